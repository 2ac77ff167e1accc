"""Conversion of the files of one `mp_rank_XX` to the neutral form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.checkpoint.formats.deepspeed import trainer_state, zero_partitions
from shardwise.checkpoint.formats.deepspeed.experts import Experts
from shardwise.checkpoint.formats.deepspeed.index import Files, OpenFiles, check_complete
from shardwise.checkpoint.formats.deepspeed.neutral import Content, Piece, equal_bits
from shardwise.checkpoint.formats.deepspeed.zero_partitions import Numbered, Target, shards
from shardwise.checkpoint.manifest import BUFFER, PARAMETER, StoredTensor, name_of
from shardwise.errors import CheckpointError

_EXTRA = "_extra_state"
_SAMPLE = 16
"""Elements of each piece of master weights that are compared with the file of an expert or layer."""


@dataclass
class Part:
    """One `mp_rank_XX`: a model, a pipeline stage, or a model-parallel part of one.

    Attributes:
        files: the files of the checkpoint.
        first: name of the first file of model states.
        model: its content.
        own: names of the part's files.
        content: the neutral form.
        homes: files of the module's values, where they are not in `first`.
        stage: the ZeRO stage.
        scaler: the loss scaler, or None.
    """

    files: OpenFiles
    first: str
    model: Mapping[str, Any]
    own: Files
    content: Content
    homes: Mapping[str, str] = field(default_factory=dict)
    stage: int = 0
    scaler: Any = None

    def __post_init__(self) -> None:
        self._models = [self.model]
        self._experts = self._find_experts()
        self.content.world = int(self.model["dp_world_size"])
        if self.own.optimizer:
            found = self.files.optimizer_file(self.own.optimizer[min(self.own.optimizer)])["partition_count"]
            self.content.world = max(found) if isinstance(found, (list, tuple)) else int(found)

    def read(self, target: Target | None, untold: str | None = None) -> None:
        """Convert the files of stages 0 to 3. `target` is the optimizer to load into. `untold`: why the parameters of
        the optimizer are unknown, or None.
        """
        if self.own.optimizer or self.own.model or self.model["param_shapes"] is not None:
            self._read_zero()
        self.read_module()
        if self.stage == 0 and self.model["optimizer"] is not None:
            self.scaler = self.model["optimizer"]
            try:
                if untold is not None:
                    raise CheckpointError(untold)
                self._read_stage_0(target)
            except CheckpointError as error:
                self.content.refuse(str(error))
        self.content.store_trained()

    def _find_experts(self) -> Experts:
        if self.model.get("ds_autoep_layers"):
            raise CheckpointError(
                "has experts of layers that DeepSpeed has divided by itself (expert_parallel), which cannot be "
                "imported; export the weights with its own tools and load those"
            )
        counts = self.model.get("num_experts") or []
        experts = ((layer, expert) for layer, count in enumerate(counts) for expert in range(count))
        names = {f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt" for layer, expert in experts}
        check_complete(self.own.experts.values(), names, "experts")
        if self.own.expert_optimizer and not counts:
            check_complete(self.own.expert_optimizer.values(), (), "experts")
        found = Experts(self.own.experts, counts, self.files.content)
        if inside := [name for name in self.model["buffer_names"] if found.layer_of(name) is not None]:
            raise CheckpointError(
                f"{inside[0]!r} is a buffer inside of experts, and those of different experts have the same name on "
                "different ranks; they cannot be imported"
            )
        return found

    # -- stages 1 to 3 -------------------------------------------------------------------------------------------------

    def _read_zero(self) -> None:
        ranks = self.files.optimizer_states(self.own, self.content.world)
        self.stage, self.scaler = ranks[0].content.get("zero_stage", 1), ranks[0].content.get("loss_scaler")
        if self.stage not in (1, 2, 3):
            raise CheckpointError(f"{ranks[0].file}: stage {self.stage}: a layout that is not known")
        shapes: Sequence[Mapping[str, Any]] | None = self.model["param_shapes"]
        if shapes is None or (self.stage == 3) != (self.own.shared is None):
            raise CheckpointError(
                f"model states {self.first} do not belong to optimizer states of stage {self.stage}: files of two "
                "checkpoints, or a layout that is not known"
            )
        if self.stage == 3:
            zero_partitions.divided_parameters(self.content, shapes, ranks)
            return
        config, count = self.model.get("ds_config"), ranks[0]["partition_count"]
        counts = list(count) if isinstance(count, (list, tuple)) else [count] * len(shapes)
        data_first = trainer_state.data_before_experts(config)
        holders = self._experts.holders(shapes, counts, self.content.world, data_first=data_first)
        zero_partitions.flat_partitions(self.content, shapes, ranks, holders, reordered=trainer_state.reordered(config))
        self._compare({**self.model["module"], **self._experts.values}, {**self.homes, **self._experts.homes})

    def _compare(self, values: Mapping[str, Any], homes: Mapping[str, str]) -> None:
        """Compare samples of master weights with values in other files. Raises CheckpointError if they differ."""
        for name, home in homes.items():
            for piece in self.content.pieces.get((name, PARAMETER), ()):
                stop = min(piece.stop, piece.start + _SAMPLE)
                mine, theirs = piece.values[: stop - piece.start], values[name].reshape(-1)[piece.start : stop]
                if not torch.equal(mine.to(theirs.dtype).nan_to_num(), theirs.nan_to_num()):
                    raise CheckpointError(
                        f"{piece.file}: {name!r} has other values than in {home}: files of two checkpoints, or ranks "
                        "that have the parts of a model in an order that is not known"
                    )

    # -- the module ----------------------------------------------------------------------------------------------------

    def read_module(self) -> None:
        """Add buffers, frozen parameters and extra state, and describe trained parameters."""
        if self.own.model:
            self._models = self.files.models(self.own, self.content.world)
        model = self._models[0]
        shared: Mapping[str, str] = model.get("shared_params") or {}
        seen: dict[Any, str] = {}
        aliases: dict[str, list[str]] = {}
        parameters: dict[str, torch.Tensor] = {}
        for name, value in {**model["module"], **self._experts.values}.items():
            if name.rpartition(".")[2] == _EXTRA:
                self.content.extra[name.removesuffix(_EXTRA).removesuffix(".")] = value
                continue
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(f"{self.first}: {name!r}: expected a tensor, found {type(value).__name__}")
            original = shared.get(name) or (seen.setdefault(_identity(value), name) if value.numel() else name)
            if original != name:
                aliases.setdefault(original, []).append(name)
            elif name in model["buffer_names"]:
                self._add_buffer(name)
            else:
                parameters[name] = value
        frozen: Mapping[str, Any] = model.get("frozen_param_shapes") or {}
        for name, value in parameters.items():
            shape = tuple(frozen[name]) if self.stage == 3 and name in frozen else tuple(value.shape)
            dtype = name_of(value.dtype)
            tensor = StoredTensor(
                name, PARAMETER, shape, dtype, (), tuple(aliases.get(name, ())), False, None, compute_dtype=dtype
            )
            if name in self.content.shapes:
                if self.stage in (1, 2) and shape != self.content.shapes[name]:
                    raise CheckpointError(
                        f"parameter {name!r}: shape {list(shape)} in the module, {list(self.content.shapes[name])} in "
                        "param_shapes"
                    )
                self.content.keep(tensor)
            elif self.stage == 3:
                self._add_frozen(tensor)
            else:
                home = self.homes.get(name) or self._experts.homes.get(name, self.first)
                self.content.store(tensor, [Piece(0, tensor.numel, value.reshape(-1), home)])

    def _add_frozen(self, tensor: StoredTensor) -> None:
        """Add a frozen parameter of stage 3, unless it was left out of the checkpoint."""
        pieces = []
        for rank, (first, last) in enumerate(shards(tensor.numel, len(self._models))):
            values = (self._models[rank].get("frozen_param_fragments") or {}).get(tensor.name)
            if values is None:
                return
            pieces.append(Piece(first, last, values.reshape(-1)[: last - first], self.own.model[rank]))
        self.content.store(tensor, [piece for piece in pieces if piece.stop > piece.start])

    def _add_buffer(self, name: str) -> None:
        """Add a buffer: the first rank's value, and those of others if they differ."""
        first = self._models[0]["module"][name]
        for rank, model in enumerate(self._models):
            value = model["module"][name]
            if rank == 0 or not equal_bits([value, first]):
                tensor = StoredTensor(name, BUFFER, tuple(value.shape), name_of(value.dtype), (), rank=rank or None)
                file = self.own.model[rank] if self.own.model else self.homes.get(name, self.first)
                self.content.store(tensor, [Piece(0, value.numel(), value.reshape(-1), file)])

    # -- stage 0 -------------------------------------------------------------------------------------------------------

    def _read_stage_0(self, target: Target | None) -> None:
        content, ranks = self.content, self.own.expert_optimizer
        held = Numbered.of(self.first, self.model["optimizer"])
        shapes = {name: tensor.shape for (name, kind, _), tensor in content.tensors.items() if kind == PARAMETER}
        members = None if target is None else target.members(shapes)
        sizes = self._experts.sizes(held.groups, members, len(ranks))
        check_complete(ranks, range(max([len(ranks), *sizes.values()])), "experts' optimizer states of rank")
        data_first = trainer_state.data_before_experts(self.model.get("ds_config"))
        separate = {rank: Numbered.of(file, self.files.content(file)["optimizer"]) for rank, file in ranks.items()}
        for rank, numbered in [(0, held), *sorted(separate.items())]:
            own = self._experts.own(sizes, rank, max(1, len(ranks)), data_first=data_first)
            names = numbered.names(shapes, members, self._experts, own)
            of_experts = numbered is not held
            wanted = {
                name
                for group in names
                for name in group
                if of_experts == (self._experts.layer_of(name) is not None) and name not in content.shapes
            }
            numbered.add(content, shapes, names, wanted)


def _identity(tensor: torch.Tensor) -> tuple[Any, ...]:
    place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return *place, tuple(tensor.shape), tensor.stride(), tensor.dtype
