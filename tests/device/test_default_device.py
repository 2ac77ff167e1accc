"""`torch.set_default_device` has no say: what the library makes is where it is used."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.device.staging import CopyStream
from shardwise.memory import Category
from shardwise.memory.places import Loans
from shardwise.offload.host import HostPlace
from shardwise.optim.rounding import random_bits
from shardwise.precision.norms import SMALL, Runs

CPU = torch.device("cpu")
FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


@pytest.fixture
def elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


def test_every_tensor_that_is_made_says_where() -> None:
    root = Path(shardwise.__file__).parent
    silent = [
        f"{path.relative_to(root)}:{call.lineno}: {ast.unparse(call)}"
        for path in sorted(root.rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and (call.func.value.id, call.func.attr in FACTORIES) == ("torch", True)
        and not any(keyword.arg in ("device", None) for keyword in call.keywords)
    ]
    assert silent == []


@pytest.mark.usefixtures("elsewhere")
def test_norms_of_what_lives_on_the_host() -> None:
    values = torch.ones(SMALL + 1, device=CPU)
    sums = Runs([(0, values), (1, values[:10])], 2, CPU).sums_of_squares()
    assert sums.tolist() == pytest.approx([SMALL + 1, 10])


@pytest.mark.usefixtures("elsewhere")
def test_random_numbers_for_rounding_on_the_host() -> None:
    def scratch(what: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=CPU)

    bits = random_bits(9, [(0, 0, 0, 9)], seed=1, step=1, stream=0, device=CPU, scratch=scratch)
    assert bits.device == CPU and len(set(bits.tolist())) > 5


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("pinned", [True, False])
def test_memory_of_the_host_is_there(pinned: bool) -> None:
    assert CopyStream(CPU).host_bytes(3).device == CPU
    loans = Loans(HostPlace(CPU, pinned=pinned), shardwise.memory.Accountant())
    tensor = torch.arange(4.0, device=CPU)
    loans.keep(Category.MASTER, tensor)
    assert loans.in_place(tensor).tolist() == [0, 1, 2, 3]
    with loans.lent_out(written=False):
        assert tensor.tolist() == [0, 1, 2, 3]
