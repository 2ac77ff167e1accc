"""Base of optimizers that update each element from its own gradient, value and state, in fp32 (fp64 for fp64).

Tensors in 16 bits are widened, updated and rounded in chunks, hence scratch memory is small and stays in the CPU's
cache. Without widening or scratch, torch's fused kernels step everything at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardwise.compat import has_values, standing_for
from shardwise.errors import ConfigError, UsageError
from shardwise.optim.base import Optimizer
from shardwise.optim.rounding import (
    COMPENSATION,
    Origin,
    compensated,
    random_bits,
    round_compensated,
    round_stochastically,
)

ALIGNMENT = 64
"""Elements; chunks begin at multiples, because vectorised kernels then treat an element alike in every chunk."""

CHUNK = 1 << 19
"""Elements that a CPU thread updates at a time: few enough for the cache, many enough to hide the call."""

DEVICE_CHUNK = 1 << 24
"""Elements that an accelerator updates at a time if the update needs scratch memory."""

SHARE = 16
"""Scratch memory of a step holds at most one element for each 16 stepped elements."""

LEAST_CHUNK = 1 << 8
"""Least elements of a chunk; fewer would cost more time than they save memory."""

ROUNDINGS = ("nearest", "stochastic", "kahan")
_STATES_STREAM = 1
"""First random-number stream of states; stream 0 is the parameter's."""


@dataclass(frozen=True)
class Batch:
    """Ranges of elements that are updated at once, in fp32 (fp64 for fp64); the lists correspond to each other.

    `values` and `states` are updated in place, `gradients` are read only. `step` counts from 1. `temporary(number)`
    returns tensors like `values` of undefined content.
    """

    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: dict[str, list[torch.Tensor]]
    step: float
    temporary: Callable[[int], list[torch.Tensor]]

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.values[0].device

    def decayed(self, decay: float, number: int) -> list[torch.Tensor]:
        """Return gradients plus `decay` times values, in temporary `number`."""
        found = self.temporary(number)
        torch._foreach_copy_(found, self.values)
        torch._foreach_mul_(found, decay)
        torch._foreach_add_(found, self.gradients)
        return found


@dataclass(frozen=True)
class _Run:
    tensors: dict[str, torch.Tensor]  # "parameter", "gradient", states by name
    origins: Sequence[Origin]
    numel: int

    def cut(self, start: int, stop: int) -> _Run:
        if (start, stop) == (0, self.numel):
            return self
        origins = []
        for tensor, first, offset, count in self.origins:
            low, high = max(offset, start), min(offset + count, stop)
            if low < high:
                origins.append((tensor, first + low - offset, low - start, high - low))
        return _Run({name: t[start:stop] for name, t in self.tensors.items()}, origins, stop - start)


