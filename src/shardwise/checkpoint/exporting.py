"""Export: plain weights for other programs, from a reader on disk or from an engine. From disk, tensors are copied and
converted in pieces of 8 MiB. From an engine, rank 0 receives and writes one tensor at a time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from shardwise.checkpoint.agree import collective_step
from shardwise.checkpoint.collect import buffer_names
from shardwise.checkpoint.directory import check_directory, replace_file
from shardwise.checkpoint.formats import weight_files
from shardwise.checkpoint.formats.dcp import DcpWriter
from shardwise.checkpoint.formats.huggingface import config_files
from shardwise.checkpoint.formats.weight_files import FORMATS, PICKLED, Entry, WeightFiles, shard_bytes, writing
from shardwise.checkpoint.manifest import StoredTensor, name_of, outline
from shardwise.checkpoint.opening import open_source
from shardwise.checkpoint.protocols import CheckpointedModel
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.unsharded import UnshardedTensor, UnshardedWeights
from shardwise.checkpoint.weights_reader import Progress, WeightsReader
from shardwise.errors import CheckpointError, CheckpointPathError
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

    def target(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of converted values."""
        return self.dtype if self.dtype is not None and dtype.is_floating_point else dtype

    def __call__(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return converted values."""
        dtype = self.target(values.dtype)
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
        tensors = _chosen(source, exclude_frozen)
        if verify:
            source.check(tensors)
        named = {
            entry: tensor
            for tensor in tensors
            for entry in _entries(tensor, tensor.torch_dtype, conversion, all_names and format == "hf")
        }
        found = Exported(tensors=len(named), size=sum(entry.spec.nbytes for entry in named))
        if source.excluded and not exclude_frozen:
            found.warnings.append(
                f"{source.path}: was saved without these frozen parameters, which are therefore missing: "
                f"{outline(source.excluded)}"
            )
        done = 0

        def pieces(entry: Entry, tensor: StoredTensor) -> weight_files.Pieces:
            nonlocal done
            for start, values in source.pieces(tensor):
                converted = conversion(entry.name, values)
                yield start, converted
                done += converted.nbytes
                if progress is not None:
                    progress(done, found.size)

        with writing(parent, f"{format_size(found.size)} are needed, and ") as closing:
            writer: weight_files.WeightsWriter = (
                DcpWriter(parent, list(named))
                if format == DISTRIBUTED
                else WeightFiles(parent, list(named), FORMATS[format], limit=limit, overwrite=overwrite)
            )
            closing.callback(writer.abandon)
            for entry, tensor in named.items():
                writer.write(entry.name, pieces(entry, tensor))
            found.files = writer.finish()
    found.warnings += conversion.warnings()
    return found


def _limit(format: str, max_shard_size: int | str | None) -> int | None:
    if max_shard_size is None:
        max_shard_size = _LIMIT.get(format)
    elif format == DISTRIBUTED:
        raise CheckpointError(f"max_shard_size: format {DISTRIBUTED!r} has a file for each tensor; leave it out")
    return None if max_shard_size is None else shard_bytes(max_shard_size)


def _chosen(source: WeightsReader, exclude_frozen: bool) -> list[StoredTensor]:
    tensors = list(source.tensors().values())
    if exclude_frozen:
        if all(tensor.trainable is None for tensor in tensors):
            raise CheckpointError(f"{source.path}: {source.what} has no record of frozen parameters")
        tensors = [tensor for tensor in tensors if tensor.trainable is not False]
    if not tensors:
        raise CheckpointError(f"{source.path}: holds no tensors to export")
    return tensors


def _entries(
    tensor: StoredTensor | UnshardedTensor, dtype: torch.dtype, conversion: Conversion, all_names: bool
) -> list[Entry]:
    spec = Spec(conversion.target(dtype), tensor.shape)
    if all_names:
        return [Entry(name, spec) for name in (tensor.name, *tensor.aliases)]
    return [Entry(tensor.name, spec, tensor.aliases)]


# -- from an engine ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExportRequest:
    """What an engine writes: into `directory`, files of the name `name`, whose suffix gives the format. With `masters`
    values of parameters are master weights, if there are any. With `config` the configuration of a transformers model
    is written, too.
    """

    directory: str
    name: str
    conversion: Conversion = field(default_factory=lambda: Conversion(None))
    limit: int | None = None
    exclude_frozen: bool = False
    all_names: bool = False
    overwrite: bool = False
    config: bool = False
    masters: bool = True


def export_model(model: CheckpointedModel, request: ExportRequest, hold: Callable[[torch.Tensor], None]) -> None:
    """Write the weights of a model. A collective: rank 0 receives and writes one tensor after another; `hold` accounts
    buffers. Raises CheckpointError on every rank.
    """
    comm, conversion = model.comm, request.conversion
    what = f"exporting weights to {request.directory}"
    if request.masters:
        model.share_changes()
    weights = UnshardedWeights(
        model, exclude_frozen=request.exclude_frozen, to_first=True, masters=request.masters, hold=hold
    )
    entries: dict[str, list[Entry]] = {}
    files: WeightFiles | None = None
    config: dict[str, bytes] = {}

    def write(tensor: UnshardedTensor, values: torch.Tensor) -> None:
        for entry in entries.get(tensor.name, ()):  # none on other ranks than the first
            assert files is not None
            files.write(entry.name, [(0, conversion(entry.name, values).reshape(-1))])

    try:
        with collective_step(comm, what):
            if comm.rank == 0:
                entries = _entries_of(model, weights, request)
                every = [entry for some in entries.values() for entry in some]
                if request.config:
                    config = config_files(model.module, [entry.spec for entry in every])
                files = WeightFiles(
                    request.directory, every, request.name, limit=request.limit, overwrite=request.overwrite
                )
        weights.for_each(write, what)
        with collective_step(comm, what):
            if files is not None:
                files.finish()
            for name, data in config.items():
                replace_file(request.directory, name, data)
    finally:
        if files is not None:
            files.abandon()
    for line in conversion.warnings():
        logger.warning("%s: %s", request.directory, line)


def _entries_of(model: CheckpointedModel, weights: UnshardedWeights, request: ExportRequest) -> dict[str, list[Entry]]:
    """Return the entries of the files by tensor; buffers with several names are written as tied parameters are."""
    aliases = {names[0]: tuple(names[1:]) for names in buffer_names(model.module).values()}
    again = {name for names in aliases.values() for name in names}
    found = {}
    for tensor in weights.tensors.values():
        if tensor.name not in again:
            named = replace(tensor, aliases=(*tensor.aliases, *aliases.get(tensor.name, ())))
            found[tensor.name] = _entries(named, tensor.dtype, request.conversion, request.all_names)
    return found


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


def request_of_16bit(
    directory: str | os.PathLike[str], name: str, exclude_frozen: bool, max_shard_size: int | str | None
) -> ExportRequest:
    """Check the arguments of an engine's `save_16bit_model`: weights in the dtype the module computes with, under all
    names.
    """
    if not name.endswith((".safetensors", *PICKLED)) or os.path.basename(name) != name or name.startswith("."):
        raise CheckpointPathError(
            f"save_filename: expected a plain file name that ends in .safetensors (or {', '.join(PICKLED)}: a state "
            f"dict as torch.save writes it), found {name!r}"
        )
    return ExportRequest(
        directory=check_directory(directory, "save_dir"),
        name=name,
        limit=None if max_shard_size is None else shard_bytes(max_shard_size),
        exclude_frozen=exclude_frozen,
        all_names=not name.endswith(PICKLED),
        overwrite=True,
        masters=False,
    )
