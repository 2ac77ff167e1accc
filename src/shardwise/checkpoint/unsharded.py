"""Unsharded parameters and buffers of all ranks, one unit at a time; the caller decides what to keep.

Ranks of one pass group unshard their units together. If they have different tensors, or boxes of them, each box is sent
when its unit is unsharded, to all ranks or the first, and joined there. Pass groups with other units follow in turn:
the first rank of each group sends its tensors on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from shardwise import boxes
from shardwise.checkpoint.agree import collective_step, on_first_rank
from shardwise.checkpoint.collect import all_buffers, extra_states, first_holders, within
from shardwise.checkpoint.manifest import dtype_of, name_of, outline
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.selection import EXTRA, extra_name
from shardwise.comm.communicator import Communicator
from shardwise.errors import CheckpointError
from shardwise.registry import HeldPart, paste, taken

_LABEL = "weights"


@dataclass(frozen=True)
class UnshardedTensor:
    """An unsharded parameter or buffer, its further names, and the dtype in which modules compute with it."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


Use = Callable[[UnshardedTensor, torch.Tensor], None]
"""Called with a tensor and its unsharded values."""


class UnshardedWeights:
    """Unsharded parameters and buffers of all ranks, on all ranks or the first (`to_first`). Methods are collectives.

    With `masters`, which needs `to_first`, values of parameters are master weights, if there are any; `hold` accounts
    buffers.

    Raises CheckpointError if boxes do not partition a tensor, or if only some ranks have modules with extra state.

    Attributes:
        parameters: those of the pass group by name, in the order of its units; with `exclude_frozen` those that require
            a gradient on some rank.
        buffers: those of the pass group by name.
        groups: for each pass group its parameters and then buffers, in order; None for those that another rank
            receives only.
        own: number of this rank's pass group.
        tensors: all tensors that this rank receives, by name, with all further names.
    """

    def __init__(
        self,
        model: CheckpointedModel,
        *,
        exclude_frozen: bool = False,
        to_first: bool = False,
        masters: bool = False,
        hold: Callable[[torch.Tensor], None] = lambda tensor: None,
    ) -> None:
        self._model, self._to_first, self._hold = model, to_first, hold
        comm, group = model.replica, model.pass_group
        self._receives = not to_first or comm.rank == 0
        self._first_ranks, self.own = [0], 0
        self._masters: _MasterWeights | None = None
        self.groups: list[list[UnshardedTensor | None]] = []
        if group.world == comm.world:
            self._collect(exclude_frozen, masters)
        else:
            self._compare(exclude_frozen, masters)
        self.tensors: dict[str, UnshardedTensor] = {}
        for tensor in (tensor for some in self.groups for tensor in some if tensor is not None):
            known = self.tensors.setdefault(tensor.name, tensor)
            aliases = tuple(dict.fromkeys((*known.aliases, *tensor.aliases)))
            self.tensors[tensor.name] = replace(known, aliases=aliases)

    def _collect(self, exclude_frozen: bool, masters: bool) -> list[UnshardedTensor]:
        self.parameters = unsharded_parameters(self._model, exclude_frozen=exclude_frozen)
        if masters:
            self._masters = _MasterWeights(self._model, self.parameters, self._hold)
            self.parameters = self._masters.parameters
        self.buffers = dict(sorted(gathered_buffers(self._model).items()))
        plain = [UnshardedTensor(n, (), tuple(b.shape), b.dtype) for n, b in self.buffers.items()]
        mine = [*self.parameters.values(), *plain]
        self.groups = [list(mine)]
        return mine

    def _compare(self, exclude_frozen: bool, masters: bool) -> None:
        """Exchange the numbers of tensors, and send the descriptions to the ranks that receive the tensors."""
        comm = self._model.replica
        leads = self._model.pass_group.rank == 0
        with collective_step(comm, "gathering whole weights") as step:
            mine = self._collect(exclude_frozen, masters)
            _refuse([name for name, _ in extra_states(self._model.module)])
            first = comm.members.index(self._model.pass_group.members[0])
            step.local = [first, len(mine)]
        counts = dict(step.gathered)
        self._first_ranks = sorted(counts)
        self.own = self._first_ranks.index(first)
        described = [[t.name, t.aliases, t.shape, name_of(t.dtype)] for t in mine] if leads else None
        known = on_first_rank(comm, described, _LABEL) if self._to_first else comm.exchange(described, _LABEL)
        for number, rank in enumerate(self._first_ranks):
            group: list[UnshardedTensor | None] = [None] * counts[rank]
            if self._receives:
                group = [UnshardedTensor(n, tuple(also), tuple(s), dtype_of(d)) for n, also, s, d in known[rank]]
            self.groups[number:] = [list(mine) if number == self.own else group]

    def for_each(self, use: Use, what: str) -> None:
        """Call `use` with each tensor and its values, each name once, on the ranks that receive them.

        A value keeps the memory of its unit alive until `use` returns. All ranks raise an exception of `use` at the
        end of the loop, named `what`, because all take part in it.
        """
        seen: set[str] = set()
        failures: list[Exception] = []
        for number, (first, listed) in enumerate(zip(self._first_ranks, self.groups, strict=True)):
            left = iter(listed)

            def deliver(
                name: str | None,
                values: torch.Tensor | None,
                first: int = first,
                left: Iterator[UnshardedTensor | None] = left,
            ) -> None:
                tensor = next(left)
                assert name is None or (tensor is not None and tensor.name == name), (tensor, name)
                if not self._to_first and tensor is not None and tensor.name in seen:
                    return  # known to all ranks
                if len(self.groups) > 1:
                    values = self._sent_on(tensor, values, first)
                if values is not None and tensor is not None and tensor.name not in seen:
                    seen.add(tensor.name)
                    try:
                        if not failures:
                            use(self.tensors[tensor.name], values)
                    except Exception as error:
                        failures.append(error)

            if number == self.own:
                self._own_values(deliver)
            else:
                for _ in listed:
                    deliver(None, None)
        with collective_step(self._model.comm, what):
            if failures:
                raise failures[0]

    def _own_values(self, deliver: Callable[[str, torch.Tensor | None], None]) -> None:
        if self._masters is not None:
            self._masters.for_each(deliver)
        else:
            for tensor, values in _gathered(self._model, self.parameters, to_first=self._to_first):
                deliver(tensor.name, values)
                del values
        keep = not self._to_first or self._model.pass_group.rank == 0
        for name, buffer in self.buffers.items():
            deliver(name, buffer.detach() if keep else None)

    def _sent_on(self, tensor: UnshardedTensor | None, values: torch.Tensor | None, first: int) -> torch.Tensor | None:
        """Send a tensor from the first rank of its pass group to the ranks that receive it."""
        model = self._model
        described = None if tensor is None else (tensor.shape, tensor.dtype)
        own = None if values is None else values.to(model.device)
        return _sent(model.replica, own, first, described, model.device, _LABEL, to_first=self._to_first)


