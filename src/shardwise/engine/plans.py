"""Memory plans of other settings: ZeRO stages, micro-batch sizes, numbers of ranks. No collective is called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.comm.domain import Arrangement, Domain
from shardwise.comm.fake import FakeCommunicator
from shardwise.comm.replicas import Replicas
from shardwise.config import Facts, Resolution, resolve
from shardwise.config.read import merged
from shardwise.engine.batch import accumulated
from shardwise.engine.dryrun import DryRunEngine, MemoryPlan, Recorder
from shardwise.engine.mesh import domain_of
from shardwise.engine.sparse import sparse_copy
from shardwise.engine.stepping import make_optimizer, prepare_optimizer
from shardwise.errors import ConfigError, UsageError
from shardwise.memory import Category, Journal, Tier, shapes_of
from shardwise.memory.dryrun import has_masks
from shardwise.memory.report import as_text, plain_table
from shardwise.precision.dtypes import policy_from_config
from shardwise.trees import tensors_in
from shardwise.units import format_size
from shardwise.zero.model import ShardedModel
from shardwise.zero.units.plan import TABLE

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.engine.pipeline_dryrun import StageForms
    from shardwise.engine.pipeline_plans import PipelinePlans, ScheduleFacts
    from shardwise.engine.stages import PipelineRanks

NO_PATH = "a directory on a fast disk"
"""Placeholder for a missing `nvme_path`."""
MARGIN = 0.15
"""Fraction added to a plan for uncounted memory: allocator fragmentation (a tenth, under an address-space limit with
changing buffers), and temporaries of a few kilobytes."""


@dataclass(frozen=True)
class Offload:
    """Tiers of state: `offload_optimizer.device` and `offload_param.device` (none, cpu, nvme), and nvme's directory."""

    optimizer: str = "none"
    parameters: str = "none"
    path: str = NO_PATH

    @property
    def config(self) -> dict[str, Any]:
        """The corresponding keys of `zero_optimization`."""
        found: dict[str, Any] = {}
        for name, device in (("offload_optimizer", self.optimizer), ("offload_param", self.parameters)):
            found[name] = {"device": device}
            if device == "nvme":
                found[name]["nvme_path"] = self.path
        if self.parameters == "nvme":
            found["offload_param"]["max_in_cpu"] = 0
        return found

    @classmethod
    def of(cls, config: Config) -> Offload:
        """Return the offload setting of a configuration."""
        zero = config.zero_optimization
        sections = (zero.offload_optimizer, zero.offload_param)
        optimizer, parameters = ("none" if section is None else section.device for section in sections)
        paths = (section.nvme_path for section in sections if section is not None)
        return cls(optimizer, parameters, next((path for path in paths if path and path.lower() != "none"), NO_PATH))

    @property
    def devices(self) -> tuple[str, str]:
        """Tiers of optimizer and parameters."""
        return self.optimizer, self.parameters

    def is_no_farther(self, other: Offload) -> bool:
        """Return True if neither optimizer nor parameters lie farther from the device than those of another setting."""
        return all(_TIERS.index(own) <= _TIERS.index(far) for own, far in zip(self.devices, other.devices, strict=True))

    @property
    def stage(self) -> int:
        """The lowest ZeRO stage that supports it."""
        return 3 if self.parameters != "none" else 1 if self.optimizer != "none" else 0

    def __str__(self) -> str:
        words = {"none": "on the device", "cpu": "on the host", "nvme": "on disk"}
        if self.optimizer == self.parameters:
            return f"state {words[self.optimizer]}"
        return f"optimizer state {words[self.optimizer]}, parameters {words[self.parameters]}"


_TIERS = ("none", "cpu", "nvme")
_WAYS = (
    ("none", "none"),
    ("cpu", "none"),
    ("none", "cpu"),
    ("cpu", "cpu"),
    ("nvme", "none"),
    ("none", "nvme"),
    ("nvme", "cpu"),
    ("cpu", "nvme"),
    ("nvme", "nvme"),
)
"""Tiers of optimizer and parameters, from the fastest to the slowest."""


