"""Base of optimizers that communicate themselves: gradients are not reduced in backward.

Before each accumulation window the optimizer chooses reduced or local gradients. From local gradients it computes a
value that is averaged over ranks (`shardwise.comm.compression.averaging`). An engine attaches flat parameters as
blocks; every rank steps all of a block (ZeRO stage 0) or its own range (stage 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.comm.communicator import Communicator
from shardwise.comm.compression.averaging import Block, BlockMean, Hold, Segment, average
from shardwise.optim.base import Optimizer


class CommOptimizer(Optimizer):
    """Base of optimizers that communicate themselves (class attribute `shardwise_sharding = "communicates"`).

    A subclass also derives from an ordinary optimizer, which takes the exact steps. Every parameter group has the
    options `step` (steps taken) and `variance_step` (exact steps), which are saved with it and belong to its state, as
    do the options `first_group_state` of the first group.
    `ranks_differ`: parameters differ between ranks between steps, which rules out sharding.
    """

    shardwise_sharding = "communicates"
    group_counters: Sequence[str] = ("step", "variance_step")
    first_group_state: Sequence[str] = ()
    ranks_differ = False

    _attached = 0
    _blocks: Sequence[Block] = ()

    # -- for subclasses ----------------------------------------------------------------------------------------------

    @property
    def warm_up(self) -> int:
        """Number of first steps that are exact, or that need less memory than later steps."""
        raise NotImplementedError

    def _is_exact(self, step: int) -> bool:
        return step < self.warm_up

    def _method(self, block: Block) -> BlockMean:
        raise NotImplementedError

    def _step_averaged(self, blocks: Sequence[Block]) -> None:
        raise NotImplementedError

    # -- for the engine ----------------------------------------------------------------------------------------------

    def attach(self, blocks: Sequence[Block], comm: Communicator, *, hold: Hold, written: Callable[[], None]) -> None:
        """Attach flat parameters in the order of all ranks; `param_groups` hold their segments.

        `comm` spans a mesh dimension. `hold` counts a message buffer. `written` follows changes outside of a step.
        """
        self._attached = id(self)  # a copy of this object is not attached
        self._blocks, self._ranks = blocks, comm
        self._hold, self._written = hold, written
        self.forget()

    def detach(self) -> None:
        """Detach from the engine and restart at step 0, because there is no variance to freeze."""
        self.forget()
        self._attached, self._blocks = 0, ()
        for name in ("_ranks", "_hold", "_written"):
            vars(self).pop(name, None)
        for group in self.param_groups:
            group.update(dict.fromkeys(self.group_counters, 0))

    def forget(self) -> None:
        """Drop momenta and compression errors; keep `state` and the groups' options."""
        for block in self._blocks:
            block.kept.clear()
        self._means: dict[str, BlockMean] = {}

    @property
    def attached(self) -> bool:
        """Whether an engine steps this optimizer."""
        return self._attached == id(self)

    @property
    def diverged(self) -> bool:
        """Whether local steps have made parameters differ between ranks."""
        return False

    def exact_gradients(self) -> bool:
        """Return True if the next step takes reduced gradients; the same on all ranks."""
        return not self.attached or self._ranks.world == 1 or self._is_exact(int(self.param_groups[0]["step"]))

    def extra_tensors(self) -> Iterator[torch.Tensor]:
        """Yield tensors that are kept outside of `state`."""
        for kept in (*(block.kept for block in self._blocks), *(mean.errors for mean in self._means.values())):
            yield from kept.values()

    def compression_error_norm(self) -> float:
        """Return the L2 norm of this rank's compression error, the unsent part of the momentum; 0 in exact steps.

        It stays of the size of the momentum. Growth without end: the variance was frozen too early.
        """
        errors = [mean.errors["worker"].norm() for mean in self._means.values()] if self.attached else []
        return float(torch.stack(errors).norm()) if errors else 0.0

    def synchronized_values(self, block: Block, segment: Segment) -> torch.Tensor:
        """Return the values of a segment that are equal on all ranks; these are saved."""
        return segment.parameter.detach()

    def restore_synchronized(self) -> None:
        """Reset the parameters to `synchronized_values`, after these have been written."""

    def momentum_was_set(self) -> None:
        """Invalidate momenta after `exp_avg` in `state` was written; other ranks receive it in the next step."""
        for block in self._blocks:
            block.kept.pop("momentum", None)

    def rank_state(self) -> dict[str, Any] | None:
        """Return the state of this rank only, such as compression errors; None if there is none."""
        blocks = {block.name: self._errors(block) for block in self._blocks if block.name in self._means}
        return {"world": self._ranks.world, "blocks": blocks} if self.attached and blocks else None

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """Load the result of `rank_state` on this rank; return False if the layout differs."""
        if state is None:
            return True
        blocks = {block.name: block for block in self._blocks}
        fits = state.get("world") == self._ranks.world and all(
            name in blocks and saved["worker"].numel() == blocks[name].numel for name, saved in state["blocks"].items()
        )
        if fits:
            self._load(state, blocks)
        return fits

    def _errors(self, block: Block) -> dict[str, torch.Tensor]:
        """Return the tensors of a block that differ between ranks."""
        return self._mean(block).errors

    def _load(self, state: Mapping[str, Any], blocks: Mapping[str, Block]) -> None:
        for block_name, saved in state["blocks"].items():
            for name, tensor in self._errors(blocks[block_name]).items():
                if name in saved:
                    tensor.copy_(saved[name])

    # -- stepping ----------------------------------------------------------------------------------------------------

    def average(self, blocks: Sequence[Block], values: Sequence[torch.Tensor]) -> None:
        """Replace the values of each block by their mean over ranks, by the optimizer's method (all ranks call)."""
        average([self._mean(block) for block in blocks], values, self._hold)

    def _mean(self, block: Block) -> BlockMean:
        if block.name not in self._means:
            self._means[block.name] = self._method(block)
        return self._means[block.name]

    def _step(self) -> None:
        exact = self.exact_gradients()
        for group in self.param_groups:
            group["step"] += 1
            group["variance_step"] += exact
        if exact:
            super()._step()
        else:
            self._step_averaged(self._blocks)

    def segments(self, blocks: Sequence[Block], *tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Any, ...]]:
        """Yield the segments of blocks, each with its parameter group and views of tensors of the blocks."""
        for block, *given in zip(blocks, *tensors, strict=True):
            for segment in block.segments:
                views = (tensor[segment.start : segment.stop] for tensor in given)
                yield segment, self.param_groups[segment.group], *views

    def lanes(self, blocks: Sequence[Block], *tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Any, ...]]:
        """Yield the number of each parameter group in whole blocks, with views of tensors of the blocks."""
        for block, *given in zip(blocks, *tensors, strict=True):
            for number, start, stop in block.lanes:
                yield number, *(tensor[start:stop] for tensor in given)

    def moments(self, parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return momentum and variance of a segment; the first call allocates zeros."""
        state = self.state[parameter]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state["exp_avg"], state["exp_avg_sq"]

    def momenta(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        """Return the momenta of blocks; after the first call the segments' states are views of them."""
        for block in blocks:
            if "momentum" not in block.kept:
                like = self.moments(block.segments[0].parameter)[0]
                known = block.kept["momentum"] = like.new_zeros(block.numel)
                for segment, _, place in self.segments([block], [known]):
                    place.copy_(self.moments(segment.parameter)[0])
                    self.state[segment.parameter]["exp_avg"] = place
                own = known[block.start : block.stop]
                if own.numel() < block.numel:
                    self._ranks.all_gather([(known, own)], f"{block.name}.momentum", kind="reduce").wait()
        return [block.kept["momentum"] for block in blocks]


def chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield chunks of 1-D tensors that fit a cache."""
    size = 1 << 16 if tensors[0].device.type == "cpu" else 1 << 24
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def decay_rates(group: Mapping[str, Any]) -> tuple[float, float]:
    """Return the bias corrections of the momentum and of the root of the variance."""
    if not group["bias_correction"]:
        return 1.0, 1.0
    first, second = group["betas"]
    return 1 - first ** group["step"], (1 - second ** group["variance_step"]) ** 0.5
