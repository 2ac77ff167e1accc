"""`torch.set_default_device` and `torch.set_default_dtype` have no say: the library names device and dtype itself."""

from __future__ import annotations

import ast
import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise.checkpoint.load import set_group
from shardwise.comm.compression.quantize import BlockCode
from shardwise.device.staging import CopyStream
from shardwise.memory import Category
from shardwise.memory.places import TieredTensors
from shardwise.offload.host import HostPlace
from shardwise.optim.rounding import random_bits
from shardwise.precision.norms import SMALL, Runs
from tests.checkpoint.job import Run, config
from tests.checkpoint.test_async import content
from tests.harness import on_ranks

CPU = torch.device("cpu")
ROOT = Path(shardwise.__file__).parent
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


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@functools.cache
def calls() -> list[tuple[Path, Any]]:
    """Return the calls of functions of torch that make tensors in the source, with their files."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            function = call.func if isinstance(call, ast.Call) else None
            named = isinstance(function, ast.Attribute) and function.attr in FACTORIES
            if named and ast.unparse(function.value) == "torch":
                found.append((path, call))
    return found


def test_every_tensor_that_is_made_says_where() -> None:
    silent = [
        f"{path.relative_to(ROOT)}:{call.lineno}: {ast.unparse(call)}"
        for path, call in calls()
        if not any(keyword.arg in ("device", None) for keyword in call.keywords)
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
    tiered = TieredTensors(HostPlace(CPU, pinned=pinned), shardwise.memory.Accountant())
    tensor = torch.arange(4.0, device=CPU)
    tiered.keep(Category.MASTER, tensor)
    assert tiered.in_place(tensor).tolist() == [0, 1, 2, 3]
    with tiered.use(written=False):
        assert tensor.tolist() == [0, 1, 2, 3]


OTHERS = [torch.bfloat16, torch.float64]


@pytest.mark.parametrize("dtype", OTHERS)
def test_quantised_messages_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    code, values = BlockCode(bits=8, block=32), torch.randn(3, 77, generator=torch.Generator().manual_seed(1))
    messages, errors = [], []
    for default in (torch.float32, dtype):
        with default_dtype(default):
            messages.append(torch.zeros(3, code.nbytes(77), dtype=torch.uint8))
            errors.append(torch.full((3, 77), 0.01, dtype=torch.float32))
            code.encode(values, messages[-1], error=errors[-1], generator=torch.Generator().manual_seed(2))
    assert torch.equal(*messages) and torch.equal(*errors)


def test_a_tensor_setting_of_a_group_is_restored_exactly() -> None:
    group: dict[str, Any] = {"lr": torch.zeros((), dtype=torch.float64)}
    with default_dtype(torch.bfloat16):
        set_group(group, {"lr": 0.1})
    assert group["lr"].item() == 0.1


@on_ranks(2)
def test_a_checkpoint_does_not_depend_on_the_default_dtype(tmp_path: Path) -> None:
    run = Run(config(1), seed=1)
    run.engine.save_checkpoint(tmp_path, tag="a")
    for dtype in OTHERS:
        with default_dtype(dtype):
            run.engine.save_checkpoint(tmp_path, tag="b")
        torch.distributed.barrier()
        assert content(f"{tmp_path}/b") == content(f"{tmp_path}/a")
