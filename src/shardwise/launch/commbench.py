"""`shardwise bench comm`: benchmark of collectives: correctness, bandwidth and bottlenecks.

The command starts the ranks itself, as `shardwise run` does. Under a launcher (`torchrun --nnodes 2 ... -m
shardwise.launch bench comm`) it runs as a rank of that job over all its machines, and rank 0 shows the table.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import CommandLineError, ShardwiseError
from shardwise.launch.placement import Resources
from shardwise.units import format_size

OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "pt2pt")
DTYPES = ("fp32", "bf16", "fp16", "fp64")
UNITS = {"GB/s": 1 / 8, "Gbit/s": 1.0}
_STEP = 16

SLOW = 2.0
"""Factor by which a rank must be slower than the others to be reported."""
POOR = 0.3
"""Fraction of the link speed below which a large message is reported."""
_LARGE = 1 << 20
_BEHIND = 1.5
"""Factor by which a collective must be slower than torch's to be reported."""


@dataclass(frozen=True)
class CommWanted:
    """Options of the benchmark.

    Attributes:
        ops, dtypes: names of `OPS` and `DTYPES`.
        sizes: message sizes in bytes.
        share: fraction of a rank's memory that sets one size, up to the largest of `sizes`; None: all `sizes`.
        trials, warmups: measured trials, and trials before them.
        raw: print numbers without units.
        file: JSON output file, or None.
    """

    resources: Resources = field(default_factory=Resources)
    ops: tuple[str, ...] = OPS
    dtypes: tuple[str, ...] = ("fp32",)
    sizes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
    share: float | None = None
    trials: int = 10
    warmups: int = 2
    unit: str = "GB/s"
    raw: bool = False
    file: str | None = None

    @property
    def plan(self) -> dict[str, Any]:
        """Plan that is passed to the ranks."""
        return {
            "ops": self.ops,
            "dtypes": self.dtypes,
            "sizes": self.sizes,
            "trials": self.trials,
            "warmups": self.warmups,
        }


def sizes_between(least: int, most: int) -> tuple[int, ...]:
    """Return sizes that grow by a factor of 16 up to `most`, inclusive.

    >>> sizes_between(1024, 1 << 20), sizes_between(4096, 100_000)
    ((1024, 16384, 262144, 1048576), (4096, 65536, 100000))
    """
    found = []
    while least < most:
        found.append(least)
        least *= _STEP
    return (*found, most)


def check(wanted: CommWanted) -> None:
    """Check the options before torch is imported. Raises CommandLineError with option and fix."""
    for option, given, known in (("--ops", wanted.ops, OPS), ("--dtype", wanted.dtypes, DTYPES)):
        unknown = [name for name in given if name not in known]
        if unknown or not given:
            raise CommandLineError(f"{option} {','.join(unknown)}: choose among {', '.join(known)}.")
    if wanted.trials < 1 or wanted.warmups < 0:
        raise CommandLineError(f"--trials {wanted.trials}, --warmups {wanted.warmups}: give 1 or more, and 0 or more.")
    if wanted.unit not in UNITS:
        raise CommandLineError(f"--unit {wanted.unit}: choose {' or '.join(UNITS)}.")
    if wanted.file is not None and not os.path.isdir(os.path.dirname(os.path.abspath(wanted.file))):
        raise CommandLineError(f"--json {wanted.file}: there is no such directory.")
    if wanted.resources.nproc == 1:
        raise CommandLineError("--nproc 1: one process has no peer. Give 2 or more.")
    names = {name for _, name in socket.if_nameindex()}
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        interface = os.environ.get(variable, "").partition(",")[0]
        if variable.startswith("GLOO") and interface and interface not in names:
            raise CommandLineError(
                f"{variable}={interface}: this machine has no such interface; it has {', '.join(sorted(names))}."
            )


def run(wanted: CommWanted) -> int:
    """Run the benchmark and show it; return 1 for a wrong result, or a failed rank's code. Raises CommandLineError."""
    check(wanted)
    launched = int(os.environ.get("WORLD_SIZE") or 1)
    if launched > 1:
        from shardwise.launch.commranks import measured

        wanted = _fitting(wanted, int(os.environ.get("LOCAL_WORLD_SIZE") or launched))
        found = measured(wanted.plan)
        return show(found, wanted) if found["rank"] == 0 else int(not _right(found))
    return _start(wanted)


