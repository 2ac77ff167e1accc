"""Ranks that were given different things are told so before they exchange anything else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import DesyncError
from tests.harness import run_ranks
from tests.harness.training import each


def _model(rank: int, what: str) -> nn.Module:
    odd = rank == 2
    layers = [nn.Linear(4, 6 if odd and what == "shape" else 4, bias=not (odd and what == "names"))]
    layers += [nn.Linear(4, 4) for _ in range(2 if odd and what == "layers" else 1)]
    if what == "shape":
        layers[1] = nn.Linear(layers[0].out_features, 4)
    model = nn.Sequential(*layers)
    if odd and what == "frozen":
        model[0].bias.requires_grad_(False)
    return model.to(torch.float64) if odd and what == "dtype" else model


def _config(rank: int, what: str) -> dict[str, Any]:
    odd = rank == 2
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2 if odd and what == "accumulation" else 1,
        "gradient_clipping": 1.0 if odd and what == "clipping" else 0.0,
        "steps_per_print": rank + 10,
        "zero_optimization": {"stage": 1 if odd and what == "stage" else 3},
        "optimizer": {
            "type": "SGD" if odd and what == "optimizer" else "AdamW",
            "params": {"lr": 0.2 if odd and what == "lr" else 0.1},
        },
    }


def _told(what: str) -> str:
    rank = dist.get_rank()
    try:
        engine, *_ = shardwise.initialize(model=_model(rank, what), config=_config(rank, what))
    except DesyncError as error:
        return str(error)
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    engine.destroy()
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
}


def test_what_differs_is_named_on_every_rank_and_what_a_rank_reports_is_its_own_affair() -> None:
    first, *others = run_ranks(each, 3, _told, [(what,) for what in (*DIFFERENCES, "nothing")])
    assert others == [first, first]
    *messages, nothing = first
    assert nothing == ""
    for message, words in zip(messages, DIFFERENCES.values(), strict=True):
        assert words in message
        assert "rank 2 was not given the same as rank 0" in message


def own_disk(directories: list[str]) -> bool:
    rank = dist.get_rank()
    offload = {"device": "nvme", "nvme_path": directories[rank]}
    config = _config(rank, "nothing")
    config["zero_optimization"] |= {"offload_optimizer": offload, "offload_param": offload}
    engine, *_ = shardwise.initialize(model=_model(rank, "nothing"), config=config)
    before = engine(torch.ones(1, 4)).detach().clone()
    engine.backward(engine(torch.ones(1, 4)).sum())
    engine.step()
    changed = not torch.equal(engine(torch.ones(1, 4)), before)
    engine.destroy()
    return changed


def test_ranks_may_have_disks_of_their_own(tmp_path: Path) -> None:
    assert run_ranks(own_disk, 2, [str(tmp_path / "first"), str(tmp_path / "second")]) == [True, True]
