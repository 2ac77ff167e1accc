"""Models of transformers, whose layers are divided, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.boxes import ranges
from tests.harness import run_ranks
from tests.parallel.tensor.tiny import FAMILIES, ROWS, alone, batch, build

STEPS = 20


def itself(model: nn.Module) -> nn.Module:
    return model


def config(stage: int, size: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "tensor_parallel": {"autotp_size": size},
        "optimizer": {"type": "SGD", "params": {"lr": 0.02, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 1e9,
        **more,
    }


def own_part(tensor: Any, value: torch.Tensor) -> torch.Tensor:
    """What this rank has of a whole tensor."""
    for dim, runs in enumerate(ranges(tensor.box) if tensor.box else ()):
        value = torch.cat([value.narrow(dim, first, end - first) for first, end in runs], dim)
    return value


def train(
    family: str,
    settings: dict[str, Any],
    steps: int = STEPS,
    prepare: Callable[[nn.Module], nn.Module] = itself,
    **more: Any,
) -> Any:
    """Train divided; return losses, gradient norm, each parameter with what it is of, and each rank's matrices."""
    model = prepare(build(family, seed=dist.get_rank(), **more))
    engine, *_ = shardwise.initialize(model=model, config=settings)
    copy = engine.get_data_parallel_rank()
    losses = []
    for step in range(steps):
        given = batch(family, step, engine.dp_world_size * ROWS)
        loss = engine(**{key: value[copy * ROWS : (copy + 1) * ROWS] for key, value in given.items()}).loss
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(float(mean) / dist.get_world_size())
        engine.backward(loss)
        engine.step()
    norm = float(engine.get_global_grad_norm())
    with shardwise.zero.GatheredParameters(list(engine.module.parameters())):
        registry = engine.sharded.registry
        parts = {t.name: (t, p.detach().clone()) for t, p in zip(registry, registry.parameters, strict=True)}
    engine.destroy()
    return losses, norm, parts


def compare(found: list[Any], expected: Any, bound: float = 2e-5) -> float:
    """Compare what ranks have found with one process; return the share of all elements that the first rank has."""
    losses, grads, exact = expected
    norm = torch.stack([grad.norm() for grad in grads.values()]).norm()
    for one in found:
        assert one[0] == pytest.approx(losses, rel=bound)
        assert one[1] == pytest.approx(float(norm), rel=10 * bound)
        for name, (tensor, value) in one[2].items():
            whole = exact[name]
            assert (value - own_part(tensor, whole)).norm() <= bound * max(float(whole.norm()), 1.0), name
    parts = found[0][2]
    return sum(value.numel() for _, value in parts.values()) / sum(exact[name].numel() for name in parts)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_training_is_that_of_one_process(family: str, size: int, stage: int) -> None:
    found = run_ranks(train, size, family, config(stage, size))
    share = compare(found, alone(family, STEPS, 1))
    assert share < 0.5 + 0.6 / size
