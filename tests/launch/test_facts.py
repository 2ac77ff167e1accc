"""What the launcher passes on to other machines, and which differences between machines end a start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.errors import LaunchError
from shardwise.launch.facts import Facts, differences, exported, facts_of
from shardwise.launch.job import Job


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a home directory in it."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_variables_by_rule_from_files_and_by_name(folder: Path) -> None:
    (folder / "home" / ".deepspeed_env").write_text("# of the cluster\nFROM_HOME=1\nexport BOTH='home'\n")
    (folder / ".deepspeed_env").write_text("BOTH=here\n\n")
    env = {"NCCL_DEBUG": "INFO", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3", "MINE": "4", "PYTHONPATH": "/a"}
    env["SHARDWISE_MACHINE"] = "here"  # names one machine, as CUDA_VISIBLE_DEVICES does
    assert exported(["MINE", "GIVEN=a=b"], env) == {
        "NCCL_DEBUG": "INFO",
        "PYTHONPATH": "/a",
        "FROM_HOME": "1",
        "BOTH": "here",
        "MINE": "4",
        "GIVEN": "a=b",
    }
    with pytest.raises(LaunchError, match="--export OTHER: this variable is not set"):
        exported(["OTHER"], env)
    with pytest.raises(LaunchError, match="GLOO_SOCKET_IFNAME=lo: machines do not reach each other"):
        exported([], {"GLOO_SOCKET_IFNAME": "lo"})
    (folder / ".shardwise_env").write_text("A=1\nnot a variable\n")
    with pytest.raises(LaunchError, match=r"\.shardwise_env, line 2: expected NAME=VALUE"):
        exported([], env)


def test_differences_between_machines_are_named_with_the_fix(folder: Path) -> None:
    (folder / "train.py").write_text("print(1)")
    (folder / "ds.json").write_text("{}")
    job = Job("train.py", ("--config=ds.json", "ds.json", "--lr", "1"))
    here = facts_of(job, {"NCCL_DEBUG": "INFO", "PATH": "/bin"})
    assert set(here.files) == {"train.py", "ds.json"} and set(here.variables) == {"NCCL_DEBUG"}

    def found(ahead: float = 0.0, **changes: object) -> list[str]:
        other: Facts = replace(here, **changes)  # type: ignore[arg-type]
        return differences([("a", here, here.clock + 5), ("b", other, here.clock + 5 - ahead)])

    assert found() == [] and found(ahead=30.0) == []
    assert "b: its clock is 90 s" in found(ahead=90.0)[0]
    assert "b: torch 1.0, and " in found(versions={**here.versions, "torch": "1.0"})[0]
    assert "b: train.py has other content than on a" in found(files={**here.files, "train.py": "other"})[0]
    assert "b: ds.json is missing, in " in found(files={"train.py": here.files["train.py"]})[0]
    (line,) = found(variables={"NCCL_DEBUG": "other", "OMP_NUM_THREADS": "more"})
    assert "b: the environment differs from that of a: NCCL_DEBUG, OMP_NUM_THREADS." in line and "--export" in line


def test_of_a_large_file_the_size_and_both_ends_are_compared_and_of_an_unchecked_job_none(folder: Path) -> None:
    size = 300 << 30  # bytes, sparse: not read whole
    with (folder / "data.bin").open("wb") as file:
        file.truncate(size)
    job, digests = Job("train.py", ("--data=data.bin",)), set[str]()
    for offset in (None, 0, size - 1, size):  # as it is; another first byte; another last byte; one byte more
        if offset is not None:
            with (folder / "data.bin").open("r+b") as file:
                file.seek(offset)
                file.write(b"x")
        digests.add(facts_of(job, {}).files["data.bin"])
    assert len(digests) == 4 and "" not in digests
    assert facts_of(replace(job, unchecked=True), {}).files == {}
