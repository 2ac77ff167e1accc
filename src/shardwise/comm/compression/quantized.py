"""Gradient reduction in quantised blocks, in one hop or, between nodes, in two.

Each rank quantises what it has for every other rank, one all-to-all exchanges the codes, and each owner adds up, in
fp32 and in rank order, what it has received and what it would have sent to itself: so that all terms are treated alike.

In two hops (qgZ of Wang et al., "ZeRO++: Extremely efficient collective communication for giant model training", 2023,
arXiv 2306.10209, section 3.3) the first exchange stays within the node. The ranks of a node are numbered by place; the
rank at place p receives what its node has for the ranks at place p of all nodes, adds that up, quantises each sum again
and sends it to where it belongs: one sum a node crosses the wire instead of one a rank. Sending by place is the paper's
reordering of slices: what arrives last lies in its owner's range.

What rounding has cut off may be added to the next gradient (error feedback; with `memory`, the moving average of Xie et
al., "LoCo: Low-bit communication adaptor for large-scale model training", 2024, arXiv 2407.04480). It is kept in bf16,
whose own rounding is a 256th of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from shardwise.comm.compression.base import Compressor, Flat
from shardwise.comm.compression.quantize import BlockCode

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator, Handle
    from shardwise.config.schema import gradients

KEPT_DTYPE = torch.bfloat16
"""Type of what rounding has cut off."""

_SECOND = ".node"
"""End of the names of what the second hop keeps."""


@dataclass(frozen=True)
class Feedback:
    """What becomes of what rounding has cut off: it is added to the next gradient.

    Attributes:
        memory: part of the old error in the new one; 0: only what the last rounding has cut off counts.
        reset_every: steps after which it is forgotten; 0: never.
    """

    memory: float = 0.0
    reset_every: int = 0


@dataclass(frozen=True)
class Hops:
    """The groups of a reduction in two hops.

    Attributes:
        node: the ranks of this rank's node.
        across: the ranks at this rank's place in all nodes, in the order of nodes.
    """

    node: Communicator
    across: Communicator


class QuantizedReduction(Compressor):
    """Reduces gradients as quantised blocks in one hop or two.

    Args:
        comm: the ranks.
        code: how values are quantised.
        hold: counts a buffer until it is given back.
        start: steps at the beginning that are reduced exactly.
        hops: exchange within nodes first; None: one exchange among all ranks. Ranks are numbered node by node.
        feedback: add what has been cut off to the next gradient; None: it is lost.
        stochastic: round at random instead of to nearest, so that errors are zero on average.
        exact_copies: where every rank keeps the whole sum, it is gathered exactly; False: as codes.
    """

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
        super().__init__(start, comm.device, hold)
        self.comm = comm
        self.code = code
        self.hops = hops
        self.feedback = feedback
        self.exact_copies = exact_copies
        self.generator: torch.Generator | None = None
        if stochastic:
            self.generator = torch.Generator(comm.device)
            self.generator.manual_seed(comm.rank)

    @property
    def nodes(self) -> int:
        """Number of nodes, as far as they matter."""
        return self.hops.across.world if self.hops is not None else 1

    @override
    def reduce(
        self, flats: Sequence[Flat], label: str, *, accumulate: bool, scale: float, wire_dtype: torch.dtype | None
    ) -> _Exchange:
        return _Exchange(self, flats, label, accumulate, scale)

    def encode(self, values: torch.Tensor, messages: torch.Tensor, error: torch.Tensor | None) -> None:
        """Quantise rows of values into rows of messages, with error feedback if there is any."""
        memory = self.feedback.memory if self.feedback is not None else 0.0
        self.code.encode(values, messages, error=error, memory=memory, generator=self.generator)

    def error(self, name: str, rows: int, numel: int, scale: float) -> torch.Tensor | None:
        """Return what has been cut off of earlier gradients, (rows, numel), or None if that is not kept."""
        if self.feedback is None:
            return None
        return self.kept.at(name, rows * numel, KEPT_DTYPE, scale).view(rows, numel)

    def buffer(self, *shape: int) -> torch.Tensor:
        """Return bytes for messages, and have them counted."""
        made = torch.empty(shape, dtype=torch.uint8, device=self.comm.device)
        self.hold(made)
        return made

    @override
    def end_step(self, applied: bool) -> None:
        super().end_step(applied)
        if self.feedback is not None and self.feedback.reset_every and self.steps % self.feedback.reset_every == 0:
            self.kept.clear()

    @override
    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "nodes": self.nodes}
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        return state

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.feedback is not None:
            super().load_state_dict(state)
            if state["nodes"] != self.nodes:
                self.kept.drop(lambda name: name.endswith(_SECOND))
        if self.generator is not None and "generator" in state:
            self.generator.set_state(state["generator"].cpu())


def in_blocks(
    bits: int, parameters: gradients.Blocks, comm: Communicator, hold: Callable[[torch.Tensor], None]
) -> QuantizedReduction:
    """Return the method that `compression.type` names, with codes of so many bits."""
    feedback = Feedback(parameters.err_beta, int(parameters.reset_T or 0)) if parameters.use_error_feedback else None
    return QuantizedReduction(
        comm,
        BlockCode(bits, int(parameters.block_size)),
        hold,
        start=int(parameters.start_compressing_after_step),
        feedback=feedback,
        stochastic=parameters.stochastic_rounding,
        exact_copies=not parameters.quantize_copies,
    )


class _Exchange:
    """The reduction of one unit, under way.

    A rank's message to another has the codes of all sections, one after the other.
    """

    def __init__(
        self, method: QuantizedReduction, flats: Sequence[Flat], label: str, accumulate: bool, scale: float
    ) -> None:
        self._method = method
        self._label = label
        self._accumulate = accumulate
        code, comm = method.code, method.comm
        self._flats: list[tuple[Flat, int, int]] = []
        size = 0
        for flat in flats:
            end = size + code.nbytes(flat.own.numel())
            self._flats.append((flat, size, end))
            size = end
        self._size = size
        errors = [method.error(flat.name, comm.world, flat.own.numel(), scale) for flat, _, _ in self._flats]
        self._second_errors = [
            method.error(flat.name + _SECOND, method.nodes, flat.own.numel(), scale)
            if method.hops is not None
            else None
            for flat, _, _ in self._flats
        ]
        first = method.hops.node if method.hops is not None else comm
        sent = method.buffer(comm.world, size)
        for (flat, begin, end), error in zip(self._flats, errors, strict=True):
            rows = flat.full.view(comm.world, flat.own.numel())
            for messages, part in self._by_receiver(sent):
                method.encode(rows[part], messages[:, begin:end], error[part] if error is not None else None)
        self._received, self._handle = self._launch(first, sent)
        self.scratch: Sequence[torch.Tensor] = [sent, self._received]

    def _by_receiver(self, messages: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield rows of messages in the order of who receives them, and for which ranks they are in the end."""
        world, nodes = messages.shape[0], self._method.nodes
        places = world // nodes
        if nodes == 1:
            yield messages, slice(None)
        else:
            for place in range(places):
                yield messages[place * nodes : (place + 1) * nodes], slice(place, None, places)

    def _launch(self, comm: Communicator, sent: torch.Tensor) -> tuple[torch.Tensor, Handle]:
        received = self._method.buffer(*sent.shape)
        sizes = [sent.numel() // comm.world] * comm.world
        handle = comm.all_to_all(received.view(-1), sent.view(-1), sizes, sizes, self._label, kind="reduce")
        return received, handle

    def wait(self) -> None:
        """Block until the sums are in place; later calls do nothing."""
        if not self._flats:
            return
        method, code, hops = self._method, self._method.code, self._method.hops
        self._handle.wait()
        self.scratch = ()
        terms = self._received
        if hops is not None:
            terms = self._second_hop(hops, terms.view(hops.node.world, method.nodes, self._size))
        for flat, begin, end in self._flats:
            code.add_up(terms[:, begin:end], flat.own, accumulate=self._accumulate)
        del terms, self._received
        for flat, _, _ in self._flats:
            if flat.whole is not None:
                self._copy(flat.own, flat.whole)
        self._flats = []

    def _second_hop(self, hops: Hops, received: torch.Tensor) -> torch.Tensor:
        """Add up what came from the node, (places, nodes, bytes), and exchange the sums; return (nodes, bytes)."""
        nodes = self._method.nodes
        sent = self._method.buffer(nodes, self._size)
        for (flat, begin, end), error in zip(self._flats, self._second_errors, strict=True):
            total = torch.empty(1, flat.own.numel(), device=received.device)
            for node in range(nodes):
                self._method.code.add_up(received[:, node, begin:end], total[0])
                kept = error[node : node + 1] if error is not None else None
                self._method.encode(total, sent[node : node + 1, begin:end], kept)
        arrived, handle = self._launch(hops.across, sent)
        handle.wait()
        return arrived

    def _copy(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        """Give all ranks the whole sum."""
        comm, code = self._method.comm, self._method.code
        if self._method.exact_copies:
            comm.all_gather([(whole, own)], self._label, kind="reduce").wait()
            return
        messages = self._method.buffer(comm.world, code.nbytes(own.numel()))
        message = messages[comm.rank : comm.rank + 1]
        self._method.encode(own.unsqueeze(0), message, None)
        comm.all_gather([(messages.view(-1), message.view(-1))], self._label, kind="reduce").wait()
        code.decode(messages, whole.view(comm.world, own.numel()))
