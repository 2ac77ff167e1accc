"""Every tensor that is exchanged lies on the engine's device: NCCL refuses those of the CPU.

Without a GPU the roles are changed: Gloo takes tensors of the CPU only, so the engine's device is named "cpu", and
whatever is made without naming a device lands on "meta", which no process group takes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import DesyncError
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_grad
from shardwise.zero.parameters import init
from shardwise.zero.parameters.init import PartStore
from tests.harness import on_ranks
from tests.harness.training import engine_of
from tests.models import Router


def plain_step(engine: Any, route: list[int]) -> None:
    engine.backward(engine(torch.ones(2, 4, device="cpu"), route).square().mean())
    engine.step()


@pytest.mark.parametrize(("stage", "whole"), [(1, True), (3, False)])
@on_ranks(2)
def test_nothing_is_exchanged_that_lies_elsewhere(stage: int, whole: bool) -> None:
    model = Router(experts=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if whole:
        optimizer = type("Custom", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    torch.set_default_device("meta")
    try:
        engine = engine_of(model, stage, optimizer, gradient_clipping=1.0, strict_sync=True)
        plain_step(engine, [0, 1])
        plain_step(engine, [1, 0, 1])
        engine.backward(engine(torch.ones(2, 4, device="cpu"), [2]).mean())
        assert safe_get_full_grad(model.last.weight) is not None
        assert safe_get_full_fp32_param(model.last.weight) is not None
        engine.step()
        desync = ""
        try:
            plain_step(engine, [0] if dist.get_rank() else [1])
        except DesyncError as error:
            desync = str(error)
        shardwise.comm.log_summary(show_straggler=True)
        engine.destroy()
        labels = sorted({record.label for record in engine.ledger.records()})
    finally:
        torch.set_default_device(None)
    assert {"unit_order", "strict_sync", "strict_sync.trace", "gradient_norm"} <= set(labels)
    assert ("side_channel.key" in labels) == (stage == 3)
    assert desync.startswith("strict_sync: ranks [1]")


class Many:
    """A communicator of many ranks, of which every eighth has the same part of each tensor."""

    world, rank, device, members = 1024, 0, torch.device("cpu"), range(1024)

    def exchange(self, value: Any, label: str) -> list[Any]:
        told = [[[[2 * place, 2 * place + 2], [0, 4]] for _ in value] for place in range(8)]
        return [told[rank % 8] for rank in range(self.world)]

    def all_to_all(self, received: torch.Tensor, message: torch.Tensor, sizes_in: Any, sizes_out: Any, *_: Any) -> Any:
        assert sum(sizes_in) == received.numel() and sum(sizes_out) == message.numel()
        self.sent = message.numel()
        return SimpleNamespace(wait=lambda: received.fill_(1.0))


def test_parts_of_many_ranks_are_kept_and_cut_once_for_each_different_part(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts: list[Any] = []
    cut = init.overlap
    monkeypatch.setattr(init, "overlap", lambda *given: cuts.append(given) or cut(*given))
    store, comm = PartStore(Many()), Many()  # type: ignore[arg-type]
    store.comm = comm  # type: ignore[assignment]
    narrowed = [init._Narrowed(number, (16, 4), ((0, 2), (0, 4))) for number in range(50)]
    store._own_boxes = [((0, 2), (0, 4))] * 50
    parameters = [nn.Parameter(torch.ones(8, 4)) for _ in narrowed]
    for one, parameter in zip(narrowed, parameters, strict=True):
        store._parts[parameter] = torch.ones(1)
        assert store._part_values(parameter, one).tolist() == [[1.0] * 4] * 2
        assert comm.sent == 128  # this rank's element is in the part of every eighth rank
    (_, lists) = store._boxes[0]
    assert len(store._boxes) == 1 and len({id(boxes) for boxes in lists}) == 8
    assert len(cuts) == 50 * (8 + comm.world)  # own elements of each part; each rank's elements of the own part
