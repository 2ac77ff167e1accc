"""Linear layers in float8: results of torchao's layers in a plain loop, at any stage, and with 8-bit all-gathers."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.config import resolve
from shardwise.errors import ConfigError, ConflictError, UsageError
from shardwise.moe.gates import TopKGate
from shardwise.precision.float8 import float8_layers, weights_to_gather
from tests.harness import run_ranks, thorough
from tests.memory.test_report import CHAINS, check, report

# Not in the environment of the other tests: transformers imports it wherever it is, and warns.
if importlib.util.find_spec("torchao") is None:
    pytest.skip("torchao is of the dependency group `inference`", allow_module_level=True)

CONFIG = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}}
PERSIST = {"stage3_param_persistence_threshold": 0}


class Model(nn.Module):
    """Blocks of linear layers with norms; sizes of the last layer are no multiples of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(3))
        self.head = nn.Linear(32, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


def model() -> Model:
    torch.manual_seed(3)
    made = Model()
    with torch.no_grad():  # small ones become subnormal in float8; the largest is no power of two
        made.blocks[0][0].weight[0, 0] = 7.3
        made.blocks[1][2].weight[:, ::2] *= 1e-4
    return made


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def converted(made: nn.Module, **options: Any) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(emulate=True, **options)
    return convert_to_float8_training(made, config=config, module_filter_fn=lambda module, _: module.out_features > 7)


def trained(stage: int, precision: str, section: dict[str, Any] | None, more: dict[str, Any] | None = None) -> Any:
    """Weights and losses after three steps, the bytes that all-gathers have sent, and their number."""
    made = model()
    if section is None:
        converted(made, round_scales_to_power_of_2=True)
        section = {}
    config = {**CONFIG, "zero_optimization": {"stage": stage, **PERSIST, **(more or {})}, "float8": section}
    engine = shardwise.initialize(model=made, config=config | ({precision: {"enabled": True}} if precision else {}))[0]
    losses = []
    for step in range(3):
        x = batch(step, engine.global_rank).to(next(iter(engine.sharded.units)).sections[0].layout.dtype)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    assert len(float8_layers(engine.module)) == 6
    gathers = [record for record in engine.ledger.records() if record.kind in ("gather", "gather_on")]
    weights = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.destroy()
    return losses, weights, sum(record.sent for record in gathers), len(gathers)


def same(one: Any, other: Any) -> bool:
    weights = zip(one[1].items(), other[1].items(), strict=True)
    return one[0] == other[0] and all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in weights)


@pytest.mark.parametrize("recipe", ["tensorwise", thorough("rowwise"), thorough("rowwise_with_gw_hp")])
def test_an_engine_trains_as_a_plain_loop(recipe: str) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    made, plain = model(), model()
    exact = copy.deepcopy(plain)(batch(0, 0))
    options = copy.copy(Float8LinearConfig.from_recipe_name(recipe))
    object.__setattr__(options, "emulate", True)
    convert_to_float8_training(plain, config=options, module_filter_fn=lambda module, _: module.out_features > 7)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-3)
    names = [name for name, _ in made.named_parameters()]
    section = {"enabled": True, "recipe": recipe, "emulate": True}
    engine = shardwise.initialize(model=made, config={**CONFIG, "float8": section})[0]
    assert [name for name, _ in made.named_parameters()] == names
    assert not torch.equal(plain(batch(0, 0)), exact)
    for step in range(3):
        loss = engine(batch(step, 0)).square().mean()
        engine.backward(loss)
        engine.step()
        wanted = plain(batch(step, 0)).square().mean()
        wanted.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(loss, wanted)
    state = engine.module_state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    engine.destroy()


@pytest.mark.parametrize("precision", ["bf16", thorough("fp16"), thorough("")])
def test_weights_travel_in_eight_bits_with_equal_results(precision: str) -> None:
    section = {"enabled": True, "emulate": True, "all_gather": True}
    whole = run_ranks(trained, 2, 0, precision, None)[0]
    wide = run_ranks(trained, 2, 3, precision, None)[0]
    coded = run_ranks(trained, 2, 3, precision, section)[0]
    assert same(whole, wide) and same(wide, coded)
    # Two bytes become one, but for biases, norms and the head; fp32 weights become a quarter.
    assert coded[2] < (0.65 if precision else 0.4) * wide[2]
    assert wide[3] < coded[3] <= 2 * wide[3]  # a small collective more for each gather of such weights


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{"zero_hpz_partition_size": 2}, {"mics_shard_size": 2}, {}])
def test_groups_of_ranks(more: dict[str, Any]) -> None:
    section, ranks = {"enabled": True, "emulate": True, "all_gather": True}, 4 if more else 3
    wide, coded = (run_ranks(trained, ranks, 3, "bf16", one, more)[0] for one in (None, section))
    assert same(wide, coded)


