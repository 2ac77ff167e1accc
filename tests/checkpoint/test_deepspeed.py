"""Checkpoints as DeepSpeed lays them out are loaded into every stage and number of ranks, and never run."""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint.convert import open_deepspeed
from shardwise.checkpoint.formats.deepspeed import DeepSpeedCheckpoint, Target, recognised
from shardwise.errors import CheckpointError
from shardwise.launch.cli import main
from tests.checkpoint import deepspeed_files as files
from tests.checkpoint.job import Run, as_ranks, config, differences, on_ranks
from tests.checkpoint.test_layouts import content
from tests.harness import thorough

SOURCES: list[tuple[int, int, dict[str, Any]]] = [
    *((stage, world, {}) for stage, world in ((0, 2), (1, 1), (1, 3), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3))),
    (2, 3, {"mappings": False}),
    (2, 2, {"round_robin": True}),
    (1, 3, {"align": 8}),
    (1, 2, {"lean": False}),
    (3, 2, {"sub_group": 30}),
    (1, 2, {"legacy": True}),
]


def train(path: str, stage: int, dtype: str, optimizer: str) -> None:
    run = Run(config(stage, dtype, optimizer), seed=1, noise=False)
    for _ in range(2):
        run.step()
    run.engine.save_checkpoint(path, tag="a")


def load_all(ours: str, sources: list[str], stage: int, dtype: str, optimizer: str) -> None:
    """Load what we have saved, and then each of DeepSpeed's, and compare."""
    run = Run(config(stage, dtype, optimizer), seed=2, noise=False)
    run.load(ours)
    expected = run.fingerprint()
    for source in sources:
        run.step()  # so that nothing is left of what was loaded before
        assert differences(expected, run.fingerprint())
        path, client = run.load(source)
        assert path == os.path.join(source, "global_step2")
        assert client["epoch"] == 3 and client["best"].tolist() == [1.0, 2.0]
        # DeepSpeed saves neither random numbers nor the place in the data.
        assert set(differences(expected, run.fingerprint())) <= {"python", "numpy", "torch", "loader"}, source


@pytest.mark.parametrize(
    ("dtype", "optimizer", "targets"),
    [
        ("fp32", "AdamW", [(2, 2)]),
        thorough("fp32", "AdamW", [(0, 1), (3, 3)]),
        ("bf16", "AdamW", [(3, 2)]),
        thorough("fp32", "SGD", [(2, 3)]),
    ],
)
def test_every_stage_is_loaded_into_every_layout(
    dtype: str, optimizer: str, targets: list[tuple[int, int]], tmp_path: Path
) -> None:
    ours = str(tmp_path / "ours")
    on_ranks(train, 1, ours, 1, dtype, optimizer)
    held = files.content_of(os.path.join(ours, "a"))
    held.client = {"epoch": 3, "best": torch.tensor([1.0, 2.0])}
    sources = []
    for number, (stage, world, options) in enumerate(SOURCES):
        sources.append(str(tmp_path / f"source{number}"))
        files.write(sources[-1], "global_step2", held, stage, world, **options)
    for stage, world in targets:
        on_ranks(load_all, world, ours, sources, stage, dtype, optimizer)


def scaler_after(path: str) -> Any:
    run = Run(config(2, "fp16"), seed=1, noise=False)
    run.load(path)
    return run.engine.loss_scaler.state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_loss_scale_goes_on(stage: int, tmp_path: Path) -> None:
    on_ranks(train, 1, str(tmp_path / "ours"), 1, "fp16", "AdamW")
    held = files.content_of(str(tmp_path / "ours" / "a"))
    held.scaler = {
        "cur_scale": 512.0,
        "dynamic": True,
        "cur_iter": 9,
        "last_overflow_iter": 6,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "min_scale": 1.0,
        "delayed_shift": 2,
        "cur_hysteresis": 2,
        "consecutive_hysteresis": False,
        "raise_error_at_min_scale": True,
        "dtype": torch.float16,
    }
    path = str(tmp_path / "theirs")
    files.write(path, "x", held, stage, 2)
    for state in on_ranks(scaler_after, 2, path):
        # Stage 0 does without a tolerance for overflows.
        assert (state["scale"], state["clean_steps"], state["tolerance"]) == (512.0, 1, 2 if stage else 1)


# -- without an engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> files.Content:
    path = tmp_path_factory.mktemp("ours")
    on_ranks(train, 1, str(path), 1, "bf16", "AdamW")
    return files.content_of(str(path / "a"))


