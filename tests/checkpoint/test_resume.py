"""Training 2k steps in one go is k steps, a fresh engine with other random weights, and k steps more: bit by bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from tests.checkpoint.job import Run, config, differences, on_ranks
from tests.harness import thorough


def interrupted(settings: dict[str, Any], path: str, other: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train, save, train on; then load into a fresh engine (with `other` settings) and train on as well."""
    whole = Run(settings, seed=1)
    for _ in range(3):
        whole.step()
    whole.engine.save_checkpoint(path, client_state={"epoch": 3, "best": torch.tensor([1.0, 2.0])})
    saved = whole.fingerprint()
    for _ in range(3):
        whole.step()
    end = whole.fingerprint()
    loss = whole.loss

    fresh = Run(settings if other is None else other, seed=2)
    before = fresh.fingerprint()
    found, client = fresh.load(path)
    loaded = fresh.fingerprint()
    for _ in range(3):
        fresh.step()
    result = {
        "different before": len(differences(saved, before)),
        "different after loading": differences(saved, loaded),
        "different at the end": differences(end, fresh.fingerprint()),
        "moved": len(differences(saved, end)),
        "losses": (loss, fresh.loss),
        "path": found,
        "client": client,
        "skipped": fresh.engine.skipped_steps,
    }
    return result


@pytest.mark.parametrize(
    ("stage", "dtype", "optimizer"),
    [
        thorough(0, "fp32", "SGD"),
        thorough(0, "bf16", "AdamW"),
        thorough(0, "fp16", "Adafactor"),
        thorough(1, "fp32", "Adafactor"),
        thorough(1, "bf16", "SGD"),
        (1, "fp16", "AdamW"),
        thorough(2, "fp32", "AdamW"),
        thorough(2, "bf16", "Adafactor"),
        thorough(2, "fp16", "SGD"),
        (3, "fp32", "AdamW"),
        thorough(3, "bf16", "Adafactor"),
        thorough(3, "fp16", "SGD"),
    ],
)
def test_resuming_is_exact(stage: int, dtype: str, optimizer: str, tmp_path: Path) -> None:
    for result in on_ranks(interrupted, 2, config(stage, dtype, optimizer), str(tmp_path)):
        assert result["different before"] > 20
        assert result["different after loading"] == []
        assert result["different at the end"] == []
        assert result["moved"] > 20
        assert result["losses"][0] == result["losses"][1]
        assert result["path"] == str(tmp_path / "global_step3")
        assert result["client"]["epoch"] == 3
        assert torch.equal(result["client"]["best"], torch.tensor([1.0, 2.0]))
    assert (tmp_path / "latest").read_text() == "global_step3"


def test_resuming_on_one_rank_is_exact(tmp_path: Path) -> None:
    (result,) = on_ranks(interrupted, 1, config(3, "bf16"), str(tmp_path))  # every stage is the same there
    assert result["different after loading"] == result["different at the end"] == []


@pytest.mark.parametrize(("saved", "loaded"), [thorough(0, 1), thorough(1, 0), thorough(2, 3), (3, 2)])
def test_resuming_at_another_stage_is_exact_too(saved: int, loaded: int, tmp_path: Path) -> None:
    # Stages 0 and 1 compute the same bits, and so do 2 and 3; runs are cut differently, so values are compared whole.
    for result in on_ranks(interrupted, 2, config(saved), str(tmp_path), config(loaded)):
        at_end = [name for name in result["different at the end"] if "[" not in name and "step of" not in name]
        assert at_end == []
        assert result["losses"][0] == result["losses"][1]


def overflowing(path: str) -> dict[str, Any]:
    settings = config(2, "fp16")
    settings["fp16"].update(initial_scale_power=24, hysteresis=2)
    whole = Run(settings, seed=1)
    for _ in range(3):
        whole.step()
    whole.engine.save_checkpoint(path)
    for _ in range(6):
        whole.step()
    fresh = Run(settings, seed=2)
    fresh.load(path)
    for _ in range(6):
        fresh.step()
    return {
        "different": differences(whole.fingerprint(), fresh.fingerprint()),
        "skipped": whole.engine.skipped_steps,
        "scale": whole.engine.cur_scale,
    }


def test_the_loss_scale_goes_on_inside_a_series_of_overflows(tmp_path: Path) -> None:
    for result in on_ranks(overflowing, 2, str(tmp_path)):
        assert result["different"] == []
        assert result["skipped"] >= 3
        assert result["scale"] < 2.0**24


def before_the_first_step(path: str) -> list[str]:
    settings = config(1)
    fresh = Run(settings, seed=1)
    fresh.engine.save_checkpoint(path, tag="start")
    start = fresh.fingerprint()
    stepped = Run(settings, seed=2)
    stepped.step()
    stepped.load(path, "start")
    return differences(start, stepped.fingerprint())


def test_a_checkpoint_from_before_the_first_step_takes_optimizer_state_away(tmp_path: Path) -> None:
    assert on_ranks(before_the_first_step, 2, str(tmp_path)) == [[], []]


def parts(path: str) -> dict[str, Any]:
    settings = config(2, "bf16")
    source = Run(settings, seed=1)
    for _ in range(2):
        source.step()
    source.engine.save_checkpoint(path, client_state={"n": 1})
    saved = source.fingerprint()
    result = {}
    for name, options in {
        "module": {"load_module_only": True},
        "no optimizer": {"load_optimizer_states": False},
        "no schedule": {"load_lr_scheduler_states": False},
    }.items():
        target = Run(settings, seed=2)
        before = target.fingerprint()
        _, client = target.load(path, **options)
        after = target.fingerprint()
        result[name] = {
            "kept": set(before) - set(differences(before, after)),
            "loaded": set(saved) - set(differences(saved, after)),
            "schedule": target.engine.lr_scheduler.state_dict(),
            "client": client,
        }
    return result


