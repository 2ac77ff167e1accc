"""Values that a configuration leaves to "auto", chosen by a plan when the engine is built."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from shardwise.config import Note, Resolution
from shardwise.config.normalize import put
from shardwise.errors import ConfigError, UsageError
from shardwise.parallel.data import first_part
from shardwise.pipeline.module import PipelineModule
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from torch import nn

    from shardwise.comm.communicator import Communicator

STAGE = "zero_optimization.stage"
DEVICES = ("zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device")
MICRO, STEPS = "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def has_sample(given: Any, data: Any) -> bool:
    """Return True if `sample_of` returns a sample batch. Reads no sample."""
    return given is not None or (isinstance(data, Sized) and hasattr(data, "__getitem__") and len(data) > 0)


def sample_of(given: Any, data: Any, collate: Callable[[list[Any]], Any] | None, sequence: int) -> Any:
    """Return the sample batch that was given, or the part of the first of `sequence` ranks of one sample of a dataset
    with a length; else None, also of a batch that only the script can split.
    """
    if given is None and has_sample(given, data):
        with contextlib.suppress(UsageError):
            return first_part((collate or default_collate)([data[0]]), sequence)
    return given


def micro_is_open(resolution: Resolution) -> bool:
    """Whether micro-batch and accumulation may change, with the same batch."""
    steps_open = STEPS not in resolution.given or STEPS in resolution.autos
    return MICRO in resolution.autos and steps_open and "train_batch_size" in resolution.given - resolution.autos


def is_open(resolution: Resolution, *, sampled: bool) -> bool:
    """Whether a plan has to choose a value, or to compare the price with a budget; `sampled`: there is a sample."""
    tiers = any(path in resolution.autos for path in (STAGE, *DEVICES))
    asked = resolution.config.cost_budget.amount is not None
    return tiers or asked or (sampled and micro_is_open(resolution))


@dataclass(frozen=True)
class Choice:
    """Chosen values by path, the reason, and the configuration with them."""

    values: dict[str, Any]
    reason: str
    raw: dict[str, Any]
    before: Resolution

    def noted(self, again: Resolution) -> Resolution:
        """Return the resolution of `raw` with the reasons, and with what the user wrote."""
        notes = [note for note in again.notes if note.path not in self.values]
        notes += [Note(path, value, self.reason) for path, value in self.values.items()]
        kept = {name: getattr(self.before, name) for name in ("written", "origin", "given", "autos", "extensions")}
        return replace(again, notes=notes, **kept)


def choice_of(
    resolution: Resolution,
    model: nn.Module,
    job: Communicator,
    optimizer: Any,
    parameters: Sequence[Any] | None,
    sample: Any,
) -> Choice:
    """Choose the open values (all ranks call).

    Raises as `shardwise.plan.auto.choose`, and ConfigError for a pipeline.
    """
    if isinstance(model, PipelineModule):
        raise ConfigError(
            f'{STAGE}, devices of offloading, cost_budget: "auto" and a budget are not planned for a pipeline when it '
            "is built. Compare stages with `shardwise plan --pp`, and write the values"
        )
    # By its name, because plans import the engine.
    choose = importlib.import_module("shardwise.plan.auto").choose
    values, reason = choose(resolution, model, job, optimizer=optimizer, parameters=parameters, sample=sample)
    raw = copy.deepcopy(resolution.raw)
    for path, value in values.items():
        put(raw, tuple(path.split(".")), value)
    if job.rank == 0 and values:
        logger.info("chosen %s: %s", ", ".join(f"{path} = {value}" for path, value in values.items()), reason)
    return Choice(values, reason, raw, resolution)
