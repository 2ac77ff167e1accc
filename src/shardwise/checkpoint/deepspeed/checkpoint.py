"""A checkpoint of DeepSpeed, with the interface of `shardwise.checkpoint.Checkpoint`."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.checkpoint.deepspeed import trainer_state
from shardwise.checkpoint.deepspeed.directory import (
    Files,
    check_parts,
    check_ranks,
    find_files,
    find_layers,
    is_universal,
    tensor_ranks,
)
from shardwise.checkpoint.deepspeed.experts import Experts
from shardwise.checkpoint.deepspeed.files import TorchFile
from shardwise.checkpoint.deepspeed.layer_files import LayerFiles, keys_of, layer_name, mapped_names, tied_by_gaps
from shardwise.checkpoint.deepspeed.stage0_optimizer import Numbered, Target
from shardwise.checkpoint.deepspeed.tp_merge import Divisions, TargetParameter, join
from shardwise.checkpoint.deepspeed.universal import MASTER, STATE, UniversalFiles, steps_of_groups, trained
from shardwise.checkpoint.deepspeed.zero_partitions import (
    DeepSpeedLayout,
    DeepSpeedPiece,
    Opened,
    divided_parameters,
    flat_partitions,
    numbered_states,
    same,
    settings_of,
)
from shardwise.checkpoint.manifest import BUFFER, OPTIMIZER, PARAMETER, Manifest, Slice, StoredTensor, name_of, outline
from shardwise.checkpoint.reader import Block, Checkpoint, Run
from shardwise.checkpoint.safetensors_reader import FileFacts
from shardwise.checkpoint.strided import read_patch
from shardwise.errors import CheckpointError

_EXTRA = "_extra_state"
_OF_A_RANK = {"rng": None, "loader": None, "compression": None, "optimizer": None}
"""State of a rank that DeepSpeed does not save."""

_SAMPLE = 16
"""Elements of each piece of an expert that are compared with the expert's own file."""


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

    def __init__(
        self, path: str, target: Target | None = None, target_parameters: Mapping[str, TargetParameter] | None = None
    ) -> None:
        self.path = path
        self._target = target
        self._target_parameters = target_parameters or {}
        self._files = {}
        self._opened: dict[str, TorchFile] = {}
        self._views: dict[tuple[str, str], torch.Tensor] = {}
        self.notes: list[str] = []
        self._layers: LayerFiles | None = None
        self._homes: Mapping[str, str] = {}
        self._file_names: dict[str, str] = {}
        self._universal: UniversalFiles | None = None
        try:
            self._open(find_files(path))
        except CheckpointError as error:
            self.close()
            if path in str(error):
                raise
            raise CheckpointError(f"{path}: {error}") from error
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            self.close()
            raise CheckpointError(
                f"{path}: a layout that is not known ({type(error).__name__}: {error}); what is known was found with "
                "DeepSpeed 0.19"
            ) from error
        except BaseException:
            self.close()
            raise

    # -- opening -----------------------------------------------------------------------------------------------------

    def _open(self, parts: Mapping[int, Files]) -> None:
        opened: list[tuple[str, Mapping[str, Any], Files]] = []
        for part, files in sorted(parts.items()):
            first = files.shared or (files.model[min(files.model)] if files.model else None)
            if first is None:
                raise CheckpointError(
                    f"{self.path}: the model states (mp_rank_{part:02d}_model_states.pt, or "
                    f"zero_pp_rank_0_mp_rank_{part:02d}_model_states.pt of stage 3) are missing: the checkpoint is "
                    "incomplete"
                )
            model = self._model_states(first)
            check_parts(self.path, parts, model.get("mp_world_size", 1))
            opened.append((first, model, files))
        if not opened:
            raise CheckpointError(f"{self.path}: the model states (mp_rank_*_model_states.pt) are missing")
        if is_universal(self.path):
            self._open_universal(opened)
            return
        self._layers = self._layer_files(opened)
        found = []
        for number, (first, model, files) in enumerate(opened):
            if self._layers is not None:
                stage = self._layers.parts[number]
                self._homes = stage.homes
                model = {**model, "module": stage.module, "param_shapes": stage.shapes}
                if self._layers.untold is not None:  # one stage then has all layers
                    model["buffer_names"] = [name for _, other, _ in opened for name in other["buffer_names"]]
            self._open_part(first, model, files)
            if self._layers is not None:
                self._rename(self._layers.tied)
            found.append((first, model, self.stage, self.manifest))
        if self._layers is not None:
            tensor = self._layers.tensor
            found = [self._unite(found[rank::tensor]) for rank in range(tensor)]
        if len(found) > 1:
            self._join(found)

    # -- models as sequences of layers -------------------------------------------------------------------------------

    def _layer_files(self, opened: Sequence[tuple[str, Mapping[str, Any], Files]]) -> LayerFiles | None:
        names = find_layers(self.path)
        lacking = [first for first, model, _ in opened if model["module"] is None]
        if not names and not lacking:
            return None
        if not names or len(lacking) < len(opened):
            first = lacking[0] if lacking else opened[0][0]
            raise CheckpointError(
                f"{os.path.join(self.path, first)}: "
                + (
                    f"holds a module state dict, and there are layer files ({names[0]}): files of two checkpoints"
                    if names
                    else "holds no module state dict, and the layer files (layer_NN-model_states.pt) are missing"
                )
            )
        mappings = []
        for _, model, files in opened:
            ranks = [self._optimizer_file(files.optimizer[rank]) for rank in sorted(files.optimizer)]
            mappings.append(mapped_names(ranks) if ranks and model["param_shapes"] is None else None)
        tensor = tensor_ranks(opened[0][1])
        if len(opened) % tensor:
            raise CheckpointError(f"{self.path}: has files of {len(opened)} ranks, expected a multiple of {tensor}")
        content = {name: self._content(name) for name in names}
        return LayerFiles(self.path, content, [model for _, model, _ in opened], mappings, tensor)

    def _rename(self, tied: Mapping[str, int]) -> None:
        """Give the manifest the names of a model of layers."""
        old = self.manifest
        new = {name: layer_name(name, tied) for t in old.tensors for name in (t.name, *t.aliases)}
        self._file_names.update((name, before) for before, name in new.items())
        optimizer = old.optimizer
        if optimizer is not None and "values" in optimizer:
            values = {new.get(name, name): state for name, state in optimizer["values"].items()}
            optimizer = {**optimizer, "values": values}
        self.manifest = replace(
            old,
            tensors=[replace(t, name=new[t.name], aliases=tuple(new[a] for a in t.aliases)) for t in old.tensors],
            extra={layer_name(f"{module}._", tied)[:-2]: tree for module, tree in old.extra.items()},
            optimizer=optimizer,
        )

    def _unite(
        self, stages: Sequence[tuple[str, Mapping[str, Any], int, Manifest]]
    ) -> tuple[str, Mapping[str, Any], int, Manifest]:
        """Merge the stages of a model, which have different parameters except for shared modules."""
        first, model, stage, manifest = stages[0]
        tensors: dict[tuple[str, str], StoredTensor] = {}
        for file, other, its_stage, own in stages:
            self._compare_models(first, model, file, other)
            if its_stage != stage:
                raise CheckpointError(
                    f"{os.path.join(self.path, file)}: is of stage {its_stage}, {first} of stage {stage}: files of two "
                    "checkpoints"
                )
            for tensor in own.tensors:
                known = tensors.setdefault((tensor.name, tensor.kind), tensor)
                if known is not tensor and not self._alike(known, tensor):
                    raise CheckpointError(
                        f"{os.path.join(self.path, file)}: {tensor.kind} {tensor.name!r} is shared by stages, and has "
                        "other values than in the files before: files of several checkpoints"
                    )
        world = sum(own.layout["world"] for *_, own in stages)
        united = replace(
            manifest,
            layout={**manifest.layout, "world": world},
            ranks=[dict(_OF_A_RANK) for _ in range(world)],
            files=self._facts(),
            tensors=list(tensors.values()),
            optimizer=self._joined_optimizer([own for *_, own in stages]),
            extra={name: tree for *_, own in stages for name, tree in own.extra.items()},
        )
        self.manifest, self.notes = united, list(dict.fromkeys(self.notes))
        return first, model, stage, united

    def _alike(self, one: StoredTensor, other: StoredTensor) -> bool:
        """Return True if two tensors have equal shapes, and equal values in a sample."""
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        count = min(one.numel, _SAMPLE)
        for start in {0, one.numel - count}:
            values = [torch.empty(count, dtype=one.torch_dtype, device="cpu") for _ in range(2)]
            self.read_into(one, start, values[0])
            self.read_into(other, start, values[1])
            if not _equal_bits(*values):
                return False
        return True

    def _facts(self) -> dict[str, FileFacts]:
        return {name: FileFacts(opened.size, ()) for name, opened in self._opened.items()}

    # -- universal checkpoints ---------------------------------------------------------------------------------------

    def _open_universal(self, opened: Sequence[tuple[str, Mapping[str, Any], Files]]) -> None:
        files = self._universal = UniversalFiles(self.path)
        state = self._content(STATE)
        self.stage = int(state.get("zero_stage", 1))
        tensor = tensor_ranks(opened[0][1])
        stages = opened[::tensor]
        for first, model, _ in stages:
            self._compare_models(stages[0][0], stages[0][1], first, model)
            if not isinstance(model["param_shapes"], (list, tuple)) or model.get("num_experts"):
                raise CheckpointError(
                    f"{os.path.join(self.path, first)}: a universal checkpoint "
                    + ("with experts" if model.get("num_experts") else "without param_shapes")
                    + ", which is not read; import the checkpoint from which it was made"
                )
        divided = any(model["module"] is None for _, model, _ in stages)
        names = [_all_names(model) for _, model, _ in stages] if divided else []
        tied = stages[0][1].get(trainer_state.TIED_LAYERS) or tied_by_gaps(names)
        found = []
        for first, model, own in stages:
            self._universal_part(model, own, files, state, tensor, tied)
            if divided:
                self._rename(tied)
            found.append((first, model, self.stage, self.manifest))
        first, model, _, united = self._unite(found)
        world = int(model["dp_world_size"]) * len(opened)
        ranks = [dict(_OF_A_RANK) for _ in range(world)]
        self.manifest = replace(united, layout={**united.layout, "world": world}, ranks=ranks)
        if left := [key for some in names for key in keys_of(some) if key not in tied]:
            self.notes.append(
                f"the layers of shared modules ({outline(sorted(set(left)))}), which universal checkpoints do not "
                "have: pass load_checkpoint(rename={'tied_modules.KEY.weight': 'layers.N.weight'}) with the first layer"
            )

    def _universal_part(
        self,
        model: Mapping[str, Any],
        own: Files,
        files: UniversalFiles,
        state: Mapping[str, Any],
        tensor: int,
        tied: Mapping[str, int],
    ) -> None:
        shapes = [dict(group) for group in model["param_shapes"]]
        trained_here = {name: tuple(shape) for group in shapes for name, shape in group.items()}
        files.require(trained_here)
        if tensor > 1:  # the model states have the shapes of parts
            for name in trained_here:
                target = self._target_parameters.get(layer_name(name, tied))
                trained_here[name] = tuple(files.stored(name, MASTER).shape) if target is None else target.shape
        layout = DeepSpeedLayout(settings=[settings_of(group) for group in state["param_groups"]])
        owner = _owners(state, len(shapes)) if self.stage == 3 else range(len(shapes))
        layout.shapes.update(trained_here)
        for number, group in enumerate(shapes):
            layout.group.update(dict.fromkeys(group, owner[number]))
        sample = next(iter(trained_here), None)
        names = [] if sample is None else files.entries(sample)
        entries = {entry: name_of(files.stored(str(sample), entry).dtype) for entry in names}
        if entries:
            for name, step in steps_of_groups(files, shapes, state).items():
                layout.values[name] = {"step": step}
        if own.model:
            check_ranks(self.path, own.model, int(model["dp_world_size"]), "model")
        models = [self._model_states(own.model[rank]) for rank in sorted(own.model)] or [model]
        module = model["module"] or {}
        if tensor > 1:
            module = {name: value for name, value in module.items() if name in model["buffer_names"]}
        self.manifest = self._describe(model, int(model["dp_world_size"]))
        none = Experts(self.path, {}, (), {})
        whole = {t.name: t for t in self._module({**model, "module": module}, own, models, layout, none)}
        there = {t.name for t in self.manifest.tensors}
        tensors = self.manifest.tensors
        for name, shape in trained_here.items():
            tensors.append(files.add(trained(whole.get(name), name, shape, layout.group[name]), name))
            for entry, dtype in entries.items():
                tensors.append(files.add(StoredTensor(name, OPTIMIZER + entry, shape, dtype, ()), name))
        others = [*(model.get("frozen_param_shapes") or {}), *model["buffer_names"]]
        for name in (name for name in others if name not in there and name in files.names):
            values = files.stored(name, MASTER)
            kind = BUFFER if name in model["buffer_names"] else PARAMETER
            dtype = name_of(values.dtype)
            found = StoredTensor(name, kind, tuple(values.shape), dtype, ())
            if kind == PARAMETER:
                found = replace(found, trainable=False, compute_dtype=dtype)
            tensors.append(files.add(found, name))
        self._describe_optimizer(model, layout, entries)
        self._describe_training(model, state.get("loss_scaler"))

    # -- model-parallel parts ----------------------------------------------------------------------------------------

    def _join(self, opened: Sequence[tuple[str, Mapping[str, Any], int, Manifest]]) -> None:
        """Merge model-parallel parts: for each its file of model states, the content, the stage, its manifest."""
        (first, model, stage, manifest), *others = opened
        for file, other, its_stage, _ in others:
            self._compare_models(first, model, file, other)
            if its_stage != stage:
                raise CheckpointError(
                    f"{os.path.join(self.path, file)}: is of stage {its_stage}, {first} of stage {stage}: files of two "
                    "checkpoints"
                )
        tables = [{(t.name, t.kind): t for t in own.tensors if t.kind != BUFFER} for *_, own in opened]
        for (file, *_), table in zip(opened[1:], tables[1:], strict=True):
            if strange := {key[0] for key in tables[0].keys() ^ table.keys() if not _lacks(key, table, tables[0])}:
                raise CheckpointError(
                    f"{os.path.join(self.path, file)}: has other parameters or optimizer state than {first}: "
                    f"{outline(sorted(strange))}: files of two checkpoints"
                )
        self._compare_buffers(opened)
        splits = Divisions(model.get("universal_checkpoint_info"), self._target_parameters)
        divisions = {}
        for (name, kind), tensor in tables[0].items():
            if kind == PARAMETER:
                parts = [table[name, kind] for table in tables]
                alike = functools.partial(self._equal, parts)
                names = (name, *tensor.aliases, *filter(None, [self._file_names.get(name)]))
                divisions[name] = splits.of(names, [part.shape for part in parts], alike)
        world = manifest.layout["world"] * len(opened)
        self.manifest = replace(
            manifest,
            layout={**manifest.layout, "world": world},
            ranks=[dict(_OF_A_RANK) for _ in range(world)],
            files=self._facts(),
            tensors=[*join(tables, divisions), *manifest.of_kind(BUFFER)],
            optimizer=self._joined_optimizer([own for *_, own in opened]),
        )
        self.notes = list(dict.fromkeys(self.notes))

    def _equal(self, parts: Sequence[StoredTensor]) -> bool:
        first = self.read(parts[0])
        return all(_equal_bits(self.read(part), first) for part in parts[1:])

    def _compare_buffers(self, opened: Sequence[tuple[str, Mapping[str, Any], int, Manifest]]) -> None:
        held = [{t.name: t for t in own.of_kind(BUFFER) if t.rank is None} for *_, own in opened]
        for (file, *_), own in zip(opened[1:], held[1:], strict=True):
            for name, tensor in own.items():
                if name not in held[0] or not self._equal([held[0][name], tensor]):
                    raise CheckpointError(
                        f"{os.path.join(self.path, file)}: buffer {name!r} is not that of {opened[0][0]}: how buffers "
                        "that model-parallel ranks have different values of are joined is not known"
                    )

    def _joined_optimizer(self, manifests: Sequence[Manifest]) -> dict[str, Any] | None:
        found = [manifest.optimizer for manifest in manifests]
        refused = next((own for own in found if own is not None and "refused" in own), None)
        if refused is not None or None in found:
            return refused
        joined: dict[str, dict[str, Any]] = {}
        for part, own in enumerate(found):
            for name, values in (own or {})["values"].items():
                for key, value in values.items():
                    held = joined.setdefault(name, {}).setdefault(key, value)
                    if not same(held, value):
                        raise CheckpointError(
                            f"{self.path}: optimizer state {key!r} of {name!r} is {value!r} in the files of "
                            f"model-parallel rank {part}, and {held!r} in those before: files of several checkpoints"
                        )
        return {**(found[0] or {}), "values": joined}

    def _open_part(self, first: str, model: Mapping[str, Any], files: Files) -> None:
        experts = self._experts(model, files)
        world = self._world(model, files)
        models = [model]
        layout = DeepSpeedLayout()
        scaler: Any = None
        if files.optimizer or files.model or model["param_shapes"] is not None:
            ranks = self._optimizer_states(files, world)
            self.stage = self._stage(ranks)
            shapes = model["param_shapes"]
            if not isinstance(shapes, (list, tuple)) or (self.stage == 3) != (files.shared is None):
                raise CheckpointError(
                    f"{self.path}: model states {first} do not belong to optimizer states of stage {self.stage}: files "
                    "of two checkpoints, or a layout that is not known"
                )
            if self.stage == 3:
                check_ranks(self.path, files.model, world, "model")
                models = [self._model_states(files.model[rank]) for rank in range(world)]
                model = models[0]
                shapes = model["param_shapes"]
                self._compare(files, models)
                layout = divided_parameters(shapes, ranks)
            else:
                config = model.get("ds_config")
                counts = self._counts(ranks[0], len(shapes))
                first_data = trainer_state.data_before_experts(config)
                holders = experts.holders(shapes, counts, world, data_first=first_data)
                layout = flat_partitions(shapes, ranks, holders, reordered=trainer_state.reordered(config))
                self._compare_values(layout, experts.values, experts.homes)
                if self._layers is not None:
                    self._compare_values(layout, model["module"], self._homes)
            layout.check()
            scaler = ranks[0].content.get("loss_scaler")
        else:
            self.stage = 0
        self.manifest = self._describe(model, world)
        whole = self._module(model, files, models, layout, experts)
        if self.stage == 0:
            layout, scaler = self._stage_0(first, model, whole, experts, files)
        self._add(layout, {tensor.name: tensor for tensor in whole})
        if model["optimizer"] is not None or self.stage > 0:
            self._describe_optimizer(model, layout)
        self._describe_training(model, scaler)

    def _model_states(self, name: str) -> Mapping[str, Any]:
        content = self._content(name)
        for key in ("module", "buffer_names", "optimizer", "param_shapes", "dp_world_size", "ds_version"):
            if key not in content:
                raise CheckpointError(
                    f"{os.path.join(self.path, name)}: expected the key {key!r}, found "
                    f"{outline(sorted(map(str, content)))}; not a file of model states, or of a version of DeepSpeed "
                    "whose layout is not known (it was found with 0.19)"
                )
        if content["module"] is not None and not isinstance(content["module"], Mapping):
            raise CheckpointError(f"{os.path.join(self.path, name)}: module: expected a state dict, or None")
        return content

    def _content(self, name: str) -> Mapping[str, Any]:
        if name not in self._opened:
            self._opened[name] = TorchFile(os.path.join(self.path, name))
        content = self._opened[name].content
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{os.path.join(self.path, name)}: expected a dictionary, found {type(content).__name__}"
            )
        return content

    def _experts(self, model: Mapping[str, Any], files: Files) -> Experts:
        if model.get("ds_autoep_layers"):
            raise CheckpointError(
                f"{self.path}: experts of layers that DeepSpeed has divided by itself (expert_parallel), which cannot "
                "be imported; export the weights with its own tools and load those"
            )
        if files.experts and files.model:
            raise CheckpointError(
                f"{self.path}: holds {files.experts[min(files.experts)]} and files of stage 3, at which DeepSpeed has "
                "no experts: files of two checkpoints. Move those that do not belong to it away"
            )
        counts = model.get("num_experts") or []
        if files.expert_optimizer and not counts:
            raise CheckpointError(
                f"{self.path}: holds {files.expert_optimizer[min(files.expert_optimizer)]}, but was saved without "
                "experts: a file of another checkpoint. Move files that do not belong to it away"
            )
        experts = Experts(self.path, files.experts, counts, {n: self._content(n) for n in files.experts.values()})
        experts.check_buffers(model["buffer_names"])
        return experts

    def _compare_values(self, layout: DeepSpeedLayout, values: Mapping[str, Any], homes: Mapping[str, str]) -> None:
        """Compare samples of master weights with values in other files. Raises CheckpointError if they differ."""
        for name, home in homes.items():
            value = values[name]
            if not isinstance(value, torch.Tensor) or layout.shapes.get(name, value.shape) != tuple(value.shape):
                raise CheckpointError(
                    f"{os.path.join(self.path, home)}: {name!r}: expected a tensor of shape "
                    f"{list(layout.shapes.get(name, ()))}, found "
                    f"{list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}"
                )
            for piece in layout.pieces.get((name, PARAMETER), ()):
                stop = min(piece.stop, piece.start + _SAMPLE)
                mine, theirs = piece.values[: stop - piece.start], value.reshape(-1)[piece.start : stop]
                if not torch.equal(mine.to(theirs.dtype).nan_to_num(), theirs.nan_to_num()):
                    raise CheckpointError(
                        f"{piece.file}: {name!r} has other values than in {os.path.join(self.path, home)}: files of "
                        "two checkpoints, or ranks that have the parts of a model in an order that is not known"
                    )

    def _world(self, model: Mapping[str, Any], files: Files) -> int:
        if not files.optimizer:
            return int(model["dp_world_size"])
        content = self._optimizer_file(files.optimizer[min(files.optimizer)])
        count = content.get("partition_count")
        counts = set(count) if isinstance(count, (list, tuple)) else {count}
        if not counts or not all(isinstance(number, int) and number > 0 for number in counts):
            raise CheckpointError(f"{content.file}: partition_count: expected numbers of ranks, found {count!r}")
        return int(max(counts))

    @staticmethod
    def _counts(rank: Opened, groups: int) -> list[int]:
        count = rank.get("partition_count")
        counts = list(count) if isinstance(count, (list, tuple)) else [count] * groups
        if len(counts) != groups:
            raise CheckpointError(
                f"{rank.file}: partition_count: expected numbers of ranks of {groups} groups, as in the model states, "
                f"found {count!r}"
            )
        return counts

    def _optimizer_file(self, name: str) -> Opened:
        content = self._content(name)
        found = content.get("optimizer_state_dict")
        if not isinstance(found, Mapping):
            raise CheckpointError(
                f"{os.path.join(self.path, name)}: expected the key 'optimizer_state_dict', found "
                f"{outline(sorted(map(str, content)))}: a layout that is not known"
            )
        return Opened(os.path.join(self.path, name), found)

    def _optimizer_states(self, files: Files, world: int) -> list[Opened]:
        check_ranks(self.path, files.optimizer, world, "optimizer")
        ranks = [self._optimizer_file(files.optimizer[rank]) for rank in range(world)]
        for other in ranks[1:]:
            for key in ("zero_stage", "partition_count"):
                if other.content.get(key) != ranks[0].content.get(key):
                    raise CheckpointError(
                        f"{other.file}: {key} is {other.content.get(key)!r}, in {ranks[0].file} "
                        f"{ranks[0].content.get(key)!r}: files of two checkpoints"
                    )
        return ranks

    def _stage(self, ranks: Sequence[Opened]) -> int:
        stage, keys = ranks[0].content.get("zero_stage", 1), ranks[0].content
        if stage in (1, 2) and "single_partition_of_fp32_groups" in keys:
            return int(stage)
        if stage == 3 and "fp32_flat_groups" in keys:
            return 3
        raise CheckpointError(
            f"{ranks[0].file}: stage {stage} with the keys {outline(sorted(map(str, keys)))}: a layout that is not "
            f"known (written by DeepSpeed {self._opened[os.path.basename(ranks[0].file)].content.get('ds_version')})"
        )

    def _compare(self, files: Files, models: Sequence[Mapping[str, Any]]) -> None:
        for rank, other in enumerate(models):
            self._compare_models(files.model[0], models[0], files.model[rank], other)

    def _compare_models(self, first: str, model: Mapping[str, Any], file: str, other: Mapping[str, Any]) -> None:
        for key in ("global_steps", "dp_world_size", "mp_world_size", "ds_version"):
            if other.get(key) != model.get(key):
                raise CheckpointError(
                    f"{os.path.join(self.path, file)}: {key} is {other.get(key)!r}, in {first} {model.get(key)!r}: "
                    "files of two checkpoints"
                )

    # -- content -----------------------------------------------------------------------------------------------------

    def _describe(self, model: Mapping[str, Any], world: int) -> Manifest:
        config = model.get("ds_config")
        return Manifest(
            tag=os.path.basename(os.path.normpath(self.path)),
            created=max(opened.modified for opened in self._opened.values()),
            versions={"deepspeed": str(model["ds_version"])},
            layout={"world": world, "stage": self.stage, "library": "deepspeed"},
            config=trainer_state.plain_json(config) if isinstance(config, Mapping) else {},
            files=self._facts(),
            tensors=[],
        )

    def _module(
        self,
        model: Mapping[str, Any],
        files: Files,
        models: Sequence[Mapping[str, Any]],
        layout: DeepSpeedLayout,
        experts: Experts,
    ) -> list[StoredTensor]:
        """Add buffers and frozen parameters; return all, without slices if their values are in other files."""
        first = files.shared or files.model[0]
        module: Mapping[str, Any] = {**model["module"], **experts.values}
        buffer_names = frozenset(model["buffer_names"])
        frozen: Mapping[str, Any] = model.get("frozen_param_shapes") or {}
        shared: Mapping[str, str] = model.get("shared_params") or {}
        parameters: list[StoredTensor] = []
        seen: dict[Any, str] = {}
        aliases: dict[str, list[str]] = {}
        for name, value in module.items():
            if name.rpartition(".")[2] == _EXTRA:
                self.manifest.extra[name.removesuffix(_EXTRA).removesuffix(".")] = value
                continue
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"{os.path.join(self.path, first)}: module: {name!r}: expected a tensor, found "
                    f"{type(value).__name__}"
                )
            original = shared.get(name) or (seen.setdefault(_identity(value), name) if value.numel() else name)
            if original != name:
                aliases.setdefault(original, []).append(name)
            elif name in buffer_names:
                self._add_buffer(name, self._homes.get(name, first), models, files)
            else:
                parameters.append(self._parameter(name, value, frozen, layout))
        parameters = [
            StoredTensor(**{**vars(tensor), "aliases": tuple(aliases.get(tensor.name, ()))}) for tensor in parameters
        ]
        for tensor in parameters:
            if tensor.name in layout.shapes:
                continue
            if self.stage == 3:
                self._add_divided(tensor, files, models)
            else:
                home = self._homes.get(tensor.name) or experts.homes.get(tensor.name, first)
                self._add_stored(tensor, [DeepSpeedPiece(0, tensor.numel, module[tensor.name].reshape(-1), home)])
        return parameters

    def _parameter(
        self, name: str, value: torch.Tensor, frozen: Mapping[str, Any], layout: DeepSpeedLayout
    ) -> StoredTensor:
        shape = layout.shapes.get(
            name, tuple(frozen[name]) if self.stage == 3 and name in frozen else tuple(value.shape)
        )
        if self.stage in (1, 2) and shape != tuple(value.shape):
            raise CheckpointError(
                f"{self.path}: parameter {name!r}: shape {list(value.shape)} in the module, {list(shape)} in "
                "param_shapes"
            )
        dtype = name_of(value.dtype)
        return StoredTensor(
            name,
            PARAMETER,
            shape,
            dtype,
            (),
            trainable=name in layout.shapes,
            group=layout.group.get(name),
            compute_dtype=dtype,
        )

    def _add_divided(self, tensor: StoredTensor, files: Files, models: Sequence[Mapping[str, Any]]) -> None:
        part = -(-tensor.numel // len(models))
        pieces = []
        for rank, model in enumerate(models):
            values = (model.get("frozen_param_fragments") or {}).get(tensor.name)
            first, last = (min(tensor.numel, edge * part) for edge in (rank, rank + 1))
            if values is None:
                return  # left out of the checkpoint; a strict load names it as missing
            if values.numel() < last - first:
                raise CheckpointError(
                    f"{os.path.join(self.path, files.model[rank])}: frozen parameter {tensor.name!r}: expected "
                    f"{last - first} elements, found {values.numel()}"
                )
            pieces.append(DeepSpeedPiece(first, last, values.reshape(-1)[: last - first], files.model[rank]))
        self._add_stored(tensor, [piece for piece in pieces if piece.stop > piece.start])

    def _add_buffer(self, name: str, first: str, models: Sequence[Mapping[str, Any]], files: Files) -> None:
        """Add a buffer: the first rank's value, and those of others if they differ."""
        for rank, model in enumerate(models):
            value = model["module"].get(name)
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(f"{os.path.join(self.path, files.model[rank])}: buffer {name!r} is missing")
            if rank and _equal_bits(value, models[0]["module"][name]):
                continue
            described = StoredTensor(name, BUFFER, tuple(value.shape), name_of(value.dtype), (), rank=rank or None)
            file = files.model[rank] if files.model else first
            self._add_stored(described, [DeepSpeedPiece(0, value.numel(), value.reshape(-1), file)])

    def _stage_0(
        self, first: str, model: Mapping[str, Any], whole: Sequence[StoredTensor], experts: Experts, files: Files
    ) -> tuple[DeepSpeedLayout, Any]:
        wrapped = model["optimizer"]
        if wrapped is None:
            return DeepSpeedLayout(), None
        ranks = files.expert_optimizer
        held = Numbered.of(os.path.join(self.path, first), wrapped)
        separate = {
            rank: Numbered.of(os.path.join(self.path, file), self._content(file).get("optimizer"))
            for rank, file in sorted(ranks.items())
        }
        if self._layers is not None and self._layers.untold is not None:
            return self._refused(held, CheckpointError(f"{self.path}: {self._layers.untold}")), wrapped
        shapes = {tensor.name: tensor.shape for tensor in whole}
        # Numbers count the parameters of one stage, not those of the engine.
        members = None if self._target is None or self._layers is not None else self._target.members(shapes)
        layout = DeepSpeedLayout()
        try:
            sizes = experts.sizes(held.groups, members, len(ranks))
        except CheckpointError as error:
            return self._refused(held, error), wrapped
        check_ranks(self.path, ranks, max([len(ranks), *sizes.values()]), "experts' optimizer")
        data_first = trainer_state.data_before_experts(self.manifest.config)
        try:
            for rank, numbered in [(0, held), *separate.items()]:
                own = experts.own(sizes, rank, max(1, len(ranks)), data_first=data_first)
                names = numbered.names(shapes, members, experts, own)
                taken = [
                    [
                        name
                        if (numbered is held) == (experts.layer_of(name) is None) and name not in layout.shapes
                        else None
                        for name in group
                    ]
                    for group in names
                ]
                numbered_states(layout, numbered.file, shapes, taken, numbered.state, numbered.masters)
        except CheckpointError as error:
            return self._refused(held, error), wrapped
        return layout, wrapped

    def _refused(self, held: Numbered, error: CheckpointError) -> DeepSpeedLayout:
        self.manifest = Manifest(**{**vars(self.manifest), "optimizer": {"refused": str(error)}})
        if held.masters is not None:
            self.notes.append("parameters come from the 16-bit values of the module, because " + str(error))
        return DeepSpeedLayout()

    def _add(self, layout: DeepSpeedLayout, whole: Mapping[str, StoredTensor]) -> None:
        missing = [name for name in layout.shapes if name not in whole]
        if missing:
            raise CheckpointError(f"{self.path}: parameters of the optimizer are not in the module: {outline(missing)}")
        tensors = self.manifest.tensors
        held = {tensor.name: tensor for tensor in tensors if tensor.kind == PARAMETER}
        tensors[:] = [t for t in tensors if t.kind != PARAMETER or t.name not in layout.shapes]
        for name in layout.shapes:
            pieces = layout.pieces.get((name, PARAMETER))
            trained = {"trainable": True, "group": layout.group[name]}
            if pieces is None and name in held:  # unsharded, in the module
                tensors.append(StoredTensor(**{**vars(held[name]), **trained}))
                continue
            pieces = pieces or []
            dtype = name_of(pieces[0].values.dtype) if pieces else whole[name].dtype
            self._add_stored(StoredTensor(**{**vars(whole[name]), **trained, "dtype": dtype}), pieces)
        for (name, kind), pieces in layout.pieces.items():
            if kind != PARAMETER:
                dtype = name_of(pieces[0].values.dtype)
                self._add_stored(StoredTensor(name, kind, layout.shapes[name], dtype, ()), pieces)
        if layout.dropped:
            self.notes.append(f"optimizer state that is no value per element: {outline(sorted(layout.dropped))}")

    def _add_stored(self, tensor: StoredTensor, pieces: Sequence[DeepSpeedPiece]) -> None:
        slices = []
        for piece in pieces:
            file = os.path.basename(piece.file)
            key = f"{tensor.kind}/{tensor.name}[{piece.start}:{piece.stop}]"
            self._views[file, key] = piece.values
            slices.append(Slice(file, key, piece.start, piece.stop))
        self.manifest.tensors.append(StoredTensor(**{**vars(tensor), "slices": tuple(slices)}))

    def _describe_optimizer(
        self, model: Mapping[str, Any], layout: DeepSpeedLayout, entries: Collection[str] | None = None
    ) -> None:
        """Describe the optimizer; `entries` are those of its state, None: those in the layout."""
        layout.take_steps(self.path)
        refused = (self.manifest.optimizer or {}).get("refused")
        if entries is None:
            entries = {kind.removeprefix(OPTIMIZER) for _, kind in layout.pieces if kind != PARAMETER}
        config, target = model.get("ds_config"), self._target
        name = trainer_state.class_of(config, entries, layout.settings)
        if target is not None:
            refused = refused or trainer_state.refusal(config, entries, target.optimizer) or self._other_groups(layout)
            name = target.optimizer
        groups = []
        if self.stage and not any(layout.settings):
            self.notes.append("settings of parameter groups, which elastic checkpoints do not have")
        for number, settings in enumerate(layout.settings):
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
        found: dict[str, Any] = {"class": name, "groups": groups, "values": layout.values}
        if refused:
            found["refused"] = refused
        self.manifest = Manifest(**{**vars(self.manifest), "optimizer": found})

    def _other_groups(self, layout: DeepSpeedLayout) -> str | None:
        assert self._target is not None
        for number, members in enumerate(self._target.groups):
            for known in members:
                name = next((name for name in known if name in layout.group), None)
                if name is not None and layout.group[name] != number:
                    return (
                        f"parameter {name!r} was in group {layout.group[name]} of the optimizer and is in group "
                        f"{number} here, so that it would get other settings; form the groups as they were"
                    )
        return None

    def _describe_training(self, model: Mapping[str, Any], scaler: Any) -> None:
        self.notes.append(
            "the place in the training data and random numbers, which DeepSpeed does not save"
            + (", and the state of its curriculum sampler" if model.get("data_sampler") else "")
            + (", and of its random layer dropping" if model.get("random_ltd") else "")
        )
        self.manifest = Manifest(
            **{
                **vars(self.manifest),
                "scheduler": trainer_state.schedule_state(model.get("lr_scheduler")),
                "scaler": trainer_state.scaler_state(scaler),
                "counters": trainer_state.counters(model, self.manifest.layout["world"]),
                "ranks": [dict(_OF_A_RANK) for _ in range(self.manifest.layout["world"])],
                "client": {key: value for key, value in model.items() if key not in trainer_state.OWN_KEYS},
            }
        )

    # -- reading, as in `Checkpoint` ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Release all files."""
        self._views = {}
        self._opened = {}
        if self._universal is not None:
            self._universal.close()

    def read_into(self, tensor: StoredTensor, start: int, out: torch.Tensor) -> None:
        """Read elements from `start` on, as `Checkpoint.read_into`."""
        with torch.no_grad():  # grad mode is per thread
            for part, patch in tensor.runs(start, start + out.numel()):
                if self._universal is not None and self._universal.has(part.file):
                    view = self._universal.values(part.file)
                else:
                    view = self._views[part.file, part.key]
                read_patch(patch, view.dtype, functools.partial(_take, view), out)

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return an unsharded tensor, on the CPU; its pieces were checked when the files were opened."""
        values = torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="cpu")
        self.read_into(tensor, 0, values.view(-1))
        return values

    def decode(self, tree: Any) -> Any:
        """Return the value itself."""
        return tree

    def blocks(self, tensors: Iterable[StoredTensor] | None = None, trees: Iterable[Any] = ()) -> list[tuple[str, int]]:
        """Return (file, record) of the files of some tensors, or of all (None); `trees` are in memory already."""
        held = None if tensors is None else list(tensors)
        names = set(self._opened) if held is None else {part.file for tensor in held for part in tensor.slices}
        found = [(name, n) for name in sorted(names & self._opened.keys()) for n in range(self._opened[name].records)]
        return found + [(name, 0) for name in (self._universal.blocks(held) if self._universal is not None else ())]

    def places(self, runs: Iterable[Run]) -> tuple[dict[Block, Run], list[Run]]:
        """Return no places, because the files are mapped into memory and copied from there."""
        return {}, list(runs)

    def verify(self, blocks: Iterable[tuple[str, int]], places: Mapping[Block, Run] | None = None) -> None:
        """Compare records with the checksums that torch has written. Raises CheckpointError if a file is damaged."""
        by_file: dict[str, list[int]] = {}
        for name, record in blocks:
            by_file.setdefault(name, []).append(record)
        for name, records in by_file.items():
            if self._universal is not None and self._universal.has(name):
                self._universal.verify(name)
            else:
                self._opened[name].verify(records)


def _all_names(model: Mapping[str, Any]) -> list[str]:
    groups = [*model["param_shapes"], model.get("frozen_param_shapes") or {}, model["buffer_names"]]
    return list(dict.fromkeys(name for group in groups for name in group))


def _owners(state: Mapping[str, Any], count: int) -> list[int]:
    """Return the parameter group of each sub-group of stage 3."""
    settings = state["optimizer_state_dict"]["param_groups"]
    owner = {sub: number for number, group in enumerate(settings) for sub in group["params"]}
    return [owner.get(sub, 0) for sub in range(count)]


def _lacks(key: tuple[str, str], *parts: Mapping[tuple[str, str], StoredTensor]) -> bool:
    """Return True if optimizer state is missing only where a model-parallel part of its parameter is empty."""
    owner = (key[0], PARAMETER)
    return key != owner and all(key in part or (owner in part and not part[owner].numel) for part in parts)


def _take(view: torch.Tensor, first: int, out: torch.Tensor) -> None:
    out.copy_(view[first : first + out.numel()])


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        tensor.untyped_storage().data_ptr(),
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.dtype,
    )


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
