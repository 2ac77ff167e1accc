"""Models named on the command line, built on the meta device."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import CommandLineError
from shardwise.pipeline.transformer import model_loss
from shardwise.plan.architectures import SHAPES, Decoder, decoder_pipeline


def named_model(name: str, recompute: bool, *, pipeline: bool = False) -> nn.Module:
    """Build a model of `SHAPES` (with activation checkpointing if `recompute`), or from module:function, on the meta
    device. Raises CommandLineError if the model is unknown, or the function returns none.
    """
    with torch.device("meta"):
        if name in SHAPES:
            return (decoder_pipeline if pipeline else Decoder)(SHAPES[name], recompute=recompute)
        module, _, function = name.partition(":")
        if not function:
            raise CommandLineError(f"{name} is not known; give {', '.join(SHAPES)}, or module:function.")
        sys.path.insert(0, str(Path.cwd()))
        try:
            build = getattr(importlib.import_module(module), function)
        except (ImportError, AttributeError) as error:
            raise CommandLineError(f"{name}: {error}.") from error
        finally:
            sys.path.pop(0)
        try:
            made = build()
        except Exception as error:
            raise CommandLineError(
                f"{name}() has raised {type(error).__name__}: {error}. It is called without arguments and has to "
                "return a torch.nn.Module; write a function that gives the model its arguments."
            ) from error
    if not isinstance(made, nn.Module):
        raise CommandLineError(f"{name} has returned {type(made).__name__}; it must return a torch.nn.Module.")
    return made


def micro_batch(model: nn.Module, sequences: int, length: int, *, pipeline: bool) -> Any:
    """Return a meta batch of token ids for a model; of a pipeline a pair (inputs, labels); None for length 0."""
    given = tokens(sequences, length)
    if given is None or not pipeline:
        return given
    of_transformers = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    if of_transformers or getattr(model, "loss_fn", None) is model_loss:
        return {"input_ids": given, "labels": given}, None
    return given, given


def tokens(sequences: int, length: int) -> Any:
    """Return a meta batch of (sequences, length) token ids; None for length 0."""
    return torch.empty(sequences, length, dtype=torch.int64, device="meta") if length else None
