"""Point-to-point collectives against plain references: values, bits, aliasing, launch order, lost peers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.comm import gloo, wire
from shardwise.errors import PeerLostError, UsageError
from tests.harness import RankFailure, run_ranks

COPIED = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]
SUMMED = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
GATHERS = [gloo.all_gather, gloo.all_gather_direct, gloo.all_gather_doubling]
SIZES = [0, 1, 3, 17, 1023, 40_001]


def values(rank, size, dtype, salt=0):
    """The same random numbers for a (rank, size, dtype, salt) in every process."""
    generator = torch.Generator().manual_seed(1000 * salt + 10 * rank + 1)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, (size,), generator=generator).to(dtype)


def same_bits(left, right):
    return left.dtype == right.dtype and torch.equal(left, right)


# ----------------------------------- all_gather


def gather_case(algorithm, sizes, dtypes, in_place):
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    pairs = []
    for salt, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True)):
        full = torch.zeros(world * size, dtype=dtype)
        shard = values(rank, size, dtype, salt)
        if in_place:
            view = full[rank * size : (rank + 1) * size]
            shard = view.copy_(shard)
        pairs.append((full, shard))
    algorithm(pairs, group, 3).wait()
    return [full for full, _ in pairs]


@settings(max_examples=40)
@given(
    algorithm=st.sampled_from(GATHERS),
    world=st.integers(1, 4),
    layout=st.lists(st.tuples(st.sampled_from(SIZES), st.sampled_from(COPIED)), max_size=4),
    in_place=st.booleans(),
)
def test_all_gather_equals_concatenation(algorithm, world, layout, in_place):
    sizes, dtypes = [size for size, _ in layout], [dtype for _, dtype in layout]
    results = run_ranks(gather_case, world, algorithm, sizes, dtypes, in_place)
    for salt, (size, dtype) in enumerate(layout):
        expected = torch.cat([values(rank, size, dtype, salt) for rank in range(world)])
        assert all(same_bits(result[salt], expected) for result in results)


@pytest.mark.parametrize("algorithm", GATHERS, ids=lambda f: f.__name__)
def test_all_gather_among_six_ranks(algorithm):
    expected = torch.cat([values(rank, 33, torch.float32) for rank in range(6)])
    for result in run_ranks(gather_case, 6, algorithm, [33], [torch.float32], True):
        assert same_bits(result[0], expected)


def chosen(world_sizes):
    calls = []
    gloo.all_gather_direct = lambda pairs, group, tag: calls.append("direct")
    gloo.all_gather_doubling = lambda pairs, group, tag: calls.append("doubling")
    dist.get_world_size = lambda group=None: world_sizes[len(calls)][0]
    for world, size in world_sizes:
        gloo.all_gather([(torch.empty(world * size), torch.empty(size))], None, 0)
    return calls


def test_the_choice_follows_the_measured_constants(monkeypatch):
    for module, name in (
        (gloo, "all_gather_direct"),
        (gloo, "all_gather_doubling"),
        (dist, "get_world_size"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # restores what `chosen` replaces
    large, few = gloo.DOUBLING_MAX_BYTES // 4 + 1, gloo.DOUBLING_MIN_WORLD - 1
    cases = [(2, 1), (few, 1), (few + 1, 1), (few + 1, large), (few + 1, large - 1)]
    assert chosen(cases) == ["direct", "direct", "doubling", "direct", "doubling"]


# ----------------------------------- reduce_scatter


def reduce_case(sizes, wire_dtype, out_dtype, accumulate, in_place):
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    pairs = []
    for salt, size in enumerate(sizes):
        full = values(rank, world * size, wire_dtype, salt)
        out = full[rank * size : (rank + 1) * size] if in_place else values(rank + 50, size, out_dtype, salt)
        pairs.append((out, full))
    pending = gloo.reduce_scatter(pairs, group, 3, accumulate)
    pending.wait()
    pending.wait()
    return [out for out, _ in pairs]


def reduce_reference(world, rank, salt, size, wire_dtype, out_dtype, accumulate, in_place):
    own = slice(rank * size, (rank + 1) * size)
    pieces = [values(peer, world * size, wire_dtype, salt)[own] for peer in range(world)]
    total = pieces[0].to(out_dtype)
    for piece in pieces[1:]:
        # fp64 pieces are added in fp64 and rounded to the dtype of the total after each addition
        total = (total + piece).to(out_dtype)
    if accumulate:
        before = pieces[rank] if in_place else values(rank + 50, size, out_dtype, salt)
        total = before + total
    return total


@settings(max_examples=40)
@given(
    world=st.integers(1, 4),
    sizes=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3),
    wire_dtype=st.sampled_from(SUMMED),
    out_dtype=st.sampled_from([torch.float32, torch.float64]),
    accumulate=st.booleans(),
)
def test_reduce_scatter_equals_the_ordered_sum(world, sizes, wire_dtype, out_dtype, accumulate):
    case = (wire_dtype, out_dtype, accumulate, False)
    for rank, result in enumerate(run_ranks(reduce_case, world, sizes, *case)):
        for salt, size in enumerate(sizes):
            assert same_bits(result[salt], reduce_reference(world, rank, salt, size, *case))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reduce_scatter_into_the_own_range_of_the_input(world, accumulate):
    size = wire.SUM_CHUNK + 7
    case = (torch.float32, torch.float32, accumulate, True)
    for rank, result in enumerate(run_ranks(reduce_case, world, [size, 5], *case)):
        assert same_bits(result[0], reduce_reference(world, rank, 0, size, *case))
        assert same_bits(result[1], reduce_reference(world, rank, 1, 5, *case))


def test_the_sum_does_not_depend_on_where_an_element_lies():
    pieces = [values(rank, 1000, torch.float32) for rank in range(3)]
    whole = values(9, 1000, torch.float32)
    wire.sum_in_order(whole, pieces, accumulate=True)
    for start, end in ((0, 1), (1, 4), (4, 17), (17, 999), (999, 1000)):
        part = values(9, 1000, torch.float32)[start:end].clone()
        wire.sum_in_order(part, [piece[start:end].clone() for piece in pieces], accumulate=True)
        assert same_bits(part, whole[start:end])


# ----------------------------------- all_reduce, broadcast, all_to_all


def all_reduce_case(shape, dtype):
    tensor = values(dist.get_rank(), shape.numel(), dtype).reshape(shape)
    if tensor.dim() == 2:
        tensor = tensor.t().contiguous().t()  # not contiguous
    gloo.all_reduce_ordered(tensor, dist.group.WORLD, 4).wait()
    return tensor


@settings(max_examples=25)
@given(
    world=st.integers(1, 4),
    shape=st.sampled_from([torch.Size([]), torch.Size([0]), torch.Size([5]), torch.Size([7, 3])]),
    dtype=st.sampled_from(COPIED),
)
def test_all_reduce_is_the_ordered_sum_with_the_same_bits_everywhere(world, shape, dtype):
    half = dtype in (torch.bfloat16, torch.float16)
    terms = [values(rank, shape.numel(), dtype).reshape(shape) for rank in range(world)]
    expected = terms[0].to(torch.float32 if half else dtype)
    for term in terms[1:]:
        expected = expected + term
    for result in run_ranks(all_reduce_case, world, shape, dtype):
        assert same_bits(result, expected.to(dtype))


def broadcast_case(src, shape, dtype, transposed):
    tensor = values(dist.get_rank(), torch.Size(shape).numel(), dtype).reshape(shape)
    if transposed:
        tensor = tensor.t().contiguous().t()
    gloo.broadcast(tensor, src, dist.group.WORLD, 5).wait()
    return tensor


@settings(max_examples=25)
@given(
    place=st.integers(1, 6).flatmap(lambda world: st.tuples(st.just(world), st.integers(0, world - 1))),
    shape=st.sampled_from([(0, 2), (1, 1), (5, 3), (401, 1001)]),
    dtype=st.sampled_from(COPIED),
    transposed=st.booleans(),
)
def test_broadcast_copies_the_source(place, shape, dtype, transposed):
    world, src = place
    expected = values(src, torch.Size(shape).numel(), dtype).reshape(shape)
    results = run_ranks(broadcast_case, world, src, shape, dtype, transposed)
    assert all(same_bits(result, expected) for result in results)


@pytest.mark.parametrize("world", [1, 2, 3, 7, 8, 33])
def test_the_broadcast_tree_reaches_every_rank_once(world):
    for root in {0, world // 2, world - 1}:
        tree = [gloo._tree(rank, root, world) for rank in range(world)]
        reached = sorted(child for _, children in tree for child in children)
        assert reached == [rank for rank in range(world) if rank != root]
        assert all(tree[child][0] == rank for rank, (_, children) in enumerate(tree) for child in children)


def all_to_all_case(sizes, dtype):
    rank, world = dist.get_rank(), dist.get_world_size()
    inputs = [values(10 * rank + peer, sizes[rank][peer], dtype) for peer in range(world)]
    outputs = [torch.zeros(sizes[peer][rank], dtype=dtype) for peer in range(world)]
    nothing = [tensor if tensor.numel() else None for tensor in inputs]
    gloo.all_to_all_v(outputs, nothing, dist.group.WORLD, 7).wait()
    return outputs


@settings(max_examples=20)
@given(
    sizes=st.integers(1, 4).flatmap(
        lambda world: st.lists(
            st.lists(st.sampled_from(SIZES), min_size=world, max_size=world), min_size=world, max_size=world
        )
    ),
    dtype=st.sampled_from(COPIED),
)
def test_all_to_all_moves_every_piece(sizes, dtype):
    results = run_ranks(all_to_all_case, len(sizes), sizes, dtype)
    for rank, outputs in enumerate(results):
        for peer, output in enumerate(outputs):
            assert same_bits(output, values(10 * peer + rank, sizes[peer][rank], dtype))


# ----------------------------------- order of launch, groups, failures


def launch_in_own_order():
    """Every rank launches and waits for the same operations in another order."""
    rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    size = 5000
    fulls = [torch.zeros(world * size) for _ in GATHERS]
    shards = [values(rank, size, torch.float32, salt) for salt in range(len(GATHERS))]
    out, full = torch.zeros(size), values(rank, world * size, torch.float32, 9)
    small = torch.tensor([float(rank + 1)])
    word = torch.full((3 + gloo.FLAT_BROADCAST_MAX_BYTES // 4,), float(rank))  # goes down the tree
    launches = [
        lambda salt=salt: GATHERS[salt]([(fulls[salt], shards[salt])], group, 100 + salt)
        for salt in range(len(GATHERS))
    ]
    launches.append(lambda: gloo.reduce_scatter([(out, full)], group, 200))
    launches.append(lambda: gloo.all_reduce_ordered(small, group, 201))
    launches.append(lambda: gloo.broadcast(word, 1, group, 202))
    order = launches[rank:] + launches[:rank]
    pending = [launch() for launch in (order if rank % 2 else reversed(order))]
    for handle in pending if rank % 3 else reversed(pending):
        handle.wait()
    return fulls, out, small.item(), word


def test_tags_keep_operations_apart_in_any_order():
    world, size = 4, 5000
    for rank, (fulls, out, small, word) in enumerate(run_ranks(launch_in_own_order, world, timeout=60)):
        for salt, full in enumerate(fulls):
            assert same_bits(full, torch.cat([values(r, size, torch.float32, salt) for r in range(world)]))
        assert same_bits(out, reduce_reference(world, rank, 9, size, torch.float32, torch.float32, False, False))
        assert small == 10.0
        assert bool((word == 1).all())


def wait_one_at_a_time():
    """Rank 0 waits for the first operation before it launches the second; the others do the reverse."""
    world, group = dist.get_world_size(), dist.group.WORLD
    full = torch.zeros(world)
    word = torch.full((1 + gloo.FLAT_BROADCAST_MAX_BYTES // 4,), float(dist.get_rank()))
    shard = torch.tensor([float(dist.get_rank())])
    if dist.get_rank() == 2:  # an inner node of the broadcast tree waits for the gather first
        second = gloo.broadcast(word, 0, group, 2)
        gloo.all_gather_doubling([(full, shard)], group, 1).wait()
        second.wait()
    else:
        second = gloo.broadcast(word, 0, group, 2)
        second.wait()
        gloo.all_gather_doubling([(full, shard)], group, 1).wait()
    return full.tolist(), word.unique().tolist()


def test_a_rank_that_passes_data_on_does_so_before_it_is_waited_for():
    assert run_ranks(wait_one_at_a_time, 4, timeout=30) == [([0.0, 1.0, 2.0, 3.0], [0.0])] * 4


def in_subgroup():
    group = dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        with pytest.raises(UsageError, match="not a member"):
            gloo.all_gather([(torch.zeros(2), torch.zeros(1))], group, 0)
        return None
    full = torch.zeros(2)
    gloo.all_gather([(full, torch.tensor([float(dist.get_rank())]))], group, 0).wait()
    word = torch.tensor([dist.get_rank()])
    gloo.broadcast(word, 1, group, 1).wait()  # rank 1 of the group is rank 3 of the world
    return full.tolist(), word.item()


def test_ranks_are_those_of_the_group():
    assert run_ranks(in_subgroup, 4) == [None, ([1.0, 3.0], 3), None, ([1.0, 3.0], 3)]


def leave_early(algorithm):
    full, shard = torch.zeros(dist.get_world_size() * 100), torch.zeros(100)
    if dist.get_rank() == 1:
        raise ValueError("rank 1 has had enough")
    pending = algorithm([(full, shard)], dist.group.WORLD, 0)
    try:
        pending.wait()
    except PeerLostError as first:
        with pytest.raises(PeerLostError) as again:
            pending.wait()
        assert again.value is first
        assert "all_gather (tag 0) lost rank 1" in str(first)
        raise


@pytest.mark.parametrize("algorithm", GATHERS[1:], ids=lambda f: f.__name__)
def test_a_lost_peer_is_named(algorithm):
    with pytest.raises(RankFailure, match="rank 1 has had enough") as caught:
        run_ranks(leave_early, 2, algorithm)
    assert [(f.rank, f.kind) for f in caught.value.failures] == [(1, "ValueError"), (0, "PeerLostError")]


def misuse():
    group = dist.group.WORLD
    bad = {
        "need a 1-D full tensor of 6": lambda: gloo.all_gather([(torch.zeros(5), torch.zeros(3))], group, 0),
        "must be the same": lambda: gloo.all_gather([(torch.zeros(2).int(), torch.zeros(1))], group, 0),
        "not contiguous": lambda: gloo.all_gather([(torch.zeros(4)[::2], torch.zeros(1))], group, 0),
        "needs floating dtypes": lambda: gloo.reduce_scatter(
            [(torch.zeros(1), torch.zeros(2, dtype=torch.int64))], group, 0
        ),
        "found 1 outputs and 2 inputs": lambda: gloo.all_to_all_v([None], [None, None], group, 0),
    }
    full = torch.zeros(8)
    bad["overlaps the full tensor"] = lambda: gloo.all_gather([(full, full[2:6])], group, 0)
    for message, call in bad.items():
        with pytest.raises(UsageError, match=message):
            call()
    return len(bad)


def test_misuse_is_refused_before_anything_is_sent():
    assert run_ranks(misuse, 2) == [6, 6]
