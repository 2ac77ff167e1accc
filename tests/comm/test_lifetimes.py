"""No buffer outlives its last reader, with everything switched on that looks at collectives."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.comm import communicator, native
from shardwise.comm.collective_queue import CollectiveQueue
from shardwise.comm.ledger import followed
from shardwise.comm.logger import comms_logger
from shardwise.compat import all_gather_single
from shardwise.device.streams import HostStreams
from shardwise.engine.parallel import SharedSequences
from tests.device.recorded import imagined
from tests.device.recording import recording
from tests.harness import thorough
from tests.harness.training import Setting, config_of, start
from tests.models import CASES
from tests.scale.test_groups import TENSOR, Net


class Work:
    """A launched collective; as torch's `Work` on NCCL it keeps its outputs for as long as it lives itself."""

    def __init__(self, outputs: Sequence[torch.Tensor]) -> None:
        self.outputs = list(outputs)

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return True


class Outputs:
    """The buffers that collectives have written to.

    No cycle of references is collected: a buffer has to go with its last reader, not with the next run of `gc`.

    Attributes:
        most: the most bytes of outputs of all-gathers that were alive at a launch.
    """

    def __init__(self) -> None:
        self._gathered: list[weakref.ref[torch.UntypedStorage]] = []
        self._others: list[weakref.ref[torch.UntypedStorage]] = []
        self.most = 0

    def launch(
        self, op: Callable[..., Any], pairs: Sequence[native.Pair], group: dist.ProcessGroup, **_: Any
    ) -> list[Work]:
        storages = self._gathered if op is all_gather_single else self._others
        for out, own in pairs:
            parts = max(1, out.numel() // max(1, own.numel()))
            out.copy_(own.repeat(parts)[: out.numel()].view_as(out))
            storages.append(weakref.ref(out.untyped_storage()))
        self.most = max(self.most, self.gathered)
        return [Work([out for out, _ in pairs])] if pairs else []

    @property
    def gathered(self) -> int:
        """The bytes of outputs of all-gathers that still are referred to."""
        return sum(self._alive(self._gathered).values())

    @property
    def others(self) -> int:
        """The bytes of outputs of other collectives only that still are referred to."""
        gathered = self._alive(self._gathered)
        return sum(size for storage, size in self._alive(self._others).items() if storage not in gathered)

    @staticmethod
    def _alive(storages: list[weakref.ref[torch.UntypedStorage]]) -> dict[int, int]:
        found = [storage for one in storages if (storage := one()) is not None]
        storages[:] = [weakref.ref(storage) for storage in found]
        return {one._cdata: one.nbytes() for one in found}


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


def alive_after_steps(
    model: str, world: int, stage: int, extra: tuple[tuple[str, Any], ...]
) -> tuple[list[tuple[int, int]], int, list[int]]:
    """Return outputs of all-gathers and of others after each step, the most of the first, and the bytes of all units.

    Of units the first number is that of the sharded ones, the second that of the others.
    """
    outputs, case, alive = Outputs(), CASES[model], []
    with imagined(world, 0), recording(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "launch_together", outputs.launch)
        patch.setattr("shardwise.comm.stall_watchdog.default_store", dist.HashStore)
        engine = start(case, Setting(stage, precision="bf16", extra=extra))
        assert (followed() is not None) is ("stall_limit" not in dict(extra))
        for step in range(3):
            engine.backward(case.loss(engine, case.data(step, 0, 0, torch.bfloat16)))
            engine.step()
            alive.append((outputs.gathered, outputs.others))
        units = [sum(unit.nbytes for unit in engine.sharded.units if unit.sharded is kind) for kind in (True, False)]
        engine.destroy()
    comms_logger.configure(enabled=False, path="")
    return alive, outputs.most, units


@pytest.mark.parametrize("world", [2, thorough(8)])
def test_no_gathered_byte_outlives_its_last_reader(world: int, tmp_path: Path) -> None:
    bare, most, (sharded, _) = alive_after_steps("gpt", world, 3, (("stall_limit", 0),))
    watched, most_watched, _ = alive_after_steps("gpt", world, 3, observers(tmp_path))
    assert watched == bare == [(0, 0)] * 3
    # Observers send a few numbers. In a pass a few units are whole at a time.
    assert most <= most_watched <= most + 512 and most_watched < sharded


@pytest.mark.parametrize(
    ("model", "world", "stage"),
    [
        ("odd_mlp", 2, 2),
        *(thorough(*one) for one in (("gpt", 2, 1), ("gpt", 8, 2), ("gpt", 8, 1))),
    ],
)
def test_updated_parameters_are_all_that_stays_of_an_all_gather(
    model: str, world: int, stage: int, tmp_path: Path
) -> None:
    """Rows of all-to-alls that carry gradients go with the sum that is formed of them."""
    watched, most, (_, whole) = alive_after_steps(model, world, stage, observers(tmp_path))
    # A small all-reduce gathers the numbers of all ranks: observers sum one number of each tensor.
    assert watched == [(whole, 0)] * 3 and most <= whole + 512 * world


@pytest.mark.parametrize("stage", [thorough(1), 3])
def test_no_activation_that_ranks_exchange_outlives_its_last_reader(stage: int, tmp_path: Path) -> None:
    """Outputs of collectives of tensor, sequence and expert parallelism."""
    outputs, alive = Outputs(), []
    keys = {"tensor_parallel": TENSOR, "sequence_parallel_size": 2, **dict(observers(tmp_path))}
    config = config_of(stage, {"type": "Adam", "params": {"lr": 0.1}}, rows=1, **keys)
    with imagined(8, 0), recording(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "launch_together", outputs.launch)
        patch.setattr("shardwise.comm.stall_watchdog.default_store", dist.HashStore)
        patch.setattr(SharedSequences, "compare", lambda *_, **__: None)  # imagined ranks have no tokens
        patch.setattr(communicator.Communicator, "barrier", lambda *_: None)
        engine = shardwise.initialize(model=Net(2), config=config)[0]
        assert followed() is not None
        for _ in range(3):
            engine.backward(engine(torch.ones(1, 2, 8)))
            engine.step()
            alive.append((outputs.gathered, outputs.others))
        whole = sum(unit.nbytes for unit in engine.sharded.units if not unit.sharded)
        engine.destroy()
    comms_logger.configure(enabled=False, path="")
    assert alive == [(whole, 0)] * 3


@pytest.mark.parametrize("dry", [False, True])
def test_buffers_of_all_collectives_of_a_chain_are_reported(dry: bool) -> None:
    limit, made = timedelta(seconds=10), list[torch.Tensor]()
    queue = CollectiveQueue(HostStreams(), waits_on_host=True, name="chains", limit=limit, imagined=dry)
    buffers = [torch.empty(1), torch.empty(2), torch.empty(3)]
    queue.start([partial(native.Works, (), scratch=[buffer]) for buffer in buffers], made.append).wait()
    queue.close()
    assert list(map(id, made)) == list(map(id, buffers))


def test_a_queue_that_is_dropped_ends_its_thread() -> None:
    queue = CollectiveQueue(HostStreams(), waits_on_host=True, name="dropped", limit=timedelta(seconds=10))
    queue.start([partial(native.Works, ())] * 2).wait()
    (thread,) = (one for one in threading.enumerate() if one.name == "shardwise-dropped")
    del queue
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
