"""A small network of machines for the tests of this folder, and commands in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from subprocess import CompletedProcess, Popen

import pytest

from tests.machines.lab import Lab, missing

SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, shardwise
shardwise.init_distributed(verbose=False)
total = torch.ones(1) * (dist.get_rank() + 1)
dist.all_reduce(total)
print("place", dist.get_rank(), os.environ["LOCAL_RANK"], os.environ["CROSS_RANK"], int(total), flush=True)
how, attempt = sys.argv[1:], os.environ["TORCHELASTIC_RESTART_COUNT"]
if how[:1] == ["fail"] and dist.get_rank() == 1 and attempt in how[1:]:
    raise ValueError("bad batch")
if how[:1] == ["sleep"] and attempt in how[1:]:
    time.sleep(120)
"""


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """Three machines besides that of the launcher."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    with Lab(3) as made:
        (made.folder / "train.py").write_text(SCRIPT)
        yield made


Start = Callable[..., "Popen[str]"]
Run = Callable[..., "CompletedProcess[str]"]


@pytest.fixture
def start(lab: Lab) -> Iterator[Start]:
    """Start `shardwise run` on machine 0 with options, and the script's arguments; killed at the end of the test."""
    begun = []

    def begin(options: list[str], *args: str, script: str | None = None) -> Popen[str]:
        begun.append(lab.train(options, script or lab.folder / "train.py", *args))
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.communicate()
    for number in range(1, lab.count + 1):
        lab.link(number, True)


@pytest.fixture
def run(start: Start) -> Run:
    """Run it to its end."""

    def to_the_end(options: list[str], *args: str, timeout: float = 90, **more: str) -> CompletedProcess[str]:
        process = start(options, *args, **more)
        out, err = process.communicate(timeout=timeout)
        return CompletedProcess(process.args, process.returncode, out, err)

    return to_the_end
