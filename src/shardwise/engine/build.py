"""The composition root: from arguments to an engine.

Read it from top to bottom; each step says why it comes where it does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwise.comm.agreement import check_agreement
from shardwise.comm.api import configure as configure_log
from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import REPLICATE
from shardwise.comm.ledger import Ledger
from shardwise.comm.logger import comms_logger
from shardwise.comm.setup import init_distributed, local_rank
from shardwise.config import Facts, Resolution, config_arguments, config_path, resolve
from shardwise.config.compression import method_parameters
from shardwise.config.export import effective
from shardwise.config.schema.gradients import DGCOptions
from shardwise.data import EngineDataLoader
from shardwise.device import choose_device
from shardwise.engine.engine import Engine
from shardwise.engine.exhausted import Circumstances, explaining
from shardwise.engine.facts import facts_of
from shardwise.engine.mesh import arrangement_of, domain_of
from shardwise.engine.plans import Subject
from shardwise.engine.recovery import note_ready
from shardwise.engine.scaling import scales_loss
from shardwise.engine.stepping import stepping_of
from shardwise.engine.zeropp import reduction
from shardwise.errors import ConfigError, ConflictError, NotBuiltError, UsageError
from shardwise.memory import Accountant, Category
from shardwise.optim import ElementwiseOptimizer, is_elementwise_state
from shardwise.optim import build as build_optimizer
from shardwise.precision.autocast import wire_dtypes
from shardwise.precision.dtypes import policy_from_config
from shardwise.precision.scaler import LossScaler
from shardwise.schedules import build as build_schedule
from shardwise.utils.logging import logger, warn_once
from shardwise.zero.model import ShardedModel
from shardwise.zero.parameters.init import built_for_codes, shard_module, suspended
from shardwise.zero.passes.rows import warnings_about
from shardwise.zero.units.leaves import get_z3_leaf_modules, set_z3_leaf_module
from shardwise.zero.units.plan import Plan
from shardwise.zero.units.released import owner_of
from shardwise.zero.updates.update import Stepping

_WRAPPED_AGAIN = (
    "the engine has been destroyed when its model was passed to shardwise.initialize() again; use the engine that this "
    "call has returned"
)
EngineParts = tuple[Engine, Any, EngineDataLoader | None, Any]


def initialize(
    args: argparse.Namespace | None = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> EngineParts:
    """Shard a model for training.

    Args:
        args: namespace whose `deepspeed_config` (or `shardwise_config`) names the configuration, if `config` is not
            given.
        model: any `nn.Module`, built plainly, on the meta device, or under `shardwise.zero.Init`. Its parameters keep
            their identity.
        optimizer: an instance (kept; its groups are edited in place), or a callable (such as a class) that gets the
            parameters. Overrides the configuration's `optimizer` section.
        model_parameters: parameters, (name, parameter) pairs, or parameter groups to optimise; default: all that
            require a gradient.
        training_data: dataset from which the returned loader draws.
        lr_scheduler: a scheduler, or a callable that gets the optimizer. Overrides the `scheduler` section.
        distributed_port: port of the rendezvous where no launcher has set one.
        mpu: model-parallel unit; its `get_data_parallel_group()` gives the ranks to shard over.
        dist_init_required: False: use the process group that there is; None or True: create it if there is none.
        collate_fn: makes a batch from a list of samples.
        config: dict, path, or base64 or text JSON.
        mesh_param: a DeviceMesh of the ranks to shard over, with a dimension `shard`, or with `replicate` and `shard`:
            state is divided over the one and replicated over the other (HSDP; also the key
            `zero_optimization.mics_shard_size`).
        config_params: older name of `config`.

    Returns:
        (engine, optimizer, training dataloader or None, lr scheduler or None).

    Raises:
        ConfigError: the configuration is wrong; the message names every offending key.
        UsageError: arguments that contradict each other.
        LaunchError: `dist_init_required` is False, and there is no process group.

    Example:
        >>> import shardwise, torch
        >>> engine, *_ = shardwise.initialize(
        ...     model=torch.nn.Linear(4, 1),
        ...     config={"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}},
        ... )
        >>> loss = engine(torch.ones(2, 4)).mean()
        >>> _ = engine.backward(loss)
        >>> engine.step()
        >>> engine.global_steps
        1
        >>> engine.destroy()
    """
    note_ready()
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize(model=...) expects an nn.Module, got {type(model).__name__}")
    _check_lazy(model)
    with suspended():
        return _build(
            args,
            model,
            optimizer,
            model_parameters,
            training_data,
            lr_scheduler,
            distributed_port,
            mpu,
            dist_init_required,
            collate_fn,
            _config_source(args, config, config_params),
            mesh_param,
        )


_MODEL_PARALLEL_SIZES = (
    "get_model_parallel_world_size",
    "get_tensor_model_parallel_world_size",
    "get_slice_parallel_world_size",
    "get_pipe_parallel_world_size",
    "get_pipeline_model_parallel_world_size",
)


def _check_mpu(mpu: Any) -> None:
    """Refuse ranks that divide a model: norm, clipping and overflow would be those of each rank's part."""
    for name in _MODEL_PARALLEL_SIZES if mpu is not None else ():
        size = getattr(mpu, name, lambda: 1)()
        if size > 1:
            raise NotBuiltError(
                f"initialize(mpu=...): mpu.{name}() is {size}: this version does not have model parallelism. Pass an "
                "mpu of model-parallel size 1, or none; ZeRO stage 3 divides large layers over all ranks"
            )


def _build(
    args: argparse.Namespace | None,
    model: nn.Module,
    client_optimizer: Any,
    model_parameters: Iterable[Any] | None,
    training_data: Any,
    client_scheduler: Any,
    port: int,
    mpu: Any,
    dist_init_required: bool | None,
    collate_fn: Callable[[list[Any]], Any] | None,
    source: Any,
    mesh: Any,
) -> EngineParts:
    # The process group first: batch sizes depend on how many ranks there are.
    init_distributed(distributed_port=port, verbose=False, dist_init_required=dist_init_required)
    ledger = Ledger()
    _check_mpu(mpu)
    group = mpu.get_data_parallel_group() if mpu is not None else None
    world = torch.distributed.get_world_size(group) if torch.distributed.is_initialized() else 1
    resolution = resolve(source, world_size=world, facts=_facts(client_optimizer))
    settings = resolution.config
    if settings.log_level is not None:
        logger.setLevel(settings.log_level.upper())
    for warning in resolution.warnings:
        warn_once(str(warning))
    grid = None
    if mesh is not None:
        members = range(world) if group is None else torch.distributed.get_process_group_ranks(group)
        grid = arrangement_of(mesh, settings.zero_optimization, members)
    # The device before the groups: each backend serves one type of device.
    own_number = local_rank()
    device = choose_device(own_number, getattr(args, "device_rank", None))
    comm = Communicator(group, ledger, device, ordered=settings.deterministic_reduce)
    domain = domain_of(settings, comm, grid)
    if settings.comms_logger.enabled:
        configure_log(settings)
        ledger.listener = lambda record: comms_logger.append(
            record.op,
            record.size,
            (record.finished or record.launched) - record.launched if comm.waits_on_host else None,
            record.ranks,
            record.line,
        )
    policy = policy_from_config(settings)
    plan = Plan.of(settings.zero_optimization, domain)
    if settings.zero_optimization.optimizer_over_replicas and REPLICATE not in domain.names:
        warn_once(
            "zero_optimization.optimizer_over_replicas has no effect: there are no replicas. Set "
            "zero_optimization.mics_shard_size, or pass a mesh with a dimension named replicate to initialize()"
        )
    if plan.shard_parameters and built_for_codes(model):
        if plan.levels(domain).parameters > 1:
            raise ConflictError(
                "zero.Init(zero_quantized_weights=True) cannot be combined with "
                "zero_optimization.mics_hierarchical_params_gather: codes are gathered in one level. Keep one of them"
            )
        plan = replace(plan, quantized_weights=True)
    accountant = Accountant()

    # A model that is wrapped again (trainers do) leaves its old engine first.
    for former in {id(o): o for o in map(owner_of, model.parameters()) if isinstance(o, ShardedModel)}.values():
        warn_once(
            "the model already belonged to an engine, which is closed; its optimizer state is dropped. Call "
            "engine.destroy() to do so explicitly"
        )
        former.close(_WRAPPED_AGAIN)
        former.comm.destroy()

    # Meta-device parameters get values (and are sharded) module by module, before anybody looks at them.
    if any(p.is_meta for p in model.parameters()):
        from shardwise.zero.parameters.init import PartStore

        shard_module(model, PartStore(comm))

    # The optimizer is made on the user's own parameters; sharding then edits its groups in place.
    optimizer = _optimizer(settings, client_optimizer, model_parameters, model, device, policy.compute_dtype)
    stepping = stepping_of(optimizer)
    if optimizer is not None:
        _check_momentum(settings, optimizer)
        if not policy.masters:
            _step_parameters(optimizer, resolution, stepping)
    # It sets the first step's learning rate on the groups, which stay what they are.
    scheduler = _scheduler(settings, client_scheduler, optimizer)
    place_buffers(model, device, policy.buffer_dtype, settings.data_types.keep_in_fp32_modules, accountant)

    wires = wire_dtypes(model, settings)
    if settings.sparse_gradients:
        for warning in warnings_about(model):
            warn_once(warning)

    # From here on ranks exchange what has the sizes of their own model.
    check_agreement(comm, facts_of(model, optimizer, resolution))

    # Sharding frees the model unit by unit, so it must be the last one to hold whole parameters.
    subject = Subject.of(model, optimizer, resolution, domain)
    with explaining(lambda: Circumstances("initialize()", subject, accountant, comm.rank)):
        sharded = ShardedModel(
            model,
            optimizer,
            stepping=stepping,
            is_elementwise=is_elementwise_state,
            plan=plan,
            policy=policy,
            domain=domain,
            device=device,
            accountant=accountant,
            prescale=prescale_of(settings, world),
            compressor=reduction(settings, comm, lambda tensor: accountant.hold(Category.BUFFERS, tensor)),
            sparse_gradients=settings.sparse_gradients,
            leaves=leaves_of(model, settings.zero_optimization.leaf_module),
            wires=wires,
        )

    engine = Engine(
        module=model,
        sharded=sharded,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        resolution=resolution,
        comm=comm,
        device=device,
        local_rank=own_number,
        scaler=LossScaler.from_config(settings.fp16) if scales_loss(settings) else None,
        accountant=accountant,
        client_optimizer=client_optimizer,
        client_lr_scheduler=client_scheduler,
        mpu=mpu,
    )
    engine.mesh_device = mesh
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    # Signals that come from here on find a whole engine.
    engine._guard_against_faults()
    if engine.global_rank == 0 and optimizer is not None:
        logger.info("precision: %s", engine.precision_in_words())
    if engine.global_rank == 0 and settings.dump_state:
        logger.info("configuration: %s", json.dumps(effective(resolution), indent=2, default=str))
    return engine, optimizer, engine.training_dataloader, scheduler


def _config_source(args: Any, config: Any, config_params: Any) -> Any:
    path = config_path(args)
    given = {"config": config, "config_params": config_params}
    if path is not None:
        given[f"args.{next(iter(config_arguments(args)))}"] = path
    named = {name: value for name, value in given.items() if value is not None}
    if not named:
        raise ConfigError(
            "initialize() needs a configuration: pass config=... (dict, path or JSON text), or --deepspeed_config on "
            "the command line together with args"
        )
    if len(named) > 1:
        raise ConfigError(f"the configuration is given twice: {' and '.join(named)}; keep one")
    return next(iter(named.values()))


def _check_lazy(model: nn.Module) -> None:
    """Raise for parameters and buffers that get their shapes in the first forward pass."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tensors if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise UsageError(
            f"initialize(): {len(lazy)} parameters or buffers of the model have no shape yet ({lazy[0]}); run the "
            "model on a batch before, which gives lazy modules their shapes"
        )


def _facts(client_optimizer: Any) -> Facts:
    """What "auto" can be resolved from: the client's optimizer knows its learning rate."""
    groups = client_optimizer.param_groups if isinstance(client_optimizer, torch.optim.Optimizer) else []
    lr = groups[0].get("lr") if groups else None
    return Facts(lr=float(lr) if lr is not None else None)


def _optimizer(
    settings: Any,
    client: Any,
    parameters: Iterable[Any] | None,
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype | None,
) -> torch.optim.Optimizer | None:
    if isinstance(client, torch.optim.Optimizer):
        return client
    chosen = list(parameters) if parameters is not None else [p for p in model.parameters() if p.requires_grad]
    if chosen and not isinstance(chosen[0], dict):
        # torch's optimizers also take (name, parameter) pairs, and keep the names in their groups.
        chosen = [entry for entry in chosen if (entry[1] if isinstance(entry, tuple) else entry).requires_grad]
    if not chosen:
        return None
    if client is not None:
        if not callable(client):
            raise UsageError(
                f"initialize(optimizer=...) expects an Optimizer or a callable, got {type(client).__name__}"
            )
        made = client(chosen)
        if not isinstance(made, torch.optim.Optimizer):
            raise UsageError(f"the optimizer callable returned {type(made).__name__}, not a torch.optim.Optimizer")
        return made
    if settings.optimizer is None or settings.optimizer.type is None:
        return None
    options = dict(settings.optimizer.params or {})
    # Some treat parameters by name; a tied one by all its names.
    named = model.named_parameters(remove_duplicate=False)
    return build_optimizer(settings.optimizer.type, chosen, options, device=device, named=named, parameter_dtype=dtype)


def configured_optimizer(
    resolution: Resolution, model: nn.Module, device: torch.device
) -> torch.optim.Optimizer | None:
    """Return the optimizer that the configuration asks for, prepared as that of an engine is."""
    policy = policy_from_config(resolution.config)
    optimizer = _optimizer(resolution.config, None, None, model, device, policy.compute_dtype)
    if optimizer is not None and not policy.masters:
        _step_parameters(optimizer, resolution, stepping_of(optimizer))
    return optimizer


def _step_parameters(optimizer: torch.optim.Optimizer, resolution: Resolution, stepping: Stepping) -> None:
    """Prepare an optimizer for stepping 16-bit parameters themselves.

    Raises:
        ConfigError: it cannot step them as the configuration asks.
    """
    fp16, bf16 = resolution.config.fp16.enabled, resolution.config.bf16
    name = type(optimizer).__name__
    rounding: str = "nearest" if fp16 else bf16.rounding or "nearest"
    ours = "an optimizer of shardwise.optim (optimizer.type Adam, AdamW, Adagrad or Lion)"
    if stepping.communicates:
        raise ConfigError(
            f"bf16.master_weights: {name} averages fp32 momenta and needs fp32 masters beside 16-bit parameters. "
            'Leave the key at "fp32", and `bf16_master_weights_and_grads` and `fp16_master_weights_and_grads` out'
        )
    if isinstance(optimizer, ElementwiseOptimizer) and not stepping.whole:
        if "bf16.rounding" not in resolution.given and optimizer.rounding != "nearest":
            rounding = optimizer.rounding
        narrow = bf16.enabled and bf16.bf16_optimizer_states
        optimizer.set_precision(rounding, torch.bfloat16 if narrow else optimizer.state_dtype)
    elif fp16:
        raise ConfigError(
            f"fp16.fp16_master_weights_and_grads: {name} would keep its state in fp16, like the parameters, which has "
            f"too little range for averages of gradients and of their squares; use {ours}, or remove the key"
        )
    elif rounding != "nearest":
        raise ConfigError(
            f'bf16.rounding: {name} writes its parameters itself, rounded to nearest, and "{rounding}" is asked for '
            f'(it is what `bf16.master_weights` "none" means unless said otherwise). Use {ours}, or write '
            '`bf16.rounding` "nearest", with which small updates are lost'
        )
    elif not bf16.bf16_optimizer_states:
        raise ConfigError(
            f"bf16.bf16_optimizer_states: {name} keeps its state in the parameters' type, which is bf16 without master "
            f"weights. Set the key to true if that is meant; {ours} can keep it in fp32"
        )


def _check_momentum(settings: Any, optimizer: torch.optim.Optimizer) -> None:
    """Warn of a method that applies momentum before it sends, under an optimizer that applies its own after."""
    method = method_parameters(settings)
    if not isinstance(method, DGCOptions) or method.momentum == 0:
        return
    for number, group in enumerate(optimizer.param_groups):
        own = {name: group[name] for name in ("momentum", "betas") if name in group}
        first = own["betas"][0] if "betas" in own else own.get("momentum", 0)
        if first:
            warn_once(
                f'compression.type "dgc" applies momentum {method.momentum:g} before it sends, and group {number} of '
                f"{type(optimizer).__name__} applies its own ({', '.join(f'{n} {v}' for n, v in own.items())}) on top. "
                "Set compression.params.momentum to 0, or use SGD without momentum"
            )
            return


def _scheduler(settings: Any, client: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    if client is not None:
        return _client_scheduler(client, optimizer)
    section = settings.scheduler
    if section is None or section.type is None or optimizer is None:
        return None
    return build_schedule(section.type, optimizer, dict(section.params or {}))


def _client_scheduler(client: Any, optimizer: torch.optim.Optimizer | None) -> Any:
    """Return the caller's scheduler, made now if need be.

    Raises:
        UsageError: it is none, or sets the learning rates of another optimizer.
    """
    if optimizer is None:
        raise UsageError("initialize(lr_scheduler=...): there is no optimizer whose learning rate could be scheduled")
    given = client.__name__ if isinstance(client, type) else type(client).__name__
    if isinstance(client, type) or (callable(client) and not hasattr(client, "step")):
        client = client(optimizer)
        given = f"{given}, which returned {type(client).__name__},"
    if not callable(getattr(client, "step", None)):
        raise UsageError(
            f"initialize(lr_scheduler=...) expects a scheduler (an object with step()), or a callable that makes one "
            f"from the optimizer; {given} is neither"
        )
    own = getattr(client, "optimizer", None)
    # Frameworks wrap optimizers; a wrapper has the same groups.
    if own is not None and getattr(own, "param_groups", None) is not optimizer.param_groups:
        raise UsageError(
            f"initialize(lr_scheduler=...): this {type(client).__name__} sets the learning rates of another optimizer "
            f"({type(own).__name__}) than the engine's {type(optimizer).__name__}. Make it from the optimizer that is "
            "passed as optimizer=, or pass a callable that makes it: lr_scheduler=lambda optimizer: ..."
        )
    return client


def prescale_of(settings: Any, world: int) -> float:
    """Return the factor on gradients before they are sent."""
    if settings.prescale_gradients:
        return 1.0 / world
    return 1.0 / float(settings.gradient_predivide_factor)


def place_buffers(
    model: nn.Module, device: torch.device, dtype: torch.dtype | None, keep: Any, accountant: Accountant
) -> None:
    """Move module buffers to the device; parameters follow unit by unit.

    Floating buffers are cast to `dtype`, if there is one, except in modules whose name contains one of `keep` ("auto":
    what the model lists in `_keep_in_fp32_modules`).
    """
    kept = (getattr(model, "_keep_in_fp32_modules", None) or []) if keep == "auto" else keep
    moved: dict[tuple[int, torch.dtype], torch.Tensor] = {}  # shared buffers stay shared
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            wide = any(part in path.split(".") for part in kept)
            cast = dtype if dtype is not None and buffer.is_floating_point() and not wide else buffer.dtype
            key = (id(buffer), cast)
            if key not in moved:
                moved[key] = buffer.to(device=device, dtype=cast)
                accountant.add(Category.OTHER, moved[key].nbytes)
            module._buffers[name] = moved[key]


def leaves_of(model: nn.Module, section: Any) -> list[nn.Module]:
    """Return the modules that the script or the configuration wants kept in one unit each, all of them marked."""
    found = get_z3_leaf_modules(model)
    if section is None:
        return found
    matched: set[str] = set()
    for name, module in model.named_modules():
        kind = type(module)
        spellings = {f"{kind.__module__}.{kind.__qualname__}", kind.__qualname__}
        wanted = {entry for entry in section.classes if entry in spellings}
        wanted |= {entry for entry in section.names if entry == name}
        wanted |= {entry for entry in section.name_suffixes if name and name.endswith(entry)}
        if wanted:
            matched |= wanted
            if module not in found:
                found.append(module)
                set_z3_leaf_module(module, True)
    # The default list of classes is not the user's.
    asked = [*section.classes, *section.names, *section.name_suffixes]
    idle = [entry for entry in asked if entry not in matched and entry not in type(section)().classes]
    if idle:
        warn_once(f"zero_optimization.leaf_module: no module of {type(model).__name__} matches {', '.join(idle)}")
    return found
