"""Engine of a pipeline: a call of `train_batch` runs all micro-batches of a step through the stages of all ranks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from shardwise.comm.topology import PipeModelDataParallelTopology, ProcessTopology
from shardwise.engine.engine import Engine
from shardwise.engine.grid import PipelineParallelGrid
from shardwise.engine.refresh import Refreshed
from shardwise.engine.stage_checks import SharedBuffers, StageCall, check_leaves, check_loss, layer_of
from shardwise.engine.stage_passes import StagePasses
from shardwise.engine.stages import WEIGHT_GRADIENTS, PipelineRanks
from shardwise.errors import PipelineError, UsageError
from shardwise.pipeline.actions import Schedule
from shardwise.pipeline.idle import IdleTimes, recording
from shardwise.pipeline.lowering import with_communication, with_sharding
from shardwise.pipeline.messages import form_of
from shardwise.pipeline.module import PipelineModule
from shardwise.pipeline.runtime import Runtime
from shardwise.pipeline.schedules import make_schedule
from shardwise.trees import map_tensors
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator


class PipelineEngine(Engine):
    """Engine of a `PipelineModule`; `shardwise.initialize` returns it.

    Every rank of a pipeline calls `train_batch` and `eval_batch`, and gets the same loss.
    """

    pipeline_parallelism = True

    def __init__(self, *, place: PipelineRanks, pipe: Communicator, schedule: str, **parts: Any) -> None:
        super().__init__(**parts)
        self._place, self._pipe, self._schedule = place, pipe, schedule
        self._model: PipelineModule = self.module
        settings = self._resolution.config.pipeline
        self._dynamic = settings.dynamic_shape or self._model.dynamic_shape
        self._unsharded_for = settings.unsharded_for
        self._runtime = Runtime(self.job, place.ranks, place.position, place.rank_of, self._stage_name)
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._iterator: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None
        self._last_form = ""
        self._broken_off = False
        self._checked_stages: set[int] = set()
        self._shared_buffers = SharedBuffers(self._model, place.rank_of)
        if self.training_dataloader is not None:
            self.set_dataloader(self.training_dataloader)

    # -- data ----------------------------------------------------------------------------------------------------------

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Take micro-batches from a data loader, again from its begin after its end."""
        from shardwise.data import RepeatingLoader

        self._iterator = iter(RepeatingLoader(loader)) if self._reads_data else None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Take micro-batches from an iterator; on ranks without the first or last stage it may be None."""
        self._iterator = iterator if self._reads_data else None

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Set a function that makes (inputs, labels) of each item of the data iterator."""
        self._batch_fn = fn

    @property
    def _reads_data(self) -> bool:
        return self.is_first_stage() or self.is_last_stage()

    # -- places --------------------------------------------------------------------------------------------------------

    def is_first_stage(self) -> bool:
        """Return True if this rank has the first stage."""
        return self._place.rank_of[0] == self._place.position

    def is_last_stage(self) -> bool:
        """Return True if this rank has the last stage, where losses are computed."""
        return self._place.rank_of[-1] == self._place.position

    def get_pipeline_parallel_rank(self) -> int:
        """Return this rank's position in its pipeline."""
        return self._place.position

    @property
    def num_stages(self) -> int:
        """Number of ranks of the pipeline."""
        return len(self._place.ranks)

    @property
    def stage_id(self) -> int:
        """This rank's position in its pipeline."""
        return self._place.position

    @functools.cached_property
    def grid(self) -> PipelineParallelGrid:
        """Ranks and process groups of the pipeline, data-parallel and tensor-parallel dimensions.

        A group is created at its first use, by its ranks.
        """
        tensor = 1 if self._tensors is None else self._tensors.group.size
        sequence, stages, size = self._sequences.group.size, self.num_stages, self.data.world
        topology: ProcessTopology = PipeModelDataParallelTopology(stages, tensor, size)
        if sequence > 1:
            topology = ProcessTopology(["pipe", "data", "sequence", "model"], [stages, size, sequence, tensor])

        def make(ranks: Sequence[int]) -> Any:
            return dist.new_group([self.job.members[rank] for rank in ranks], use_local_synchronization=True)

        return PipelineParallelGrid(topology, rank=self.job.rank, make_group=make)

    def _stage_name(self, stage: int) -> str:
        return f"stage {stage} of {len(self._place.rank_of)} ({self._model.layers_of(stage)})"

    # -- batches -------------------------------------------------------------------------------------------------------

    def train_batch(self, data_iter: Iterator[Any] | None = None, num_micro_batches: int | None = None) -> Any:
        """Run micro-batches forward and backward, and the update if they complete a step (all ranks call).

        A model in evaluation mode returns to training mode.

        Args:
            data_iter: yields (inputs, labels) for each micro-batch, on ranks with the first or last stage; default: the
                data loader or iterator that has been set.
            num_micro_batches: default: all that the step still needs, `gradient_accumulation_steps` at its begin. A
                call with fewer accumulates gradients.

        Returns:
            The mean loss of all micro-batches of the step and data-parallel ranks, a 0-D tensor, the same on all ranks;
            None before the step is complete.

        Raises:
            PipelineError: the data iterators of some ranks have ended, or an error has ended an earlier batch.
        """
        self._runtime.check("train_batch()")
        if not self._model.training:
            self.train()
        if self._broken_off:  # an error has ended the last batch, whose gradients are of some micro-batches
            self.sharded.hooks.settle()
            self._step.begin_again()
        left = self._batches.steps - (self._step.micro_steps - self._step.window_began)
        count = left if num_micro_batches is None else num_micro_batches
        if not 1 <= count <= left:
            raise PipelineError(
                f"train_batch(num_micro_batches={count}): the step needs {left} more of {self._batches.steps} "
                f"micro-batches (gradient_accumulation_steps). Pass 1 to {left}"
            )
        schedule = self._made(self._schedule, count)
        with self.accountant.owning(None):  # because memory plans leave the inputs out
            batches = self._fetch(data_iter, count, "train_batch()", trains=True)
        self._shared_buffers.begin()
        self._step.begin_batch(single=self._batches.steps == 1 and not schedule.has(WEIGHT_GRADIENTS))
        completes = count == left
        with torch.enable_grad():
            work = _Work(self, batches, count, trains=True, computes_loss=True, completes=completes)
            fixed = self._agree(batches, count, "train_batch()")
            self._broken_off = True
            self._runtime.run(schedule, work, fixed=fixed)
            self._broken_off = False
        if not completes:
            return None
        report = self.last_step
        assert report is not None and report.loss is not None
        return report.loss.float()

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None = None,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """Run micro-batches forward without gradients; training state is not changed (all ranks call).

        Args:
            data_iter: as of `train_batch`.
            return_logits: return (loss, outputs of the last stage by micro-batch; None on ranks without it).
            compute_loss: False: return the outputs instead of losses.
            reduce_output: "avg": mean over micro-batches and data-parallel ranks; None: the losses by micro-batch.
            bcast_loss: give the loss to all ranks; without, ranks without the last stage get None.
            num_micro_batches: default: as many as in training.
        """
        self._runtime.check("eval_batch()")
        if reduce_output not in ("avg", None):
            raise UsageError(f"eval_batch(reduce_output={reduce_output!r}): expected 'avg' or None")
        count = self._batches.steps if num_micro_batches is None else num_micro_batches
        schedule = self._made("inference", count)
        batches = self._fetch(data_iter, count, "eval_batch()", trains=False)
        modes = {
            module: module.training for part in (self._model, *self._model.built_stages) for module in part.modules()
        }
        self.module.eval()
        try:
            with torch.no_grad():
                work = _Work(self, batches, count, trains=False, computes_loss=compute_loss, keeps=return_logits)
                found = self._runtime.run(schedule, work, fixed=self._agree(batches, count, "eval_batch()"))
        finally:
            for module, mode in modes.items():
                module.training = mode
        losses, kept = ([by[number] for number in sorted(by)] for by in (found, work.outputs))
        outputs = kept if return_logits else losses
        if not compute_loss:
            return outputs or None
        average = self._mean_loss if reduce_output == "avg" else self._all_losses
        reduced = average(losses, count)
        loss = reduced if bcast_loss or self.is_last_stage() else None
        return (loss, outputs or None) if return_logits else loss

    def inference_batch(self, data_iter: Iterator[Any] | None = None, num_micro_batches: int | None = None) -> Any:
        """Return the outputs of the last stage by micro-batch, on ranks that have it; None on others."""
        return self.eval_batch(data_iter, compute_loss=False, num_micro_batches=num_micro_batches)

    def record_idle(self) -> contextlib.AbstractContextManager[IdleTimes]:
        """Return a context that measures each computation of all ranks of the pipeline (all ranks call).

        Example: `with engine.record_idle() as idle: engine.train_batch()`, then `print(idle)`, `idle.svg("idle.svg")`.
        """
        return recording(self._pipe)

    def _made(self, name: str, count: int) -> Any:
        if (name, count) not in self._schedules:
            chunks = len(self._place.rank_of) // len(self._place.ranks)
            made = make_schedule(name, len(self._place.ranks), count, chunks, self._place.placement)
            self._schedules[name, count] = with_sharding(with_communication(made), self._unsharded_for)
        return self._schedules[name, count]

    def _fetch(self, data_iter: Iterator[Any] | None, count: int, call: str, *, trains: bool) -> list[Any]:
        """Return (inputs, labels) of all micro-batches, fewer at the end of the data; [] on ranks that read none.

        What this rank computes with is on its device.
        """
        if not self._reads_data:
            return []
        iterator = data_iter if data_iter is not None else self._iterator
        if iterator is None:
            return []
        found = []
        for _ in range(count):
            try:
                item = next(iterator)
            except StopIteration:
                break
            batch = item if self._batch_fn is None else self._batch_fn(item)
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise PipelineError(
                    f"{call}: the data iterator has given a {type(batch).__name__}; expected a pair (inputs, labels). "
                    "Set a function that makes pairs with engine.set_batch_fn()"
                )
            inputs, labels = self._curricula.truncated(batch) if trains else batch
            inputs = self._on_device(inputs) if self.is_first_stage() else inputs
            found.append((inputs, self._on_device(labels) if self.is_last_stage() else labels))
        return found

    def _on_device(self, values: Any) -> Any:
        return map_tensors(values, lambda tensor: tensor.to(self.device, non_blocking=True))

    def _agree(self, batches: Sequence[Any], count: int, call: str) -> bool:
        """Check on all ranks of the pipeline that all data is there; return True if messages have the forms of before.

        One small exchange for a batch. They have, if all micro-batches of this batch and of the one before have inputs
        of one form, and both batches train, or both evaluate.
        """
        form = ""
        if self.is_first_stage() and not self._dynamic:
            texts = {f"{form_of(inputs, 'the data iterator')[0]}" for inputs, _ in batches}
            form = f"{torch.is_grad_enabled()} {texts.pop()}" if len(texts) == 1 else ""
        same = bool(form) and form == self._last_form
        own = [len(batches) if self._reads_data else -1, same, f"{call} of {count} micro-batches"]
        gathered = self._pipe.exchange(own, "pipeline_batch")
        calls = list(dict.fromkeys(entry[2] for entry in gathered))
        if len(calls) > 1:
            first = next(place for place, entry in enumerate(gathered) if entry[2] != calls[0])
            raise PipelineError(
                f"rank {self._place.ranks[0]} is in {calls[0]}, and rank {self._place.ranks[first]} in "
                f"{gathered[first][2]}. All ranks of a pipeline make the same calls"
            )
        counts = [(self._place.ranks[place], had) for place, (had, *_) in enumerate(gathered)]
        missing = [(rank, had) for rank, had in counts if 0 <= had < max(1, count)]
        if missing:
            shown = ", ".join(f"rank {rank} has {had}" for rank, had in missing)
            raise PipelineError(
                f"{call}: {count} micro-batches are needed, and {shown}. Every rank with the first or the last stage "
                "needs a data iterator of the same length: initialize(training_data=...), engine.set_dataloader() or "
                "data_iter="
            )
        self._last_form = form  # of a batch that runs: receivers keep the forms of a batch before a refused one
        return any(entry[1] for entry in gathered)

    def _loss(self, output: Any, labels: Any) -> Any:
        return output if self._model.loss_fn is None else self._model.loss_fn(output, labels)

    def _mean_loss(self, losses: Sequence[Any], count: int) -> torch.Tensor:
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for loss in losses:
            value, weight = loss if isinstance(loss, tuple) else (loss, 1.0)
            value = value.double().reshape(())
            if isinstance(weight, torch.Tensor):
                weight = weight.to(value).reshape(())
                value = torch.where(weight == 0.0, 0.0, value)  # the mean over no tokens may be NaN
            elif not weight:
                continue
            total[0] += value * weight
            total[1] += weight
        self.job.all_reduce(total, "eval_loss").wait()
        return (total[0] / total[1]).float()

    def _all_losses(self, losses: Sequence[Any], count: int) -> torch.Tensor:
        values = torch.zeros(count, dtype=torch.float64, device=self.device)
        for number, loss in enumerate(losses):
            values[number] = (loss[0] if isinstance(loss, tuple) else loss).double()
        self._pipe.all_reduce(values, "eval_loss").wait()
        return values.float()

    @override
    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
        **options: Any,
    ) -> None:
        """Compile the stages of this rank with `torch.compile`; arguments and errors as of `Engine.compile`."""
        stages = () if self.is_compiled else self._model.built_stages
        super().compile(backend, compile_kwargs, schedule, compiled_autograd_enabled, **options)
        for stage in stages:
            stage.compile(backend=backend, **{**(compile_kwargs or {}), **options})

    # -- calls that a pipeline does not have ---------------------------------------------------------------------------

    @override
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Raise PipelineError: `train_batch` and `eval_batch` run the model."""
        raise PipelineError(
            "engine(...): a pipeline runs whole batches. Call engine.train_batch() or engine.eval_batch()"
        )

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise PipelineError: `train_batch` differentiates."""
        raise PipelineError("engine.backward(): a pipeline runs whole batches. Call engine.train_batch()")

    @override
    def step(self, *args: Any, **kwargs: Any) -> None:
        """Raise PipelineError: `train_batch` steps."""
        raise PipelineError("engine.step(): a pipeline runs whole batches. Call engine.train_batch()")

    @override
    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Raise PipelineError: `train_batch` counts micro-batches."""
        raise PipelineError(
            "engine.set_gradient_accumulation_boundary(): a pipeline counts micro-batches. Accumulate gradients of "
            "several calls with engine.train_batch(num_micro_batches=...)"
        )

    @override
    def no_sync(self) -> Any:
        """Raise PipelineError: `train_batch` reduces gradients once in a step."""
        raise PipelineError(
            "engine.no_sync(): a pipeline reduces gradients in the last backward pass of a step. Accumulate gradients "
            "of several calls with engine.train_batch(num_micro_batches=...)"
        )

    @override
    def refresh(self, *args: Any, **kwargs: Any) -> Refreshed:
        """Raise PipelineError if stages are on several ranks, whose models differ."""
        if self.num_stages == 1:
            return super().refresh(*args, **kwargs)
        raise PipelineError(
            "engine.refresh(): stages of a pipeline have different parameters, and units can be rebuilt only if all "
            "ranks change the same. Save a checkpoint, change the model, and call initialize() and load_checkpoint()"
        )

    @override
    def destroy(self) -> None:
        self._runtime.close()
        super().destroy()

    # -- computations of a stage ---------------------------------------------------------------------------------------

    def run_stage(self, stage: int, value: Any) -> Any:
        """Return the outputs of a stage of this rank."""
        return super().forward(value, stage=stage)

    def update(self) -> None:
        """Step with the gradients of the accumulation window."""
        self._step.set_gradient_accumulation_boundary(True)
        try:
            super().step()
        finally:
            self._step.set_gradient_accumulation_boundary(None)

    @contextlib.contextmanager
    def around_backward(self) -> Iterator[None]:
        """Report errors and times of a backward pass."""
        with (
            self._memory.reporting_oom("engine.train_batch()", graph=True),
            self.sharded.noting_disk_errors(),
            self._observers.during("backward"),
        ):
            yield

    @override
    def _compare_sequences(self, inputs: Any, kwargs: Any) -> None:
        stage = kwargs["stage"]
        call = StageCall(self._model.stage(stage), inputs[0])

        def run(*tensors: Any) -> Any:
            return self._run_plainly(call.value(tensors), stage=stage)

        self._sequences.compare(call, run, call.tensors, {}, stage=stage)

    def check_stage(self, stage: int, value: Any, output: Any) -> None:
        """Check a stage's forward pass: the parameters that the output depends on, once, and shared buffers."""
        if stage not in self._checked_stages:
            self._checked_stages.add(stage)
            check_leaves(self._stage_name(stage), output, value, {id(p) for p in self._model.parameters()})
        self._shared_buffers.check()


