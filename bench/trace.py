"""Where the time of a step on one CUDA device goes: a profile with shardwise's ranges, its gaps, and a picture.

    python bench/trace.py [--size 163M] [--way "forced 3"|"offload"] [--keep DIR]

Two ways: "forced 3" gathers, releases and reduces at stage 3 on one rank as several do; "offload" has optimizer and
parameters on the host. torch's profiler records two steps after some that warm up. Told are: which part of the time the
device computes, copies and does nothing; the ten longest intervals in which its computing stream does nothing, with the
range in which the host was and the kernel that came next; and the kernels that take longest. `--keep` leaves the trace
as a file for Perfetto or chrome://tracing. The picture has a row for each stream and one for the host's ranges.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import tempfile
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness import Device, Row, child, options_of, own_group, save, serve, show
from systems import SIZES, Case, forced, offloaded

from shardwise.profile.trace import union

STEPS = 2
WAYS = ("forced 3", "offload")
KINDS = {
    "gemm": "#4c78a8",
    "attention": "#72b7b2",
    "optimizer": "#54a24b",
    "collective": "#b39ddb",
    "to device": "#e8c547",
    "to host": "#f2a65a",
    "other kernels": "#9ecae9",
}
"""Colours of what the device does."""
RANGES = {
    "boundary": "#c7e9c0",
    "forward": "#d3e3f3",
    "backward": "#a7c6e5",
    "gather": "#8c6bb1",
    "reduce": "#d95f0e",
    "wait": "#d62728",
    "step": "#74c476",
    "store": "#f2a65a",
    "lend": "#e8c547",
    "copy": "#bab0ac",
}
"""Colours of the host's ranges, by the first word of their names."""
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def kind_of(event: dict[str, Any]) -> str:
    """Return the kind of an event of the device by its name."""
    name = event["name"].lower()
    found = {
        "to device": "htod" in name or "host -> device" in name,
        "to host": "dtoh" in name or "device -> host" in name,
        "collective": "nccl" in name,
        "optimizer": "multi_tensor" in name or "adam" in name or "fused_step" in name,
        "attention": "flash" in name or "attention" in name or "fmha" in name,
        "gemm": any(part in name for part in ("gemm", "nvjet", "cutlass", "mm_", "addmm", "linear", "cublas")),
    }
    return next((kind for kind, there in found.items() if there), "other kernels")


def profile(options: argparse.Namespace) -> Row:
    """Train in this process, and leave the trace in `--file`; return the device's name."""
    device = Device(options.device)
    case = Case(SIZES[options.size], bf16=True, device=options.device)
    run = offloaded(case, 3, "cpu", "cpu") if options.way == "offload" else forced(case, 3)
    for _ in range(3):
        run.step()
    run.finish()
    device.wait()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(STEPS):
            with torch.profiler.record_function("bench::step"):
                run.step()
        run.finish()
        device.wait()
    recorded.export_chrome_trace(options.file)
    run.close()
    return {"name": device.name}


