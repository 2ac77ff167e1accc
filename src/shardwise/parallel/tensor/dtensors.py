"""Models sharded by torch (`parallelize_module`), with DTensor parameters.

The engine's parameter is the local tensor, declared as a part of the global tensor. During a module's forward its
parameters are DTensors again, so the plan's forward wrappers keep working.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.parallel.tensor.group import Runs, TensorGroup


class _Kept(NamedTuple):
    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def made_of(self, local: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def _found(model: nn.Module) -> Iterator[tuple[str, Any]]:
    # The import is slow, and already done if there are DTensors.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    if kind is not None:
        yield from ((name, parameter) for name, parameter in model.named_parameters() if isinstance(parameter, kind))


def line_of(model: nn.Module) -> list[int] | None:
    """Return the global ranks over which a model's DTensors are sharded; raises a UsageError if unsupported."""
    line: list[int] | None = None
    for name, tensor in _found(model):
        mesh, dim = tensor.device_mesh, _mesh_dim(name, tensor)
        own = mesh.get_coordinate()
        if own is None:
            raise UsageError(f"parameter {name!r} is a DTensor of the mesh {mesh}, which this rank is not in")
        if dim is None and mesh.ndim > 1:
            continue  # replicated: other parameters determine the ranks
        index: list[Any] = list(own)
        index[dim or 0] = slice(None)
        ranks = mesh.mesh[tuple(index)].tolist()
        if line is not None and ranks != line:
            raise UsageError(
                f"parameter {name!r} is divided over ranks {ranks}, an earlier one over {line}: all DTensors of a "
                "model have to be divided over the same ranks. Use one mesh dimension for all of them"
            )
        line = ranks
    return line


def _mesh_dim(name: str, tensor: Any) -> int | None:
    """Return the mesh dimension that shards a DTensor; None if it is replicated."""
    from torch.distributed.tensor import Replicate, Shard

    found = [number for number, placement in enumerate(tensor.placements) if not isinstance(placement, Replicate)]
    if len(found) > 1 or not all(isinstance(tensor.placements[number], Shard) for number in found):
        raise UsageError(
            f"parameter {name!r} is a DTensor with the placements {list(tensor.placements)}: expected Shard(dim) in at "
            "most one dimension of the mesh, and Replicate() in the others. Do not call fully_shard, as ZeRO divides "
            "over the data-parallel ranks; redistribute other parameters before shardwise.initialize(), or load a "
            "model of transformers without a plan, and write tensor_parallel.autotp_size in the configuration"
        )
    return found[0] if found else None


class DTensors:
    """Replaces a model's DTensors by local tensors while an engine is open."""

    def __init__(self, model: nn.Module, group: TensorGroup) -> None:
        self._local: dict[int, nn.Parameter] = {}  # by id() of the DTensor
        self._kept: dict[int, _Kept] = {}  # by id() of the local parameter
        self._before: list[Any] = []  # kept alive, so their id() is not reused
        self._own: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._hooks: list[Any] = []
        for name, tensor in list(_found(model)):
            self._take(name, tensor, group)
        for module in model.modules():
            own = {name: self._local[id(p)] for name, p in module._parameters.items() if id(p) in self._local}
            module._parameters.update(own)
            if own:
                self._own[module] = own

    def __bool__(self) -> bool:
        return bool(self._own)

    def _take(self, name: str, tensor: Any, group: TensorGroup) -> None:
        local = nn.Parameter(tensor.detach().to_local(), requires_grad=tensor.requires_grad)
        number = _mesh_dim(name, tensor)
        if number is not None:
            placement = tensor.placements[number]
            dim = placement.dim % tensor.ndim
            runs = _chunks(tensor.shape[dim], group.size)
            first, end = runs[group.place][0]
            if local.shape[dim] != end - first:
                raise UsageError(
                    f"parameter {name!r} is a DTensor with {placement}, of which this rank has {local.shape[dim]} of "
                    f"{tensor.shape[dim]} in dimension {dim}; expected {end - first}, as torch.chunk divides"
                )
            group.declare(local, tensor.shape, dim, runs)
        self._local[id(tensor)] = local
        self._kept[id(local)] = _Kept(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
        self._before.append(tensor)

    # -- optimizer -----------------------------------------------------------------------------------------------------

    def exchange(self, optimizer: Any, parameters: Iterable[Any] | None) -> list[Any] | None:
        """Replace DTensors by local tensors in a client's optimizer, whose state is kept, and in its parameters."""
        if isinstance(optimizer, torch.optim.Optimizer):
            self._optimizer = optimizer
            _swap(optimizer, self._local)
        return None if parameters is None else [self._exchanged(entry) for entry in parameters]

    def _exchanged(self, entry: Any) -> Any:
        if isinstance(entry, dict):
            given = entry["params"]
            listed = [given] if isinstance(given, torch.Tensor) else given
            return {**entry, "params": [self._exchanged(one) for one in listed]}
        if isinstance(entry, tuple):
            return entry[0], self._exchanged(entry[1])
        return self._local.get(id(entry), entry)

    # -- forward pass --------------------------------------------------------------------------------------------------

    def watch(self, hook: Callable[[Callable[..., None]], Any]) -> None:
        """Install hooks that provide DTensors during forward passes, after the hooks that unshard parameters."""
        for module in self._own:
            self._hooks.append(module.register_forward_pre_hook(hook(self._begins)))
            self._hooks.append(module.register_forward_hook(hook(self._ended), prepend=True, always_call=True))

    def _begins(self, module: nn.Module, *_: Any) -> None:
        for name, parameter in self._own[module].items():
            # A view, because the placeholder of a resharded parameter would be wrapped itself.
            module._parameters[name] = self._kept[id(parameter)].made_of(parameter.view_as(parameter))

    def _ended(self, module: nn.Module, *_: Any) -> None:
        module._parameters.update(self._own[module])

    def close(self) -> None:
        """Restore DTensors with the current values in model and optimizer."""
        for hook in self._hooks:
            hook.remove()
        made: dict[int, nn.Parameter] = {}
        for module, own in self._own.items():
            for name, local in own.items():
                if id(local) not in made:
                    again = self._kept[id(local)].made_of(local.detach())
                    made[id(local)] = nn.Parameter(again, requires_grad=local.requires_grad)
                module._parameters[name] = made[id(local)]
        if self._optimizer is not None:
            _swap(self._optimizer, made)
        self._own, self._local, self._before = {}, {}, []


def _swap(optimizer: torch.optim.Optimizer, others: dict[int, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [others.get(id(parameter), parameter) for parameter in group["params"]]
    for parameter in [parameter for parameter in optimizer.state if id(parameter) in others]:
        state = optimizer.state.pop(parameter)
        local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
        optimizer.state[others[id(parameter)]] = local


def _chunks(size: int, ranks: int) -> tuple[Runs, ...]:
    each = -(-size // ranks)
    return tuple(((min(rank * each, size), min((rank + 1) * each, size)),) for rank in range(ranks))
