"""One rank on a device that gathers, releases and reduces as several would, with collectives that are late."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.comm import groups, native
from shardwise.comm.communicator import Communicator
from shardwise.moe import MoE
from shardwise.trees import map_tensors
from shardwise.zero.units.flat_param import FlatParamStorage
from tests.harness.training import Outcome, Setting, masters, train
from tests.models import CASES, GPT, Case, language, language_loss, regression, regression_loss
from tests.zero.elsewhere import forced

CYCLES = 2_000_000
"""About a millisecond, longer than a layer of these models takes."""


def start_group() -> None:
    """Have a group of one rank on NCCL."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


class _Copy:
    """What a collective of one rank does, on a stream of its own."""

    def __init__(self, work: Callable[[], None]) -> None:
        work()
        self._done = torch.cuda.current_stream().record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._done)


@contextmanager
def late_collectives(*, nccl: bool = False) -> Iterator[None]:
    """Have one rank shard, and its collectives run late; memory that is given back is filled with NaN.

    Each group's collectives run on a stream of their own behind a delay, and the host does not wait: what reads too
    early, or gives memory back too early, gives other numbers than an engine that does none of this.

    Args:
        nccl: NCCL copies; otherwise kernels of torch do, which say nothing about what NCCL accepts.
    """
    streams: dict[tuple[str, int], torch.cuda.Stream] = defaultdict(torch.cuda.Stream)
    free, launch = FlatParamStorage.free, native.launch_together

    def launched(
        op: Callable[..., Any], pairs: Sequence[native.Pair], group: dist.ProcessGroup, *, async_op: bool
    ) -> list[Any]:
        stream = streams[group.group_name, torch.cuda.current_stream().cuda_stream]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES)

            def work() -> None:
                if nccl:
                    for launched in launch(op, pairs, group, async_op=async_op):
                        if launched is not None:  # else it runs on this stream
                            launched.wait()
                    return
                for out, own in pairs:
                    if out.data_ptr() != own.data_ptr():
                        out.copy_(own.view_as(out))

            return [_Copy(work)]

    def poisoned(self: FlatParamStorage) -> None:
        numel, dtype = self.full.numel(), self.full.dtype
        free(self)
        if numel and dtype.is_floating_point:
            torch.empty(numel, dtype=dtype, device=self.device).fill_(float("nan"))

    @contextmanager
    def one_group() -> Iterator[None]:
        """Nothing is sent through groups, each of which takes NCCL a while to make."""
        with (
            mock.patch.object(groups, "new_group", lambda *_: dist.group.WORLD),
            mock.patch.object(groups, "give_back", lambda _: None),
        ):
            yield

    with (
        forced(),
        nullcontext() if nccl else one_group(),
        mock.patch.object(Communicator, "sends", True),
        mock.patch.object(native, "launch_together", launched),
        mock.patch.object(FlatParamStorage, "free", poisoned),
    ):
        yield


def on_device(case: Case) -> Case:
    """Return a case whose data lie on the device."""
    return replace(case, batch=lambda generator, seed: map_tensors(case.batch(generator, seed), torch.Tensor.cuda))


def outcome(case: Case, setting: Setting, steps: int = 4) -> Outcome:
    """Train a case with its data on the device."""
    return train(on_device(case), setting, steps)


def masters_on_host(engine: Any) -> dict[str, torch.Tensor]:
    """Return the master weights of an engine, which ends."""
    found = {name: value.detach().cpu() for name, value in masters(engine.module).items()}
    engine.destroy()
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


# -- models ------------------------------------------------------------------------------------------------------------


class Twice(GPT):
    """The second block is called twice."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in (*self.blocks, self.blocks[1]):
            x = self.run(block, x)
        x = self.norm(x)
        assert self.head is not None
        return self.head(x)  # type: ignore[no-any-return]


def recomputed(reentrant: bool) -> Callable[[], nn.Module]:
    """Return what makes a model that computes its blocks again in the backward pass, with dropout."""

    def make() -> nn.Module:
        model = GPT(dropout=0.1)
        model.run = lambda block, x: checkpoint(block, x, use_reentrant=reentrant)
        return model

    return make


def compiled() -> nn.Module:
    """A model whose blocks are compiled."""
    model = GPT()
    for block in model.blocks:
        block.compile()
    return model


class Experts(nn.Module):
    """A layer of experts, each with places for some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(8, 8), MoE(8, nn.Linear(8, 8), num_experts=4, k=2, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.first(x))[0]  # type: ignore[no-any-return]


MODELS: dict[str, Case] = {
    **{name: CASES[name] for name in ("gpt", "gpt_functional_head", "odd_mlp", "borrower", "mixture", "lora")},
    "twice": Case("twice", Twice, language, language_loss),
    "recomputed": Case("recomputed", recomputed(False), language, language_loss),
    "reentrant": Case("reentrant", recomputed(True), language, language_loss),
    "compiled": Case("compiled", compiled, language, language_loss),
    "experts": Case("experts", Experts, regression(8, 8), regression_loss),
}
