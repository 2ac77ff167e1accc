"""Forward passes of a model for the check of sequence parallelism, with the outputs of its modules."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.compat import belongs_to_transformers
from shardwise.errors import ShardwiseError
from shardwise.parallel.data import IGNORED
from shardwise.parallel.deterministic import Deterministic
from shardwise.parallel.sequence import SequenceGroup, whole_sequences
from shardwise.parallel.tensor.copies import map_inputs, signature
from shardwise.trees import tensors_in

LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""By dtype: smallest error of a token beyond rounding, relative to the tensor's largest value."""

# Errors of torch and Python that do not mention sequences.
_RAISED = (RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError)


@dataclass
class Call:
    """Arguments of a forward pass on whole sequences, and on this rank's part."""

    whole: tuple[tuple[Any, ...], dict[str, Any]]
    own: tuple[tuple[Any, ...], dict[str, Any]]
    tokens: int

    @property
    def weights(self) -> list[int]:
        """Numbers of this rank's tokens that have a label, and that are not 0, for each tensor of integers."""
        args, kwargs = self.own
        some = [x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor) and x.dim() > 1]
        return [int((x != none).sum()) for x in some if not x.is_floating_point() for none in (IGNORED, 0)]


@dataclass
class Seen:
    """Arguments and outputs of a module call."""

    name: str
    taken: list[torch.Tensor]
    returned: list[torch.Tensor]


