"""Names of modules and parameters, as patterns of the configuration match them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torch import nn


def name_search(model: nn.Module) -> Callable[[Iterable[str], str], bool]:
    """Return a function that searches patterns in a name of this model.

    Patterns are also searched without PEFT's prefix (`base_model.model.`), which keeps the meaning of `^`.

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
    """Return the prefix that adapters have added to the names of the model in them."""
    base = getattr(type(model), "get_base_model", None)
    if base is None or not hasattr(model, "peft_config"):
        return ""
    inner = base(model)
    return next((f"{path}." for path, module in model.named_modules() if module is inner and path), "")
