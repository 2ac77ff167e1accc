"""Train a Llama of transformers whose matrices are divided over ranks, which have one copy of it among them.

    shardwise run --nproc 2 examples/tensor_parallel.py
    shardwise run --nproc 4 examples/tensor_parallel.py             # two copies of two ranks each
    shardwise run --nproc 1 examples/tensor_parallel.py --tp 1      # the same losses on one

Nothing is downloaded: the model is built from a configuration, reads bytes, and learns from the Python language
reference, which comes with Python. Only the section `tensor_parallel` of examples/tensor_parallel.json has anything to
do with how it is divided.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

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
    max_position_embeddings=LENGTH,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)


def text() -> torch.Tensor:
    """Return passages of the Python language reference as bytes; [passages, LENGTH]."""
    from pydoc_data.topics import topics

    symbols = torch.tensor(list("\n".join(topics[name] for name in sorted(topics)).encode()))
    return symbols[: len(symbols) // LENGTH * LENGTH].view(-1, LENGTH)


def main() -> None:
    """Train for some steps; print the loss, and what of the model a rank has."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".json"))
    found.add_argument("--tp", type=int, help="overrides tensor_parallel.autotp_size")
    found.add_argument("--stage", type=int, choices=range(4), help="overrides zero_optimization.stage")
    found.add_argument("--steps", type=int, default=30)
    found.add_argument("--save", type=Path, help="folder for a checkpoint: of whole tensors, whatever --tp is")
    options = found.parse_args()
    config = json.loads(options.config.read_text())
    if options.tp is not None:
        config["tensor_parallel"] = {"autotp_size": options.tp} if options.tp > 1 else {}
    if options.stage is not None:
        config["zero_optimization"]["stage"] = options.stage

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(LLAMA)
    whole = sum(parameter.numel() for parameter in model.parameters())
    # The loader gives ranks that have a copy of the model among them the same samples.
    engine, _, loader, _ = shardwise.initialize(model=model.train(), training_data=list(text()), config=config)
    here = sum(parameter.numel() for parameter in model.parameters())
    batches = iter(shardwise.RepeatingLoader(loader))
    for step in range(options.steps):
        ids = next(batches).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        if engine.global_rank == 0 and (step % 10 == 0 or step + 1 == options.steps):
            print(f"step {step:3d}  loss {mean.item() / dist.get_world_size():.3f}", flush=True)
    print(
        f"rank {engine.global_rank} has {here:,} of {whole:,} parameters, in copy {engine.get_data_parallel_rank()} of "
        f"{engine.dp_world_size}",
        flush=True,
    )
    if options.save is not None:
        engine.save_checkpoint(str(options.save))
    engine.destroy()


if __name__ == "__main__":
    main()
