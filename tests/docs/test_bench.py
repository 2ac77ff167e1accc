"""The benchmarks run, on tiny models, and leave figures from which plots and tables are made."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.limit(1000)  # they measure, beside other tests


def bench(script: str, *options: str) -> str:
    command = [sys.executable, str(ROOT / "bench" / script), *options]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


class Bench:
    """Quick runs of benchmarks into one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, script: str, *options: str) -> str:
        return bench(script, "--quick", "--device", "cpu", "--results", str(self.folder), *options)

    def rows(self, name: str) -> dict[str, Any]:
        """Return the rows of a result by system."""
        found = runpy.run_path(str(ROOT / "bench" / "harness.py"))["load"](self.folder, name)
        assert found is not None, sorted(path.name for path in self.folder.iterdir())
        return {row["system"]: row for row in found["rows"]}


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    return Bench(tmp_path)


@pytest.mark.thorough
def test_layers_and_kernels(quick: Bench) -> None:
    quick("sparse_attention.py", "--tokens", "64")
    rows = quick.rows("sparse_attention")
    assert rows["dense"]["share"] == 1 > rows["local_sliding_window"]["share"]
    assert all(row["time_s"] > 0 for row in rows.values())
    quick("kernels.py")
    assert quick.rows("kernels")["AdamW step"]["fused_ms"] > 0


@pytest.mark.thorough
def test_systems_take_turns_and_the_figures_reach_table_and_plot(quick: Bench) -> None:
    quick("train.py", "--nproc", "2")
    rows = quick.rows("time_zero_tiny_fp32_2")
    assert rows["DDP"]["ratio"] == 1 and "blocked_share" not in rows["DDP"]
    last = rows["shardwise 3"]
    assert 0 < last["blocked_share"] < 1 and last["passes_ms"] > 0 and last["update_ms"] > 0
    quick("train.py", "--what", "memory", "--systems", "shardwise 3", "--nproc", "2")
    for name, file in (
        ("time_zero_27M_fp32_2", "time_zero_tiny_fp32_2"),
        ("time_zero_27M_bf16_2", "time_zero_tiny_fp32_2"),
        ("memory_zero_98M_bf16_4", "memory_zero_tiny_fp32_2"),
    ):
        (quick.folder / f"{name}.json").write_text((quick.folder / f"{file}.json").read_text())
    assert "time_and_memory.png\n" in bench("plot.py", "--results", str(quick.folder))
    assert (quick.folder / "time_and_memory.png").stat().st_size > 10_000
    printed = bench("report.py", "--results", str(quick.folder)).splitlines()
    row = next(line for line in printed if "| shardwise 3 |" in line)
    assert row.split("|")[2].strip() == f"{last['ratio']:.2f}"


@pytest.mark.thorough
def test_the_first_step_is_measured(quick: Bench) -> None:
    quick("train.py", "--what", "start", "--systems", "DDP")
    assert quick.rows("start_zero_tiny_fp32_1")["DDP"]["build_s"] > 0


@pytest.mark.thorough
def test_groups_send_within_and_between(quick: Bench) -> None:
    quick("train.py", "--set", "groups", "--nproc", "4", "--systems", "FSDP2 groups;shardwise 3 groups")
    rows = quick.rows("time_groups_tiny_fp32_4")
    assert rows["FSDP2 groups"]["ratio"] == 1
    assert all(row["within_bytes_a_parameter"] > row["between_bytes_a_parameter"] > 0 for row in rows.values())


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["time", "memory"])
def test_tensor_parallelism_is_measured(quick: Bench, what: str) -> None:
    names = "FSDP2 + TP 2", "shardwise 3 + TP 2"
    quick("train.py", "--set", "tensor", "--what", what, "--nproc", "2", "--systems", ";".join(names))
    first, second = (quick.rows(f"{what}_tensor_tiny_fp32_2")[name] for name in names)
    assert first["ratio"] == 1 and second["ratio"] > 0
    if what == "time":
        assert second["loss_differs"] < 1e-6


@pytest.mark.thorough
def test_limits_are_searched(quick: Bench) -> None:
    quick("limits.py", "--what", "batch", "--nproc", "1", "--systems", "shardwise 2")
    (row,) = quick.rows("largest_batch_tiny_fp32_1").values()
    assert row["batch_per_rank"] > 1 and row["train_samples_per_s"] > 0
    quick("limits.py", "--what", "sequence", "--systems", "plain;tensor tokens recomputed")
    plain, other = quick.rows("longest_sequence_2").values()
    assert plain["over_plain"] == 1 and other["over_plain"] >= 1.2


