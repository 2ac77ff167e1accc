"""Counts what a reader has to follow: callables, files and moves between files in five events of training.

    python bench/hops.py [--world 8] [--list EVENT]

A GPT of six blocks trains at stage 3 in bf16 on imagined ranks, on a CPU that takes the branches of a device. In the
third step every call of a Python function of the library is noted. PyTorch's FSDP2, with the same model, is beside it.
An event inside of a pass is one entry from torch into the library: "unit needed" is a forward entry that launches an
all-gather, "gradient" a backward entry that launches a reduction; of several the one with most callables counts.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from harness import Row, options_of, own_group, save, show
from host import as_device
from systems import ZERO, Case, Run, Size, shardwise

import shardwise as library

_GATHERS = frozenset({"all_gather_single", "all_gather_into_tensor"})
_REDUCTIONS = frozenset({"reduce_scatter_single", "reduce_scatter_tensor", "all_to_all_single"})
"""Functions of torch.distributed, whose names depend on its release."""


@dataclass
class Event:
    """Calls between an entry into a library and the return from it."""

    calls: int = 0
    codes: set[CodeType] = field(default_factory=set)
    moves: int = 0
    collectives: set[str] = field(default_factory=set)
    _last: str = ""

    def note(self, code: CodeType) -> None:
        """A function of the library is called."""
        self.calls += 1
        self.codes.add(code)
        self.moves += code.co_filename != self._last
        self._last = code.co_filename

    @property
    def files(self) -> set[str]:
        """The files of the functions."""
        return {code.co_filename for code in self.codes}

    def row(self) -> dict[str, int]:
        """Return the figures."""
        return {
            "calls": self.calls,
            "callables": len(self.codes),
            "files": len(self.files),
            "moves": max(0, self.moves - 1),
        }


@contextlib.contextmanager
def watching(folder: str) -> Iterator[tuple[Event, list[Event]]]:
    """Note calls of functions below a folder: all of them, and each entry into it from torch by itself."""
    whole, entries = Event(), list[Event]()
    inside: list[tuple[FrameType, Event]] = []

    def seen(frame: FrameType, what: str, _: Any) -> None:
        code = frame.f_code
        if what == "return" and inside and inside[-1][0] is frame:
            inside.pop()
        elif what == "call" and code.co_filename.startswith(folder):
            if not inside or _comes_from_torch(frame, folder):
                entries.append(Event())
                inside.append((frame, entries[-1]))
            whole.note(code)
            inside[-1][1].note(code)
        elif what == "call" and inside and code.co_filename.endswith("distributed_c10d.py"):
            inside[-1][1].collectives.add(code.co_name)

    sys.setprofile(seen)
    try:
        yield whole, entries
    finally:
        sys.setprofile(None)


def _comes_from_torch(frame: FrameType, folder: str) -> bool:
    """Whether modules or autograd have called a function of a library, rather than the library itself."""
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(folder):
        if any(
            part in caller.f_code.co_filename for part in ("torch/nn/modules", "torch/autograd", "torch/_tensor.py")
        ):
            return True
        caller = caller.f_back
    return False


def _largest(entries: list[Event], collectives: frozenset[str]) -> Event:
    found = [one for one in entries if one.collectives & collectives]
    return max(found, key=lambda one: len(one.codes), default=Event())


def events(make: Callable[[Case], Run], case: Case, folder: str) -> dict[str, Event]:
    """Return the events of a system."""
    make(case).close()  # modules are imported
    with watching(folder) as (initialize, _):
        run = make(case)
    for _ in range(2):
        run.backward(run.loss())
        run.update()
    with watching(folder) as (forward, into_forward):
        loss = run.loss()
    with watching(folder) as (backward, into_backward):
        run.backward(loss)
    with watching(folder) as (step, _):
        run.update()
    run.finish()
    run.close()
    return {
        "gradient that completes a unit": _largest(into_backward, _REDUCTIONS),
        "unit needed in forward": _largest(into_forward, _GATHERS),
        "forward": forward,
        "backward": backward,
        "step": step,
        "initialize": initialize,
    }


def main() -> None:
    """Print and keep the table."""
    options = options_of(__doc__, world=8, list="")
    logging.getLogger("shardwise").setLevel(logging.WARNING)
    own = str(Path(library.__file__).parent)
    torch_s = str(Path(torch.__file__).parent / "distributed" / "fsdp" / "_fully_shard")
    case = Case(Size(width=64, layers=6, heads=4, vocabulary=64, rows=1, length=8), bf16=True)
    rows: list[Row] = []
    for name, make, folder in (
        ("shardwise 3", ZERO["shardwise 3"], own),
        ("shardwise 3, offloaded", lambda case: shardwise(case, 3, offload_optimizer={"device": "cpu"}), own),
        ("FSDP2", ZERO["FSDP2"], torch_s),
    ):
        with as_device(), own_group(options.world, "cpu"):
            for event, seen in events(make, case, folder).items():
                rows.append({"system": name, "setting": {"event": event}, **seen.row()})
                show(rows[-1:])
                if options.list == event and name == "shardwise 3":
                    for code in sorted(seen.codes, key=lambda code: (code.co_filename, code.co_firstlineno)):
                        print(f"    {Path(code.co_filename).relative_to(own)}:{code.co_firstlineno} {code.co_qualname}")
    save(options, "hops", rows, world=options.world)


if __name__ == "__main__":
    main()
