"""Shared tensors, sequences and experts on one mesh, beneath every ZeRO stage, against one process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.engine.mesh import RankGrid
from shardwise.engine.parallel import exchanges_of
from shardwise.parallel import RingAttention, mean_loss, split
from shardwise.parallel.data import complete
from shardwise.registry import part_of
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import config_of
from tests.parallel.tensor.models import MOMENTUM
from tests.parallel.tensor.together import ROWS, RULES, TOKENS, WIDTH, WORDS, alone, data, decoder, loss_of

STEPS, CLIP = 3, 0.5


@dataclass(frozen=True)
class Mesh:
    """Ranks, and how many of them share what."""

    world: int
    tensor: int = 2
    sequence: int = 1
    experts: int = 0
    tokens: bool = False
    zero: dict[str, Any] = field(default_factory=dict)

    @property
    def copies(self) -> int:
        """Ranks that have samples of their own."""
        return self.world // self.tensor // self.sequence


MESHES = {
    "tensor": Mesh(4),
    "sequence": Mesh(4, sequence=2),
    "groups": Mesh(4, zero={"mics_shard_size": 2}),
    "experts": Mesh(4, experts=2),
    "norms": Mesh(2, tokens=True),
    "norms, experts": Mesh(4, experts=2, tokens=True),
    "all": Mesh(8, sequence=2, experts=2, tokens=True, zero={"mics_shard_size": 4, "optimizer_over_replicas": True}),
}


def config(mesh: Mesh, stage: int, accumulation: int, **more: Any) -> dict[str, Any]:
    shared = {"autotp_size": mesh.tensor, "partition_config": RULES, "sequence_parallel": mesh.tokens}
    keys = {"gradient_clipping": CLIP, "sequence_parallel_size": mesh.sequence, "tensor_parallel": shared}
    return config_of(stage, MOMENTUM, zero=mesh.zero, gradient_accumulation_steps=accumulation, **keys, **more)


def started(mesh: Mesh, stage: int, accumulation: int, **more: Any) -> Any:
    shardwise.init_distributed(verbose=False)
    model = decoder(mesh.sequence > 1, mesh.experts)
    return shardwise.initialize(model=model, config=config(mesh, stage, accumulation, **more))[0]


Batch = dict[str, torch.Tensor]


def own(engine: Any, step: int, micro: int, change: Callable[[Batch], Batch] = dict) -> Batch:
    """This rank's part of the rows of its copy of the model; `change` gets all rows."""
    copy, batch = engine.get_data_parallel_rank(), change(data(step, micro, engine.dp_world_size))
    rows = {name: value[copy * ROWS : (copy + 1) * ROWS] for name, value in batch.items()}
    return split(rows) if engine.sequence_parallel_size > 1 else complete(rows)


def steps(engine: Any, count: int) -> list[Any]:
    """Train; return loss, norm, gradients and parameters of each step, by the names of tensors."""
    told = []
    for step in range(count):
        sums = torch.zeros(2, dtype=torch.float64)
        for micro in range(engine.gradient_accumulation_steps()):
            loss, tokens = loss_of(engine, own(engine, step, micro))
            sums += torch.stack([loss.detach().double() * tokens, tokens.double()])
            engine.backward(loss, weight=tokens)
            if engine.is_gradient_accumulation_boundary():
                named = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
                grads = {part_of(p).name or n: safe_get_full_grad(p) for n, p in named}
            engine.step()
        dist.all_reduce(sums)
        values = {part_of(p).name or n: safe_get_full_fp32_param(p) for n, p in named}
        told.append((float(sums[0] / sums[1]), float(engine.last_step.grad_norm), grads, values))
    return told


def train(mesh: Mesh, stage: int, accumulation: int, **more: Any) -> Any:
    engine = started(mesh, stage, accumulation, **more)
    boxes = {tensor.name: tensor.box for tensor in engine.sharded.registry}
    told = steps(engine, STEPS)
    return told, boxes


