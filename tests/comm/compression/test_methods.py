"""What is sent and what is kept is together what was there; selections and factors are what they should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm.compression import Flat
from shardwise.comm.compression.powersgd import PowerSGD, split
from shardwise.comm.compression.sparse import DGC, TopK
from shardwise.config.schema import gradients
from tests.comm.compression.loopback import Loopback, on_threads

SHAPES = [(0, torch.Size([6, 5])), (32, torch.Size([7])), (48, torch.Size([3, 2, 4])), (72, torch.Size([]))]
NUMEL = 96


def gradient(seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, so that sums are exact; zeros between parameters."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.zeros(NUMEL)
    for start, shape in SHAPES:
        full[start : start + shape.numel()] = torch.randint(-99, 100, (shape.numel(),), generator=generator).float()
    return full.to(dtype)


def rounds(
    comm: Loopback,
    method: Any,
    whole: bool,
    seeds: list[int],
    *,
    dtype: torch.dtype = torch.float32,
    wire: torch.dtype | None = None,
    accumulate: bool = False,
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Reduce one gradient after the other; return the sums, and what is kept in the end."""
    sums = []
    size = NUMEL // comm.world
    everything = torch.zeros(NUMEL)
    for number, seed in enumerate(seeds):
        out = everything[comm.rank * size : (comm.rank + 1) * size]
        full = gradient(100 * seed + comm.rank, dtype)
        flat = Flat("unit.0", full, out, everything if whole else None, SHAPES)
        added = accumulate and number > 0
        method.reduce([flat], "unit", accumulate=added, scale=1.0, wire_dtype=wire).wait()
        sums.append((everything if whole else out).clone())
        if not accumulate:
            method.end_step(True)
    return sums, {name: tensor.clone() for name, tensor in method.state_dict()["tensors"].items()}


def make(cls: Any, comm: Loopback, **parameters: Any) -> Any:
    section = {TopK: gradients.TopKOptions, DGC: gradients.DGCOptions, PowerSGD: gradients.PowerSGDOptions}[cls]
    return cls(section(start_compressing_after_step=0, **parameters), comm, lambda _: None)


def whole_sum(answers: list[Any], step: int, whole: bool) -> torch.Tensor:
    parts = [sums[step] for sums, _ in answers]
    if whole:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    return torch.cat(parts)


@given(
    world=st.sampled_from([1, 2, 3]),
    whole=st.booleans(),
    ratio=st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=3),
    narrow=st.booleans(),
    accumulate=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_top_k_loses_nothing(
    world: int, whole: bool, ratio: float, seeds: list[int], narrow: bool, accumulate: bool
) -> None:
    # With whole numbers nothing is rounded but by the wire, and what that has left over is kept.
    wire = torch.bfloat16 if narrow else None
    answers = on_threads(
        world, lambda comm: rounds(comm, make(TopK, comm, ratio=ratio), whole, seeds, wire=wire, accumulate=accumulate)
    )
    given_in = sum(gradient(100 * seed + rank) for seed in seeds for rank in range(world))
    arrived = whole_sum(answers, -1, whole)
    if not accumulate:
        arrived = sum(whole_sum(answers, step, whole) for step in range(len(seeds)))
    left = sum(kept["unit.0.error"] for _, kept in answers)
    assert torch.equal(arrived + left, given_in)


