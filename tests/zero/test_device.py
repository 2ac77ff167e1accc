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
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwise
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.errors import DesyncError
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_grad
from shardwise.zero.parameters import init
from shardwise.zero.parameters.init import PartStore, materialize, shard_module
from shardwise.zero.passes.sums import GradientSums
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


class Sent(Exception):
    """A tensor has been handed in for communication."""


class Elsewhere:
    """A communicator of two ranks whose device is not the one on which parameters are built."""

    world, rank, device = 2, 0, torch.device("meta")

    def broadcast(self, tensor: torch.Tensor, *_: Any) -> None:
        raise Sent(tensor.device.type)

    def all_gather(self, pairs: Any, *_: Any, **__: Any) -> None:
        raise Sent(*{tensor.device.type for pair in pairs for tensor in pair})


def test_parameters_built_under_init_travel_on_the_device_of_the_group() -> None:
    store, parameter = PartStore(Elsewhere()), nn.Parameter(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(Sent, match=r"^meta$"):
        store.split(parameter)
    store._parts[parameter] = torch.ones(2)
    with pytest.raises(Sent, match=r"^meta$"):
        store.values(parameter)


def test_numbers_of_a_step_may_lie_on_several_devices() -> None:
    device = torch.device("cuda", 0)
    sums = GradientSums([], SimpleNamespace(names=[]), None, None, device, None, None)  # type: ignore[arg-type]
    with FakeTensorMode():
        loss, weight = torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64, device=device)
        told = sums._on_device([1.0, loss, weight])
    assert (told.device, told.shape, told.dtype) == (device, (3,), torch.float64)


class Made(Exception):
    """Values have been asked for."""


def test_meta_models_are_initialised_on_the_device_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(root: nn.Module, name: str, module: nn.Module, device: torch.device) -> None:
        raise Made(device.type)

    monkeypatch.setattr("shardwise.zero.parameters.init.materialize", made)
    comm = SimpleNamespace(device=torch.device("cuda", 0), world=1)
    store = PartStore(comm)  # type: ignore[arg-type]
    with pytest.raises(Made, match=r"^cuda$"):
        shard_module(nn.Linear(2, 2, device="meta"), store, lambda ranks: store)


class Layer(nn.Module):
    """Its values are formed with tensors that it makes meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        self.weight.data.copy_(torch.ones(3) + torch.arange(3))
        self.mask = torch.ones(2)


def test_what_a_module_makes_meanwhile_is_where_its_parameters_are() -> None:
    with torch.device("meta"):
        layer = Layer()
        materialize(layer, "", layer, torch.device("cpu"))
    assert layer.weight.tolist() == [1, 2, 3]
    assert layer.mask.device == torch.device("cpu")


def test_parts_of_what_is_made_on_a_device_may_wait_elsewhere() -> None:
    here, elsewhere = torch.device("cpu"), torch.device("meta")
    store = PartStore(Communicator(None, Ledger(), here, alone=True))
    made, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    store.split(made, place=elsewhere)
    store.split(other)
    assert made.device == other.device == here
    assert [store._parts[parameter].device for parameter in (made, other)] == [elsewhere, here]


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
