"""Other ways to ask for shared sequences, and set-ups that cannot work: errors that say what to do."""

from __future__ import annotations

import functools
import gc
import operator
import re
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.config import resolve
from shardwise.errors import ConflictError, UsageError
from shardwise.parallel import RingAttention, RoundRobinLoader, SequenceLoader, begin, current, end, split
from shardwise.parallel.data import complete
from shardwise.utils import safe_get_full_grad
from tests.harness import of_all_ranks, on_ranks, thorough
from tests.harness.engines import forget_engines
from tests.harness.training import SGD
from tests.parallel.models import MODELS, ROWS, data, llama, loss_of

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
}


def error(call: Any) -> str:
    try:
        call()
    except (UsageError, ConflictError) as raised:
        return str(raised)
    return "nothing"


class Unit:
    """A model-parallel unit as Megatron's, of ranks that are no neighbours."""

    def __init__(self) -> None:
        groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        self.group = groups[dist.get_rank() % 2]

    def get_sequence_parallel_group(self) -> Any:
        return self.group

    def get_sequence_parallel_world_size(self) -> int:
        return 2


@pytest.mark.parametrize("how", [*map(thorough, ("pair", "mesh", "replicas", "unit")), "begun"])
@on_ranks(4)
def test_ways_to_ask(how: str) -> None:
    more: dict[str, Any] = {}
    begun = None
    if how == "pair":
        more["mesh"] = (2, 2)
    elif how == "mesh":
        more["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "dp"))
    elif how == "replicas":
        more["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "sp"))
    elif how == "unit":
        more["mpu"] = Unit()
    elif how == "begun":
        begun = more["mpu"] = begin(2)
    engine, *_ = shardwise.initialize(model=MODELS["gpt"](shared=True), config=CONFIG, **more)
    counts = []
    for number in range(2):  # before the first step the model is compared with itself
        loss, tokens = loss_of(engine, split(data(number, 1)))
        engine.backward(loss, weight=tokens)
        engine.step()
        counts.append(sum(record.op == "all_to_all" for record in engine.ledger.records()))
    assert counts[1] - counts[0] == 2 * 4  # two layers; queries, keys and values, then outputs, and both back
    assert engine.sharded.domain.names == (("shard", "replicate") if how == "replicas" else ("shard",))
    sequences = [[0, 2], [1, 3]] if how in ("mesh", "unit") else [[0, 1], [2, 3]]
    own = next(line for line in sequences if dist.get_rank() in line)
    assert dist.get_process_group_ranks(engine.get_sequence_parallel_group()) == own
    assert engine.train_batch_size() == 4
    engine.destroy()
    assert current() is begun
    end()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"sequence_parallel_size": 3}, "sequence_parallel_size: is 3, but the number of ranks is 4"),
        (
            {"sequence_parallel_size": 2, "data_parallel_size": 4},
            r"data_parallel_size: is 4, but the number of data-parallel ranks is 2 \(4 ranks, of which 2 share samples",
        ),
    ],
)
def test_sizes_that_do_not_fit(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConflictError, match=said):
        resolve({**CONFIG, **more}, world_size=4)


def test_data_parallel_ranks_beside_a_pipeline() -> None:
    config = {"train_batch_size": 8, "data_parallel_size": 2, "pipeline": {"stages": 2}}
    assert resolve(config, world_size=4).config.train_micro_batch_size_per_gpu == 4
    with pytest.raises(ConflictError, match="data_parallel_size: is 2, but the number of data-parallel ranks is 4"):
        resolve(config, world_size=8)


def test_batch_sizes_count_groups_of_ranks() -> None:
    found = resolve({**CONFIG, "train_batch_size": 8, "sequence_parallel_size": 2}, world_size=4).config
    assert (found.train_micro_batch_size_per_gpu, found.gradient_accumulation_steps) == (2, 2)


class Unshared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MODELS["gpt"](shared=False)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.inner(**batch)