def offloads(path: str = NO_PATH, *, nested: bool = True) -> list[Offload]:
    """Return the offload settings to be tried, from the fastest to the slowest. `nested`: only those that keep
    parameters no farther than the optimizer's state, which moves less often.
    """
    return [
        Offload(optimizer, parameters, path)
        for optimizer, parameters in _WAYS
        if not nested or _TIERS.index(parameters) <= _TIERS.index(optimizer)
    ]


@dataclass(frozen=True)
class Room:
    """Bytes available to one rank in tiers that count together; `directories`: the counted ones (empty: all)."""

    tiers: tuple[Tier, ...]
    size: int
    directories: tuple[str, ...] = ()

    def needed(self, plan: MemoryPlan) -> int:
        """Return the bytes of a plan that count."""
        if Tier.DISK in self.tiers:
            return sum(size for directory, size in plan.files.items() if self.counts(directory))
        if Tier.DEVICE not in self.tiers:
            return plan.elsewhere[Tier.HOST.value]
        return plan.near if Tier.HOST in self.tiers else plan.total

    def counts(self, directory: str) -> bool:
        """Return True if files in a directory count."""
        return Tier.DISK in self.tiers and (not self.directories or directory in self.directories)


@dataclass(frozen=True)
class Setting:
    """Settings that leave training unchanged: the global batch is micro_batch * accumulation * ranks.
    `sequence`, `tensor`: sizes of sequence-parallel and tensor-parallel groups. `offload` None: as configured.
    `pipeline`: ranks of a pipeline, at each of which are `ranks` ranks.
    """

    stage: int
    micro_batch: int
    accumulation: int
    ranks: int
    offload: Offload | None = None
    sequence: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def cost(self) -> tuple[int, int, int, int, int]:
        """Sort key: ranks, tiers of state, communication of a step, passes of a step, stage. Communication is in model
        sizes: one reduction (one a micro-batch if gradients are sharded), and one all-gather (two a micro-batch if
        parameters are sharded).
        """
        row = TABLE[self.stage]
        reductions = self.accumulation if row.gradients else 1
        gathers = 2 * self.accumulation if row.parameters else 1
        exchanged = (reductions + gathers) if self.ranks > 1 else 0
        return (
            self.ranks,
            0 if self.offload is None else _slowness(self.offload),
            exchanged,
            self.accumulation,
            self.stage,
        )

    @property
    def config(self) -> dict[str, Any]:
        """The corresponding keys of the configuration; the launcher sets the number of ranks."""
        return {
            "train_batch_size": self.micro_batch * self.accumulation * self.ranks // (self.sequence * self.tensor),
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": {"stage": self.stage, **({} if self.offload is None else self.offload.config)},
        }

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        if self.pipeline > 1:
            ranks += f" at each of {self.pipeline} positions of a pipeline"
        where = "" if self.offload is None else f", {self.offload}"
        return f"stage {self.stage}, micro-batch {self.micro_batch} x {self.accumulation}, {ranks}{where}"

    def offloaded(self, ways: Sequence[Offload], now: Offload | None = None) -> list[Setting]:
        """Return settings of the same batches and ranks with other tiers and higher stages, cheapest first.
        The configured tiers `now` are skipped at the current stage.
        """
        found = []
        for way in ways:
            for stage in TABLE:
                least = max(way.stage, self.stage)
                # One rank shards nothing: only the lowest stage that supports the tiers.
                same = stage == self.stage and now is not None and way.devices == now.devices
                if not same and (stage == least or (stage > least and self.ranks > 1)):
                    found.append(replace(self, stage=stage, offload=way))
        return sorted(found, key=lambda setting: setting.cost)


def _slowness(offload: Offload) -> int:
    return _WAYS.index(offload.devices)


