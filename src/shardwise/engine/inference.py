"""Composition root of inference: builds an inference engine from the arguments of `init_inference`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.manifest import outline
from shardwise.comm.setup import init_distributed, local_rank
from shardwise.device import choose_device
from shardwise.engine.build import EngineArguments, build
from shardwise.engine.engine import Engine
from shardwise.errors import CheckpointError, ConfigError, UsageError
from shardwise.inference.config import InferenceConfig, checkpoint_of, directory_of, read_config, rows_of
from shardwise.inference.engine import InferenceEngine, cast
from shardwise.inference.loading import check_has_values, materialize_model, paths_of


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """Return an inference engine for a model, which is cast, divided and quantised in place (all ranks call).

    Args:
        model: for `generate` a model of transformers. Built on the meta device (`with torch.device("meta")`) it is
            never whole on a rank: each reads its parts from the configuration's `checkpoint`.
        config: dictionary, JSON file or text, or `InferenceConfig`; see `docs/inference.md`.
        kwargs: further keys.

    Raises:
        ConflictError: a key has two values, or the ranks are not whole groups of `tensor_parallel.tp_size`.
        ConfigError: the configuration is wrong, or nothing of the model can be divided or quantised.
        CheckpointError: the checkpoint does not fit the model.

    Example:
        >>> import torch, shardwise
        >>> engine = shardwise.init_inference(torch.nn.Linear(4, 2), dtype="fp32")
        >>> engine(torch.ones(1, 4)).shape, engine(torch.ones(1, 4)).requires_grad
        (torch.Size([1, 2]), False)
        >>> engine.destroy()
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"init_inference(model=...) expects an nn.Module, got {type(model).__name__}")
    if isinstance(model, (Engine, InferenceEngine)):
        raise UsageError("init_inference(model=...): it is an engine already. Pass its module (engine.module)")
    settings = read_config(config, **kwargs)
    init_distributed(verbose=False)
    if settings.zero.get("stage", 0) == 0:
        return InferenceEngine(model, settings, choose_device(local_rank()))
    return _streamed(model, settings)


def _streamed(model: nn.Module, settings: InferenceConfig) -> InferenceEngine:
    """Build an engine without an optimizer at ZeRO stage 3, which has weights on device, host or disk."""
    if settings.zero["stage"] != 3:
        raise ConfigError(
            f"zero.stage is {settings.zero['stage']}: stages 1 and 2 divide state of training. Write 3, which streams "
            "weights, or leave zero out"
        )
    section = settings.tensor_parallel
    if section.enabled and section.group is not None:
        raise ConfigError("tensor_parallel.tp_group: streamed weights (zero) take adjacent ranks. Write tp_size")
    precision = {"fp16": {"fp16": {"enabled": True}}, "bf16": {"bf16": {"enabled": True}}}.get(settings.dtype, {})
    training = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": settings.zero,
        "tensor_parallel": {
            "autotp_size": section.tp_size if section.enabled else 1,
            "injection_policy_tuple": rows_of(settings),
        },
        **({"aio": settings.aio} if settings.aio else {}),
        **precision,
    }
    checkpoint = checkpoint_of(settings)
    meta = check_has_values(model, checkpoint)
    if meta or not precision:  # without a section of a precision the engine computes in the model's own
        cast(model, settings.torch_dtype)
    if meta:
        # Memory that nothing is written to takes no room: weights are read into the parts that ranks keep.
        materialize_model(model, torch.device("cpu"))
    engine = build(EngineArguments(model=model, config=training))[0]
    try:
        if checkpoint is not None:
            _load(engine, paths_of(checkpoint, directory_of(settings)))
        return InferenceEngine(model, settings, engine.device, engine)
    except BaseException:
        engine.destroy()
        raise


def _load(engine: Engine, paths: list[str]) -> None:
    """Load weights, of which each file may have a part. Raises CheckpointError if no file has a tensor."""
    missing: set[str] | None = None
    for path in paths:
        found = set(engine.load_weights(path, strict=len(paths) == 1).missing)
        missing = found if missing is None else missing & found
    if missing:
        raise CheckpointError(f"{', '.join(paths)}: do not fit the model: missing: {outline(sorted(missing))}")
