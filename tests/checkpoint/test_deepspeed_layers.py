"""Layer files and universal checkpoints of DeepSpeed are read into any layout, and universal ones written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.checkpoint import Checkpoint
from shardwise.checkpoint.directory import StagingDirectory
from shardwise.checkpoint.formats.deepspeed import DeepSpeedCheckpoint
from shardwise.checkpoint.formats.universal_writer import write_universal
from shardwise.errors import CheckpointError
from shardwise.pipe import LayerSpec
from tests.checkpoint import deepspeed_files as files
from tests.checkpoint import deepspeed_layers as made
from tests.checkpoint.deepspeed_models import PLAIN
from tests.checkpoint.job import Run as PlainRun
from tests.checkpoint.job import config, first_rank
from tests.checkpoint.weights import command
from tests.harness import on_ranks, run_ranks, thorough
from tests.pipeline.training import Block, Setting, engine_of, layers, train, untied

ENDS, TIED = [3, 7], {"words": 0}
"""Layers of two stages: embedding and blocks, blocks, norm and head."""


class Scaled(Block):
    """A block with a buffer."""

    scale: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("scale", torch.ones(1))


def small() -> list[Any]:
    """Return the tied layers, one of them with a buffer."""
    found = layers(4)
    found[1] = LayerSpec(Scaled, 8)
    return found


def small_untied() -> list[Any]:
    """Return layers with a head of its own."""
    return [untied()[0], *small()[1:-1], untied()[-1]]


def saved_by(path: str, made: Callable[[], list[Any]], dtype: str = "fp32") -> None:
    """Train a PipelineModule in one process, and save."""
    train(Setting(1, zero=1, steps=2, made=made, config={"bf16": {"enabled": dtype == "bf16"}}), save=path)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return checkpoints of PipelineModules."""
    found = {name: str(tmp_path_factory.mktemp(name)) for name in ("tied", "untied", "bf16")}
    run_ranks(saved_by, 1, found["tied"], small)
    run_ranks(saved_by, 1, found["untied"], small_untied)
    run_ranks(saved_by, 1, found["bf16"], small, "bf16")
    return {name: os.path.join(path, "global_step2") for name, path in found.items()}


def assert_same(path: str, ours: str, buffers: bool = True) -> DeepSpeedCheckpoint:
    """Compare all tensors, step counts and counters with those of a checkpoint of shardwise."""
    saved = DeepSpeedCheckpoint(path)
    saved.verify(saved.blocks())
    with Checkpoint(ours) as expected:
        wanted = {(t.name, t.kind): t for t in expected.manifest.tensors if buffers or t.kind != "buffer"}
        found = {(t.name, t.kind): t for t in saved.manifest.tensors}
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert torch.equal(saved.read(found[key]), expected.read(tensor)), key
            assert (found[key].trainable, found[key].group) == (tensor.trainable, tensor.group), key
        theirs, own = saved.manifest.optimizer, expected.manifest.optimizer
        assert theirs is not None and own is not None
        for name, values in own["values"].items():
            assert float(theirs["values"][name]["step"]) == float(expected.decode(values["step"]))
        assert saved.manifest.counters["global_steps"] == expected.manifest.counters["global_steps"]
    return saved


# -- layer files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "stage", "options"),
    [
        ("tied", 1, {"tied": TIED}),
        ("untied", 1, {}),
        ("untied", 0, {}),
        ("bf16", 1, {"tied": TIED, "named": False}),
    ],
)
@pytest.mark.parametrize("world", [1, 2])
def test_layer_files_are_joined(
    source: str, stage: int, options: dict[str, Any], world: int, sources: dict[str, str], tmp_path: Path
) -> None:
    content = files.content_of(sources[source])
    path = made.write_layers(str(tmp_path), "x", content, ENDS, stage, world, **options)
    with assert_same(path, sources[source]) as saved:
        assert saved.manifest.layout["world"] == 2 * world