@dataclass(frozen=True)
class SettingPlan:
    """Planned memory of one rank under a setting.

    Attributes:
        peaks: peak bytes of each category, by name; activations if they could be planned.
        total: peak bytes of the sum; None without a plan.
        elsewhere: peak bytes of each used tier except the device, by name.
        moved: bytes that a step reads from ("read") and writes to ("written") each of these tiers.
        fits: within the limits, with a margin of 15 %; None if unknown.
        note: reason for an unknown value.
        position: of the rank in its pipeline; None without one.
    """

    setting: Setting
    peaks: dict[str, int] = field(default_factory=dict)
    total: int | None = None
    fits: bool | None = None
    note: str = ""
    elsewhere: dict[str, int] = field(default_factory=dict)
    moved: dict[str, dict[str, int]] = field(default_factory=dict)
    position: int | None = None


@dataclass(frozen=True)
class MemoryPlans:
    """Plans of several settings, cheapest first; `room`: bytes available to the engine here, None if unknown.

    `schedule`: stages and idle time of a pipeline; None without one.
    """

    plans: tuple[SettingPlan, ...]
    room: int | None
    notes: tuple[str, ...] = ()
    schedule: ScheduleFacts | None = None

    @property
    def cheapest(self) -> SettingPlan | None:
        """The first plan that fits."""
        return next((plan for plan in self.plans if plan.fits), None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)

    def render(self, width: int = 100) -> str:
        """Return the table as text."""
        return as_text([self], width)

    def __rich__(self) -> Any:
        room = "" if self.room is None else f"; there is room for {format_size(self.room)}"
        tiers = list(dict.fromkeys(tier for plan in self.plans for tier in plan.elsewhere))
        offloaded = ["state, parameters"] if any(plan.setting.offload is not None for plan in self.plans) else []
        positions = ["pipeline rank"] if any(plan.position is not None for plan in self.plans) else []
        parts = ("resident", "buffers", "activations", "total")
        columns = ("stage", *positions, "micro-batch x steps", "ranks", *parts, *tiers)
        table = plain_table(
            f"Planned memory of one rank{room}",
            (*columns, *offloaded, "fits"),
            (*self.notes, *dict.fromkeys(plan.note for plan in self.plans if plan.note)),
            left=("state, parameters", "fits"),
        )
        for plan in self.plans:
            setting = plan.setting
            resident = ("parameters", "gradients", "master weights", "optimizer state", "other")
            buffers = ("communication buffers", "gathered window")
            sizes = [sum(plan.peaks[name] for name in part) if plan.peaks else None for part in (resident, buffers)]
            table.add_row(
                str(setting.stage),
                *(["" if plan.position is None else str(plan.position)] if positions else []),
                f"{setting.micro_batch} x {setting.accumulation}",
                str(setting.ranks),
                *(format_size(size) for size in (*sizes, plan.peaks.get("activations"), plan.total)),
                *(format_size(plan.elsewhere.get(tier)) for tier in tiers),
                *([", ".join(setting.offload.devices) if setting.offload else "as it is"] if offloaded else []),
                {True: "yes", False: "no", None: "?"}[plan.fits],
            )
        return table


