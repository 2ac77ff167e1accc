"""What articles on DeepSpeed and ZeRO say, and what comes out here: planned by dry runs, or measured.

    python bench/articles.py [--rows TEXT] [--quick]

Each row (articles.toml) names the claim, its figure, ours, and how it was made. Plans are made here, in some minutes;
measurements are those of the other benchmarks in bench/results. GB are 10^9 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from harness import RESULTS, Row, data_of, load, options_of, save, show
from systems import config_of
from torch import nn

from shardwise.engine.plans import Offload, SettingPlan, planners_of
from shardwise.memory.sources import memory_sources
from shardwise.plan.architectures import SHAPES, Decoder, Shape
from shardwise.plan.cluster import Cluster
from shardwise.plan.configurations import decoder_of
from shardwise.plan.time import plan_times

GB = 1e9
OFFLOADS = {"": None, "host": Offload("cpu", "none"), "both": Offload("cpu", "cpu")}


def shape_of(model: str) -> Shape:
    """Return a shape by the name of a model, or by a number of parameters."""
    return SHAPES[model] if model in SHAPES else decoder_of(float(model))


def built(shape: Shape, recompute: bool = False) -> nn.Module:
    """Return a decoder without memory."""
    with torch.device("meta"):
        return Decoder(shape, recompute=recompute)


def planned(
    model: str,
    ranks: int,
    stage: int,
    *,
    precision: str = "fp32",
    rows: int = 1,
    length: int = 512,
    recompute: bool = False,
    offload: str = "",
    tensor: int = 1,
) -> SettingPlan:
    """Return the plan of one rank."""
    config = config_of(rows)
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if tensor > 1:
        config["tensor_parallel"] = {"autotp_size": tensor}
    batch = torch.empty(rows, length, dtype=torch.int64, device="meta") if length else None
    (planner,), _ = planners_of(built(shape_of(model), recompute), config, ranks, batch)
    setting = replace(planner.target.setting, stage=stage, offload=OFFLOADS[offload])
    return planner.plan(setting)


def resident(one: SettingPlan) -> float:
    """Return the bytes of parameters, gradients and optimizer on the device."""
    return sum(one.peaks[name] for name in ("parameters", "gradients", "master weights", "optimizer state"))


def stages(model: str, ranks: int, which: Sequence[int] = (0, 1, 2, 3), note: str = "", **more: Any) -> str:
    """Return the totals of ZeRO stages."""
    totals = (planned(model, ranks, stage, **more).total or 0 for stage in which)
    return " / ".join(f"{total / GB:.1f}" for total in totals) + f" GB{note}"


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


def speed(model: str, ranks: int, stage: int, rows: int, card: str, **config: Any) -> str:
    """Return the samples a second that are planned on cards."""
    settings = config_of(rows, fp16={"enabled": True}, **config)
    batch = torch.empty(rows, 512, dtype=torch.int64, device="meta")
    cluster = Cluster.of(card, None, 8)
    (one,) = plan_times(built(shape_of(model), True), settings, cluster, ranks=ranks, stages=[stage], batch=batch)
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


def largest_batch(name: str, ranks: int, stage: int, precision: str, offload: str = "", limit: float = 24 * GB) -> str:
    """Return the largest micro-batch of 128 source and target tokens that fits a device, without a margin."""
    config = config_of(1)
    if precision != "fp32":
        config[precision] = {"enabled": True}
    tokens = torch.empty(1, 128, dtype=torch.int64, device="meta")
    (planner,), _ = planners_of(transformers_model(name), config, ranks, {"input_ids": tokens, "labels": tokens})

    def total(rows: int) -> int:
        setting = replace(planner.target.setting, stage=stage, offload=OFFLOADS[offload], micro_batch=rows)
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


def parameters(model: str) -> str:
    """Return the number of parameters."""
    return f"{sum(p.numel() for p in built(shape_of(model)).parameters()):,}"


def copies(model: str, ranks: int) -> str:
    """Return the bytes of parameters of a rank and of all, and those at stage 3."""
    whole, part = (planned(model, ranks, stage, length=0).peaks["parameters"] / GB for stage in (0, 3))
    return f"{whole:.2f} GB of parameters a rank, {ranks * whole:.1f} GB in all; stage 3 {part:.2f} GB"


def less(model: str, ranks: int) -> str:
    """Return how much less state there is on a device at stages 1, 2 and 3."""
    whole, *others = (resident(planned(model, ranks, stage, precision="bf16", length=0)) for stage in range(4))
    return " / ".join(f"{whole / one:.1f}x" for one in others) + f" at stages 1 / 2 / 3 on {ranks} ranks"


def parts(model: str) -> str:
    """Return the bytes of weights, of the optimizer's state, and of all."""
    one = planned(model, 8, 0, precision="bf16", length=0)
    sizes = (one.peaks["parameters"], one.peaks["master weights"] + one.peaks["optimizer state"], resident(one))
    return ", ".join(f"{size / GB:.0f}" for size in sizes) + " GB in mixed precision"


def offloaded(model: str, ranks: int, card: str) -> str:
    """Return the bytes at stage 3 with the optimizer on the host and without, and the planned speed."""
    there, here = (stages(model, ranks, [3], precision="fp16", recompute=True, offload=place) for place in ("host", ""))
    return f"{there}, with state on the device {here} and {speed(model, ranks, 3, 8, card)} on A100 by data sheet"


MADE: dict[str, Callable[..., str]] = {
    made.__name__: made
    for made in (dense, blocks, parameters, copies, stages, less, parts, offloaded, largest_batch, measured)
}
"""What comes out, by name in articles.toml."""


def main() -> None:
    """Make the rows, print them and keep them."""
    options = options_of(__doc__, quick={"rows": "dense"}, rows="")
    rows: list[Row] = []
    for claim in data_of("articles.toml")["claims"]:
        if options.rows in claim["where"]:
            here = MADE[claim["made"]](**claim.get("of", {}))
            how = claim.get("how", "planned")
            rows.append({"system": claim["where"], "setting": {}, "says": claim["says"], "here": here, "how": how})
            print(claim["where"], "|", claim["says"], "|", here, flush=True)
    if not options.rows:
        show(rows)
    save(options, "articles", rows)


if __name__ == "__main__":
    main()
