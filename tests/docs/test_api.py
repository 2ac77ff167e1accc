"""The API reference has the public names of each public module, and the members of the engine."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.engine import Engine, PipelineEngine
from shardwise.engine.state_getters import StateGetters

PAGES = {page.stem: page.read_text("utf-8") for page in (Path(__file__).parents[2] / "docs" / "api").glob("*.md")}
USED_BY_OTHER_PACKAGES = {
    "comm": "Group ProcessGroup ReduceOp comms_logger",
    "config": "Config accept",
    "data": "outlive_signals",
    "memory": "Call Journal disk_limit fake_copy fake_optimizer give_back_freed_memory host_limits is_out_of_memory"
    " like_cross_entropy module_bytes shapes_of virtual_bytes",
    "moe": "ExpertGroup bind_experts",
    "optim": "group_shardings is_elementwise_state",
    "utils": "logger",
}
OF_THE_RUNTIME = "around_backward check_stage enable_backward_allreduce inside_no_sync_ctxt pipeline_parallelism"
OF_THE_RUNTIME += " run_stage to_empty train update"


def find(name: str) -> Any:
    """Return the object at a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise AssertionError(f"{name} does not exist")


@pytest.fixture(scope="module")
def shown() -> list[Any]:
    return [find(name) for text in PAGES.values() for name in re.findall(r"^::: (\S+)", text, re.MULTILINE)]


@pytest.mark.parametrize("name", [name for name in shardwise.__all__ if inspect.ismodule(getattr(shardwise, name))])
def test_public_names_of_a_module_are_shown(shown: list[Any], name: str) -> None:
    module = getattr(shardwise, name)
    modules = {value.__name__ for value in shown if inspect.ismodule(value)}
    left_out = USED_BY_OTHER_PACKAGES.get(name, "").split()
    assert name in PAGES
    assert [
        key
        for key in getattr(module, "__all__", ())
        if key not in left_out
        and not any(getattr(module, key) is value for value in shown)
        and getattr(getattr(module, key), "__module__", None) not in modules
    ] == []


@pytest.mark.parametrize("kind", [Engine, PipelineEngine])
def test_members_of_the_engine_are_shown(kind: type[Engine]) -> None:
    bases = {StateGetters, Engine} if kind is Engine else {kind}
    listed = {name for names in re.findall(r"members: \[(.*)\]", PAGES["engine"]) for name in names.split(", ")}
    described = set(re.findall(r"^        (\w+): ", Engine.__doc__ or "", re.MULTILINE)) | {"defaults", "state"}
    members = {name: value for base in bases for name, value in vars(base).items() if not name.startswith("_")}
    aliases = {name for name, value in members.items() if inspect.isfunction(value) and value.__name__ != name}
    aliases = {name for name in aliases if members.get(members[name].__name__) is members[name]}
    assert set(members) - listed - described - aliases - set(OF_THE_RUNTIME.split()) == set()
    assert {name for name in listed if not hasattr(PipelineEngine, name)} == set()
