"""Training over shared sequences against one process: losses, gradients and parameters, under every ZeRO stage."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import UsageError
from shardwise.parallel import RingAttention, RoundRobinLoader, SequenceLoader, mean_loss, split
from tests.harness import run_ranks, thorough
from tests.harness.training import gradients, masters
from tests.parallel.models import MODELS, ROWS, alone, data, loss_of

STEPS = 6


def config(stage: int, size: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "sequence_parallel_size": size,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def own_rows(engine: Any, step: int, packed: bool) -> dict[str, torch.Tensor]:
    """This rank's part of the rows of its copy of the model."""
    copy = engine.get_data_parallel_rank()
    batch = data(step, engine.dp_world_size, packed=packed)
    return split({name: value[copy * ROWS : (copy + 1) * ROWS] for name, value in batch.items()})


def train(kind: str, stage: int, size: int, packed: bool, weighted: bool = True) -> Any:
    engine, *_ = shardwise.initialize(model=MODELS[kind](shared=True), config=config(stage, size))
    losses = []
    for step in range(STEPS):
        loss, tokens = loss_of(engine, own_rows(engine, step, packed))
        total = torch.stack([loss.detach().double() * tokens, tokens.double()])
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
        if weighted:
            engine.backward(loss, weight=tokens)
        else:
            engine.backward(mean_loss(loss, tokens))
        if step == STEPS - 1:
            grads = gradients(engine.module)
        engine.step()
    found = masters(engine.module)
    engine.destroy()
    return losses, grads, found


def assert_equal(found: Any, exact: Any) -> None:
    """Losses, last gradients and parameters of a run in fp32, and of one in fp64."""
    assert found[0] == pytest.approx(exact[0], rel=1e-5)
    for ours, theirs in zip(found[1:], exact[1:], strict=True):
        largest = max(value.norm() for value in theirs.values())
        for name, value in theirs.items():
            assert (ours[name] - value).norm() <= 1e-4 * value.norm() + 1e-6 * largest, name


@pytest.mark.parametrize(
    ("kind", "packed", "stage", "world", "size"),
    [
        ("llama", True, 2, 4, 4),
        thorough("llama", False, 3, 4, 2),
        thorough("gpt", False, 0, 2, 2),
        thorough("gpt", False, 1, 4, 2),
    ],
)
def test_training_is_that_of_one_process(kind: str, packed: bool, stage: int, world: int, size: int) -> None:
    copies = world // size
    exact = alone(kind, STEPS, copies, torch.float64, packed)
    for found in run_ranks(train, world, kind, stage, size, packed):
        assert_equal(found, exact)


def test_losses_of_a_sequence_that_all_its_ranks_differentiate() -> None:
    """DeepSpeed's way: the mean over sequences of the mean over each one's tokens; one copy of the model here."""
    exact = alone("gpt", STEPS, 1, torch.float64)
    for found in run_ranks(train, 2, "gpt", 2, 2, False, False):
        assert_equal(found, exact)


@pytest.mark.parametrize(
    ("weighted", "kind", "packed"),
    [thorough(False, "gpt", False), thorough(False, "llama", True), (True, "llama", True)],
)
def test_a_size_of_one_leaves_scripts_as_they_are(kind: str, packed: bool, weighted: bool) -> None:
    if weighted:
        exact = alone(kind, STEPS, 2, torch.float64, packed)
        for found in run_ranks(train, 2, kind, 1, 1, packed):
            assert_equal(found, exact)
    else:
        exact = alone(kind, STEPS, 1, torch.float64, packed)
        for found in run_ranks(train, 1, kind, 1, 1, packed, False):
            assert_equal(found, exact)


def not_shared() -> Any:
    """Loaders, and an engine that nobody destroys."""
    engine, _, loader, _ = shardwise.initialize(
        model=MODELS["gpt"](shared=True), config=config(1, 1, gradient_accumulation_steps=2), training_data=Rows()
    )
    assert engine.get_sequence_parallel_group() is None and engine.sequence_parallel_size == 1
    parts = list(SequenceLoader(loader))
    handed = RoundRobinLoader(loader)
    assert len(handed) == len(loader)
    q = torch.randn(2, 1, 8, 16)
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(RingAttention()(q, q, q), expected)
    rounds = list(handed)
    engine.destroy()
    with pytest.raises(UsageError, match="there is no group of ranks"):
        list(SequenceLoader(loader))
    return [[batch["input_ids"].tolist() for batch in batches] for batches in (parts, rounds)], parts


