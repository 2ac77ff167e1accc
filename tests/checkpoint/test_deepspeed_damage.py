"""Damaged, incomplete and mixed checkpoints of DeepSpeed are refused, with the file or the parameter in the error."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from shardwise.errors import CheckpointError
from tests.checkpoint import deepspeed_files as files
from tests.checkpoint import deepspeed_layers as layered
from tests.checkpoint import test_deepspeed_layers as layers
from tests.checkpoint.deepspeed_models import DIVIDED, EXPERTS, PLAIN, write_parts
from tests.checkpoint.hostile import change_a_byte
from tests.checkpoint.job import Run, config, differences
from tests.harness import run_ranks

Damage = Callable[[str], Any]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> dict[str, files.Content]:
    """The content of checkpoints of each kind of model."""
    place = tmp_path_factory.mktemp("ours")
    run_ranks(layers.saved_by, 1, str(place), layers.small)
    kinds = {"plain": (PLAIN, "bf16"), "parts": (DIVIDED, "fp32"), "experts": (EXPERTS, "fp32")}
    found = {name: kind.saved(place / name, dtype) for name, (kind, dtype) in kinds.items()}
    return {**found, "layers": files.content_of(str(place / "global_step2"))}


def write(form: str, held: dict[str, files.Content], parent: str) -> str:
    """Write a checkpoint of a form: the kind of model or of files, and the ZeRO stage."""
    kind, stage = form.split()
    if kind == "parts":
        return write_parts(parent, held[kind], int(stage), 2, 2)
    if kind == "layers":
        return layered.write_layers(parent, "x", held[kind], layers.ENDS, int(stage), 2, tied=layers.TIED)
    if kind == "universal":
        return layered.write_universal(parent, "x", held["plain"], int(stage))
    world, options = (4, {"ep": 2}) if kind == "experts" else (2, {})
    return files.write(parent, "x", held[kind], int(stage), world, **options)


# -- kinds of damage ---------------------------------------------------------------------------------------------------


def edit(pattern: str, change: Callable[[Any], Any], inside: str | None = None) -> Damage:
    """Change the content of files, or an entry of it."""

    def damage(path: str) -> None:
        for file in sorted(Path(path).glob(pattern)):
            layered.edit(file, lambda value: change(value if inside is None else value[inside]))

    return damage


def states(pattern: str, change: Callable[[Any], Any]) -> Damage:
    """Change what an optimizer has saved."""
    return edit(f"{pattern}optim*", change, "optimizer_state_dict")


def described(change: Callable[[dict[str, Any]], Any]) -> Damage:
    """Change what is said of how one parameter is divided."""
    name = r"^blocks\.0\.qkv\.weight$"
    return edit("mp_rank_00_model*", lambda v: change(v["universal_checkpoint_info"]["affine_map"]["params"][name]))


def remove(pattern: str) -> Damage:
    def damage(path: str) -> None:
        for found in Path(path).glob(pattern):
            shutil.rmtree(found) if found.is_dir() else found.unlink()

    return damage


def copy(pattern: str, name: str) -> Damage:
    return lambda path: shutil.copy(next(Path(path).glob(pattern)), Path(path) / name)


def truncate(pattern: str) -> Damage:
    return lambda path: os.truncate(next(Path(path).glob(pattern)), 300)


def replace(name: str, value: Any) -> Damage:
    return lambda path: torch.save(value, os.path.join(path, name))


def flipped(path: str) -> None:
    """Change one bit of the largest tensor of rank 1."""
    (file,) = Path(path).glob("*zero_pp_rank_1_*optim*")
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    change_a_byte(file, largest.header_offset + 200 + largest.file_size // 2)


SHORT, NINE = torch.zeros(3), torch.tensor(9.0)
EXPERT, LAYER, BIAS = (
    "layer_1_expert_2_mp_rank_00_model_states.pt",
    "layer_02-model_states.pt",
    "zero/blocks.1.norm.bias",
)
FIRST = "blocks.0.deepspeed_moe.experts.deepspeed_experts.0."
MASTERS, BASE = "single_partition_of_fp32_groups", "base_optimizer_state"

DAMAGE: dict[str, tuple[str, Damage, str]] = {
    "a rank is missing": ("plain 2", remove("*rank_1_*optim*"), "optimizer states of rank 1"),
    "no model states": ("plain 2", remove("mp_*"), "mp_rank_00_model_states.pt"),
    "no model states of a rank": ("plain 3", remove("zero*rank_1_*model*"), "model states of rank 1"),
    "a rank too many": (
        "plain 2",
        copy("*rank_1_*optim*", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt"),
        "optimizer states of rank 2",
    ),
    "a changed bit": ("plain 2", flipped, "rank_1.*damaged"),
    "a truncated file": ("plain 2", truncate("*rank_1_*optim*"), "rank_1.*damaged"),
    "another world": ("plain 2", states("*rank_1_*", lambda v: v.update(partition_count=[4, 4])), "partition_count"),
    "another step": ("plain 3", edit("*_1_*model*", lambda v: v.update(global_steps=7)), "global_steps"),
    "a short partition": ("plain 2", states("*rank_1_*", lambda v: v[MASTERS].__setitem__(0, SHORT)), "group 0"),
    "a fragment is missing": (
        "plain 2",
        states("*rank_1_*", lambda v: v["param_slice_mappings"][0].popitem()),
        "param_slice_mappings",
    ),
    "no known key": ("plain 2", states("*", lambda v: v.pop(MASTERS)), MASTERS),
    "another stage number": ("plain 2", states("*", lambda v: v.update(zero_stage=7)), "stage 7"),
    "no version": ("plain 2", edit("mp_*", lambda v: v.pop("ds_version")), "ds_version"),
    "another shape": (
        "plain 2",
        edit("mp_*", lambda v: v["module"].update({"embedding.weight": SHORT})),
        "embedding.weight",
    ),
    "other steps": ("plain 2", states("*rank_1_*", lambda v: v[BASE]["state"][0].update(step=NINE)), "'step'"),
    "an optimizer of experts": ("plain 0", copy("mp_*", "expp_rank_0_mp_rank_00_optim_states.pt"), "expp_rank_0"),
    "NVMe": ("plain 1", lambda path: os.mkdir(Path(path) / "offloaded_tensors"), "NVMe"),
    "a part is missing": ("parts 2", remove("*mp_rank_01*"), "files of mp_rank 1"),
    "states of a part are missing": ("parts 2", remove("zero_pp_rank_1_mp_rank_01*"), "optimizer states of rank 1"),
    "a part too many": ("parts 2", edit("mp_rank_00_model*", lambda v: v.update(mp_world_size=1)), "mp_rank 1"),
    "another parameter": ("parts 2", edit("mp_rank_01_model*", lambda v: v["module"].update(more=SHORT)), "'more'"),
    "another buffer": ("parts 2", edit("mp_rank_01_model*", lambda v: v["module"].update(scale=NINE)), "'scale'"),
    "another step count": (
        "parts 2",
        states("*mp_rank_01*", lambda v: v[BASE]["state"][0].update(step=NINE)),
        "part 1.*'step'",
    ),
    "a piece is not described": (
        "parts 2",
        described(lambda v: v["ranks"][0]["pieces"].pop()),
        "qkv.weight.*affine_map",
    ),
    "a region twice": ("parts 2", described(lambda v: v["ranks"].update({1: v["ranks"][0]})), "qkv.weight"),
    "an expert is missing": ("experts 1", remove(EXPERT), EXPERT),
    "an expert too many": ("experts 1", copy(EXPERT, EXPERT.replace("t_2", "t_4")), "layer_1_expert_4"),
    "a truncated expert": ("experts 2", truncate("layer_0_expert_1_*"), "layer_0_expert_1"),
    "another expert's names": ("experts 1", copy("layer_0_expert_1_*", EXPERT.replace("r_1", "r_0")), "r_0_expert_2"),
    "experts of another checkpoint": (
        "experts 2",
        states("*pp_rank_1_*", lambda v: v[MASTERS].__setitem__(1, v[MASTERS][1] + 1)),
        "other values than in .*layer_0_expert_2",
    ),
    "a buffer": ("experts 1", edit("mp_*", lambda v: v["buffer_names"].append(f"{FIRST}mean")), f"{FIRST}mean"),
    "numbers of experts": ("experts 1", edit("mp_*", lambda v: v.update(num_experts=[4])), "layer_1_expert_0"),
    "another division": ("experts 2", states("*", lambda v: v.update(partition_count=[4, 4])), "group 1 .*4 of 4"),
    "experts in layers": ("experts 1", edit("mp_*", lambda v: v.update(ds_autoep_layers={"a": 1})), "expert_parallel"),
    "a missing layer": ("layers 1", remove(LAYER), f"{LAYER} is missing"),
    "a missing shared layer": ("layers 1", remove("layer_00-model_states.pt"), "'words' with weight"),
    "a truncated layer": ("layers 1", truncate(LAYER), f"{LAYER}: truncated"),
    "another value": (
        "layers 1",
        edit(LAYER, lambda held: held.update({"norm.bias": torch.ones(8)})),
        "'2.norm.bias' has other values than in .*layer_02",
    ),
    "a layer too many": ("layers 1", replace("layer_09-model_states.pt", {"w": SHORT}), "layer_09.*another check"),
    "no layers": ("layers 1", remove("layer_*"), "mp_rank_00.*layer files.*missing"),
    "code": ("layers 1", replace(LAYER, {"w": shardwise.errors.UsageError}), f"{LAYER}: holds objects of shardwise"),
    "a missing stage": ("layers 1", remove("mp_rank_01_model_states.pt"), "mp_rank_01.*missing"),
    "a missing rank": ("universal 3", remove("zero_pp_rank_1_*"), "model states of rank 1"),
    "a missing parameter": ("universal 2", remove(BIAS), "zero: the directories .* missing: blocks.1"),
    "a missing entry": ("universal 2", remove(f"{BIAS}/exp_avg.pt"), f"{BIAS}/exp_avg.pt: cannot be opened"),
    "a truncated entry": ("universal 2", truncate(f"{BIAS}/exp_avg_sq.pt"), f"{BIAS}/exp_avg_sq.pt: truncated"),
    "shape of an entry": ("universal 2", replace(f"{BIAS}/fp32.pt", {"param": SHORT}), rf"{BIAS}/fp32.pt.*\[3\]"),
    "no tensor": ("universal 2", replace(f"{BIAS}/fp32.pt", {"a": 1}), f"{BIAS}/fp32.pt: expected a tensor"),
    "step of an entry": ("universal 2", replace(f"{BIAS}/step.pt", NINE), f"{BIAS}/step.pt: the step count is 9"),
    "no settings": ("universal 2", remove("zero/optimizer_state.pt"), "optimizer_state.pt: cannot be opened"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(kind: str, held: dict[str, files.Content], tmp_path: Path) -> None:
    form, damage, message = DAMAGE[kind]
    path = write(form, held, str(tmp_path))
    damage(path)
    with pytest.raises(CheckpointError, match=message) as caught, DeepSpeedCheckpoint(path) as saved:
        saved.verify(saved.blocks())
    assert path in str(caught.value)


def attempts(paths: dict[str, str], expected: dict[str, str]) -> None:
    """Load each on all ranks; nothing of the engine changes, and every rank hears of it."""
    run = Run(config(3, "bf16"), seed=2, noise=False)
    before = run.fingerprint()
    for kind, path in paths.items():
        with pytest.raises(CheckpointError, match=expected[kind]):
            run.engine.load_checkpoint(path, "x")
        assert not differences(before, run.fingerprint()), kind
    (first, *_) = paths.values()
    assert run.engine.load_checkpoint(os.path.dirname(first)) == (None, None)
    run.step()


def test_no_rank_changes_anything_before_all_have_understood(held: dict[str, files.Content], tmp_path: Path) -> None:
    paths, expected = {}, {}
    for kind in ("a rank is missing", "a truncated file", "a changed bit", "other steps"):
        form, damage, expected[kind] = DAMAGE[kind]
        paths[kind] = str(tmp_path / kind.replace(" ", "-"))
        damage(write(form, held, paths[kind]))
        expected[kind] += "|failed on rank"
    run_ranks(attempts, 2, paths, expected)
