"""Every name of the table: served ones are there, of the declared kind and signature; others say why there is nothing
behind them, when they are used or when they are imported."""

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
from shardwise.dropin.entries import Alias, Missing, Stub
from shardwise.dropin.members import MEMBERS, PARAMETER
from shardwise.dropin.modules import PATHS
from shardwise.dropin.table import MAINS, TABLE
from shardwise.errors import AbsentNameError
from shardwise.zero.units import released

pytestmark = pytest.mark.usefixtures("installed")


def rows(kind: type) -> dict[str, dict[str, Any]]:
    found = {path: {n: e for n, e in entries.items() if isinstance(e, kind)} for path, entries in TABLE.items()}
    return {path: entries for path, entries in found.items() if entries}


SERVED, RAISING, ABSENT = rows(Alias), rows(Stub), rows(Missing)


def problem(declared: str, target: Any) -> str | None:
    """Say where a target takes other arguments than its row promises: names, order and defaults."""
    function = eval(f"lambda {declared[1:-1]}: None")  # the table's own text
    wanted = inspect.signature(function).parameters
    have = inspect.signature(target).parameters
    for name, parameter in wanted.items():
        if name not in have:
            return f"no argument {name}"
        if parameter.default is parameter.empty:
            continue
        if parameter.default is not ... and parameter.default != have[name].default:
            return f"{name} has the default {have[name].default!r}"
        if parameter.default is ... and have[name].default is inspect.Parameter.empty:
            return f"{name} has no default"
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    order = [name for name, p in have.items() if p.kind in positional]
    promised = [name for name in wanted if name in order]
    if order[: len(promised)] != promised:
        return f"its order is {order}"
    more = {n: p for n, p in have.items() if n not in wanted and p.default is inspect.Parameter.empty}
    needed = [n for n, p in more.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return f"it needs {needed}, too" if needed else None


@pytest.mark.parametrize("path", sorted(SERVED))
def test_served_names_are_there(path: str) -> None:
    module = importlib.import_module(path)
    assert isinstance(module, ModuleType) and module.__name__ == path
    for name, entry in SERVED[path].items():
        value = getattr(module, name)
        assert name in dir(module)
        if entry.kind == "class":
            assert isinstance(value, type), name
        elif entry.kind == "function":
            assert inspect.isroutine(value), name
        elif entry.kind == "module":
            assert isinstance(value, ModuleType) and value.__name__ == entry.target
        else:
            assert not isinstance(value, (type, ModuleType)), name
        names: dict[str, Any] = {}
        exec(f"from {path} import {name}", names)
        assert names[name] is value or names[name] == value, name
        if entry.signature is not None:
            found = problem(entry.signature, value)
            assert found is None, f"{path}.{name}: {found}"


@pytest.mark.parametrize("path", sorted(ABSENT))
def test_absent_names_say_why(path: str) -> None:
    for name, entry in ABSENT[path].items():
        statement = f"import {path}" if name == "*" else f"from {path} import {name}"
        with pytest.raises(ImportError, match=re.escape(entry.reason)) as error:
            exec(statement)
        assert isinstance(error.value, AbsentNameError)
        assert entry.probed_by, f"{path}.{name}: who takes an ImportError for an answer?"
        if path in PATHS:
            assert not hasattr(importlib.import_module(path), name)
        else:
            with contextlib.suppress(ModuleNotFoundError):  # which is the answer where the parent is missing, too
                assert importlib.util.find_spec(path) is None


@pytest.mark.parametrize("path", sorted(RAISING))
def test_names_that_raise_can_be_imported_and_say_why_when_they_are_used(path: str) -> None:
    module = importlib.import_module(path)
    for name, entry in RAISING[path].items():
        names: dict[str, Any] = {}
        exec(f"from {path} import {name}", names)
        found = names[name]
        assert found is getattr(module, name) and name in dir(module)
        reason = re.escape(f"{name} is not in shardwise {shardwise.__version__} ") + ".*" + re.escape(entry.reason)
        with pytest.raises(AbsentNameError, match=reason):
            found("anything", at="all")
        if entry.kind == "exception":
            assert issubclass(found, Exception)
        if entry.kind in ("class", "exception"):
            derived = type("Derived", (found, *([] if entry.kind == "exception" else [torch.nn.Module])), {})
            for cls in (found, derived):
                assert isinstance(cls, type) and not isinstance(1, cls)
                with pytest.raises(AbsentNameError, match=reason):
                    cls()
                with pytest.raises(AttributeError, match=reason):
                    _ = cls.from_anything
            assert getattr(importlib.import_module(found.__module__), name) is found  # so it can be pickled
        elif entry.kind == "function":
            assert inspect.isfunction(found) and found.__name__ == name
        else:
            assert entry.reason in repr(found)
            for use in (bool, str, hash, len, list, int, lambda v: v == 1, lambda v: v + "x", lambda v: {}[v]):
                with pytest.raises(AbsentNameError, match=reason):
                    use(found)
            with pytest.raises(AttributeError, match=reason):
                _ = found.attribute


def test_the_check_of_signatures_sees_differences() -> None:
    def target(a: int, b: int = 1, *, c: int = 2) -> None: ...

    assert problem("(a, b=1, c=2)", target) is None
    assert problem("(a, b=..., c=2)", target) is None
    for wrong in ("(a, b=2)", "(a, d=1)", "(a=...)", "(b=1, a=...)"):
        assert problem(wrong, target) is not None, wrong


def test_a_name_comes_before_a_module_of_its_name() -> None:
    """The import system assigns a module to its parent when it has imported it."""
    both = {(path, name) for path, entries in TABLE.items() for name in entries if f"{path}.{name}" in PATHS}
    assert both == {("deepspeed.utils", "z3_leaf_module"), ("deepspeed.utils", "tensor_fragment")}
    for path, name in both:
        before = getattr(importlib.import_module(path), name)
        assert isinstance(importlib.import_module(f"{path}.{name}"), ModuleType)
        assert getattr(importlib.import_module(path), name) is before and not isinstance(before, ModuleType)


def test_what_python_m_runs_can_be_called() -> None:
    for path, target in MAINS.items():
        home, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(home), name))
        assert importlib.import_module(path).__spec__.loader.get_code(path)


