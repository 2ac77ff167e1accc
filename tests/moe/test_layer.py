"""One rank: the layer is the mixture written down token by token."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.config.schema.parallel import ExpertParallel
from shardwise.errors import NotBuiltError, UsageError
from shardwise.moe import ExpertGroup, ExpertUtilization, MoE
from shardwise.moe.exchange import bind_experts
from shardwise.moe.experts import GroupSizes, grouped_linear
from shardwise.moe.gates import route
from shardwise.moe.huggingface import Form, Names, StackedExperts
from tests.device.recorded import imagined
from tests.device.recording import Event, recording
from tests.moe.models import EXPERTS, WIDTH, expert, plain


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert found.dtype == expected.dtype == torch.float64
    assert (found - expected).norm() <= 1e-13 * expected.norm().clamp(min=1.0), what


def compare(layer: MoE, tokens: torch.Tensor, k: int, factor: float | None) -> list[int]:
    """Compare output, loss and all gradients with those of the plain mixture; return the experts' tokens."""
    other = copy.deepcopy(layer)
    own = tokens.clone().requires_grad_()
    theirs = tokens.clone().requires_grad_()
    output, l_aux, counts = layer(own.view(2, -1, WIDTH))
    inner = other.deepspeed_moe
    made, loss, taken = plain(theirs, inner.gate.wg.weight, list(inner.experts.deepspeed_experts), k, factor)
    if layer.use_residual:
        share = torch.softmax(other.coefficient(theirs), dim=-1)
        made = made * share[:, :1] + other.mlp(theirs) * share[:, 1:]
    close(output.view_as(made), made, "output")
    close(l_aux, loss, "l_aux")
    assert counts.tolist() == taken
    weights = torch.randn_like(made)
    ((output.view_as(made) * weights).sum() + l_aux).backward()
    ((made * weights).sum() + loss).backward()
    close(own.grad, theirs.grad, "tokens")  # type: ignore[arg-type]
    for (name, mine), param in zip(layer.named_parameters(), other.parameters(), strict=True):
        found = torch.zeros_like(mine) if mine.grad is None else mine.grad
        close(found, torch.zeros_like(param) if param.grad is None else param.grad, name)
    return taken


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("factor", [None, 0.5, 1.25])
@pytest.mark.parametrize("residual", [False, True])
def test_the_layer_is_the_plain_mixture(k: int, factor: float | None, residual: bool) -> None:
    options: dict[str, Any] = {} if factor is None else {"capacity_factor": factor}
    experts = nn.ModuleList(expert() for _ in range(EXPERTS))
    layer = MoE(
        WIDTH,
        experts,
        EXPERTS,
        k=k,
        use_rts=False,
        top2_2nd_expert_sampling=False,
        drop_tokens=factor is not None,
        use_residual=residual,
        **options,
    ).double()
    taken = compare(layer, torch.randn(24, WIDTH).double(), k, factor)
    if factor == 0.5:
        assert max(taken) > max(24 * k // 8, 4)  # some were dropped


@pytest.mark.parametrize("factor", [None, 1.0])
def test_all_tokens_to_one_expert(factor: float | None) -> None:
    layer = MoE(WIDTH, expert(), EXPERTS, drop_tokens=factor is not None, use_rts=False).double()
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()[2] = 1.0
    assert compare(layer, torch.rand(24, WIDTH).double(), 1, factor) == [0, 0, 24, 0]


def test_random_selection_keeps_as_many_and_others() -> None:
    layer = MoE(WIDTH, expert(), EXPERTS, min_capacity=1)
    with torch.no_grad():
        layer.deepspeed_moe.gate.wg.weight.zero_()[2] = 1.0
    tokens = torch.rand(24, WIDTH)
    kept = []
    for _ in range(2):
        output, _, _ = layer(tokens)
        kept.append(output.abs().sum(1) > 0)
        assert kept[-1].sum() == 6
    assert not torch.equal(*kept)
    layer.eval()
    assert (layer(tokens)[0].abs().sum(1) > 0).nonzero().flatten().tolist() == list(range(6))


def test_noise_while_training_only() -> None:
    tokens = torch.randn(64, WIDTH)
    for policy in ("Jitter", "RSample"):
        layer = MoE(WIDTH, expert(), EXPERTS, noisy_gate_policy=policy, drop_tokens=False)
        assert not torch.equal(layer(tokens)[0], layer(tokens)[0])
        layer.eval()
        assert torch.equal(layer(tokens)[0], layer(tokens)[0])


def test_sampling_draws_by_probability() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20000, 4)
    expected = torch.softmax(logits[0], dim=0)
    found = route(logits, 1, drop_tokens=False, sampled=True).exp_counts / 20000
    assert (found - expected).abs().max() < 0.02
    chosen = route(logits, 2, drop_tokens=False, second_sampled=True).experts
    assert (chosen[0] == 2).all() and (chosen[1] != 2).all()
    rest = expected[[0, 1, 3]] / expected[[0, 1, 3]].sum()
    second = torch.stack([(chosen[1] == e).float().mean() for e in (0, 1, 3)])
    assert (second - rest).abs().max() < 0.02


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("k", [1, 2])
def test_tokens_that_are_not_used(k: int, drop: bool) -> None:
    layer = MoE(WIDTH, expert(), EXPERTS, k=k, drop_tokens=drop, use_rts=False, top2_2nd_expert_sampling=False).double()
    tokens, used = torch.randn(12, WIDTH).double(), torch.arange(12) % 3 != 0
    output, _, counts = layer(tokens, used)
    assert counts.sum() == 8 * k and not output[~used].any()
    layer.deepspeed_moe.gate.drop_tokens = False
    close(output[used], layer(tokens[used])[0], "used")


@pytest.mark.parametrize("drop", [False, True])
def test_no_tokens(drop: bool) -> None:
    layer = MoE(WIDTH, expert(), EXPERTS, drop_tokens=drop)
    output, l_aux, counts = layer(torch.zeros(0, WIDTH, requires_grad=True))
    (output.sum() + l_aux).backward()
    assert output.shape == (0, WIDTH) and counts.tolist() == [0] * EXPERTS and l_aux == 0


def test_load_is_counted_while_somebody_looks() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), MoE(WIDTH, expert(), EXPERTS, k=2))
    model(torch.randn(10, WIDTH))
    load = ExpertUtilization(model)
    assert load.counts() == {}
    counts = sum(model(torch.randn(10, WIDTH))[2] for _ in range(3))
    events = load.events(7)
    assert [(name, step) for name, _, step in events] == [(f"Train/Experts/1/{e}", 7) for e in range(EXPERTS)]
    assert torch.equal(torch.stack([part for _, part, _ in events]), counts.double() / 60)  # type: ignore[attr-defined]
    load.close()
    model(torch.randn(10, WIDTH))
    assert load.counts() == {}


@pytest.mark.parametrize("reentrant", [True, False])
def test_load_counts_recomputed_tokens_once(reentrant: bool) -> None:
    model = MoE(WIDTH, expert(), EXPERTS, k=1, drop_tokens=False)
    load = ExpertUtilization(model)
    tokens = torch.randn(6, WIDTH, requires_grad=True)
    checkpoint(lambda x: model(x)[0].square(), tokens, use_reentrant=reentrant).sum().backward()
    assert sum(int(counts.sum()) for counts in load.counts().values()) == 6
    load.close()


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_experts": 3, "ep_size": 2}, UsageError, r"num_experts=3, ep_size=2\)"),
        ({"k": 5}, UsageError, r"k=5, num_experts=4\)"),
        ({"noisy_gate_policy": "rsample"}, UsageError, r"noisy_gate_policy='rsample'"),
        ({"use_tutel": True}, NotBuiltError, r"use_tutel=True"),
        ({"enable_expert_tensor_parallelism": True}, NotBuiltError, r"enable_expert_tensor_parallelism=True"),
        ({"expert": nn.ModuleList([nn.Linear(1, 1)])}, UsageError, r"1 experts are given, num_experts is 4"),
        ({"expert": nn.ModuleList([expert()] * 4), "ep_size": 2}, UsageError, r"MoE without its groups: of"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        MoE(WIDTH, **({"expert": expert(), "num_experts": 4} | options))


def test_divided_experts_need_an_engine() -> None:
    layer = MoE(WIDTH, expert(), EXPERTS, ep_size=2)
    assert layer.num_local_experts == 2 and layer.expert_group_name == "ep_size_2"
    with pytest.raises(UsageError, match=r"MoE without its groups: .* shardwise.initialize\(\) before it is called"):
        layer(torch.zeros(1, WIDTH))
    layer.group = pickle.loads(pickle.dumps(ExpertGroup()))  # of a module that was pickled
    with pytest.raises(UsageError, match="MoE without its groups"):
        layer(torch.zeros(1, WIDTH))


def test_one_grouped_product_is_one_for_each_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """The product that GPUs take, on a CPU; a device may leave gradients without rows unwritten."""
    unwritten = torch.tensor([0.0, torch.nan, 0.0, 0.0]).view(4, 1, 1)

    def product(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        matrices.register_hook(lambda gradient: gradient + unwritten.to(gradient))
        return nn.functional.grouped_mm(rows, matrices, offs=ends)

    monkeypatch.setattr("shardwise.moe.experts.writes_empty_groups", lambda device: False)
    monkeypatch.setattr("shardwise.moe.experts.grouped_product", lambda weight: product)
    rows, weight = torch.randn(20, 16).bfloat16(), torch.randn(4, 24, 16).bfloat16()
    found = []
    for grouped in (False, True):
        own = [value.clone().requires_grad_() for value in (rows, weight)]
        output = grouped_linear(*own, GroupSizes([5, 0, 14, 1]), grouped=grouped)
        output.float().square().sum().backward()
        found.append([output.float(), *(value.grad.float() for value in own)])  # type: ignore[union-attr]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.detach().abs().max()))


def stacked(ep_size: int) -> StackedExperts:
    given = nn.Module()
    given.gate_up_proj = nn.Parameter(torch.randn(4, 48, 16).bfloat16())
    given.down_proj = nn.Parameter(torch.randn(4, 16, 24).bfloat16())
    return StackedExperts(given, Form(Names.of(ExpertParallel())), ep_size, nn.functional.silu, grouped=True)


class Uploads(TorchFunctionMode):
    """The elements of each tensor that may be copied from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to and isinstance(args[1], torch.device):
            self.elements.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def recorded_experts(ep_size: int) -> list[Event]:
    """What stacked experts do on a device in a forward and backward pass, from the choice of experts on."""
    with imagined(ep_size, 0), recording() as recorder, Uploads() as uploads:
        experts = stacked(ep_size)
        comm = Communicator(None, Ledger(), torch.device("cpu"))
        bind_experts(nn.ModuleDict({"experts": experts}), comm)
        tokens = torch.randn(8, 16).bfloat16().requires_grad_()
        chosen, weights = torch.arange(16).view(8, 2) % 4, torch.full((8, 2), 0.5).bfloat16()
        begin = len(recorder.trace.events)
        experts(tokens, chosen, weights).sum().backward()
        events = recorder.trace.events[begin:]
        comm.destroy()
    # CUDA may finish all work of a stream before it reads more from memory that is not pinned.
    assert max(uploads.elements, default=0) <= experts.num_experts
    return events


def test_one_rank_computes_stacked_experts_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.moe.experts.grouped_product", lambda weight: lambda r, w, ends: r @ w[0] + ends[0])
    assert [event for event in recorded_experts(1) if event.kind in ("read", "block")] == []


def test_the_host_does_not_wait_in_a_layer_that_drops_tokens() -> None:
    with imagined(2, 0), recording() as recorder:
        comm = Communicator(None, Ledger(), torch.device("cpu"))
        layer = MoE(WIDTH, expert(), EXPERTS, 2)
        bind_experts(nn.ModuleDict({"moe": layer}), comm)
        for _ in range(2):  # after the first pass
            begin = len(recorder.trace.events)
            layer(torch.randn(8, WIDTH))[0].sum().backward()
        events = recorder.trace.events[begin:]
        comm.destroy()
    assert [event for event in events if event.kind in ("read", "block")] == []


def test_ranks_wait_once_for_the_sizes_of_an_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for what is launched after the numbers of rows: meanwhile the device sorts the rows."""
    monkeypatch.setattr("shardwise.moe.experts.grouped_product", lambda weight: lambda r, w, ends: r @ w[0] + ends[0])
    events = recorded_experts(2)
    (wait,) = [place for place, event in enumerate(events) if event.kind in ("read", "block")]
    assert events[wait].kind == "block"
    (mark,) = [n for n, event in enumerate(events) if event.kind == "mark" and event.number == events[wait].number]
    assert "sort" in {event.name for event in events[mark:wait]}