class _MasterWeights:
    """Master weights of a pass group, one tensor at a time on its first rank. `parameters` have their dtypes there."""

    def __init__(
        self, model: CheckpointedModel, wanted: Mapping[str, UnshardedTensor], hold: Callable[[torch.Tensor], None]
    ) -> None:
        self._model, self._hold = model, hold
        self._runs: dict[str, list[tuple[Any, int, int, torch.Tensor]]] = {}
        values, ranges = model.value_runs(), model.owned_ranges()
        for tensor in model.registry:
            if tensor.name in wanted:
                with model.materialized(tensor.index):
                    runs = within(values.get(tensor.index, []), ranges.get(tensor.index, []))
                self._runs.setdefault(tensor.name, []).extend((model.box_of(tensor), *run) for run in runs)
        local = {
            name: [name_of(runs[0][3].dtype), [run[:3] for run in runs]] for name, runs in self._runs.items() if runs
        }
        self._of_ranks = on_first_rank(model.pass_group, local, _LABEL)
        dtypes = {name: dtype_of(dtype) for held in self._of_ranks for name, (dtype, _) in held.items()}
        self.parameters = {name: replace(t, dtype=dtypes.get(name, t.dtype)) for name, t in wanted.items()}

    def for_each(self, deliver: Callable[[str, torch.Tensor | None], None]) -> None:
        nothing = torch.empty(0, device="cpu")

        def use(names: Sequence[str]) -> None:
            for name in names:
                deliver(name, self._gather(self.parameters[name]))

        # Ranks may fetch different numbers of tensors at a time; the order, that of collectives, is the same.
        first = {name: runs[0][3] for name, runs in self._runs.items() if runs}
        self._model.fetch([(name, first.get(name, nothing)) for name in self.parameters], use)

    def _gather(self, tensor: UnshardedTensor) -> torch.Tensor | None:
        comm, device = self._model.pass_group, self._model.device
        own = [values.to(device).reshape(-1).view(torch.uint8) for *_, values in self._runs.get(tensor.name, ())]
        given = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *own])
        runs = [held.get(tensor.name, (None, ()))[1] for held in self._of_ranks]
        counts = [sum(stop - start for _, start, stop in some) * tensor.dtype.itemsize for some in runs]
        arrived = torch.empty(sum(counts), dtype=torch.uint8, device=device)
        self._hold(given)
        self._hold(arrived)
        sent = [given.numel(), *[0] * (comm.world - 1)]
        comm.all_to_all(arrived, given, counts or [0] * comm.world, sent, tensor.name).wait()
        del given, own
        if comm.rank != 0:
            return None
        flat, outer, place = arrived.view(tensor.dtype), boxes.whole(tensor.shape), 0
        every = [run for some in runs for run in some]
        if not every and tensor.shape:  # a copy of a tensor that another group delivers first
            return torch.full(tensor.shape, torch.nan, dtype=torch.float32, device=device).to(tensor.dtype)
        if [start for _, start, _ in every] == [0, *(stop for *_, stop in every[:-1])] and all(
            box is None for box, *_ in every
        ):
            return flat.view(tensor.shape)  # the ranges of ranks follow one another
        unsharded = torch.empty(flat.numel(), dtype=tensor.dtype, device=device)
        self._hold(unsharded)
        for box, start, stop in every:
            part, held = flat[place : place + stop - start], outer if box is None else boxes.region(box)
            for patch in boxes.overlap(held, start, stop, outer, 0, flat.numel()):
                into = unsharded.as_strided(patch.shape, patch.target_strides, patch.target)
                into.copy_(taken(part, patch).view(patch.shape))
            place += stop - start
        return unsharded.view(tensor.shape)


