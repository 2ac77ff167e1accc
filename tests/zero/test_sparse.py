"""Gradients of embedding tables as rows: the bits of the dense reduction, with a fraction of its bytes."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise
from shardwise.comm import neighbours
from shardwise.comm.domain import Domain
from shardwise.comm.imagined import ImaginedCommunicator
from shardwise.engine import build
from shardwise.errors import ConfigError
from shardwise.memory import Accountant
from shardwise.registry import LogicalTensor
from shardwise.utils import safe_get_full_grad
from shardwise.zero.model import ShardedModel
from shardwise.zero.passes.rows import DENSE, RowReduction, Rows, Table, affordable, find_tables, warnings_about
from shardwise.zero.units.layout import lay_out
from shardwise.zero.units.plan import Levels
from shardwise.zero.units.unit import SectionMemory
from tests.harness import run_ranks
from tests.models import Batch, Case
from tests.zero.training import Outcome, Setting, assert_identical, assert_no_worse, plain, train

WORDS, WIDTH = 401, 7  # rows do not begin where ranges of ranks do


class Bags(nn.Module):
    """Two tables of which few rows are used, one of them by two lookups, and a dense rest."""

    def __init__(self, twice: bool = True) -> None:
        super().__init__()
        self.twice = twice  # of which torch cannot add the gradients in fp16 on the CPU
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True, padding_idx=0)
        self.bags = nn.EmbeddingBag(97, WIDTH, mode="sum", sparse=True)
        self.inner = nn.Linear(WIDTH, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = self.words(batch["words"]).sum(1)
        if self.twice:
            x = x + self.words(batch["words"][:, :1]).squeeze(1)
        if batch["bags"] is not None:
            x = x + self.bags(batch["bags"])
        return self.head(torch.tanh(self.inner(x)))


def few(generator: torch.Generator, seed: int) -> Batch:
    """Few rows, several of them twice; some ranks have no bags."""
    words = torch.randint(0, WORDS, (2, 3), generator=generator)
    words[1, 0] = words[0, 0]
    bags = torch.randint(0, 97, (2, 2), generator=generator) if seed % 3 else None
    return {"words": words, "bags": bags, "target": torch.randn(2, 3, generator=generator)}


def many(generator: torch.Generator, seed: int) -> Batch:
    """More rows than would pay on some ranks."""
    count = 900 if seed % 2 else 3
    return {**few(generator, seed), "words": torch.randint(0, WORDS, (2, count), generator=generator)}


def bags_loss(model: Any, batch: Batch) -> torch.Tensor:
    return (model(batch).float() - batch["target"].float()).square().mean()


class Tied(nn.Module):
    """A table that is also a head, without a module that says so: the gradient is dense on ranks that use the head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(41, WIDTH, sparse=True)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = torch.tanh(self.mix(self.words(batch["words"]).sum(1)))
        return F.linear(x, self.words.weight).sum(1, keepdim=True) if batch["head"] else x


def some_heads(generator: torch.Generator, seed: int) -> Batch:
    words = torch.randint(0, 41, (2, 2), generator=generator)
    return {"words": words, "head": seed % 4 == 1, "target": torch.randn(2, 1, generator=generator)}


SPARSE = {
    "few": Case("few", Bags, few, bags_loss),
    "once": Case("once", lambda: Bags(twice=False), few, bags_loss),
    "many": Case("many", Bags, many, bags_loss),
    "tied": Case("tied", Tied, some_heads, bags_loss),
}
ON = (("sparse_gradients", True),)


def train_both(name: str, settings: list[Setting], steps: int, transport: str = "") -> list[tuple[Outcome, Outcome]]:
    """Train a case with each setting, densely and by rows."""
    if transport:
        os.environ[neighbours.VARIABLE] = transport
    try:
        found = []
        for setting in settings:
            both = [
                train(SPARSE[name], replace(setting, extra=extra), steps)
                for extra in (setting.extra, setting.extra + ON)
            ]
            if dist.get_rank():
                for outcome in both:
                    outcome.gradients = []
            found.append((both[0], both[1]))
        return found
    finally:
        os.environ.pop(neighbours.VARIABLE, None)


def check_bits(name: str, world: int, settings: list[Setting], transport: str = "") -> list[Outcome]:
    per_rank = run_ranks(train_both, world, name, settings, 3, transport)
    for number, setting in enumerate(settings):
        dense, rows = per_rank[0][number]
        assert_identical(dense, rows, f"{name} {setting}")
        assert all(other[number][1].parameters == rows.parameters for other in per_rank)
    return [rows for _, rows in per_rank[0]]


