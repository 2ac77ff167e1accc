"""The examples run as their users would run them, a few steps each."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise_deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from tests.harness import thorough
from tests.harness.programs import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"


def launch(script: str, *options: str, environment: dict[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "2", str(EXAMPLES / script), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def pretraining(directory: Path, steps: int) -> tuple[str, ...]:
    """Options of a short run that writes to a directory."""
    config = json.loads((EXAMPLES / "pretrain_gpt.json").read_text())
    config["scheduler"]["params"] |= {"total_num_steps": steps, "warmup_num_steps": 2}
    config["train_micro_batch_size_per_gpu"] = 1
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    return "--config", str(directory / "config.json"), "--sample", "8", "--out", str(directory / "out")


def part_of_the_manual(directory: Path) -> dict[str, str]:
    """Return an environment in which the text to train on is a fortieth as long; cutting all of it takes most of a run.

    For programs with `directory` on their path it is as long.
    """
    from pydoc_data.topics import topics

    names = sorted(topics)[::40]
    (directory / "pydoc_data").mkdir()
    (directory / "pydoc_data" / "__init__.py").touch()
    (directory / "pydoc_data" / "topics.py").write_text(f"topics = { {name: topics[name] for name in names}!r}")
    return {**os.environ, "PYTHONPATH": f"{directory}:{os.environ.get('PYTHONPATH', '')}"}


@pytest.mark.limit(600)
@pytest.mark.parametrize("compared", [False, thorough(True)])
def test_pretraining_pauses_at_ctrl_c_and_goes_on(compared: bool, tmp_path: Path) -> None:
    """`compared`: the end has the bits of a run without a pause."""
    steps, environment = 3, part_of_the_manual(tmp_path)
    paused = pretraining(tmp_path / "paused", steps)
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "2", "--grace", "60"]
    command += [str(EXAMPLES / "pretrain_gpt.py"), *paused]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    job = subprocess.Popen(command, start_new_session=True, env=environment, **pipes)
    assert job.stdout is not None
    said = ""
    for line in job.stdout:
        said += line
        if "before training" in line:  # the first step comes next
            os.killpg(job.pid, signal.SIGINT)
    assert job.wait(timeout=200) == 130, said
    assert "paused after step" in said and "The same command goes on" in said
    tag = (tmp_path / "paused" / "out" / "latest").read_text().strip()
    assert tag in [f"global_step{step}" for step in range(1, steps)]

    output = run_program(EXAMPLES / "pretrain_gpt.py", *paused, path=[tmp_path])
    assert f"going on after step {tag.removeprefix('global_step')} of {steps}" in output
    assert f"after {steps} steps" in output and "training loss" in output and "before training" not in output
    for word in ("planned", "measured", "floor", "optimizer", "activations"):
        assert word in output
    assert (tmp_path / "paused" / "out" / "loss.png").stat().st_size > 10_000
    if compared:
        assert f"all {steps} steps have been taken" in launch("pretrain_gpt.py", *paused, environment=environment)
        whole = pretraining(tmp_path / "whole", steps)
        launch("pretrain_gpt.py", *whole, "--save-every", "2", environment=environment)
        first, second = (
            get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / name / "out")) for name in ("whole", "paused")
        )
        assert first and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.thorough
@pytest.mark.parametrize(("family", "stage"), [("bloom", 3), ("llama", 1)])
def test_finetuning_lowers_the_loss(family: str, stage: int, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    saved = tmp_path / "saved"
    output = launch("finetune_hf.py", "--family", family, "--stage", str(stage), "--steps", "10", "--save", str(saved))
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 2
    assert losses[1] < losses[0] - 0.5
    assert (saved / "model.safetensors").is_file()


@pytest.mark.parametrize("mode", ["bslongformer", thorough("bigbird")])
def test_sparse_attention_trains(mode: str) -> None:
    pytest.importorskip("transformers")
    options = ("--tokens", "500", "--steps", "12", "--mode", mode)
    output = run_program(EXAMPLES / "sparse_attention.py", *options, nproc=1)
    losses = re.findall(r"loss ([\d.]+) to ([\d.]+)", output)
    assert f"sparse ({mode})" in output and "dense: " in output and len(losses) == 2
    assert float(losses[0][1]) < float(losses[0][0]) - 0.3


def test_state_eight_times_as_large_as_the_device_trains(tmp_path: Path) -> None:
    config = json.loads((EXAMPLES / "offload.json").read_text())
    config["zero_optimization"]["offload_optimizer"]["nvme_path"] = str(tmp_path / "swap")
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ("--config", str(tmp_path / "config.json"), "--layers", "12", "--steps", "2")
    output = run_program(EXAMPLES / "offload.py", *options, nproc=1)
    assert "everything on the device is refused" in output and '"offload_optimizer": {"device": "cpu"}' in output
    used, limit, times = re.findall(r"on the device ([\d.]+) MiB of ([\d.]+); (\d+) x as much state", output)[0]
    assert float(used) <= float(limit) and times == "8"
    losses = [float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]
    assert not list((tmp_path / "swap").iterdir())


def test_simple_samples_come_first(tmp_path: Path) -> None:
    for steps in ("20", "30"):  # the second run finds the analysis of the first
        output = run_program(EXAMPLES / "curriculum.py", "--out", str(tmp_path / "a b"), "--steps", steps)
    losses = [float(loss) for loss in re.findall(r"samples ([\d.]+)", output)]
    hardest = [int(most) for most in re.findall(r"this batch (\d+)", output)]
    assert len(losses) == 3 and losses[-1] < losses[0] and hardest[0] <= hardest[-1]


@pytest.mark.thorough
def test_experts_over_ranks_train_as_on_one() -> None:
    found = []
    for size in ("2", "1"):
        output = launch("moe.py", "--ep-size", size, "--steps", "21")
        assert output.count(f"has {8 // int(size)} of 8 experts") == 2
        found.append([float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", output)])
    assert found[0] == pytest.approx(found[1], rel=0.05) and found[0][-1] < found[0][0]


@pytest.mark.thorough
def test_a_student_of_a_sharded_teacher_learns() -> None:
    printed = launch("distillation.py", "--steps", "4", "--teacher-steps", "12")
    losses = {name: float(loss) for name, loss in re.findall(r"(?:\[rank 0\] )?(.+): held-out loss (.+)", printed)}
    assert list(losses) == ["teacher", "student, trained plainly", "student, distilled"]
    assert losses["student, distilled"] < losses["student, trained plainly"]


def test_matrices_over_ranks_train_as_on_one(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    part_of_the_manual(tmp_path)
    found = []
    for size in (2, 1):
        options = ("--tp", str(size), "--steps", "6")
        output = run_program(EXAMPLES / "tensor_parallel.py", *options, path=[tmp_path], nproc=size)
        found.append([float(loss) for loss in re.findall(r"step +\d+  loss ([\d.]+)", output)])
        here, whole = (
            int(number.replace(",", "")) for number in re.findall(r"has ([\d,]+) of ([\d,]+) par", output)[0]
        )
        assert here < 0.51 * whole if size == 2 else here == whole
    assert found[0] == pytest.approx(found[1], abs=2e-3) and found[0][-1] < found[0][0] - 0.2


@pytest.mark.thorough
def test_a_model_writes_the_same_while_it_trains_and_when_it_is_served(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    output = launch("generation.py", "--steps", "11", "--tokens", "8", environment=part_of_the_manual(tmp_path))
    trained = re.findall(r"step +11  loss [\d.]+  (.*)", output)
    served = re.findall(r"served in fp32, [\d,]+ parameters a rank: (.*)", output)
    assert trained == served and "The class " in served[0]


@pytest.mark.thorough
def test_a_sequence_that_is_too_long_for_a_rank_trains_on_two() -> None:
    output = launch("long_context.py", "--tokens", "2048", "--steps", "6")
    assert re.search(
        r"a whole sequence on every rank is refused:\n.* MiB more than memory_limits.device allows", output
    )
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+) of 1024 tokens of 2048", output)]
    assert len(losses) == 2 and losses[1] < losses[0]
    peak = float(re.findall(r"with 2 ranks a sequence ([\d.]+) MiB on each", output)[0])
    assert peak <= 32


def test_a_pipeline_learns_and_shows_its_idle_time(tmp_path: Path) -> None:
    options = ("--steps", "5", "--picture", str(tmp_path / "step.svg"))
    part_of_the_manual(tmp_path)
    output = run_program(EXAMPLES / "pipeline.py", *options, path=[tmp_path])
    losses = [float(value) for value in re.findall(r"step +\d+ +loss (\S+)", output)]
    assert len(losses) == 2 and losses[0] > losses[1]
    assert "idle share of all ranks" in output and "stage 1 of 2" in output
    assert (tmp_path / "step.svg").read_text().startswith("<svg")
