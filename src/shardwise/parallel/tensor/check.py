"""Check of tensor parallelism: compares sharded blocks with unsharded copies in the first forward pass.

Names, sizes or rules determine which layers are sharded. The model's code between them may not support that: a norm
over heads, a softmax over features, a weight used without its layer. So each kind of sharded block is copied twice with
the same random weights, sharded and unsharded. On some tokens of the block's first inputs, outputs and gradients of
inputs and parameters must agree. The sharded copies first run without communication, because all ranks must raise a
shape error before any rank waits.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.boxes import whole as whole_region
from shardwise.compat import without_function_modes
from shardwise.errors import ConfigError
from shardwise.parallel.deterministic import Deterministic
from shardwise.parallel.sequence import shares as sequence_shares
from shardwise.parallel.tensor import mappings
from shardwise.parallel.tensor.copies import (
    copied,
    declared,
    map_inputs,
    numbers_changed,
    random_weight,
    whole_shape,
)
from shardwise.parallel.tensor.group import TensorGroup
from shardwise.parallel.tensor.guard import numbers_of, same_numbers
from shardwise.parallel.tensor.layers import Parallel
from shardwise.parallel.tensor.operators import Operators
from shardwise.registry import cut, part_of, paste
from shardwise.trees import tensors_in

RULES = "tensor_parallel.partition_config.layer_specs"
_ROWS, _TOKENS = 2, 8  # rows and tokens of a block's inputs that are used
_NEAR, _NEAR_IN_HALF = 1e-4, 5e-2  # tolerances relative to the norm of a tensor
_FLOOR = 1e-4  # smaller differences relative to the largest gradient are rounding


@contextlib.contextmanager
def frozen(block: nn.Module) -> Iterator[None]:
    """Give a block no gradients, because a wrapped forward pass of a copy may call modules of the block."""
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


class _CopyGroup(TensorGroup):
    """Tensor-parallel group of a sharded copy. `silent`: no communication."""

    silent = False

    def carries(self, tensor: torch.Tensor) -> bool:
        return not self.silent and super().carries(tensor)


class _Run:
    def __init__(self, module: nn.Module, block: nn.Module, given: tuple[Any, Any], wanted: list[torch.Tensor]) -> None:
        self.module, self._block, self._wanted = module, block, wanted
        self.made: dict[str, torch.Tensor] = {}
        self.inputs: list[torch.Tensor | None] = []
        self.parameters: dict[str, torch.Tensor | None] = {}
        self._given = given

    def forward(self, silent: bool = False, watching: bool = False) -> None:
        """With `watching`, record the outputs of each submodule."""
        handles = []
        if watching:
            for path, inner in self.module.named_modules():
                handles.append(inner.register_forward_hook(self._noting(path)))
        args, kwargs = self._given
        with without_function_modes(), Deterministic(silent), frozen(self._block):
            made = self.module(*args, **kwargs)
        for handle in handles:
            handle.remove()
        for layer in self.module.modules():
            if isinstance(layer, Parallel):
                layer.group.end_pass()  # breaks a reference cycle through the graph
        self.outputs = [tensor for tensor in tensors_in(made) if tensor.is_floating_point()]

    def parameter(self, name: str) -> torch.Tensor:
        return dict(self.module.named_parameters())[name]

    def _noting(self, path: str) -> Callable[..., None]:
        def note(_: nn.Module, __: Any, made: Any) -> None:
            found = [tensor for tensor in tensors_in(made) if tensor.is_floating_point()]
            if found:
                self.made[path] = found[0].detach().clone()

        return note

    def backward(self, seeds: dict[int, torch.Tensor], silent: bool = False) -> None:
        named = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        roots = {index: self.outputs[index] for index in seeds if self.outputs[index].requires_grad}
        if roots:
            with Deterministic(silent), frozen(self._block):
                given = [seeds[index] for index in roots]
                # Without gradients of parameters outside of the copy.
                torch.autograd.backward(list(roots.values()), given, inputs=[*self._wanted, *named.values()])
        self.outputs = [tensor.detach() for tensor in self.outputs]
        self.inputs = [tensor.grad for tensor in self._wanted]
        self.parameters = {name: one.grad for name, one in named.items()}


class _Sizes(NamedTuple):
    rows: int | None = _ROWS  # None: all
    tokens: int | None = _TOKENS


class Comparison:
    """Compares one block, sharded and unsharded, on arguments of its forward; `path` is its name in the model."""

    def __init__(self, block: nn.Module, path: str, group: TensorGroup, args: Any, kwargs: Any) -> None:
        self._block, self._group, self._path = block, group, path
        self._comm = group.comm
        self._given = (args, kwargs)
        # Without tensors in caches, which other blocks have filled.
        given = [one for one in tree_leaves(self._given) if isinstance(one, torch.Tensor)]
        self._tensors = list({id(tensor): tensor for tensor in given}.values())
        self._declared = declared(block)
        self._numbers = {name: number for number, (name, _) in enumerate(block.named_parameters())}
        dims = [m.cut.tokens for m in block.modules() if isinstance(m, Parallel) and m.cut.tokens is not None]
        self._token_dim = dims[0] if dims else None
        self._hidden = next((i for i, t in enumerate(self._tensors) if t.is_floating_point() and t.dim() > 1), None)
        self._length: int | None = None
        self._rows: int | None = None
        self._heads: dict[int, tuple[int, list[int], torch.Tensor]] = {}
        # Inputs with the shape of this rank's heads and equal values on all ranks.
        self._alike_heads: dict[int, tuple[int, list[int], torch.Tensor]] = {}
        self._device = self._comm.device if self._hidden is None else self._tensors[self._hidden].device

    def operators(self, closes: Callable[[nn.Module], bool]) -> tuple[str, nn.Parameter | None]:
        """Return the operators of the sharded block on meta tensors, and a foreign sharded parameter; no communication.

        `closes` returns True for a module that may use its sharded weights in its forward pass.
        """
        group = _CopyGroup(self._comm, self._group.columns, self._group.place)
        group.silent = True
        group.begin_tokens(self._group.tokens)

        def without_values(tensor: torch.Tensor) -> torch.Tensor:
            dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
            if hasattr(tensor, "__tensor_flatten__"):  # quantised
                return torch.empty(tensor.shape, dtype=dtype, device="meta")
            return torch.empty_like(tensor, dtype=dtype, device="meta")

        module = copied(self._block, lambda _, one: without_values(one), torch.float32, group, torch.device("meta"))
        args, kwargs = map_inputs(self._given, without_values)
        noted = Operators(self._block, closes)
        try:
            with noted, torch.no_grad():
                module(*args, **kwargs)
        except Exception as error:
            noted.found.append(type(error).__name__)
        group.end_pass()
        return "\n".join(noted.found), noted.foreign

    def run(self) -> list[str]:
        """Return names of unsharded parameters with partial gradients on each rank.

        Raises a ConfigError on all ranks if the sharded block computes other values, or fails.
        """
        self._compare_inputs()
        whole, dtype, sizes, problem = self._whole()
        divided = None
        shapes: list[list[int]] = []
        if whole is not None:
            try:
                divided = self._divided(dtype, sizes, silent=True)
                divided.forward(silent=True)
                shapes = [list(tensor.shape) for tensor in divided.outputs]
                alike = [i for i in range(len(whole.outputs)) if self._alike_shape(whole, shapes, i)]
                divided.backward(self._seeds(whole, alike, divided=True), silent=True)
            except Exception as error:
                problem = self._described(error, divided)
        every = self._comm.exchange([problem, shapes], "tensor_check")
        self._refuse([told for told, _ in every])
        assert whole is not None
        compared = [
            i for i in range(len(whole.outputs)) if all(self._alike_shape(whole, theirs, i) for _, theirs in every)
        ]
        if whole.outputs and 0 not in compared:
            shape, found = list(whole.outputs[0].shape), [theirs[0] if theirs else None for _, theirs in every]
            self._refuse([f"|its output has the shape {found[0]}, and whole {shape}"])
        whole.backward(self._seeds(whole, compared, divided=False))
        divided = self._divided(dtype, sizes)
        divided.forward()
        divided.backward(self._seeds(whole, compared, divided=True))
        near = _NEAR_IN_HALF if whole.outputs and _is_half(whole.outputs[0]) else _NEAR
        wrong = self._wrong_outputs(whole, divided, compared, near)
        if any(told for told in self._comm.exchange(wrong, "tensor_check")):
            self._refuse(self._comm.exchange(self._first_difference(dtype, sizes, near) or wrong, "tensor_check"))
        self._refuse(self._comm.exchange(self._wrong_gradients(whole, divided, near), "tensor_check"))
        return self.summands

    # -- inputs --------------------------------------------------------------------------------------------------------

    def _compare_inputs(self) -> None:
        """Find inputs sharded by heads; raise a ConfigError if any other input differs between ranks."""
        own = [[list(t.shape), *numbers_of(t).tolist(), _is_half(t)] for t in self._tensors]
        every = self._comm.exchange(own, "tensor_block_inputs")
        if any(len(other) != len(every[0]) for other in every):
            self._refuse([f"|the ranks give it {sorted({len(other) for other in every})} tensors"])
        if self._hidden is not None:
            hidden = self._tensors[self._hidden]
            self._rows = hidden.shape[0] if hidden.dim() > 2 else None
            dim = hidden.dim() - 2 if self._token_dim is None else self._token_dim % hidden.dim()
            shapes = [other[self._hidden][0] for other in every]
            self._length = sum(shape[dim] for shape in shapes) if self._token_dim is not None else hidden.shape[dim]
        totals = numbers_changed(self._block)
        for index, tensor in enumerate(self._tensors):
            rows = [other[index] for other in every]
            if self._token_dim is not None and index == self._hidden:
                continue
            if all(row[0] == rows[0][0] and same_numbers(row[1:4], rows[0][1:4], half=row[4]) for row in rows):
                if tensor.dim() == 4 and any(1 < now == tensor.shape[1] for total, now in totals if total != now):
                    whole = torch.cat([tensor.detach()] * self._group.size, 1)
                    self._alike_heads[index] = 1, [tensor.shape[1]] * self._group.size, whole
                continue
            sizes = [[row[0][dim] for row in rows] for dim in range(tensor.dim())]
            if any(len(row[0]) != tensor.dim() for row in rows):
                sizes = []
            dims = [
                dim
                for dim, some in enumerate(sizes)
                if any(some[self._group.place] == now and sum(some) == total for total, now in totals)
            ]
            if not dims or index == self._hidden:
                self._refuse(
                    [
                        f"|its input {index} of shape {rows[0][0]} differs between the ranks, so that something before "
                        "it is divided and not put together"
                    ]
                )
            dim = 1 if 1 in dims and tensor.dim() == 4 else dims[0]
            whole = mappings.together(tensor.detach(), self._group, sizes[dim], dim, "tensor_check")
            self._heads[index] = dim, sizes[dim], whole

    def _sample(self, dtype: torch.dtype, sizes: _Sizes, group: TensorGroup | None) -> tuple[Any, list[torch.Tensor]]:
        """Return inputs of a copy, and those that require a gradient; `group`: of a sharded copy."""
        order = {id(tensor): index for index, tensor in enumerate(self._tensors)}
        wanted: list[torch.Tensor] = []
        self._wanted: list[int] = []

        def change(tensor: torch.Tensor) -> torch.Tensor:
            index = order.get(id(tensor), -1)
            made = tensor.detach()
            if index == self._hidden:
                made = self._random_hidden(made)
            elif index in self._heads and group is None:
                made = self._heads[index][2]
            made = self._shortened(made, sizes)
            if not made.is_floating_point():
                return made.clone()
            made = made.to(dtype, copy=True)
            if index == self._hidden and group is not None and self._token_dim is not None:
                made = self._own_tokens(made, group.begin_tokens(made.shape[self._token_dim])).clone()
            if not (tensor.requires_grad or index == self._hidden):
                return made
            made.requires_grad_()
            wanted.append(made)
            self._wanted.append(index)
            return made.clone()  # cloned, because a block may modify it in place

        return map_inputs(self._given, change), wanted

    def _random_hidden(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return random hidden states, because those of some models are zero at the first step."""
        shape = list(hidden.shape)
        if self._token_dim is not None and self._length is not None:
            shape[self._token_dim] = self._length
        return torch.randn(shape, generator=self._generator(0), device=self._device)

    def _own_tokens(self, tensor: torch.Tensor, shares: Sequence[int] | None = None) -> torch.Tensor:
        assert self._token_dim is not None
        sizes = shares or sequence_shares(tensor.shape[self._token_dim], self._group.size)
        return mappings.part(tensor, self._group, sizes, self._token_dim)

    def _shortened(self, tensor: torch.Tensor, sizes: _Sizes) -> torch.Tensor:
        for dim, size in enumerate(tensor.shape):
            features = tensor.is_floating_point() and tensor.dim() > 1 and dim == tensor.dim() - 1
            if (
                sizes.tokens is not None
                and size == self._length
                and not (features and tensor.shape[-2] not in (size, sizes.tokens))
            ):
                tensor = tensor.narrow(dim, 0, min(size, sizes.tokens))
            elif sizes.rows is not None and dim == 0 and size == self._rows:
                tensor = tensor.narrow(dim, 0, min(size, sizes.rows))
        return tensor

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(number)

    # -- the two copies ------------------------------------------------------------------------------------------------

    def _values(self, dtype: torch.dtype, *, divided: bool) -> Callable[[str, nn.Parameter], torch.Tensor]:
        def values(name: str, parameter: nn.Parameter) -> torch.Tensor:
            shape = whole_shape(parameter) if name in self._declared else tuple(parameter.shape)
            if not parameter.is_floating_point():
                return parameter.detach().clone()
            made = random_weight(self._numbers.get(name, 0), shape, self._device)
            box = part_of(parameter).box if divided and name in self._declared else None
            return made.to(dtype) if box is None else cut(made, box).to(dtype, copy=True)

        return values

    def _whole(self) -> tuple[_Run | None, torch.dtype, _Sizes, str]:
        """Run the unsharded copy's forward on as few tokens as possible; or return the reason of a failure."""
        # Inputs with equal values on all ranks are first used unchanged, then as sharded by heads.
        run, dtype, sizes, problem = self._whole_forward()
        if run is None and self._alike_heads:
            self._heads |= self._alike_heads
            run, dtype, sizes, _ = self._whole_forward()
        return run, dtype, sizes, problem if run is None else ""

    def _whole_forward(self) -> tuple[_Run | None, torch.dtype, _Sizes, str]:
        first = torch.float64 if self._device.type == "cpu" else torch.float32
        own = next((p.dtype for p in self._block.parameters() if p.is_floating_point()), first)
        problem = ""
        for dtype in dict.fromkeys((first, torch.float32, own)):
            module = copied(self._block, self._values(dtype, divided=False), dtype, None)
            for sizes in (_Sizes(), _Sizes(tokens=None), _Sizes(None, None)):
                run = None
                try:
                    given, wanted = self._sample(dtype, sizes, None)
                    run = _Run(module, self._block, given, wanted)
                    run.forward()
                    return run, dtype, sizes, ""
                except Exception as error:
                    problem = problem or f"{self._described(error, run)} (this is the whole one)"
        return None, first, _Sizes(), problem

    def _divided(self, dtype: torch.dtype, sizes: _Sizes, *, silent: bool = False) -> _Run:
        group = _CopyGroup(self._comm, self._group.columns, self._group.place)
        group.silent = silent
        module = copied(self._block, self._values(dtype, divided=True), dtype, group)
        given, wanted = self._sample(dtype, sizes, group)
        return _Run(module, self._block, given, wanted)

    def _alike_shape(self, whole: _Run, shapes: Sequence[Sequence[int]], index: int) -> bool:
        if index >= len(shapes):
            return False
        return self._divides_output(index) or list(whole.outputs[index].shape) == list(shapes[index])

    def _divides_output(self, index: int) -> bool:
        return self._token_dim is not None and index == 0

    def _seeds(self, whole: _Run, compared: Sequence[int], *, divided: bool) -> dict[int, torch.Tensor]:
        found = {}
        for index in compared:
            output = whole.outputs[index]
            seed = torch.randn(output.shape, generator=self._generator(1000 + index), device=self._device)
            seed = seed.to(output.dtype)
            found[index] = self._own_tokens(seed).contiguous() if divided and self._divides_output(index) else seed
        return found

    # -- differences ---------------------------------------------------------------------------------------------------

    def _wrong_outputs(self, whole: _Run, divided: _Run, compared: Sequence[int], near: float) -> str:
        for index in compared:
            wanted = whole.outputs[index]
            if self._divides_output(index):
                wanted = self._own_tokens(wanted)
            if off := _off(divided.outputs[index], wanted, near):
                return f"|its output {index} is off by {off}"
        return ""

    def _first_difference(self, dtype: torch.dtype, sizes: _Sizes, near: float) -> str:
        given, wanted = self._sample(dtype, sizes, None)
        copy = copied(self._block, self._values(dtype, divided=False), dtype, None)
        whole = _Run(copy, self._block, given, wanted)
        whole.forward(watching=True)
        divided = self._divided(dtype, sizes)
        divided.forward(watching=True)
        modules = dict(self._block.named_modules())
        for path, found in divided.made.items():
            expected = whole.made.get(path)
            if expected is None or expected.shape != found.shape or not path:
                continue
            if off := _off(found, expected, near):
                kind = type(modules[path]).__name__
                return f"{path}|the first module with another output is {self._name(path)} ({kind}), off by {off}"
        return ""

    def _wrong_gradients(self, whole: _Run, divided: _Run, near: float) -> str:
        """Return the gradients that differ, and sum partial ones of unsharded parameters from now on."""
        known = [grad for grad in whole.parameters.values() if grad is not None]
        floor = _FLOOR * near * max((float(grad.norm()) for grad in known), default=0.0)
        wrong, summands = [], []
        for name, parameter in self._block.named_parameters():
            if name not in whole.parameters or not parameter.is_floating_point():
                continue
            grads = whole.parameters[name], divided.parameters[name]
            expected = _or_zero(grads[0], whole.parameter(name))
            found = _or_zero(grads[1], divided.parameter(name))
            if name in self._declared:
                total = torch.zeros_like(expected)
                box = part_of(parameter).box
                paste(found.contiguous(), box if box is not None else whole_region(tuple(expected.shape)), total)
                found = mappings.total(total, self._group, "tensor_check")
            off = _off(found, expected, near, floor)
            if name not in self._declared:
                told = self._comm.exchange([bool(off), grads[1] is not None], "tensor_check")
                if any(differs for differs, _ in told):
                    total = mappings.total(found.contiguous(), self._group, "tensor_check")
                    if all(there for _, there in told) and not _off(total, expected, near, floor):
                        summands.append(name)
                        continue
            if off:
                wrong.append((name, f"the gradient of {self._name(name)} is off by {off}"))
        for index, wanted, own in zip(self._wanted, whole.inputs, divided.inputs, strict=True):
            if wanted is None or own is None:
                off = "" if wanted is own else "100 %"
            else:
                off = _off(own, self._own_input(index, wanted), near, floor)
            if off:
                wrong.append(("", f"the gradient of its input {index} is off by {off}"))
        self.summands = summands
        if not wrong:
            return ""
        children = {name.split(".")[0] for name, _ in wrong}
        said = "; ".join(what for _, what in wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        return f"{children.pop() if len(children) == 1 else ''}|{said}"

    def _own_input(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        if index in self._heads:
            dim, sizes, _ = self._heads[index]
            return mappings.part(whole, self._group, sizes, dim)
        return self._own_tokens(whole) if index == self._hidden and self._token_dim is not None else whole

    # -- messages ------------------------------------------------------------------------------------------------------

    def _name(self, path: str) -> str:
        return f"{self._path}.{path}".strip(".")

    def _described(self, error: Exception, run: _Run | None) -> str:
        places = {} if run is None else {id(module): path for path, module in run.module.named_modules()}
        where, line = "", ""
        for frame, number in traceback.walk_tb(error.__traceback__):
            inner = places.get(id(frame.f_locals.get("self")))
            if inner is not None and not frame.f_code.co_filename.startswith(_OWN):
                where = inner
                line = linecache.getline(frame.f_code.co_filename, number).strip()
        at = f" in {self._name(where) or 'the model'}" if where or line else ""
        said = str(error).split("\n")[0]
        return f"{where}|{type(error).__name__}{at}{f' at `{line}`' if line else ''}: {said}"

    def _refuse(self, every: Sequence[str]) -> None:
        """Raise the first difference of any rank, as "path in the block|difference"; "" is none."""
        told = next((one for one in every if one), None)
        if told is None:
            return
        where, _, what = told.partition("|")
        child = self._name(where.split(".")[0])
        pattern = re.sub(r"(?<=\\\.)\d+(?=\\\.|$)", r"\\d+", re.escape(child or self._path))
        leave = "Leave" if self._token_dim is None else "Switch tensor_parallel.sequence_parallel off, or leave"
        raise ConfigError(
            f"tensor parallelism: {self._path or 'the model'} ({type(self._block).__name__}), divided over "
            f"{self._group.size} ranks, does not compute what it computes whole: {what}. {leave} the layers there "
            f'whole ({RULES}: {{"patterns": ["^{pattern}"], "partition_type": "skip"}}), or divide them by other rules'
        )


_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))  # directories without model code


def _is_half(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _or_zero(grad: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if grad is None else grad


def _off(found: torch.Tensor, expected: torch.Tensor, near: float, floor: float = 0.0) -> str:
    size, off = float(expected.norm()), float((found - expected).norm())
    if off <= near * size + floor:
        return ""
    return f"{100 * off / size:.2g} %" if size > 0 else "100 %"
