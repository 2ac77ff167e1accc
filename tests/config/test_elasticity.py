"""Section `elasticity`: batch sizes that stay equal over numbers of ranks, in the configuration and the drop-in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.config.elasticity import SCHEDULED, elastic_batch, micro_batch, section_of
from shardwise.errors import ConfigError, ElasticConfigError, ElasticWorldSizeError
from shardwise_deepspeed.elasticity import compute_elastic_config, ensure_immutable_elastic_config, main
from tests.harness.tables import tables

LARGE: dict[str, Any] = {
    **{"enabled": True, "max_train_batch_size": 10_000, "micro_batch_sizes": [8, 12, 16, 17]},
    **{"min_gpus": 32, "max_gpus": 1500, "version": 0.1},
}


def brute(section: Any, train: int, node: int, shared: int) -> tuple[int, ...]:
    ranks = range(section.min_gpus, section.max_gpus + 1)
    sizes = [size for size in ranks if size % node == 0 and train % (size // shared) == 0]
    return tuple(s for s in sizes if any(train // (s // shared) % micro == 0 for micro in section.micro_batch_sizes))


@pytest.mark.parametrize(
    "change", [{}, {"prefer_larger_batch": False}, {"micro_batch_sizes": [1, 3]}, {"max_gpus": 99}]
)
def test_every_valid_number_of_ranks_keeps_the_batch(change: dict[str, Any]) -> None:
    section = section_of({**LARGE, **change})
    found = elastic_batch(section)
    assert found.world_sizes == brute(section, found.train, 1, 1) and found.train <= 10_000
    for size in found.world_sizes:
        config = resolve({"elasticity": {**LARGE, **change}}, world_size=size).config
        micro, steps = config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
        assert config.train_batch_size == found.train == micro * steps * size and micro in section.micro_batch_sizes


def test_the_published_batch() -> None:
    found = elastic_batch(section_of(LARGE))
    assert (found.train, len(found.world_sizes)) == (9792, 23)
    assert elastic_batch(section_of({**LARGE, "prefer_larger_batch": False})).train <= 9792


@pytest.mark.parametrize(
    ("shared", "micros", "micro"), [(1, [4, 8], 4), (2, [4, 8], 8), (4, [4, 8], 8), (2, [8], 8), (4, [8], 8)]
)
def test_whole_nodes_and_model_parallelism(shared: int, micros: list[int], micro: int) -> None:
    """Micro-batches divide the samples of a data-parallel rank, not of a GPU."""
    keys = {"max_train_batch_size": 64, "micro_batch_sizes": micros, "num_gpus_per_node": 8}
    section = section_of({**keys, "model_parallel_size": shared})
    found = elastic_batch(section)
    assert (found.train, micro_batch(section, found, 16)) == (64, micro)
    assert found.world_sizes == brute(section, 64, 8, shared)
    config = {"elasticity": {**keys, "enabled": True, "model_parallel_size": shared}}
    tensor = {"tensor_parallel": {"autotp_size": shared}} if shared > 1 else {}
    assert resolve({**config, **tensor}, world_size=16).config.train_micro_batch_size_per_gpu == micro
    if shared > 1:
        with pytest.raises(ElasticConfigError, match=r"model_parallel_size: is .*but 1 ranks share"):
            resolve(config, world_size=16)


def test_an_invalid_number_of_ranks_is_refused_with_the_valid_ones() -> None:
    section = {**LARGE, "min_gpus": 1, "max_gpus": 4, "micro_batch_sizes": [2], "max_train_batch_size": 8}
    with pytest.raises(ElasticWorldSizeError, match=r"3 ranks cannot keep .* of 8 samples.*valid: 1, 2, 4\)"):
        resolve({"elasticity": section}, world_size=3)
    with pytest.raises(ElasticWorldSizeError, match="23 are valid; the nearest: 32, 34"):
        resolve({"elasticity": LARGE}, world_size=33)


def test_other_batch_keys() -> None:
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        with pytest.raises(ElasticConfigError, match=f"{key}: is given, but `elasticity.enabled` chooses"):
            resolve({key: 4, "elasticity": LARGE}, world_size=64)
        section = {**LARGE, "ignore_non_elastic_batch_info": True, "min_time": 20}
        found = resolve({key: 4, "elasticity": section}, world_size=64)
        assert found.config.train_batch_size == 9792
        assert [note.path for note in found.no_effect] == [key, "elasticity.min_time"]
        assert resolve({key: "auto", "elasticity": LARGE}, world_size=64).config.train_batch_size == 9792
    reasons = {note.path: note.reason for note in resolve({"elasticity": LARGE}, world_size=64).notes}
    assert reasons["train_batch_size"].startswith("elasticity: it fits 23 numbers of ranks: 32, 34, ")
    assert reasons["gradient_accumulation_steps"] == "elasticity: 9792 = 17 x 9 x 64 ranks"


@pytest.mark.parametrize(("change", "message"), tables(__file__)["wrong"])
def test_wrong_sections(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve({"elasticity": {**LARGE, **change}}, world_size=64)


def test_the_section_of_a_scheduler_must_be_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCHEDULED, json.dumps({**LARGE, "max_gpus": 64}))
    resolve({"elasticity": LARGE}, world_size=64)  # the numbers of ranks may differ
    ensure_immutable_elastic_config(LARGE)
    monkeypatch.setenv(SCHEDULED, json.dumps({**LARGE, "max_train_batch_size": 64}))
    with pytest.raises(ElasticConfigError, match="counts on max_train_batch_size = 64"):
        resolve({"elasticity": LARGE}, world_size=64)
    with pytest.raises(ElasticConfigError, match="counts on max_train_batch_size = 64"):
        ensure_immutable_elastic_config(LARGE)


def test_the_names_of_the_dropin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"elasticity": LARGE}
    assert compute_elastic_config(config, "0.18")[0] == 9792
    assert compute_elastic_config(config, "0.18", world_size=64)[2] == 17
    with pytest.raises(ElasticConfigError, match="pass world_size"):
        compute_elastic_config(config, "0.18", return_microbatch=True)
    with pytest.raises(ElasticConfigError, match="no such section, or it is off"):
        compute_elastic_config({"elasticity": {"enabled": False}}, "0.18")
    (tmp_path / "ds.json").write_text(json.dumps(config))
    for arguments, code, text in (
        ([], 0, "9792"),
        (["-w", "64"], 0, "micro_batch_size .... 17"),
        (["-w", "33"], 1, ""),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["-c", str(tmp_path / "ds.json"), *arguments])
        printed = capsys.readouterr()
        assert ended.value.code == code and text in printed.out
    assert "ds_elastic: error: elasticity: 33 ranks cannot keep" in printed.err