def test_parts_can_be_loaded_alone(tmp_path: Path) -> None:
    result = on_ranks(parts, 2, str(tmp_path))[0]
    weights = "plain blocks.0.inner.weight"
    module, no_optimizer, no_schedule = result["module"], result["no optimizer"], result["no schedule"]
    assert weights in module["loaded"] & no_optimizer["loaded"] & no_schedule["loaded"]
    assert {"counters", "torch", "loader", "lr"} <= module["kept"]
    assert not any(name.startswith("exp_avg") for name in module["loaded"] | no_optimizer["loaded"])
    assert any(name.startswith("exp_avg") for name in no_schedule["loaded"])
    assert {"counters", "torch", "loader"} <= no_optimizer["loaded"]
    assert no_optimizer["schedule"] == {"last_batch_iteration": 2}
    assert no_schedule["schedule"] == {"last_batch_iteration": 0}
    assert all(part["client"] == {"n": 1} for part in result.values())


def accumulation_changed(path: str) -> list[int]:
    source = Run(config(2), seed=1)
    for _ in range(3):
        source.step()
    source.engine.save_checkpoint(path)
    target = Run(config(2, gradient_accumulation_steps=4), seed=2)
    target.load(path)
    steps = []
    for _ in range(4):
        target.micro_batch()
        steps.append(target.engine.global_steps)
    return steps


def test_a_window_of_another_length_begins_anew(tmp_path: Path) -> None:
    assert on_ranks(accumulation_changed, 2, str(tmp_path)) == [[3, 3, 3, 4]] * 2


def torch_scheduler(path: str) -> list[str]:
    def engine(seed: int) -> Run:
        settings = config(3)
        del settings["scheduler"]
        run = Run(settings, seed)
        run.engine.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(run.engine.optimizer, [2, 4], gamma=0.1)
        return run

    whole = engine(1)
    for _ in range(3):
        whole.step()
    whole.engine.save_checkpoint(path)
    for _ in range(3):
        whole.step()
    fresh = engine(2)
    fresh.load(path)
    for _ in range(3):
        fresh.step()
    assert type(fresh.engine.lr_scheduler.milestones) is type(whole.engine.lr_scheduler.milestones)
    return differences(whole.fingerprint(), fresh.fingerprint())


def test_schedulers_of_torch_go_on(tmp_path: Path) -> None:
    assert on_ranks(torch_scheduler, 2, str(tmp_path)) == [[], []]


def no_latest(path: str) -> Any:
    run = Run(config(1), seed=1)
    first = run.load(path)
    run.step()
    run.engine.save_checkpoint(path, tag=5, save_latest=False)
    second = run.load(path)
    third = run.load(path, 5)
    return first, second, third, sorted(os.listdir(path))


def test_without_latest_the_newest_is_loaded(tmp_path: Path) -> None:
    for first, second, third, names in on_ranks(no_latest, 2, str(tmp_path)):
        assert first == (None, None)
        assert second == third == (str(tmp_path / "5"), {})
        assert names == ["5"]


def files(path: str, stage: int, dtype: str) -> None:
    run = Run(config(stage, dtype), seed=1)
    run.step()
    run.engine.save_checkpoint(path, tag="a")


def test_every_stage_writes_the_same_runs_in_files_of_nearly_equal_size(tmp_path: Path) -> None:
    from shardwise.checkpoint import Checkpoint

    seen = []
    for stage in range(4):
        path = str(tmp_path / str(stage))
        on_ranks(files, 2, path, stage, "bf16")
        with Checkpoint(f"{path}/a") as saved:
            cuts = {
                (t.name, t.kind, t.shape, t.dtype): [(r.start, r.stop, r.file[:9]) for r in t.slices]
                for t in saved.manifest.tensors
            }
            seen.append((cuts, [facts.size for facts in saved.manifest.files.values()]))
    assert seen[0][0] == seen[1][0] == seen[2][0] == seen[3][0]
    for sizes in (sizes for _, sizes in seen):
        assert max(sizes) < 1.2 * min(sizes)
    cuts = seen[0][0]
    assert cuts["embedding.weight", "optimizer/exp_avg", (13, 11), "float32"] == [
        (0, 96, "rank00000"),
        (96, 143, "rank00001"),
    ]
    assert ("blocks.0.inner.weight", "parameter", (11, 11), "float32") in cuts
    assert ("blocks.0.inner.bias", "parameter", (11,), "bfloat16") in cuts


class Hollow(nn.Module):
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


def hollow(path: str, stage: int) -> tuple[bool, int]:
    def engine(seed: int) -> Any:
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        return shardwise.initialize(model=Hollow(seed), config=settings)[0]

    source, target = engine(1), engine(2)
    for _ in range(2):
        source.backward(source(torch.ones(2, 3)))
        source.step()
    source.save_checkpoint(path)
    target.load_checkpoint(path)
    calls = target.module.calls
    for each in (source, target):
        each.backward(each(torch.ones(2, 3)))
        each.step()
    one, other = source.module_state_dict(), target.module_state_dict()
    equal = all(torch.equal(one[name], other[name]) for name in ("layer.weight", "layer.bias", "empty"))
    source.destroy()
    target.destroy()
    return equal, calls


@pytest.mark.parametrize("stage", [thorough(0), 3])
def test_empty_parameters_and_extra_state_of_modules(stage: int, tmp_path: Path) -> None:
    assert on_ranks(hollow, 3, str(tmp_path), stage) == [(True, 2)] * 3
