"""A checkpoint of DeepSpeed, with the interface of `shardwise.checkpoint.Checkpoint`."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.checksums import FileFacts
from shardwise.checkpoint.formats.deepspeed import trainer_state
from shardwise.checkpoint.formats.deepspeed.index import Files, OpenFiles, is_universal
from shardwise.checkpoint.formats.deepspeed.layer_files import LayerFiles, all_names, keys_of, layer_name, tied_by_gaps
from shardwise.checkpoint.formats.deepspeed.neutral import Content, Views, unite
from shardwise.checkpoint.formats.deepspeed.parts import Part
from shardwise.checkpoint.formats.deepspeed.tp_merge import Divisions, TargetParameter, join
from shardwise.checkpoint.formats.deepspeed.universal import STATE, UniversalFiles
from shardwise.checkpoint.formats.deepspeed.zero_partitions import Target
from shardwise.checkpoint.manifest import Manifest, Slice, StoredTensor, outline
from shardwise.checkpoint.reader import Block, Checkpoint
from shardwise.checkpoint.weights_reader import Progress, ReadRange, Run, copy_range
from shardwise.errors import CheckpointError

_OF_A_RANK = {"rng": None, "compression": None, "optimizer": None}
"""State of a rank that DeepSpeed does not save."""

_Opened = Sequence[tuple[str, Mapping[str, Any], Files]]


class DeepSpeedCheckpoint(Checkpoint):
    """A checkpoint that DeepSpeed has written at ZeRO stage 0, 1, 2 or 3, with fp32 master values if there are any.

    Everything is read by name and range from mapped files, on any number of ranks.

    Args:
        path: its directory, as `save_dir/tag`.
        target: the optimizer to load into; None: unknown.
        target_parameters: parameters of the model to load into, by all their names; a source of their split over
            model-parallel ranks.

    Attributes:
        manifest: its content, as in `Checkpoint`. Trees are plain Python values.
        stage: the ZeRO stage at which it was saved.
        notes: descriptions of state that cannot be loaded.

    Raises:
        CheckpointError: files are missing, damaged, of several checkpoints or an unsupported kind, or rebuilding their
            objects would run code.

    Example: one parameter, without DeepSpeed.
        >>> with DeepSpeedCheckpoint("runs/old/global_step100") as saved:  # doctest: +SKIP
        ...     weight = saved.read(saved.find("h.0.attn.weight"))
        ...     moment = saved.read(saved.find("h.0.attn.weight", "optimizer/exp_avg"))
    """

    what = "checkpoint of DeepSpeed"

    def __init__(
        self, path: str, target: Target | None = None, target_parameters: Mapping[str, TargetParameter] | None = None
    ) -> None:
        self.path = path
        self.stage = 0
        self.notes: list[str] = []
        self._target = target
        self._target_parameters = target_parameters or {}
        self._views: Views = {}
        self._file_names: dict[str, str] = {}
        self._universal: UniversalFiles | None = None
        self._open_files = OpenFiles(path)
        try:
            self._open()
        except CheckpointError as error:
            if path in str(error):
                raise
            raise CheckpointError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{path}: a layout that is not known ({type(error).__name__}: {error}); what is known was found with "
                "DeepSpeed 0.19"
            ) from error

    # -- conversion to the neutral form --------------------------------------------------------------------------------

    def _open(self) -> None:
        opened = self._open_files.parts()
        model = opened[0][1]
        tensor = int((model.get("checkpoint_parallel_dimensions") or {}).get("tp_degree", 1))
        if is_universal(self.path):
            content = self._universal_content(opened[::tensor], tensor)
            scaler = self._open_files.content(STATE).get("loss_scaler")
            content.world = int(model["dp_world_size"]) * len(opened)
        else:
            parts, tied = self._parts(opened, tensor)
            if any(part.stage != parts[0].stage for part in parts):
                raise CheckpointError("its parts are of several ZeRO stages: files of two checkpoints")
            self.stage, scaler = parts[0].stage, parts[0].scaler
            contents = [part.content if tied is None else self._named(part.content, tied) for part in parts]
            if tied is not None:
                contents = [unite(contents[rank::tensor]) for rank in range(tensor)]
            content = contents[0]
            if len(contents) > 1:
                splits = Divisions(model.get("universal_checkpoint_info"), self._target_parameters)
                content = join(contents, splits, self._file_names, self.read)
            if content.refused and isinstance(scaler, Mapping) and "fp32_groups" in scaler:
                self.notes.append("parameters come from the 16-bit values of the module, because " + content.refused)
        self.manifest = self._describe(model, content, scaler)

    def _parts(self, opened: _Opened, tensor: int) -> tuple[list[Part], Mapping[str, int] | None]:
        """Return the converted `mp_rank_XX`; of a model as a sequence of layers the first layer of each key, too."""
        layers = self._layer_files(opened, tensor)
        parts = []
        for number, (first, model, own) in enumerate(opened):
            homes: Mapping[str, str] = {}
            if layers is not None:
                stage = layers.parts[number]
                model, homes = {**model, "module": stage.module, "param_shapes": stage.shapes}, stage.homes
                if layers.untold is not None:  # one stage then has all layers
                    model["buffer_names"] = [name for _, other, _ in opened for name in other["buffer_names"]]
            part = Part(self._open_files, first, model, own, Content(self._views), homes)
            # Numbers count the parameters of one stage, not those of the engine.
            part.read(self._target if layers is None else None, None if layers is None else layers.untold)
            parts.append(part)
        return parts, None if layers is None else layers.tied

    def _layer_files(self, opened: _Opened, tensor: int) -> LayerFiles | None:
        files = self._open_files
        without = [first for first, model, _ in opened if model["module"] is None]
        if files.layers and not without:
            raise CheckpointError(
                f"{opened[0][0]}: holds a module state dict, and there are layer files ({files.layers[0]}): files of "
                "two checkpoints"
            )
        if without and not files.layers:
            raise CheckpointError(
                f"{without[0]}: holds no module state dict, and the layer files (layer_NN-model_states.pt) are missing"
            )
        if not without:
            return None
        optimizers = [
            [files.optimizer_file(own.optimizer[rank]) for rank in sorted(own.optimizer)] for *_, own in opened
        ]
        return LayerFiles(files, [model for _, model, _ in opened], optimizers, tensor)

    def _named(self, content: Content, tied: Mapping[str, int]) -> Content:
        """Return content under the names of a model of layers."""
        for tensor in content.tensors.values():
            self._file_names.update((layer_name(name, tied), name) for name in (tensor.name, *tensor.aliases))
        return content.renamed(functools.partial(layer_name, tied=tied))

    def _universal_content(self, stages: _Opened, tensor: int) -> Content:
        """Return the content of a universal checkpoint, of which `stages` are the first files of each stage."""
        files = self._universal = UniversalFiles(self.path)
        state = self._open_files.content(STATE)
        self.stage = int(state.get("zero_stage", 1))
        if any(model.get("num_experts") for _, model, _ in stages):
            raise CheckpointError("a universal checkpoint with experts; import the checkpoint from which it was made")
        divided = any(model["module"] is None for _, model, _ in stages)
        names = [all_names(model, model["param_shapes"]) for _, model, _ in stages] if divided else []
        tied = stages[0][1].get(trainer_state.TIED_LAYERS) or tied_by_gaps(names)
        found = []
        for first, model, own in stages:
            module = model["module"] or {}
            if tensor > 1:
                module = {name: value for name, value in module.items() if name in model["buffer_names"]}
            part = Part(self._open_files, first, {**model, "module": module}, own, Content(self._views))
            part.stage = self.stage
            for group in model["param_shapes"]:
                part.content.shapes.update((name, tuple(shape)) for name, shape in group.items())
            part.read_module()
            targets = {name: self._target_parameters.get(layer_name(name, tied)) for name in part.content.shapes}
            known = {name: target.shape for name, target in targets.items() if target is not None}
            files.describe(part.content, model, state, known if tensor > 1 else None)
            found.append(self._named(part.content, tied) if divided else part.content)
        if left := {key for some in names for key in keys_of(some) if key not in tied}:
            self.notes.append(
                f"the layers of shared modules ({outline(sorted(left))}), which universal checkpoints do not have: "
                "pass load_checkpoint(rename={'tied_modules.KEY.weight': 'layers.N.weight'}) with the first layer"
            )
        return unite(found)

    # -- description -------------------------------------------------------------------------------------------------

    def _describe(self, model: Mapping[str, Any], content: Content, scaler: Any) -> Manifest:
        config = model.get("ds_config")
        if content.dropped:
            self.notes.append(f"optimizer state that is no value per element: {outline(sorted(content.dropped))}")
        optimizer = self._optimizer(config, content) if model["optimizer"] is not None or self.stage > 0 else None
        self.notes.append(
            "the place in the training data and random numbers, which DeepSpeed does not save"
            + (", and the state of its curriculum sampler" if model.get("data_sampler") else "")
            + (", and of its random layer dropping" if model.get("random_ltd") else "")
        )
        opened = self._open_files.opened
        return Manifest(
            tag=os.path.basename(os.path.normpath(self.path)),
            created=max(file.modified for file in opened.values()),
            versions={"deepspeed": str(model["ds_version"])},
            layout={"world": content.world, "stage": self.stage, "library": "deepspeed"},
            config=trainer_state.plain_json(config) if isinstance(config, Mapping) else {},
            files={name: FileFacts(file.size, ()) for name, file in opened.items()},
            tensors=list(content.tensors.values()),
            optimizer=optimizer,
            scheduler=model.get("lr_scheduler"),
            scaler=trainer_state.scaler_state(scaler),
            counters=trainer_state.counters(model, content.world),
            ranks=[dict(_OF_A_RANK) for _ in range(content.world)],
            extra=content.extra,
            client={key: value for key, value in model.items() if key not in trainer_state.OWN_KEYS},
        )

    def _optimizer(self, config: Any, content: Content) -> dict[str, Any]:
        target, refused = self._target, content.refused
        name = trainer_state.class_of(config, content.entries, content.settings)
        if target is not None:
            name = target.optimizer
            refused = refused or trainer_state.refusal(config, content.entries, name) or _other_groups(target, content)
        if self.stage and not any(content.settings):
            self.notes.append("settings of parameter groups, which elastic checkpoints do not have")
        groups = []
        for number, settings in enumerate(content.settings):
            here = target.settings[number] if target is not None and number < len(target.settings) else None
            kept, left = trainer_state.fitting_settings(settings, here)
            groups.append(kept)
            if left:
                self.notes.append(
                    f"settings of parameter group {number} that {name or 'optimizers here'} does not have: "
                    + ", ".join(f"{key}={value!r}" for key, value in left.items())
                )
            decoupled = settings.get("decoupled_weight_decay")
            if settings.get("weight_decay") and (decoupled, name) in ((True, "Adam"), (False, "AdamW")):
                self.notes.append(
                    f"parameter group {number} had weight decay that was {'' if decoupled else 'not '}decoupled from "
                    f"the gradient; that of {name} is {'' if name == 'AdamW' else 'not '}"
                )
        found: dict[str, Any] = {"class": name, "groups": groups, "values": content.values}
        return {**found, "refused": refused} if refused else found

    # -- reading, as in `Checkpoint` ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release all files."""
        self._views = {}
        self._open_files.opened = {}
        self._universal = None

    def mapped(self, part: Slice) -> torch.Tensor:
        """Return the elements of a slice, in a mapped file."""
        if self._universal is not None and part.file in self._universal.expected:
            return self._universal.values(part.file)
        return self._views[part.file, part.key]

    def opened(self, tensor: StoredTensor, part: Slice) -> ReadRange:
        """Return a function that copies from a mapped file."""
        return functools.partial(copy_range, self.mapped(part))

    def check(self, tensors: Iterable[StoredTensor] | None = None, progress: Progress | None = None) -> bool:
        """Compare records with the checksums that torch has written. Raises CheckpointError if a file is damaged."""
        self.verify(self.blocks(tensors))
        return True

    def decode(self, tree: Any) -> Any:
        """Return the value itself."""
        return tree

    def files(self) -> list[str]:
        """Return the names of all files, with those of parameters of universal checkpoints."""
        return sorted({*self._open_files.opened, *(() if self._universal is None else self._universal.expected)})

    def blocks(
        self,
        tensors: Iterable[StoredTensor] | None = None,
        trees: Iterable[Any] = (),
        files: Collection[str] | None = None,
    ) -> list[Block]:
        """Return (file, record) of the files of some tensors, or of all (None); `trees` are in memory already."""
        names, opened = set(self.files() if files is None else files), self._open_files.opened
        if tensors is not None:
            names &= {part.file for tensor in tensors for part in tensor.slices}
        return [(name, n) for name in sorted(names) for n in range(opened[name].records if name in opened else 1)]

    def places(self, runs: Iterable[Run]) -> tuple[dict[Block, Run], list[Run]]:
        """Return no places, because the files are mapped into memory and copied from there."""
        return {}, list(runs)

    def verify(self, blocks: Iterable[Block], places: Mapping[Block, Run] | None = None) -> None:
        """Compare records with the checksums that torch has written. Raises CheckpointError if a file is damaged."""
        by_file: dict[str, list[int]] = {}
        for name, record in blocks:
            by_file.setdefault(name, []).append(record)
        for name, records in by_file.items():
            if name in self._open_files.opened:
                self._open_files.opened[name].verify(records)
            elif self._universal is not None:
                self._universal.verify(name)


def _other_groups(target: Target, content: Content) -> str | None:
    for number, members in enumerate(target.groups):
        for known in members:
            name = next((name for name in known if name in content.group), None)
            if name is not None and content.group[name] != number:
                return (
                    f"parameter {name!r} was in group {content.group[name]} of the optimizer and is in group {number} "
                    "here, so that it would get other settings; form the groups as they were"
                )
    return None
