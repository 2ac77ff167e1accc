"""Gradient reduction in quantised blocks, in one hop or, between nodes, in two.

Each rank quantises its values for every rank, one all-to-all exchanges the codes, and each owner adds in fp32 (a CPU
in rank order). The owner's own values are quantised, too: all terms are treated alike.

In two hops (qgZ of Wang et al., "ZeRO++: Extremely efficient collective communication for giant model training", 2023,
arXiv 2306.10209, section 3.3) the first exchange stays within the node. The rank at place p of a node receives the
node's values for the ranks at place p of all nodes, adds them, quantises each sum and sends it to its owner: one sum
per node crosses the network instead of one per rank. The order by place is the paper's reordering of slices.

Error feedback adds the rounding error to the next gradient; with `memory`, as the moving average of Xie et al., "LoCo:
Low-bit communication adaptor for large-scale model training", 2024, arXiv 2407.04480. The error is kept in bf16, with a
rounding error of a 256th.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from shardwise.comm.compression.averaging import BlockMean
from shardwise.comm.compression.base import Compressor, Flat, Running
from shardwise.comm.compression.quantize import BlockCode, in_parts

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config.schema import gradients

KEPT_DTYPE = torch.bfloat16
"""Dtype of rounding errors."""

_SECOND = ".node"  # suffix of the names of the second hop's errors


@dataclass(frozen=True)
class Feedback:
    """Error feedback: weight of the old error in the new one (0: plain), and steps after which errors are cleared."""

    memory: float = 0.0
    reset_every: int = 0


@dataclass(frozen=True)
class Hops:
    """The groups of two hops: `node` of this rank, and `across`, of ranks at this rank's place in all nodes.

    `ranks` are all ranks, node by node; None: in their own order.
    """

    node: Communicator
    across: Communicator
    ranks: tuple[int, ...] | None = None

    @classmethod
    def of(cls, comm: Communicator, nodes: Sequence[Sequence[int]]) -> Hops:
        """Return the hops of nodes of as many ranks each (all ranks call)."""
        order = tuple(itertools.chain(*nodes))
        across = [list(line) for line in zip(*nodes, strict=True)]
        found = None if order == tuple(range(comm.world)) else order
        return cls(comm.part(nodes, "node"), comm.part(across, "across_nodes"), found)


class QuantizedReduction(Compressor):
    """Reduces gradients as quantised blocks in one hop or two.

    Args:
        comm: the ranks.
        code: of the values.
        hold: counts a buffer until it is released.
        start: steps at the beginning that are reduced exactly.
        hops: exchange within nodes first; None: one exchange among all ranks.
        feedback: None: rounding errors are lost.
        stochastic: stochastic rounding, which makes errors zero on average.
        exact_copies: where every rank keeps the whole sum, gather it exactly; False: as codes.
    """

    zeroed = False

    def __init__(
        self,
        comm: Communicator,
        code: BlockCode,
        hold: Callable[[torch.Tensor], None],
        *,
        start: int = 0,
        hops: Hops | None = None,
        feedback: Feedback | None = None,
        stochastic: bool = False,
        exact_copies: bool = True,
    ) -> None:
        super().__init__(comm, start, hold)
        self.code, self.hops, self.feedback, self.exact_copies = code, hops, feedback, exact_copies
        self.nodes = 1 if hops is None else hops.across.world
        self.generator = torch.Generator(comm.device).manual_seed(comm.rank) if stochastic else None

    @override
    def reduce(
        self, flats: Sequence[Flat], label: str, *, accumulate: bool, scale: float, wire_dtype: torch.dtype | None
    ) -> Running:
        world, hops = self.comm.world, self.hops
        places: list[tuple[Flat, slice]] = []  # a rank's message has the codes of all flat parameters
        size = 0
        for flat in flats:
            begin, size = size, size + self.code.nbytes(flat.own.numel())
            places.append((flat, slice(begin, size)))
        sent = self.buffer(world, size)
        second_errors = []
        for flat, place in places:
            rows, error = flat.full.view(world, -1), self._error(flat.name, world, flat.own.numel(), scale)
            if hops is not None:
                second_errors.append(self._error(flat.name + _SECOND, self.nodes, flat.own.numel(), scale))
            for messages, part in self._by_receiver(sent):
                self._encode(rows[part], messages[:, place], None if error is None else error[part])
        received, handle = self.exchange(sent, label, None if hops is None else hops.node)
        arrived = [received]  # a list, because `finish` releases the messages before it allocates others

        def finish() -> None:
            terms = arrived.pop()
            if hops is not None:
                terms = self._second_hop(
                    hops, terms.view(hops.node.world, self.nodes, size), places, second_errors, label
                )
            for flat, place in places:
                self.code.add_up(terms[:, place], flat.own, accumulate=accumulate)
            del terms
            for flat, _ in places:
                if flat.whole is not None:
                    self._copy(flat.own, flat.whole, label)

        return Running(handle, finish, [sent, received])

    def _encode(self, values: torch.Tensor, messages: torch.Tensor, error: torch.Tensor | None) -> None:
        memory = self.feedback.memory if self.feedback is not None else 0.0
        self.code.encode(values, messages, error=error, memory=memory, generator=self.generator)

    def _error(self, name: str, rows: int, numel: int, scale: float) -> torch.Tensor | None:
        """Return the rounding errors of earlier gradients, (rows, numel), or None without error feedback."""
        if self.feedback is None:
            return None
        return self.kept.at(name, rows * numel, KEPT_DTYPE, scale).view(rows, numel)

    def _by_receiver(self, messages: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield rows of messages in the order of their receivers, and the ranks that own the values."""
        if self.nodes == 1:
            yield messages, slice(None)
            return
        places = messages.shape[0] // self.nodes
        order = None if self.hops is None else self.hops.ranks
        if order is not None:
            for row in range(messages.shape[0]):
                place, node = divmod(row, self.nodes)
                owner = order[node * places + place]
                yield messages[row : row + 1], slice(owner, owner + 1)
            return
        for place in range(places):
            yield messages[place * self.nodes : (place + 1) * self.nodes], slice(place, None, places)

    def _second_hop(
        self,
        hops: Hops,
        received: torch.Tensor,
        places: Sequence[tuple[Flat, slice]],
        errors: Sequence[torch.Tensor | None],
        label: str,
    ) -> torch.Tensor:
        """Add up the messages of the node, (places, nodes, bytes), and exchange the sums; return (nodes, bytes)."""
        sent = self.buffer(*received.shape[1:])
        for (flat, place), error in zip(places, errors, strict=True):
            together = 1 if in_parts(received.device) else self.nodes
            total = torch.empty(together, flat.own.numel(), dtype=torch.float32, device=received.device)
            self.hold(total)
            for node in range(0, self.nodes, together):
                rows = slice(node, node + together)
                if together == 1:
                    self.code.add_up(received[:, node, place], total[0])
                else:
                    self._add_rows(received[..., place], total)
                self._encode(total, sent[rows, place], None if error is None else error[rows])
        arrived, handle = self.exchange(sent, label, hops.across)
        handle.wait()
        return arrived

    def _add_rows(self, messages: torch.Tensor, total: torch.Tensor) -> None:
        """Add up the messages of the node, (places, nodes, bytes), in order of places, for all nodes at once."""
        self.code.decode(messages[0], total)
        term = torch.empty_like(total)
        self.hold(term)
        for others in messages[1:]:
            self.code.decode(others, term)
            total.add_(term)

    def _copy(self, own: torch.Tensor, whole: torch.Tensor, label: str) -> None:
        comm = self.comm
        if self.exact_copies:
            comm.all_gather([(whole, own)], label, kind="reduce").wait()
            return
        messages = self.buffer(comm.world, self.code.nbytes(own.numel()))
        message = messages[comm.rank : comm.rank + 1]
        self._encode(own.unsqueeze(0), message, None)
        comm.all_gather([(messages.view(-1), message.view(-1))], label, kind="reduce").wait()
        self.code.decode(messages, whole.view(comm.world, own.numel()))

    @override
    def end_step(self, applied: bool) -> None:
        super().end_step(applied)
        if self.feedback is not None and self.feedback.reset_every and self.steps % self.feedback.reset_every == 0:
            self.kept.clear()

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "nodes": self.nodes}
        if self.hops is not None and self.hops.ranks is not None:
            state["ranks"] = list(self.hops.ranks)
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        return state

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.feedback is not None:
            super().load_state_dict(state)
            ranks = None if self.hops is None or self.hops.ranks is None else list(self.hops.ranks)
            if state["nodes"] != self.nodes or state.get("ranks") != ranks:
                self.kept.drop(lambda name: name.endswith(_SECOND))
        if self.generator is not None and "generator" in state:
            self.generator.set_state(state["generator"].cpu())


