"""What the benchmarks of one GPU make of figures and traces that only a GPU gives."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import runpy
import shlex
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))

    def module(name: str) -> dict[str, Any]:
        return runpy.run_path(str(ROOT / "bench" / f"{name}.py"))

    return module


def event(cat: str, name: str, start: float, length: float, stream: int = 7) -> dict[str, Any]:
    """An event as torch's profiler writes those of a CUDA device."""
    args = {"stream": stream} if cat in ("kernel", "gpu_memcpy", "gpu_memset") else {}
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length, "tid": 1, "pid": 0, "args": args}


TRACE = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    event("kernel", "warm up", 0, 50),
    event("user_annotation", "bench::step", 100, 100),
    event("gpu_user_annotation", "bench::step", 110, 200),
    event("user_annotation", "bench::step", 200, 100),
    event("user_annotation", "shardwise::wait for gather blocks.0", 150, 60),
    event("kernel", "sm90_xmma_gemm_bf16", 110, 50),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 120, 100, stream=20),
    event("kernel", "flash_fwd_kernel", 220, 60),
    event("kernel", "multi_tensor_apply_kernel", 280, 20),
]


def test_a_trace_tells_gaps_and_kinds(bench: Any, tmp_path: Path) -> None:
    trace = bench("trace")["Trace"](TRACE)
    assert trace.computing == "stream 7" and set(trace.lanes) == {"stream 7", "stream 20"}
    found = trace.summary()
    assert found["step_ms"] == pytest.approx(0.1)  # from the first step to the last kernel: two steps in 200 us
    assert found["computing"] == pytest.approx(130 / 200)
    assert found["anything"] == pytest.approx(190 / 200)
    times = {"to device_ms": 0.05, "attention_ms": 0.03, "gemm_ms": 0.025, "optimizer_ms": 0.01}
    assert {kind: found[kind] for kind in times} == pytest.approx(times)
    (gap,) = trace.gaps()
    assert gap["gap_us"] == 60 and gap["host_in"] == "wait for gather blocks.0"
    assert gap["others_run"] == "to device" and gap["next"] == "flash_fwd_kernel"
    trace.draw("a trace", tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 5000


def test_targets_say_what_was_met(bench: Any, tmp_path: Path) -> None:
    report, harness = bench("report"), bench("harness")
    results = {
        "gpu_one_163M_bf16_1": [
            {"system": "alone", "ratio": 1.0},
            {"system": "shardwise", "ratio": 1.01, "slack": 0.02},
            {"system": "FSDP2", "ratio": 1.2, "slack": 0.4},
            {"system": "shardwise 3 forced", "ratio": 1.32, "slack": 0.01},
        ],
        "gpu_offload_limited_13B_32": [
            {"system": "s", "setting": {"model": "13B", "limit_gib": 32.0}, "as_v100": 34.5}
        ],
    }
    for name, rows in results.items():
        (tmp_path / f"{name}.json").write_text(harness["text_of"]({"machine": {}}, harness["long"](rows)))
    cells = {what: rest for what, *rest in (target.cells(tmp_path) for target in report["TARGETS"])}
    assert cells["step of 163M, over plain PyTorch's"] == ["<= 1.02", "1.01", "yes"]
    assert cells["step of 163M, stage 3 forced, over FSDP2's"] == ["<= 1", "1.1", "**no**"]
    assert cells["step of 1.4B, over plain PyTorch's"] == ["<= 1.02", "-", "not measured"]
    assert cells["reserved and never allocated, over reserved, random lengths"] == ["<= 0.05", "0.02", "yes"]
    assert cells["13 B under 32 GiB, TFLOP/s on a card as fast as a V100"] == [">= 30", "34.5", "yes"]


@pytest.mark.parametrize(
    ("name", "peak"),
    [("NVIDIA H200", 989.0), ("NVIDIA H200 NVL", 835.0), ("NVIDIA B200", 2250.0), ("NVIDIA L4", 121.0)],
)
def test_peaks_are_those_of_the_device(bench: Any, name: str, peak: float) -> None:
    device = bench("harness")["Device"]("cpu")
    assert device.peak_flops(half=True) is None
    device.name = name
    assert device.peak_flops(half=True) == peak * 1e12


def test_the_optimizer_of_deepspeed_is_fused_as_those_beside_it(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    configs = list[dict[str, Any]]()
    peer = types.SimpleNamespace(
        init_distributed=lambda backend: None,
        initialize=lambda model, config: configs.append(config) or [None],
        LayerSpec=lambda *layer: layer,
        PipelineModule=lambda specs, **options: specs,
    )
    for name in ("deepspeed", "deepspeed.pipe"):
        monkeypatch.setitem(sys.modules, name, peer)
    options = argparse.Namespace(size="tiny", micro_batches=2, nproc=1)
    bench("pipeline")["of_engine"](options, "", "deepspeed")
    assert configs[0]["optimizer"]["params"]["fused"]


def test_nothing_goes_on_behind_a_part_that_takes_too_long(bench: Any, tmp_path: Path) -> None:
    file = tmp_path / "number"
    child = f"sleep 60 & echo $! > {file}; wait"
    assert bench("run")["run"](["sh", "-c", child], dict(os.environ), 1.0) == 124
    with pytest.raises(ProcessLookupError):
        for _ in range(100):  # until init has taken it
            os.kill(int(file.read_text()), 0)
            time.sleep(0.05)


def test_each_part_of_a_device_names_what_there_is_and_ends_within_600_s(bench: Any) -> None:
    sizes, train = bench("systems")["SIZES"], bench("offload_train")
    settings = train["SETTINGS"] | train["DIGITS"] | train["OTHERS"]
    for part in bench("run")["parts_of"]("cuda").values():
        for file, command, limit in part:
            _, *arguments = shlex.split(command)
            given = dict(itertools.pairwise(arguments))
            assert limit <= 600 and int(given.get("--limit", 0)) < limit, command
            assert given.get("--size", "163M") in sizes, command
            assert given.get("--file", file) == file, command
            for model in given.get("--models", "13B").split(","):
                assert train["Subject"](model).size.layers, command
            names = given["--settings"].split(";") if "--settings" in given else []
            assert settings.keys() >= set(names), command


def test_rows_are_kept_before_a_benchmark_ends(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_complete, train = bench("run")["is_complete"], bench("offload_train")
    file = tmp_path / "gpu_offload_cost.json"
    assert not is_complete(file)
    found = list[tuple[bool, int]]()

    def rows(options: argparse.Namespace) -> Any:
        yield {"system": "first", "step_s": 1.0}
        found.append((is_complete(file), len(json.loads(file.read_text())["rows"])))
        yield {"system": "second", "step_s": 2.0}

    main = train["main"]
    monkeypatch.setitem(main.__globals__["QUESTIONS"], "cost", rows)
    monkeypatch.setattr(sys, "argv", ["offload_train.py", "--device", "cpu", "--quick", "--results", str(tmp_path)])
    main()
    assert found == [(False, 1)] and is_complete(file)
    assert len(json.loads(file.read_text())["rows"]) == 2
