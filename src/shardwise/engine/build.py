"""Composition root: builds an engine from the arguments of `initialize`. Comments give the reason for each position."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.api import configure as configure_log
from shardwise.comm.communicator import Communicator, check_agreement, members_of
from shardwise.comm.domain import REPLICATE, Domain
from shardwise.comm.environment import CONFIG_OVERRIDE, DEVICE_LIMIT
from shardwise.comm.groups import name_of_engine, refuse
from shardwise.comm.ledger import Ledger
from shardwise.comm.logger import comms_logger
from shardwise.comm.setup import init_distributed, local_rank
from shardwise.compat import watch_clipping
from shardwise.config import Facts, Resolution, resolve
from shardwise.config.export import effective
from shardwise.config.read import Document, merged, read
from shardwise.data import EngineDataLoader
from shardwise.device import choose_device
from shardwise.device.segments import let_segments_grow
from shardwise.device.streams import warn_of_one_queue
from shardwise.engine import compressing
from shardwise.engine.advice import (
    check_unwrapped,
    warn_of_arguments,
    warn_of_batch_norm,
    warn_of_clipping,
    warn_of_memory_format,
)
from shardwise.engine.batch import Batches
from shardwise.engine.checkpointing import Checkpoints
from shardwise.engine.choice import choice_of, has_sample, is_open, sample_of
from shardwise.engine.curricula import Curricula
from shardwise.engine.engine import Engine
from shardwise.engine.facts import agree_on_arguments, facts_of, facts_of_arguments
from shardwise.engine.faults import FaultTolerance, note_ready
from shardwise.engine.generation import Generation
from shardwise.engine.interchange import Interchange
from shardwise.engine.memory import MemoryReporting
from shardwise.engine.mesh import (
    RankGrid,
    RequestedParallelism,
    check_shard_size,
    domain_of,
    domains_of,
    grid_of,
    group_of,
    local_ranks,
    log_machines,
    mesh_place,
    model_parallel_size,
    reduction,
    replicas_of,
    requested_by,
)
from shardwise.engine.modules import (
    check_lazy,
    check_one_device,
    chunks_of,
    close_former_engine,
    fill_meta_parameters,
    leaves_of,
    modules_with,
    place_buffers,
    share_buffers,
)
from shardwise.engine.observers import Activations, Observers, StepEvents
from shardwise.engine.parallel import (
    OwnSequences,
    SharedSequences,
    SharedTensors,
    divide_experts,
    exchanges_in_backward,
    exchanges_of,
)
from shardwise.engine.pipeline import PipelineEngine
from shardwise.engine.plans import PlanningTarget
from shardwise.engine.preflight import has_watchdog, is_wanted, preflight
from shardwise.engine.profiling import Profiling
from shardwise.engine.reserved import CommunicatorMemory
from shardwise.engine.scaling import plain_gradients, prescale_of, scales_loss
from shardwise.engine.signals import SignalWatch
from shardwise.engine.sparse import use_sparse_attention
from shardwise.engine.stages import (
    PipelineRanks,
    as_pipeline,
    build_stages,
    check_tied_groups,
    recompute_as_configured,
    tie,
)
from shardwise.engine.step import TrainStep
from shardwise.engine.step_log import Following, describe, device_limit, display_mode, display_of, log_of
from shardwise.engine.stepping import make_optimizer, make_scheduler, prepare_optimizer
from shardwise.engine.timelines import Timelines
from shardwise.engine.tuning import TuningRun
from shardwise.engine.unequal import UnequalBatches, check_divisible, first_sizes, part_of_replica
from shardwise.errors import ConfigError, ConflictError, UsageError
from shardwise.memory import Accountant, Category
from shardwise.memory.oom import OomContext, reporting_oom
from shardwise.memory.watchdog import Watchdog
from shardwise.monitor import Monitor, check_packages, switched_on
from shardwise.offload import Disks, homes_of
from shardwise.optim import is_elementwise_state
from shardwise.optim.registry import group_with_list
from shardwise.pipeline.module import PipelineModule
from shardwise.pipeline.schedules import placement_of
from shardwise.precision.autocast import wire_dtypes
from shardwise.precision.dtypes import policy_from_config
from shardwise.precision.float8 import train_in_float8
from shardwise.precision.scaler import LossScaler
from shardwise.units import parse_size
from shardwise.utils.logging import logger, warn_once
from shardwise.zero.build import check_optimizer
from shardwise.zero.model import ShardedModel, Sharding
from shardwise.zero.parameters.init import built_for_codes, spread_from_first, suspended
from shardwise.zero.passes.reduce import CopiesElsewhere
from shardwise.zero.units.plan import Plan

EngineParts = tuple[Engine, Any, EngineDataLoader | None, Any]
"""Engine, optimizer, dataloader, schedule; all but the engine may be None."""


@dataclass(frozen=True)
class EngineArguments:
    """Arguments of `initialize` and of an interface that builds engine classes of its own."""

    model: nn.Module
    config: Any
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None
    model_parameters: Iterable[Any] | None = None
    lr_scheduler: Any = None
    training_data: Any = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    loss_fn: Callable[..., Any] | None = None
    mesh: Any = None
    mpu: Any = None
    sample_batch: Any = None
    device_index: int | None = None
    """Number of the CUDA device; None: the local rank."""
    engine: type[Engine] = Engine
    pipeline_engine: type[PipelineEngine] = PipelineEngine


on_initialize: Callable[[EngineArguments], None] | None = None
"""Called with the arguments of each `initialize` before anything is built; `shardwise plan` sets it for a script."""


def check_model(model: Any) -> None:
    """Raise UsageError for an object that is no model, or an engine already."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize(model=...) expects an nn.Module, got {type(model).__name__}")
    if isinstance(model, Engine):
        raise UsageError(
            "initialize(model=...): it is an engine already. Pass its module (engine.module) for a new engine"
        )


