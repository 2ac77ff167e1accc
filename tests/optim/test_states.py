"""What the entries of an optimizer's state are."""

from __future__ import annotations

import torch

from shardwise.optim import is_elementwise_state


def test_what_counts_as_elementwise() -> None:
    assert is_elementwise_state(torch.zeros(2, 3), 6)
    assert not is_elementwise_state(torch.zeros(2), 6)
    assert not is_elementwise_state(3, 1)
    assert not is_elementwise_state(torch.tensor(1.0), 1, "step")
    assert is_elementwise_state(torch.tensor(1.0), 1, "exp_avg")
