"""How fast state moves that is not on the device, and how much of that is hidden: parts of one process, without ranks.

    OMP_NUM_THREADS=1 python bench/offload.py [--what step,disk,overlap] [--directory DIR] [--rounds 9]

*step*: bytes that AdamW has to move (it reads masters, gradients and two moments and writes masters, moments and the
bf16 copy) over its time, beside a plain copy and a triad (a = b + c) of as many bytes with as many threads.

*disk*: parts of the optimizer's state that live on a disk are used in turn, by doing nothing, and given back written:
all are read and written once. Beside them plain loops: threads that read and write as many bytes in the same directory
past the page cache and do nothing else, in several ways; the fastest counts.

*overlap*: the same parts, and the parameters of an engine, on a disk that is played: memory whose bytes arrive when one
disk of a given speed would have them. The speed is chosen so that moving takes half as long as computing, or as long.
"hidden" is the part of the time of moving by which training does not take longer than with everything in memory; "of
waiting" compares with a disk that is played to be infinitely fast, and leaves out the processor's own work for moving
(copies and new pages, which on a GPU it does beside the computation). A part is computed by several steps of AdamW (one
takes hardly longer than copying in memory: no disk keeps up with it).

All take turns, forwards and then backwards through the list, so that a noisy machine is noisy for all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from harness import Row, options_of, save, show, turns

from shardwise.memory import Accountant, Category
from shardwise.memory.places import ON_HOST, StateHome, TieredTensors, acquiring, in_turn
from shardwise.offload import DiskPlace
from shardwise.offload.files import DiskOptions, SwapFile
from shardwise.offload.tmpfile import Bytes, move_all, open_tmpfile, paged, take_space
from shardwise.optim import AdamW

CPU = torch.device("cpu")
MOVED = 30
"""Bytes an element that a step of AdamW with a bf16 copy reads and writes."""
STEPS = 24
"""Of AdamW, as the computation of a part where moving is to be hidden."""
SHARES = {"half as long": 0.5, "as long": 1.0}
"""How long moving takes, by computing."""

Rows = list[Row]


class Parts:
    """Masters and moments in parts that live somewhere, with gradients and bf16 copies in memory.

    Args:
        home: where.
        count: of parts.
        elements: of one.
    """

    def __init__(self, home: StateHome, count: int, elements: int) -> None:
        self.gradient = torch.randn(elements)
        self.copy = torch.zeros(elements, dtype=torch.bfloat16)
        self.bytes = count * elements * 12
        accountant = Accountant()
        self.parts = []
        for _ in range(count):
            tiered, master = TieredTensors(home, accountant), torch.nn.Parameter(torch.randn(elements))
            optimizer = AdamW([master], lr=1e-3)
            moments = {"exp_avg": torch.zeros(elements), "exp_avg_sq": torch.zeros(elements)}
            optimizer.state[master] = {"step": torch.tensor(10.0), **moments}
            for tensor in (master.detach(), *moments.values()):
                tiered.keep(Category.OPTIMIZER, tensor)
            self.parts.append(((optimizer, master), [(tiered, True)]))

    def step(self, part: tuple[AdamW, torch.nn.Parameter]) -> None:
        """Step one part."""
        optimizer, master = part
        self.gradient.mul_(1.0)  # as long as by any other factor, and the gradient stays what it is
        master.grad = self.gradient
        optimizer.step()
        self.copy.copy_(master.detach())

    def in_turn(self, steps: int = 0) -> None:
        """Bring each part, step it some times, and give it back written."""

        def use(part: tuple[AdamW, torch.nn.Parameter]) -> None:
            for _ in range(steps):
                self.step(part)

        in_turn(self.parts, use)

    @contextlib.contextmanager
    def at_hand(self) -> Iterator[None]:
        """Have everything in memory: `in_turn` moves nothing inside of the block."""
        with acquiring([tiered for _, wanted in self.parts for tiered in wanted]):
            yield


# -- the step ----------------------------------------------------------------------------------------------------------


def step(options: argparse.Namespace) -> Rows:
    """Return how fast the optimizer's step, a copy and a triad move bytes, with one thread and with all."""
    elements = 100_000 if options.quick else 50_000_000
    state = Parts(ON_HOST, 1, elements)
    target = torch.zeros(MOVED // 2 * elements, dtype=torch.uint8)
    source = torch.ones_like(target)
    count = MOVED * elements // 12
    sums, first, second = torch.zeros(count), torch.ones(count), torch.ones(count)
    ways: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "triad": lambda: torch.add(first, second, alpha=3.0, out=sums),
        "AdamW": lambda: state.step(state.parts[0][0]),
    }
    rows: Rows = []
    before = torch.get_num_threads()
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        torch.set_num_threads(threads)
        seconds = turns(ways, options.rounds, timed=True)
        bound = {name: statistics.median(seconds[name]) for name in ("copy", "triad")}
        for name in ways:
            median = statistics.median(seconds[name])
            rows.append(
                {
                    "system": f"{name}, {threads} thread{'s' * (threads > 1)}",
                    "moved_gb_per_s": MOVED * elements / median / 1e9,
                    **{f"of_{other}": value / median for other, value in bound.items()},
                }
            )
    torch.set_num_threads(before)
    return rows


