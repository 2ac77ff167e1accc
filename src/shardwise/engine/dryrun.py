"""Dry run: one accumulation window of an engine on fake tensors and a fake communicator gives the memory plan.

The first window allocates the optimizer state and records the order of units; the second one counts.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from shardwise.comm.domain import Domain
from shardwise.comm.fake import FakeCommunicator
from shardwise.comm.ledger import Watcher
from shardwise.engine.batch import Batches
from shardwise.engine.mesh import RankGrid, domain_of, domains_of, reduction, replicas_of
from shardwise.engine.modules import chunks_of, leaves_of, modules_with, place_buffers
from shardwise.engine.observers import Activations
from shardwise.engine.parallel import SharedTensors, divide_experts
from shardwise.engine.reserved import CommunicatorMemory
from shardwise.engine.scaling import cast_floats, prescale_of, scale_gradients_of, scales_loss
from shardwise.engine.signals import SignalWatch
from shardwise.engine.step import TrainStep
from shardwise.engine.stepping import stepping_of
from shardwise.memory import Accountant, Category, Journal, Moved, Tier, fake_copy, fake_optimizer, track_activations
from shardwise.memory.dryrun import Answers, arguments_of, fake_values, loss_of, undisturbed, without_masks
from shardwise.offload import Disks, homes_of
from shardwise.optim import is_elementwise_state
from shardwise.parallel import sequence
from shardwise.parallel.sequence import SequenceGroup
from shardwise.parallel.tensor.check import frozen
from shardwise.precision.autocast import autocast, autocast_dtype, wire_dtypes
from shardwise.precision.dtypes import policy_from_config
from shardwise.precision.float8 import train_in_float8
from shardwise.precision.scaler import LossScaler
from shardwise.registry import copy_part
from shardwise.zero.memory import floor
from shardwise.zero.model import ShardedModel, Sharding
from shardwise.zero.units.plan import Plan

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.comm.domain import Arrangement
    from shardwise.config import Config
    from shardwise.zero.passes.reduce import CopiesElsewhere


class Recorder(Watcher, Protocol):
    """Records what a dry run does, by phases: "forward", "backward", "step"."""

    def begin(self) -> None:
        """Forget what has been recorded."""

    def phase(self, name: str, stage: int | None = None) -> AbstractContextManager[None]:
        """Record the block as a phase of a pass; `stage`: of a pipeline, as a pass of its own."""

    def watching(self, model: nn.Module, units: Mapping[nn.Module, str]) -> AbstractContextManager[None]:
        """Record a model's calls inside the block; `units`: names of the units that modules need."""


MOST_PASSES = 3
"""Micro-batches of a window that are run: the first, which allocates the accumulators; one in the middle, like every
further one; and the last, which reduces if that has not been done."""


@dataclass(frozen=True)
class MemoryPlan:
    """Planned bytes of one rank in a window, as plain JSON values.

    `peaks`: of each category, activations only with a batch. `elsewhere`: peaks of each tier except the device.
    `total`: peak of the sum on the device; `near`: of device and host together. `floor`: minimum of each category;
    `least`: sum of minima at the time of the peak. `moved`: bytes "read" from and "written" to each tier in use.
    `files`: by directory on a disk.
    """

    peaks: dict[str, int]
    total: int
    floor: dict[str, int]
    least: int
    elsewhere: dict[str, int]
    near: int
    moved: dict[str, dict[str, int]]
    files: dict[str, int]

    def joined(self, other: MemoryPlan) -> MemoryPlan:
        """Return the plan of a training run with windows of both plans."""
        return replace(
            other,
            peaks=_larger(self.peaks, other.peaks),
            total=max(self.total, other.total),
            least=max(self.least, other.least),
            elsewhere=_larger(self.elsewhere, other.elsewhere),
            near=max(self.near, other.near),
            files=_larger(self.files, other.files),
        )


