"""A run of the autotuner, from inside: what was built, how fast it is, and the end of the process."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from shardwise.engine.observers import NOTHING, Phase, StepObserver
from shardwise.trees import tensors_in

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Resolution
    from shardwise.engine.batch import Batches
    from shardwise.engine.memory import MemoryReporting
    from shardwise.zero.model import ShardedModel


class TuningRun(StepObserver):
    """Serves the section `autotuning` in a run that `shardwise run --autotuning` has started.

    The first run takes one step and writes facts and plans of the model. Every other run measures some steps and writes
    the result. All ranks then leave by `SystemExit`.
    """

    def __init__(
        self,
        resolution: Resolution,
        sharded: ShardedModel,
        batches: Batches,
        memory: MemoryReporting,
        job: Communicator,
    ) -> None:
        options = resolution.config.autotuning
        self._resolution, self._options = resolution, options
        self._sharded, self._batches, self._memory, self._job = sharded, batches, memory, job
        self._facts = options.model_info_path if options.model_info.profile else None
        self.active = options.enabled and (self._facts is not None or options.metric_path is not None)
        self._steps = 0
        self._began = 0.0
        self._rows: set[int] = set()

    @override
    def during(self, phase: Phase, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> AbstractContextManager[Any]:
        if phase == "forward":
            first = next((one for one in tensors_in((args, kwargs)) if one.dim()), None)
            if first is not None:
                self._rows.add(first.shape[0])
        return NOTHING

    @override
    def after_step(self) -> None:
        """Count the step; after the last one write the result and end the process."""
        self._steps += 1
        options = self._options
        start = max(2, options.start_profile_step)
        if self._facts is not None:
            if self._job.rank == 0:
                _write(self._facts, self._model_facts())
        elif self._steps < options.end_profile_step:
            if self._steps == start - 1:
                self._began = self._now()
            return
        elif self._job.rank == 0:
            assert options.metric_path is not None
            _write(options.metric_path, self._measured(self._now() - self._began, self._steps - start + 1))
        self._job.barrier("autotuning")
        raise SystemExit(0)

    def _now(self) -> float:
        if self._sharded.device.type == "cuda":
            torch.cuda.synchronize(self._sharded.device)
        return time.perf_counter()

    def _measured(self, seconds: float, steps: int) -> dict[str, Any]:
        return {
            "throughput": self._batches.total * steps / seconds,
            "latency": seconds / steps,
            "memory": self._sharded.accountant.peak_total,
            "rows": self._single_size(),
            "built": self._built(),
        }

    def _model_facts(self) -> dict[str, Any]:
        # Because plans of time import the engine: they are loaded by name in this one run.
        candidates = importlib.import_module("shardwise.plan.candidates")
        planner, rooms = self._memory.planning()
        found: dict[str, Any] = candidates.facts(planner, rooms)
        return found | {"rows": self._single_size(), "built": self._built()}

    def _single_size(self) -> int | None:
        """Return the first dimension of the module's inputs, if it is always the same."""
        return next(iter(self._rows)) if len(self._rows) == 1 else None

    def _built(self) -> dict[str, Any]:
        """Return the configuration with the values that the engine's parts have."""
        found = self._batches.effective(self._resolution)
        found["zero_optimization"]["stage"] = self._sharded.sharding.plan.stage
        return found


def _write(path: str, values: dict[str, Any]) -> None:
    """Write a file at once, because the tuner may end this process at any time."""
    hidden = Path(f"{path}.{os.getpid()}")
    hidden.write_text(json.dumps(values, indent=1), encoding="utf-8")
    os.replace(hidden, path)