@pytest.mark.parametrize(("name", "world"), [("few", 3), ("many", 2), ("tied", 2)])
def test_rows_give_the_bits_of_the_dense_reduction(name: str, world: int) -> None:
    settings = [
        Setting(stage=stage, accumulation=accumulation, optimizer=optimizer, clip=0.5)
        for stage in range(4)
        for accumulation, optimizer in ((1, "AdamW"), (3, "momentum"))
    ]
    found = check_bits(name, world, settings)
    loop = plain(SPARSE[name], settings[0], world)
    exact = plain(SPARSE[name], settings[0], world, wide=True)
    assert_no_worse(found[0].masters, loop.masters, exact.masters, name, slack=2e-7)
    for start_of_pair in (0, 1):
        for outcome in found[start_of_pair + 2 :: 2]:
            if start_of_pair == 0:  # with accumulation, stages 0-1 and 2-3 add in different orders
                assert outcome.parameters == found[start_of_pair].parameters


def test_other_precisions_wires_scales_and_optimizers() -> None:
    wide = (("communication_data_type", "fp32"),)
    settings = [
        Setting(stage=0, precision="bf16", accumulation=2, optimizer="AdamW"),
        Setting(stage=1, precision="bf16", accumulation=2, extra=(("prescale_gradients", True),)),
        Setting(stage=2, precision="bf16", extra=wide, accumulation=2),
        Setting(stage=3, precision="bf16", optimizer="AdamW"),
        Setting(stage=0, optimizer="Adafactor"),
        Setting(stage=2, optimizer="Adafactor", accumulation=2),
    ]
    check_bits("few", 2, settings)
    scaled = (("gradient_predivide_factor", 2.0),)
    check_bits("once", 2, [Setting(stage=stage, precision="fp16", accumulation=2, extra=scaled) for stage in (1, 2)])
    check_bits("few", 2, [Setting(stage=stage, accumulation=1 + stage % 2) for stage in range(4)], "messages")


