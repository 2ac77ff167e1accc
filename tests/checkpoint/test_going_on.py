"""Which state a job goes on from, and what is never lost on the way there."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.listing import CheckpointDirectory
from shardwise.checkpoint.peer_replicas import make_own
from shardwise.errors import CheckpointError, CheckpointPathError
from tests.checkpoint.hostile import change_a_byte
from tests.checkpoint.job import Run, barrier, config, differences, first_rank, rank
from tests.checkpoint.test_copies import copying, start
from tests.harness import on_ranks
from tests.harness.logs import logged


def fresh(place: str, runs: str, seed: int, **settings: Any) -> tuple[str, int] | None:
    """Resume in a new engine, as a restarted job does; return from where and at which step."""
    run = start(place, copying(2, **settings), seed=seed)
    run.engine.resume(runs)
    found = run.engine.resumed
    run.engine.destroy()
    barrier()
    return None if found is None else (found.source, found.steps)


# -- nothing is taken for a beginning that is not one ------------------------------------------------------------------


@on_ranks(2)
def test_what_cannot_be_read_is_an_error_and_not_a_beginning(tmp_path: Path) -> None:
    runs = f"{tmp_path}/runs"
    run = Run(config(2), seed=1)
    assert run.engine.resume(runs) is None  # nothing there
    run.until(1)
    run.engine.save_checkpoint(runs)
    original = os.listdir

    def listdir(path: Any = ".") -> list[str]:
        if str(path) == runs:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return original(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "listdir", listdir)
        with pytest.raises(CheckpointError, match=r"cannot be listed.*no new run is started|failed on rank 0"):
            run.engine.resume(runs)
    barrier()
    first_rank(lambda: os.truncate(f"{runs}/global_step1/manifest.json", 100))
    with pytest.raises(CheckpointError, match="global_step1"):
        run.engine.resume(runs)
    first_rank(os.unlink, f"{runs}/latest")
    with pytest.raises(CheckpointError, match="none of them can be used"):
        run.engine.resume(runs)
    first_rank(shutil.rmtree, f"{runs}/global_step1")
    assert run.engine.resume(runs) is None
    assert run.engine.global_steps == 1


@on_ranks(2)
def test_a_directory_of_another_program_is_none_of_checkpoints_and_a_checkpoint_is_none_either(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    if rank() == 0:
        (runs / "site").mkdir(parents=True)
        (runs / "site" / "manifest.json").write_text('{"name": "a web page"}')
    barrier()
    run = Run(config(2), seed=1)
    assert run.engine.resume(runs) is None and run.engine.load_checkpoint(runs) == (None, None)
    run.engine.save_checkpoint(runs, tag="a")
    for load in (run.engine.resume, run.engine.load_checkpoint):
        with pytest.raises(CheckpointError, match=r"runs/a: is a checkpoint itself.* give '.*/runs', .* tag 'a'"):
            load(runs / "a")
        (tmp_path / "b").mkdir(exist_ok=True)
        (tmp_path / "b" / "mp_rank_00_model_states.pt").touch()  # as of DeepSpeed
        with pytest.raises(CheckpointError, match="/b: is a checkpoint itself"):
            load(tmp_path / "b")


@on_ranks(2)
def test_damaged_ones_are_passed_over_also_without_a_usable_latest(tmp_path: Path) -> None:
    runs = f"{tmp_path}/runs"
    run = Run(config(2), seed=1)
    for step in (1, 2, 3):
        run.until(step)
        run.engine.save_checkpoint(runs, save_latest=False)
    barrier()
    for step, left in ((3, 2), (2, 1)):
        first_rank(change_a_byte, next(Path(runs, f"global_step{step}").glob("rank00001*")))
        assert Run(config(2), seed=2).engine.resume(runs) == {}
        other = Run(config(2), seed=2)
        other.engine.resume(runs)
        assert other.engine.global_steps == left
        assert other.engine.last_load.passed_over
    first_rank(Path(runs, "latest").write_bytes, b"")
    with logged() as told:
        assert other.load(runs)[0] == f"{runs}/global_step1"
    assert any("global_step3 is skipped" in line for line in told.lines) is (rank() == 0)
    first_rank(os.unlink, f"{runs}/latest")
    first_rank(change_a_byte, next(Path(runs, "global_step1").glob("rank00001*")))
    with pytest.raises(CheckpointError, match=r"global_step3.*global_step2.*global_step1"):
        other.engine.resume(runs)


# -- whoever goes back, stays there ------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_run_that_went_back_does_not_go_on_from_where_it_had_been(tmp_path: Path) -> None:
    runs, place = f"{tmp_path}/runs", f"{tmp_path}/memory"
    run = start(place, copying(2, every=4), seed=1)
    run.engine.resume(runs)
    run.until(2)
    run.engine.save_checkpoint(runs)
    run.until(9)  # copies at 4 and 8
    run.engine.save_checkpoint(runs)
    run.engine.load_checkpoint(runs, "global_step2")
    run.until(3)
    run.engine.save_checkpoint(runs)
    barrier()
    # Neither the copy of step 8 nor the checkpoint of step 9 is of this way.
    assert fresh(place, runs, 2, every=4) == ("disk", 3)
    run.until(4)
    assert fresh(place, runs, 3, every=4) == ("memory", 4)
    # What `latest` is made to name by hand counts, too.
    first_rank(Path(runs, "latest").write_text, "global_step9\n")
    assert CheckpointDirectory(runs).newest_first().tags == ["global_step9", "global_step3", "global_step2"]
    assert fresh(place, runs, 4, every=4) == ("memory", 4)
    first_rank(shutil.rmtree, f"{place}/engine0")
    assert fresh(place, runs, 5, every=4) == ("disk", 9)


@on_ranks(2)
def test_the_copy_that_was_gone_on_from_stays_until_there_is_another(tmp_path: Path) -> None:
    runs, place = f"{tmp_path}/runs", f"{tmp_path}/memory"
    run = start(place, copying(2, every=2), seed=1)
    run.engine.resume(runs)
    run.until(4)
    first_rank(change_a_byte, next(Path(place).glob("engine0/step4-*/rank00001*.safetensors")))
    run.engine.resume(runs)
    assert run.engine.global_steps == 2
    copies, seen = run.engine._faults.copies, []
    original = copies._write

    def write(*args: Any) -> Any:
        result = original(*args)
        seen.append(sorted(name[:5] for name in os.listdir(copies.path) if name.startswith("step")))
        return result

    copies._write = write  # type: ignore[method-assign]
    run.until(6)
    # While the copies of steps 4 and 6 are written, there is always one that is whole.
    assert seen == [["step2"], ["step4"]]
    assert fresh(place, runs, 2, every=2) == ("memory", 6)


# -- copies in a directory of the job's own ----------------------------------------------------------------------------


def own(place: str, **more: Any) -> dict[str, Any]:
    section = {"memory_copies": {"every": 1, "directory": place}, **more}
    return config(2, checkpoint=section)


@on_ranks(2)
def test_copies_are_left_after_a_failure_and_removed_after_a_success(tmp_path: Path) -> None:
    place, runs = f"{tmp_path}/memory", f"{tmp_path}/runs"
    for fails in (False, True):
        run = start("unused", own(place), seed=1)
        run.engine.resume(runs)
        run.until(2)
        expected = run.fingerprint()
        barrier()
        if not fails:
            run.engine.destroy()
        elif rank() == 0:
            try:
                raise ValueError("on this rank alone")
            except ValueError:
                run.engine._faults.end()  # of destroy() in a `finally`; the other rank is somewhere else
        barrier()
        assert os.path.isdir(f"{place}/engine0") == fails
    other = start("unused", own(place), seed=2)
    other.engine.resume(runs)
    assert differences(expected, other.fingerprint()) == []


@on_ranks(2)
def test_another_run_does_not_go_on_from_them(tmp_path: Path) -> None:
    place = f"{tmp_path}/memory"
    run = start("unused", own(place), seed=1)
    run.engine.resume(f"{tmp_path}/a")
    run.until(2)
    other = start("unused", own(place), seed=2)
    assert other.engine.resume(f"{tmp_path}/b") is None
    assert other.engine.resume(f"{tmp_path}/a") == {}


@on_ranks(2)
def test_copies_of_a_run_that_does_not_resume_are_passed_over(tmp_path: Path) -> None:
    start("unused", own(f"{tmp_path}/memory"), seed=1).until(1)
    with logged() as told:
        other = start("unused", own(f"{tmp_path}/memory"), seed=2)
        assert other.engine.resume(f"{tmp_path}/runs") is None
    assert any("of step 1 of a run that had not called" in line for line in told.lines) is (rank() == 0)


@on_ranks(2)
def test_what_was_saved_before_the_end_of_the_job_needs_no_copies(tmp_path: Path) -> None:
    place, runs = f"{tmp_path}/memory", f"{tmp_path}/runs"
    run = start("unused", own(place, on_signal={"save_dir": runs}), seed=1)
    run.until(1)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        run.until(2)
    barrier()
    assert not os.path.exists(f"{place}/engine0")
    assert Path(runs, "latest").read_text() == "global_step2"


# -- one rank's mistake is everybody's error ---------------------------------------------------------------------------


@on_ranks(2)
def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run = Run(config(2), seed=1)
    run.until(1)
    good, bad = f"{tmp_path}/runs", f"{tmp_path}/file{rank()}"
    if rank() == 1:
        Path(bad).touch()
    path = bad if rank() == 1 else good
    calls = [
        lambda: run.engine.save_checkpoint(path),
        lambda: run.engine.save_checkpoint(good, tag="a/b" if rank() == 1 else "ab"),
        lambda: run.engine.load_checkpoint(path),
        lambda: run.engine.load_checkpoint(good, tag=".x" if rank() == 1 else "x"),
        lambda: run.engine.export(path),
        lambda: run.engine.save_16bit_model(path),
    ]
    for call in calls:
        with pytest.raises(CheckpointPathError if rank() == 1 else CheckpointError) as raised:
            call()
        assert rank() == 1 or "rank 1" in str(raised.value)
    run.engine.save_checkpoint(good)
    assert run.engine.load_checkpoint(good)[0] == f"{good}/global_step1"


# -- whose directory it is ---------------------------------------------------------------------------------------------


def test_copies_are_made_in_a_directory_of_this_user_only(tmp_path: Path) -> None:
    first = tmp_path / "a" / "engine0"
    make_own(str(first))
    make_own(str(first))  # after a restart
    assert first.stat().st_mode & 0o777 == 0o700 and len(list(first.parent.iterdir())) == 1
    first.chmod(0o777)
    with pytest.raises(CheckpointError, match=r"engine0: belongs to user .* that others cannot write to"):
        make_own(str(first))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "engine0").symlink_to(tmp_path / "a")
    with pytest.raises(CheckpointError, match="engine0: belongs to user"):
        make_own(str(tmp_path / "b" / "engine0"))
    (tmp_path / "c" / "engine0").mkdir(parents=True)
    (tmp_path / "c" / "engine0" / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="was not made for copies"):
        make_own(str(tmp_path / "c" / "engine0"))
    (tmp_path / "d").mkdir()
    (tmp_path / "d").chmod(0o777)
    with pytest.raises(CheckpointError, match="everybody can write to it"):
        make_own(str(tmp_path / "d" / "engine0"))
    if os.geteuid() == 0:
        first.chmod(0o700)
        os.chown(first, 1, -1)
        with pytest.raises(CheckpointError, match="belongs to user 1 "):
            make_own(str(first))


@on_ranks(1)
def test_what_others_have_put_beside_copies_stays(tmp_path: Path) -> None:
    place = tmp_path / "memory"
    run = start("unused", own(str(place)), seed=1)
    run.until(1)
    (place / "engine0" / "results" / "sub").mkdir(parents=True)
    run.until(3)
    run.engine.destroy()
    assert sorted(os.listdir(place / "engine0")) == ["results", "shardwise.copies"]
