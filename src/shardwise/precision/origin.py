"""Origin of infinite or NaN values: the first module, phase, rank and micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

What = Literal[
    "batch", "parameter", "output", "code", "loss", "loss_gradient", "input_gradient", "code_gradient", "own_gradient"
]

LARGE = 1e4
"""Finite values above this are near the fp16 limit, and unusual in any dtype."""


@dataclass(frozen=True)
class Origin:
    """The first non-finite values of an accumulation window that were computed from finite ones.

    Attributes:
        what: "batch": the inputs of the model. "parameter": a parameter, before its use. "output": a module's output
            from finite inputs. "code": the result of a module's own code between calls of its submodules. "loss": the
            script's loss from the model's outputs. Backward pass: "loss_gradient": the gradient that enters the model.
            "input_gradient": a module's input gradient from finite gradients. "code_gradient": a gradient of code
            between calls. "own_gradient": a parameter's gradient, while all gradients between modules were finite.
        module: its name in the model; "" is the model itself, None is outside of the model.
        parameter: its name, for "parameter" and "own_gradient".
        other_module: for code: the module that received or produced the value.
        ranks: ranks with such values; `micro_batch`: its number in the accumulation window.
        line: `file:line` of the module's call.
        largest: largest absolute input value; None if unknown.
    """

    what: What
    phase: Literal["forward", "backward"]
    module: str | None
    of_class: str = ""
    parameter: str | None = None
    other_module: str | None = None
    kind: Literal["NaN", "infinite"] = "NaN"
    ranks: tuple[int, ...] = ()
    micro_batch: int | None = None
    line: str = ""
    largest: float | None = None

    def __str__(self) -> str:
        """Return a sentence for a message.

        >>> print(Origin("output", "forward", "blocks.1.up", "Linear", ranks=(2,), micro_batch=0, largest=3.5))
        It began in the forward pass of micro-batch 0 on rank 2: module 'blocks.1.up' (Linear) made NaN values of \
finite ones, of which the largest was 3.5
        """
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        which = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        line = f" ({self.line})" if self.line else ""
        return f"It began in the {self.phase} pass{which} on {who}: {self._words()}{line}"

    def _words(self) -> str:
        kind, module, other_module = self.kind, self.named, repr(self.other_module)
        largest = "" if self.largest is None else f", of which the largest was {self.largest:.4g}"
        if self.what == "batch":
            return f"the inputs of the model were {kind}"
        if self.what == "parameter":
            return f"parameter {self.parameter!r} of {module} was {kind} before it was used"
        if self.what == "output":
            return f"{module} made {kind} values of finite ones{largest}"
        if self.what == "code":
            return f"the code of {module} made {kind} values, and passed them to {other_module}"
        if self.what == "loss":
            return f"the outputs of the model were finite, and the loss was {kind}"
        if self.what == "loss_gradient":
            return f"the loss was finite, and the gradient of the model's outputs was {kind}"
        if self.what == "input_gradient":
            return f"{module} made {kind} gradients of finite ones{largest}"
        if self.what == "code_gradient":
            return f"the code of {module} made {kind} gradients, that of the output of {other_module} first"
        return f"{module} made the gradient of its parameter {self.parameter!r} {kind}; what it handed on was finite"

    @property
    def named(self) -> str:
        """Name of the module for a message."""
        of_class = f" ({self.of_class})" if self.of_class else ""
        return f"module {self.module!r}{of_class}" if self.module else f"the model{of_class}"

    @property
    def advice(self) -> str:
        """Recommended remedies."""
        if self.what == "batch":
            return "look for such values in the data of this micro-batch"
        if self.what == "parameter":
            return (
                "an earlier update has damaged parameters: go back to a checkpoint of before, and have such steps "
                'skipped ("non_finite": "skip")'
            )
        if self.what in ("loss", "loss_gradient"):
            return "look at logarithms, divisions and means over nothing in the loss, and at the labels"
        if self.kind == "infinite" or (self.largest is not None and self.largest > LARGE):
            return (
                "values outgrow their type: look at what goes into this module, lower the learning rate or lengthen "
                "its warm-up, normalise, or take bf16 instead of fp16"
            )
        return "look at divisions, roots, logarithms and masks of this module; an epsilon may be missing"
