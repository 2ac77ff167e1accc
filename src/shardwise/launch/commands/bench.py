"""`shardwise bench`: measures disk, communication and computing speed of this machine."""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from shardwise.errors import CommandLineError, OffloadError, ShardwiseError
from shardwise.launch.console import parse_bytes, parse_speeds
from shardwise.units import format_size

if TYPE_CHECKING:
    from shardwise.offload.measure import Speed, Way

_LARGE, _QUICK = 1 << 30, 256 << 20
_LEAST = 16 << 20
"""Minimum bytes of a file; with fewer only the first requests would be measured."""

_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


def register(app: typer.Typer) -> None:
    """Add the group of subcommands."""
    group = typer.Typer(
        name="bench",
        help=(summary := "Measure disk, communication and computing of this machine."),
        short_help=summary,  # otherwise it is truncated
        rich_markup_mode=None,
        no_args_is_help=True,
    )
    group.command("io")(io)
    group.command("comm")(comm)
    group.command("machine")(machine)
    app.add_typer(group)


def io(
    directory: Annotated[str, typer.Option("--dir", metavar="DIR", help="A directory on the disk (nvme_path).")] = ".",
    size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of the file, such as 4G; needs as much memory. Default: 1G (--quick: 256M), or a quarter of "
            "the free space, if that is less.",
        ),
    ] = None,
    block_size: Annotated[str, typer.Option(metavar="SIZES", help="Sizes of a request, separated by commas.")] = "",
    queue_depth: Annotated[str, typer.Option(metavar="NUMBERS", help="Requests in flight per thread.")] = "",
    threads: Annotated[str, typer.Option(metavar="NUMBERS", help="aio.intra_op_parallelism.")] = "",
    rounds: Annotated[
        int | None,
        typer.Option(metavar="N", help="Passes of each setting; the median is shown. Default: 3 (--quick: 1)."),
    ] = None,
    read: Annotated[bool, typer.Option("--read/--no-read", help="Measure reading.")] = True,
    write: Annotated[bool, typer.Option("--write/--no-write", help="Measure writing.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer settings, one round, a smaller file.")] = False,
    as_json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Also write the results to FILE as JSON."),
    ] = None,
) -> None:
    """Measure the disk of a directory with different `aio` settings, and show the section to paste.

    Each setting runs the code path of offloading to disk, and a plain loop. The file is removed afterwards.
    """
    show(
        Wanted(
            directory=directory,
            size=None if size is None else parse_bytes(size, "--size"),
            blocks=_list(block_size, "--block-size", parse_bytes) or ((1 << 20, 4 << 20) if quick else Wanted.blocks),
            depths=_list(queue_depth, "--queue-depth", parse_count) or ((4, 8, 16) if quick else Wanted.depths),
            threads=_list(threads, "--threads", parse_count) or ((1,) if quick else Wanted.threads),
            rounds=rounds if rounds is not None else 1 if quick else Wanted.rounds,
            read=read,
            write=write,
            most=_QUICK if quick else _LARGE,
            file=as_json,
        )
    )


def comm(
    nproc: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes. Default: one for each visible CUDA device, or two on the CPU."),
    ] = None,
    include: Annotated[str, typer.Option("--include", "-i", metavar="SPEC", help="Slots to use, as for `run`.")] = "",
    exclude: Annotated[str, typer.Option("--exclude", "-e", metavar="SPEC", help="Slots not to use.")] = "",
    hostfile: Annotated[
        str | None,
        typer.Option("--hostfile", "-H", metavar="PATH", help="Machines, one a line: `host slots=N`."),
    ] = None,
    ops: Annotated[str, typer.Option(metavar="NAMES", help="Collectives, separated by commas. Default: all.")] = "",
    dtype: Annotated[str, typer.Option(metavar="NAMES", help="fp32, bf16, fp16, fp64, separated by commas.")] = "fp32",
    minsize: Annotated[
        str, typer.Option(metavar="SIZE", help="Smallest message; each next one is 16 times larger.")
    ] = "4K",
    maxsize: Annotated[str, typer.Option(metavar="SIZE", help="Largest message.")] = "16M",
    sizes: Annotated[
        str, typer.Option(metavar="SIZES", help="Sizes of messages in place of these, separated by commas.")
    ] = "",
    trials: Annotated[int, typer.Option(metavar="N", help="Measured trials; the median is shown.")] = 10,
    warmups: Annotated[int, typer.Option(metavar="N", help="Trials before the measured ones.")] = 2,
    unit: Annotated[str, typer.Option(metavar="UNIT", help="Unit of bandwidths: GB/s or Gbit/s.")] = "GB/s",
    as_json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Also write the results to FILE as JSON."),
    ] = None,
) -> None:
    """Measure the collectives of this machine, check their results, and name bottlenecks.

    Each collective is measured as the engine runs it and as torch runs it, and compared with the bandwidth of the
    links. Under torchrun all machines of the job are measured. The exit code is 1 if a result is wrong.
    """
    from shardwise.launch.commbench import OPS, CommWanted, run, sizes_between
    from shardwise.launch.placement import Resources

    given = _list(sizes, "--sizes", parse_bytes)
    least, most = parse_bytes(minsize, "--minsize"), parse_bytes(maxsize, "--maxsize")
    if least > most:
        raise CommandLineError(f"--minsize {minsize} is more than --maxsize {maxsize}.")
    wanted = CommWanted(
        resources=Resources(nproc, None, include or None, exclude or None, hostfile),
        ops=tuple(ops.split(",")) if ops else OPS,
        dtypes=tuple(dtype.split(",")),
        sizes=given or sizes_between(least, most),
        trials=trials,
        warmups=warmups,
        unit=unit,
        file=as_json,
    )
    raise typer.Exit(run(wanted))


