"""Every name of names.toml: served ones are there, with the declared arguments; others give a reason."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
from types import ModuleType
from typing import Any

import pytest
import torch

import shardwise
from shardwise.errors import AbsentNameError
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
