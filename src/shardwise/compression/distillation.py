"""Knowledge distillation: a student learns from the outputs of a teacher, which may be sharded like the student.

Logits are compared with a temperature, as by Hinton et al., "Distilling the Knowledge in a Neural Network"
(1503.02531), hidden states by their squared distance, as in TinyBERT (1909.10351).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.compat import backward_pass
from shardwise.errors import UsageError


class Distillation:
    """The loss of a student that learns from a teacher.

    The teacher is any module, or an engine: `shardwise.initialize(model=teacher, config=...)` without an optimizer
    shards it with ZeRO stage 3, without gradients and optimizer state. It is called in evaluation mode.

    Args:
        teacher: engine or module.
        temperature: by which logits are divided.
        weight: weight of the teacher's part, in [0, 1]; the student's own loss has the rest.
        student: engine or module whose hidden states are compared; needed for `hidden` only.
        hidden: names of the student's modules -> names of the teacher's, whose first outputs have one shape.
        hidden_weight: weight of the mean squared distance of each pair.

    Raises:
        UsageError: a weight or the temperature is out of its range, `hidden` has no student, or a name is unknown.

    Example:
        >>> import torch
        >>> teacher, student = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
        >>> distillation, x = Distillation(teacher, temperature=2.0, weight=1.0), torch.ones(2, 4)
        >>> student.load_state_dict(teacher.state_dict())
        <All keys matched successfully>
        >>> round(float(distillation(student(x), torch.tensor(0.7), x)), 5)
        0.0
    """

    def __init__(
        self,
        teacher: nn.Module,
        *,
        temperature: float = 2.0,
        weight: float = 0.5,
        student: nn.Module | None = None,
        hidden: Mapping[str, str] | None = None,
        hidden_weight: float = 1.0,
    ) -> None:
        if temperature <= 0 or not 0 <= weight <= 1 or hidden_weight < 0:
            raise UsageError(
                f"Distillation(temperature={temperature}, weight={weight}, hidden_weight={hidden_weight}): expected a "
                "positive temperature, a weight in [0, 1] and a hidden_weight of at least 0"
            )
        if hidden and student is None:
            raise UsageError("Distillation(hidden=...): the student's hidden states are needed. Pass student=engine")
        self.teacher = teacher.eval()
        self.temperature, self.weight, self.hidden_weight = temperature, weight, hidden_weight
        pairs = dict(hidden or {})
        self._states = [
            (_State(student, of_student), _State(teacher, of_teacher))
            for of_student, of_teacher in pairs.items()
            if student is not None
        ]

    def __call__(
        self, outputs: Any, loss: torch.Tensor | None, *inputs: Any, mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """Return the student's loss; call it after each forward pass of the student, on all ranks.

        Args:
            outputs: logits of the student (..., classes), or an object that has them as `logits`.
            loss: the student's own loss; None if `weight` is 1.
            inputs: of the student, with which the teacher is called, as with `kwargs`.
            mask: tokens that count, as booleans (...); None: all.

        Raises UsageError if shapes of student and teacher differ.
        """
        with torch.no_grad():
            expected = _logits(self.teacher(*inputs, **kwargs))
        total = self.weight * self._soft(_logits(outputs), expected, mask)
        if loss is not None:
            total = total + (1 - self.weight) * loss
        elif self.weight < 1:
            raise UsageError(f"Distillation: the student's own loss has the weight {1 - self.weight:g}. Pass it")
        for own, of in self._states:
            if total.requires_grad and not own.with_gradient:
                raise UsageError(
                    f"Distillation(hidden=...): {own.name!r} has run without gradients, as inside of activation "
                    "checkpointing with use_reentrant=True, so the student would not learn its hidden states. Pass "
                    "use_reentrant=False, or name a module that is not inside of a checkpointed one"
                )
            total = total + self.hidden_weight * _distance(own.take(), of.take(), own.name)
        return total

    def close(self) -> None:
        """Remove the hooks that keep hidden states."""
        for pair in self._states:
            for state in pair:
                state.handle.remove()

    def _soft(self, logits: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        if logits.shape != expected.shape:
            raise UsageError(
                f"Distillation: logits of the student are {list(logits.shape)}, of the teacher {list(expected.shape)}. "
                "Both need one vocabulary and the same inputs"
            )
        own, of = (F.log_softmax(values.float() / self.temperature, -1) for values in (logits, expected))
        each = F.kl_div(own, of, reduction="none", log_target=True).sum(-1)
        mean = each.mean() if mask is None else (each * mask).sum() / mask.sum().clamp(min=1)
        return mean * self.temperature**2


class _State:
    """The first output of a module in its last call."""

    def __init__(self, model: nn.Module, name: str) -> None:
        root = getattr(model, "module", model)
        known = dict((root if isinstance(root, nn.Module) else model).named_modules())
        if name not in known:
            raise UsageError(f"Distillation(hidden=...): {type(root).__name__} has no module {name!r}")
        self.name = name
        self._value: torch.Tensor | None = None
        self.with_gradient = False
        self.handle = known[name].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, args: Any, outputs: Any) -> None:
        # A recomputed forward pass happens in the backward pass, after the value was taken.
        if backward_pass() is None:
            self._value = outputs[0] if isinstance(outputs, tuple) else outputs
            self.with_gradient = torch.is_grad_enabled()

    def take(self) -> torch.Tensor:
        value, self._value = self._value, None
        if value is None:
            raise UsageError(f"Distillation: {self.name!r} has not been called since the last loss")
        return value


def _logits(outputs: Any) -> torch.Tensor:
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def _distance(own: torch.Tensor, of: torch.Tensor, name: str) -> torch.Tensor:
    if own.shape != of.shape:
        raise UsageError(
            f"Distillation: hidden states at {name!r} are {list(own.shape)}, of the teacher {list(of.shape)}; compare "
            "modules of one width"
        )
    return F.mse_loss(own.float(), of.float())
