"""Owner of a sharded model's parameters: unshards them for the script, in passes and outside of them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from shardwise.errors import ReleasedParameterError
from shardwise.registry import LogicalTensor
from shardwise.utils.logging import warn_once
from shardwise.zero.parameters.unsharded_access import Shown
from shardwise.zero.passes.model_pass import Call
from shardwise.zero.passes.order import Phase
from shardwise.zero.units.released import Owner
from shardwise.zero.units.unit import Unit

if TYPE_CHECKING:
    from shardwise.zero.model import ShardedModel


class Gathered(NamedTuple):
    """Parameters that `ParameterOwner.gather` has unsharded."""

    units: list[Unit]
    shown: list[Shown]
    """Parameters that are whole tensors instead of this rank's parts."""
    versions: list[int]
    """Version counters of `shown`."""


class ParameterOwner(Owner):
    """Owner of the parameters of a sharded model, which parameters do not keep: else it would never be freed."""

    def __init__(self, model: ShardedModel) -> None:
        self._model = weakref.ref(model)

    @property
    def dropped(self) -> bool:
        """Whether engine and module have been dropped, of which this parameter is left."""
        return self._model() is None

    @property
    def model(self) -> ShardedModel:
        """The sharded model. Raises ReleasedParameterError if it has been dropped."""
        model = self._model()
        if model is None:
            raise ReleasedParameterError(
                "the parameter has no values: its model and engine have been dropped. Keep the engine, or call "
                "engine.destroy() first, which makes parameters whole"
            )
        return model

    def _unit_of(self, parameter: nn.Parameter) -> tuple[LogicalTensor, Unit]:
        tensor = self.model.registry.find(parameter)
        assert tensor is not None
        return tensor, self.model.unit_of(tensor.index)

    @property
    @override
    def in_pass(self) -> bool:
        return self.model.model_pass.order.phase is not Phase.IDLE

    @override
    def touch(self, parameter: nn.Parameter, what: str) -> Call | None:
        tensor, unit = self._unit_of(parameter)
        return self.model.model_pass.touch(unit, tensor, what)

    @override
    def end_touch(self, parameter: nn.Parameter, token: Any, result: object) -> None:
        self.model.model_pass.end_touch(self._unit_of(parameter)[1], token, result)

    @override
    def gather(self, parameters: Iterable[nn.Parameter]) -> Gathered:
        """Unshard parameters outside of passes (all ranks call); parts become whole tensors (else UsageError)."""
        parameters, model = list(parameters), self.model
        units = model.state.gather_parts(parameters)
        try:
            shown = model.wholes.show(parameters)
            return Gathered(units, shown, [parameter._version for _, parameter, _ in shown])
        except BaseException:
            model.state.let_go(units)
            raise

    @override
    def discarded(self, gathered: Gathered) -> list[str]:
        names = [name for unit in gathered.units for name in unit.changed()]
        for (tensor, parameter, _), version in zip(gathered.shown, gathered.versions, strict=True):
            if parameter._version != version and tensor.name not in names:
                names.append(tensor.name)
        return names

    @override
    def put_back(self, parameters: Iterable[nn.Parameter], gathered: Gathered, src: int | None) -> None:
        """End a `gather`, and reshard the units. Raises UsageError if rounded values would be stored."""
        parameters, model = list(parameters), self.model
        for unit in model.units_of(parameter for _, parameter, _ in gathered.shown):
            unit.attach()
        if src is not None and gathered.shown:
            model.wholes.agree(gathered.shown, model.comm.group_rank(src) if src in model.comm.members else 0)
            for tensor, _, whole in gathered.shown:
                model.state.values_of(tensor.index).copy_(tensor.cut(whole).reshape(-1))
        model.state.put_parts_back(parameters, gathered.units, src)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Unshard all units. Because passes inside need no communication, their number may differ by rank."""
        model = self.model
        gathered = model.state.gather_parts(model.registry.parameters)
        model.unsharder.suspended = True
        try:
            yield
        finally:
            model.unsharder.suspended = False
            try:
                for unit in gathered:
                    if unit.changed():  # also through `p.data`, which counts no version
                        torch.autograd.graph.increment_version(unit.parameters)
            finally:
                try:
                    model.state.let_go(gathered)
                finally:
                    model.shards_written()  # by changes inside

    @override
    def kept(self, parameter: nn.Parameter) -> int:
        tensor, unit = self._unit_of(parameter)
        if not unit.sharded:
            return tensor.numel
        section = self.model.section_of(tensor.index)
        pieces = section.layout.pieces(section.shard_range.start, section.shard_range.stop)
        return sum(piece.stop - piece.start for piece in pieces if piece.index == tensor.index)

    @override
    def converted(self, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter | None:
        if dtype != parameter.dtype or not self.model.is_absent(parameter):
            return None
        warn_once(
            f"{type(self.model.module).__name__} is moved to {device}: parameters that are sharded stay on "
            f"{self.model.device}, with the engine. Call engine.destroy(), which makes the model whole, before moving "
            "it"
        )
        return parameter

    @override
    def replace(self, parameter: nn.Parameter, other: nn.Parameter) -> bool:
        return other is parameter