# -- traffic -----------------------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """Almost nothing but a table."""

    def __init__(self, words: int, width: int, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(words, width, sparse=sparse)
        self.head = nn.Linear(width, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(words)).square().mean()


def engine_of(model: nn.Module, stage: int, accumulation: int = 1, on: bool = True) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "sparse_gradients": on,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return shardwise.initialize(model=model, config=config)[0]


def words_of(rank: int, words: int, count: int) -> torch.Tensor:
    """Different words, some of them those of other ranks, each of them twice in the batch."""
    chosen = torch.randperm(words, generator=torch.Generator().manual_seed(rank))[:count]
    return chosen.repeat(2, 1)


def reduction_bytes(stage: int, words: int, width: int, count: int) -> dict[str, Any]:
    """What one step sends for gradients, densely and by rows."""
    found: dict[str, Any] = {}
    for on in (False, True):
        engine = engine_of(Lookup(words, width), stage, on=on)
        batch = words_of(dist.get_rank(), words, count)
        first = engine.ledger.sequence
        engine.backward(engine(batch))
        records = list(engine.ledger.records(first))
        parameters = {"all_gather"} if stage == 3 else set()
        found[str(on)] = sum(r.sent for r in records if r.op not in parameters)
        found[f"rows {on}"] = sum(r.sent for r in records if r.op == "all_to_all")
        found[f"whole {on}"] = sum(r.sent for r in records if r.op == "all_gather")
        table, head = sorted((s.layout for u in engine.sharded.units for s in u.sections), key=lambda s: -s.numel)[:2]
        found["shard"], found["head"] = table.shard, 4 * head.shard
        engine.step()
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_sent_is_the_rows(world: int) -> None:
    words, width, count = 3000, 11, 25
    row = 8 + 4 * width
    for stage in (0, 1, 2):
        per_rank = run_ranks(reduction_bytes, world, stage, words, width, count)
        for rank, found in enumerate(per_rank):
            if stage == 0:
                told = 8 * world + found["head"]  # numbers of rows; the head's gradient, which is not in rows
                assert found["whole True"] == (row * count + told) * (world - 1)
            else:
                mine = words_of(rank, words, count)[0].tolist()
                expected = 0
                for peer in range(world):
                    first, last = peer * found["shard"], (peer + 1) * found["shard"]
                    if peer != rank:
                        expected += sum(1 for word in mine if word * width < last and (word + 1) * width > first)
                assert found["rows True"] == row * expected
            assert found["rows False"] == 0
            assert 10 * found["True"] < found["False"]


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_of(tokens: int) -> list[tuple[str, dict[str, Any], tuple[int, int]]]:
    found = []
    for stage, accumulation, on in (
        (0, 1, True),
        (0, 2, True),
        (1, 2, True),
        (2, 2, True),
        (3, 1, True),
        (2, 1, False),
    ):
        engine = engine_of(Lookup(4000, 33), stage, accumulation, on)
        generator = torch.Generator().manual_seed(dist.get_rank())
        for step in range(3 * accumulation):
            if step == 2 * accumulation:
                engine.accountant.reset_peak()
            engine.backward(engine(torch.randint(0, 4000, (2, tokens), generator=generator)))
            engine.step()
        report = engine.memory_report()  # without activations, which it does not measure here
        rows = {row.name: (row.planned, row.measured) for row in report.rows if row.measured is not None}
        rows["total"] = (report.total.planned, report.total.measured)
        found.append((f"{stage} {accumulation} {on}", rows, (report.total.floor, report.total.measured)))
        assert on == any("planned as if they had to become dense" in note for note in report.notes)
        engine.destroy()
    return found


@pytest.mark.parametrize("tokens", [4, 400, 1200, 4000])
def test_what_is_held_is_at_most_what_was_planned(tokens: int) -> None:
    table = 4000 * 33 * 4
    for per_rank in run_ranks(memory_of, 2, tokens):
        least = {what: found for what, _, found in per_rank}
        for what, rows, _ in per_rank:
            for name, (planned, measured) in rows.items():
                assert measured <= planned + 64, (what, name)  # a step count or two
            floor, measured = least[what]
            assert floor <= measured, what
        by_setting = {what: rows for what, rows, _ in per_rank}
        if tokens == 4:
            dense, sparse = (by_setting[f"2 {1 + on} {on}"]["communication buffers"][1] for on in (False, True))
            assert dense >= table and sparse < table / 50


# -- states of training ------------------------------------------------------------------------------------------------


def helped_in_reductions() -> list[bool]:
    """Whether peers are helped when a reduction is launched that waits for numbers, as on a device."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    engine = engine_of(Bags(), 3)
    found: list[bool] = []
    reduce = Domain.reduce

    def waiting(self: Domain, launches: Any, made: Any = None) -> Any:
        link = reduce(self, launches, made)
        found.append(engine.sharded.gatherer._parked)
        link.wait()
        return link

    with mock.patch.object(Domain, "reduce", waiting):
        engine.backward(bags_loss(engine, few(generator, 0)))
        engine.step()
    engine.destroy()
    return found


def test_peers_are_helped_while_rows_are_reduced() -> None:
    for found in run_ranks(helped_in_reductions, 2):
        assert any(found)


def half_a_window() -> list[torch.Tensor]:
    """The gradient that the script sees after each of two micro-batches."""
    found = []
    for stage in (0, 1, 2):
        for on in (False, True):
            engine = engine_of(Lookup(300, 5), stage, 2, on)
            for micro in range(2):
                engine.backward(engine(words_of(dist.get_rank() + 7 * micro, 300, 4)))
                found.append(safe_get_full_grad(engine.module.words.weight))
                engine.step()
            engine.destroy()
    return found


def test_the_gradient_of_an_unfinished_window_is_seen() -> None:
    for found in run_ranks(half_a_window, 2):
        for start in range(0, len(found), 4):
            dense, rows = found[start : start + 2], found[start + 2 : start + 4]
            assert all(map(torch.equal, dense, rows))
            assert 4 <= int((rows[0] != 0).any(1).sum()) <= 8 < 2 * int((rows[1] != 0).any(1).sum())


def resumed(path: str) -> bool:
    def steps(engine: Any, first: int, last: int) -> None:
        for step in range(first, last):
            engine.backward(engine(words_of(dist.get_rank() + 3 * step, 300, 4)))
            engine.step()

    def whole(engine: Any) -> list[torch.Tensor]:
        with shardwise.zero.GatheredParameters(list(engine.module.parameters())):
            values = [p.detach().clone() for p in engine.module.parameters()]
        engine.destroy()
        return values

    straight = engine_of(Lookup(300, 5), 2)
    steps(straight, 0, 2)
    straight.save_checkpoint(path)
    steps(straight, 2, 4)
    ends = [whole(straight)]
    for stage, on in ((2, True), (3, True), (1, False)):  # another layout, and reductions of another kind
        engine = engine_of(Lookup(300, 5), stage, on=on)
        engine.load_checkpoint(path)
        steps(engine, 2, 4)
        ends.append(whole(engine))
    return all(torch.equal(a, b) for end in ends[1:] for a, b in zip(ends[0], end, strict=True))


def test_resuming_is_exact(tmp_path: Path) -> None:
    assert run_ranks(resumed, 2, str(tmp_path)) == [True, True]


# -- which tables ------------------------------------------------------------------------------------------------------


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.Embedding(5, 2, sparse=True)
        self.dense = nn.Embedding(6, 2)
        self.frozen = nn.Embedding(7, 2, sparse=True)
        self.frozen.weight.requires_grad_(False)
        self.tied = nn.Embedding(8, 2, sparse=True)
        self.head = nn.Linear(2, 8, bias=False)
        self.head.weight = self.tied.weight
        self.shared = nn.EmbeddingBag(5, 2, sparse=True, mode="sum")
        self.shared.weight = self.sparse.weight


def test_tables_are_what_only_sparse_embeddings_have() -> None:
    model = Several()
    tables, reasons = find_tables(model)
    assert len(tables) == 1 and tables[0] is model.sparse.weight
    assert reasons == {
        "dense.weight": "the embedding is built with sparse=False; with sparse=True its gradients are rows",
        "tied.weight": "it is tied to head.weight, whose gradient is dense",
    }
    text = "\n".join(warnings_about(model))
    assert "sparse_gradients: dense.weight is reduced densely" in text
    assert "with sparse=True its gradients are rows" in text and "tied to head.weight" in text
    assert "has no effect" in warnings_about(nn.Linear(2, 2))[0]
    assert warnings_about(Lookup(4, 2)) == []


def test_a_dense_embedding_is_trained_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardwise"):
        engine = engine_of(Lookup(50, 3, sparse=False), 0)
    assert "words.weight is reduced densely" in caplog.text
    assert engine.sparse_gradients_enabled() is True
    engine.backward(engine(torch.zeros(2, 2, dtype=torch.long)))
    engine.step()
    engine.destroy()


class Lossy(ShardedModel):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "compressor": object()})


def test_rows_and_lossy_reduction_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "ShardedModel", Lossy)
    with pytest.raises(ConfigError, match="sparse_gradients: true cannot be combined with lossy"):
        engine_of(Lookup(50, 3), 0)


def disagree() -> str:
    try:
        engine_of(Lookup(50, 3, sparse=dist.get_rank() == 0), 1)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_ranks_whose_tables_differ_are_told() -> None:
    for message in run_ranks(disagree, 2):
        assert "parameter words.weight" in message and "reduced as rows" in message


# -- arithmetic --------------------------------------------------------------------------------------------------------


class Wires:
    """Ranks in one process: what each sends is kept until all have."""

    def __init__(self, world: int) -> None:
        self.sent: list[list[tuple[torch.Tensor, list[int]]]] = [[] for _ in range(world)]

    def rank(self, rank: int) -> Any:
        wires, world = self, len(self.sent)

        class Handle:
            def __init__(self, fill: Any) -> None:
                self.wait = fill
                self.scratch: list[torch.Tensor] = []

        class Comm:
            def __init__(self) -> None:
                self.rank, self.world = rank, world

            def all_to_all(self, output: Any, given: Any, outputs: Any, inputs: Any, label: str, kind: str) -> Any:
                number = len(wires.sent[rank])
                wires.sent[rank].append((given, list(inputs)))

                def fill() -> None:
                    parts = [g.split(sizes)[rank] for g, sizes in (wires.sent[peer][number] for peer in range(world))]
                    assert [len(part) for part in parts] == list(outputs)
                    output.copy_(torch.cat(parts))

                return Handle(fill)

            def all_gather(self, pairs: Any, label: str, kind: str) -> Any:
                ((full, shard),) = pairs
                number = len(wires.sent[rank])
                wires.sent[rank].append((shard, []))
                return Handle(lambda: full.copy_(torch.cat([wires.sent[peer][number][0] for peer in range(world)])))

        return Comm()


def section_of(rows: int, width: int, world: int, rank: int, dtype: torch.dtype, whole: bool) -> SectionMemory:
    tensor = LogicalTensor(0, "table", (), (rows, width), dtype, dtype, True, None)
    (layout,) = lay_out([tensor], [world], "cpu", tables={0})
    domain = Domain(ImaginedCommunicator(world, torch.device("cpu")))
    domain.place = rank
    return SectionMemory(
        layout,
        domain=domain,
        levels=Levels(optimizer=0 if whole else 1, gradients=0, parameters=0),
        device=torch.device("cpu"),
        master_dtype=torch.float32,
        accumulate_dtype=torch.float32,
        accountant=Accountant(),
    )


@st.composite
def gradients(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """A table's rows and width, and the rows that each rank has."""
    rows, width = draw(st.integers(1, 40)), draw(st.integers(1, 50))
    world = draw(st.integers(2, 5))
    used = st.lists(st.integers(0, rows - 1), max_size=6, unique=True)
    return rows, width, [sorted(draw(used)) for _ in range(world)]


@given(
    given_rows=gradients(),
    whole=st.booleans(),
    accumulate=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_sums_of_rows_are_those_of_whole_tables(
    given_rows: tuple[int, int, list[list[int]]], whole: bool, accumulate: bool, dtype: torch.dtype
) -> None:
    rows, width, used = given_rows
    world = len(used)
    generator = torch.Generator().manual_seed(rows)
    parts = [
        Rows(torch.tensor(mine, dtype=torch.int64), torch.randn(len(mine), width, generator=generator).to(dtype))
        for mine in used
    ]
    sections = [section_of(rows, width, world, rank, dtype, whole) for rank in range(world)]
    table = Table.of(sections[0])
    counts = [[last - first for first, last in part.spans(table.ranges)] for part in parts]
    wires, reductions = Wires(world), []
    for rank, (section, part) in enumerate(zip(sections, parts, strict=True)):
        section.whole_gradient.fill_(0.25)
        given_part = part if used[rank] else None
        reductions.append(
            RowReduction(
                wires.rank(rank),
                section.whole_gradient,
                table,
                given_part,
                counts,
                "table",
                accumulate=accumulate,
                dtype=dtype,
            )
        )
    total = torch.zeros(sections[0].layout.numel)
    for part in parts:
        dense = torch.zeros(rows, width, dtype=dtype)
        part.write(dense)
        total[: rows * width] += dense.float().reshape(-1)
    for rank, (section, reduction) in enumerate(zip(sections, reductions, strict=True)):
        reduction.wait()
        own = slice(None) if whole else slice(*section.layout.range_of(rank))
        assert torch.equal(section.whole_gradient, total[own] + (0.25 if accumulate else 0.0))


@given(gradients(), gradients())
def test_rows_are_added_like_tables(first: Any, second: Any) -> None:
    rows, width, used = first
    table = torch.zeros(rows, width)
    found: Rows | None = None
    for mine in [*used, *([row % rows for row in other] for other in second[2])]:
        mine = sorted(set(mine))
        part = Rows(torch.tensor(mine, dtype=torch.int64), torch.randn(len(mine), width))
        dense = torch.zeros(rows, width)
        part.write(dense)
        table += dense
        found = part if found is None else found.plus(part, rows)
        assert found is not None
    assert found is not None
    whole = torch.empty(rows, width)
    found.write(whole)
    assert torch.equal(whole, table)
    assert found.index.tolist() == sorted(set(found.index.tolist()))
    assert len(found.index) == 0 or found.plus(found, len(found.index) - 1) is None


@given(gradients(), st.sampled_from([2, 4]), st.booleans())
def test_rows_never_take_more_than_the_table(given_rows: Any, itemsize: int, whole: bool) -> None:
    rows, width, used = given_rows
    world = len(used)
    table = Table.of(section_of(rows, width, world, 0, torch.float32, whole))
    parts = [Rows(torch.tensor(mine, dtype=torch.int64), torch.zeros(len(mine), width)) for mine in used]
    counts = [[last - first for first, last in part.spans(table.ranges)] for part in parts]
    assert all(sum(row) >= len(mine) for row, mine in zip(counts, used, strict=True))
    assert not affordable([*counts[:-1], [DENSE] * world], table, itemsize, 4)
    dense = rows * width * itemsize
    if affordable(counts, table, itemsize, 4):
        row = 8 + width * itemsize
        sent = [(world - 1) * max(map(len, used)) * row if whole else sum(numbers) * row for numbers in counts]
        assert max(sent) <= dense
        fewer = [[min(1, count) for count in numbers] for numbers in counts]
        assert affordable(fewer, table, itemsize, 4)
    assert affordable([[0] * world] * world, table, itemsize, 4)
