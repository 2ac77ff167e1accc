"""Index of a model's layers by name, without wrappers of adapters and compilers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.parallel.tensor.layers import stores_inputs_first

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:base_layer|original_module|modules_to_save\.[^.]+|_orig_mod|_checkpoint_wrapped_module)(?:\.|$)"
)
_ADAPTERS = re.compile(r"(?:^|\.)lora_(?:A|B|embedding_A|embedding_B|magnitude_vector)(?:\.|$)")
_OF_TRANSFORMERS = ("get_input_embeddings", "get_output_embeddings", "post_init")


@dataclass(frozen=True)
class Layer:
    """A linear layer or an embedding, by its name without wrappers."""

    path: str
    places: tuple[str, ...]  # names in the model; several, because adapters keep the original
    module: nn.Module

    @property
    def weight(self) -> nn.Parameter:
        """2-D weight of the layer."""
        found: Any = self.module._parameters["weight"]
        return found

    @property
    def is_embedding(self) -> bool:
        """True for an embedding (words by width)."""
        return isinstance(self.module, nn.Embedding)

    @property
    def inputs(self) -> int:
        """Input features of a linear layer."""
        return self.weight.shape[int(not stores_inputs_first(self.module))]

    @property
    def outputs(self) -> int:
        """Output features of a linear layer."""
        return self.weight.shape[int(stores_inputs_first(self.module))]


class Inventory:
    """Modules of a model by name without wrappers; `layers` are linear layers and embeddings, without adapters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules: dict[str, nn.Module] = {}
        self.layers: dict[str, Layer] = {}
        places: dict[str, list[str]] = {}
        for path, module in model.named_modules():
            if _ADAPTERS.search(path):
                continue
            name = plain(path)
            self.modules[name] = module
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2:
                places.setdefault(name, []).append(path)
        for name, found in places.items():
            self.layers[name] = Layer(name, tuple(found), model.get_submodule(found[0]))

    def linear(self, path: str) -> Layer | None:
        """Return the linear layer of this name, or None."""
        found = self.layers.get(path)
        return None if found is None or found.is_embedding else found

    def pretrained(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the models of transformers, outermost first."""
        for path, module in self.modules.items():
            # Adapter wrappers forward attributes of the inner model; their classes do not.
            if hasattr(module, "config") and all(hasattr(type(module), name) for name in _OF_TRANSFORMERS):
                yield path, module

    def below(self, path: str) -> list[Layer]:
        """Return the linear layers inside of a module."""
        return [layer for name, layer in self.layers.items() if name.startswith(under(path)) and not layer.is_embedding]


def plain(path: str) -> str:
    """Return a module's name without wrappers.

    >>> plain("model.q_proj.base_layer"), plain("lm_head.modules_to_save.default")
    ('model.q_proj', 'lm_head')
    """
    return _WRAPPERS.sub("", path).rstrip(".")


def under(path: str) -> str:
    """Return the name prefix of a module's children."""
    return f"{path}." if path else ""
