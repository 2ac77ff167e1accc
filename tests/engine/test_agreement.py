"""Ranks that were given different things are told so before they exchange anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.moe import MoE
from tests.harness import on_ranks, run_ranks
from tests.harness.training import each


def model_of(what: str) -> nn.Module:
    if what in ("experts", "ep size"):
        experts = nn.Linear(4, 4) if what == "experts" else MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=1)
        return nn.ModuleDict({"experts": MoE(4, nn.Linear(4, 4), num_experts=4, ep_size=2) if odd() else experts})
    layers = [nn.Linear(4, 6 if odd() and what == "shape" else 4, bias=not (odd() and what == "names"))]
    layers += [nn.Linear(4, 4) for _ in range(2 if odd() and what == "layers" else 1)]
    if what == "shape":
        layers[1] = nn.Linear(layers[0].out_features, 4)
    model = nn.Sequential(*layers)
    if odd() and what == "frozen":
        model[0].bias.requires_grad_(False)
    return model.to(torch.float64) if odd() and what == "dtype" else model


def odd() -> bool:
    """Return True on the rank that is given something else."""
    return dist.get_rank() == 2


def failing(parameters: Any) -> torch.optim.Optimizer:
    raise ValueError("this optimizer cannot be made")


OTHER: dict[str, dict[str, Any]] = {
    "accumulation": {"gradient_accumulation_steps": 2},
    "clipping": {"gradient_clipping": 1.0},
    "stage": {"zero_optimization": {"stage": 1}},
    "optimizer": {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    "lr": {"optimizer": {"type": "AdamW", "params": {"lr": 0.2}}},
    "tensor size": {"tensor_parallel": {"autotp_size": 3}},
    "sequence size": {"sequence_parallel_size": 3},
    "no key": {"no_such_key": 1},
}


def config_of(what: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": dist.get_rank() + 10,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        **(OTHER.get(what, {}) if odd() else {}),
    }


def told(what: str) -> str:
    try:
        built: Any = torch.device("meta" if what == "meta" and not odd() else "cpu")
        if what == "zero.Init" and odd():
            built = shardwise.zero.Init(config_dict_or_path=config_of(what))
        with built:
            model = model_of(what)
        optimizer = failing if what == "optimizer fails" and odd() else None
        engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=config_of(what))
    except (ShardwiseError, ValueError) as error:
        return str(error)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    return ""


DIFFERENCES = {
    "shape": "parameter 0.weight: (4, 4) torch.float32, group 0 on rank 0, (6, 4) torch.float32",
    "names": "parameter 0.bias: (4,) torch.float32, group 0 on rank 0, nothing on rank 2",
    "layers": "parameter 2.weight: nothing on rank 0, (4, 4) torch.float32, group 0 on rank 2",
    "frozen": "parameter 0.bias: (4,) torch.float32, group 0 on rank 0, (4,) torch.float32, frozen on rank 2",
    "dtype": "torch.float64",
    "accumulation": "config gradient_accumulation_steps: 1 on rank 0, 2 on rank 2",
    "clipping": "config gradient_clipping: 0.0 on rank 0, 1.0 on rank 2",
    "stage": "config zero_optimization.stage: 3 on rank 0, 1 on rank 2",
    "optimizer": "config optimizer.type: 'adamw' on rank 0, 'SGD' on rank 2",
    "lr": "config optimizer.params.lr: 0.1 on rank 0, 0.2 on rank 2",
    "tensor size": "config tensor_parallel.autotp_size: 1 on rank 0, 3 on rank 2",
    "sequence size": "config sequence_parallel_size: 1 on rank 0, 3 on rank 2",
    "ep size": "layer of experts experts: 4 experts, ep_size 1 on rank 0, 4 experts, ep_size 2 on rank 2",
    "experts": "layer of experts experts: nothing on rank 0, 4 experts, ep_size 2 on rank 2",
}
REFUSED = {
    "zero.Init": ("All ranks make the same calls", "zero.Init"),
    "meta": ("of 3 built the model on the meta device, rank 2 with values", ""),
    "no key": ("rank 2 has refused its arguments with ConfigError", "no_such_key"),
    "optimizer fails": ("making the optimizer: rank 2 of 3 raised ValueError", "this optimizer cannot be made"),
}
"""What the other ranks say, and the rank itself."""


def test_what_differs_is_named_on_every_rank_and_what_a_rank_reports_is_its_own_affair() -> None:
    first, *others = run_ranks(each, 3, told, [(what,) for what in (*DIFFERENCES, "nothing")])
    assert others == [first, first]
    *messages, nothing = first
    assert nothing == ""
    for message, words in zip(messages, DIFFERENCES.values(), strict=True):
        assert words in message
        assert "rank 2 was not given the same as rank 0" in message


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_rank_refuses_is_an_error_on_all(what: str) -> None:
    found, (words, own) = run_ranks(told, 3, what), REFUSED[what]
    assert words in found[0] and words in found[1] and (own or words) in found[2]


@on_ranks(2)
def test_one_rank_may_report_alone(tmp_path: Path) -> None:
    own: dict[str, Any] = {"log_level": "info", "progress": {"mode": "lines"}}
    own["csv_monitor"] = {"enabled": True, "output_path": str(tmp_path)}
    config = config_of("nothing") | (own if dist.get_rank() == 0 else {})
    engine, *_ = shardwise.initialize(model=model_of("nothing"), config=config)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert engine.last_step.applied


@on_ranks(2)
def test_ranks_may_have_disks_of_their_own(tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path / f"rank{dist.get_rank()}")}
    config = config_of("nothing")
    config["zero_optimization"] |= {"offload_optimizer": offload, "offload_param": offload}
    engine, *_ = shardwise.initialize(model=model_of("nothing"), config=config)
    before = engine(torch.ones(1, 4)).detach().clone()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    assert not torch.equal(engine(torch.ones(1, 4)), before)
