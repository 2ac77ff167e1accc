"""New process groups: what is done when a rank cannot be heard in one, and against strangers who take its place."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise import compat
from shardwise.comm import groups
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.errors import PeerLostError
from tests.device.recorded import imagined
from tests.harness import on_ranks, run_ranks

CPU = torch.device("cpu")


def works(comm: Communicator) -> bool:
    total = torch.ones(8)
    comm.all_reduce(total, "total").wait()
    return bool((total == comm.world).all())


def with_deaf_ranks(attempts: int, part: bool) -> tuple[bool | str, int]:
    """Make a group in which the last rank hears nobody for so many attempts."""
    seen, original = [], groups._missing

    def missing(group: dist.ProcessGroup, key: str) -> int | None:
        seen.append(group.group_name)
        found = original(group, key)
        assert found is None
        return 0 if dist.get_rank() == dist.get_world_size() - 1 and len(seen) <= attempts else None

    comm = Communicator(None, Ledger(), CPU) if part else None
    groups._missing = missing
    try:
        made = (
            comm.part([[at, at + 1] for at in range(0, comm.world, 2)], "part")
            if comm is not None
            else Communicator(None, Ledger(), CPU)
        )
        found: bool | str = works(made)
        made.destroy()
    except PeerLostError as error:
        found = str(error)
    finally:
        groups._missing = original
        if comm is not None:
            comm.destroy()
    assert len(set(seen)) == len(seen)
    return found, len(seen)


@pytest.mark.parametrize(("world", "part"), [(2, False), (4, True)])
def test_a_group_in_which_a_rank_is_not_heard_is_made_again_by_all(world: int, part: bool) -> None:
    # A part's ranks make its group by themselves, and only those of the deaf rank make it again.
    attempts = [1, 1, 3, 3] if part else [3] * world
    assert run_ranks(with_deaf_ranks, world, 2, part) == [(True, count) for count in attempts]


def test_after_some_attempts_it_is_an_error_on_all_ranks() -> None:
    for found, attempts in run_ranks(with_deaf_ranks, 2, 9, False):
        assert "a process group of 2 ranks was made 5 times" in str(found) and attempts == 5


class Options:
    """Those of NCCL's groups, as torch has them."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=-1, max_ctas=-1)
        self._timeout = timedelta(0)


def made_on_nccl(ranks: list[int], monkeypatch: pytest.MonkeyPatch, purpose: str = "reduce") -> list[dict[str, Any]]:
    """Return the arguments of groups on NCCL, in a job of 4 ranks whose default group has a device."""
    asked: list[dict[str, Any]] = []
    device = torch.device("cuda", 0)

    def make_group(
        ranks: list[int], name: str, timeout: timedelta, backend: str, options: Any, device: Any
    ) -> dist.ProcessGroup:
        bound = dist.group.WORLD.bound_device_id
        asked.append({"ranks": ranks, "name": name, "options": options, "bound": bound, "device": device})
        return dist.group.WORLD

    with imagined(4, 0):
        dist.group.WORLD.bound_device_id = device
        monkeypatch.setattr(compat, "make_group", make_group)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
        groups.new_group(ranks, timedelta(minutes=3), "nccl", device, purpose)
        assert dist.group.WORLD.bound_device_id == device
    return asked


def test_ranks_that_make_a_group_by_themselves_do_not_split_the_default_groups_communicator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # That takes all ranks, and torch does it where the default group has a device.
    (asked,) = made_on_nccl([0, 2], monkeypatch)
    assert asked["bound"] is None
    assert (asked["ranks"], asked["device"]) == ([0, 2], torch.device("cuda", 0))
    assert "reduce" in asked["name"]


def test_collectives_of_devices_go_before_what_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    (asked,) = made_on_nccl([0, 1, 2, 3], monkeypatch)
    assert asked["bound"] is not None  # all ranks are here: it may be split
    assert asked["options"].is_high_priority_stream
    assert asked["options"].config.max_ctas == -1
    assert asked["options"]._timeout == timedelta(minutes=3)


def test_receives_that_wait_long_leave_the_device_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("activations_up", "gradients_down"):
        (asked,) = made_on_nccl([0, 1], monkeypatch, kind)
        assert not asked["options"].is_high_priority_stream
        assert (asked["options"].config.min_ctas, asked["options"].config.max_ctas) == (1, 4)
        assert asked["options"]._timeout == timedelta(minutes=3)


@on_ranks(2)
def test_an_engine_may_outlive_the_process_groups() -> None:
    comm = Communicator(None, Ledger(), CPU)
    assert works(comm)
    dist.destroy_process_group()
    comm.destroy()
