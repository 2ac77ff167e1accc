"""Export: plain weights for other programs, from a source on disk or from an engine. Tensors are copied and converted
in pieces of 8 MiB, which bounds memory. From an engine, ranks send their ranges to rank 0.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.boxes import Patch, Region, overlap, region, whole
from shardwise.checkpoint.agree import collective_step, on_first_rank
from shardwise.checkpoint.collect import buffer_names, within
from shardwise.checkpoint.directory import check_directory
from shardwise.checkpoint.hf_config import config_files
from shardwise.checkpoint.manifest import dtype_of, name_of, outline
from shardwise.checkpoint.opening import open_source
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.sharded_weights import FORMATS, Entry, WeightFiles, replace_file, shard_bytes
from shardwise.checkpoint.source import PIECE, Progress, Source
from shardwise.checkpoint.unsharded import UnshardedTensor, UnshardedWeights
from shardwise.errors import CheckpointError
from shardwise.registry import taken
from shardwise.units import format_size
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
                f"{error.filename or parent}: {error.strerror} (errno {error.errno}); {format_size(found.size)} are "
                "needed. What was there before is unchanged"
            ) from error
    found.warnings += conversion.warnings()
    return found


def _limit(format: str, max_shard_size: int | str | None) -> int | None:
    if max_shard_size is None:
        max_shard_size = _LIMIT.get(format)
    elif format == DISTRIBUTED:
        raise CheckpointError(f"max_shard_size: format {DISTRIBUTED!r} has a file for each tensor; leave it out")
    return None if max_shard_size is None else shard_bytes(max_shard_size)


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
    weights = UnshardedWeights(model, exclude_frozen=request.exclude_frozen, to_first=True)
    model.share_changes()
    own = _own_runs(model, weights)
    local = {
        name: [name_of(runs[0].values.dtype), [(run.box, run.start, run.stop) for run in runs]]
        for name, runs in own.items()
        if runs
    }
    places = _places(model, weights, on_first_rank(comm, local, _LABEL), request)
    files: WeightFiles | None = None
    config: dict[str, bytes] = {}
    failure: Exception | None = None

    def write(wanted: Sequence[_Place]) -> None:
        nonlocal failure
        for place in wanted:
            runs = own.get(place.name, []) if place.sends else []
            for start, piece in _gathered(model, place, runs, request.conversion, hold):
                # A full disk must not end the loop on rank 0 only, because the others send to it.
                if files is not None and failure is None:
                    try:
                        for entry in place.entries:
                            files.write(entry.name, start, request.conversion(entry.name, piece))
                    except (OSError, CheckpointError) as error:
                        failure = error

    try:
        with collective_step(comm, what):
            if rank == 0:
                entries = [entry for place in places for entry in place.entries]
                if request.config:
                    config = config_files(model.module, [entry.spec for entry in entries])
                files = WeightFiles(
                    request.directory, entries, request.name, max_shard_size=request.limit, overwrite=request.overwrite
                )
        # Ranks may fetch different numbers of tensors at a time; the order, that of collectives, is the same.
        nothing = torch.empty(0, device="cpu")
        first = {name: runs[0].values for name, runs in own.items() if runs}
        model.fetch([(place, first.get(place.name, nothing) if place.sends else nothing) for place in places], write)
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

    def patches(self, shape: tuple[int, ...], low: int, high: int) -> Iterator[Patch]:
        outer = whole(shape)
        return iter(overlap(self.box or outer, self.start, self.stop, outer, low, high))


def _own_runs(model: CheckpointedModel, weights: UnshardedWeights) -> dict[str, list[_Own]]:
    """Return the runs that this rank sends; the first rank of a pass group sends its buffers."""
    values, ranges = model.value_runs(), model.owned_ranges()
    own: dict[str, list[_Own]] = {}
    for tensor in model.registry:
        if tensor.name in weights.parameters:
            with model.materialized(tensor.index):
                runs = within(values.get(tensor.index, []), ranges.get(tensor.index, []))
            own.setdefault(tensor.name, []).extend(_Own(model.box_of(tensor), *run) for run in runs)
    if model.pass_group.rank == 0:
        own |= {n: [_Own(None, 0, b.numel(), b.detach().reshape(-1))] for n, b in weights.buffers.items()}
    return own


@dataclass(frozen=True, eq=False)
class _Place:
    """A tensor of one pass group; on ranks that do not know it only the number of its pieces, or of all of a group.

    Attributes:
        sends: the tensor is one of this rank's pass group.
        entries: on rank 0, tensors of the files.
        dtype: on rank 0, of the values.
        runs: on rank 0, (box, start, stop) of each rank's runs.
    """

    pieces: int
    sends: bool = False
    name: str = ""
    shape: tuple[int, ...] = ()
    entries: Sequence[Entry] = ()
    dtype: torch.dtype = torch.float32
    runs: Sequence[Sequence[tuple[Region, int, int]]] = ()

    def patches(self, rank: int, low: int, high: int) -> list[Patch]:
        """Return the patches of a piece that rank 0 receives from a rank."""
        outer = whole(self.shape)
        return [p for box, start, stop in self.runs[rank] for p in overlap(box, start, stop, outer, low, high)]


_STEP = PIECE // 4
"""Elements of a piece, in any dtype."""


def _pieces(tensor: UnshardedTensor) -> int:
    return -(-math.prod(tensor.shape) // _STEP)


def _places(
    model: CheckpointedModel, weights: UnshardedWeights, gathered: Sequence[Mapping[str, Any]], request: ExportRequest
) -> list[_Place]:
    totals = model.comm.exchange(sum(_pieces(t) for t in weights.groups[weights.own] if t is not None), _LABEL)
    names = {name: tuple(known[1:]) for known in buffer_names(model.module).values() for name in known[:1]}
    seen = {alias for also in names.values() for alias in also}
    found: list[_Place] = []
    for number, listed in enumerate(weights.groups):
        ranks = weights.ranks_of(number)
        if None in listed:
            found.append(_Place(totals[ranks[0]]))
            continue
        for tensor in listed:
            assert tensor is not None
            place = _Place(_pieces(tensor), number == weights.own, tensor.name, tensor.shape)
            if gathered:
                runs, dtype = _runs_of(tensor, gathered, ranks)
                entries: list[Entry] = []
                if tensor.name not in seen:
                    spec = request.conversion.spec(Spec(dtype, tensor.shape))
                    aliases = (*weights.tensors[tensor.name].aliases, *names.get(tensor.name, ()))
                    entries = _named(tensor.name, aliases, spec, "", request.all_names)
                seen.add(tensor.name)
                place = replace(place, entries=entries, dtype=dtype, runs=runs)
            found.append(place)
    return found


def _runs_of(
    tensor: UnshardedTensor, gathered: Sequence[Mapping[str, Any]], ranks: Collection[int]
) -> tuple[list[list[tuple[Region, int, int]]], torch.dtype]:
    found, dtype, outer = [], tensor.dtype, whole(tensor.shape)
    for rank, entry in enumerate(gathered):
        name, runs = entry.get(tensor.name, (None, ())) if rank in ranks else (None, ())
        dtype = dtype if name is None else dtype_of(name)
        found.append([(outer if box is None else region(box), start, stop) for box, start, stop in runs])
    return found, dtype


def _gathered(
    model: CheckpointedModel,
    place: _Place,
    own: list[_Own],
    conversion: Conversion,
    hold: Callable[[torch.Tensor], None],
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield (first element, values) of a tensor on rank 0, piece by piece; other ranks send only."""
    comm, receives = model.comm, model.comm.rank == 0
    dtype = conversion.spec(Spec(place.dtype, ())).dtype
    numel = math.prod(place.shape)
    for low in range(0, place.pieces * _STEP, _STEP):
        high = min(numel, low + _STEP)
        sent = [
            conversion(place.name, taken(run.values, patch)).to(model.device).reshape(-1)
            for run in own
            for patch in run.patches(place.shape, low, high)
        ]
        given = torch.cat(sent) if len(sent) > 1 else (sent[0].contiguous() if sent else _nothing(model))
        patches = [place.patches(rank, low, high) if receives else [] for rank in range(comm.world)]
        counts = [sum(patch.numel for patch in some) * dtype.itemsize for some in patches]
        output = torch.empty(sum(counts), dtype=torch.uint8, device=model.device)
        hold(given)
        hold(output)
        given = given.view(torch.uint8)
        comm.all_to_all(output, given, counts, [given.numel(), *[0] * (comm.world - 1)], _LABEL).wait()
        if place.entries:
            yield from _in_order([patch for some in patches for patch in some], output.view(dtype), low, hold)


def _nothing(model: CheckpointedModel) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=model.device)


def _in_order(
    patches: Sequence[Patch], arrived: torch.Tensor, low: int, hold: Callable[[torch.Tensor], None]
) -> Iterator[tuple[int, torch.Tensor]]:
    parts = list(zip(patches, arrived.split([patch.numel for patch in patches]), strict=True))
    if all(patch.flat for patch in patches):
        for patch, values in sorted(parts, key=lambda pair: pair[0].target):
            yield low + patch.target, values
        return
    piece = torch.empty_like(arrived)
    hold(piece)
    for patch, values in parts:
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
