"""The four sources of memory: exact on small modules, and the formulas for transformers against exact counts."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.errors import UsageError
from shardwise.memory import memory_sources, transformer_activation_bytes, transformer_model_bytes
from tests.harness import on_ranks, thorough
from tests.harness.training import ADAMW, engine_of


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(512, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 1024), nn.Linear(1024, 512))


MODEL, ACTIVATIONS = 12_597_248, 65_536  # of the dense network, as it is known from the text that describes the method


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "copies", "counters"),
    [
        (partial(torch.optim.SGD, momentum=0.9), 1, 0),
        ("adam", 2, 8 * 4),
        (partial(torch.optim.AdamW, fused=True, amsgrad=True), 3, 8 * 4),
    ],
)
def test_a_dense_network(optimizer: Any, copies: int, counters: int, dry_run: bool) -> None:
    found = memory_sources(dense(), torch.randn(4, 512), optimizer=optimizer, dry_run=dry_run)
    assert found.model == found.gradient == MODEL
    assert found.activation_outputs == ACTIVATIONS
    assert found.activation_saved == 4 * 4 * (512 + 1024 * 3)  # the inputs of four linear layers
    assert (found.optimizer, found.optimizer_counters) == (copies * MODEL + counters, counters)
    assert found.total == (2 + copies) * MODEL + counters + found.activation_saved
    assert [found.under(name).outputs for name in "0123"] == [16384, 16384, 16384, 8192]
    assert [found.under(name).saved for name in "0123"] == [8192, 16384, 16384, 16384]
    assert found.under("").optimizer == found.optimizer


def test_an_instance_of_the_optimizer_and_its_real_state_after_a_step() -> None:
    net = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 7))
    for make in (
        torch.optim.Adam,
        torch.optim.Adafactor,
        lambda p: torch.optim.SGD([{"params": p[:1], "momentum": 0.9}, {"params": p[1:]}], lr=0.1),
    ):
        optimizer = make(list(net.parameters()))  # type: ignore[operator]
        found = memory_sources(net, optimizer=optimizer)
        net(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        state = sum(v.nbytes for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
        assert found.optimizer == state
        assert found.activation_outputs is None and found.activation_saved is None


@pytest.mark.parametrize(
    ("module", "optimizer", "words"),
    [
        (nn.Linear(3, 3), "Adamm", "expected the name of a class in torch.optim"),
        (nn.Linear(3, 3), torch.optim.SGD([torch.zeros(3, requires_grad=True)]), "none of the module's parameters"),
        (nn.Linear(3, 3), "lbfgs", "state of LBFGS is unknown"),
        (nn.Linear(3, 3), list, "the callable returned list"),
        (nn.LazyLinear(3), None, "2 parameters have no shape yet"),
    ],
)
def test_optimizers_that_cannot_be_asked(module: nn.Module, optimizer: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        memory_sources(module, optimizer=optimizer)


def test_tied_frozen_and_shared() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 6)
            self.frozen = nn.Linear(6, 6, bias=False).requires_grad_(False)
            self.twice = nn.Linear(6, 6, bias=False)
            self.head = nn.Linear(6, 11, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.frozen(self.embedding(tokens))
            return self.head(self.twice(torch.tanh(self.twice(x))))

    tokens = torch.zeros(5, dtype=torch.int64)
    found = memory_sources(Net(), tokens, optimizer="adam")
    assert found.model == (66 + 36 + 36) * 4  # the tied weight once
    assert found.gradient == (66 + 36) * 4  # not of the frozen one
    assert found.optimizer == 2 * found.gradient + 2 * 4
    assert (found.under("embedding").model, found.under("head").model, found.under("frozen").gradient) == (264, 0, 0)
    assert found.inputs == 40
    assert found.under("twice").outputs == 2 * 5 * 6 * 4  # each call
    # tokens; the input of the first and of the second call of the shared layer; tanh's output is that input; head's.
    # The embedding's own output is saved by nobody: the gradient passes through the frozen layer without it.
    assert found.activation_saved == 40 + 3 * 5 * 6 * 4


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor


def test_outputs_of_any_form() -> None:
    class Leaf(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {"a": Pair(x * 2, x * 3), "b": [(x * 4,)]}

    found = memory_sources(nn.Sequential(Leaf()), torch.ones(4, 8))
    assert found.activation_outputs == (1 + 3) * 4 * 8 * 4
    assert found.model == 0


class Inner(nn.Module):
    """Modules that others are made of, some of which are not called."""

    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            again = self.recompute
            x = checkpoint(block, x, use_reentrant=again == "reentrant") if again else x + block(x)
        return x


@pytest.mark.parametrize("kind", ["not reentrant", "reentrant"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_recomputed_activations_are_not_saved(kind: str, dry_run: bool) -> None:
    x = torch.randn(8, 16, requires_grad=True)
    saved = memory_sources(Inner(""), x, dry_run=dry_run).activation_saved
    assert memory_sources(Inner(kind), x, dry_run=dry_run).activation_saved == 4 * 8 * 16 * 4  # the blocks' inputs
    assert saved is not None and saved > 4 * 8 * 16 * 4 * 8

    # The logarithms of the probabilities, the targets, and the total weight.


class Disturbing(nn.Module):
    """Draws numbers, follows the data in two kinds of buffers, and can fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("none", None)
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        if self.fail:
            raise ArithmeticError("as asked")
        return x


