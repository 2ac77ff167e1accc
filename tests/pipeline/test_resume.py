"""A rank of a pipeline is killed within a batch: the job goes on from the newest checkpoint, bit by bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.pipe import LayerSpec
from tests.harness import run_ranks
from tests.pipeline.training import WIDTH, WORDS, Block, Setting, batch, data, engine_of, loss_of

STEPS, KILLED_AT = 7, 4
ROOT = Path(__file__).parents[2]


def noisy() -> list[Any]:
    """Return layers whose random numbers are those of the rank."""
    return [
        LayerSpec(nn.Embedding, WORDS, WIDTH),
        *(LayerSpec(Noisy) for _ in range(6)),
        LayerSpec(nn.Linear, WIDTH, WORDS),
    ]


def plain() -> list[Any]:
    """Return layers that give the same bits on any number of stages."""
    return [
        LayerSpec(nn.Embedding, WORDS, WIDTH),
        *(LayerSpec(Block, WIDTH) for _ in range(6)),
        LayerSpec(nn.Linear, WIDTH, WORDS),
    ]


class Noisy(Block):
    """A block with dropout."""

    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


class Killing:
    """A loss that kills its process in the second micro-batch of a step, once in a directory."""

    def __init__(self, root: Path) -> None:
        self.calls, self.killed = 0, root / "killed"

    def __call__(self, output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 4 * KILLED_AT + 2 and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_of(output, ids)


def setting_of(stages: int, zero: int, made: Any, loss: Any = loss_of) -> Setting:
    config = {"gradient_clipping": 0.0, "pipeline": {"schedule": "1f1b"}}
    return Setting(stages, "1f1b", zero, made=made, loss=loss, config=config, batches=batch)


def go_on(root: str, setting: Setting, asynchronous: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train to the last step from the newest checkpoint, and save each step; return losses and weights."""
    engine = engine_of(setting)
    torch.manual_seed(17 + dist.get_rank())
    losses = (engine.resume(f"{root}/runs") or {"losses": []})["losses"]
    while engine.global_steps < STEPS:
        losses = [*losses, float(engine.train_batch(data(setting, engine.global_steps)))]
        engine.save_checkpoint(f"{root}/runs", client_state={"losses": losses}, asynchronous=asynchronous)
    engine.wait_for_checkpoint()
    weights = engine.module_state_dict()
    engine.destroy()
    return losses, weights


SCRIPT = """
import sys
from pathlib import Path
import shardwise, torch
from tests.pipeline import test_resume
root, stages, zero, made, asynchronous = sys.argv[1:]
shardwise.init_distributed(verbose=False)
loss = test_resume.Killing(Path(root))
setting = test_resume.setting_of(int(stages), int(zero), getattr(test_resume, made), loss)
end = test_resume.go_on(root, setting, asynchronous == "True")
if torch.distributed.get_rank() == 0:
    torch.save(end, f"{root}/end.pt")
torch.distributed.destroy_process_group()
"""


def launched(root: Path, ranks: int, stages: int, zero: int, made: str, asynchronous: bool, *options: str) -> int:
    """Run the script under `shardwise run`; return the exit code."""
    script = root / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", str(ranks), *options, str(script), str(root)]
    command += [str(stages), str(zero), made, str(asynchronous)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert (root / "killed").exists(), done.stderr
    return done.returncode


def check(root: Path, expected: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, weights = torch.load(root / "end.pt", weights_only=True)
    assert losses == expected[0] and len(losses) == STEPS
    assert weights.keys() == expected[1].keys()
    assert [name for name in weights if not torch.equal(weights[name], expected[1][name])] == []


@pytest.mark.thorough
@pytest.mark.limit(600)
@pytest.mark.parametrize(("ranks", "zero", "asynchronous"), [(2, 1, True), (4, 1, False), (4, 3, True)])
def test_a_job_that_lost_a_rank_ends_with_the_same_bits(
    ranks: int, zero: int, asynchronous: bool, tmp_path: Path
) -> None:
    """Also with random numbers in its layers."""
    (tmp_path / "whole").mkdir()
    setting = setting_of(2, zero, noisy)
    expected = run_ranks(go_on, ranks, str(tmp_path / "whole"), setting, False)[0]
    assert launched(tmp_path, ranks, 2, zero, "noisy", asynchronous, "--max-restarts", "1") == 0
    check(tmp_path, expected)


@pytest.mark.thorough
@pytest.mark.limit(600)
@pytest.mark.parametrize("stages", [4, 1])
def test_a_job_goes_on_with_another_number_of_stages(stages: int, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    expected = run_ranks(go_on, 2, str(tmp_path / "whole"), setting_of(2, 1, plain), False)[0]
    assert launched(tmp_path, 2, 2, 1, "plain", True) != 0
    found = run_ranks(go_on, stages, str(tmp_path), setting_of(stages, 1, plain), True)[0]
    torch.save(found, tmp_path / "end.pt")
    check(tmp_path, expected)
