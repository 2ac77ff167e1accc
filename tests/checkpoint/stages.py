"""The matrix of checkpoints for models of stages: any number of stages into any other and into none.

Layouts are (stage of ZeRO, ranks, tensor, experts, stages, chunks, device of the optimizer). Whatever the layout, the
run has the same samples in a step. Checkpoints that were saved with other stages of ZeRO hold the same, where they add
in one order; each is loaded into an engine of every layout that has had other values before. What each rank then holds
is compared, bit by bit, with the files: master weights, optimizer state, step counts, settings of parameter groups
(which ranks have by name, and not all of them), buffers that differ between ranks, learning-rate schedule, loss scaler,
counters. Training goes on: with the bits of the run that was not interrupted in the same layout, else with its losses
to rounding.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.moe import MoE
from shardwise.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.checkpoint.matrix import AFTER, BEFORE, Content, held, rank, unlike
from tests.harness import run_ranks

WORDS, WIDTH, LENGTH, ROWS = 13, 8, 5, 8
"""`ROWS` samples in a step, in micro-batches of one."""


class Stages(NamedTuple):
    """A layout; see the module docstring."""

    zero: int
    world: int
    tensor: int = 1
    experts: int = 1
    stages: int = 1
    chunks: int = 1
    offload: str = "none"

    @property
    def mesh(self) -> tuple[int, ...]:
        """All but the stage of ZeRO."""
        return self[1:]

    @property
    def places(self) -> int:
        """Number of ranks with samples of their own."""
        return self.world // self.stages // self.tensor


MESHES: list[tuple[int, ...]] = [
    (1, 1, 1, 1, 1),
    (2, 1, 2, 1, 1),
    (2, 2, 1, 1, 1),
    (2, 1, 1, 2, 1),
    (2, 1, 1, 2, 2),
    (4, 1, 2, 2, 1),
    (4, 1, 1, 2, 2),
    (4, 2, 1, 2, 1),
    (4, 1, 1, 4, 1),
    (4, 1, 1, 4, 2),
    (8, 1, 2, 4, 1),
    (8, 2, 1, 2, 1),
]

SOME = [MESHES[number] for number in (0, 2, 4, 5, 8)]
"""For fp16, with a loss scaler."""


def of_meshes(meshes: list[tuple[int, ...]], zero: int | None = None) -> list[Stages]:
    """Return the layouts of meshes: with every stage of ZeRO, or with one, which begins at `zero` and rotates."""
    if zero is None:
        return [Stages(stage, *mesh) for mesh in meshes for stage in range(4)]
    return [Stages((zero + number) % 4, *mesh) for number, mesh in enumerate(meshes)]


RULES = {
    "layer_specs": [
        {"patterns": [r"\.up\.weight$"], "partition_type": "column"},
        {"patterns": [r"\.down\.weight$"], "partition_type": "row"},
    ]
}


class Mlp(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Experts(nn.Module):
    """A residual block of experts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.experts = MoE(WIDTH, nn.Linear(WIDTH, WIDTH), 4, ep_size=size, k=1, drop_tokens=False, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.experts(x)[0]


class Seen(nn.Module):
    """Sums up its inputs, of which ranks have different ones, in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.seen += x.detach().abs().mean((0, 1))
        return x


def head(embedding: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of the tied head."""
    return F.linear(x, embedding.weight)


def loss_of(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy."""
    return F.cross_entropy(output.flatten(0, 1).float(), ids.flatten())


def model_of(layout: Stages, seed: int) -> PipelineModule:
    """Return a model of eight layers; some have no matrix and some no vector."""
    torch.manual_seed(seed)
    tied = TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH)
    last = TiedLayerSpec("words", nn.Embedding, WORDS, WIDTH, forward_fn=head)
    middle = [LayerSpec(Mlp), LayerSpec(Experts, layout.experts), LayerSpec(Seen), LayerSpec(Mlp), LayerSpec(Mlp)]
    layers = [tied, *middle, LayerSpec(nn.LayerNorm, WIDTH), last]
    return PipelineModule(layers, num_stages=layout.stages, loss_fn=loss_of, partition_method="uniform")


def optimizer_of(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with a group of matrices and one of vectors, those of them that have parameters."""
    matrices = {"name": "matrices", "weight_decay": 0.1, "params": [p for p in parameters if p.ndim > 1]}
    vectors = {"name": "vectors", "weight_decay": 0.0, "lr": 0.02, "params": [p for p in parameters if p.ndim < 2]}
    groups = [group for group in (matrices, vectors) if group["params"]]
    return torch.optim.AdamW(groups or [{"params": []}], lr=0.01)


def start(layout: Stages, seed: int, dtype: str = "fp32", **more: Any) -> Any:
    """Return an engine."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ROWS // layout.places,
        "zero_optimization": {"stage": layout.zero, "stage3_param_persistence_threshold": 0},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9, "warmup_max_lr": 0.02}},
        "pipeline": {"schedule": "interleaved" if layout.chunks > 1 else "1f1b"},
        **more,
    }
    if layout.offload != "none":
        config["zero_optimization"]["offload_optimizer"] = {"device": layout.offload}
    if layout.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": layout.tensor, "partition_config": RULES}
    if dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}
    model = model_of(layout, seed)
    return shardwise.initialize(model=model, optimizer=optimizer_of, config=config)[0]


def train(engine: Any, first: int, steps: int) -> list[float]:
    """Train on samples that depend on the step only; return the losses."""
    losses, places, place = [], engine.dp_world_size, engine.get_data_parallel_rank()
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, WORDS, (ROWS, 1, LENGTH), generator=generator)
        own = [(row, row) for row in rows[place::places]]
        losses.append(float(engine.train_batch(iter(own))))
    return losses


def state(engine: Any) -> dict[str, Any]:
    """Return the weights, this rank's part of master weights and optimizer state, schedule and scaler."""
    scaler = engine.loss_scaler
    return {
        "weights": dict(sorted((name, value.tolist()) for name, value in engine.module_state_dict().items())),
        "held": held(engine),
        "schedule": engine.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }


class End(NamedTuple):
    """How a run has gone on, and the state that it saved: schedule and scaler, own values of buffers by share."""

    losses: list[float]
    end: dict[str, Any]
    saved: dict[str, Any]
    share: tuple[int, int]
    buffers: dict[str, list[float]]


def _path(root: str, dtype: str, layout: Stages) -> str:
    return os.path.join(root, dtype, "-".join(map(str, layout)))


def _buffers(engine: Any) -> dict[str, list[float]]:
    return {name: buffer.tolist() for name, buffer in engine.module.named_buffers() if name.endswith("seen")}


def save_all(root: str, dtype: str, layouts: list[Stages]) -> list[End]:
    """Train, save and go on in some layouts of this number of ranks."""
    shardwise.init_distributed(verbose=False)
    ends = []
    for layout in layouts:
        engine = start(layout, 1, dtype)
        train(engine, 0, BEFORE)
        engine.save_checkpoint(_path(root, dtype, layout), tag="a")
        saved, buffers = state(engine), _buffers(engine)
        share = engine.get_data_parallel_rank(), engine.dp_world_size
        losses = train(engine, BEFORE, AFTER)
        ends.append(End(losses, state(engine), saved, share, buffers))
        engine.destroy()
    return ends


def _unlike(engine: Any, content: Content, ends: list[End]) -> list[str]:
    """Return what an engine has not from a checkpoint, bit by bit."""
    by_name = {group["name"]: group for group in content.groups}
    groups = [by_name[group.get("name")] for group in engine.optimizer.param_groups if "name" in group]
    wrong = unlike(engine, content, groups)
    share, expected = (engine.get_data_parallel_rank(), engine.dp_world_size), {}
    for end in reversed(ends):  # the first rank's where no rank had this share
        expected.update(end.buffers)
    for end in ends:
        expected.update(end.buffers if end.share == share else {})
    wrong += [name for name, values in _buffers(engine).items() if values != expected[name]]
    found = state(engine)
    wrong += [key for key in ("schedule", "scaler") if found[key] != ends[0].saved[key]]
    return wrong


def load_all(root: str, dtype: str, sources: dict[Stages, list[End]], targets: list[Stages]) -> list[str]:
    """Load every checkpoint into engines of some layouts of this number of ranks; return what was wrong."""
    shardwise.init_distributed(verbose=False)
    wrong = []
    contents = {source: Content(_path(root, dtype, source)) for source in sources}
    for target in targets:
        engine = start(target, 2, dtype)
        train(engine, 100, 1)  # what is loaded has to replace this
        for source, ends in sources.items():
            what = f"{dtype}: {tuple(source)} into {tuple(target)}"
            engine.load_checkpoint(_path(root, dtype, source), tag="a")
            wrong += [f"{what}: {name} is not as saved" for name in _unlike(engine, contents[source], ends)]
            losses = train(engine, BEFORE, AFTER)
            if source == target and (losses, state(engine)) != (ends[rank()].losses, ends[rank()].end):
                wrong.append(f"{what}: went on otherwise than the run that was not interrupted")
            bound = 1e-5 if dtype == "fp32" else 0.02
            near = all(abs(a - b) <= bound * abs(b) for a, b in zip(losses, ends[0].losses, strict=True))
            wrong += [] if near else [f"{what}: went on with losses {losses}, expected {ends[0].losses}"]
        engine.destroy()
    return wrong


def run(root: str, dtype: str, sources: list[Stages], targets: list[Stages], timeout: float) -> tuple[int, list[str]]:
    """Save in the first layouts and load into the second.

    Returns:
        (number of pairs, what was wrong).
    """
    ends: dict[Stages, list[End]] = {}
    for world in sorted({source.world for source in sources}):
        some = [source for source in sources if source.world == world]
        answers = run_ranks(save_all, world, root, dtype, some, timeout=timeout)
        ends.update({source: [answer[n] for answer in answers] for n, source in enumerate(some)})
    known: dict[tuple[int, ...], set[str]] = {}
    for source in sources:
        # Stages 2 and 3 add up gradients of several micro-batches after the sum over ranks, stages 0 and 1 before.
        added_first = source.places > 1 and source.zero < 2
        key = (*source.mesh, added_first)
        known.setdefault(key, set()).add(Content(_path(root, dtype, source)).fingerprint())
    wrong = [f"{dtype}: stages of ZeRO differ on {mesh}" for mesh, seen in known.items() if len(seen) > 1]
    for world in sorted({target.world for target in targets}):
        some = [target for target in targets if target.world == world]
        for found in run_ranks(load_all, world, root, dtype, ends, some, timeout=timeout):
            wrong += found
    return len(sources) * len(targets), wrong