def unsharded_parameters(model: CheckpointedModel, *, exclude_frozen: bool) -> dict[str, UnshardedTensor]:
    """Return all ranks' parameters to unshard, by name, in the order of the units; with `exclude_frozen` those that
    require a gradient on some rank. A collective. Raises CheckpointError if boxes do not partition a tensor.
    """
    pairs = [pair for unit in model.units for pair in zip(unit.tensors, unit.parameters, strict=True)]
    own = [tensor.name for tensor, parameter in pairs if parameter.requires_grad or not exclude_frozen]
    wanted = set(own)
    if is_divided(model):
        with collective_step(model.pass_group, "gathering whole weights") as step:
            step.local = own
        wanted.update(*step.gathered)
    found: dict[str, UnshardedTensor] = {}
    parts: dict[str, dict[boxes.Region, None]] = {}
    for part in (part for some in _new_parts(model) for part in some):
        if part.name in wanted:
            known = found.pop(part.name, UnshardedTensor(part.name, (), part.shape, part.dtype))
            aliases = dict.fromkeys((*known.aliases, *part.aliases))
            found[part.name] = replace(known, aliases=tuple(aliases))
            parts.setdefault(part.name, {})[part.box] = None
    for name, held in parts.items():
        wrong = boxes.misfit(found[name].shape, held)
        if wrong is not None:
            raise CheckpointError(
                f"parameter {name!r}: element {list(wrong[0])} of {list(found[name].shape)} is on {wrong[1]} ranks or "
                "groups of ranks, so there is no whole tensor; see shardwise.declare_part"
            )
    return found


