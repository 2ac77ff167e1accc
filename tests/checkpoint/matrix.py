"""Any layout into any layout, with every optimizer.

    python -m tests.checkpoint.matrix [--results bench/results] [--only adamw,lion]      (make matrix)

For every optimizer of the registry a small model (odd sizes, a tied and frozen parameters, two groups, running
statistics that differ between ranks) is trained and saved at every stage on 1 to 4 ranks, and each of these checkpoints
is loaded into an engine of every stage and number of ranks that has had other values before. Then

- what each rank holds is compared, bit by bit, with the files: master weights, optimizer state, settings of groups,
  counters, buffers, and the whole weights that the module computes with;
- training goes on with given data, and the whole weights are compared, bit by bit, with those of a run that was always
  in the target layout. On as many ranks as the checkpoint is of, that is the run which was never interrupted: in fp32
  every stage computes the same bits. On another number of ranks sums have other parts, so no run could have had these
  values before; there it is an engine that was *built* in the target layout from the state at that step: from a plain
  model with these weights and an optimizer instance with this state, without `load_checkpoint`.

What 1-bit optimizers have not sent yet belongs to the ranks that keep it. On another number of ranks it is dropped (an
engine that is built there has none either); on the same ranks they go on exactly, at their other stage too.

`test_matrix.py` runs the part in which every pair of layouts occurs once, with alternating optimizers.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise
from shardwise.checkpoint import Checkpoint, Manifest
from shardwise.config import names as known
from shardwise.optim import build
from tests.checkpoint.job import WIDTH, Model
from tests.harness import run_ranks

WORLDS = (1, 2, 3, 4)
BEFORE, AFTER = 2, 2
"""Steps before the checkpoint and after it."""

Layout = tuple[int, int]
"""(stage, number of ranks)."""

_QUICK: dict[str, dict[str, Any]] = {
    "onebitadam": {"freeze_step": 1},
    "onebitlamb": {"freeze_step": 1},
    "zerooneadam": {"var_freeze_step": 1, "local_step_scaler": 2, "local_step_clipper": 2},
}
"""Options with which compression has begun when the checkpoint is written."""


@dataclass(frozen=True)
class Entry:
    """An optimizer and a precision.

    Attributes:
        label: names it.
        name: `optimizer.type`.
        dtype: `fp32` or `bf16`.
        stages: how many stages it can be used at.
    """

    label: str
    name: str
    dtype: str = "fp32"
    stages: int = 4

    @property
    def stages_agree(self) -> bool:
        """Whether a run has the same bits at every stage."""
        return self.dtype == "fp32"

    @property
    def options(self) -> dict[str, Any]:
        """`optimizer.params`."""
        return {"lr": 0.01, **_QUICK.get(self.name, {})}

    def layouts(self) -> list[Layout]:
        """All layouts."""
        return list(itertools.product(range(self.stages), WORLDS))


def entries() -> list[Entry]:
    """Every optimizer of the registry; those that work at every stage first."""
    every = sorted({*known.NATIVE_OPTIMIZERS, *known.torch_optimizers()} - known.UNUSABLE_OPTIMIZERS.keys())
    found = [Entry(name, name, stages=known.ONEBIT_STAGES.get(name, 3) + 1) for name in every if name != "Muon"]
    found += [Entry(f"{name}, bf16", name, "bf16") for name in ("adamw", "muon", "Adafactor")]
    return sorted(found, key=lambda entry: -entry.stages)


class Net(Model):
    """A model without noise, whose statistics differ between ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, noise=False)
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False)


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def _world() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": trained[:4]}, {"params": trained[4:], "lr": 0.02}]


def _config(entry: Entry, stage: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 3,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    if entry.dtype == "bf16":
        found["bf16"] = {"enabled": True}
    return found


def start(entry: Entry, stage: int, seed: int) -> Any:
    """Make an engine whose optimizer is built from the configuration."""
    torch.manual_seed(seed)
    config = {**_config(entry, stage), "optimizer": {"type": entry.name, "params": entry.options}}
    model = Net(seed)
    return shardwise.initialize(model=model, model_parameters=_groups(model), config=config)[0]


def train(engine: Any, first: int, steps: int) -> None:
    """Train on the data of some steps; they depend on step and rank only."""
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1 + 64 * step + _rank())
        engine.backward(engine(torch.randint(0, 13, (3,), generator=generator)))
        engine.step()