@dataclass(frozen=True)
class PlanningTarget:
    """Model, optimizer and configuration to be planned, unchanged. `groups`: of parameters before sharding.
    `grid`: arrangement for the current number of ranks. `place`: position in a pipeline, of which the model, `comm` and
    `grid` are; None without one.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    groups: Sequence[Sequence[nn.Parameter]]
    resolution: Resolution
    comm: Communicator
    setting: Setting
    grid: Arrangement
    place: PipelineRanks | None = None

    @property
    def device(self) -> torch.device:
        """Device of the engine."""
        return self.comm.device

    @classmethod
    def of(
        cls,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        resolution: Resolution,
        domain: Domain,
        place: PipelineRanks | None = None,
        replicas: Replicas | None = None,
    ) -> PlanningTarget:
        """Return the target for a configured engine before it is built."""
        config = resolution.config
        micro, steps = int(config.train_micro_batch_size_per_gpu or 1), int(config.gradient_accumulation_steps or 1)
        groups = [list(group["params"]) for group in optimizer.param_groups] if optimizer is not None else []
        sequence, tensor = config.sequence_parallel_size, config.tensor_parallel.size
        positions = 1 if place is None else len(place.ranks)
        stage = config.zero_optimization.stage
        ranks, grid = domain.ranks, domain.arrangement
        if replicas is not None:
            ranks, grid = replicas.job, replicas.grid
        setting = Setting(stage, micro, steps, ranks.world, sequence=sequence, tensor=tensor, pipeline=positions)
        return cls(module, optimizer, groups, resolution, ranks, setting, grid, place)


class Planner:
    """Makes and caches memory plans. `batch`: a micro-batch, real or on the meta device; None: without activations.

    A micro-batch of a pipeline is a pair (inputs, labels). `forms`: of the values between stages, shared by planners of
    several positions.
    """

    def __init__(
        self,
        target: PlanningTarget,
        batch: Any = None,
        loss: Callable[[Any], torch.Tensor] | None = None,
        forms: StageForms | None = None,
    ) -> None:
        self.target = target
        self._loss = loss
        self._batch = None if batch is None else shapes_of(batch)
        inputs = batch if target.place is None or batch is None else _pair(batch)[0]
        self._masks = inputs is not None and has_masks(inputs)
        self._forms = forms
        self._plans: dict[Setting, tuple[MemoryPlan | None, str]] = {}

    @property
    def batch(self) -> Any:
        """The shapes of a micro-batch; None without one."""
        return self._batch

    def plan(self, setting: Setting, rooms: Sequence[Room] = (), recorder: Recorder | None = None) -> SettingPlan:
        """Return the plan of one rank under a setting; `rooms` are the available bytes, if known. `recorder`: records
        what the rank does in a window, nothing if its activations cannot be planned.
        """
        if recorder is not None:
            self._plans[setting] = self._run(setting, recorder)
        found, note = self.window(setting)
        position = None if self.target.place is None else self.target.place.position
        if found is None:
            return SettingPlan(setting, note=note, position=position)
        peaks = dict(found.peaks)
        if self._batch is None or note:
            del peaks[Category.ACTIVATIONS.value]
        fits = all(room.needed(found) * (1 + MARGIN) <= room.size for room in rooms) if rooms else None
        unlimited = [directory for directory in found.files if not any(room.counts(directory) for room in rooms)]
        if fits and (note or unlimited):
            fits = None  # activations are missing, or the disk's free space is unknown
        elsewhere = {tier: size for tier, size in found.elsewhere.items() if size}
        return SettingPlan(setting, peaks, found.total, fits, note, elsewhere, found.moved, position)

    def window(self, setting: Setting) -> tuple[MemoryPlan | None, str]:
        """Return the plan of a window, and the reason why the plan or its activations are missing."""
        if setting not in self._plans:
            self._plans[setting] = self._run(setting)
        return self._plans[setting]

    def record(
        self, setting: Setting, recorder: Recorder | None = None, journal: Journal | None = None
    ) -> tuple[MemoryPlan, ShardedModel]:
        """Record what a rank does in a window, whose memory `plan` then knows, and the events of its memory. Raises any
        error of the module on fake tensors. Returns the plan, and the model as sharded.

        Raises UsageError without a batch, and ConfigError for a setting that the configuration does not allow.
        """
        if self._batch is None:
            raise UsageError("a plan of time needs a batch")
        batch = self._of_size(setting.micro_batch)
        steps = accumulated(self.target.resolution.config, setting.accumulation)
        engine = self._engine(setting, batch, journal)
        plan = engine.run(batch, steps, self._loss, masks=self._masks, recorder=recorder)
        self._plans[setting] = plan, ""
        return plan, engine.sharded

    def _run(self, setting: Setting, recorder: Recorder | None = None) -> tuple[MemoryPlan | None, str]:
        config, note = self.target.resolution.config, ""
        accumulation = accumulated(config, setting.accumulation)
        try:
            if self._batch is not None:
                try:
                    batch = self._of_size(setting.micro_batch)
                    engine = self._engine(setting, batch)
                    return engine.run(batch, accumulation, self._loss, masks=self._masks, recorder=recorder), ""
                except ConfigError:
                    raise
                except Exception as error:  # any error of the user's module on fake tensors
                    given = ", ".join(
                        f"{str(one.dtype).removeprefix('torch.')} {list(one.shape)}" for one in tensors_in(batch)
                    )
                    raised = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    note = f"activations not planned: on a batch of {given} the model raises {raised}"
            return self._engine(setting).run(None, accumulation), note
        except ConfigError as error:
            return None, f"the configuration does not allow it: {error}"

    def _of_size(self, micro_batch: int) -> Any:
        now = self.target.setting.micro_batch
        if micro_batch == now:
            return self._batch
        sizes = [tensor.shape[0] for tensor in tensors_in(self._batch) if tensor.dim()]
        if not sizes or sizes[0] % now:
            raise UsageError(f"the batch's first dimension is not a multiple of the {now} samples of a micro-batch")
        return shapes_of(self._batch, sizes[0], sizes[0] // now * micro_batch)

    def _engine(self, setting: Setting, batch: Any = None, journal: Journal | None = None) -> DryRunEngine:
        target = self.target
        raw = _planned(target.resolution.raw, setting)
        same = setting.ranks == target.setting.ranks
        config = resolve(raw, world_size=setting.ranks * setting.pipeline, facts=_facts(target)).config
        like, grid = (target.comm, target.grid) if same else (None, None)
        found = target.module, target.optimizer, target.groups, config
        if target.place is None:
            device = target.device
            return DryRunEngine(*found, world=setting.ranks, device=device, like=like, grid=grid, journal=journal)
        from shardwise.engine.pipeline_dryrun import PipelineDryRun, StageForms, resized  # imports this module

        if self._forms is None:
            self._forms = StageForms(target.module, len(target.place.rank_of))
        forms = {}
        if batch is not None:
            forms = self._forms.of(batch[0], config, setting.ranks, target.device, masks=self._masks)
        return PipelineDryRun(
            *found,
            world=setting.ranks,
            device=target.device,
            like=like,
            grid=grid,
            place=resized(target.place, setting.ranks),
            forms=forms,
            times=self._forms.times,
        )


def _pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise UsageError(
            f"a micro-batch of a pipeline is a pair (inputs, labels), as of its data iterator; got a "
            f"{type(batch).__name__}"
        )
    return batch[0], batch[1]


_OLD_OFFLOAD = ("cpu_offload", "cpu_offload_param", "cpu_offload_params", "cpu_offload_use_pin_memory")
"""Former keys of `offload_optimizer` and `offload_param`."""


def with_keys(raw: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with the keys of a setting in the place of its own."""
    zero = raw.get("zero_optimization")
    if isinstance(zero, dict) and "offload_optimizer" in keys.get("zero_optimization", {}):
        raw = {**raw, "zero_optimization": {name: value for name, value in zero.items() if name not in _OLD_OFFLOAD}}
    return merged(dict(raw), dict(keys))