@pytest.mark.parametrize("gather", [False, thorough(True)])
def test_the_plan_of_memory_is_the_measurement(gather: bool) -> None:
    section = {"enabled": True, "emulate": True, "all_gather": gather}
    for before, after in run_ranks(report, 2, 3, "bf16", more={"float8": section}):
        check(before, after, "float8", CHAINS if gather else ())


def test_what_cannot_be_is_refused() -> None:
    def start(model: nn.Module, **section: Any) -> Any:
        return shardwise.initialize(model=model, config={**CONFIG, "float8": {"enabled": True, **section}})

    with pytest.raises(UsageError, match=r'cpu has no products in float8; .*"emulate": true'):
        start(model())
    with pytest.raises(ConfigError, match=r"float8: Linear has no linear layer .* whose sizes are multiples of 16"):
        start(nn.Linear(7, 3), emulate=True)
    with pytest.raises(ConfigError, match="no linear layer"):
        start(model(), emulate=True, filter_fqns=["blocks", "head"])
    with pytest.raises(ConflictError, match=r"float8\.all_gather: needs `float8\.recipe` \"tensorwise\""):
        resolve({**CONFIG, "float8": {"enabled": True, "recipe": "rowwise", "all_gather": True}}, world_size=1)
    with pytest.raises(ConflictError, match=r"float8\.enabled: cannot be combined with `tensor_parallel\.autotp_size`"):
        resolve({**CONFIG, "float8": {"enabled": True}, "tensor_parallel": {"autotp_size": 2}}, world_size=2)
    given = model()
    layers = dict(given.named_modules())
    section = {"enabled": True, "emulate": True}
    with pytest.raises(UsageError, match="int is neither"):
        shardwise.initialize(model=given, config={**CONFIG, "float8": section}, lr_scheduler=3)
    assert dict(given.named_modules()) == layers
    made = start(model(), emulate=True, filter_fqns=["blocks.1"])[0]
    assert sorted(float8_layers(made.module)) == ["blocks.0.0", "blocks.0.2", "blocks.2.0", "blocks.2.2"]
    assert F.mse_loss(made(batch(0, 0)), model()(batch(0, 0))) < 10
    made.destroy()


class Odd(nn.Module):
    """Layers that stay as they are: with a hook, used twice, reparametrised, and the router of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.hooked, self.first = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.second = nn.Sequential(self.first)
        self.hooked.register_forward_hook(lambda module, given, output: 2 * output)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
        self.gate = TopKGate(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.normed(self.second(self.first(self.hooked(self.plain(x)))))
        return x + self.gate(x).weights.sum()


def test_layers_that_are_not_only_called_stay_exact() -> None:
    section = {"enabled": True, "emulate": True, "all_gather": True}
    made = shardwise.initialize(model=Odd(), config={**CONFIG, "float8": section})[0]
    assert list(float8_layers(made.module)) == ["plain"]
    assert weights_to_gather(made.module)[0] == [made.module.plain.weight]
    made.backward(made(torch.ones(3, 16)).sum())  # three rows are no multiple of 16
    made.step()
    made.destroy()
    with pytest.raises(ConflictError, match=r"float8\.enabled: cannot be combined with `compression_training`"):
        resolve({**CONFIG, "float8": {"enabled": True}, "quantize_training": {"enabled": True}}, world_size=1)


def refused_scales() -> str:
    made = converted(model())
    config = {**CONFIG, "zero_optimization": {"stage": 3, **PERSIST}}
    with pytest.raises(ConfigError) as raised:
        section = {"enabled": True, "emulate": True, "all_gather": True}
        shardwise.initialize(model=made, config=config | {"float8": section})
    return str(raised.value)


def test_other_scales_are_not_gathered() -> None:
    assert "blocks.0.0 was converted with other scales" in run_ranks(refused_scales, 2)[0]
