"""zero.Init: builds models sharded, one module at a time.

Inside the context, a parameter is unsharded until the next module registers parameters. Then each rank keeps a shard of
rank 0's values, so ranks need not share a seed. Because all ranks construct alike, later initialisation code gathers
the parameter on demand. After the context, `GatheredParameters` gives values until `initialize()` builds units. Random
numbers are those drawn without the context: the same seed gives the same model.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from shardwise.boxes import Region, overlap, region, sizes, whole
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.compat import is_fake_group, without_overrides
from shardwise.errors import ReleasedParameterError, UsageError
from shardwise.registry import cut, keep_elsewhere, part_of, takes_compute_dtype, without_part
from shardwise.utils.logging import warn_once
from shardwise.zero.units import released
from shardwise.zero.units.flat_param import same_bits

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class _Narrowed:
    """Parameter that has become a part of a tensor: number among these, shape of the tensor, and box of the part."""

    number: int
    shape: tuple[int, ...]
    part: Region


class PartStore(released.Owner):
    """Shards of parameters that are not in units yet.

    `comm` has the ranks over which parameters are sharded; with `owns_comm` its groups are destroyed with the last
    shard. `quantized_weights` requests 8-bit all-gathers from the engine. `place`: device of shards (None: unchanged).
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        quantized_weights: bool = False,
        owns_comm: bool = False,
        place: torch.device | None = None,
    ) -> None:
        self.comm = comm
        self._place = place
        self._owns_comm = owns_comm
        self.quantized_weights = quantized_weights
        self.open = False
        self._parts = WeakTensorKeyDictionary()
        self._whole: dict[int, nn.Parameter] = {}
        self._home = WeakTensorKeyDictionary()
        self.names = WeakTensorKeyDictionary()
        self._current: int | None = None
        self._narrowed = WeakTensorKeyDictionary()
        # By rank, boxes of narrowed parameters from a number on; ranks with equal boxes share a list.
        self._boxes: list[tuple[int, list[list[Region]]]] = []
        self._own_boxes: list[Region] = []

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        """Add a parameter of a module, and shard the parameters of the module before."""
        self._enter(id(module))
        if released.is_released(parameter):
            return
        self.names[parameter] = f"{name!r} of a {type(module).__name__}"
        self._home[parameter] = id(module)
        self._whole[id(parameter)] = parameter
        keep_elsewhere(parameter, self)

    def _enter(self, home: int) -> None:
        if home != self._current:
            self.flush()
        self._current = home

    def flush(self) -> None:
        """Shard all parameters that are unsharded."""
        for parameter in self._whole.values():
            self.split(parameter)
        self._whole = {}

    def split(self, parameter: nn.Parameter, src: int = 0, place: torch.device | None = None) -> None:
        """Shard the values of group rank `src`, and free the rest; `place` overrides the device of shards."""
        values = parameter.data
        flat = self._to_travel(values.contiguous().view(-1))
        self.comm.broadcast(flat, src, "zero.Init").wait()
        size = -(-flat.numel() // self.comm.world)
        part = torch.zeros(size, dtype=values.dtype, device=place or self._place or values.device)
        mine = flat[self.comm.rank * size : (self.comm.rank + 1) * size]
        part[: mine.numel()] = mine
        self._parts[parameter] = part
        keep_elsewhere(parameter, self)
        parameter.data = released.blank_of(parameter)
        released.adopt(parameter, self)
        released.guard(parameter)

    def narrow(self, parameter: nn.Parameter, part: Region) -> None:
        """Make the parameter a part of its tensor, of which each rank keeps its shard until values are needed."""
        self.flush()
        if not released.is_released(parameter):
            self.split(parameter)  # unsharded by the script
        self._narrowed[parameter] = _Narrowed(len(self._own_boxes), tuple(parameter.shape), part)
        self._own_boxes.append(part)
        with without_overrides():
            like = torch.empty((), dtype=parameter.dtype, device=parameter.device)
            parameter.data = released.blank(like.expand(sizes(part)))

    def agrees(self, parameter: nn.Parameter, ranks: Sequence[int] | None) -> bool:
        """Return True if the stored values are right for a part that `ranks` share."""
        return parameter in self._narrowed or len(ranks or self.comm.members) == self.comm.world

    def _parts_of_all(self, number: int) -> list[Region]:
        """Return the boxes of a narrowed tensor, by rank (a collective if they are not known yet)."""
        first = sum(len(ranks[0]) for _, ranks in self._boxes)
        if number >= first:
            gathered = self.comm.exchange(self._own_boxes[first:], "zero.Init parts")
            lists = {id(boxes): [region(box) for box in boxes] for boxes in gathered}
            self._boxes.append((first, [lists[id(boxes)] for boxes in gathered]))
        first, ranks = next((first, ranks) for first, ranks in reversed(self._boxes) if first <= number)
        return [boxes[number - first] for boxes in ranks]

    def _part_values(self, parameter: nn.Parameter, narrowed: _Narrowed) -> torch.Tensor:
        parts = self._parts_of_all(narrowed.number)
        own = self._to_travel(self._parts[parameter])
        outer, numel, size = whole(narrowed.shape), math.prod(narrowed.shape), own.numel()
        ranges = [(min(rank * size, numel), min((rank + 1) * size, numel)) for rank in range(self.comm.world)]
        start, stop = ranges[self.comm.rank]
        runs_of = {
            part: [
                own.as_strided(patch.shape, patch.source_strides, patch.source).reshape(-1)
                for patch in overlap(outer, start, stop, part, 0, math.prod(sizes(part)))
            ]
            for part in dict.fromkeys(parts)
        }
        sent = [runs_of[part] for part in parts]
        values = own.new_empty(sizes(narrowed.part))
        targets = [
            [
                values.as_strided(patch.shape, patch.target_strides, patch.target)
                for patch in overlap(outer, first, end, narrowed.part, 0, values.numel())
            ]
            for first, end in ranges
        ]
        given = [run for runs in sent for run in runs]
        message = torch.cat(given) if given else own.new_empty(0)
        received = own.new_empty(values.numel())
        sizes_in, sizes_out = ([sum(map(torch.numel, runs)) for runs in some] for some in (targets, sent))
        self.comm.all_to_all(received, message, sizes_in, sizes_out, f"zero.Init part {narrowed.number}").wait()
        into = [view for views in targets for view in views]
        for view, run in zip(into, received.split([view.numel() for view in into]), strict=True):
            view.copy_(run.view(view.shape))
        return values

    def of_first(self, values: torch.Tensor) -> torch.Tensor:
        """Broadcast the values of the first rank (a collective)."""
        moved = self._to_travel(values.contiguous())
        self.comm.broadcast(moved, 0, "zero.Init").wait()
        return moved.to(values.device)

    def _to_travel(self, values: torch.Tensor) -> torch.Tensor:
        """Copy values to the device of the collectives, because parameters may be built on another device."""
        return values if self.comm.world == 1 else values.to(self.comm.device)

    def values(self, parameter: nn.Parameter) -> torch.Tensor:
        """Gather the unsharded values, or a narrowed parameter's part, on the device of `comm` (a collective)."""
        narrowed = self._narrowed.get(parameter)
        if narrowed is not None:
            with without_overrides():
                return self._part_values(parameter, narrowed)
        part = self._to_travel(self._parts[parameter])
        full = part.new_empty(part.numel() * self.comm.world)
        self.comm.all_gather([(full, part)], "zero.Init", kind="explicit").wait()
        with without_overrides():
            return full[: parameter.numel()].view(parameter.shape)

    @property
    @override
    def in_pass(self) -> bool:
        return False

    @override
    def touch(self, parameter: nn.Parameter, what: str) -> None:
        if not self.open or parameter in self._narrowed:
            raise ReleasedParameterError(
                f"{what}: the values of parameter {self.names.get(parameter, '')} (shape {tuple(parameter.shape)}), "
                f"built under zero.Init and sharded over {self.comm.world} ranks, are not here. Use `with "
                "shardwise.zero.GatheredParameters(parameter, modifier_rank=None or 0):` on every rank, or "
                "pass the model to shardwise.initialize() first."
            )
        self._enter(self._home.get(parameter, id(parameter)))
        self._restore(parameter)
        self._whole[id(parameter)] = parameter

    def detached(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return another parameter with the same shard: `state_dict()` gives names and shapes without values."""
        return None if self.open else self._with_part(parameter, self._parts[parameter], parameter.device)

    def _with_part(self, parameter: nn.Parameter, part: torch.Tensor, device: torch.device) -> nn.Parameter:
        with without_overrides():
            like = torch.empty((), dtype=part.dtype, device=device).expand(parameter.shape)
            other = nn.Parameter(released.blank(like), requires_grad=False)
        self._parts[other] = part
        if parameter in self._narrowed:
            self._narrowed[other] = self._narrowed[parameter]
        keep_elsewhere(other, self)
        self.names[other] = self.names.get(parameter, "")
        released.adopt(other, self)
        released.guard(other)
        return other

    def kept(self, parameter: nn.Parameter) -> int:
        """Return the number of elements in this rank's shard; the last ranks may have fewer, or none."""
        size, narrowed = self._parts[parameter].numel(), self._narrowed.get(parameter)
        numel = parameter.numel() if narrowed is None else math.prod(narrowed.shape)
        return max(0, min(size, numel - self.comm.rank * size))

    @override
    def converted(self, parameter: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter | None:
        if self.open:
            return None
        return self._with_part(parameter, self._parts[parameter].to(self._place or device, dtype), device)

    @override
    def replace(self, parameter: nn.Parameter, other: nn.Parameter) -> bool:
        if other is not parameter:
            if released.owner_of(other) is not self:
                return False
            self._parts[parameter] = self._parts[other]
            with without_overrides():
                parameter.data = other.data
        return True

    def _restore(self, parameter: nn.Parameter) -> None:
        values = self.values(parameter)
        released.restore(parameter)
        parameter.data = values.to(parameter.device)

    @override
    def end_touch(self, parameter: nn.Parameter, token: Any, result: Any) -> None: ...

    def gather(self, parameters: Iterable[nn.Parameter]) -> list[tuple[nn.Parameter, int]]:
        """Gather parameters that are sharded; return them with their version counters."""
        wanted = [p for p in parameters if released.is_released(p)]
        for parameter in wanted:
            self._restore(parameter)
        return [(parameter, parameter._version) for parameter in wanted]

    @override
    def discarded(self, gathered: list[tuple[nn.Parameter, int]]) -> list[str]:
        changed = [p for p, version in gathered if p._version != version or self._differs(p)]
        return [self.names.get(parameter, f"of shape {tuple(parameter.shape)}") for parameter in changed]

    def _differs(self, parameter: nn.Parameter) -> bool:
        part = self._parts[parameter]
        if parameter in self._narrowed or part.device != parameter.device:
            return False
        start = self.comm.rank * part.numel()
        own = parameter.data.reshape(-1)[start : start + part.numel()]
        return own.dtype is part.dtype and not same_bits(own, part[: own.numel()])

    def put_back(
        self, parameters: Iterable[nn.Parameter], gathered: list[tuple[nn.Parameter, int]], src: int | None
    ) -> None:
        """End a `gather`. Raises UsageError if changed parameters are parts of tensors."""
        for parameter, _ in gathered:
            narrowed = parameter in self._narrowed
            if src is None or narrowed:
                parameter.data = released.blank_of(parameter)
                released.guard(parameter)
            else:
                self.split(parameter, self.comm.group_rank(src))
            if src is not None and narrowed:
                raise UsageError(
                    f"GatheredParameters(modifier_rank={src}): parameter {self.names.get(parameter, '')} has been "
                    "built under zero.Init and is a part of a tensor. Change it before it becomes one, or after "
                    "shardwise.initialize()"
                )

    def forget(self, parameter: nn.Parameter) -> None:
        """Drop the shard of a parameter that is in a unit now, and the process groups with the last shard."""
        self._parts.pop(parameter, None)
        self._home.pop(parameter, None)
        self._narrowed.pop(parameter, None)
        keep_elsewhere(parameter, None)
        released.restore(parameter)
        if self._owns_comm and not self._parts and not self.open:
            self.comm.destroy()


def whole_values(parameter: nn.Parameter) -> tuple[torch.Tensor, bool]:
    """Return a parameter's unsharded values for its unit, and whether all ranks are known to have the same values.

    A parameter built under `zero.Init` is gathered (a collective) and becomes plain.
    """
    owner = released.owner_of(parameter)
    if isinstance(owner, PartStore) and released.is_released(parameter):
        values = owner.values(parameter)
        owner.forget(parameter)
        return values, True
    if owner is not None and not isinstance(owner, PartStore):
        raise UsageError("the model already belongs to an engine: call engine.destroy() before wrapping it again")
    return parameter.data, False


def built_for_codes(module: nn.Module) -> bool:
    """Return True if parameters were built under `Init(zero_quantized_weights=True)` and are not adopted yet."""
    owners = map(released.owner_of, module.parameters())
    return any(isinstance(owner, PartStore) and owner.quantized_weights for owner in owners)


class Init:
    """Build modules sharded over the data-parallel ranks; see the module docstring.

    Args:
        module: shard this (possibly meta-device) module at once instead of acting as a context.
        data_parallel_group, sequence_data_parallel_group: ranks that share the parameters; default all.
        mpu: gives the data-parallel group by `get_data_parallel_group()`.
        config_dict_or_path: configuration; `zero_optimization.stage` below 3 disables the context. `config` is
            deprecated.
        enabled: False disables the context.
        dtype: of floating parameters from sharding on; default: full precision, from which fp32 master weights start.
        remote_device: `cpu` or `nvme`: shards wait for the engine on the host; only the engine puts them on a disk.
            None or `none`: shards stay on the device of their parameter.
        zero_quantized_weights: the engine uses 8-bit all-gathers, as with `zero_optimization.zero_quantized_weights`.
        mem_efficient_linear, pin_memory: accepted for existing code, without effect: shards are copied once.
        zero_param_parallel_group, zero_quantized_nontrainable_weights, param_swapper: refused.

    Example:
        >>> import shardwise, torch
        >>> with shardwise.zero.Init():
        ...     model = torch.nn.Linear(4, 4)
        >>> model.weight.shape
        torch.Size([4, 4])
    """

    _active: list[Init] = []  # noqa: RUF012  (contexts that are open in this process, innermost last)

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        zero_param_parallel_group: Any = None,
        zero_quantized_weights: bool = False,
        zero_quantized_nontrainable_weights: bool = False,
        sequence_data_parallel_group: Any = None,
        param_swapper: Any = None,
    ) -> None:
        for name, value in (
            ("zero_quantized_nontrainable_weights", zero_quantized_nontrainable_weights),
            ("param_swapper", param_swapper),
            ("zero_param_parallel_group", zero_param_parallel_group),
        ):
            if value:
                raise UsageError(f"zero.Init({name}=...) is not available in this version; leave it out")
        remote = getattr(remote_device, "value", remote_device)
        if remote not in (None, "none", "cpu", "nvme"):
            raise UsageError(f"zero.Init(remote_device={remote!r}): it is None, 'none', 'cpu' or 'nvme'")
        source = config_dict_or_path if config_dict_or_path is not None else config
        self._enabled = enabled and _shards_parameters(source)
        self._dtype = dtype
        self._store: PartStore | None = None
        self._original: Any = None
        if not self._enabled:
            return
        from shardwise.comm.setup import init_distributed, local_rank
        from shardwise.device import choose_device

        init_distributed(verbose=False)
        group = data_parallel_group or sequence_data_parallel_group
        if group is None and mpu is not None:
            group = mpu.get_data_parallel_group()
        if is_fake_group(group):
            return  # `shardwise plan` runs the script, and gives parameters no values
        comm = Communicator(group, Ledger(), choose_device(local_rank()), name="zero.Init")
        place = torch.device("cpu") if remote in ("cpu", "nvme") else None
        self._store = PartStore(comm, quantized_weights=zero_quantized_weights, owns_comm=True, place=place)
        if module is not None:
            store = self._store
            shard_module(module, store, lambda ranks: store, dtype)

    def __enter__(self) -> Init:
        if self._store is None:
            return self
        store, dtype = self._store, self._dtype
        store.open = True
        Init._active.append(self)
        original = self._original = nn.Module.register_parameter

        def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            original(module, name, param)
            if Init._active and Init._active[-1] is self and param is not None and not param.is_meta:
                if dtype is not None and takes_compute_dtype(param) and not released.is_released(param):
                    param.data = param.data.to(dtype)
                store.register(module, name, param)

        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign,assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is None:
            return
        nn.Module.register_parameter = self._original  # type: ignore[method-assign]
        Init._active.remove(self)
        if kind is None:
            self._store.flush()
        self._store.open = False


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Build modules plainly inside an open `Init` context, after sharding the parameters built so far."""
    for context in Init._active:
        if context._store is not None:
            context._store.flush()
    active, Init._active[:] = list(Init._active), []
    try:
        yield
    finally:
        Init._active[:] = active


def _shards_parameters(source: Any) -> bool:
    if source is None:
        return True
    from shardwise.config.normalize import scan
    from shardwise.config.read import read
    from shardwise.config.validate import validate
    from shardwise.zero.units.plan import TABLE

    found = scan(read(source).data)
    if ("zero_optimization", "stage") in found.autos:
        warn_once(
            'zero.Init: has no effect, because zero_optimization.stage is "auto", which initialize() chooses for the '
            "built model. Write 3, or build the model on the meta device"
        )
    config, _, _ = validate(found)  # initialize() reports the problems
    return bool(TABLE[config.zero_optimization.stage].parameters)


def shard_module(
    module: nn.Module,
    store: PartStore,
    store_of: Callable[[tuple[int, ...] | None], PartStore],
    dtype: torch.dtype | None = None,
) -> None:
    """Shard the parameters of a module in place, one submodule at a time; initialise meta-device submodules first.

    Tensors of which ranks have parts are initialised unsharded, with rank 0's values, on the ranks' device; shards wait
    on the host, which has room for all. `store_of` returns the store of the ranks that share a part (None: all).
    `dtype` converts floating parameters. Raises UsageError if a submodule has no initialisation.
    """
    done: set[int] = set()
    for name, child in module.named_modules():
        named = {p: key for key, p in child._parameters.items() if p is not None and id(p) not in done}
        own = list(named)
        done.update(id(p) for p in own)
        made = [p for p in own if p.is_meta]
        if made or any(b is not None and b.is_meta for b in child._buffers.values()):
            materialize(module, name, child, store.comm.device)
        for parameter in made:
            box = part_of(parameter).box
            if box is not None:
                values = store.of_first(parameter.data)
                parameter.data = cut(values, box).clone(memory_format=torch.contiguous_format)
        fresh = {id(parameter) for parameter in made}
        for parameter in own:
            if not released.is_released(parameter):
                if dtype is not None and takes_compute_dtype(parameter):
                    parameter.data = parameter.data.to(dtype)
                keeper = store_of(part_of(parameter).ranks)
                keeper.names[parameter] = repr(f"{name}.{named[parameter]}".lstrip("."))
                keeper.split(parameter, place=_HOST if id(parameter) in fresh else None)


def spread_from_first(module: nn.Module, comm: Communicator) -> None:
    """Broadcast the first rank's values to ranks that have the module on the meta device (all ranks call).

    These ranks hold one unsharded tensor at a time. Parameters keep their identity; shards wait on the host for units,
    and buffers are replicated. Raises UsageError for parameters declared as parts, which the first rank lacks.
    """
    for name, parameter in module.named_parameters():
        if part_of(parameter).ranks is not None:
            raise UsageError(
                f"parameter {name!r} is a part of a tensor, and the model is on the meta device on some ranks only. "
                "Build models with declared parts on the meta device on all ranks, or on none"
            )
    store = PartStore(comm)
    done: set[int] = set()
    buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # old and new buffer
    for path, child in module.named_modules():
        for key, buffer in child._buffers.items():
            if buffer is not None:
                if id(buffer) not in buffers:
                    values = torch.empty_like(buffer, device=comm.device) if buffer.is_meta else buffer
                    sent = store.of_first(values.detach().reshape(-1).view(torch.uint8))
                    received = sent.view(buffer.dtype).view(buffer.shape)
                    buffers[id(buffer)] = buffer, received if buffer.is_meta else buffer
                child._buffers[key] = buffers[id(buffer)][1]
        for key, parameter in child._parameters.items():
            if parameter is None or id(parameter) in done:
                continue
            done.add(id(parameter))
            if parameter.is_meta:
                values = torch.empty_like(parameter, device=comm.device)
                with without_part(parameter):
                    torch.utils.swap_tensors(parameter, nn.Parameter(values, requires_grad=parameter.requires_grad))
            store.names[parameter] = repr(f"{path}.{key}".lstrip("."))
            store.split(parameter, place=_HOST)


def materialize(root: nn.Module, name: str, module: nn.Module, device: torch.device) -> None:
    """Allocate and initialise a meta-device module's own parameters and buffers; parameters keep their identity.

    `root` is the model, `name` that of `module` in it. Raises UsageError if neither has an initialisation method, or
    tensors are left without values.
    """
    fresh = {}
    for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None and tensor.is_meta:
            values: torch.Tensor = _blank(tensor, device)
            if isinstance(tensor, nn.Parameter):
                values = nn.Parameter(values, requires_grad=tensor.requires_grad)
            with without_part(tensor):
                torch.utils.swap_tensors(tensor, values)
            fresh[key] = (tensor, tensor._version)
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(reset):
        with device:
            reset()
    elif callable(getattr(root, "_init_weights", None)):
        with device:
            root._init_weights(module)  # type: ignore[operator]
    else:
        raise UsageError(
            f"module {name or '(root)'!r} ({type(module).__name__}) is on the meta device and has no "
            "reset_parameters() to give its parameters values. Define one, or build the model under "
            "shardwise.zero.Init() instead of on 'meta'."
        )
    now = {**module._parameters, **module._buffers}
    blank = [key for key, (tensor, version) in fresh.items() if now.get(key) is tensor and _is_blank(tensor, version)]
    if blank:
        names = ", ".join(repr(f"{name}.{key}".lstrip(".")) for key in blank)
        by = "its reset_parameters()" if callable(reset) else f"_init_weights() of {type(root).__name__}"
        raise UsageError(
            f"module {name or '(root)'!r} ({type(module).__name__}) is on the meta device, and {by} has left these "
            f"without values: {names}. What a constructor computes is not computed on 'meta'. Compute it in "
            "reset_parameters() of the module, or build the model under shardwise.zero.Init() instead of on 'meta'."
        )


def _sentinel(dtype: torch.dtype) -> float | None:
    """Return a value that no initialisation leaves (None: the dtype has none)."""
    if dtype in (torch.int64, torch.int32, torch.int16):
        return torch.iinfo(dtype).min + 1
    return float("nan") if dtype.is_floating_point or dtype.is_complex else None


def _blank(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Allocate memory of a value that no initialisation leaves, because version counters miss writes by `.data`."""
    shape, value = part_of(tensor).shape, _sentinel(tensor.dtype)
    values = torch.empty_like(tensor.detach() if shape is None else tensor.detach().new_empty(shape), device=device)
    return values if value is None else values.fill_(value)


def _is_blank(tensor: torch.Tensor, version: int) -> bool:
    if tensor._version != version or not tensor.numel():
        return False
    value, values = _sentinel(tensor.dtype), tensor.detach()
    return value is None or bool((values.isnan() if value != value else values == value).all())
