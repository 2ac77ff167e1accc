"""The pool of ranks itself: order of results, failures, timeouts, isolation and reuse."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, RankTimeout, run_ranks


def rank_and_env(offset, scale=1):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    return offset + scale * dist.get_rank(), [int(os.environ[n]) for n in names], os.environ["MASTER_ADDR"]


def process_id():
    return os.getpid()


def fail_on(rank):
    if dist.get_rank() == rank:
        raise KeyError("the cause")
    dist.all_reduce(torch.ones(1))


def fail_everywhere():
    raise ValueError("everyone")


def hang_on(rank):
    if dist.get_rank() == rank:
        time.sleep(60)


def die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def spoil_state():
    os.environ["SPOILT"] = "1"
    os.environ["RANK"] = "77"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(99)


def observe_state():
    return (
        os.environ.get("SPOILT"),
        os.environ["RANK"],
        os.getcwd(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
        (torch.rand(1).item(), random.random()),
    )


def warn_future():
    warnings.warn("renamed", FutureWarning, stacklevel=1)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_come_in_rank_order(world):
    results = run_ranks(rank_and_env, world, 10, scale=2)
    assert results == [(10 + 2 * r, [r, r, world, world], "127.0.0.1") for r in range(world)]


def test_an_exception_names_the_rank_and_shows_its_traceback():
    with pytest.raises(RankFailure, match=r"rank 1 of 3 raised KeyError") as caught:
        run_ranks(fail_on, 3, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, KeyError)
    text = str(caught.value)
    assert "in fail_on" in text
    assert "ranks [0, 2] failed afterwards" in text
    assert "raised RuntimeError" not in text


def test_a_failure_leaves_the_pool_usable():
    pids = run_ranks(process_id, 2)
    with pytest.raises(RankFailure, match="everyone") as caught:
        run_ranks(fail_everywhere, 2)
    assert "raised the same" in str(caught.value)
    assert run_ranks(process_id, 2) == pids


def test_a_timeout_names_the_rank_and_its_stack_and_starts_new_workers():
    pids = run_ranks(process_id, 2)
    started = time.monotonic()
    with pytest.raises(RankTimeout, match=r"ranks \[1\] of 2 did not answer within 1 s") as caught:
        run_ranks(hang_on, 2, 1, timeout=1)
    assert time.monotonic() - started < 30  # it hangs for a minute
    assert "in hang_on" in str(caught.value)
    assert not set(run_ranks(process_id, 2)) & set(pids)


def test_a_dead_worker_is_reported_with_its_exit_code():
    with pytest.raises(RankFailure, match=r"rank 0 ended with exit code -9"):
        run_ranks(die_on, 2, 0)
    assert len(run_ranks(process_id, 2)) == 2


def test_state_does_not_leak_into_the_next_call():
    before = run_ranks(observe_state, 2)
    run_ranks(spoil_state, 2)
    assert run_ranks(observe_state, 2) == before
    assert [state[1] for state in before] == ["0", "1"]


def test_future_warnings_are_errors_in_ranks():
    with pytest.raises(RankFailure, match="renamed"):
        run_ranks(warn_future, 1)
