"""What a job refuses before it starts, and what its processes are given."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from shardwise.comm.environment import PROGRESS
from shardwise.errors import CommandLineError
from shardwise.launch import hosts
from shardwise.launch.job import Job, by_hand, check
from shardwise.launch.placement import Placement
from shardwise.launch.start import run_job
from shardwise.launch.workers import worker_command, worker_environment
from tests.harness.tables import tables


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text("")
    (tmp_path / "tool").write_text("#!/bin/sh\n")
    (tmp_path / "package").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("job", "message"), tables(__file__)["wrong"])
def test_wrong_jobs_are_refused(folder, job: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandLineError, match=message):
        check(Job(**job))


def test_no_more_processes_than_there_are_can_be_kept(folder, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(CommandLineError, match="has only 2 processes"):
        run_job(Job("train.py", nproc=2, max_restarts=1, min_nproc=3))


def test_commands(folder) -> None:
    args = ("--lr", "1")
    assert worker_command(Job("train.py", args), 2) == [sys.executable, "-u", "train.py", *args]
    assert worker_command(Job("train.py", args, local_rank=True), 2)[2:] == ["train.py", *args, "--local_rank=2"]
    assert worker_command(Job("a.b", args, module=True), 0)[1:] == ["-u", "-m", "a.b", *args]
    assert worker_command(Job("./tool", no_python=True, local_rank=True), 1) == ["./tool", "--local_rank=1"]


def test_environment_of_the_workers() -> None:
    cores = len(os.sched_getaffinity(0))
    given = worker_environment(Job("x"), Placement(3, ("4", "6", "7")), {"A": "b"})
    assert given["CUDA_VISIBLE_DEVICES"] == "4,6,7"
    assert given["OMP_NUM_THREADS"] == str(max(1, cores // 3))
    assert (given["A"], given["GLOO_SOCKET_IFNAME"]) == ("b", "lo")
    mine = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0", "CUDA_VISIBLE_DEVICES": ""}
    assert worker_environment(Job("x"), Placement(1, None), mine) == mine
    limited = worker_environment(Job("x", device_limit="2GiB"), Placement(1, None), {"SHARDWISE_DEVICE_LIMIT": "1GiB"})
    assert limited["SHARDWISE_DEVICE_LIMIT"] == "2GiB"
    assert "GLOO_SOCKET_IFNAME" not in worker_environment(Job("x"), Placement(1, None), {}, interface="")


def test_ranks_are_told_of_progress() -> None:
    placement = Placement(1, None)

    def told(job: Job, **env: str) -> str | None:
        return worker_environment(job, placement, env).get(PROGRESS)

    assert told(Job("train.py")) is None and told(Job("train.py"), **{PROGRESS: "auto"}) == "auto"
    assert told(Job("train.py", progress="auto")) == "auto"
    assert told(Job("train.py", progress="auto"), **{PROGRESS: "off"}) == "off"
    assert told(Job("train.py", progress="off"), **{PROGRESS: "auto"}) == "off"


def test_a_quiet_run_logs_warnings_and_errors_only() -> None:
    def level(job: Job, **env: str) -> str | None:
        return worker_environment(job, Placement(1, None), env).get("SHARDWISE_LOG_LEVEL")

    assert level(Job("train.py")) is None and level(Job("train.py", quiet=True)) == "warning"
    assert level(Job("train.py", quiet=True), SHARDWISE_LOG_LEVEL="debug") == "debug"
    code = "from shardwise.utils import logger; print(logger.level)"
    for name, expected in (("warning", logging.WARNING), ("nonsense", logging.INFO)):
        env = {**os.environ, "SHARDWISE_LOG_LEVEL": name}
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert int(done.stdout) == expected


def test_the_default_hostfile_names_the_machines_of_a_job(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hosts, "DEFAULT_HOSTFILE", str(tmp_path / "hostfile"))
    two, elsewhere = Job(__file__, nodes="2"), Job(__file__, master_addr="192.0.2.1")
    for job in (two, elsewhere):
        with pytest.raises(CommandLineError):
            check(job)
    (tmp_path / "hostfile").write_text("a slots=1\nb slots=1\n")
    for job in (two, elsewhere):
        check(job)
        assert not by_hand(job)
    assert by_hand(Job(__file__, nodes="2", node_rank=1))