def _larger(sizes: dict[str, int], others: dict[str, int]) -> dict[str, int]:
    return {key: max(size, others.get(key, 0)) for key, size in sizes.items()}


class DryRunEngine:
    """A model's engine on fake tensors; copies module and optimizer without values and state.

    `optimizer` None: the model is only evaluated. `groups`: parameters in each of the optimizer's groups. `like`:
    communicator of a running engine with as many ranks; None: ranks may span machines. `journal`: of the accountant.
    """

    shows_loss = False
    """Whether each step sums the loss over ranks."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        groups: Sequence[Sequence[nn.Parameter]],
        config: Config,
        *,
        world: int,
        device: torch.device,
        like: Communicator | None = None,
        grid: Arrangement | None = None,
        journal: Journal | None = None,
    ) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        self._config, self._device, self._module = config, device, module
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.accountant = accountant = Accountant(journal)
        twin = fake_copy(module, self._mode)
        pairs = list(zip(module.parameters(), twin.parameters(), strict=True))
        for parameter, copied in pairs:
            copy_part(parameter, copied)
        copies = {id(parameter): copied for parameter, copied in pairs}
        own = None
        if optimizer is not None:
            members = [[copies[id(parameter)] for parameter in group] for group in groups]
            options = zip(optimizer.param_groups, members, strict=True)
            own = fake_optimizer(optimizer, [{**group, "params": params} for group, params in options])
        with self._computing():
            self._job, comm, elsewhere = self._ranks(twin, world, like)
            replicas = replicas_of(config, self._job, grid)
            together = self._job
            if replicas is not None:
                together = comm = replicas.own
                domain = Domain(comm)
            else:
                domain = domain_of(config, comm) if grid is None else Domain(comm, grid)
            lines = RankGrid.of(world, tensor=config.tensor_parallel.size, sequence=config.sequence_parallel_size)
            tensors = None
            if config.float8.enabled:  # in a plan without an engine the model has its own layers
                train_in_float8(twin, config.float8, None, contextlib.ExitStack())
            if config.tensor_parallel.size > 1:
                tensors = SharedTensors(comm, lines.tensor, twin, config)
            divide_experts(twin, config, comm, lines)
            policy = policy_from_config(config)
            plan = Plan.of(config.zero_optimization, domain, float8=config.float8)
            self._disks = Disks.of(config, comm.rank, imagined=True, accountant=accountant)
            place_buffers(twin, device, policy.buffer_dtype, config.data_types.keep_in_fp32_modules, accountant)
            self.sharded = ShardedModel(
                twin,
                own,
                Sharding(
                    stepping=stepping_of(own),
                    is_elementwise=is_elementwise_state,
                    plan=plan,
                    policy=policy,
                    domains=domains_of(twin, domain),
                    device=device,
                    accountant=accountant,
                    prescale=prescale_of(config, domain.world),
                    compressor=reduction(config, comm, lambda tensor: accountant.hold(Category.BUFFERS, tensor)),
                    leaves=[*leaves_of(twin, config.zero_optimization.leaf_module), *modules_with(twin, elsewhere)],
                    homes=homes_of(plan.where, device, self._disks),
                    wires=wire_dtypes(twin, config),
                    norm_group=together,
                    copies=elsewhere,
                    chunks=self._chunks(twin),
                    replicas=None if replicas is None else (replicas, config.local_sgd),
                ),
            )
            self._communicators = CommunicatorMemory(accountant, device, self._job.world, planned=True)
            data = self._job if replicas is not None else comm.part(lines.data, "data_parallel")
            self._sequences = SequenceGroup(comm.part(lines.sequence, sequence.NAME), data)
            self._batches = Batches(config, data, device)
            self._activations = Activations(
                config, twin, device, accountant, None if tensors is None else tensors.group
            )
            scaler = LossScaler.from_config(config.fp16) if scales_loss(config) else None
            self._step = TrainStep(
                self.sharded, config, together, self._batches, own, None, scaler, SignalWatch(), self.shows_loss
            )

    def _ranks(
        self, twin: nn.Module, world: int, like: Communicator | None
    ) -> tuple[Communicator, Communicator, dict[int, CopiesElsewhere]]:
        """Return communicators of the job and of the pass group, and parameters that other pass groups have, too."""
        comm = FakeCommunicator(world, self._device, rank=like.rank if like is not None else 0, like=like)
        return comm, comm, {}

    def _chunks(self, twin: nn.Module) -> Sequence[nn.Module]:
        """Return the parts of the module that run in passes of their own."""
        return chunks_of(twin)

    def run(
        self,
        batch: Any,
        accumulation: int,
        loss: Callable[[Any], torch.Tensor] | None = None,
        *,
        masks: bool = False,
        recorder: Recorder | None = None,
    ) -> MemoryPlan:
        """Return the memory plan of a window; to be called once. Raises any error of the module on fake tensors.

        Args:
            batch: of one pass, real tensors or shapes, not counted. None: without activations; modules use parameters
                only.
            loss: returns a scalar from the module's output; None: `shardwise.memory.dryrun.loss_of`.
            masks: the batch may contain attention masks (`shardwise.memory.dryrun.has_masks`).
            recorder: records the last window.
        """
        self._recorder: Recorder | None = None
        given = None if batch is None else self.fake(batch)
        found = None
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._computing())
            stack.enter_context(self._as_engine())
            stack.enter_context(track_activations(self.accountant))
            if not masks:
                stack.enter_context(without_masks())  # after the tracking, because the innermost mode answers
            if recorder is not None:
                units = {module: unit.name for unit in self.sharded.units for module in unit.modules}
                stack.enter_context(recorder.watching(self.sharded.module, units))
            if batch is None:
                stack.enter_context(_using_parameters(self.sharded))
                stack.enter_context(self.accountant.owning(None))
            for begins in (lambda: True, self._begin_losing):
                if not begins():
                    break
                self._window(given, accumulation, loss)
                if recorder is None:  # else the window begins with waits for the gathers of the one before
                    self.sharded.finish_gathers()
                self._communicators.reserve(self._job)
                self.accountant.reset_peak()
                if recorder is not None:
                    self._recorder = self._job.ledger.watcher = recorder
                for _ in range(1 if found is None else 2):  # some lossy steps alternate
                    if recorder is not None:
                        recorder.begin()
                    moved = self._window(given, accumulation, loss)
                plan = self._read(accumulation, moved)
                found = plan if found is None else found.joined(plan)
        assert found is not None
        return found

    def _begin_losing(self) -> bool:
        """Skip the exact warm-up steps of lossy reductions; return whether there were any."""
        reducer, update = self.sharded.reducer, self.sharded.update
        if reducer is not None and reducer.compressor is not None:
            reducer.compressor.steps = max(reducer.compressor.steps, reducer.compressor.start)
            return True
        return update is not None and update.begin_averaging()

    @contextlib.contextmanager
    def computing(self, *, masks: bool) -> Iterator[None]:
        """Run the module's code on fake tensors inside the block."""
        with self._computing(), self._as_engine(), contextlib.nullcontext() if masks else without_masks():
            yield

    def fake(self, values: Any) -> Any:
        """Return nested values with fake tensors."""
        return fake_values(values, self._mode, self._device)

    @contextlib.contextmanager
    def _as_engine(self) -> Iterator[None]:
        """Let modules use the groups of the dry run, and leave those of running engines as they are."""
        with frozen(self._module), sequence.imagined(self._sequences):
            yield

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        with undisturbed(), self._mode, warnings.catch_warnings(), torch.enable_grad():
            # The engine compares data pointers, which fake tensors do not have.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield

    def _window(self, batch: Any, accumulation: int, loss: Callable[[Any], torch.Tensor] | None) -> dict[Tier, Moved]:
        self._batches.steps = passes = min(accumulation, MOST_PASSES)
        marks = [self._moved()]
        for _ in range(passes):
            with self.phase("forward"):
                scalar = self._forward(batch, loss)
            if self.sharded.update is not None:
                with Answers():
                    with self.phase("backward"):
                        with self._step.passing(scalar) as roots:
                            self.sharded.backward(roots)
                        del roots
                    with self.phase("step"):
                        self._step.take()
            del scalar
            marks.append(self._moved())
        whole = {tier: marks[-1][tier] - marks[0][tier] for tier in Tier}
        if accumulation > MOST_PASSES:  # passes that are not run count as the second
            for tier in Tier:
                whole[tier] += (marks[2][tier] - marks[1][tier]).times(accumulation - passes)
        return whole

    def phase(self, name: str, *stage: int) -> AbstractContextManager[None]:
        """Record the block, if there is a recorder."""
        return contextlib.nullcontext() if self._recorder is None else self._recorder.phase(name, *stage)

    def _moved(self) -> dict[Tier, Moved]:
        return {tier: self.accountant.moved(tier) for tier in Tier}

    def _forward(self, batch: Any, loss: Callable[[Any], torch.Tensor] | None) -> torch.Tensor:
        if batch is None:
            return self.sharded.module(torch.zeros(1, device=self._device, requires_grad=True)).sum()
        output = self.call(*arguments_of(batch))
        return loss(output) if loss is not None else loss_of(output)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module as the engine's forward pass."""
        config = self._config
        if config.fp16.enabled and config.fp16.auto_cast:
            args, kwargs = cast_floats((args, kwargs), torch.float16)
        with autocast(self._device, autocast_dtype(config)), self._activations.around((args, kwargs)):
            output = self.sharded.module(*args, **kwargs)
        if self._step.loss_scaler is not None:
            output = scale_gradients_of(output, self._step.output_scale)
        return output

    def _read(self, accumulation: int, moved: dict[Tier, Moved]) -> MemoryPlan:
        accountant = self.accountant
        peaks, highest = accountant.peak, accountant.at_peak
        least = floor(self.sharded, accumulation, peaks, accountant.live)
        total = sum(min(size, highest[category]) for category, size in least.items())
        return MemoryPlan(
            peaks={category.value: size for category, size in peaks.items()},
            total=accountant.peak_total,
            floor={category.value: size for category, size in least.items()},
            least=total,
            elsewhere={tier.value: accountant.peak_total_in(tier) for tier in (Tier.HOST, Tier.DISK)},
            near=accountant.peak_near,
            moved={tier.value: moved[tier]._asdict() for tier in (Tier.HOST, Tier.DISK) if any(moved[tier])},
            files={str(directory): size for directory, size in self._disks.sizes.items()},
        )


class _Use(torch.autograd.Function):
    """Uses parameters and allocates their gradients, without computing values."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.parameters = parameters
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, *(p.new_empty(p.shape) if p.requires_grad else None for p in ctx.parameters)


@contextlib.contextmanager
def _using_parameters(sharded: ShardedModel) -> Iterator[None]:
    root = sharded.module
    used: dict[nn.Module, list[nn.Parameter]] = {root: []}
    homes: dict[nn.Module, list[nn.Parameter]] = {module: [] for module in root.modules()}
    for unit in sharded.units:
        for module in unit.modules:
            homes[module] += unit.parameters
    for module, parameters in homes.items():
        if parameters:
            inside = {id(parameter) for parameter in module.parameters()}
            used[module] = [parameter for parameter in parameters if id(parameter) in inside]

    def use(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(value: torch.Tensor) -> torch.Tensor:
            if used[module]:
                value = _Use.apply(value, *used[module])
            for other in used if module is root else ():
                if other is not root:
                    value = other(value)
            return value

        return forward

    try:
        for module in used:
            module.forward = use(module)
        yield
    finally:
        for module in used:
            del module.forward
