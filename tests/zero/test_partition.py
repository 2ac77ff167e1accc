"""Units: each parameter in exactly one, caps respected, blocks kept together, every home hooked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from shardwise.registry import Registry
from shardwise.zero.units.partition import UnitSpec, find_units
from tests.models import GPT


class Own(nn.Module):
    """Parameters of its own around children."""

    def __init__(self, sizes: list[int], children: list[nn.Module]) -> None:
        super().__init__()
        for place, size in enumerate(sizes):
            self.register_parameter(f"own{place}", nn.Parameter(nn.Linear(1, max(size, 1)).weight[:size].detach()))
        for place, child in enumerate(children):
            self.add_module(f"child{place}", child)


@st.composite
def trees(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    if depth == 0:
        return nn.Linear(draw(st.integers(1, 9)), draw(st.integers(1, 9)), bias=draw(st.booleans()))
    children = [draw(trees(depth=depth - 1)) for _ in range(draw(st.integers(0, 3)))]
    kind = draw(st.sampled_from(["list", "sequential", "dict", "own", "empty"]))
    if kind == "list":
        return nn.ModuleList(children)
    if kind == "sequential":
        return nn.Sequential(*children)
    if kind == "dict":
        return nn.ModuleDict({str(place): child for place, child in enumerate(children)})
    return Own(draw(st.lists(st.integers(0, 30), max_size=2)) if kind == "own" else [], children)


def tie(root: nn.Module, draw: st.DataObject) -> None:
    """Make some modules share a parameter, and one module appear twice."""
    linears = [m for m in root.modules() if isinstance(m, nn.Linear)]
    if len(linears) > 1 and draw.draw(st.booleans()):
        first, second = draw.draw(st.sampled_from(linears)), draw.draw(st.sampled_from(linears))
        second.weight = first.weight
    if linears and draw.draw(st.booleans()):
        root.add_module("again", draw.draw(st.sampled_from(linears)))


def units_of(root: nn.Module, cap: int, leaves: tuple[nn.Module, ...] = ()) -> tuple[Registry, list[UnitSpec]]:
    registry = Registry.of(root, groups={id(p): 0 for p in root.parameters()})
    return registry, find_units(root, registry, cap, leaves)


@given(trees(), st.integers(1, 300), st.data())
def test_any_model(root: nn.Module, cap: int, data: st.DataObject) -> None:
    tie(root, data)
    registry, specs = units_of(root, cap)
    assert sorted(t.index for spec in specs for t in spec.tensors) == list(range(len(registry)))
    for spec in specs:
        assert spec.tensors and spec.modules
        assert spec.size <= cap or len([t for t in spec.tensors if t.numel]) == 1, (spec.name, spec.size)
        assert spec.size == sum(t.numel for t in spec.tensors)
    # A module that holds a parameter is, or lies in, a module of the parameter's unit: its calls are seen.
    for spec in specs:
        covered = {id(inner) for module in spec.modules for inner in module.modules()}
        for tensor in spec.tensors:
            parameter = registry.parameters[tensor.index]
            for module in root.modules():
                if any(p is parameter for p in module._parameters.values()):
                    assert id(module) in covered, (spec.name, tensor.name)


@given(trees(), st.integers(1, 60), st.data())
def test_leaves_stay_whole(root: nn.Module, cap: int, data: st.DataObject) -> None:
    candidates = [m for m in root.modules() if m is not root and any(True for _ in m.parameters())]
    if not candidates:
        return
    leaf = data.draw(st.sampled_from(candidates))
    registry, specs = units_of(root, cap, (leaf,))
    inside = {registry.find(p).index for p in leaf.parameters()}  # type: ignore[union-attr]
    homes = [spec for spec in specs if any(t.index in inside for t in spec.tensors)]
    assert len(homes) == 1
    if leaf in homes[0].modules:  # not inside of a block: then nothing is packed with it
        assert {t.index for t in homes[0].tensors} == inside


def test_blocks_of_a_transformer_are_units() -> None:
    _, specs = units_of(GPT(layers=4), 10**9)
    assert [spec.name for spec in specs if spec.name.startswith("blocks")] == [f"blocks.{i}" for i in range(4)]
    sizes = [spec.size for spec in specs]
    assert max(sizes) == sizes[1]  # what lies outside of blocks is packed up to their size
