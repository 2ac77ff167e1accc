"""Checkpoints on signals: one rank gets the signal, all save at the same step, and steps send no more."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.errors import CheckpointError, CheckpointPathError, UsageError
from tests.checkpoint.job import Run, config, differences
from tests.harness import run_ranks, thorough

END, GO_ON = "SIGTERM", "SIGUSR2"  # SIGUSR1 shows the stacks of the pool's processes


def collectives(run: Run) -> list[tuple[str, str]]:
    return [(record.op, record.label) for record in run.engine.ledger.records()]


def one_rank_is_told(root: str, stage: int, dtype: str) -> None:
    rank = dist.get_rank()
    before = {name: signal.getsignal(getattr(signal, name)) for name in (END, GO_ON)}
    # Without dropout: both draw from the same random numbers.
    silent = Run(config(stage, dtype), seed=1, noise=False)
    section = {"on_signal": {"save_dir": root, "save_on": [GO_ON]}}
    run = Run(config(stage, dtype, checkpoint=section), seed=1, noise=False)
    run.engine.provide_client_state(lambda: {"seen": run.engine.global_steps})
    silent.step()
    run.step()
    already = len(collectives(silent)), len(collectives(run))
    assert silent.step() == run.step()
    assert collectives(silent)[already[0] :] == collectives(run)[already[1] :]
    assert not os.path.exists(root)

    if rank == 1:
        os.kill(os.getpid(), getattr(signal, GO_ON))
    run.micro_batch()
    assert not os.path.exists(root)  # in the middle of a window nothing can be saved
    run.micro_batch()
    silent.step()
    assert CheckpointDirectory(root).latest() == "global_step3"
    with Checkpoint(f"{root}/global_step3") as saved:
        assert saved.decode(saved.manifest.client) == {"seen": 3}
    # Training goes on as if nothing had been, and once is once.
    assert silent.step() == run.step()
    assert differences(silent.fingerprint(), run.fingerprint()) == []
    assert sorted(os.listdir(root)) == ["global_step3", "latest"]

    if rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run.step()
    assert ended.value.code == 143
    assert CheckpointDirectory(root).latest() == "global_step5"
    other = Run(config(stage, dtype), seed=2, noise=False)
    assert other.engine.resume(root) == {"seen": 5}
    silent.step()
    assert differences(silent.fingerprint(), other.fingerprint()) == []

    # Where no step is taken for a long time.
    if rank == 1:
        os.kill(os.getpid(), getattr(signal, GO_ON))
    os.unlink(f"{root}/latest") if rank == 0 else None
    dist.barrier()
    run.engine.check_signals()
    assert CheckpointDirectory(root).latest() == "global_step5"
    silent.engine.check_signals()  # which watches nothing

    # Where the script's function fails on one rank.
    run.engine.provide_client_state(lambda: {"seen": 1 // (1 - rank)})
    if rank == 1:
        os.kill(os.getpid(), getattr(signal, GO_ON))
    dist.barrier()
    os.unlink(f"{root}/latest") if rank == 0 else None
    run.engine.check_signals()
    assert not os.path.exists(f"{root}/latest")
    run.engine.destroy()
    assert {name: signal.getsignal(getattr(signal, name)) for name in (END, GO_ON)} == before


@pytest.mark.parametrize(("stage", "dtype"), [thorough(0, "fp32"), thorough(3, "bf16"), (2, "fp16")])
def test_all_ranks_save_at_the_same_step_when_one_is_told(stage: int, dtype: str, tmp_path: Path) -> None:
    run_ranks(one_rank_is_told, 2, str(tmp_path / "runs"), stage, dtype)


def failing_and_mistaken(root: str) -> None:
    rank = dist.get_rank()
    run = Run(config(1), seed=1)
    run.engine.checkpoint_on_signal(f"{root}/runs", save_on=[GO_ON])
    if rank == 0:
        Path(root, "runs").touch()  # no directory any more
        os.kill(os.getpid(), getattr(signal, GO_ON))
    dist.barrier()
    run.step()  # is logged, and training goes on
    assert run.engine.global_steps == 1
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(CheckpointError, match="is a file"):
        run.step()
    dist.barrier()
    if rank == 0:
        os.unlink(f"{root}/runs")
        os.mkdir(f"{root}/runs")
    dist.barrier()

    for name in ("SIGKILL", "TERM", 15):
        with pytest.raises(UsageError, match=r"name of a signal that can be handled.*found"):
            run.engine.checkpoint_on_signal(root, exit_on=[name])
    with pytest.raises(UsageError, match="SIGTERM cannot both end the job"):
        run.engine.checkpoint_on_signal(root, save_on=["SIGTERM"])
    with pytest.raises(UsageError, match="ranks watch different signals"):
        run.engine.checkpoint_on_signal(root, save_on=[GO_ON] if rank == 0 else ["SIGXCPU"])
    with pytest.raises(CheckpointPathError, match="save_dir"):
        run.engine.checkpoint_on_signal("")
    # Two engines: the one that has asked last.
    other = Run(config(1), seed=1)
    other.engine.checkpoint_on_signal(f"{root}/other", save_on=[GO_ON])
    os.kill(os.getpid(), getattr(signal, GO_ON))
    run.step()
    other.step()
    assert not os.listdir(f"{root}/runs") and CheckpointDirectory(f"{root}/other").latest() == "global_step1"
    # A child process is not a rank.
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM


def test_failures_and_mistakes(tmp_path: Path) -> None:
    run_ranks(failing_and_mistaken, 2, str(tmp_path))
