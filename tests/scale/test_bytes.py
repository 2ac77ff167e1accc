"""What one rank receives at set-up and in a step grows with its own tensors, and by a few bytes with each rank."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.checkpoint.agree import held_by_any, on_first_rank
from shardwise.checkpoint.load import _elsewhere
from shardwise.checkpoint.manifest import PARAMETER, Manifest, StoredTensor
from shardwise.checkpoint.match import Options
from shardwise.checkpoint.selection import Renamed, Selection
from shardwise.comm import stragglers
from shardwise.comm.coded import coded, decoded
from shardwise.comm.communicator import _DIGEST, _INLINE, _LENGTH, Communicator, Handle, check_agreement, head_of
from shardwise.comm.domain import Domain, Domains
from shardwise.comm.fake import FakeCommunicator
from shardwise.comm.ledger import Ledger
from shardwise.memory import Accountant
from shardwise.registry import Registry, declare_part
from shardwise.zero.units.global_ids import GlobalTensorIds
from shardwise.zero.units.layout import lay_out
from shardwise.zero.units.partition import find_units
from shardwise.zero.updates.tp_split import SplitTensors
from tests.device.recorded import imagined
from tests.harness.training import engine_of

CPU = torch.device("cpu")
WORLDS = (8, 256, 1024, 4096)
TENSOR, LAYERS = 8, 12


class Rank(FakeCommunicator):
    """One of many ranks; what the others say is known, or is what this one says.

    Attributes:
        said: this rank's values, by label.
        received: bytes that have come.
        calls: collectives.
    """

    def __init__(self, world: int, rank: int, others: Callable[[int, str], bytes] | None = None) -> None:
        super().__init__(world, CPU, rank=rank)
        self.imagined = False
        self._others = others
        self.said: dict[str, Any] = {}
        self.received = self.calls = 0

    def exchange(self, value: Any, label: str) -> list[Any]:
        self.said[label] = value
        if self._others is None:
            return [json.loads(json.dumps(value))] * self.world
        self._texts = [self._others(rank, label) for rank in range(self.world)]
        self._at = 0
        return Communicator.exchange(self, value, label)

    def fingerprints(self, text: str, label: str) -> list[str]:
        self._texts = [text.encode()] * self.world
        return Communicator.fingerprints(self, text, label)

    def _rows(self, own: bytes, width: int, label: str) -> list[bytes]:
        self.received += width * self.world
        self.calls += 1
        if width == _DIGEST + _LENGTH + _INLINE:
            return [head_of(text).ljust(width, b"\0") for text in self._texts]
        if width == _DIGEST:
            return [own] * self.world
        part = [text[self._at : self._at + width].ljust(width, b"\0") for text in self._texts]
        self._at += width
        return part

    def _broadcast_bytes(self, own: bytes, src: int, size: int, label: str) -> bytes:
        self.received += size
        self.calls += 1
        return self._texts[src]


class Layers(nn.Module):
    """Layers of which ranks have columns, with norms that all ranks share."""

    def __init__(self, world: int, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        column = list(range(rank % TENSOR, world, TENSOR))
        for _ in range(LAYERS):
            layer = nn.Module()
            layer.norm, layer.up = nn.LayerNorm(4), nn.Linear(4, 4, bias=False)
            place = rank % TENSOR
            box = [(4 * place, 4 * place + 4), (0, 4)]
            declare_part(layer.up.weight, shape=[4 * TENSOR, 4], box=box, ranks=column, divisor=len(column))
            self.layers.append(layer)


def set_up(comm: Rank) -> tuple[GlobalTensorIds, SplitTensors]:
    """Number the tensors of a model, and find out where parts lie."""
    world, rank = comm.world, comm.rank
    model = Layers(world, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = {id(p): 0 for group in optimizer.param_groups for p in group["params"]}
    registry = Registry.of(model, groups=groups)
    specs = find_units(model, registry, 1 << 20)
    lines = [list(range(place, world, TENSOR)) for place in range(TENSOR)]
    part = FakeCommunicator(world // TENSOR, CPU, rank=rank // TENSOR)
    main = Domain(comm)
    domains = Domains(main, {(tuple(lines[rank % TENSOR]), world // TENSOR): Domain(part, like=main)})
    numbering = GlobalTensorIds(registry, specs, domains, comm)
    cut = {index for index, place in enumerate(numbering.places) if place in numbering.cut}
    layouts = [lay_out(spec.tensors, domains.of(spec.domain).sizes, "cpu", {0}, cut) for spec in specs]
    parts = SplitTensors(registry, numbering, specs, layouts, domains, Accountant())
    parts.own({place: place % world for place in parts.known})
    return numbering, parts


@functools.cache
def told_by(world: int, place: int) -> dict[str, bytes]:
    """Return what a rank at a place of all copies of the model says."""
    rank = Rank(world, place)
    with contextlib.suppress(shardwise.errors.ConflictError):  # the others have other parts
        set_up(rank)
    return {label: json.dumps(value).encode() for label, value in rank.said.items()}


def received(world: int) -> tuple[int, int]:
    comm = Rank(world, 0, lambda rank, label: told_by(world, rank % TENSOR)[label])
    numbering, parts = set_up(comm)
    assert len(numbering.names) == 3 * LAYERS and len(parts.known) == LAYERS
    assert [len(numbering.holders[place]) for place in parts.known] == [world] * LAYERS
    assert len({id(ranks) for ranks in numbering.holders}) <= 2
    held = numbering.parts_of(numbering.places.index(parts.known[0]))
    assert [part.ranks[:1] for part in held] == [(place,) for place in range(TENSOR)]
    return comm.received, comm.calls


def test_numbering_and_parts_of_tensors() -> None:
    found = {world: received(world) for world in WORLDS}
    assert len({calls for world, (_, calls) in found.items() if world > 8}) == 1  # the same messages on any number
    for world, (bytes_, _) in found.items():
        # Six exchanges have a row of 64 bytes for each rank; tensors and parts are described once, whatever the ranks.
        assert bytes_ <= 6 * 64 * world + 20_000, (world, found)


@pytest.mark.parametrize("world", WORLDS)
def test_agreement_takes_a_digest_of_each_rank(world: int) -> None:
    comm = Rank(world, 0)
    check_agreement(comm, {f"parameter {number}": "(4, 4)" for number in range(1000)})
    assert (comm.received, comm.calls) == (_DIGEST * world, 1)


@pytest.mark.parametrize("world", WORLDS)
def test_long_values_that_are_equal_are_sent_once(world: int) -> None:
    value = ["x" * 100] * 100
    text = json.dumps(value).encode()
    comm = Rank(world, 0, lambda rank, label: text)
    assert comm.exchange(value, "equal") == [value] * world
    assert comm.received == 64 * world + len(json.dumps(value)) and comm.calls == 2


@pytest.mark.parametrize("world", WORLDS)
def test_stragglers_are_found_in_a_bounded_number_of_collectives(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(record_lines=False, engine="e12345678/1")
    for turn in range(4096):
        record = ledger.open("all_gather", "world", 8, 8, "layers.0", ranks=world, members=range(world))
        record.kind, record.turn, record.finished, record.waited = "gather", turn, 2e3, 0.5
    comm = Rank(world, 0)
    comm.ledger = ledger
    monkeypatch.setattr(stragglers, "measure", lambda comm: SimpleNamespace(offset=0.0, uncertainty=1e-6))
    monkeypatch.setattr(comm, "exchange", lambda value, label: [comm.said.setdefault(label, value)])
    stragglers.compare(comm)
    _, _, parts = comm.said["stragglers"]
    assert len(parts) == min(4096, stragglers.MOST_PARTS // world) and "e12345678/1/world/" in parts[-1].key
    assert len(json.dumps(comm.said["stragglers"])) * world < 10 << 20


def own_values(rank: int, label: str) -> bytes:
    return json.dumps([rank] * 40).encode()


@pytest.mark.parametrize("world", WORLDS)
def test_long_values_that_differ_come_in_pieces(world: int) -> None:
    comm = Rank(world, 0, own_values)
    assert comm.exchange([0] * 40, "different") == [[rank] * 40 for rank in range(world)]
    assert comm.received <= 64 * world + 2 * world * len(json.dumps([world] * 40))


def one_long_value(rank: int, label: str) -> bytes:
    return json.dumps("x" * (1 << 20) if rank == 5 else str(rank) * 100).encode()


@pytest.mark.parametrize("world", WORLDS)
def test_one_long_value_does_not_make_the_others_long(world: int) -> None:
    comm = Rank(world, 0, one_long_value)
    found = comm.exchange("0" * 100, "one")
    assert found == [json.loads(one_long_value(rank, "")) for rank in range(world)]
    assert comm.received <= (1 << 20) + 2 + (64 + 402) * world and comm.calls == 3


class Deep(nn.Module):
    """A model of so many layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def small_collectives(world: int, stage: int, layers: int) -> list[tuple[str, str, int]]:
    """Return the collectives of a second step that are not those of units: operation, label and bytes of a rank."""
    with imagined(world, 0):
        adam = {"type": "Adam", "params": {"lr": 0.1}}
        engine = engine_of(Deep(layers), stage, adam, rows=1, gradient_clipping=1.0, stall_limit=0)
        for _ in range(2):
            begin = 1 + max(record.sequence for record in engine.job.ledger.records())
            engine.backward(engine(torch.ones(1, 4)))
            engine.step()
        records = list(engine.job.ledger.records(begin))
        engine.destroy()
    return [(one.op, one.label, one.size) for one in records if one.op not in ("all_gather", "reduce_scatter")]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_has_one_small_sum_whatever_the_number_of_tensors(stage: int, world: int) -> None:
    """The norm, overflow and other facts of a rank: 8 numbers of 8 bytes."""
    for layers in (2, 20):
        assert small_collectives(world, stage, layers) == [("all_reduce", "gradient_norm", 64)]


