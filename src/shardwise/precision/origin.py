"""Where values became infinite or NaN first: a module, its phase, a rank and a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

What = Literal[
    "batch", "parameter", "output", "code", "loss", "loss_gradient", "input_gradient", "code_gradient", "own_gradient"
]

LARGE = 1e4
"""Finite values beyond this are near the end of fp16, and unusual in any type."""


@dataclass(frozen=True)
class Origin:
    """The first values of a window that were not finite, though what they were computed from was.

    Attributes:
        what: "batch": the inputs of the model. "parameter": a parameter, before it was used. "output": what a module
            made of finite inputs. "code": what the code of a module made between the calls of its own modules. "loss":
            what the script made of the model's outputs. In the backward pass, "loss_gradient": the gradient that came
            into the model. "input_gradient": what a module made of finite gradients. "code_gradient": the same of code
            between calls. "own_gradient": the gradient of a parameter, where all that modules handed on was finite.
        phase: "forward" or "backward".
        module: its name in the model; "" is the model itself, None what is outside of it.
        of_class: name of the module's class.
        parameter: its name, for "parameter" and "own_gradient".
        beside: for code: the module that was given, or had made, the value in question.
        kind: "NaN" or "infinite".
        ranks: where it was so.
        micro_batch: number of the micro-batch in its accumulation window.
        line: `file:line` from which the module was called.
        largest: largest absolute value that went into it; None if it is not known.
    """

    what: What
    phase: Literal["forward", "backward"]
    module: str | None
    of_class: str = ""
    parameter: str | None = None
    beside: str | None = None
    kind: Literal["NaN", "infinite"] = "NaN"
    ranks: tuple[int, ...] = ()
    micro_batch: int | None = None
    line: str = ""
    largest: float | None = None

    def __str__(self) -> str:
        """Return it in words.

        >>> print(Origin("output", "forward", "blocks.1.up", "Linear", ranks=(2,), micro_batch=0, largest=3.5))
        It began in the forward pass of micro-batch 0 on rank 2: module 'blocks.1.up' (Linear) made NaN values of \
finite ones, of which the largest was 3.5
        """
        who = f"rank{'s' if len(self.ranks) > 1 else ''} {', '.join(map(str, self.ranks))}"
        which = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        line = f" ({self.line})" if self.line else ""
        return f"It began in the {self.phase} pass{which} on {who}: {self._words()}{line}"

    def _words(self) -> str:
        kind, module, beside = self.kind, self.named, repr(self.beside)
        largest = "" if self.largest is None else f", of which the largest was {self.largest:.4g}"
        if self.what == "batch":
            return f"the inputs of the model were {kind}"
        if self.what == "parameter":
            return f"parameter {self.parameter!r} of {module} was {kind} before it was used"
        if self.what == "output":
            return f"{module} made {kind} values of finite ones{largest}"
        if self.what == "code":
            return f"the code of {module} made {kind} values, and passed them to {beside}"
        if self.what == "loss":
            return f"the outputs of the model were finite, and the loss was {kind}"
        if self.what == "loss_gradient":
            return f"the loss was finite, and the gradient of the model's outputs was {kind}"
        if self.what == "input_gradient":
            return f"{module} made {kind} gradients of finite ones{largest}"
        if self.what == "code_gradient":
            return f"the code of {module} made {kind} gradients, that of the output of {beside} first"
        return f"{module} made the gradient of its parameter {self.parameter!r} {kind}; what it handed on was finite"

    @property
    def named(self) -> str:
        """The module in words."""
        of_class = f" ({self.of_class})" if self.of_class else ""
        return f"module {self.module!r}{of_class}" if self.module else f"the model{of_class}"

    @property
    def advice(self) -> str:
        """What to try."""
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
