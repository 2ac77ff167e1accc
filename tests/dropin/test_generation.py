"""`generate` at stage 3: the tokens of one process, with prompts and lengths that differ between ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise
from tests.dropin.clients import MISSING, gpt2, on_clients, tokens

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def prompt(rank: int) -> torch.Tensor:
    """A prompt whose length depends on the rank."""
    return torch.randint(1, 48, (1, 4 + 5 * rank), generator=torch.Generator().manual_seed(rank))


@on_clients(2)
def test_prompts_and_lengths_differ_between_ranks() -> None:
    """Train a GPT-2 at stage 3 and generate in between: in step with the other rank, and at one's own pace."""
    from deepspeed.runtime.zero.partition_parameters import unwrap_model_for_generation  # type: ignore[import-not-found]
    from transformers.integrations import HfDeepSpeedConfig

    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    # While it is alive, `generate` keeps in step with the other ranks.
    keep = HfDeepSpeedConfig(settings)
    assert keep.is_zero3()
    model = gpt2()
    engine, *_ = shardwise.initialize(model=model, config=settings)
    rank = dist.get_rank()
    limit = {"max_new_tokens": (3, 6)[rank], "pad_token_id": 0, "eos_token_id": 64, "do_sample": False}
    for how in ("in step", "alone", "in step"):
        engine.train()
        batch = tokens(4)[2 * rank : 2 * rank + 2]
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        engine.eval()
        if how == "in step":
            made = engine.module.generate(prompt(rank), **limit)
        else:
            with unwrap_model_for_generation(engine) as whole:
                made = whole.generate(prompt(rank), synced_gpus=False, **limit)
        with engine.gathered():
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        plain = gpt2()
        plain.load_state_dict(weights)
        assert made.tolist() == plain.eval().generate(prompt(rank), synced_gpus=False, **limit).tolist(), how
        assert made.shape[1] == (7, 15)[rank]
    engine.destroy()
