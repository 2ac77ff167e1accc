"""The worker side of the rank pool: waits for a task, runs it as one rank, answers, waits again.

A task is bytes: a pickled `Task` whose `call` holds the pickled `(function, args, kwargs)`. It is unpickled
here, inside the rank's environment, so that a module that looks at RANK on import sees its own.

Invariant: a worker that has answered keeps its process group until the pool says that all ranks have answered
(`FINISH`), because closing a connection may discard what the peer has not read yet. A worker that failed
destroys its group at once: peers that wait for it then fail within milliseconds instead of timing out.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import numpy
import torch
import torch.distributed as dist

from tests.harness.engines import end_engines, forget_engines, watch_engines

serving = False
"""Whether this process is a worker."""

FINISH = b"finish"
"""Sent by the pool after every rank of a call has answered."""


@dataclass
class Task:
    """One rank's part of a call."""

    number: int
    rank: int
    world: int
    timeout: float
    init: bool
    env: dict[str, str]
    sys_path: list[str]
    call: bytes


@dataclass
class Failure:
    """An exception that a rank raised; `when` is `time.monotonic()`, one clock for all processes."""

    rank: int
    kind: str
    message: str
    trace: str
    when: float
    pickled: bytes | None


def main(conn: Connection, store_port: int, stack_file: str) -> None:
    """Serve tasks until the connection closes. SIGUSR1 writes the stacks of all threads to `stack_file`."""
    global serving
    serving = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with open(stack_file, "w") as stacks:
        store = dist.TCPStore("127.0.0.1", store_port, is_master=False)
        clean_env, clean_dir = dict(os.environ), os.getcwd()
        watch_engines()
        gc.set_threshold(700, 10, 10)  # Python's own; processes of the tests begin with another (tests/startup)
        gc.freeze()  # what is loaded now lives for ever: the collections between calls need not look at it
        loaded = len(sys.modules)
        while True:
            try:
                message = conn.recv_bytes()
            except (EOFError, OSError):
                return
            if message == FINISH:
                _leave_group()
                _reset(clean_env, clean_dir)
                if len(sys.modules) > loaded:
                    loaded = len(sys.modules)
                    gc.freeze()  # what a call has imported, too: torch._dynamo alone takes 60 ms of each collection
            else:
                # Each time: tests of signals take it, and Python cannot give back a handler that is not its own. It is
                # given up first, because what is registered already is not installed again.
                faulthandler.unregister(signal.SIGUSR1)
                faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
                _answer(conn, _run(pickle.loads(message), store))


def _run(task: Task, store: dist.TCPStore) -> tuple[bool, bytes]:
    """Run the task; return (succeeded, pickled result or pickled `Failure`)."""
    try:
        sys.path[:] = task.sys_path
        os.environ.update(task.env)
        warnings.resetwarnings()
        warnings.simplefilter("error", FutureWarning)
        random.seed(0)
        numpy.random.seed(0)
        torch.manual_seed(0)
        if task.init:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"call{task.number}", store),
                rank=task.rank,
                world_size=task.world,
                # Later than the pool's own limit: the pool names ranks and shows stacks, Gloo does not.
                timeout=timedelta(seconds=task.timeout + 30),
            )
            _wait_for_all(task, store)
        function, args, kwargs = pickle.loads(task.call)
        answer = pickle.dumps(function(*args, **kwargs))
        end_engines()
        return True, answer
    except BaseException as error:
        failure = Failure(
            rank=task.rank,
            kind=type(error).__name__,
            message=str(error),
            trace="".join(traceback.format_exception(error)),
            when=time.monotonic(),
            pickled=_pickle_exception(error),
        )
        error.__traceback__ = None  # its frames hold the process group
        forget_engines()
        _leave_group()
        return False, pickle.dumps(failure)


def _wait_for_all(task: Task, store: dist.TCPStore) -> None:
    """Let no rank leave its group again (by failing at once) while another is still connecting to it."""
    keys = [f"ready{task.number}/{rank}" for rank in range(task.world)]
    store.set(keys[task.rank], "")
    store.wait(keys, timedelta(seconds=task.timeout + 30))


def _pickle_exception(error: BaseException) -> bytes | None:
    """Pickle the exception if it survives the round trip; classes with own arguments often do not."""
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:
        return None
    return data


def _answer(conn: Connection, answer: tuple[bool, bytes]) -> None:
    try:
        conn.send(answer)
    except (BrokenPipeError, OSError):
        sys.exit(1)  # the test process is gone


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _reset(env: dict[str, str], directory: str) -> None:
    """Undo what a test may have changed in this process, so that the next call starts from the same state."""
    for name in set(os.environ) - set(env):
        del os.environ[name]
    os.environ.update(env)
    os.chdir(directory)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler, a second's work
        torch.use_deterministic_algorithms(False)
    gc.collect()
