"""Sharded and unsharded copies of tensor-parallel blocks, with their own parameters.

A copy shares attributes with its block, but no tensors and no hooks of the engine. Forward and backward hooks of
scripts are dropped, because they may collect outputs. Lists and dictionaries of a wrapped forward pass are copied.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.compat import belongs_to_transformers
from shardwise.parallel.tensor.group import TensorGroup
from shardwise.parallel.tensor.layers import Parallel
from shardwise.parallel.tensor.sequence_parallel import for_copy, takes_tokens
from shardwise.registry import part_of

_BEHIND = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS = ("_forward_pre_hooks", *_BEHIND)
_TensorOf = Callable[[torch.Tensor], torch.Tensor]
_MEMBERS = ("_parameters", "_buffers", "_modules")


class _Before(NamedTuple):
    kind: type[nn.Module]
    attributes: dict[str, Any]


_before: WeakIdKeyDictionary = WeakIdKeyDictionary()  # module -> its class and attributes before sharding
# Module -> names of its parameters that sharding has declared: tensor parts, and parameters with partial gradients.
# No weak references to parameters, because torch does not swap tensors that have one.
_declared: WeakIdKeyDictionary = WeakIdKeyDictionary()


def snapshot(model: nn.Module) -> Callable[[], None]:
    """Record a model's modules; return a function that stores all changes since."""
    noted = [(module, type(module), _attributes(module)) for module in model.modules()]
    parts = [
        (module, name, part_of(parameter))
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]

    def remember() -> None:
        for module, name, part in parts:
            own = module._parameters[name]
            if own is not None and part_of(own) is not part:
                _declared.setdefault(module, set()).add(name)
        for module, kind, attributes in noted:
            now = _attributes(module)
            changed = {name: value for name, value in attributes.items() if now.get(name) is not value}
            if changed or type(module) is not kind:
                _before[module] = _Before(kind, changed)

    return remember


def change_class(module: nn.Module, change: Callable[[type[nn.Module]], type[nn.Module]]) -> None:
    """Replace the class of a module, and of its unsharded copies."""
    module.__class__ = change(type(module))
    if module in _before:
        _before[module] = _before[module]._replace(kind=change(_before[module].kind))


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in (*_MEMBERS, *_HOOKS)}


def copied(
    block: nn.Module,
    values: Callable[[str, nn.Parameter], torch.Tensor],
    dtype: torch.dtype,
    group: TensorGroup | None,
    device: torch.device | None = None,
) -> nn.Module:
    """Return a copy of a block for a tensor-parallel group (None: unsharded), with parameters made by `values`."""
    own_tensor = functools.partial(_tensor_of, dtype=dtype, device=device)
    memo: dict[int, Any] = {}
    for module in block.modules():
        before = _before.get(module) if group is None else None
        made: nn.Module = object.__new__(before.kind if before is not None else type(module))
        made.__dict__ = dict(vars(module)) | (before.attributes if before is not None else {})
        memo[id(module)] = made
    for path, module in block.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(
                    values(f"{path}.{name}".lstrip("."), parameter), parameter.requires_grad
                )
        for buffer in module._buffers.values():
            if buffer is not None and id(buffer) not in memo:
                memo[id(buffer)] = own_tensor(buffer)
    for module in block.modules():
        made = memo[id(module)]
        for members in _MEMBERS:
            own = {name: memo.get(id(one), one) for name, one in vars(module)[members].items()}
            made.__dict__[members] = own
        for name in _HOOKS:
            hooks = vars(module)[name]
            made.__dict__[name] = type(hooks)(
                (key, _hook_of(hook, memo, own_tensor, group))
                for key, hook in hooks.items()
                if _stays(hook, group, name)
            )
        for name, value in _attributes(made).items():
            made.__dict__[name] = _mapped(value, memo, own_tensor)
        made.__dict__["_compiled_call_impl"] = None
        if "gradient_checkpointing" in vars(made):
            made.__dict__["gradient_checkpointing"] = False
        if group is not None and isinstance(made, Parallel):
            made.group = group
    found: nn.Module = memo[id(block)]
    return found


def _hook_of(hook: Any, memo: dict[int, Any], own_tensor: _TensorOf, group: TensorGroup | None) -> Any:
    return for_copy(hook, group) if group is not None and takes_tokens(hook) else _mapped(hook, memo, own_tensor)


def _stays(hook: Any, group: TensorGroup | None, kind: str) -> bool:
    if any(getattr(hook, name, False) for name in ("may_wait_for_ranks", "begins_tokens")):
        return False
    if takes_tokens(hook):
        return group is not None
    return kind not in _BEHIND or belongs_to_transformers(hook)


