"""Random decisions of a training pass: functions of its position, so that they are equal where they must be.

A decision depends on a seed, the step, the forward pass of the step, and the layer; not on the state of a random number
generator. Ranks of a model copy decide alike, a resumed run decides as an uninterrupted one, and recomputation repeats
the decision of its forward pass.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardwise.compat import backward_pass, never_compiled
from shardwise.data.fetch import mixed_seed
from shardwise.errors import ConfigError, UsageError


class PassDraws:
    """Seeds of the decisions of the running training pass.

    Args:
        seed: seed of the decisions, followed by numbers of ranks that decide differently.
        position: returns (step, micro-batch of the step, forward pass of the micro-batch, forward passes whose backward
            pass is to come).
    """

    def __init__(self, seed: tuple[int, ...], position: Callable[[], tuple[int, ...]]) -> None:
        self._seed = seed
        self._position = position
        self._training: bool | None = None  # None: outside of the engine's passes
        self._others = False
        self._pass: tuple[int, ...] | None = None

    @contextlib.contextmanager
    def within(self, *, training: bool) -> Iterator[None]:
        """Decide in the forward pass of the block if it is a training pass."""
        before, self._training = self._training, training
        if training:
            self._pass, self._others = self._position()[:-1], False
        try:
            yield
        finally:
            self._training = before

    @never_compiled
    def seed_of(self, layer: int) -> int | None:
        """Return the seed of a layer's decision; None outside of the engine's training passes.

        Raises UsageError if a backward pass recomputes the layer, and it is unknown for which forward pass.
        """
        if self._training is False:
            return None
        if self._training is None:
            if backward_pass() is None:
                self._others = True
                return None
            if self._others or self._pass is None or self._position()[-1] > 1:
                raise UsageError(
                    "layers that are skipped, or drop tokens, are recomputed (activation checkpointing), and several "
                    "forward passes have run before this backward pass, so it is unknown which decisions to repeat. "
                    "Run engine.backward() after each engine(...), or switch recomputation off"
                )
        assert self._pass is not None  # set where a training pass begins
        return mixed_seed(*self._seed, *self._pass, layer)


class Instead:
    """Replaces the forward method of one layer, which keeps its name and parameters. Copies of the layer compute as it
    did before.

    Attributes:
        plain: the layer's own forward method.
        signature: parameters of the layer, of which the first are hidden states; `inner` is the layer that a wrapper
            calls.
    """

    def __init__(self, layer: nn.Module, run: Callable[..., Any], inner: nn.Module | None = None) -> None:
        self._layer, self._run = layer, run
        self.plain = layer.forward
        self.signature = inspect.signature((inner or layer).forward)
        self._first = next(iter(self.signature.parameters), "")
        layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `run` with this object and the arguments."""
        return self._run(self, args, kwargs)

    def hidden_states(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
        """Return the layer's first argument. Raises UsageError if it is no tensor."""
        found = args[0] if args else kwargs.get(self._first)
        if not isinstance(found, torch.Tensor):
            raise UsageError(
                "a layer that is skipped, or drops tokens, takes hidden states as its first argument; found "
                f"{type(found).__name__}"
            )
        return found

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any]]:
        return _plain, (self.plain,)

    def remove(self) -> None:
        """Give the layer its forward method back."""
        if self._layer.__dict__.get("forward") is self:
            del self._layer.forward
            if self._layer.forward != self.plain:
                self._layer.forward = self.plain


def unwrap(model: nn.Module) -> None:
    """Give the layers of a model their forward methods back."""
    for module in model.modules():
        while isinstance(forward := vars(module).get("forward"), Instead) and forward._layer is module:
            forward.remove()


def _plain(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


def layers_of(model: nn.Module, where: str) -> list[nn.Module]:
    """Return the repeated layers of a model: those of the largest outermost lists whose elements have one class.

    Raises ConfigError with the key `where` if there is none.
    """
    found: dict[str, list[nn.Module]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(path.startswith(f"{o}.") for o in found):
            continue
        layers = list(module)
        if (
            len(layers) > 1
            and len({type(layer) for layer in layers}) == 1
            and any(True for _ in layers[0].parameters())
        ):
            found[path] = layers
    if not found:
        raise ConfigError(
            f"{where}: {type(model).__name__} has no list (nn.ModuleList) of layers of one class. Give it one, or let "
            "its layers drop by themselves"
        )
    largest = max(found.values(), key=lambda layers: sum(p.numel() for layer in layers for p in layer.parameters()))
    return [layer for layers in found.values() if type(layers[0]) is type(largest[0]) for layer in layers]


def split_output(output: Any, layer: str) -> tuple[torch.Tensor, int | None]:
    """Return the hidden states of a layer's output, and the length of the tuple that they begin; None: no tuple.

    Raises UsageError for further outputs, which nothing could replace where the layer is skipped or drops tokens.
    """
    first, rest = (output[0], output[1:]) if isinstance(output, (tuple, list)) else (output, ())
    if not isinstance(first, torch.Tensor) or any(one is not None for one in rest):
        raise UsageError(
            f"{layer}: the layer returns more than hidden states (attention weights, caches, position biases), which "
            "would be missing where it is skipped or drops tokens. Switch these outputs off in the model's config"
        )
    return first, None if not isinstance(output, (tuple, list)) else len(output)


def as_output(hidden: torch.Tensor, length: int | None) -> Any:
    """Return hidden states in the form of a layer's output, by the length from `split_output`."""
    return hidden if length is None else (hidden, *[None] * (length - 1))
