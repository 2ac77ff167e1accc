"""A checkpoint of one layout is loaded into another; `test_matrix.py` has all of them, bit by bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import Checkpoint
from tests.checkpoint.job import FROZEN, Run, as_ranks, config, on_ranks
from tests.harness import thorough


def content(path: str) -> dict[str, Any]:
    """Return all that does not depend on the layout."""
    with Checkpoint(os.path.join(path, "a")) as saved:
        found: dict[str, Any] = {}
        for tensor in saved.manifest.tensors:
            if tensor.rank is None:
                found[f"{tensor.kind} {tensor.name}"] = saved.read(tensor)
        assert saved.manifest.optimizer is not None
        for name, values in saved.manifest.optimizer["values"].items():
            found[f"values {name}"] = values
        found["groups"] = [
            {key: value for key, value in group.items() if key != "fused"}
            for group in saved.manifest.optimizer["groups"]
        ]
        found["counters"] = saved.manifest.counters["global_steps"]
        return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor):
            return a.dtype == b.dtype and torch.equal(a, b)
        return bool(a == b)

    return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("saved", "loaded"), [("bf16", "fp32"), thorough("fp32", "bf16"), ("fp16", "bf16")])
@as_ranks(2)
def test_master_weights_and_state_survive_a_change_of_dtype(saved: str, loaded: str, tmp_path: Path) -> None:
    source, target = Run(config(2, saved), seed=1), Run(config(3, loaded), seed=2)
    source.step(), source.step()
    source.engine.save_checkpoint(tmp_path / "from", tag="a")
    target.load(tmp_path / "from", "a")
    target.engine.save_checkpoint(tmp_path / "to", tag="a")
    target.step()
    torch.distributed.barrier()
    before, after = content(str(tmp_path / "from")), content(str(tmp_path / "to"))
    # Frozen parameters have no master weights: they are stored as the module has them.
    for name in [f"parameter {name}" for name in FROZEN]:
        assert torch.allclose(before.pop(name).float(), after.pop(name).float(), rtol=0.01)
    assert same(before, after)


def worlds(path: str, load: bool) -> tuple[list[float], list[float]]:
    run = Run(config(1), seed=1)
    if load:
        run.load(path)
    else:
        run.step()
        run.engine.save_checkpoint(path)
    return torch.rand(2).tolist(), run.model.statistics.running_mean.tolist()


def test_random_numbers_go_on_on_the_ranks_that_both_have(tmp_path: Path) -> None:
    saved = on_ranks(worlds, 2, str(tmp_path), False)
    more = on_ranks(worlds, 3, str(tmp_path), True)
    one = on_ranks(worlds, 1, str(tmp_path), True)
    assert [r for r, _ in more[:2]] == [r for r, _ in saved]
    assert len({tuple(r) for r, _ in more}) == 3
    assert one[0][0] == saved[0][0]
    # Statistics of other ranks have no place in another layout: all take rank 0's.
    assert saved[0][1] != saved[1][1]
    assert all(mean == saved[0][1] for _, mean in more)
