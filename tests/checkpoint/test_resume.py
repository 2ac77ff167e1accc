"""Training 2k steps in one go is k steps, a fresh engine with other random weights, and k steps more: bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint import Checkpoint
from shardwise.errors import CheckpointError
from tests.checkpoint.job import Run, as_ranks, config, differences
from tests.harness import on_ranks, thorough
from tests.harness.training import ADAMW, engine_of


def steps(run: Run, count: int) -> Run:
    for _ in range(count):
        run.step()
    return run


def interrupted(start: Callable[[int], Run], path: Path, after: int = 3) -> Run:
    """Train, save, train on; load into a fresh run, train that on as well, and compare all that decides."""
    whole = steps(start(1), 3)
    whole.engine.save_checkpoint(path, client_state={"epoch": 3, "best": torch.tensor([1.0, 2.0])})
    saved = whole.fingerprint()
    end = steps(whole, after).fingerprint()
    fresh = start(2)
    assert differences(saved, end) and len(differences(saved, fresh.fingerprint())) > 20
    found, client = fresh.load(path)
    assert found == f"{path}/global_step3" and (path / "latest").read_text() == "global_step3"
    assert client["epoch"] == 3 and torch.equal(client["best"], torch.tensor([1.0, 2.0]))
    assert differences(saved, fresh.fingerprint()) == []
    assert differences(end, steps(fresh, after).fingerprint()) == [] and whole.loss == fresh.loss
    return fresh


@pytest.mark.parametrize(
    ("stage", "dtype", "optimizer"),
    [
        (1, "fp16", "AdamW"),
        (3, "fp32", "AdamW"),
        thorough(0, "bf16", "AdamW"),
        thorough(0, "fp16", "Adafactor"),
        thorough(2, "fp16", "SGD"),
        thorough(3, "bf16", "Adafactor"),
    ],
)
@as_ranks(2)
def test_resuming_is_exact(stage: int, dtype: str, optimizer: str, tmp_path: Path) -> None:
    interrupted(lambda seed: Run(config(stage, dtype, optimizer), seed), tmp_path)


@as_ranks(2)
def test_the_loss_scale_goes_on_inside_a_series_of_overflows(tmp_path: Path) -> None:
    settings = config(2, "fp16")
    settings["fp16"].update(initial_scale_power=24, hysteresis=2)
    engine = interrupted(lambda seed: Run(settings, seed), tmp_path, 6).engine
    assert engine.skipped_steps >= 3 and engine.cur_scale < 2.0**24


@as_ranks(2)
def test_schedulers_of_torch_go_on(tmp_path: Path) -> None:
    def start(seed: int) -> Run:
        settings = config(3)
        del settings["scheduler"]
        run = Run(settings, seed)
        run.engine.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(run.engine.optimizer, [2, 4], gamma=0.1)
        return run

    interrupted(start, tmp_path)


@as_ranks(2)
def test_a_checkpoint_from_before_the_first_step_takes_optimizer_state_away(tmp_path: Path) -> None:
    fresh = Run(config(1), seed=1)
    fresh.engine.save_checkpoint(tmp_path, tag="start")
    start = fresh.fingerprint()
    stepped = steps(Run(config(1), seed=2), 1)
    stepped.load(tmp_path, "start")
    assert differences(start, stepped.fingerprint()) == []


@as_ranks(2)
def test_parts_can_be_loaded_alone(tmp_path: Path) -> None:
    settings = config(2, "bf16")
    source = steps(Run(settings, seed=1), 2)
    source.engine.save_checkpoint(tmp_path, client_state={"n": 1})
    saved = source.fingerprint()

    def parts(**options: Any) -> tuple[set[str], set[str], Any]:
        """Return what is kept, what is loaded, and the schedule."""
        target = Run(settings, seed=2)
        before = target.fingerprint()
        assert target.load(tmp_path, **options)[1] == {"n": 1}
        kept, loaded = (set(one) - set(differences(one, target.fingerprint())) for one in (before, saved))
        assert "plain blocks.0.inner.weight" in loaded
        return kept, loaded, target.engine.lr_scheduler.state_dict()

    kept, loaded, _ = parts(load_module_only=True)
    assert {"counters", "torch", "loader", "lr"} <= kept
    assert not any(name.startswith("exp_avg") for name in loaded)
    _, loaded, schedule = parts(load_optimizer_states=False)
    assert {"counters", "torch", "loader"} <= loaded and schedule == {"last_batch_iteration": 2}
    assert not any(name.startswith("exp_avg") for name in loaded)
    _, loaded, schedule = parts(load_lr_scheduler_states=False)
    assert any(name.startswith("exp_avg") for name in loaded) and schedule == {"last_batch_iteration": 0}


@as_ranks(2)
def test_a_window_of_another_length_begins_anew(tmp_path: Path) -> None:
    steps(Run(config(2), seed=1), 3).engine.save_checkpoint(tmp_path)
    target = Run(config(2, gradient_accumulation_steps=4), seed=2)
    target.load(tmp_path)
    found = []
    for _ in range(4):
        target.micro_batch()
        found.append(target.engine.global_steps)
    assert found == [3, 3, 3, 4]


@as_ranks(2)
def test_without_latest_the_newest_is_loaded(tmp_path: Path) -> None:
    run = Run(config(1), seed=1)
    assert run.load(tmp_path) == (None, None)
    run.engine.save_checkpoint(tmp_path, tag=5, save_latest=False)
    assert run.load(tmp_path) == run.load(tmp_path, 5) == (f"{tmp_path}/5", {})


@as_ranks(2)
def test_every_stage_writes_the_same_runs_in_files_of_nearly_equal_size(tmp_path: Path) -> None:
    seen = []
    for stage in range(4):
        steps(Run(config(stage, "bf16"), seed=1), 1).engine.save_checkpoint(tmp_path, tag=stage)
        with Checkpoint(f"{tmp_path}/{stage}") as saved:
            tensors, files = saved.manifest.tensors, saved.manifest.files
            seen.append({(t.name, t.kind): [(r.start, r.stop, r.file[:9]) for r in t.slices] for t in tensors})
            sizes = [facts.size for facts in files.values()]
            assert max(sizes) < 1.2 * min(sizes)
    assert all(cuts == seen[0] for cuts in seen)
    cuts = seen[0]["embedding.weight", "optimizer/exp_avg"]
    assert cuts == [(0, 96, "rank00000"), (96, 143, "rank00001")]


class Hollow(nn.Module):
    """A model with a parameter without elements, and extra state."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(3, 1)
        self.empty = nn.Parameter(torch.zeros(2, 0))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (self.layer(x) + self.empty.sum()).square().mean()

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


@on_ranks(3)
def test_empty_parameters_and_extra_state_of_modules(tmp_path: Path) -> None:
    engines = [engine_of(Hollow(seed), 3, ADAMW) for seed in (1, 2)]
    found = []
    for engine in engines:
        if found:
            engine.load_checkpoint(tmp_path)
        else:
            engine.backward(engine(torch.ones(2, 3)))
            engine.step()
            engine.save_checkpoint(tmp_path)
        assert engine.module.calls == 1
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
        found.append(engine.module_state_dict())
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("layer.weight", "layer.bias", "empty"))
    for engine in engines:
        engine.destroy()


@on_ranks(2)
def test_extra_state_that_one_rank_refuses_is_an_error_on_all_ranks() -> None:
    engine = engine_of(Hollow(1), 3, ADAMW)
    state = engine.module_state_dict()
    state["_extra_state"] = {"calls" if torch.distributed.get_rank() else "other": 1}
    with pytest.raises(CheckpointError, match="failed on rank 0" if torch.distributed.get_rank() else "'calls'"):
        engine.load_module_state_dict(state)
    engine.destroy()
