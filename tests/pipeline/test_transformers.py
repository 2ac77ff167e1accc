"""Models of transformers as pipelines: `pipeline.stages` suffices, and training equals that of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

import shardwise
from shardwise.errors import PipelineError
from tests.harness import run_ranks, thorough

WORDS, STEPS, MICRO_BATCHES = 64, 3, 3


def model_of(kind: str) -> Any:
    """Return a small model; Llama with its own head, the others with tied ones."""
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        return transformers.LlamaForCausalLM(config)
    if kind == "gpt2":
        zero = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=4, n_head=4, n_positions=32, **zero)
        )
    if kind == "bloom":
        return transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=4, n_head=4)
        )
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=WORDS,
            d_model=32,
            d_ff=48,
            num_layers=3,
            num_decoder_layers=3,
            num_heads=4,
            d_kv=8,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def batch(step: int, number: int, place: int) -> dict[str, torch.Tensor]:
    """Return a micro-batch in which one row is padded."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * number + place)
    ids = torch.randint(1, WORDS, (2, 7), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, 5:], labels[0, 5:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def alone(kind: str, places: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = model_of(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for number in range(MICRO_BATCHES):
            for place in range(places):
                loss = model(**batch(step, number, place)).loss / (MICRO_BATCHES * places)
                loss.backward()
                total += float(loss.detach())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(total)
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass(frozen=True)
class Setting:
    """A layout; `tensor`: ranks of a tensor-parallel group."""

    kind: str
    stages: int
    schedule: str = "1f1b"
    zero: int = 1
    tensor: int = 1
    more: dict[str, Any] = field(default_factory=dict)


def engine_of(setting: Setting) -> Any:
    """Return the engine of a setting."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": setting.zero, "stage3_param_persistence_threshold": 0},
        "pipeline": {"stages": setting.stages, "schedule": setting.schedule},
        "tensor_parallel": {"autotp_size": setting.tensor},
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
    }
    return shardwise.initialize(model=model_of(setting.kind), config=config)[0]


def train(setting: Setting) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    engine = engine_of(setting)
    place = dist.get_rank() % (dist.get_world_size() // setting.stages) // setting.tensor
    losses, norms = [], []
    for step in range(STEPS):
        pairs = ((batch(step, number, place), None) for number in range(MICRO_BATCHES))
        losses.append(float(engine.train_batch(pairs)))
        norms.append(float(engine.last_step.grad_norm))
    engine.destroy()
    whole = setting.tensor == 1
    return losses, norms, {n: p.detach().clone() for n, p in engine.module.named_parameters()} if whole else {}


@pytest.mark.parametrize(
    ("setting", "ranks"),
    [
        (Setting("llama", 2, "zb-h1"), 4),
        (Setting("gpt2", 2, zero=2), 2),
        (Setting("t5", 2), 2),
        thorough(Setting("llama", 2, "zbv", 3), 4),
        thorough(Setting("bloom", 3), 3),
        thorough(Setting("gpt2", 4, "1f1b"), 4),
        thorough(Setting("t5", 3, "zb-h1"), 3),
        (Setting("llama", 2, tensor=2), 4),
        thorough(Setting("llama", 2, tensor=2), 8),
    ],
    ids=str,
)
def test_training_equals_that_of_one_process(setting: Setting, ranks: int) -> None:
    places = ranks // setting.stages // setting.tensor
    losses, norms, parameters = alone(setting.kind, places)
    found = run_ranks(train, ranks, setting)
    for run in found:
        torch.testing.assert_close(run[0], losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(run[1], norms, rtol=1e-4, atol=1e-5)
        for name, values in run[2].items():
            torch.testing.assert_close(values, parameters[name], rtol=1e-4, atol=5e-6, msg=name)
    if setting.tensor == 1:
        assert {name for run in found for name in run[2]} == set(parameters)


def refused() -> str:
    config = {"train_micro_batch_size_per_gpu": 1, "pipeline": {"stages": 2}}
    with pytest.raises(PipelineError) as error:
        shardwise.initialize(model=nn.Linear(2, 2), config=config)
    return str(error.value)


def test_other_models_are_refused_with_what_to_write() -> None:
    for text in run_ranks(refused, 2):
        assert "Linear is neither a shardwise.pipe.PipelineModule nor an nn.Sequential nor a model of" in text
