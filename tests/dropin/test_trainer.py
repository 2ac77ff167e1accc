"""transformers' Trainer with `deepspeed=` and shardwise behind it: the losses of the same Trainer without it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from tests.dropin.clients import MISSING, forget, gpt2, on_clients, tokens
from tests.harness import thorough
from tests.harness.tables import tables

TABLES = tables(__file__)

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def config(stage: int | None) -> Any:
    """A configuration that leaves to the Trainer what the Trainer knows; without a stage None."""
    if stage is None:
        return None
    given: dict[str, Any] = copy.deepcopy(TABLES["config"])
    given["zero_optimization"]["stage"] = stage
    return given


def trainer(
    directory: str, deepspeed: dict[str, Any] | None, model: Any, optimizers: Any = None, **changes: Any
) -> Any:
    """A Trainer on CPU ranks.

    Args:
        directory: for its output.
        deepspeed: its configuration; None: without.
        model: or what makes it when the arguments exist.
        optimizers: makes an optimizer from the model, and makes a schedule from it; None: the Trainer does. It drops
            those that are passed as `optimizers` when DeepSpeed is used, and calls these methods.
        changes: of its arguments.
    """
    from transformers import Trainer, TrainingArguments

    forget()
    place: dict[str, Any] = {"use_cpu": True} if deepspeed is None else {"deepspeed": deepspeed}
    arguments = TrainingArguments(directory, **TABLES["arguments"] | place | changes)
    rows = [{"input_ids": row, "labels": row} for row in tokens(48)]
    made = model() if callable(model) else model

    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = self.optimizer or optimizers[0](self.model)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = optimizers[1](optimizer or self.optimizer)
            return self.lr_scheduler

    kind = Trainer if optimizers is None else Own
    return kind(made, arguments, train_dataset=rows, eval_dataset=rows[:4])


Logged = dict[str, list[float]]


def logged(ran: Any) -> Logged:
    """Losses, norms and evaluations, in order."""
    history = ran.state.log_history
    return {key: [float(row[key]) for row in history if key in row] for key in ("loss", "grad_norm", "eval_loss")}


def evaluated(model: Any) -> float:
    """Return the loss of a model on rows that are always the same."""
    given = tokens(4)
    with torch.no_grad():
        return float(model.eval()(input_ids=given, labels=given).loss)


def end(ran: Any) -> Logged:
    """Return what has been logged; the engine goes, and what transformers remember of it."""
    if ran.is_deepspeed_enabled:
        ran.deepspeed.destroy()
    forget()
    torch.distributed.barrier()
    return logged(ran)


def trained(directory: str, given: dict[str, Any] | None, model: Callable[..., Any]) -> tuple[Logged, float, Logged]:
    """Train, save, load the weights into a plain model and compare, and go on from the checkpoint in the middle."""
    ran = trainer(directory, given, model)
    ran.train()
    ran.save_model(f"{directory}/final")
    ours = evaluated(ran.model_wrapped)
    if given is not None:
        assert isinstance(ran.deepspeed, shardwise.Engine) and ran.args.world_size == torch.distributed.get_world_size()
        assert ran.deepspeed.zero_optimization_stage() == given["zero_optimization"]["stage"]
        parts = given.get("tensor_parallel", {}).get("autotp_size", 1)
        assert ran.deepspeed.get_tensor_parallel_world_size() == parts
    first = end(ran)
    difference = abs(evaluated(type(model()).from_pretrained(f"{directory}/final")) - ours)
    again = trainer(directory, given, lambda: model(seed=5))
    again.train(resume_from_checkpoint=f"{directory}/checkpoint-3")
    return first, difference, end(again)


@on_clients(2)
def test_offload(tmp_path: Path) -> None:
    """Two steps without offload, and with it."""
    found = []
    for number, places in enumerate(((), ("offload_optimizer",), ("offload_optimizer", "offload_param"))):
        given = config(3)
        given["zero_optimization"] |= {place: {"device": "cpu", "pin_memory": True} for place in places}
        ran = trainer(f"{tmp_path}/{number}", given, gpt2, max_steps=2, eval_strategy="no", save_strategy="no")
        ran.train()
        found.append(end(ran))
    assert len(found[0]["loss"]) == 2 and found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("chosen", [(3,), thorough((0, 1, 2))], ids=str)
@on_clients(2)
def test_stages(tmp_path: Path, chosen: tuple[int, ...]) -> None:
    plain = trained(f"{tmp_path}/plain", None, gpt2)[0]
    assert len(plain["loss"]) == 6 and len(plain["eval_loss"]) == 2
    for stage in chosen:
        first, difference, second = trained(f"{tmp_path}/{stage}", config(stage), gpt2)
        assert first["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert first["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-4)
        assert first["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)
        assert difference < 1e-6 and second == first


def adapted(directory: str, stage: int | None) -> tuple[Logged, float]:
    """LoRA and a module of its own: they alone are trained and saved, and load into plain transformers and PEFT."""
    from peft import LoraConfig, PeftModel, get_peft_model

    def model() -> Any:
        base = gpt2()
        what = {"target_modules": ["c_attn"], "modules_to_save": ["ln_f"]}
        lora = LoraConfig(r=4, task_type="CAUSAL_LM", fan_in_fan_out=True, **what)
        torch.manual_seed(3)
        return get_peft_model(base, lora)

    ran = trainer(directory, config(stage), model)
    ran.train()
    ran.save_model(f"{directory}/final")
    ours, found = evaluated(ran.model_wrapped), end(ran)
    assert sorted(name for name in os.listdir(f"{directory}/final") if name.endswith(".safetensors")) == [
        "adapter_model.safetensors"
    ]
    return found, abs(evaluated(PeftModel.from_pretrained(gpt2(), f"{directory}/final")) - ours)


@pytest.mark.parametrize("chosen", [(3,), thorough((0, 1, 2))], ids=str)
@on_clients(2)
def test_lora(tmp_path: Path, chosen: tuple[int, ...]) -> None:
    plain = adapted(f"{tmp_path}/plain", None)[0]
    for stage in chosen:
        found, difference = adapted(f"{tmp_path}/{stage}", stage)
        assert found["loss"] == pytest.approx(plain["loss"], rel=1e-4) and difference < 1e-6
