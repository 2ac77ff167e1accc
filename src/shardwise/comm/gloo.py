"""Collectives for the Gloo backend, built from point-to-point messages.

Gloo's own reduce-scatter is an all-reduce followed by a copy, and its all-gather moves more data through
memory than it must; both are several times slower than the direct exchange used here (numbers:
`bench/comm_gloo.py`). What is sent is also what is counted: reduce-scatter and all-gather put (world - 1) /
world of the buffer on the wire of each rank, whatever the algorithm.

Methods. Reduce-scatter and all-to-all: direct exchange, one message per pair of ranks. All-gather: direct
exchange, or recursive doubling in the form that works for any number of ranks (Bruck et al., "Efficient
algorithms for all-to-all communications in multiport message-passing systems", 1997). Broadcast: binomial
tree.

Invariants:

- Sums are formed in rank order, so their bits depend neither on which rank adds nor on who arrives first.
- Once launched, an exchange completes without any rank calling `wait()`: single-step algorithms post
  everything at launch, and those that must pass data on (doubling, inner nodes of the tree) do so in a
  thread of their own. Ranks may therefore launch and wait for exchanges with different tags in different
  orders.
- Messages between two ranks with the same tag arrive in the order sent (Gloo keeps one queue per peer and
  tag).
- Tensors handed in belong to the exchange until `wait()` has returned.

Ranks are ranks within `group` throughout. The functions hold no state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from shardwise.comm.wire import CPU, Pending, Wire, check_flat, copy_into, split_by_rank, sum_in_order
from shardwise.errors import UsageError

Pair = tuple[torch.Tensor, torch.Tensor]

# Choices of `all_gather` and `broadcast`, from measurements on loopback (two cores, torch 2.13). From 2 to
# 16 ranks the direct all-gather was the fastest, or within the noise of it, at every size from 64 B to 32
# MiB; doubling pays for its thread (50 to 100 us). Launching one message each way costs 22 us and
# a round trip 55 us, so that (world - 1) launches outgrow a thread and log2(world) round trips between 16
# and 32 ranks.
DOUBLING_MIN_WORLD = 32
DOUBLING_MAX_BYTES = 16 << 10
FLAT_BROADCAST_MAX_WORLD = 8
FLAT_BROADCAST_MAX_BYTES = 256 << 10


def all_gather(pairs: Sequence[Pair], group: dist.ProcessGroup, tag: int) -> Pending:
    """Gather each shard from all ranks, with the algorithm that measured fastest for this size and world.

    Args:
        pairs: (full, shard): contiguous 1-D CPU tensors of world * S and S elements of one dtype. Rank r's
            shard becomes `full[r * S : (r + 1) * S]`. `shard` may be that view itself: then nothing is
            copied.
        group: the ranks that take part.
        tag: the same on all ranks, different from that of any other exchange under way in the group.

    Returns:
        A handle; `full` is complete when its `wait()` has returned.

    Raises:
        UsageError: shapes or dtypes do not fit, or this rank is not in the group.
        PeerLostError: a peer is gone.
    """
    world = dist.get_world_size(group)
    if world >= DOUBLING_MIN_WORLD and _bytes(shard for _, shard in pairs) <= DOUBLING_MAX_BYTES:
        return all_gather_doubling(pairs, group, tag)
    return all_gather_direct(pairs, group, tag)


def all_gather_direct(pairs: Sequence[Pair], group: dist.ProcessGroup, tag: int) -> Pending:
    """`all_gather` in one step: each rank sends its shard to every other, one message per peer and pair."""
    wire = Wire("all_gather", group, tag)
    pieces = [_place(full, shard, wire) for full, shard in pairs]
    for peer in wire.peers():
        for parts in pieces:
            wire.receive(parts[peer], peer)
    for peer in wire.peers():
        for _, shard in pairs:
            wire.send(shard, peer)
    return Pending(wire)


def all_gather_doubling(pairs: Sequence[Pair], group: dist.ProcessGroup, tag: int) -> Pending:
    """`all_gather` in ceil(log2(world)) steps, for small shards among many ranks.

    All shards of a rank travel as one row of bytes. Before step k a rank holds the rows of the 2**k ranks
    that begin with itself; it sends them 2**k ranks down and receives as many from 2**k ranks up. The rows
    are copied to their places by `wait()`; the buffer for them is as large as all `full` together.
    """
    wire = Wire("all_gather", group, tag)
    places = [_place(full, shard, wire) for full, shard in pairs]
    shards = [shard.view(torch.uint8) for _, shard in pairs if shard.numel()]
    row = torch.cat(shards) if shards else torch.empty(0, dtype=torch.uint8, device=CPU)
    rows = torch.empty(wire.world, row.numel(), dtype=torch.uint8, device=CPU)
    rows[0] = row

    def exchange() -> None:
        held = 1
        while held < wire.world:
            count = min(held, wire.world - held)
            above = (wire.rank + held) % wire.world
            message = wire.receive(rows[held : held + count], above)
            wire.send(rows[:count], (wire.rank - held) % wire.world)
            wire.wait_for(message)
            held += count

    def unpack() -> None:
        for distance in range(1, wire.world):
            source, offset = (wire.rank + distance) % wire.world, 0
            for parts in places:
                part = parts[source]
                size = part.numel() * part.element_size()
                if size:
                    part.view(torch.uint8).copy_(rows[distance, offset : offset + size])
                offset += size

    if wire.world > 1:
        wire.relay(exchange)
    return Pending(wire).then(unpack)


def reduce_scatter(
    pairs: Sequence[Pair],
    group: dist.ProcessGroup,
    tag: int,
    accumulate: bool = False,
) -> Pending:
    """Add up each `full` over ranks, in rank order, and keep this rank's range.

    `out = (out if accumulate else 0) + (full of rank 0 + full of rank 1 + ...)[this rank's range]`. The sum
    is formed in the dtype of `out`, then added: roundings that do not depend on the layout. The pieces travel
    in the dtype of `full`; (world - 1) * S elements of it are held until `wait()`.

    Args:
        pairs: (out, full): contiguous 1-D CPU tensors of S and world * S elements. `out` is fp32 or fp64,
            `full` any floating dtype. `out` may be this rank's range of `full` itself.
        group: the ranks that take part.
        tag: as for `all_gather`.
        accumulate: add to `out` instead of replacing it.

    Raises:
        UsageError: shapes or dtypes do not fit, or this rank is not in the group.
        PeerLostError: a peer is gone.
    """
    wire = Wire("reduce_scatter", group, tag)
    inputs = [split_by_rank(full, out, wire) for out, full in pairs]
    for out, full in pairs:
        if not (out.is_floating_point() and full.is_floating_point()):
            raise UsageError(f"reduce_scatter: needs floating dtypes; found out {out.dtype} and full {full.dtype}")
    scratch = receive_buffers(pairs, wire.world)
    terms = [
        [*received[: wire.rank], parts[wire.rank], *received[wire.rank :]]
        for received, parts in zip(scratch, inputs, strict=True)
    ]
    for peer in wire.peers():
        for pieces in terms:
            wire.receive(pieces[peer], peer)
    for peer in wire.peers():
        for parts in inputs:
            wire.send(parts[peer], peer)

    def add_up() -> None:
        for (out, _), pieces, received in zip(pairs, terms, scratch, strict=True):
            # What rank 0 has sent, or rank 1 to rank 0: the first or the second term.
            spare = received[0] if wire.world > 1 and received.dtype == out.dtype else None
            sum_in_order(out, pieces, accumulate, spare)

    return Pending(wire, scratch).then(add_up)


def receive_buffers(pairs: Sequence[Pair], world: int) -> list[torch.Tensor]:
    """Return memory for what the other ranks send in a reduction, a row for each."""
    return [torch.empty(world - 1, out.numel(), dtype=full.dtype, device=CPU) for out, full in pairs]


def all_reduce_ordered(tensor: torch.Tensor, group: dist.ProcessGroup, tag: int) -> Pending:
    """Sum a small tensor over ranks in place, in rank order: the same bits on every rank.

    Every rank receives all contributions, so this is for norms and flags, not for gradients. Half-precision
    tensors are summed in fp32 and rounded once.
    """
    own = tensor.detach().reshape(-1)
    gathered = torch.empty(dist.get_world_size(group) * own.numel(), dtype=own.dtype, device=CPU)
    total_dtype = torch.float32 if own.dtype in (torch.bfloat16, torch.float16) else own.dtype

    def add_up() -> None:
        if own.numel():
            first, *others = gathered.view(-1, own.numel()).unbind()
            total = first.to(total_dtype, copy=True)
            for term in others:
                total.add_(term)
            tensor.detach().copy_(total.view(tensor.shape))

    return all_gather([(gathered, own)], group, tag).then(add_up)


def broadcast(tensor: torch.Tensor, src: int, group: dist.ProcessGroup, tag: int) -> Pending:
    """Copy `tensor` of rank `src` into that of every rank, down a binomial tree.

    Small tensors go to few ranks directly, as no rank then needs a thread to pass them on.
    """
    wire = Wire("broadcast", group, tag)
    flat = tensor.detach().contiguous().view(-1)
    if wire.world <= FLAT_BROADCAST_MAX_WORLD and flat.nbytes <= FLAT_BROADCAST_MAX_BYTES:
        parent, children = src, wire.peers() if wire.rank == src else []
    else:
        parent, children = _tree(wire.rank, src, wire.world)

    def send_down() -> None:
        for child in children:
            wire.send(flat, child)

    if wire.rank == src:
        send_down()
        return Pending(wire)
    message = wire.receive(flat, parent)

    def pass_on() -> None:
        wire.wait_for(message)
        send_down()

    if children:
        wire.relay(pass_on)
    if tensor.is_contiguous():
        return Pending(wire)
    return Pending(wire).then(lambda: copy_into(tensor.detach(), flat))


def all_to_all_v(
    outputs: Sequence[torch.Tensor | None],
    inputs: Sequence[torch.Tensor | None],
    group: dist.ProcessGroup,
    tag: int,
) -> Pending:
    """Send `inputs[r]` to rank r and receive `outputs[r]` from it.

    Args:
        outputs: one contiguous tensor per rank, of the size that the rank sends; None or an empty tensor for
            nothing.
        inputs: one contiguous tensor per rank; None or an empty tensor for nothing.
        group: the ranks that take part.
        tag: as for `all_gather`.
    """
    wire = Wire("all_to_all", group, tag)
    if len(outputs) != wire.world or len(inputs) != wire.world:
        raise UsageError(
            f"all_to_all: {wire.world} ranks need as many tensors on each side; "
            f"found {len(outputs)} outputs and {len(inputs)} inputs"
        )
    for peer in wire.peers():
        if (output := outputs[peer]) is not None:
            wire.receive(check_flat(output, "output", wire.op).view(-1), peer)
    for peer in wire.peers():
        if (piece := inputs[peer]) is not None:
            wire.send(check_flat(piece, "input", wire.op).view(-1), peer)
    output, piece = outputs[wire.rank], inputs[wire.rank]
    sizes = [0 if tensor is None else tensor.numel() for tensor in (output, piece)]
    if sizes[0] != sizes[1]:
        raise UsageError(f"all_to_all: rank {wire.rank} sends itself {sizes[1]} elements and expects {sizes[0]}")
    if output is not None and piece is not None:
        copy_into(output, piece)
    return Pending(wire)


def _place(full: torch.Tensor, shard: torch.Tensor, wire: Wire) -> Sequence[torch.Tensor]:
    """Put this rank's shard into `full`; return the views of `full` by rank."""
    if full.dtype != shard.dtype:
        raise UsageError(f"all_gather: full is {full.dtype} and shard is {shard.dtype}; they must be the same")
    parts = split_by_rank(full, shard, wire)
    copy_into(parts[wire.rank], shard)
    return parts


def _tree(rank: int, root: int, world: int) -> tuple[int, list[int]]:
    """Return parent and children in the binomial tree: a place's parent has its lowest set bit cleared."""
    place = (rank - root) % world
    limit = place & -place if place else world
    steps = [1 << bit for bit in reversed(range(world.bit_length())) if 1 << bit < limit]
    children = [(place + step + root) % world for step in steps if place + step < world]
    return ((place & (place - 1)) + root) % world, children


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
