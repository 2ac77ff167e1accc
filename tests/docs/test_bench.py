"""The benchmarks run, on tiny models, and leave figures from which plots and tables are made."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def bench(script: str, *options: str) -> str:
    command = [sys.executable, str(ROOT / "bench" / script), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.thorough
def test_systems_take_turns_and_the_figures_reach_the_table(tmp_path: Path) -> None:
    bench("step_time.py", "--quick", "--results", str(tmp_path))
    shutil.copy(tmp_path / "step_time_27M_fp32_2.json", tmp_path / "step_time_27M_bf16_2.json")
    record = json.loads((tmp_path / "step_time_27M_fp32_2.json").read_text())
    assert {"torch", "processor", "cores", "load_average"} <= record["machine"].keys()
    rows = {row["system"]: row for row in record["rows"]}
    assert rows["DDP"]["ratio"] == 1 and rows["DDP"]["blocked_share"] is None
    assert 0 < rows["shardwise 3"]["blocked_share"] < 1
    bench("memory.py", "--quick", "--systems", "shardwise 3", "--nproc", "2", "--results", str(tmp_path))
    memory = tmp_path / "memory_98M_bf16_2.json"
    memory.rename(tmp_path / "memory_98M_bf16_4.json")
    assert "time_and_memory.png\n" in bench("plot.py", "--results", str(tmp_path))
    assert (tmp_path / "time_and_memory.png").stat().st_size > 10_000
    row = next(line for line in bench("table.py", "--results", str(tmp_path)).splitlines() if "| shardwise 3 |" in line)
    assert row.split("|")[2].strip() == f"{rows['shardwise 3']['ratio']:.2f}"


def rows(file: Path) -> list[dict[str, Any]]:
    return json.loads(file.read_text())["rows"]


@pytest.mark.thorough
def test_the_other_benchmarks_run(tmp_path: Path) -> None:
    scripts = {
        "growth.py": ["--nproc", "1"],
        "largest_batch.py": ["--nproc", "1"],
    }
    with ThreadPoolExecutor() as pool:  # most of their time goes into starting processes
        found = [
            pool.submit(bench, script, "--quick", "--systems", "shardwise 2", "--results", str(tmp_path), *options)
            for script, options in scripts.items()
        ]
        watched = pool.submit(bench, "monitoring.py", "--quick", "--nproc", "1", "--parts", "--results", str(tmp_path))
        of_layers = pool.submit(bench, "host_time.py", "--quick", "--dtypes", "fp32", "--results", str(tmp_path))
    assert all(one.result() for one in found) and watched.result()
    nothing, everything, *parts = rows(tmp_path / "monitoring_7M_fp32_1.json")
    assert nothing["over_percent"] == 0 < everything["processor_ms"] and len(parts) > 3
    (row,) = rows(tmp_path / "growth_layers_1.json")
    assert all(microseconds > 0 for microseconds in row["microseconds_per_layer"].values())
    assert of_layers.result()
    by_system = {(row["system"], row["world"], row["beside"]): row for row in rows(tmp_path / "host_time.json")}
    assert by_system["alone", 8, False]["over_alone"] == 1 and ("shardwise 3 forced", 1, True) in by_system
    (row,) = rows(tmp_path / "growth_lengths_1.json")
    assert row["late_mib"] > 0
    (row,) = rows(tmp_path / "largest_batch_27M_fp32_1.json")
    assert row["batch_per_rank"] > 1 and row["train_samples_per_s"] > 0


@pytest.mark.thorough
@pytest.mark.parametrize(
    "parts", ["device,step,fp16", "trace,checkpoint,large", "limited,cost,largest", "host,optimizer"]
)
def test_one_gpu_is_measured(parts: str, tmp_path: Path) -> None:
    options = ["--device", "cpu", "--quick", "--results", str(tmp_path), "--only", parts]
    printed = bench("gpu.py", *options)
    assert "step of 163M, over plain PyTorch's" in printed
    found = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert len(found) >= len(parts.split(","))
    failed = [row for part in found.values() for row in part["rows"] if "failed" in row]
    assert not failed
    assert "took" not in bench("gpu.py", *options, "--missing")  # nothing is measured twice
    if "trace" in parts:
        assert (tmp_path / "gpu_trace_offload.png").stat().st_size > 5000


@pytest.mark.thorough
def test_what_ranks_share_is_measured(tmp_path: Path) -> None:
    options = ["--quick", "--results", str(tmp_path)]
    ways = "plain,shared,tensor,tensor tokens recomputed"
    with ThreadPoolExecutor() as pool:
        tensor = pool.submit(
            bench, "tensor.py", *options, "--nproc", "2", "--systems", "FSDP2 + TP 2,shardwise 3 + TP 2"
        )
        longest = pool.submit(bench, "longest_sequence.py", *options, "--ways", ways)
    assert tensor.result() and longest.result()
    first, second = rows(tmp_path / "tensor_27M_fp32_2.json")
    assert first["ratio"] == first["memory_ratio"] == 1 and second["ratio"] > 0 and second["memory_ratio"] > 0
    assert second["loss_differs"] < 1e-6
    plain, *others = rows(tmp_path / "longest_sequence_2.json")
    assert plain["over_plain"] == 1 and all(row["over_plain"] >= 1.2 for row in others)


@pytest.mark.thorough
def test_pipelines_are_measured(tmp_path: Path) -> None:
    options = ["--quick", "--results", str(tmp_path)]
    throttled = bench("pipeline_idle.py", *options, "--schedules", "naive,1f1b", "--pictures", str(tmp_path))
    assert throttled.startswith("2 ranks naive") and (tmp_path / "1f1b_2.svg").exists()
    bench("pipeline.py", *options, "--systems", "torch 1f1b,shardwise 1f1b")
    naive, other = rows(tmp_path / "pipeline_idle_m2.json")
    assert naive["simulated_idle_share"] == 0.5 > other["simulated_idle_share"] > 0 < other["activations_mb"]
    first, second = rows(tmp_path / "pipeline_27M_fp32_2_m8.json")
    assert first["ratio_to_best_other"] == 1 and second["ratio_to_best_other"] > 0


@pytest.mark.thorough
def test_checkpoints_are_measured(tmp_path: Path) -> None:
    options = ["--quick", "--results", str(tmp_path), "--directory", str(tmp_path)]
    with ThreadPoolExecutor() as pool:
        io = pool.submit(bench, "checkpoint_io.py", *options, "--only", "disk,shardwise,torch.save,torch DCP")
        memory = pool.submit(bench, "checkpoint_memory.py", *options)
    assert "shardwise" in io.result() and "stage 3, 2 ranks" in memory.result()
    by_system = {row["system"]: row for row in rows(tmp_path / "checkpoint_io_1.json")}
    assert (
        by_system["disk"]["load_of_disk"] == 1
        and by_system["shardwise"]["load_processor"] > 0
        and by_system["torch DCP"]["save_gb_per_s"] > 0
    )
    (row,) = rows(tmp_path / "checkpoint_memory.json")
    assert row["highest"] >= row["held"]


@pytest.mark.thorough
def test_pictures_of_schedules_are_drawn(tmp_path: Path) -> None:
    written = (ROOT / "docs" / "schedules.md").read_text()
    bench("schedules.py", "--images", str(tmp_path))
    drawn = {picture.name for picture in tmp_path.iterdir()}
    assert len(drawn) == 5 and drawn == set(re.findall(r"images/(\w+\.png)", written))
    for name in drawn:
        assert (ROOT / "docs" / "images" / name).exists() and (tmp_path / name).stat().st_size > 10_000


@pytest.mark.thorough
def test_convergence_leaves_curves_and_bytes(tmp_path: Path) -> None:
    options = ["--quick", "--nproc", "2", "--names", "Adam;1-bit Adam", "--results", str(tmp_path)]
    bench("convergence.py", *options)
    exact, onebit = rows(tmp_path / "convergence_onebit.json")
    assert len(exact["loss"]) == len(exact["steps"]) == 2 and exact["loss"][1] < exact["loss"][0]
    assert onebit["sent_bytes"][-1] < exact["sent_bytes"][-1] / 3
    assert "convergence_onebit.png\n" in bench("plot.py", "--results", str(tmp_path))


def test_every_part_is_a_command_that_exists() -> None:
    listed = bench("run.py", "--list")
    scripts = {line.split()[1] for line in listed.splitlines() if line.startswith("    python bench/")}
    assert len(scripts) >= 6
    assert all((ROOT / script).exists() for script in scripts)


def test_the_adam_benchmark_runs(tmp_path: Path) -> None:
    printed = bench("cpu_adam.py", "--quick", "--results", str(tmp_path))
    found = {row["system"]: row for row in rows(tmp_path / "cpu_adam.json")}
    assert "scaled, then shardwise AdamW, then bf16 copy" in printed
    assert found["copy of 30 bytes"]["over_copy"] == 1
    assert all(row["median_ns"] > 0 for row in found.values())
    assert "| shardwise AdamW | 28 |" in bench("table.py", "--results", str(tmp_path))


@pytest.mark.thorough
def test_the_benchmark_of_optimizers_on_devices_runs(tmp_path: Path) -> None:
    bench("optimizer_kernels.py", "--quick", "--device", "cpu", "--segments", "3", "--results", str(tmp_path))
    part = json.loads((tmp_path / "gpu.json").read_text())["parts"]["optimizer"]
    found = {row["system"].removesuffix(", torch's kernels"): row for row in part["rows"]}
    assert found["copy"]["of_copy"] == 1 and found["AdamW of torch, fused, fp32"]["bytes"] == 28
    assert found["AdamW, fp32 masters, bf16 copy"]["bytes"] == 30
    assert found["AdamW, bf16, kahan, bf16 states"]["bytes"] == 20
    assert all(row["gb_per_s"] > 0 for row in found.values())


@pytest.mark.thorough
def test_offloading_is_measured(tmp_path: Path) -> None:
    options = ["--quick", "--results", str(tmp_path), "--directory", str(tmp_path)]
    with ThreadPoolExecutor() as pool:
        parts = pool.submit(bench, "offload.py", *options)
        times = pool.submit(bench, "offload_time.py", "--place", "disk", *options)
        memory = pool.submit(bench, "offload_memory.py", *options)
    assert all(one.result() for one in (parts, times, memory))
    by_threads = {row["system"]: row for row in rows(tmp_path / "offload_step.json")}
    assert by_threads["copy, 1 thread"]["of_copy"] == 1 and by_threads["AdamW, 1 thread"]["gb_per_s"] > 0
    first, *loops = rows(tmp_path / "offload_disk.json")
    assert first["system"] == "in turn" and first["of_plain"] > 0 and max(row["of_plain"] for row in loops) == 1
    assert all(row["with_ms"] > 0 and "hidden" in row for row in rows(tmp_path / "offload_overlap.json"))
    names = [row["system"] for row in rows(tmp_path / "offload_time_disk_98M_bf16_1.json")]
    on_disk = ("optimizer on disk", "all on disk")
    assert names == ["shardwise 3", *(f"shardwise 3, {state}" for state in on_disk)]
    (row,) = rows(tmp_path / "offload_memory_98M_bf16_1.json")
    assert row["planned_disk"] == row["counted_disk"] >= 14  # parameters, masters and two moments
    assert "offload_step.png\n" in bench("plot.py", "--results", str(tmp_path))
    assert "| shardwise 3, all on disk | disk | 1 |" in bench("table.py", "--results", str(tmp_path))
