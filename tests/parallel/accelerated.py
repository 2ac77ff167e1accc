"""A script of Accelerate whose ranks share sequences; rank 0 prints the losses. Without arguments one trains."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch

TOKENS = 11


def model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    config = LlamaConfig(vocab_size=37, num_key_value_heads=2, use_cache=False, attn_implementation="sdpa", **sizes)
    return LlamaForCausalLM(config)


def samples() -> list[dict[str, torch.Tensor]]:
    made = [torch.arange(TOKENS) * (number + 1) % 37 for number in range(6)]
    return [{"input_ids": ids, "labels": ids, "position_ids": torch.arange(TOKENS)} for ids in made]


def shared() -> list[float]:
    import shardwise

    shardwise.install_as_deepspeed()
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin, DeepSpeedSequenceParallelConfig, ParallelismConfig
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallel = ParallelismConfig(sp_backend="deepspeed", sp_size=2, sp_handler=handler)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 3},
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), parallelism_config=parallel)
    net = model()
    loader = torch.utils.data.DataLoader(samples(), batch_size=1)  # type: ignore[arg-type]
    net, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader)
    losses = []
    for batch in loader:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            loss = deepspeed_sp_compute_loss(accelerator, net, dict(batch), False, parallel)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def alone() -> list[float]:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for sample in samples():
        loss = net(**{name: value.unsqueeze(0) for name, value in sample.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    print("losses", *(shared() if sys.argv[1:] else alone()), flush=True)
