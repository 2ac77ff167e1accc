"""Planned against measured memory of ranks, for 44 settings.

    python bench/plan_memory.py [--only TEXT] [--steps 3]

Each setting is planned in this process as `shardwise plan` does, with the model on the meta device and without ranks.
Then it is trained on ranks of this machine under `track_activations`: two steps, and some more, of which the median
peak counts, of the rank with the most. Categories and total on the device, host and disk are compared where planned or
measured bytes are 64 KiB or more. The error of a setting is the largest of these.

A plan says that a setting fits if the plan and 15 % more are within the limits. So it has to say yes at limits of 1.18
times the measured peaks (15 % and an error of 2 %), and no where the limit of one tier is 0.98 times its peak. Some
settings are also trained under both limits: through all steps, and up to an `OutOfMemoryError`.
"""

from __future__ import annotations

import argparse
import functools
import gc
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from harness import Row, data_of, job, options_of, save, serve, show
from pipeline import layers, loss_of
from systems import GPT, LAYER_SPECS, Size, in_directory
from torch import nn

LEAST = 64 << 10
"""Bytes from which on a figure counts."""
FITS, SHORT = 1.18, 0.98
"""Limits that suffice, and that do not, by the measured peaks."""
SIZE, QUICK = Size(384, 6, 6, 4096, 2, 128), Size(64, 4, 4, 512, 2, 16)

Peaks = dict[str, int]


# -- models ------------------------------------------------------------------------------------------------------------


