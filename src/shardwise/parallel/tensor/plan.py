"""Which layers of a model are divided, and how: by the rules of the configuration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torch import nn

from shardwise.errors import ConfigError
from shardwise.parallel.tensor.layers import Cut, Kind, runs_of, stores_inputs_first

if TYPE_CHECKING:
    from shardwise.config.schema.parallel import TensorParallel

_SECTION = "tensor_parallel"


def cuts_of(model: nn.Module, size: int, section: TensorParallel) -> dict[str, Cut]:
    """Return how each layer is divided, by its name.

    Args:
        model: it is not changed.
        size: ranks that have a copy of the model.
        section: of the configuration.

    Raises:
        ConfigError: nothing is divided.
    """
    rules = section.partition_config
    found: dict[str, Cut] = {}
    for path, layer in model.named_modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.dim() != 2:
            continue
        for rule in rules.layer_specs if rules is not None else ():
            if any(re.search(pattern, f"{path}.weight") for pattern in rule.patterns):
                if rule.partition_type != "skip":
                    kind: Kind = "row" if rule.partition_type == "row" else "column"
                    features = weight.shape[int((kind == "row") != stores_inputs_first(layer))]
                    found[path] = Cut(kind, runs_of(features, size), whole_output=rule.gather_output)
                break
    if not found:
        raise ConfigError(f"{_SECTION}: no layer of {type(model).__name__} is divided")
    return found | _tied(model, found)


def _tied(model: nn.Module, cuts: dict[str, Cut]) -> dict[str, Cut]:
    """Return how embeddings are divided whose weight is that of a layer which is divided by output features."""
    shared = {id(model.get_submodule(path).weight): cut for path, cut in cuts.items() if cut.kind == "column"}
    return {
        path: Cut("words", shared[id(layer.weight)].runs)
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Embedding) and path not in cuts and id(layer.weight) in shared
    }
