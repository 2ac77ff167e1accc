"""Quantisation in blocks: bounds of the error, what is not finite, and sizes.

Reductions of quantised blocks, in one hop and in two, against the same arithmetic in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm.communicator import Communicator
from shardwise.comm.compression import Feedback, Flat, Hops, QuantizedReduction, quantize, quantized
from shardwise.comm.compression.quantize import SMALLEST, BlockCode
from shardwise.comm.ledger import Ledger
from shardwise.comm.machines import groups_of
from shardwise.memory import Accountant, Category
from tests.comm.blocks import Simulation, rounded
from tests.harness import run_ranks

CODES = st.builds(BlockCode, st.sampled_from([4, 8]), st.sampled_from([2, 6, 32, 256]))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])


def coded(code: BlockCode, values: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Messages of some rows, and the fp32 values that come out of them."""
    messages = torch.empty(values.shape[0], code.nbytes(values.shape[1]), dtype=torch.uint8)
    code.encode(values, messages, **options)  # type: ignore[arg-type]
    back = torch.empty(values.shape)
    code.decode(messages, back)
    return messages, back


def tops(code: BlockCode, values: torch.Tensor) -> torch.Tensor:
    """For each value the largest magnitude of its block."""
    if not values.numel():
        return values
    columns = [block.abs().amax(1, keepdim=True).expand_as(block) for block in values.split(code.block, 1)]
    return torch.cat(columns, 1)


