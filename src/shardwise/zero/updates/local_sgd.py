"""Local SGD: replicas step on their own, and exchange at intervals the change of their parameters.

Stich, "Local SGD converges fast and communicates little", 2018 (arXiv 1805.09767). Douillard et al., "DiLoCo:
Distributed low-communication training of language models", 2023 (arXiv 2311.08105). Fragments: Douillard et al.,
"Streaming DiLoCo with overlapping communication", 2025 (arXiv 2501.18512).

Each rank keeps its range of the parameters that replicas last agreed on, in fp32, and the momentum of the outer
optimizer. In an exchange the mean over replicas of (agreed - own parameters) is the gradient of the outer optimizer,
whose result becomes the agreed parameters. Replicas with unequal parts of the batch count by them (McMahan et al.,
"Communication-efficient learning of deep networks from decentralized data", 2016, arXiv 1602.05629). All
replicas compute the same bits, so each is complete without the others. The inner optimizer's state is the replica's.

With `overlap_steps` the mean is of the changes at the step where the exchange begins. That many steps later the outer
optimizer steps, and own parameters become mixing * own + (1 - mixing) * agreed.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad
from typing_extensions import override

from shardwise.comm.communicator import Handle
from shardwise.comm.compression import BlockCode
from shardwise.comm.compression.averaging import BlockMean, ExactMean, advance
from shardwise.comm.compression.quantized import QuantizedMean
from shardwise.comm.domain import Domains
from shardwise.comm.replicas import Replicas
from shardwise.errors import CheckpointError, ConflictError, DesyncError, UsageError
from shardwise.memory import Accountant, Category
from shardwise.memory.places import ALL_ON_DEVICE
from shardwise.zero.units.flat_param import FlatParamStorage
from shardwise.zero.units.plan import Plan
from shardwise.zero.units.unit import Unit
from shardwise.zero.updates.segments import SegmentUpdate
from shardwise.zero.updates.update import OUTER, Stepping, Update

if TYPE_CHECKING:
    from shardwise.config.schema.local import LocalSGD

MOMENTUM = OUTER + "momentum"
"""Name of the outer optimizer's momentum in checkpoints, beside the state of the inner optimizer."""


@dataclass(eq=False)
class _Outer:
    """Outer state of this rank's master weights in a flat parameter; `numel` is its own part's, padded for the mean."""

    name: str
    section: FlatParamStorage
    agreed: torch.Tensor
    momentum: torch.Tensor | None
    mean: BlockMean
    numel: int

    def own_part(self, values: torch.Tensor) -> torch.Tensor:
        """Return the range that no other rank of the replica exchanges, as a view."""
        return self.section.domain.within(values, self.section.levels.optimizer, self.section.domain.depth)


@dataclass
class _Exchange:
    """An exchange that has begun; `sent` are the own parts of changes, then of means.

    After step `turn` the second collective is launched. After step `end` the means are merged, with the part `mixing`
    of own parameters.
    """

    units: list[int]
    chosen: list[_Outer]
    sent: list[torch.Tensor]
    running: list[Iterator[Sequence[torch.Tensor]]]
    turn: int
    end: int
    mixing: float