class _Work(StagePasses):
    """Work of a rank's stages in one batch."""

    def __init__(
        self,
        engine: PipelineEngine,
        batches: Sequence[Any],
        count: int,
        *,
        trains: bool,
        computes_loss: bool,
        completes: bool = True,
        keeps: bool = False,
    ) -> None:
        super().__init__(engine.sharded, engine._step, engine._place.stages, completes=completes)
        self._engine, self._batches, self._micro_batches, self._trains = engine, batches, count, trains
        self._computes_loss = computes_loss
        self._keeps = keeps
        self.outputs: dict[int, Any] = {}

    @override
    def around(self) -> contextlib.AbstractContextManager[None]:
        return self._engine.around_backward()

    def inputs(self, micro_batch: int) -> Any:
        """Return the inputs of the first stage."""
        return self._batches[micro_batch][0]

    def forward(self, stage: int, micro_batch: int, value: Any) -> Any:
        """Return the outputs of a stage, or the loss of the last one."""
        engine = self._engine
        self.select(stage, micro_batch)
        try:
            output = engine.run_stage(stage, value)
        except Exception as error:
            if layer := layer_of(error):
                logger.error("%s, micro-batch %d: %s", engine._stage_name(stage), micro_batch, layer)
            raise
        if stage == len(engine._place.rank_of) - 1:
            if self._keeps:
                self.outputs[micro_batch] = output
            if self._computes_loss:
                output = engine._loss(output, self._batches[micro_batch][1])
                where = engine._stage_name(stage) if self._trains else "eval_batch()"
                check_loss(f"{where}, micro-batch {micro_batch}", output, trains=self._trains)
        if self._trains:
            engine.check_stage(stage, value, output)
        return output

    def step(self) -> None:
        """Count micro-batches, and step if they complete the accumulation window."""
        self._step.micro_steps += self._micro_batches - self._completes
        if self._completes:
            self._engine.update()
