"""Training 2k steps in one go is k steps, a fresh engine with other random weights, and k steps more: bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint import Checkpoint
from shardwise.errors import CheckpointError, DesyncError
from tests.checkpoint.job import FROZEN, Run, barrier, config, content, differences, rank
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import ADAMW, engine_of


def interrupted(start: Callable[[int], Run], path: Path, after: int = 3) -> Run:
    """Train, save, train on; load into a fresh run, train that on as well, and compare all that decides."""
    whole = start(1).until(3)
    whole.engine.save_checkpoint(path, client_state={"epoch": 3, "best": torch.tensor([1.0, 2.0])})
    saved = whole.fingerprint()
    end = whole.until(3 + after).fingerprint()
    fresh = start(2)
    assert differences(saved, end) and len(differences(saved, fresh.fingerprint())) > 20
    found, client = fresh.load(path)
    assert found == f"{path}/global_step3" and (path / "latest").read_text() == "global_step3"
    assert client["epoch"] == 3 and torch.equal(client["best"], torch.tensor([1.0, 2.0]))
    assert differences(saved, fresh.fingerprint()) == []
    assert differences(end, fresh.until(3 + after).fingerprint()) == [] and whole.loss == fresh.loss
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
@on_ranks(2)
def test_resuming_is_exact(stage: int, dtype: str, optimizer: str, tmp_path: Path) -> None:
    interrupted(lambda seed: Run(config(stage, dtype, optimizer), seed), tmp_path)


@on_ranks(2)
def test_the_loss_scale_goes_on_inside_a_series_of_overflows(tmp_path: Path) -> None:
    settings = config(2, "fp16")
    settings["fp16"].update(initial_scale_power=24, hysteresis=2)
    engine = interrupted(lambda seed: Run(settings, seed), tmp_path, 6).engine
    assert engine.skipped_steps >= 3 and engine.cur_scale < 2.0**24


@on_ranks(2)
def test_schedulers_of_torch_go_on(tmp_path: Path) -> None:
    def start(seed: int) -> Run:
        run = Run(config(3, scheduler=None), seed)
        run.engine.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(run.engine.optimizer, [2, 4], gamma=0.1)
        return run

    interrupted(start, tmp_path)


@on_ranks(2)
def test_a_checkpoint_from_before_the_first_step_takes_optimizer_state_away(tmp_path: Path) -> None:
    fresh = Run(config(1), seed=1)
    fresh.engine.save_checkpoint(tmp_path, tag="start")
    start = fresh.fingerprint()
    stepped = Run(config(1), seed=2).until(1)
    stepped.load(tmp_path, "start")
    assert differences(start, stepped.fingerprint()) == []


@on_ranks(2)
def test_parts_can_be_loaded_alone(tmp_path: Path) -> None:
    settings = config(2, "bf16")
    source = Run(settings, seed=1).until(2)
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


@on_ranks(2)
def test_a_window_of_another_length_begins_anew(tmp_path: Path) -> None:
    Run(config(2), seed=1).until(3).engine.save_checkpoint(tmp_path)
    target = Run(config(2, gradient_accumulation_steps=4), seed=2)
    target.load(tmp_path)
    found = []
    for _ in range(4):
        target.micro_batch()
        found.append(target.engine.global_steps)
    assert found == [3, 3, 3, 4]


@on_ranks(2)
def test_without_latest_the_newest_is_loaded(tmp_path: Path) -> None:
    run = Run(config(1), seed=1)
    assert run.load(tmp_path) == (None, None)
    run.engine.save_checkpoint(tmp_path, tag=5, save_latest=False)
    assert run.load(tmp_path) == run.load(tmp_path, 5) == (f"{tmp_path}/5", {})


@on_ranks(2)
def test_every_stage_writes_the_same_runs_in_files_of_nearly_equal_size(tmp_path: Path) -> None:
    seen = []
    for stage in range(4):
        Run(config(stage, "bf16"), seed=1).until(1).engine.save_checkpoint(tmp_path, tag=stage)
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


@on_ranks(2)
def test_extra_state_that_one_rank_refuses_is_an_error_on_all_ranks() -> None:
    engine = engine_of(Hollow(1), 3, ADAMW)
    state = engine.module_state_dict()
    state["_extra_state"] = {"calls" if rank() else "other": 1}
    with pytest.raises(CheckpointError, match="failed on rank 0" if rank() else "'calls'"):
        engine.load_module_state_dict(state)


# -- into another layout -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("saved", "loaded"), [("bf16", "fp32"), thorough("fp32", "bf16"), ("fp16", "bf16")])
@on_ranks(2)
def test_master_weights_and_state_survive_a_change_of_dtype(saved: str, loaded: str, tmp_path: Path) -> None:
    source, target = Run(config(2, saved), seed=1), Run(config(3, loaded), seed=2)
    source.step(), source.step()
    source.engine.save_checkpoint(tmp_path / "from", tag="a")
    target.load(tmp_path / "from", "a")
    target.engine.save_checkpoint(tmp_path / "to", tag="a")
    target.step()
    barrier()
    before, after = content(str(tmp_path / "from")), content(str(tmp_path / "to"))
    # Frozen parameters have no master weights: they are stored as the module has them.
    for name in [f"parameter {name}" for name in FROZEN]:
        assert torch.allclose(before.pop(name).float(), after.pop(name).float(), rtol=0.01)
    assert differences(before, after) == []


def worlds(path: str, load: bool) -> tuple[list[float], list[float]]:
    run = Run(config(1), seed=1)
    if load:
        run.load(path)
    else:
        run.step()
        run.engine.save_checkpoint(path)
    return torch.rand(2).tolist(), run.model.statistics.running_mean.tolist()


def test_random_numbers_go_on_on_the_ranks_that_both_have(tmp_path: Path) -> None:
    saved = run_ranks(worlds, 2, str(tmp_path), False)
    more = run_ranks(worlds, 3, str(tmp_path), True)
    one = run_ranks(worlds, 1, str(tmp_path), True)
    assert [r for r, _ in more[:2]] == [r for r, _ in saved]
    assert len({tuple(r) for r, _ in more}) == 3
    assert one[0][0] == saved[0][0]
    # Statistics of other ranks have no place in another layout: all take rank 0's.
    assert saved[0][1] != saved[1][1]
    assert all(mean == saved[0][1] for _, mean in more)


# -- another number of ranks with an equal global batch ----------------------------------------------------------------


BATCH = 12
"""Samples of a step; an epoch has four such steps and a rest."""


def trained(root: str, world: int, stage: int, dtype: str, load: bool, to: int) -> tuple[Any, torch.Tensor, list[int]]:
    """Train to a step; return the scalars that decide the next step, the weights, and this rank's samples."""
    sizes = {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 3 if world < 3 else 1}
    settings = config(stage, dtype, gradient_accumulation_steps=None, **sizes)
    run = Run(settings, seed=2 if load else 1, noise=False)
    engine = run.engine
    if load:
        run.load(root)
    tokens: list[int] = []
    engine.module.register_forward_pre_hook(lambda module, inputs: tokens.extend(inputs[0].tolist()))
    run.until(to)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    scaler = None if engine.loss_scaler is None else engine.loss_scaler.state_dict()
    scalars = [groups, engine.lr_scheduler.state_dict(), scaler, engine.global_steps, engine.global_samples]
    weights = torch.cat([value.flatten().float() for value in engine.module_state_dict().values()])
    engine.save_checkpoint(root) if not load and to == 2 else None
    return scalars, weights, tokens


