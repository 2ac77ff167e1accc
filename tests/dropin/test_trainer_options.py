"""Options of the Trainer under stages 2 and 3, against the Trainer without DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dropin.clients import MISSING, forget, gpt2, on_clients
from tests.dropin.test_trainer import Logged, config, end, evaluated, logged, trainer
from tests.harness import thorough

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

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
