"""No buffer outlives its last reader, with everything switched on that looks at collectives."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm import native
from shardwise.comm.logger import comms_logger
from shardwise.comm.rank_status import is_following
from shardwise.device.recording import recording
from tests.device.recorded import imagined
from tests.models import CASES
from tests.zero.training import Setting, start


class Work:
    """A launched collective; as torch's `Work` on NCCL it keeps its outputs for as long as it lives itself."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


class Outputs:
    """What collectives have written to."""

    def __init__(self) -> None:
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []

    def launch(self, _: Callable[..., Any], pairs: Sequence[native.Pair], group: dist.ProcessGroup) -> list[Work]:
        for out, own in pairs:
            parts = max(1, out.numel() // max(1, own.numel()))
            out.copy_(own.repeat(parts)[: out.numel()].view_as(out))
            self._storages.append(weakref.ref(out.untyped_storage()))
        return [Work([out for out, _ in pairs])] if pairs else []

    def alive(self) -> int:
        """Return the bytes that still are referred to."""
        gc.collect()
        return sum(storage.nbytes() for storage in {found._cdata: found for found in self._found()}.values())

    def _found(self) -> list[torch.UntypedStorage]:
        return [storage for one in self._storages if (storage := one()) is not None]


def observers(directory: Path) -> tuple[tuple[str, Any], ...]:
    """Everything in the configuration that looks at collectives or values of a step."""
    return (
        ("comms_logger", {"enabled": True, "path": str(directory / "comms")}),
        ("wall_clock_breakdown", True),
        ("memory_breakdown", True),
        ("anomaly_watch", {"enabled": True, "trace": "always"}),
        ("timeline", {"enabled": True, "path": str(directory / "timeline"), "start_step": 0, "steps": 50}),
        ("csv_monitor", {"enabled": True, "output_path": str(directory / "csv")}),
        ("run_log", {"enabled": True, "path": str(directory / "log")}),
        ("strict_sync", True),
    )


def alive_after_steps(model: str, world: int, stage: int, extra: tuple[tuple[str, Any], ...]) -> list[int]:
    outputs, case, alive = Outputs(), CASES[model], []
    with imagined(world, 0), recording(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_launch", outputs.launch)
        patch.setattr("shardwise.comm.stall_watchdog.default_store", dist.HashStore)
        engine = start(case, Setting(stage, precision="bf16", extra=extra))
        assert is_following() is ("stall_limit" not in dict(extra))
        for step in range(3):
            engine.backward(case.loss(engine, case.data(step, 0, 0, torch.bfloat16)))
            engine.step()
            alive.append(outputs.alive())
        engine.destroy()
    return alive


@pytest.mark.parametrize(
    ("model", "world", "stage"),
    [
        ("odd_mlp", 2, 2),
        ("gpt", 8, 3),
        *(pytest.param(*one, marks=pytest.mark.thorough) for one in (("gpt", 2, 3), ("gpt", 8, 1))),
    ],
)
def test_no_output_outlives_its_last_reader(model: str, world: int, stage: int, tmp_path: Path) -> None:
    bare = alive_after_steps(model, world, stage, (("stall_limit", 0),))
    watched = alive_after_steps(model, world, stage, observers(tmp_path))
    comms_logger.configure(enabled=False, path="")
    assert watched == bare and bare[0] >= bare[-1]
