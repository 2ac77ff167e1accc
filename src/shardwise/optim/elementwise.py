"""Optimizers that update each element from its own gradient, value and state.

The update computes in fp32 (fp64 for fp64). Parameters, gradients and states in 16 bits are widened, updated and
rounded chunk by chunk, so that the scratch memory is small and, on a CPU, stays in the cache. Where nothing is widened
and no scratch is needed, torch's fused kernels step everything at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardwise.compat import has_values
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
"""Elements at whose multiples chunks begin: vectorised kernels then treat an element the same wherever cuts fall."""

CHUNK = 1 << 19
"""Elements that a CPU thread updates at a time: few enough for the cache, enough for the calls not to count."""

DEVICE_CHUNK = 1 << 24
"""Elements that an accelerator updates at a time where that takes scratch: bounds it, and costs no time."""

SHARE = 16
"""The scratch of a step has no more than one element for so many that are stepped."""

LEAST_CHUNK = 1 << 8
"""Fewer elements at a time would cost more time than they save memory."""

ROUNDINGS = ("nearest", "stochastic", "kahan")
_STATES_STREAM = 1
"""Stream of random numbers of the first state; 0 is the parameter's."""


@dataclass(frozen=True)
class Batch:
    """Runs of elements that are updated at once; the lists correspond to each other.

    Attributes:
        values: what is updated in place, in fp32 (fp64 for fp64 parameters).
        gradients: in the same dtype; not to be written.
        states: lists by name of the state, in the same dtype; updated in place.
        step: number of this step, from 1.
        temporary: gives a list of tensors like `values`, of undefined content, by number.
    """

    values: list[torch.Tensor]
    gradients: list[torch.Tensor]
    states: dict[str, list[torch.Tensor]]
    step: float
    temporary: Callable[[int], list[torch.Tensor]]

    @property
    def device(self) -> torch.device:
        """Where everything lies."""
        return self.values[0].device

    def decayed(self, decay: float, number: int) -> list[torch.Tensor]:
        """Return gradients plus `decay` times values, in the temporary of this number."""
        found = self.temporary(number)
        torch._foreach_copy_(found, self.values)
        torch._foreach_mul_(found, decay)
        torch._foreach_add_(found, self.gradients)
        return found


@dataclass(frozen=True)
class _Run:
    """A flat range of a parameter with all that belongs to it."""

    tensors: dict[str, torch.Tensor]  # "parameter", "gradient", states by name
    origins: Sequence[Origin]
    numel: int

    def cut(self, start: int, stop: int) -> _Run:
        """Return a part of the run."""
        if (start, stop) == (0, self.numel):
            return self
        origins = []
        for tensor, first, offset, count in self.origins:
            low, high = max(offset, start), min(offset + count, stop)
            if low < high:
                origins.append((tensor, first + low - offset, low - start, high - low))
        return _Run({name: t[start:stop] for name, t in self.tensors.items()}, origins, stop - start)


class _Memory:
    """Scratch of one step, taken when it is first needed and used for every batch."""

    def __init__(self, limit: int, device: torch.device) -> None:
        self._limit = limit
        self._device = device
        self._held: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get(self, name: str, dtype: torch.dtype, start: int, numel: int) -> torch.Tensor:
        """Return a range of the scratch of this name."""
        held = self._held.get((name, dtype))
        if held is None:
            held = self._held[name, dtype] = torch.empty(self._limit, dtype=dtype, device=self._device)
        return held[start : start + numel]


