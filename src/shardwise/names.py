"""Names of modules and parameters as patterns of the configuration mean them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch import nn


def name_search(model: nn.Module) -> Callable[[Iterable[str], str], bool]:
    """Return what tells whether one of several patterns is found in a name of this model.

    What PEFT has wrapped (`get_peft_model`) has names that begin with `base_model.model.`; patterns are searched in the
    names before as well, so that `^` goes on meaning the beginning.

    Args:
        model: whose names will be searched.

    >>> finds = name_search(nn.Linear(2, 2))
    >>> finds(["^bias"], "bias"), finds(["^layer", "^w"], "bias")
    (True, False)
    """
    prefix = _adapters(model)

    def finds(patterns: Iterable[str], name: str) -> bool:
        names = {name, name.removeprefix(prefix)}
        return any(re.search(pattern, known) for pattern in patterns for known in names)

    return finds


def _adapters(model: nn.Module) -> str:
    """Return what adapters have put before the names of the model in them."""
    base = getattr(type(model), "get_base_model", None)
    if base is None or not hasattr(model, "peft_config"):
        return ""
    inner = base(model)
    return next((f"{path}." for path, module in model.named_modules() if module is inner and path), "")
