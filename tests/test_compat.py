"""What shardwise takes for granted about torch and torch does not document: a version that differs fails here."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from shardwise import compat


def test_a_backward_pass_has_a_number_on_its_thread_only() -> None:
    seen: list[int | None] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: seen.append(compat.backward_pass()))
    for _ in range(2):
        (2 * x).sum().backward()
    assert compat.backward_pass() is None
    assert None not in seen and seen[0] != seen[1]


def test_autograd_tells_which_parameters_get_gradients() -> None:
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    nodes = [get_gradient_edge(parameter).node for parameter in (used, unused)]
    seen: list[list[bool]] = []

    def look(_: torch.Tensor) -> None:
        seen.append([compat.will_run(node) for node in nodes])

    out = used * 2
    out.register_hook(look)
    out.sum().backward(retain_graph=True)
    torch.autograd.grad(out.sum(), used)
    assert seen == [[True, False], [False, False]]


def test_nodes_are_numbered_in_the_order_in_which_they_are_made() -> None:
    x = torch.ones(2, requires_grad=True)
    begin = compat.number_now()
    first = 2 * x
    middle = compat.number_now()
    second = first + 1
    assert first.grad_fn is not None and second.grad_fn is not None
    numbers = compat.number_of(first.grad_fn), compat.number_of(second.grad_fn)
    assert begin <= numbers[0] < middle <= numbers[1] < compat.number_now()
    assert compat.number_of(get_gradient_edge(x).node) == compat.LEAF_NUMBER


def test_autograd_tells_which_node_runs() -> None:
    seen: list[int | None] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            node = compat.current_node()
            seen.append(None if node is None else compat.number_of(node))
            return gradient

    out = Look.apply(torch.ones(2, requires_grad=True))
    out.sum().backward()
    assert seen == [compat.number_of(out.grad_fn)] and compat.current_node() is None


def test_callbacks_run_at_the_end_of_a_backward_pass() -> None:
    order: list[str] = []
    x = torch.ones(2, requires_grad=True)
    out = 2 * x

    def begins(_: torch.Tensor) -> None:
        compat.at_end_of_backward(lambda: order.append("end"))
        order.append("begins")

    out.register_hook(begins)
    x.register_hook(lambda _: order.append("leaf"))
    out.sum().backward()
    assert order == ["begins", "leaf", "end"]


def test_the_innermost_saved_tensor_hooks_are_known() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    assert compat.saved_hooks_in_force(True) is None
    with saved_tensors_hooks(pack, pack):
        assert compat.saved_hooks_in_force(True) == (pack, pack)
        assert compat.reason_against_saved_hooks() is None
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert compat.reason_against_saved_hooks() == "not here"


def test_running_calls_of_a_module_are_counted() -> None:
    seen: list[int] = []

    class Nested(nn.Module):
        def forward(self, depth: int) -> None:
            seen.append(compat.calls_running(self))
            if depth:
                self(depth - 1)

    module = Nested()
    module.register_forward_pre_hook(lambda *_: seen.append(compat.calls_running(module)))
    module(1)
    assert seen == [1, 1, 2, 2] and compat.calls_running(module) == 0


def test_schedulers_mark_the_step_that_they_wrap() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    assert compat.only_counts_steps(vars(optimizer)["step"])
    assert not compat.only_counts_steps(lambda: None)


def test_versions_count_changes_in_place_but_not_those_of_data() -> None:
    parameter = nn.Parameter(torch.ones(2))
    before = parameter._version
    with torch.no_grad():
        parameter.add_(1)
    after = parameter._version
    parameter.data.add_(1)
    assert (after - before, parameter._version - after) == (1, 0)


def test_storages_know_who_refers_to_them() -> None:
    tensor = torch.ones(4)
    alone = compat.storage_users(tensor)
    view = tensor[:2]
    assert alone is not None and compat.storage_users(tensor) == alone + 1
    del view
    assert compat.storage_users(tensor) == alone


def test_a_graph_holds_what_is_kept_with_it() -> None:
    class Kept:
        pass

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    x = torch.ones(2, requires_grad=True)
    compat.keep_with_graph(x, "kept", None)  # it has no graph
    for make in (lambda: x * 2, lambda: Own.apply(x)):
        made = make()
        value = Kept()
        known = weakref.ref(value)
        compat.keep_with_graph(made, "kept", value)
        loss = made.sum()
        del value, made
        loss.backward()
        assert known() is not None
        del loss
        assert known() is None


def test_locals_of_a_running_function_are_read_and_not_kept() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def running() -> bool:
        values, name = torch.ones(3), "here"
        held.append(weakref.ref(values))
        assert compat.local_of(sys._getframe(), "name") == name and compat.local_of(sys._getframe(), "absent") is None
        del values
        return held[0]() is None

    assert running()
    code = compile("found = local_of(sys._getframe(), 'there'), there", "script.py", "exec")
    script = {"local_of": compat.local_of, "sys": sys, "there": 5}
    exec(code, script)  # the locals of a module are its globals, which stay
    assert script["found"] == (5, 5)


@pytest.mark.parametrize(("capability", "writes"), [((8, 0), True), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_devices_that_leave_gradients_of_unused_experts_unwritten(
    capability: tuple[int, int], writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert compat.writes_empty_groups(torch.device("cuda", 0)) is writes
    assert compat.writes_empty_groups(torch.device("cpu"))
