"""Which optimizers can step a range of a parameter, and which need the unsharded tensor.

An elementwise optimizer gives the same numbers on flat ranges as on tensors (ZeRO; Rajbhandari et al., 2020). If only
norms are missing (LAMB), it gets ranges and norms. Others read the tensor: factored second moments (Adafactor),
orthogonalised updates (Muon). One rank owns each of their tensors. Only this table or the class itself declares an
optimizer elementwise: a subclass may override the update, and therefore does not inherit the declaration.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from shardwise.config.names import UNUSABLE_OPTIMIZERS
from shardwise.errors import ConfigError
from shardwise.optim.comm_optimizer import CommOptimizer

ATTRIBUTE = "shardwise_sharding"
"""Class attribute that declares the sharding of a class: a value of `Sharding` except "refused"."""

GROUP_METHOD = "shardwise_group_sharding"
"""Method of a "mixed" class that returns the sharding of a parameter group."""

COST_METHOD = "shardwise_cost"
"""Method that returns the cost to step a tensor of a shape; owners are balanced by it."""


class Sharding(Enum):
    """Form in which an optimizer gets parameters."""

    ELEMENTWISE = "elementwise"
    """Flat ranges. Each rank holds state for its ranges."""

    NORMS = "norms"
    """Flat ranges, and norms of unsharded tensors in the attribute `shardwise_norms` (of type `TensorNorms`)."""

    WHOLE = "whole"
    """Unsharded tensors, each owned by one rank, which holds its state."""

    COMMUNICATES = "communicates"
    """Flat memory of units, and gradients that the optimizer reduces (`CommOptimizer`). The class has its own state."""

    MIXED = "mixed"
    """One of the above for each parameter group, by the method `shardwise_group_sharding(group)`."""

    REFUSED = "refused"
    """Not shardable: the algorithm needs all parameters at once, or gradients of another kind."""


_OF_GROUPS = (Sharding.ELEMENTWISE, Sharding.NORMS, Sharding.WHOLE)

_ELEMENTWISE = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Their per-tensor states (step, eta, mu, mu_product) depend on step count and options only."""

_WHOLE: dict[type, str] = {
    torch.optim.Adafactor: "Adafactor factors its second moment over rows and columns and scales by the tensor's norm",
    torch.optim.Muon: "Muon orthogonalises the update of a whole matrix",
}

_REFUSED: dict[type, str] = {
    cls: reason
    for name, reason in UNUSABLE_OPTIMIZERS.items()
    if (cls := getattr(torch.optim, name)) is not torch.optim.Optimizer
}


def sharding_of(optimizer: torch.optim.Optimizer) -> tuple[Sharding, str]:
    """Return the sharding of an optimizer, and the reason. Raises ConfigError for an unknown declaration.

    A class attribute declares a class of one's own:

    >>> class Sign(torch.optim.SGD):
    ...     shardwise_sharding = "elementwise"
    >>> sharding_of(Sign([torch.zeros(2)]))
    (<Sharding.ELEMENTWISE: 'elementwise'>, "Sign declares shardwise_sharding = 'elementwise'")
    """
    cls = type(optimizer)
    name = cls.__name__
    if cls in _ELEMENTWISE:
        return Sharding.ELEMENTWISE, f"{name} updates each element from its own gradient and state"
    if reason := _WHOLE.get(cls):
        return Sharding.WHOLE, reason
    if reason := next((text for refused, text in _REFUSED.items() if isinstance(optimizer, refused)), None):
        return Sharding.REFUSED, reason
    # Looked up in the class itself, because a base class declares its own update only.
    declared = vars(cls).get(ATTRIBUTE)
    if declared is None and getattr(cls, ATTRIBUTE, None) == Sharding.COMMUNICATES.value:
        declared = Sharding.COMMUNICATES.value  # about gradients, not the update
    if declared is None:
        return Sharding.WHOLE, (
            f"{name} does not say how it may be split, so it gets whole tensors; if each element's update "
            f'depends only on that element, set {ATTRIBUTE} = "elementwise" in the class to save memory'
        )
    kind = _known(cls, ATTRIBUTE, declared, (*_OF_GROUPS, Sharding.MIXED, Sharding.COMMUNICATES))
    if kind is Sharding.COMMUNICATES and not isinstance(optimizer, CommOptimizer):
        raise ConfigError(
            f"{cls.__module__}.{cls.__qualname__}.{ATTRIBUTE} is {declared!r}, which only subclasses of "
            "shardwise.optim.comm_optimizer.CommOptimizer can be"
        )
    return kind, f"{name} declares {ATTRIBUTE} = {declared!r}"


def group_shardings(optimizer: torch.optim.Optimizer) -> list[Sharding]:
    """Return the sharding of each parameter group. Raises ConfigError if it is refused, or not declared.

    >>> group_shardings(torch.optim.SGD([torch.zeros(2)]))
    [<Sharding.ELEMENTWISE: 'elementwise'>]
    """
    kind, reason = sharding_of(optimizer)
    if kind is Sharding.REFUSED:
        raise ConfigError(f"optimizer {type(optimizer).__name__} cannot be used: {reason}")
    if kind is not Sharding.MIXED:
        return [kind] * len(optimizer.param_groups)
    method = getattr(optimizer, GROUP_METHOD, None)
    if not callable(method):
        cls = type(optimizer)
        raise ConfigError(
            f'{cls.__module__}.{cls.__qualname__} declares {ATTRIBUTE} = "mixed", but has no method '
            f"{GROUP_METHOD}(group) that says what each parameter group needs; add it"
        )
    return [_known(type(optimizer), GROUP_METHOD, method(group), _OF_GROUPS) for group in optimizer.param_groups]


def _known(cls: type, where: str, declared: object, choices: Sequence[Sharding]) -> Sharding:
    for choice in choices:
        if declared == choice.value:
            return choice
    *first, last = [repr(choice.value) for choice in choices]
    raise ConfigError(
        f"{cls.__module__}.{cls.__qualname__}.{where}: expected {', '.join(first)} or {last}, found {declared!r}"
    )