def test_stage_0_without_names_of_shared_layers_loads_weights_alone(sources: dict[str, str], tmp_path: Path) -> None:
    content = files.content_of(sources["tied"])
    path = made.write_layers(str(tmp_path), "x", content, ENDS, 0, 2, tied=TIED)
    with DeepSpeedCheckpoint(path) as saved, Checkpoint(sources["tied"]) as ours:
        assert saved.manifest.optimizer is not None
        assert "shared or frozen layers" in saved.manifest.optimizer["refused"]
        for tensor in ours.manifest.of_module():
            found = saved.find(tensor.name, tensor.kind)
            assert torch.equal(saved.read(found), ours.read(tensor))


def go_on(setting: Setting, load: str) -> list[Any]:
    """Load and train; return losses and parameters."""
    run = train(setting, first=2, load=load)
    return [run.losses, run.parameters]


@pytest.mark.parametrize("layout", [thorough((1, 2, 3)), (2, 2, 1), thorough((2, 4, 2))])
def test_training_goes_on_from_layer_files_and_universal_checkpoints(
    layout: tuple[int, int, int], sources: dict[str, str], tmp_path: Path
) -> None:
    stages, ranks, zero = layout
    content = files.content_of(sources["tied"])
    theirs = {
        "layers": made.write_layers(str(tmp_path / "layers"), "x", content, ENDS, 1, 2, tied=TIED),
        "universal": str(tmp_path / "universal"),
    }
    with Checkpoint(sources["tied"]) as saved:
        write_universal(saved, theirs["universal"], "x", stages=True, tied=TIED)
    setting = Setting(stages, zero=zero, steps=2, made=small)
    expected = run_ranks(go_on, ranks, setting, os.path.dirname(sources["tied"]))
    for name in theirs:
        on = setting if name == "layers" else replace(setting, config={"checkpoint": {"load_universal": True}})
        for (losses, parameters), (own, others) in zip(
            expected, run_ranks(go_on, ranks, on, str(tmp_path / name)), strict=True
        ):
            assert own == losses
            assert all(torch.equal(others[n], value) for n, value in parameters.items())


@on_ranks(1)
def test_another_number_of_layers_is_refused_by_name(sources: dict[str, str], tmp_path: Path) -> None:
    made.write_layers(str(tmp_path), "x", files.content_of(sources["tied"]), ENDS, 1, 2, tied=TIED)
    engine = engine_of(Setting(1, zero=1, made=layers))
    with pytest.raises(CheckpointError, match="another model") as caught:
        engine.load_checkpoint(tmp_path, "x")
    assert "layers.6" in str(caught.value)


# -- universal checkpoints ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a checkpoint of a plain model with a tied head, a frozen parameter, buffers and two groups."""
    path = tmp_path_factory.mktemp("plain")
    PLAIN.saved(path, "fp32")
    return str(path / "a")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_universal_checkpoints_are_read(stage: int, plain: str, tmp_path: Path) -> None:
    path = made.write_universal(str(tmp_path), "uni", files.content_of(plain), stage)
    with assert_same(path, plain) as saved:
        assert saved.stage == stage


def test_universal_checkpoints_of_stages_are_read(sources: dict[str, str], tmp_path: Path) -> None:
    content = files.content_of(sources["tied"])
    path = made.write_universal(str(tmp_path), "uni", content, 1, ends=ENDS, tied=TIED)
    assert_same(path, sources["tied"], buffers=False).close()  # the format has no buffers of stages