@pytest.mark.thorough
def test_host_time_and_growth_are_measured(quick: Bench) -> None:
    quick("host.py", "--dtypes", "fp32", "--systems", "alone;shardwise 3 forced")
    assert quick.rows("host_time")["alone"]["over_alone"] == 1
    for what, metric in (("layers", "a_layer_us"), ("lengths", "late_mib")):
        quick("host.py", "--what", what, "--nproc", "1", "--systems", "shardwise 2")
        assert quick.rows(f"growth_{what}_1")["shardwise 2"][metric] > 0


@pytest.mark.thorough
def test_the_cost_of_watching_is_measured(quick: Bench) -> None:
    quick("overhead.py", "--nproc", "1")
    rows = quick.rows("monitoring_tiny_fp32_1")
    assert rows["nothing"]["over_percent"] == 0 < rows["everything"]["processor_ms"]
    quick("overhead.py", "--what", "timeline", "--keep", str(quick.folder / "kept"))
    assert quick.rows("timeline_tiny_fp32_2")["everything"]["events_a_step"] > 0
    bench("pictures.py", "timeline", str(quick.folder / "kept"), "--images", str(quick.folder))
    assert (quick.folder / "timeline.png").stat().st_size > 10_000


@pytest.mark.thorough
@pytest.mark.limit(1000)
@pytest.mark.parametrize(
    "parts", ["device,step,fp16", "trace,checkpoint,large", "limited,cost,7B,largest", "host,optimizer"]
)
def test_the_measurements_of_one_gpu_are_rehearsed(quick: Bench, parts: str) -> None:
    options = ["--rehearse", "--quick", "--results", str(quick.folder), "--only", parts]
    assert "step of 163M, over plain PyTorch's" in bench("run.py", *options)
    files = list(quick.folder.glob("gpu_*.json"))
    assert len(files) >= len(parts.split(","))
    for file in files:
        failed = [row for row in quick.rows(file.stem).values() if "failed" in row]
        assert not failed, file.name
    if "trace" in parts:
        assert (quick.folder / "gpu_trace_offload.png").stat().st_size > 5000


@pytest.mark.thorough
def test_pipelines_are_measured(quick: Bench) -> None:
    quick(
        "pipeline.py",
        "--what",
        "idle",
        "--micro-batches",
        "2",
        "--systems",
        "naive;1f1b",
        "--pictures",
        str(quick.folder),
    )
    assert (quick.folder / "1f1b_2.svg").exists()
    naive, other = quick.rows("pipeline_idle_m2").values()
    assert naive["simulated_idle_share"] == 0.5 > other["simulated_idle_share"] > 0 < other["activations_mb"]
    quick("pipeline.py", "--systems", "torch 1f1b;shardwise 1f1b")
    first, second = quick.rows("pipeline_tiny_fp32_2_m8").values()
    assert first["ratio"] == 1 and second["ratio"] > 0


@pytest.mark.thorough
def test_checkpoints_are_measured(quick: Bench) -> None:
    folder = ("--directory", str(quick.folder))
    quick("checkpoint.py", *folder, "--systems", "disk;shardwise;torch.save;torch DCP")
    rows = quick.rows("checkpoint_io_1")
    assert rows["disk"]["load_of_disk"] == 1 and rows["torch DCP"]["save_gb_per_s"] > 0
    assert rows["shardwise"]["load_processor_s_per_gb"] > 0
    quick("checkpoint.py", *folder, "--what", "memory")
    row = quick.rows("checkpoint_memory")["stage 3"]
    assert row["highest"] >= row["held"]
    quick("checkpoint.py", *folder, "--what", "background", "--nproc", "2")
    rows = quick.rows("checkpoint_async_2")
    assert rows["foreground"]["over_foreground"] == 1 and rows["background"]["slowdown"] > 0
    quick("checkpoint.py", *folder, "--what", "copies", "--nproc", "2")
    assert quick.rows("memory_copies_2")["copy, one node"]["a_rank_gb_per_s"] > 0


@pytest.mark.thorough
def test_pictures_of_schedules_are_drawn(tmp_path: Path) -> None:
    written = (ROOT / "docs" / "schedules.md").read_text()
    bench("pictures.py", "schedules", "--images", str(tmp_path))
    drawn = {picture.name for picture in tmp_path.iterdir()}
    assert len(drawn) == 5 and drawn == set(re.findall(r"images/(\w+\.png)", written))
    for name in drawn:
        assert (ROOT / "docs" / "images" / name).exists() and (tmp_path / name).stat().st_size > 10_000


@pytest.mark.thorough
def test_curricula_and_skipped_layers(quick: Bench) -> None:
    quick("curriculum.py", "--nproc", "1")
    rows = quick.rows("curriculum")
    assert rows["sequences begin short"]["steps"] > rows["whole sequences"]["steps"] > 1
    assert rows["whole sequences"]["tokens_to_target"] >= 4000
    quick("curriculum.py", "--what", "layers")
    rows = quick.rows("layer_drop")
    assert rows["theta 1"]["kept"] == 1 and rows["theta 0.25"]["median_ms"] > 0