# -- a disk ------------------------------------------------------------------------------------------------------------


class PlainLoops:
    """Loops that read and write a file without a name, past the page cache where that is possible.

    Args:
        directory: where it is.
        size: bytes that one pass reads and writes.
        most: bytes of memory, for all blocks in turn.
    """

    def __init__(self, directory: Path, size: int, most: int) -> None:
        self._file = open_tmpfile(directory, 1 << 20)
        take_space(self._file.descriptor, directory, 0, size, "the plain loops' file")
        self._size = size
        self._memory = paged(most)
        self._memory[:] = 1
        for place in range(0, size, most):
            move_all(os.pwritev, self._file.descriptor, self._memory[: min(most, size - place)], place)

    def close(self) -> None:
        """Give the space back."""
        os.close(self._file.descriptor)

    def back_and_forth(self, threads: int, block: int) -> None:
        """Each thread reads a block, writes it back, and goes to the next."""

        def work(number: int) -> None:
            for place in range(number * block, self._size, threads * block):
                part = self._part(place, block)
                move_all(os.preadv, self._file.descriptor, part, place)
                move_all(os.pwritev, self._file.descriptor, part, place)

        _all([threading.Thread(target=work, args=(number,)) for number in range(threads)])

    def side_by_side(self, threads: int, block: int) -> None:
        """Half of the threads read everything while the others write everything."""
        half = threads // 2

        def work(call: Callable[..., int], number: int) -> None:
            for place in range(number % half * block, self._size, half * block):
                move_all(call, self._file.descriptor, self._part(place, block), place)

        calls = [os.preadv] * half + [os.pwritev] * half
        _all([threading.Thread(target=work, args=(call, number)) for number, call in enumerate(calls)])

    def _part(self, place: int, block: int) -> Bytes:
        """Return memory for a block of the file: one block after the other takes the next part of it."""
        start = place // block % (self._memory.size // block) * block
        return self._memory[start : start + min(block, self._size - place)]


def _all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def disk(options: argparse.Namespace) -> Rows:
    """Return how fast parts are read and written in turn, and plain loops."""
    count, elements = (4, 1 << 19) if options.quick else (12, 7 << 20)
    settings = DiskOptions()
    file = SwapFile(options.directory, settings, label="the swap file")
    state = Parts(DiskPlace(file, CPU, CPU), count, elements)
    loops = PlainLoops(options.directory, state.bytes, 3 * state.bytes // count)
    shapes = [(4, 1 << 20), (8, 1 << 20), (8, 4 << 20)]
    ways: dict[str, Callable[[], object]] = {"in turn": state.in_turn}
    for threads, block in shapes:
        what = f"{threads} threads, {block >> 20} MiB"
        ways[f"back and forth, {what}"] = lambda threads=threads, block=block: loops.back_and_forth(threads, block)
        ways[f"side by side, {what}"] = lambda threads=threads, block=block: loops.side_by_side(threads, block)
    seconds = turns(ways, options.rounds, timed=True)
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    fastest = min((name for name in ways if name != "in turn"), key=medians.__getitem__)
    rows = [
        {
            "system": name,
            "moved_gb_per_s": 2 * state.bytes / medians[name] / 1e9,
            "highest_gb_per_s": 2 * state.bytes / min(seconds[name]) / 1e9,
            "of_plain": medians[fastest] / medians[name],
            "plain": fastest,
            "direct": file.direct,
            "moved_bytes": 2 * state.bytes,
        }
        for name in ways
    ]
    file.close()
    loops.close()
    return rows


# -- what is hidden ----------------------------------------------------------------------------------------------------


class Move:
    """Bytes on their way (see `PlayedDisk`)."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.target, self.source, self.asked = target, source, time.perf_counter()
        self._ended = threading.Event()
        self.end = self._ended.set

    def wait(self) -> None:
        """Block until they are there."""
        self._ended.wait()

    settle = wait


class Space:
    """An extent of a `PlayedDisk`."""

    def __init__(self, size: int) -> None:
        self.values = torch.zeros(size, dtype=torch.uint8)

    def free(self) -> None:
        """Nothing: the memory goes with it."""


class PlayedDisk:
    """Memory that takes its time: one transfer after the other, each as long as bytes over speed say.

    Attributes:
        speed: bytes a second.
        moved: bytes since the last begin of an action that is timed.
        size: bytes of the file; not counted.
    """

    size = 0

    def __init__(self, speed: float = float("inf")) -> None:
        self.speed = speed
        self.moved = 0
        self._asked: queue.SimpleQueue[Move | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def reserve(self, size: int) -> Space:
        """Take memory."""
        return Space(size)

    def read(self, extent: Space, memory: torch.Tensor) -> Move:
        """Begin to bring an extent's bytes."""
        return self._begin(Move(memory.detach(), extent.values[: memory.numel()]))

    def write(self, extent: Space, memory: torch.Tensor) -> Move:
        """Begin to store bytes in an extent."""
        return self._begin(Move(extent.values[: memory.numel()], memory.detach()))

    def idle(self) -> None:
        """Wait until nothing is under way."""
        empty = torch.empty(0, dtype=torch.uint8)
        self._begin(Move(empty, empty)).wait()

    def timed(self, action: Callable[[], object]) -> float:
        """Return the seconds of an action; `moved` counts from its beginning."""
        self.moved, begin = 0, time.perf_counter()
        action()
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)

    def _begin(self, move: Move) -> Move:
        self._asked.put(move)
        return move

    def _work(self) -> None:
        free = 0.0
        while (move := self._asked.get()) is not None:
            size = move.target.numel()
            free = max(free, move.asked) + size / self.speed
            if size:  # other threads go on meanwhile
                ctypes.memmove(move.target.data_ptr(), move.source.data_ptr(), size)
            while (left := free - time.perf_counter()) > 0:
                time.sleep(left)
            self.moved += size
            move.end()