def _digest(values: Iterable[tuple[str, torch.Tensor]]) -> str:
    total = hashlib.sha256()
    for name, tensor in values:
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def whole(engine: Any) -> str:
    """Return a fingerprint of whole weights and buffers."""
    return _digest(engine.module_state_dict().items())


def held(engine: Any) -> str:
    """Return a fingerprint of the master weights and optimizer state on this rank, as they are cut here."""
    sharded, found = engine.sharded, []
    for index, runs in sorted(sharded.value_runs().items()):
        found += [(f"{index} {start}", view) for start, _, view in runs]
        for key in sorted(sharded.update.state(index)):
            found += [(f"{index} {key} {start}", view) for start, _, view in sharded.update.state_pieces(index, key)]
    return _digest(found)


# -- saving ------------------------------------------------------------------------------------------------------------


def _path(root: str, entry: Entry, layout: Layout) -> str:
    return os.path.join(root, entry.label.replace(", ", "-"), f"stage{layout[0]}ranks{layout[1]}")


def save_all(root: str, work: list[tuple[Entry, list[int]]]) -> dict[tuple[str, int], str]:
    """Train and save at some stages on this number of ranks; return the weights of the runs when they have gone on."""
    ends = {}
    for entry, stages in work:
        for stage in stages:
            engine = start(entry, stage, seed=1)
            train(engine, 0, BEFORE)
            engine.save_checkpoint(_path(root, entry, (stage, _world())), tag="a")
            train(engine, BEFORE, AFTER)
            ends[entry.label, stage] = whole(engine)
            engine.destroy()
    return ends


# -- what a checkpoint holds -------------------------------------------------------------------------------------------


class Content:
    """A checkpoint, whole in memory."""

    def __init__(self, path: str) -> None:
        with Checkpoint(os.path.join(path, "a")) as saved:
            self.manifest: Manifest = saved.manifest
            self.tensors = {(t.kind, t.name, t.rank): saved.read(t) for t in saved.manifest.tensors}
            assert saved.manifest.optimizer is not None
            self.groups = [saved.decode(group) for group in saved.manifest.optimizer["groups"]]
            self.values = {
                name: {key: saved.decode(tree) for key, tree in values.items()}
                for name, values in saved.manifest.optimizer["values"].items()
            }

    def buffer(self, name: str) -> torch.Tensor:
        """Return the value that this rank takes: its own, or rank 0's if the checkpoint is of other ranks."""
        own = _rank() if self.manifest.layout["world"] == _world() else None
        return self.tensors.get(("buffer", name, own), self.tensors["buffer", name, None])

    def fingerprint(self) -> str:
        """Return what is the same for two checkpoints that hold the same."""
        plain = [(f"{kind} {name}", tensor) for (kind, name, rank), tensor in self.tensors.items() if rank is None]
        rest = json.dumps([self.groups, self.values, self.manifest.counters], default=repr, sort_keys=True)
        return _digest(sorted(plain, key=lambda pair: pair[0])) + hashlib.sha256(rest.encode()).hexdigest()