def machine(
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Where the rates go.")] = "machine.json",
    nproc: Annotated[int, typer.Option(metavar="N", help="Ranks that share the machine.")] = 2,
    seconds: Annotated[float, typer.Option(metavar="S", help="Limit for the operators, about.")] = 9.0,
    disk_speed: Annotated[
        str | None, typer.Option(metavar="READ,WRITE", help="GB/s of a rank's disk, as `bench io` finds them.")
    ] = None,
) -> None:
    """Measure operators and collectives of this machine, for `shardwise plan --time FILE`. Takes less than a minute.

    One rank measures operators of small decoders in fp32 and bf16, and what the host adds to each; then all ranks
    measure collectives, and how much longer work takes with all ranks at work, and during a collective.
    """
    from shardwise.launch.job import Job
    from shardwise.launch.placement import find_devices
    from shardwise.launch.start import run_job
    from shardwise.plan.rates import Machine

    directory = os.path.dirname(os.path.abspath(out))
    if not os.path.isdir(directory):
        raise CommandLineError(f"--out {out}: there is no such directory.")
    if nproc < 1 or seconds <= 0:
        raise CommandLineError("--nproc is 1 or more, --seconds above 0.")
    if len(find_devices().names) and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        raise CommandLineError(
            "bench machine: ranks with a device are not measured yet. CUDA_VISIBLE_DEVICES= measures those of the CPU."
        )
    disk = None if disk_speed is None else parse_speeds(disk_speed)
    found: list[Machine] = []
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        for ranks in sorted({1, nproc}):
            file = str(Path(folder, f"{ranks}.json"))
            job = Job("shardwise.launch.machine_measure", (file, str(seconds)), nproc=ranks, module=True, quiet=True)
            if code := run_job(job):
                raise typer.Exit(code)
            found.append(Machine.load(file))
    whole = found[0].joined(found[-1])
    whole.disk = disk
    whole.save(out)
    typer.echo(
        f"{whole.processor}: {len(whole.operators)} operators, "
        f"{len(whole.collectives)} collectives of up to {nproc} ranks, "
        f"{1e6 * whole.host:.1f} us of the host an operator; written to {out}"
    )


@dataclass(frozen=True)
class Wanted:
    """Options of the disk benchmark of a directory's disk. `size` is in bytes of the file; None: `most`, or less if
    there is little space. `blocks`, `depths` and `threads` are settings, with `rounds` passes of each. `file` is the
    JSON output file, or None.
    """

    directory: str
    size: int | None = None
    blocks: tuple[int, ...] = (256 << 10, 1 << 20, 4 << 20)
    depths: tuple[int, ...] = (4, 8, 16, 32)
    threads: tuple[int, ...] = (1, 4)
    rounds: int = 3
    read: bool = True
    write: bool = True
    most: int = _LARGE
    file: str | None = None


def parse_count(text: str, name: str) -> int:
    """Return a number that is at least 1. Raises CommandLineError if the text is none."""
    if re.fullmatch(r"\s*[0-9]{1,9}\s*", text) is None or int(text) < 1:
        raise CommandLineError(f"{name} {text}: give a number, 1 or more.")
    return int(text)


def _list(text: str, name: str, parse: Any) -> tuple[int, ...]:
    return tuple(parse(part, name) for part in text.split(",")) if text else ()


