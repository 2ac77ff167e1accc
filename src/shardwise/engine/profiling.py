"""What rank 0 tells of an engine's steps while it trains: what they compute. The other ranks do nothing."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from shardwise.compat import never_compiled
from shardwise.device.clock import Instant, now, seconds_between
from shardwise.profile import ModuleProfile
from shardwise.profile.counting import FlopCount
from shardwise.profile.report import report, summary, write
from shardwise.profile.tree import profile_of
from shardwise.utils.logging import warn_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.engine.batch import Batches
    from shardwise.engine.step import TrainStep
    from shardwise.zero.model import ShardedModel

_NOTHING = contextlib.nullcontext()


class Profiling:
    """The section `flops_profiler` of one engine.

    Args:
        sharded: the model.
        config: validated.
        job: all ranks; the first one profiles.
        batches: sizes.
        steps: counts the steps.

    Attributes:
        profile: of the step that was profiled; None before.
    """

    def __init__(
        self, sharded: ShardedModel, config: Config, job: Communicator, batches: Batches, steps: TrainStep
    ) -> None:
        self.profile: ModuleProfile | None = None
        self._options = config.flops_profiler
        self._sharded = sharded
        self._job = job
        self._batches = batches
        self._steps = steps
        self._cuda = sharded.device.type == "cuda"
        self._waits = self._options.enabled and job.rank == 0
        self._count: FlopCount | None = None
        self._spans: dict[str, list[tuple[Instant, Instant]]] = {}

    @never_compiled
    def forward(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return self._forward() if self._waits and torch.is_grad_enabled() else _NOTHING

    def _forward(self) -> AbstractContextManager[Any]:
        taken, wanted = self._steps.global_steps, self._options.profile_step
        if taken > wanted:
            warn_once(
                f"flops_profiler.profile_step {wanted}: {taken} steps have been taken already, so none is profiled; "
                f"set it to {taken} or more"
            )
            self._waits = False
        if taken != wanted:
            return _NOTHING
        if self._count is None:
            self._count = FlopCount(self._sharded.module)
            self._count.start()
        return self._count.counting()

    def backward(self) -> AbstractContextManager[Any]:
        """Return the context of a backward pass."""
        return _NOTHING if self._count is None else self._counted_backward(self._count)

    @contextlib.contextmanager
    def _counted_backward(self, count: FlopCount) -> Iterator[None]:
        with self._timed("backward"), count.counting():
            yield

    def step(self) -> AbstractContextManager[Any]:
        """Return the context of a step."""
        return _NOTHING if self._count is None else self._timed("step")

    @contextlib.contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begun = now(self._cuda)
        yield
        self._spans.setdefault(what, []).append((begun, now(self._cuda)))

    def after_step(self) -> None:
        """A window has ended: the profile is complete, if it was the window's."""
        if self._count is None:
            return
        count, self._count, self._waits = self._count, None, False
        count.stop()
        self.profile = profile_of(count, self._sharded.registry.numel_of)
        seconds = {what: sum(seconds_between(*span) for span in spans) for what, spans in self._spans.items()}
        self._spans = {}
        options = self._options
        passes = count.calls[count.model]
        head = summary(
            self.profile,
            title=(
                f"profile of {type(count.model).__name__}, step {options.profile_step}: what rank 0 of "
                f"{self._job.world} computes for {passes} micro-batches of {self._batches.micro} samples"
            ),
            backward_s=seconds.get("backward", 0.0),
            step_s=seconds.get("step", 0.0),
            recompute_factor=options.recompute_fwd_factor,
        )
        if "backward" not in seconds:
            head.append("backward passes have not been seen: call engine.backward(loss), not loss.backward()")
        lines = report(
            self.profile, head, depth=options.module_depth, top=options.top_modules, detailed=options.detailed
        )
        write(lines, options.output_file)

    def close(self) -> None:
        """Take everything off the model."""
        if self._count is not None:
            self._count.stop()
            self._count = None
