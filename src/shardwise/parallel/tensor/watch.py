"""Selects the sharded blocks to compare with unsharded copies: each kind once, before its first forward passes.

Blocks of one kind have the same classes, shapes and shardings, and run the same operators. Because operators may depend
on numbers, functions and arguments that only a run shows, each block runs once on meta tensors, and again in passes 16,
32, 64, ... For a block that is not called as a module (a model may call its methods, or its submodules), the smallest
submodules that have a row layer and its column layers are compared.
"""

from __future__ import annotations

import contextlib
import contextvars
import gc
import hashlib
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from shardwise.compat import has_values, never_compiled
from shardwise.errors import ConfigError
from shardwise.parallel.sequence import comparing, whole_sequences
from shardwise.parallel.sequence import current as current_sequences
from shardwise.parallel.tensor.check import RULES, Comparison
from shardwise.parallel.tensor.copies import signature
from shardwise.parallel.tensor.guard import sum_gradient
from shardwise.parallel.tensor.layers import Parallel, RowParallel
from shardwise.trees import tensors_in

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList)
_CALLS = 8  # Maximum calls in which a block is examined, if no forward pass of the model ends before.
_AGAIN = 16  # Blocks are examined again in this forward pass, and in twice, four times, ... as many.

_watched: weakref.WeakKeyDictionary[nn.Module, DivisionWatch] = weakref.WeakKeyDictionary()


def watch_division(model: nn.Module) -> None:
    """Compare sharded blocks with unsharded copies in the first forward passes in training and evaluation."""
    _watched[model] = DivisionWatch(model)


def begin_pass(model: nn.Module) -> None:
    """Stop examining blocks that have been called in an earlier pass of the same mode."""
    watch = _watched.get(model)
    if watch is not None:
        watch.begin_pass(model.training)


class DivisionWatch:
    """Hooks on the blocks of a model with sharded layers."""

    def __init__(self, model: nn.Module) -> None:
        known = _Known(model)
        self._passes = {True: 0, False: 0}
        self._hooks: list[_BlockHook] = []
        for path in blocks_of(model):
            block = model.get_submodule(path)
            own = _BlockHook(block, path, known)
            parts = {inner: _BlockHook(part, inner, known) for inner, part in _parts(block, path)}
            for hook in parts.values():
                own.inner.append(hook.register())
            for name in _open(block):
                inner = f"{path}.{name}".strip(".")
                around = [own, *(hook for part, hook in parts.items() if inner.startswith(f"{part}."))]
                before = _LayerHook(around, inner, path)
                own.inner.append(block.get_submodule(name).register_forward_pre_hook(before))
            self._hooks += [own, *parts.values()]
            own.register()

    def begin_pass(self, training: bool) -> None:
        """Remove hooks of blocks that have been called in this mode, and restore those of others."""
        if comparing():
            return
        self._passes[training] += 1
        number = self._passes[training]
        for hook in self._hooks:
            if number >= _AGAIN and number & (number - 1) == 0:
                hook.modes.discard(training)
                hook.register()
            elif training in hook.modes:
                hook.remove()
            elif hook.modes:
                hook.register()


class _Known:
    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self.summands: dict[Any, list[str]] = {}
        self.compared: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def closes(self, module: nn.Module) -> bool:
        """Return True if a module with sharded weights is compared, or has unsharded inputs and outputs."""
        return module in self.compared or (isinstance(module, Parallel) and _closed(module))

    def name(self, parameter: nn.Parameter | None) -> str:
        model = self._model()
        if parameter is None or model is None:
            return ""
        return next((name for name, one in model.named_parameters() if one is parameter), "a divided parameter")


