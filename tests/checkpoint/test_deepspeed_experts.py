"""Experts as DeepSpeed lays them out are loaded into any number of ranks and division, and what is missing is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from shardwise.errors import CheckpointError
from shardwise.moe import MoE
from shardwise_deepspeed.experts import split_params_into_different_moe_groups_for_optimizer
from tests.checkpoint import deepspeed_files as files
from tests.checkpoint.test_layouts import content, same
from tests.harness import run_ranks, thorough
from tests.harness.training import ADAMW, engine_of

WIDTH, EXPERTS = 7, 4

SOURCES: list[tuple[int, int, dict[str, Any]]] = [
    (0, 2, {"ep": 1}),
    (0, 4, {"ep": 2}),
    (0, 4, {"ep": 4, "data_first": True}),
    (1, 2, {"ep": 2}),
    (2, 4, {"ep": 1, "align": 8}),
    (2, 4, {"ep": 2}),
    (1, 4, {"ep": 2, "data_first": True, "lean": False}),
    (2, 6, {"ep": 2, "mappings": False}),
    (2, 4, {"ep": 4, "round_robin": True}),
]


class Net(nn.Module):
    """Two layers of experts of different sizes, one with an expert that all tokens use, and layers between them."""

    def __init__(self, seed: int, ep_size: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(self._layer(inner, ep_size) for inner in (5, 3))
        self.last = nn.Linear(WIDTH, 1)

    def _layer(self, inner: int, ep_size: int) -> MoE:
        experts = [nn.Sequential(nn.Linear(WIDTH, inner), nn.GELU(), nn.Linear(inner, WIDTH)) for _ in range(EXPERTS)]
        return MoE(WIDTH, nn.ModuleList(experts), EXPERTS, ep_size, k=2, use_residual=inner == 3, drop_tokens=False)

    def batch(self, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(6, 3, generator=generator).to(self.first.weight.dtype)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.first(values)
        total = values.new_zeros(())
        for block in self.blocks:
            made, l_aux, _ = block(values)
            values, total = values + made, total + 0.01 * l_aux
        return self.last(values).square().mean() + total


def started(seed: int, ep_size: int, stage: int, dtype: str, limit: int | None = None) -> Any:
    shardwise.init_distributed(verbose=False)
    model = Net(seed, ep_size)
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all", "weight_decay": 0.1}, limit
    )
    bf16 = {"enabled": dtype == "bf16"}
    return engine_of(model, stage, ADAMW, groups=groups, train_micro_batch_size_per_gpu=6, bf16=bf16)


def ours(path: Path, *options: Any) -> tuple[files.Content, dict[str, Any]]:
    return files.saved_by(started, str(path), *options), without_names(content(str(path)))


def without_names(found: dict[str, Any]) -> dict[str, Any]:
    """Return what is compared: groups of experts are called by the ranks over which they are divided."""
    groups = [{key: value for key, value in group.items() if key != "name"} for group in found["groups"]]
    return {**found, "groups": groups}


INTO = {"fp32": [(1, 1, 0), (2, 2, 2), (2, 1, 3)], "bf16": [(1, 1, 2), (2, 2, 1)]}


@pytest.mark.parametrize(
    ("dtype", "which"),
    [("fp32", slice(0, None, 2)), ("bf16", slice(1, None, 2)), *(thorough(dtype, slice(None)) for dtype in INTO)],
    ids=["fp32-some", "bf16-others", "fp32", "bf16"],
)
def test_experts_are_loaded_into_every_layout(dtype: str, which: slice, tmp_path: Path) -> None:
    held, expected = ours(tmp_path / "ours", dtype)
    assert len(held.experts) == 2 * 4 * EXPERTS
    sources = [str(tmp_path / f"source{number}") for number in range(len(SOURCES[which]))]
    for path, (stage, world, options) in zip(sources, SOURCES[which], strict=True):
        files.write(path, "global_step3", held, stage, world, **options)
    for world, ep_size, stage in INTO[dtype]:
        run_ranks(files.save_again, world, started, sources, ep_size, stage, dtype)
        for source, described in zip(sources, SOURCES[which], strict=True):
            assert same(without_names(content(source + "-again")), expected), (described, (world, ep_size, stage))


def test_experts_in_several_groups(tmp_path: Path) -> None:
    """As `max_group_size` makes them: each expert of a rank in a group of its own."""
    held, expected = ours(tmp_path / "ours", "fp32", 100)
    assert len(held.groups) > EXPERTS
    sources = [str(tmp_path / f"source{stage}") for stage in range(3)]
    for stage, path in enumerate(sources):
        files.write(path, "x", held, stage, 2, ep=1)
    run_ranks(files.save_again, 2, started, sources, 1, 2, "fp32", 100)
    for source in sources:
        assert same(without_names(content(source + "-again")), expected)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> files.Content:
    return ours(tmp_path_factory.mktemp("ours"), "fp32")[0]


@pytest.mark.parametrize("pattern", ["expp_rank_1_*", "expp*"])
def test_optimizer_state_of_stage_0_without_all_files_of_experts_is_refused(
    pattern: str, held: files.Content, tmp_path: Path
) -> None:
    path = files.write(str(tmp_path), "x", held, 0, 4, ep=2)
    for file in Path(path).glob(pattern):
        file.unlink()
    with DeepSpeedCheckpoint(path) as saved:
        assert saved.manifest.optimizer is not None
        assert "experts' optimizer states of rank" in saved.manifest.optimizer["refused"]


def refused(path: str) -> str:
    engine = started(2, 1, 1, "fp32", 100)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(path)
    engine.load_checkpoint(path, load_optimizer_states=False)
    engine.destroy()
    return str(caught.value)


@pytest.mark.parametrize("stage", [thorough(0), 2])
def test_other_groups_are_refused(stage: int, held: files.Content, tmp_path: Path) -> None:
    files.write(str(tmp_path), "x", held, stage, 2, ep=2)
    for told in run_ranks(refused, 2, str(tmp_path)):
        assert "group" in told and "load_optimizer_states=False" in told