def _planned(raw: dict[str, Any], setting: Setting) -> dict[str, Any]:
    own = with_keys(raw, setting.config) | {"steps_per_print": None}  # dry runs print no progress
    if raw.get("managed_gradient_accumulation") is False:
        own["managed_gradient_accumulation"] = True  # memory does not depend on this key
    return own


def _facts(target: PlanningTarget) -> Facts:
    groups = target.optimizer.param_groups if target.optimizer is not None else []
    lr = groups[0].get("lr") if groups else None
    config = target.resolution.config
    sequence, tensor = (
        size if size > 1 else None for size in (config.sequence_parallel_size, config.tensor_parallel.size)
    )
    return Facts(
        lr=None if lr is None else float(lr),
        sequence_parallel_size=sequence,
        tensor_parallel_size=tensor,
        pipeline_stages=None if target.place is None else len(target.place.ranks),
    )


def plan_model(
    model: nn.Module,
    config: dict[str, Any],
    *,
    ranks: int,
    stages: Sequence[int] = (0, 1, 2, 3),
    batch: Any = None,
    rooms: Sequence[Room] = (),
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    local_ranks: int | None = None,
) -> MemoryPlans:
    """Return the planned memory of one rank without a process group, a device, or memory for the model.

    The configuration's micro-batch size and accumulation hold for each stage. Raises a ConfigError if it is wrong.

    Args:
        model: parameters may be on the meta device.
        batch: a micro-batch, real or on the meta device, for activations; the loss is found in the output.
        rooms: bytes available to one rank.
        optimizer, model_parameters: as of `shardwise.initialize`.
        local_ranks: CPU ranks that share a machine: if all do, they exchange through shared memory. None: through
            messages, whose buffers are those of GPUs, too.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Linear(4096, 4096, bias=False)
        >>> adam = {"type": "AdamW", "params": {"lr": 1e-3}}
        >>> config = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam}
        >>> (plan,) = plan_model(model, config, ranks=1024, stages=[1]).plans
        >>> plan.peaks["optimizer state"] // 1000  # 8 bytes for each of 4096 * 4096 / 1024
        131
    """
    planners, pipeline = planners_of(model, config, ranks, batch, optimizer, model_parameters, local_ranks)
    plans = tuple(
        planner.plan(replace(planner.target.setting, stage=stage), rooms) for stage in stages for planner in planners
    )
    return plans_of(plans, rooms, pipeline)


