"""RNG tracker of a tensor-parallel group, for dropout.

Outside of sharded layers all ranks have equal activations and drop the same elements: their generators share a state.
Between a column-parallel and a row-parallel layer each rank has its own activations: the generator has a rank-specific
state there, derived from a number of the common generator and the rank. The same holds where each rank has its own
tokens: from the first block or a row-parallel layer to the next norm (sequence-parallel norms). Recomputed regions
repeat the same numbers, because `torch.utils.checkpoint` restores the state that identifies the region. The common
generator advances equally on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardwise.compat import backward_pass, keep_with_graph
from shardwise.parallel.sequence import comparing
from shardwise.parallel.tensor.group import TensorGroup
from shardwise.parallel.tensor.layers import ColumnParallel, NormParallel, PickedColumns, RowParallel
from shardwise.parallel.tensor.sequence_parallel import takes_tokens_before, takes_tokens_behind
from shardwise.trees import tensors_in

_BITS = 63
_ADAPTED = ".base_layer"


class _Region:
    """A region with rank-specific random numbers; `untouched` returns True if no number has been drawn in it."""

    __slots__ = ("__weakref__", "device", "restore", "untouched")

    def __init__(self, device: torch.device, restore: Callable[[], None], untouched: Callable[[], bool]) -> None:
        self.device, self.restore, self.untouched = device, restore, untouched


class Regions:
    """Tracks a model's regions with rank-specific random numbers, begun and ended by sharded layers, while `active`."""

    def __init__(self, model: nn.Module, group: TensorGroup) -> None:
        self._group = group
        # By seed, which survives a restored state: a checkpointed function may begin within a region, and re-enters it
        # when recomputed. A region lives as long as the graph of its forward pass.
        self._known: weakref.WeakValueDictionary[int, _Region] = weakref.WeakValueDictionary()
        self._of_pass: list[_Region] = []
        self._devices: set[torch.device] = set()
        self._hooks: list[Any] = []
        self._last: Any = None
        self._drawn = has_dropout(model)
        self._trained = False
        self.active = False

    def watch(self, model: nn.Module, hook: Callable[[Callable[..., None]], Any]) -> None:
        """Install the hooks; `hook` makes a module hook from a function."""
        divided = False
        kinds = (ColumnParallel, PickedColumns, RowParallel)
        layers = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, kinds)]
        adapted = {_without_adapter(path) for path, _ in layers if path.endswith(_ADAPTED)}
        for path, layer in layers:
            # An adapter belongs to its layer. It has the layer's input, and its output is added to the
            # layer's. Before that it drops features: sharded ones of a row layer, or common ones
            # before a column layer, also where the layer of queries has begun a region before that of keys.
            place = _without_adapter(path)
            around = model.get_submodule(place)
            if not adapted.isdisjoint(_parents(place)):
                continue  # a matrix of the adapter
            if isinstance(layer, RowParallel):
                register = around.register_forward_hook if place in adapted else around.register_forward_pre_hook
                self._hooks.append(register(hook(self._end)))
                if layer.cut.tokens is not None:  # tokens are sharded from here on
                    self._hooks.append(around.register_forward_hook(hook(self._behind)))
            elif not layer.cut.whole_output:
                if place in adapted:
                    self._hooks.append(around.register_forward_pre_hook(hook(self._end)))
                self._hooks.append(around.register_forward_hook(hook(self._behind)))
                divided = True
        if not divided:
            return
        self._watch_tokens(model, hook)
        self.active = True
        self._last = model.register_forward_hook(hook(self._passed), always_call=True)

    def _watch_tokens(self, model: nn.Module, hook: Callable[[Callable[..., None]], Any]) -> None:
        for module in model.modules():
            if isinstance(module, NormParallel):
                self._hooks.append(module.register_forward_hook(hook(self._end)))
            if takes_tokens_before(module):
                self._hooks.append(module.register_forward_pre_hook(hook(self._before), with_kwargs=True))
            if takes_tokens_behind(module):
                self._hooks.append(module.register_forward_hook(hook(self._behind)))

    def _before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self._begin(module, next(iter([*args, *kwargs.values()])))

    def _behind(self, module: nn.Module, _: Any, made: Any) -> None:
        self._begin(module, made[0] if isinstance(made, tuple) else made)

    def _begin(self, module: nn.Module, given: Any) -> None:
        if not module.training or not isinstance(given, torch.Tensor) or given.device.type not in ("cpu", "cuda"):
            return
        if comparing():
            return  # without random numbers
        device = given.device
        generator = generator_of(device)
        if self._region(device) is not None:
            return  # begun by queries; this is the layer of keys
        number, restore = _take(generator, device)
        seed = own_seed(number, self._group.place)
        generator.manual_seed(seed)
        region = self._known.get(seed)
        if region is not None and backward_pass() is not None:
            return  # a recomputed region
        if region is None:
            untouched = _watched(generator, device) if not self._drawn else bool
            self._known[seed] = region = _Region(device, restore, untouched)
            self._devices.add(device)
        self._of_pass.append(region)  # also if a script has set the seed of an earlier pass

    def _region(self, device: torch.device) -> _Region | None:
        found = self._known.get(generator_of(device).initial_seed())
        return found if found is not None and found.device == device else None

    def _end(self, *_: Any) -> None:
        for device in self._devices:
            region = self._region(device)
            if region is None:
                continue
            if not self._drawn:
                self._drawn = not region.untouched()
            region.restore()

    def _passed(self, model: nn.Module, _: Any, made: Any) -> None:
        self._end()
        for tensor in tensors_in(made):
            keep_with_graph(tensor, self, self._of_pass)
        self._of_pass = []
        self._trained |= model.training

    def settle(self) -> None:
        """Stop tracking before a step if sharded layers draw no random numbers."""
        # Not earlier, because the first pass advanced the common generator at each region, and so does its
        # recomputation.
        if self._trained and not self._drawn:
            self._leave()

    def _leave(self) -> None:
        self._end()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.active = [], False

    def close(self) -> None:
        """Stop tracking."""
        self._leave()
        if self._last is not None:  # torch may still call it
            self._last.remove()


