"""What optimizers that communicate themselves have in common: what an engine gives them, and what they keep.

An ordinary optimizer gets gradients that have been reduced. One of these tells the engine before each step whether it
wants them so, or this rank's own, which it then compresses after it has made an update of them (momentum, say). The
engine gives it its memory in *blocks*: flat buffers with all parameters of a unit, of which every rank steps all (ZeRO
stage 0) or its own range (stage 1).

Outside of an engine, and on one rank, these optimizers step the gradients that they are given, exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.comm.compression.onebit import OnebitAllReduce, Scale
from shardwise.errors import UsageError

_CHUNK = {"cpu": 1 << 16}
_LARGE_CHUNK = 1 << 24


class Segment(Protocol):
    """A run of master weights of one parameter group that this rank steps.

    Attributes:
        parameter: the values, 1-D: what the group has in its `params`.
        group: number of the parameter group.
        start, stop: its place in the block.
        pieces: (number of a parameter, start, stop) of the parameters' runs, counted from the segment's start.
    """

    parameter: nn.Parameter
    group: int
    start: int
    stop: int
    pieces: Sequence[tuple[int, int, int]]


class Block(Protocol):
    """All parameters of a unit that have one dtype, side by side.

    Attributes:
        name: the same on all ranks and in every run.
        numel: elements, padding included.
        start, stop: the range that this rank steps.
        segments: what lies in it.
        lanes: (number of a parameter group, start, stop) of all of the block.
        tensors: (number of a parameter, start, stop) of all of the block.
        gradient: in a step: of the range the mean over ranks, or of the block this rank's part of the mean; may be
            overwritten.
    """

    name: str
    numel: int
    start: int
    stop: int
    segments: Sequence[Segment]
    lanes: Sequence[tuple[int, int, int]]
    tensors: Sequence[tuple[int, int, int]]
    gradient: torch.Tensor | None


class Communicating(torch.optim.Optimizer):
    """Base of optimizers that communicate themselves (class attribute `shardwise_sharding = "communicates"`).

    Every group has the options `step` (steps taken) and `variance_step` (those among them that have updated the
    variance), which are saved with it.

    Attributes:
        ranks_differ: between steps ranks have different parameters, so that nothing can be sharded.
        scale: what the scales of compressed values preserve.
        joined: whether the values of all parameters of a rank's range share one scale.
        tensor_keys: names of values that are kept for each parameter as a whole.
    """

    ranks_differ = False
    scale: Scale = "norm"
    joined = False
    tensor_keys: tuple[str, ...] = ()

    _attached = 0
    _blocks: Sequence[Block] = ()
    _comm: Communicator | None = None

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "step": 0, "variance_step": 0})

    # -- what the engine calls ---------------------------------------------------------------------------------------

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
            comm: the ranks.
            hold: is told about messages.
            written: called when parameters have changed outside of a step.
        """
        self._attached = id(self)  # a copy of this object is not attached
        self._blocks, self._comm = blocks, comm
        self._hold, self._written = hold, written
        self._numbers = {number: place for place, number in enumerate(n for b in blocks for n, _, _ in b.tensors)}
        self._device = blocks[0].segments[0].parameter.device if blocks else torch.device("cpu")
        self.forget()

    def detach(self) -> None:
        """Forget the engine, and begin anew: without a variance there is nothing to be frozen."""
        self._attached, self._blocks, self._comm = 0, (), None
        self._hold, self._written, self._numbers = _ignore, _ignore, {}
        self.forget()
        for group in self.param_groups:
            group["step"] = group["variance_step"] = 0

    def forget(self) -> None:
        """Drop everything that is kept besides `state` and the groups' options."""
        self._whole: dict[str, torch.Tensor] = {}
        self._reductions: dict[str, OnebitAllReduce] = {}
        self._values = {
            key: torch.full((len(self._numbers),), torch.nan, dtype=torch.float32, device=self._device)
            for key in self.tensor_keys
        }

    @property
    def apart(self) -> bool:
        """Whether ranks have made steps of their own, so that their parameters differ now."""
        return False

    def exact_gradients(self) -> bool:
        """Return whether the next step takes the reduced gradient; otherwise this rank's part of it (on all alike)."""
        return not self.attached or self._alone or self._is_exact(self._steps)

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield what is kept besides `state`."""
        yield from self._whole.values()
        yield from self._values.values()
        for reduction in self._reductions.values():
            yield from reduction.state_dict().values()

    def unsaid(self) -> float:
        """Return the L2 norm of what this rank has still to say of its momentum; 0 as long as all steps are exact.

        It stays of the size of the momentum in a healthy training; growth without end says that the variance has been
        frozen too early.
        """
        if not self.attached or not self._reductions:
            return 0.0
        return float(torch.stack([r.worker_error.norm() for r in self._reductions.values()]).norm())

    def agreed(self, segment: Segment) -> torch.Tensor:
        """Return the values of a segment that are the same on all ranks: those that are saved."""
        return segment.parameter.detach()

    def withdraw(self) -> None:
        """Make the parameters what `agreed` says, after it has been written."""

    def momentum_was_set(self) -> None:
        """Somebody has changed `exp_avg` in `state`: other ranks have to learn of it."""
        self._whole = {}

    def tensor_state(self, number: int) -> dict[str, torch.Tensor]:
        """Return what is kept for a parameter as a whole."""
        place = self._numbers[number]
        return {key: values[place] for key, values in self._values.items() if not torch.isnan(values[place])}

    def set_tensor_state(self, number: int, values: Mapping[str, Any]) -> None:
        """Take over what is kept for a parameter as a whole."""
        for key, value in values.items():
            self._values[key][self._numbers[number]] = float(value)

    def rank_state(self) -> dict[str, Any] | None:
        """Return what only this rank knows: what it has not said yet. None: nothing."""
        if not self.attached or not self._reductions:
            return None
        return {
            "world": self._ranks.world,
            "blocks": {b.name: self._block_state(b) for b in self._blocks if b.name in self._reductions},
        }

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """Take over what `rank_state` has returned on this rank; return whether it fits the layout."""
        if state is None:
            return True
        blocks = {block.name: block for block in self._blocks}
        fits = state["world"] == self._ranks.world and all(
            name in blocks and saved["worker"].numel() == blocks[name].numel for name, saved in state["blocks"].items()
        )
        if fits:
            for name, saved in state["blocks"].items():
                self._load_block(blocks[name], saved)
        return fits

    @property
    def warm_up(self) -> int:
        """Steps at the beginning that are exact, or keep less than those after them."""
        raise NotImplementedError

    # -- what subclasses say -----------------------------------------------------------------------------------------

    def _is_exact(self, step: int) -> bool:
        """Whether the step after `step` steps takes the reduced gradient."""
        raise NotImplementedError

    def _step_plain(self, values: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Step one parameter outside of an engine."""
        raise NotImplementedError

    def _step_exact(self) -> None:
        """Step all blocks with reduced gradients."""
        raise NotImplementedError

    def _step_compressed(self) -> None:
        """Step all blocks with this rank's gradients."""
        raise NotImplementedError

    # -- stepping ----------------------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """Whether an engine steps this optimizer."""
        return self._attached == id(self)

    @property
    def _ranks(self) -> Communicator:
        if self._comm is None:
            raise UsageError(f"{type(self).__name__}: this needs an engine; pass the optimizer to initialize()")
        return self._comm

    @property
    def _alone(self) -> bool:
        return self._ranks.world == 1

    @property
    def _steps(self) -> int:
        return int(self.param_groups[0]["step"])

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters.

        In an engine with what it has collected; outside of one with the parameters' gradients as they are, which
        nobody reduces: exactly, as on one rank.

        Args:
            closure: computes the loss again; only outside of an engine.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exact = self.exact_gradients()
        advances = exact and self._updates_variance(self._steps)
        for group in self.param_groups:
            group["step"] += 1
            group["variance_step"] += advances
        if not self.attached:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._step_plain(parameter, parameter.grad, group)
        elif exact:
            self._step_exact()
        else:
            self._step_compressed()
        return loss

    def _updates_variance(self, step: int) -> bool:
        return True

    def moments(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return momentum and variance of a parameter or segment; zeros are made at the first call."""
        state = self.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state["exp_avg"], state["exp_avg_sq"]

    # -- compressing -------------------------------------------------------------------------------------------------

    def _momentum(self, block: Block) -> torch.Tensor:
        """Return the momentum of a whole block; from the first call on the segments' states are views of it."""
        known = self._whole.get(block.name)
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
            self._whole[block.name] = known
        return known

    def _reduction(self, block: Block) -> OnebitAllReduce:
        known = self._reductions.get(block.name)
        if known is None:
            example = block.segments[0].parameter
            known = self._reductions[block.name] = OnebitAllReduce(
                self._ranks,
                block.numel,
                [(start, stop) for _, start, stop in block.tensors],
                example.dtype,
                example.device,
                block.name,
                scale=self.scale,
                joined=self.joined,
            )
        return known

    def _mean(self, values: Sequence[torch.Tensor]) -> None:
        """Replace the values of each block by their compressed mean over ranks; the same bits on all of them."""
        reductions = [self._reduction(block) for block in self._blocks]
        for reduction, own in zip(reductions, values, strict=True):
            reduction.launch(own)
            self._hold_messages(reduction)
        for reduction in reductions:
            reduction.combine()
            self._hold_messages(reduction)
        for reduction, out in zip(reductions, values, strict=True):
            reduction.finish(out)

    def _hold_messages(self, reduction: OnebitAllReduce) -> None:
        for message in reduction.scratch:
            self._hold(message)

    def _block_state(self, block: Block) -> dict[str, torch.Tensor]:
        return self._reductions[block.name].state_dict()

    def _load_block(self, block: Block, saved: Mapping[str, torch.Tensor]) -> None:
        self._reduction(block).load_state_dict(saved)


def _ignore(*_: Any) -> None:
    """Nobody listens."""


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
