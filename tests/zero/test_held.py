"""What a script holds on to when a sharded unit is released: it stays valid, with the values it had, or raises."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import ReleasedParameterError
from shardwise.memory import Category
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import SGD, Setting, Tensors, engine_of, start, take_steps
from tests.models import CASES

WAYS: dict[str, Callable[[nn.Parameter], Any]] = {
    "detached": lambda p: p.detach(),
    "moved": lambda p: p.detach().cpu(),
    "data": lambda p: p.data,
    "row": lambda p: p.detach()[0],
    "transposed": lambda p: p.detach().t(),
    "reshaped": lambda p: p.view(-1),
    "numpy": lambda p: p.detach().numpy(),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "parts": lambda p: p.detach().unbind()[-1],
    "list": lambda p: [p.detach()],
}


def copied(held: Any) -> torch.Tensor:
    """The values of something held, in memory of their own."""
    if isinstance(held, list):
        held = held[0]
    return torch.from_numpy(held.copy()) if isinstance(held, np.ndarray) else held.detach().clone()


class Holder:
    """A program that trains and holds on to tensors; all ranks do the same.

    Every action is one method; what is held is compared with what it was when it was taken.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.case = CASES[self.random.choice(["gpt", "gpt_functional_head", "odd_mlp", "two_towers"])]
        self.engine = start(
            self.case,
            Setting(
                stage=3,
                precision=self.random.choice(["fp32", "bf16"]),
                optimizer=self.random.choice(["SGD", "AdamW", "momentum"]),
                cap=self.random.choice([None, 300]),
                prefetch=self.random.random() < 0.7,
            ),
        )
        self.module = self.engine.module
        self.matrices = [p for p in self.module.parameters() if p.dim() == 2 and p.numel()]
        self.held: list[tuple[Any, torch.Tensor]] = []
        self.addresses = {id(p): p.data_ptr() for p in self.module.parameters()}
        self.steps = 0

    def hold(self, value: Any) -> None:
        self.held.append((value, copied(value)))

    def batch(self) -> Any:
        self.steps += 1
        dtype = next(p.dtype for p in self.module.parameters() if p.is_floating_point())
        return self.case.data(self.steps, 0, dist.get_rank(), dtype)

    def train(self) -> None:
        self.engine.backward(self.case.loss(self.engine, self.batch()))
        self.engine.step()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.case.loss(self.engine, self.batch())

    def forward_only(self) -> None:
        loss = self.case.loss(self.engine, self.batch())
        if self.random.random() < 0.5:
            self.hold(loss)

    def gather(self) -> None:
        chosen = self.random.sample(self.matrices, self.random.randint(1, len(self.matrices)))
        way = WAYS[self.random.choice(list(WAYS))]
        with shardwise.zero.GatheredParameters(chosen, modifier_rank=self.random.choice([None, 0])):
            for parameter in chosen:
                if parameter.dtype is not torch.bfloat16 or way is not WAYS["numpy"]:
                    self.hold(way(parameter))

    def gather_all(self) -> None:
        with (
            self.engine.gathered()
            if self.random.random() < 0.5
            else shardwise.zero.GatheredParameters(list(self.module.parameters()))
        ):
            for value in self.module.state_dict().values():
                self.hold(value)

    def watch_forward(self) -> None:
        way = WAYS[self.random.choice(["detached", "data", "row", "transposed"])]
        chosen = self.random.choice([m for m in self.module.modules() if isinstance(m, nn.Linear)])
        hook = chosen.register_forward_hook(lambda module, args, out: self.hold(way(module.weight)))
        self.random.choice([self.train, self.evaluate])()
        hook.remove()

    def watch_gradients(self) -> None:
        hook = self.random.choice(self.matrices).register_hook(lambda gradient: self.hold(gradient))
        self.train()
        hook.remove()

    def watch_optimizer(self) -> None:
        def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.hold(parameter.grad)

        hook = self.engine.optimizer.register_step_pre_hook(look)
        self.train()
        hook.remove()

    def retain(self) -> None:
        """Differentiate a graph twice, with the values of all units released in between."""
        loss = self.case.loss(self.engine, self.batch())
        self.engine.backward(loss, retain_graph=True)
        self.engine.empty_partition_cache()
        self.engine.backward(loss)
        self.engine.step()

    def look(self) -> None:
        """Read released parameters where nothing can notice it, and ask for their addresses."""
        for parameter in self.random.sample(self.matrices, 1):
            # NaN, or the values: the unit that a backward pass needs first is kept for it.
            for value in (torch.tensor(parameter), _read(parameter)):
                assert bool(value.isnan().all()) or bool(value.isfinite().all())
            with pytest.raises(ReleasedParameterError):
                parameter.sum()
        now = {id(p): p.data_ptr() for p in self.module.parameters()}
        assert now == self.addresses and len(set(now.values())) == len(now)
        assert all(p.untyped_storage().nbytes() > 0 and p.is_contiguous() for p in self.module.parameters())

    def read(self) -> None:
        for value, expected in self.held:
            assert torch.equal(copied(value), expected) or bool(expected.isnan().any())

    def forget(self) -> None:
        # Ranks hold different numbers of tensors: what they draw together must not depend on it.
        self.held = random.Random(self.steps).sample(self.held, len(self.held) // 2)

    def run(self) -> list[str]:
        actions = [
            self.train, self.evaluate, self.forward_only, self.gather, self.gather, self.gather_all,
            self.watch_forward, self.watch_gradients, self.watch_optimizer, self.retain, self.look, self.read,
            self.forget, self.engine.empty_partition_cache,
        ]  # fmt: skip
        done = []
        for action in self.random.choices(actions, k=6):
            done.append(action.__name__)
            action()
        self.read()
        self.engine.destroy()
        self.read()
        assert all(bool(p.isfinite().all()) for p in self.module.parameters())
        return done


def _read(parameter: nn.Parameter) -> torch.Tensor:
    """The values of a parameter, as code that knows nothing of overrides reads them."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach() * 1


def programs(first: int, count: int) -> int:
    """Run random programs; return how many actions they took. A failure tells the seed."""
    actions = 0
    for seed in range(first, first + count):
        try:
            actions += len(Holder(seed).run())
        except Exception as error:
            raise AssertionError(f"program {seed}: {type(error).__name__}: {error}") from error
    return actions


@pytest.mark.parametrize("block", [0, *map(thorough, range(1, 80))])
def test_random_programs_that_hold_on_to_tensors(block: int) -> None:
    assert run_ranks(programs, 2, 4 * block, 4) == [24, 24]


@on_ranks(2)
def test_what_was_taken_from_gathered_parameters_stays_valid_and_is_counted() -> None:
    case = CASES["gpt"]
    engine = start(case, Setting(stage=3))
    parameter = engine.module.blocks[1].up.weight
    for way, take in WAYS.items():
        with shardwise.zero.GatheredParameters([parameter]):
            held = take(parameter)
            expected = copied(held)
        assert engine.accountant.live[Category.GATHERED] > 0, way
        take_steps(engine, case, [0])
        assert torch.equal(copied(held), expected), way
        del held
        assert engine.accountant.live[Category.GATHERED] == 0, way


class KeepsGradients(torch.optim.SGD):
    """An optimizer whose state refers to the last gradients instead of copying them."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["last"] = parameter.grad
        return found


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 2)])
@on_ranks("world")
def test_an_optimizer_may_refer_to_gradients_between_steps(stage: int, world: int) -> None:
    case = CASES["gpt"]
    model = case.make()
    engine = start(case, Setting(stage=stage), model, KeepsGradients(model.parameters(), lr=0.1))
    for step in range(3):
        take_steps(engine, case, [step])
        assert all(float(state["last"].norm()) > 0 for state in engine.optimizer.state.values())


