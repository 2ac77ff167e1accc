"""A pool of long-lived Gloo worker processes for multi-rank tests.

Starting a Python process that imports torch takes seconds, a call into a running one takes milliseconds; so
the workers are forked from a server that has torch loaded, started when first needed and reused by all tests.
Every call gets a new process group (a new prefix in one TCPStore on loopback) and a reset environment.

Invariant: after a call either every worker of it is idle again, or the whole pool has been killed and the
next call starts a new one. No test waits for longer than its timeout.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.harness import worker
from tests.harness.jobs import free_port
from tests.harness.worker import Failure, Task

GRACE_S = 5.0
"""After a rank has failed, its peers have this long to answer before the pool is killed."""

_PEER_DIED = re.compile(r"clos|reset|broken pipe|timed out|connect|recvValue|peer|lost rank", re.IGNORECASE)


class RankFailure(Exception):
    """A rank raised or died. `rank` is the one that failed first, `failures` are all, in order of time.

    The message holds the remote traceback. The remote exception, where it can be pickled, is `__cause__`.
    """

    def __init__(self, message: str, failures: list[Failure] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or []
        self.rank = self.failures[0].rank if self.failures else None


class RankTimeout(RankFailure):
    """Ranks did not answer in time; the message names them and shows their stacks."""


@dataclass
class _Worker:
    process: BaseProcess
    conn: Connection
    stack_file: Path


class Pool:
    """Worker processes of this test process; use it through `run_ranks`."""

    def __init__(self) -> None:
        # The fork server reads these when it loads torch.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self._context = multiprocessing.get_context("forkserver")
        # Each rank needs the compiler, a second's work, with its first optimizer. Transformers is left to the ranks:
        # when it is imported it asks whether DeepSpeed is there.
        loaded = ["torch._dynamo", "torch.distributed.checkpoint"]
        self._context.set_forkserver_preload([*loaded, "shardwise.engine", worker.__name__])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._numbers = itertools.count()
        self._workers: list[_Worker] = []
        self._directory = Path(tempfile.mkdtemp(prefix="shardwise-ranks-"))

    def run(self, fn: Callable[..., Any], world: int, args: Any, kwargs: Any, timeout: float, init: bool) -> list[Any]:
        """Run `fn(*args, **kwargs)` on ranks 0..world-1; see `run_ranks`."""
        call = pickle.dumps((fn, args, kwargs))
        self._grow(max(world, 2))
        port = self._store.port if init else free_port()
        number = next(self._numbers)
        try:
            for rank in range(world):
                env = _rank_env(rank, world, port)
                task = Task(number, rank, world, timeout, init, env, sys.path, call)
                self._workers[rank].conn.send_bytes(pickle.dumps(task))
            return self._collect(world, timeout)
        except RankFailure:
            raise
        except BaseException:  # KeyboardInterrupt among them: the workers are in an unknown state
            self.kill()
            raise

    def close(self) -> None:
        """Let the workers leave, kill those that do not, and remove the pool's files."""
        for w in self._workers:
            w.conn.close()
        for w in self._workers:
            w.process.join(GRACE_S)
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        """Kill every worker; the next call starts new ones."""
        for w in self._workers:
            w.process.kill()
        for w in self._workers:
            w.process.join()
            w.conn.close()
        self._workers.clear()

    def _grow(self, count: int) -> None:
        if any(not w.process.is_alive() for w in self._workers):
            self.kill()
        while len(self._workers) < count:
            ours, theirs = self._context.Pipe()
            stack_file = self._directory / f"stacks-{next(self._numbers)}"
            process = self._context.Process(
                target=worker.main,
                args=(theirs, self._store.port, str(stack_file)),
                name=f"rank{len(self._workers)}",
            )
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, stack_file))

    def _collect(self, world: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        waiting = dict(enumerate(self._workers[:world]))
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            handles: list[Any] = [h for w in waiting.values() for h in (w.conn, w.process.sentinel)]
            ready = wait(handles, left)
            for rank, w in list(waiting.items()):
                if w.conn not in ready and w.process.sentinel not in ready:
                    continue
                del waiting[rank]
                answer = _receive(w, rank)
                if isinstance(answer, Failure):
                    failures.append(answer)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                else:
                    results[rank] = pickle.loads(answer)
        stacks = {rank: _stacks(w) for rank, w in waiting.items()}
        if waiting or any(not w.process.is_alive() for w in self._workers[:world]):
            self.kill()
        for w in self._workers[:world]:
            w.conn.send_bytes(worker.FINISH)
        if failures or stacks:
            raise _describe(failures, stacks, world, timeout)
        return [results[rank] for rank in range(world)]


def _receive(w: _Worker, rank: int) -> bytes | Failure:
    """Read the worker's answer; a worker that has died without one becomes a `Failure`."""
    try:
        if w.conn.poll():
            succeeded, data = w.conn.recv()
            return data if succeeded else pickle.loads(data)
    except (EOFError, OSError):
        pass
    w.process.join(GRACE_S)
    message = f"the process of rank {rank} ended with exit code {w.process.exitcode}"
    return Failure(rank, "ProcessDied", message, message + "\n", time.monotonic(), None)


def _stacks(w: _Worker) -> str:
    """Ask a running worker for the stacks of its threads."""
    if not w.process.is_alive() or w.process.pid is None:
        return "(the process has ended)"
    os.kill(w.process.pid, signal.SIGUSR1)
    size = -1
    for _ in range(100):  # the dump is complete when it has stopped growing
        time.sleep(0.05)
        previous, size = size, w.stack_file.stat().st_size
        if size == previous and size > 0:
            break
    return w.stack_file.read_text() or "(no answer to the request for stacks)"


def _describe(failures: list[Failure], stacks: dict[int, str], world: int, timeout: float) -> RankFailure:
    """Make the exception: causes first, the rest in a line each."""
    failures.sort(key=lambda f: f.when)
    hung = "".join(f"\n--- stacks of rank {rank}, which did not answer:\n{text}" for rank, text in stacks.items())
    if not failures:
        return RankTimeout(f"ranks {sorted(stacks)} of {world} did not answer within {timeout:g} s{hung}")
    first = failures[0]
    causes, same, followers = [first], [], []
    for failure in failures[1:]:
        if (failure.kind, failure.message) == (first.kind, first.message):
            same.append(failure.rank)
        elif failure.kind in ("RuntimeError", "DistBackendError", "PeerLostError") and _PEER_DIED.search(
            failure.message
        ):
            followers.append(failure.rank)
        else:
            causes.append(failure)
    lines = [f"rank {f.rank} of {world} raised {f.kind}: {f.message}\n\n{f.trace}" for f in causes]
    if same:
        lines.append(f"ranks {sorted(same)} raised the same")
    if followers:
        lines.append(f"ranks {sorted(followers)} failed afterwards, because a peer was gone")
    error = RankFailure("\n".join(lines) + hung, failures)
    if first.pickled is not None:
        error.__cause__ = pickle.loads(first.pickled)
    return error


def _rank_env(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


_pool: Pool | None = None


def run_ranks(
    fn: Callable[..., Any], world: int, *args: Any, timeout: float = 120, init: bool = True, **kwargs: Any
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `world` ranks and return their results in rank order.

    Args:
        fn: a function of a module (it is pickled by its name), or any other callable that can be pickled.
        world: number of ranks; 1 also runs in a worker.
        args: positional arguments; tensors travel by value.
        timeout: seconds until ranks that have not answered are killed.
        init: create the default Gloo process group first. Without it only the environment is set
            (MASTER_PORT is then a free port), for tests of the initialisation itself.
        kwargs: keyword arguments of `fn`.

    Raises:
        RankFailure: a rank raised or died; use `pytest.raises(RankFailure, match=...)` for expected failures.
        RankTimeout: ranks did not answer in time.

    Each call starts with `torch.manual_seed(0)`, one thread, RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
    MASTER_ADDR and MASTER_PORT set, and FutureWarning raised as an error.
    """
    global _pool
    if _pool is None:
        _pool = Pool()
        atexit.register(close_pool)
    return _pool.run(fn, world, args, kwargs, timeout, init)


def on_ranks(world: int | str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test whose body runs on each of `world` ranks; `options` are those of `run_ranks`.

    A string is the name of the test's argument that has the number.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(**given: Any) -> None:
            if worker.serving:
                body(**given)
            else:
                count = given[world] if isinstance(world, str) else world
                run_ranks(functools.partial(test, **given), count, **options)

        return test

    return decorate


def of_all_ranks(value: Any) -> list[Any]:
    """Return the value of each rank, inside of a test of `on_ranks`."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def close_pool() -> None:
    """End all workers; a later call starts new ones."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None
