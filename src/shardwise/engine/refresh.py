"""Refresh of an engine whose model the script has changed: adapters, resized embeddings, frozen or unfrozen layers.

The training state is copied into memory (`shardwise.checkpoint.peer_replicas`). The units are built again from the
model as it is now, and the copy is loaded into them, as into any layout.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.checkpoint.agree import collective_step
from shardwise.checkpoint.manifest import outline
from shardwise.checkpoint.match import Options
from shardwise.checkpoint.peer_replicas import InMemoryCheckpoints
from shardwise.config.export import effective
from shardwise.engine.mesh import domains_of
from shardwise.engine.modules import check_lazy, fill_meta_parameters, leaves_of, place_buffers
from shardwise.engine.stepping import prepare_optimizer
from shardwise.errors import CheckpointError, UsageError
from shardwise.memory import Category
from shardwise.precision.autocast import wire_dtypes
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Resolution
    from shardwise.engine.checkpointing import Checkpoints
    from shardwise.engine.step import TrainStep
    from shardwise.zero.model import ShardedModel

_MEMORY = "/dev/shm"


class Refreshed(NamedTuple):
    """Names of the parameters that `Engine.refresh` has found changed.

    Attributes:
        added: new parameters, also in place of others of the same name, and parameters with another shape.
        removed: parameters that the model no longer has.
        trained: parameters that have been unfrozen.
        frozen: parameters that have been frozen.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    trained: tuple[str, ...]
    frozen: tuple[str, ...]


@dataclass
class _Plan:
    """The changes, parameters with other shapes, and the members of the optimizer's groups afterwards."""

    changes: Refreshed
    resized: list[nn.Parameter] = field(default_factory=list)
    groups: list[list[nn.Parameter]] = field(default_factory=list)
    more: list[dict[str, Any]] = field(default_factory=list)


def refresh(
    sharded: ShardedModel,
    resolution: Resolution,
    job: Communicator,
    step: TrainStep,
    checkpoints: Checkpoints,
    param_groups: Sequence[Mapping[str, Any]],
    directory: str | os.PathLike[str] | None,
    parallel: Sequence[str],
) -> Refreshed:
    """Rebuild the units of a model; see `Engine.refresh`. `parallel` names the ways in which layers are divided."""
    sharded.check_there("engine.refresh()")
    sharded.hooks.settle()
    step.read_pending()
    with collective_step(job, "engine.refresh()") as agreed:
        _check(sharded)
        check_lazy(sharded.module)
        plan = _plan(sharded, step, param_groups)
        if parallel and plan.changes.added:
            raise UsageError(
                f"engine.refresh(): the model has new parameters ({outline(plan.changes.added)}), and its layers are "
                f"divided by {' and '.join(parallel)} when the engine is built. Add them before initialize()"
            )
        names = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in sharded.module.named_parameters()]
        agreed.local = [repr(plan.changes), repr(names) if not parallel else "", [len(group) for group in plan.groups]]
    if any(other != agreed.gathered[0] for other in agreed.gathered):
        raise UsageError(
            "engine.refresh(): the ranks have changed their models differently: "
            f"{dict(enumerate(entry[0] for entry in agreed.gathered[:4]))}. Make the same changes on every rank"
        )
    if not any(plan.changes) and not plan.more:
        return plan.changes
    sharded.registry.follow(sharded.module)
    copies: InMemoryCheckpoints | None = None
    try:
        try:
            copies = InMemoryCheckpoints(
                sharded.state,
                _directory(job, directory),
                every=1,
                replicas=0,
                hold=lambda buffer: sharded.accountant.hold(Category.BUFFERS, buffer),
                numbers=checkpoints.numbers,
            )
            copies.check_finite = False
            header = {"layout": checkpoints.layout(), "config": effective(resolution)}
            copies.copy(lambda: (checkpoints.training_state({}), header))
        except CheckpointError as error:
            raise CheckpointError(
                f"engine.refresh(): the state cannot be kept in memory meanwhile, and nothing has changed: {error}. "
                "Free memory there, or name another directory: engine.refresh(directory=...)"
            ) from error
        _rebuild(sharded, resolution, plan)
        step.attach()
        version = copies.versions()[0]
        fresh = frozenset(name for names in plan.changes for name in names)  # their values are in the model
        with copies.assembled(version) as name:
            if name is None:
                sharded.failed = "engine.refresh() could not read the copy of the state. Restart from a checkpoint"
                raise CheckpointError(sharded.failed)
            options = Options(strict=False, settings=False, verify=False, fresh=fresh)
            checkpoints.restore(copies.path, name, options, load_lr_scheduler_states=False, going_back=True)
    finally:
        if copies is not None:
            copies.remove()
    if job.rank == 0:
        found = [f"{kind} {outline(names)}" for kind, names in plan.changes._asdict().items() if names]
        logger.info("engine.refresh(): %s", "; ".join(found))
    return plan.changes


