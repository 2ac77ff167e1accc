"""How many bytes go to disks and come from them: no more than have to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.memory import Category, Tier
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import Setting, start
from tests.offload.settings import offload, played_device
from tests.offload.test_faults import CASE, made, steps
from tests.offload.test_interrupted import backward


def on_disk(engine: Any, *categories: Category) -> int:
    live = engine.sharded.accountant.live_in(Tier.DISK)
    return sum(live[category] for category in categories)


def read_and_written(engine: Any) -> tuple[int, int]:
    files = {id(home._file): home._file for home in vars(engine.sharded.homes).values() if home.tier is Tier.DISK}
    read = sum(file.threads.bytes_read for file in files.values())
    written = sum(file.threads.bytes_written for file in files.values())
    moved = engine.sharded.accountant.moved(Tier.DISK)
    assert (moved.read, moved.written) == (read, written)
    return read, written


@pytest.mark.parametrize("world", [1, thorough(2)])
def test_a_step_does_not_read_the_shards_that_it_overwrites(tmp_path: Path, world: int) -> None:
    run_ranks(stepped, world, str(tmp_path))


def stepped(directory: str) -> None:
    zero = offload("some parameters near", directory)
    zero["offload_param"]["max_in_cpu"] = 0
    engine = made(zero)
    steps(engine, 0, 1)
    backward(engine, 1)
    before = read_and_written(engine)
    engine.step()
    after = read_and_written(engine)
    state = on_disk(engine, Category.MASTER, Category.OPTIMIZER)
    shards = on_disk(engine, Category.PARAMETERS)
    engine.destroy()
    assert state > 0 and shards > 0
    assert (after[0] - before[0], after[1] - before[1]) == (state, state + shards)


@on_ranks(1)
def test_sums_of_gradients_in_16_bits_are_half_as_many_bytes_to_the_host() -> None:
    """By `data_types.grad_accum_dtype`; sums are in fp32 otherwise."""
    sent = []
    zero = tuple(offload("optimizer on host", "").items())
    for sums in ("fp32", "bf16"):
        extra = (("data_types", {"grad_accum_dtype": sums}),)
        with played_device():
            engine = start(CASE, Setting(2, precision="bf16", optimizer="own AdamW", zero=zero, extra=extra))
            steps(engine, 0, 1)
            before = engine.accountant.moved(Tier.HOST).written
            backward(engine, 1)
            sent.append(engine.accountant.moved(Tier.HOST).written - before)
            engine.step()
            engine.destroy()
    assert sent[0] == 2 * sent[1] >= 4 * sum(parameter.numel() for parameter in CASE.make().parameters())


@pytest.mark.parametrize("way", ["sync", "async"])
@on_ranks(1)
def test_a_save_reads_the_state_once(tmp_path: Path, way: str) -> None:
    engine = made(offload("optimizer on disk", str(tmp_path)))
    steps(engine, 0, 2)
    before = read_and_written(engine)
    engine.save_checkpoint(tmp_path / "saved", asynchronous=way == "async")
    engine.wait_for_checkpoint()
    read = read_and_written(engine)[0] - before[0]
    assert 0 < read <= on_disk(engine, Category.MASTER, Category.OPTIMIZER)
    engine.destroy()