@as_ranks(1)
def test_schedules_go_on_after_the_last_step(held: files.Content, tmp_path: Path) -> None:
    """OneCycle and LRRangeTest take the last finished step, and apply the rate of the next."""
    cycle = {"cycle_min_lr": 0.0, "cycle_max_lr": 0.8, "cycle_first_step_size": 8}
    for kind, params, steps in [("WarmupLR", {}, [3, 0]), ("OneCycle", cycle, [4, 0])]:
        engine = Run(config(1, "bf16", scheduler={"type": kind, "params": params}), seed=2, noise=False).engine
        for last, step in zip([3, -1], steps, strict=True):
            files.write(
                str(tmp_path / f"{kind}{step}"), "x", replace(held, scheduler={"last_batch_iteration": last}), 1, 1
            )
            engine.load_checkpoint(str(tmp_path / f"{kind}{step}"))
            assert engine.lr_scheduler.last_batch_iteration == step
            assert engine.get_lr() == engine.lr_scheduler.lr(step)


class Malicious:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("where", ["model", "optimizer", "attribute"])
def test_code_in_a_file_is_refused_and_not_run(where: str, legacy: bool, held: files.Content, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    evil = Malicious(f"touch {proof}")
    path = files.write(str(tmp_path), "x", held, 2, 1, legacy=legacy)
    name = "mp_rank_00_model_states.pt" if where == "model" else "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with files.pretended():
        value = torch.load(os.path.join(path, name), weights_only=False)
        if where == "attribute":
            value["optimizer_state_dict"]["loss_scaler"].cur_scale = evil
        else:
            value["evil"] = evil
        files._put(value, path, name, legacy)
    with pytest.raises(CheckpointError, match=name) as caught:
        DeepSpeedCheckpoint(path)
    assert legacy or "posix.system" in str(caught.value)
    assert not proof.exists()
    pickle.loads(pickle.dumps(evil))
    assert proof.exists()  # so it would have run


@pytest.mark.parametrize("stage", [thorough(0), 3])
@as_ranks(2)
def test_what_does_not_fit_the_engine_is_refused(stage: int, held: files.Content, tmp_path: Path) -> None:
    path = str(tmp_path / str(torch.distributed.get_rank()))
    files.write(path, "x", held, stage, 2)
    path = str(tmp_path / "0")
    torch.distributed.barrier()
    engine = Run(config(2, "bf16", "SGD"), seed=2, noise=False).engine
    with pytest.raises(CheckpointError, match=r"exp_avg.*SGD.*load_optimizer_states"):
        engine.load_checkpoint(path)
    engine.load_checkpoint(path, load_optimizer_states=False)
    assert engine.global_steps == 2
    scheduler = {"type": "StepLR", "params": {"step_size": 3}}
    other = Run(config(2, "bf16", scheduler=scheduler), seed=2, noise=False).engine
    with pytest.raises(CheckpointError, match=r"last_batch_iteration.*StepLR|StepLR.*last_batch_iteration"):
        other.load_checkpoint(path)
    other.load_checkpoint(path, load_lr_scheduler_states=False)
    seen: dict[str, Any] = {}
    other.load_checkpoint(path, load_module_only=True, custom_load_fn=lambda src, dst: seen.update(src))
    assert {"embedding.weight", "head.weight"} <= set(seen)


def groups(held: files.Content) -> Target:
    named = [[(name,) for name in group] for group in held.groups]
    return Target("AdamW", named, [frozenset({"lr", "betas", "eps", "weight_decay"})] * len(named))


def test_settings_that_have_no_place_are_told(held: files.Content, tmp_path: Path) -> None:
    changed = files.Content(**vars(held))
    changed.settings = [{**group, "maximize": True, "foreach": True, "weird": 3} for group in held.settings]
    with DeepSpeedCheckpoint(files.write(str(tmp_path), "x", changed, 2, 1), groups(held)) as saved:
        assert any("maximize=True, weird=3" in note and "foreach" not in note for note in saved.notes)
        assert saved.manifest.optimizer is not None
        assert set(saved.manifest.optimizer["groups"][0]) == {"lr", "betas", "eps", "weight_decay"}


def test_step_counts_may_be_in_the_groups(held: files.Content, tmp_path: Path) -> None:
    changed = files.Content(**vars(held))
    changed.settings = [{**group, "step": 7} for group in held.settings]
    changed.states = {n: {k: v for k, v in state.items() if k != "step"} for n, state in held.states.items()}
    for stage in (0, 1, 3):
        with DeepSpeedCheckpoint(
            files.write(str(tmp_path / str(stage)), "x", changed, stage, 2), groups(held)
        ) as saved:
            assert saved.manifest.optimizer is not None
            counts = [state["step"] for state in saved.manifest.optimizer["values"].values()]
            assert len(counts) == len(held.masters) and all(torch.equal(c, torch.tensor(7.0)) for c in counts)
            assert all("step" not in group for group in saved.manifest.optimizer["groups"])


def test_elastic_checkpoints_have_no_settings(held: files.Content, tmp_path: Path) -> None:
    with DeepSpeedCheckpoint(files.write(str(tmp_path), "x", held, 1, 3, elastic=True), groups(held)) as saved:
        assert saved.manifest.optimizer is not None and saved.manifest.optimizer["groups"] == [{}, {}]
        assert any("settings of parameter groups" in note for note in saved.notes)
        moment = saved.read(saved.find("embedding.weight", "optimizer/exp_avg"))
        assert torch.equal(moment, held.states["embedding.weight"]["exp_avg"])


# -- conversion ------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> int:
    try:
        main(["import-deepspeed", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def load_converted(path: str) -> list[int]:
    run = Run(config(3, "bf16"), seed=2, noise=False)
    run.load(path)
    run.engine.save_checkpoint(path + "-again", tag="a")
    return [run.engine.global_steps, run.engine.micro_steps]


@pytest.mark.parametrize(("stage", "world"), [(0, 1), thorough(2, 3), (3, 2)])
def test_a_checkpoint_is_converted_without_a_model(
    stage: int, world: int, held: files.Content, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, plain = (str(tmp_path / name) for name in ("theirs", "ours", "plain"))
    changed = files.Content(**vars(held))
    changed.client = {"epoch": 3, "best": torch.tensor([1.0, 2.0])}
    changed.settings = [{k: v for k, v in group.items() if k != "decoupled_weight_decay"} for group in held.settings]
    files.write(source, "global_step2", changed, stage, world)
    options = ["--optimizer", "AdamW"]
    if stage == 0:  # frozen parameters: which ones were the optimizer's cannot be told
        assert command(source, target, *options) == 1
        assert "is not in the file" in capsys.readouterr().err
        assert command(source, plain, "--no-optimizer") == 0
        assert "no optimizer state" in capsys.readouterr().out
        return
    assert command(source, target) == 1
    assert "name its class" in capsys.readouterr().err and not os.path.exists(target)
    assert command(source, target, *options) == 0
    printed = capsys.readouterr().out
    assert f"at stage {stage} on {world} ranks" in printed and "not taken over: the place" in printed
    assert on_ranks(load_converted, 2, target) == [[2, 4]] * 2
    again = content(target + "-again")
    for name, master in held.masters.items():
        assert torch.equal(again[f"parameter {name}"], master)
        assert torch.equal(again[f"optimizer/exp_avg {name}"], held.states[name]["exp_avg"])


def test_the_command_says_what_is_wrong(
    held: files.Content, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = files.write(str(tmp_path / "theirs"), "x", held, 2, 2)
    (tmp_path / "empty").mkdir()
    cases = {
        (str(tmp_path / "none"), "out"): "there is no such file or directory",
        (str(tmp_path / "empty"), "out"): "not a checkpoint of DeepSpeed",
        (str(tmp_path / "theirs"), "out", "--tag", "y"): "there is no such directory",
        (path, "out", "--no-optimizer", "--optimizer", "SGD"): "contradict",
        (path, str(tmp_path / "theirs" / "latest"), "--no-optimizer"): "is a file",
    }
    for arguments, message in cases.items():
        assert command(*arguments) in (1, 2)
        assert message in capsys.readouterr().err
    assert recognised(path) and not recognised(str(tmp_path))
    with open_deepspeed(str(tmp_path / "theirs")) as found, open_deepspeed(path) as directly:
        assert found.path == directly.path == path
    os.truncate(next(Path(path).glob("*rank_1_*optim*")), 300)
    assert command(path, str(tmp_path / "out"), "--no-optimizer") == 1
    assert "damaged" in capsys.readouterr().err and not (tmp_path / "out").exists()
