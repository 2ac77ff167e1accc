"""Curriculum, layer dropping and token dropping of an engine: what changes with the step in a training pass.

Everything here follows from the counters of the step, so checkpoints need no state for it.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.data.draws import PassDraws
from shardwise.data.layer_drop import LayerDropper, ProgressiveLayerDrop
from shardwise.data.token_drop import RandomLTDScheduler, TokenDropper
from shardwise.errors import ConflictError, UsageError
from shardwise.pipeline.module import PipelineModule
from shardwise.schedules.difficulty import CurriculumScheduler
from shardwise.trees import map_tensors, tensors_in

if TYPE_CHECKING:
    from shardwise.config import Config
    from shardwise.engine.batch import Batches
    from shardwise.engine.step import TrainStep

_LENGTH = "curriculum_seqlen"
_THETA = "pld_theta"


class Curricula:
    """Changes the arguments of training passes, and lets layers skip work.

    Attributes:
        layer_drop: schedule of progressive layer dropping, or None.
        lengths: schedule of the length of sequences (`curriculum_learning`), or None.
        tokens: schedule of the tokens of layers (`random_ltd`), or None.
    """

    def __init__(self, config: Config, model: nn.Module, step: TrainStep, batches: Batches) -> None:
        self._step, self._batches = step, batches
        self._taken = inspect.signature(model.forward).parameters
        self._truncates = not isinstance(model, PipelineModule)  # a pipeline truncates its batches, which stages divide
        self._config = config
        seed, drop, ltd = config.data_efficiency.seed, config.progressive_layer_drop, config.data_efficiency.token_drop
        self.layer_drop = self.lengths = self.tokens = None
        if isinstance(model, PipelineModule) and (drop.enabled or ltd is not None):
            where = "progressive_layer_drop" if drop.enabled else "data_efficiency.data_routing.random_ltd"
            raise ConflictError(
                f"{where}: the model is a PipelineModule, whose stages run all of their layers. Leave the section out, "
                "or pass the layers as an ordinary model"
            )
        self._droppers: list[LayerDropper | TokenDropper] = []
        self._draws: list[PassDraws] = []
        if config.curriculum_learning.enabled:
            self.lengths = CurriculumScheduler(config.curriculum_learning.model_dump())
            if config.sequence_parallel_size > 1 and _LENGTH not in self._taken:
                raise ConflictError(
                    "curriculum_learning: a rank has a part of each sequence (sequence_parallel_size "
                    f"{config.sequence_parallel_size}), which cannot be truncated by itself. Let the model's forward "
                    f"take `{_LENGTH}`, or remove the section"
                )
        if drop.enabled:
            given = {name: value for name in ("theta", "gamma") if (value := getattr(drop, name)) is not None}
            self.layer_drop = ProgressiveLayerDrop(**given)
            if _THETA not in self._taken:
                # All ranks decide alike: a step is shorter only if none of them computes the layer.
                self._draws.append(PassDraws((seed, 0), self._position))
                self._droppers.append(LayerDropper(model, self.layer_drop, self._draws[-1]))
        if ltd is not None:
            if config.tensor_parallel.sequence_parallel:
                raise ConflictError(
                    "data_efficiency.data_routing.random_ltd: with tensor_parallel.sequence_parallel a rank has a part "
                    "of each sequence between layers; remove one of the two"
                )
            self.tokens = RandomLTDScheduler(ltd)
            self._draws.append(PassDraws((seed, 1, batches.data.rank), self._position))
            self._droppers.append(TokenDropper(model, self.tokens, self._draws[-1]))
        self.active = any(one is not None for one in (self.layer_drop, self.lengths, self.tokens))
        self.follow()

    def _position(self) -> tuple[int, ...]:
        step = self._step
        return step.global_steps, step.micro_steps - step.window_began, step.forwards, step.open_passes

    @property
    def current(self) -> Curricula:
        """These schedules, set to the step that comes, also after a checkpoint was loaded."""
        self.follow()
        return self

    def follow(self) -> None:
        """Set all schedules to the step that comes."""
        steps = self._step.global_steps
        if self.layer_drop is not None:
            self.layer_drop.update_state(steps)
        if self.lengths is not None and (
            self.lengths.custom is not None or self._config.curriculum_learning.schedule_type != "custom"
        ):
            self.lengths.update_difficulty(steps + 1)
        if self.tokens is not None:
            self.tokens.update_seq(steps + 1)

    def given(self, inputs: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a training pass: truncated, or with those that the model's forward takes."""
        self.follow()
        added: dict[str, Any] = {}
        if self.layer_drop is not None and _THETA in self._taken:
            added = {**self.layer_drop.get_state()}
        if self.lengths is not None:
            if _LENGTH in self._taken:
                added[_LENGTH] = self.lengths.update_difficulty(self._step.global_steps + 1)
            elif self._truncates:
                inputs, kwargs = self.truncated((inputs, kwargs))
        return inputs, {**kwargs, **added}

    def truncated(self, batch: Any) -> Any:
        """Return a batch with the sequences of a training pass, at most as long as the curriculum says."""
        if self.lengths is None:
            return batch
        most = int(self.lengths.update_difficulty(self._step.global_steps + 1))
        length = _length(tensors_in(batch))
        return batch if length <= most else map_tensors(batch, lambda tensor: _narrowed(tensor, length, most))

    def within(self, *, training: bool) -> AbstractContextManager[Any]:
        """Return the context of a forward pass of the engine."""
        return _all(self._draws, training) if self._draws else contextlib.nullcontext()

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], float]]) -> None:
        """Set functions of the step (from 1) that return difficulties, for curricula of schedule_type "custom".

        Args:
            schedule_func_dict: by name of the metric; "seqlen" for the section `curriculum_learning`.

        Raises:
            UsageError: there is no curriculum of that name.
            ConfigError: its schedule_type is not "custom".
        """
        schedules = {} if self.lengths is None else {"seqlen": self.lengths}
        schedules |= getattr(self._sampler, "schedules", {})
        for name, function in schedule_func_dict.items():
            if name not in schedules:
                raise UsageError(
                    f"set_custom_curriculum_learning_schedule(): no curriculum has the name {name!r}; there are: "
                    f"{', '.join(schedules) or 'none'}"
                )
            schedules[name].set_custom_get_difficulty(function)
        self.follow()

    @property
    def _sampler(self) -> Any:
        loader = self._batches.training_dataloader
        return None if loader is None else loader.sampler

    def close(self) -> None:
        """Give the layers their forward methods back."""
        for dropper in self._droppers:
            dropper.remove()