def _check(sharded: ShardedModel) -> None:
    """Raise UsageError if state would be lost."""
    if sharded.state.holds_gradients:
        raise UsageError(
            "engine.refresh(): gradients of an unfinished accumulation window are held, and would be lost. Call it "
            "after the engine.step() that ends a window"
        )
    if sharded.pinned:
        raise UsageError("engine.refresh(): inside gathered() or GatheredParameters; leave the block first")
    if sharded.local is not None:
        raise UsageError("engine.refresh(): not with local_sgd. Change the model before initialize()")
    if sharded.stepping.communicates or sharded.compressor is not None:
        raise UsageError(
            "engine.refresh(): the optimizer or the gradient compression keeps errors of what each rank has sent, "
            "which belong to the present units. Change the model before initialize()"
        )


def _plan(sharded: ShardedModel, step: TrainStep, param_groups: Sequence[Mapping[str, Any]]) -> _Plan:
    known = {id(p): t for t, p in zip(sharded.registry, sharded.registry.parameters, strict=True)}
    now = dict(sharded.module.named_parameters())
    present = {id(parameter): name for name, parameter in now.items()}
    has_optimizer = sharded.optimizer is not None
    sharded.places.check_memory()
    resized = set(sharded.places.resized())
    plan = _Plan(
        Refreshed(
            tuple(n for n, p in now.items() if id(p) not in known or known[id(p)].index in resized),
            tuple(t.name for key, t in known.items() if key not in present and t.name not in now),
            tuple(
                present[id(p)]
                for p in sharded.registry.parameters
                if id(p) in present and p.requires_grad and not known[id(p)].trainable and has_optimizer
            ),
            tuple(
                present[id(p)]
                for p in sharded.registry.parameters
                if id(p) in present and known[id(p)].trainable and not p.requires_grad
            ),
        ),
        [sharded.registry.parameters[index] for index in sorted(resized)],
    )
    if sharded.optimizer is None:
        return plan
    if len(sharded.optimizer.param_groups) != len(sharded.client_groups):
        raise UsageError(
            f"engine.refresh(): the optimizer has {len(sharded.optimizer.param_groups)} parameter groups, and had "
            f"{len(sharded.client_groups)} when the engine was built. Remove those that were added "
            f"(del optimizer.param_groups[{len(sharded.client_groups)}:]), and pass them as "
            "engine.refresh(param_groups=[...])"
        )
    replaced = {t.name: now[t.name] for key, t in known.items() if key not in present and t.name in now}
    for group in sharded.client_groups:
        kept = [p if id(p) in present else replaced.get(known[id(p)].name) for p in group if id(p) in known]
        plan.groups.append([p for p in kept if p is not None])
    plan.more = [_group(group, present, step) for group in param_groups]
    stepped = {id(p) for members in (*plan.groups, *(group["params"] for group in plan.more)) for p in members}
    rest = [name for name, p in now.items() if p.requires_grad and id(p) not in stepped]
    if rest and len(plan.groups) > 1:
        raise UsageError(
            f"engine.refresh(): the optimizer has {len(plan.groups)} parameter groups, and none has these parameters: "
            f"{outline(rest)}. Pass param_groups=[{{'params': [...]}}] with them"
        )
    if rest:
        plan.groups[0] += [now[name] for name in rest]
    return plan


def _group(given: Mapping[str, Any], present: Mapping[int, str], step: TrainStep) -> dict[str, Any]:
    group = {**given, "params": list(given["params"])}
    unknown = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in present]
    if unknown:
        raise UsageError(f"engine.refresh(param_groups=...): the model has no such parameters (shapes {unknown[:4]})")
    if step.lr_scheduler is not None:
        raise UsageError(
            f"engine.refresh(param_groups=...): {type(step.lr_scheduler).__name__} has learning rates of the present "
            "groups. Leave param_groups out, if the optimizer has one group; or schedule the learning rate yourself"
        )
    return group


def _directory(job: Communicator, given: str | os.PathLike[str] | None) -> str:
    """Return the same new path on every rank."""
    token = str(job.share_object(secrets.token_hex(8), "refresh"))
    parent = given or (_MEMORY if os.path.isdir(_MEMORY) else tempfile.gettempdir())
    return os.path.join(os.path.abspath(parent), f"shardwise-refresh-{token}")


def _rebuild(sharded: ShardedModel, resolution: Resolution, plan: _Plan) -> None:
    model, optimizer, settings = sharded.module, sharded.optimizer, resolution.config
    sources = sharded.disassemble(plan.resized)
    if optimizer is not None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for group, members in zip(optimizer.param_groups, plan.groups, strict=True):
            group["params"] = members
            if "param_names" in group:
                group["param_names"] = [names[id(parameter)] for parameter in members]
        for group in plan.more:
            optimizer.add_param_group(group)
    domains = domains_of(model, sharded.domain)
    fill_meta_parameters(model, domains)
    place_buffers(
        model,
        sharded.device,
        sharded.policy.buffer_dtype,
        settings.data_types.keep_in_fp32_modules,
        sharded.accountant,
    )
    with torch.no_grad():
        sharded.build(
            replace(
                sharded.sharding,
                stepping=prepare_optimizer(optimizer, resolution, masters=sharded.policy.masters),
                policy=sharded.policy,
                domains=domains,
                leaves=leaves_of(model, settings.zero_optimization.leaf_module),
                wires=wire_dtypes(model, settings),
            ),
            sources,
        )
