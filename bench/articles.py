"""What articles on DeepSpeed and ZeRO say, and what comes out here: planned by dry runs, or measured.

    python bench/articles.py [--rows TEXT] [--quick]

Each row names the claim, its figure, ours, and how it was made. Plans are made here, in some minutes; measurements are
those of the other benchmarks in bench/results. GB are 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from harness import RESULTS, Row, load, options_of, save, show
from torch import nn

from shardwise.engine.plans import Offload, SettingPlan, planners_of
from shardwise.memory.sources import memory_sources
from shardwise.plan.architectures import SHAPES, Decoder, Shape
from shardwise.plan.cluster import Cluster
from shardwise.plan.configurations import decoder_of
from shardwise.plan.time import plan_times

GB = 1e9
HOST = Offload("cpu", "none")
BOTH = Offload("cpu", "cpu")


@dataclass(frozen=True)
class Claim:
    """A claim: where it stands, what it says, and functions of what comes out and of how."""

    where: str
    says: str
    here: Callable[[], str]
    how: str


def built(shape: Shape, recompute: bool = False) -> nn.Module:
    """Return a decoder without memory."""
    with torch.device("meta"):
        return Decoder(shape, recompute=recompute)


def planned(
    shape: Shape,
    ranks: int,
    stage: int,
    *,
    precision: str = "fp32",
    rows: int = 1,
    length: int = 512,
    recompute: bool = False,
    offload: Offload | None = None,
    tensor: int = 1,
) -> SettingPlan:
    """Return the plan of one rank."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if tensor > 1:
        config["tensor_parallel"] = {"autotp_size": tensor}
    batch = torch.empty(rows, length, dtype=torch.int64, device="meta") if length else None
    (planner,), _ = planners_of(built(shape, recompute), config, ranks, batch)
    setting = replace(planner.target.setting, stage=stage, offload=offload)
    return planner.plan(setting)


def gigabytes(*plans: SettingPlan) -> str:
    """Return the totals of plans."""
    return " / ".join(f"{(one.total or 0) / GB:.1f}" for one in plans) + " GB"


def resident(one: SettingPlan) -> float:
    """Return the bytes of parameters, gradients and optimizer on the device."""
    return sum(one.peaks[name] for name in ("parameters", "gradients", "master weights", "optimizer state"))


def stages(shape: Shape, ranks: int, which: tuple[int, ...] = (0, 1, 2, 3), **more: Any) -> str:
    """Return the totals of ZeRO stages."""
    return gigabytes(*(planned(shape, ranks, stage, **more) for stage in which))


def dense() -> str:
    """Return model and activation bytes of a dense network of four layers."""
    wide = nn.Linear(1024, 1024)
    model = nn.Sequential(nn.Linear(512, 1024), wide, nn.Linear(1024, 1024), nn.Linear(1024, 512))
    found = memory_sources(model, torch.ones(4, 512))
    return f"{found.model:,} B and {found.activation_outputs:,} B"


