"""Steps of elementwise optimizers: one pass over memory in one launch, on a CUDA device where Triton is there.

A kernel reads gradients, parameters and states of all runs once, in their own dtypes; computes in fp32; and writes what
has changed, and the output, once.

Guaranteed: each operation is that of the optimizer's `update`, in its order, and rounds once (products and sums are
not fused, quotients and roots are those of IEEE 754, small numbers are not taken for zero). So an element gets the same
bits however runs are cut and wherever they lie, and on all such devices. They are those of the formulas of `update` on
a CPU too, but for the last bit of a root, which torch's library for CPUs does not always round to nearest; Adam takes a
kernel of torch's there, which differs by roundings. Random numbers are those of `shardwise.optim.rounding`.

The kernel has been compared with `update` in Triton's interpreter, and compiled (`bench/kernel_report.py`); it has not
been run on a device.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar

import torch

from shardwise.compat import has_values

_log = logging.getLogger("shardwise")

_KEPT = 256
"""Tables that are kept for the next step with the same tensors: an engine may step units one by one."""

_ALIGNMENT = 16
"""Bytes that a thread of the kernel reads at a time."""

_SERVED = (torch.float32, torch.bfloat16, torch.float16)

COMPENSATION = "compensation"
"""Name of what holds the rest of each parameter that bf16 has cut off."""


@dataclass(frozen=True)
class Formula:
    """What is to be computed for each element.

    Attributes:
        algorithm: "adam" (two states), "lion" or "adagrad" (one).
        decay_of: "value": it is multiplied by `decay`; "gradient": `decay` times the value is added to it; "": nothing.
        decay: see there.
        eps: added to roots.
        rate: by which the direction is multiplied.
        keep1, add1: by which the first state and the gradient are multiplied for their sum.
        keep2, add2: the same for the second state and the gradient's square; for Lion the first state's next value.
        unbias: by which the root of the second state is multiplied.
    """

    algorithm: str
    decay_of: str
    decay: float
    rate: float
    eps: float = 0.0
    keep1: float = 0.0
    add1: float = 0.0
    keep2: float = 0.0
    add2: float = 0.0
    unbias: float = 1.0


Origin = tuple[int, int, int, int]
"""(number of a tensor, first element in the flattened tensor, first element in the run, count); both even."""


class Run(Protocol):
    """A flat range of a parameter.

    Attributes:
        tensors: "parameter", "gradient", states by name, perhaps "compensation" and "output"; 1-D.
        origins: where its elements come from, for random numbers; what no origin names is padding.
        numel: of each tensor.
    """

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """See the class."""

    @property
    def origins(self) -> Sequence[Origin]:
        """See the class."""

    @property
    def numel(self) -> int:
        """See the class."""


AnyRun = TypeVar("AnyRun", bound=Run)

Kind = tuple[torch.dtype | None, ...]
"""Dtypes of gradient, parameter, states and output (None: there is none)."""


def step(
    runs: Sequence[AnyRun],
    formula: Formula,
    states: Sequence[str],
    *,
    rounding: str,
    factor: torch.Tensor | None,
    key: Callable[..., int],
) -> list[AnyRun]:
    """Step runs that lie on one device.

    Args:
        runs: of one dtype of parameters.
        formula: what is computed.
        states: their names, in the order in which the formula has them.
        rounding: of bf16 parameters: "nearest", "stochastic" or "kahan". States in bf16 are rounded stochastically.
        factor: what gradients are to be multiplied by, on the device; or None.
        key: gives 32 random bits for a stream of random numbers, or one and a tensor; see `shardwise.optim.rounding`.

    Returns:
        Runs that no kernel serves; nothing of them has been written.
    """
    others: list[AnyRun] = []
    alike: dict[Kind, list[AnyRun]] = {}
    for run in runs:
        kind = _kind(run, states)
        (others if kind is None else alike.setdefault(kind, [])).append(run)
    for kind, these in alike.items():
        if not _kernel.step(these, formula, states, kind, rounding, factor, key):
            others += these
    return others


def _imagine(runs: Sequence[Run], states: Sequence[str]) -> None:
    """Read and write what the kernel would, without scratch: plans are made on fake tensors, which have no values."""
    for run in runs:
        gradient = run.tensors["gradient"]
        for name in ("parameter", *states, COMPENSATION):
            if name in run.tensors:
                run.tensors[name].add_(gradient)
        if "output" in run.tensors:
            run.tensors["output"].copy_(run.tensors["parameter"])


def compiles_for(device: torch.device) -> bool:
    """Whether there are kernels for a device, as far as is known; tests have them interpreted for the CPU."""
    return device.type == "cuda" and _kernel.wanted


def kernels_of(device: torch.device) -> str:
    """Return which kernels a process has for a device: ranks that have others would round differently.

    >>> kernels_of(torch.device("cpu"))
    'those of torch'
    """
    if not compiles_for(device) or importlib.util.find_spec("triton") is None:
        return "those of torch"
    return f"Triton {importlib.metadata.version('triton')}"


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """Step without kernels inside of the block, to compare."""
    before, _kernel.wanted = _kernel.wanted, False
    try:
        yield
    finally:
        _kernel.wanted = before


def _kind(run: Run, states: Sequence[str]) -> Kind | None:
    """Return the dtypes of a run, or None if the kernel does not serve it."""
    tensors = run.tensors
    used = [tensors[name] for name in ("parameter", "gradient", *states)]
    used += [tensors[name] for name in ("output", COMPENSATION) if name in tensors]
    device = used[0].device
    if not all(tensor.device == device and tensor.is_contiguous() for tensor in used):
        return None
    kept = {tensors[name].dtype for name in states}
    output = tensors["output"].dtype if "output" in tensors else None
    kind = (tensors["gradient"].dtype, tensors["parameter"].dtype, *kept, output)
    served = len(kept) == 1 and torch.float16 not in kept and all(dtype in _SERVED for dtype in kind if dtype)
    return kind if served and 0 < run.numel < 1 << 31 else None


class _Kernel:
    """The kernel, which is loaded when it is first needed, if it can be."""

    def __init__(self) -> None:
        self.wanted = True  # until it turns out that it cannot be had
        self._loading = threading.Lock()
        self._module: ModuleType | None = None
        self._tables = _Tables()

    def step(
        self,
        runs: Sequence[Run],
        formula: Formula,
        states: Sequence[str],
        kind: Kind,
        rounding: str,
        factor: torch.Tensor | None,
        key: Callable[..., int],
    ) -> bool:
        """Launch it; return False where it cannot be had, and nothing has been written."""
        with self._loading:
            if self.wanted and self._module is None:
                with self._falling_back():
                    self._module = importlib.import_module("shardwise.device.tritonsteps")
        if not self.wanted or self._module is None:
            return False
        if not has_values(runs[0].tensors["parameter"]):
            _imagine(runs, states)
            return True
        rounding = rounding if kind[1] is torch.bfloat16 else "nearest"
        streams = [0] if rounding == "stochastic" else []
        streams += range(1, 1 + len(states)) if kind[2] is torch.bfloat16 else []
        names = ("gradient", "parameter", states[0], states[-1], COMPENSATION, "output")
        device = runs[0].tensors["parameter"].device
        # A thread of the engine's own may have another current device.
        on_device: Any = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with on_device:
            tables = self._tables.of(runs, names, bool(streams), self._module.CHUNK)
            keys = _sent(_keys(runs, streams, key), device) if streams else None
            with self._falling_back():
                self._module.launch(*tables, keys, factor, formula, kind, rounding)
        return self.wanted

    @contextlib.contextmanager
    def _falling_back(self) -> Iterator[None]:
        try:
            yield
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # nothing is wrong with the kernel
        except Exception as error:  # Triton is missing or too old, or finds no C compiler at the first launch
            self.wanted = False
            _log.warning(
                "optimizers step by several kernels of torch, which takes longer than one pass over memory by one of "
                "Triton would, and rounds differently (all ranks should do alike): %s: %s",
                type(error).__name__,
                error,
            )


Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""See `shardwise.device.tritonsteps`: chunks, spans and rows."""


