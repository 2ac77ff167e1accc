"""Accelerate and the Trainer count the CPU ranks that there are; where they cannot, the error says what to do."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import UsageError
from tests.dropin.clients import MISSING, Ranks

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def counted(early: bool) -> tuple[int, str | None, str, int]:
    """What Accelerate counts; `early`: when something else has made the process group."""
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin

    if early:
        deepspeed.init_distributed()
    state = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)).state
    return state.num_processes, state.backend, state.device.type, state.process_index


@pytest.mark.parametrize("early", [False, True])
def test_the_ranks_are_counted(early: bool, ranks: Ranks) -> None:
    assert ranks(counted, 2, early) == [(2, "gloo", "cpu", 0), (2, "gloo", "cpu", 1)]


def counted_too_early() -> str:
    """A script that makes a PartialState before Accelerate knows of DeepSpeed."""
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    assert PartialState().num_processes == 1
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(UsageError) as caught:
        accelerator.prepare(model, torch.optim.SGD(model.parameters()), torch.utils.data.DataLoader(range(4)))
    return str(caught.value)


def test_another_count_is_refused(ranks: Ranks) -> None:
    for message in ranks(counted_too_early, 2):
        assert message.startswith("Accelerate counts 1 process, but there are 2 ranks")
        assert "ACCELERATE_USE_DEEPSPEED=true" in message and 'PartialState(backend="gloo")' in message
