"""Configurations of the shapes in which people write them for DeepSpeed: which start, and which keys are ignored.

`shapes.json` has one row for each: what DeepSpeed's own parser does with it ("accepts": 0.19.8; "accepted before":
0.14.4; "refuses": both, or the engine where it builds the optimizer), and what happens here, on one rank. `later` marks
features of later work, `misspelt` names that are one edit from a known one. `realistic.json` has configurations in the
forms of public repositories of 2020 to 2026, on two ranks, with the keys that are ignored or refused.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.config import accept, assume, resolve
from shardwise.errors import ConfigError
from shardwise.utils.logging import warn_once
from tests.harness.tables import tables

HERE = Path(__file__).parent
SHAPES: list[dict[str, Any]] = json.loads((HERE / "shapes.json").read_text())
REALISTIC: list[dict[str, Any]] = json.loads((HERE / "realistic.json").read_text())


@pytest.mark.parametrize("shape", [*SHAPES, *REALISTIC], ids=lambda shape: shape.get("style") or shape["name"])
def test_a_shape_starts_or_is_refused(shape: dict[str, Any]) -> None:
    before = json.dumps(shape["config"])
    try:
        facts = assume(accept(shape["config"]))[0] if shape in REALISTIC else None
        found = resolve(accept(shape["config"]), world_size=2 if shape in REALISTIC else 1, facts=facts)
    except ConfigError as error:
        assert sorted({problem.path for problem in error.problems}) == shape.get("refused"), error
    else:
        assert sorted(note.path for note in found.ignored) == shape.get("ignored")
        messages = found.log_messages()
        assert all(sum(f"`{path}`" in text for text in messages) == 1 for path in shape["ignored"])
        assert found.written == shape["config"]
    assert json.dumps(shape["config"]) == before


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.get("ignored")], ids=lambda shape: shape["style"])
def test_the_strict_reader_refuses_unknown_keys(shape: dict[str, Any]) -> None:
    """`shardwise.initialize` and `shardwise check --strict`; values that it reads in the same way are no mistakes."""
    unknown = [
        note for note in accept(shape["config"]).ignored if "no key of" in note.reason or "comment" in note.reason
    ]
    if unknown:
        with pytest.raises(ConfigError) as error:
            resolve(shape["config"], world_size=1)
        assert {note.path for note in unknown} <= {problem.path for problem in error.value.problems}


@pytest.mark.parametrize(("config", "path", "wanted"), tables(__file__)["hints"])
def test_hints_of_the_strict_reader_name_the_cause(config: dict[str, Any], path: str, wanted: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve({"train_batch_size": 1, **config})
    (problem,) = error.value.problems
    assert problem.path == path and wanted in problem.message


def test_an_engine_starts_with_one_warning_and_trains_as_without_the_keys(
    installed: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deepspeed

    monkeypatch.setattr(logging.getLogger("shardwise"), "propagate", True)
    warn_once.cache_clear()
    plain = {
        "train_batch_size": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 2},
    }
    written = {
        **plain,
        "seed": 1,
        "_comment": "x",
        "optimizer": {**plain["optimizer"], "weight_decay": 0.5},  # type: ignore[dict-item]
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "overlap_comm": True},
        "checkpoint": {"use_node_local_storage": True},
    }
    weights = []
    for config in (plain, written):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 1)
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        assert engine.config == config
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
        weights.append(model.weight.detach().clone())
        engine.destroy()
    assert torch.equal(*weights)
    (warning,) = {record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING}
    for path in ("seed", "_comment", "optimizer.weight_decay", "zero_optimization.offload_param"):
        assert f"`{path}`" in warning
    for path in ("zero_optimization.overlap_comm", "checkpoint.use_node_local_storage"):
        assert f"`{path}`" in warning


def test_values_are_read_with_their_meaning() -> None:
    def read(config: dict[str, Any]) -> Any:
        return resolve(accept({"train_batch_size": 1, **config})).config

    assert read({"fp16": {"enabled": True, "min_loss_scale": 0}}).fp16.min_loss_scale == 2.0**-24
    assert read({"fp16": {"enabled": True, "loss_scale": "dynamic"}}).fp16.loss_scale == 0
    assert read({"gradient_clipping": -1}).gradient_clipping == 0
    assert read({"steps_per_print": "inf"}).steps_per_print is None
    assert read({"zero_optimization": {"stage": 3, "sub_group_size": 0}}).zero_optimization.sub_group_size > 0
    disk = {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    assert read({"zero_optimization": disk}).zero_optimization.offload_optimizer.device == "cpu"
    off = read({"fp16": {"enabled": False, "loss_scale": "x", "hysteresis": 4}}).fp16
    assert (off.loss_scale, off.hysteresis) == (0, 4)


def test_a_size_switches_tensor_parallelism_on() -> None:
    (note,) = accept({"tensor_parallel": {"autotp_size": 2, "tp_size": 2}}).ignored
    assert note.path == "tensor_parallel.tp_size" and "`tensor_parallel.tp.tp_size`" in note.reason


def test_a_stage_that_is_chosen_later_keeps_the_keys_of_every_stage() -> None:
    zero = {
        "stage": "auto",
        "offload_optimizer": {"device": "auto", "pin_memory": True},
        "stage3_max_live_parameters": 9,
    }
    document = accept({"train_batch_size": 8, "zero_optimization": zero})
    assert document.data["zero_optimization"] == zero
    found = resolve(document)
    assert not found.ignored and not found.no_effect


def test_a_pipeline_is_on_without_a_switch() -> None:
    pipeline = {"stages": 2, "activation_checkpoint_interval": -1, "chunk": 2, "seed_layers": True}
    with pytest.raises(ConfigError) as error:
        resolve(accept({"train_batch_size": 8, "pipeline": pipeline}), world_size=2)
    paths = sorted(problem.path for problem in error.value.problems)
    assert paths == ["pipeline.activation_checkpoint_interval", "pipeline.chunk"]


def test_the_address_of_the_schema_is_no_unknown_key() -> None:
    document = accept({"$schema": "https://example.org/schema.json", "train_batch_size": 8})
    assert not document.ignored and not resolve(document).ignored