@pytest.mark.parametrize("fail", [False, True])
@pytest.mark.parametrize("dry_run", [False, True])
def test_the_module_is_left_as_it_was(fail: bool, dry_run: bool) -> None:
    net = Disturbing()
    net.layers.eval()
    net.layers[1].train()
    net(torch.randn(3, 6)).sum().backward()
    net.fail = fail
    before = copy.deepcopy(net.state_dict())
    grads = {name: (p.grad, p.grad.clone()) for name, p in net.named_parameters() if p.grad is not None}
    modes = [module.training for module in net.modules()]
    mean, random = net.mean, torch.get_rng_state()
    if fail:
        with pytest.raises(ArithmeticError, match="as asked"):
            memory_sources(net, torch.randn(3, 6), dry_run=dry_run)
    else:
        inputs = torch.ones(3, 6)
        assert memory_sources(net, inputs, optimizer="adam", dry_run=dry_run).activation_saved
        assert torch.equal(random, torch.get_rng_state())
    assert net.mean is mean
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    for name, p in net.named_parameters():
        assert p.grad is grads[name][0] and torch.equal(p.grad, grads[name][1])  # type: ignore[arg-type]
    assert modes == [module.training for module in net.modules()]
    for module in net.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_meta_and_fake_modules_take_no_memory() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def big() -> nn.Module:
        return nn.Sequential(nn.Linear(1 << 16, 1 << 17), nn.GELU(), nn.Linear(1 << 17, 1 << 10))

    with torch.device("meta"):
        module = big()
    for inputs in (torch.empty(2, 1 << 16, device="meta"), torch.ones(2, 1 << 16)):
        found = memory_sources(module, inputs, optimizer="adam")
        assert found.model == 4 * ((1 << 33) + (1 << 17) + (1 << 27) + (1 << 10))
        assert found.optimizer == 2 * found.model + 16
        assert found.activation_saved == 2 * 4 * ((1 << 16) + 2 * (1 << 17))
        assert any("fake tensors" in note for note in found.notes)
    with FakeTensorMode() as mode:
        fake, inputs = big(), torch.empty(2, 1 << 16)
        again = memory_sources(fake, inputs, optimizer="adam")
    assert memory_sources(fake, inputs, dry_run=True).activation_saved == again.activation_saved
    assert (again.model, again.optimizer, again.activation_saved) == (
        found.model,
        found.optimizer,
        found.activation_saved,
    )
    assert mode is not None


@pytest.mark.parametrize("stage", [thorough(1), 3])
@on_ranks(2)
def test_a_module_that_belongs_to_an_engine(stage: int) -> None:
    torch.manual_seed(0)
    engine = engine_of(dense(), stage, ADAMW)
    x = torch.randn(4, 512)
    engine.backward(engine(x).square().mean())
    engine.step()
    count = len(list(engine.ledger.records()))
    found = memory_sources(engine.module, x, optimizer="adam")
    with pytest.raises(UsageError, match="pass its class instead"):
        memory_sources(engine.module, x, optimizer=engine.optimizer)
    assert len(list(engine.ledger.records())) == count  # nothing was gathered
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.destroy()
    steps = engine.global_steps
    assert (found.model, found.gradient, found.activation_outputs) == (MODEL, MODEL, ACTIVATIONS)
    assert found.optimizer == 2 * MODEL + 32
    assert steps == 2


def test_rendering_and_plain_values() -> None:
    found = memory_sources(dense(), torch.randn(4, 512), optimizer="adam")
    assert "12,597,248" in found.render() and "Linear" not in found.render(depth=0)
    values = found.as_dict()
    assert values["model"] == MODEL and values["total"] == found.total and values["modules"][1]["name"] == "0"
    with pytest.raises(UsageError, match="no module of this name"):
        found.under("4")
    assert "-" in memory_sources(dense()).render()


def test_formulas_for_transformers() -> None:
    """Without dropout in attention the scores are not formed: what is saved no longer grows with their square."""
    n, h, m, b = 2, 64, 4, 2

    def saved(dropout: float, length: int) -> int:
        layer = nn.TransformerEncoderLayer(h, m, 4 * h, dropout, "gelu", batch_first=True, norm_first=True)
        found = memory_sources(nn.TransformerEncoder(layer, n, enable_nested_tensor=False), torch.randn(b, length, h))
        assert found.model == transformer_model_bytes(n, h)
        assert found.activation_saved is not None
        return found.activation_saved

    for length in (32, 128):
        formula = transformer_activation_bytes(n, h, m, b, length)
        assert formula == n * b * length * (67 * h + 9 * m * length)  # Korthikanti et al. in fp32
        assert 0.9 * formula <= saved(0.1, length) <= 1.45 * formula
    assert saved(0.0, 128) <= 1.02 * 4 * saved(0.0, 32)
