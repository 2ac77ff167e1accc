"""Jobs on several machines through ssh: places, failures, lost machines, and what is refused before the start."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from subprocess import Popen

import pytest

from tests.machines.conftest import Run, Start
from tests.machines.lab import Lab

pytestmark = pytest.mark.limit(200)


def places(text: str) -> list[list[int]]:
    """Return rank, local rank, machine and sum of each rank, in the order of ranks."""
    lines = [line.partition("place ")[2] for line in text.splitlines() if "place " in line]
    return sorted([int(number) for number in line.split()] for line in lines)


def nothing_left(lab: Lab, within: float = 15.0) -> bool:
    deadline = time.monotonic() + within
    while any(lab.processes(number) for number in range(1, lab.count + 1)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def test_ranks_of_a_hostfile_meet(lab: Lab, run: Run) -> None:
    hosts = lab.hostfile(2, [1, 2])
    done = run(["-H", str(hosts), "--local-rank"])
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == [[0, 0, 0, 10], [1, 1, 0, 10], [2, 0, 1, 10], [3, 1, 1, 10]]
    assert all(line.startswith("[rank ") for line in done.stdout.splitlines())
    assert f"m1: 2 processes on the CPU, meeting at {lab.address(1)}:29500" in done.stderr
    chosen = run(["-H", str(lab.hostfile(2)), "--exclude", "m2@m1:0"])
    assert places(chosen.stdout) == [[0, 0, 0, 6], [1, 0, 1, 6], [2, 1, 1, 6]], chosen.stderr
    assert nothing_left(lab)


def test_the_first_failure_is_named_over_machines_and_restarts_run_out(lab: Lab, run: Run) -> None:
    hosts = lab.hostfile(1, [1, 2])
    done = run(["-H", str(hosts), "--max-restarts", "1"], "fail", "0", "1")
    assert done.returncode == 1 and len(places(done.stdout)) == 4
    assert "rank 1 failed first (exit code 1); starting all 2 processes again on 2 machines" in done.stderr
    last = done.stderr.rpartition("shardwise run: rank 1 failed first")[2]
    assert ", pid " in last and " on m2, " in last and last.rstrip().endswith("ValueError: bad batch")
    assert run(["-H", str(hosts), "--max-restarts", "1"], "fail", "0").returncode == 0
    assert nothing_left(lab)


def running(process: Popen[str], ranks: int) -> None:
    """Wait until all ranks have met."""
    assert process.stdout is not None
    for _ in range(ranks):
        assert "place" in process.stdout.readline()


@pytest.mark.parametrize(("sig", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_the_end_of_the_launcher_ends_all_processes_everywhere(
    lab: Lab, start: Start, sig: signal.Signals, code: int
) -> None:
    pids = lab.folder / f"pids-{code}"
    process = start(["-H", str(lab.hostfile(1)), "--pid-file", str(pids)], "sleep", "0")
    running(process, 3)
    ranks = json.loads(pids.read_text())["ranks"]
    assert [ranks[str(rank)]["host"] for rank in range(3)] == ["m1", "m2", "m3"]
    assert all(ranks[str(rank)]["pid"] in lab.processes(rank + 1) for rank in range(3))
    listening = lab.run(1, ["ss", "-ltnH"]).stdout
    assert f"{lab.address(1)}:29500" in listening and not re.search(r"(0\.0\.0\.0|\*|\[::\]):29500", listening)
    process.send_signal(sig)
    _, err = process.communicate(timeout=20)
    assert process.returncode == code, err
    assert nothing_left(lab) and pids.exists() == (sig is signal.SIGKILL)


def test_a_lost_machine_ends_the_job_or_is_left_out(lab: Lab, start: Start) -> None:
    process = start(["-H", str(lab.hostfile(1))], "sleep", "0")
    running(process, 3)
    began = time.monotonic()
    lab.link(3, False)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and "machine m3 (rank 2) is lost: no message for 6 s" in err
    assert nothing_left(lab) and time.monotonic() - began < 15
    lab.link(3, True)
    process = start(["-H", str(lab.hostfile(1)), "--max-restarts", "1", "--nnodes", "2:"], "sleep", "0")
    running(process, 3)
    lab.link(3, False)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert places(out) == [[0, 0, 0, 3], [1, 0, 1, 3]]
    assert "machine m3 (rank 2) is lost: no message for 6 s; starting all 2 processes again on 2 machines" in err
    lab.link(3, True)
    assert nothing_left(lab)


def refused(run: Run, options: list[str], **more: str) -> str:
    done = run(options, **more)
    assert done.returncode in (1, 2) and not done.stdout
    return str(done.stderr)


def test_machines_that_cannot_be_used_are_named_with_the_fix(
    lab: Lab, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ["-H", str(lab.hostfile(1, [1, 2]))]
    text = refused(run, [*hosts, "--python", "/no/python"])
    assert "m1, m2: ended with exit code 127" in text and "--python" in text
    unknown = lab.folder / "unknown"
    unknown.write_text("m1 slots=1\nnowhere.invalid slots=1\n")
    assert "nowhere.invalid: this machine knows no address of that name" in refused(run, ["-H", str(unknown)])
    closed = refused(run, [*hosts, "--ssh-port", "2222"])
    assert "Connection refused. No ssh server listens there" in closed
    # Each machine has a /dev/shm of its own, where the others' script is missing.
    script = "/dev/shm/only-here.py"
    Path(script).write_text("")
    try:
        assert f"m1, m2: No such file {script}" in refused(run, hosts, script=script)
    finally:
        os.unlink(script)
    assert nothing_left(lab)


def test_machines_that_do_not_reach_each_other_are_named_before_the_start(lab: Lab, run: Run) -> None:
    lab.wall(2, 3, True)
    try:
        text = refused(run, ["-H", str(lab.hostfile(1))])
    finally:
        lab.wall(2, 3, False)
    assert f"m2: cannot reach m3 at {lab.address(3)}:" in text and "no route to host" in text
    assert "m1: cannot reach" not in text and "open TCP between the machines, in both directions" in text
    assert nothing_left(lab)


def test_a_taken_port_of_the_first_machine_is_named(lab: Lab, run: Run) -> None:
    holder = lab.start(
        1,
        [
            sys.executable,
            "-c",
            f'import socket, time; s = socket.create_server(("{lab.address(1)}", 4321)); time.sleep(60)',
        ],
    )
    time.sleep(1.0)
    done = run(["-H", str(lab.hostfile(1, [1, 2])), "--master_port", "4321"])
    holder.kill()
    assert done.returncode == 1 and "m1" in done.stderr and "Port 4321 on 10.77.0.2 is taken" in done.stderr
    assert nothing_left(lab)


def test_a_key_that_is_refused_and_a_host_key_that_is_not_known(lab: Lab, run: Run) -> None:
    hosts = ["-H", str(lab.hostfile(1, [1, 2]))]
    for name, words in (("authorized_keys", "refuses the key"), ("known_hosts", "host key is not the known one")):
        path = lab.folder / name
        content = path.read_text()
        path.write_text("")
        try:
            assert words in refused(run, hosts)
        finally:
            path.write_text(content)


def test_the_doctor_compares_machines(lab: Lab) -> None:
    command = [sys.executable, "-m", "shardwise.launch", "doctor", "--launcher-args", " ".join(lab.ssh), "-H"]
    environment = {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"}

    def doctor(hosts: Path, *options: str) -> tuple[int, str]:
        process = lab.start(0, [*command, str(hosts), *options], env=environment)
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    code, text = doctor(lab.hostfile(2), "--json")
    found = json.loads(text)
    assert code == 0 and found["ok"] and found["problems"] == []
    assert [(one["name"], one["address"], one["interface"], one["processes"]) for one in found["machines"]] == [
        (lab.name(number), lab.address(number), "eth0", 2) for number in (1, 2, 3)
    ]
    assert all(one["next_bytes_per_s"] > 1e6 and 0 < one["next_round_trip_s"] < 0.5 for one in found["machines"])
    code, text = doctor(lab.hostfile(2))
    assert code == 0 and "round trip" in " ".join(text.split()) and "eth0" in text
    lab.link(3, False)
    code, text = doctor(lab.hostfile(2))
    lab.link(3, True)
    assert code == 1 and "m1" in text and re.search(r"m3: ended with exit code 255\. .*(route|timed out)", text)
