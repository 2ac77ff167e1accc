"""How many communicators an engine makes: at most one for each mesh dimension and purpose, by its first use."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.engine.parallel import SharedSequences
from shardwise.engine.reserved import RESERVE, CommunicatorMemory
from shardwise.memory import Accountant, Category
from shardwise.parallel.tensor.group import TensorGroup
from shardwise.parallel.tensor.layers import runs_of
from shardwise.registry import part_of
from tests.device.recorded import imagined
from tests.harness import run_ranks
from tests.harness.training import SGD, config_of, engine_of

RULES = [
    {"patterns": [r"up\.weight$", r"up\.bias$"], "partition_type": "column"},
    {"patterns": [r"down\.weight$"], "partition_type": "row"},
]
TENSOR = {"autotp_size": 2, "partition_config": {"use_default_specs": False, "layer_specs": RULES}}


class Net(nn.Module):
    def __init__(self, experts: int = 0) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.attention = shardwise.parallel.DistributedAttention(
            nn.functional.scaled_dot_product_attention, scatter_idx=1, gather_idx=2
        )
        self.experts = shardwise.moe.MoE(8, nn.Linear(8, 8), num_experts=4, ep_size=experts) if experts else None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        values = self.head(self.down(self.up(given).relu()))
        heads = values.unflatten(-1, (4, 2)).transpose(1, 2)
        values = self.attention(heads, heads, heads).transpose(1, 2).flatten(2)
        if self.experts is not None:
            values = self.experts(values)[0]
        return values.sum()


def counted(zero: dict[str, Any], experts: int = 0, world: int = 8, **more: Any) -> list[tuple[int, str]]:
    """Return the number of ranks and the purpose of each group that one rank makes until its first step."""
    config = config_of(0, {"type": "Adam", "params": {"lr": 0.1}}, rows=1, zero=zero, stall_limit=0, **more)
    with imagined(world, 0):
        engine = shardwise.initialize(model=Net(experts), config=config)[0]
        with mock.patch.object(SharedSequences, "compare"):  # imagined ranks have no tokens
            engine.backward(engine(torch.ones(1, 2, 8)))
        engine.step()
        made = engine.job.communicators()
        with mock.patch.object(Communicator, "barrier"):
            engine.destroy()
        return sorted((len(ranks), purpose) for ranks, purpose in made)


JOB = [(8, "gather"), (8, "reduce"), (8, "small")]
SETTINGS: dict[str, tuple[dict[str, Any], list[tuple[int, str]]]] = {
    "data parallel, stage 0": ({"zero": {"stage": 0}}, [(8, "reduce"), (8, "small")]),
    "data parallel, stage 1": ({"zero": {"stage": 1}}, JOB),
    "data parallel, stage 3": ({"zero": {"stage": 3}}, JOB),
    "HSDP": (
        {"zero": {"stage": 3, "mics_shard_size": 4}},
        [(2, "reduce"), (4, "gather"), (4, "reduce"), (8, "small")],
    ),
    "MiCS": (
        {
            "zero": {
                "stage": 3,
                "mics_shard_size": 4,
                "mics_hierarchical_params_gather": True,
                "zero_node_size": 2,
            }
        },
        [(2, "gather"), (2, "gather"), (2, "reduce"), (2, "reduce"), (2, "reduce"), (8, "small")],
    ),
    "hpZ": ({"zero": {"stage": 3, "zero_hpz_partition_size": 2}}, [(2, "gather"), *JOB]),
    "sequences": ({"zero": {"stage": 1}, "sequence_parallel_size": 2}, [(2, "small"), *JOB]),
    "tensors": (
        {"zero": {"stage": 1}, "tensor_parallel": TENSOR},
        [(2, "small"), (4, "gather"), (4, "reduce"), *JOB],
    ),
    "tensors, sequences and experts": (
        {"zero": {"stage": 1}, "tensor_parallel": TENSOR, "sequence_parallel_size": 2, "experts": 2},
        # Ranks of a sequence and of experts are the same here.
        [*[(2, "small")] * 2, *[(4, "gather"), (4, "reduce")] * 2, *JOB],
    ),
}


@pytest.mark.parametrize("name", list(SETTINGS))
def test_each_mesh_dimension_has_one_communicator_a_purpose(name: str) -> None:
    given, expected = SETTINGS[name]
    assert counted(**given) == sorted(expected)


@pytest.mark.parametrize("world", [256, 1024, 4096])
@pytest.mark.parametrize("name", ["data parallel, stage 3", "hpZ", "tensors, sequences and experts"])
def test_more_ranks_make_no_more_communicators(name: str, world: int) -> None:
    given, expected = SETTINGS[name]
    found = counted(**given, world=world)
    assert [purpose for _, purpose in found] == [
        purpose for _, purpose in sorted((ranks * world // 8 if ranks > 2 else ranks, p) for ranks, p in expected)
    ]


def test_device_memory_of_communicators_is_a_reserve_until_a_step_has_been_measured() -> None:
    accountant, device = Accountant(), torch.device("cuda", 0)
    state = {"free": 70 << 30, "reserved": 2 << 30}
    with (
        mock.patch.object(torch.cuda, "mem_get_info", lambda _: (state["free"], 80 << 30)),
        mock.patch.object(torch.cuda, "memory_reserved", lambda _: state["reserved"]),
        imagined(8, 0),
    ):
        memory = CommunicatorMemory(accountant, device, 8)
        job = Communicator(None, Ledger(), torch.device("cpu"))
        job.connect("gather", "reduce")
        memory.reserve(job)
        assert accountant.live[Category.COMMUNICATORS] == 2 * RESERVE
        state["free"], state["reserved"] = 60 << 30, 11 << 30
        for _ in range(2):
            memory.after_step()
            assert accountant.live[Category.COMMUNICATORS] == 1 << 30
        job.destroy()
    on_host = CommunicatorMemory(accountant, torch.device("cpu"), 8)
    on_host.reserve(job)
    on_host.after_step()
    assert accountant.live[Category.COMMUNICATORS] == 1 << 30


class Uneven(nn.Module):
    """With 9 words over two ranks, one has as many elements of the words as of `mid`, and the other has not."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.words, self.mid = nn.Embedding(words, 4), nn.Linear(4, 4, bias=False)
        self.norm, self.big = nn.LayerNorm(4), nn.Linear(4, 10, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.big(self.norm(self.mid(self.words(ids)))).pow(2).mean()


def trained(stage: int, ranks: int) -> list[float]:
    torch.manual_seed(0)
    rules = [{"patterns": [r"words\.weight$"], "partition_type": "column"}]
    section = {"autotp_size": ranks, "partition_config": {"use_default_specs": False, "layer_specs": rules}}
    zero = {"stage3_param_persistence_threshold": 17}
    engine = engine_of(Uneven(9), stage, SGD, rows=1, zero=zero, tensor_parallel=section)
    losses = []
    for _ in range(3):
        losses.append(engine(torch.arange(9)))
        engine.backward(losses[-1])
        engine.step()
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("stage", [1, 3])
def test_words_that_do_not_divide_evenly_are_trained_as_on_one_rank(stage: int) -> None:
    expected = pytest.approx(run_ranks(trained, 1, stage, 1)[0], rel=1e-5)
    assert run_ranks(trained, 2, stage, 2) == [expected] * 2


def test_parameters_of_the_same_ranks_share_the_list_of_them() -> None:
    group = TensorGroup(None, [range(place, 4096, 2) for place in range(2)], 0)
    layers = [nn.LayerNorm(8) for _ in range(4)]
    for layer in layers[:2]:
        group.declare_summands(layer.weight)
    for layer in layers[2:]:
        group.declare(layer.weight, [8], 0, runs_of(8, 2))
    first, second, third, fourth = (part_of(layer.weight).ranks for layer in layers)
    assert first is second is not None and third is fourth is not None