def test_groups_are_told_by_strides() -> None:
    assert coded(range(3, 4096, 8)) == [3, 8, 512]
    for ranks in ([7], [0, 1, 2, 3], [0, 1, 8, 9], [0, 2, 5], [0, 1, 8, 9, 64, 65, 72, 73], [1, 2, 4, 8]):
        assert decoded(coded(ranks)) == ranks
    assert len(coded([0, 1, 8, 9, 64, 65, 72, 73])) == 7


STAGES, NAMES = 8, 1250


class Counting(Rank):
    """A rank that counts the bytes of all its collectives, and receives what the others send: nothing."""

    def _launch(self, op: str, size: int, sent: int, label: str, kind: str, *launch: Any, **given: Any) -> Handle:
        self.calls += 1
        self.received += size - size // self.world
        return super()._launch(op, size, sent, label, kind, *launch, **given)


def names_of(stage: int) -> list[str]:
    return [f"model.layers.{stage * NAMES + number}.attention.weight" for number in range(NAMES)]


def agreed(world: int) -> tuple[int, int, frozenset[str]]:
    comm = Counting(world, 0)
    tensors = [SimpleNamespace(name=name, aliases=()) for name in names_of(0)]
    model: Any = SimpleNamespace(comm=comm, registry=tensors, module=nn.Module())
    stored = [StoredTensor(n, PARAMETER, (2,), "float32", ()) for stage in range(STAGES) for n in names_of(stage)]
    manifest = Manifest("a", 0.0, {}, {}, {}, {}, stored)
    selection = Selection.of(exclude=["model.layers.0.*", "gone.*"])
    found = _elsewhere(model, Renamed(manifest), Options(selection=selection), "a", 1)
    return comm.received, comm.calls, found.names


@pytest.mark.parametrize("world", [8, 1024, 4096])
def test_ranks_mark_the_names_that_they_have(world: int) -> None:
    received, calls, names = agreed(world)
    assert names == frozenset()  # the others of this test have none
    assert calls == 3  # a digest of the request; a sum over ranks
    assert received <= 16 * world + 2 * 4 * (STAGES * NAMES + 2 + world)


def test_names_of_any_rank_are_found_on_all() -> None:
    comm = Counting(8, 0)

    def summed(flat: torch.Tensor, label: str, out: Any = None) -> Any:
        flat[2] += 3
        return SimpleNamespace(wait=lambda: None)

    comm.sum_large = summed  # type: ignore[method-assign]
    assert held_by_any(comm, ["a", "b", "c", "d"], {"b", "other"}, "names") == {"b", "c"}


@pytest.mark.parametrize("world", [8, 1024])
def test_other_ranks_than_the_first_receive_no_descriptions(world: int) -> None:
    comm = Counting(world, 1)
    assert on_first_rank(comm, names_of(0), "weights") == []
    assert comm.received <= (20 + 44) * world + 2 * world * len(str(names_of(0))) // world