def is_divided(model: CheckpointedModel) -> bool:
    """Return True if ranks have different tensors, or boxes of them; the same on all ranks."""
    return any(model.parts_of(tensor.index) for tensor in model.registry)


def _new_parts(model: CheckpointedModel) -> Iterator[list[HeldPart]]:
    """Yield for each parameter, unit by unit, the boxes at its position that are new."""
    seen: set[tuple[str, boxes.Region]] = set()
    everywhere = tuple(range(model.pass_group.world))
    for unit in model.units:
        for tensor in unit.tensors:
            shape = tensor.global_shape
            entire = HeldPart(tensor.name, tensor.aliases, shape, tensor.dtype, boxes.whole(shape), everywhere)
            parts = [part for part in model.parts_of(tensor.index) or [entire] if part.numel or part.whole]
            new = [part for part in parts if (part.name, part.box) not in seen]
            seen.update((part.name, part.box) for part in new)
            yield new


def _gathered(
    model: CheckpointedModel, wanted: Mapping[str, UnshardedTensor], *, to_first: bool
) -> Iterator[tuple[UnshardedTensor, torch.Tensor | None]]:
    """Yield the wanted parameters of the pass group in one order on its ranks, with unsharded values on all of them or
    the first (`to_first`), else None. A collective of the pass group.
    """
    waiting: dict[str, torch.Tensor | None] = {}
    missing: dict[str, int] = {}  # elements
    new = _new_parts(model)
    for unit in model.units:
        parts = [[part for part in next(new) if part.name in wanted] for _ in unit.tensors]
        if not any(parts):
            continue
        gathered = model.gather_parts(unit.parameters)
        try:
            for parameter, some in zip(unit.parameters, parts, strict=True):
                for part in some:
                    values = _received(model, part, parameter.detach(), to_first=to_first)
                    left = missing.pop(part.name, torch.Size(part.shape).numel()) - part.numel
                    if not part.whole:
                        values = waiting[part.name] = _joined(waiting.get(part.name), part, values)
                    if left:
                        missing[part.name] = left
                    else:
                        waiting.pop(part.name, None)
                        yield wanted[part.name], values
                    del values
        finally:
            model.put_parts_back(unit.parameters, gathered, None)


def _received(model: CheckpointedModel, part: HeldPart, own: torch.Tensor, *, to_first: bool) -> torch.Tensor | None:
    """Return a box that some ranks have, on all ranks or the first only; its first owner sends it."""
    comm = model.pass_group
    if 0 in part.ranks if to_first else len(part.ranks) == comm.world:
        return own if not to_first or comm.rank == 0 else None
    described = boxes.sizes(part.box), part.dtype
    return _sent(comm, own, part.ranks[0], described, model.device, part.name, to_first=to_first)


def _sent(
    comm: Communicator,
    own: torch.Tensor | None,
    sender: int,
    described: tuple[tuple[int, ...], torch.dtype] | None,
    device: torch.device,
    label: str,
    *,
    to_first: bool,
) -> torch.Tensor | None:
    """Send a tensor of rank `sender` to all ranks, or to the first (`to_first`); others return None. A collective.
    `described` is its shape and dtype, on the ranks that receive the tensor.
    """
    sends, receives = comm.rank == sender, not to_first or comm.rank == 0
    if to_first and sender == 0:
        return own
    nothing = torch.empty(0, dtype=torch.uint8, device=device)
    given = nothing if own is None or not sends else own.detach().contiguous()
    arrived = nothing
    if receives:
        assert described is not None
        arrived = given if sends else torch.empty(described[0], dtype=described[1], device=device)
    if not to_first:
        comm.broadcast(arrived, sender, label).wait()
        return arrived
    sizes = [arrived.nbytes * (rank == sender) for rank in range(comm.world)]
    flat, sent = arrived.reshape(-1).view(torch.uint8), given.reshape(-1).view(torch.uint8)
    comm.all_to_all(flat, sent, sizes, [sent.numel(), *[0] * (comm.world - 1)], label).wait()
    return arrived if receives else None