class QuantizedMean(BlockMean):
    """The mean over ranks of one flat buffer of `numel` values, a multiple of the number of ranks, as quantised blocks.

    Each rank sends its values for every owner, and each owner the mean of its range. All ranks use the sent means: the
    result has the same bits everywhere. The fp32 errors are "worker", of this rank's values, and "server", of the means
    of its range; both are added to the next values.
    """

    def __init__(self, comm: Communicator, numel: int, code: BlockCode, label: str, device: torch.device) -> None:
        super().__init__()
        self._comm, self._code, self._label = comm, code, label
        self._shard = numel // comm.world
        for name, size in (("worker", numel), ("server", self._shard)):
            self.errors[name] = torch.zeros(size, dtype=torch.float32, device=device)

    @override
    def average(self, values: torch.Tensor) -> Iterator[Sequence[torch.Tensor]]:
        comm, code, shard = self._comm, self._code, self._shard
        worker, server = self.errors.values()
        size = code.nbytes(shard)
        # Zeros, because padding at the end of a message is sent, too.
        sent = torch.zeros(comm.world, size, dtype=torch.uint8, device=values.device)
        code.encode(values.view(comm.world, shard), sent, error=worker.view(comm.world, shard))
        received, sizes = torch.empty_like(sent), [size] * comm.world
        handle = comm.all_to_all(received.view(-1), sent.view(-1), sizes, sizes, self._label, kind="reduce")
        yield received, sent
        handle.wait()
        mean = torch.empty(1, shard, dtype=torch.float32, device=values.device)
        code.hold(mean)
        code.add_up(received, mean[0])
        mean.div_(comm.world)
        received = torch.zeros_like(sent)
        message = received[comm.rank : comm.rank + 1]
        code.encode(mean, message, error=server.view(1, shard))
        del sent, mean
        handle = comm.all_gather([(received.view(-1), message.view(-1))], self._label, kind="reduce")
        yield (received,)
        handle.wait()
        code.decode(received, values.view(comm.world, shard))


def in_blocks(
    bits: int, parameters: gradients.Blocks, comm: Communicator, hold: Callable[[torch.Tensor], None]
) -> QuantizedReduction:
    """Return the method of `compression.type` with codes of `bits` bits."""
    feedback = Feedback(parameters.err_beta, int(parameters.reset_T or 0)) if parameters.use_error_feedback else None
    return QuantizedReduction(
        comm,
        BlockCode(bits, int(parameters.block_size), hold),
        hold,
        start=int(parameters.start_compressing_after_step),
        feedback=feedback,
        stochastic=parameters.stochastic_rounding,
        exact_copies=not parameters.quantize_copies,
    )