class _Memory:
    """Scratch memory of one step, allocated at first use and reused by every batch."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit = limit
        self._device = device
        self._held: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, dtype: torch.dtype, start: int, numel: int) -> torch.Tensor:
        held = self._held.get((name, dtype))
        if held is None:
            held = self._held[name, dtype] = torch.empty(self._limit, dtype=dtype, device=self._device)
        return held[start : start + numel]


class ElementwiseOptimizer(Optimizer):
    """Base of elementwise optimizers. A subclass defines its options, the names of its states, and `update`.

    Because a subclass may override the update, each class declares `shardwise_sharding = "elementwise"` itself. bf16
    parameters are rounded to "nearest", "stochastic" (without memory, by `seed`, the same on all ranks) or "kahan" (two
    more bytes per element). `state_dtype` None: fp32, or wider if the parameters are. bf16 states are rounded
    stochastically, because a second moment rounded to nearest could not fall (1 - beta2 is below bf16's resolution).
    Raises ConfigError for an unknown `rounding`, or a `state_dtype` with too small a range.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    """Names of the states with one value per element, as in torch's class of the same algorithm."""

    temporaries: ClassVar[int] = 0
    """Number of temporaries that `update` uses at most."""

    shardwise_origins: Mapping[int, Sequence[Origin]] = {}
    """Origins of each parameter's elements by `id`, set by an engine, for the same stochastic rounding if sharded."""

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        *,
        rounding: str = "nearest",
        state_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.set_precision(rounding, state_dtype)
        self.seed = seed
        super().__init__(params, defaults)

    def set_precision(self, rounding: str, state_dtype: torch.dtype | None) -> None:
        """Change `rounding` and `state_dtype` (ConfigError as in the class); the next step converts existing states."""
        name = type(self).__name__
        if rounding not in ROUNDINGS:
            raise ConfigError(f"{name}(rounding=...): expected one of {', '.join(ROUNDINGS)}, found {rounding!r}")
        if state_dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
            raise ConfigError(
                f"{name}(state_dtype=...): expected torch.bfloat16, torch.float32, torch.float64 or None, found "
                f"{state_dtype}; fp16 has too little range for averages of gradients and of their squares"
            )
        self.rounding = rounding
        self.state_dtype = state_dtype

    # -- for subclasses ----------------------------------------------------------------------------------------------

    def initial(self, name: str, group: Mapping[str, Any]) -> float:
        """Return the initial value of a state."""
        return 0.0

    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        """Update values and states of a batch with the options of a group.

        Each operation should round once (no fused pair), or be one kernel. Then chunk boundaries change no bit.
        """
        raise NotImplementedError

    # -- stepping ----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        number = 0
        for group in self.param_groups:
            self._check_group(group)
            # Ranks step different ranges: the update of a range must not depend on other ranges.
            alike: dict[tuple[torch.device, torch.dtype, torch.dtype, float], list[_Run]] = {}
            for parameter in group["params"]:
                run = self._run_of(parameter, group, number)
                number += 1
                if run is not None:
                    count = self.state[parameter]["step"]
                    count += 1
                    # In a dry run the tensor is fake and has no value.
                    now = float(count) if type(count) is torch.Tensor else 1.0
                    kinds = (parameter.device, parameter.dtype, run.tensors["gradient"].dtype, now)
                    alike.setdefault(kinds, []).append(run)
            for (device, kept, _, count), runs in alike.items():
                self._step_runs(runs, group, device, torch.promote_types(kept, torch.float32), count)
                for run in runs:
                    _put_back(run)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        name = type(self).__name__
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise UsageError(
                    f"{name}.step(): a parameter group has {option}=True, from loaded state; shardwise.optim.{name} "
                    f"does not have it. Go on with torch.optim.{name} (optimizer.params.{option} true)"
                )

    def _run_of(self, parameter: torch.Tensor, group: Mapping[str, Any], number: int) -> _Run | None:
        gradient = parameter.grad
        if gradient is None:
            return None
        name = type(self).__name__
        if gradient.layout is not torch.strided:
            raise UsageError(f"{name}.step(): a gradient is sparse; it takes dense ones (nn.Embedding(sparse=False))")
        if self.rounding != "nearest" and parameter.dtype is torch.float16:
            raise UsageError(f"{name}(rounding={self.rounding!r}): this is for bf16 parameters, found fp16 ones")
        origins = self.shardwise_origins.get(id(parameter), [(number, 0, 0, parameter.numel())])
        tensors = {"parameter": _flat(parameter.detach()), "gradient": _flat(gradient.detach())}
        if not parameter.is_contiguous():
            tensors["original"] = parameter.detach()  # a copy is updated
        state = self.state[parameter]
        if not isinstance(state.setdefault("step", 0), torch.Tensor):  # a number in states of old versions of torch
            state["step"] = torch.full((), float(state["step"]), dtype=torch.float32, device="cpu")
        kinds = self._states_of(parameter.dtype)
        if COMPENSATION in state and COMPENSATION not in kinds:
            # A run with compensation was loaded: the compensation is part of the value.
            tensors["parameter"].add_(state.pop(COMPENSATION).reshape(-1))
        for key, dtype in kinds.items():
            found = state.get(key)
            if found is None:
                value = 0.0 if key == COMPENSATION else self.initial(key, group)
                found = torch.full(parameter.shape, value, dtype=dtype, device=parameter.device)
            if found.dtype is not dtype or not found.is_contiguous():
                found = found.to(dtype).contiguous()
            state[key] = found
            tensors[key] = _flat(found)
        return _Run(tensors, origins, parameter.numel())

    def _states_of(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        kept = self.state_dtype or torch.promote_types(dtype, torch.float32)
        names = dict.fromkeys(self.state_names, kept)
        if self._rounds(dtype) == "kahan":
            names[COMPENSATION] = dtype
        return names

    def _rounds(self, dtype: torch.dtype) -> str:
        return self.rounding if dtype is torch.bfloat16 else "nearest"

    def _step_runs(
        self,
        runs: Sequence[_Run],
        group: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype,
        step: float,
    ) -> None:
        numels = [run.numel for run in runs]
        # Without scratch memory the cache does not matter.
        plain = not self.temporaries_of(group, device, dtype) and _all_in(runs, dtype)
        limit = sum(map(_room, numels)) if plain else _limit(numels, device)
        memory = _Memory(limit, device)
        batches = _batches(runs, limit)
        if not has_values(runs[0].tensors["parameter"]):
            with standing_for(-(-sum(map(_room, numels)) // limit)):
                self._step_batch(next(batches), memory, group, dtype, step)
            return
        for parts in batches:
            self._step_batch(parts, memory, group, dtype, step)

    def _step_batch(
        self,
        parts: Sequence[_Run],
        memory: _Memory,
        group: Mapping[str, Any],
        dtype: torch.dtype,
        step: float,
    ) -> None:
        starts = _starts(parts)

        def like(name: str) -> list[torch.Tensor]:
            return [memory.get(name, dtype, start, part.numel) for start, part in zip(starts, parts, strict=True)]

        def scratch(name: str, numel: int, wanted: torch.dtype) -> torch.Tensor:
            return memory.get(name, wanted, 0, numel)

        def widened(name: str) -> list[torch.Tensor]:
            found = [part.tensors[name] for part in parts]
            if all(tensor.dtype is dtype for tensor in found):
                return found
            return [wide.copy_(tensor) for wide, tensor in zip(like(name), found, strict=True)]

        values = widened("parameter")
        for part, value in zip(parts, values, strict=True):
            if COMPENSATION in part.tensors:
                compensated(value, part.tensors[COMPENSATION], scratch)
        states = {name: widened(name) for name in self.state_names}
        self.update(Batch(values, widened("gradient"), states, step, lambda i: like(f"temporary {i}")), group)
        for position, part in enumerate(parts):

            def noise(stream: int, part: _Run = part) -> torch.Tensor:
                return random_bits(
                    part.numel,
                    part.origins,
                    seed=self.seed,
                    step=int(step),
                    stream=stream,
                    device=part.tensors["parameter"].device,
                    scratch=scratch,
                )

            for stream, name in enumerate(self.state_names, _STATES_STREAM):
                kept, wide = part.tensors[name], states[name][position]
                if kept is not wide:
                    if kept.dtype is torch.bfloat16 and dtype is torch.float32:
                        round_stochastically(wide, noise(stream))
                    kept.copy_(wide)
            parameter, value = part.tensors["parameter"], values[position]
            if COMPENSATION in part.tensors:
                round_compensated(value, parameter, part.tensors[COMPENSATION], scratch)
            elif parameter is not value:
                if self._rounds(parameter.dtype) == "stochastic":
                    round_stochastically(value, noise(0))
                parameter.copy_(value)

    def temporaries_of(self, group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> int:
        """Return the number of temporaries that `update` uses with these options."""
        return self.temporaries

    # -- state -------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and states; unlike torch's method it keeps fp32 states of 16-bit parameters in fp32."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for option, value in self.defaults.items():
                group.setdefault(option, value)  # not saved by torch's class
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if isinstance(value, torch.Tensor) and name in (*self.state_names, COMPENSATION):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: getattr(self, name) for name in ("rounding", "state_dtype", "seed")}
        return {**super().__getstate__(), **kept}


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)


def _limit(numels: Iterable[int], device: torch.device) -> int:
    whole = sum(map(_room, numels))
    most = CHUNK * torch.get_num_threads() if device.type == "cpu" else DEVICE_CHUNK
    return min(whole, most, max(LEAST_CHUNK, _room(whole // SHARE)))


def _all_in(runs: Sequence[_Run], dtype: torch.dtype) -> bool:
    """Return True if parameter, gradient and states have the dtype of the computation, without compensation."""
    return all(tensor.dtype is dtype and name != COMPENSATION for run in runs for name, tensor in run.tensors.items())


def _room(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _starts(parts: Sequence[_Run]) -> list[int]:
    starts, end = [], 0
    for part in parts:
        starts.append(end)
        end += _room(part.numel)
    return starts


def _batches(runs: Sequence[_Run], limit: int) -> Iterator[list[_Run]]:
    """Yield batches of at most `limit` elements; longer ranges are split at multiples of the alignment."""
    batch: list[_Run] = []
    room = limit
    for run in runs:
        start = 0
        while start < run.numel:
            if not room:
                yield batch
                batch, room = [], limit
            stop = min(run.numel, start + room)
            batch.append(run.cut(start, stop))
            room -= _room(stop - start)
            start = stop
    if batch:
        yield batch


def _put_back(run: _Run) -> None:
    original = run.tensors.get("original")
    if original is not None:
        original.copy_(run.tensors["parameter"].view(original.shape))