def _joined(whole: torch.Tensor | None, part: HeldPart, values: torch.Tensor | None) -> torch.Tensor | None:
    if values is None:
        return None
    if whole is None:
        whole = torch.empty(part.shape, dtype=part.dtype, device=values.device)
    paste(values, part.box, whole)
    return whole


def gathered_buffers(model: CheckpointedModel) -> dict[str, torch.Tensor]:
    """Return the persistent buffers of the module, and those of other ranks only. A collective. Raises CheckpointError
    if only some ranks have modules with `get_extra_state`, because that cannot be sent.
    """
    found = dict(all_buffers(model.module))
    gathered = _elsewhere(model)
    homes, extra = first_holders(gathered, "buffers"), first_holders(gathered, "extra")
    _refuse([name for name in extra if not all(name in entry["extra"] for entry in gathered)])
    for name, rank in homes.items():
        if all(name in entry["buffers"] for entry in gathered):
            continue
        dtype, shape = gathered[rank]["buffers"][name]
        own, described = found.get(name), (tuple(shape), dtype_of(dtype))
        values = _sent(model.pass_group, own, rank, described, model.device, name, to_first=False)
        assert values is not None
        found.setdefault(name, values)
    return found


def _refuse(extra: list[str]) -> None:
    if extra:
        raise CheckpointError(
            f"extra state of modules that not all ranks have cannot be gathered: {outline(extra)}; save a checkpoint, "
            "and export that"
        )


def _elsewhere(model: CheckpointedModel) -> list[dict[str, Any]]:
    """Return each rank's buffers and extra state if ranks may have different modules, else nothing. A collective."""
    if not is_divided(model):
        return []
    with collective_step(model.pass_group, "comparing modules") as step:
        held = {name: [name_of(buffer.dtype), list(buffer.shape)] for name, buffer in all_buffers(model.module)}
        step.local = {"buffers": held, "extra": [name for name, _ in extra_states(model.module)]}
    return step.gathered


def state_dict(model: CheckpointedModel, *, exclude_frozen: bool = False, to_first: bool = False) -> dict[str, Any]:
    """Return the module's unsharded state dict on the CPU, under the names of the user's module; with `to_first` other
    ranks than the first get an empty one. A collective. `exclude_frozen` leaves out parameters that do not require a
    gradient. Every name of a tied parameter is included, because `load_state_dict` of a plain module requires them.
    """
    found: dict[str, Any] = {}

    def keep(tensor: UnshardedTensor, values: torch.Tensor) -> None:
        copied = values.cpu() if values.device.type != "cpu" else values.clone()
        found.update(dict.fromkeys((tensor.name, *tensor.aliases), copied))

    UnshardedWeights(model, exclude_frozen=exclude_frozen, to_first=to_first).for_each(keep, "gathering a state dict")
    if to_first and model.comm.rank != 0:
        return {}
    found.update((extra_name(name), module.get_extra_state()) for name, module in extra_states(model.module))
    return {name: found[name] for name in _in_order(model.module, found)}


def _in_order(module: nn.Module, found: Iterable[str]) -> list[str]:
    """Return names in the order of a plain module's state dict; those of other ranks follow their predecessors."""
    places = {name: place for place, name in enumerate(_names(module))}
    keys: dict[str, tuple[int, bool]] = {}
    last = -1
    for name in found:
        last = places.get(name, last)
        keys[name] = last, name not in places
    return sorted(keys, key=keys.__getitem__)


def _names(module: nn.Module) -> Iterator[str]:
    for prefix, child in module.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        yield from (dot + key for key in (*child._parameters, *child._buffers, EXTRA))
