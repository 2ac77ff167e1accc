"""Models named on the command line, built on the meta device."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.errors import CommandLineError
from shardwise.parallel.data import first_part
from shardwise.pipeline.transformer import model_loss
from shardwise.plan.architectures import CONFIGS, SHAPES, Decoder, Layers, Shape, decoder_pipeline

LENGTH = 512
"""Tokens in a sequence where nothing else is given."""
_LETTERS = {
    "n": "layers",
    "h": "width",
    "m": "heads",
    "b": "sequences of a micro-batch",
    "l": "tokens of a sequence",
    "v": "words of the vocabulary",
}
_DROPOUT = 0.1


def named_model(name: str, recompute: bool, *, pipeline: bool = False) -> nn.Module:
    """Build a model on the meta device: of `SHAPES`, of `CONFIGS`, by letters (`letters_of`), from a configuration of
    transformers (a directory, a file, or a name in the local cache of the hub), or from module:function.

    Args:
        recompute: with activation checkpointing of layers.
        pipeline: as layers of a pipeline, where the model has that form.

    Raises CommandLineError if the model is unknown or cannot be built.
    """
    with torch.device("meta"):
        if name in SHAPES:
            return (decoder_pipeline if pipeline else Decoder)(SHAPES[name], recompute=recompute)
        if letters := letters_of(name):
            return _of_letters(name, letters, recompute, pipeline)
        if ":" in name and not Path(name).exists():
            return _of_function(name, recompute)
        return _of_transformers(name, recompute)


# -- letters -----------------------------------------------------------------------------------------------------------


def letters_of(name: str) -> dict[str, int]:
    """Return the sizes in a name such as n=24,h=1024,m=16,b=1,l=512: layers, width, heads, sequences of a micro-batch,
    tokens of a sequence; v is the vocabulary. The last three may be left out. {}: the name is none of this form.

    Raises CommandLineError.
    """
    if "=" not in name or Path(name).exists():
        return {}
    pairs = [part.partition("=") for part in name.split(",")]
    found = {letter: int(size) for letter, _, size in pairs if letter in _LETTERS and size.isdecimal()}
    missing = [letter for letter in "nhm" if letter not in found]
    if len(found) < len(pairs) or missing or 0 in found.values():
        known = ", ".join(f"{letter} ({meaning})" for letter, meaning in _LETTERS.items())
        raise CommandLineError(
            f"{name}: give each letter once, as in n=24,h=1024,m=16,b=1,l=512, with numbers from 1 up: {known}; the "
            "last three may be left out."
        )
    if found["h"] % found["m"]:
        raise CommandLineError(f"{name}: the width h={found['h']} is no multiple of the heads m={found['m']}.")
    return found


def _of_letters(name: str, letters: dict[str, int], recompute: bool, pipeline: bool) -> nn.Module:
    shape = Shape(letters["n"], letters["h"], letters["m"], letters.get("v", 0), dropout=_DROPOUT)
    if shape.vocabulary:
        return (decoder_pipeline if pipeline else Decoder)(shape, recompute=recompute)
    if pipeline:
        raise CommandLineError(f"{name}: a pipeline needs an embedding and a head; give v, the vocabulary, too.")
    return Layers(shape, recompute=recompute)


# -- functions ---------------------------------------------------------------------------------------------------------


def _of_function(name: str, recompute: bool) -> nn.Module:
    if recompute:
        raise CommandLineError(f"--recompute: {name} decides by itself what it recomputes; leave the option out.")
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
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


# -- models of transformers --------------------------------------------------------------------------------------------


def is_model_config(path: str) -> bool:
    """Return True if a path is a configuration of transformers: a directory, or a JSON file with a model type."""
    if not path.endswith(".json"):
        return Path(path).is_dir()
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and "model_type" in found


def _of_transformers(name: str, recompute: bool) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise CommandLineError(
            f"{name}: {_unknown()} For a model of transformers install it: pip install 'shardwise[hf]'."
        ) from error
    config = _config(transformers, name)
    kind = _class_of(transformers, config)
    if kind is None:
        raise CommandLineError(
            f"{name}: transformers has no model with a head for {type(config).__name__} (architectures: "
            f"{config.architectures}). Write a function that builds yours, and give module:function."
        )
    # In fp32, because the configuration of the training decides about the precision.
    build = kind.from_config if hasattr(kind, "from_config") else kind._from_config
    try:
        made: nn.Module = build(config, dtype=torch.float32)
        if recompute:
            new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
            getattr(made, new if hasattr(made, new) else old)()
    except Exception as error:  # any error of the model's own code
        raise CommandLineError(f"{name}: transformers raises {type(error).__name__}: {error}.") from error
    return made


def _config(transformers: Any, name: str) -> Any:
    if name in CONFIGS:
        return transformers.AutoConfig.for_model(**CONFIGS[name])
    there = Path(name).exists()
    try:
        return transformers.AutoConfig.from_pretrained(name, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of the hub's client, of JSON, or of the configuration's class
        if there:
            raise CommandLineError(
                f"{name}: it is no configuration of a model of transformers: {str(error).splitlines()[0]} (The "
                "configuration of a training stands behind its model: shardwise plan MODEL CONFIG.json)"
            ) from error
        raise CommandLineError(f"{name}: {_unknown()}") from error


def _unknown() -> str:
    return (
        f"it is not known. Give {', '.join([*SHAPES, *CONFIGS])}; sizes such as n=24,h=1024,m=16,b=1,l=512; a "
        "directory or config.json of a model of transformers; the name of one in the local cache of the Hugging Face "
        "hub (`hf download NAME config.json` puts it there); a training script (.py); or module:function of your own."
    )


def _class_of(transformers: Any, config: Any) -> Any:
    """Return the class that the configuration names; else a model of its type with a head."""
    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    causal = transformers.AutoModelForCausalLM
    kinds = [
        transformers.AutoModelForMaskedLM,
        causal,
    ]  # BERT has both, and is a decoder only if the configuration says so
    if getattr(config, "is_decoder", False):
        kinds.reverse()
    if config.is_encoder_decoder:
        kinds = [transformers.AutoModelForSeq2SeqLM]
    return next((kind for kind in kinds if type(config) in kind._model_mapping), None)


# -- micro-batches -----------------------------------------------------------------------------------------------------


def longest(model: nn.Module) -> int | None:
    """Return the most tokens of a sequence that a model of transformers takes; None: it has no limit."""
    return getattr(getattr(model, "config", None), "max_position_embeddings", None)


def micro_batch(model: nn.Module, sequences: int, length: int, *, pipeline: bool, parts: int = 1) -> Any:
    """Return a meta batch of token ids for a model, with labels where it takes them; of a pipeline a pair (inputs,
    labels); None for length 0. `parts`: ranks that share a sequence, of which the first has the batch.
    """
    whole = _whole(model, sequences, length, pipeline=pipeline)
    return whole if pipeline or whole is None else first_part(whole, parts)


def _whole(model: nn.Module, sequences: int, length: int, *, pipeline: bool) -> Any:
    given = tokens(sequences, length)
    if isinstance(model, Layers) and given is not None:
        return torch.empty(sequences, length, model.width, device="meta")
    of_transformers = any(kind.__module__.startswith("transformers.") for kind in type(model).__mro__)
    if given is None or not (of_transformers or pipeline):
        return given
    if pipeline and not of_transformers and getattr(model, "loss_fn", None) is not model_loss:
        return given, given
    names = ["input_ids", "labels"]
    if of_transformers:
        taken = inspect.signature(model.forward).parameters
        names = [name for name in ("input_ids", "decoder_input_ids", "labels") if name in taken]
    batch = dict.fromkeys(names, given)
    return (batch, None) if pipeline else batch


def tokens(sequences: int, length: int) -> Any:
    """Return a meta batch of (sequences, length) token ids; None for length 0."""
    return torch.empty(sequences, length, dtype=torch.int64, device="meta") if length else None