@pytest.mark.parametrize(("source", "stages"), [("plain", False), ("tied", True), ("bf16", True)])
def test_universal_checkpoints_are_written(
    source: str, stages: bool, plain: str, sources: dict[str, str], tmp_path: Path
) -> None:
    ours = plain if source == "plain" else sources[source]
    with Checkpoint(ours) as saved:
        assert write_universal(saved, tmp_path, "uni", stages=stages, tied=TIED if stages else None) == []
    assert (tmp_path / "latest_universal").read_text() == "uni"
    assert sorted(os.listdir(tmp_path)) == ["latest_universal", "uni"]
    folder = "tied_modules.words.weight" if stages else "embedding.weight"
    value = torch.load(tmp_path / "uni" / "zero" / folder / "fp32.pt", weights_only=True)
    assert value["param"].dtype is torch.float32 and value["param"].dim() == 2
    # DeepSpeed looks for one of these, at stages 1 and 2 or at stage 3.
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        assert torch.load(tmp_path / "uni" / name, weights_only=True)["global_steps"] == 2
    assert_same(str(tmp_path / "uni"), ours).close()


def test_a_universal_checkpoint_that_fails_leaves_nothing(plain: str, tmp_path: Path) -> None:
    """What a killed process has left goes, too; a directory that appears meanwhile stays as it is."""
    killed = StagingDirectory(str(tmp_path), "uni")
    (Path(killed.path) / "zero" / "w").mkdir(parents=True)
    killed._unlock()

    def appear(done: int, size: int) -> None:
        (tmp_path / "uni").mkdir(exist_ok=True)
        (tmp_path / "uni" / "theirs").touch()

    with Checkpoint(plain) as saved, pytest.raises(CheckpointError, match="cannot be written"):
        write_universal(saved, tmp_path, "uni", progress=appear)
    assert os.listdir(tmp_path) == ["uni"] and os.listdir(tmp_path / "uni") == ["theirs"]


@on_ranks(2)
def test_the_configuration_chooses_the_universal_checkpoint(plain: str, tmp_path: Path) -> None:
    """`latest_universal` is used by itself, and with the key where there is a `latest` too."""
    theirs, both = str(tmp_path / "theirs"), str(tmp_path / "both")

    def put() -> None:
        shutil.copytree(os.path.dirname(plain), both)
        with Checkpoint(plain) as saved:
            write_universal(saved, theirs, "uni")
            write_universal(saved, both, "uni")

    first_rank(put)
    run = PlainRun(config(2), seed=2, noise=False)
    assert run.load(theirs)[0] == os.path.join(theirs, "uni")
    assert run.load(both)[0] == os.path.join(both, "a")
    on = PlainRun({**config(2), "checkpoint": {"load_universal": True}}, seed=2, noise=False)
    assert on.load(both)[0] == os.path.join(both, "uni")
    with pytest.raises(CheckpointError, match="no file 'latest_universal'"):
        on.load(tmp_path)
    assert on.load(both, "a")[0] == os.path.join(both, "a")


def test_the_command_writes_and_imports(plain: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("export-universal", os.path.dirname(plain), str(tmp_path / "uni"), "--name", "u") == 0
    assert "parameters, step 2" in capsys.readouterr().out
    assert command("import-deepspeed", str(tmp_path / "uni"), str(tmp_path / "back"), "--name", "b") == 0
    with Checkpoint(plain) as ours, Checkpoint(str(tmp_path / "back" / "b")) as back:
        for tensor in ours.manifest.tensors:
            assert torch.equal(back.read(back.find(tensor.name, tensor.kind)), ours.read(tensor))
    assert command("export-universal", plain, str(tmp_path / "uni"), "--name", "u")  # exists
    assert "exists already" in capsys.readouterr().err
    assert command("export-universal", plain, str(tmp_path / "uni"), "--name", "v", "--stages")
    assert "expected the name of a layer" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path / "uni")) == ["latest_universal", "u"]


def test_other_optimizers_are_not_written(tmp_path: Path) -> None:
    PLAIN.saved(tmp_path / "ours", "fp32", "SGD")
    with Checkpoint(str(tmp_path / "ours" / "a")) as saved, pytest.raises(CheckpointError, match="the state of Adam"):
        write_universal(saved, tmp_path / "theirs", "uni")
    assert not os.path.exists(tmp_path / "theirs" / "uni")
