"""Which optimizers can step a part of a parameter, and which need it whole.

A shard is a flat range of a parameter. An optimizer whose update of an element depends only on that
element's own gradient, value and state gives, on ranges, exactly the numbers that it gives on whole
tensors; ZeRO (Rajbhandari et al., 2020) rests on this. Others read the whole tensor: factored second
moments (Adafactor), orthogonalised updates (Muon). Those get whole tensors, each owned by one rank. In
between are optimizers that are elementwise but for norms of whole tensors (LAMB): they get ranges, and are
given the norms.

Invariant: nothing is called elementwise unless this table or the class itself says so. A subclass may
override the update in any way, so it does not inherit the property.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from shardwise.config.names import UNUSABLE_OPTIMIZERS
from shardwise.errors import ConfigError
from shardwise.optim.comm_optimizer import CommOptimizer

ATTRIBUTE = "shardwise_sharding"
"""Name of the class attribute by which an optimizer class declares itself: the value of a `Sharding` but "refused"."""

GROUP_METHOD = "shardwise_group_sharding"
"""Name of the method by which a "mixed" class says what it needs for a parameter group: another of these values."""

COST_METHOD = "shardwise_cost"
"""Name of the method by which a class may say what it costs to step a whole tensor of a shape: owners are balanced by
it."""


class Sharding(Enum):
    """What an optimizer has to be given."""

    ELEMENTWISE = "elementwise"
    """Flat ranges: the update of an element depends on that element's own gradient, value and state only.
    Memory: each rank holds state for its ranges."""

    NORMS = "norms"
    """Flat ranges, and norms of the tensors that these are parts of, in the attribute `shardwise_norms`
    (`shardwise.precision.tensornorms.TensorNorms`). Memory: as elementwise."""

    WHOLE = "whole"
    """Whole tensors, each owned by one rank. Memory: a rank holds state for the tensors that it owns."""

    COMMUNICATES = "communicates"
    """Flat memory of whole units, and gradients that it reduces itself (`shardwise.optim.comm_optimizer`).
    Memory: as the class says."""

    MIXED = "mixed"
    """One of the above for each parameter group: the method `shardwise_group_sharding(group)` says which."""

    REFUSED = "refused"
    """Neither: the algorithm needs all parameters at once, or gradients of another kind."""


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
"""What their state holds per tensor (step, eta, mu, mu_product) depends on step count and options only."""

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
    """Return what the optimizer has to be given, and the reason in words.

    A class of one's own is declared by a class attribute:

    >>> class Sign(torch.optim.SGD):
    ...     shardwise_sharding = "elementwise"
    >>> sharding_of(Sign([torch.zeros(2)]))
    (<Sharding.ELEMENTWISE: 'elementwise'>, "Sign declares shardwise_sharding = 'elementwise'")

    Raises:
        ConfigError: the declaration is none of "elementwise", "norms", "whole", "mixed" and "communicates".
    """
    cls = type(optimizer)
    name = cls.__name__
    if cls in _ELEMENTWISE:
        return Sharding.ELEMENTWISE, f"{name} updates each element from its own gradient and state"
    if reason := _WHOLE.get(cls):
        return Sharding.WHOLE, reason
    if reason := next((text for refused, text in _REFUSED.items() if isinstance(optimizer, refused)), None):
        return Sharding.REFUSED, reason
    # Looked up in the class itself: a base class speaks for its own update only.
    declared = vars(cls).get(ATTRIBUTE)
    if declared is None and getattr(cls, ATTRIBUTE, None) == Sharding.COMMUNICATES.value:
        declared = Sharding.COMMUNICATES.value  # how its step gets gradients is no question of a single update
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
    """Return what the optimizer has to be given for each of its parameter groups.

    Raises:
        ConfigError: the optimizer cannot be sharded, or does not say how.

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
