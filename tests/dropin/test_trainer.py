"""transformers' Trainer with `deepspeed=` and shardwise behind it: the losses of the same Trainer without it."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

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


QUICK = {"max_steps": 3, "eval_strategy": "no", "save_strategy": "no"}


def recomputed(directory: str, stage: int | None) -> Logged:
    ran = trainer(directory, config(stage), gpt2, activation_checkpointing=True, **QUICK)
    ran.train()
    assert ran.model.is_activation_checkpointing
    return end(ran)


def own_optimizer(directory: str, stage: int | None) -> Logged:
    """An optimizer and a schedule of torch."""

    def optimizer(model: Any) -> Any:
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}]
        return torch.optim.RMSprop(groups, lr=1e-3, eps=1e-4)

    def schedule(made: Any) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))

    keys = config(stage) or {}
    given = {key: keys[key] for key in keys.keys() - {"optimizer", "scheduler"}} or None
    ran = trainer(directory, given, gpt2, (optimizer, schedule), **QUICK)
    ran.train()
    found = end(ran)
    found["lr"] = [row["learning_rate"] for row in ran.state.log_history if "learning_rate" in row]
    return found


def short_window(directory: str, stage: int | None) -> Logged:
    """One epoch of 12 micro-batches a rank in windows of 5: the last one has two."""
    changes = QUICK | {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 5}
    ran = trainer(directory, config(stage), gpt2, **changes)
    ran.train()
    assert ran.state.global_step == 3
    ran.evaluate()
    return end(ran)


def best(directory: str, stage: int | None) -> Logged:
    """The best model, here that of the first evaluation, is loaded at the end."""
    ran = trainer(directory, config(stage), gpt2, load_best_model_at_end=True)
    ran.train()
    assert ran.state.best_model_checkpoint.endswith("checkpoint-3")
    found = logged(ran)
    again = ran.evaluate()["eval_loss"]
    assert again == pytest.approx(found["eval_loss"][0], abs=1e-6)
    end(ran)
    return found


def only_the_model(directory: str, stage: int | None) -> Logged:
    """`save_only_model`: weights for plain transformers and nothing of an engine."""
    from transformers import GPT2LMHeadModel

    ran = trainer(directory, config(stage), gpt2, save_only_model=True, max_steps=3)
    ran.train()
    ours, found = evaluated(ran.model_wrapped), end(ran)
    files = os.listdir(f"{directory}/checkpoint-3")
    assert "model.safetensors" in files and not [name for name in files if name.startswith("global_step")]
    assert evaluated(GPT2LMHeadModel.from_pretrained(f"{directory}/checkpoint-3")) == pytest.approx(ours, abs=1e-6)
    return found


CASES = {case.__name__: case for case in (recomputed, own_optimizer, short_window, best, only_the_model)}


@pytest.mark.parametrize("name", [*map(thorough, list(CASES)[:-1]), "only_the_model"])
@on_clients(2)
def test_options(name: str, tmp_path: Path) -> None:
    plain, second, third = (CASES[name](f"{tmp_path}/{stage}", stage) for stage in (None, 2, 3))
    assert second == third
    for key in plain.keys() - {"grad_norm"}:
        assert second[key] == pytest.approx(plain[key], rel=1e-4)
    assert second["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)


# -- models that are changed before training --------------------------------------------------


@on_clients(2)
def test_resized_embeddings(tmp_path: Path) -> None:
    """A vocabulary that grows before training: of a model that `from_pretrained` has sharded, and of a whole one."""
    from transformers import GPT2LMHeadModel
    from transformers.trainer_pt_utils import get_model_param_count

    from shardwise.zero.units.released import is_released

    if dist.get_rank() == 0:
        gpt2(seed=7).save_pretrained(f"{tmp_path}/given")
    dist.barrier()
    found = []
    for sharded in (True, False):

        def model(sharded: bool = sharded) -> Any:
            made = GPT2LMHeadModel.from_pretrained(f"{tmp_path}/given") if sharded else gpt2(seed=7)
            assert all(is_released(parameter) == sharded for parameter in made.parameters())
            torch.manual_seed(11)
            made.resize_token_embeddings(72, mean_resizing=False)
            assert made.transformer.wte.weight.shape == made.lm_head.weight.shape == (72, 16)
            assert made.transformer.wte.weight is made.lm_head.weight
            return made

        ran = trainer(f"{tmp_path}/{sharded}", config(3), model, **QUICK)
        count = sum(p.numel() for p in gpt2().parameters()) + 8 * 16
        assert get_model_param_count(ran.model) == count == get_model_param_count(ran.model, trainable_only=True)
        ran.train()
        assert get_model_param_count(ran.model_wrapped) == count
        ran.save_model(f"{tmp_path}/{sharded}/final")
        found.append(end(ran))
        assert GPT2LMHeadModel.from_pretrained(f"{tmp_path}/{sharded}/final").lm_head.weight.shape == (72, 16)
    assert len(found[0]["loss"]) == 3 and found[0] == found[1]


# -- bf16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [thorough(1), 3])
@on_clients(2)
def test_bf16(tmp_path: Path, stage: int) -> None:
    """`bf16=True`: 16-bit weights with fp32 masters by the engine; without DeepSpeed, autocast on fp32 weights."""
    from transformers import GPT2LMHeadModel

    # transformers asks for use_cpu where there is no graphics card; the engine is there all the same.
    changes = {"bf16": True, "use_cpu": True, "eval_steps": 2, "save_steps": 2, "max_steps": 4}
    ran = trainer(f"{tmp_path}/plain", None, gpt2, **changes)
    ran.train()
    plain = end(ran)
    ran = trainer(f"{tmp_path}/ours", config(stage), gpt2, **changes)
    ran.train()
    assert ran.deepspeed.bfloat16_enabled() and ran.model.dtype is torch.bfloat16
    ran.save_model(f"{tmp_path}/final")
    found = end(ran)
    forget()
    dist.barrier()
    assert GPT2LMHeadModel.from_pretrained(f"{tmp_path}/final", dtype="auto").dtype is torch.bfloat16
    again = trainer(f"{tmp_path}/ours", config(stage), lambda: gpt2(seed=5), **changes)
    again.train(resume_from_checkpoint=f"{tmp_path}/ours/checkpoint-2")
    assert end(again) == found
    assert len(plain["loss"]) == 4 and len(plain["eval_loss"]) == 2
    for key in ("loss", "eval_loss"):
        assert found[key] == pytest.approx(plain[key], rel=1e-2)
