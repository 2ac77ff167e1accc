"""The batch equation: any sufficient part gives the rest exactly, or an error that explains the numbers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config import Facts, resolve
from shardwise.errors import BatchSizeError, ConfigError, ConflictError

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"

SOLVED = [
    ({TRAIN: 32, MICRO: 2, STEPS: 4}, 4, (32, 2, 4)),
    ({TRAIN: 32, MICRO: 2}, 4, (32, 2, 4)),
    ({TRAIN: 32, STEPS: 4}, 4, (32, 2, 4)),
    ({MICRO: 2, STEPS: 4}, 4, (32, 2, 4)),
    ({TRAIN: 32}, 4, (32, 8, 1)),
    ({MICRO: 2}, 4, (8, 2, 1)),
    ({TRAIN: "auto", MICRO: 2, STEPS: "auto"}, 4, (8, 2, 1)),
    ({TRAIN: 32, MICRO: "auto", STEPS: "auto"}, 4, (32, 8, 1)),
]


@pytest.mark.parametrize(("keys", "world", "expected"), SOLVED)
def test_sufficient_parts(keys: dict[str, Any], world: int, expected: tuple[int, int, int]) -> None:
    config = resolve(keys, world_size=world).config
    assert (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    ) == expected


size = st.one_of(st.none(), st.integers(1, 12), st.integers(1, 200), st.just("auto"))


@given(train=size, micro=size, steps=size, world=st.integers(1, 9))
def test_solved_exactly_or_refused(train: Any, micro: Any, steps: Any, world: int) -> None:
    given_keys = {TRAIN: train, MICRO: micro, STEPS: steps}
    source = {name: value for name, value in given_keys.items() if value is not None}
    numbers = {name: value for name, value in source.items() if value != "auto"}
    try:
        config = resolve(source, world_size=world).config
    except BatchSizeError:
        # Refused only if no third number exists: the given ones alone decide.
        if TRAIN in numbers:
            known = numbers.get(MICRO, 1) * numbers.get(STEPS, 1) * world
            assert numbers[TRAIN] % known or (len(numbers) == 3 and numbers[TRAIN] != known)
        else:
            assert MICRO not in numbers
        return
    found = {TRAIN: config.train_batch_size, MICRO: config.train_micro_batch_size_per_gpu}
    found[STEPS] = config.gradient_accumulation_steps
    assert found[TRAIN] == found[MICRO] * found[STEPS] * world
    assert all(value >= 1 for value in found.values())
    assert numbers.items() <= found.items()


def test_nothing_given() -> None:
    for source in ({}, {STEPS: 4}, {TRAIN: "auto"}, {MICRO: "auto", STEPS: 2}):
        with pytest.raises(BatchSizeError, match=MICRO):
            resolve(source)
        assert resolve(source, facts=Facts(micro_batch_size=3)).config.train_micro_batch_size_per_gpu == 3


def test_error_shows_numbers_sources_and_a_solution(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    file = tmp_path / "ds.json"
    file.write_text(f'{{"{TRAIN}": 32,\n "{MICRO}": 4,\n "{STEPS}": 4}}')
    with pytest.raises(BatchSizeError) as caught:
        resolve(file, world_size=4)
    message = str(caught.value)
    assert "32 != 4 x 4 x 4 = 64" in message
    assert f"{TRAIN} = 32 ({file})" in message
    assert f"{MICRO} = 4 ({file})" in message
    assert "4 data-parallel ranks (WORLD_SIZE from the launcher)" in message
    assert f"Fix: {TRAIN} = 64; or {STEPS} = 2; or {MICRO} = 2." in message
    assert "launcher (WORLD_SIZE is not set)" not in message
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, ConfigError)


def test_every_proposal_works() -> None:
    source = {TRAIN: 48, MICRO: 4, STEPS: 4}
    with pytest.raises(BatchSizeError) as caught:
        resolve(source, world_size=2)
    proposals = str(caught.value).split("Fix: ")[1].split(".")[0].split("; or ")
    assert len(proposals) == 3
    for proposal in proposals:
        name, value = proposal.split(" = ")
        resolve({**source, name: int(value)}, world_size=2)


def test_multiples_are_proposed_when_a_number_is_missing() -> None:
    with pytest.raises(
        BatchSizeError, match=rf"10 is not a multiple of 1 x 4 = 4.*Fix: {TRAIN} = 8; or {TRAIN} = 12\."
    ):
        resolve({TRAIN: 10}, world_size=4)
    with pytest.raises(BatchSizeError, match=rf"Fix: {TRAIN} = 16\."):
        resolve({TRAIN: 10, STEPS: 4}, world_size=4)


def test_numbers_of_one_rank_are_said_to_be_that() -> None:
    keys = {TRAIN: 2, MICRO: 1, STEPS: 2}
    with pytest.raises(BatchSizeError, match=r"fit 1 rank: a library that has filled them in.*the data of all 2"):
        resolve(keys, world_size=2)
    with pytest.raises(BatchSizeError) as caught:
        resolve(keys, world_size=4)
    assert "all 4" in str(caught.value)
    with pytest.raises(BatchSizeError) as caught:
        resolve(keys | {TRAIN: 6}, world_size=2)
    assert "fit 1 rank" not in str(caught.value)


def test_one_rank_without_a_launcher_gets_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    source = {TRAIN: 32, MICRO: 4, STEPS: 4}
    with pytest.raises(BatchSizeError, match="started without a launcher"):
        resolve(source)
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(BatchSizeError) as caught:
        resolve(source)
    assert "without a launcher" not in str(caught.value)


def test_hybrid_parallelism_divides_the_ranks() -> None:
    pipeline, tensor = {"enabled": True, "partition": "uniform", "stages": 4}, {"enabled": True, "size": 2}
    keys = {MICRO: 1, "zero_optimization": {"stage": 3}, "pipeline": pipeline, "tensor_parallel": tensor}
    assert resolve(keys, world_size=8).config.train_batch_size == 1
    with pytest.raises(ConflictError) as caught:
        resolve(keys, world_size=2)
    assert [problem.path for problem in caught.value.problems] == ["pipeline.stages"]
