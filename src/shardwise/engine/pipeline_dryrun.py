"""Dry run of a pipeline rank: the runtime executes the rank's actions of a schedule on fake tensors.

No other rank runs. The forms of the activations that a stage receives come from a forward pass through all stages.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import override

from shardwise.comm.fake import FakeCommunicator
from shardwise.comm.links import Link
from shardwise.engine.dryrun import DryRunEngine
from shardwise.engine.stage_passes import StagePasses
from shardwise.engine.stages import WEIGHT_GRADIENTS, PipelineRanks, tie
from shardwise.errors import UsageError
from shardwise.memory import Moved, Tier
from shardwise.memory.dryrun import Answers
from shardwise.pipeline.actions import COMPUTATIONS, INPUT_GRADIENT, WEIGHT_GRADIENT, Op
from shardwise.pipeline.lowering import with_communication, with_sharding
from shardwise.pipeline.messages import Form, form_of
from shardwise.pipeline.module import PipelineModule
from shardwise.pipeline.runtime import Runtime
from shardwise.pipeline.schedules import make_schedule
from shardwise.pipeline.simulator import Times, simulate
from shardwise.profile.counting import FlopCount
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator, Handle
    from shardwise.config import Config
    from shardwise.pipeline.actions import Schedule
    from shardwise.zero.passes.reduce import CopiesElsewhere


class PipelineDryRun(DryRunEngine):
    """A dry run of one position of a pipeline, with a module that has the stages of this position.

    Args:
        place: position, of which `world` and `like` are the ranks.
        forms: of the outputs of all stages except the last (`StageForms`); empty for a dry run without a batch.
        times: of the stages, which decide how long messages are under way.
        parts: arguments of `DryRunEngine`.
    """

    shows_loss = True

    def __init__(self, *parts: Any, place: PipelineRanks, forms: Mapping[int, Form], times: Times, **named: Any):
        self._place, self._times, self._computes = place, times, bool(forms) or len(place.rank_of) == 1
        super().__init__(*parts, **named)
        with self._computing():
            self._links: list[_PlannedLink] = []
            self._runtime = Runtime(
                self._job, place.ranks, place.position, place.rank_of, self._stage_name, link=self._make_link
            )
        if forms:
            self._runtime.expect(forms)

    def _make_link(self, whole: Communicator, source: int, target: int, what: Any) -> Link:
        self._links.append(_PlannedLink(whole, source, target, what))
        return self._links[-1]

    def _stage_name(self, stage: int) -> str:
        return f"stage {stage} of {len(self._place.rank_of)}"

    @override
    def _ranks(
        self, twin: nn.Module, world: int, like: Communicator | None
    ) -> tuple[Communicator, Communicator, dict[int, CopiesElsewhere]]:
        place, positions = self._place, len(self._place.ranks)
        if positions == 1:
            return super()._ranks(twin, world, like)
        job = FakeCommunicator(world * positions, self._device, rank=place.ranks[place.position], like=like)
        return job, job.part(place.stage_ranks, "stage"), tie(twin, place, job)  # type: ignore[arg-type]

    @override
    def _chunks(self, twin: nn.Module) -> Sequence[nn.Module]:
        return super()._chunks(twin) if self._computes else ()  # without a batch all modules are called in one pass

    @override
    def _window(self, batch: Any, accumulation: int, loss: Callable[[Any], torch.Tensor] | None) -> dict[Tier, Moved]:
        if batch is None:
            return super()._window(batch, accumulation, loss)
        # The first window only allocates optimizer state and traces the order of units.
        most = accumulation if self.sharded.stepped else min(2, accumulation)
        pipeline = self._config.pipeline
        schedule = with_sharding(planned_schedule(pipeline.schedule, self._place, most), pipeline.unsharded_for)
        count = self._batches.steps = schedule.micro_batches
        before = self._moved()
        for link in self._links:
            link.follow(schedule, self._times)
        with quiet():
            self._step.begin_batch(single=count == 1 and not schedule.has(WEIGHT_GRADIENTS))
            self._runtime.run(schedule, _Work(self, batch, loss, count), fixed=True)
        return {tier: moved - before[tier] for tier, moved in self._moved().items()}

    def update(self, micro_batches: int) -> None:
        """Step with the gradients of all micro-batches."""
        self._step.micro_steps += micro_batches - 1
        self._step.set_gradient_accumulation_boundary(True)
        with Answers():
            self._step.take()
        self._step.set_gradient_accumulation_boundary(None)


class _PlannedLink(Link):
    """A link to a rank that is not there, which takes each message when the simulated schedule says so."""

    def __init__(self, whole: Communicator, source: int, target: int, what: Any) -> None:
        super().__init__(whole, source, target, what)
        self._forward = what == "activations"
        self._sending: dict[str, float] = {}
        self._received: dict[str, float] = {}

    def follow(self, schedule: Schedule, times: Times) -> None:
        """Take over the times of a schedule."""
        ops = (Op.SEND_FORWARD, Op.RECV_FORWARD) if self._forward else (Op.SEND_BACKWARD, Op.RECV_BACKWARD)
        sent_from = -1 if self._forward else 1  # stage of the sender, from that of the receiver
        for spans in simulate(schedule, times).spans:
            for _, action, start, end in spans:
                if action.op is ops[0]:
                    self._sending[f"{(action.stage, action.micro_batch)}"] = start
                elif action.op is ops[1]:
                    self._received[f"{(action.stage + sent_from, action.micro_batch)}"] = end

    @override
    def _is_received(self, label: str, handles: Sequence[Handle], now: str) -> bool:
        return self._received[label] <= self._sending[now]


class _Work(StagePasses):
    """Work of a rank's stages in a dry run."""

    def __init__(
        self, engine: PipelineDryRun, batch: Any, loss: Callable[[Any], torch.Tensor] | None, micro_batches: int
    ) -> None:
        super().__init__(engine.sharded, engine._step, engine._place.stages)
        self._engine, self._loss, self._micro_batches = engine, loss, micro_batches
        self._inputs, self._labels = batch

    @override
    def around(self) -> contextlib.AbstractContextManager[Any]:
        return Answers()

    def inputs(self, micro_batch: int) -> Any:
        """Return the inputs of the first stage."""
        return self._inputs

    def forward(self, stage: int, micro_batch: int, value: Any) -> Any:
        """Return the outputs of a stage; of the last one the loss."""
        engine = self._engine
        self.select(stage, micro_batch)
        with engine.phase(Op.FORWARD.value, stage):
            output = engine.call((value,), {"stage": stage})
            if stage < len(engine._place.rank_of) - 1:
                return output
            if self._loss is not None:
                return self._loss(output)
            loss_fn: Any = engine.sharded.module.loss_fn
            return output if loss_fn is None else loss_fn(output, self._labels)

    @override
    def backward(self, key: tuple[int, int], *given: Any, split: bool, last: bool) -> None:
        with self._engine.phase((Op.BACKWARD_INPUT if split else Op.BACKWARD).value, key[0]):
            super().backward(key, *given, split=split, last=last)

    @override
    def weight_gradients(self, key: tuple[int, int], *given: Any, last: bool) -> None:
        with self._engine.phase(Op.BACKWARD_WEIGHT.value, key[0]):
            super().weight_gradients(key, *given, last=last)

    def step(self) -> None:
        """Step with the gradients of the batch."""
        with self._engine.phase(Op.STEP.value, -1):
            self._engine.update(self._micro_batches)