@contextlib.contextmanager
def _all(draws: list[PassDraws], training: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for one in draws:
            stack.enter_context(one.within(training=training))
        yield


def _length(tensors: list[torch.Tensor]) -> int:
    """Return the length of the sequences of a batch: that of the first ones, but of token ids before features."""
    if not tensors:
        return 0
    found = [tensor for tensor in tensors if tensor.dim() in (2, 3)]
    if not found:
        raise UsageError(
            "curriculum_learning: it truncates tensors (batch, length) or (batch, length, width), found shapes "
            f"{', '.join(str(tuple(tensor.shape)) for tensor in tensors)}. Remove the section, or let the model's "
            f"forward take `{_LENGTH}`"
        )
    first = found[0]
    if first.dim() == 2 and first.is_floating_point():
        first = next((tensor for tensor in found if tensor.dim() == 2 and not tensor.is_floating_point()), first)
    return first.shape[1]


def _narrowed(tensor: torch.Tensor, length: int, most: int) -> torch.Tensor:
    """Return the first `most` positions of a tensor of tokens (batch, length, ...), or of a mask."""
    shape = tensor.shape
    if tensor.dim() == 3 and tensor.is_floating_point() and shape[1:] == (length, length):
        raise UsageError(
            f"curriculum_learning: a floating-point input of shape {tuple(shape)} may be a mask or embeddings, so it "
            f"is unknown what to truncate. Let the model's forward take `{_LENGTH}`, or pass the mask as (batch, 1, "
            "length, length)"
        )
    mask = tensor.dim() == 4 or (tensor.dim() == 3 and not tensor.is_floating_point())
    dims = [dim for dim in ((-2, -1) if mask else (1,)) if tensor.dim() > 1 and shape[dim] == length]
    for dim in dims:
        tensor = tensor.narrow(dim, 0, most)
    return tensor.contiguous() if dims else tensor  # models call view() on labels