def _start(wanted: CommWanted) -> int:
    from dataclasses import replace

    from shardwise.launch.job import Job
    from shardwise.launch.placement import find_devices, place
    from shardwise.launch.start import run_job

    devices = find_devices()
    resources = wanted.resources
    if len(devices.names) < 2 and resources == Resources():
        resources = replace(resources, nproc=2)
    if len(devices.names) == 1 and (resources.nproc or 2) > 1:
        # NCCL needs one device for each rank; measure the host instead.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        devices = find_devices()
    nproc = place(resources, devices).nproc
    if nproc == 1:
        raise CommandLineError("One slot: one process has no peer. Give --nproc 2 or more.")
    wanted = _fitting(wanted, nproc)
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        answer = Path(folder, "found.json")
        arguments = (json.dumps(wanted.plan), str(answer))
        module = "shardwise.launch.commranks"
        job = Job(
            module,
            arguments,
            nproc=resources.nproc,
            include=resources.include,
            exclude=resources.exclude,
            hostfile=resources.hostfile,
            module=True,
            quiet=True,
        )
        code = run_job(job)
        if code:
            return code
        return show(json.loads(answer.read_text(encoding="utf-8")), wanted)


def _fitting(wanted: CommWanted, nproc: int) -> CommWanted:
    from dataclasses import replace

    import torch

    from shardwise.launch.comm_measure import COPIES
    from shardwise.memory import memory_limit

    cuda = torch.cuda.device_count() >= nproc
    limit = memory_limit(torch.device("cuda", 0) if cuda else torch.device("cpu"), 1 if cuda else nproc)
    if limit is None:
        return wanted
    free = max(0, limit.share - limit.own)
    if wanted.share is not None:
        size = min(max(wanted.sizes), int(free * wanted.share / COPIES))
        wanted = replace(wanted, sizes=(1 << max(size, 1024).bit_length() - 1,))
    if COPIES * max(wanted.sizes) > free:
        raise CommandLineError(
            f"Messages of {max(wanted.sizes)} bytes take up to {COPIES} times as much on each of {nproc} ranks, and "
            f"{limit.name} leaves {free} bytes to each. Give a smaller --maxsize."
        )
    return wanted


# -- report ------------------------------------------------------------------------------------------------------------


def _right(found: Mapping[str, Any]) -> bool:
    return not any(row["wrong"] for row in found["rows"])


_BY_MEMORY = ("all_gather", "reduce_scatter", "all_reduce")
"""Collectives that use shared memory on one machine; a small all-reduce goes through sockets."""


def link_speed(found: Mapping[str, Any], op: str = "all_gather") -> tuple[float | None, str]:
    """Return the link speed in bytes per second that bounds a collective, and the name of the link; None if unknown.
    Over several machines the slowest stream between two of them, or a slower used interface, bounds it; on one machine
    copies bound shared-memory transport, and sockets messages.
    """
    links = found["links"]
    numbers = links["machines"]
    across = [one for one in links["streams"] if len({numbers[rank] for rank in one["ranks"]}) > 1]
    if links["transport"] == "nccl" and not across:
        return None, "the devices' own links, which are not measured"
    if across:
        stream = min(min(one["there"], one["back"]) for one in across)
        speeds = [one["up"].get(one["used"], {}).get("speed") for one in links["interfaces"]]
        text = [speed for speed in speeds if speed]
        if text and min(text) < stream:
            return min(text), "the slowest interface between the machines"
        return stream, "the slowest stream between two machines"
    if links["transport"] == "memory" and op in _BY_MEMORY:
        return min(links["copy"]), "plain copies in memory, all ranks at once"
    return min(min(one["there"], one["back"]) for one in links["streams"]), "streams through sockets"


def share_of_link(row: Mapping[str, Any], found: Mapping[str, Any]) -> float | None:
    """Return the best trial's bus bandwidth (the engine's, else torch's) as a fraction of the link speed."""
    best = row.get("ours") or row["torch"]
    speed, _ = link_speed(found, row["op"])
    return None if not speed else best["busbw_gbps"] * best["median_us"] / best["min_us"] * 1e9 / 8 / speed


def verdicts(found: Mapping[str, Any]) -> list[str]:
    """Return problems and fixes, worst first."""
    return [*_wrong(found), *_slow_ranks(found), *_interfaces(found), *_poor(found), *_behind(found)]


