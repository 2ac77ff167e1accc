"""One CUDA device that gathers, releases and reduces as several would, with collectives that are late.

Each collective runs on a stream of its own behind a delay, and the host does not wait: what reads too early, or gives
memory back too early, gives other numbers than stage 0, which does none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.communicator import Communicator, Handle
from shardwise.trees import map_tensors
from shardwise.zero.units.unit import SectionMemory
from tests.models import CASES
from tests.zero.test_one_rank import forced
from tests.zero.training import Outcome, Setting, assert_identical, train

_CYCLES = 2_000_000
"""About a millisecond, longer than a layer of these models takes."""


class Late:
    """A collective on a stream of its own."""

    scratch: Sequence[torch.Tensor] = ()

    def __init__(self, stream: torch.cuda.Stream, work: Callable[[], None]) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(_CYCLES)
            work()
            self._done = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


@contextmanager
def late_collectives() -> Iterator[None]:
    """Have the collectives of one rank run late; memory that is given back is filled with numbers that are none."""
    streams = {kind: torch.cuda.Stream() for kind in ("gather", "reduce", "replicate", "explicit")}
    free = SectionMemory.free

    def all_gather(self: Communicator, pairs: Any, label: str, kind: str = "gather") -> Handle:
        def work() -> None:
            for full, shard in pairs:
                if full.data_ptr() != shard.data_ptr():
                    full.copy_(shard)

        return Handle(Late(streams[kind], work), None, self.ledger)

    def reduce_scatter(
        self: Communicator, pairs: Any, label: str, *, accumulate: bool = False, kind: str = "reduce"
    ) -> Handle:
        def work() -> None:
            for out, full in pairs:
                if accumulate:
                    out.add_(full.to(out.dtype))
                elif out.data_ptr() != full.data_ptr():
                    out.copy_(full)

        return Handle(Late(streams[kind], work), None, self.ledger)

    def poisoned(self: SectionMemory) -> None:
        numel, dtype = self.full.numel(), self.full.dtype
        free(self)
        if numel and dtype.is_floating_point:
            torch.empty(numel, dtype=dtype, device=self.device).fill_(float("nan"))

    with (
        forced(),
        mock.patch.object(Communicator, "all_gather", all_gather),
        mock.patch.object(Communicator, "reduce_scatter", reduce_scatter),
        mock.patch.object(SectionMemory, "free", poisoned),
        # One rank alone waits for nothing; here it launches on streams of its own, as several do.
        mock.patch.object(Communicator, "waits_on_host", False),
    ):
        yield


def outcome(name: str, setting: Setting) -> Outcome:
    case = CASES[name]

    def batch(generator: torch.Generator, seed: int) -> Any:
        return map_tensors(case.batch(generator, seed), torch.Tensor.cuda)

    return train(replace(case, batch=batch), setting, 4)


@pytest.mark.parametrize("name", ["gpt", "gpt_functional_head", "odd_mlp", "borrower"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_late_collectives_change_no_bit(name: str, precision: str, accumulation: int) -> None:
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    setting = Setting(accumulation=accumulation, precision=precision, clip=1.0, optimizer="AdamW", lr=1e-2)
    expected = outcome(name, setting)
    for stage in (1, 2, 3):
        with late_collectives():
            assert_identical(outcome(name, setting.with_stage(stage)), expected, f"stage {stage}")