@pytest.mark.parametrize("local", [thorough(0), 1])
@on_ranks(2)
def test_gradients_that_are_not_reduced_yet(local: int) -> None:
    """Stages 0 and 1 add them up locally until the boundary; stage 2 reduces them in each pass."""
    found = []
    for stage in (2, local):
        engine = started(Mesh(2), stage, 2)
        loss, tokens = loss_of(engine, own(engine, 0, 0))
        engine.backward(loss, weight=tokens)
        found.append({n: safe_get_full_grad(p) for n, p in engine.module.named_parameters() if p.requires_grad})
        engine.destroy()
    reduced, unreduced = found
    for name, value in reduced.items():
        torch.testing.assert_close(unreduced[name], value, rtol=1e-5, atol=1e-7, msg=name)


def part(whole: torch.Tensor, box: Any, like: torch.Tensor) -> torch.Tensor:
    """What a rank has of a whole tensor, if that is what it has told."""
    if whole.shape == like.shape or box is None:
        return whole
    return whole[tuple(slice(first, end) for first, end in box)]


@pytest.mark.parametrize(
    ("kind", "stage", "accumulation"),
    [
        ("norms", 3, 2),
        thorough("tensor", 1, 1),
        thorough("tensor", 0, 1),
        thorough("sequence", 2, 1),
        thorough("groups", 2, 2),
        thorough("experts", 1, 2),
        thorough("norms, experts", 3, 1),
        thorough("all", 3, 2),
    ],
)
def test_training_is_that_of_one_process(kind: str, stage: int, accumulation: int) -> None:
    """In fp32 each gradient and parameter is as near to fp64 as the numerics contract says, or where sums inside of
    layers are those of parts, no farther than twice a plain loop in fp32."""
    mesh = MESHES[kind]
    exact, rounded = (
        alone(STEPS, mesh.copies, accumulation, CLIP, mesh.experts > 0, dtype)
        for dtype in (torch.float64, torch.float32)
    )
    assert max(norm for _, norm, _, _ in exact) > CLIP
    for told, boxes in run_ranks(train, mesh.world, mesh, stage, accumulation):
        for step, (found, wanted, plain) in enumerate(zip(told, exact, rounded, strict=True)):
            assert found[0] == pytest.approx(wanted[0], rel=1e-6), step
            assert found[1] == pytest.approx(wanted[1], rel=1e-5), step
            for ours, theirs, others in zip(found[2:], wanted[2:], plain[2:], strict=True):
                largest = max(value.norm() for value in theirs.values())
                for name, value in ours.items():
                    whole, other = (part(some[name], boxes[name], value) for some in (theirs, others))
                    limit = max(1e-6 * whole.norm(), 2 * (other - whole).norm(), 3e-7 * largest)
                    assert (value - whole).norm() <= limit, (step, name, float((value - whole).norm()), float(limit))