Times = tuple[Callable[[], float], Callable[[], float]]
"""Seconds of a training with everything in memory, and with state on a played disk. Nothing is under way before and
after it."""


def steps(played: PlayedDisk, count: int, elements: int) -> Times:
    """Return the times of an optimizer's steps of parts whose masters and moments are on the disk."""
    state = Parts(DiskPlace(played, CPU, CPU), count, elements)

    def moving() -> float:
        return played.timed(lambda: state.in_turn(STEPS))

    def resident() -> float:
        with state.at_hand():
            return moving()

    return resident, moving


def passes(played: PlayedDisk, case: Any, directory: Path) -> Times:
    """Return the times of forward and backward passes of an engine whose parameters are on the disk."""
    from systems import shardwise

    on_disk = {"offload_param": {"device": "nvme", "nvme_path": str(directory), "max_in_cpu": 0}}
    with mock.patch("shardwise.offload.files.SwapFile", lambda *args, **options: played):
        away = shardwise(case, 3, **on_disk)
    near = shardwise(case, 3)
    for run in (away, near):
        run.passes()

    def timed(run: Any) -> float:
        # What a step has to move is not measured.
        speed, played.speed = played.speed, float("inf")
        run.update()
        run.finish()
        played.idle()
        played.speed = speed
        return played.timed(run.passes)

    return functools.partial(timed, near), functools.partial(timed, away)


def overlap(options: argparse.Namespace) -> Rows:
    """Return how much of moving is hidden behind an optimizer's step, and behind the passes of an engine."""
    from systems import SIZES, Case

    count, elements = (4, 100_000) if options.quick else (12, 2 << 20)
    played = PlayedDisk()
    rows = hidden("optimizer state in steps", played, steps(played, count, elements), options.rounds)
    for batch in (1, 8):
        played = PlayedDisk()
        case = Case(replace(SIZES["tiny" if options.quick else "98M"], rows=batch), bf16=True)
        times = passes(played, case, options.directory)
        rows += hidden(f"parameters in passes of {batch * case.size.length} tokens", played, times, options.rounds)
    return rows


def hidden(name: str, played: PlayedDisk, times: Times, rounds: int) -> Rows:
    """Return how much of moving is hidden at several speeds."""
    resident, moving_at = times
    resident()
    moving_at()
    size = played.moved
    found: dict[str, list[list[float]]] = {share: [] for share in SHARES}
    for turn in range(rounds):
        for share in SHARES if turn % 2 == 0 else reversed(SHARES):
            near, at_once = resident(), moving_at()
            moving = SHARES[share] * near
            played.speed = size / moving
            away = moving_at()
            played.speed = float("inf")
            at_once = (at_once + moving_at()) / 2
            near = (near + resident()) / 2
            figures = [near, moving, at_once, away, (near + moving - away) / moving, (at_once + moving - away) / moving]
            found[share].append(figures)
    played.close()
    fields = ("resident_ms", "moving_ms", "at_once_ms", "with_ms")
    rows = []
    for share, measured in found.items():
        *times, part, of_waiting = (statistics.median(column) for column in zip(*measured, strict=True))
        row: dict[str, Any] = {"system": f"{name}, {share}"}
        row |= {field: value * 1e3 for field, value in zip(fields, times, strict=True)}
        rows.append({**row, "hidden": part, "hidden_of_waiting": of_waiting, "moved_bytes": size})
    return rows


MEASURED: dict[str, Callable[[argparse.Namespace], Rows]] = {"step": step, "disk": disk, "overlap": overlap}


def main() -> None:
    """Measure, print the figures and keep them."""
    options = options_of(__doc__, quick={"rounds": 2}, what=",".join(MEASURED), directory="", rounds=9)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        options.directory = Path(directory)
        for name in options.what.split(","):
            rows = MEASURED[name](options)
            show(rows)
            save(options, f"offload_{name}", rows, rounds=options.rounds)


if __name__ == "__main__":
    main()
