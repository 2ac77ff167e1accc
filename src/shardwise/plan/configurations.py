"""Configurations for a model and a cluster: the space that is searched, and the best setting with reasons."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine.plans import MARGIN, Offload, Room, offloads, planners_of, with_keys
from shardwise.errors import UsageError
from shardwise.memory import Tier
from shardwise.parallel.data import first_part
from shardwise.plan.architectures import Decoder, Shape
from shardwise.plan.clock import Rates
from shardwise.plan.cluster import Cluster
from shardwise.plan.layers import deep_planner
from shardwise.plan.search import OBJECTIVES, Branch, Candidate, Objective, Search, candidates, in_words, search
from shardwise.units import format_size


def branches(
    build: Callable[[bool], nn.Module],
    config: Mapping[str, Any],
    batch: torch.Tensor,
    *,
    ranks: Sequence[int],
    tensor: Sequence[int] = (1,),
    recompute: Sequence[bool] = (False,),
    deep: bool = True,
) -> Iterator[Branch]:
    """Yield the models and arrangements of ranks that are searched.

    Args:
        build: returns the model on the meta device, with recomputed layers or without.
        config: the rest of the configuration.
        batch: one sample, on the meta device.
        ranks: numbers of ranks of the job.
        tensor: sizes of tensor-parallel groups; those that do not divide a number of ranks are left out.
        deep: plan from shallow models (`shardwise.plan.layers`).
    """
    for again in recompute:
        model = build(again)
        for size in tensor:
            for count in ranks:
                if count % size:
                    continue
                keys = {} if size == 1 else {"tensor_parallel": {"autotp_size": size}}
                own = with_keys(config, {"train_micro_batch_size_per_gpu": 1, **keys})
                (planner, *_), _ = planners_of(model, own, count)
                part = first_part(batch, planner.target.setting.sequence)
                yield Branch(deep_planner(planner.target, part, deep=deep), count, (again, size), keys, recompute=again)


def choose(
    build: Callable[[bool], nn.Module],
    config: Mapping[str, Any],
    sample: torch.Tensor,
    *,
    ranks: Sequence[int],
    rooms: Sequence[Room],
    rates: Rates | None,
    objective: Objective = "throughput",
    tensor: Sequence[int] = (1,),
    recompute: Sequence[bool] = (False,),
    batch: int | None = None,
    ways: Sequence[Offload] | None = None,
    limit: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> Search:
    """Search all settings with shallow models, and plan the best one with the whole model.

    Arguments as those of `branches` and `search`; `batch`: samples of a step, None: any; `ways`: tiers of state.
    """
    tiers = offloads() if ways is None else ways
    given: dict[str, Any] = {"ranks": ranks, "tensor": tensor, "recompute": recompute}
    for deep in (True, False):  # not all models run with fewer layers
        space = [
            one
            for branch in branches(build, config, sample, **given, deep=deep)
            for one in candidates(branch, tiers, batch=batch, micro_batches=_micro_batches(batch))
        ]
        found = search(space, rooms, rates, objective, limit, progress)
        if found.planned or not found.unknown:
            break
    whole = {(branch.ranks, branch.passes): branch for branch in branches(build, config, sample, **given, deep=False)}
    found.ranking = list(_confirmed(found.ranking, whole, rooms, rates, objective))
    return found


def _confirmed(
    ranking: Sequence[Candidate],
    whole: Mapping[Any, Branch],
    rooms: Sequence[Room],
    rates: Rates | None,
    objective: Objective,
) -> Iterator[Candidate]:
    """Yield candidates in order, the first of them planned with the whole model."""
    for place, one in enumerate(ranking):
        planned = search(
            [Candidate(whole[one.branch.ranks, one.branch.passes], one.setting)],
            rooms,
            rates,
            objective,
            everything=True,
        ).ranking
        if planned:
            yield planned[0]
            yield from ranking[place + 1 :]
            return


def _micro_batches(batch: int | None) -> list[int]:
    if batch is None:
        return [1 << power for power in range(9)]
    return [size for size in range(1, batch + 1) if batch % size == 0]


def with_reasons(best: Candidate, found: Search, config: Mapping[str, Any], objective: Objective, origin: str) -> str:
    """Return the configuration of a candidate as JSON with a comment for each value that was chosen."""
    setting, plan, time = best.setting, best.plan, best.time
    assert plan is not None
    took = "" if time is None else f", planned {1e3 * time.total:.0f} ms a step"
    head = [
        f"{best.branch.ranks} ranks{', layers recomputed by the model' * best.branch.recompute}: "
        f"{OBJECTIVES[objective]}, of {found.settings} settings{took}",
        f"planned {format_size(plan.total)} of a rank's device, and {MARGIN:.0%} to spare fit",
        *(f"{format_size(size)} on {tier}" for tier, size in plan.elsewhere.items()),
        *([origin] if origin else []),
    ]
    sharded = {0: "nothing", 1: "optimizer state", 2: "optimizer state and gradients", 3: "all state"}[setting.stage]
    reasons = {
        "train_batch_size": f"{setting.micro_batch} x {setting.accumulation} x {best.branch.ranks} ranks"
        + (f" / {setting.sequence * setting.tensor}" if setting.sequence * setting.tensor > 1 else ""),
        "train_micro_batch_size_per_gpu": "larger ones do not fit, or are not faster",
        "zero_optimization": f"stage {setting.stage} divides {sharded}; "
        + (str(setting.offload) if setting.offload is not None else "state as configured"),
        "tensor_parallel": "ranks that share a layer",
    }
    values = with_keys(config, best.config)
    lines = [
        f"  {json.dumps(key)}: {json.dumps(value, indent=2).replace(chr(10), chr(10) + '  ')},"
        for key, value in values.items()
    ]
    lines = [
        f"  // {reasons[key]}\n{line}" if key in reasons else line for key, line in zip(values, lines, strict=True)
    ]
    return "\n".join([*(f"// {line}" for line in head), "{", *lines, "}", ""])


def decoder_of(parameters: float) -> Shape:
    """Return a Llama-like decoder of about so many parameters: 128 values a head, and as wide as 128 x its layers.

    >>> decoder_of(7e9).layers
    32
    """

    def size(layers: int) -> float:
        width = 128 * layers
        return 12 * layers * width**2 + 2 * 32000 * width

    layers = min(range(1, 400), key=lambda count: abs(size(count) - parameters))
    width = 128 * layers
    return Shape(layers, width, layers, 32000, inner=-(-8 * width // 3 // 256) * 256, llama=True)


def get_training_config(
    model_size: float,
    gpu_count: int,
    *,
    card: str = "a100-80",
    link: str | None = None,
    ranks_per_machine: int = 8,
    batch: int | None = None,
    length: int = 2048,
) -> dict[str, Any]:
    """Return a configuration for a decoder of `model_size` parameters on `gpu_count` cards, by a search of plans.

    Args:
        card, link: names of `shardwise.plan.cluster.sheets`; the link is needed where there are several machines.
        batch: samples of a step; None: the fastest.
        length: tokens of a sample.

    Raises UsageError if nothing fits, with the least that is needed.
    """
    if model_size <= 0 or gpu_count < 1:
        raise UsageError("get_training_config(model_size, gpu_count): give a number of parameters, and 1 card or more")
    shape = decoder_of(model_size)
    cluster = Cluster.of(card, link, ranks_per_machine)

    def build(recompute: bool) -> nn.Module:
        with torch.device("meta"):
            return Decoder(shape, recompute=recompute)

    config = {
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
        },
        "bf16": {"enabled": True},
    }
    if "bf16" not in cluster.card.flops:
        config["fp16"] = config.pop("bf16")
    found = choose(
        build,
        config,
        torch.empty(1, length, dtype=torch.int64, device="meta"),
        ranks=[gpu_count],
        rooms=[Room((Tier.DEVICE,), int(cluster.card.memory))],
        rates=cluster,
        batch=batch,
        ways=offloads()[:3],
    )
    if not found.ranking:
        raise UsageError(f"nothing fits on {gpu_count} x {cluster.card.name}. {in_words(found)}")
    return {**config, **found.ranking[0].config}