class ElementwiseOptimizer(Optimizer):
    """Base of optimizers that update each element from its own gradient, value and state.

    A subclass gives its options, the names of its states, and `update`, which gets everything in fp32; it declares
    `shardwise_sharding = "elementwise"` as every class does for itself.

    Args:
        params: as for every optimizer of PyTorch.
        defaults: options of parameter groups.
        rounding: how bf16 parameters are rounded after the update: "nearest"; "stochastic" (needs no memory); "kahan"
            (two more bytes an element). Parameters in fp32 are not rounded.
        state_dtype: type of the states; None: fp32, or wider where the parameters are. States in bf16 are rounded
            stochastically with any `rounding`: to nearest, a second moment could not fall (a change of
            1 - beta2 is less than bf16 resolves).
        seed: of stochastic rounding; the same on all ranks.

    Raises:
        ConfigError: unknown `rounding`, or a `state_dtype` in which states have too little range.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    """Names of the states with one value per element, as torch's class of the same algorithm has them."""

    temporaries: ClassVar[int] = 0
    """Number of temporaries that `update` may ask for."""

    shardwise_origins: Mapping[int, Sequence[Origin]] = {}
    """Where the elements of each parameter come from, by `id`; an engine sets it, so that the random numbers of
    stochastic rounding do not depend on how tensors are sharded."""

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
        """Change `rounding` and `state_dtype`; existing states are converted by the next step.

        Raises:
            ConfigError: see the class.
        """
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
        """Return the value with which a state begins."""
        return 0.0

    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        """Update values and states of a batch with the options of a group.

        Each operation should round once (a product, then a sum; no fused pair), or come from one kernel: then cutting
        the run elsewhere changes no bit.
        """
        raise NotImplementedError

    # -- stepping ----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        number = 0
        for group in self.param_groups:
            self._check_group(group)
            # How a run is stepped must not depend on what else this rank steps: other ranks step other runs.
            alike: dict[tuple[torch.device, torch.dtype, torch.dtype, float], list[_Run]] = {}
            for parameter in group["params"]:
                run = self._run_of(parameter, group, number)
                number += 1
                if run is not None:
                    count = self.state[parameter]["step"]
                    count += 1
                    # In a dry run it is a fake tensor, which has no value.
                    now = float(count) if type(count) is torch.Tensor else 1.0
                    kinds = (parameter.device, parameter.dtype, run.tensors["gradient"].dtype, now)
                    alike.setdefault(kinds, []).append(run)
            for (device, kept, _, count), runs in alike.items():
                self._step_runs(runs, group, device, torch.promote_types(kept, torch.float32), count)
                for run in runs:
                    _put_back(run)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Raise for options of torch's class that a loaded state has brought along."""
        name = type(self).__name__
        for option in ("amsgrad", "maximize"):
            if group.get(option):
                raise UsageError(
                    f"{name}.step(): a parameter group has {option}=True, from loaded state; shardwise.optim.{name} "
                    f"does not have it. Go on with torch.optim.{name} (optimizer.params.{option} true)"
                )

    def _run_of(self, parameter: torch.Tensor, group: Mapping[str, Any], number: int) -> _Run | None:
        """Return what is to be updated of a parameter, with its state (made at first), or None without a gradient."""
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
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
        kinds = self._states_of(parameter.dtype)
        if COMPENSATION in state and COMPENSATION not in kinds:
            # Loaded from a run that had it: part of the value.
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
        """Return names and dtypes of the states of a parameter of this dtype."""
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
        # Without scratch there is nothing that had better stay in the cache.
        plain = not self.temporaries_of(group, device, dtype) and _all_in(runs, dtype)
        limit = sum(map(_room, numels)) if plain else _limit(numels, device)
        memory = _Memory(limit, device)
        for parts in _batches(runs, limit):
            self._step_batch(parts, memory, group, dtype, step)
            if not has_values(parts[0].tensors["parameter"]):
                return  # a dry run has seen what all batches take

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
        """Return how many temporaries `update` asks for with these options."""
        return self.temporaries

    # -- state -------------------------------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load groups and states; unlike torch's own method it leaves fp32 states of 16-bit parameters in fp32."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for option, value in self.defaults.items():
                group.setdefault(option, value)  # that torch's class has not saved
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
    """Return a tensor's elements in one dimension: the tensor itself where it has no other."""
    return tensor if tensor.dim() == 1 and tensor.is_contiguous() else tensor.reshape(-1)


def _limit(numels: Iterable[int], device: torch.device) -> int:
    """Return the elements of a batch: fast, and few in proportion to tensors of these sizes."""
    whole = sum(map(_room, numels))
    most = CHUNK * torch.get_num_threads() if device.type == "cpu" else DEVICE_CHUNK
    return min(whole, most, max(LEAST_CHUNK, _room(whole // SHARE)))


def _all_in(runs: Sequence[_Run], dtype: torch.dtype) -> bool:
    """Whether what is read and updated has the dtype of the computation, and no digits are kept elsewhere."""
    return all(tensor.dtype is dtype and name != COMPENSATION for run in runs for name, tensor in run.tensors.items())


def _room(numel: int) -> int:
    """Return what a run takes in scratch: the next one begins at an aligned place."""
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _starts(parts: Sequence[_Run]) -> list[int]:
    starts, end = [], 0
    for part in parts:
        starts.append(end)
        end += _room(part.numel)
    return starts


def _batches(runs: Sequence[_Run], limit: int) -> Iterator[list[_Run]]:
    """Yield lists of runs of at most `limit` elements together; longer ones are cut at multiples of the alignment."""
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
    """Write what was updated in a copy into the parameter itself."""
    original = run.tensors.get("original")
    if original is not None:
        original.copy_(run.tensors["parameter"].view(original.shape))
