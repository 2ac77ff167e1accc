"""Writing a checkpoint in DeepSpeed's universal format, in one process and in pieces of 8 MiB.

The files were compared with those of DeepSpeed 0.19.8, which loads them with `checkpoint.load_universal` at ZeRO stages
1, 2 and 3, on any number of ranks: `mp_rank_00_model_states.pt` at stages 1 and 2, the equal file
`zero_pp_rank_0_mp_rank_00_model_states.pt` at stage 3. It does not load buffers, frozen parameters and the loss scale
from this format.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from shardwise.checkpoint import directory
from shardwise.checkpoint.formats.deepspeed import trainer_state
from shardwise.checkpoint.formats.deepspeed.layer_files import stage_name
from shardwise.checkpoint.formats.deepspeed.universal import STATE, STEP, entry_of, file_of
from shardwise.checkpoint.formats.torch_save_writer import StateFileWriter
from shardwise.checkpoint.formats.weight_files import writing
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.manifest import BUFFER, OPTIMIZER, PARAMETER, StoredTensor, outline
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.weights_reader import Progress
from shardwise.errors import CheckpointError, CheckpointPathError

VERSION = "0.19.8"
"""Version of DeepSpeed whose files these are."""

_ENTRIES = {"exp_avg", "exp_avg_sq"}
_MODELS = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
_PLAIN = (type(None), bool, int, float, str)


def write_universal(
    saved: Checkpoint,
    target: str | os.PathLike[str],
    tag: str,
    *,
    stages: bool = False,
    tied: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write an opened checkpoint in DeepSpeed's universal format to `<target>/<tag>/`, and let `latest_universal` name
    it; return descriptions of state that is not written.

    All bytes are first compared with their checksums. The directory appears by one rename, and must be new.

    Args:
        saved: a checkpoint of an engine with an optimizer that has the state `exp_avg` and `exp_avg_sq`.
        target: directory of checkpoints; created if needed.
        tag: name of the new checkpoint.
        stages: the model is a sequence of layers (`layers.0.weight`), which DeepSpeed divides into stages.
        tied: with `stages`, the first layer of each key of a TiedLayerSpec.
        progress: called with bytes written and total bytes.

    Raises:
        CheckpointPathError: the target exists, or cannot be used.
        CheckpointError: the checkpoint is damaged, or cannot be written in this format.

    Example:
        >>> with Checkpoint("runs/a/global_step100") as saved:  # doctest: +SKIP
        ...     write_universal(saved, "runs/for_deepspeed", "global_step100")
    """
    if tied and not stages:
        raise CheckpointError("tied: expected stages=True as well, because only stages have shared modules")
    parent = directory.check_directory(target, "target")
    path = os.path.join(parent, directory.check_tag(tag))
    if os.path.lexists(path):
        raise CheckpointPathError(f"{path}: exists already; choose another name, or remove it")
    saved.check()
    with writing(path) as closing:
        writer = UniversalWriter(saved, parent, tag, stages, tied or {})
        closing.callback(writer.draft.discard)
        done, size = 0, sum(tensor.nbytes for tensor in writer.tensors)
        for tensor in writer.tensors:
            writer.write(tensor)
            done += tensor.nbytes
            if progress is not None:
                progress(done, size)
        writer.finish()
    return writer.notes


