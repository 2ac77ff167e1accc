"""Passes of the stages of a pipeline rank over the units of a sharded model, in one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.zero.passes.model_pass import Part

if TYPE_CHECKING:
    import torch

    from shardwise.engine.step import TrainStep
    from shardwise.pipeline.split_backward import DeferredWeights
    from shardwise.zero.model import ShardedModel

_NOTHING = contextlib.nullcontext()


class StagePasses:
    """Runs passes of stages; subclasses add inputs, forward passes and the step (`pipeline.runtime.StageWork`).

    Args:
        sharded: the rank's stages, each of which is a chunk.
        step: the accumulation window.
        stages: numbers of the rank's stages.
        completes: the batch ends the accumulation window.
    """

    def __init__(
        self, sharded: ShardedModel, step: TrainStep, stages: Sequence[int], *, completes: bool = True
    ) -> None:
        self._sharded, self._step, self._stages, self._completes = sharded, step, stages, completes
        sharded.model_pass.end_graphs()

    def around(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for a backward pass."""
        return _NOTHING

    def select(self, stage: int, micro_batch: int) -> None:
        """Choose the stage and the graph of the next pass."""
        self._sharded.model_pass.select(self._stages.index(stage), (stage, micro_batch))

    def backward(
        self,
        key: tuple[int, int],
        roots: Sequence[Any],
        gradients: Sequence[torch.Tensor | None] | None,
        *,
        split: bool,
        last: bool,
    ) -> None:
        """Run a backward pass from outputs with their gradients; None: from a loss, or (loss, weight)."""
        part = Part.FIRST if split else Part.WHOLE
        if gradients is not None:
            self._differentiate(key, self._step.passing_on(), roots, gradients, part, last)
        else:
            loss, weight = roots[0] if isinstance(roots[0], tuple) else (roots[0], None)
            self._differentiate(key, self._step.passing(loss, weight), None, None, part, last)

    def weight_gradients(self, key: tuple[int, int], weights: DeferredWeights, *, last: bool) -> None:
        """Compute the other gradients of parameters."""
        roots = weights.take()
        self._differentiate(key, self._step.passing_on(), roots, None, Part.SECOND, last)

    def _differentiate(
        self,
        key: tuple[int, int],
        passing: contextlib.AbstractContextManager[Any],
        roots: Sequence[Any] | None,
        gradients: Sequence[torch.Tensor | None] | None,
        part: Part,
        last: bool,
    ) -> None:
        self.select(*key)
        self._step.set_gradient_accumulation_boundary(last and self._completes)
        with passing as scaled, self.around():
            self._sharded.backward(scaled if roots is None else roots, gradients, part=part)

    def unshard(self, stage: int) -> None:
        """Keep the parameters of a stage unsharded until `reshard`."""
        self._sharded.model_pass.keep(self._stages.index(stage))

    def reshard(self, stage: int) -> None:
        """Reshard the parameters of a stage."""
        self._sharded.model_pass.release(self._stages.index(stage))