@on_ranks(2)
def test_hooks_that_keep_what_they_are_given_hold_no_whole_values() -> None:
    """Hooks around the forward pass that keep every tensor as it is do not keep whole values either."""
    case = CASES["gpt"]
    engine = start(case, Setting(stage=3))
    losses = []
    for hooks in (False, True):
        around = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
        with around if hooks else contextlib.nullcontext():
            loss = case.loss(engine, case.data(0, 0, dist.get_rank(), torch.float32))
        live = engine.accountant.live[Category.GATHERED]
        engine.backward(loss)
        norm = float(shardwise.utils.safe_get_full_grad(next(engine.module.parameters())).norm())
        losses.append([float(loss), live, norm])
        engine.zero_grad()
    without, with_hooks = losses
    assert without == with_hooks


@on_ranks(2)
def test_addresses_of_parameters_that_were_built_sharded_are_distinct_and_stable() -> None:
    case = CASES["gpt"]
    with shardwise.zero.Init():
        model = case.make()
    parameters = list(model.parameters())
    assert len({p.data_ptr() for p in parameters}) == len(parameters)
    engine = start(case, Setting(stage=3), model)
    first = [p.data_ptr() for p in parameters]
    loss = case.loss(engine, case.data(0, 0, dist.get_rank(), torch.float32))
    assert first == [p.data_ptr() for p in parameters]
    engine.backward(loss)
    engine.step()
    assert first == [p.data_ptr() for p in parameters]
    assert len(set(first)) == len({p.untyped_storage().data_ptr() for p in parameters}) == len(parameters)


