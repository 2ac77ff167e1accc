"""Configuration files of transformers' models, written with their weights."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.manifest import name_of
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger


def config_files(model: nn.Module, specs: Iterable[Spec]) -> dict[str, bytes]:
    """Return `from_pretrained`'s other files by name, for weights of `specs`; none for other libraries' models."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    source: Any = getattr(model, "pretrained_model", model)  # of a module that runs the layers of such a model
    if kind is None or not isinstance(source, kind):
        return {}
    config = copy.deepcopy(source.config)
    config.architectures = [type(source).__name__]
    dtype = _most_of(specs)
    if dtype is not None:
        config.dtype = name_of(dtype)
    found = _saved(config, "config")
    if getattr(source, "generation_config", None) is not None and source.can_generate():
        try:
            found |= _saved(source.generation_config, "generation_config")
        except CheckpointError as error:  # contradictory settings: a warning, to keep the weights
            logger.warning("%s; the file is left out", error)
    return found


def _saved(config: Any, what: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        try:
            config.save_pretrained(directory)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"the model's {what} cannot be written by transformers: {reason}") from error
        found = {}
        for name in sorted(os.listdir(directory)):
            with open(os.path.join(directory, name), "rb") as file:
                found[name] = file.read()
    return found


def _most_of(specs: Iterable[Spec]) -> torch.dtype | None:
    sizes: Counter[torch.dtype] = Counter()
    for spec in specs:
        if spec.dtype.is_floating_point:
            sizes[spec.dtype] += spec.nbytes
    return sizes.most_common(1)[0][0] if sizes else None