@given(
    world=st.sampled_from([1, 2, 3]),
    rank=st.integers(1, 7),
    seeds=st.lists(st.integers(0, 999), min_size=1, max_size=3),
    epsilon=st.sampled_from([0.0, 1e-8]),
    half=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_power_sgd_loses_nothing(world: int, rank: int, seeds: list[int], epsilon: float, half: bool) -> None:
    dtype = torch.bfloat16 if half else torch.float32
    options = {"matrix_approximation_rank": rank, "min_compression_rate": 0.1, "orthogonalization_epsilon": epsilon}
    parts = split(SHAPES, rank, 0.1)
    assert parts.matrices == [(0, 30), (48, 24)]
    answers = on_threads(world, lambda comm: rounds(comm, make(PowerSGD, comm, **options), False, seeds, dtype=dtype))
    arrived = sum(whole_sum(answers, step, False) for step in range(len(seeds)))
    given_in = sum(gradient(100 * seed + r, dtype).float() for seed in seeds for r in range(world))
    first = 0
    for (offset, numel), shape, (_, used) in zip(parts.matrices, parts.kept, parts.second, strict=True):
        left = sum(kept["unit.0.error"][first : first + numel] for _, kept in answers)
        first += numel
        own = slice(offset, offset + numel)
        torch.testing.assert_close(arrived[own] + left, given_in[own], rtol=0, atol=2e-2)
        if used == min(shape):
            torch.testing.assert_close(arrived[own], given_in[own], rtol=0, atol=2e-2)  # there is nothing to lose
        arrived[own] = given_in[own] = 0
    assert torch.equal(arrived, given_in)  # what is not compressed is exact, and between parameters there is nothing


@pytest.mark.parametrize("cls", [TopK, DGC, PowerSGD])
def test_whole_sums_are_those_of_the_owners(cls: Any) -> None:
    few = on_threads(3, lambda comm: rounds(comm, make(cls, comm), False, [1, 2, 3]))
    everybody = on_threads(3, lambda comm: rounds(comm, make(cls, comm), True, [1, 2, 3]))
    for step in range(3):
        assert torch.equal(whole_sum(few, step, False), whole_sum(everybody, step, True))


def test_dgc_against_its_definition() -> None:
    """One rank, in plain steps: clipping, momentum, masking, and a warm-up of the part that is sent."""
    options = {"ratio": 0.02, "momentum": 0.5, "local_clipping": 200.0, "warmup_steps": 2}
    seeds = [1, 2, 3, 4]
    ((sums, kept),) = on_threads(1, lambda comm: rounds(comm, make(DGC, comm, **options), True, seeds))
    u, v = torch.zeros(NUMEL), torch.zeros(NUMEL)
    counts = []
    for step, seed in enumerate(seeds):
        g = gradient(100 * seed)
        for start, shape in SHAPES:
            part = g[start : start + shape.numel()]
            part *= min(1.0, 200.0 / float(part.norm()))
        u = 0.5 * u + g
        v = v + u
        count = -(-int(96 * 0.25) // 1) if step == 0 else (7 if step == 1 else 2)  # 0.25, 0.0707 and 0.02 of 96
        chosen = v.abs().topk(count).indices
        counts.append(count)
        expected = torch.zeros(NUMEL)
        expected[chosen] = v[chosen]
        u[chosen] = v[chosen] = 0.0
        torch.testing.assert_close(sums[step], expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(kept["unit.0.momentum"], u, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(kept["unit.0.accumulated"], v, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("cls", [TopK, DGC, PowerSGD])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_arrives_and_does_not_stay(cls: Any, value: float) -> None:
    """One rank's gradient overflows: some owner hears of it; what is kept stays finite, and mostly what it was."""

    def run(comm: Loopback) -> tuple[bool, torch.Tensor, list[torch.Tensor]]:
        options = {} if cls is not PowerSGD else {"min_compression_rate": 0.1}
        method = make(cls, comm, **options)
        size = NUMEL // comm.world
        out = torch.zeros(size)
        seen, kept = False, []
        for number in range(4):
            full = gradient(10 * number + comm.rank)
            if number == 2 and comm.rank == 1:
                full[[3, 50]] = value
            flat = Flat("u", full, out, None, SHAPES)
            method.reduce([flat], "u", accumulate=False, scale=1.0, wire_dtype=None).wait()
            if number == 2:
                seen = not bool(out.isfinite().all())
            else:
                assert out.isfinite().all()
            method.end_step(number != 2)
            tensors = method.state_dict()["tensors"]
            assert all(tensor.isfinite().all() for tensor in tensors.values())
            kept.append(torch.cat([t.clone() for n, t in tensors.items() if not n.endswith("factor")]))
        return seen, out, kept

    answers = on_threads(2, run)
    assert any(seen for seen, _, _ in answers)
    for _, _, kept in answers:
        assert int(kept[2].count_nonzero()) > 0.5 * int(kept[1].count_nonzero()) > 0


@pytest.mark.parametrize("cls", [TopK, DGC, PowerSGD])
def test_what_is_kept_follows_the_scale(cls: Any) -> None:
    """Powers of two: the same bits, at another scale in each step."""

    def run(comm: Loopback, scales: list[float]) -> list[torch.Tensor]:
        options = {} if cls is not PowerSGD else {"min_compression_rate": 0.1}
        if cls is DGC:
            options = {"local_clipping": 50.0}
        method = make(cls, comm, **options)
        out = torch.zeros(NUMEL // comm.world)
        found = []
        for number, scale in enumerate(scales):
            flat = Flat("u", gradient(10 * number + comm.rank) * scale, out, None, SHAPES)
            method.reduce([flat], "u", accumulate=False, scale=scale, wire_dtype=None).wait()
            method.end_step(True)
            found.append(out / scale)
        return found

    still = on_threads(2, lambda comm: run(comm, [1.0] * 5))
    moving = on_threads(2, lambda comm: run(comm, [1.0, 4.0, 4.0, 0.5, 1024.0]))
    for mine, theirs in zip(still, moving, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("cls", [TopK, DGC, PowerSGD])
def test_going_on_from_a_saved_state(cls: Any) -> None:
    def run(comm: Loopback) -> None:
        first, second = make(cls, comm), make(cls, comm)
        rounds(comm, first, True, [1, 2])
        second.load_state_dict(first.state_dict())
        second.steps = first.steps
        going_on, _ = rounds(comm, first, True, [3, 4])
        resumed, _ = rounds(comm, second, True, [3, 4])
        assert all(torch.equal(a, b) for a, b in zip(going_on, resumed, strict=True))

    on_threads(2, run)