def test_no_reason_is_left_without_words() -> None:
    reasons = [e.reason for table in (RAISING, ABSENT) for es in table.values() for e in es.values()]
    assert all(len(reason) > 15 and not reason.endswith(".") for reason in reasons)


def subject(path: str) -> Any:
    """Something that has the members of a class."""
    if path == PARAMETER:
        parameter = torch.nn.Parameter(torch.zeros(2))
        released.guard(parameter)
        return parameter
    parent, _, name = path.rpartition(".")
    if name == "DeepSpeedEngine":
        model = torch.nn.Linear(2, 1)
        settings = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
        return importlib.import_module("deepspeed").initialize(model=model, config=settings)[0]
    if name in ("PipelineEngine", "PipelineModule"):
        layers = [torch.nn.Linear(2, 1)]
        module = importlib.import_module("deepspeed.pipe").PipelineModule(layers, num_stages=1, loss_fn=torch.sub)
        settings = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}}
        deepspeed = importlib.import_module("deepspeed")
        return module if name == "PipelineModule" else deepspeed.initialize(model=module, config=settings)[0]
    if name == "DeepSpeedAccelerator":
        return importlib.import_module("deepspeed").get_accelerator()
    if name == "MonitorMaster":
        home = importlib.import_module("deepspeed.monitor.config")
        return importlib.import_module(parent).MonitorMaster(home.get_monitor_config({}))
    cls = getattr(importlib.import_module(parent.replace("deepspeed.zero", "deepspeed.runtime.zero")), name)
    return cls() if name in ("CommsLogger", "CPUAdamBuilder") else cls


@pytest.mark.parametrize("path", sorted(MEMBERS))
def test_members_are_there_or_not(path: str) -> None:
    holder = subject(path)
    wrong = []
    for name, entry in MEMBERS[path].items():
        if isinstance(entry, Missing):
            wrong += [f"{name} is there"] if hasattr(holder, name) else []
        elif not hasattr(holder, name):
            wrong.append(f"{name} is not there")
        elif entry.signature is not None and (found := problem(entry.signature, getattr(holder, name))):
            wrong.append(f"{name}: {found}")
    assert not wrong
    if isinstance(holder, shardwise.Engine):
        holder.destroy()
