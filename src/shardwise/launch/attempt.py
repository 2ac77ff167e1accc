"""One attempt of a job on this machine: workers, their output, and their exit."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.coordinator import Report
from shardwise.launch.cores import Cores
from shardwise.launch.failure import troubles
from shardwise.launch.output import OutputChannel, OutputReader, Tags, Terminal, is_raw, open_log, open_pipe, prefix
from shardwise.launch.processes import STOPPED, Streams, Worker, WorkerGroup

DRAIN_S = 2.0
"""Seconds to wait for the end of output after the exit; a process that left its session may hold it open."""

SETTLE_S = 2.0
"""Seconds that a worker with a recorded exception may take to exit by itself."""


@dataclass(frozen=True)
class Display:
    """Display and logging of the workers' output: reader thread, streams, ranks with a prefix, directory of logs."""

    pump: OutputReader
    out: Terminal
    err: Terminal
    tags: Tags
    log_dir: Path | None


class Attempt:
    """Starts workers once; stops them at least once (a second stop does nothing). `argv` and `cores` (None: unbound)
    are by rank, `scratch` is a private directory for error files, `world_size` is the number of ranks on all machines.
    """

    def __init__(
        self,
        number: int,
        argv: Mapping[int, Sequence[str]],
        env: Mapping[int, Mapping[str, str]],
        cores: Mapping[int, Cores] | None,
        display: Display,
        scratch: Path,
        world_size: int,
    ) -> None:
        self._display = display
        self._world_size = world_size
        self._error_files = {rank: scratch / f"attempt_{number}_rank_{rank}.json" for rank in argv}
        self._channels: dict[int, tuple[OutputChannel, OutputChannel]] = {}
        workers = []
        for rank in argv:
            variables = {**env[rank], "TORCHELASTIC_ERROR_FILE": str(self._error_files[rank])}
            workers.append(Worker(rank, argv[rank], variables, None if cores is None else cores[rank]))
        self.gang = WorkerGroup(workers)

    def start(self) -> dict[int, int]:
        """Start all workers; return their process ids by rank."""
        with contextlib.ExitStack() as parents_copies:
            nothing = os.open(os.devnull, os.O_RDONLY)
            parents_copies.callback(os.close, nothing)
            streams = {}
            for rank in self._error_files:
                out_reader, out_writer = self._open(rank, sys.stdout.isatty(), 1)
                err_reader, err_writer = self._open(rank, sys.stderr.isatty(), 2)
                parents_copies.callback(os.close, out_writer)
                parents_copies.callback(os.close, err_writer)
                # Only one process can read the user's standard input.
                streams[rank] = Streams(0 if rank == 0 else nothing, out_writer, err_writer)
                out, err = self._channel(rank, "out"), self._channel(rank, "err")
                self._channels[rank] = (out, err)
                self._display.pump.add(out_reader, out)
                self._display.pump.add(err_reader, err)
            self.gang.start(streams)
            return self.gang.pids()

    def failed(self) -> bool:
        """Whether a worker has failed, or has recorded an exception (`@record`) and waits in a collective for peers."""
        return self.gang.failed() or any(
            rank not in self.gang.exits and _older_than(SETTLE_S, path) for rank, path in self._error_files.items()
        )

    def ended(self) -> set[int]:
        """Return the ranks that have exited."""
        return set(self.gang.exits)

    def stop(self, first: signal.Signals, grace: float) -> Report:
        """Stop all workers and their child processes, show the rest of their output, and return how they ended."""
        frozen = [rank for rank, state in self.gang.states().items() if state in STOPPED]
        stuck = self.gang.stop(first, grace)
        if stuck:
            self._display.err.write(
                f"shardwise run: processes {stuck} do not end even on SIGKILL; the kernel holds them (a "
                "driver or a "
                "disk does not answer).\n".encode()
            )
        deadline = time.monotonic() + DRAIN_S
        for channel in (channel for pair in self._channels.values() for channel in pair):
            channel.closed.wait(max(0.0, deadline - time.monotonic()))
        assert self.gang.stop_began is not None
        errors = {rank: err for rank, (_, err) in self._channels.items()}
        found = troubles(self.gang.exits, errors, self._error_files, self.gang.stop_began)
        exits = tuple(self.gang.exits.values())
        return Report(exits, dict(self.gang.killed), tuple(found), tuple(frozen), grace)

    def _open(self, rank: int, terminal: bool, descriptor: int) -> tuple[int, int]:
        return open_pipe(descriptor if is_raw(self._display.tags, rank, terminal) else None)

    def _channel(self, rank: int, stream: str) -> OutputChannel:
        display = self._display
        screen, terminal = (display.out, sys.stdout.isatty()) if stream == "out" else (display.err, sys.stderr.isatty())
        return OutputChannel(
            rank,
            screen,
            prefix(display.tags, rank, self._world_size),
            is_raw(display.tags, rank, terminal),
            None if display.log_dir is None else open_log(display.log_dir, rank, stream),
        )


def _older_than(seconds: float, path: Path) -> bool:
    try:
        return time.time() - path.stat().st_mtime > seconds
    except FileNotFoundError:
        return False