@suspended()  # leave zero.Init, if the script calls inside it
def build(given: EngineArguments) -> EngineParts:
    """Build an engine. Raises as `initialize`."""
    check_model(given.model)
    if on_initialize is not None:
        on_initialize(given)
    note_ready()
    try:
        with contextlib.ExitStack() as undo:
            made = _build(undo, given)
            undo.pop_all()  # the engine closes them from now on
    except ConfigError as error:
        # The mistake is in the configuration: frames of its checks would only hide the message.
        raise error.with_traceback(None)  # noqa: B904
    return made


def _build(undo: contextlib.ExitStack, given: EngineArguments) -> EngineParts:
    model, optimizer, model_parameters = given.model, given.optimizer, given.model_parameters
    lr_scheduler, mesh, mpu = given.lr_scheduler, given.mesh, given.mpu
    with refusing(mpu):
        check_unwrapped(model)
        pipeline = model if isinstance(model, PipelineModule) else None
        # The layers of a pipeline are built below, once the ranks of each stage are known.
        known = model if pipeline is None else nn.Module()
        check_lazy(known)
        check_one_device(known)
        # The process group first, because batch sizes depend on the number of ranks.
        init_distributed(verbose=False)
        group = group_of(mpu)
        members = members_of(group)
        if dist.get_rank(group) == 0:
            warn_of_memory_format(known)
        requested = requested_by(mpu, mesh, known, members)

        # The configuration before any group, because most mistakes are found here, on every rank alike.
        resolution = _resolve(_overridden(given.config, optimizer), members, optimizer, requested, pipeline)
        settings = resolution.config
        of_deepspeed = isinstance(given.config, Document) and given.config.written is not None
        use_sparse_attention(model, settings.sparse_attention, undo, of_deepspeed=of_deepspeed)
        positions = 1 if settings.pipeline.stages == "auto" else settings.pipeline.stages
        if pipeline is None and (positions > 1 or given.loss_fn is not None):
            pipeline = model = as_pipeline(model, settings.pipeline.partition, given.loss_fn)
            known = nn.Module()
        if pipeline is not None:
            recompute_as_configured(pipeline, settings.pipeline)
        sequence, tensor = settings.sequence_parallel_size, settings.tensor_parallel.size
        if settings.local_sgd.enabled and (pipeline is not None or sequence * tensor > 1):
            raise ConflictError(
                "local_sgd: a replica is divided by ZeRO only, and this model is a pipeline, or has tensor or sequence "
                f"parallelism ({requested.where or 'configured'}). Leave local_sgd out"
            )
        methods = compressing.section_for(known, settings, of_deepspeed=of_deepspeed)
        local, staged = settings.local_sgd.enabled, pipeline is not None
        compression = compressing.prepare(known, methods, undo, pipeline=staged, local_sgd=local)
        trained = optimizer is not None or settings.optimizer.type is not None
        check_divisible(settings, given.training_data, trained and pipeline is None)
        check_packages(settings)
        check_shard_size(settings, requested)

        # The device before the groups, because each backend serves one device type.
        own_number = local_rank()
        device = choose_device(own_number, given.device_index)
        if settings.float8.enabled:
            if pipeline is not None:
                raise ConflictError("float8 cannot be combined with a pipeline, whose layers are built later")
            if compression is not None:
                raise ConflictError("float8 cannot be combined with compression, which changes the same layers")
            train_in_float8(model, settings.float8, device, undo)

    # Groups: job, data-parallel, sequence-parallel, tensor-parallel, and the domains of parameters.
    # Job and data-parallel group are equal without sequence and tensor parallelism.
    accountant = Accountant()  # counts allocations from here on
    communicators = CommunicatorMemory(accountant, device, len(members))
    job = data = _communicator(settings, group, device)
    undo.callback(job.destroy)

    # Compare ranks before the collectives that depend on the arguments.
    shows_loss = bool(switched_on(settings)) or settings.anomaly_watch.enabled or settings.run_log.enabled
    shows_loss |= display_mode(settings) != "off" or pipeline is not None
    agreed = agree_on_arguments(job, known, facts_of_arguments(known, resolution, mesh, mpu), shows_loss)
    if agreed.spreads:
        spread_from_first(model, job)

    # A plan chooses what is left to "auto"; it needs the limits of all ranks.
    sampled = pipeline is None and has_sample(given.sample_batch, given.training_data)
    if is_open(resolution, sampled=sampled):
        sample = sample_of(given.sample_batch, given.training_data, given.collate_fn, settings.sequence_parallel_size)
        model_parameters = None if model_parameters is None else [group_with_list(one) for one in model_parameters]
        chosen = choice_of(resolution, model, job, optimizer, model_parameters, sample)
        again = _resolve(chosen.raw, members, optimizer, requested, pipeline)
        resolution = chosen.noted(again)
        settings = resolution.config

    # Replicas that step on their own run passes of their own.
    replicas = replicas_of(settings, job, requested.arrangement)
    # Ranks that step together: the sums of a step are over them.
    together = job if replicas is None else replicas.own

    # The ranks of one pipeline position run the same layers, and form a pass group. Each builds its own layers.
    whole, place, pipe = together, None, None
    copies: dict[int, CopiesElsewhere] = {}
    if pipeline is not None:
        rank_of = placement_of(settings.pipeline.schedule, positions, settings.pipeline.chunks)
        place = PipelineRanks.of(job.rank, job.world, positions, rank_of)
        build_stages(pipeline, place, job)
        check = functools.partial(compressing.check_combinations, model, methods, pipeline=True, local_sgd=local)
        job.together("building stages", check)
        pipe = job.part([list(ranks) for ranks in zip(*place.stage_ranks, strict=True)], "pipeline")
        if positions > 1:
            whole = job.part(place.stage_ranks, "stage")
            data = whole
            copies = tie(pipeline, place, job)

    lines = grid_of(whole, sequence, tensor, requested, mpu)
    if sequence * tensor > 1:
        data = whole.part(lines.data, "data_parallel")
    sequences = (
        SharedSequences(whole, lines.sequence, data, requested.group, divided=tensor > 1)
        if sequence > 1
        else OwnSequences(whole, data)
    )
    undo.callback(sequences.close)
    domain = domain_of(settings, whole, requested) if replicas is None else Domain(whole)
    if job.rank == 0 and domain.async_gathers:
        warn_of_one_queue()
    if agreed.has_buffers or pipeline is not None:
        share_buffers(model, data if model_parallel_size(mpu) > 1 else whole if replicas is None else job)
    # Shard tensors and experts before domains are assigned to parameters.
    tensors = None
    if tensor > 1:
        client = model_parallel_size(mpu) > 1 and "tensor_parallel.autotp_size" not in resolution.given
        tensors = SharedTensors(whole, lines.tensor, model, settings, data=data, client=client)
        undo.callback(tensors.close)
        model_parameters = tensors.exchange(optimizer, model_parameters)
    groups = job.together("dividing experts", lambda: divide_experts(model, settings, whole, lines))
    if compression is not None:
        compression.check_divided()
    domains = domains_of(model, domain)

    # The plan: sharding, domains and dtypes.
    policy = policy_from_config(settings)
    plan = _plan(settings, domain, model)
    log_machines(job, whole, lines, domain, plan.secondary)
    if plan.releases and settings.expandable_segments and not settings.registered_buffers:
        let_segments_grow(device)  # before permanent allocations

    # Close a former engine of the model first, while its parameters can still be unsharded.
    close_former_engine(model)

    # Materialize meta parameters before their first use.
    fill_meta_parameters(model, domains)

    # The optimizer is built on the user's parameters; sharding then edits its groups in place.
    # The schedule sets the first learning rate on the groups, which keep their identity.
    def stepping_parts() -> tuple[Any, Any, Any]:
        part = place is not None and len(place.ranks) > 1
        made = make_optimizer(
            settings, optimizer, model_parameters, model, device, policy.compute_dtype, of_a_part=part
        )
        if made is not None:
            check_optimizer(made, model, of_a_part=part)
        prepared = prepare_optimizer(made, resolution, masters=policy.masters)
        return made, prepared, make_scheduler(settings, lr_scheduler, made)

    stepped, stepping, scheduler = job.together("making the optimizer", stepping_parts)
    if pipeline is not None:
        check_tied_groups(pipeline, copies, stepped)
    if compression is not None and stepped is not None:
        compressing.check_optimizer(compression, stepped)

    # Buffers move now, parameters unit by unit during sharding.
    place_buffers(model, device, policy.buffer_dtype, settings.data_types.keep_in_fp32_modules, accountant)

    # Sizes of later exchanges depend on each rank's model.
    check_agreement(
        whole if replicas is None else job, {**facts_of(model, stepped, resolution), "torch": torch.__version__}
    )

    # Memory preflight before weights are sharded; the watchdog starts here.
    target = PlanningTarget.of(model, stepped, resolution, domain, place, replicas)
    budget = preflight(target, job) if is_wanted(settings, plan.where.names) else None
    watchdog = None
    if budget is not None and has_watchdog(settings, plan.where.names) and job.rank == budget.node[0]:
        watchdog = Watchdog(functools.partial(budget.exhaustion, job.rank, accountant))

    # Sharding frees the model unit by unit, so no other object may hold unsharded parameters.
    setting, processes = str(target.setting), local_ranks(job.world)
    with reporting_oom(lambda: OomContext("initialize()", setting, device, accountant, job.rank, processes)):
        sharded = ShardedModel(
            model,
            stepped,
            Sharding(
                stepping=stepping,
                is_elementwise=is_elementwise_state,
                plan=plan,
                policy=policy,
                domains=domains,
                device=device,
                accountant=accountant,
                prescale=prescale_of(settings, domain.world),
                compressor=reduction(settings, domain.ranks, lambda tensor: accountant.hold(Category.BUFFERS, tensor)),
                leaves=[*leaves_of(model, settings.zero_optimization.leaf_module), *modules_with(model, copies)],
                homes=homes_of(plan.where, device, Disks.of(settings, job.rank, accountant=accountant)),
                wires=wire_dtypes(model, settings),
                plain=plain_gradients(settings, plan) if stepped is None and not domains.others else None,
                norm_group=together,
                copies=copies,
                chunks=chunks_of(model),
                place=mesh_place(lines, whole.rank, (0, 1) if place is None else (place.position, len(place.ranks)))
                if replicas is None
                else mesh_place(RankGrid.of(job.world), job.rank, (0, 1)),
                replicas=None if replicas is None else (replicas, settings.local_sgd),
                registered=settings.registered_buffers,
            ),
        )

    communicators.reserve(job)

    # Parts of the engine, in order of dependence: step, checkpoints (save its counters), faults (save checkpoints),
    # memory (all three hold some).
    signals = SignalWatch()
    batches = Batches(settings, data, device)
    scaler = LossScaler.from_config(settings.fp16) if scales_loss(settings) else None
    step = TrainStep(sharded, settings, together, batches, stepped, scheduler, scaler, signals, agreed.shows_loss)
    step.exchanges = exchanges_in_backward(model, lines)
    stepping = weakref.ref(step)  # the stall watchdog's thread keeps the ledger
    job.ledger.step = lambda: 0 if (now := stepping()) is None else now.global_steps
    compressed = compressing.Compressing(compression, step, job, model)
    checkpoints = Checkpoints(sharded, resolution, job, step, batches, compressed, tensors)
    if watchdog is not None:
        watchdog.checkpoint = checkpoints.known
    faults = FaultTolerance(sharded, resolution, job, step, batches, checkpoints, signals)
    if given.training_data is not None:
        sizes = first_sizes(settings, batches)
        batches.training_dataloader = batches.loader(given.training_data, collate_fn=given.collate_fn, unequal=sizes)

    # Layers that are skipped, once the model is sharded: plans are of all layers.
    curricula = Curricula(settings, model, step, batches)
    undo.callback(curricula.close)
    timelines = Timelines(sharded, settings, job, step)
    memory = MemoryReporting(
        sharded, resolution, job, step, batches, checkpoints, faults, budget, watchdog, communicators, place
    )
    for shared in (sequences, tensors):
        if shared is not None:
            shared.watch(model)

    # Monitors last, because a failure before this line must leave no service running.
    monitor = Monitor(settings, job.rank)
    undo.callback(monitor.close)
    log, ranks = log_of(settings, job, step) or (None, [])
    if log is not None:
        undo.callback(log.close)
    display, limit = display_of(settings, job.rank), device_limit(settings, device)
    events = StepEvents(monitor, step)
    # Tensor-parallel ranks and the stages of a pipeline have the same tokens.
    readers = batches.ranks * sequences.group.size
    profiling = Profiling(sharded, settings, job, readers, batches, step, events)
    following = Following(sharded, step, job.ledger, readers, log, settings.run_log.every, display, limit)
    if sharded.local is not None and replicas is not None and settings.unequal_batches.enabled:
        sharded.local.share = functools.partial(part_of_replica, batches, replicas)
    dividing = UnequalBatches(settings, batches, step, job, device)
    tuning = TuningRun(resolution, sharded, batches, memory, job)
    activations = Activations(
        settings,
        model,
        device,
        accountant,
        None if tensors is None else tensors.group,
        step if job.rank == 0 else None,
    )
    make: Callable[..., Engine] = given.engine
    if place is not None and pipe is not None:
        make = functools.partial(given.pipeline_engine, place=place, pipe=pipe, schedule=settings.pipeline.schedule)
    engine = make(
        sharded=sharded,
        step=step,
        batches=batches,
        checkpoints=checkpoints,
        interchange=Interchange(sharded, job, step, compressed, checkpoints.numbers, checkpoints.background),
        generation=Generation(sharded, settings.hybrid_engine, job, tensors),
        faults=faults,
        memory=memory,
        activations=activations,
        curricula=curricula,
        monitor=monitor,
        observers=Observers(
            [events, profiling, timelines, following, activations, memory, dividing, tuning, compressed]
        ),
        profiling=profiling,
        timelines=timelines,
        following=following,
        resolution=resolution,
        job=job,
        data=data,
        sequences=sequences,
        tensors=tensors,
        expert_groups=groups,
        local_rank=own_number,
        client_optimizer=optimizer,
        client_lr_scheduler=lr_scheduler,
        mpu=mpu,
        mesh_device=mesh,
    )
    for writer in (monitor, log):
        if writer is not None:
            weakref.finalize(engine, writer.end).atexit = False
    if log is not None:
        timelines.directory = log.directory
        describe(engine, resolution, memory, log, ranks)

    if job.rank == 0:
        warn_of_arguments(settings, optimizer, lr_scheduler, model, trains=stepped is not None)
        warn_of_batch_norm(model, data.world * sequence)
    watch_clipping(warn_of_clipping)

    # Signals are handled once the engine is complete.
    faults.guard()
    timelines.begin_if_due()
    if job.rank == 0 and stepped is not None:
        logger.info("precision: %s", engine.precision_in_words())
    if job.rank == 0 and (exchanges := exchanges_of(model, lines)):
        logger.info("collectives of a pass: %s", exchanges)
    if job.rank == 0 and settings.dump_state:
        logger.info("configuration: %s", json.dumps(effective(resolution), indent=2, default=str))
    return engine, stepped, batches.training_dataloader, scheduler