# -- losses without labels, and of several forms -----------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A step in which half of the rows, or of the only row's tokens, has no labels: the loss of a rank may be 0 / 0.

    Attributes:
        weight: form of the weight of the loss, or "mean_loss".
        ring: attention of a ring in place of an exchange of heads.
        recompute: blocks are recomputed in the backward pass.
    """

    stage: int
    mesh: Mesh
    weight: str = "int"
    ring: bool = False
    recompute: bool = False


def unlabelled(batch: Batch) -> Batch:
    labels = batch["labels"].clone()
    if len(labels) > ROWS:
        labels[: len(labels) // 2] = -100
    else:
        labels[:, : TOKENS // 2] = -100
    return {**batch, "labels": labels}


def mean_of(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = model(batch["input_ids"], batch["position_ids"]), batch["shift_labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), (labels != -100).sum()


def recomputed(forward: Any) -> Any:
    return lambda *args: checkpoint(forward, *args, use_reentrant=False)


def graded(cases: list[Case]) -> list[Any]:
    """Return norm and gradients of a step of each case."""
    found = []
    for case in cases:
        engine = started(case.mesh, case.stage, 1)
        for block in engine.module.blocks:
            if case.ring:
                block.attend = RingAttention()
            if case.recompute:
                block.forward = recomputed(block.forward)
        loss, tokens = mean_of(engine, own(engine, 0, 0, unlabelled))
        if case.weight == "mean_loss":
            engine.backward(mean_loss(loss, tokens))
        else:
            engine.backward(loss, weight={"int": int, "float": float, "tensor": torch.clone}[case.weight](tokens))
        named = [(n, p) for n, p in engine.module.named_parameters() if p.requires_grad]
        grads = {part_of(p).name or n: safe_get_full_grad(p) for n, p in named}
        engine.step()
        found.append((float(engine.last_step.grad_norm), grads))
        engine.destroy()
    return found


PAIRS = [
    Case(0, Mesh(2, 1, 2)),
    Case(1, Mesh(2, 1, 1, 2), "float"),
    Case(2, Mesh(2, 1, 2), "mean_loss"),
    Case(3, Mesh(2, 1, 2, 2), "tensor", recompute=True),
    Case(1, Mesh(2, 1, 2), ring=True),
]
FOURS = [(2, 1, 0), (1, 2, 0), (1, 1, 2), (2, 2, 0), (2, 1, 2), (1, 2, 2), (2, 2, 2), (1, 4, 4)]
"""Ranks of tensors, sequences and experts."""


@pytest.mark.parametrize(
    "cases",
    [
        PAIRS,
        thorough([Case(3, Mesh(4))]),  # one copy of the model has no labels, and exchanges more than the other
        *(thorough([Case(stage, Mesh(4, *ranks)) for ranks in FOURS]) for stage in range(4)),
    ],
    ids=["2", "4", *(f"stage {stage}" for stage in range(4))],
)
def test_all_gradients_and_the_norm(cases: list[Case]) -> None:
    for case, *ranks in zip(cases, *run_ranks(graded, cases[0].mesh.world, cases), strict=True):
        model = decoder(experts=int(case.mesh.experts > 0))
        mean_of(model, complete(unlabelled(data(0, 0, case.mesh.copies))))[0].backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in expected.values() if g is not None))
        found = {name: grad for _, grads in ranks for name, grad in grads.items()}
        assert found.keys() == expected.keys(), case
        assert [own for own, _ in ranks] == pytest.approx([norm] * len(ranks), rel=1e-5), case
        for name, grad in expected.items():
            wanted = torch.zeros_like(found[name]) if grad is None else grad
            off = float((found[name] - wanted).norm())
            assert off <= 1e-5 * float(wanted.norm()) + 1e-7 * norm, (case, name, off, float(wanted.norm()))


@on_ranks(4)
def test_what_a_mesh_costs_is_said() -> None:
    mesh = MESHES["norms, experts"]
    lines = RankGrid.of(mesh.world, tensor=mesh.tensor, sequence=mesh.sequence)
    assert exchanges_of(started(mesh, 1, 1).module, lines) == (
        "data-parallel size 2; tensor-parallel size 2: 5 all-gathers behind norms and 3 reduce-scatters of outputs "
        "forward, as many backward; expert-parallel size 2: 2 all-to-alls in each of 1 layers forward, 2 backward"
    )


def in_half(mesh: Mesh, stage: int, precision: str) -> list[float]:
    more: dict[str, Any] = {precision: {"enabled": True, **({"initial_scale_power": 8} if precision == "fp16" else {})}}
    engine = started(mesh, stage, 1, **more)
    return [loss for loss, *_ in steps(engine, STEPS)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "stage", "precision"), [("sequence", 1, "fp16"), ("norms, experts", 3, "bf16"), ("groups", 2, "fp16")]
)
def test_half_precision_stays_near(kind: str, stage: int, precision: str) -> None:
    """Within a few units in the last place of the losses of one process in fp64."""
    mesh = MESHES[kind]
    exact = [loss for loss, *_ in alone(STEPS, mesh.copies, 1, CLIP, mesh.experts > 0)]
    near = 0.03 if precision == "bf16" else 0.005
    for losses in run_ranks(in_half, mesh.world, mesh, stage, precision):
        assert losses == pytest.approx(exact, rel=near)


BLOCKS, SIZE, CHOICES = 2, 4, 2
WIRED = {
    "tensor": Mesh(2),
    "norms": Mesh(2, tokens=True),
    "sequence": Mesh(4, sequence=2),
    "experts": Mesh(4, experts=2, tokens=True),
}


def step(mesh: Mesh, stage: int, recompute: bool) -> Any:
    """Train two steps; return what the second has sent, and what the ranks' units hold."""
    engine = started(mesh, stage, 1)
    if recompute:
        for block in engine.module.blocks:
            block.forward = recomputed(block.forward)
    for number in range(2):
        engine.sharded.finish_gathers()
        since = engine.ledger.sequence
        loss, tokens = loss_of(engine, own(engine, number, 0))
        engine.backward(loss, weight=tokens)
        engine.step()
    engine.sharded.finish_gathers()
    found: Counter[tuple[str, str]] = Counter()
    for record in engine.ledger.records(since):
        shared = record.group in ("tensor_parallel", "sequence_parallel", "experts_2")
        if shared:
            if record.op in ("reduce_scatter", "all_gather", "all_to_all") and "counts" not in record.label:
                found[record.group, record.op] += record.size
        elif record.op in ("reduce_scatter", "all_gather") and record.sent:
            found["zero", record.op] += record.size
    units = {unit.index: unit for unit in engine.sharded.units if unit.domain.world > 1}
    sections = [(unit.index, section.layout) for unit in units.values() for section in unit.sections]
    first_back = next(index for index in engine.sharded.order[1] if index in units)
    held = {
        "trained": sum(layout.numel for _, layout in sections if layout.trainable),
        "all": sum(layout.numel for _, layout in sections),
        "kept": sum(layout.numel for index, layout in sections if index == first_back),
        "tokens": own(engine, 1, 0)["input_ids"].shape[1],
    }
    return found, held


