"""Tiny models that generate, with prompts, and what transformers makes of each prompt without padding."""

from __future__ import annotations

from typing import Any

import torch

from tests.families import WORDS, build

NEW = 64
FAMILIES = {
    "gpt2": {"n_positions": 128, "bos_token_id": 1, "eos_token_id": 2},
    "llama": {"max_position_embeddings": 128},
    "bloom": {},
    "t5": {},
    "mixtral": {"max_position_embeddings": 128, "output_router_logits": False},
    "qwen2": {"max_position_embeddings": 128},
}
ARGUMENTS: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
# Because tiny models repeat themselves, no pair of tokens comes twice.
ARGUMENTS |= {"no_repeat_ngram_size": 2, "suppress_tokens": [0]}


def generating(family: str, seed: int = 0) -> Any:
    """Build a model in evaluation mode."""
    return build(family, seed, noise=0.4, **FAMILIES[family]).eval()


def prompts(rows: int, padding: str) -> dict[str, torch.Tensor]:
    """Return prompts of 6, 4, 3, ... tokens, padded on a side."""
    ids = torch.randint(3, WORDS, (rows, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        cut = row + 1
        part = slice(0, cut) if padding == "left" else slice(6 - cut, 6)
        if padding == "right":
            ids[row] = ids[row].roll(-cut)
        ids[row, part], mask[row, part] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def expected(model: Any, rows: int, new: int = NEW) -> list[list[int]]:
    """Return the greedy answer of transformers to each prompt without padding."""
    given = prompts(rows, "left")
    found = []
    for ids, mask in zip(given["input_ids"], given["attention_mask"], strict=True):
        one = ids[mask.bool()].unsqueeze(0)
        out = model.generate(one, attention_mask=torch.ones_like(one), max_new_tokens=new, **ARGUMENTS)
        found.append(out[0, -new:].tolist())
    return found


def answers(engine: Any, rows: int, padding: str, new: int = NEW, **more: Any) -> list[list[int]]:
    """Return an engine's greedy answers to the padded prompts."""
    out = engine.generate(**prompts(rows, padding), max_new_tokens=new, **ARGUMENTS, **more)
    found: list[list[int]] = out[:, -new:].tolist()
    return found
