"""Profiler of rank 0: FLOPs, times, memory and throughput of training steps."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from shardwise.compat import never_compiled
from shardwise.engine.observers import NOTHING, Phase, StepObserver
from shardwise.memory import phases
from shardwise.memory.phases import MemoryPhases
from shardwise.precision.autocast import autocast_dtype
from shardwise.profile import ModuleProfile
from shardwise.profile.breakdown import BACKWARD, FORWARD, STEP, Breakdown
from shardwise.profile.counting import FlopCount
from shardwise.profile.peaks import peak_of
from shardwise.profile.rates import Rates
from shardwise.profile.report import report, summary, write
from shardwise.profile.tree import profile_of
from shardwise.utils.logging import logger, warn_once

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Config
    from shardwise.engine.batch import Batches
    from shardwise.engine.observers import StepEvents
    from shardwise.engine.step import TrainStep
    from shardwise.zero.model import ShardedModel

_PARTS = {"forward": FORWARD, "backward": BACKWARD, "step": STEP}
_AFTER = {FORWARD: phases.FORWARD, BACKWARD: phases.BACKWARD, STEP: phases.STEP}


@dataclass(eq=False, repr=False)
class Profiling(StepObserver):
    """Serves the sections `flops_profiler` and `timers`, and the keys `wall_clock_breakdown` and `memory_breakdown`.
    `profile`: of the profiled step, or None. `count`: its FLOP counter; modules are then called by `counted`.
    `_readers`: number of ranks with tokens of their own.
    """

    _sharded: ShardedModel
    _config: Config
    _job: Communicator
    _readers: int
    _batches: Batches
    _steps: TrainStep
    _events: StepEvents

    def __post_init__(self) -> None:
        sharded, config, job = self._sharded, self._config, self._job
        self.profile: ModuleProfile | None = None
        self.count: FlopCount | None = None
        self._options = config.flops_profiler
        self._cuda = sharded.device.type == "cuda"
        self._waits = self._options.enabled and job.rank == 0
        self._parts = Breakdown(self._cuda)  # of the step that is profiled
        every = config.steps_per_print
        self._every = int(every) if every and math.isfinite(every) and job.rank == 0 else 0
        # Keys of their own print after each step, even without `steps_per_print`.
        asked = job.rank == 0 and (config.wall_clock_breakdown or config.memory_breakdown)
        self._interval = self._every or int(asked)
        self._times: Breakdown | None = None
        self._timed = 0  # steps since times were reported
        if (self._interval and config.wall_clock_breakdown) or (self._every and self._options.enabled):
            self._times = Breakdown(self._cuda)
        self._rates: Rates | None = None
        self._samples = 0  # before the step
        if self._every and config.timers.throughput.enabled:
            peak = None
            if self._cuda:
                dtype = autocast_dtype(config) or sharded.policy.compute_dtype or torch.float32
                peak = peak_of(torch.cuda.get_device_name(sharded.device), dtype)
            self._rates = Rates(self._readers, config.timers.throughput.synchronized, sharded.device, peak)
        self._held: MemoryPhases | None = None
        if self._interval and config.memory_breakdown:
            self._held = MemoryPhases(sharded.accountant, sharded.device)
        self.active = self._waits or self._interval > 0 or self._rates is not None

    # -- observation -------------------------------------------------------------------------------------------------

    @override
    def during(self, phase: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        forward = phase == "forward"
        if forward and self._rates is not None and self._sharded.model_pass.in_first_chunk:
            self._rates.saw(args, kwargs)
        if forward and self._waits:
            self._begin_count()
        if phase == "step":
            self._samples = self._steps.global_samples
        held = None if self._held is None or (self._steps.global_steps + 1) % self._interval else self._held
        # Most steps read only a clock.
        if held is None and (forward or self.count is None):
            return self._clocked(_PARTS[phase])
        return self._watched(_PARTS[phase], held)

    def _clocked(self, part: str) -> AbstractContextManager[Any]:
        if self._times is None:
            return NOTHING
        return self._times.backward() if part == BACKWARD else self._times.part(part)

    @contextlib.contextmanager
    def _watched(self, part: str, held: MemoryPhases | None) -> Iterator[None]:
        if held is not None and part == FORWARD:
            held.look(phases.BEFORE)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._clocked(part))
            if self.count is not None and part != FORWARD:
                stack.enter_context(self._parts.part(part))
                if part == BACKWARD:
                    stack.enter_context(self.count.counting())
            yield
        if held is not None:
            held.look(_AFTER[part])

    @never_compiled
    def counted(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the module and count FLOPs; not compiled, because operators are counted only in eager mode."""
        assert self.count is not None
        with self.count.counting() if torch.is_grad_enabled() else NOTHING:
            return self._sharded.module(*args, **kwargs)

    @override
    def after_step(self) -> None:
        self._timed += 1
        if self._rates is not None:
            self._rates.stepped(self._steps.global_samples - self._samples)
        if self._interval and self._steps.global_steps % self._interval == 0:
            self._tell_times()
        if self.count is not None:
            self._tell_profile(self.count)
            if self._rates is not None:
                self._rates.restart()  # counting takes time

    def close(self) -> None:
        """Remove the hooks from the model."""
        if self.count is not None:
            self.count.stop()
            self.count = None

    # -- times -------------------------------------------------------------------------------------------------------

    def _tell_times(self) -> None:
        steps, self._timed = self._timed, 0
        if self._times is not None:
            means = {part: 1e3 * seconds / steps for part, seconds in self._times.read().items()}
            told = " | ".join(f"{part}: {mean:.2f}" for part, mean in means.items())
            logger.info("step=%d time (ms) | %s", self._steps.global_steps, told)
            self._events.write_times(means)
        if self._held is not None:
            logger.info("step=%d memory of rank 0\n%s", self._steps.global_steps, self._held.table())
        rates = self._rates.read(None if self.profile is None else self.profile.flops) if self._rates else ""
        if rates:
            logger.info("step=%d throughput: %s", self._steps.global_steps, rates)

    # -- FLOPs of a step ---------------------------------------------------------------------------------------------

    def _begin_count(self) -> None:
        taken, wanted = self._steps.global_steps, self._options.profile_step
        if taken > wanted:
            warn_once(
                f"flops_profiler.profile_step {wanted}: {taken} steps have been taken already, so none is profiled; "
                f"set it to {taken} or more"
            )
            self._waits = False
        elif taken == wanted and self.count is None:
            self.count = FlopCount(self._sharded.module)
            self.count.start()

    def _tell_profile(self, count: FlopCount) -> None:
        self.count, self._waits = None, False
        count.stop()
        self.profile = profile_of(count, self._sharded.registry.numel_of)
        seconds = self._parts.read()
        options = self._options
        micro_batches = count.calls[count.model] // len(self._sharded.model_pass.chunks)
        head = summary(
            self.profile,
            title=(
                f"profile of {type(count.model).__name__}, step {options.profile_step}: what rank 0 of "
                f"{self._job.world} computes for {micro_batches} micro-batches of {self._batches.micro} samples"
            ),
            backward_s=seconds.get(BACKWARD, 0.0),
            step_s=seconds.get(STEP, 0.0),
            recompute_factor=options.recompute_fwd_factor,
        )
        if BACKWARD not in seconds:
            head.append("backward passes have not been seen: call engine.backward(loss), not loss.backward()")
        lines = report(
            self.profile, head, depth=options.module_depth, top=options.top_modules, detailed=options.detailed
        )
        write(lines, options.output_file)