@pytest.mark.parametrize("dtype", ["fp32", thorough("fp16")])
@pytest.mark.parametrize(("before", "after"), [(2, 1), thorough(1, 2), thorough(3, 2), thorough(2, 3), thorough(4, 1)])
def test_training_goes_on_as_if_not_resized(before: int, after: int, dtype: str, tmp_path: Path) -> None:
    root = str(tmp_path)
    run_ranks(trained, before, root, before, 1, dtype, False, 2)
    resized = run_ranks(trained, after, root, after, 2, dtype, True, 4)
    # The reference: the same checkpoint on the ranks that saved it.
    reference = run_ranks(trained, before, root, before, 1, dtype, True, 4)
    for scalars, weights, _ in resized:
        assert scalars == reference[0][0]  # on all ranks, and those of the run that was not resized
        torch.testing.assert_close(weights, reference[0][1], rtol=0, atol=1e-5 if dtype == "fp32" else 4e-3)
    seen, expected = (sorted(token for rank in ranks for token in rank[2]) for ranks in (resized, reference))
    assert seen == expected and len(seen) == 2 * BATCH


@on_ranks(2)
def test_a_scalar_that_differs_after_a_load_is_named(tmp_path: Path) -> None:
    run = Run(config(1), seed=1)
    run.engine.save_checkpoint(tmp_path)
    run.load(tmp_path)
    if rank() == 1:
        run.engine.optimizer.param_groups[1]["weight_decay"] = 0.5
    run.load(tmp_path)  # replaces it
    if rank() == 1:
        run.engine.optimizer.param_groups[1]["weight_decay"] = 0.5
    message = r"rank 1.*\n  optimizer group 1 weight_decay: 0\.1 on rank 0, 0\.5 on rank 1"
    with pytest.raises(DesyncError, match=message):
        run.load(tmp_path, load_param_groups=False)


def with_dropout(root: str, to: int) -> torch.Tensor:
    settings: dict[str, Any] = {"sample_seed": 7, "gradient_accumulation_steps": None}
    run = Run(config(1, train_batch_size=BATCH, **settings), seed=1)
    run.load(root) if to > 2 else None
    run.until(to)
    run.engine.save_checkpoint(root) if to == 2 else None
    if to == 4:  # the epoch goes on with micro-batches of another size
        other = Run(config(1, train_micro_batch_size_per_gpu=2, **settings), seed=1)
        with pytest.raises(CheckpointError, match=r"micro-batches of 3 samples, and now they have 2"):
            other.load(root)
    return torch.cat([value.detach().flatten() for value in run.engine.module.parameters()])


@pytest.mark.parametrize(("before", "after"), [(2, 1), thorough(4, 2), thorough(1, 4)])
def test_dropout_follows_the_sample(before: int, after: int, tmp_path: Path) -> None:
    """A rank with more micro-batches draws for each of them what another rank drew."""
    early = run_ranks(with_dropout, before, str(tmp_path / "a"), 2)
    other = run_ranks(with_dropout, after, str(tmp_path / "b"), 2)
    torch.testing.assert_close(early[0], other[0], rtol=0, atol=1e-5)
    resized = run_ranks(with_dropout, after, str(tmp_path / "a"), 4)
    reference = run_ranks(with_dropout, before, str(tmp_path / "a"), 4)
    torch.testing.assert_close(resized[0], reference[0], rtol=0, atol=1e-5)
    assert not torch.allclose(resized[0], early[0], rtol=0, atol=1e-3)
