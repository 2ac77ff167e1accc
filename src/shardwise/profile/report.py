"""Text report of a profile."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from shardwise.profile.tree import ModuleProfile
from shardwise.profile.words import duration_to_string, flops_to_string, macs_to_string, params_to_string
from shardwise.utils.logging import logger

_NOTE = (
    "Counted are products of matrices (linear layers, convolutions, attention): 2 operations for a multiplication and "
    "an addition. Percentages are shares of the model."
)
_NOTE_ON_TIMES = "Times are of forward calls while counting, which makes each operator some microseconds slower."

# Measures for comparing modules: name -> getter and formatter.
_MEASURES: dict[str, tuple[Callable[[ModuleProfile], float], Callable[[float], str]]] = {
    "params": (lambda module: module.parameters, params_to_string),
    "forward MACs": (lambda module: module.macs, macs_to_string),
    "forward time": (lambda module: module.seconds, duration_to_string),
}


def report(
    profile: ModuleProfile, head: Sequence[str], *, depth: int = -1, top: int = 1, detailed: bool = True
) -> list[str]:
    """Return all lines of a profile up to `depth` (-1: all), with the `top` module classes of each depth."""
    lines = [*head, "", *aggregated(profile, depth, top)]
    if detailed:
        lines += ["", *table(profile, depth)]
    timed = any(module.seconds for module in profile.walk())
    return [*lines, "", _NOTE, *([_NOTE_ON_TIMES] if timed else [])]


def write(lines: Iterable[str], output_file: str | os.PathLike[str] | None) -> None:
    """Write a profile to standard output, or to a file, replacing the file."""
    text = "\n".join(lines)
    if output_file is not None:
        try:
            path = Path(output_file)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
            return
        except OSError as error:
            # a warning only, because a profile must not stop training
            logger.warning("the profile cannot be written to %s (%s); it follows here", output_file, error)
    print(text, flush=True)


def summary(
    profile: ModuleProfile, *, title: str, backward_s: float = 0.0, step_s: float = 0.0, recompute_factor: float = 0.0
) -> list[str]:
    """Return the summary lines of the model; seconds or a `recompute_factor` of 0 are left out."""
    lines = [title, f"parameters:    {params_to_string(profile.parameters)}"]
    rows = [("forward", profile.forward, profile.seconds), ("backward", profile.backward, backward_s)]
    for name, flops, seconds in rows:
        if flops or seconds:
            line = f"{name + ':':<15}{flops_to_string(flops)}, {macs_to_string(flops / 2)}"
            both = flops + (profile.recompute if name == "backward" else 0)
            if seconds:
                line += f", {duration_to_string(seconds)}, {flops_to_string(both / seconds)} a second"
            lines.append(line)
    if profile.recompute:
        share = profile.recompute / profile.forward if profile.forward else 0.0
        again = f"{share:.0%} of the forward pass, within the time of the backward pass"
        lines.append(f"recomputed:    {flops_to_string(profile.recompute)} ({again})")
    if step_s:
        lines.append(f"step:          {duration_to_string(step_s)}")
    if recompute_factor:
        ruled = profile.forward * (3 + recompute_factor)
        found = profile.flops + profile.recompute
        lines.append(
            f"by rule:       {flops_to_string(ruled)} = forward x (3 + {recompute_factor:g}); "
            f"counted: {flops_to_string(found)}"
        )
    return lines


def aggregated(profile: ModuleProfile, depth: int = -1, top: int = 1) -> list[str]:
    """Return the `top` most expensive module classes of each depth up to `depth` (-1: all)."""
    levels: dict[int, dict[str, list[ModuleProfile]]] = defaultdict(lambda: defaultdict(list))
    for module in profile.walk():
        if depth < 0 or module.depth <= depth:
            levels[module.depth][module.kind].append(module)
    lines = [f"most at each depth (top {top} by class)"]
    for level, kinds in sorted(levels.items()):
        lines.append(f"depth {level}")
        for name, (read, write) in _MEASURES.items():
            sums = {kind: sum(map(read, modules)) for kind, modules in kinds.items()}
            if any(sums.values()):
                most = sorted(sums, key=lambda kind: -sums[kind])[:top]
                lines.append(f"  {name + ':':<14}" + ", ".join(f"{kind} {write(sums[kind])}" for kind in most))
    return lines


def table(profile: ModuleProfile, depth: int = -1) -> list[str]:
    """Return one line for each module up to `depth` (-1: all), with its share of the model."""
    shown = [module for module in profile.walk() if depth < 0 or module.depth <= depth]
    rows = [["module", "params", "forward", "backward", "recomputed", "forward time"]]
    rows += [list(_cells(module, profile)) for module in shown]
    wanted = [place for place in range(len(rows[0])) if any(row[place] for row in rows[1:])]
    widths = {place: max(len(row[place]) for row in rows) for place in wanted}
    return [
        "  ".join(row[place].rjust(width) if place else row[place].ljust(width) for place, width in widths.items())
        for row in rows
    ]


def _cells(module: ModuleProfile, whole: ModuleProfile) -> Iterator[str]:
    yield f"{'  ' * module.depth}{module.name.rpartition('.')[2] or 'model'} ({module.kind})"
    yield params_to_string(module.parameters)
    for phase in ("forward", "backward", "recompute"):
        mine, everything = getattr(module, phase), getattr(whole, phase)
        yield f"{flops_to_string(mine)} {_share(mine, everything)}" if everything else ""
    yield f"{duration_to_string(module.seconds)} {_share(module.seconds, whole.seconds)}" if whole.seconds else ""


def _share(part: float, whole: float) -> str:
    return f"{part / whole:>4.0%}" if whole else ""
