"""Low-rank adapters that are merged into their layers for a while, with every bit restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


@contextlib.contextmanager
def merged(model: nn.Module) -> Iterator[int]:
    """Merge a model's adapters inside the block, whose value is the number of layers.

    Adapters are layers of peft (`merge` and `unmerge`), or of scripts (`fuse_lora_weight` and `unfuse_lora_weight`).
    Because subtracting what was added rounds, the weights of their base layers are copied before, and copied back.
    """
    layers: list[tuple[Any, str]] = []
    kept: list[tuple[nn.Parameter, torch.Tensor]] = []
    try:
        for module in model.modules():
            found: Any = module
            undo = _undoing(found)
            if undo is None:
                continue
            base = found.get_base_layer() if hasattr(found, "get_base_layer") else found
            with torch.no_grad():
                kept += [(one, one.detach().clone()) for one in base.parameters(recurse=False)]
                layers.append((found, undo))
                getattr(found, "merge" if undo == "unmerge" else "fuse_lora_weight")()
        yield len(layers)
    finally:
        with torch.no_grad():
            for layer, undo in layers:
                getattr(layer, undo)()
            for parameter, values in kept:
                parameter.copy_(values)


def _undoing(module: Any) -> str | None:
    """Return the name of the method that takes an adapter out again; None for other layers, or merged ones."""
    if type(module).__module__.startswith("peft.tuners.") and callable(getattr(module, "get_base_layer", None)):
        return None if module.merged or module.disable_adapters else "unmerge"
    own = callable(getattr(module, "fuse_lora_weight", None)) and callable(getattr(module, "unfuse_lora_weight", None))
    return "unfuse_lora_weight" if own and isinstance(getattr(module, "weight", None), nn.Parameter) else None
