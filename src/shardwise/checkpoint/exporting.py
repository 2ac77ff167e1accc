"""Export: plain weights for other programs, from a source on disk or from an engine. Tensors are copied and converted
in pieces of 8 MiB, which bounds memory. From an engine, ranks send their ranges to rank 0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.boxes import Patch, Region, overlap, region, whole
from shardwise.checkpoint.agree import collective_step
from shardwise.checkpoint.collect import buffer_names, within
from shardwise.checkpoint.directory import check_directory
from shardwise.checkpoint.hf_config import config_files
from shardwise.checkpoint.manifest import dtype_of, name_of, outline
from shardwise.checkpoint.opening import open_source
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.sharded_weights import FORMATS, Entry, WeightFiles, parse_size, replace_file
from shardwise.checkpoint.source import PIECE, Progress, Source
from shardwise.checkpoint.weights import UnshardedTensor, gathered_buffers, unsharded_parameters
from shardwise.errors import CheckpointError
from shardwise.registry import taken
from shardwise.utils.logging import logger

KEEP = "keep"
_DTYPES: dict[Any, torch.dtype | None] = {
    KEEP: None,
    **{name: torch.float32 for name in ("float32", "fp32")},
    **{name: torch.bfloat16 for name in ("bfloat16", "bf16")},
    **{name: torch.float16 for name in ("float16", "fp16", "half")},
}
DISTRIBUTED = "dcp"
_LIMIT = {"hf": "5GB", "pt": None}
_LABEL = "export"


def parse_format(format: str, known: tuple[str, ...] = (*FORMATS, DISTRIBUTED)) -> str:
    """Return the name of a format. Raises CheckpointError if the format is unknown."""
    if format not in known:
        raise CheckpointError(f"format: expected one of {', '.join(known)}, found {format!r}")
    return format


def parse_export_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """Return the dtype of floating-point tensors; None: unchanged. Raises CheckpointError for other values."""
    name = name_of(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in _DTYPES:
        raise CheckpointError(f"dtype: expected float32, bfloat16, float16 or {KEEP}, found {dtype!r}")
    return _DTYPES[name]


@dataclass
class Exported:
    """Result of an export: files (none for `dcp`), number and bytes of tensors, warnings for readers of the files."""

    files: list[str] = field(default_factory=list)
    tensors: int = 0
    size: int = 0
    warnings: list[str] = field(default_factory=list)


class Conversion:
    """Converts floating-point values to a dtype (None: unchanged), and counts values outside of its range."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.overflowed: dict[str, int] = {}

    def spec(self, spec: Spec) -> Spec:
        """Return dtype and shape after the conversion."""
        return Spec(self._target(spec.dtype), spec.shape)

    def _target(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def __call__(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return converted values."""
        dtype = self._target(values.dtype)
        if dtype is values.dtype:
            return values
        converted = values.to(dtype)
        if dtype is torch.float16 and values.dtype.itemsize > 1:
            count = int((converted.isinf() & ~values.isinf()).sum())
            if count:
                self.overflowed[name] = self.overflowed.get(name, 0) + count
        return converted

    def warnings(self) -> list[str]:
        """Return messages about values outside of the range."""
        if not self.overflowed:
            return []
        names = outline([f"{name} ({count} values)" for name, count in self.overflowed.items()])
        return [f"values beyond the range of float16 became infinite in {names}; export as bfloat16 or float32 instead"]


def export(
    path: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    format: str = "hf",
    dtype: str | torch.dtype = KEEP,
    max_shard_size: int | str | None = None,
    exclude_frozen: bool = False,
    all_names: bool = False,
    tag: str | int | None = None,
    overwrite: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> Exported:
    """Write the weights of a checkpoint for other programs, in one process and without a device.

    Args:
        path: a checkpoint or a directory of checkpoints, or other weights that `open_source` reads.
        directory: directory of the files; created if needed.
        format: `hf`: safetensors with an index, for Hugging Face's `from_pretrained`; `pt`: a state dict as
            `torch.save` writes it (`torch.load(weights_only=True)` reads it); `dcp`: a directory of
            torch.distributed.checkpoint.
        dtype: dtype of floating-point tensors: `float32`, `bfloat16`, `float16`, or `keep` (stored dtype; master
            weights: float32).
        max_shard_size: size of one file, as "5GB" or a number of bytes; None: 5GB for `hf`, one file for `pt`.
        exclude_frozen: leave out parameters that were not trained.
        all_names: `hf`: write a tied tensor under each of its names. By default only one is written: Hugging Face's
            models tie it again, and `safetensors.torch.load_model` finds the other names in the header. Other formats
            always have all names.
        tag: tag in a directory of checkpoints; None: the one that `latest` names, or the newest complete one.
        overwrite: replace weights in `directory`.
        verify: compare everything with its checksums before it is written.
        progress: called with bytes written and total bytes.

    Raises:
        CheckpointPathError: `path` holds no weights, or `directory` holds some already.
        CheckpointError: the checkpoint is damaged, an argument is wrong, or writing failed. The directory is unchanged.

    Example:
        >>> import shardwise, tempfile
        >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config={"train_batch_size": 2})
        >>> run, out = tempfile.mkdtemp(), tempfile.mkdtemp()
        >>> engine.save_checkpoint(run)
        True
        >>> engine.destroy()
        >>> export(run, out, dtype="bfloat16").files
        ['model.safetensors']
    """
    parse_format(format)
    conversion = Conversion(parse_export_dtype(dtype))
    limit = _limit(format, max_shard_size)
    parent = check_directory(directory, "directory")
    with open_source(path, tag) as source:
        entries = _entries(source, conversion, exclude_frozen, all_names and format == "hf")
        names = list(dict.fromkeys(entry.source for entry in entries))
        if verify:
            source.verify(names)
        found = Exported(tensors=len(entries), size=sum(entry.spec.nbytes for entry in entries))
        if source.excluded and not exclude_frozen:
            found.warnings.append(
                f"{source.path}: was saved without these frozen parameters, which are therefore missing: "
                f"{outline(source.excluded)}"
            )
        try:
            if format == DISTRIBUTED:
                _write_distributed(source, parent, entries, conversion, found.size, progress)
            else:
                found.files = _write_files(
                    source, parent, FORMATS[format], entries, conversion, limit, overwrite, progress
                )
        except OSError as error:
            raise CheckpointError(
                f"{error.filename or parent}: {error.strerror} (errno {error.errno}); {found.size / 1e6:.1f} MB are "
                "needed. What was there before is unchanged"
            ) from error
    found.warnings += conversion.warnings()
    return found


def _limit(format: str, max_shard_size: int | str | None) -> int | None:
    if max_shard_size is None:
        max_shard_size = _LIMIT.get(format)
    elif format == DISTRIBUTED:
        raise CheckpointError(f"max_shard_size: format {DISTRIBUTED!r} has a file for each tensor; leave it out")
    return None if max_shard_size is None else parse_size(max_shard_size)


def _entries(source: Source, conversion: Conversion, exclude_frozen: bool, all_names: bool) -> list[Entry]:
    tensors = list(source.tensors().values())
    if exclude_frozen:
        if all(tensor.trainable is None for tensor in tensors):
            raise CheckpointError(f"{source.path}: {source.what} has no record of frozen parameters")
        tensors = [tensor for tensor in tensors if tensor.trainable is not False]
    if not tensors:
        raise CheckpointError(f"{source.path}: holds no tensors to export")
    entries = []
    for tensor in tensors:
        spec = conversion.spec(tensor.spec)
        entries += _named(tensor.name, tensor.aliases, spec, tensor.name, all_names)
    return entries


def _named(name: str, aliases: tuple[str, ...], spec: Spec, source: str, all_names: bool) -> list[Entry]:
    if all_names:
        return [Entry(each, spec, (), source) for each in (name, *aliases)]
    return [Entry(name, spec, aliases, source)]


def _write_files(
    source: Source,
    parent: str,
    name: str,
    entries: list[Entry],
    conversion: Conversion,
    limit: int | None,
    overwrite: bool,
    progress: Progress | None,
) -> list[str]:
    files = WeightFiles(parent, entries, name, max_shard_size=limit, overwrite=overwrite)
    done = 0
    try:
        for entry in entries:
            for start, values in source.pieces(entry.source):
                converted = conversion(entry.name, values)
                files.write(entry.name, start, converted)
                done += converted.nbytes
                if progress is not None:
                    progress(done, files.size)
        return files.finish()
    finally:
        files.abandon()


def _write_distributed(
    source: Source, path: str, entries: list[Entry], conversion: Conversion, size: int, progress: Progress | None
) -> None:
    from shardwise.checkpoint import dcp

    done = 0

    def read(entry: Entry) -> torch.Tensor:
        nonlocal done
        values = torch.empty(entry.spec.shape, dtype=entry.spec.dtype, device="cpu")
        flat = values.view(-1)
        for start, piece in source.pieces(entry.source):
            flat[start : start + piece.numel()] = conversion(entry.name, piece)
        done += values.nbytes
        if progress is not None:
            progress(min(done, size), size)
        return values

    dcp.write(path, entries, read)


# -- from an engine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExportRequest:
    """Arguments of an engine's `export`; with `config` the configuration of a transformers model is exported, too."""

    directory: str
    name: str
    conversion: Conversion
    limit: int | None = None
    exclude_frozen: bool = False
    all_names: bool = False
    overwrite: bool = False
    config: bool = False


def export_model(model: CheckpointedModel, request: ExportRequest, hold: Callable[[torch.Tensor], None]) -> None:
    """Write master weights, or parameters without them. A collective. Every rank sends rank 0 its `owned_ranges` of
    each piece, and needs memory for a few pieces of 8 MiB, accounted by `hold`. Raises CheckpointError on every rank.
    """
    comm, rank = model.comm, model.comm.rank
    what = f"exporting weights to {request.directory}"
    wanted = unsharded_parameters(model, exclude_frozen=request.exclude_frozen)
    model.share_changes()
    values, ranges = model.value_runs(), model.owned_ranges()
    own: dict[str, list[_Own]] = {}
    for tensor in model.registry:
        if tensor.name in wanted:
            with model.materialized(tensor.index):
                runs = within(values.get(tensor.index, []), ranges.get(tensor.index, []))
            own.setdefault(tensor.name, []).extend(_Own(model.box_of(tensor), *run) for run in runs)
    with collective_step(comm, what) as known:
        known.local = {
            name: [name_of(runs[0].values.dtype), [(run.box, run.start, run.stop) for run in runs]]
            for name, runs in own.items()
            if runs
        }
    layout = {name: _spread(tensor, known.gathered) for name, tensor in wanted.items()}
    places = _places(model, wanted, layout, request)
    files: WeightFiles | None = None
    config: dict[str, bytes] = {}
    failure: Exception | None = None

    def write(wanted: Sequence[tuple[Entry, str | torch.Tensor]]) -> None:
        nonlocal failure
        for entry, where in wanted:
            if isinstance(where, torch.Tensor):
                pieces: Iterator[tuple[int, torch.Tensor]] = iter([(0, where.detach().reshape(-1))])
            else:
                pieces = _gathered(model, entry, layout[where], own.get(where, []), request.conversion, hold)
            for start, piece in pieces:
                # A full disk must not end the loop on rank 0 only, because the others send to it.
                if files is not None and failure is None:
                    try:
                        files.write(entry.name, start, request.conversion(entry.name, piece))
                    except (OSError, CheckpointError) as error:
                        failure = error

    try:
        with collective_step(comm, what):
            if rank == 0:
                entries = [entry for entry, _ in places]
                if request.config:
                    config = config_files(model.module, [entry.spec for entry in entries])
                files = WeightFiles(
                    request.directory, entries, request.name, max_shard_size=request.limit, overwrite=request.overwrite
                )
        # Ranks may fetch different numbers of tensors at a time; the order, that of collectives, is the same.
        nothing = torch.empty(0, device="cpu")
        first = {name: runs[0].values for name, runs in own.items() if runs}
        model.fetch(
            [(p, nothing if isinstance(p[1], torch.Tensor) else first.get(p[1], nothing)) for p in places], write
        )
        with collective_step(comm, what) as ended:
            if failure is not None:
                raise failure
            if files is not None:
                files.finish()
            for name, data in config.items():
                replace_file(request.directory, name, data)
            ended.local = request.conversion.overflowed
    finally:
        if files is not None:
            files.abandon()
    if rank == 0:
        for counts in ended.gathered[1:]:
            for name, count in counts.items():
                request.conversion.overflowed[name] = request.conversion.overflowed.get(name, 0) + count
        for line in request.conversion.warnings():
            logger.warning("%s: %s", request.directory, line)


@dataclass(frozen=True)
class _Own:
    box: Region | None
    start: int
    stop: int
    values: torch.Tensor


@dataclass
class _Spread:
    """Places of a parameter's elements; `runs` has (box, start, stop) of each rank's runs."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    runs: list[list[tuple[Region, int, int]]] = field(default_factory=list)

    def patches(self, rank: int, low: int, high: int) -> Iterator[tuple[int, Patch]]:
        outer = whole(self.shape)
        for number, (box, start, stop) in enumerate(self.runs[rank]):
            for patch in overlap(box, start, stop, outer, low, high):
                yield number, patch


def _spread(tensor: UnshardedTensor, gathered: list[dict[str, Any]]) -> _Spread:
    found = _Spread(tensor.dtype, tensor.shape)
    for entry in gathered:
        name, runs = entry.get(tensor.name, (None, ()))
        if name is not None:
            found.dtype = dtype_of(name)
        outer = whole(tensor.shape)
        found.runs.append([(outer if box is None else region(box), start, stop) for box, start, stop in runs])
    return found


def _places(
    model: CheckpointedModel,
    wanted: Mapping[str, UnshardedTensor],
    layout: Mapping[str, _Spread],
    request: ExportRequest,
) -> list[tuple[Entry, str | torch.Tensor]]:
    found: list[tuple[Entry, str | torch.Tensor]] = []
    for tensor in wanted.values():
        spec = request.conversion.spec(Spec(layout[tensor.name].dtype, tensor.shape))
        entries = _named(tensor.name, tensor.aliases, spec, "", request.all_names)
        found += [(entry, tensor.name) for entry in entries]
    held = gathered_buffers(model)
    names = {name: tuple(known[1:]) for known in buffer_names(model.module).values() for name in known[:1]}
    aliases = {alias for also in names.values() for alias in also}
    for name, buffer in sorted(held.items()):
        if name not in aliases:
            spec = request.conversion.spec(Spec(buffer.dtype, tuple(buffer.shape)))
            entries = _named(name, names.get(name, ()), spec, "", request.all_names)
            found += [(entry, buffer) for entry in entries]
    return found


def _gathered(
    model: CheckpointedModel,
    entry: Entry,
    spread: _Spread,
    own: list[_Own],
    conversion: Conversion,
    hold: Callable[[torch.Tensor], None],
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first element, values) of a parameter on rank 0, piece by piece; other ranks send only."""
    comm = model.comm
    step = PIECE // max(entry.spec.dtype.itemsize, spread.dtype.itemsize)
    numel = entry.spec.nbytes // entry.spec.dtype.itemsize
    for low in range(0, numel, step):
        high = min(numel, low + step)
        sent = [
            conversion(entry.name, taken(own[number].values, patch)).to(model.device).reshape(-1)
            for number, patch in spread.patches(comm.rank, low, high)
        ]
        counts = [sum(p.numel for _, p in spread.patches(rank, low, high)) for rank in range(comm.world)]
        empty = torch.empty(0, dtype=entry.spec.dtype, device=model.device)
        given = torch.cat(sent) if len(sent) > 1 else (sent[0].contiguous() if sent else empty)
        output = torch.empty(high - low, dtype=entry.spec.dtype, device=model.device) if comm.rank == 0 else empty
        hold(given)
        hold(output)
        to_first = [given.numel(), *[0] * (comm.world - 1)]
        comm.all_to_all(output, given, counts if comm.rank == 0 else [0] * comm.world, to_first, _LABEL).wait()
        if comm.rank == 0:
            patches = [patch for rank in range(comm.world) for _, patch in spread.patches(rank, low, high)]
            arrived = list(zip(patches, output.split([patch.numel for patch in patches]), strict=True))
            if all(patch.flat for patch in patches):
                for patch, values in sorted(arrived, key=lambda pair: pair[0].target):
                    yield low + patch.target, values
                continue
            piece = torch.empty_like(output)
            hold(piece)
            for patch, values in arrived:
                piece.as_strided(patch.shape, patch.target_strides, patch.target).copy_(values.view(patch.shape))
            yield low, piece


def request_of(
    directory: str | os.PathLike[str],
    format: str,
    dtype: str | torch.dtype,
    max_shard_size: int | str | None,
    exclude_frozen: bool,
    all_names: bool,
    overwrite: bool,
) -> ExportRequest:
    """Check the arguments of an engine's `export`."""
    if format == DISTRIBUTED:
        raise CheckpointError(
            f"format: {DISTRIBUTED!r} is made from a checkpoint: engine.save_checkpoint(dir), then "
            "shardwise export dir OUT --format dcp"
        )
    parse_format(format, tuple(FORMATS))
    return ExportRequest(
        directory=check_directory(directory, "directory"),
        name=FORMATS[format],
        conversion=Conversion(parse_export_dtype(dtype)),
        limit=_limit(format, max_shard_size),
        exclude_frozen=exclude_frozen,
        all_names=all_names and format == "hf",
        overwrite=overwrite,
        config=format == "hf" and not exclude_frozen,
    )
