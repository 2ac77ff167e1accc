"""Reading an open checkpoint: any range of any tensor, from any of its files."""

from __future__ import annotations

import functools
import os
import sys
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from shardwise.checkpoint import manifest, manifestfile, nested_json
from shardwise.checkpoint.directory import Hold
from shardwise.checkpoint.manifest import Slice, StoredTensor
from shardwise.checkpoint.safetensors_reader import TensorFile
from shardwise.checkpoint.weights_reader import Progress, ReadRange, Run, WeightsReader
from shardwise.device.staging import is_far
from shardwise.errors import CheckpointError

T = TypeVar("T")

Block = tuple[str, int]
"""(file, number of a checksum in it)."""


class Checkpoint(WeightsReader):
    """A checkpoint on disk: `manifest` has its content, `notes` describe state that cannot be loaded. Files that belong
    to no checkpoint yet are read with a `given` manifest.

    Raises CheckpointError if it is incomplete, or its manifest is damaged or of another format.

    Example: read ten elements of a parameter.
        >>> with Checkpoint("runs/a/global_step100") as saved:  # doctest: +SKIP
        ...     weight = saved.find("h.0.attn.weight")
        ...     out = torch.empty(10, dtype=weight.torch_dtype)
        ...     saved.read_into(weight, 100, out)
    """

    what = "checkpoint of shardwise"

    def __init__(self, path: str, given: manifest.Manifest | None = None) -> None:
        self.path = path
        while True:
            self._hold = Hold(path)  # first, because it could be removed after a check
            self.manifest = given or manifestfile.load(path)
            if self._hold.is_current():
                break
            self._hold.release()  # another one of this tag was published meanwhile
        self.notes: list[str] = []
        self._files: dict[str, TensorFile] = {}
        self._spans: dict[str, list[tuple[int, int]]] = {}
        self._opening = threading.Lock()

    def close(self) -> None:
        """Close all files, and unlock the checkpoint."""
        self._hold.release()
        for file in self._files.values():
            file.close()
        self._files = {}

    def find(self, name: str, kind: str = manifest.PARAMETER) -> StoredTensor:
        """Return the description of a tensor. Raises CheckpointError if there is none of this name and kind."""
        for tensor in self.manifest.tensors:
            if tensor.kind == kind and (tensor.name == name or name in tensor.aliases):
                return tensor
        raise CheckpointError(f"{self.path}: there is no {kind} {name!r}")

    @property
    def excluded(self) -> list[str]:
        """Frozen parameters that the save left out."""
        return list(self.manifest.excluded)

    def tensors(self) -> dict[str, StoredTensor]:
        """Return all parameters and buffers by name: master weights if there are any, and rank 0's buffers."""
        held = [*self.manifest.of_kind(manifest.PARAMETER), *self.manifest.of_kind(manifest.BUFFER)]
        return {tensor.name: tensor for tensor in held if tensor.rank is None}

    def opened(self, tensor: StoredTensor, part: Slice) -> ReadRange:
        """Return a thread-safe function that reads from a slice of a tensor."""
        return functools.partial(self._stored(tensor, part).read_into, part.key)

    def check(self, tensors: Iterable[StoredTensor] | None = None, progress: Progress | None = None) -> bool:
        """Compare the bytes of tensors (None: of everything) with their checksums, and report progress in blocks.
        Raises CheckpointError if a file is damaged.
        """
        wanted = None if tensors is None else list(tensors)
        files = self.manifest.files if wanted is None else {part.file for tensor in wanted for part in tensor.slices}
        self.check_sizes(sorted(files))
        blocks = self.blocks(wanted)
        for first in range(0, len(blocks), 16):
            self.verify(blocks[first : first + 16])
            if progress is not None:
                progress(min(len(blocks), first + 16), len(blocks))
        return True

    def read_all(self, runs: Sequence[Run]) -> None:
        """Read as `read_into` does, with several threads if there are cores for them."""
        for_each(lambda run: self.read_into(*run), runs)

    def module_values(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers unsharded, on the CPU, under all their names."""
        values: dict[str, torch.Tensor] = {}
        for tensor in self.manifest.of_module():
            if tensor.rank is None:
                values.update(dict.fromkeys((tensor.name, *tensor.aliases), self.read(tensor)))
        return values

    def decode(self, tree: Any) -> Any:
        """Return the Python value of a tree in the manifest."""
        return nested_json.decode(tree, lambda reference: self._file(reference["file"]).read(reference["key"]))

    def _stored(self, tensor: StoredTensor, part: Slice) -> TensorFile:
        file = self._file(part.file)
        spec, count = file.specs.get(part.key), part.stop - part.start
        if spec is None or spec.dtype is not tensor.torch_dtype or spec.nbytes != count * spec.dtype.itemsize:
            description = "nothing" if spec is None else f"{spec.dtype} of shape {list(spec.shape)}"
            raise CheckpointError(
                f"{file.path}: {part.key!r}: expected {count} elements of {tensor.dtype} ({tensor.kind} "
                f"{tensor.name!r}), found {description}: the manifest is of another file"
            )
        return file

    def _file(self, name: str) -> TensorFile:
        with self._opening:
            if name not in self._files:
                # Names come from the manifest, which lists only files of the checkpoint's own directory.
                if name not in self.manifest.files:
                    raise CheckpointError(f"{self.path}: the manifest does not list the file {name!r}")
                self._files[name] = TensorFile(os.path.join(self.path, name))
            return self._files[name]

    def check_sizes(self, files: Iterable[str]) -> None:
        """Check that files have the manifest's sizes. Raises CheckpointError if one is missing or differs."""
        for name in files:
            path = os.path.join(self.path, name)
            expected = self.manifest.files[name].size
            try:
                found = os.path.getsize(path)
            except OSError as error:
                raise CheckpointError(f"{path}: expected a file of {expected} bytes: {error.strerror}") from error
            if found != expected:
                raise CheckpointError(
                    f"{path}: expected {expected} bytes, found {found}: the file is truncated or was changed"
                )

    def _spans_of(self, name: str) -> list[tuple[int, int]]:
        """Return the first byte and the end of the bytes of each checksum of a file."""
        if name not in self._spans:
            facts, file = self.manifest.files[name], self._file(name)
            if facts.block is not None:
                starts = range(0, facts.size, facts.block)
                spans = [(start, min(facts.size, start + facts.block)) for start in starts]
            else:
                spans = [(0, file.data), *sorted(map(file.span, file.specs))]
            if len(spans) != len(facts.checksums):
                raise CheckpointError(
                    f"{file.path}: damaged: expected {len(facts.checksums) - 1} tensors, found {len(spans) - 1}"
                )
            self._spans[name] = spans
        return self._spans[name]

    def files(self) -> list[str]:
        """Return the names of all files with checksums."""
        return sorted(self.manifest.files)

    def blocks(
        self,
        tensors: Iterable[StoredTensor] | None = None,
        trees: Iterable[Any] = (),
        files: Collection[str] | None = None,
    ) -> list[Block]:
        """Return the blocks that hold some tensors and trees; all blocks if `tensors` is None. With `files` only those
        of these files, and no other is opened.
        """
        chosen = self.files() if files is None else files
        if tensors is None:
            return [(name, n) for name in sorted(chosen) for n in range(len(self.manifest.files[name].checksums))]
        wanted = {(part.file, part.key) for tensor in tensors for part in tensor.slices}
        wanted |= {(ref["file"], ref["key"]) for tree in trees for ref in nested_json.references(tree)}
        found: set[Block] = set()
        for name, key in ((name, key) for name, key in wanted if name in chosen):
            file = self._file(name)
            for span in (file.span(key), (0, file.data)):  # the header has the tensor's offset
                found.update((name, n) for n in self._overlapping(name, *span))
        return sorted(found)

    def _overlapping(self, name: str, begin: int, end: int) -> range:
        spans = self._spans_of(name)
        return range(bisect_right(spans, (begin, sys.maxsize)) - 1, bisect_left(spans, (end, 0)))

    def places(self, runs: Iterable[Run]) -> tuple[dict[Block, Run], list[Run]]:
        """Divide runs into those that `verify` can fill on the way, of the elements of entire blocks, and others."""
        found: dict[Block, Run] = {}
        rest: list[Run] = []
        for stored, start, out in runs:
            here: dict[Block, Run] = {}
            for part, patch in stored.runs(start, start + out.numel()):
                file = self._stored(stored, part)
                blocks = self._overlapping(part.file, *file.span(part.key))
                into = out[patch.target : patch.target + patch.numel] if patch.flat else out[:0]
                exact = (self._spans_of(part.file)[blocks[0]] if blocks else None) == file.span(part.key)
                fits = into.dtype == stored.torch_dtype and into.is_contiguous() and not is_far(into.device)
                if exact and fits and into.nbytes == file.specs[part.key].nbytes:
                    here[part.file, blocks[0]] = (stored, start + patch.target, into)
                else:
                    here = {}
                    break
            if here and found.keys().isdisjoint(here):
                found.update(here)
            else:
                rest.append((stored, start, out))
        return found, rest

    def verify(self, blocks: Iterable[Block], places: Mapping[Block, Run] | None = None) -> None:
        """Compare the bytes of blocks with their checksums, with threads if there are cores for them. `places`, from
        the method of this name, are filled before that. Raises CheckpointError for a damaged file, with the first wrong
        bytes and their tensor.
        """
        into = {block: out for block, (_, _, out) in (places or {}).items()}

        def check(some: Sequence[Block]) -> None:
            for block in some:
                self._verify(*block, into.get(block))

        for_each(check, divided(list(blocks)))

    def _verify(self, name: str, number: int, out: torch.Tensor | None) -> None:
        file, (begin, end) = self._file(name), self._spans_of(name)[number]
        if file.checksum(begin, end, out) != self.manifest.files[name].checksums[number]:
            names = [key for key in file.specs if file.span(key)[0] < end and file.span(key)[1] > begin]
            holders = f" (they hold {manifest.outline(names, 3)})" if names else ""
            raise CheckpointError(
                f"{file.path}: damaged: the checksum of bytes [{begin}, {end}) is wrong{holders}. Load another "
                "checkpoint by its tag, or restore this file from a copy"
            )


def complete_manifest(path: str) -> manifest.Manifest:
    """Return the manifest of the checkpoint at `path`. Raises CheckpointError if a file is missing or truncated."""
    with Checkpoint(path) as saved:
        saved.check_sizes(saved.manifest.files)
        return saved.manifest


def verify(path: str) -> manifest.Manifest:
    """Compare every byte of the checkpoint at `save_dir/tag` with its checksum; return the manifest.

    Raises:
        CheckpointError: a file is missing, damaged, or of another format.
    """
    with Checkpoint(path) as saved:
        saved.check()
        return saved.manifest


# -- threads for reading and hashing, both of which release the GIL ----------------------------------------------------

_MOST = 4
"""Maximum number of threads of one rank; more would compete for memory and disk."""


def workers() -> int:
    """Return the number of threads of this rank: its share of the machine's cores, from 1 to 4."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(1, min(_MOST, cores // max(1, int(ranks) if ranks.isdigit() else 1)))


def for_each(function: Callable[[T], None], items: Sequence[T]) -> None:
    """Call a function for every item without gradients, with threads if there are cores.

    Raises the exception of the first item that fails.
    """
    function = torch.no_grad()(function)  # a thread does not inherit the mode
    count = min(workers(), len(items))
    if count <= 1:
        for item in items:
            function(item)
        return
    with ThreadPoolExecutor(count, thread_name_prefix="shardwise-read") as pool:
        for _ in pool.map(function, items):  # after an exception it cancels the others
            pass


def divided(items: Sequence[T]) -> list[Sequence[T]]:
    """Return items in as many consecutive runs as there are threads."""
    count = max(1, min(workers(), len(items)))
    return [items[len(items) * n // count : len(items) * (n + 1) // count] for n in range(count)]
