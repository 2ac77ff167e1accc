"""Export and import of an engine's unsharded weights, and DeepSpeed checkpoints (`engine.load_checkpoint`).

`shardwise.checkpoint` writes and reads the files. DeepSpeed's files do not record the optimizer's class, and sometimes
neither parameter names (stage 0) nor the split over model-parallel ranks: the engine decides. Mismatches are refused
before any state changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint import unsharded
from shardwise.checkpoint.agree import collective_step, same_on_all
from shardwise.checkpoint.exporting import KEEP, export_model, request_of, request_of_16bit
from shardwise.checkpoint.formats.deepspeed import DeepSpeedCheckpoint, Target, TargetParameter, recognised
from shardwise.checkpoint.importing import LoadedWeights, Rename, load_state_dict, load_weights
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.weights_reader import StateDictReader, WeightsReader
from shardwise.errors import CheckpointError, UsageError
from shardwise.memory import Category

if TYPE_CHECKING:
    from shardwise.checkpoint.listing import StateNumbers
    from shardwise.comm.communicator import Communicator
    from shardwise.engine.background import BackgroundSaves
    from shardwise.engine.compressing import Compressing
    from shardwise.engine.step import TrainStep
    from shardwise.zero.model import ShardedModel

CustomLoad = Callable[..., None]
"""Called as `custom_load_fn(src=state_dict, dst=module)`."""


@dataclass(eq=False, repr=False)
class Interchange:
    """Exports and imports weights. Every method is collective."""

    _sharded: ShardedModel
    _job: Communicator
    _step: TrainStep
    _compressing: Compressing
    _numbers: StateNumbers
    _background: BackgroundSaves

    def export(
        self,
        directory: str | os.PathLike[str],
        format: str = "hf",
        dtype: str | torch.dtype = KEEP,
        max_shard_size: int | str | None = None,
        exclude_frozen_parameters: bool = False,
        all_names: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Write unsharded weights for other programs, like `shardwise export` does from a checkpoint.

        Values are master weights, if any. Rank 0 writes; other ranks send their shards one tensor at a time, so no rank
        needs memory for the model. The files are published once all are complete. For a model of transformers, format
        `hf` also writes `config.json` and `generation_config.json`, for `from_pretrained(directory)`.

        Args:
            directory: on rank 0; created if needed.
            format: `hf` (safetensors) or `pt` (a state dict of tensors, as `torch.save` writes it).
            dtype: of floating-point tensors: `float32`, `bfloat16`, `float16`, or `keep` for the dtype of the values.
            max_shard_size: maximum size of a file, in bytes or as "5GB". None: 5GB for `hf`, one file for `pt`.
            exclude_frozen_parameters: leave out parameters that do not require a gradient, and the configuration.
            all_names: `hf`: write a tied tensor under each of its names instead of once.
            overwrite: replace weights in `directory`. A configuration is always replaced.

        Raises:
            CheckpointPathError: the directory cannot be used, or already holds weights.
            CheckpointError: an argument is wrong, or writing failed; raised on all ranks.

        Example:
            >>> import os, shardwise, tempfile
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config={"train_batch_size": 2})
            >>> directory = tempfile.mkdtemp()
            >>> engine.export(directory, dtype="bfloat16")
            >>> os.listdir(directory)
            ['model.safetensors']
            >>> engine.destroy()
        """
        self._sharded.check_there("engine.export()")
        with collective_step(self._job, "export"):
            request = request_of(
                directory, format, dtype, max_shard_size, exclude_frozen_parameters, all_names, overwrite
            )
        self._sharded.hooks.settle()
        self._step.read_pending()
        export_model(self._sharded.state, request, self._hold)

    def _hold(self, tensor: torch.Tensor) -> None:
        self._sharded.accountant.hold(Category.BUFFERS, tensor)

    def load_weights(
        self,
        path: str | os.PathLike[str],
        strict: bool = True,
        rename: Rename | None = None,
        tag: str | int | None = None,
    ) -> LoadedWeights:
        """Load weights of another program into the shards; each rank reads only its own part.

        Master weights take the values in full precision. Optimizer state, schedule and counters stay. Gradients of an
        unfinished accumulation window are dropped.

        Args:
            path: Hugging Face weights (a directory, or a file .safetensors, .index.json, .bin, .pt), a
                torch.distributed.checkpoint directory, or a checkpoint; the same on every rank.
            strict: require equal names in model and files.
            rename: name in the files -> name in the model, as a mapping (missing names stay) or a function; None as a
                name skips the tensor.
            tag: checkpoint to load from a directory of checkpoints.

        Returns:
            (missing, unexpected): names only in the model, and names only in the files; both empty if `strict`.

        Raises:
            CheckpointPathError: there are no weights at `path`.
            CheckpointError: names (if `strict`) or shapes differ, or a file is damaged; no value has been changed.

        Example: a model of Hugging Face's, never whole on any rank.
            >>> config = AutoConfig.from_pretrained(folder)  # doctest: +SKIP
            >>> with shardwise.zero.Init():  # doctest: +SKIP
            ...     model = AutoModelForCausalLM.from_config(config)
            >>> engine, *_ = shardwise.initialize(model=model, config="config.json")  # doctest: +SKIP
            >>> engine.load_weights(folder)  # doctest: +SKIP
        """
        self._sharded.check_there("engine.load_weights()")
        self._background.await_last()  # a failure is raised by the next save or wait
        self._sharded.hooks.settle()
        found = load_weights(self._sharded.state, path, tag=tag, strict=strict, rename=rename)
        self._step.begin_again()
        self._numbers.loaded()
        if self._sharded.compressor is not None:
            self._sharded.compressor.clear()  # its residuals belong to gradients at other weights
        module = self._sharded.module
        names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
        self._compressing.loaded({*names} - {*found.missing})
        return found

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Write unsharded weights in the compute dtype to a file that plain PyTorch can load; return True.

        Rank 0 writes while units are gathered one after another; no rank holds more than one unsharded unit. Tied
        parameters are written under all their names. `export` writes master weights, and tied parameters as Hugging
        Face does.

        Args:
            save_dir: directory; created if needed.
            save_filename: ends in `.safetensors`; or in `.bin`, `.pt` or `.pth` for a state dict of tensors as
                `torch.save` writes it (`torch.load(weights_only=True)` reads it).
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
            max_shard_size: maximum size of each of several files, in bytes or as "5GB", with an index. None: one file.

        Raises:
            CheckpointPathError: the directory or the name cannot be used.
            CheckpointError: `max_shard_size` is not a size, or writing failed; raised on all ranks.
        """
        self._sharded.check_there("engine.save_16bit_model()", values=True)
        with collective_step(self._job, "save_16bit_model"):
            request = request_of_16bit(save_dir, save_filename, exclude_frozen_parameters, max_shard_size)
        self._step.read_pending()
        export_model(self._sharded.state, request, self._hold)
        return True

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's unsharded state dict, on the CPU of every rank.

        Args:
            destination: dictionary to add to; a new one if None.
            prefix: prefix of every name.
            keep_vars: must be False, because values are copies; a UsageError otherwise.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
        """
        self._sharded.check_there("engine.module_state_dict()", values=True)
        if keep_vars:
            raise UsageError("module_state_dict(keep_vars=True): values are gathered copies; use keep_vars=False")
        self._step.read_pending()
        found = unsharded.state_dict(self._sharded.state, exclude_frozen=exclude_frozen_parameters)
        destination = {} if destination is None else destination
        destination.update((prefix + name, value) for name, value in found.items())
        return destination

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the unsharded state dict on rank 0, None on other ranks (called by trainers)."""
        self._sharded.check_there("engine._consolidated_16bit_state_dict()", values=True)
        self._step.read_pending()
        found = unsharded.state_dict(self._sharded.state, exclude_frozen=exclude_frozen_parameters, to_first=True)
        return found if self._job.rank == 0 else None

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: CustomLoad | None = None,
        fetch_z3_params: bool = False,
        allowed_missing_keys: Iterable[str] | None = None,
    ) -> None:
        """Load an unsharded state dict of the module, the same on every rank. Optimizer state stays.

        Args:
            checkpoint: state dict, or a dictionary that has it under the key "module".
            strict: require equal names in module and state dict.
            custom_load_fn: called instead as `custom_load_fn(src=state_dict, dst=module)`, with all parameters
                gathered.
            fetch_z3_params: accepted for existing scripts and ignored.
            allowed_missing_keys: names that may be missing although `strict` is set; they keep their values.

        Raises:
            CheckpointError: names or shapes differ; no value has been changed.
        """
        self._sharded.check_there("engine.load_module_state_dict()")
        self._sharded.hooks.settle()
        inner = checkpoint.get("module")
        values = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is not None:
            load_custom(self._sharded, self._job, custom_load_fn, values)
        else:
            may_lack = frozenset(allowed_missing_keys or ())
            load_state_dict(self._sharded.state, values, strict=strict, may_lack=may_lack)
        self._numbers.loaded()
        self._compressing.loaded(values.keys())


def load_custom(sharded: ShardedModel, job: Communicator, function: CustomLoad, values: Mapping[str, Any]) -> None:
    """Fill the gathered parameters with the script's `function`; rank 0's values are used. Master weights of 16-bit
    parameters get the digits of `values` of the same names, where these round to what the function has written.
    """
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    source = StateDictReader({name: value for name, value in tensors.items() if value.is_floating_point()})
    parameters = sharded.registry.parameters
    gathered = sharded.owner.gather(parameters)
    try:
        with collective_step(job, "custom_load_fn"), torch.no_grad():
            function(src=values, dst=sharded.module)
    except BaseException:
        sharded.owner.put_back(parameters, gathered, None)
        raise
    ranks = sharded.comm
    sharded.owner.put_back(parameters, gathered, ranks.members[0])
    if sharded.policy.compute_dtype is not None and same_on_all(job, sorted(source.tensors()), "custom_load_fn"):
        sharded.state.finish_gathers()
        with collective_step(job, "custom_load_fn"), torch.no_grad():
            _take_digits(sharded.state, source)
        sharded.state.publish()


def _take_digits(model: CheckpointedModel, source: WeightsReader) -> None:
    known, values = source.by_any_name(), model.value_runs()
    for indices in model.iter_resident():
        for index in indices:
            tensor, dtype = model.registry[index], model.registry.parameters[index].dtype
            stored = next((known[name] for name in (tensor.name, *tensor.aliases) if name in known), None)
            if stored is None or stored.shape != tensor.global_shape:
                continue
            part = stored.part(model.box_of(tensor))
            for start, _, master in values.get(index, ()):
                if master.dtype is not dtype:
                    digits = torch.empty_like(master)
                    source.read_into(part, start, digits)
                    master.copy_(torch.where(digits.to(dtype) == master.to(dtype), digits, master))


# -- checkpoints of DeepSpeed ------------------------------------------------------------------------------------------

_STEPS = ("last_batch_iteration", "last_epoch", "_step_count")
_MOST_STEPS = 1 << 53


def opener(model: ShardedModel) -> Callable[[str], Checkpoint]:
    """Return a function that opens a checkpoint of shardwise or DeepSpeed."""

    def opened(path: str) -> Checkpoint:
        if recognised(path):
            return DeepSpeedCheckpoint(path, _target(model), _target_parameters(model))
        return Checkpoint(path)

    return opened


def _target_parameters(model: ShardedModel) -> dict[str, TargetParameter]:
    found = {}
    for tensor in model.registry:
        parts = sorted((p.ranks, p.box) for p in model.state.parts_of(tensor.index) if p.name == tensor.name)
        whole = TargetParameter(tensor.global_shape, [(box, ranks) for ranks, box in parts])
        found.update(dict.fromkeys((tensor.name, *tensor.aliases), whole))
    return found


def _target(model: ShardedModel) -> Target | None:
    if model.optimizer is None:
        return None
    groups = []
    for members in model.client_groups:
        tensors = [model.registry.find(parameter) for parameter in members]
        groups.append([(tensor.name, *tensor.aliases) for tensor in tensors if tensor is not None])
    settings = [frozenset(group) - {"params"} for group in model.optimizer.param_groups]
    return Target(type(model.optimizer).__name__, groups, settings)


def check_schedule(saved: Checkpoint, scheduler: Any) -> None:
    """Raise a CheckpointError for another schedule (by class, or by entries without it) or impossible step numbers."""
    state, own = saved.manifest.scheduler, schedule_name(scheduler)
    recorded = saved.manifest.layout.get("scheduler")
    if state is not None and recorded is not None and recorded != own:
        raise CheckpointError(
            f"{saved.path}: holds the state of the learning-rate schedule {recorded}, and this engine has {own}, whose "
            "rates would be those of neither. Configure the one it was saved with, or pass "
            "load_lr_scheduler_states=False to begin this one anew"
        )
    for name in _STEPS if isinstance(state, Mapping) else ():
        step = state.get(name, 0)
        if not (isinstance(step, (int, float)) and -1 <= step <= _MOST_STEPS):
            raise CheckpointError(
                f"{saved.path}: the state of its learning-rate scheduler has {name!r} {step!r:.100}, which is no "
                "number of steps; pass load_lr_scheduler_states=False to begin the schedule anew"
            )
    if not isinstance(saved, DeepSpeedCheckpoint) or not hasattr(scheduler, "state_dict"):
        return
    expected = set(scheduler.state_dict())
    found = set(state) if isinstance(state, Mapping) else {type(state).__name__}
    if found != expected:
        raise CheckpointError(
            f"{saved.path}: its learning-rate scheduler has the state {sorted(map(str, found))}, and "
            f"{type(scheduler).__name__}, which this engine has, {sorted(map(str, expected))}: another kind of "
            "schedule. Configure the one it was saved with, or pass load_lr_scheduler_states=False"
        )


def schedule_name(scheduler: Any) -> str | None:
    """Return the class name of a schedule and of the schedules it is composed of; None without one."""
    if scheduler is None:
        return None
    parts = getattr(scheduler, "_schedulers", None)
    inner = f"({', '.join(str(schedule_name(part)) for part in parts)})" if isinstance(parts, (list, tuple)) else ""
    return type(scheduler).__name__ + inner