class Trace:
    """The events of a trace.

    Args:
        events: those of the file.

    Attributes:
        start, stop: of what is looked at: the steps, in microseconds.
        lanes: events of the device by stream, or on a CPU torch's operators by thread.
        ranges: the host's ranges.
    """

    def __init__(self, events: list[dict[str, Any]]) -> None:
        complete = [event for event in events if event.get("ph") == "X" and event.get("dur", 0) > 0]
        steps = [event for event in complete if event["name"] == "bench::step" and "gpu" not in event["cat"]]
        device = [event for event in complete if event.get("cat") in _ON_DEVICE]
        self.start = min(event["ts"] for event in steps)
        last = [event for event in device if event["ts"] >= self.start] or steps
        self.stop = max(event["ts"] + event["dur"] for event in last)
        shown = device or [event for event in complete if event.get("cat") == "cpu_op"]
        self.lanes: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in shown:
            if event["ts"] >= self.start:
                place = f"stream {event['args']['stream']}" if device else f"thread {event['tid']}"
                self.lanes[place].append(event)
        self.ranges = [
            event
            for event in complete
            if event.get("cat") == "user_annotation"
            and event["name"].startswith("shardwise::")
            and event["ts"] >= self.start
        ]
        for lane in self.lanes.values():
            lane.sort(key=lambda event: event["ts"])

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a file."""
        return cls(json.loads(path.read_text())["traceEvents"])

    @property
    def computing(self) -> str:
        """The lane with most time in kernels."""
        return max(self.lanes, key=lambda lane: sum(event["dur"] for event in self.lanes[lane]))

    def busy(self, lanes: list[str]) -> list[tuple[float, float]]:
        """Return the intervals in which something runs on some lanes."""
        return union((event["ts"], event["ts"] + event["dur"]) for lane in lanes for event in self.lanes[lane])

    def gaps(self, count: int = 10) -> list[dict[str, Any]]:
        """Return the longest intervals in which the computing stream does nothing."""
        lane = self.lanes[self.computing]
        intervals = self.busy([self.computing])
        edges = [(a[1], b[0]) for a, b in pairwise(intervals)]
        found = []
        for start, stop in sorted(edges, key=lambda edge: edge[0] - edge[1])[:count]:
            inside = [e["name"] for e in self.ranges if e["ts"] <= start and e["ts"] + e["dur"] >= start]
            others = {
                kind_of(event)
                for name, events in self.lanes.items()
                for event in events
                if name != self.computing and event["ts"] < stop and event["ts"] + event["dur"] > start
            }
            after = next(event["name"] for event in lane if event["ts"] >= stop)
            found.append(
                {
                    "gap_us": stop - start,
                    "at_ms": (start - self.start) / 1e3,
                    "host_in": inside[-1].removeprefix("shardwise::") if inside else "-",
                    "others_run": ", ".join(sorted(others)) or "-",
                    "next": after[:80],
                }
            )
        return found

    def summary(self) -> dict[str, Any]:
        """Return shares of time, gaps and the longest kernels."""
        whole = self.stop - self.start
        everything = sum(stop - start for start, stop in self.busy(list(self.lanes)))
        computing = sum(stop - start for start, stop in self.busy([self.computing]))
        times: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        for lane in self.lanes.values():
            for event in lane:
                times[event["name"][:100]] += event["dur"]
                kinds[kind_of(event)] += event["dur"]
        waited = sum(event["dur"] for event in self.lanes[self.computing] if kind_of(event) == "to device")
        spans: Counter[str] = Counter()
        for event in self.ranges:
            spans[event["name"].removeprefix("shardwise::").rsplit(" ", 1)[0]] += event["dur"]
        return {
            "step_ms": whole / STEPS / 1e3,
            "computing": computing / whole,
            "anything": everything / whole,
            "copies_in_computing_stream_ms": waited / STEPS / 1e3,
            **{f"{kind}_ms": spent / STEPS / 1e3 for kind, spent in kinds.most_common()},
            **{f"kernel {name}_ms": spent / STEPS / 1e3 for name, spent in times.most_common(12)},
            **{f"host in {name}_ms": spent / STEPS / 1e3 for name, spent in spans.most_common(12)},
        }

    def draw(self, title: str, path: Path) -> None:
        """Draw the last step."""
        import matplotlib.pyplot as plt
        from matplotlib.patches import Patch

        plt.style.use(Path(__file__).with_name("plots.mplstyle"))
        begin = self.start + (self.stop - self.start) * (STEPS - 1) / STEPS
        lanes = sorted(self.lanes, key=lambda lane: (lane != self.computing, lane))
        figure, axes = plt.subplots(figsize=(13, 0.45 * (len(lanes) + 1) + 2.2))
        used: set[str] = set()
        for row, lane in enumerate(lanes):
            bars: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for event in self.lanes[lane]:
                if event["ts"] + event["dur"] > begin:
                    bars[kind_of(event)].append(((event["ts"] - begin) / 1e3, event["dur"] / 1e3))
            for kind, spans in bars.items():
                axes.broken_barh(spans, (row - 0.4, 0.8), facecolors=KINDS[kind], linewidth=0)
                used.add(kind)
        seen: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in self.ranges:
            if event["ts"] + event["dur"] > begin:
                word = event["name"].removeprefix("shardwise::").split()[0]
                seen[word].append(((event["ts"] - begin) / 1e3, event["dur"] / 1e3))
        for word, colour in RANGES.items():  # the inner ones last
            axes.broken_barh(seen[word], (len(lanes) - 0.4, 0.8), facecolors=colour, edgecolors="white", linewidth=0.2)
        axes.set_yticks(range(len(lanes) + 1), [*lanes, "host: ranges"])
        axes.set_ylim(len(lanes) + 0.6, -0.6)
        axes.set_xlim(0, (self.stop - begin) / 1e3)
        axes.set_xlabel("milliseconds")
        axes.set_title(title, loc="left", fontsize=10)
        patches = [Patch(color=colour, label=kind) for kind, colour in KINDS.items() if kind in used]
        patches += [Patch(color=colour, label=f"host: {word}") for word, colour in RANGES.items() if seen[word]]
        figure.legend(handles=patches, ncols=7, loc="outside upper center")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)


def main() -> None:
    """Profile both ways, or the one of the options; draw and keep them."""
    options = options_of(__doc__, quick={"size": "tiny"}, size="163M", way="", keep="", file="", limit=200)
    serve(profile, options, own_group(1, options.device))
    rows: list[Row] = []
    for way in [options.way] if options.way else WAYS:
        short = way.replace(" ", "_")
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            found = child("--way", way, "--file", str(file), limit=options.limit)
            if not file.exists():
                rows.append({"system": way, "failed": found.get("failed", "no trace")})
                continue
            trace = Trace.read(file)
            if options.keep:
                kept = Path(options.keep) / f"trace_{short}.json.gz"
                kept.parent.mkdir(parents=True, exist_ok=True)
                with file.open("rb") as source, gzip.open(kept, "wb") as target:
                    shutil.copyfileobj(source, target)
        rows.append({"system": way, **trace.summary()})
        rows += [{"system": way, "setting": {"gap": number}, **gap} for number, gap in enumerate(trace.gaps(), 1)]
        trace.draw(f"{way}, {options.size}, bf16, {found['name']}", options.results / f"gpu_trace_{short}.png")
    show(rows)
    save(options, "gpu_trace", rows, size=options.size)


if __name__ == "__main__":
    main()