def unlike(engine: Any, content: Content) -> list[str]:
    """Return what an engine has not from a checkpoint, bit by bit."""
    sharded, found = engine.sharded, []

    def compare(what: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        if mine.dtype != theirs.dtype or not torch.equal(mine.reshape(-1), theirs.reshape(-1)):
            found.append(what)

    for index, runs in sharded.value_runs().items():
        name = sharded.registry[index].name
        values = content.tensors["parameter", name, None].view(-1)
        for start, stop, view in runs:
            compare(f"{name}[{start}:{stop}]", view, values[start:stop])
        if runs and sharded.registry[index].trainable:
            found += _unlike_state(sharded, content, index, compare)
    for name, tensor in engine.module_state_dict().items():
        saved = content.tensors.get(("parameter", name, None))
        if saved is None and name != "head.weight":  # the other name of the embedding's
            compare(name, tensor, content.buffer(name))
        elif saved is not None:
            compare(f"weights of {name}", tensor, saved.to(tensor.dtype))
    for number, (group, saved_group) in enumerate(zip(engine.optimizer.param_groups, content.groups, strict=True)):
        mine = {key: value for key, value in group.items() if key != "params"}
        found += [f"group {number}: {key}" for key in saved_group if key != "fused" and mine[key] != saved_group[key]]
    if engine.global_steps != BEFORE:
        found.append("counters")
    return found


def _unlike_state(sharded: Any, content: Content, index: int, compare: Any) -> list[str]:
    name, state, found = sharded.registry[index].name, sharded.update.state(index), []
    keys = {kind.removeprefix("optimizer/") for kind, of, _ in content.tensors if of == name and "/" in kind}
    keys |= content.values.get(name, {}).keys()
    if set(state) != keys:
        found.append(f"{name}: state {sorted(state)}, saved {sorted(keys)}")
    for key in keys & set(state):
        saved = content.tensors.get((f"optimizer/{key}", name, None), content.values.get(name, {}).get(key))
        pieces = sharded.update.state_pieces(index, key)
        for start, stop, view in pieces:
            compare(f"{key} of {name}[{start}:{stop}]", view, saved.view(-1)[start:stop])
        if not pieces and isinstance(saved, torch.Tensor):
            compare(f"{key} of {name}", state[key], saved)
        elif not pieces and state[key] != saved:
            found.append(f"{key} of {name}")
    return found


def built(entry: Entry, stage: int, content: Content) -> Any:
    """Return an engine that was built from the state in a checkpoint, without loading it."""
    model = Net(seed=3)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(content.tensors["parameter", name, None])
        for name, buffer in model.named_buffers():
            if name in dict(model.state_dict()):
                buffer.copy_(content.buffer(name))
    optimizer = build(entry.name, _groups(model), entry.options, device="cpu", named=parameters.items())
    for group, saved in zip(optimizer.param_groups, content.groups, strict=True):
        group.update(saved)
    for (kind, name, _), tensor in content.tensors.items():
        if kind.startswith("optimizer/"):
            optimizer.state[parameters[name]][kind.removeprefix("optimizer/")] = tensor.clone()
    for name, values in content.values.items():
        for key, value in values.items():
            copied = value.clone() if isinstance(value, torch.Tensor) else value
            optimizer.state[parameters[name]][key] = copied
    return shardwise.initialize(model=model, optimizer=optimizer, config=_config(entry, stage))[0]


# -- loading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one number of ranks has to load: checkpoints into engines of some stages.

    Attributes:
        entry: the optimizer.
        sources: layouts of the checkpoints.
        stages: of the engines.
        ends: weights of the uninterrupted runs on this number of ranks, by stage, for each rank.
        same: checkpoints of one number of ranks hold the same, whatever the stage.
    """

    entry: Entry
    sources: list[Layout]
    stages: list[int]
    ends: dict[int, list[str]]
    same: bool


def load_all(root: str, work: list[Work]) -> list[str]:
    """Load, compare and go on; return what was wrong."""
    wrong = []
    for one in work:
        contents = {source: Content(_path(root, one.entry, source)) for source in one.sources}
        for stage in one.stages:
            wrong += _load_into(root, one, stage, contents)
    return wrong


def _load_into(root: str, work: Work, stage: int, contents: dict[Layout, Content]) -> list[str]:
    entry, wrong = work.entry, []
    engine = start(entry, stage, seed=2)
    train(engine, 100, 1)  # what is loaded has to replace this
    references: dict[str, tuple[str, str]] = {}
    for source, content in contents.items():
        what = f"{entry.label}: {source} into {(stage, _world())}"
        engine.load_checkpoint(_path(root, entry, source), tag="a")
        wrong += [f"{what}: {name} is not as saved" for name in unlike(engine, content)]
        train(engine, BEFORE, AFTER)
        found = whole(engine), held(engine)
        if source == (stage, _world()) or (entry.stages_agree and source[1] == _world()):
            expected = work.ends.get(stage, next(iter(work.ends.values())))[_rank()]
            if found[0] != expected:
                wrong.append(f"{what}: went on otherwise than the run that was not interrupted")
            continue
        key = str(source[1]) if work.same else str(source)
        if key not in references:
            reference = built(entry, stage, content)
            train(reference, BEFORE, AFTER)
            references[key] = whole(reference), held(reference)
            reference.destroy()
        if found != references[key]:
            wrong.append(f"{what}: went on otherwise than an engine that was built from this state")
    engine.destroy()
    return wrong


def run(plan: dict[Entry, tuple[list[Layout], list[Layout]]], root: str, timeout: float) -> tuple[int, list[str]]:
    """Save in the first layouts of each entry and load into the second.

    Returns:
        (number of pairs, what was wrong).
    """
    ends: dict[tuple[str, Layout], list[str]] = {}
    for world in WORLDS:
        saving = [(entry, sorted(s for s, w in sources if w == world)) for entry, (sources, _) in plan.items()]
        answers = run_ranks(save_all, world, root, saving, timeout=timeout)
        for label, stage in answers[0]:
            ends[label, (stage, world)] = [answer[label, stage] for answer in answers]
    wrong, same = [], {}
    for entry, (sources, _) in plan.items():
        known_as: dict[int, set[str]] = {}
        finals: dict[int, set[str]] = {}
        for source in sources:
            known_as.setdefault(source[1], set()).add(Content(_path(root, entry, source)).fingerprint())
            finals.setdefault(source[1], set()).add(str(ends[entry.label, source]))
        same[entry] = entry.stages_agree
        if entry.stages_agree:
            wrong += [f"{entry.label}: stages differ on {w} ranks" for w, seen in known_as.items() if len(seen) > 1]
            wrong += [f"{entry.label}: stages end otherwise on {w} ranks" for w, s in finals.items() if len(s) > 1]
    for world in WORLDS:
        loading = [
            Work(
                entry,
                sources,
                sorted(s for s, w in targets if w == world),
                {s: ends[entry.label, (s, w)] for s, w in sources if w == world},
                same[entry],
            )
            for entry, (sources, targets) in plan.items()
        ]
        for found in run_ranks(load_all, world, root, loading, timeout=timeout):
            wrong += found
    return sum(len(sources) * len(targets) for sources, targets in plan.values()), wrong


def part() -> dict[Entry, tuple[list[Layout], list[Layout]]]:
    """Return a plan in which every pair of layouts occurs: 16 pairs for each of 16 optimizers, 4 for the others."""
    plan = {}
    for number, entry in enumerate(entries()):
        worlds = (WORLDS, WORLDS) if number < 16 else ((2, 3), (2, 4))
        shifts = number % 4, number // 4 % 4
        plan[entry] = tuple(
            [((world + shift) % entry.stages, world) for world in chosen]
            for chosen, shift in zip(worlds, shifts, strict=True)
        )
    return plan  # type: ignore[return-value]


def main() -> int:
    """Run all pairs and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("bench/results"))
    parser.add_argument("--only", help="labels of optimizers, separated by ;; results of others are kept")
    options = parser.parse_args()
    by_label = {entry.label: entry for entry in entries()}
    chosen = [by_label[label] for label in options.only.split(";")] if options.only else list(by_label.values())
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    from _machine import save

    file = options.results / "checkpoint_matrix.json"
    before = json.loads(file.read_text())["rows"] if options.only and file.exists() else []
    rows: list[dict[str, Any]] = [row for row in before if row["optimizer"] not in {entry.label for entry in chosen}]
    failed = sum(row["wrong"] for row in rows)
    for entry in chosen:
        root = tempfile.mkdtemp(prefix="matrix-")
        begun = time.perf_counter()
        try:
            pairs, wrong = run({entry: (entry.layouts(), entry.layouts())}, root, timeout=1800)
        finally:
            shutil.rmtree(root)
        row = {"optimizer": entry.label, "pairs": pairs, "wrong": len(wrong)}
        rows.append(row)
        print(f"{entry.label:20} {pairs} pairs, {len(wrong)} wrong, {time.perf_counter() - begun:.0f} s", flush=True)
        for line in wrong[:20]:
            print(f"    {line}")
        failed += len(wrong)
        # After each: what there is of a run that was cut short is true as well.
        save(options.results, "checkpoint_matrix", rows, pairs=sum(one["pairs"] for one in rows), wrong=failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
