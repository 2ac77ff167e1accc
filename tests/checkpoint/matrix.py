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

Layouts in which ranks share tensors, sequences and experts train a model of their own, that of
`tests.parallel.tensor.together`: {tensor 1, 2} x {sequence 1, 2} x {experts 1, 2} at every stage on 1, 2 and 4 ranks,
and some on 8. What a rank holds is compared in the same way, with its part of what is in the files. All meshes train on
the same samples, and sums inside of layers are those of parts: another mesh goes on with the losses of the run that was
not interrupted to rounding, with the same bits at every stage, and where it does not divide experts, with those of an
engine that was built; the same mesh goes on with the bits of the run that was not interrupted.

What 1-bit optimizers have not sent yet belongs to the ranks that keep it. On another number of ranks it is dropped (an
engine that is built there has none either); on the same ranks they go on exactly, at their other stage too.

Layouts with stages train the model of `tests.checkpoint.stages`; parameter groups are compared by name, also the
learning-rate schedule and the loss scaler. Checkpoints that were saved with other stages of ZeRO hold the same, where
these add in one order. The same layout goes on with the bits of the run that was not interrupted, another one with its
losses to rounding.

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
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.checkpoint import Checkpoint, Manifest
from shardwise.config import names as known
from shardwise.optim import build
from shardwise.parallel import split
from shardwise.parallel.data import complete
from shardwise.pipe import PipelineModule
from shardwise.registry import cut
from tests.checkpoint import stages
from tests.checkpoint.job import WIDTH, Layout, Model, rank
from tests.harness import run_ranks
from tests.parallel.tensor import together

WORLDS = (1, 2, 3, 4)
BEFORE, AFTER = 2, 2
"""Steps before the checkpoint and after it."""

ROWS = 4
"""Samples of a step on a mesh, of all ranks together."""


def meshes() -> list[tuple[int, ...]]:
    """Every mesh of tensor, sequence and experts on 1, 2 and 4 ranks."""
    shares = list(itertools.product((1, 2), repeat=3))
    return [(world, *share) for world in (1, 2, 4) for share in shares if _fits(world, *share)]


def _fits(world: int, tensor: int, sequence: int, experts: int) -> bool:
    return world % (tensor * sequence) == 0 and world % (tensor * experts) == 0


SOME_MESHES: list[tuple[int, ...]] = [(1, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 2), (4, 2, 1, 2), (4, 2, 2, 2)]
"""For further optimizers and precisions."""

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
        meshes: whether ranks share tensors, sequences and experts of a model that has all of these.
        pipeline: whether the model is that of `tests.checkpoint.stages`, with an optimizer of its own.
    """

    label: str
    name: str
    dtype: str = "fp32"
    stages: int = 4
    meshes: bool = False
    pipeline: bool = False

    def common(self, layout: Layout) -> tuple[Any, ...]:
        """Return what layouts with the same bits have in common: not the stage of ZeRO, if it makes no difference."""
        if self.pipeline:
            # Stages 2 and 3 add up gradients of several micro-batches after the sum over ranks, stages 0 and 1 before.
            return (*layout.mesh, layout.copies > 1 and layout.stage < 2)
        return layout.mesh if self.dtype == "fp32" else layout

    @property
    def options(self) -> dict[str, Any]:
        """`optimizer.params`."""
        return {"lr": 0.01, **_QUICK.get(self.name, {})}

    def every_pair(self) -> tuple[list[Layout], list[Layout]]:
        """All layouts of checkpoints, and of the engines that load them."""
        if self.pipeline:
            some = stages.MESHES if self.dtype == "fp32" else stages.SOME
            return stages.of_meshes(some, 0 if self.dtype == "fp32" else 1), stages.of_meshes(some)
        if not self.meshes:
            found = [Layout(stage, world) for stage in range(self.stages) for world in WORLDS]
            return found, found
        every = self.name == "adamw" and self.dtype == "fp32"
        found = [Layout(stage, *mesh) for mesh in (meshes() if every else SOME_MESHES) for stage in range(self.stages)]
        found += [Layout(stage, 8, 2, share, 2) for stage in (1, 3) for share in (1, 2) if every]
        return found, found


def entries() -> list[Entry]:
    """Every optimizer of the registry; those that work at every stage first."""
    every = sorted({*known.NATIVE_OPTIMIZERS, *known.torch_optimizers()} - known.UNUSABLE_OPTIMIZERS.keys())
    found = [Entry(name, name, stages=known.ONEBIT_STAGES.get(name, 3) + 1) for name in every if name != "Muon"]
    found += [Entry(f"{name}, bf16", name, "bf16") for name in ("adamw", "muon", "Adafactor")]
    return sorted(found, key=lambda entry: -entry.stages)


def on_meshes() -> list[Entry]:
    """An optimizer that steps elements, with masters and without, and one of whole tensors, on meshes."""
    return [
        Entry("adamw, meshes", "adamw", meshes=True),
        Entry("muon, meshes", "muon", meshes=True),
        Entry("adamw, bf16, meshes", "adamw", "bf16", meshes=True),
    ]


STAGED = Entry("AdamW, stages", "adamw", pipeline=True)
STAGED_FP16 = Entry("AdamW, fp16, stages", "adamw", "fp16", pipeline=True)


class Net(Model):
    """A model without noise, whose statistics differ between ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, noise=False)
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False)


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [{"params": trained[:4]}, {"params": trained[4:], "lr": 0.02}]


