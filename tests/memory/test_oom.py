"""Memory that has run out: what is said, and that the setting which is said to fit does run under the same limit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.memory import (
    MemoryLimit,
    OutOfMemoryError,
    limits,
    oom,
)
from tests.harness import on_ranks

CPU_ERROR = (
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "4194304 bytes. Error code 12 (Cannot allocate memory)"
)
MIB = 1 << 20


class Failing(nn.Module):
    """Fails in the forward or in the backward pass when it is told to, with a large tensor at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_error: Exception | None = None
        self.backward_error: Exception | None = None
        self.large: weakref.ref[torch.Tensor] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and not isinstance(x, torch._subclasses.FakeTensor):
            large = x * 2
            self.large = weakref.ref(large)
            if self.forward_error is not None:
                raise self.forward_error
            if self.backward_error is not None:
                return _Raise.apply(x, self.backward_error)
        return x * 2


class _Raise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: Exception) -> torch.Tensor:
        ctx.error = error
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise ctx.error


def build(stage: int = 0, micro: int = 64) -> tuple[Any, Failing]:
    failing = Failing()
    layers = [nn.Sequential(nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 64)) for _ in range(4)]
    config = {
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }
    engine, *_ = shardwise.initialize(model=nn.Sequential(*layers, failing), config=config)
    return engine, failing


