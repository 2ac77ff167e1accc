"""zero.Init: models built sharded have the values, shapes and random numbers of plain construction."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import ReleasedParameterError, UsageError
from shardwise.zero.units import released
from tests.harness import of_all_ranks, on_ranks
from tests.harness.logs import logged
from tests.harness.training import Setting, config_of, digest, masters, start, take_steps
from tests.models import CASES, GPT, MixedTypes, OddMLP

STAGE3 = config_of(3, rows=1)


@on_ranks(2)
def test_no_groups_are_left_behind() -> None:
    """Process groups before, and after each of three models that were built, wrapped, ended, and wrapped in vain."""
    counts = [len(dist.distributed_c10d._world.pg_map)]
    for _ in range(3):
        with shardwise.zero.Init(config_dict_or_path=STAGE3):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine, *_ = shardwise.initialize(model=model, config=STAGE3)
        engine(torch.ones(1, 4))
        engine.destroy()
        with pytest.raises(UsageError, match="no optimizer whose"):
            shardwise.initialize(model=model, config=STAGE3, lr_scheduler=3)
        counts.append(len(dist.distributed_c10d._world.pg_map))
    assert len(set(counts)) == 1


class Initialised(nn.Module):
    """Initialises in every way that scripts use: nn.init, .data, apply, indexing, tying, buffers from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2))
        self.head = nn.Linear(6, 11, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(3, 0))
        self.head.weight = self.tokens.weight
        self.apply(self.initialise)
        nn.init.orthogonal_(self.layers[1][0].weight)
        with torch.no_grad():
            self.scale.fill_(0.5).mul_(3)
            self.layers[0][0].bias[2] = 7.0
            self.layers[0][2].weight.copy_(self.layers[0][2].weight * 2 + self.layers[1][2].weight)
        self.layers[1][2].bias.data = torch.arange(6.0)
        self.register_buffer("norm", self.tokens.weight.detach().norm())
        for name, parameter in self.named_parameters():
            if name.endswith("0.bias"):
                nn.init.constant_(parameter, 0.25)

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, gain=0.5)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.02)
            module.weight.data[0].zero_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tokens(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h) * self.scale + self.empty.sum()


def shapes(model: nn.Module) -> list[Any]:
    return [(n, tuple(p.shape), p.dtype, p.numel(), p.dim(), p.requires_grad) for n, p in model.named_parameters()]


@pytest.mark.parametrize(("kind", "world_seed"), [(Initialised, True), (MixedTypes, False)])
@on_ranks(3)
def test_values_shapes_and_random_numbers_are_those_of_plain_construction(
    kind: type[nn.Module], world_seed: bool
) -> None:
    torch.manual_seed(4)
    plain, drawn = kind(), torch.rand(())
    torch.manual_seed(4 + (0 if world_seed else dist.get_rank()))
    with shardwise.zero.Init():
        model = kind()
        assert shapes(model) == shapes(plain)
    found = torch.rand(())
    assert shapes(model) == shapes(plain)
    with shardwise.zero.GatheredParameters(list(model.parameters())):
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
        assert shapes(model) == shapes(plain)
    if world_seed or dist.get_rank() == 0:
        assert found == drawn
        assert all(map(torch.equal, model.buffers(), plain.buffers()))


@contextmanager
def watched_construction(seen: list[set[int]]) -> Iterator[None]:
    """Note, whenever a parameter is registered, which modules have whole parameters."""
    homes: dict[int, tuple[weakref.ref[Any], int]] = {}
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None:
            homes[id(param)] = (weakref.ref(param), id(module))
        alive = [(ref(), home) for ref, home in homes.values()]
        seen.append({home for p, home in alive if p is not None and not released.is_released(p)})

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


