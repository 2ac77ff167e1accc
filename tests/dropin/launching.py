"""Starts the programs of tests/dropin/programs as a user would: by deepspeed, torchrun or accelerate launch.

They know nothing of shardwise. Each prints its losses at the end, on rank 0. `Place` has what they would download: a
tokenizer, tiny models with random weights, and a text.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise_deepspeed.version import VERSION
from tests.dropin.test_commands import DIRECTORY
from tests.dropin.test_modules import package
from tests.harness.tables import tables

PROGRAMS = Path(__file__).parent / "programs"
LAUNCHERS = ("deepspeed", "torchrun", "accelerate")
STAGES = (1, 2, 3)
PRECISIONS = ("fp32", "bf16")
RTOL = {"fp32": 1e-5, "bf16": 2**-6}
"""A loss in bf16 has 8 bits: two roundings. Without DeepSpeed these programs report it in fp32."""


@dataclass(frozen=True)
class Program:
    """A program and how it is called.

    Attributes:
        script: file in `programs`.
        arguments: of every run; {here} is the directory of `Place`, {out} the run's own.
        style: who makes the engine: the script itself ("native"), the Trainer, or Accelerate.
        needs: packages without which it cannot run.
        config: more of the DeepSpeed configuration.
    """

    script: str
    arguments: str = ""
    style: str = "native"
    needs: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> list[str]:
        """Packages that it needs and that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


ALL = {name: Program(**row) for name, row in tables(__file__).items()}


class Place:
    """A directory with what the programs read, and where they write.

    Args:
        directory: empty.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._runs = 0
        self.site = package(directory / "site", VERSION, (DIRECTORY / "deepspeed" / "__init__.py").read_text())
        self._saved = False

    def command(self, name: str, launcher: str, stage: int, precision: str) -> tuple[list[str], dict[str, str]]:
        """How a program is started, and the variables that its environment has."""
        program = ALL[name]
        out = self._out()
        config = out / "config.json"
        config.write_text(json.dumps(_config(program, stage, precision)))
        arguments = self._arguments(program, out)
        variables = {}
        if program.script == "nanogpt.py":
            arguments.append(f"--config={config}")
        elif program.style == "native":
            arguments += ["--stage", str(stage), "--dtype", precision]
        elif program.style == "trainer":
            arguments += _precision(precision)
            if launcher != "accelerate":
                arguments += ["--deepspeed", str(config)]
        elif launcher != "accelerate":
            variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}
        python = [sys.executable, "-m"]
        if launcher == "deepspeed":
            alone = ["--no_local_rank"] if program.script == "nanogpt.py" else []
            start = [*python, "deepspeed.launcher.runner", "--num_gpus", "2", *alone]
        elif launcher == "torchrun":
            start = [*python, "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        else:
            start = [*python, "accelerate.commands.accelerate_cli", "launch", "--use_deepspeed", "--num_processes", "2"]
            start += ["--main_process_port", "0", "--deepspeed_config_file", str(config)]
        return [*start, str(PROGRAMS / program.script), *arguments], variables

    def run(self, name: str, launcher: str, stage: int, precision: str) -> dict[str, Any]:
        """What rank 0 of a program prints at the end."""
        command, variables = self.command(name, launcher, stage, precision)
        return self._started(command, variables)

    def without(self, name: str, stage: int, precision: str) -> tuple[str, list[str]]:
        """File, and arguments with which a program does not use DeepSpeed: DistributedDataParallel on Gloo.

        The stage matters to transformers only: it draws weights in another order where they are sharded at once.
        """
        program = ALL[name]
        arguments = self._arguments(program, self._out())
        file = str(PROGRAMS / program.script)
        if program.script == "nanogpt.py":
            return file, ["--plain=True", f"--dtype={'bfloat16' if precision == 'bf16' else 'float32'}"]
        if program.script == "clm_no_trainer.py":
            return file, [*arguments, "--plain", precision]
        if program.style == "native":
            return file, [*arguments, "--plain", "--dtype", precision]
        if program.script == "clm.py" and stage == 3:
            arguments += ["--as_at_stage_3", "true"]
        return file, [*arguments, "--bf16", str(precision == "bf16"), "--use_cpu", "true"]

    def _out(self) -> Path:
        self._runs += 1
        out = self.directory / f"run{self._runs}"
        out.mkdir()
        return out

    def _arguments(self, program: Program, out: Path) -> list[str]:
        if "transformers" in program.needs and not self._saved:
            _save_models(self.directory)
            self._saved = True
        return program.arguments.format(here=self.directory, out=out).split()

    def _started(self, command: list[str], variables: dict[str, str]) -> dict[str, Any]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
        environment = {
            **kept,
            "PYTHONPATH": f"{self.site}:{os.environ.get('PYTHONPATH', '')}",
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HOME": str(self.directory / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment, cwd=self.directory)
        errors = done.stderr.partition("ChildFailedError")[0]
        shown = " ".join(command) + "\n" + done.stdout[-3000:] + errors[-6000:]
        assert done.returncode == 0, shown
        told = [line for line in done.stdout.splitlines() if "told {" in line]
        assert len(told) == 1, shown
        return json.loads(told[0].partition("told ")[2])


def plainly(file: str, arguments: list[str]) -> dict[str, Any]:
    """What a program tells when it is run by a rank of the pool, without a launcher."""
    return runpy.run_path(file)["main"](arguments)


def differences(told: dict[str, Any], without: dict[str, Any]) -> list[float]:
    """Relative differences of all losses that two runs tell; the number of parameters must be the same."""
    assert told.keys() == without.keys() and told.get("parameters") == without.get("parameters")
    found = []
    for name in told.keys() - {"parameters"}:
        ours, theirs = (value if isinstance(value, list) else [value] for value in (told[name], without[name]))
        found += [abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True)]
    return found


def _precision(precision: str) -> list[str]:
    """Arguments of TrainingArguments; on a CPU it accepts bf16 only together with use_cpu."""
    return ["--bf16", "true", "--use_cpu", "true"] if precision == "bf16" else ["--bf16", "false"]


def _config(program: Program, stage: int, precision: str) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    found = {"zero_optimization": zero, "bf16": {"enabled": precision == "bf16"}, **program.config}
    if program.style == "native":
        return found
    auto = ["train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"]
    found |= dict.fromkeys(auto, "auto")
    if program.style == "trainer":
        return found | {"bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
    return found | {"gradient_accumulation_steps": 1, "gradient_clipping": 0.0}


def _save_models(directory: Path) -> None:
    """Write a tokenizer, tiny models, and a text."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers import PreTrainedTokenizerFast as Fast

    words = ["[PAD]", "[UNK]", "[EOS]", *(f"w{number}" for number in range(61))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Fast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", eos_token="[EOS]", model_max_length=24
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": 24, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=2, eos_token_id=2)).save_pretrained(directory / "gpt2")
    tokenizer.save_pretrained(directory / "gpt2")
    text = (" ".join(words[3 + (start * 7 + place * 3) % 61] for place in range(16)) for start in range(40))
    (directory / "text.txt").write_text("\n".join(text) + "\n")
