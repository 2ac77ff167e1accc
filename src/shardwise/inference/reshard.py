"""Weights sent from the ranks that train a model to ranks that hold it otherwise: a plan as a value, and its execution.

    trainer ranks    [a a a a][b b b b]      each has a range of every tensor (ZeRO), or of its part of it
    rollout ranks    [a b][a b]              each has a part of every tensor (tensor parallelism)

The plan is found through directories: each rank describes its own tensors to the ranks that their names are assigned
to, which match holders and receivers of a tensor and answer both. So what a rank sends, receives and stores grows with
its own tensors, and with a few bytes for each rank.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from shardwise.boxes import Patch, Region, overlap, region, sizes, whole
from shardwise.checkpoint.manifest import dtype_of, name_of, outline
from shardwise.checkpoint.protocols import CheckpointedModel, Run
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.errors import UsageError
from shardwise.registry import Registry, taken

LIMIT = 64 << 20
"""Bytes that a rank sends or receives at a time, unless one tensor has more."""


@dataclass(frozen=True)
class Holding:
    """Elements `[start, stop)` of a region of a tensor, which a rank has (`sends`) or needs.

    `shape` is that of the tensor; `dtype` that of the values (`float32`), by whose bytes rounds are bounded.
    """

    name: str
    shape: tuple[int, ...]
    box: Region
    start: int
    stop: int
    dtype: str
    sends: bool


@dataclass(frozen=True)
class Transfer:
    """Values that go to or come from `peer`: those that two ranks' holdings of a tensor have in common."""

    peer: int
    source: Holding
    target: Holding

    @property
    def name(self) -> str:
        """Name of the tensor."""
        return self.target.name

    def patches(self) -> list[Patch]:
        """Return the common elements, from the source's range to that of the target, in one order on both ranks."""
        source, target = self.source, self.target
        return list(overlap(source.box, source.start, source.stop, target.box, target.start, target.stop))

    @property
    def numel(self) -> int:
        """Number of values."""
        return sum(patch.numel for patch in self.patches())

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, in the target's dtype."""
        return self.numel * dtype_of(self.target.dtype).itemsize

    @property
    def room(self) -> int:
        """Bytes in a message, so that values of any dtype are aligned."""
        return -(-self.nbytes // 8) * 8


@dataclass(frozen=True)
class ReshardPlan:
    """What this rank sends and receives, in order of names; all names up to each of `rounds` go together."""

    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    rounds: tuple[str, ...] = ()


def match(holdings: Sequence[tuple[int, Holding]]) -> tuple[list[tuple[int, int, Holding, Holding]], list[str]]:
    """Match holders and receivers of tensors.

    Args:
        holdings: (rank, holding). Of equal holdings the first rank's is sent.

    Returns:
        (sender, receiver, source, target) of each transfer, and sentences on tensors that are incomplete.

    Example: rank 1 needs the right half of what rank 0 has.
        >>> held = Holding("w", (2, 4), ((0, 2), (0, 4)), 0, 8, "float32", True)
        >>> part = Holding("w", (2, 4), ((0, 2), (2, 4)), 0, 4, "float32", False)
        >>> match([(0, held), (1, part)])[0] == [(0, 1, held, part)]
        True
    """
    senders: dict[str, dict[Any, tuple[int, Holding]]] = {}
    for rank, one in holdings:
        if one.sends:
            senders.setdefault(one.name, {}).setdefault((one.box, one.start, one.stop), (rank, one))
    found, problems = [], []
    for rank, target in holdings:
        if target.sends:
            continue
        missing = target.stop - target.start
        for sender, source in senders.get(target.name, {}).values():
            if source.shape != target.shape:
                problems.append(
                    f"{target.name} has shape {list(source.shape)}, and {list(target.shape)} on rank {rank}"
                )
                missing = 0
                break
            common = Transfer(sender, source, target).numel
            if common:
                found.append((sender, rank, source, target))
            missing -= common
        if missing:
            problems.append(f"{target.name}: rank {rank} lacks {missing} of {target.stop - target.start} values")
    return found, problems


def reshard_plan(comm: Communicator, own: Iterable[Holding], limit: int = LIMIT) -> ReshardPlan:
    """Return this rank's plan, for its holdings (all ranks call).

    Raises a UsageError on all ranks if a receiver's tensor has no holder, or another shape.
    """
    letters: list[list[Any]] = [[] for _ in range(comm.world)]
    for one in own:
        letters[zlib.crc32(one.name.encode()) % comm.world].append(_to_json(one))
    arrived = _exchange(comm, letters)
    pairs, problems = match([(rank, _from_json(row)) for rank, rows in enumerate(arrived) for row in rows])
    wrong = [text for texts in comm.exchange(problems[:4], "reshard_problems") for text in texts]
    if wrong:
        raise UsageError(
            f"weights cannot be sent: {outline(wrong, 3)}. Both sides need the same model; pass rename= where names "
            "of the trainer differ"
        )
    answers: list[list[Any]] = [[] for _ in range(comm.world)]
    for sender, receiver, source, target in pairs:
        both = [_to_json(source), _to_json(target)]
        answers[sender].append([True, receiver, *both])
        answers[receiver].append([False, sender, *both])
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    for rows in _exchange(comm, answers):
        for out, peer, source, target in rows:
            (sends if out else receives).append(Transfer(peer, _from_json(source), _from_json(target)))
    for some in (sends, receives):
        some.sort(key=lambda one: (one.name, one.source.box, one.source.start, one.target.box, one.peer))
    return ReshardPlan(tuple(sends), tuple(receives), _rounds(comm, sends, receives, limit))


def _rounds(comm: Communicator, sends: Sequence[Transfer], receives: Sequence[Transfer], limit: int) -> tuple[str, ...]:
    """Return the last name of each round: the first of those up to which ranks have `limit` bytes."""
    found: list[str] = []
    while True:
        own = [_fitting(some, found[-1] if found else "", limit) for some in (sends, receives)]
        gathered = [row for rows in comm.exchange(own, "reshard_rounds") for row in rows if row[0]]
        if not gathered:
            return tuple(found)
        found.append(min((name for name, more in gathered if more), default=max(name for name, _ in gathered)))


def _fitting(some: Sequence[Transfer], after: str, limit: int) -> tuple[str, bool]:
    """Return the last name after another up to which transfers fit the limit (at least the first), and whether more
    names follow; ("", False) if there are none.
    """
    end, total = "", 0
    for one in some:
        if one.name > after:
            total += one.room
            if total > limit and end and one.name != end:
                return end, True
            end = one.name
    return end, False


def _to_json(one: Holding) -> list[Any]:
    return [one.name, one.shape, one.box, one.start, one.stop, one.dtype, one.sends]


def _from_json(row: Sequence[Any]) -> Holding:
    name, shape, box, start, stop, dtype, out = row
    return Holding(name, tuple(shape), region(box), start, stop, dtype, out)


def _exchange(comm: Communicator, letters: Sequence[Any]) -> list[Any]:
    """Return the JSON values that the ranks have for this rank, in rank order; each has one for every rank."""
    texts = [json.dumps(one).encode() if one else b"" for one in letters]
    if not comm.sends:
        return [json.loads(texts[0] or b"[]")]
    ones = [1] * comm.world
    counts = torch.tensor([len(text) for text in texts], dtype=torch.int64, device=comm.device)
    arriving = torch.empty_like(counts)
    comm.all_to_all(arriving, counts, ones, ones, "reshard_sizes").wait()
    arriving_sizes = [int(size) for size in arriving.tolist()]
    data = torch.frombuffer(bytearray(b"".join(texts) or b" "), dtype=torch.uint8)[: int(counts.sum())].to(comm.device)
    out = torch.empty(sum(arriving_sizes), dtype=torch.uint8, device=comm.device)
    comm.all_to_all(out, data, arriving_sizes, [len(text) for text in texts], "reshard").wait()
    found, here, place = [], bytes(out.cpu().tolist()), 0
    for size in arriving_sizes:
        found.append(json.loads(here[place : place + size] or b"[]"))
        place += size
    return found


# -- execution ---------------------------------------------------------------------------------------------------------


class _Target(NamedTuple):
    holding: Holding
    values: torch.Tensor


class _Values(NamedTuple):
    """Values that a rank sends, on any tier."""

    state: CheckpointedModel
    sources: Mapping[Holding, int | str]
    runs: Mapping[int, Sequence[Run]]
    buffers: Mapping[str, torch.Tensor]

    def fill(self, given: torch.Tensor, out: Sequence[Transfer], places: Sequence[int]) -> None:
        """Write the values of transfers into a message, converted to the receivers' dtypes."""
        wanted: list[tuple[tuple[int, int], torch.Tensor]] = []
        for number, one in enumerate(out):
            key = self.sources[one.source]
            if isinstance(key, str):
                wanted.append(((number, 0), self.buffers[key].detach().reshape(-1)))
            else:
                start, stop = one.source.start, one.source.stop
                first, values = next((a, values) for a, b, values in self.runs[key] if a <= start and stop <= b)
                wanted.append(((number, start - first), values))
        views = dict(wanted)

        def use(keys: Sequence[tuple[int, int]]) -> None:
            for number, start in keys:
                one = out[number]
                values = views[number, start][start:]
                some = given[places[number] : places[number] + one.nbytes].view(dtype_of(one.target.dtype))
                for patch in one.patches():
                    some[: patch.numel].view(patch.shape).copy_(taken(values, patch))
                    some = some[patch.numel :]

        with torch.no_grad():
            self.state.fetch(wanted, use)


class WeightSync:
    """Sends the weights of an engine to models on other ranks, or on the same ones (all ranks of the group create it).

    Args:
        trainer: engine whose weights are sent; None on ranks without one. Master weights are sent, if there are any.
        rollout: `InferenceEngine`, or module, that receives them; None on ranks without one.
        group: process group of all these ranks, or a communicator of them; None: all ranks.
        rename: name of the trainer's tensor -> name in the receivers' models; None as a name leaves the tensor out.

    Attributes:
        plan: what this rank sends and receives (`ReshardPlan`).

    Raises:
        UsageError: a tensor of a receiver has no holder, another shape, or is quantised.

    Example: ranks 0 and 1 train, ranks 2 and 3 generate.
        >>> sync = WeightSync(trainer=engine) if rank < 2 else WeightSync(rollout=engine)  # doctest: +SKIP
        >>> sync()  # after each phase of training, on all four ranks                      # doctest: +SKIP
    """

    def __init__(
        self,
        trainer: Any = None,
        rollout: Any = None,
        group: dist.ProcessGroup | Communicator | None = None,
        rename: Callable[[str], str | None] | None = None,
    ) -> None:
        self._module: nn.Module | None = getattr(rollout, "module", rollout)
        self._rename = rename
        self._trainer = trainer
        targets, _, self._planned = self._tensors()
        if isinstance(group, Communicator):
            self._comm, self._owns = group, False
        else:
            if trainer is not None:
                device = trainer.device
            else:
                device = next((one.values.device for one in targets.values()), torch.device("cpu"))
            self._comm, self._owns = Communicator(group, Ledger(), device, name="weight_sync"), True
        self.plan = reshard_plan(self._comm, self._planned)

    def _tensors(self) -> tuple[Mapping[str, _Target], Mapping[Holding, int | str], list[Holding]]:
        """Return what this rank receives and sends now, and both as holdings."""
        targets = {} if self._module is None else _targets(self._module)
        sources = {} if self._trainer is None else self._sources()
        return targets, sources, [*(one.holding for one in targets.values()), *sources]

    def _sources(self) -> dict[Holding, int | str]:
        """Return what this rank sends: the number of a parameter, or the name of a buffer."""
        state: CheckpointedModel = self._trainer.sharded.state
        found: dict[Holding, int | str] = {}
        dtypes = {index: runs[0][2].dtype for index, runs in state.value_runs().items() if runs}
        for index, ranges in state.owned_ranges().items():
            tensor = state.registry[index]
            name = tensor.name if self._rename is None else self._rename(tensor.name)
            if name is None:
                continue
            box = state.box_of(tensor) or whole(tensor.global_shape)
            for start, stop in ranges:
                if start < stop:
                    dtype = name_of(dtypes[index])
                    found[Holding(name, tensor.global_shape, box, start, stop, dtype, True)] = index
        for name, buffer in _saved_buffers(state.module).items():
            new = name if self._rename is None else self._rename(name)
            if new is not None:
                shape = tuple(buffer.shape)
                found[Holding(new, shape, whole(shape), 0, buffer.numel(), name_of(buffer.dtype), True)] = name
        return found

    def __call__(self) -> int:
        """Send the current weights (all ranks of the group call); return the bytes that this rank has received.

        If a model has other tensors or dtypes than before, the plan is found again.
        """
        if self._trainer is not None:
            self._trainer.sharded.state.finish_gathers()
        targets, sources, own = self._tensors()
        if any(self._comm.exchange(own != self._planned, "weights_changed")):
            self.plan, self._planned = reshard_plan(self._comm, own), own
        read = None
        if self._trainer is not None:
            state: CheckpointedModel = self._trainer.sharded.state
            read = _Values(state, sources, state.value_runs(), _saved_buffers(state.module))
        received = 0
        first = ""
        for last in self.plan.rounds:
            out = [one for one in self.plan.sends if first < one.name <= last]
            into = [one for one in self.plan.receives if first < one.name <= last]
            received += self._round(out, into, read, targets)
            first = last
        return received

    def _round(
        self,
        out: Sequence[Transfer],
        into: Sequence[Transfer],
        read: _Values | None,
        targets: Mapping[str, _Target],
    ) -> int:
        comm = self._comm
        out, into = (sorted(some, key=lambda one: one.peer) for some in (out, into))
        going, coming = _places(out, comm.world), _places(into, comm.world)
        given = torch.empty(sum(going[1]), dtype=torch.uint8, device=comm.device)
        arrived = torch.empty(sum(coming[1]), dtype=torch.uint8, device=comm.device)
        if read is not None:
            read.fill(given, out, going[0])
        comm.all_to_all(arrived, given, coming[1], going[1], "weights").wait()
        with torch.no_grad():
            for one, place in zip(into, coming[0], strict=True):
                values = targets[one.name].values
                flat = values.contiguous().view(-1)  # patches count elements in the order of dimensions
                some = arrived[place : place + one.nbytes].view(dtype_of(one.target.dtype))
                for patch in one.patches():
                    part = flat.as_strided(patch.shape, patch.target_strides, flat.storage_offset() + patch.target)
                    part.copy_(some[: patch.numel].view(patch.shape))
                    some = some[patch.numel :]
                if not values.is_contiguous():
                    values.copy_(flat.view(values.shape))
        return arrived.numel()

    def close(self) -> None:
        """Destroy the process groups (all ranks of the group call)."""
        if self._owns:
            self._comm.destroy()


def _places(some: Sequence[Transfer], world: int) -> tuple[list[int], list[int]]:
    """Return the first byte of each transfer, and the bytes of each peer."""
    places, counts, place = [], [0] * world, 0
    for one in some:
        places.append(place)
        place += one.room
        counts[one.peer] += one.room
    return places, counts


def _saved_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    kept = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in kept and buffer.numel()}


def _targets(module: nn.Module) -> Mapping[str, _Target]:
    registry = Registry.of(module)
    found: dict[str, _Target] = {}
    for tensor, parameter in zip(registry, registry.parameters, strict=True):
        values = parameter.data
        if type(values) is not torch.Tensor:
            raise UsageError(
                f"WeightSync(rollout=...): {tensor.name} is quantised ({type(values).__name__}), and cannot be "
                "written. Leave quant (or dtype int8) out of init_inference()"
            )
        box = tensor.box or whole(tensor.global_shape)
        holding = Holding(tensor.name, tensor.global_shape, box, 0, math.prod(sizes(box)), name_of(values.dtype), False)
        found[tensor.name] = _Target(holding, values)
    for name, buffer in _saved_buffers(module).items():
        shape = tuple(buffer.shape)
        found[name] = _Target(
            Holding(name, shape, whole(shape), 0, buffer.numel(), name_of(buffer.dtype), False), buffer
        )
    return found