def _tensor_of(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    return tensor.detach().to(device, dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


def _mapped(value: Any, memo: dict[int, Any], own_tensor: _TensorOf) -> Any:
    if isinstance(value, (nn.Module, nn.Parameter)):
        return memo.get(id(value), value)
    if isinstance(value, torch.Tensor):
        return own_tensor(value)
    if isinstance(value, types.MethodType):
        own = memo.get(id(value.__self__))
        return value if own is None else _method_of(own, value)
    if isinstance(value, types.FunctionType):
        return _rebound(value, memo, own_tensor)
    if isinstance(value, functools.partial):
        args = [_mapped(one, memo, own_tensor) for one in value.args]
        return functools.partial(_mapped(value.func, memo, own_tensor), *args, **value.keywords)
    if type(value) in (list, tuple, dict, set):
        if type(value) is dict:
            return {key: _mapped(one, memo, own_tensor) for key, one in value.items()}
        return type(value)(_mapped(one, memo, own_tensor) for one in value)
    inner = getattr(value, "__dict__", None)
    if isinstance(inner, dict) and not isinstance(value, type) and any(id(one) in memo for one in inner.values()):
        made = copy.copy(value)
        made.__dict__.update({name: memo.get(id(one), one) for name, one in inner.items()})
        return made
    return value


def _method_of(module: Any, method: types.MethodType) -> Any:
    inherited = getattr(type(module), getattr(method.__func__, "__name__", ""), None)
    return types.MethodType(method.__func__ if inherited is None else inherited, module)


def _rebound(function: types.FunctionType, memo: dict[int, Any], own_tensor: _TensorOf) -> types.FunctionType:
    """Return a function (a forward pass that a script has wrapped) that calls copies instead of modules."""
    if id(function) in memo:
        found: types.FunctionType = memo[id(function)]
        return found
    memo[id(function)] = function  # because it may refer to itself
    kinds = (nn.Module, types.MethodType, types.FunctionType, functools.partial)

    def own(inner: Any) -> Any:
        if isinstance(inner, (list, dict, set)):
            return copy.copy(inner)
        return _mapped(inner, memo, own_tensor) if isinstance(inner, kinds) else inner

    cells = []
    for cell in function.__closure__ or ():
        try:
            inner = cell.cell_contents
        except ValueError:  # the cell is empty
            cells.append(cell)
            continue
        mapped = own(inner)
        cells.append(cell if mapped is inner else types.CellType(mapped))
    defaults = tuple(own(inner) for inner in function.__defaults__ or ())
    named = {name: own(inner) for name, inner in (function.__kwdefaults__ or {}).items()}
    new, old = [*cells, *defaults, *named.values()], [*(function.__closure__ or ()), *(function.__defaults__ or ())]
    old += (function.__kwdefaults__ or {}).values()
    if all(one is other for one, other in zip(new, old, strict=True)):
        return function
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, defaults or None, tuple(cells) or None
    )
    made.__kwdefaults__ = named or None
    memo[id(function)] = made
    return made


def declared(block: nn.Module) -> set[str]:
    """Return names of a block's parameters that sharding has declared."""
    return {
        f"{path}.{name}".lstrip(".") for path, module in block.named_modules() for name in _declared.get(module, ())
    }


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the unsharded shape of a parameter."""
    part = part_of(parameter)
    return tuple(parameter.shape) if part.box is None or part.shape is None else part.shape


def random_weight(number: int, shape: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return a random weight, equal on all ranks, by the parameter's number in its block."""
    generator = torch.Generator(device).manual_seed(number + 1)
    if len(shape) > 1 and shape[-1] > 1:
        return torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
    return torch.rand(shape, generator=generator, device=device) + 0.5


def numbers_changed(block: nn.Module) -> set[tuple[int, int]]:
    """Return pairs of integer attributes of a block before and after sharding."""
    found = set()
    for module in block.modules():
        before = _before.get(module)
        for name, value in before.attributes.items() if before is not None else ():
            now = getattr(module, name)
            if isinstance(value, int) and isinstance(now, int):
                found.add((value, now))
    return found


def map_inputs(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a copy of a block's inputs with changed tensors; caches are copied too."""
    return _map_nested(value, change, {}, 4)


# No closures: two that call each other form a cycle, which would keep the tensors until Python collects garbage.
def _map_nested(value: Any, change: Callable[[torch.Tensor], Any], memo: dict[int, Any], depth: int) -> Any:
    leaves, form = tree_flatten(value)
    return tree_unflatten([_map_leaf(leaf, change, memo, depth) for leaf in leaves], form)


def _map_leaf(one: Any, change: Callable[[torch.Tensor], Any], memo: dict[int, Any], depth: int) -> Any:
    if id(one) in memo:
        return memo[id(one)]
    made = one
    if isinstance(one, torch.Tensor):
        made = change(one)
    elif depth and _opens(one):
        try:
            made = copy.copy(one)
        except (TypeError, RuntimeError, AttributeError):
            made = one
        if made is not one:
            memo[id(one)] = made
            inner = {name: _map_nested(value, change, memo, depth - 1) for name, value in vars(one).items()}
            vars(made).update(inner)
    memo[id(one)] = made
    return made


def _opens(value: Any) -> bool:
    kind = type(value)
    return hasattr(value, "__dict__") and not (
        isinstance(value, (type, nn.Module, types.ModuleType)) or callable(value) or "onfig" in kind.__name__
    )


def signature(block: nn.Module) -> str:
    """Return a key of a block's kind: classes, shapes, shard specs, and attributes that select a code path."""
    return "\n".join(_lines(block))


def _lines(block: nn.Module) -> Iterator[str]:
    for path, module in block.named_modules():
        kind = type(module)
        yield f"{path} {kind.__module__}.{kind.__qualname__}"
        if isinstance(module, Parallel):
            yield f"{module.cut}"
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{name} {whole_shape(parameter)} {parameter.requires_grad}"
        for name, value in vars(module).items():
            if name != "training" and isinstance(value, (bool, str)):
                yield f"{name}={value}"
            elif isinstance(value, types.FunctionType):
                yield f"{name}={value.__qualname__}"
