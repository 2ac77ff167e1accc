"""Loads DeepSpeed checkpoints into an engine (`engine.load_checkpoint`).

Their files do not record the optimizer's class, and sometimes neither parameter names (stage 0) nor the split over
model-parallel ranks: the engine decides. Mismatches are refused before any state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.deepspeed import DeepSpeedCheckpoint, Target, TargetParameter, recognised
from shardwise.checkpoint.reader import Checkpoint
from shardwise.errors import CheckpointError

if TYPE_CHECKING:
    from shardwise.zero.model import ShardedModel


_STEPS = ("last_batch_iteration", "last_epoch", "_step_count")
_MOST_STEPS = 1 << 53


def opener(model: ShardedModel) -> Callable[[str], Checkpoint]:
    """Return a function that opens a checkpoint of shardwise or DeepSpeed."""

    def opened(path: str) -> Checkpoint:
        return (
            DeepSpeedCheckpoint(path, _target(model), _target_parameters(model))
            if recognised(path)
            else Checkpoint(path)
        )

    return opened


def _target_parameters(model: ShardedModel) -> dict[str, TargetParameter]:
    found = {}
    for tensor in model.registry:
        parts = sorted((p.ranks, p.box) for p in model.state.parts_of(tensor.index) if p.name == tensor.name)
        whole = TargetParameter(tensor.global_shape, [(box, ranks) for ranks, box in parts])
        found.update(dict.fromkeys((tensor.name, *tensor.aliases), whole))
    return found


def _target(model: ShardedModel) -> Target | None:
    if model.optimizer is None:
        return None
    groups = []
    for members in model.client_groups:
        tensors = [model.registry.find(parameter) for parameter in members]
        groups.append([(tensor.name, *tensor.aliases) for tensor in tensors if tensor is not None])
    settings = [frozenset(group) - {"params"} for group in model.optimizer.param_groups]
    return Target(type(model.optimizer).__name__, groups, settings)


def check_schedule(saved: Checkpoint, scheduler: Any) -> None:
    """Raise a CheckpointError for another schedule (by class, or by entries without it) or impossible step numbers."""
    state, own = saved.manifest.scheduler, schedule_name(scheduler)
    recorded = saved.manifest.layout.get("scheduler")
    if state is not None and recorded is not None and recorded != own:
        raise CheckpointError(
            f"{saved.path}: holds the state of the learning-rate schedule {recorded}, and this engine has {own}, whose "
            "rates would be those of neither. Configure the one it was saved with, or pass "
            "load_lr_scheduler_states=False to begin this one anew"
        )
    for name in _STEPS if isinstance(state, Mapping) else ():
        step = state.get(name, 0)
        if not (isinstance(step, (int, float)) and -1 <= step <= _MOST_STEPS):
            raise CheckpointError(
                f"{saved.path}: the state of its learning-rate scheduler has {name!r} {step!r:.100}, which is no "
                "number of steps; pass load_lr_scheduler_states=False to begin the schedule anew"
            )
    if not isinstance(saved, DeepSpeedCheckpoint) or not hasattr(scheduler, "state_dict"):
        return
    expected = set(scheduler.state_dict())
    found = set(state) if isinstance(state, Mapping) else {type(state).__name__}
    if found != expected:
        raise CheckpointError(
            f"{saved.path}: its learning-rate scheduler has the state {sorted(map(str, found))}, and "
            f"{type(scheduler).__name__}, which this engine has, {sorted(map(str, expected))}: another kind of "
            "schedule. Configure the one it was saved with, or pass load_lr_scheduler_states=False"
        )


def schedule_name(scheduler: Any) -> str | None:
    """Return the class name of a schedule and of the schedules it is composed of; None without one."""
    if scheduler is None:
        return None
    parts = getattr(scheduler, "_schedulers", None)
    inner = f"({', '.join(str(schedule_name(part)) for part in parts)})" if isinstance(parts, (list, tuple)) else ""
    return type(scheduler).__name__ + inner
