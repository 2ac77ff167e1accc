"""The commands `ds_io` and `ds_nvme_tune`: their options, passed to `shardwise bench io`, refused with the reason, or
reported as without effect.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import CommandLineError, NotBuiltError, ShardwiseError
from shardwise.launch.commands.bench import Wanted, parse_bytes, parse_count, show

_GPU = "measures copies to a GPU as well, which is not built yet; what is measured ends in the memory of the host"
_THREADS = "requests go to the disk one by one from as many threads as there may be in flight"
_SEQUENTIAL = "waits for each request before the next, which `--queue_depth 1` does here"

_IO_REFUSED = {
    "gpu": _GPU,
    "use_gds": _GPU,
    "folder_to_device_mapping": _GPU,
    "sequential_requests": _SEQUENTIAL,
    "include_warmup_time": "counts the first pass, which only finds space; it is left out of every figure here",
    "different_file_each_iteration": "takes a new file for each pass; here, as in training, all use one",
}
_IO_WITHOUT_EFFECT = {
    "single_submit": _THREADS,
    "fast_io_size": "it belongs to the engine torch_fast_io",
    "validate": "every read is compared with what was written, always",
    "slow_bounce_buffer": "it matters with a GPU only",
    "torch_legacy_save": "it belongs to the engines torch_io and torch_fast_io",
    "use_accelerator_pin_memory": "memory is aligned to pages",
    "warmup_loops": "one pass comes before those that count",
}
_TUNE_REFUSED = {"gpu": _GPU, "gds": _GPU}
_TUNE_WITHOUT_EFFECT = {
    "flush_page_cache": "nothing that is measured stays in the page cache",
    "verbose": "every figure is shown",
}
_SWEPT = {"block_size": "blocks", "queue_depth": "depths", "io_parallel": "threads"}
_ENGINES = ("aio_handle", "aio_basic")
_VALUES = ("fast_io_size", "warmup_loops")
_LISTS = ("folder_to_device_mapping",)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandLineError(f"{message}. `{self.prog} --help` shows the options.")


def _parser(name: str, description: str, refused: dict[str, str], without: dict[str, str]) -> argparse.ArgumentParser:
    made = _Parser(prog=name, description=description, allow_abbrev=False)
    for title, options in (("no effect", without), ("refused", refused)):
        group = made.add_argument_group(title)
        for option, why in options.items():
            if option in _VALUES:
                group.add_argument(f"--{option}", help=why)
            elif option in _LISTS:
                group.add_argument(f"--{option}", nargs="+", help=why)
            else:
                group.add_argument(f"--{option}", action="store_true", default=None, help=why)
    return made


def _settle(given: argparse.Namespace, refused: dict[str, str], without: dict[str, str]) -> None:
    for option, why in refused.items():
        if getattr(given, option) is not None:
            raise NotBuiltError(f"--{option}: {why}.")
    for option, why in without.items():
        if getattr(given, option) is not None:
            print(f"--{option} changes nothing: {why}")


def io_of(arguments: list[str]) -> Wanted:
    """Return the benchmark that a command line of `ds_io` requests. Raises CommandLineError for an unknown or missing
    option or a wrong value, NotBuiltError for an unsupported option.

    >>> io_of(["--folder", "/disk", "--read", "--io_size", "64M", "--queue_depth", "16"]).depths
    (16,)
    """
    parser = _parser("ds_io", "Measure a disk with one setting.", _IO_REFUSED, _IO_WITHOUT_EFFECT)
    add = parser.add_argument
    add("--folder", help="directory on the disk")
    add("--io_size", metavar="SIZE", help="of the file, as 1G")
    add("--read", action="store_true", help="measure reading; else writing is measured")
    add("--block_size", default="1M", metavar="SIZE", help="bytes of a request")
    add("--queue_depth", default="8", metavar="N", help="requests in flight for each thread")
    add("--io_parallel", default="1", metavar="N", help="threads")
    add("--loops", default="3", metavar="N", help="passes; the median is shown")
    add("--engine", default=_ENGINES[0], metavar="NAME", help=" or ".join(_ENGINES))
    add("--multi_process", default="1", metavar="N", help="only 1")
    given = parser.parse_args(arguments)
    _settle(given, _IO_REFUSED, _IO_WITHOUT_EFFECT)
    if given.folder is None:
        raise CommandLineError("--folder is missing: give a directory on the disk.")
    if given.engine not in _ENGINES:
        raise NotBuiltError(f"--engine {given.engine}: only {' and '.join(_ENGINES)} move values as training does.")
    if parse_count(given.multi_process, "--multi_process") > 1:
        raise NotBuiltError(f"--multi_process {given.multi_process}: one process is measured; start several commands.")
    return Wanted(
        directory=given.folder,
        size=None if given.io_size is None else parse_bytes(given.io_size, "--io_size"),
        blocks=(parse_bytes(given.block_size, "--block_size"),),
        depths=(parse_count(given.queue_depth, "--queue_depth"),),
        threads=(parse_count(given.io_parallel, "--io_parallel"),),
        rounds=parse_count(given.loops, "--loops"),
        read=given.read,
        write=not given.read,
    )


def tune_of(arguments: list[str]) -> Wanted:
    """Return the benchmark that a command line of `ds_nvme_tune` requests. Raises as `io_of`.

    >>> tune_of(["--nvme_dir", "/disk", "--no_write", "--loops", "5"]).rounds
    5
    """
    parser = _parser("ds_nvme_tune", "Find the `aio` section for a disk.", _TUNE_REFUSED, _TUNE_WITHOUT_EFFECT)
    add = parser.add_argument
    add("--nvme_dir", required=True, metavar="DIR", help="directory on the disk")
    add("--sweep_config", metavar="FILE", help="JSON: lists under the names of options of ds_io")
    add("--no_read", action="store_true", help="do not measure reading")
    add("--no_write", action="store_true", help="do not measure writing")
    add("--io_size", metavar="SIZE", help="of the file, as 1G")
    add("--log_dir", metavar="DIR", help="write everything to DIR/bench-io.json, too")
    add("--loops", default="3", metavar="N", help="passes of each setting; the median is shown")
    given = parser.parse_args(arguments)
    _settle(given, _TUNE_REFUSED, _TUNE_WITHOUT_EFFECT)
    swept = {} if given.sweep_config is None else _read_sweep(given.sweep_config)
    if given.log_dir is not None:
        try:
            os.makedirs(given.log_dir, exist_ok=True)
        except OSError as error:
            raise CommandLineError(f"--log_dir {given.log_dir}: {error.strerror}.") from error
    return Wanted(
        directory=given.nvme_dir,
        size=None if given.io_size is None else parse_bytes(given.io_size, "--io_size"),
        rounds=parse_count(given.loops, "--loops"),
        read=not given.no_read,
        write=not given.no_write,
        file=None if given.log_dir is None else os.path.join(given.log_dir, "bench-io.json"),
        **swept,
    )


def _read_sweep(path: str) -> dict[str, Any]:
    name = f"--sweep_config {path}"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandLineError(f"{name}: {error.strerror}.") from error
    except ValueError as error:
        raise CommandLineError(f"{name}: not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise CommandLineError(f"{name}: expected an object of lists.")
    found: dict[str, Any] = {}
    for key, values in content.items():
        if not isinstance(values, list) or not values:
            raise CommandLineError(f"{name}: {key}: expected a list, found {json.dumps(values)}.")
        if key in _SWEPT:
            parse = parse_bytes if key == "block_size" else parse_count
            found[_SWEPT[key]] = tuple(parse(str(value), f"{name}: {key}") for value in values)
        elif key == "sequential_requests" and values != [True]:
            print(f"sequential_requests: true is not measured: it {_SEQUENTIAL}")
        elif key in ("single_submit", "overlap_events"):
            print(f"{key} changes nothing: {_THREADS}")
        elif key in _IO_REFUSED:
            raise NotBuiltError(f"{name}: {key}: {_IO_REFUSED[key]}.")
        else:
            known = ", ".join([*_SWEPT, "sequential_requests", "single_submit", "overlap_events"])
            raise CommandLineError(f"{name}: {key} is not known; expected {known}.")
    return found


def measure_one(args: list[str] | None = None) -> NoReturn:
    """Run `ds_io` and exit with its code; `args` default to those of this process."""
    _main("ds_io", io_of, args)


def tune(args: list[str] | None = None) -> NoReturn:
    """Run `ds_nvme_tune` and exit with its code; `args` default to those of this process."""
    _main("ds_nvme_tune", tune_of, args)


def _main(name: str, read: Callable[[list[str]], Wanted], args: list[str] | None) -> NoReturn:
    try:
        show(read(sys.argv[1:] if args is None else args))
    except ShardwiseError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, CommandLineError) else 1)
    sys.exit(0)