@on_ranks(2)
def test_at_most_one_modules_parameters_are_whole_at_a_time() -> None:
    seen: list[set[int]] = []
    with shardwise.zero.Init(), watched_construction(seen):
        model = Initialised()
    # What is left of a sharded parameter is its shape on one element, and this rank's part.
    with torch._C.DisableTorchFunctionSubclass():
        left = sum(p.untyped_storage().nbytes() for p in model.parameters())
    modules = max(len(homes) for homes in seen)
    elements = left // 4 - sum(1 for _ in model.parameters())
    assert modules == 1
    assert elements == 0


# -- training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "name", "cap"), [("meta", "gpt", None), ("init", "odd_mlp", 50)])
@on_ranks(2)
def test_training_goes_on_as_with_a_plain_model(way: str, name: str, cap: int | None) -> None:
    case, digests = CASES[name], set()
    for how in ("plain", way):
        torch.manual_seed(7)
        with shardwise.zero.Init(enabled=how == "init"), torch.device("meta" if how == "meta" else "cpu"):
            model = case.build()
        engine = start(case, Setting(stage=3, cap=cap, optimizer="AdamW", lr=1e-2), model)
        take_steps(engine, case, range(2))
        digests.add(digest(list(masters(model).values())))
        engine.destroy()
        assert all(type(p) is nn.Parameter and not p.is_meta for p in model.parameters())
    assert len(digests) == 1


@on_ranks(2)
def test_parameters_may_be_built_in_16_bits() -> None:
    with shardwise.zero.Init(dtype=torch.bfloat16):
        model = GPT()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    engine = start(CASES["gpt"], Setting(stage=3, precision="bf16"), model)
    take_steps(engine, CASES["gpt"], range(2))
    assert {value.dtype for value in masters(model).values()} == {torch.float32}


@on_ranks(2)
def test_an_existing_module_is_converted_at_once() -> None:
    model = OddMLP()
    values = {n: p.detach().clone() for n, p in model.named_parameters()}
    shardwise.zero.Init(module=model, config_dict_or_path=STAGE3)
    assert all(released.is_released(p) for p in model.parameters())
    with shardwise.zero.GatheredParameters(list(model.parameters())):
        assert all(torch.equal(p, values[n]) for n, p in model.named_parameters())


# -- refusals, and what the context leaves behind ----------------------------------------------------------------------


@on_ranks(3)
def test_a_sharded_model_is_converted_part_by_part() -> None:
    """`to` and its relatives before there is an engine: each rank converts its part, the plain model all of it."""

    def made() -> nn.Module:
        torch.manual_seed(2)
        return Initialised()

    plain = made().to(torch.bfloat16)
    with shardwise.zero.Init():
        model = made()
    counts = [parameter.partition_numel() for parameter in model.parameters()]
    assert [sum(parts) for parts in zip(*of_all_ranks(counts), strict=True)] == [p.numel() for p in plain.parameters()]
    own = list(model.parameters())
    assert model.to(torch.float32).cpu().float() is model
    assert [parameter.partition_numel() for parameter in model.parameters()] == counts
    model.bfloat16().to(torch.device("cpu", 0))
    assert all(mine is was and released.is_released(mine) for mine, was in zip(model.parameters(), own, strict=True))
    with shardwise.zero.GatheredParameters(model.parameters()):
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    with pytest.raises(ReleasedParameterError, match="to: the values of parameter 'scale'"):
        model.scale.to(torch.float32, copy=True)
    engine, *_ = shardwise.initialize(model=model, config={**STAGE3, "optimizer": {"type": "AdamW"}})
    assert engine.precision_in_words().startswith(("compute bfloat16", "compute bf16"))


@pytest.mark.parametrize(
    ("options", "sharded"),
    [
        ({"enabled": False}, False),
        ({"config_dict_or_path": {"zero_optimization": {"stage": 2}}}, False),
        ({"config_dict_or_path": {"zero_optimization": {"stage": "3"}}}, True),
        ({"config_dict_or_path": {"zero_optimization": {}, "zero_optimization.stage": 3}}, True),
    ],
)
@on_ranks(1)
def test_the_stage_is_read_as_initialize_reads_it(options: dict[str, Any], sharded: bool) -> None:
    with shardwise.zero.Init(**options):
        model = nn.Linear(2, 2)
    assert released.is_released(model.weight) is sharded