def test_loaders_of_ranks_that_share_no_sequence_give_whole_ones() -> None:
    seen = []
    for (parts, rounds), batches in run_ranks(not_shared, 2):
        for batch in batches:
            assert batch.keys() == {"input_ids", "shift_labels", "position_ids"}
            assert batch["input_ids"].shape == batch["shift_labels"].shape == (ROWS, 9)
        assert len(parts) == len(rounds) == 2
        seen += [row[0] // 100 for rows in parts for row in rows]
    assert sorted(seen) == list(range(8))


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(9) + 100 * index, "labels": torch.arange(9) + 100 * index}


def loaded() -> Any:
    """The parts that come from the engine's loader, and who this rank is."""
    more = {"gradient_accumulation_steps": 2, "data_parallel_size": 2}
    engine, _, loader, _ = shardwise.initialize(
        model=MODELS["gpt"](shared=True), config=config(1, 2, **more), training_data=Rows()
    )
    wrapped = SequenceLoader(loader)
    assert len(wrapped) == len(loader) == 2
    assert wrapped.state_dict() == loader.state_dict()
    parts = list(wrapped)
    ranks = dist.get_process_group_ranks(engine.get_sequence_parallel_group())
    found = (
        ranks,
        dist.get_process_group_ranks(engine.data_parallel_group),
        [engine.world_size, engine.dp_world_size, engine.seq_dp_world_size, engine.sequence_parallel_size],
        [engine.get_data_parallel_rank(), engine.train_batch_size()],
    )
    engine.destroy()
    return parts, found


def test_ranks_of_a_sequence_get_parts_of_the_same_samples() -> None:
    told = run_ranks(loaded, 4)
    assert [found for _, found in told] == [
        ([first, first + 1], [rank % 2, rank % 2 + 2], [4, 2, 4, 2], [rank // 2, 8])
        for rank, first in enumerate([0, 0, 2, 2])
    ]
    seen = []
    for first in (0, 2):
        for left, right in zip(told[first][0], told[first + 1][0], strict=True):
            whole = {name: torch.cat([left[name], right[name]], dim=1) for name in left}
            assert left["input_ids"].shape[1] == 5 and right["input_ids"].shape[1] == 4
            assert whole["position_ids"].tolist() == [list(range(9))]
            assert torch.equal(whole["shift_labels"][:, :-1], whole["input_ids"][:, 1:])
            assert bool((whole["shift_labels"][:, -1] == -100).all()) and "labels" not in whole
            seen += (whole["input_ids"][:, 0] // 100).tolist()
    assert sorted(seen) == list(range(8))


def save(path: str) -> Any:
    engine, *_ = shardwise.initialize(model=MODELS["gpt"](shared=True), config=config(3, 2))
    for step in range(2):
        loss, tokens = loss_of(engine, own_rows(engine, step, False))
        engine.backward(loss, weight=tokens)
        engine.step()
    engine.save_checkpoint(path)
    found = masters(engine.module)
    engine.destroy()
    return found


def resume(path: str, size: int) -> Any:
    engine, *_ = shardwise.initialize(model=MODELS["gpt"](shared=size > 1), config=config(1, size))
    engine.load_checkpoint(path)
    before = masters(engine.module)
    batch = own_rows(engine, 2, False) if size > 1 else None
    if batch is None:
        from shardwise.parallel.data import complete

        copy = engine.get_data_parallel_rank()
        whole = data(2, 1)
        batch = complete({name: value[copy : copy + 1] for name, value in whole.items()})
    loss, tokens = loss_of(engine, batch)
    engine.backward(loss, weight=tokens)
    engine.step()
    after = masters(engine.module)
    engine.destroy()
    return before, after


def test_a_checkpoint_knows_nothing_of_shared_sequences(tmp_path: Any) -> None:
    saved = run_ranks(save, 2, str(tmp_path))[0]
    ends = []
    for size in (2, 1):
        before, after = run_ranks(resume, 2, str(tmp_path), size)[0]
        assert all(torch.equal(before[name], value) for name, value in saved.items())
        ends.append(after)
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-4, atol=1e-6)


def step_once(how: str) -> Any:
    """Gradients of one step with activations that are recomputed, offloaded, or neither."""
    extra: dict[str, Any] = {"bf16": {"enabled": False}}
    model = MODELS["llama"](shared=True)
    if how == "recomputed":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames it
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = shardwise.initialize(model=model, config=config(3, 2, **extra))
    with shardwise.offload_activations(min_bytes=1) if how == "offloaded" else contextlib.nullcontext():
        loss, tokens = loss_of(engine, own_rows(engine, 0, True))
    engine.backward(loss, weight=tokens)
    found = gradients(engine.module)
    engine.destroy()
    return found


@pytest.mark.parametrize("how", [thorough("recomputed"), "offloaded"])
def test_activations_may_be_recomputed_or_offloaded(how: str) -> None:
    plain, other = (run_ranks(step_once, 2, kind)[0] for kind in ("plain", how))
    assert all(torch.equal(other[name], value) for name, value in plain.items())
