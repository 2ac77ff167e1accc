"""fp32 weights under the names that existing scripts call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardwise
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger
from shardwise_deepspeed.zero_to_fp32 import (
    LazyTensor,
    StateFile,
    convert_zero_checkpoint_to_fp32_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    get_model_state_file,
    get_optim_files,
    load_state_dict_from_zero_checkpoint,
    main,
)
from tests.checkpoint import deepspeed_files
from tests.checkpoint.job import FROZEN, Model, Run, config
from tests.harness import run_ranks


def make(path: str) -> dict[str, torch.Tensor]:
    run = Run(config(3), seed=1)
    run.step()
    run.engine.save_checkpoint(path, tag="first", client_state={"epoch": 3, "best": torch.ones(2)})
    expected = run.engine.module_state_dict()
    run.step()
    run.engine.save_checkpoint(path)
    return expected


def make_wide(path: str) -> None:
    model = torch.nn.Linear(3, 2)
    model.register_buffer("clock", torch.tensor([1 / 3], dtype=torch.float64))
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    engine, *_ = shardwise.initialize(model=model, config={"train_batch_size": 1, "optimizer": sgd})
    engine.save_checkpoint(path)


def test_a_module_keeps_the_precision_of_its_buffers(tmp_path: Path) -> None:
    run_ranks(make_wide, 1, str(tmp_path))
    model = torch.nn.Linear(3, 2)
    model.weight = torch.nn.Parameter(torch.ones(3, 2).t())
    model.register_buffer("clock", torch.zeros(1, dtype=torch.float64))
    load_state_dict_from_zero_checkpoint(model, tmp_path)
    saved = get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert model.clock.item() == 1 / 3 and torch.equal(model.weight, saved["weight"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    path = tmp_path_factory.mktemp("runs")
    return path, run_ranks(make, 2, str(path))[0]


def test_the_state_dict_is_that_of_the_plain_module(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path, expected = saved
    found = get_fp32_state_dict_from_zero_checkpoint(path, "first")
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype in (torch.float32, torch.int64) and torch.equal(value, expected[name]), name
    assert found["head.weight"] is found["embedding.weight"]
    Model(seed=5).load_state_dict(found, strict=True)
    lazy = get_fp32_state_dict_from_zero_checkpoint(path, "first", exclude_frozen_parameters=True, lazy_mode=True)
    assert set(found) - set(lazy) == set(FROZEN)
    assert all(isinstance(value, LazyTensor) and value.shape == found[name].shape for name, value in lazy.items())
    assert all(torch.equal(value.contiguous(), found[name]) for name, value in lazy.items())
    assert lazy["head.weight"].numel() == 143 and "embedding.weight" in repr(lazy["head.weight"])
    latest = get_fp32_state_dict_from_zero_checkpoint(str(path))
    assert not torch.equal(latest["temperature"], found["temperature"])


def test_a_module_takes_a_checkpoint(
    saved: tuple[Path, dict[str, torch.Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    path, expected = saved
    model = Model(seed=5)
    model.extra = torch.nn.Parameter(torch.ones(2))
    logger.propagate = True
    try:
        assert load_state_dict_from_zero_checkpoint(model, path, "first") is model
    finally:
        logger.propagate = False
    assert "not in the checkpoint: extra" in caplog.text
    values = model.state_dict()
    assert all(torch.equal(values[name], value) for name, value in expected.items())
    model.temperature = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"'temperature' has shape \[\], in the model \[3\]"):
        load_state_dict_from_zero_checkpoint(model, path)


def test_files_and_script(
    saved: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, expected = saved
    convert_zero_checkpoint_to_fp32_state_dict(path, tmp_path / "a", tag="first")
    back = torch.load(tmp_path / "a" / "pytorch_model.bin", weights_only=True)
    assert back.keys() == expected.keys() and all(torch.equal(back[name], value) for name, value in expected.items())
    convert_zero_checkpoint_to_fp32_state_dict(path, tmp_path / "a", "1KB", tag="first")
    names = sorted(file.name for file in (tmp_path / "a").iterdir())
    assert names[0] == "pytorch_model-00001-of-00004.bin" and names[-1] == "pytorch_model.bin.index.json"
    assert len(names) == 5  # and not the file from before
    options = ["-t", "first", "--safe_serialization", "--exclude_frozen_parameters", "-d"]
    with pytest.raises(SystemExit) as end:
        main([str(path), str(tmp_path / "b"), *options])
    shown = capsys.readouterr()
    assert not end.value.code, shown.err
    assert "embedding.weight [13, 11] torch.float32 head.weight" in shown.out
    once = load_file(tmp_path / "b" / "model.safetensors")
    assert set(expected) - set(once) == {*FROZEN, "head.weight"}
    with pytest.raises(SystemExit) as end:
        main([str(path / "never"), str(tmp_path / "b")])
    assert end.value.code == 1 and "no such file or directory" in capsys.readouterr().err


def test_files_of_states_are_made_of_our_checkpoint(saved: tuple[Path, dict[str, torch.Tensor]]) -> None:
    path = saved[0] / "first"
    (file,) = get_optim_files(path)
    assert isinstance(file, StateFile)
    assert torch.load(file, weights_only=True) == {"optimizer_state_dict": {"zero_stage": 3}}
    states = torch.load(get_model_state_file(path, 3), weights_only=True)
    assert torch.equal(states.pop("best"), torch.ones(2))
    expected = {"global_steps": 1, "skipped_steps": 0, "dp_world_size": 2, "mp_world_size": 1, "epoch": 3}
    assert states == expected
    with pytest.raises(CheckpointError, match="was saved with ZeRO stage 3, not 2"):
        get_model_state_file(path, 2)
    with pytest.raises(CheckpointError):
        get_optim_files(saved[0])


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_files_of_states_of_deepspeed_are_found(
    saved: tuple[Path, dict[str, torch.Tensor]], stage: int, tmp_path: Path
) -> None:
    content = deepspeed_files.content_of(str(saved[0] / "first"))
    path = deepspeed_files.write(str(tmp_path), "a", content, stage, 2)
    model = get_model_state_file(path, stage)
    assert Path(model).is_file() and model.endswith("mp_rank_00_model_states.pt")
    if stage == 0:
        with pytest.raises(FileNotFoundError, match="without files of optimizer states"):
            get_optim_files(path)
    else:
        found = [Path(file).name for file in get_optim_files(path)]
        assert found == [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
        (tmp_path / "a" / Path(model).name).unlink()
        with pytest.raises(FileNotFoundError, match="without the first rank's file"):
            get_model_state_file(path, stage)