class Mixture(nn.Module):
    """Four experts in the place of a layer."""

    def __init__(self, width: int, ep_size: int) -> None:
        from shardwise.moe import MoE

        super().__init__()
        expert = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.experts = MoE(width, expert, 4, ep_size, k=1, use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of each token's expert."""
        return self.experts(x)[0]


def tied(size: Size) -> nn.Module:
    """Return a GPT whose head is its embedding."""
    model = GPT(size)
    model.head.weight = model.tokens.weight
    return model


def frozen(size: Size) -> nn.Module:
    """Return a GPT of which the head and the last half of the blocks are trained."""
    model = GPT(size)
    model.tokens.requires_grad_(False)
    model.places.requires_grad_(False)
    model.blocks[: size.layers // 2].requires_grad_(False)
    return model


def experts(size: Size, ep_size: int) -> nn.Module:
    """Return a GPT with experts in every second block."""
    model = GPT(size)
    for block in model.blocks[1::2]:
        block.up, block.down = Mixture(size.width, ep_size), nn.Linear(size.width, size.width)
    return model


def pipeline(size: Size) -> nn.Module:
    """Return a GPT as layers."""
    from shardwise.pipe import LayerSpec, PipelineModule

    return PipelineModule([LayerSpec(*layer) for layer in layers(size)], loss_fn=loss_of)


def llama(size: Size, shared: bool = False, adapted: bool = False) -> nn.Module:
    """Return a Llama of transformers that shares sequences, or of which low-rank adapters of peft are trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    if shared:
        from shardwise.parallel import share_attention

        return share_attention(model)
    if adapted:
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"]))
    return model


def gpt2(size: Size) -> nn.Module:
    """Return a GPT-2 of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_positions": size.length, "n_embd": size.width, "n_layer": size.layers, "n_head": size.heads}
    config = GPT2Config(vocab_size=size.vocabulary, use_cache=False, **shape)
    return GPT2LMHeadModel(config)


MODELS: dict[str, Callable[[Size], nn.Module]] = {
    "gpt": GPT,
    "gpt, recompute": functools.partial(GPT, recompute=True),
    "gpt, tied": tied,
    "gpt, frozen": frozen,
    "gpt, experts": functools.partial(experts, ep_size=1),
    "gpt, experts of 2 ranks": functools.partial(experts, ep_size=2),
    "gpt, layers": pipeline,
    "llama": llama,
    "llama, sequences": functools.partial(llama, shared=True),
    "llama, adapters": functools.partial(llama, adapted=True),
    "gpt2": gpt2,
}


# -- settings ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What is planned and trained.

    Attributes:
        stage, dtype, accumulation: ZeRO stage, precision, micro-batches of a step.
        model: of `MODELS`.
        optimizer: name in the configuration; or torch.optim.NAME, which the script passes.
        zero, keys: of `zero_optimization`, and of the configuration.
        note: names them.
        limited: it is trained under limits, too.
    """

    ranks: int
    stage: int
    dtype: str = "fp32"
    accumulation: int = 1
    model: str = "gpt"
    optimizer: str = "AdamW"
    zero: dict[str, Any] = field(default_factory=dict)
    keys: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    limited: bool = False

    @property
    def name(self) -> str:
        """A description."""
        given = [self.model, self.dtype, f"ZeRO {self.stage}", f"{self.accumulation} micro-batches"]
        if self.optimizer != "AdamW":
            given.append(self.optimizer.rpartition(".")[2])
        return ", ".join([*given, *filter(None, [self.note])])

    def config(self, size: Size, directory: str, **more: Any) -> dict[str, Any]:
        """Return the configuration."""
        config = {
            "train_micro_batch_size_per_gpu": size.rows,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.stage, **in_directory(self.zero, directory)},
            "bf16": {"enabled": self.dtype == "bf16"},
            "fp16": {"enabled": self.dtype == "fp16", "initial_scale_power": 8},
            "steps_per_print": None,
            **self.keys,
            **more,
        }
        if "." not in self.optimizer:
            params = {"lr": 1e-4} | ({"momentum": 0.9} if self.optimizer == "SGD" else {})
            config["optimizer"] = {"type": self.optimizer, "params": params}
        return config

    def client_optimizer(self) -> Any:
        """Return a callable that makes the script's optimizer; None: as configured."""
        _, of_torch, name = self.optimizer.rpartition(".")
        return functools.partial(getattr(torch.optim, name), lr=1e-4) if of_torch else None

    def batch(self, size: Size, device: str) -> Any:
        """Return a micro-batch of a rank."""
        length = size.length // int(self.keys.get("sequence_parallel_size", 1))
        ids = torch.zeros(size.rows, length, dtype=torch.int64, device=device)
        if device != "meta":
            # Experts get equal numbers of tokens, as planned; ranks that share sequences or a model get the same.
            ids.copy_(torch.arange(ids.numel()).view_as(ids) % size.vocabulary)
        if self.model == "gpt, layers":
            return ids, ids
        if not self.model.startswith(("llama", "gpt2")):
            return ids
        if "sequence_parallel_size" not in self.keys:
            return {"input_ids": ids, "labels": ids}
        first = 0 if device == "meta" else dist.get_rank() % 2 * length
        places = torch.arange(first, first + length, device=device).unsqueeze(0)
        return {"input_ids": ids, "labels": ids, "shift_labels": ids, "position_ids": places}


KEYS = {
    "tensor": {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": LAYER_SPECS}}},
    "sequences": {"sequence_parallel_size": 2},
}
"""Keys that settings have by a name."""
SETTINGS = [
    Setting(**{**row, "keys": KEYS.get(str(row.get("keys")), row.get("keys", {}))})
    for row in data_of("plan_memory.toml")["settings"]
]


def chosen(options: argparse.Namespace, ranks: int | None = None) -> list[Setting]:
    """Return the settings that are asked for."""
    return [one for one in SETTINGS if options.only in f"{one.ranks} ranks, {one.name}" and ranks in (None, one.ranks)]


# -- training ----------------------------------------------------------------------------------------------------------


class Training:
    """An engine that trains a setting."""

    def __init__(self, setting: Setting, options: argparse.Namespace, **more: Any) -> None:
        import shardwise

        size = size_of(options)
        torch.manual_seed(0)
        config = setting.config(size, options.directory, **more)
        model, self._batch = MODELS[setting.model](size), setting.batch(size, "cpu")
        self.engine = shardwise.initialize(model=model, config=config, optimizer=setting.client_optimizer())[0]
        self._piped, self._passes = setting.model == "gpt, layers", setting.accumulation

    def step(self) -> None:
        """Train one step."""
        engine, batch = self.engine, self._batch
        if self._piped:
            engine.train_batch(iter([batch] * self._passes))
            return
        for _ in range(self._passes):
            found = engine(**batch) if isinstance(batch, dict) else engine(batch)
            loss = found if isinstance(found, torch.Tensor) else found.loss
            del found
            engine.backward(loss)
            del loss
            engine.step()

    def run(self, steps: int) -> list[Peaks]:
        """Train; return the peaks of each step but the first two, by category and tier."""
        from shardwise.memory import Tier, track_activations

        accountant, found = self.engine.accountant, []
        with track_activations(accountant):
            for step in range(2 + steps):
                accountant.reset_peak()
                self.step()
                if step >= 2:
                    peaks = {category.value: size for category, size in accountant.peak.items()}
                    peaks |= {tier.value: accountant.peak_total_in(tier) for tier in (Tier.HOST, Tier.DISK)}
                    found.append(peaks | {"total": accountant.peak_total})
        return found


def size_of(options: argparse.Namespace) -> Size:
    """Return the shape of models and batches."""
    return QUICK if options.quick else SIZE


def measure(options: argparse.Namespace) -> list[Row]:
    """Train each setting; return the peaks of all positions of a pipeline, and which limits have ended the training."""
    found = []
    for setting in chosen(options, dist.get_world_size()):
        training = Training(setting, options)
        own = training.run(options.steps)
        training.engine.destroy()
        del training
        gc.collect()
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
        each = len(ranks) // int(setting.keys.get("pipeline", {}).get("stages", 1))
        peaks = [most(ranks[first : first + each]) for first in range(0, len(ranks), each)]
        found.append({"peaks": peaks, "ended": list(limited(setting, options, ranks))})
    return found


def most(ranks: list[list[Peaks]]) -> Peaks:
    """Return the peaks of the rank with the most, of which the median of the steps counts."""
    steps = [{name: max(peaks[name] for peaks in step) for name in step[0]} for step in zip(*ranks, strict=True)]
    return {name: int(statistics.median(step[name] for step in steps)) for name in steps[0]}


def limited(setting: Setting, options: argparse.Namespace, ranks: list[list[Peaks]]) -> Iterator[bool]:
    """Yield for a limit that suffices, and for one that does not, whether it has ended the training."""
    from shardwise.memory import OutOfMemoryError

    totals = [peaks["total"] for steps in ranks for peaks in steps]
    for limit in (FITS * max(totals), SHORT * min(totals)) if setting.limited else ():
        training = None
        try:
            training = Training(setting, options, memory_limits={"device": int(limit)})
            training.run(1)
            yield False
        except OutOfMemoryError:
            yield True
        if training is not None:
            training.engine.destroy()
        del training
        gc.collect()


# -- planning and comparing --------------------------------------------------------------------------------------------


def planners_for(setting: Setting, options: argparse.Namespace) -> list[Any]:
    """Return the planner of a rank, or of each position of a pipeline."""
    from shardwise.engine.plans import planners_of

    size = size_of(options)
    with torch.device("meta"):
        model = MODELS[setting.model](size)
    config, batch = setting.config(size, options.directory), setting.batch(size, "meta")
    return planners_of(model, config, setting.ranks, batch, setting.client_optimizer(), local_ranks=setting.ranks)[0]


def plans_of(planners: list[Any], limits: Peaks | None = None) -> list[Any]:
    """Return the plan of each planner; `limits` by tier."""
    from shardwise.engine.plans import Room
    from shardwise.memory import Tier

    rooms = [Room((Tier(name),), limit) for name, limit in (limits or {}).items()]
    return [planner.plan(planner.target.setting, rooms) for planner in planners]


def peaks_of(plan: Any) -> Peaks:
    """Return a plan as `Training.run` returns the measurement."""
    return {**plan.peaks, "total": plan.total or 0, **{tier: plan.elsewhere.get(tier, 0) for tier in ("host", "disk")}}


def errors_of(plans: list[Any], measured: list[Peaks]) -> dict[str, tuple[float, int, int]]:
    """Return the largest error of all positions, with planned and measured bytes, by category and tier."""
    found: dict[str, tuple[float, int, int]] = {}
    for plan, peaks in zip(plans, measured, strict=True):
        planned = peaks_of(plan)
        for name, size in peaks.items():
            guess = planned.get(name, 0)
            if max(size, guess) >= LEAST:
                found[name] = max(found.get(name, (0.0, 0, 0)), (abs(guess - size) / max(size, LEAST), guess, size))
    return found


def judged(planners: list[Any], measured: list[Peaks]) -> list[bool]:
    """Return for each limit whether plans are right that say whether the setting fits."""
    tiers = {"device": "total", "host": "host", "disk": "disk"}
    peaks = {tier: max(one[name] for one in measured) for tier, name in tiers.items()}
    peaks = {tier: peak for tier, peak in peaks.items() if peak >= LEAST}
    enough = {tier: int(FITS * peak) for tier, peak in peaks.items()}
    cases = [(enough, True)]
    cases += [({**enough, tier: int(SHORT * peak)}, False) for tier, peak in peaks.items()]
    return [all(plan.fits for plan in plans_of(planners, limits)) is right for limits, right in cases]


def main() -> None:
    """Plan, train, print the table and keep it."""
    options = options_of(__doc__, quick={"steps": 1}, only="", steps=3, directory="")
    serve(measure, options)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        options.directory = folder
        for ranks in sorted({setting.ranks for setting in chosen(options)}):
            measured = job(ranks, "--directory", folder)
            for setting, found in zip(chosen(options, ranks), measured, strict=True):
                planners = planners_for(setting, options)
                errors, right = errors_of(plans_of(planners), found["peaks"]), judged(planners, found["peaks"])
                if setting.limited:
                    right.append(found["ended"] == [False, True])
                worst = max(errors, key=lambda name: errors[name][0])
                error, guess, size = errors[worst]
                row: Row = {"system": setting.name, "setting": {"ranks": ranks}}
                row |= {"total_mb": errors["total"][2] / 1e6, "error_percent": 100 * error, "worst": worst}
                row |= {"planned_mb": guess / 1e6, "measured_mb": size / 1e6}
                row |= {"judged": len(right), "judged_right": sum(right)}
                rows.append(row | {"bytes": [[name, *one[1:]] for name, one in errors.items()]})
                show(rows[-1:])
    figures = [row["error_percent"] for row in rows]
    whole: Row = {"system": f"{len(rows)} settings", "setting": {}}
    whole |= {"median_error_percent": statistics.median(figures), "largest_error_percent": max(figures)}
    whole |= {"within": sum(error <= 2 for error in figures)}
    whole |= {"right": sum(row["judged"] == row["judged_right"] for row in rows), "of": len(rows)}
    show([whole])
    save(options, "plan_memory", rows, steps=options.steps)
    save(options, "plan_memory_errors", [whole], steps=options.steps)


if __name__ == "__main__":
    main()