class StageForms:
    """Forms of the values between stages, from a forward pass on fake tensors through all stages.

    Args:
        module: the model, perhaps with some stages only: the others are built on the meta device.
        stages: number of stages.

    Attributes:
        flops: FLOPs of the last pass, by stage; empty before.
        sizes: bytes of the outputs of each stage except the last one, of the last pass.
    """

    def __init__(self, module: nn.Module, stages: int) -> None:
        assert isinstance(module, PipelineModule)
        self._module, self._stages = module, stages
        self._found: dict[str, dict[int, Form]] = {}
        self.flops: list[int] = []
        self.sizes: dict[int, int] = {}

    @property
    def times(self) -> Times:
        """Times in proportion to FLOPs, if these are known: each gradient takes as long as the forward pass."""
        if not any(self.flops):
            return Times()
        again = [count * (2 if self._module.recompute.interval else 1) for count in self.flops]
        return Times(forward=self.flops, input_gradient=again, weight_gradient=self.flops)

    def of(self, inputs: Any, config: Config, world: int, device: torch.device, *, masks: bool) -> dict[int, Form]:
        """Return the forms of the outputs of all stages, except those of the last one, for some inputs."""
        key = form_of(inputs, "the batch")[0].encoded().decode()
        if key not in self._found:
            try:
                whole = with_stages(self._module, range(self._stages), self._stages)
            except UsageError as error:
                raise UsageError(f"{error}. Plan all stages in one process (shardwise plan --pp)") from error
            engine = DryRunEngine(whole, None, [], config, world=world, device=device)
            self._found[key] = self._run(engine, inputs, masks=masks)
        return self._found[key]

    def _run(self, engine: DryRunEngine, inputs: Any, *, masks: bool) -> dict[int, Form]:
        forms, flops = {}, []
        with engine.computing(masks=masks), quiet():
            value = engine.fake(inputs)
            for stage in range(self._stages):
                engine.sharded.model_pass.select(stage)
                count = FlopCount(engine.sharded.module)
                with count.counting():
                    output = engine.call((value,), {"stage": stage})
                flops.append(sum(count.flops.values()))
                if stage < self._stages - 1:
                    forms[stage], tensors = form_of(output, f"stage {stage} of {self._stages}")
                    self.sizes[stage] = sum(tensor.nbytes for tensor in tensors)
                    value = forms[stage].value([tensor.detach() for tensor in tensors])
        self.flops = flops
        return forms