SAID = {
    "pair": r"mesh=\(1, 3\)\): 1 x 3 ranks, but the number of ranks is 2",
    "conflict": "is 2, but the arguments of initialize\\(\\) give 1",
    "unshared": "Unshared has run without any exchange of heads .*share_attention",
    "whole": r"all 2 ranks have positions 0 to 7, so each has the whole sequence.*SequenceLoader",
    "pairs": r"mask of shape \(1, 1, 4, 4\); expected",
    "short": "at least 2 tokens",
    "keys": r"the keys \['pixels'\] cannot be split",
    "second": r"shared by ranks \[0, 1\] here, and should be by",
    "none": "set sequence_parallel_size in the configuration",
    "heads": "over 2 ranks needs at least as many attention heads, the model has 1",
    "ring": "ring attention has no dropout",
    "core": "'paged' cannot work on shared sequences; choose one of sdpa",
    "other": "expects a model of transformers, got Unshared",
}


@on_ranks(2)
def test_wrong_set_ups_say_what_to_do() -> None:
    config = {**CONFIG, "sequence_parallel_size": 2}

    def start(model: nn.Module, **more: Any) -> Any:
        return shardwise.initialize(model=model, config=config, **more)[0]

    found = {"pair": error(lambda: start(Unshared(), mesh=(1, 3)))}
    found["conflict"] = error(lambda: start(Unshared(), mesh=(2, 1)))
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.int64), "position_ids": torch.arange(8).view(1, 8)}
    engine = start(Unshared())
    found["unshared"] = error(lambda: engine(**batch))
    engine.destroy()
    engine = start(llama(shared=True))
    found["whole"] = error(lambda: engine(**batch))
    engine.destroy()
    engine = start(llama(shared=True))
    part = split(batch)
    mask = torch.ones(2, 1, 4, 4, dtype=torch.bool)
    found["pairs"] = error(lambda: engine(**part, attention_mask=mask))
    found["short"] = error(lambda: split({"input_ids": torch.ones(2, 1, dtype=torch.int64)}))
    found["keys"] = error(lambda: split({"pixels": torch.ones(2)}))
    found["second"] = error(lambda: begin(1))
    engine.destroy()
    model = llama(shared=True)
    found["none"] = error(lambda: split(batch))
    model.config.num_attention_heads = 1
    begin(2)
    from shardwise.parallel import share_attention

    found["heads"] = error(lambda: share_attention(model))
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    found["ring"] = error(lambda: share_attention(model, "ring")(**split(batch)))
    found["core"] = error(lambda: share_attention(model, "paged"))
    found["other"] = error(lambda: share_attention(Unshared()))
    end()
    assert found.keys() == SAID.keys()
    for name, message in SAID.items():
        assert re.search(message, found[name]), (name, found[name])


@on_ranks(2)
def test_batches_of_each_rank_are_handed_round() -> None:
    group = begin(2)
    own = [
        {"input_ids": torch.arange(7) + 100 * group.rank + 10 * n + torch.zeros(1, 1, dtype=torch.int64)}
        for n in range(3 - group.rank)  # the second rank has fewer
    ]
    left, right = of_all_ranks(list(RoundRobinLoader(own, group)))
    assert len(left) == len(right) == 4
    for number, parts in enumerate(zip(left, right, strict=True)):
        start = 100 * (number % 2) + 10 * (number // 2)
        whole = {name: torch.cat([part[name] for part in parts], 1).tolist() for name in parts[0]}
        assert whole["input_ids"] == [[start + place for place in range(7)]]
        assert whole["position_ids"] == [list(range(7))]
    end()


@on_ranks(2)
def test_packed_rows_of_one_rank_are_known_to_all() -> None:
    group = begin(2)
    positions = torch.arange(8) % (8 if group.rank else 4)
    batch = {"input_ids": torch.arange(8).view(1, -1), "position_ids": positions.view(1, -1)}
    assert len(list(RoundRobinLoader([batch], group))) == 2
    assert of_all_ranks(group.aligned) == [True, True]
    end()


def test_layouts_in_inference_mode() -> None:
    group = begin(1)
    with torch.inference_mode():
        positions = torch.arange(3).view(1, -1)
        assert all(group.layout(3, 1, positions, None, positions.device).lengths == [3] for _ in range(2))
    end()


@pytest.mark.parametrize("stage", [thorough(1), 3])
@on_ranks(2)
def test_plans_are_made_of_a_rank_s_part(stage: int) -> None:
    engine, *_ = shardwise.initialize(model=llama(shared=True), config=CONFIG, mesh=(1, 2))
    for plan in engine.memory_plans(split(data(0, 1)), stages=[stage]).plans:
        assert not plan.note and plan.setting.config["train_batch_size"] == 2 and plan.peaks["activations"] > 0


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(9) + 100 * index, "labels": torch.arange(9) + 100 * index}