def of_tensors(mesh: Mesh, tokens: int, recompute: bool) -> dict[str, int]:
    """What ranks of one copy of the model exchange. A recomputed block needs no more the sum at its end."""
    stream, logits = ROWS * tokens * WIDTH * SIZE, ROWS * tokens * WORDS * SIZE
    divided = 2 * BLOCKS - (mesh.experts > 0)  # attention and MLPs
    if not mesh.tokens:
        # Two sums a layer forward and two backward, and those of the embedding and of the head's input.
        pairs = 2 * divided + 2 + recompute * BLOCKS
        return {"reduce_scatter": pairs * stream, "all_gather": pairs * stream + logits}
    # A gather behind each norm, a sum behind each divided layer, and the same backwards; of what is not divided the
    # gradients of each rank's tokens are put together. Ranks with fewer tokens send as many.
    most = ROWS * -(-tokens // mesh.tensor) * mesh.tensor * WIDTH * SIZE
    gathers = 2 * BLOCKS + 1 + 2 * BLOCKS + 1 + recompute * 2 * BLOCKS
    sums = 2 * divided + 1 + recompute * BLOCKS
    return {"reduce_scatter": sums * most + stream, "all_gather": gathers * most + stream + logits}


def of_zero(stage: int, held: dict[str, int]) -> dict[str, int]:
    """What the ranks of each domain exchange; the unit needed first backwards is kept since the forward pass."""
    trained = held["trained"] * SIZE
    gathered = (2 * held["all"] - held["kept"]) * SIZE if stage == 3 else trained
    return {"reduce_scatter": trained, "all_gather": gathered}


@pytest.mark.parametrize(
    ("kind", "recompute", "stage"),
    [
        ("experts", True, 3),
        ("tensor", False, 1),
        thorough("tensor", True, 0),
        thorough("norms", False, 2),
        thorough("norms", True, 1),
        thorough("sequence", True, 3),
    ],
)
def test_bytes_are_those_of_closed_forms(kind: str, recompute: bool, stage: int) -> None:
    mesh = WIRED[kind]
    told = run_ranks(step, mesh.world, mesh, stage, recompute)
    passes = 2 + recompute
    for found, held in told:
        tokens = held["tokens"]
        wanted = {("tensor_parallel", op): size for op, size in of_tensors(mesh, tokens, recompute).items()}
        wanted |= {("zero", op): size for op, size in of_zero(stage, held).items() if size}
        if mesh.sequence > 1:
            # Queries, keys and values to heads and the output back, N/P each, and the same backwards.
            here = ROWS * tokens * WIDTH // mesh.tensor * SIZE
            whole = ROWS * TOKENS * WIDTH // mesh.tensor // mesh.sequence * SIZE
            forward, backward = 3 * here + whole, here + 3 * whole
            wanted["sequence_parallel", "all_to_all"] = BLOCKS * ((passes - 1) * forward + backward)
        sizes = {key: size for key, size in found.items() if key[0] != "experts_2"}
        assert sizes == wanted
    if mesh.experts:
        # Each choice of a token to its expert and back, and the same backwards.
        sent = sum(found["experts_2", "all_to_all"] for found, _ in told)
        assert sent == 2 * passes * CHOICES * mesh.world * ROWS * TOKENS * WIDTH * SIZE
