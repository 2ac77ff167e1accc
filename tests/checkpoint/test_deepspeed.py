"""Checkpoints as DeepSpeed lays them out are loaded into every stage, number of ranks and division, and never run."""

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
from shardwise.checkpoint.formats.deepspeed.tp_merge import Divisions
from shardwise.errors import CheckpointError
from tests.checkpoint import deepspeed_files as files
from tests.checkpoint.deepspeed_models import DIVIDED, EXPERTS, PLAIN, Kind, write_parts
from tests.checkpoint.hostile import Evil
from tests.checkpoint.job import Run, config, content, differences, first_rank
from tests.checkpoint.weights import command
from tests.harness import on_ranks, run_ranks, thorough

ALL = slice(None)


@pytest.mark.parametrize(
    ("kind", "some", "options", "into"),
    [
        (PLAIN, ALL, ("fp32", "AdamW"), [(2, 1, 2)]),
        thorough(PLAIN, ALL, ("fp32", "AdamW"), [(1, 1, 0), (3, 1, 3)]),
        (PLAIN, ALL, ("bf16", "AdamW"), [(2, 1, 3)]),
        thorough(PLAIN, ALL, ("fp32", "SGD"), [(3, 1, 2)]),
        (EXPERTS, slice(0, None, 2), ("fp32",), [(1, 1, 0), (2, 2, 2), (2, 1, 3)]),
        (EXPERTS, slice(1, None, 2), ("bf16",), [(1, 1, 2), (2, 2, 1)]),
        thorough(EXPERTS, ALL, ("fp32",), [(1, 1, 0), (2, 2, 2), (2, 1, 3)]),
        thorough(EXPERTS, ALL, ("bf16",), [(1, 1, 2), (2, 2, 1)]),
        # As `max_group_size` makes them: each expert of a rank in a group of its own.
        (EXPERTS, slice(0, 5, 4), ("fp32", 100), [(2, 1, 2)]),
        (DIVIDED, slice(0, None, 3), ("fp32",), [(2, 2, 2), (2, 1, 3)]),
        (DIVIDED, slice(1, None, 3), ("bf16",), [(2, 2, 0)]),
        thorough(DIVIDED, ALL, ("fp32",), [(2, 2, 2), (2, 1, 3), (1, 1, 0), (2, 2, 3)]),
        thorough(DIVIDED, ALL, ("bf16",), [(2, 2, 0), (1, 1, 1)]),
    ],
)
def test_files_of_every_layout_are_loaded_into_every_other(
    kind: Kind, some: slice, options: tuple[Any, ...], into: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    held, expected = kind.saved(tmp_path, *options), content(str(tmp_path))
    layouts = kind.layouts[some]
    sources = [str(tmp_path / "-".join(map(str, layout))) for layout in layouts]
    for source, layout in zip(sources, layouts, strict=True):
        kind.write(source, held, *layout)
    for target in into:
        for layout, found in zip(layouts, kind.loaded(sources, *target, *options), strict=True):
            assert differences(expected, found) == [], (layout, target)


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> files.Content:
    return PLAIN.saved(tmp_path_factory.mktemp("plain"), "bf16")


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> files.Content:
    return EXPERTS.saved(tmp_path_factory.mktemp("experts"), "fp32")


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory) -> files.Content:
    return DIVIDED.saved(tmp_path_factory.mktemp("divided"), "fp32")


# -- schedules, scalers and settings -----------------------------------------------------------------------------------


def scaler_after(path: str) -> Any:
    run = Run(config(2, "fp16"), seed=1, noise=False)
    run.load(path)
    return run.engine.loss_scaler.state_dict()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_loss_scale_goes_on(stage: int, tmp_path: Path) -> None:
    held = PLAIN.saved(tmp_path, "fp16")
    held.scaler = {
        "cur_scale": 512.0,
        "dynamic": True,
        "cur_iter": 9,
        "last_overflow_iter": 6,
        "scale_factor": 2.0,
        "scale_window": 1000,
        "delayed_shift": 2,
        "cur_hysteresis": 2,
        "dtype": torch.float16,
    }
    path = str(tmp_path / "theirs")
    files.write(path, "x", held, stage, 2)
    for state in run_ranks(scaler_after, 2, path):
        # Stage 0 does without a tolerance for overflows.
        assert (state["scale"], state["clean_steps"], state["tolerance"]) == (512.0, 1, 2 if stage else 1)


@on_ranks(1)
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


@pytest.mark.parametrize("stage", [thorough(0), 3])
@on_ranks(2)
def test_what_does_not_fit_the_engine_is_refused(stage: int, held: files.Content, tmp_path: Path) -> None:
    path = str(tmp_path)
    first_rank(files.write, path, "x", held, stage, 2)
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
    settings = [{**group, "maximize": True, "foreach": True, "weird": 3} for group in held.settings]
    changed = replace(held, settings=settings)
    with DeepSpeedCheckpoint(files.write(str(tmp_path), "x", changed, 2, 1), groups(held)) as saved:
        assert any("maximize=True, weird=3" in note and "foreach" not in note for note in saved.notes)
        assert saved.manifest.optimizer is not None
        assert set(saved.manifest.optimizer["groups"][0]) == {"lr", "betas", "eps", "weight_decay"}


