"""Train a Hugging Face causal language model through the same API: built from a configuration, or weights from disk.

    shardwise run --nproc 2 examples/finetune_hf.py --family bloom --stage 3
    shardwise run --nproc 2 examples/finetune_hf.py --model /path/to/saved/model

Nothing is downloaded. Without `--model` a tiny model of the family is built, reads bytes, and learns from the Python
language reference, which comes with Python.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

import shardwise

LENGTH = 128
BYTES = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
SIZE = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": LENGTH}

FAMILIES: dict[str, Callable[[], Any]] = {
    "bloom": lambda: transformers.BloomConfig(**BYTES, hidden_size=128, n_layer=4, n_head=4),
    "opt": lambda: transformers.OPTConfig(**BYTES, **SIZE, ffn_dim=512, word_embed_proj_dim=128),
    "gpt2": lambda: transformers.GPT2Config(**BYTES, n_embd=128, n_layer=4, n_head=4, n_positions=LENGTH),
    "llama": lambda: transformers.LlamaConfig(**BYTES, **SIZE, intermediate_size=512),
}


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """Consecutive pieces of LENGTH tokens."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def reference() -> str:
    """Return the Python language reference."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def main() -> None:
    """Train for some steps and print the loss."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--family", choices=FAMILIES, default="bloom")
    parser.add_argument("--model", type=Path, help="folder of a saved model with its tokenizer")
    parser.add_argument("--stage", type=int, choices=range(4), help="overrides zero_optimization.stage")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save", type=Path, help="folder for the trained weights (model.safetensors)")
    parser.add_argument("--local_rank", type=int, help="given by launchers; not needed")
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    if args.stage is not None:
        config["zero_optimization"]["stage"] = args.stage

    torch.manual_seed(0)
    if args.model is not None:
        model = transformers.AutoModelForCausalLM.from_pretrained(args.model, local_files_only=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, local_files_only=True)
        tokens = torch.tensor(tokenizer(reference())["input_ids"])
    else:
        with shardwise.zero.Init(config_dict_or_path=config):  # built module by module, sharded from the start
            model = transformers.AutoModelForCausalLM.from_config(FAMILIES[args.family]())
        tokens = torch.tensor(list(reference().encode()))
    engine, _, loader, _ = shardwise.initialize(model=model.train(), training_data=Windows(tokens), config=config)

    batches = iter(shardwise.RepeatingLoader(loader))
    while engine.global_steps < args.steps:
        ids = next(batches).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        if engine.global_rank == 0 and (engine.global_steps % 10 == 0 or engine.global_steps == 1):
            print(f"step {engine.global_steps}  loss {float(mean) / engine.world_size:.3f}", flush=True)
    if args.save is not None:
        engine.save_16bit_model(args.save)
    engine.destroy()


if __name__ == "__main__":
    main()
