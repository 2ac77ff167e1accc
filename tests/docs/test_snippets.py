"""The programs printed in the README and in Getting started run as they stand, on two ranks."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

from shardwise.launch.cli import app
from tests.harness import thorough
from tests.harness.programs import run_program

ROOT = Path(__file__).parents[2]


def program(page):
    """The first Python block of a page that is a whole program, or, of "page#word", the first with the word."""
    page, _, word = page.partition("#")
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return next(block for block in blocks if (word or "shardwise.initialize") in block)


@pytest.mark.parametrize(
    ("page", "printed"),
    [
        thorough("docs/parts.md", r"loss \d.*, norm \d.*, 128 parameters of 256 here"),
        thorough("docs/accumulation.md", r"loss \d.*the mean over 32 tokens"),
        thorough("docs/sequence.md", r"loss \d.* of 128 tokens here, 252 in all"),
        thorough("docs/getting-started.md", r"epoch 2: loss \d"),
        thorough("docs/tensor.md", r"loss \d.*, 16512 of 30080 parameters here"),
        thorough("docs/pipeline.md", r"after 10 steps: loss \d"),
        pytest.param(
            "docs/pipeline.md#to_pipeline",
            r"after 20 steps: loss \d",
            marks=[
                pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
                pytest.mark.thorough,
            ],
        ),
        thorough("docs/moe.md", r"loss \d.*, 2 of 4 experts here"),
        pytest.param(
            "docs/export.md",
            r"\d+ parameters, torch.bfloat16",
            marks=[
                pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
                pytest.mark.thorough,
            ],
        ),
        ("README.md", r"after 50 steps: loss \d"),
    ],
)
def test_the_printed_program_runs(page, printed, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(program(page))
    assert re.search(printed, run_program(script))


@pytest.mark.thorough
def test_before_and_after_of_ddp_print_the_same(tmp_path):
    page = (ROOT / "docs/from-ddp.md").read_text()
    printed = []
    for name in ("before", "after"):
        script = tmp_path / f"{name}.py"
        script.write_text(re.search(rf"```python\n(# {name}.py.*?)```", page, re.DOTALL)[1])
        command = [sys.executable, "-m", "shardwise.launch", "run", "-q", "--nproc", "2", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        printed.append(re.findall(r"epoch \d: loss [\d.]+", done.stdout))
    assert printed[0] == printed[1] and len(printed[0]) == 2
    assert (tmp_path / "weights.safetensors").exists()


def test_a_schedule_is_shown_before_it_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/pipeline.md").read_text(), re.DOTALL)
    exec(next(block for block in blocks if "simulate(" in block), {})
    assert "11% idle" in capsys.readouterr().out


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
def test_options_of_the_printed_commands_exist(page):
    commands = typer.main.get_command(app).commands
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    for line in "".join(blocks).replace("\\\n", " ").splitlines():
        found = re.search(r"\bshardwise ([a-z]+) ?(.*)", line)
        if found is not None:
            words = [word for word in shlex.split(found[2], comments=True) if word != "..."]
            command = commands.get(found[1])
            if getattr(command, "commands", None):
                command, words = command.commands[words[0]], words[1:]
            if command is not None:
                command.make_context(found[1], words)
            else:
                assert line.startswith("kubectl"), line
