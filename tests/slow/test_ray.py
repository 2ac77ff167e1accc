"""Ray Train starts the ranks: the losses are those of `shardwise run`, also when a worker has been killed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.jobs import environment

ROOT = Path(__file__).parents[2]


def execute(*command: str, folder: Path = ROOT) -> str:
    env = environment(OMP_NUM_THREADS="1", RAY_DEDUP_LOGS="0")
    done = subprocess.run(
        [sys.executable, "-m", *command], capture_output=True, text=True, timeout=280, env=env, cwd=folder
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    return done.stdout


def losses(folder: Path, rank: int) -> list[list[str]]:
    return [line.split() for line in (folder / f"losses.{rank}").read_text().splitlines()]


@pytest.mark.thorough
@pytest.mark.limit(600)
def test_a_killed_worker_changes_no_loss(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    plain, on_ray = tmp_path / "plain", tmp_path / "ray"
    plain.mkdir()
    on_ray.mkdir()
    execute("shardwise.launch", "run", "--nproc", "2", "--module", "tests.slow.ray_loop", str(plain))
    printed = execute("tests.slow.ray_loop", str(on_ray), "ray")
    for rank in range(2):
        expected = [loss for _, _, loss in losses(plain, rank)]
        found = losses(on_ray, rank)
        assert len(expected) == 20 and [int(step) for _, step, _ in found] == [*range(1, 13), *range(11, 21)]
        assert all(loss == expected[int(step) - 1] for _, step, loss in found)
        assert {attempt for attempt, step, _ in found if int(step) > 12} == {"2"}  # client_state came back
    assert "kept {'step': 20} global_step20 2" in printed
    assert (on_ray / "storage" / "a" / "latest").read_text().strip() == "global_step20"


@pytest.mark.thorough
@pytest.mark.limit(600)
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    page = (ROOT / "docs" / "clusters.md").read_text()
    block = next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "TorchTrainer" in block)
    assert "/shared/runs" in block
    (tmp_path / "page_program.py").write_text(block.replace("/shared/runs", str(tmp_path / "runs")))
    assert re.search(r"\{'step': 20, 'best': [\d.]+\}", execute("page_program", folder=tmp_path))
    assert (tmp_path / "runs" / "a" / "global_step20").is_dir()