@on_ranks(2)
def test_an_address_in_a_pass_is_that_of_the_values() -> None:
    """A kernel that is given an address in a pass (Triton's launcher asks for it) finds the values there."""
    case = CASES["gpt"]
    model = case.make()
    parameter = next(model.blocks[0].parameters())
    expected = parameter.detach().clone()
    engine = start(case, Setting(stage=3), model)
    found: list[bool] = []

    def kernel(module: Any, given: Any) -> None:
        read = (ctypes.c_float * parameter.numel()).from_address(parameter.data_ptr())
        found.append(torch.equal(torch.tensor(list(read)).view(expected.shape), expected))

    hook = model.blocks[2].register_forward_pre_hook(kernel)
    for micro in range(2):
        engine.backward(case.loss(engine, case.data(micro, 0, dist.get_rank(), torch.float32)))
    hook.remove()
    assert found == [True] * 2


# -- autograd functions that keep a parameter -----------------------------------------------------------------------


class FusedLoss(torch.autograd.Function):
    """Cross-entropy of a head, which keeps the parameter itself for its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        likely = (x @ weight.t()).softmax(-1)
        ctx.save_for_backward(x, likely, labels)
        ctx.weight = weight
        return nn.functional.nll_loss(likely.log(), labels)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, likely, labels = ctx.saved_tensors
        d = (likely - nn.functional.one_hot(labels, likely.shape[-1])) / len(labels) * grads[0]
        return d @ ctx.weight, d.t() @ x, None


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 8, bias=False)
        self.loss: Any = None

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.body(x).tanh()
        self.loss = FusedLoss.apply(h, self.head.weight, labels)
        return h


def fused(stage: int, how: str) -> Tensors:
    engine = engine_of(Fused(), stage, SGD, train_micro_batch_size_per_gpu=5)
    weight = engine.module.head.weight
    for number in range(3):
        torch.manual_seed(10 * number + dist.get_rank())
        x, labels = torch.randn(5, 6), torch.randint(0, 8, (5,))
        h = engine(x, labels)
        loss = engine.module.loss
        if how == "in a block":
            with shardwise.zero.GatheredParameters(weight):
                loss = FusedLoss.apply(h, weight, labels)
        elif how == "outside":
            with pytest.raises(ReleasedParameterError, match=r"Compute a loss from them in the model's forward\(\)"):
                FusedLoss.apply(h, weight, labels)
        engine.backward(loss)
        engine.step()
    found = engine.module_state_dict()
    engine.destroy()
    return found


@on_ranks(2)
def test_a_loss_whose_function_keeps_a_parameter_may_be_differentiated_outside_of_forward() -> None:
    expected = fused(0, "kept on the module")
    for how in ("kept on the module", "in a block", "outside"):
        found = fused(3, how)
        if dist.get_rank() == 0:
            assert all(torch.equal(value, found[name]) for name, value in expected.items()), how
