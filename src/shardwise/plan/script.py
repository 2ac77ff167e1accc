"""A training script up to its `initialize`: its model, optimizer, configuration and data, without other ranks."""

from __future__ import annotations

import contextlib
import inspect
import os
import runpy
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

import torch
from torch import nn

from shardwise.comm.environment import LOOPBACK, TORCH_LAYOUT
from shardwise.comm.fake import FakeCommunicator
from shardwise.comm.setup import DEFAULT_PORT
from shardwise.compat import fake_group, parameters_on_meta
from shardwise.config import Config, Facts, load, resolve
from shardwise.config.read import Document
from shardwise.engine import build as engine_build
from shardwise.engine.advice import check_unwrapped
from shardwise.engine.batch import Batches
from shardwise.engine.mesh import requested_by
from shardwise.engine.pipeline_plans import requested_stages
from shardwise.engine.stages import as_pipeline
from shardwise.errors import CommandLineError, ShardwiseError, UsageError
from shardwise.parallel.data import first_part
from shardwise.pipe import PipelineModule

Changes = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes the configuration that is planned from the script's."""


@dataclass(frozen=True)
class ScriptModel:
    """What a script gives to `initialize`.

    Attributes:
        settings: configuration as changed, with the keys that a mesh or a model-parallel unit stands for.
        config: the same, resolved.
        optimizer, model_parameters: as of `initialize`.
        batch: of a micro-batch of `training_data` the part that the model's forward takes; None without such data.
    """

    model: nn.Module
    settings: dict[str, Any]
    config: Config
    optimizer: Any
    model_parameters: list[Any] | None
    batch: Any


class _Taken(BaseException):
    """Ends a script at `initialize`; a BaseException, because scripts catch exceptions of `initialize`."""


def model_of_script(
    script: str, arguments: Sequence[str], ranks: int, local_ranks: int, changes: Changes, *, with_batch: bool
) -> ScriptModel:
    """Run a script in this process until it calls `initialize` of shardwise or of the drop-in.

    The process is rank 0 of `ranks`, of which no other exists: collectives of the script change nothing. Parameters
    have no values and take no memory. The script's standard output goes to standard error.

    Args:
        arguments: of the script.
        local_ranks: ranks of a machine.
        with_batch: take a micro-batch of the script's training data.

    Raises:
        CommandLineError: there is no such script.
        UsageError: the script has raised (its traceback is on standard error), or has ended without `initialize`.
    """
    if not Path(script).is_file():
        raise CommandLineError(f"{script}: there is no such script.")
    found: list[ScriptModel | ShardwiseError] = []

    def take(given: engine_build.EngineArguments) -> None:
        try:
            found.append(_model_of(given, ranks, changes, with_batch))
        except ShardwiseError as error:
            found.append(error)
        raise _Taken

    end = ""
    try:
        with _fake_rank([script, *arguments], ranks, local_ranks, take):
            runpy.run_path(script, run_name="__main__")
        end = "has ended"
    except _Taken:
        pass
    except SystemExit as error:
        end = f"has ended with exit code {error.code or 0}"
    except Exception as error:
        if not found:
            traceback.print_exception(error.with_traceback(_frames_of(error, script)))
        end = f"has raised {type(error).__name__}: {error}; this was"
    if not found:
        raise UsageError(
            f"{script} {end} before it called initialize() of shardwise or of its drop-in deepspeed, whose arguments "
            "are planned. Give the arguments with which the script gets there, or a function that builds the model, "
            "as module:function"
        )
    if isinstance(found[0], ShardwiseError):
        raise found[0]
    return found[0]


def _frames_of(error: Exception, script: str) -> TracebackType | None:
    """Return the traceback from the script on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace


def accepted(model: nn.Module, batch: Any) -> Any:
    """Return the part of a batch that the model's forward takes; of a pipeline a pair of inputs and labels."""
    if isinstance(model, PipelineModule):
        return (batch, batch) if isinstance(batch, torch.Tensor) else batch
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = Counter(parameter.kind for parameter in parameters)
    if isinstance(batch, Mapping) and not kinds[inspect.Parameter.VAR_KEYWORD]:
        names = {parameter.name for parameter in parameters}
        return {name: value for name, value in batch.items() if name in names}
    if isinstance(batch, (tuple, list)) and not kinds[inspect.Parameter.VAR_POSITIONAL]:
        return tuple(batch[: kinds[inspect.Parameter.POSITIONAL_ONLY] + kinds[inspect.Parameter.POSITIONAL_OR_KEYWORD]])
    return batch


@contextlib.contextmanager
def _fake_rank(
    argv: list[str], ranks: int, local_ranks: int, take: Callable[[engine_build.EngineArguments], None]
) -> Iterator[None]:
    """Let a script run as rank 0 inside the block, and `take` the arguments of its `initialize`."""
    place = dict(zip(TORCH_LAYOUT, ("0", str(ranks), "0", LOOPBACK, str(DEFAULT_PORT)), strict=True))
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {**place, "LOCAL_WORLD_SIZE": str(local_ranks)}))
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(mock.patch.object(sys, "path", [str(Path(argv[0]).resolve().parent), *sys.path]))
        stack.enter_context(mock.patch.object(engine_build, "on_initialize", take))
        if not torch.cuda.is_available():
            stack.enter_context(mock.patch.object(torch.cuda, "set_device", lambda device: None))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # standard output has the plan
        stack.enter_context(fake_group(ranks))
        stack.enter_context(parameters_on_meta())
        yield


def _model_of(given: engine_build.EngineArguments, ranks: int, changes: Changes, with_batch: bool) -> ScriptModel:
    model, optimizer = given.model, given.optimizer
    pipeline = isinstance(model, PipelineModule)
    if not pipeline:  # the layers of a pipeline may not be there yet
        check_unwrapped(model)
    requested = requested_by(given.mpu, given.mesh, nn.Module() if pipeline else model, range(ranks))
    settings = load(given.config)
    if isinstance(given.config, Document) and given.config.written is not None:
        settings.pop("sparse_attention", None)  # DeepSpeed leaves this section to the script
    shard = requested.shard if requested.arrangement is not None else None
    for section, key, size in (
        ("sequence_parallel_size", None, requested.size),
        ("tensor_parallel", "autotp_size", requested.tensor),
        ("pipeline", "stages", requested.stages),
        ("zero_optimization", "mics_shard_size", shard),
    ):
        if size is not None:
            settings[section] = size if key is None else {**settings.get(section, {}), key: size}
    settings = changes(settings)
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else [{}]
    facts = Facts(lr=groups[0].get("lr"), pipeline_stages=requested_stages(model))
    config = resolve(settings, world_size=ranks, facts=facts).config
    if given.loss_fn is not None and not pipeline:
        model = as_pipeline(model, config.pipeline.partition, given.loss_fn)
    if isinstance(model, PipelineModule) and (model.boundaries is None or model.assumed):
        model.assumed = False  # the plan has the layers of all stages
        model.build([0], 1)
    batch = None
    if with_batch and given.training_data is not None:
        cpu = torch.device("cpu")
        batches = Batches(config, FakeCommunicator(1, cpu), cpu)
        batch = next(iter(batches.loader(given.training_data, collate_fn=given.collate_fn)))
        batch = accepted(model, batch)
        if not isinstance(model, PipelineModule):
            batch = first_part(batch, config.sequence_parallel_size)
    parameters = None if given.model_parameters is None else list(given.model_parameters)
    return ScriptModel(model, settings, config, optimizer, parameters, batch)