def plans_of(plans: Sequence[SettingPlan], rooms: Sequence[Room], pipeline: PipelinePlans | None) -> MemoryPlans:
    """Return the plans of one rank, or of each position of a pipeline, together."""
    room = min((room.size for room in rooms if Tier.DEVICE in room.tiers), default=None)
    return MemoryPlans(tuple(plans), room, schedule=None if pipeline is None else pipeline.facts())


def planners_of(
    model: nn.Module,
    config: dict[str, Any],
    ranks: int,
    batch: Any = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    local_ranks: int | None = None,
) -> tuple[list[Planner], PipelinePlans | None]:
    """Return a planner of rank 0, or of each position of a pipeline, and the pipeline; arguments as `plan_model`."""
    from shardwise.engine.pipeline_plans import PipelinePlans, requested_stages  # imports this module

    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else [{}]
    facts = Facts(lr=groups[0].get("lr"), pipeline_stages=requested_stages(model))
    resolution = resolve(config, world_size=ranks, facts=facts)
    model = sparse_copy(model, resolution.config.sparse_attention)
    pipeline = PipelinePlans.of(model, resolution, ranks)
    models = [(model, None)] if pipeline is None else pipeline.positions()
    forms = None if pipeline is None else pipeline.forms
    if pipeline is not None and isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            "plans of a pipeline need the section `optimizer`, or a callable: an optimizer that has its parameters "
            "does not say which of them lie in which stage"
        )
    near = local_ranks is not None and local_ranks >= ranks
    client: dict[str, Any] = {"optimizer": optimizer, "near": near}
    if model_parameters is not None and pipeline is None:
        client["parameters"] = list(model_parameters)
    found = [Planner(target_of(part, resolution, ranks, place, **client), batch, forms=forms) for part, place in models]
    return found, pipeline


def target_of(
    model: nn.Module,
    resolution: Resolution,
    ranks: int,
    place: PipelineRanks | None = None,
    *,
    device: torch.device | None = None,
    optimizer: Any = None,
    parameters: Sequence[Any] | None = None,
    near: bool = False,
) -> PlanningTarget:
    """Return the target for a model on ranks that are not there; `optimizer` and `parameters` as of `initialize`.

    `near`: CPU ranks share a machine.
    """
    device = device or torch.device("cpu")
    comm = FakeCommunicator(ranks if place is None else len(place.stage_ranks[0]), device, near=near)
    policy = policy_from_config(resolution.config)
    part = place is not None and len(place.ranks) > 1
    made = make_optimizer(resolution.config, optimizer, parameters, model, device, policy.compute_dtype, of_a_part=part)
    prepare_optimizer(made, resolution, masters=policy.masters)
    return PlanningTarget.of(model, made, resolution, domain_of(resolution.config, comm), place)