def _wrong(found: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in found["rows"]:
        for way, ranks in row["wrong"].items():
            rank, words = next(iter(ranks.items()))
            whose = "shardwise's" if way == "ours" else "torch's"
            lines.append(
                f"WRONG RESULT: {whose} {row['op']} of {row['bytes']} bytes ({row['dtype']}) on rank "
                f"{', '.join(ranks)}: rank {rank}: {words}. Do not train on this machine before it is right: check "
                "memory and cables, and the versions of driver, torch and NCCL."
            )
    return lines


def _slow_ranks(found: Mapping[str, Any]) -> list[str]:
    links = found["links"]
    lines = []
    for what, values, unit, more in (
        ("copies memory at", [one / 1e9 for one in links["copy"]], "GB/s", True),
        ("takes for the same computation", links["compute_ms"], "ms", False),
    ):
        for rank, own in enumerate(values):
            others = statistics.median([value for place, value in enumerate(values) if place != rank])
            if (others / own if more else own / others) >= SLOW:
                host = links["interfaces"][rank]["host"]
                lines.append(
                    f"rank {rank} ({host}) is slow: it {what} {own:.2f} {unit}, the others {others:.2f}. Every "
                    "collective waits for it. Look there for other programs on its cores (top, --bind-cores), for a "
                    "limit of its container, and for throttling."
                )
    streams = links["streams"]
    for place, one in enumerate(streams):
        own = min(one["there"], one["back"])
        others = [min(other["there"], other["back"]) for number, other in enumerate(streams) if number != place]
        if others and statistics.median(others) >= SLOW * own:
            rank = one["ranks"][1]
            end = links["interfaces"][rank]
            lines.append(
                f"the way to rank {rank} ({end['host']}) is slow: {own / 1e9:.2f} GB/s from and to rank 0, "
                f"{statistics.median(others) / 1e9:.2f} to the others. Check its interface "
                f"({end['used'] or 'unknown'}), cable and switch port."
            )
    return lines


def _interfaces(found: Mapping[str, Any]) -> list[str]:
    links = found["links"]
    variable = "NCCL_SOCKET_IFNAME" if links["transport"] == "nccl" else "GLOO_SOCKET_IFNAME"
    lines = []
    if len(set(links["machines"])) == 1:
        one = links["interfaces"][0]
        if links["transport"] != "nccl" and one["used"] and not _loopback(one):
            lines.append(
                f"all ranks are on one machine, and their messages go through {one['used']}: unset {variable}, or set "
                f"it to lo."
            )
        return lines
    for rank, one in enumerate(links["interfaces"]):
        if links["machines"].index(links["machines"][rank]) != rank:
            continue  # once for each machine
        speeds = {name: facts["speed"] for name, facts in one["up"].items() if facts["speed"]}
        fastest = max(speeds, key=lambda name: speeds[name], default="")
        if one["used"] in speeds and speeds[fastest] > speeds[one["used"]]:
            lines.append(
                f"rank {rank} ({one['host']}) uses {one['used']} ({speeds[one['used']] * 8 / 1e9:.0f} Gbit/s), and "
                f"{fastest} has {speeds[fastest] * 8 / 1e9:.0f}: set {variable}={fastest} on all machines that have it."
            )
    return lines


def _loopback(one: Mapping[str, Any]) -> bool:
    return one["used"] in ("lo", "lo0") or bool(one["up"].get(one["used"], {}).get("loopback"))


def _poor(found: Mapping[str, Any]) -> list[str]:
    largest: dict[str, Mapping[str, Any]] = {}
    for row in found["rows"]:
        if row["bytes"] >= _LARGE and row["bytes"] >= largest.get(row["op"], row)["bytes"]:
            largest[row["op"]] = row
    shares = {op: share_of_link(row, found) for op, row in largest.items()}
    low = {op: share for op, share in shares.items() if share is not None and share < POOR}
    if not low:
        return []
    links = found["links"]
    fix = {
        "memory": "more ranks than cores, or other programs on them, are the usual reason",
        "messages": "check the interface, its MTU, and that no other job uses the network",
        "nccl": "check the interface (NCCL_DEBUG=INFO shows which is used), and that no other job uses the network",
    }[links["transport"]]
    if links["transport"] == "messages" and len(set(links["machines"])) == 1:
        fix = "ranks of one machine are faster where they may read each other's memory (SHARDWISE_TRANSPORT)"
    text = ", ".join(f"{op} {share:.0%}" for op, share in low.items())
    return [f"large messages reach little of what the links give: {text}; {fix}."]


def _behind(found: Mapping[str, Any]) -> list[str]:
    behind = [
        f"{row['op']} of {row['bytes']} bytes ({1 / row['times_torch']:.1f} times)"
        for row in found["rows"]
        if row["bytes"] >= _LARGE and row["times_torch"] and row["times_torch"] < 1 / _BEHIND
    ]
    return [f"torch's own collective is faster than the engine's here: {', '.join(behind)}."] if behind else []


def show(found: Mapping[str, Any], wanted: CommWanted) -> int:
    """Print the table and the verdicts, write the JSON file, and return the exit code."""
    lines = verdicts(found)
    if wanted.file is not None:
        rows = []
        for row in found["rows"]:
            speed, what = link_speed(found, row["op"])
            rows.append({**row, "link_bytes_per_second": speed, "link": what, "link_share": share_of_link(row, found)})
        everything = {key: value for key, value in found.items() if key not in ("rank", "rows")}
        everything |= {"rows": rows}
        everything |= {"right": _right(found), "verdicts": lines}
        try:
            Path(wanted.file).write_text(json.dumps(everything, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise ShardwiseError(f"--json {wanted.file}: {error.strerror}") from error
    from shardwise.launch.console import output

    console = output()
    for line in _head(found):
        console.print(line)
    console.print(_table(found, wanted))
    if _right(found):
        console.print("Results are right on all ranks.")
    for line in lines:
        console.print(f"- {line}")
    return int(not _right(found))


def _head(found: Mapping[str, Any]) -> list[str]:
    links = found["links"]
    machines = len(set(links["machines"]))
    lines = [
        f"{found['ranks']} ranks on {machines} machine{'s' * (machines > 1)}, {found['backend']}, {found['device']}, "
        f"transport: {links['transport']}",
        f"copies on each rank: {_listed(one / 1e9 for one in links['copy'])} GB/s; the same computation: "
        f"{_listed(links['compute_ms'])} ms",
    ]
    lines += [
        f"stream between ranks 0 and {one['ranks'][1]}: {one['there'] / 1e9:.2f} GB/s, back {one['back'] / 1e9:.2f}, "
        f"there and back {one['trip_us']:.0f} us"
        for one in links["streams"]
    ]
    by_what: dict[str, list[str]] = {}
    for op in dict.fromkeys(row["op"] for row in found["rows"]):
        speed, what = link_speed(found, op)
        text = f"{what}: {speed / 1e9:.2f} GB/s" if speed is not None else what
        by_what.setdefault(text, []).append(op)
    return [*lines, *(f"the link of {', '.join(ops)}: {text}" for text, ops in by_what.items())]


def _listed(values: Any) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _table(found: Mapping[str, Any], wanted: CommWanted) -> Any:
    from shardwise.launch.console import table

    numbers = ("size", "us", "min", "p95", "algbw", "busbw", "of link", "torch us", "x torch")
    shown = table("op", "dtype", *numbers, "right", numbers=numbers)
    factor = UNITS[wanted.unit]
    for row in found["rows"]:
        best = row.get("ours") or row["torch"]
        share = share_of_link(row, found)
        torchs = row.get("torch")
        shown.add_row(
            row["op"],
            row["dtype"],
            str(row["bytes"]) if wanted.raw else format_size(row["bytes"]),
            *(f"{best[key]:.1f}" for key in ("median_us", "min_us", "p95_us")),
            *(f"{best[key] * factor:.3f}" for key in ("algbw_gbps", "busbw_gbps")),
            "-" if share is None else f"{share:.2f}" if wanted.raw else f"{share:.0%}",
            "-" if torchs is None else f"{torchs['median_us']:.1f}",
            "-" if row["times_torch"] is None else f"{row['times_torch']:.2f}",
            "NO" if row["wrong"] else "yes",
        )
    shown.caption = (
        f"us: median of {found['trials']} trials of the slowest rank; bandwidths in {wanted.unit}; of link: the best "
        "trial; x torch: how many times faster than torch's own. pt2pt is torch's: ranks 0 and 1, one way"
    )
    shown.caption_justify = "left"
    return shown
