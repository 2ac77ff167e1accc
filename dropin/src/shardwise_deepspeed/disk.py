"""The commands `ds_io` and `ds_nvme_tune`: their options, passed to `shardwise bench io`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from shardwise.errors import CommandLineError, NotBuiltError
from shardwise.launch.commands.bench import Wanted, parse_bytes, parse_count, show
from shardwise_deepspeed.entries import read
from shardwise_deepspeed.options import Parser, run

_SWEPT = {"block_size": "blocks", "queue_depth": "depths", "io_parallel": "threads"}
_ENGINES = ("aio_handle", "aio_basic")


def io_of(arguments: list[str]) -> Wanted:
    """Return the benchmark that a command line of `ds_io` requests. Raises CommandLineError for an unknown or missing
    option or a wrong value, NotBuiltError for an unsupported option.

    >>> io_of(["--folder", "/disk", "--read", "--io_size", "64M", "--queue_depth", "16"]).depths
    (16,)
    """
    given = Parser("ds_io").given(arguments)
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
    given = Parser("ds_nvme_tune").given(arguments)
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
    options, found = read("options.toml")["ds_io"], dict[str, Any]()
    refused = options["refused"]
    for key, values in content.items():
        if not isinstance(values, list) or not values:
            raise CommandLineError(f"{name}: {key}: expected a list, found {json.dumps(values)}.")
        if key in _SWEPT:
            parse = parse_bytes if key == "block_size" else parse_count
            found[_SWEPT[key]] = tuple(parse(str(value), f"{name}: {key}") for value in values)
        elif key == "sequential_requests" and values != [True]:
            print(f"sequential_requests: true is not measured: it {refused[key]}")
        elif key in ("single_submit", "overlap_events"):
            print(f"{key} changes nothing: {options['without_effect']['single_submit']}")
        elif key in refused:
            raise NotBuiltError(f"{name}: {key}: {refused[key]}.")
        else:
            known = ", ".join([*_SWEPT, "sequential_requests", "single_submit", "overlap_events"])
            raise CommandLineError(f"{name}: {key} is not known; expected {known}.")
    return found


def measure_one(args: list[str] | None = None) -> NoReturn:
    """Run `ds_io` and exit with its code; `args` default to those of this process."""
    run("ds_io", lambda arguments: show(io_of(arguments)), args)


def tune(args: list[str] | None = None) -> NoReturn:
    """Run `ds_nvme_tune` and exit with its code; `args` default to those of this process."""
    run("ds_nvme_tune", lambda arguments: show(tune_of(arguments)), args)
