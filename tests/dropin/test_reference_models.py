"""A model that is only evaluated beside the one that is trained, as preference optimisation has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.dropin.clients import MISSING, gpt2, mean_over_ranks, on_clients, tokens

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def likelihoods(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """Log-likelihood of each row."""
    scores = F.log_softmax(model(input_ids=rows).logits[:, :-1], -1)
    return scores.gather(-1, rows[:, 1:, None]).squeeze(-1).sum(-1)


def preference(policy: Any, reference: Any, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The loss of direct preference optimisation."""
    with torch.no_grad():
        given = likelihoods(reference, chosen) - likelihoods(reference, rejected)
    ours = likelihoods(policy, chosen) - likelihoods(policy, rejected)
    return -F.logsigmoid(0.1 * (ours - given)).mean()


def pairs(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    chosen, rejected = tokens(32).view(2, 4, 2, 2, 16)[:, step, rank]
    return chosen, rejected


def trained(stage: int, reference_stage: int) -> list[float]:
    """Losses of a policy whose reference has no optimizer in its configuration, prepared as TRL does."""
    import deepspeed  # type: ignore[import-not-found]

    base = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0}}
    zero = {"stage3_param_persistence_threshold": 0}
    config = base | {"zero_optimization": zero | {"stage": stage}, "optimizer": optimizer}
    policy, *_ = deepspeed.initialize(model=gpt2(), config=config)
    frozen = gpt2()
    given: dict[str, Any] = base | {"zero_optimization": {"stage": reference_stage}}
    if reference_stage == 3:
        # As TRL writes them: from the width of the model, and at the top level.
        given["zero_optimization.reduce_bucket_size"] = 16 * 16
        given["zero_optimization.stage3_param_persistence_threshold"] = 10 * 16
        given["zero_optimization.stage3_prefetch_bucket_size"] = 0.9 * 16 * 16
    reference, *others = deepspeed.initialize(model=frozen, config=given)
    reference.eval()
    assert others == [None, None, None] and not reference.training
    rank = dist.get_rank()
    losses = []
    for step in range(4):
        loss = preference(policy, reference, *pairs(step, rank))
        policy.backward(loss)
        policy.step()
        losses.append(mean_over_ranks(loss))
    with reference.gathered():
        plain = gpt2().state_dict()
        assert all(torch.equal(value, plain[name]) for name, value in frozen.state_dict().items())
    reference.destroy()
    policy.destroy()
    return losses


def plain() -> list[float]:
    policy, reference = gpt2(), gpt2().eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(4):
        loss = torch.stack([preference(policy, reference, *pairs(step, rank)) for rank in range(2)]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_clients(2)
def test_a_reference_model() -> None:
    expected = plain()
    assert expected[-1] < expected[0]
    for stages in ((3, 3), (3, 0), (2, 3)):
        assert trained(*stages) == pytest.approx(expected, rel=1e-4)
