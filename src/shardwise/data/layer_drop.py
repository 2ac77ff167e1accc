"""Progressive layer dropping: layers of training passes are skipped at random, more of them as training goes on.

Paper: Zhang and He, "Accelerating Training of Transformer-Based Language Models with Progressive Layer Dropping"
(2020).
"""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.compat import never_compiled
from shardwise.data.draws import Instead, PassDraws, as_output, layers_of, split_output
from shardwise.errors import UsageError


class ProgressiveLayerDrop:
    """Schedule theta(t) = (1 - theta) exp(-gamma t) + theta of the part of layer outputs that is kept.

    Args:
        theta: the part at last.
        gamma: speed at which it is approached.

    >>> drop = ProgressiveLayerDrop(theta=0.5, gamma=0.001)
    >>> drop.get_theta()
    1.0
    >>> drop.update_state(1000)
    >>> round(drop.get_theta(), 3)
    0.684
    """

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def update_state(self, global_step: int) -> None:
        """Set the current value to that after a number of steps."""
        self.current_theta = (1.0 - self.theta) * math.exp(-self.gamma * global_step) + self.theta

    def get_theta(self) -> float:
        """Return the current value."""
        return self.current_theta

    def get_state(self) -> dict[str, Any]:
        """Return the arguments that the model's forward method gets."""
        return {"progressive_layer_drop": True, "pld_theta": self.current_theta}


def keep_probability(layer: int, layers: int, theta: float) -> float:
    """Return the probability that a layer (from 0) is computed: the first one always, later ones less often."""
    return 1.0 - layer / layers * (1.0 - theta)


class LayerDropper:
    """Skips layers of a model with the probabilities of `keep_probability`.

    A computed layer's change of the hidden states is divided by its probability p, so that the mean over decisions is
    the layer's output, and evaluation needs no scale: x + (layer(x) - x) / p; x if skipped.
    """

    def __init__(self, model: nn.Module, schedule: ProgressiveLayerDrop, draws: PassDraws) -> None:
        self._schedule, self._draws = schedule, draws
        layers = layers_of(model, "progressive_layer_drop")
        self._count = len(layers)
        self._form: int | None = None
        self._instead = [Instead(layer, partial(self._run, number)) for number, layer in enumerate(layers)]

    @never_compiled
    def _kept(self, number: int) -> float | None:
        """Return the probability of a computed layer; None: it is skipped."""
        probability = keep_probability(number, self._count, self._schedule.get_theta())
        seed = None if probability >= 1.0 else self._draws.seed_of(number)
        if seed is None:
            return 1.0
        return probability if random.Random(seed).random() < probability else None

    def _run(self, number: int, layer: Instead, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        probability = self._kept(number)
        if probability is None:
            return as_output(layer.hidden_states(args, kwargs), self._form)
        output = layer.plain(*args, **kwargs)
        if number == 0 and self._schedule.get_theta() < 1.0:
            hidden, self._form = split_output(output, "progressive_layer_drop")
            _check_shape(hidden, layer.hidden_states(args, kwargs))
        if probability == 1.0:
            return output
        hidden, form = split_output(output, "progressive_layer_drop")
        return as_output(torch.lerp(layer.hidden_states(args, kwargs), hidden, 1.0 / probability), form)

    def remove(self) -> None:
        """Give the layers their forward methods back."""
        for one in self._instead:
            one.remove()


def _check_shape(hidden: torch.Tensor, given: torch.Tensor) -> None:
    if hidden.shape != given.shape or hidden.dtype != given.dtype:
        raise UsageError(
            f"progressive_layer_drop: a layer gets {given.dtype} hidden states of shape {tuple(given.shape)} and "
            f"returns {hidden.dtype} of shape {tuple(hidden.shape)}, so it cannot be skipped. Let the model's forward "
            "take `pld_theta`, and drop by itself"
        )
