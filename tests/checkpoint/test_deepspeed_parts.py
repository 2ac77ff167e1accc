"""Files of several model-parallel ranks are joined where the files or the engine tell how; nothing is guessed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from shardwise.checkpoint.formats.deepspeed.tp_merge import Divisions
from shardwise.errors import CheckpointError
from tests.checkpoint import deepspeed_files as files
from tests.checkpoint.test_layouts import content, same
from tests.harness import run_ranks, thorough
from tests.harness.training import ADAMW, engine_of

WORDS, WIDTH, INNER = 13, 8, 10

RULES = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r"qkv\.weight$"], "partition_type": "column", "shape": [3, -1]},
        {"patterns": [r"up\.weight$"], "partition_type": "column"},
        {"patterns": [r"(o|down)\.weight$"], "partition_type": "row"},
    ],
}


class Block(nn.Module):
    """A fused projection, whose parts are divided each by itself, and layers divided by output and input features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(values)).chunk(3, -1)
        values = values + self.o(torch.tanh(q) * k * v)
        return values + self.down(nn.functional.gelu(self.up(values)))


class Net(nn.Module):
    """Blocks between an embedding and the output layer that is tied to it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor(seed / 2))

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(0, WORDS, (6, 4), generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.words(tokens)) * self.scale)
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), (tokens.flatten() + 1) % WORDS)


def regions(count: int) -> dict[str, list[Any]]:
    """What each of some model-parallel ranks has of the divided parameters."""
    found: dict[str, list[Any]] = {}
    each, inner = WIDTH // count, [n * INNER // count for n in range(count + 1)]
    for block in range(2):
        for part in range(count):
            fused = tuple((n * WIDTH + part * each, n * WIDTH + (part + 1) * each) for n in range(3))
            some, half = (part * each, (part + 1) * each), (inner[part], inner[part + 1])
            for name, box in {
                "qkv.weight": (fused, (0, WIDTH)),
                "qkv.bias": (fused,),
                "o.weight": ((0, WIDTH), some),
                "up.weight": (half, (0, WIDTH)),
                "up.bias": (half,),
                "down.weight": ((0, WIDTH), half),
            }.items():
                found.setdefault(f"blocks.{block}.{name}", []).append(box)
    return found


def exact(held: files.Content, count: int) -> dict[str, Any]:
    return {"universal_checkpoint_version": 0.4, "affine_map": files.affine_map(held, regions(count))}


def started(seed: int, degree: int, stage: int, dtype: str) -> Any:
    shardwise.init_distributed(verbose=False)
    return engine_of(
        Net(seed),
        stage,
        ADAMW,
        train_micro_batch_size_per_gpu=6,
        bf16={"enabled": dtype == "bf16"},
        tensor_parallel={"autotp_size": degree, **({"partition_config": RULES} if degree > 1 else {})},
    )


def ours(path: Path, dtype: str) -> tuple[files.Content, dict[str, Any]]:
    return files.saved_by(started, str(path), dtype), content(str(path))


def write(parent: str, held: files.Content, count: int, info: Any, stage: int, world: int, **options: Any) -> str:
    for part in files.divided(held, regions(count), info):
        path = files.write(parent, "x", part, stage, world, **options)
    return path


CASES = [(stage, world, count) for stage in range(4) for world, count in ((1, 2), (3, 2), (2, 4))]


@pytest.mark.parametrize(
    ("dtype", "cases", "targets"),
    [
        ("fp32", CASES[::3], [(2, 2, 2), (2, 1, 3)]),
        ("bf16", CASES[1::3], [(2, 2, 0)]),
        thorough("fp32", CASES, [(2, 2, 2), (2, 1, 3), (1, 1, 0), (2, 2, 3)]),
        thorough("bf16", CASES, [(2, 2, 0), (1, 1, 1)]),
    ],
    ids=["fp32-some", "bf16-others", "fp32", "bf16"],
)
def test_parts_are_loaded_into_every_layout(
    dtype: str, cases: list[tuple[int, int, int]], targets: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    held, expected = ours(tmp_path / "ours", dtype)
    sources = [str(tmp_path / "-".join(map(str, case))) for case in cases]
    for path, (stage, world, count) in zip(sources, cases, strict=True):
        write(path, held, count, exact(held, count), stage, world)
    for world, degree, stage in targets:
        run_ranks(files.save_again, world, started, sources, degree, stage, dtype)
        for source in sources:
            assert same(content(source + "-again"), expected), (source, world, degree, stage)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> files.Content:
    return ours(tmp_path_factory.mktemp("ours"), "fp32")[0]


def known_only_here(path: str, again: str) -> str:
    """Load what the files do not describe with as many ranks, which is told by the model, and without."""
    engine = started(2, 2, 1, "fp32")
    engine.load_checkpoint(path)
    engine.save_checkpoint(again, tag="a")
    engine.destroy()
    engine = started(2, 1, 1, "fp32")
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(path)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("stage", [thorough(0), thorough(2), 3])
def test_what_files_do_not_tell_the_engine_tells_or_nobody(stage: int, held: files.Content, tmp_path: Path) -> None:
    path = write(str(tmp_path / "theirs"), held, 2, None, stage, 2)
    for told in run_ranks(known_only_here, 2, str(tmp_path / "theirs"), str(tmp_path / "again")):
        assert "'blocks.0.qkv.weight'" in told and "autotp_size=2" in told and "[24, 8]" in told
    found = content(str(tmp_path / "again"))
    for name, master in held.masters.items():
        assert torch.equal(found[f"parameter {name}"], master)
        assert torch.equal(found[f"optimizer/exp_avg {name}"], held.states[name]["exp_avg"])
    with pytest.raises(CheckpointError, match=r"words\.weight.*files do not describe.*autotp_size=2"):
        DeepSpeedCheckpoint(path)


PATTERNS = {
    "parameter_with_row_parallelism_patterns": [r"^blocks\.\d\.(o|down)\.weight$"],
    "tp_replicated_parameter_patterns": [r".*norm\.", r".*(o|down)\.bias$"],
    "vocabulary_parameter_patterns": ["words"],
    "parameter_with_sub_params": [{"patterns": [r"^blocks\.0\.qkv\.weight$"], "shape": [(8, 8, 8), -1]}],
    "original_vocab_size": 13,
}


def test_patterns() -> None:
    told = Divisions(PATTERNS, {})

    def of(name: str, *shapes: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[Any, ...]]:
        found = told.of([name], shapes, lambda: False)
        return found.shape, found.regions

    assert of("blocks.1.o.weight", (8, 4), (8, 4)) == ((8, 8), (((0, 8), (0, 4)), ((0, 8), (4, 8))))
    assert of("blocks.1.o.bias", (8,), (8,)) == ((8,), (((0, 8),), ((0, 8),)))
    assert of("blocks.1.up.weight", (5, 8), (4, 8)) == ((9, 8), (((0, 5), (0, 8)), ((5, 9), (0, 8))))
    assert of("words.weight", (7, 8), (7, 8)) == ((14, 8), (((0, 7), (0, 8)), ((7, 14), (0, 8))))
    for name, shapes, message in (
        ("blocks.0.qkv.weight", ((12, 8), (12, 8)), "the files do not describe"),
        ("blocks.0.norm.weight", ((8,), (4,)), "should be whole"),
        ("blocks.0.o.weight", ((8, 4), (6, 4)), "divided in dimension 1"),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            of(name, *shapes)
        assert name in str(caught.value)
    with pytest.raises(CheckpointError, match=r"'\(' is no regular expression"):
        Divisions({"vocabulary_parameter_patterns": ["("]}, {})


def test_parts_that_several_ranks_share_and_empty_ones(tmp_path: Path) -> None:
    """As of fewer heads of keys than ranks, and of one head that one rank has."""
    value = torch.arange(12.0).view(6, 2)
    both = {"k": value, "w": torch.ones(3)}
    states = {name: {"exp_avg": master + 1} for name, master in both.items()}
    held = files.Content(both, [], {}, [["k", "w"]], [{"lr": 0.1}], both, states)
    for number, ends in enumerate(([(0, 3), (0, 3), (3, 6), (3, 6)], [(0, 6), (6, 6)], [(0, 0), (0, 2), (2, 6)])):
        cut = {"k": [(end, (0, 2)) for end in ends]}
        info = {"affine_map": files.affine_map(held, cut)}
        for stage in range(4):
            parent = str(tmp_path / f"{number}-{stage}")
            for part in files.divided(held, cut, info):
                if stage and not part.masters["k"].numel():
                    part.groups = [["w"]]
                path = files.write(parent, "x", part, stage, 2)
            with DeepSpeedCheckpoint(path) as saved:
                assert torch.equal(saved.read(saved.find("k")), value)
                assert torch.equal(saved.read(saved.find("k", "optimizer/exp_avg")), value + 1)
