"""After a resize with an equal global batch: the same samples in each step, equal scalars on all ranks, and the
training of the run that was not resized, to rounding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import CheckpointError, DesyncError
from tests.checkpoint.job import Run, as_ranks, config, on_ranks
from tests.harness import thorough

BATCH = 12
"""Samples of a step; an epoch has four such steps and a rest."""


def trained(root: str, world: int, stage: int, dtype: str, load: bool, to: int) -> tuple[Any, torch.Tensor, list[int]]:
    """Train to a step; return the scalars that decide the next step, the weights, and this rank's samples."""
    settings = config(stage, dtype)
    del settings["gradient_accumulation_steps"]
    settings |= {"train_batch_size": BATCH, "train_micro_batch_size_per_gpu": 3 if world < 3 else 1}
    run = Run(settings, seed=2 if load else 1, noise=False)
    engine = run.engine
    if load:
        run.load(root)
    tokens: list[int] = []
    engine.module.register_forward_pre_hook(lambda module, inputs: tokens.extend(inputs[0].tolist()))
    while engine.global_steps < to:
        run.step()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    scaler = None if engine.loss_scaler is None else engine.loss_scaler.state_dict()
    scalars = [groups, engine.lr_scheduler.state_dict(), scaler, engine.global_steps, engine.global_samples]
    weights = torch.cat([value.flatten().float() for value in engine.module_state_dict().values()])
    engine.save_checkpoint(root) if not load and to == 2 else None
    return scalars, weights, tokens


@pytest.mark.parametrize("dtype", ["fp32", thorough("fp16")])
@pytest.mark.parametrize(("before", "after"), [(2, 1), thorough(1, 2), thorough(3, 2), thorough(2, 3), thorough(4, 1)])
def test_training_goes_on_as_if_not_resized(before: int, after: int, dtype: str, tmp_path: Path) -> None:
    root = str(tmp_path)
    on_ranks(trained, before, root, before, 1, dtype, False, 2)
    resized = on_ranks(trained, after, root, after, 2, dtype, True, 4)
    # The reference: the same checkpoint on the ranks that saved it.
    reference = on_ranks(trained, before, root, before, 1, dtype, True, 4)
    for scalars, weights, _ in resized:
        assert scalars == reference[0][0]  # on all ranks, and those of the run that was not resized
        torch.testing.assert_close(weights, reference[0][1], rtol=0, atol=1e-5 if dtype == "fp32" else 4e-3)
    seen, expected = (sorted(token for rank in ranks for token in rank[2]) for ranks in (resized, reference))
    assert seen == expected and len(seen) == 2 * BATCH


@as_ranks(2)
def test_a_scalar_that_differs_after_a_load_is_named(tmp_path: Path) -> None:
    run = Run(config(1), seed=1)
    run.engine.save_checkpoint(tmp_path)
    run.load(tmp_path)
    if torch.distributed.get_rank() == 1:
        run.engine.optimizer.param_groups[1]["weight_decay"] = 0.5
    run.load(tmp_path)  # replaces it
    if torch.distributed.get_rank() == 1:
        run.engine.optimizer.param_groups[1]["weight_decay"] = 0.5
    message = r"rank 1.*\n  optimizer group 1 weight_decay: 0\.1 on rank 0, 0\.5 on rank 1"
    with pytest.raises(DesyncError, match=message):
        run.load(tmp_path, load_param_groups=False)


def with_dropout(world: int, root: str, to: int) -> torch.Tensor:
    settings = config(1, sample_seed=7) | {"train_batch_size": BATCH}
    del settings["gradient_accumulation_steps"]
    run = Run(settings, seed=1)
    run.load(root) if to > 2 else None
    while run.engine.global_steps < to:
        run.step()
    run.engine.save_checkpoint(root) if to == 2 else None
    if to == 4:  # the epoch goes on with micro-batches of another size
        del settings["train_batch_size"]
        other = Run(settings | {"train_micro_batch_size_per_gpu": 2}, seed=1)
        with pytest.raises(CheckpointError, match=r"micro-batches of 3 samples, and now they have 2"):
            other.load(root)
    return torch.cat([value.detach().flatten() for value in run.engine.module.parameters()])


@pytest.mark.parametrize(("before", "after"), [(2, 1), thorough(4, 2), thorough(1, 4)])
def test_dropout_follows_the_sample(before: int, after: int, tmp_path: Path) -> None:
    """A rank with more micro-batches draws for each of them what another rank drew."""
    early = on_ranks(with_dropout, before, before, str(tmp_path / "a"), 2)
    other = on_ranks(with_dropout, after, after, str(tmp_path / "b"), 2)
    torch.testing.assert_close(early[0], other[0], rtol=0, atol=1e-5)
    resized = on_ranks(with_dropout, after, after, str(tmp_path / "a"), 4)
    reference = on_ranks(with_dropout, before, before, str(tmp_path / "a"), 4)
    torch.testing.assert_close(resized[0], reference[0], rtol=0, atol=1e-5)
    assert not torch.allclose(resized[0], early[0], rtol=0, atol=1e-3)
