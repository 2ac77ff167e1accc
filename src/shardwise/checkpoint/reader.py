"""Reading an open checkpoint: any range of any tensor, from any of its files."""

from __future__ import annotations

import functools
import os
import threading
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from shardwise.checkpoint import manifest, manifestfile, nested_json
from shardwise.checkpoint.directory import Hold
from shardwise.checkpoint.manifest import Slice, StoredTensor
from shardwise.checkpoint.parallel import divided, for_each
from shardwise.checkpoint.safetensors_reader import BLOCK, STEP, Take, TensorFile
from shardwise.checkpoint.strided import read_patch
from shardwise.device.staging import Staging, is_far
from shardwise.errors import CheckpointError

Run = tuple[StoredTensor, int, torch.Tensor]
"""(tensor, start, 1-D tensor): elements of a stored tensor from `start` on, and their destination."""


@dataclass(frozen=True)
class FilePlace:
    """Contiguous elements of a stored tensor in a file, from byte `begin`; and their destination (1-D, any dtype)."""

    stored: StoredTensor
    start: int
    out: torch.Tensor
    file: str
    begin: int

    @property
    def end(self) -> int:
        """End of the bytes (exclusive)."""
        return self.begin + self.out.numel() * self.stored.torch_dtype.itemsize

    @property
    def blocks(self) -> range:
        """Blocks of the file that contain the elements."""
        return range(self.begin // BLOCK, -(-self.end // BLOCK))

    def part(self, begin: int, end: int) -> list[Run]:
        """Return the elements between two bytes of the file as a run, or nothing."""
        size = self.stored.torch_dtype.itemsize
        first, last = (max(begin, self.begin) - self.begin) // size, (min(end, self.end) - self.begin) // size
        return [(self.stored, self.start + first, self.out[first:last])] if first < last else []


class Checkpoint:
    """A checkpoint on disk: `manifest` has its content, `notes` describe state that cannot be loaded.

    Raises CheckpointError if it is incomplete, or its manifest is damaged or of another format.

    Example: read ten elements of a parameter.
        >>> with Checkpoint("runs/a/global_step100") as saved:  # doctest: +SKIP
        ...     weight = saved.find("h.0.attn.weight")
        ...     out = torch.empty(10, dtype=weight.torch_dtype)
        ...     saved.read_into(weight, 100, out)
    """

    def __init__(self, path: str) -> None:
        self.path = path
        while True:
            self._hold = Hold(path)  # first, because it could be removed after a check
            self.manifest = manifestfile.load(path)
            if self._hold.is_current():
                break
            self._hold.release()  # another one of this tag was published meanwhile
        self.notes: list[str] = []
        self._files: dict[str, TensorFile] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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

    def read_into(self, tensor: StoredTensor, start: int, out: torch.Tensor) -> None:
        """Read elements of the flattened tensor, from `start` on, into a 1-D tensor of any dtype and device.
        Thread-safe. Only their bytes are read. Raises CheckpointError if they are not stored, or a file cannot be read.
        """
        for part, patch in tensor.runs(start, start + out.numel()):
            file = self._stored(tensor, part)
            read_patch(patch, tensor.torch_dtype, functools.partial(file.read_into, part.key), out)

    def read_all(self, runs: Sequence[Run]) -> None:
        """Call `read_into` for several (tensor, start, out), with several threads if there are cores for them."""
        for_each(lambda run: self.read_into(*run), runs)

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return an unsharded tensor, on the CPU."""
        for part in tensor.slices:
            self._stored(tensor, part)  # before memory is allocated for a missing tensor
        values = torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="cpu")
        self.read_into(tensor, 0, values.view(-1))
        return values

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

    def blocks(self, tensors: Iterable[StoredTensor] | None = None, trees: Iterable[Any] = ()) -> list[tuple[str, int]]:
        """Return (file, block) of the blocks that hold some tensors and trees; of all blocks if `tensors` is None."""
        if tensors is None:
            return [
                (name, n)
                for name in sorted(self.manifest.files)
                for n in range(len(self.manifest.files[name].checksums))
            ]
        wanted = [(part.file, part.key) for tensor in tensors for part in tensor.slices]
        wanted += [(ref["file"], ref["key"]) for tree in trees for ref in nested_json.references(tree)]
        found: set[tuple[str, int]] = set()
        for name, key in wanted:
            file = self._file(name)
            if key not in file.specs:
                raise CheckpointError(f"{file.path}: there is no tensor {key!r}")
            begin, end = file.span(key)
            # The header has the tensor's offset and must be correct, too.
            found.update((name, n) for n in range(-(-file.data // BLOCK)))
            found.update((name, n) for n in range(begin // BLOCK, -(-end // BLOCK)))
        return sorted(found)

    def places(self, runs: Iterable[Run]) -> tuple[list[FilePlace], list[Run]]:
        """Divide runs into places that `verify` can fill on the way, and other runs: of the same bytes as a place, not
        aligned in the file, or in another order in memory. Raises CheckpointError if values are not stored.
        """
        found: list[FilePlace] = []
        rest: list[Run] = []
        for stored, start, out in runs:
            taken = stored.runs(start, start + out.numel())
            if not all(patch.flat for _, patch in taken):
                rest.append((stored, start, out))
                continue
            for part, patch in taken:
                begin = self._stored(stored, part).span(part.key)[0] + patch.source * stored.torch_dtype.itemsize
                into = out[patch.target : patch.target + patch.numel]
                found.append(FilePlace(stored, start + patch.target, into, part.file, begin))
        kept: list[FilePlace] = []
        for place in sorted(found, key=lambda place: (place.file, place.begin)):
            second = bool(kept) and kept[-1].file == place.file and place.begin < kept[-1].end
            if second or place.begin % place.stored.torch_dtype.itemsize:
                rest.append((place.stored, place.start, place.out))
            else:
                kept.append(place)
        return kept, rest

    def mostly(self, places: Iterable[FilePlace]) -> list[tuple[str, int]]:
        """Return (file, block) of the blocks that are read into some places to at least a half."""
        held: Counter[tuple[str, int]] = Counter()
        for place in places:
            for n in place.blocks:
                held[place.file, n] += min(place.end, (n + 1) * BLOCK) - max(place.begin, n * BLOCK)
        files = self.manifest.files
        return sorted(
            block for block, n in held.items() if 2 * n >= min(BLOCK, files[block[0]].size - block[1] * BLOCK)
        )

    def left(self, places: Iterable[FilePlace], blocks: Iterable[tuple[str, int]]) -> list[Run]:
        """Return the runs of some places that `verify` of some blocks does not fill."""
        done, found = set(blocks), []
        for place in places:
            at = place.begin
            for n in place.blocks:
                if (place.file, n) in done:
                    found += place.part(at, n * BLOCK)
                    at = (n + 1) * BLOCK
            found += place.part(at, place.end)
        return found

    def verify(self, blocks: Iterable[tuple[str, int]], places: Sequence[FilePlace] = ()) -> None:
        """Compare the bytes of (file, block) pairs with their checksums, with threads if there are cores for them.
        `places`, from the method of this name, are filled before that. Raises CheckpointError for a damaged file, with
        the first wrong bytes and their tensor.
        """
        by_file: dict[str, list[FilePlace]] = {}
        for place in places:
            by_file.setdefault(place.file, []).append(place)
        for_each(lambda some: self._verify_run(some, by_file), divided(list(blocks)))

    def _verify_run(self, blocks: Sequence[tuple[str, int]], places: dict[str, list[FilePlace]]) -> None:
        by_file: dict[str, list[int]] = {}
        for name, block in blocks:
            by_file.setdefault(name, []).append(block)
        for name, numbers in by_file.items():
            file, there = self._file(name), places.get(name, ())
            device = next((place.out.device for place in there if is_far(place.out.device)), None)
            staging = None if device is None else Staging(device, STEP)
            memory = None if staging is None else staging.free
            try:
                checksums = self.manifest.files[name].checksums
                wrong = file.wrong_blocks(checksums, numbers, _taker(there, staging), memory)
            finally:
                if staging is not None:
                    staging.drain()
            if wrong:
                begin = wrong[0] * BLOCK
                raise CheckpointError(
                    f"{file.path}: damaged: the checksum of bytes [{begin}, {begin + BLOCK}) is "
                    f"wrong{self._holders(file, begin)}. Load another checkpoint by its tag, or restore this file "
                    "from a copy"
                )

    def _holders(self, file: TensorFile, begin: int) -> str:
        names = [name for name in file.specs if file.span(name)[0] < begin + BLOCK and file.span(name)[1] > begin]
        return f" (they hold {manifest.outline(names, 3)})" if names else ""


def _taker(places: Sequence[FilePlace], staging: Staging | None) -> Take | None:
    """Return a function that copies bytes of a file to some places of it, in order; `staging` has host buffers."""
    if not places:
        return None
    begins = [place.begin for place in places]

    def take(offset: int, data: torch.Tensor) -> None:
        end = offset + data.numel()
        for number in range(max(0, bisect_right(begins, offset) - 1), bisect_left(begins, end)):
            place = places[number]
            for stored, start, out in place.part(offset, end):
                dtype = stored.torch_dtype
                first = place.begin + (start - place.start) * dtype.itemsize - offset
                values = data[first : first + out.numel() * dtype.itemsize].view(dtype)
                if staging is not None and out.dtype is dtype and is_far(out.device):
                    staging.send(out.detach(), values)
                else:
                    out.detach().copy_(values)

    return take


def verify(path: str) -> manifest.Manifest:
    """Compare every byte of the checkpoint at `save_dir/tag` with its checksum; return the manifest.

    Raises:
        CheckpointError: a file is missing, damaged, or of another format.
    """
    with Checkpoint(path) as saved:
        saved.check_sizes(saved.manifest.files)
        saved.verify(saved.blocks())
        return saved.manifest
