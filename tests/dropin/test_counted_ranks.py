"""Accelerate and the Trainer count the CPU ranks that there are; where they cannot, the error says what to do."""

from __future__ import annotations

import pytest
import torch

from shardwise.errors import UsageError
from tests.dropin.clients import MISSING, on_clients

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


@pytest.mark.parametrize("early", [False, True])
@on_clients(2)
def test_the_ranks_are_counted(early: bool) -> None:
    """`early`: when something else has made the process group."""
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin

    if early:
        deepspeed.init_distributed()
    state = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2)).state
    assert (state.num_processes, state.backend, state.device.type) == (2, "gloo", "cpu")
    assert state.process_index == torch.distributed.get_rank()


@on_clients(2)
def test_another_count_is_refused() -> None:
    """A script that makes a PartialState before Accelerate knows of DeepSpeed."""
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState

    assert PartialState().num_processes == 1
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))
    model = torch.nn.Linear(2, 2)
    with pytest.raises(
        UsageError, match=r"Accelerate counts 1 process, but there are 2 ranks.*ACCELERATE_USE_DEEPSPEED"
    ):
        accelerator.prepare(model, torch.optim.SGD(model.parameters()), torch.utils.data.DataLoader(range(4)))