@dataclass
class Recording:
    """Module calls of a forward pass."""

    seen: list[Seen] = field(default_factory=list)  # ordered by the end of calls
    # arguments of the first call of some blocks, by name
    given: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    output: Any = None
    drew: bool = False  # random numbers other than those of dropout were constants

    @contextlib.contextmanager
    def of(self, model: nn.Module, blocks: dict[str, nn.Module]) -> Iterator[None]:
        """Record calls of a model's modules, and arguments of some blocks, inside the context."""
        handles = []
        for name, block in blocks.items():

            def begins(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                if name not in self.given:
                    self.given[name] = map_inputs((args, kwargs), _kept)

            handles.append(block.register_forward_pre_hook(begins, with_kwargs=True))
        experts = [module for module in model.modules() if has_capacity(module)]
        # Because routers return tensors by experts and capacity.
        inner = {id(inside) for module in experts for inside in module.modules() if inside is not module}
        for name, module in model.named_modules():
            if id(module) in inner:
                continue

            def ended(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                taken = tensors_in((args, kwargs))
                self.seen.append(Seen(name, [x.detach() for x in taken], [x.detach() for x in tensors_in(output)]))

            handles.append(module.register_forward_hook(ended, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextlib.contextmanager
def _without_observers(model: nn.Module) -> Iterator[None]:
    """Disable forward hooks of scripts, because they may collect outputs."""
    before = [(module._forward_hooks, dict(module._forward_hooks)) for module in model.modules()]
    try:
        for hooks, all_ in before:
            for key, hook in all_.items():
                if not is_needed(hook):
                    del hooks[key]
        yield
    finally:
        for hooks, all_ in before:
            added = dict(hooks)  # such as those that transformers adds in the first forward pass
            hooks.clear()
            hooks.update(all_ | added)


def is_needed(hook: Any) -> bool:
    """Return True if a hook belongs to the engine, or a model of transformers computes with it."""
    return getattr(hook, "may_wait_for_ranks", False) or belongs_to_transformers(hook)


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    # Masks and positions stay the same tensors, because layouts are cached by them.
    return tensor.detach().clone() if tensor.is_floating_point() else tensor


def _blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return one block of each kind, by name: elements of the outermost lists of modules."""
    found: dict[str, nn.Module] = {}
    lists: list[str] = []
    kinds = set()
    half = sum(parameter.numel() for parameter in model.parameters()) / 2
    for path, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or any(path.startswith(f"{o}.") for o in lists):
            continue
        lists.append(path)
        for name, block in module.named_children():
            size = sum(parameter.numel() for parameter in block.parameters())
            # Layers of torch have no code of a model; a list of few large blocks would need as much memory again.
            if not size or size > half or type(block).__module__.startswith("torch.nn."):
                continue
            kind = signature(block)
            if kind not in kinds:
                kinds.add(kind)
                found[f"{path}.{name}".strip(".")] = block
    return found


class Passes:
    """Forward passes of a model in evaluation and training mode that leave the model and random numbers unchanged.

    Batch norms and layers of experts stay in evaluation mode, because they depend on a rank's tokens (a warning and the
    documentation say so).
    """

    def __init__(self, run: Callable[..., Any], model: nn.Module, group: SequenceGroup, call: Call) -> None:
        self._run, self.model, self.group, self.call = run, model, group, call
        self.blocks = _blocks_of(model)
        self._modes = {module: module.training for module in model.modules()}
        own = [vars(module) for module in model.modules()]
        self._numbers = [(some, n, value) for some in own for n, value in some.items() if type(value) in (int, float)]
        self._lists = [(value, list(value)) for some in own for value in some.values() if type(value) is list]
        self._buffers = [
            (m._buffers, name, buffer, buffer._version, buffer.detach().clone())
            for m in model.modules()
            for name, buffer in m._buffers.items()
            if buffer is not None and not buffer.is_inference()
        ]
        self._restore_numbers = _random_numbers(group.comm.device)

    def restore(self, *, numbers: bool = True) -> None:
        """Restore the model and, if `numbers`, random numbers."""
        for module, training in self._modes.items():
            module.training = training
        for attributes, name, value in self._numbers:
            attributes[name] = value
        for values, before in self._lists:
            values[:] = before
        for buffers, name, buffer, version, kept in self._buffers:
            buffers[name] = buffer
            if buffer._version != version:
                buffer.copy_(kept)
        if numbers:
            self._restore_numbers()

    def own(self, *, training: bool) -> Recording | str:
        """Run the model on this rank's tokens; return an error of torch or Python in words."""
        made = Recording()
        try:
            self._record(made, self.call.own, training)
        except (ShardwiseError, torch.OutOfMemoryError):
            raise
        except _RAISED as error:
            behind = f" behind {made.seen[-1].name}" if made.seen else ""
            return f"{type(error).__name__}{behind} when it runs on a rank's own tokens ({error})"
        return made

    def whole(self, *, training: bool, again: bool = False) -> Recording:
        """Run the model on whole sequences; `again`: with random numbers that follow those of the pass before."""
        made = Recording()
        with whole_sequences(self.group):
            self._record(made, self.call.whole, training, again=again)
        return made

    def _record(self, made: Recording, call: Any, training: bool, *, again: bool = False) -> None:
        self.restore(numbers=not again)
        for module, trains in self._modes.items():
            module.training = training and trains
        leave_out_statistics(self.model)
        args, kwargs = call
        self.group.comparing = True
        try:
            with (
                torch.no_grad(),
                _without_observers(self.model),
                made.of(self.model, self.blocks),
                Deterministic() if training else contextlib.nullcontext() as mode,
            ):
                made.output = self._run(*args, **kwargs)
            made.drew = mode is not None and mode.drew
        finally:
            self.group.comparing = False


def _random_numbers(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the states of torch, Python and NumPy."""
    found: list[tuple[Callable[[Any], Any], Any]] = [
        (torch.set_rng_state, torch.get_rng_state()),
        (random.setstate, random.getstate()),
    ]
    if device.type == "cuda":
        found.append((functools.partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found.append((numpy.random.set_state, numpy.random.get_state()))

    def restore() -> None:
        for function, state in found:
            function(state)

    return restore


def unlike(one: Recording, other: Recording, *, exact: bool = False) -> str | None:
    """Return the first module that returns other numbers in another pass on the same tokens, in words."""
    for first, second in itertools.zip_longest(one.seen, other.seen):
        name = (first or second).name or "the model"
        if first is None or second is None or first.name != second.name or len(first.returned) != len(second.returned):
            return f"{name} is called in one of two passes only"
        for before, after in zip(first.returned, second.returned, strict=True):
            if before.shape != after.shape:
                return f"{name} returns other shapes in each pass"
            wide = before.dtype if before.is_complex() else torch.float64
            off = (before.to(wide) - after.to(wide)).abs().nan_to_num(0, 0, 0)
            limit = 0.0 if exact else LIMITS.get(before.dtype, 0.0) * float(before.abs().nan_to_num(0, 0, 0).max())
            if before.numel() and float(off.max()) > limit:
                return f"{name} returns other numbers in each pass"
    return None


def leave_out_statistics(model: nn.Module) -> None:
    """Set batch norms and layers of experts to evaluation mode."""
    for module in model.modules():
        if isinstance(module, _BatchNorm) or has_capacity(module):
            for inner in module.modules():
                inner.training = False


def has_capacity(module: nn.Module) -> bool:
    """Return True if experts of the module drop tokens beyond a capacity."""
    return type(module).__name__ == "MoE"


def apart(
    whole: list[torch.Tensor], own: list[torch.Tensor], group: SequenceGroup, few: int, limit: float | None = None
) -> float | None:
    """Return the difference of tensors beyond rounding (`limit`; None: by dtype); None if equal or not comparable."""
    for expected, found in zip(whole, own, strict=True):
        dimension = token_dimension(expected.shape, found.shape, group.size, few)
        if dimension is None or not expected.numel() or expected.is_complex():
            continue
        part = expected.narrow(dimension, group.rank * found.shape[dimension], found.shape[dimension])
        dtype = expected.dtype if expected.is_floating_point() else torch.float64
        wide = torch.promote_types(dtype, torch.float32)
        scale = float(expected.to(wide).nan_to_num(0, 0, 0).abs().max()) or 1.0
        off = (part.to(wide) - found.to(wide)).abs().nan_to_num(0, 0, 0).movedim(dimension, 0).flatten(1).amax(
            1
        ) / scale
        wrong = int((off > (limit or LIMITS[dtype])).sum())
        # In 16 bits, routers may select other experts for some tokens.
        if wrong > (0 if wide is dtype else len(off) // 4):
            return float(off.max())
    return None


def token_dimension(whole: torch.Size, own: torch.Size, ranks: int, few: int) -> int | None:
    """Return the only dimension with different sizes, if it is the token dimension."""
    if len(whole) != len(own):
        return None
    differ = [number for number, sizes in enumerate(zip(whole, own, strict=True)) if sizes[0] != sizes[1]]
    # Dimension 0 is excluded, because tokens may be reordered there (rows of experts).
    if len(differ) != 1 or differ[0] == 0 or own[differ[0]] != few or whole[differ[0]] != few * ranks:
        return None
    return differ[0]
