"""The random number generators of a rank: torch (CPU and the rank's own device), Python and numpy."""

from __future__ import annotations

import operator
import random
from typing import Any

import numpy
import torch

from shardwise.errors import CheckpointError


def capture(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators as values for `shardwise.checkpoint.nested_json`."""
    version, internal, gauss = random.getstate()
    return {
        "python": (version, numpy.array(internal, dtype=numpy.int64), gauss),
        "numpy": numpy.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def restore(state: dict[str, Any], device: torch.device, *, with_torch: bool = True) -> None:
    """Restore all generators, or those of Python and numpy; the device's if captured on its type of device. Raises
    CheckpointError.
    """
    try:
        version, internal, gauss = state["python"]
        random.setstate((version, tuple(internal.tolist()), gauss))
        numpy.random.set_state(_checked(state["numpy"]))
        if with_torch:
            torch.set_rng_state(state["torch"])
        if with_torch and device.type == "cuda" and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"], device)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise CheckpointError(
            f"the saved random number state does not fit this Python, numpy or torch: {error}"
        ) from error


def _checked(state: dict[str, Any]) -> dict[str, Any]:
    """Return numpy's state after checking its position, because numpy reads there without a check."""
    place, size = state["state"]["pos"], len(state["state"]["key"])
    if state["bit_generator"] != "MT19937" or size != 624 or not 0 <= operator.index(place) <= size:
        raise ValueError(f"the place {place!r} is not one in a table of 624 numbers")
    return state
