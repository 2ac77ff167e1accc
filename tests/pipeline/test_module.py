"""Pipeline modules: stages run one after the other equal the whole model; weights and names do not depend on stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint as torch_checkpoint

from shardwise.comm.topology import PipeDataParallelTopology
from shardwise.errors import ConfigError, UsageError
from shardwise.pipeline.layers import LayerSpec, TiedLayerSpec
from shardwise.pipeline.module import PipelineModule
from tests.pipeline.gradients import step_by_stages


class Block(nn.Module):
    """Takes and returns a tuple; keeps the second item."""

    def __init__(self, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)
        self.calls = 0

    def forward(self, value: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        hidden, mask = value
        return hidden + self.drop(functional.gelu(self.linear(self.norm(hidden)))) * mask, mask


def pair(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden, (torch.arange(hidden.shape[-1]) < 6).float()


def only(value: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return value[0]


def head(module: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return functional.linear(hidden, module.weight)  # type: ignore[arg-type]


def specs(dropout: float = 0.0) -> list[Any]:
    return [
        TiedLayerSpec("words", nn.Embedding, 16, 8),
        pair,
        *[LayerSpec(Block, 8, dropout=dropout) for _ in range(4)],
        only,
        LayerSpec(nn.LayerNorm, 8),
        TiedLayerSpec("words", nn.Embedding, 16, 8, forward_fn=head),
    ]


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output * torch.cos(torch.arange(output.numel())).view_as(output)).sum()


def seeded_model(seed: int = 0, **options: Any) -> PipelineModule:
    torch.manual_seed(seed)
    return PipelineModule(specs(), **options)


def on_ranks(count: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[PipelineModule]:
    """Return the modules of `count` ranks, each with one stage."""
    monkeypatch.setenv("WORLD_SIZE", str(count))
    modules = [seeded_model(**options) for _ in range(count)]
    for number, module in enumerate(modules):
        module.build([number], count)
    return modules


BATCH = torch.tensor([[1, 2, 3], [4, 5, 15]])


@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("seed_layers", [False, True])
def test_stages_equal_the_whole_model(count: int, seed_layers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = seeded_model(seed_layers=seed_layers)
    after = torch.rand(3)
    output, grads = step_by_stages([whole], BATCH, loss_of)
    modules = on_ranks(count, monkeypatch, seed_layers=seed_layers)
    assert torch.equal(torch.rand(3), after), "building layers draws from the global generator"
    weights: dict[str, torch.Tensor] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            assert torch.equal(weights.setdefault(name, parameter), parameter), name
    assert weights.keys() == dict(whole.named_parameters()).keys()
    assert all(torch.equal(weights[name], parameter) for name, parameter in whole.named_parameters())
    found, split = step_by_stages([module.stage(i) for i, module in enumerate(modules)], BATCH, loss_of)
    assert torch.equal(found, output)
    assert split.keys() == grads.keys()
    for name, grad in grads.items():
        assert torch.equal(split[name], grad), name


def test_each_rank_builds_its_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    class Counted(nn.Linear):
        def __init__(self, number: int) -> None:
            super().__init__(2, 2)
            if self.weight.device.type != "meta":
                built.append(number)

    monkeypatch.setenv("WORLD_SIZE", "4")
    module = PipelineModule([LayerSpec(Counted, i) for i in range(8)], partition_method="uniform")
    assert built == []
    module.build([1, 2], 4)
    assert built == [2, 3, 4, 5]
    assert [name for name, _ in module.named_parameters()] == [
        f"layers.{i}.{part}" for i in (2, 3, 4, 5) for part in ("weight", "bias")
    ]
    assert [module.stage_owner(i) for i in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
    before = module.stage(1).get_parameter("layers.2.weight")
    module.build([0, 1], 4)
    assert built == [2, 3, 4, 5, 0, 1]
    assert module.stage(1).get_parameter("layers.2.weight") is before
    with pytest.raises(UsageError, match="Stage 2 is not on this rank"):
        module.stage(2)
    with pytest.raises(UsageError, match=r"stages of 0 to 3, found \[4\]"):
        module.build([4], 4)


def test_before_the_stages_are_built_nothing_pretends_to_be_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    module = seeded_model()
    for use in (lambda: list(module.parameters()), module.state_dict, lambda: module(BATCH)):
        with pytest.raises(UsageError):
            use()
    module.build([0], 2)
    with pytest.raises(UsageError, match=r"has the stages \[0\] only"):
        module(BATCH)


def test_a_seed_function_gets_the_number_of_the_layer() -> None:
    seeds: list[int] = []

    def seed(value: int) -> None:
        seeds.append(value)
        torch.manual_seed(value)

    layers = [LayerSpec(nn.Linear, 2, 2) for _ in range(3)]
    module = PipelineModule(layers, seed_layers=True, seed_fn=seed, base_seed=40)
    assert seeds == [40, 41, 42]
    torch.manual_seed(41)
    assert torch.equal(module.get_parameter("layers.1.weight"), nn.Linear(2, 2).weight)


def test_tied_layers_are_one_parameter_under_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    module = on_ranks(3, monkeypatch)[2]
    assert "layers.0.weight" in dict(module.named_parameters())
    (tie,) = module.tied_parameters()
    assert (tie.key, tie.name, tie.users) == ("words", "layers.0.weight", (0, 2))
    monkeypatch.delenv("WORLD_SIZE")
    assert seeded_model(num_stages=1).tied_parameters() == []


@pytest.mark.parametrize("count", [1, 3])
def test_other_classes_of_one_key_share_the_named_parameters(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [
        TiedLayerSpec("words", nn.Embedding, 16, 8),
        LayerSpec(nn.Linear, 8, 8),
        TiedLayerSpec("words", nn.Linear, 8, 16, tied_weight_attr="weight"),
    ]
    monkeypatch.setenv("WORLD_SIZE", "9")
    torch.manual_seed(0)
    whole = PipelineModule(layers)
    whole.build(range(count), count)
    assert [name for name, _ in whole.named_parameters()] == [
        "layers.0.weight",
        "layers.1.weight",
        "layers.1.bias",
        "layers.2.bias",
    ]
    assert whole.get_parameter("layers.2.weight") is whole.get_parameter("layers.0.weight")
    torch.manual_seed(0)
    last = PipelineModule(layers, partition_method="uniform")
    last.build([2], 3)
    assert dict(last.named_parameters()).keys() == {"layers.0.weight", "layers.2.bias"}
    assert last.state_dict().keys() == {"layers.0.weight", "layers.2.weight", "layers.2.bias"}
    assert torch.equal(last.get_parameter("layers.0.weight"), whole.get_parameter("layers.0.weight"))
    assert [(tie.name, tie.users) for tie in last.tied_parameters()] == [("layers.0.weight", (0, 2))]


def test_built_modules_that_share_a_parameter_are_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    words, middle, out = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16, bias=False)
    out.weight = words.weight
    monkeypatch.setenv("WORLD_SIZE", "2")
    module = PipelineModule(nn.Sequential(words, middle, middle, out), partition_method="uniform")
    module.build([1], 2)
    assert {name for name, _ in module.named_parameters()} == {"layers.0.weight", "layers.1.weight", "layers.1.bias"}
    assert module.get_parameter("layers.0.weight") is words.weight
    assert {(tie.name, tie.users) for tie in module.tied_parameters()} == {
        ("layers.0.weight", (0, 1)),
        ("layers.1.weight", (0, 1)),
        ("layers.1.bias", (0, 1)),
    }
    with pytest.raises(UsageError, match=r"Layer 0 \(Embedding\) was passed as a built module"):
        module.build([0], 2)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.Linear], r"layer 0: expected a LayerSpec.*Write LayerSpec\(Class"),
        ([LayerSpec(nn.Linear, 2, 2), 3], "layer 1: expected a LayerSpec"),
        (
            [TiedLayerSpec("k", nn.Linear, 2, 3), TiedLayerSpec("k", nn.Linear, 3, 2)],
            r"weight: expected a parameter \(3, 2\), found \(2, 3\)",
        ),
        ([TiedLayerSpec("k", nn.Linear, 2, 2, tied_weight_attr=["wieght"])], "has no wieght"),
    ],
)
def test_wrong_layers_are_named(layers: list[Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        PipelineModule(layers)


def test_wrong_classes_topologies_and_losses() -> None:
    with pytest.raises(UsageError, match=r"expected a subclass of torch\.nn\.Module"):
        LayerSpec(pair)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_stages=3 contradicts the topology, whose axis 'pipe' has 2"):
        seeded_model(num_stages=3, topology=PipeDataParallelTopology(2, 1))
    with pytest.raises(UsageError, match="loss_fn has parameters"):
        seeded_model(loss_fn=nn.Linear(1, 1))
    assert seeded_model(topology=PipeDataParallelTopology(2, 1)).num_stages == 2


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("interval", [1, 3])
def test_recomputed_groups_give_the_same_gradients(interval: int, reentrant: bool) -> None:
    def checkpoint(function: Any, *args: Any) -> Any:
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=True)

    torch.manual_seed(0)
    plain = PipelineModule(specs(dropout=0.5))
    torch.manual_seed(0)
    module = PipelineModule(
        specs(dropout=0.5),
        activation_checkpoint_interval=interval,
        activation_checkpoint_func=checkpoint if reentrant else None,
        checkpointable_layers=["Block"] if interval == 1 else None,
    )
    expected, grads = step_by_stages([plain], BATCH, loss_of)
    output, found = step_by_stages([module], BATCH, loss_of)
    assert torch.equal(output, expected)
    assert all(torch.equal(found[name], grad) for name, grad in grads.items())
    assert [block.calls for block in module.modules() if isinstance(block, Block)] == [2, 2, 2, 2]


def test_measured_layers_are_divided_by_time() -> None:
    class Slow(nn.Linear):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            for _ in range(200):
                value = super().forward(value)
            return value

    layers = [LayerSpec(Slow, 16, 16), *[LayerSpec(nn.Linear, 16, 16) for _ in range(5)]]
    module = PipelineModule(layers, num_stages=2, sample_batch=torch.ones(64, 16))
    assert module.boundaries == [0, 1, 6]
    costs = module.profile()
    assert costs[0].seconds > 5 * max(cost.seconds or 0 for cost in costs[1:])  # type: ignore[operator]
    assert all(cost.bytes == 4 * (16 * 16 + 16) + 4 * 64 * 16 for cost in costs[1:])
    assert all(parameter.grad is None for parameter in module.parameters())
    assert PipelineModule(layers, num_stages=2, partition_method="parameters").boundaries == [0, 3, 6]


def test_ranks_need_equal_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    module = PipelineModule([LayerSpec(nn.Linear, 4, 4) for _ in range(4)], sample_batch=torch.ones(1, 4))
    with pytest.raises(UsageError, match="must be equal on all ranks"):
        module.build([0], 2)
    module.build([0], 2, costs=module.profile())
    assert module.stage(0).first == 0