def blocks(layers: int, width: int) -> str:
    """Return the bytes of transformer blocks, by the formula and by the model."""
    with torch.device("meta"):
        model = Decoder(Shape(layers, width, width // 64, 1))
    found = sum(p.numel() for p in model.layers.parameters()) * 4
    formula = 4 * layers * width * (13 + 12 * width)
    return f"formula {formula / GB:.3f} GB, model {found / GB:.3f} GB"


def speed(shape: Shape, ranks: int, stage: int, rows: int, card: str, **config: Any) -> str:
    """Return the samples a second that are planned on cards."""
    settings = {
        "train_micro_batch_size_per_gpu": rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "fp16": {"enabled": True},
        **config,
    }
    batch = torch.empty(rows, 512, dtype=torch.int64, device="meta")
    cluster = Cluster.of(card, None, 8)
    (one,) = plan_times(built(shape, True), settings, cluster, ranks=ranks, stages=[stage], batch=batch)
    return f"{rows * ranks / one.time.total:.0f} samples/s"


def transformers_model(name: str) -> nn.Module:
    """Return a T5 of a published size, without memory."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"t5-large": (1024, 4096, 24, 16, 64), "t5-3b": (1024, 16384, 24, 32, 128)}
    width, inner, layers, heads, each = sizes[name]
    config = T5Config(
        vocab_size=32128,
        d_model=width,
        d_ff=inner,
        num_layers=layers,
        num_heads=heads,
        d_kv=each,
        decoder_start_token_id=0,
        use_cache=False,
    )
    with torch.device("meta"):
        return T5ForConditionalGeneration(config)


def largest_batch(name: str, ranks: int, stage: int, precision: str, offload: Offload | None, limit: float) -> str:
    """Return the largest micro-batch of 128 source and target tokens that fits a device, without a margin."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    tokens = torch.empty(1, 128, dtype=torch.int64, device="meta")
    (planner,), _ = planners_of(transformers_model(name), config, ranks, {"input_ids": tokens, "labels": tokens})

    def total(rows: int) -> int:
        setting = replace(planner.target.setting, stage=stage, offload=offload, micro_batch=rows)
        plan = planner.plan(setting)
        if plan.note:
            raise SystemExit(f"{name}: {plan.note}")
        return plan.total or 0

    one = total(1)
    if one > limit:
        return f"none ({one / GB:.1f} GB for one)"
    few, more = total(16), total(32)  # of so many activations are the peak
    rows = max(1, 16 + int((limit - few) // ((more - few) / 16)))
    while total(rows) > limit:
        rows -= 1
    return f"{rows}"


def measured(name: str, system: str, metric: str, other: str, form: str = "{:.2f}") -> str:
    """Return the ratio of a metric of two systems in a result file."""
    record = load(RESULTS, name)
    if record is None:
        return "not measured"
    found = {row["system"]: row[metric] for row in record["rows"] if metric in row}
    return form.format(found[other] / found[system])


def claims() -> Iterator[Claim]:
    """Yield all claims, in the order of the articles."""
    bloom, small, giant = SHAPES["bloom-560m"], SHAPES["bloom-1b1"], SHAPES["llama-70b"]
    plan = "planned"
    yield Claim(
        "dense net 512-1,024-1,024-1,024-512, 4 samples", "12,597,248 B, 65,536 B of activations", dense, "measured"
    )
    yield Claim("transformer, 4nh(13 + 12h) bytes, n 24, h 1,024", "1.21 GB", lambda: blocks(24, 1024), plan)
    yield Claim(
        "BLOOM-560M, parameters",
        "559,214,592",
        lambda: f"{sum(p.numel() for p in built(bloom).parameters()):,}",
        plan,
    )
    yield Claim(
        "BLOOM-560M, fp32, 8 ranks, 1 x 512: stages 0 / 1 / 2 / 3",
        "estimated 10.71 / 6.79 / 4.83 GB, measured 10.88 / 7.48 / 8.22 (6.37) / 7.41 GB",
        lambda: stages(bloom, 8),
        plan,
    )
    yield Claim(
        "1 B x 8 data-parallel ranks",
        "3.7 GB a rank, 29.8 GB in all",
        lambda: (
            f"{planned(small, 8, 0, length=0).peaks['parameters'] / GB:.2f} GB of parameters a rank, "
            f"{8 * planned(small, 8, 0, length=0).peaks['parameters'] / GB:.1f} GB in all; stage 3 "
            f"{planned(small, 8, 3, length=0).peaks['parameters'] / GB:.2f} GB"
        ),
        plan,
    )
    thirteen = SHAPES["llama-13b"]
    yield Claim(
        "13 B on one 32 GB card",
        "trains, with state on the host",
        lambda: (
            gigabytes(planned(thirteen, 1, 3, precision="fp16", rows=1, length=1024, recompute=True, offload=BOTH))
            + " on the device"
        ),
        plan,
    )
    yield Claim(
        "13 B without model parallelism, 64 ranks, 1 x 1,024: stages 1 / 2 / 3",
        "fits 32 GB at stage 2",
        lambda: stages(thirteen, 64, (1, 2, 3), precision="bf16", length=1024, recompute=True),
        plan,
    )
    yield Claim(
        "200 B, 16-way tensor parallelism, 1,024 ranks",
        "trains on 32 GB cards",
        lambda: stages(decoder_of(200e9), 1024, (1, 2), precision="bf16", length=1024, recompute=True, tensor=16),
        plan,
    )
    yield Claim(
        "8x less model state with stages 1 and 2",
        "8x",
        lambda: " / ".join(f"{1 / share:.1f}x" for share in _shares(small, 64)) + " at stages 1 / 2 / 3 on 64 ranks",
        plan,
    )
    yield Claim(
        "1-bit Adam: bytes sent",
        "up to 5x less",
        lambda: measured("convergence_onebit", "1-bit Adam", "sent_bytes_a_parameter", "Adam", "{:.1f}x less"),
        "bench/convergence.py",
    )
    yield Claim(
        "1-bit Adam: speed on a slow network",
        "2.7x to 3.5x",
        lambda: measured("machines_throttled", "1-bit Adam", "step_s", "ZeRO 1", "{:.1f}x at 100 Mbit/s"),
        "make machines",
    )
    yield Claim(
        "CPU-Adam against torch's loop",
        "5.1x to 6.5x",
        lambda: measured("cpu_adam", "shardwise AdamW", "median_ns", "torch AdamW, loop", "{:.1f}x"),
        "bench/cpu_adam.py",
    )
    yield Claim(
        "stage 2: less memory",
        "50 to 70 %",
        lambda: measured(
            "memory_zero_98M_bf16_4", "shardwise 0", "peak_bytes_a_parameter", "shardwise 2", "{:.0%} left"
        ),
        "bench/memory.py, 4 ranks",
    )
    yield Claim(
        "stage 3: time of a step against stage 0",
        "2 to 3x communication",
        lambda: measured("time_zero_27M_fp32_2", "shardwise 0", "median_ms", "shardwise 3", "{:.2f} of the time"),
        "bench/step_time.py, 2 ranks",
    )
    yield Claim(
        "70 B: weights, optimizer, all",
        "140, 280, 560 GB",
        lambda: _all_of(giant),
        plan,
    )
    yield Claim(
        "70 B on 8 ranks: stages 0 / 1 / 2 / 3",
        "560 / 400 / 200 / 10 GB",
        lambda: stages(giant, 8, precision="bf16", length=2048, recompute=True),
        plan,
    )
    yield Claim(
        "1 B on 4 ranks: stages 1 / 3", "18 / 6 GB", lambda: stages(decoder_of(1e9), 4, (1, 3), recompute=True), plan
    )
    ten = decoder_of(10e9)
    yield Claim("10 B on 8 ranks: stages 0 / 3", "200 / 25 GB", lambda: stages(ten, 8, (0, 3), recompute=True), plan)
    yield Claim(
        "100 B on 32 ranks, stage 3",
        "28 GB",
        lambda: stages(decoder_of(100e9), 32, (3,), precision="bf16", recompute=True),
        plan,
    )
    twenty = decoder_of(20e9)
    yield Claim(
        "20 B on 8 x 80 GB, stage 3, optimizer on the host",
        "80 to 22 GB, 42 samples/s",
        lambda: (
            gigabytes(planned(twenty, 8, 3, precision="fp16", recompute=True, offload=HOST))
            + ", with state on the device "
            + gigabytes(planned(twenty, 8, 3, precision="fp16", recompute=True))
            + f" and {speed(twenty, 8, 3, 8, 'a100-80')} on A100 by data sheet"
        ),
        plan,
    )
    for label, says, stage, precision, offload in (
        ("fp32, as DDP", "16", 0, "fp32", None),
        ("fp16", "20", 0, "fp16", None),
        ("sharded", "30", 2, "fp32", None),
        ("sharded, fp16", "30", 2, "fp16", None),
        ("DeepSpeed", "40", 2, "fp16", None),
        ("DeepSpeed, host", "50", 2, "fp16", HOST),
    ):
        yield Claim(
            f"T5-large on 2 x 24 GB, {label}: largest batch a rank",
            says,
            lambda stage=stage, precision=precision, offload=offload: largest_batch(  # type: ignore[misc]
                "t5-large", 2, stage, precision, offload, 24 * GB
            ),
            f"{plan}, 128 tokens",
        )
    yield Claim(
        "T5-3B on 24 GB without ZeRO",
        "out of memory at 1",
        lambda: largest_batch("t5-3b", 1, 0, "fp16", None, 24 * GB),
        f"{plan}, 128 tokens",
    )
    yield Claim(
        "T5-3B on 24 GB, state on the host",
        "20 (30 fails)",
        lambda: largest_batch("t5-3b", 1, 2, "fp16", HOST, 24 * GB),
        f"{plan}, 128 tokens",
    )


def _shares(shape: Shape, ranks: int) -> list[float]:
    whole, *others = (resident(planned(shape, ranks, stage, precision="bf16", length=0)) for stage in range(4))
    return [one / whole for one in others]


def _all_of(shape: Shape) -> str:
    one = planned(shape, 8, 0, precision="bf16", length=0)
    parts = (one.peaks["parameters"], one.peaks["master weights"] + one.peaks["optimizer state"], resident(one))
    return ", ".join(f"{size / GB:.0f}" for size in parts) + " GB in mixed precision"


def main() -> None:
    """Make the rows, print them and keep them."""
    options = options_of(__doc__, quick={"rows": "dense"}, rows="")
    rows: list[Row] = []
    for claim in claims():
        if options.rows in claim.where:
            rows.append(
                {"system": claim.where, "setting": {}, "says": claim.says, "here": claim.here(), "how": claim.how}
            )
            print(rows[-1]["system"], "|", rows[-1]["says"], "|", rows[-1]["here"], flush=True)
    if not options.rows:
        show(rows)
    save(options, "articles", rows)


if __name__ == "__main__":
    main()