@contextlib.contextmanager
def refusing(mpu: Any) -> Iterator[None]:
    """Report an exception of the block to ranks that wait for this one."""
    try:
        yield
    except Exception as error:
        if mpu is None:  # with an mpu the engine may span a part of the ranks
            refuse("initialize()", error)
        raise


def _resolve(
    source: Any,
    ranks: Sequence[int],
    client_optimizer: Any,
    requested: RequestedParallelism,
    pipeline: PipelineModule | None,
) -> Resolution:
    groups = client_optimizer.param_groups if isinstance(client_optimizer, torch.optim.Optimizer) else []
    lr = groups[0].get("lr") if groups else None
    of_model = None if pipeline is None else pipeline.num_stages
    if requested.stages is not None and of_model not in (None, requested.stages):
        raise ConflictError(f"{requested.where}: the PipelineModule has num_stages={of_model}. Leave num_stages out")
    facts = Facts(
        lr=None if lr is None else float(lr),
        sequence_parallel_size=requested.size,
        tensor_parallel_size=requested.tensor,
        pipeline_stages=requested.stages or of_model,
    )
    resolution = resolve(source, world_size=len(ranks), facts=facts)
    _take_device_limit(resolution)
    if resolution.config.log_level is not None:
        logger.setLevel(resolution.config.log_level.upper())
    if dist.get_rank() == ranks[0]:
        for message in resolution.log_messages():
            warn_once(message)
    return resolution