def test_step_counts_may_be_in_the_groups(held: files.Content, tmp_path: Path) -> None:
    settings = [{**group, "step": 7} for group in held.settings]
    states = {n: {k: v for k, v in state.items() if k != "step"} for n, state in held.states.items()}
    changed = replace(held, settings=settings, states=states)
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


# -- experts and divided parameters -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", ["expp_rank_1_*", "expp*"])
def test_optimizer_state_of_stage_0_without_all_files_of_experts_is_refused(
    pattern: str, experts: files.Content, tmp_path: Path
) -> None:
    path = files.write(str(tmp_path), "x", experts, 0, 4, ep=2)
    for file in Path(path).glob(pattern):
        file.unlink()
    with DeepSpeedCheckpoint(path) as saved:
        assert saved.manifest.optimizer is not None
        assert "experts' optimizer states of rank" in saved.manifest.optimizer["refused"]


@pytest.mark.parametrize("stage", [thorough(0), 2])
@on_ranks(2)
def test_other_groups_are_refused(stage: int, experts: files.Content, tmp_path: Path) -> None:
    first_rank(lambda: files.write(str(tmp_path), "x", experts, stage, 2, ep=2))
    engine = EXPERTS.started(2, 1, 1, "fp32", 100)
    with pytest.raises(CheckpointError, match=r"group(.|\n)*load_optimizer_states=False"):
        engine.load_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path, load_optimizer_states=False)


@pytest.mark.parametrize("stage", [thorough(0), thorough(2), 3])
@on_ranks(2)
def test_what_files_do_not_tell_the_engine_tells_or_nobody(stage: int, divided: files.Content, tmp_path: Path) -> None:
    """With as many ranks the model says how parameters are divided; otherwise nothing is guessed."""
    theirs, again = str(tmp_path / "theirs"), str(tmp_path / "again")
    first_rank(write_parts, theirs, divided, stage, 2, 2, False)
    engine = DIVIDED.started(2, 2, 1, "fp32")
    engine.load_checkpoint(theirs)
    engine.save_checkpoint(again, tag="a")
    with pytest.raises(CheckpointError) as caught:
        DIVIDED.started(2, 1, 1, "fp32").load_checkpoint(theirs)
    assert all(part in str(caught.value) for part in ("'blocks.0.qkv.weight'", "autotp_size=2", "[24, 8]"))
    found = content(again)
    for name, master in divided.masters.items():
        assert torch.equal(found[f"parameter {name}"], master)
        assert torch.equal(found[f"optimizer/exp_avg {name}"], divided.states[name]["exp_avg"])
    with pytest.raises(CheckpointError, match=r"words\.weight.*files do not describe.*autotp_size=2"):
        DeepSpeedCheckpoint(f"{theirs}/x")


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


# -- what is not run, and conversion ---------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("where", ["model", "optimizer", "attribute"])
def test_code_in_a_file_is_refused_and_not_run(where: str, legacy: bool, held: files.Content, tmp_path: Path) -> None:
    proof = tmp_path / "proof"
    evil = Evil(proof)
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


def imports(*arguments: str) -> int:
    return command("import-deepspeed", *arguments)


@pytest.mark.parametrize(("stage", "world"), [(0, 1), thorough(2, 3), (3, 2)])
def test_a_checkpoint_is_converted_without_a_model(
    stage: int, world: int, held: files.Content, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target, plain = (str(tmp_path / name) for name in ("theirs", "ours", "plain"))
    settings = [{k: v for k, v in group.items() if k != "decoupled_weight_decay"} for group in held.settings]
    files.write(source, "global_step2", replace(held, settings=settings), stage, world)
    options = ["--optimizer", "AdamW"]
    if stage == 0:  # frozen parameters: which ones were the optimizer's cannot be told
        assert imports(source, target, *options) == 1
        assert "is not in the file" in capsys.readouterr().err
        assert imports(source, plain, "--no-optimizer") == 0
        assert "no optimizer state" in capsys.readouterr().out
        return
    assert imports(source, target) == 1
    assert "name its class" in capsys.readouterr().err and not os.path.exists(target)
    assert imports(source, target, *options) == 0
    printed = capsys.readouterr().out
    assert f"at stage {stage} on {world} ranks" in printed and "not taken over: the place" in printed
    (again,) = PLAIN.loaded([target], 2, 1, 3, "bf16")
    assert again["steps"] == [2, 4]
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
        assert imports(*arguments) in (1, 2)
        assert message in capsys.readouterr().err
    assert recognised(path) and not recognised(str(tmp_path))
    with open_deepspeed(str(tmp_path / "theirs")) as found, open_deepspeed(path) as directly:
        assert found.path == directly.path == path
    os.truncate(next(Path(path).glob("*rank_1_*optim*")), 300)
    assert imports(path, str(tmp_path / "out"), "--no-optimizer") == 1
    assert "damaged" in capsys.readouterr().err and not (tmp_path / "out").exists()
