"""`shardwise plan`: tell what a model's training takes on each of many ranks, without any of them."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import nn

    from shardwise.engine.plans import SettingPlan

PARTS = {
    "parameters": ("parameters",),
    "gradients": ("gradients",),
    "optimizer": ("master weights", "optimizer state"),
    "buffers": ("communication buffers", "gathered window"),
    "activations": ("activations",),
    "other": ("other",),
}
"""Columns of the table, and the categories in them."""


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("plan")(plan)


def plan(
    models: Annotated[
        list[str],
        typer.Argument(
            help="bloom-560m, bloom-1b1, bloom-7b1, llama-7b, llama-13b, llama-70b, or module:function of your own, "
            "which returns a module.",
            metavar="MODEL...",
        ),
    ],
    ranks: Annotated[int, typer.Option(metavar="N", help="Data-parallel ranks.")] = 8,
    stages: Annotated[str, typer.Option(metavar="LIST", help="ZeRO stages.")] = "0,1,2,3",
    config: Annotated[
        str | None, typer.Option(metavar="FILE", help="Configuration; default: AdamW in the precision given.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16, without a configuration.")] = "fp32",
    micro_batch: Annotated[int, typer.Option(metavar="N", help="Sequences in a micro-batch.")] = 1,
    accumulation: Annotated[int, typer.Option(metavar="N", help="Micro-batches in a step.")] = 1,
    length: Annotated[int, typer.Option(metavar="N", help="Tokens in a sequence; 0: no activations.")] = 512,
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute the layers of the named models.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print bytes as one JSON object.")] = False,
) -> None:
    """Print the memory of one rank at each ZeRO stage, by running a window of training on tensors without memory.

    No rank and no device is needed. The tensors are taken to lie on the CPU. 1 GB is 10^9 bytes.
    """
    from shardwise.config import load
    from shardwise.engine.plans import plan_model
    from shardwise.errors import CommandLineError

    if precision not in ("fp32", "bf16", "fp16"):
        raise CommandLineError(f"--precision {precision}: give fp32, bf16 or fp16.")
    if min(ranks, micro_batch, accumulation) < 1 or length < 0:
        raise CommandLineError("--ranks, --micro-batch and --accumulation are 1 or more, --length 0 or more.")
    chosen = [int(stage) for stage in stages.split(",") if stage in ("0", "1", "2", "3")]
    if len(chosen) != len(stages.split(",")):
        raise CommandLineError(f"--stages {stages}: give some of 0, 1, 2 and 3, with commas.")
    found: dict[str, Any] = {}
    for name in models:
        settings: dict[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
        if precision != "fp32":
            settings[precision] = {"enabled": True}
        if config is not None:
            settings = load(config)
        settings = {
            **{key: value for key, value in settings.items() if key != "train_batch_size"},
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
        }
        model = _model(name, recompute)
        numel = sum(parameter.numel() for parameter in model.parameters())
        plans = plan_model(model, settings, ranks=ranks, stages=chosen, batch=_batch(micro_batch, length)).plans
        if as_json:
            found[name] = {"parameters": numel, "plans": [_as_dict(one) for one in plans]}
        else:
            _show(f"{name}: {numel:,} parameters, {ranks} rank{'s' * (ranks > 1)}", plans)
    if as_json:
        typer.echo(json.dumps(found, indent=2))


def _model(name: str, recompute: bool) -> nn.Module:
    """Build a model whose parameters have no memory."""
    import torch

    from shardwise.errors import CommandLineError
    from shardwise.launch.architectures import SHAPES, Decoder

    with torch.device("meta"):
        if name in SHAPES:
            return Decoder(SHAPES[name], recompute=recompute)
        module, _, function = name.partition(":")
        if not function:
            raise CommandLineError(f"{name} is not known; give {', '.join(SHAPES)}, or module:function.")
        sys.path.insert(0, str(Path.cwd()))
        try:
            made = getattr(importlib.import_module(module), function)()
        except (ImportError, AttributeError) as error:
            raise CommandLineError(f"{name}: {error}.") from error
        finally:
            sys.path.pop(0)
    if not isinstance(made, torch.nn.Module):
        raise CommandLineError(f"{name} has returned {type(made).__name__}; it must return a torch.nn.Module.")
    return made


def _batch(micro_batch: int, length: int) -> Any:
    import torch

    return torch.empty(micro_batch, length, dtype=torch.int64, device="meta") if length else None


def _as_dict(one: SettingPlan) -> dict[str, Any]:
    return {"stage": one.setting.stage, "peaks": one.peaks, "total": one.total, "note": one.note}


def _show(title: str, plans: tuple[SettingPlan, ...]) -> None:
    typer.echo(title)
    typer.echo(f"{'stage':>5}" + "".join(f"{name:>12}" for name in (*PARTS, "total")) + "  GB")
    for one in plans:
        sizes = [
            sum(one.peaks[category] for category in part) if set(part) <= one.peaks.keys() else None
            for part in PARTS.values()
        ]
        cells = ("-" if size is None else f"{size / 1e9:.2f}" for size in (*sizes, one.total))
        typer.echo(f"{one.setting.stage:>5}" + "".join(f"{cell:>12}" for cell in cells))
    for note in dict.fromkeys(one.note for one in plans if one.note):
        typer.echo(note)
    typer.echo("")