def with_stages(module: PipelineModule, stages: Iterable[int], count: int) -> PipelineModule:
    """Return a copy of a model that has some of `count` stages and shares the tensors of the model.

    Layers that the model has dropped are built on the meta device.
    """
    known = module.boundaries
    boundaries = known if known is not None and len(known) == count + 1 else module.partition(count)
    tensors = [tensor for stage in module.built_stages for tensor in (*stage.parameters(), *stage.buffers())]
    copied: PipelineModule = copy.deepcopy(module, {id(tensor): tensor for tensor in tensors})
    copied.partition_method, copied.assumed = boundaries, False
    with torch.device("meta"):
        copied.build(stages, count)
    return copied


def resized(place: PipelineRanks, size: int) -> PipelineRanks:
    """Return the same position in a pipeline with `size` ranks at each position."""
    positions = len(place.ranks)
    if len(place.stage_ranks[0]) == size:
        return place
    return PipelineRanks.of(place.position * size, size * positions, positions, place.rank_of)


def planned_schedule(name: str, place: PipelineRanks, micro_batches: int) -> Schedule:
    """Return a schedule of few micro-batches in which ranks hold as many activations as in the schedule of all."""
    positions, chunks = len(place.ranks), len(place.rank_of) // len(place.ranks)

    def made(count: int) -> Schedule:
        return make_schedule(name, positions, count, chunks, place.placement)

    found, wanted = made(micro_batches), held(made(micro_batches))
    for count in range(micro_batches % positions, micro_batches, positions):
        if count > 2 and held(fewer := made(count)) == wanted:
            found = fewer
            break
    return with_communication(found)


def held(schedule: Schedule) -> list[tuple[set[tuple[int, ...]], list[int]]]:
    """Return what each rank holds at most, and how many activations in the last backward pass of each stage.

    At most: all largest combinations of activations, and of inputs and gradients of delayed weight gradients, by stage.
    """
    found = []
    for actions in schedule.actions:
        stages = sorted({action.stage for action in actions if action.op is Op.FORWARD})
        now = [0] * (2 * len(stages))
        seen: set[tuple[int, ...]] = set()
        at_last: dict[int, int] = {}
        for action in actions:
            if action.op not in COMPUTATIONS:
                continue
            place = stages.index(action.stage)
            if action.op in WEIGHT_GRADIENT:
                at_last[action.stage] = sum(now)
            now[place] += (action.op is Op.FORWARD) - (action.op in INPUT_GRADIENT)
            now[len(stages) + place] += (action.op is Op.BACKWARD_INPUT) - (action.op is Op.BACKWARD_WEIGHT)
            seen.add(tuple(now))
        most = {one for one in seen if not any(one != other and _covers(other, one) for other in seen)}
        found.append((most, list(at_last.values())))
    return found


def _covers(one: Sequence[int], other: Sequence[int]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the log of the runtime, because the caller reports errors."""
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