def _without_adapter(path: str) -> str:
    while path.endswith(_ADAPTED):
        path = path.removesuffix(_ADAPTED)
    return path


def _parents(path: str) -> Iterator[str]:
    while path:
        path = path.rpartition(".")[0]
        yield path


def has_dropout(model: nn.Module) -> bool:
    """Return True if a module is dropout, or has a dropout attribute between 0 and 1."""
    for module in model.modules():
        for name, value in vars(module).items():
            named = "drop" in name or (name == "p" and "Dropout" in type(module).__name__)
            if named and isinstance(value, float) and 0 < value < 1:
                return True
    return False


def own_seed(number: int, place: int) -> int:
    """Return a seed that differs over places and numbers (multiplicative hash of both)."""
    mixed = (number * 0x9E3779B97F4A7C15 + (place + 1) * 0xD1B54A32D192ED03) % (1 << 64)
    mixed = (mixed ^ (mixed >> 31)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    return (mixed ^ (mixed >> 29)) % (1 << _BITS)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _take(generator: torch.Generator, device: torch.device) -> tuple[int, Callable[[], None]]:
    """Draw a number; return it and a function that restores the state after it. The host does not wait for a device."""
    if device.type == "cuda":
        seed, offset = generator.initial_seed(), generator.get_offset()

        def again() -> None:
            generator.manual_seed(seed)
            generator.set_offset(offset + 4)  # offsets are multiples of 4

        return own_seed(seed, offset), again
    number = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator))
    state = generator.get_state()
    return number, lambda: _set(generator, state)


def _set(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _watched(generator: torch.Generator, device: torch.device) -> Callable[[], bool]:
    if device.type == "cuda":
        return lambda: generator.get_offset() == 0
    before = generator.get_state()
    return lambda: torch.equal(before, generator.get_state())


def same_numbers(group: TensorGroup) -> None:
    """Broadcast the generator states of a tensor-parallel group's first rank (all its ranks call)."""
    comm = group.comm
    if comm.imagined:
        return
    devices = {torch.device("cpu"), comm.device}
    for device in sorted(devices, key=str):
        generator = generator_of(device)
        state = generator.get_state()
        sent = state.to(comm.device)
        comm.broadcast(sent, 0, "random_numbers").wait()
        generator.set_state(sent.to("cpu"))
