"""Loss scaling for fp16 (Micikevicius et al., 2018), which keeps small gradients above the smallest fp16 number.

The loss is multiplied by a scale before the backward pass; the gradients are divided by it before the step. A dynamic
scale searches for the largest value without overflow. Invariant: the scaler depends only on its settings and the
sequence of `update` calls. Ranks that agree on each overflow agree on the scale without communication.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import CheckpointError, ConfigError, LossScaleError

if TYPE_CHECKING:
    from shardwise.config.schema.precision import FP16

_log = logging.getLogger("shardwise")

_LARGEST = torch.finfo(torch.float32).max


class LossScaler:
    """A static (`loss_scale`) or dynamic (0) loss scale, which starts at 2 to the power `initial_scale_power`.

    Rules of the dynamic scale, in order, for each step (an overflow skips it); the tolerance begins at `hysteresis`:

    - Overflow, tolerance above 1: the tolerance falls by one; the scale stays.
    - Overflow, tolerance 1: the scale is halved, not below `min_loss_scale`, where `LossScaleError` ends the run.
    - No overflow: with `consecutive_hysteresis` the tolerance is restored. After `loss_scale_window` such steps in a
      row the scale is doubled, the tolerance restored and the count reset.

    `reference_weight` is a power of two that divides micro-batch weights before they multiply a loss (see
    `shardwise.engine.window`); None until ranks have agreed on one.

    Raises:
        ConfigError: a value is invalid, or the initial scale is below the minimum.

    >>> scaler = LossScaler(initial_scale_power=4, hysteresis=2)
    >>> scaler.update(overflow=True)   # tolerated
    >>> scaler.scale
    16.0
    >>> scaler.update(overflow=True)
    >>> scaler.scale
    8.0
    """

    def __init__(
        self,
        *,
        loss_scale: float = 0.0,
        initial_scale_power: int = 16,
        loss_scale_window: int = 1000,
        hysteresis: int = 2,
        consecutive_hysteresis: bool = False,
        min_loss_scale: float = 1.0,
    ) -> None:
        if not (math.isfinite(loss_scale) and loss_scale >= 0):
            raise ConfigError(f"fp16.loss_scale: expected a finite number >= 0, found {loss_scale!r}")
        self.dynamic = loss_scale == 0
        self._scale = float(2.0**initial_scale_power if self.dynamic else loss_scale)
        self._window = loss_scale_window
        self._hysteresis = hysteresis
        self._consecutive = consecutive_hysteresis
        self._minimum = float(min_loss_scale)
        self._tolerance = hysteresis
        self._clean_steps = 0
        self.reference_weight: float | None = None
        if self.dynamic:
            self._check_dynamic(initial_scale_power)

    @classmethod
    def from_config(cls, fp16: FP16) -> LossScaler:
        """Build the scaler of the configuration's `fp16` section."""
        return cls(
            loss_scale=fp16.loss_scale,
            initial_scale_power=fp16.initial_scale_power,
            loss_scale_window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            min_loss_scale=fp16.min_loss_scale,
        )

    @property
    def scale(self) -> float:
        """Factor of the loss in the next backward pass."""
        return self._scale

    @property
    def exhausted(self) -> bool:
        """True if another overflow would not be a step of the search for a scale."""
        return not self.dynamic or (self._scale <= self._minimum and self._tolerance <= 1)

    def update(self, overflow: bool, reason: object = "") -> None:
        """Advance by one step; `overflow`: a gradient on any rank was non-finite and the step was skipped.

        Raises:
            LossScaleError: overflow while the dynamic scale is at its minimum and no tolerance is left; names `reason`.
        """
        if not self.dynamic:
            return
        if overflow:
            self._clean_steps = 0
            if self._tolerance > 1:
                self._tolerance -= 1
            else:
                self._halve(reason)
            return
        self._clean_steps += 1
        if self._consecutive:
            self._tolerance = self._hysteresis
        if self._clean_steps == self._window:
            self._clean_steps = 0
            self._tolerance = self._hysteresis
            # The scale multiplies fp32 numbers. All-zero gradients would otherwise double it beyond their range.
            if self._scale <= _LARGEST / 2:
                self._scale *= 2.0

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state for `load_state_dict`, as JSON types."""
        return {
            "dynamic": self.dynamic,
            "scale": self._scale,
            "tolerance": self._tolerance,
            "clean_steps": self._clean_steps,
            "reference_weight": self.reference_weight,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; settings of this scaler win over a static scale and values outside of them (logged).

        Raises:
            CheckpointError: an entry is missing or invalid.
        """
        expected = {"dynamic": bool, "scale": float, "tolerance": int, "clean_steps": int}
        for name, kind in expected.items():
            if type(state.get(name)) is not kind:
                raise CheckpointError(
                    f"loss scaler state {name!r}: expected {kind.__name__}, found {state.get(name)!r}"
                )
        if not (0 < state["scale"] <= _LARGEST and state["tolerance"] >= 1 and state["clean_steps"] >= 0):
            raise CheckpointError(f"loss scaler state: values out of range in {dict(state)!r}")
        reference = state.get("reference_weight")  # absent in checkpoints of versions without weights
        if reference is not None and not (type(reference) is float and 0 < reference <= _LARGEST):
            raise CheckpointError(
                f"loss scaler state 'reference_weight': expected a float > 0 or None, found {reference!r}"
            )
        self.reference_weight = reference
        if not self.dynamic or not state["dynamic"]:
            if (self.dynamic, self._scale) != (state["dynamic"], state["scale"]):
                _log.warning(
                    "the loss scale goes on at %g as configured, not at %g as saved",
                    self._scale,
                    state["scale"],
                )
            return
        if state["scale"] < self._minimum:
            _log.warning(
                "the loss scale goes on at fp16.min_loss_scale %g; %g was saved",
                self._minimum,
                state["scale"],
            )
        self._scale = max(state["scale"], self._minimum)
        self._tolerance = min(state["tolerance"], self._hysteresis)
        self._clean_steps = min(state["clean_steps"], self._window - 1)

    def _halve(self, reason: object) -> None:
        if self._scale <= self._minimum:
            found = f" Found: {reason}." if str(reason) else ""
            raise LossScaleError(
                f"gradients overflow at the smallest loss scale (fp16.min_loss_scale {self._minimum:g}), so halving it "
                f"further is not allowed.{found} Where the loss or a gradient is infinite or not a number by itself, "
                "no scale helps: look for such values in the data and the loss of the last steps; then lower the "
                "learning rate, lengthen its warm-up, or set gradient_clipping. Where gradients are beyond 65504 with "
                "this scale, the largest fp16 number, lower fp16.min_loss_scale. If it happened within the first "
                "steps, start lower (fp16.initial_scale_power) so that fewer steps are skipped. Or train in bf16 "
                '("bf16": {"enabled": true} instead of fp16), which has the range of fp32 and needs no loss scale'
            )
        self._scale = max(self._scale / 2.0, self._minimum)

    def _check_dynamic(self, initial_scale_power: int) -> None:
        if not math.isfinite(self._minimum) or self._minimum <= 0:
            raise ConfigError(f"fp16.min_loss_scale: expected a finite number > 0, found {self._minimum!r}")
        for key, value in (("loss_scale_window", self._window), ("hysteresis", self._hysteresis)):
            if value < 1:
                raise ConfigError(f"fp16.{key}: expected an integer >= 1, found {value!r}")
        if not self._minimum <= self._scale <= _LARGEST:
            raise ConfigError(
                f"fp16.initial_scale_power: {initial_scale_power} makes the loss scale start at {self._scale:g}, "
                f"outside [fp16.min_loss_scale, largest fp32 number] = [{self._minimum:g}, {_LARGEST:g}]"
            )