class _BlockHook:
    """Forward pre-hook of a block with sharded layers: compares the first block of its kind."""

    may_wait_for_ranks = True

    def __init__(self, block: nn.Module, path: str, known: _Known) -> None:
        self._block, self._path, self._known = weakref.ref(block), path, known
        known.compared.add(block)
        self._signature = signature(block)
        self._handle: RemovableHandle | None = None
        self._calls = 0
        self.modes: set[bool] = set()
        self.inner: list[RemovableHandle] = []

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _in_a_copy, ()

    def register(self) -> RemovableHandle:
        block = self._block()
        if self._handle is None and block is not None:
            self._handle = block.register_forward_pre_hook(self, with_kwargs=True)
            self._calls = 0
        assert self._handle is not None
        return self._handle

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    @never_compiled
    def __call__(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for handle in self.inner:
            handle.remove()
        self.inner = []
        group = next(module.group for module in block.modules() if isinstance(module, Parallel))
        given = tensors_in((args, kwargs))
        if any(not has_values(tensor) or tensor.is_meta for tensor in given) or group.comm.imagined:
            return
        if comparing():
            return
        continues = _continues(block, (args, kwargs))
        if not continues:
            self.modes.add(block.training)
        self._calls += 1
        if self._calls > _CALLS:
            self.remove()
            return
        if continues:
            return
        # Because copies get a few tokens of this rank only, their attention exchanges nothing.
        sequences = current_sequences()
        own_tokens = contextlib.nullcontext() if sequences is None else whole_sequences(sequences)
        comparison = Comparison(block, self._path, group, args, kwargs)
        with undisturbed(group.comm.device), own_tokens:
            # In an empty context, because models collect outputs of the surrounding pass in context variables.
            runs, foreign = contextvars.Context().run(comparison.operators, self._known.closes)
            own = hashlib.blake2b(f"{self._signature}\n{runs}".encode(), digest_size=8).hexdigest()
            told = group.comm.exchange([own, self._known.name(foreign)], "tensor_check")
            if used := next((name for _, name in told if name), None):
                raise ConfigError(_used_elsewhere(self._path, block, used))
            kind = block.training, *(theirs for theirs, _ in told)
            if kind not in self._known.summands:
                self._known.summands[kind] = contextvars.Context().run(comparison.run)
                gc.collect()  # because reference cycles of the copies keep tensors alive
        _sum_up(block, self._known.summands[kind])


def _continues(block: nn.Module, given: Any) -> bool:
    """Return True if a cache of transformers has this rank's heads of earlier passes, which a whole copy cannot use."""
    numbers = {number for one in block.modules() if isinstance(number := getattr(one, "layer_idx", None), int)} or {0}
    caches = [one for one in tree_leaves(given) if callable(getattr(one, "get_seq_length", None))]
    return any(_has_tokens(cache, number) for cache in caches for number in numbers)


def _has_tokens(cache: Any, layer: int) -> bool:
    try:
        return bool(cache.get_seq_length(layer) > 0)
    except ValueError:  # a layer of linear attention has a state of earlier tokens, and does not count them
        return bool(cache.has_previous_state(layer))


def _used_elsewhere(path: str, block: nn.Module, name: str) -> str:
    pattern = re.escape(name.removesuffix(".weight").removesuffix(".bias"))
    return (
        f"tensor parallelism: {path or 'the model'} ({type(block).__name__}) uses {name} of another block, of which "
        "each rank has a part. Call the module that has both the column and the row layer, or leave the layer whole "
        f'({RULES}: {{"patterns": ["^{pattern}"], "partition_type": "skip"}})'
    )


def _sum_up(block: nn.Module, names: Sequence[str]) -> None:
    layer = next(module for module in block.modules() if isinstance(module, Parallel))
    for name, parameter in block.named_parameters():
        if name in names:
            sum_gradient(parameter, layer)


class _LayerHook:
    """Forward pre-hook of a sharded layer: refuses a call outside of the forward passes of `around`."""

    may_wait_for_ranks = True

    def __init__(self, around: Sequence[_BlockHook], path: str, block: str) -> None:
        self._around, self._path, self._block = around, path, block

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _in_a_copy, ()

    @never_compiled
    def __call__(self, layer: Any, args: Any) -> None:
        if any(hook.modes for hook in self._around) or comparing():
            return
        if layer.group.comm.imagined or any(not has_values(one) or one.is_meta for one in tensors_in(args)):
            return
        raise ConfigError(
            f"tensor parallelism: the model calls {self._path} ({type(layer).__name__}) outside of the forward pass of "
            f"{self._block or 'the model'}, so that nothing compares what it computes of the layer's part with what it "
            f"computes of the whole. Call {self._block or 'the model'} as a module, or leave its layers whole "
            f'({RULES}: "partition_type": "skip")'
        )


def blocks_of(model: nn.Module) -> list[str]:
    """Return the paths of the smallest parts of a model outside of which no tensor is sharded.

    These are elements of lists of layers (blocks of a decoder), and other modules in which one layer consumes the
    sharded output of another.
    """
    layers = {path: module for path, module in model.named_modules() if isinstance(module, Parallel)}
    half = sum(whole.numel() for whole in model.parameters()) / 2
    found: set[str] = set()
    loose: dict[str, Parallel] = {}
    for path, layer in layers.items():
        chain = [outer for outer in _elements(model, path) if outer != path]
        small = [outer for outer in chain if sum(p.numel() for p in model.get_submodule(outer).parameters()) <= half]
        if chain:
            found.add((small or chain[-1:])[0])
        elif not _closed(layer):
            loose[path] = layer
    return _outermost(found | _around_rows(model, loose))


def _parts(block: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    for name in _outermost(_around_rows(block, _open(block)) - {""}):
        yield f"{path}.{name}".strip("."), block.get_submodule(name)


def _open(block: nn.Module) -> dict[str, Parallel]:
    """Return the sharded layers of a block with sharded inputs or outputs."""
    layers = {name: module for name, module in block.named_modules() if isinstance(module, Parallel)}
    return {name: layer for name, layer in layers.items() if not _closed(layer)}


def _around_rows(model: nn.Module, layers: dict[str, Parallel]) -> set[str]:
    """Return the smallest modules that have a row layer and other sharded layers."""
    rows = [path for path, layer in layers.items() if isinstance(layer, RowParallel)]
    found = set()
    for row in rows:
        outer = row
        while outer:
            outer = outer.rpartition(".")[0]
            inside = [path for path in layers if path not in rows and path.startswith(f"{outer}." if outer else "")]
            if inside and not isinstance(model.get_submodule(outer), _CONTAINERS):
                found.add(outer)
                break
    return found


def _outermost(paths: set[str]) -> list[str]:
    return sorted(path for path in paths if not any(path != o and path.startswith(f"{o}." if o else "") for o in paths))


def _closed(layer: Parallel) -> bool:
    """Return True if inputs and outputs of a layer are unsharded."""
    cut_ = layer.cut
    if cut_.kind in ("words", "latent", "norm"):
        return True
    return cut_.whole_output or cut_.whole_in_evaluation or (cut_.kind == "row" and cut_.whole_input)


def _elements(model: nn.Module, path: str) -> Iterator[str]:
    names = path.split(".")
    for n in range(1, len(names) + 1):
        outer, own = ".".join(names[: n - 1]), ".".join(names[:n])
        inside = model.get_submodule(outer)
        module = model.get_submodule(own)
        if isinstance(inside, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and not isinstance(module, _CONTAINERS):
            yield own


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _in_a_copy() -> Callable[..., None]:
    return _nothing


@contextlib.contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Keep random numbers, autograd and autocast of the surrounding pass unchanged."""
    devices = [device] if device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x))
        for kind in {"cpu", device.type}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield
