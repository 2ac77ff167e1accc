"""Activations on the host: the same bits, the device keeps two groups of them, and nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import checkpointing, offload_activations
from shardwise.errors import ConfigError
from shardwise.memory import Accountant, Category, Tier, track_activations
from tests.device import checking
from tests.device.recorded import record_all
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import SGD, Outcome, Setting, assert_identical, engine_of, start, train
from tests.models import CASES, GPT, Batch, Case, language, language_loss

LEAST = 64
"""Bytes from which tensors of these small models are moved."""

MOVED = (("activation_offload", {"enabled": True, "min_bytes": LEAST}),)
INPUTS = (
    ("activation_offload", {"min_bytes": LEAST}),
    ("activation_checkpointing", {"cpu_checkpointing": True, "contiguous_memory_optimization": True}),
)


# -- the same bits -----------------------------------------------------------------------------------------------------


def gpt(run: Callable[..., Any]) -> nn.Module:
    model = GPT(layers=3, head="tied", dropout=0.2)
    model.run = run
    model.blocks[1].requires_grad_(False)
    return model


RUNS: dict[str, Callable[..., Any]] = {
    "kept": lambda block, x: block(x),
    "torch's checkpoint": lambda block, x: checkpoint(block, x, use_reentrant=False),
    "checkpoint": lambda block, x: checkpointing.checkpoint(block, x),
    "nested": lambda block, x: checkpointing.checkpoint(lambda y: checkpointing.checkpoint(block, y * 1.5), x),
    "half": lambda block, x: x + checkpointing.checkpoint(block.attention, block.norm1(x)),
}


def outcomes(run: str, stage: int, accumulation: int) -> list[Outcome]:
    """By what is moved."""
    case = Case(run, partial(gpt, RUNS[run]), language, language_loss)
    setting = Setting(stage, precision="bf16", accumulation=accumulation, optimizer="AdamW", lr=1e-2, clip=0.5)
    return [train(case, setting.with_stage(stage, extra=extra), steps=2) for extra in ((), MOVED, INPUTS)]


@pytest.mark.parametrize(
    ("run", "stage", "accumulation"),
    [("nested", 3, 1), ("half", 3, 1), *(thorough(run, 3, 2) for run in RUNS), thorough("kept", 0, 2)],
)
def test_bits_at_every_stage(run: str, stage: int, accumulation: int) -> None:
    for kept, *moved in run_ranks(outcomes, 2, run, stage, accumulation):
        for outcome in moved:
            assert_identical(outcome, kept, run)


class Wide(nn.Module):
    """Saves views of one storage, expanded and strided tensors, outputs, and tensors of several dtypes."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.rand(width))
        self.register_buffer("table", torch.randn(64, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:-1], 3, 4, -1).permute(2, 0, 3, 1, 4)
        h = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        h = self.out(h.transpose(1, 2).flatten(2)) + self.table[: x.shape[1]]
        h = h * self.scale.expand_as(h)
        mask = (h > 0).to(torch.float64)
        part = h[:, -1] * h[:, 0].tanh()
        top, _ = (h * mask.to(h.dtype)).sigmoid().max(dim=-1)
        chosen = torch.where(h > 0.5, h.exp(), h.sin())
        wave = torch.view_as_real(torch.fft.fft(chosen, dim=1) * torch.complex(h, h)).sum()
        return part.sum() + top.square().sum() + h[1:, 2:].cos().mul(h[1:, :-2]).sum() + 0.01 * wave


def gradients(model: nn.Module, around: AbstractContextManager[Any], x: torch.Tensor) -> list[torch.Tensor]:
    with around:
        loss = model(x)
    return list(torch.autograd.grad(loss, [*model.parameters(), x]))


@pytest.mark.parametrize(("least", "dtype"), [(0, torch.float32), (300, torch.float64), (1 << 20, torch.float32)])
def test_views_and_dtypes(least: int, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model, x = Wide().to(dtype), torch.randn(3, 10, 24, dtype=dtype, requires_grad=True)
    accountant = Accountant()
    plain = gradients(model, nullcontext(), x)
    moved = gradients(model, offload_activations(min_bytes=least, accountant=accountant), x)
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
    assert (accountant.peak_total_in(Tier.HOST) > 0) == (least < 1 << 20)


class Pieces(nn.Module):
    """Writes pieces of one storage in place, which have version counters of their own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.GRU(5, 5, batch_first=True) if kind == "GRU" else nn.Linear(5, 15)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.kind == "GRU":
            return (y[0] * torch.arange(1.0, 6.0)).tanh().sum()
        first, second, third = torch.unsafe_chunk(y, 3, -1) if self.kind == "chunk" else y.unsafe_split(5, -1)
        found = first.sigmoid_() * second.tanh_() + third.sigmoid_() * first
        for _ in range(4):  # what was saved first leaves the device
            found = found.sin() * found.cos()
        return found.square().sum()


def test_pieces_of_one_storage_that_are_written_in_place() -> None:
    for kind in ("GRU", "chunk", "split"):
        torch.manual_seed(0)
        model, x = Pieces(kind), torch.randn(2, 4, 5, requires_grad=True)
        plain = gradients(model, nullcontext(), x)
        moved = gradients(model, offload_activations(min_bytes=1), x)
        assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True)), kind


def test_a_tensor_that_several_nodes_save_is_copied_once() -> None:
    accountant = Accountant()
    x = torch.randn(32, 32, requires_grad=True)
    with offload_activations(min_bytes=LEAST, accountant=accountant):
        y = x * 2
        z = (y.sin() + y.cos() + y.t().exp().square() + y[8:].square().sum()).sum()  # exp's output is another tensor
    assert accountant.live_in(Tier.HOST)[Category.ACTIVATIONS] == 2 * y.nbytes
    z.backward()


def test_nothing_is_moved_that_is_alive_anyway() -> None:
    accountant = Accountant()
    model, batch = nn.Linear(64, 64), torch.randn(64, 64)
    leaf, table = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64)
    with offload_activations(min_bytes=LEAST, accountant=accountant, stay=[batch, table]):
        loss = (model(batch) * table[:, :32].repeat(1, 2)).sum() + (leaf * leaf).sum() + (model.weight.t() * 2).sum()
    kept = table[:, :32].repeat(1, 2)
    assert accountant.live_in(Tier.HOST)[Category.ACTIVATIONS] == kept.nbytes
    loss.backward()


def test_large_tensors() -> None:
    x = torch.full((18, 1 << 20), 0.5, requires_grad=True)
    accountant = Accountant()
    with offload_activations(accountant=accountant):
        loss = x.exp().square().sum()
    assert accountant.live_in(Tier.HOST)[Category.ACTIVATIONS] == x.nbytes >= 64 << 20
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad[::7, ::4096], 2 * x.detach()[::7, ::4096].exp().square())


# -- graphs ------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_graphs_that_are_used_twice() -> None:
    """What is made of a graph that is kept, handed out, or differentiated again."""
    stage = 3
    made = []
    case = CASES["gpt"]
    hidden: list[torch.Tensor] = []
    for extra in ((), MOVED):
        engine = start(case, Setting(stage, extra=extra))
        batch = case.data(0, 0, 0, torch.float32)
        values: list[torch.Tensor] = []
        loss = case.loss(engine, batch)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        handle = engine.module.norm.register_forward_pre_hook(lambda _, args: hidden.append(args[0]))
        loss = case.loss(engine, batch)
        values += torch.autograd.grad(loss, hidden[0], retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, hidden[0], create_graph=True)
        engine.backward(loss + gradient.square().sum())
        engine.step()
        handle.remove()
        # Two graphs at a time, differentiated in the order in which they were made.
        first, second = case.loss(engine, batch), case.loss(engine, batch)
        engine.backward(first)
        engine.backward(second)
        engine.step()
        del loss, gradient, first, second
        hidden.clear()
        gc.collect()
        assert engine.accountant.live_in(Tier.HOST)[Category.ACTIVATIONS] == 0
        values += [value.clone() for value in engine.module_state_dict().values()]
        engine.destroy()
        made.append(values)
    kept, moved = made
    assert all(torch.equal(one, other) for one, other in zip(kept, moved, strict=True))


def test_changes_after_saving_are_errors() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    with offload_activations(min_bytes=0):
        y = x * 2
        z = y.sin()
        y.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*is at version 1; expected version 0"):
        z.sum().backward()


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("on the way back")


def test_errors_leave_nothing_behind() -> None:
    accountant = Accountant()
    offload = offload_activations(min_bytes=LEAST, accountant=accountant)
    x = torch.randn(64, 64, requires_grad=True)
    with pytest.raises(ZeroDivisionError), offload:
        (x * 2).sin().exp()
        raise ZeroDivisionError
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    with offload:
        y = (x * 2).sin().exp().sin().exp()
        z = Failing.apply(y).sin().exp().sum()
    with pytest.raises(ValueError, match="on the way back"):
        z.backward()
    del y, z
    gc.collect()
    assert offload.held == 0 and accountant.live_in(Tier.HOST)[Category.ACTIVATIONS] == 0
    with offload:
        loss = (x * 2).sin().sum()
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, 2 * (x.detach() * 2).cos())


# -- memory ------------------------------------------------------------------------------------------------------------


def test_the_device_keeps_two_groups() -> None:
    size = 128 * 128 * 4
    accountant = Accountant()
    offload = offload_activations(min_bytes=LEAST, accountant=accountant)
    x = torch.randn(128, 128, requires_grad=True)
    for _ in range(2):
        accountant.reset_peak()
        with track_activations(accountant):
            with offload:
                y = x * 1.0
                for _ in range(20):
                    y = y.sin()  # saves its input
                loss = y.sum()
                del y
            assert accountant.live[Category.ACTIVATIONS] <= 2 * size + 64
            assert accountant.live_in(Tier.HOST)[Category.ACTIVATIONS] == 20 * size
            torch.autograd.grad(loss, x)
            del loss
        # Two groups, the tensor and the gradient at work, and what the kernel makes of them.
        assert accountant.peak[Category.ACTIVATIONS] <= (2 + 3) * size + 64
        assert accountant.peak_total_in(Tier.HOST) == 20 * size
        assert accountant.live_in(Tier.HOST)[Category.ACTIVATIONS] == offload.held == 0


# -- order -------------------------------------------------------------------------------------------------------------


class Again(GPT):
    def __init__(self) -> None:
        super().__init__()
        self.run = lambda block, x: checkpointing.checkpoint(block, x)


@pytest.mark.parametrize(("form", "stage"), [thorough("moved", 0), thorough("moved", 3), ("inputs", 3)])
def test_streams_are_in_order(stage: int, form: str) -> None:
    case = Case("again", Again, language, language_loss) if form == "inputs" else CASES["gpt"]
    setting = Setting(stage, precision="bf16", accumulation=2, extra=MOVED if form == "moved" else INPUTS)
    traces = record_all(case, setting, world=2, steps=2)
    copies = [e for e in traces[0].events if e.kind == "kernel" and e.stream.startswith("copies")]
    assert {event.stream for event in copies} >= {"copies", "copies.2"}
    assert [str(problem) for problem in checking.check(traces)] == []


# -- the configuration -------------------------------------------------------------------------------------------------


def small(**extra: Any) -> Any:
    torch.manual_seed(0)
    return engine_of(GPT(), 0, SGD, **extra)


def held_by(engine: Any, batch: Batch) -> int:
    loss = language_loss(engine, batch)
    held = engine.accountant.live_in(Tier.HOST)[Category.ACTIVATIONS]
    engine.backward(loss)
    engine.step()
    return int(held)


def test_what_the_configuration_asks_for() -> None:
    batch = {"tokens": torch.randint(31, (2, 13))}
    for section, moves in ({}, False), ({"enabled": True}, False), ({"enabled": True, "min_bytes": 0}, True):
        engine = small(activation_offload=section)
        assert (held_by(engine, batch) > 0) == moves  # nothing in this model has 1 MiB
        engine.destroy()
    with pytest.raises(ConfigError, match=r"activation_offload\.min_bytes"):
        small(activation_offload={"min_bytes": -1})
    with pytest.raises(ConfigError, match=r"activation_offload\.enable\b.*did you mean"):
        small(activation_offload={"enable": True})


def test_compiled_models() -> None:
    def trained(section: dict[str, Any]) -> list[torch.Tensor]:
        engine = small(activation_offload=section)
        engine.compile(backend="eager")
        batch = {"tokens": torch.arange(26).view(2, 13)}
        for _ in range(2):
            engine.backward(F.cross_entropy(engine(batch["tokens"]).flatten(0, 1), batch["tokens"].flatten()))
            engine.step()
        values = [value.clone() for value in engine.module_state_dict().values()]
        engine.destroy()
        return values

    plain, moved = trained({}), trained({"enabled": True, "min_bytes": LEAST})
    assert all(torch.equal(one, other) for one, other in zip(plain, moved, strict=True))
