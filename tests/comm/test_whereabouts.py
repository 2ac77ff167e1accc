"""What a rank says when a collective fails: who did not answer, where each rank is, and for how long it has waited."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardwise.comm import desync
from shardwise.comm.communicator import Communicator
from shardwise.comm.groups import PURPOSES
from shardwise.comm.intra_node_transport import IntraNodeTransport
from shardwise.comm.ledger import Ledger
from shardwise.errors import ShardwiseError
from tests.harness import RankFailure, run_ranks, thorough
from tests.harness.training import SGD, engine_of

CPU = torch.device("cpu")
LIMIT_S = 1.0
Told = tuple[str, str, float]


def limit(comm: Communicator) -> None:
    """Shorten the limit, in groups that had time to start."""
    comm.connect(*PURPOSES)
    assert comm._cache is not None
    for group in comm._cache._made.values():
        distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S), group)
    if isinstance(comm._backend, IntraNodeTransport):
        comm._backend._limit = timedelta(seconds=LIMIT_S)


def tell(call: Any) -> Told:
    """Call something that fails; return the kind of error, its message, and the seconds that it took."""
    begin = time.monotonic()
    with pytest.raises(ShardwiseError) as caught:
        call()
    assert caught.value.__cause__ is not None
    told = type(caught.value).__name__, str(caught.value), time.monotonic() - begin
    with pytest.raises(ShardwiseError) as again:
        call()
    assert again.value is caught.value  # the first failure counts
    return told


# -- collectives -------------------------------------------------------------------------------------------------------


def one_sleeps() -> Told | None:
    comm = Communicator(None, Ledger(), CPU)
    limit(comm)
    comm.all_reduce(torch.ones(1), "first").wait()
    if comm.rank == 1:
        dist.distributed_c10d._get_default_store().wait(["told"])
        return None
    told = tell(lambda: comm.all_reduce(torch.ones(1), "second").wait())
    dist.distributed_c10d._get_default_store().set("told", "")
    return told


def test_a_rank_that_sleeps_is_named() -> None:
    told = run_ranks(one_sleeps, 2)[0]
    assert told is not None
    kind, message, seconds = told
    assert kind == "PeerLostError"
    assert re.search(
        r"rank 0 of 2 has waited \d+\.\d s for rank 1 in all_reduce 'second' #1 at .*test_where.*:\d+", message
    )
    assert "last completed: all_reduce 'first' #0" in message
    assert "rank 1: has not said where it is" in message
    assert "save_checkpoint()" in message
    assert 0.9 * LIMIT_S < seconds < LIMIT_S + desync.PATIENCE_S + 1.5


def different_collectives(same_kind: bool) -> Told:
    comm = Communicator(None, Ledger(), CPU)
    comm.barrier()
    limit(comm)
    if comm.rank == 0:
        full = torch.zeros(8)
        return tell(lambda: comm.all_gather([(full, full[:4])], "blocks.1").wait())
    if same_kind:
        full = torch.zeros(16)
        return tell(lambda: comm.all_gather([(full, full[8:])], "blocks.2").wait())
    return tell(lambda: comm.reduce_scatter([(torch.zeros(4), torch.zeros(8))], "blocks.2").wait())


@pytest.mark.parametrize("same_kind", [thorough(False), True])
def test_ranks_in_different_collectives_are_compared(same_kind: bool) -> None:
    """Also where sizes differ within a kind, for which Gloo would end the process."""
    results = run_ranks(different_collectives, 2, same_kind)
    other = "all_gather" if same_kind else "reduce_scatter"
    for rank, (kind, message, _) in enumerate(results):
        assert kind == "DesyncError", message
        assert re.search(r"all_gather 'blocks\.1' #0 .*at ", message)
        assert re.search(rf"{other} 'blocks\.2' #0 .*at ", message)
        assert f"  rank {1 - rank}: waits in " in message
        assert "wait for each other in different collectives" in message
        assert "`with engine.gathered():`" in message


def leave_or_wait() -> str:
    comm = Communicator(None, Ledger(), CPU)
    comm.barrier()
    if comm.rank == 1:
        desync.publish_end()
        dist.destroy_process_group()
        return ""
    return tell(lambda: comm.barrier("next"))[1]


def test_a_rank_that_has_ended_is_not_called_a_crash() -> None:
    message = run_ranks(leave_or_wait, 2)[0]
    assert "rank 0 of 2 " in message
    assert "in all_reduce 'next' #1 at " in message
    assert "Did it get fewer batches than the others?" in message
    assert "GLHF" not in message


# -- engines -----------------------------------------------------------------------------------------------------------


def train(how: str, folder: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    engine = engine_of(model, 3, SGD)
    odd = dist.get_rank() == 1
    limit(engine.job)
    for number in range(3):
        if how == "save" and odd and number == 1:
            engine.save_checkpoint(folder)
        engine.backward(engine(torch.ones(1, 4)).sum())
        if not (how == "skip" and odd and number == 1):
            engine.step()


@pytest.mark.parametrize(
    ("how", "own"), [("save", "exchange 'checkpoint'"), thorough("skip", "all_reduce 'gradient_norm'")]
)
def test_an_engine_on_other_ways_than_the_others_says_where_each_rank_is(how: str, own: str, tmp_path) -> None:
    with pytest.raises(RankFailure) as caught:
        run_ranks(train, 2, how, str(tmp_path))
    messages = [failure.message for failure in caught.value.failures if failure.kind == "DesyncError"]
    assert messages, str(caught.value)
    assert own in messages[0]
    assert "all_gather '" in messages[0]
    assert messages[0].count("test_whereabouts.py:") == 2


def test_a_process_without_process_groups_publishes_no_end() -> None:
    """A script that has destroyed them ends without an error."""
    desync.publish_end()
