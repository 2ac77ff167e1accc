"""Checks of the options that several optimizers have."""

from __future__ import annotations

import math
from typing import Any

from shardwise.errors import ConfigError


def check_not_negative(optimizer: str, **options: Any) -> None:
    """Raise unless every option is a finite number that is not negative (or a tensor of one).

    Raises:
        ConfigError: it names the optimizer and the option.
    """
    for name, value in options.items():
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if isinstance(value, (bool, str)) or not math.isfinite(number) or number < 0:
            raise ConfigError(f"{optimizer}({name}=...): expected a number >= 0, found {value!r}")


def check_betas(optimizer: str, betas: Any) -> None:
    """Raise unless `betas` are two numbers in [0, 1).

    Raises:
        ConfigError: it names the optimizer.
    """
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not pair or not all(isinstance(beta, (int, float)) and 0 <= beta < 1 for beta in betas):
        raise ConfigError(f"{optimizer}(betas=...): expected two numbers in [0, 1), found {betas!r}")