def show(wanted: Wanted) -> None:
    """Run the disk benchmark, and print a table and the section to paste. Raises CommandLineError if a request cannot
    be measured, OffloadError if the disk has failed.
    """
    size = _size(wanted, _check(wanted))
    from shardwise.launch.console import Bar, output, table
    from shardwise.offload.measure import MeasuredFile, Way, settings, smallest, way

    directory = Path(wanted.directory).resolve()
    options = settings(wanted.blocks, wanted.depths, wanted.threads)
    kinds = {"write": wanted.write, "read": wanted.read}
    try:
        file = MeasuredFile(directory, size, max(wanted.blocks))
    except OffloadError as error:
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
        raise CommandLineError(f"{wanted.directory}: no file of {format_size(size)} can be made: {reason}.") from error
    try:
        with Bar("measuring") as bar:
            found = file.speeds([way(one) for one in options], wanted.rounds, **kinds, progress=bar.show)
            speeds = dict(zip(options, found, strict=True))
            best = smallest(speeds)
            # Measure the compared settings together once more, because a disk's speed may change within a minute.
            references = [way(best), way(best)._replace(plain=True), Way(way(best).block, 1, plain=True)]
            again = file.speeds(references, max(wanted.rounds, 3), **kinds, progress=bar.show)
    except OSError as error:
        raise OffloadError(f"{directory}: the disk has failed: {error.strerror}") from error
    finally:
        file.close()
    section = {
        "block_size": best.block_size,
        "queue_depth": best.queue_depth,
        "intra_op_parallelism": best.threads,
    }
    system = _file_system(directory)
    if wanted.file is not None:
        everything = {
            "directory": str(directory),
            "file_system": system,
            "direct": file.direct,
            "size": size,
            "rounds": wanted.rounds,
            "bytes_per_second": [{**_named(one), **speed._asdict()} for one, speed in speeds.items()],
            "compared_with_plain_loops": [_compared(one, speed) for one, speed in zip(references, again, strict=True)],
            "aio": section,
        }
        _save(wanted.file, everything)
    console = output()
    through = "past the page cache (O_DIRECT)" if file.direct else "through the page cache: it does not take O_DIRECT"
    console.print(f"{directory}: {system}, {through}")
    if system in _MEMORY_FILE_SYSTEMS:
        console.print(f"warning: {system} is memory, not a disk")
    console.print(f"{format_size(size)} a pass, {wanted.rounds} of each, median in GB/s")
    names = ("block_size", "queue_depth", "intra_op_parallelism", "write", "read")
    shown = table(*names, "", numbers=names)
    for one, speed in speeds.items():
        shown.add_row(*(str(value) for value in _named(one).values()), *_cells(speed), "chosen" if one == best else "")
    shown.add_section()
    labels = ("chosen, again", f"plain loops, {best.in_flight} threads", "plain loop, 1 thread")
    for label, compared, speed in zip(labels, references, again, strict=True):
        shown.add_row(str(compared.block), "", "", *_cells(speed), label)
    console.print(shown)
    console.print("Only the product of queue_depth and intra_op_parallelism matters here.")
    console.print(json.dumps({"aio": section}, indent=2))


def _check(wanted: Wanted) -> int:
    """Check the options before torch is imported; return the free bytes of the disk."""
    directory = wanted.directory
    if not os.path.isdir(directory):
        raise CommandLineError(f"{directory}: there is no such directory.")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise CommandLineError(f"{directory}: this user cannot write there.")
    if not wanted.read and not wanted.write:
        raise CommandLineError("Neither reading nor writing: nothing is left to measure.")
    if wanted.rounds < 1:
        raise CommandLineError(f"--rounds {wanted.rounds}: give 1 or more.")
    if wanted.file is not None and not os.path.isdir(os.path.dirname(os.path.abspath(wanted.file))):
        raise CommandLineError(f"--json {wanted.file}: there is no such directory.")
    found = os.statvfs(directory)
    free = found.f_bavail * found.f_frsize
    if wanted.size is not None and wanted.size > free:
        raise CommandLineError(f"{directory}: {free} bytes are free there, and the file is to have {wanted.size}.")
    if wanted.size is None and free // 4 < _LEAST:
        raise CommandLineError(f"{directory}: {free} bytes are free there, too little for a measurement.")
    return free


def _size(wanted: Wanted, free: int) -> int:
    """Return the bytes of the file, a multiple of the largest request, with `free` bytes on the disk. Raises
    CommandLineError if memory is too small, or the size is smaller than a request.
    """
    import torch

    from shardwise.memory import memory_limit
    from shardwise.offload.tmpfile import padded

    limit = memory_limit(torch.device("cpu"))
    memory = wanted.most if limit is None else limit.share - limit.own
    if wanted.size is not None and limit is not None and wanted.size > memory:
        raise CommandLineError(
            f"A file of {wanted.size} bytes needs as much memory, and {limit.name} leaves {memory} bytes."
        )
    largest = padded(max(wanted.blocks))
    size = wanted.size if wanted.size is not None else min(wanted.most, free // 4, memory // 4)
    if size < largest:
        raise CommandLineError(
            f"A file of {size} bytes is smaller than a request of {largest} bytes; give more, or smaller blocks."
        )
    return size - size % largest


def _named(one: Any) -> dict[str, int]:
    return {"block_size": one.block_size, "queue_depth": one.queue_depth, "intra_op_parallelism": one.threads}


def _compared(one: Way, speed: Speed) -> dict[str, Any]:
    return {"plain": one.plain, "block_size": one.block, "in_flight": one.in_flight, **speed._asdict()}


def _cells(speed: Speed) -> list[str]:
    return ["-" if value is None else f"{value / 1e9:.2f}" for value in speed]


def _save(path: str, everything: dict[str, Any]) -> None:
    try:
        Path(path).write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ShardwiseError(f"--json {path}: {error.strerror}") from error


def _file_system(directory: Path) -> str:
    """Return the type of the file system of a directory."""
    there = [one for one in psutil.disk_partitions(all=True) if directory.is_relative_to(one.mountpoint)]
    # Of file systems that are mounted at one place, the last one is used.
    return max(reversed(there), key=lambda one: len(one.mountpoint)).fstype if there else "unknown file system"