@pytest.mark.thorough
def test_convergence_leaves_curves_and_bytes(quick: Bench) -> None:
    quick("convergence.py", "--nproc", "2", "--systems", "Adam;1-bit Adam")
    exact, onebit = quick.rows("convergence_onebit").values()
    assert len(exact["loss"]) == len(exact["steps"]) == 2 and exact["loss"][1] < exact["loss"][0]
    assert onebit["sent_bytes"][-1] < exact["sent_bytes"][-1] / 3
    assert "convergence_onebit.png\n" in bench("plot.py", "--results", str(quick.folder))


@pytest.mark.thorough
def test_distilled_students_leave_curves(quick: Bench) -> None:
    quick("distillation.py")
    rows = quick.rows("distillation")
    assert [len(row["loss"]) for row in rows.values()] == [2] * 5
    assert rows["student"]["parameters"] < rows["teacher"]["parameters"]
    assert "distillation.png\n" in bench("plot.py", "--results", str(quick.folder))


@pytest.mark.parametrize("options", [[], ["--rehearse"]])
def test_every_part_is_a_command_that_exists(options: list[str]) -> None:
    listed = bench("run.py", "--list", *options)
    scripts = {line.split()[1] for line in listed.splitlines() if line.startswith("    python bench/")}
    assert len(scripts) >= 6
    assert all((ROOT / script).exists() for script in scripts)


@pytest.mark.thorough
@pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is of the dependency group `inference`"
)
def test_inference_is_measured(quick: Bench) -> None:
    quick("inference.py", "--directory", str(quick.folder))
    rows = quick.rows("inference")
    assert all(row["tokens_per_s"] > 0 for row in rows.values())
    assert rows["bf16, 2 ranks"]["weights_mib"] < 0.6 * rows["bf16"]["weights_mib"]
    assert rows["int8"]["weights_mib"] < rows["bf16"]["weights_mib"]


def test_the_adam_benchmark_runs(quick: Bench) -> None:
    quick("micro.py", "--what", "adam")
    rows = quick.rows("cpu_adam")
    assert "scaled, then shardwise AdamW, then bf16 copy" in rows
    assert rows["copy of 30 bytes"]["over_copy"] == 1 and all(row["median_ns"] > 0 for row in rows.values())
    assert "| shardwise AdamW | 28 |" in bench("report.py", "--results", str(quick.folder))


@pytest.mark.thorough
def test_the_benchmark_of_optimizers_on_devices_runs(quick: Bench) -> None:
    quick("micro.py", "--what", "optimizers", "--segments", "3")
    rows = quick.rows("gpu_optimizer")
    assert rows["copy"]["of_copy"] == 1 and rows["AdamW of torch, fused, fp32"]["bytes"] == 28
    assert rows["AdamW, fp32 masters, bf16 copy"]["bytes"] == 30
    assert rows["AdamW, bf16, kahan, bf16 states"]["bytes"] == 20
    assert all(row["moved_gb_per_s"] > 0 for row in rows.values())


@pytest.mark.thorough
def test_offloading_is_measured(quick: Bench) -> None:
    folder = ("--directory", str(quick.folder))
    quick("offload.py", *folder)
    by_threads = quick.rows("offload_step")
    assert by_threads["copy, 1 thread"]["of_copy"] == 1 and by_threads["AdamW, 1 thread"]["moved_gb_per_s"] > 0
    first, *loops = quick.rows("offload_disk").values()
    assert first["system"] == "in turn" and first["of_plain"] > 0 and max(row["of_plain"] for row in loops) == 1
    assert all(row["with_ms"] > 0 and "hidden" in row for row in quick.rows("offload_overlap").values())
    quick("train.py", *folder, "--set", "disk")
    assert list(quick.rows("time_disk_tiny_fp32_1")) == ["shardwise 3", "shardwise 3, all on disk"]
    system = "shardwise 3, all on disk"
    quick("train.py", *folder, "--set", "disk", "--what", "memory", "--dtype", "bf16", "--systems", system)
    row = quick.rows("memory_disk_tiny_bf16_1")[system]
    # Parameters, masters and two moments.
    assert row["planned_disk_bytes_a_parameter"] == row["counted_disk_bytes_a_parameter"] >= 14
    (quick.folder / "memory_disk_tiny_bf16_1.json").rename(quick.folder / "memory_disk_98M_bf16_1.json")
    assert "offload_step.png\n" in bench("plot.py", "--results", str(quick.folder))