def _overridden(source: Any, client_optimizer: Any) -> Any:
    """Return a configuration with the keys of the file that `CONFIG_OVERRIDE` names, if the engine trains."""
    path = os.environ.get(CONFIG_OVERRIDE)
    if not path:
        return source
    document = read(source)
    optimizer = document.data.get("optimizer")
    if client_optimizer is None and not (isinstance(optimizer, dict) and optimizer.get("type")):
        return document
    origin = f"{document.origin}, with {CONFIG_OVERRIDE} {path}"
    return replace(document, data=merged(document.data, read(Path(path)).data), origin=origin)


def _take_device_limit(resolution: Resolution) -> None:
    written = os.environ.get(DEVICE_LIMIT)
    if not written:
        return
    try:
        resolution.config.memory_limits.device = parse_size(written)
    except ValueError as error:
        raise ConfigError(f"{DEVICE_LIMIT} (shardwise run --device-limit): {error}") from error


def _communicator(settings: Any, group: Any, device: torch.device) -> Communicator:
    ledger = Ledger()
    comm = Communicator(group, ledger, device, ordered=settings.deterministic_reduce, call="initialize()")
    ledger.engine = name_of_engine(comm.members)
    if settings.comms_logger.enabled:
        configure_log(settings)
    comms_logger.listen(comm)
    return comm


def _plan(settings: Any, domain: Domain, model: nn.Module) -> Plan:
    zero = settings.zero_optimization
    plan = Plan.of(zero, domain, float8=settings.float8)
    if zero.optimizer_over_replicas and REPLICATE not in domain.names:
        warn_once(
            "zero_optimization.optimizer_over_replicas has no effect: there are no replicas. Set "
            "zero_optimization.mics_shard_size, or pass a mesh with a dimension named replicate to initialize()"
        )
    if not (plan.shard_parameters and built_for_codes(model)):
        return plan
    if plan.levels(domain).parameters > 1:
        raise ConflictError(
            "zero.Init(zero_quantized_weights=True) cannot be combined with "
            "zero_optimization.mics_hierarchical_params_gather: codes are gathered in one level. Keep one of them"
        )
    return replace(plan, quantized_weights=True)