@on_ranks(1)
def test_a_stage_that_is_chosen_later_switches_the_context_off() -> None:
    with logged() as log, shardwise.zero.Init(config_dict_or_path={"zero_optimization": {"stage": "auto"}}):
        assert not released.is_released(nn.Linear(2, 2).weight)
    assert any("zero.Init: has no effect" in line for line in log.lines)


@on_ranks(2)
def test_errors_name_the_parameter_and_the_module() -> None:
    original = nn.Module.register_parameter
    with pytest.raises(ZeroDivisionError), shardwise.zero.Init():
        nn.Linear(2, 2)
        raise ZeroDivisionError
    assert nn.Module.register_parameter is original and type(nn.Linear(2, 2).weight) is nn.Parameter
    with shardwise.zero.Init():
        model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ReleasedParameterError, match=r"weight.*Linear.*GatheredParameters"):
        model[0].weight.sum()
    with pytest.raises(UsageError, match=r"OddMLP.*reset_parameters"), torch.device("meta"):
        shardwise.initialize(model=OddMLP(), config=STAGE3)


class Rotary(nn.Module):
    """Buffers computed by the constructor, and one parameter that `reset_parameters` forgets."""

    def __init__(self, complete: bool) -> None:
        super().__init__()
        self.complete = complete
        self.gain, self.shift = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(3))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.register_buffer("frequencies", 10000 ** -(torch.arange(3.0) / 3), persistent=False)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("order", torch.arange(3))
        self.other = nn.Module()
        self.other.register_buffer("frequencies", self.frequencies)
        self.other.reset_parameters = lambda: None

    def reset_parameters(self) -> None:
        self.gain.data.fill_(1.0)
        if self.complete:
            nn.init.zeros_(self.shift)
            self.frequencies.data.copy_(10000 ** -(torch.arange(3.0) / 3))
            self.mask = torch.ones(3, 3, dtype=torch.bool).tril()
            self.order.copy_(torch.arange(3))


@on_ranks(2)
def test_what_a_meta_module_leaves_without_values_is_named() -> None:
    with torch.device("meta"):
        lacking, complete = Rotary(False), Rotary(True)
    with pytest.raises(
        UsageError, match=r"reset_parameters\(\) has left .*: 'shift', 'frequencies', 'mask', 'order'\."
    ):
        shardwise.initialize(model=lacking, config=STAGE3)
    shardwise.initialize(model=complete, config=STAGE3).engine.destroy()
    found = complete.state_dict(keep_vars=True)
    assert all(torch.equal(found[name], value) for name, value in Rotary(True).state_dict(keep_vars=True).items())
    assert complete.other.frequencies is complete.frequencies


@on_ranks(2)
def test_a_state_dict_has_names_and_shapes() -> None:
    """Of a model that is sharded and not wrapped yet; it has values only when gathered."""
    with shardwise.zero.Init():
        model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    state = model.state_dict()
    assert [(name, tuple(value.shape)) for name, value in state.items()] == [
        ("0.weight", (2, 3)), ("0.bias", (2,)), ("1.weight", (1, 2)), ("1.bias", (1,)),
    ]  # fmt: skip
    assert all(released.is_released(value) and value is not model.get_parameter(name) for name, value in state.items())
    with pytest.raises(ReleasedParameterError, match="'weight' of a Linear"):
        state["0.weight"].sum()
    with shardwise.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
        values = [parameter.clone() for parameter in model.parameters()]
    with shardwise.zero.GatheredParameters(list(state.values())), torch.no_grad():
        assert all(torch.equal(value, given) for value, given in zip(state.values(), values, strict=True))