@st.composite
def rows(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.integers(1, 4)), draw(st.integers(0, 700))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Magnitudes of many orders, and zeros.
    spread = draw(st.sampled_from([0, 3, 30]))
    values *= 10.0 ** (spread * (torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5))
    values[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    return values.clamp_(-6e4, 6e4).to(draw(DTYPES))


@settings(max_examples=150, deadline=None)
@given(CODES, rows())
def test_values_are_at_most_half_a_scale_off(code: BlockCode, values: torch.Tensor) -> None:
    _, back = coded(code, values)
    wide = values.float().double()  # fp64 is read in fp32
    bound = tops(code, wide) / (2 * code.levels) * (1 + 1e-4) + SMALLEST
    assert ((back.double() - wide).abs() <= bound).all()
    assert (back[wide == 0] == 0).all()


def test_rounding_at_random_is_right_on_average() -> None:
    values = torch.tensor([[1.0, 0.3, -0.3, 0.05]]).repeat(20_000, 1)
    _, back = coded(BlockCode(4, 4), values, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(back.mean(0), values[0], atol=4 / 7 / 20_000**0.5)


@settings(max_examples=60, deadline=None)
@given(CODES, rows(), st.data())
def test_blocks_that_are_not_finite_stay_so_and_others_do_not_notice(
    code: BlockCode, values: torch.Tensor, data: st.DataObject
) -> None:
    if not values.numel():
        return
    expected = coded(code, values)[1]
    row, column = data.draw(st.integers(0, values.shape[0] - 1)), data.draw(st.integers(0, values.shape[1] - 1))
    values[row, column] = data.draw(st.sampled_from([float("inf"), float("-inf"), float("nan")]))
    _, back = coded(code, values)
    start = column - column % code.block
    assert not back[row, start : start + code.block].isfinite().any()
    back[row, start : start + code.block] = expected[row, start : start + code.block]
    assert torch.equal(back, expected)


def test_sizes_and_bad_input() -> None:
    assert BlockCode(8, 256).nbytes(1024) == 1024 + 4 * 4
    assert BlockCode(4, 256).nbytes(1024) == 512 + 4 * 4
    assert BlockCode(4, 256).nbytes(1025) == 516 + 4 * 5  # an odd end, filled up to 4 bytes
    assert BlockCode(8).nbytes(0) == 0
    for bits, block in ((2, 256), (8, 0), (8, 7), (4, -2)):
        with pytest.raises(ValueError, match=str(bits if bits == 2 else block)):
            BlockCode(bits, block)


# -- reductions --------------------------------------------------------------------------------------------------------

SHARDS = {"first": 300, "second": 16}
"""Elements of each rank's range of two sections."""


def full_of(rank: int, step: int, world: int, name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * step + 1000 * len(name))
    return torch.randn(world * SHARDS[name], generator=generator)


def reductions(
    node: int, bits: int, memory: float | None, whole: bool, nodes: str = "aabb"
) -> tuple[list[torch.Tensor], list[int]]:
    """Two steps of two reductions each; what this rank has, and the bytes sent in each group."""
    ledger = Ledger()
    comm = Communicator(None, ledger, torch.device("cpu"))
    world, code = comm.world, BlockCode(bits, 64)
    hops = Hops.of(comm, groups_of(nodes, node)) if node < world else None
    feedback = None if memory is None else Feedback(memory)
    counted: list[torch.Tensor] = []
    method = QuantizedReduction(comm, code, counted.append, hops=hops, feedback=feedback)
    start, seen = ledger.sequence, []
    for step in range(2):
        flats = []
        for name, shard in SHARDS.items():
            full = full_of(comm.rank, step, world, name)
            place = torch.zeros(world * shard) if whole else None
            own = torch.zeros(shard) if place is None else place[comm.rank * shard : (comm.rank + 1) * shard]
            flats.append(Flat(name, full, own, place, [(0, full.shape)]))
        if step == 1 and memory is not None:  # what is kept is all that matters
            state = method.state_dict()
            method = QuantizedReduction(comm, code, counted.append, hops=hops, feedback=feedback)
            method.load_state_dict(state)
        method.reduce(flats, "unit", accumulate=False, scale=1.0, wire_dtype=None).wait()
        seen += [flat.own.clone() if flat.whole is None else flat.whole for flat in flats]
        if not whole:
            method.reduce(flats[:1], "again", accumulate=True, scale=1.0, wire_dtype=None).wait()
            seen.append(flats[0].own)
        method.end_step(True)
    groups = ("data_parallel", "node", "across_nodes")
    sent = [sum(r.sent for r in ledger.records(start) if r.group == g) for g in groups]
    comm.destroy()
    return seen, sent


@pytest.mark.parametrize(
    ("world", "node", "bits", "memory", "whole"),
    [
        (3, 3, 8, None, False),
        (2, 2, 4, 0.0, True),
        (4, 2, 4, 0.5, False),
        (4, 2, 4, None, True),
    ],
)
def test_sums_are_those_of_one_process(world: int, node: int, bits: int, memory: float | None, whole: bool) -> None:
    answers = run_ranks(reductions, world, node, bits, memory, whole)
    simulation = Simulation(world, node, bits, 64, memory)
    for step in range(2):
        for place, name in enumerate(SHARDS):
            expected = simulation.reduce(name, [full_of(rank, step, world, name) for rank in range(world)])
            for rank, (seen, _) in enumerate(answers):
                mine = expected if whole else expected.split(SHARDS[name])[rank]
                assert torch.equal(seen[step * (2 if whole else 3) + place], mine)
        if not whole:
            again = simulation.reduce("first", [full_of(rank, step, world, "first") for rank in range(world)]).split(
                300
            )
            for rank, (seen, _) in enumerate(answers):
                assert torch.equal(seen[3 * step + 2], seen[3 * step] + again[rank])
    code = BlockCode(bits, 64)
    sizes = [code.nbytes(shard) for shard in SHARDS.values()]
    message = 2 * (sum(sizes) if whole else sum(sizes) + sizes[0])
    nodes = world // node
    copies = 2 * (world - 1) * sum(4 * shard for shard in SHARDS.values()) if whole else 0
    for _, sent in answers:
        if nodes == 1:
            assert sent == [(world - 1) * message + copies, 0, 0]
        else:  # a message for each node, to each rank of the node; then one to each other node
            assert sent == [copies, (node - 1) * nodes * message, (nodes - 1) * message]


def test_nodes_of_ranks_in_turn_have_the_sums_of_ranks_node_by_node() -> None:
    """With the ranks 0, 2 and 1, 3 on a node the sums are those of ranks and ranges in this order."""
    for nodes, order in (("abab", (0, 2, 1, 3)), ("abba", (0, 3, 1, 2))):
        answers = run_ranks(reductions, 4, 2, 4, 0.5, False, nodes)
        simulation = Simulation(4, 2, 4, 64, 0.5)
        for step in range(2):
            for place, name in enumerate(SHARDS):
                fulls = [torch.cat([full_of(r, step, 4, name).chunk(4)[one] for one in order]) for r in order]
                for rank, own in zip(order, simulation.reduce(name, fulls).chunk(4), strict=True):
                    assert torch.equal(answers[rank][0][3 * step + place], own)
            fulls = [torch.cat([full_of(r, step, 4, "first").chunk(4)[one] for one in order]) for r in order]
            simulation.reduce("first", fulls)


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Rows are coded and added as on a device."""
    with (
        mock.patch.object(quantize, "in_parts", lambda device: False),
        mock.patch.object(quantized, "in_parts", lambda device: False),
    ):
        yield


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_added_at_once_have_the_sum_of_their_values(bits: int) -> None:
    code, values = BlockCode(bits, 64), torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    with at_once(), mock.patch.object(quantize, "DEVICE_CHUNK", 1500):  # several tiles, and a shorter block at the end
        messages, back = coded(code, values)
        total = torch.ones(1000)
        code.add_up(messages, total, accumulate=True)
    assert torch.equal(messages, coded(code, values)[0]) and torch.equal(back, coded(code, values)[1])
    assert torch.allclose(total, 1.0 + back.sum(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("bits", [4, 8])
def test_scratch_memory_is_counted(bits: int) -> None:
    """Of a device, where a tile has up to 32 MiB of fp32 values."""
    accountant, size = Accountant(), 4 * 1000
    code, values = BlockCode(bits, 50, lambda tensor: accountant.hold(Category.BUFFERS, tensor)), torch.randn(5, 1000)
    messages, errors, total = (
        torch.empty(5, code.nbytes(1000), dtype=torch.uint8),
        torch.zeros(5, 1000),
        torch.ones(1000),
    )
    chance = torch.Generator().manual_seed(0)
    calls: list[tuple[int, Callable[[], object]]] = [
        (1, lambda: code.encode(values, messages)),
        (2, lambda: code.encode(values, messages, error=errors)),
        (3, lambda: code.encode(values.half(), messages, generator=chance)),
        (1, lambda: code.decode(messages, errors)),
        (1, lambda: code.add_up(messages, total)),
    ]
    with at_once(), mock.patch.object(quantize, "DEVICE_CHUNK", 1000):
        for number, call in calls:
            accountant.reset_peak()
            call()
            assert accountant.peak_total == number * size and accountant.total == 0


def reduced_at_once(*arguments: Any) -> Any:
    with at_once():
        return reductions(*arguments)


def test_the_nodes_of_a_second_hop_are_coded_at_once_with_the_same_bits() -> None:
    """With two ranks a node and two nodes every sum has two terms."""
    expected, found = (run_ranks(run, 4, 2, 4, 0.5, False) for run in (reductions, reduced_at_once))
    for (ours, sent), (theirs, as_many) in zip(found, expected, strict=True):
        assert sent == as_many and all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def _ignore(buffer: torch.Tensor) -> None:
    """Nobody counts."""


def other_cases() -> list[object]:
    """What is kept at another scale, after a skipped step, after a period; copies as codes; rounding at random."""
    comm = Communicator(None, Ledger(), torch.device("cpu"))
    seen: list[object] = []
    full = full_of(comm.rank, 0, comm.world, "first")

    def reduce(method: QuantizedReduction, values: torch.Tensor, scale: float, whole: bool = False) -> torch.Tensor:
        place = torch.zeros(values.numel())
        own = place.split(300)[comm.rank]
        flat = Flat("a", values, own, place if whole else None, ())
        method.reduce([flat], "x", accumulate=False, scale=scale, wire_dtype=None).wait()
        return place if whole else own.clone()

    one, other = (QuantizedReduction(comm, BlockCode(4, 64), _ignore, feedback=Feedback(0.3, 2)) for _ in range(2))
    first = reduce(one, full.clone(), 1.0), reduce(other, full * 8, 8.0)
    second = reduce(one, full.clone(), 1.0), reduce(other, full / 4, 0.25)
    seen.append(torch.equal(first[0] * 8, first[1]) and torch.equal(second[0] / 4, second[1]))
    seen.append(not torch.equal(first[0], second[0]))
    one.end_step(True)
    seen.append(not torch.equal(first[0], reduce(one, full.clone(), 1.0)))
    one.end_step(True)  # the second step: forgotten
    seen.append(torch.equal(first[0], reduce(one, full.clone(), 1.0)))
    broken = full.clone()
    broken[0] = float("inf") if comm.rank == 1 else 0.0
    found = reduce(one, broken, 1.0)
    seen.append(bool(found[:64].isfinite().any()) if comm.rank == 0 else not found.isfinite().all())
    one.end_step(False)
    seen[-1] = not seen[-1] and bool(reduce(one, full.clone(), 1.0).isfinite().all())

    copied = QuantizedReduction(comm, BlockCode(8, 64), _ignore, exact_copies=False)
    whole = reduce(copied, full.clone(), 1.0, whole=True)
    seen.append(torch.equal(whole.split(300)[comm.rank], rounded(reduce(copied, full.clone(), 1.0), 8, 64)))
    chance = QuantizedReduction(comm, BlockCode(4, 64), _ignore, stochastic=True)
    state = chance.state_dict()
    drawn = reduce(chance, full.clone(), 1.0)
    seen.append(not torch.equal(drawn, reduce(chance, full.clone(), 1.0)))
    chance.load_state_dict(state)
    seen.append(torch.equal(drawn, reduce(chance, full.clone(), 1.0)))
    comm.destroy()
    return [*seen, whole]


def test_what_is_kept_follows_scale_and_steps() -> None:
    answers = run_ranks(other_cases, 2)
    for answer in answers:
        assert answer[:-1] == [True] * 8
        assert torch.equal(answer[-1], answers[0][-1])
