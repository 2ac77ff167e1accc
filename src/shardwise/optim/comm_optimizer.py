"""Base of optimizers that communicate themselves: no reduction in backward, then an average by a given method.

An ordinary optimizer gets reduced gradients. One of these decides before each window whether it takes reduced
gradients, or this rank's own, of which it makes a value that is averaged over ranks
(`shardwise.comm.compression.averaging`). An engine gives it flat parameters as blocks, of which every rank steps all
(ZeRO stage 0) or its own range (stage 1).

Outside of an engine, and on one rank, these optimizers step the gradients as they are, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.comm.communicator import Communicator
from shardwise.comm.compression.averaging import Averages, Block, BlockMean, Segment
from shardwise.errors import UsageError
from shardwise.optim.base import Optimizer

_CHUNK = {"cpu": 1 << 16}
_LARGE_CHUNK = 1 << 24


class CommOptimizer(Optimizer):
    """Base of optimizers that communicate themselves (class attribute `shardwise_sharding = "communicates"`).

    A subclass derives from an ordinary optimizer, too, which takes the exact steps. Every group has the options `step`
    (steps taken) and `variance_step` (those among them that were exact), which are saved with it.

    Attributes:
        ranks_differ: between steps ranks have different parameters, so that nothing can be sharded.
    """

    ranks_differ = False

    _attached = 0
    _blocks: Sequence[Block] = ()
    _comm: Communicator | None = None

    # -- for subclasses ----------------------------------------------------------------------------------------------

    @property
    def warm_up(self) -> int:
        """Steps at the beginning that are exact, or keep less than those after them."""
        raise NotImplementedError

    def _is_exact(self, step: int) -> bool:
        """Return True if the step after `step` steps takes the reduced gradient."""
        return step < self.warm_up

    def _method(self, block: Block) -> BlockMean:
        """Return what averages a block."""
        raise NotImplementedError

    def _step_averaged(self, blocks: Sequence[Block]) -> None:
        """Step blocks with this rank's gradients."""
        raise NotImplementedError

    # -- for the engine ----------------------------------------------------------------------------------------------

    def attach(
        self,
        blocks: Sequence[Block],
        comm: Communicator,
        *,
        hold: Callable[[torch.Tensor], None],
        written: Callable[[], None],
    ) -> None:
        """Work on these blocks from now on; `param_groups` hold their segments.

        Args:
            blocks: in the same order on all ranks.
            comm: the ranks of a mesh dimension.
            hold: counts a message.
            written: is called when parameters have changed outside of a step.
        """
        self._attached = id(self)  # a copy of this object is not attached
        self._blocks, self._comm = blocks, comm
        self._hold, self._written = hold, written
        self.forget()

    def detach(self) -> None:
        """Forget the engine, and begin anew: without a variance there is nothing to be frozen."""
        self._attached, self._blocks, self._comm = 0, (), None
        self._hold, self._written = _ignore, _ignore
        self.forget()
        for group in self.param_groups:
            group["step"] = group["variance_step"] = 0

    def forget(self) -> None:
        """Drop everything that is kept besides `state` and the groups' options."""
        self._momenta: dict[str, torch.Tensor] = {}
        self._averages = Averages(self._method, self._hold)

    @property
    def attached(self) -> bool:
        """Whether an engine steps this optimizer."""
        return self._attached == id(self)

    @property
    def apart(self) -> bool:
        """Whether ranks have made steps of their own, so that their parameters differ now."""
        return False

    def exact_gradients(self) -> bool:
        """Return True if the next step takes the reduced gradient, not this rank's part of it (on all ranks alike)."""
        return not self.attached or self._ranks.world == 1 or self._is_exact(int(self.param_groups[0]["step"]))

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield what is kept besides `state`."""
        yield from self._momenta.values()
        for mean in self._averages.means.values():
            yield from mean.state_dict().values()

    def unsaid(self) -> float:
        """Return the L2 norm of what this rank has still to send of its momentum; 0 as long as all steps are exact.

        It stays of the size of the momentum in a healthy training; growth without end shows that the variance has been
        frozen too early.
        """
        errors = [mean.state_dict()["worker"].norm() for mean in self._averages.means.values()] if self.attached else []
        return float(torch.stack(errors).norm()) if errors else 0.0

    def agreed(self, segment: Segment) -> torch.Tensor:
        """Return the values of a segment that are the same on all ranks: those that are saved."""
        return segment.parameter.detach()

    def withdraw(self) -> None:
        """Make the parameters what `agreed` returns, after that has been written."""

    def momentum_was_set(self) -> None:
        """Take note that `exp_avg` in `state` has been changed: other ranks have to learn of it."""
        self._momenta = {}

    def rank_state(self) -> dict[str, Any] | None:
        """Return what only this rank keeps: what it has not sent yet. None: nothing."""
        means = self._averages.means if self.attached else {}
        if not means:
            return None
        blocks = {block.name: self._block_state(block) for block in self._blocks if block.name in means}
        return {"world": self._ranks.world, "blocks": blocks}

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """Take over what `rank_state` has returned on this rank; return False if it does not fit the layout."""
        if state is None:
            return True
        blocks = {block.name: block for block in self._blocks}
        fits = state["world"] == self._ranks.world and all(
            name in blocks and saved["worker"].numel() == blocks[name].numel for name, saved in state["blocks"].items()
        )
        for name, saved in state["blocks"].items() if fits else ():
            self._load_block(blocks[name], saved)
        return fits

    def _block_state(self, block: Block) -> dict[str, torch.Tensor]:
        return self._averages.of(block).state_dict()

    def _load_block(self, block: Block, saved: Mapping[str, torch.Tensor]) -> None:
        self._averages.of(block).load_state_dict(saved)

    # -- stepping ----------------------------------------------------------------------------------------------------

    @property
    def _ranks(self) -> Communicator:
        if self._comm is None:
            raise UsageError(f"{type(self).__name__}: this needs an engine; pass the optimizer to initialize()")
        return self._comm

    def _step(self) -> None:
        exact = self.exact_gradients()
        for group in self.param_groups:
            group["step"] += 1
            group["variance_step"] += exact
        if exact:
            super()._step()
        else:
            self._step_averaged(self._blocks)

    def segments(self, blocks: Sequence[Block]) -> Iterator[tuple[Segment, dict[str, Any]]]:
        """Yield the segments of blocks, each with its parameter group."""
        for block in blocks:
            for segment in block.segments:
                yield segment, self.param_groups[segment.group]

    def moments(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return momentum and variance of a segment; zeros are made at the first call."""
        state = self.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state["exp_avg"], state["exp_avg_sq"]

    def momentum(self, block: Block) -> torch.Tensor:
        """Return the momentum of a whole block; from the first call on the segments' states are views of it."""
        known = self._momenta.get(block.name)
        if known is None:
            pieces = [(segment, self.moments(segment.parameter)[0]) for segment in block.segments]
            known = torch.zeros(block.numel, dtype=pieces[0][1].dtype, device=pieces[0][1].device)
            for segment, momentum in pieces:
                place = known[segment.start : segment.stop]
                place.copy_(momentum)
                self.state[segment.parameter]["exp_avg"] = place
            own = known[block.start : block.stop]
            if own.numel() < block.numel:
                self._ranks.all_gather([(known, own)], f"{block.name}.momentum", kind="reduce").wait()
            self._momenta[block.name] = known
        return known


def _ignore(*_: Any) -> None:
    """Do nothing."""


def parts(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield indices that cut a tensor into what fits a cache: temporaries are small, and read while they are there."""
    size = _CHUNK.get(tensor.device.type, _LARGE_CHUNK)
    if tensor.dim() != 1 or tensor.numel() <= size:
        yield ...
        return
    for start in range(0, tensor.numel(), size):
        yield slice(start, start + size)


def decay_rates(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return what momentum, and the root of the variance, of a group are divided by: 1 without bias correction."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    first, second = group["betas"]
    return 1 - first ** group["step"], (1 - second ** group["variance_step"]) ** 0.5