def _model(entry: Entry, layout: Layout, seed: int) -> nn.Module:
    if not entry.meshes:
        return Net(seed)
    torch.manual_seed(seed)
    return together.Decoder(layout.sequence > 1, layout.experts)


def settings(entry: Entry, layout: Layout) -> dict[str, Any]:
    """Return the configuration of an engine without an optimizer."""
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS // layout.copies if entry.meshes else 3,
        "sequence_parallel_size": layout.sequence,
        "zero_optimization": {"stage": layout.stage, "stage3_param_persistence_threshold": 0},
    }
    if layout.tensor > 1:
        # With experts the scales of norms are parts, too: each rank has the gradient of its tokens.
        shared = {"partition_config": together.RULES, "sequence_parallel": layout.experts > 1}
        found["tensor_parallel"] = {"autotp_size": layout.tensor, **shared}
    if entry.dtype == "bf16":
        found["bf16"] = {"enabled": True}
    return found


def start(entry: Entry, layout: Layout, seed: int, **more: Any) -> Any:
    """Make an engine whose optimizer is built from the configuration, with more of it where a test asks for it."""
    if entry.pipeline:
        return stages.start(layout, seed, entry.dtype)
    torch.manual_seed(seed)
    config = {**settings(entry, layout), "optimizer": {"type": entry.name, "params": entry.options}, **more}
    model = _model(entry, layout, seed)
    return shardwise.initialize(model=model, model_parameters=_groups(model), config=config)[0]


def train(engine: Any, first: int, steps: int) -> list[float]:
    """Train on the data of some steps; they depend on step and rank only.

    Returns:
        The losses of all ranks' samples together, on a mesh or in a pipeline.
    """
    if isinstance(engine.module, PipelineModule):
        return stages.train(engine, first, steps)
    if isinstance(engine.module, together.Decoder):
        return [_share(engine, step) for step in range(first, first + steps)]
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(1 + 64 * step + rank())
        engine.backward(engine(torch.randint(0, 13, (3,), generator=generator)))
        engine.step()
    return []


