"""Accelerate and the Trainer count the CPU ranks that there are; where they cannot, the error says what to do."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch

from shardwise.errors import UsageError
from shardwise.utils.logging import warn_once
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


def warned(gathers: bool | None) -> list[str]:
    from accelerate import Accelerator, DeepSpeedPlugin

    os.environ["ACCELERATE_DEEPSPEED_ZERO3_INIT"] = "false"
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: Any) -> None:
            said.append(record.getMessage())

    handler = Kept()
    warn_once.cache_clear()  # an earlier test may have had it said
    logging.getLogger("shardwise").addHandler(handler)
    plugin = DeepSpeedPlugin(zero_stage=3, **({} if gathers is None else {"zero3_save_16bit_model": gathers}))
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = torch.nn.Linear(2, 2)
    loader = torch.utils.data.DataLoader(range(4))
    engine, *_ = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
    logging.getLogger("shardwise").removeHandler(handler)
    if gathers:
        accelerator.get_state_dict(engine)
    else:
        with pytest.raises(ValueError, match="stage3_gather_16bit_weights_on_model_save"):
            accelerator.get_state_dict(engine)
    engine.destroy()
    return [message for message in said if "stage3_gather" in message]


@pytest.mark.parametrize("gathers", [None, True])
def test_weights_that_cannot_be_saved_are_said_at_the_start(gathers: bool | None, ranks: Ranks) -> None:
    first, second = ranks(warned, 2, gathers)
    assert not second and len(first) == (0 if gathers else 1)
    assert gathers or '"stage3_gather_16bit_weights_on_model_save": true' in first[0]
