"""Guarded parameters: resharded parameters keep identity, shape, dtype and numel, and never give wrong values.

While a unit is resharded, or its all-gather is in flight, its parameters have a class with a `__torch_function__` that
receives every access. It returns metadata. An access to values calls the unit's owner, which unshards in a pass, or
raises `ReleasedParameterError`. Inside the forward and backward of their own modules, and in `GatheredParameters`,
parameters have their own class and cost nothing. A use elsewhere is detected even while the values are valid, because
its backward needs them again.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.compat import fake_tensor, never_compiled, without_overrides
from shardwise.zero.units.status import ZeroParamStatus


class Owner(Protocol):
    """Makes the values of guarded parameters valid."""

    @property
    def in_pass(self) -> bool:
        """Whether a forward or backward pass runs, in which `touch` unshards."""

    def touch(self, parameter: nn.Parameter, what: str) -> Any:
        """Make the values of `parameter` valid and restore its class, or raise. Returns a token for `end_touch`."""

    def end_touch(self, parameter: nn.Parameter, token: Any, result: Any) -> None:
        """End a `touch` after a function has computed `result`, and unshard again when `result` is differentiated."""

    def gather(self, parameters: Iterable[nn.Parameter]) -> Any:
        """Unshard parameters on every rank (a collective)."""

    def put_back(self, parameters: Iterable[nn.Parameter], gathered: Any, src: int | None) -> None:
        """End a `gather`. All ranks take over the values of global rank `src`; None drops changes."""

    def discarded(self, gathered: Any) -> list[str]:
        """Return the names of gathered parameters whose changes `put_back` without `src` drops.

        Version counters show changes in place; this rank's range shows changes through aliases (`p.data`).
        """

    def kept(self, parameter: nn.Parameter) -> int:
        """Return the number of elements of `parameter` in this rank's shard."""

    def converted(self, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter | None:
        """Return the converted `parameter` without its values. None: the conversion needs values."""

    def replace(self, parameter: nn.Parameter, other: nn.Parameter) -> bool:
        """Replace `parameter` by a result of `converted` (`parameter.data = other`); return False if impossible."""


@runtime_checkable
class Detaching(Protocol):
    """Owner whose guarded parameters `state_dict()` may list."""

    def detached(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return `parameter.detach()` as another guarded parameter. None: the call needs values."""


_CONVERSIONS = frozenset({"to", "cpu", "cuda", "float", "double", "half", "bfloat16"})
"""Methods that `module.to(...)` and similar calls use on each parameter before they assign to its `data`."""

_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_classes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_blanks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

# Functions that need no values. Getters arrive as `descriptor.__get__`; their names are looked up there.
_METADATA = frozenset(
    {
        "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "itemsize",
        "nbytes", "is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla",
        "is_mps", "is_xpu", "is_complex", "is_floating_point", "numel", "nelement", "dim", "size",
        "element_size", "ndimension", "_version", "_backward_hooks", "_post_accumulate_grad_hooks",
        "retains_grad", "output_nr", "_base", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
        "__hash__", "__len__", "get_device", "is_inference", "zeros_like", "ones_like", "full_like",
        "empty_like", "rand_like", "randn_like", "new_zeros", "new_ones", "new_full", "new_empty", "is_shared",
        "is_conj", "is_neg", "is_signed", "grad_dtype", "name", "names", "_has_compatible_shallow_copy_type",
    }
)  # fmt: skip

# Functions of the memory that a guarded parameter refers to, which is the same each time.
_ADDRESSES = frozenset({"data_ptr", "untyped_storage", "storage", "_typed_storage", "storage_offset"})

# Functions of the memory layout of the values.
_ARRANGEMENT = frozenset({"stride", "is_contiguous", "dim_order", "is_non_overlapping_and_dense"})


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        name = getattr(getattr(func, "__self__", None), "__name__", name)
    return name


class Released(nn.Parameter):
    """Class of guarded parameters, with attributes that scripts written for DeepSpeed look for (`ds_id`, ...)."""

    @property
    def ds_id(self) -> int:
        """Unique number of the parameter."""
        return id(self)

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Status `NOT_AVAILABLE`."""
        return ZeroParamStatus.NOT_AVAILABLE

    @property
    def ds_numel(self) -> int:
        """Number of elements of the unsharded parameter."""
        return self.numel()

    @property
    def ds_shape(self) -> torch.Size:
        """Shape of the unsharded parameter."""
        return self.shape

    def partition_numel(self) -> int:
        """Return the number of elements of the parameter in this rank's shard."""
        return _owners[self].kept(self)

    @classmethod
    @never_compiled
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad and not any(is_released(value) for value in args[0]):
            return _gradients_of(*args, **kwargs)
        name = _name_of(func)
        if name in _METADATA or (name == "type" and len(args) == 1 and not kwargs):  # with a dtype, `type` converts
            with without_overrides():
                return func(*args, **kwargs)
        # In a pass, a kernel that will read the values takes the address (Triton's launcher does).
        reads = name == "data_ptr" and is_released(args[0]) and _owners[args[0]].in_pass
        if name in _ADDRESSES and is_released(args[0]) and not reads:
            return func(blank_of(args[0]), *args[1:], **kwargs)
        if name in _ARRANGEMENT and is_released(args[0]):
            return func(_arranged(args[0]), *args[1:], **kwargs)
        if name == "detach":
            keeper = _owners[args[0]]
            found = keeper.detached(args[0]) if isinstance(keeper, Detaching) else None
            if found is not None:
                return found
        if name in _CONVERSIONS:
            found = _converted(func, args, kwargs)
            if found is not None:
                return found
        if name == "data" and len(args) == 2 and all(map(is_released, args)) and _owners[args[0]].replace(*args):
            return None
        touched: list[tuple[nn.Parameter, Owner, Any]] = []
        for value in _flatten((args, kwargs)):
            if is_released(value):
                owner: Owner = _owners[value]
                touched.append((value, owner, owner.touch(value, name)))
        result = None
        try:
            result = func(*args, **kwargs)
        finally:
            for parameter, owner, token in touched:
                owner.end_touch(parameter, token, result)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the values into a plain parameter."""
        return self._as_itself("copy.deepcopy", lambda: copy.deepcopy(self, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter."""
        return self._as_itself("pickling", lambda: self.__reduce_ex__(protocol))

    def _as_itself(self, what: str, do: Callable[[], Any]) -> Any:
        owner: Owner = _owners[self]
        token = owner.touch(self, what)
        try:
            return do()
        finally:
            owner.end_touch(self, token, None)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with without_overrides():
            return f"Parameter(released, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"


_released: set[type] = {Released}
"""Classes of guarded parameters."""


def _converted(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Parameter | None:
    """Convert a guarded parameter without values, if possible; converting an empty tensor gives dtype and device."""
    parameter = args[0]
    if not is_released(parameter) or kwargs.get("copy") or kwargs.get("memory_format") is not None:
        return None
    with without_overrides():
        like = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        found = func(like, *args[1:], **kwargs)
    if found is like:
        return parameter
    return _owners[parameter].converted(parameter, found.dtype, found.device)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _arranged(parameter: nn.Parameter) -> torch.Tensor:
    with without_overrides():
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def blank(like: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this shape, dtype and device with all elements at one element of memory: NaN.

    Each guarded parameter refers to its own blank. Code that reads it undetected (`torch.tensor(p)`, a kernel called
    directly) gets NaN, or the smallest integer, and never other memory. torch refuses to write to it.
    """
    with without_overrides():
        element = torch.empty(1, dtype=like.dtype, device=like.device)
        if like.is_floating_point() or like.is_complex():
            element.view(torch.uint8).fill_(0xFF)  # NaN in every floating dtype
        else:
            element.fill_(False if like.dtype is torch.bool else torch.iinfo(like.dtype).min)
        return element.reshape(()).expand(like.shape)


def blank_of(parameter: nn.Parameter) -> torch.Tensor:
    """Return the blank of a parameter, the same each time: scripts count shared weights by `data_ptr()`."""
    found = _blanks.get(parameter)
    like = (parameter.dtype, parameter.device, parameter.shape)  # offloaded experts change the shape
    if found is None or (found.dtype, found.device, found.shape) != like:
        found = _blanks[parameter] = blank(parameter)
    assert isinstance(found, torch.Tensor)
    return found


def _gradients_of(
    outputs: Any, inputs: tuple[Any, ...], *, materialize_grads: bool = False, **kwargs: Any
) -> tuple[torch.Tensor | None, ...]:
    """Call `torch.autograd.grad` with gradient edges in place of guarded inputs, which need no values.

    The pass runs with overrides in force, because recomputation may use any parameter.
    """
    with without_overrides():
        edges = [get_gradient_edge(value) if is_released(value) else value for value in inputs]
    found = torch.autograd.grad(outputs, edges, **kwargs)
    if not materialize_grads:
        return found
    graph = bool(kwargs.get("create_graph"))
    return tuple(
        gradient if gradient is not None else torch.zeros_like(value, requires_grad=graph)
        for gradient, value in zip(found, inputs, strict=True)
    )


def _flatten(value: Any) -> list[Any]:
    found: dict[int, Any] = {}
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            found[id(item)] = item
        elif isinstance(item, (tuple, list)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
    return list(found.values())


def adopt(parameter: nn.Parameter, owner: Owner) -> None:
    """Set the owner of a parameter."""
    _owners[parameter] = owner
    if not is_released(parameter):
        _classes[parameter] = type(parameter)


def disown(parameter: nn.Parameter) -> None:
    """Remove the owner of a parameter whose values are valid."""
    restore(parameter)
    _owners.pop(parameter, None)


def owner_of(parameter: torch.Tensor) -> Owner | None:
    """Return the owner of a parameter, or None."""
    return _owners.get(parameter)


def guard(parameter: nn.Parameter) -> None:
    """Mark the values as invalid."""
    parameter.__class__ = _guarded(type(parameter))


def restore(parameter: nn.Parameter) -> None:
    """Mark the values as valid: give the parameter its own class back."""
    if is_released(parameter):
        parameter.__class__ = _classes.get(parameter, nn.Parameter)


Classes = list[tuple[nn.Parameter, type[nn.Parameter], type[nn.Parameter]]]
"""Parameters with their own classes, and their classes while guarded."""


def classes_of(parameters: Iterable[nn.Parameter]) -> Classes:
    """Look up the classes of parameters once, for repeated guarding."""
    found = [(p, _classes.get(p, nn.Parameter) if is_released(p) else type(p)) for p in parameters]
    return [(parameter, own, _guarded(own)) for parameter, own in found]


@functools.cache
def _guarded(own: type[nn.Parameter]) -> type[nn.Parameter]:
    """Return the guarded class of parameters of class `own`.

    Classes that dispatch operators must go on dispatching: fake tensors get a guarded subclass. Other such classes do
    not keep their values in the units' memory, and are returned as they are.
    """
    if own.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return Released
    if own is not fake_tensor():
        return own
    made = type(f"Released{own.__name__}", (Released, own), {})
    _released.add(made)
    return made


def is_released(parameter: torch.Tensor) -> bool:
    """Return True if a parameter is guarded."""
    return type(parameter) in _released