class UniversalWriter:
    """Writes a universal checkpoint with the content of another one; `tensors` are to be written.

    Raises CheckpointError if the format has no place for the content.
    """

    def __init__(self, saved: Checkpoint, parent: str, tag: str, stages: bool, tied: Mapping[str, int]) -> None:
        self._saved, self._stages, self._tied = saved, stages, tied
        self._parent, self._tag = parent, tag
        self.notes: list[str] = []
        held = saved.manifest
        if held.optimizer is None or "refused" in held.optimizer:
            raise CheckpointError(
                f"{saved.path}: has no optimizer state that can be written; `shardwise export` writes only weights"
            )
        self._state = {(t.name, t.kind.removeprefix(OPTIMIZER)): t for t in held.of_kind(OPTIMIZER)}
        self._trained = [t for t in held.of_kind(PARAMETER) if t.trainable and t.numel]
        self._others = [t for t in held.of_kind(PARAMETER) if not t.trainable]
        self._buffers = [t for t in held.of_kind(BUFFER) if t.rank is None]
        self._groups = [saved.decode(group) for group in held.optimizer["groups"]]
        self._check()
        self._steps = [self._step(number) for number in range(len(self._groups))]
        self._names = {t.name: self._name(t.name) for t in (*self._trained, *self._others, *self._buffers)}
        unused = [key for key, n in tied.items() if not any(name.startswith(f"layers.{n}.") for name in self._names)]
        if unused:
            raise CheckpointError(f"tied: the layers of {outline(unused)} have no parameters in {saved.path}")
        state = [self._state[t.name, entry] for t in self._trained for entry in sorted(_ENTRIES)]
        self.tensors = [*self._trained, *state, *self._others, *self._buffers]
        self._fp32 = {t.name for t in self._trained}
        self.draft = directory.StagingDirectory(parent, tag, tidy=False)

    def _check(self) -> None:
        for tensor in self._trained:
            found = {entry for entry in _ENTRIES if (tensor.name, entry) in self._state}
            if found != _ENTRIES:
                raise CheckpointError(
                    f"{self._saved.path}: the optimizer state of {tensor.name!r} has "
                    f"{outline(sorted(found)) or 'no entries of Adam'}, expected {outline(sorted(_ENTRIES))}: "
                    "DeepSpeed's universal format has only the state of Adam, after a step"
                )
        more = sorted({entry for _, entry in self._state} - _ENTRIES)
        if more:
            raise CheckpointError(
                f"{self._saved.path}: has optimizer state {outline(more)}, which DeepSpeed's universal format does not"
            )

    def _step(self, number: int) -> float:
        """Return the step count of a parameter group; DeepSpeed has one for each."""
        values = (self._saved.manifest.optimizer or {})["values"]
        found: dict[float, str] = {}
        for tensor in (t for t in self._trained if t.group == number):
            step = self._saved.decode(values.get(tensor.name, {}).get("step"))
            if step is None:
                step = self._groups[number].get("step")
            if step is None:
                raise CheckpointError(f"{self._saved.path}: {tensor.name!r} has no step count")
            found.setdefault(float(step), tensor.name)
        if len(found) > 1:
            listed = outline([f"{name!r} {step:g}" for step, name in found.items()])
            raise CheckpointError(
                f"{self._saved.path}: parameters of group {number} have different step counts ({listed}); DeepSpeed "
                "has one for each group"
            )
        return next(iter(found), 0.0)

    def _name(self, name: str) -> str:
        try:
            found = stage_name(name, self._tied) if self._stages else name
        except CheckpointError as error:
            raise CheckpointError(f"{self._saved.path}: {error}. Leave stages out") from error
        if "/" in found or found in (".", ".."):
            raise CheckpointError(f"{self._saved.path}: the name {found!r} cannot be that of a directory")
        return found

    # -- writing -----------------------------------------------------------------------------------------------------

    def write(self, tensor: StoredTensor) -> None:
        """Write a tensor into its file; trained parameters and their state in fp32."""
        dtype = torch.float32 if tensor.name in self._fp32 else tensor.torch_dtype
        path = os.path.join(self.draft.path, file_of(self._names[tensor.name], entry_of(tensor)))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        writer = StateFileWriter(path, {"param": Spec(dtype, tensor.shape)})
        try:
            for start, values in self._saved.pieces(tensor):
                writer.write_part("param", start, values.to(dtype))
            writer.close()
        finally:
            writer.abandon()

    def finish(self) -> None:
        """Write step counts, settings and model states, publish the directory, and let `latest_universal` name it."""
        for tensor in self._trained:
            step = torch.tensor(self._steps[tensor.group or 0], dtype=torch.float32, device="cpu")
            _save(step, os.path.join(self.draft.path, file_of(self._names[tensor.name], STEP)))
        _save(self._optimizer(), os.path.join(self.draft.path, STATE))
        for name in _MODELS:
            _save(self._model(), os.path.join(self.draft.path, name))
        for folder, _, _ in os.walk(self.draft.path, topdown=False):
            directory.sync_directory(folder)
        self.draft.publish(replace=False)
        CheckpointDirectory(self._parent).set_latest(self._tag, directory.LATEST_UNIVERSAL)

    def _optimizer(self) -> dict[str, Any]:
        groups = []
        for number, group in enumerate(self._groups):
            kept = self._plain({k: v for k, v in group.items() if k not in ("params", "param_names")}, "settings")
            groups.append({**kept, "params": [number]})
        states = {
            n: {"step": torch.tensor(step, dtype=torch.float32, device="cpu")} for n, step in enumerate(self._steps)
        }
        return {
            "zero_stage": 1,
            "ds_version": VERSION,
            "param_groups": groups,
            "optimizer_state_dict": {"state": states, "param_groups": groups},
        }

    def _model(self) -> dict[str, Any]:
        held = self._saved.manifest
        shapes: list[OrderedDict[str, torch.Size]] = [OrderedDict() for _ in self._groups]
        for tensor in self._trained:
            shapes[tensor.group or 0][self._names[tensor.name]] = torch.Size(tensor.shape)
        shared = {alias: t.name for t in (*self._trained, *self._others) for alias in t.aliases}
        client = self._saved.decode(held.client) or {}
        return {
            **self._plain({k: v for k, v in client.items() if k not in trainer_state.OWN_KEYS}, "client_state"),
            "module": None if self._stages else {},
            "buffer_names": [self._names[t.name] for t in self._buffers],
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict((self._names[t.name], torch.Size(t.shape)) for t in self._others),
            "shared_params": {} if self._stages else shared,
            "frozen_param_fragments": None,
            "lr_scheduler": self._plain({"": self._saved.decode(held.scheduler)}, "lr_scheduler").get(""),
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": held.counters.get("skipped_steps", 0),
            "global_steps": held.counters.get("global_steps", 0),
            "global_samples": held.counters.get("global_samples", 0),
            "dp_world_size": 1,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "num_experts": [],
            trainer_state.TIED_LAYERS: dict(self._tied),
            "ds_config": trainer_state.plain_json(held.config),
            "ds_version": VERSION,
        }

    def _plain(self, values: Mapping[str, Any], what: str) -> dict[str, Any]:
        """Return the values that DeepSpeed can read without classes of this library, and note the others."""
        kept = {key: value for key, value in values.items() if _is_plain(value)}
        if left := sorted(set(values) - set(kept)):
            note = f"{what}: {outline(left)}, of a class that other programs do not have"
            self.notes = list(dict.fromkeys([*self.notes, note]))
        return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return type(value) is dict and all(type(k) in _PLAIN and _is_plain(v) for k, v in value.items())
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or type(value) is torch.Tensor


def _save(value: Any, path: str) -> None:
    with open(path, "xb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