def made(size: int, **more: Any) -> Any:
    """Return an engine of ranks that share sequences, and its loader."""
    how = {"train_micro_batch_size_per_gpu": ROWS, "gradient_accumulation_steps": 2, "sequence_parallel_size": size}
    engine, _, loader, _ = shardwise.initialize(
        model=MODELS["gpt"](shared=True), config={**how, "optimizer": SGD, **more}, training_data=Rows()
    )
    return engine, loader


@on_ranks(2)
def test_loaders_of_ranks_that_share_no_sequence_give_whole_ones() -> None:
    engine, loader = made(1)
    assert engine.get_sequence_parallel_group() is None and engine.sequence_parallel_size == 1
    parts, handed = list(SequenceLoader(loader)), RoundRobinLoader(loader)
    assert len(handed) == len(loader)
    q = torch.randn(2, 1, 8, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(RingAttention()(q, q, q), expected)
    assert len(parts) == len(list(handed)) == 2
    engine.destroy()
    with pytest.raises(UsageError, match="there is no group of ranks"):
        list(SequenceLoader(loader))
    for batch in parts:
        assert batch.keys() == {"input_ids", "shift_labels", "position_ids"}
        assert batch["input_ids"].shape == batch["shift_labels"].shape == (ROWS, 9)
    seen = of_all_ranks([int(row[0]) // 100 for batch in parts for row in batch["input_ids"]])
    assert sorted(seen[0] + seen[1]) == list(range(8))


@on_ranks(4)
def test_ranks_of_a_sequence_get_parts_of_the_same_samples() -> None:
    engine, loader = made(2, data_parallel_size=2)
    rank, first = dist.get_rank(), dist.get_rank() // 2 * 2
    assert dist.get_process_group_ranks(engine.get_sequence_parallel_group()) == [first, first + 1]
    assert dist.get_process_group_ranks(engine.data_parallel_group) == [rank % 2, rank % 2 + 2]
    sizes = engine.world_size, engine.dp_world_size, engine.seq_dp_world_size, engine.sequence_parallel_size
    assert (*sizes, engine.get_data_parallel_rank(), engine.train_batch_size()) == (4, 2, 4, 2, rank // 2, 8)
    wrapped = SequenceLoader(loader)
    assert len(wrapped) == len(loader) == 2
    assert wrapped.state_dict() == loader.state_dict()
    parts, seen = of_all_ranks(list(wrapped)), []
    for first in (0, 2):
        for left, right in zip(parts[first], parts[first + 1], strict=True):
            whole = {name: torch.cat([left[name], right[name]], dim=1) for name in left}
            assert left["input_ids"].shape[1] == 5 and right["input_ids"].shape[1] == 4
            assert whole["position_ids"].tolist() == [list(range(9))]
            assert torch.equal(whole["shift_labels"][:, :-1], whole["input_ids"][:, 1:])
            assert bool((whole["shift_labels"][:, -1] == -100).all()) and "labels" not in whole
            seen += (whole["input_ids"][:, 0] // 100).tolist()
    assert sorted(seen) == list(range(8))


@on_ranks(2)
def test_other_numbers_of_rows_are_refused_on_all_ranks() -> None:
    begin(2)
    rows = 2 + dist.get_rank()
    ids, positions = torch.ones(rows, 4, dtype=torch.long), torch.arange(4) + 4 * dist.get_rank()
    for model in (make(shared=True) for make in MODELS.values()):
        with pytest.raises(UsageError, match=r"have \[2, 3\] rows"):
            model(input_ids=ids, position_ids=positions.unsqueeze(0))
    query = torch.ones(rows, 4, 2, 8)
    with pytest.raises(UsageError, match=r"have \[2, 3\] rows"):
        RingAttention()(query, query, query)
    end()


@on_ranks(2)
def test_engines_over_the_same_ranks_end_one_by_one() -> None:
    config = {"sequence_parallel_size": 2, "optimizer": SGD, "train_micro_batch_size_per_gpu": ROWS}
    plain = MODELS["gpt"](shared=False)
    loss_of(plain, complete(data(0, 1)))[0].backward()
    first, second = (shardwise.initialize(model=MODELS["gpt"](shared=True), config=config).engine for _ in range(2))

    def exchanges() -> int:
        loss, tokens = loss_of(second, split(data(0, 1)))
        before = second.ledger.totals["all_to_all"].count
        second.backward(loss, weight=tokens)
        torch.testing.assert_close(safe_get_full_grad(second.module.head.weight), plain.head.weight.grad)
        second.zero_grad()
        return second.ledger.totals["all_to_all"].count - before

    expected = exchanges()
    loss, tokens = loss_of(first, split(data(0, 1)))
    before = first.ledger.totals["all_to_all"].count
    first.backward(loss, weight=tokens)
    assert first.ledger.totals["all_to_all"].count - before == expected  # not in the ledger of the newest engine
    for _ in range(2):  # the second call does nothing
        first.destroy()
        assert exchanges() == expected > 0
        assert dist.get_process_group_ranks(second.get_sequence_parallel_group()) == [0, 1]
        assert not current().data.destroyed
    second.destroy()
    assert current() is None


@on_ranks(2)
def test_parts_of_sequences_without_shared_attention_are_refused_in_evaluation() -> None:
    config = {**CONFIG, "sequence_parallel_size": 2}
    engine = shardwise.initialize(model=Unshared(), config=config).engine.eval()
    part = split(data(0, 1))
    given = {name: part[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad(), mock.patch("shardwise.engine.parallel.warn_once") as warn:
        said = error(lambda: engine(**given))
        # The first tokens may as well be a whole sequence.
        assert re.search(SAID["unshared"] if dist.get_rank() else "nothing", said), said
        assert warn.call_count == 1 - dist.get_rank()
    engine.destroy()


@on_ranks(2)
def test_recomputed_passes_of_other_lengths() -> None:
    batches = [data(number, 1, length) for number, length in enumerate((9, 6))]
    plain, shared = MODELS["gpt"](shared=False), MODELS["gpt"](shared=True)

    def mean(model: Any, parts: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        losses, tokens = zip(*(loss_of(model, part) for part in parts), strict=True)
        return sum(map(operator.mul, losses, tokens)) / sum(tokens), sum(tokens)

    mean(plain, [complete(batch) for batch in batches])[0].backward()
    for block in shared.blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    engine = shardwise.initialize(model=shared, config={**CONFIG, "sequence_parallel_size": 2}).engine
    loss, tokens = mean(engine, [split(batch) for batch in batches])
    engine.backward(loss, weight=tokens)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(safe_get_full_grad(shared.get_parameter(name)), parameter.grad)


@on_ranks(2)
def test_a_block_outside_of_the_model_s_forward_pass() -> None:
    plain, shared = MODELS["gpt"](shared=False), MODELS["gpt"](shared=True)
    engine = shardwise.initialize(model=shared, config={**CONFIG, "sequence_parallel_size": 2}).engine
    loss, tokens = loss_of(engine, split(data(0, 1, 9)))
    x = torch.ones(2, 10, 12).cumsum(1)
    torch.testing.assert_close(shared.blocks[0](split(x)), split(plain.blocks[0](x)))
    engine.backward(loss, weight=tokens)


@on_ranks(2)
def test_a_group_ends_without_an_engine_that_was_dropped() -> None:
    group = begin(2)
    config = {"optimizer": SGD, "train_micro_batch_size_per_gpu": ROWS}
    engine = shardwise.initialize(model=MODELS["gpt"](shared=True), config=config, mpu=group).engine
    del engine
    forget_engines()
    gc.collect()
    assert current() is group
    end()
    assert current() is None
    assert begin(1).size == 1
    end()