def room_of(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Have there be room for so many bytes."""
    limit = MemoryLimit("a test", 10 * room, 5 * room, 5 * room)
    monkeypatch.setattr(oom, "memory_limit", lambda device, processes: limit)
    monkeypatch.setattr(oom, "engine_room", lambda *_: room)


KINDS: list[tuple[Callable[[], Exception], int | None]] = [
    (lambda: RuntimeError(CPU_ERROR), 4 * MIB),
    (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ..."), 20 * MIB),
    (MemoryError, None),
]


@pytest.mark.parametrize(("kind", "where"), [(0, "forward"), (1, "backward"), (2, "step")])
def test_what_is_said(where: str, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Large enough for activations to count: with one micro-batch gradients come when most of those have gone.
    engine, failing = build(micro=512)
    x = torch.randn(512, 64)
    room_of(monkeypatch, 100 * MIB)
    make, requested = KINDS[kind]
    raised = make()
    with pytest.raises(OutOfMemoryError) as told:
        if where == "forward":
            failing.forward_error = raised
        loss = engine(x).square().mean() if where == "forward" else None
        if loss is None:
            failing.backward_error = raised if where == "backward" else None
            loss = engine(x).square().mean()
        engine.backward(loss)
        monkeypatch.setattr(engine.optimizer, "step", _raiser(raised))
        engine.step()
    error = told.value
    # Whoever waits for any of the usual errors gets it; tools look for the usual words in the only argument.
    for kind_of in (torch.OutOfMemoryError, RuntimeError, MemoryError, ShardwiseError):
        assert isinstance(error, kind_of)
    assert error.__cause__ is raised and len(error.args) == 1
    text = str(error)
    call = {"forward": "the engine's forward()", "backward": "engine.backward()", "step": "engine.step()"}[where]
    assert text.startswith(f"rank 0 has run out of memory in {call}: {str(raised) or 'MemoryError'}")
    assert error.requested == requested
    assert (
        "Limit: a test" in text and "room for 100.00 MiB" in text and "held now" in text and "optimizer state" in text
    )
    assert "engine.memory_plans(batch)" in text and error.suggestion is None
    assert failing.large is not None and failing.large() is None  # what the failed pass held is free again
    engine.destroy()


def _raiser(error: Exception) -> Callable[..., None]:
    def step(*_: Any) -> None:
        raise error

    return step


def test_other_errors_pass_as_they_are() -> None:
    engine, failing = build()
    failing.forward_error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match=r"^shapes differ$") as told:
        engine(torch.randn(64, 64))
    assert type(told.value) is RuntimeError
    engine.destroy()


def test_when_there_is_no_memory_for_plans_either(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, failing = build()
    monkeypatch.setattr(oom, "memory_limit", _raiser(MemoryError("none left")))  # type: ignore[arg-type]
    failing.forward_error = MemoryError("first")
    with pytest.raises(OutOfMemoryError, match=r"Held when .*: parameters .*Not planned \(MemoryError: none left"):
        engine(torch.randn(64, 64))
    engine.destroy()


def test_initialize(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.zero.units.flat_param import FlatParamStorage

    calls = []
    original = FlatParamStorage.settle

    def settle(self: FlatParamStorage, *, keep_master: bool) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError(CPU_ERROR)
        original(self, keep_master=keep_master)

    monkeypatch.setattr(FlatParamStorage, "settle", settle)
    with pytest.raises(OutOfMemoryError) as told:
        build()
    text = str(told.value)
    assert "run out of memory in initialize()" in text and "Held when it happened: parameters" in text


@on_ranks(2)
def test_no_rank_waits_for_the_one_that_explains() -> None:
    """The other rank's pass ends; nothing in the explanation is a collective."""
    engine, failing = build(3)
    x = torch.randn(64, 64)
    engine.backward(engine(x).square().mean())
    engine.step()
    if torch.distributed.get_rank() == 0:
        engine(x)
        return
    failing.forward_error = RuntimeError(CPU_ERROR)
    with pytest.raises(OutOfMemoryError, match="rank 1 has run out of memory"):
        engine(x)
    failing.forward_error = None


# -- limits ------------------------------------------------------------------------------------------------------------


def test_control_groups(tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (root / "a" / "b").mkdir(parents=True)
    (root / "memory" / "old").mkdir(parents=True)
    files = {
        "a/memory.max": "4000000\n",
        "a/memory.current": "1000000\n",
        "a/b/memory.max": "max\n",
        "a/b/memory.current": "500000\n",
        "memory/old/memory.limit_in_bytes": "3000000\n",
        "memory/old/memory.usage_in_bytes": "2000000\n",
    }
    for name, text in files.items():
        (root / name).write_text(text)
    membership = tmp_path / "membership"
    membership.write_text("0::/a/b\n5:cpu,cpuacct:/x\n4:memory:/old\n")
    found = list(limits.control_groups(membership, root))
    assert [(group.path, group.limit, group.used()) for group in found] == [
        ("/a", 4000000, 1000000),
        ("/old", 3000000, 2000000),
    ]
    assert list(limits.control_groups(tmp_path / "none", root)) == []


def test_pages_of_files_count_as_free(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("4000000\n")
    (tmp_path / "memory.current").write_text("3900000\n")
    (tmp_path / "memory.stat").write_text("anon 900000\ninactive_file 2500000\nactive_file 400000\nshmem 5000\n")
    membership = tmp_path / "membership"
    membership.write_text("0::/\n")
    (group,) = limits.control_groups(membership, tmp_path)
    assert group.used() == 1000000
    assert limits.lowest_free([group])[1:] == (4000000, 3000000)
    (tmp_path / "memory.stat").write_text("total_inactive_file 1000000\ninactive_file 5\n")
    assert group.used() == 2900000
    assert group.used(exact_above=4000000) == 3900000


# -- under a real limit ------------------------------------------------------------------------------------------------

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3}}


def under_limit(room: int, width: int, config: dict[str, Any], world: int = 1) -> list[dict[str, Any]]:
    """Run the script `limited.py` on some ranks, with so many MiB of address space for model and training."""
    asked = json.dumps({"room": room, "width": width, "config": config})
    port = str(29500 + os.getpid() % 20000)
    processes = []
    for rank in range(world):
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",  # otherwise the C library reserves addresses for each thread
            "MALLOC_MMAP_THRESHOLD_": "4194304",  # as under `shardwise run`: otherwise its heap breaks up, by chance
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        command = [sys.executable, str(Path(__file__).parent / "limited.py"), asked]
        processes.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=240) for process in processes]
    assert all(out.strip() for out, _ in said), "\n".join(f"{out}\n{err[-3000:]}" for out, err in said)
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in said]


@pytest.mark.slow
def test_memory_that_runs_out_under_a_limit() -> None:
    (told,) = under_limit(400, 16384, {"train_micro_batch_size_per_gpu": 512, "optimizer": OPTIMIZER})
    # How much the process maps before differs between processors.
    assert re.search(r"rank 0 has run out of memory in (engine\.backward\(\)|the engine's forward\(\)): ", told["text"])
    assert told["cause"] == "RuntimeError"
    assert "Limit: RLIMIT_AS" in told["text"]
    assert told["requested"] >= 16 * MIB


@pytest.mark.slow
@pytest.mark.thorough
def test_a_smaller_micro_batch_fits() -> None:
    smaller = {"train_micro_batch_size_per_gpu": 64, "gradient_accumulation_steps": 8}
    assert under_limit(400, 16384, {**smaller, "optimizer": OPTIMIZER}) == [{"steps": 2}]
