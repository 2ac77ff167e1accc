"""Train a small Llama of transformers, let it write between steps, and serve its weights divided over the ranks.

    shardwise run --nproc 2 examples/generation.py
    shardwise run --nproc 2 examples/generation.py --dtype int8        # needs torchao
    shardwise run --nproc 2 examples/generation.py --model DIRECTORY   # serve a saved model; nothing is trained

Nothing is downloaded: the model is built from a configuration, reads bytes, and learns from the Python language
reference. While it trains, ZeRO stage 3 shards it, and `engine.generate` gathers its weights once (`hybrid_engine`).
Then each rank reads its part of the exported weights, into a model that is never whole on any rank.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import shardwise

LENGTH = 64
LLAMA = transformers.LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
    "zero_optimization": {"stage": 3},
    "hybrid_engine": {"enabled": True},
}
PROMPT = "The class "


def text() -> torch.Tensor:
    """Return passages of the Python language reference as bytes; [passages, LENGTH]."""
    from pydoc_data.topics import topics

    symbols = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    return symbols[: len(symbols) // LENGTH * LENGTH].view(-1, LENGTH)


def written(engine: Any, tokens: int) -> str:
    """Return what a model writes after the prompt, byte by byte."""
    ids = torch.tensor([list(PROMPT.encode())], device=engine.device)
    found = engine.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return repr(bytes(found[0].tolist()).decode(errors="replace"))


def train(steps: int, tokens: int, directory: str) -> None:
    """Train, write every 50 steps, and export the weights."""
    torch.manual_seed(0)
    engine, _, loader, _ = shardwise.initialize(
        model=transformers.LlamaForCausalLM(LLAMA), training_data=list(text()), config=CONFIG
    )
    batches = iter(shardwise.RepeatingLoader(loader))
    for step in range(1, steps + 1):
        ids = next(batches).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        if step % 50 == 0 or step == steps:
            engine.eval()
            line = written(engine, tokens)  # all ranks call
            engine.train()
            if engine.global_rank == 0:
                print(f"step {step:3d}  loss {loss.item():.3f}  {line}", flush=True)
    engine.export(directory)
    engine.destroy()


def serve(directory: str, dtype: str, tokens: int) -> None:
    """Write with a model of which each rank reads its part."""
    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    size = dist.get_world_size()
    engine = shardwise.init_inference(model, dtype=dtype, tensor_parallel={"tp_size": size}, checkpoint=directory)
    line = written(engine, tokens)
    if dist.get_rank() == 0:
        here = sum(parameter.numel() for parameter in model.parameters())
        print(f"served in {dtype}, {here:,} parameters a rank: {line}", flush=True)
    engine.destroy()


def main() -> None:
    """Train unless a model is given, then serve."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--model", help="directory of a saved model of transformers that reads bytes")
    found.add_argument("--steps", type=int, default=150)
    found.add_argument("--tokens", type=int, default=48)
    found.add_argument("--dtype", default="fp32", choices=("fp32", "fp16", "bf16", "int8"))
    options = found.parse_args()
    shardwise.init_distributed()
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    directory = options.model or str(Path(name[0]) / "model")
    if options.model is None:
        train(options.steps, options.tokens, directory)
    serve(directory, options.dtype, options.tokens)


if __name__ == "__main__":
    main()