class _Tables:
    """Where tensors lie, for the kernel. Addresses repeat from step to step, so that tables mostly are there already.

    They belong to the stream on which they were sent: what runs there later finds them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Any, Any] = OrderedDict()

    def of(self, runs: Sequence[Run], names: Sequence[str], random: bool, chunk: int) -> Tables:
        """Return the tables of runs, with origins if there are random numbers.

        Args:
            runs: on one device.
            names: of tensors in the order of the table's columns; a run may lack some.
            random: see above.
            chunk: elements of a program.
        """
        device = runs[0].tensors["parameter"].device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        sizes = tuple(run.numel for run in runs)
        origins = tuple(tuple(run.origins) for run in runs) if random else None
        found = [run.tensors.get(name) for run in runs for name in names]
        addresses = tuple(0 if tensor is None else tensor.data_ptr() for tensor in found)
        place = (device, stream, sizes)
        with self._lock:
            chunks, spans = self._get((place, origins), lambda: _chunks(sizes, origins, chunk), device)
            (rows,) = self._get((place, addresses), lambda: (_rows(sizes, addresses, chunk),), device)
        return chunks, spans, rows

    def _get(self, key: Any, make: Callable[[], tuple[torch.Tensor, ...]], device: torch.device) -> Any:
        found = self._kept.pop(key, None)
        if found is None:
            found = [_sent(table, device) for table in make()]
            if len(self._kept) >= _KEPT:
                self._kept.popitem(last=False)
        self._kept[key] = found
        return found


def _chunks(
    sizes: Sequence[int], origins: Sequence[Sequence[Origin]] | None, chunk: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return, for each chunk, run, range of origins in it, and whether it is one of them; and each origin's pairs."""
    runs = torch.arange(len(sizes), device="cpu").repeat_interleave(-(-torch.tensor(sizes, device="cpu") // chunk))
    firsts = torch.tensor(_firsts(sizes, chunk), device="cpu")
    # Pairs of all runs on one line: each run has a piece of its own that is long enough.
    piece = 1 << 32
    spans = [
        (number * piece + offset // 2, number * piece + -(-(offset + count) // 2))
        for number, of_run in enumerate(origins or ())
        for _, _, offset, count in of_run
    ]
    line = torch.tensor(spans, dtype=torch.int64, device="cpu").view(-1, 2)
    begins = runs * piece + (torch.arange(len(runs), device="cpu") - firsts[runs]) * (chunk // 2)
    first = torch.searchsorted(line[:, 1].contiguous(), begins, right=True)
    last = torch.searchsorted(line[:, 0].contiguous(), begins + chunk // 2)
    whole = begins % piece + chunk // 2 <= torch.tensor(sizes, device="cpu")[runs] // 2
    if origins is not None:
        low, high = torch.cat([line, line.new_zeros(1, 2)])[first].unbind(1)
        whole &= (last - first == 1) & (low <= begins) & (high >= begins + chunk // 2)
    return torch.stack([runs, first, last, whole], 1).to(torch.int32), (line % piece).to(torch.int32)


def _rows(sizes: Sequence[int], addresses: Sequence[int], chunk: int) -> torch.Tensor:
    """Return, for each run: elements, number of its first chunk, whether all addresses are aligned, and addresses."""
    places = torch.tensor(addresses, dtype=torch.int64, device="cpu").view(len(sizes), -1)
    aligned = (places % _ALIGNMENT == 0).all(1)
    return torch.cat([torch.tensor([sizes, _firsts(sizes, chunk), aligned.tolist()], device="cpu").T, places], 1)


def _firsts(sizes: Sequence[int], chunk: int) -> list[int]:
    return list(itertools.accumulate((-(-size // chunk) for size in sizes), initial=0))[:-1]


def _keys(runs: Sequence[Run], streams: Sequence[int], key: Callable[..., int]) -> torch.Tensor:
    """Return, for each stream of random numbers: its key, and what each origin adds to the number of a pair of the run.

    There are rows up to the last stream, of which those of others are zero.
    """
    origins = [origin for run in runs for origin in run.origins]
    table = torch.zeros(streams[-1] + 1, 1 + len(origins), dtype=torch.int64, device="cpu")
    for stream in streams:
        of_tensor = {tensor: key(stream, tensor) for tensor in {origin[0] for origin in origins}}
        bases = [of_tensor[tensor] + start // 2 - offset // 2 for tensor, start, offset, _ in origins]
        table[stream] = torch.tensor([key(stream), *bases], device="cpu")
    return table.to(torch.int32)  # modulo 2^32


def _sent(table: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a table on a device; nobody waits for it."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table


_kernel = _Kernel()
