"""Metrics of the samples of a dataset, computed once by map and reduce, for sampling by difficulty.

The map writes parts (`.npy`), each complete or absent, so an interrupted analysis goes on where it was. The reduction
writes indexed datasets (`shardwise.data.indexed`), and removes the parts. Reading either runs no code, and no
command line is built.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, default_collate

from shardwise.data.fetch import outlive_signals
from shardwise.data.indexed import Array, write_rows
from shardwise.errors import ConfigError, UsageError

VALUE, TOTAL = "single_value_per_sample", "accumulate_value_over_samples"
_PART = 1 << 16
"""Most samples of a part."""
_PERCENTS = 100
_CLAIM = "analysis.json"


class _Measure:
    """Collates the samples of a batch, and computes the metrics of the batch."""

    def __init__(self, collate: Callable[[list[Any]], Any], functions: dict[str, Callable[[Any], Any]]) -> None:
        self.collate, self.functions = collate, functions

    def __call__(self, samples: list[Any]) -> tuple[int, dict[str, Array]]:
        batch = self.collate(samples)
        found = {name: function(batch) for name, function in self.functions.items()}
        return len(samples), {
            name: value.numpy(force=True) if isinstance(value, torch.Tensor) else np.asarray(value)
            for name, value in found.items()
        }


class DataAnalyzer:
    """Computes metrics of the samples of a map-style dataset.

    A metric of type "single_value_per_sample" is a function of a batch that returns an integer for each sample. Of each
    metric NAME the reduction writes, in `save_path/NAME/`: `NAME_sample_to_metric` (the value of each sample),
    `NAME_index_to_metric` (the different values, ascending), `NAME_index_to_sample` (the samples of each of them) and
    `NAME_index_to_sample_percentile_merged` (the samples of each percentile). A metric of type
    "accumulate_value_over_samples" returns an array, and `NAME_metric_value` has the sum over all batches.

    Args:
        dataset: the dataset.
        num_workers: processes that share the work, such as those of several machines, with the same `save_path`.
        worker_id: this one, from 0.
        num_threads: processes that this worker starts to read and measure samples; 1: none.
        num_threads_reduce: has no effect: the reduction sorts in one process.
        batch_size: samples of a batch.
        metric_names, metric_functions, metric_types, metric_dtypes: of each metric; dtypes by default the smallest.
        save_path: directory.
        collate_fn: makes a batch of a list of samples; None: torch's default.
        sample_indices: numbers of the samples, if the dataset is a part of another.

    Raises:
        UsageError: lists differ in length; a type is unknown; values are no integers, or not one for each sample;
            or `save_path` has parts of another analysis.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        worker_id: int = 0,
        num_threads: int = 1,
        num_threads_reduce: int = 1,
        specific_threads: Sequence[int] = (),
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        metric_dtypes: Sequence[Any] = (),
        save_path: str | os.PathLike[str] = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        custom_map_init: None = None,
        custom_map_update: None = None,
        custom_map_finalize: None = None,
        custom_reduce: None = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        if specific_threads or any((custom_map_init, custom_map_update, custom_map_finalize, custom_reduce)):
            raise UsageError(
                "DataAnalyzer(specific_threads, custom_map_*, custom_reduce): an interrupted analysis goes on by "
                "itself, and other computations than metrics are the script's; leave these arguments out"
            )
        dtypes = list(metric_dtypes) or [None] * len(metric_names)
        lengths = {len(metric_names), len(metric_functions), len(metric_types), len(dtypes)}
        wrong = [name for name in metric_names if not name or os.path.basename(name) != name]
        if lengths == {0} or len(lengths) > 1 or wrong or not set(metric_types) <= {VALUE, TOTAL}:
            raise UsageError(
                f"DataAnalyzer: expected a name, which can be that of a file, a function and a type ({VALUE} or "
                f"{TOTAL}) for each metric, found names {list(metric_names)}, types {list(metric_types)}, "
                f"{len(metric_functions)} functions and {len(dtypes)} dtypes"
            )
        self._dataset, self._batch, self._path = dataset, batch_size, os.fspath(save_path)
        self._workers, self._worker, self._processes = num_workers, worker_id, num_threads if num_threads > 1 else 0
        self._types = dict(zip(metric_names, metric_types, strict=True))
        self._dtypes = dict(zip(metric_names, dtypes, strict=True))
        self._measure = _Measure(collate_fn or default_collate, dict(zip(metric_names, metric_functions, strict=True)))
        self._numbers = None if sample_indices is None else np.asarray(sample_indices, np.int64)
        count = len(dataset)
        if self._numbers is not None and len(self._numbers) != count:
            raise UsageError(f"DataAnalyzer(sample_indices): {len(self._numbers)} numbers for {count} samples")
        self._size = max(1, min(_PART, -(-count // num_workers)))

    def run_map(self) -> None:
        """Measure this worker's part of the samples, as far as that was not done before."""
        self._claim()
        for number, (start, stop) in enumerate(self._parts()):
            missing = [name for name in self._types if not os.path.exists(self._part(name, start, stop))]
            if missing and number % self._workers == self._worker:
                for name, values in self._measured(start, stop).items():
                    path = self._part(name, start, stop)
                    temporary = f"{path}.{os.getpid()}.tmp"
                    with open(temporary, "wb") as file:
                        np.save(file, values, allow_pickle=False)
                        file.flush()
                        os.fsync(file.fileno())
                    os.replace(temporary, path)

    def run_reduce(self) -> None:
        """Write the files of each metric from the parts of all workers, which are removed; one worker calls it.

        Raises UsageError if parts are missing.
        """
        for name, kind in self._types.items():
            if not os.path.exists(os.path.join(self._path, name, _CLAIM)):
                raise UsageError(
                    f"DataAnalyzer.run_reduce(): there is no analysis under way in {self._path}: it was reduced "
                    "already, or run_map() has not begun"
                )
            paths = [self._part(name, start, stop) for start, stop in self._parts()]
            missing = [path for path in paths if not os.path.exists(path)]
            if missing:
                raise UsageError(
                    f"DataAnalyzer.run_reduce(): {len(missing)} of {len(paths)} parts are missing, such as {missing[0]}"
                    f". Let each of {self._workers} workers finish run_map() with the same save_path"
                )
            parts = [np.load(path, mmap_mode="r", allow_pickle=False) for path in paths]
            if kind == TOTAL:
                total = np.sum([np.asarray(part) for part in parts], axis=0)
                self._write(name, "metric_value", total.reshape(-1), [total.size], self._dtypes[name])
            else:
                self._write_order(name, np.concatenate(parts))
        for name in self._types:
            folder = Path(self._path, name)
            for file in (*folder.glob("part_*.npy"), folder / _CLAIM):
                file.unlink(missing_ok=True)  # another worker may have reduced as well

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Map, and reduce once all workers are done: those of a process group if there is one (worker 0 reduces)."""
        self.run_map()
        meets = self._workers > 1 and dist.is_available() and dist.is_initialized()
        if meets:
            dist.barrier(comm_group)
        if self._worker == 0:
            self.run_reduce()
        if meets:
            dist.barrier(comm_group)

    def _write_order(self, name: str, values: Array) -> None:
        order = np.argsort(values, kind="stable")
        ordered = values[order]
        numbers = order if self._numbers is None else self._numbers[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(order) else order
        dtype = self._dtypes[name]
        self._write(name, "sample_to_metric", values, np.ones(len(values), np.int32), dtype)
        self._write(name, "index_to_metric", ordered[starts], np.ones(len(starts), np.int32), dtype)
        self._write(name, "index_to_sample", numbers, np.diff(starts, append=len(order)))
        ends = np.arange(_PERCENTS + 1) * len(order) // _PERCENTS
        self._write(name, "index_to_sample_percentile_merged", numbers, [size for size in np.diff(ends) if size])

    def _write(self, name: str, what: str, values: Array, sizes: Any, dtype: Any = None) -> None:
        write_rows(os.path.join(self._path, name, f"{name}_{what}"), values, sizes, dtype)

    def _measured(self, start: int, stop: int) -> dict[str, Array]:
        batches = [list(range(at, min(at + self._batch, stop))) for at in range(start, stop, self._batch)]
        loader = DataLoader(
            self._dataset,
            batch_sampler=batches,
            num_workers=self._processes,
            collate_fn=self._measure,
            worker_init_fn=outlive_signals if self._processes else None,
        )
        found: dict[str, list[Array]] = {name: [] for name in self._types}
        for count, values in loader:
            for name, value in values.items():
                if self._types[name] == VALUE and value.shape not in ((count,), (count, 1)):
                    raise UsageError(f"metric {name!r}: {count} samples have values of the shape {value.shape}")
                found[name].append(value.reshape(count) if self._types[name] == VALUE else value)
        return {
            name: np.concatenate(values) if self._types[name] == VALUE else np.sum(values, axis=0)
            for name, values in found.items()
        }

    def _parts(self) -> Iterator[tuple[int, int]]:
        count = len(self._dataset)
        return ((start, min(start + self._size, count)) for start in range(0, count, self._size))

    def _part(self, name: str, start: int, stop: int) -> str:
        return os.path.join(self._path, name, f"part_{start}_{stop}.npy")

    def _digest(self, name: str) -> str:
        functions = self._measure.functions[name], self._measure.collate
        text = _text(functions).encode()
        numbers = b"" if self._numbers is None else self._numbers.tobytes()
        return hashlib.blake2b(text + numbers, digest_size=8).hexdigest()

    def _claim(self) -> None:
        """Compare the analysis with that whose parts the directory has."""
        for name in self._types:
            os.makedirs(os.path.join(self._path, name), exist_ok=True)
            path = os.path.join(self._path, name, _CLAIM)
            own = {"samples": len(self._dataset), "type": self._types[name], "functions": self._digest(name)}
            if os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    found = json.load(file)
                if found != own:
                    raise ConfigError(
                        f"{path}: has parts of another analysis ({found}, now {own}); remove the directory"
                    )
            else:
                temporary = f"{path}.{os.getpid()}.tmp"
                with open(temporary, "w", encoding="utf-8") as file:
                    json.dump(own, file)
                os.replace(temporary, path)


def _text(value: Any, above: frozenset[int] = frozenset()) -> str:
    """Return a text that is equal in all processes for equal plain values and functions.

    A function's text has its name, source, defaults, closure and bound arguments; that of another object only its
    class, because attributes change. `above`: ids of the objects that contain the value.
    """
    if id(value) in above:
        return ""
    above |= {id(value)}
    if isinstance(value, functools.partial):
        value = value.func, value.args, value.keywords
    if isinstance(value, dict):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        return f"({', '.join(_text(item, above) for item in value)})"
    if value is None or isinstance(value, int | float | complex | str | bytes):
        return repr(value)
    found = value if inspect.isroutine(value) or inspect.isclass(value) else type(value)
    text = str(found.__qualname__)
    with contextlib.suppress(OSError, TypeError):  # in an interactive session, and in C
        text += f" {inspect.getsource(found)}"
    function = inspect.unwrap(getattr(value, "__func__", value))
    if inspect.isfunction(function):
        held: list[Any] = [function.__defaults__, function.__kwdefaults__]
        with contextlib.suppress(ValueError):  # of a variable without a value
            held += [cell.cell_contents for cell in function.__closure__ or ()]
        text += _text(held, above)
    return text


class DistributedDataAnalyzer(DataAnalyzer):
    """A `DataAnalyzer` whose workers are the ranks of a process group; `save_path` is on a file system of all of them.

    Args:
        num_workers: processes that each rank starts to read and measure samples; 1: none.
        comm_group: the process group; None: the default one, which must exist.
        device: has no effect: values are small.
    """

    def __init__(
        self,
        dataset: Any,
        num_workers: int = 1,
        batch_size: int = 1,
        metric_names: Sequence[str] = (),
        metric_functions: Sequence[Callable[[Any], Any]] = (),
        metric_types: Sequence[str] = (),
        save_path: str | os.PathLike[str] = "./",
        collate_fn: Callable[[list[Any]], Any] | None = None,
        device: Any = None,
        comm_group: Any = None,
        sample_indices: Sequence[int] | None = None,
    ) -> None:
        self._group = comm_group
        super().__init__(
            dataset,
            num_workers=dist.get_world_size(comm_group),
            worker_id=dist.get_rank(comm_group),
            num_threads=num_workers,
            batch_size=batch_size,
            metric_names=metric_names,
            metric_functions=metric_functions,
            metric_types=metric_types,
            save_path=save_path,
            collate_fn=collate_fn,
            sample_indices=sample_indices,
        )

    def run_map_reduce(self, comm_group: Any = None) -> None:
        """Map on all ranks, and reduce on the first (all ranks call)."""
        super().run_map_reduce(comm_group if comm_group is not None else self._group)
