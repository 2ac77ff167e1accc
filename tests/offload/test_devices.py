"""A device that is not the processor: nothing of either is used together with the other.

The engine's parts run on tensors without memory of a device that does not exist, for which torch still checks that
operations have all of their tensors on one device. torch cannot forget such a device: each place has a process.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.backend_registration
from torch import nn

from shardwise.config import resolve
from shardwise.engine import dryrun
from shardwise.memory import Tier
from shardwise.memory.dryrun import fake_copy
from shardwise.optim import registry
from tests.harness import thorough
from tests.offload.settings import FROM_STAGE_1, PLACES, offload

DEVICE = "npy:0"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.float().square().mean()


def moved(module: nn.Module, mode: Any) -> nn.Module:
    twin = fake_copy(module, mode)
    with mode:
        for part in twin.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    blank = torch.empty(parameter.shape, dtype=parameter.dtype, device=DEVICE)
                    part._parameters[name] = nn.Parameter(blank)
    return twin


plain_tensor = torch.tensor


def made_there(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    made = plain_tensor(data, **options)
    return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)


@contextlib.contextmanager
def another_device() -> Iterator[None]:
    with (
        mock.patch.object(dryrun, "fake_copy", moved),
        mock.patch("torch.random.fork_rng", lambda *_: contextlib.nullcontext()),
        mock.patch("torch.tensor", made_there),
    ):
        yield


def planned(place: str, stage: int, kind: str, precision: str, accumulation: int) -> tuple[int, dict[str, int]]:
    model = Net()
    zero = offload(place, "unused")
    if kind == "torch":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    else:
        options = {"device": torch.device("cpu"), "named": list(model.named_parameters())}
        optimizer = registry.build(kind, list(model.parameters()), {"lr": 1e-3}, **options)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
    }
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    with another_device():
        groups = [group["params"] for group in optimizer.param_groups]
        settings = resolve(config, world_size=2).config
        twin = dryrun.DryRunEngine(model, optimizer, groups, settings, world=2, device=torch.device(DEVICE))
        plan = twin.run(torch.empty((4, 64), dtype=dtype, device="meta"), accumulation)
    return plan.total, plan.elsewhere


KINDS = ("torch", "AdamW", "Lamb", "Muon", "Lion")
PRECISIONS = ("fp32", "bf16", "fp16")


def plan_all(place: str, kinds: tuple[str, ...]) -> None:
    torch.utils.backend_registration._setup_privateuseone_for_python_backend("npy")
    for stage in (1, 3) if place in FROM_STAGE_1 else (3,):
        for number, kind in enumerate(kinds):
            precision = PRECISIONS[(number + stage) % 3]
            _, elsewhere = planned(place, stage, kind, precision, accumulation=1 + number % 2)
            assert elsewhere[(Tier.DISK if "on disk" in place else Tier.HOST).value], (stage, kind, precision)


@pytest.mark.parametrize(
    ("place", "kinds"), [("some parameters near", ("torch", "Lamb")), *(thorough(place, KINDS) for place in PLACES)]
)
def test_nothing_of_two_devices_meets(place: str, kinds: tuple[str, ...]) -> None:
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch makes no devices of Python")
    code = f"from tests.offload import test_devices; test_devices.plan_all({place!r}, {kinds!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