def _share(engine: Any, step: int) -> float:
    """Train a step on this rank's share of the samples that all meshes have; return the loss of all."""
    copies, copy = engine.dp_world_size, engine.get_data_parallel_rank()
    rows = slice(copy * ROWS // copies, (copy + 1) * ROWS // copies)
    own = {name: value[rows] for name, value in together.data(step, 0, ROWS // together.ROWS).items()}
    loss, tokens = together.loss_of(engine, split(own) if engine.sequence_parallel_size > 1 else complete(own))
    engine.backward(loss, weight=tokens)
    engine.step()
    sums = torch.stack([loss.detach().double() * tokens, tokens.double()])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return float(sums[0] / sums[1])


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
    for index, runs in sorted(sharded.state.value_runs().items()):
        found += [(f"{index} {start}", view) for start, _, view in runs]
        for key in sorted(sharded.update.state(index)):
            found += [(f"{index} {key} {start}", view) for start, _, view in sharded.update.state_pieces(index, key)]
    return _digest(found)


# -- saving ------------------------------------------------------------------------------------------------------------


def _path(root: str, entry: Entry, layout: Layout) -> str:
    return os.path.join(root, entry.label.replace(", ", "-"), "-".join(map(str, layout)))


class End(NamedTuple):
    """How a run that was not interrupted has gone on, and what it had when it was saved.

    Attributes:
        weights: fingerprint at the end.
        losses: of the last steps.
        state: fingerprint of what this rank holds at the end, with the state of the schedule and of the scaler.
        saved: the state of the schedule and of the scaler in the checkpoint.
        share: which of the ranks with samples of their own this is, and how many there are.
        buffers: those in which the ranks of a pipeline differ.
    """

    weights: str
    losses: list[float]
    state: Any
    saved: Any
    share: tuple[int, int]
    buffers: dict[str, list[float]]


def scalars(engine: Any) -> list[Any]:
    """Return the state of the schedule and of the loss scaler."""
    return [None if one is None else one.state_dict() for one in (engine.lr_scheduler, engine.loss_scaler)]


def _share_of(engine: Any) -> tuple[int, int]:
    return engine.get_data_parallel_rank(), engine.dp_world_size


def _buffers(engine: Any) -> dict[str, list[float]]:
    return {name: buffer.tolist() for name, buffer in engine.module.named_buffers() if name.endswith("seen")}


def save_all(root: str, work: list[tuple[Entry, list[Layout]]]) -> dict[tuple[str, Layout], End]:
    """Train and save in some layouts on this number of ranks; return how the runs have gone on."""
    ends = {}
    for entry, layouts in work:
        for layout in layouts:
            engine = start(entry, layout, seed=1)
            train(engine, 0, BEFORE)
            engine.save_checkpoint(_path(root, entry, layout), tag="a")
            saved, buffers = scalars(engine), _buffers(engine)
            losses = train(engine, BEFORE, AFTER)
            state = held(engine), scalars(engine)
            ends[entry.label, layout] = End(whole(engine), losses, state, saved, _share_of(engine), buffers)
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
        own = rank() if self.manifest.layout["world"] == _world() else None
        return self.tensors.get(("buffer", name, own), self.tensors["buffer", name, None])

    def fingerprint(self) -> str:
        """Return what is the same for two checkpoints that hold the same."""
        plain = [(f"{kind} {name}", tensor) for (kind, name, rank), tensor in self.tensors.items() if rank is None]
        rest = json.dumps([self.groups, self.values, self.manifest.counters], default=repr, sort_keys=True)
        return _digest(sorted(plain, key=lambda pair: pair[0])) + hashlib.sha256(rest.encode()).hexdigest()


def unlike(engine: Any, content: Content) -> list[str]:
    """Return what an engine has not from a checkpoint, bit by bit; but for buffers of a pipeline."""
    sharded, found, pipeline = engine.sharded, [], isinstance(engine.module, PipelineModule)

    def compare(what: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        if mine.dtype != theirs.dtype or not torch.equal(mine.reshape(-1), theirs.reshape(-1)):
            found.append(what)

    for index, runs in sharded.state.value_runs().items():
        name = sharded.registry[index].name
        values = _part(sharded, index, content.tensors["parameter", name, None])
        for start, stop, view in runs:
            compare(f"{name}[{start}:{stop}]", view, values[start:stop])
        if runs and sharded.registry[index].trainable:
            found += _unlike_state(sharded, content, index, compare)
    for name, tensor in engine.module_state_dict().items():
        saved = content.tensors.get(("parameter", name, None))
        if saved is None and ("buffer", name, None) in content.tensors and not pipeline:
            compare(name, tensor, content.buffer(name))
        elif saved is not None:
            compare(f"weights of {name}", tensor, saved.to(tensor.dtype))
    saved_groups = content.groups
    if pipeline:
        by_name = {group["name"]: group for group in saved_groups}
        saved_groups = [by_name[group["name"]] for group in engine.optimizer.param_groups]
    for number, (group, saved_group) in enumerate(zip(engine.optimizer.param_groups, saved_groups, strict=True)):
        mine = {key: value for key, value in group.items() if key != "params"}
        keys = [key for key in saved_group if key != "fused"]
        found += [f"group {number}: {key}" for key in keys if not _equal(mine[key], saved_group[key])]
    if engine.global_steps != BEFORE:
        found.append("counters")
    return found


def _equal(mine: Any, saved: Any) -> bool:
    """Compare values of a group, among which optimizers may keep a tensor."""
    if isinstance(mine, torch.Tensor) and isinstance(saved, torch.Tensor):
        return mine.dtype == saved.dtype and torch.equal(mine, saved)
    return bool(mine == saved)


def _part(sharded: Any, index: int, values: Any) -> torch.Tensor:
    """Return the elements of a whole tensor of which this rank has runs."""
    box = sharded.state.box_of(sharded.registry[index])
    return (values if box is None else cut(values, box)).reshape(-1)


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
            compare(f"{key} of {name}[{start}:{stop}]", view, _part(sharded, index, saved)[start:stop])
        if not pieces and isinstance(saved, torch.Tensor):
            compare(f"{key} of {name}", state[key], saved)
        elif not pieces and state[key] != saved:
            found.append(f"{key} of {name}")
    return found


def built(entry: Entry, layout: Layout, content: Content) -> Any:
    """Return an engine that was built from the state in a checkpoint, without loading it."""
    model = _model(entry, layout, seed=3)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(content.tensors["parameter", name, None])
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
    engine = shardwise.initialize(model=model, optimizer=optimizer, config=settings(entry, layout))[0]
    for name, buffer in model.named_buffers():  # after it, because ranks begin with the buffers of the first one
        if ("buffer", name, None) in content.tensors:
            buffer.copy_(content.buffer(name))
    return engine


# -- loading -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What one number of ranks has to load: checkpoints into engines of some layouts.

    Attributes:
        entry: the optimizer.
        sources: layouts of the checkpoints.
        targets: of the engines.
        ends: of the uninterrupted runs, for each of their ranks.
    """

    entry: Entry
    sources: list[Layout]
    targets: list[Layout]
    ends: dict[Layout, list[End]]


def load_all(root: str, work: list[Work]) -> list[str]:
    """Load, compare and go on; return what was wrong."""
    wrong = []
    for one in work:
        contents = {source: Content(_path(root, one.entry, source)) for source in one.sources}
        weights: dict[Any, str] = {}
        for target in one.targets:
            wrong += _load_into(root, one, target, contents, weights)
    return wrong


def _load_into(
    root: str, work: Work, target: Layout, contents: dict[Layout, Content], weights: dict[Any, str]
) -> list[str]:
    entry, wrong = work.entry, []
    engine = start(entry, target, seed=2)
    train(engine, 100, 1)  # what is loaded has to replace this
    references: dict[Any, tuple[str, str]] = {}
    for source, content in contents.items():
        what = f"{entry.label}: {tuple(source)} into {tuple(target)}"
        engine.load_checkpoint(_path(root, entry, source), tag="a")
        expected = work.ends[source]
        unlike_saved = unlike(engine, content)
        if entry.pipeline:
            unlike_saved += _unlike_ends(engine, expected)
        wrong += [f"{what}: {name} is not as saved" for name in unlike_saved]
        losses = train(engine, BEFORE, AFTER)
        found = whole(engine), held(engine)
        if (entry.meshes or entry.pipeline) and not _near(losses, expected[0].losses, entry.dtype):
            wrong.append(f"{what}: went on with losses {losses}, expected {expected[0].losses}")
        if entry.pipeline:
            ended = found[0], losses, (found[1], scalars(engine))
            if source == target and ended != expected[rank()][:3]:
                wrong.append(f"{what}: went on otherwise than the run that was not interrupted")
            continue
        # Where stages agree, checkpoints of one mesh hold the same, whatever the stage.
        key = entry.common(source)
        if key == entry.common(target):
            if found[0] != expected[rank()].weights:
                wrong.append(f"{what}: went on otherwise than the run that was not interrupted")
            continue
        if entry.meshes and entry.dtype == "fp32" and weights.setdefault((key, target.mesh), found[0]) != found[0]:
            wrong.append(f"{what}: went on otherwise than at another stage")
        if target.experts == 1:  # a plain model has the names of all experts
            if key not in references:
                reference = built(entry, target, content)
                train(reference, BEFORE, AFTER)
                references[key] = whole(reference), held(reference)
                reference.destroy()
            if found != references[key]:
                wrong.append(f"{what}: went on otherwise than an engine that was built from this state")
    engine.destroy()
    return wrong


def _unlike_ends(engine: Any, ends: list[End]) -> list[str]:
    """Return what the ranks of a pipeline have not from those that saved: buffers, schedule and scaler."""
    expected: dict[str, list[float]] = {}
    for end in reversed(ends):  # the first rank's where no rank had this share
        expected.update(end.buffers)
    for end in ends:
        expected.update(end.buffers if end.share == _share_of(engine) else {})
    found = [name for name, values in _buffers(engine).items() if values != expected[name]]
    return found + (["schedule or scaler"] if scalars(engine) != ends[0].saved else [])


def _near(losses: list[float], expected: list[float], dtype: str) -> bool:
    bound = 1e-5 if dtype == "fp32" else 0.02
    return all(abs(a - b) <= bound * abs(b) for a, b in zip(losses, expected, strict=True))


def run(plan: dict[Entry, tuple[list[Layout], list[Layout]]], root: str, timeout: float) -> tuple[int, list[str]]:
    """Save in the first layouts of each entry and load into the second.

    Returns:
        (number of pairs, what was wrong).
    """
    ends: dict[tuple[str, Layout], list[End]] = {}
    for world in sorted({source.world for sources, _ in plan.values() for source in sources}):
        saving = [(entry, [one for one in sources if one.world == world]) for entry, (sources, _) in plan.items()]
        answers = run_ranks(save_all, world, root, saving, timeout=timeout)
        for key in answers[0]:
            ends[key] = [answer[key] for answer in answers]
    wrong = []
    for entry, (sources, _) in plan.items():
        known_as: dict[tuple[Any, ...], set[str]] = {}
        finals: dict[tuple[Any, ...], set[str]] = {}
        for source in sources:
            key = entry.common(source)
            known_as.setdefault(key, set()).add(Content(_path(root, entry, source)).fingerprint())
            finals.setdefault(key, set()).add(
                "" if entry.pipeline else str([end[:2] for end in ends[entry.label, source]])
            )
        wrong += [f"{entry.label}: stages differ on {m}" for m, seen in known_as.items() if len(seen) > 1]
        wrong += [f"{entry.label}: stages end otherwise on {m}" for m, seen in finals.items() if len(seen) > 1]
    for world in sorted({target.world for _, targets in plan.values() for target in targets}):
        loading = [
            Work(
                entry,
                sources,
                [one for one in targets if one.world == world],
                {source: ends[entry.label, source] for source in sources},
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
            [Layout((world + shift) % entry.stages, world) for world in chosen]
            for chosen, shift in zip(worlds, shifts, strict=True)
        )
    return plan  # type: ignore[return-value]


def part_of_meshes() -> dict[Entry, tuple[list[Layout], list[Layout]]]:
    """Return a plan with every size of each dimension, every stage and number of ranks, saved and loaded."""
    found = {}
    for number, entry in enumerate(on_meshes()):
        chosen = SOME_MESHES if number == 0 else SOME_MESHES[number::2]
        saved, loaded = ([Layout((n + shift) % 4, *mesh) for n, mesh in enumerate(chosen)] for shift in (0, 3))
        found[entry] = saved, loaded
    return found


def main() -> int:
    """Run all pairs and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("bench/results"))
    parser.add_argument("--only", help="labels of optimizers, separated by ;; results of others are kept")
    options = parser.parse_args()
    by_label = {entry.label: entry for entry in (*entries(), *on_meshes(), STAGED, STAGED_FP16)}
    chosen = options.only.split(";") if options.only else list(by_label)
    sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
    from harness import load, save

    before = load(options.results, "checkpoint_matrix") if options.only else None
    rows: list[dict[str, Any]] = [row for row in before["rows"] if row["system"] not in chosen] if before else []
    failed = sum(row["wrong"] for row in rows)
    for label in chosen:
        root = tempfile.mkdtemp(prefix="matrix-")
        begun = time.perf_counter()
        try:
            pairs, wrong = run({by_label[label]: by_label[label].every_pair()}, root, timeout=10800)
        finally:
            shutil.rmtree(root)
        row = {"system": label, "pairs": pairs, "wrong": len(wrong)}
        rows.append(row)
        print(f"{label:20} {pairs} pairs, {len(wrong)} wrong, {time.perf_counter() - begun:.0f} s", flush=True)
        for line in wrong[:20]:
            print(f"    {line}")
        failed += len(wrong)
        # After each: what there is of a run that was cut short is true as well.
        facts = {"pairs": sum(one["pairs"] for one in rows), "wrong": failed}
        save(options, "checkpoint_matrix", rows, command="python -m tests.checkpoint.matrix", **facts)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
