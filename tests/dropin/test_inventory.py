"""Every name of names.toml: served ones are there, with the declared arguments; others give a reason."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import shardwise
from shardwise.errors import AbsentAttributeError, AbsentNameError
from shardwise.zero.units import released
from shardwise_deepspeed.entries import Alias, Missing, Stub, absent_members, commands, table
from shardwise_deepspeed.modules import PATHS
from tests.dropin.inventory import MEMBERS, SIGNATURES, problem

pytestmark = pytest.mark.usefixtures("installed")

TABLE = table()


def rows(kind: type) -> dict[str, dict[str, Any]]:
    found = {path: {n: e for n, e in entries.items() if isinstance(e, kind)} for path, entries in TABLE.items()}
    return {path: entries for path, entries in found.items() if entries}


def test_served_names_are_there() -> None:
    for path, entries in rows(Alias).items():
        module = importlib.import_module(path)
        assert isinstance(module, ModuleType) and module.__name__ == path
        for name in entries:
            names: dict[str, Any] = {}
            exec(f"from {path} import {name}", names)
            value = getattr(module, name)
            assert name in dir(module)
            assert names[name] is value or names[name] == value, name


@pytest.mark.parametrize("path", sorted(SIGNATURES))
def test_served_names_take_the_arguments_of_deepspeed(path: str) -> None:
    module = importlib.import_module(path)
    assert {
        name: found for name, text in SIGNATURES[path].items() if (found := problem(text, getattr(module, name)))
    } == {}


def test_absent_names_say_why() -> None:
    for path, entries in rows(Missing).items():
        for name, entry in entries.items():
            statement = f"import {path}" if name == "*" else f"from {path} import {name}"
            with pytest.raises(ImportError, match=re.escape(entry.reason)) as error:
                exec(statement)
            assert isinstance(error.value, AbsentNameError)
            if path in PATHS:
                assert not hasattr(importlib.import_module(path), name)
            else:
                with contextlib.suppress(ModuleNotFoundError):  # as of any module whose parent is missing
                    assert importlib.util.find_spec(path) is None


STUBS = {(name, entry): path for path, entries in rows(Stub).items() for name, entry in entries.items()}


def test_stubs_can_be_imported_and_say_why_when_they_are_called() -> None:
    for (name, entry), path in STUBS.items():
        names: dict[str, Any] = {}
        exec(f"from {path} import {name}", names)
        found = names[name]
        assert found is getattr(importlib.import_module(path), name)
        with pytest.raises(AbsentNameError, match=re.escape(f"{name} is not in shardwise ")) as error:
            found("anything", at="all")
        assert str(error.value).endswith(entry.reason)
        assert isinstance(found, type) == (entry.kind in ("class", "exception"))


@pytest.mark.parametrize(
    ("path", "name", "kind"),
    [
        ("deepspeed.inference.v2", "InferenceEngineV2", "class"),
        ("deepspeed.elasticity", "DSElasticAgent", "class"),
        ("deepspeed.inference", "build_hf_engine", "function"),
        ("deepspeed.comm.constants", "NCCL_BACKEND", "value"),
        ("deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset", "valid_dtypes", "value"),
    ],
)
def test_each_kind_of_stub(path: str, name: str, kind: str) -> None:
    module = importlib.import_module(path)
    found, entry = getattr(module, name), TABLE[path][name]
    assert isinstance(entry, Stub) and entry.kind == kind and name in dir(module)
    if kind in ("class", "exception"):
        assert issubclass(found, Exception) == (kind == "exception")
        derived = type("Derived", (found, *([] if kind == "exception" else [torch.nn.Module])), {})
        for cls in (found, derived):
            assert not isinstance(1, cls)
            with pytest.raises(AbsentNameError):
                cls()
            with pytest.raises(AttributeError, match=re.escape(entry.reason)):
                _ = cls.from_anything
        assert getattr(importlib.import_module(found.__module__), name) is found  # so it can be pickled
    elif kind == "function":
        assert inspect.isfunction(found) and found.__name__ == name
    else:
        assert entry.reason in repr(found)
        for use in (bool, str, hash, len, list, int, lambda v: v == 1, lambda v: v + "x", lambda v: {}[v]):
            with pytest.raises(AbsentNameError):
                use(found)
        with pytest.raises(AttributeError):
            _ = found.attribute


def test_a_name_comes_before_a_module_of_its_name() -> None:
    """The import system assigns a module to its parent when it has imported it."""
    both = {(path, name) for path, entries in TABLE.items() for name in entries if f"{path}.{name}" in PATHS}
    assert both == {("deepspeed.utils", "z3_leaf_module"), ("deepspeed.utils", "tensor_fragment")}
    for path, name in both:
        before = getattr(importlib.import_module(path), name)
        assert isinstance(importlib.import_module(f"{path}.{name}"), ModuleType)
        assert getattr(importlib.import_module(path), name) is before and not isinstance(before, ModuleType)


def test_commands_can_be_called() -> None:
    for path, target in commands().items():
        home, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(home), name))
        assert importlib.import_module(path).__spec__.loader.get_code(path)


def subject(path: str) -> Any:
    """Return an object that has the members of a class."""
    import deepspeed

    if path == "parameter":
        parameter = torch.nn.Parameter(torch.zeros(2))
        released.guard(parameter)
        return parameter
    parent, _, name = path.rpartition(".")
    settings = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
    if name == "DeepSpeedEngine":
        return deepspeed.initialize(model=torch.nn.Linear(2, 1), config=settings)[0]
    if name in ("PipelineEngine", "PipelineModule"):
        module = deepspeed.pipe.PipelineModule([torch.nn.Linear(2, 1)], num_stages=1, loss_fn=torch.sub)
        return module if name == "PipelineModule" else deepspeed.initialize(model=module, config=settings)[0]
    if name == "DeepSpeedAccelerator":
        return deepspeed.get_accelerator()
    if name == "MonitorMaster":
        home = importlib.import_module("deepspeed.monitor.config")
        return importlib.import_module(parent).MonitorMaster(home.get_monitor_config({}))
    cls = getattr(importlib.import_module(parent.replace("deepspeed.zero", "deepspeed.runtime.zero")), name)
    return cls() if name in ("CommsLogger", "CPUAdamBuilder") else cls


@pytest.mark.parametrize("path", sorted(MEMBERS))
def test_members_are_there_or_not(path: str) -> None:
    import deepspeed

    holder = subject(path)
    wrong = {name for name in MEMBERS[path] if not hasattr(holder, name)}
    assert not wrong
    wrong = {name for name, text in MEMBERS[path].items() if text is not None and problem(text, getattr(holder, name))}
    assert not wrong
    with contextlib.suppress(KeyError):
        assert not {name for name in absent_members(path) if hasattr(holder, name)}
    if isinstance(holder, shardwise.Engine):
        assert isinstance(holder, deepspeed.DeepSpeedEngine)
        holder.destroy()


@pytest.mark.parametrize("path", ["deepspeed.DeepSpeedEngine", "deepspeed.runtime.pipe.module.PipelineModule"])
def test_absent_members_say_why(path: str) -> None:
    holder = subject(path)
    for name, reason in absent_members(path).items():
        with pytest.raises(AttributeError, match=re.escape(f".{name} is not in shardwise")) as error:
            getattr(holder, name)
        assert isinstance(error.value, AbsentNameError) and str(error.value).endswith(reason)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = holder.nonsense
    if isinstance(holder, shardwise.Engine):
        holder.module.losses = [1.0]  # a module's own attribute of such a name is the module's
        assert holder.losses == [1.0]
        holder.destroy()


# -- DeepSpeed's own modules and engine --------------------------------------------------------------------------------

SURFACE: dict[str, Any] = json.loads((Path(__file__).parent / "surface.json").read_text())
"""Functions and classes that the modules of DeepSpeed 0.14.4 and 0.19.8 define, and the members of its engine."""


def test_every_name_of_a_module_can_be_imported_or_says_why_not() -> None:
    missing = []
    for path, name in ((path, name) for path, names in SURFACE["modules"].items() for name in names):
        try:
            getattr(importlib.import_module(path), name)
        except AbsentNameError:
            continue
        except (AttributeError, ImportError) as error:
            missing.append(f"{path}.{name}: {error}")
    assert not missing


def test_every_member_of_the_engine_is_there_or_says_why_not() -> None:
    engine, missing = subject("deepspeed.DeepSpeedEngine"), []
    for name in SURFACE["engine"]:
        try:
            getattr(engine, name)
        except AbsentAttributeError as error:
            assert f"engine.{name} is not in shardwise" in str(error)
        except AttributeError as error:
            missing.append(f"{name}: {error}")
    engine.destroy()
    assert not missing


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_members_of_the_optimizer(stage: int) -> None:
    import deepspeed

    fp16 = {"enabled": True, "initial_scale_power": 7}
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "fp16": fp16,
        "zero_optimization": {"stage": stage},
    }
    model = torch.nn.Linear(4, 1)
    engine, optimizer, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    optimizer.backward(engine(torch.ones(2, 4).half()).float().mean())
    optimizer.update_master_grads()
    engine.step()
    assert optimizer.loss_scale == optimizer.cur_scale == optimizer.get_loss_scale() == 128
    assert optimizer.loss_scaler.loss_scale == optimizer.loss_scaler.cur_scale == 128 and optimizer.dynamic_loss_scale
    assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0
    optimizer.set_lr(0.25)
    assert optimizer.get_lr() == 0.25 == engine.get_lr()[0]
    if stage < 3:
        model.weight.data.fill_(2.0)
        optimizer.reload_model_params()
        engine.backward(engine(torch.zeros(2, 4).half()).float().mean())
        engine.step()
        assert torch.equal(model.weight.detach(), torch.full_like(model.weight, 2.0))
    assert not hasattr(optimizer, "bit16_groups")
    with pytest.raises(AttributeError, match=r"fp32_groups_flat is not in shardwise .*safe_get_full_fp32_param"):
        _ = optimizer.fp32_groups_flat
    engine.destroy()
    assert not hasattr(optimizer, "loss_scale")
    assert not hasattr(torch.optim.SGD(torch.nn.Linear(1, 1).parameters()), "loss_scale")


def test_members_of_the_loader_and_names_of_saving(tmp_path: Path) -> None:
    import deepspeed

    model = torch.nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(torch.ones(8, 4))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam"}}
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=config
    )
    loader.data_sampler.set_epoch(1)
    assert loader.data_sampler is loader.sampler and loader.num_local_io_workers == 0 and loader.collate_fn is None
    assert engine.store_checkpoint(str(tmp_path)) and list(tmp_path.iterdir())
    with pytest.raises(AttributeError, match=r"_get_ckpt_name is not in .*engine\.save_checkpoint"):
        engine._get_ckpt_name("dir", "tag")
    with pytest.raises(AttributeError, match=r"engine\.grid is not in .*only the engine of a pipeline"):
        _ = engine.grid
    engine.destroy()
