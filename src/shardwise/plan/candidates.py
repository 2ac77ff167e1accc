"""Candidates of the autotuner, with their planned memory and time; made in the first run of the user's script."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shardwise.config.export import without_secrets
from shardwise.config.schema.tuning import Autotuning
from shardwise.engine.plans import MARGIN, Offload, Planner, Room, Setting
from shardwise.errors import ShardwiseError, UsageError
from shardwise.plan.events import Operator, Recorder
from shardwise.plan.rates import Machine
from shardwise.plan.time import plan_time
from shardwise.zero.units.plan import TABLE

BUCKET = 50_000_000
"""Elements of a small bucket; it matters for models with more parameters."""

ON_DEVICE = Offload()
MEASURED_S = 20.0
"""Seconds for operators of the model that the rates lack, for each candidate."""


@dataclass(frozen=True)
class Candidate:
    """A setting that may be measured.

    Attributes:
        config: keys that replace those of the user's configuration.
        memory: planned bytes of a rank's device; None if unknown.
        fits: the plan is within the limits; None if unknown.
        seconds: planned time of a step; None without rates.
        note: reason for an unknown value.
        possible: the configuration allows the setting.
    """

    name: str
    config: dict[str, Any]
    micro: int
    accumulation: int
    memory: int | None = None
    fits: bool | None = None
    seconds: float | None = None
    note: str = ""
    possible: bool = True

    @property
    def family(self) -> str:
        """The name without the micro-batch: settings of a family differ by its size only."""
        return f"{self.name.partition('_')[0]}{self.name.partition('_gas')[2].lstrip('0123456789')}"


@dataclass(frozen=True)
class ModelFacts:
    """Result of the first run.

    Attributes:
        activation_mem_per_gpu: planned bytes of a micro-batch; `flops`: of a rank's micro-batch. None if unknown.
        micro: micro-batch size of the run. `rows`: first dimension of the module's inputs, None if it varies.
        config: as the script has passed it, without secrets. `built`: as the engine has it.
        candidates: from the least communication to the most.
    """

    num_params: int
    trainable_num_params: int
    micro: int
    accumulation: int
    stage: int
    config: dict[str, Any]
    candidates: list[Candidate]
    activation_mem_per_gpu: int | None = None
    flops: int | None = None
    notes: list[str] = field(default_factory=list)
    rows: int | None = None
    built: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, values: dict[str, Any]) -> ModelFacts:
        """Return the facts of a JSON object."""
        return cls(**{**values, "candidates": [Candidate(**one) for one in values["candidates"]]})


def facts(planner: Planner, rooms: Sequence[Room]) -> dict[str, Any]:
    """Return `ModelFacts` of a running engine as a JSON object.

    Raises UsageError if no batch sizes are within the bounds of the section.
    """
    target = planner.target
    options, now = target.resolution.config.autotuning, target.setting
    # A plan with its margin would exclude settings that may fit; a run that does not fit is a result.
    rooms = [replace(room, size=int(room.size * (1 + MARGIN))) for room in rooms]
    plan = planner.plan(now, rooms)
    flops, notes = None, [plan.note] if plan.note else []
    try:
        recorder = Recorder()
        planner.record(now, recorder)
        events = (event for phase, event in recorder.passes[0].events if phase != "step")
        flops = sum(event.flops for event in events if isinstance(event, Operator))
    except Exception as error:  # any error of the user's module on fake tensors
        if options.metric == "flops":
            notes.append(f"floating-point operations not counted: {type(error).__name__}: {error}")
    machine, why = _machine(options)
    notes += [why] if why else []
    candidates: list[Candidate] = []
    config = target.resolution.config
    settings = choose(
        now, options, fixed(target.resolution.raw), lambda one: planner.plan(one, rooms).fits, Offload.of(config)
    )
    for setting in sorted(settings, key=lambda one: one.cost):
        made = _candidate(planner, setting, rooms, machine)
        if made.possible or not any(made.family == other.family for other in candidates):
            candidates.append(made)
    parameters = list(target.module.parameters())
    numel = sum(parameter.numel() for parameter in parameters)
    found = ModelFacts(
        num_params=numel,
        trainable_num_params=sum(one.numel() for one in parameters if one.requires_grad),
        micro=now.micro_batch,
        accumulation=now.accumulation,
        stage=now.stage,
        config=without_secrets(target.resolution.raw),
        candidates=candidates,
        activation_mem_per_gpu=plan.peaks.get("activations"),
        flops=flops,
        notes=notes,
    )
    return asdict(found)


def fixed(config: dict[str, Any]) -> int | None:
    """Return the global batch size of a configuration, None if it gives none.

    >>> fixed({"train_batch_size": 32}), fixed({"train_batch_size": "auto"})
    (32, None)
    """
    written = config.get("train_batch_size")
    return int(written) if isinstance(written, int | float) and not isinstance(written, bool) else None


def choose(
    now: Setting,
    options: Autotuning,
    batch: int | None,
    fits: Callable[[Setting], bool | None],
    configured: Offload = ON_DEVICE,
) -> Iterator[Setting]:
    """Yield the settings of the search: for each stage some micro-batch sizes that may fit, and the smallest that does
    not. With `fast` false also: the latter with optimizer state on the host, or all without configured offloading.

    Args:
        batch: global batch size that all settings keep; None: as many micro-batches in a step as now.
        fits: whether a setting fits; None: unknown.
        configured: tiers of the configuration.
    """
    groups = now.ranks // (now.sequence * now.tensor)
    of_batch = _sizes(now, options, batch, groups)
    offloads = configured.devices != ON_DEVICE.devices
    # One rank shards nothing.
    for stage in TABLE if now.ranks > 1 else (now.stage,):
        for offload in (None, ON_DEVICE) if offloads and not options.fast else (None,):
            found = [
                replace(now, stage=stage, micro_batch=size, accumulation=passes, offload=offload)
                for size, passes in of_batch
            ]
            fitting = _how_many(found, fits)
            yield from _spread(found[:fitting], now.micro_batch, options.num_tuning_micro_batch_sizes)
            if fitting == len(found):
                continue
            yield found[fitting]
            moved = replace(found[fitting], offload=Offload("cpu", "none"))
            if not (offloads or options.fast) and stage > 0 and fits(moved) is not False:
                yield moved


def _sizes(now: Setting, options: Autotuning, batch: int | None, groups: int) -> list[tuple[int, int]]:
    """Return pairs of micro-batch size and accumulation, ascending."""
    low, high = options.min_train_micro_batch_size_per_gpu, options.max_train_micro_batch_size_per_gpu
    if batch is not None:
        samples = batch // groups
        found = [(size, samples // size) for size in range(low, min(high, samples) + 1) if samples % size == 0]
        if not found:
            raise UsageError(
                f"autotuning: no micro-batch size from {low} to {high} divides the {samples} samples of a rank "
                f"(train_batch_size {batch} on {groups} ranks). Change "
                "autotuning.min_train_micro_batch_size_per_gpu or autotuning.max_train_micro_batch_size_per_gpu"
            )
        return found
    passes = now.accumulation
    powers = [low << power for power in range(high.bit_length()) if low << power <= high]
    least, most = options.min_train_batch_size, options.max_train_batch_size
    sizes = sorted({*powers, high, *([now.micro_batch] if low <= now.micro_batch <= high else [])})
    totals = {size: size * passes * groups for size in sizes}
    found = [(size, passes) for size in sizes if least <= totals[size] and (most is None or totals[size] <= most)]
    if not found:
        raise UsageError(
            f"autotuning: with micro-batches of {low} to {high}, {passes} in a step, on {groups} ranks, no global "
            f"batch is from {least} to {most}. Change autotuning.min_train_batch_size, "
            "autotuning.max_train_batch_size or gradient_accumulation_steps"
        )
    return found


def _how_many(settings: Sequence[Setting], fits: Callable[[Setting], bool | None]) -> int:
    """Return how many of the settings, in the order of memory, may fit."""
    low, high = 0, len(settings)
    while low < high:
        middle = (low + high) // 2
        if fits(settings[middle]) is False:
            high = middle
        else:
            low = middle + 1
    return low


def _spread(settings: Sequence[Setting], now: int, number: int) -> list[Setting]:
    """Return `number` settings, evenly spaced from the current micro-batch size to the largest; smaller ones if there
    are not enough.
    """
    if len(settings) <= number:
        return list(settings)
    last = len(settings) - 1
    first = next((place for place, one in enumerate(settings) if one.micro_batch == now), 0)
    first = min(first, last - number + 1)
    if number == 1:
        return [settings[last]]
    places = {first + round(step * (last - first) / (number - 1)) for step in range(number)}
    return [settings[place] for place in sorted(places)]


def name_of(setting: Setting) -> str:
    """Return the name of a setting in files and tables.

    >>> name_of(Setting(2, 8, 1, 4))
    'z2_mbs8_gas1'
    """
    offload = setting.offload
    offloaded = "" if offload is None else "_device" if offload == ON_DEVICE else "_offload"
    return f"z{setting.stage}_mbs{setting.micro_batch}_gas{setting.accumulation}{offloaded}"


def _machine(options: Autotuning) -> tuple[Machine | None, str]:
    if options.rates is None:
        return None, ""
    machine = Machine.load(options.rates)
    why = "" if machine.is_here() else f"autotuning.rates {options.rates} was measured on {machine.host_name}"
    return machine, why


def _candidate(planner: Planner, setting: Setting, rooms: Sequence[Room], machine: Machine | None) -> Candidate:
    plan = planner.plan(setting, rooms)
    seconds, note = None, plan.note
    if machine is not None and plan.total is not None and plan.fits is not False:
        try:
            seconds = plan_time(planner, setting, machine, MEASURED_S).time.total
        except ShardwiseError as error:
            note = note or str(error)
    return Candidate(
        name_of(setting),
        setting.config,
        setting.micro_batch,
        setting.accumulation,
        plan.total,
        plan.fits,
        seconds,
        note,
        possible=plan.total is not None,
    )