class LocalSgdUpdate(Update):
    """Steps elementwise optimizers on each replica, and exchanges parameters between replicas.

    Raises ConflictError if the plan offloads state, ranks have parameters of their own, or the optimizer needs whole
    tensors.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        segments: SegmentUpdate,
        replicas: Replicas,
        settings: LocalSGD,
        accountant: Accountant,
    ) -> None:
        super().__init__(optimizer, [segments])
        self._segments, self._replicas, self._settings, self._accountant = segments, replicas, settings, accountant
        self._outer: dict[int, list[_Outer]] = {}  # by unit
        self._of_section: dict[int, _Outer] = {}
        self._places: dict[int, int] = {}  # first element in the master weights, by `id` of a segment
        self._diverged: set[int] = set()  # units
        self.share: Callable[[], float] | None = None  # of this replica in the mean, in multiples of an equal one
        self._planning = False  # each step exchanges the largest fragment
        self._own_values: dict[str, torch.Tensor] = {}  # other than the agreed ones, until they are published
        self._exchange: _Exchange | None = None
        self._hold = functools.partial(accountant.hold, Category.BUFFERS)

    # -- building ----------------------------------------------------------------------------------------------------

    @override
    def bind(self, own_gradient: Any, written: Any) -> None:
        super().bind(own_gradient, written)
        self._places = {id(parameter): where.start for _, where, parameter in self._segments.segments}
        hold, outer = functools.partial(self._accountant.hold, Category.OPTIMIZER), self._settings.outer_optimizer
        for unit in self._segments.units:
            for place, section in enumerate(unit.trainable):
                assert section.master is not None
                name, size = f"{unit.index}.{unit.name}.{place}", section.layout.shard
                agreed = section.master.detach().to(torch.float32, copy=True)
                momentum = torch.zeros_like(agreed) if outer.decay else None
                mean, numel = self._mean(name, size, agreed.device)
                one = _Outer(name, section, agreed, momentum, mean, numel)
                for tensor in (agreed, momentum, *mean.errors.values()):
                    if tensor is not None:
                        hold(tensor)
                self._outer.setdefault(unit.index, []).append(one)
                self._of_section[id(section)] = one
        if self._settings.fragments > len(self._outer):
            raise ConflictError(
                f"local_sgd.fragments: is {self._settings.fragments}, and the model has {len(self._outer)} units with "
                "trained parameters, of which each fragment needs one. Lower one of fragments and reduce_bucket_size"
            )
        if self._replicas.count > 1:
            self._replicas.across.connect("reduce")

    def _mean(self, name: str, size: int, device: torch.device) -> tuple[BlockMean, int]:
        across, bits = self._replicas.across, self._settings.quantize_bits
        numel = size + -size % across.world
        if bits is None or across.world == 1:
            return ExactMean(across, name), numel
        return QuantizedMean(across, numel, BlockCode(bits, hold=self._hold), name, device), numel

    # -- exchange ----------------------------------------------------------------------------------------------------

    def due(self, step: int | None) -> list[int]:
        """Return the units whose replicas exchange after step `step` (from 1; None: all); the same on all ranks."""
        if step is None:
            return list(self._outer)
        every, count, units = self._settings.sync_every, self._settings.fragments, list(self._outer)
        parts = [units[number::count] for number in range(count)]  # not runs of units, which differ in size more
        if self._planning:
            return max(parts, key=lambda part: sum(one.numel for unit in part for one in self._outer[unit]))
        return [u for n, part in enumerate(parts) if (step + n * every // count) % every == 0 for u in part]

    @override
    def begin_averaging(self) -> bool:
        self._planning = True
        return True

    @property
    def diverged(self) -> bool:
        """Whether replicas have stepped since an exchange of some unit."""
        return bool(self._diverged)

    @override
    def _step(self, factor: float | torch.Tensor) -> None:
        super()._step(factor)
        self._diverged.update(self._outer)

    def acts(self, step: int | None) -> bool:
        """Return True if replicas begin, continue or end an exchange after a step; the same on all ranks."""
        running = self._exchange
        return bool(self.due(step)) or (running is not None and (step == running.turn or step == running.end))

    @torch.no_grad()
    def begin_exchange(self, units: list[int], step: int | None) -> list[int]:
        """Exchange units that are due (all ranks call); return them, for `publish`, if they have changed."""
        chosen = [one for unit in units for one in self._outer[unit]]
        if not chosen:
            return []
        self._check_alike(chosen)
        sent = []
        for one in chosen:
            assert one.section.master is not None
            change = one.own_part(one.agreed) - one.own_part(one.section.master.detach())
            if self.share is not None:
                change.mul_(self.share())
            sent.append(change if change.numel() == one.numel else pad(change, (0, one.numel - change.numel())))
            self._hold(sent[-1])
        running = advance([one.mean.average(own) for one, own in zip(chosen, sent, strict=True)], self._hold)
        steps = 0 if step is None else self._settings.overlap_steps
        turn, end = (step or 0) + (steps + 1) // 2, (step or 0) + steps
        self._exchange = _Exchange(units, chosen, sent, running, turn, end, self._settings.mixing if steps else 0.0)
        return [] if steps else self._merge(self._exchange)

    def continue_exchange(self, units: list[int], step: int | None) -> list[int]:
        """Go on with an exchange that has begun, and end it if others are due; as `begin_exchange` (all ranks call)."""
        running = self._exchange
        if running is not None and (units or step == running.end):
            return self._merge(running)
        if running is not None and step == running.turn:
            running.running = advance(running.running, self._hold)
        return []

    @torch.no_grad()
    def _merge(self, exchange: _Exchange) -> list[int]:
        """Step the outer optimizer, and return the units of the exchange."""
        outer = self._settings.outer_optimizer
        self.settle()
        self._exchange = None
        gathers = map(self._gathered, exchange.chosen, exchange.sent)
        ahead = next(gathers)
        for one in exchange.chosen:
            (gradient, handle), ahead = ahead, next(gathers, ahead)  # one all-gather runs while the one before is used
            assert one.section.master is not None
            if handle is not None:
                handle.wait()
            if one.momentum is not None:
                one.momentum.mul_(outer.decay).add_(gradient)
                gradient = gradient.add_(one.momentum, alpha=outer.decay) if outer.type == "Nesterov" else one.momentum
            one.agreed.sub_(gradient, alpha=outer.rate)
            if exchange.mixing:
                own = one.section.master.detach().to(one.agreed.dtype)
                self._own_values[one.name] = own.lerp_(one.agreed, 1 - exchange.mixing)
        return exchange.units

    def _gathered(self, one: _Outer, mean: torch.Tensor) -> tuple[torch.Tensor, Handle | None]:
        """Return the mean of all master weights that this rank has, with the all-gather that completes it."""
        own = mean[: one.own_part(one.agreed).numel()]
        if own.numel() == one.agreed.numel():
            return own, None
        whole = torch.empty_like(one.agreed)
        self._hold(whole)
        own = one.own_part(whole).copy_(own)
        return whole, self._replicas.own.all_gather([(whole, own)], one.name, kind="reduce")

    def settle(self) -> None:
        """Wait for the means of an exchange that has begun, which are merged at their step (all ranks call)."""
        while self._exchange is not None and self._exchange.running:
            self._exchange.running = advance(self._exchange.running, self._hold)

    def _check_alike(self, chosen: Iterable[_Outer]) -> None:
        """Raise DesyncError if options of parameter groups, or agreed parameters, differ between replicas."""
        across, number = self._replicas.across, self._replicas.number
        if across.imagined or across.world == 1:
            return
        options = [
            sorted((name, value) for name, value in group.items() if isinstance(value, (bool, int, float, str, tuple)))
            for group in self.optimizer.param_groups
        ]
        sums = torch.stack([one.agreed.view(torch.int32).sum() for one in chosen]).tolist()  # of bits, in any order
        for what, value in (("options of the optimizer's parameter groups", options), ("agreed parameters", sums)):
            texts = across.fingerprints(repr(value), "replicas")
            others = [other for other, text in enumerate(texts) if text != texts[0]]
            if others:
                raise DesyncError(
                    f"local_sgd: {what} differ between replicas: {others} have others than 0, and this one ({number}) "
                    f"has {value!s:.300}. Set them from values that all replicas have"
                )

    # -- agreed values -----------------------------------------------------------------------------------------------

    @override
    def publish(self, unit: Unit) -> None:
        self._diverged.discard(unit.index)
        if self._exchange is not None and unit.index in self._exchange.units and not self._own_values:
            self.settle()  # of parameters that have been replaced
            self._exchange = None
        for one in self._outer.get(unit.index, ()):
            assert one.section.master is not None
            own = self._own_values.pop(one.name, None)
            one.section.master.detach().copy_(one.agreed if own is None else own)
            if own is not None:
                self._diverged.add(unit.index)
        super().publish(unit)

    @override
    def refresh(self, unit: Unit, loaded: Collection[int] = ()) -> None:
        self.check_agreed(f"parameters of unit {unit.name!r}")
        super().refresh(unit, loaded)
        for one in self._outer.get(unit.index, ()):
            assert one.section.master is not None
            one.agreed.copy_(one.section.master.detach())

    @override
    def check_agreed(self, what: str) -> None:
        if self._diverged:
            raise UsageError(
                f"{what} changed while replicas differ: they have made steps of their own since they last exchanged. "
                "Call engine.synchronize_replicas() on all ranks before changing them"
            )

    @override
    def check_movable(self, what: str) -> None:
        raise UsageError(f"{what}: with local_sgd the optimizer's state stays on the device. Leave local_sgd out")

    @override
    def master_pieces(self, index: int) -> list[tuple[int, int, torch.Tensor]]:
        return [(start, stop, one.agreed[places]) for start, stop, one, places in self._pieces(index)]

    @override
    def state_pieces(self, index: int, key: str) -> list[tuple[int, int, torch.Tensor]]:
        if key != MOMENTUM:
            return super().state_pieces(index, key)
        pieces = self._pieces(index)
        return [(start, stop, one.momentum[at]) for start, stop, one, at in pieces if one.momentum is not None]

    def _pieces(self, index: int) -> list[tuple[int, int, _Outer, slice]]:
        found = []
        for section, piece, parameter in self._segments.runs.get(index, ()):
            first = self._places[id(parameter)] + piece.offset
            places = slice(first, first + piece.stop - piece.start)
            found.append((piece.start, piece.stop, self._of_section[id(section)], places))
        return found

    @override
    def state(self, index: int) -> Mapping[str, Any]:
        momenta = [one.momentum for _, _, one, _ in self._pieces(index) if one.momentum is not None]
        return {**super().state(index), **({MOMENTUM: momenta[0]} if momenta else {})}

    @override
    def clear_state(self) -> None:
        super().clear_state()
        for one in self._of_section.values():
            for tensor in (one.momentum, *one.mean.errors.values()):
                if tensor is not None:
                    tensor.zero_()

    @override
    def cut_by(self, shared: Mapping[int, Any]) -> None:
        super().cut_by(shared)
        self._places = {id(parameter): where.start for _, where, parameter in self._segments.segments}

    # -- state of single replicas in checkpoints ---------------------------------------------------------------------

    def layout(self) -> dict[str, Any]:
        """Return the facts of a checkpoint by which layouts are compared."""
        sections = [(one.name, one.section.layout.numel, one.agreed.numel()) for one in self._of_section.values()]
        text = repr((self._replicas.count, self._replicas.own.world, sections))
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return {"replicas": self._replicas.count, "agreed": not self._diverged, "layout": digest}

    @override
    def rank_state(self) -> dict[str, Any] | None:
        self.settle()
        running = self._exchange
        inner = [self.optimizer.state.get(parameter, {}) for _, _, parameter in self._segments.segments]
        chosen = [one for unit in sorted(self._diverged) for one in self._outer[unit]]
        return {
            **self.layout(),
            "values": {one.name: one.section.master for one in chosen},
            "inner": [dict(state) for state in inner] if self._replicas.number else [],
            "errors": {one.name: one.mean.errors for one in self._of_section.values() if one.mean.errors},
            "exchange": None
            if running is None
            else {
                "units": running.units,
                "end": running.end,
                "mixing": running.mixing,
                "means": {one.name: mean for one, mean in zip(running.chosen, running.sent, strict=True)},
            },
        }

    @override
    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        if state is None or state.get("layout") != self.layout()["layout"]:
            return False
        segments = self._segments.segments
        if len(state["inner"]) not in (0, len(segments)):
            raise CheckpointError(
                f"the optimizer state of replica {self._replicas.number} has {len(state['inner'])} parts, and the "
                f"engine {len(segments)}: parameters have other step counts. Pass load_optimizer_states=False"
            )
        for (_, _, parameter), saved in zip(segments, state["inner"], strict=False):
            known = self.optimizer.state[parameter]
            for name, value in saved.items():
                if isinstance(value, torch.Tensor) and isinstance(known.get(name), torch.Tensor):
                    known[name].copy_(value)
                else:
                    known[name] = value.to(parameter.device) if isinstance(value, torch.Tensor) else value
        for one in self._of_section.values():
            saved = state["errors"].get(one.name, {})
            for name, error in one.mean.errors.items():  # zero before, and without one of another `quantize_bits`
                if name in saved and saved[name].shape == error.shape:
                    error.copy_(saved[name])
        self._own_values = dict(state["values"])
        self.settle()
        self._exchange = None
        if (saved := state.get("exchange")) is not None:
            chosen = [one for unit in saved["units"] for one in self._outer[unit]]
            sent = [saved["means"][one.name].to(one.agreed.device, copy=True) for one in chosen]
            self._exchange = _Exchange(saved["units"], chosen, sent, [], saved["end"], saved["end"], saved["mixing"])
            for mean in sent:
                self._hold(mean)
        self._segments.hold_state()
        return True

    @property
    def has_own_values(self) -> bool:
        """Whether a checkpoint has brought this replica's own parameters, which are to be published."""
        return bool(self._own_values)


def check_local(domains: Domains, plan: Plan, stepping: Stepping) -> None:
    """Raise ConflictError for what local SGD cannot have."""
    if plan.where != ALL_ON_DEVICE:
        raise ConflictError(
            "local_sgd: state cannot be elsewhere than on the device. Remove offload_optimizer and "
            "offload_param from zero_optimization"
        )
    if domains.others:
        raise ConflictError(
            "local_sgd: parameters that only some ranks share (declare_part) are not supported. Leave local_sgd out"
        )
    if stepping.whole or stepping.communicates:
        raise ConflictError(
            "local_sgd: needs an optimizer with one value of state per element (SGD, Adam, AdamW, Lion, Adagrad), and "
            "this one steps whole tensors, or communicates itself. Take another one"
        )
