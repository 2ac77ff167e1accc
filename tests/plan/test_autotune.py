"""Decisions of the autotuner, from plans and reports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.config.schema.tuning import Autotuning
from shardwise.engine.plans import Offload, Setting
from shardwise.errors import UsageError
from shardwise.plan import autotune
from shardwise.plan.candidates import ON_DEVICE, Candidate, ModelFacts, choose, name_of

NOW = Setting(1, 4, 2, 2)


def chosen(
    now: Setting = NOW, batch: int | None = None, limit: int = 10**9, configured: Offload = ON_DEVICE, **keys: Any
) -> dict[str, Setting]:
    """Settings of a search where a micro-batch of `limit` samples is the largest that fits."""
    return {
        name_of(one): one
        for one in choose(
            now,
            Autotuning(**keys),
            batch,
            lambda one: one.micro_batch <= limit or (one.offload is not None and one.stage == 2),
            configured,
        )
    }


def sizes(found: dict[str, Setting], stage: int) -> list[int]:
    return [one.micro_batch for one in found.values() if one.stage == stage]


def test_sizes_are_spread_from_the_present_one_to_the_largest() -> None:
    found = chosen(max_train_micro_batch_size_per_gpu=64)
    assert all(sizes(found, stage) == [4, 16, 64] for stage in range(4))
    assert {one.accumulation for one in found.values()} == {2}
    assert sizes(chosen(max_train_micro_batch_size_per_gpu=64, num_tuning_micro_batch_sizes=1), 0) == [64]
    assert sizes(chosen(replace(NOW, micro_batch=64), max_train_micro_batch_size_per_gpu=64), 0) == [16, 32, 64]
    assert {one.stage for one in chosen(replace(NOW, ranks=1)).values()} == {1}  # one rank shards nothing


def test_bounds_of_the_global_batch() -> None:
    assert sizes(chosen(min_train_batch_size=32, max_train_batch_size=128, num_tuning_micro_batch_sizes=9), 2) == [
        8,
        16,
        32,
    ]
    with pytest.raises(UsageError, match=r"no global batch is from 1 to 3\. Change autotuning\.min_train_batch_size"):
        chosen(max_train_batch_size=3)
    found = chosen(batch=24)
    assert sizes(found, 0) == [4, 6, 12] and found["z0_mbs6_gas2"].config["train_batch_size"] == 24


def test_the_first_size_that_does_not_fit_is_shown_and_offloaded_only_then() -> None:
    bounds = {"max_train_micro_batch_size_per_gpu": 64, "num_tuning_micro_batch_sizes": 2}
    assert sizes(chosen(limit=16, **bounds), 1) == [4, 16, 32]
    found = chosen(limit=16, fast=False, **bounds)
    assert [name for name in found if name.endswith("_offload")] == ["z2_mbs32_gas2_offload"]
    assert not any(one.offload for one in chosen(fast=False, **bounds).values())


def test_offloading_of_the_configuration_is_left_out_where_the_model_fits() -> None:
    host, bounds = Offload("cpu", "none"), {"max_train_micro_batch_size_per_gpu": 4, "num_tuning_micro_batch_sizes": 1}
    found = chosen(configured=host, fast=False, **bounds)
    assert list(found)[:2] == ["z0_mbs4_gas2", "z0_mbs4_gas2_device"] and len(found) == 8
    assert found["z1_mbs4_gas2_device"].config["zero_optimization"]["offload_optimizer"] == {"device": "none"}
    assert len(chosen(configured=host, **bounds)) == 4


def candidate(name: str, seconds: float | None = None, **more: Any) -> Candidate:
    stage, micro, passes = (int(part.lstrip("zmbsga")) for part in name.split("_")[:3])
    config = {
        "train_batch_size": 2 * micro * passes,
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": stage},
    }
    return Candidate(name, config, micro, passes, **{"memory": 100, "seconds": seconds, **more})


ROWS = [candidate("z3_mbs2_gas1", 2.0), candidate("z1_mbs8_gas1", 4.0), candidate("z1_mbs2_gas1", 1.1)]


def test_the_order_of_runs() -> None:
    def names(**keys: Any) -> list[str]:
        return [one.name for one in autotune.ordered(ROWS, Autotuning(**keys))]

    assert names() == ["z1_mbs2_gas1", "z1_mbs8_gas1", "z3_mbs2_gas1"]
    assert names(tuner_type="model_based") == ["z1_mbs8_gas1", "z1_mbs2_gas1", "z3_mbs2_gas1"]
    assert names(tuner_type="model_based", metric="latency") == ["z1_mbs2_gas1", "z3_mbs2_gas1", "z1_mbs8_gas1"]
    assert sorted(names(tuner_type="random")) == sorted(names())


def test_only_what_the_plan_cannot_rank_is_run() -> None:
    options = Autotuning()
    reasons = {one.name: autotune.excluded(one, ROWS, options) for one in ROWS}
    # Seconds of a sample: 0.5, 0.25, 0.275.
    assert reasons == {
        "z3_mbs2_gas1": "planned to take 2.0 times as long as z1_mbs8_gas1",
        "z1_mbs8_gas1": "",
        "z1_mbs2_gas1": "",
    }
    assert "does not fit" in autotune.excluded(replace(ROWS[1], fits=False), ROWS, options)
    assert autotune.excluded(replace(ROWS[1], possible=False, note="no"), ROWS, options) == "no"
    without = candidate("z0_mbs2_gas1")
    assert autotune.excluded(without, [*ROWS, without], options) == ""


def test_larger_micro_batches_are_not_run_after_one_that_ran_out_of_memory() -> None:
    one = ROWS[2]
    ended = autotune.Result(one.name, {}, [], "out of memory", "here")
    assert "ran out of memory" in autotune.excluded_by_results(ROWS[1], {one.name: ended}, ROWS)
    assert not autotune.excluded_by_results(ROWS[0], {one.name: ended}, ROWS)  # another stage


FACTS = ModelFacts(1000, 1000, 4, 1, 1, {}, ROWS, flops=400, rows=4)
REPORT: dict[str, Any] = {
    "throughput": 100.0,
    "latency": 0.04,
    "memory": 90,
    "rows": 2,
    "built": {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}},
}


def judged(report: dict[str, Any] = REPORT, facts: ModelFacts = FACTS, **keys: Any) -> autotune.Result:
    return autotune.judged(ROWS[2], {}, [], report, facts, Autotuning(**keys))


def test_metrics() -> None:
    found = judged()
    assert (found.status, found.value, found.memory, found.planned) == ("measured", 100.0, 90, 100)
    assert judged(metric="latency").value == 0.04 and judged(metric="flops").value == 200 / 0.04
    assert autotune.in_words(judged(metric="latency"), Autotuning(metric="latency")) == "40 ms a step"
    unknown = judged(facts=replace(FACTS, flops=None), metric="flops")
    assert unknown.status == "failed" and "tune by throughput" in unknown.reason
    slow = replace(found, name="slow", value=1.0)
    assert autotune.best_of([slow, found], Autotuning()) is found
    assert autotune.best_of([slow, found], Autotuning(metric="latency")) is slow


def test_a_key_that_was_not_applied_is_no_result() -> None:
    built = {**REPORT["built"], "zero_optimization": {"stage": 0}}
    found = judged({**REPORT, "built": built})
    assert found.status == "not as configured" and found.value is None
    assert found.reason == "zero_optimization.stage is 0 in the engine, and 1 in the candidate's configuration"


def test_batches_that_do_not_follow_the_micro_batch_size_are_no_result() -> None:
    assert "had 4 at 4. Take the size from engine" in judged({**REPORT, "rows": 4}).reason
    assert judged({**REPORT, "rows": None}).status == "measured"  # they vary


def test_small_buckets_are_tried_on_the_best_of_a_large_model() -> None:
    large = replace(FACTS, num_params=10**9)
    assert not autotune.variations(ROWS[0], large, Autotuning())
    assert not autotune.variations(ROWS[0], FACTS, Autotuning(fast=False))
    (one,) = autotune.variations(ROWS[0], large, Autotuning(fast=False))
    assert one.config["zero_optimization"] == {
        "stage": 3,
        "reduce_bucket_size": 50_000_000,
        "allgather_bucket_size": 50_000_000,
    }
