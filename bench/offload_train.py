"""Training on one CUDA device with state on the host or on a disk: what it costs, and how far it goes.

    python bench/offload_train.py --what cost [--size 1.4B]      # 7B: as MegaTrain (2604.05091) on one H200
    python bench/offload_train.py --what largest [--settings "all on the host;all on the disk"]
    python bench/offload_train.py --what limited [--models "13B,T5-3B"] [--limits "32,24"]

All in bf16 with AdamW; blocks and the loss are recomputed.

cost: one model at each setting, shardwise and DeepSpeed, each in a process of its own; the resident run is measured
first and last. Time of a step, of its passes and of its update; TFLOP/s count model FLOPs (see systems.py), so that
what is recomputed does not.

largest: for each setting the deepest GPT of a width (`--width`) whose plan fits the device, the machine's memory and
the disk with a margin; it is then trained. Plans are made without a device (`shardwise plan`). Others, which have no
plan, are tried: as deep as shardwise with everything on the device, and then less deep by a tenth until one trains.

limited: a model on a device that is limited to some GiB, as by the card that papers and articles have used. Settings
are tried from the one that keeps most digits of the state to the one that keeps fewest: the first whose plan fits this
machine is trained, with the largest micro-batch that fits. Beside it stands how the plain run ends.

`--limit` is the seconds that a process may take; `--file` the name of the file in bench/results.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from harness import (
    V100_PEAK,
    Device,
    Row,
    answer,
    child,
    data_of,
    highest_resident,
    medians,
    most_that,
    options_of,
    own_group,
    save,
    serve,
    show,
)
from systems import GPT, SETS, SIZES, Case, config_of, in_directory, installed, shardwise

MARGIN = 0.9
"""Part of each tier that a plan may take."""
ROWS = (32, 24, 16, 12, 8, 4, 2, 1)
"""Micro-batches that are tried, from the largest."""
HOST: dict[str, Any] = {"device": "cpu"}
DISK: dict[str, Any] = {"device": "nvme", "nvme_path": ""}
NO_MASTERS = {"enabled": True, "master_weights": "none", "rounding": "stochastic", "bf16_optimizer_states": True}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where state lives, and in how many digits.

    Attributes:
        zero: keys of `zero_optimization`.
        keys: further keys of the configuration.
        params: of the optimizer.
    """

    zero: dict[str, Any]
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    params: dict[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, rows: int, directory: str) -> dict[str, Any]:
        """Return the configuration."""
        zero = {"stage": 3, **in_directory(self.zero, directory)}
        config = config_of(rows, zero_optimization=zero, bf16={"enabled": True}, steps_per_print=0)
        config["optimizer"]["params"] |= self.params
        return config | self.keys


RESIDENT = "all on the device"
SETTINGS = {
    RESIDENT: Setting({}),
    "optimizer on the host": Setting({"offload_optimizer": HOST}),
    "all on the host": Setting({"offload_optimizer": HOST, "offload_param": HOST}),
    "optimizer on the disk, parameters on the host": Setting({"offload_optimizer": DISK, "offload_param": HOST}),
    "all on the disk": Setting(
        {"offload_optimizer": DISK | {"gradients": "nvme"}, "offload_param": DISK | {"max_in_cpu": 0}}
    ),
}
DIGITS = {
    "all on the host": SETTINGS["all on the host"],
    "optimizer on the disk, parameters on the host": SETTINGS["optimizer on the disk, parameters on the host"],
    "all on the host, 16-bit moments": Setting(
        {"offload_optimizer": HOST, "offload_param": HOST}, params={"fp32_optimizer_states": False}
    ),
    "all on the host, no masters, 16-bit moments": Setting(
        {"offload_optimizer": HOST, "offload_param": HOST}, {"bf16": NO_MASTERS}
    ),
    "optimizer on the disk, parameters on the host, no masters, 16-bit moments": Setting(
        {"offload_optimizer": DISK, "offload_param": HOST}, {"bf16": NO_MASTERS}
    ),
    "all on the host, no masters, 16-bit moments and gradients": Setting(
        {"offload_optimizer": HOST, "offload_param": HOST},
        {"bf16": NO_MASTERS, "data_types": {"grad_accum_dtype": "bf16"}},
    ),
}
"""Settings by how many digits of the state they keep, the most first. Parameters that have no masters are rounded
stochastically, which keeps small updates."""
OTHERS = {
    "plain PyTorch": SETS["one"]["alone"],
    "FSDP2": SETS["one"]["FSDP2"],
    **{name.replace(" on ", " on the "): make for name, make in SETS["host"].items() if name.startswith("DeepSpeed")},
}
"""Other systems: the first two have everything on the device."""
PLAIN = ("plain PyTorch", "FSDP2")
RIVALS = {
    "optimizer on the host": "DeepSpeed 2, optimizer on the host",
    "all on the host": "DeepSpeed 3, all on the host",
}
"""The system that a setting is compared with."""


class Subject:
    """A model that is trained.

    Args:
        name: of a size of `_systems.py`, or "T5-3B".
        quick: take a tiny one in its place.
    """

    def __init__(self, name: str, quick: bool = False, layers: int = 0, width: int = 0) -> None:
        self.name, self.quick = f"GPT of {layers} layers" if layers else name, quick
        self.is_t5 = name.startswith("T5")
        self.size = SIZES["tiny" if quick else "13B" if self.is_t5 else name]
        if self.is_t5:
            self.size = dataclasses.replace(self.size, vocabulary=32128, rows=20, length=8 if quick else 128)
        if layers:
            shape = {} if quick else {"width": width, "heads": width // 128}
            self.size = dataclasses.replace(self.size, layers=layers, **shape)

    def module(self) -> Any:
        """Return the model, which returns its own loss."""
        return t5(self.quick) if self.is_t5 else GPT(self.size, recompute=True)

    def on_meta(self) -> Any:
        """Return the model without its values."""
        with torch.device("meta"):
            return self.module()

    @functools.cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.on_meta().parameters())

    def flops(self, rows: int) -> float:
        """Return the model FLOPs of a step; of T5, whose tokens go through half of it each, those of its products."""
        if self.is_t5:
            return 6.0 * self.parameters * rows * self.size.length
        return self.size.flops_per_token * rows * self.size.length


def t5(quick: bool) -> Any:
    """Return T5-3B of random values (Raffel et al., 2020), which is taught to repeat its input."""
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32}
    if quick:
        shape = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}

    class Copying(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t5 = T5ForConditionalGeneration(T5Config(**shape, decoder_start_token_id=0, use_cache=False))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.t5(input_ids=ids, labels=ids).loss

    return Copying()


# -- plans -------------------------------------------------------------------------------------------------------------


def room(options: argparse.Namespace) -> dict[str, int]:
    """Return the bytes that there are on each tier."""
    there = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    disk = shutil.disk_usage(options.directory).free
    return {"device": options.limit_bytes or Device(options.device).total, "host": there, "disk": disk}


def planned(subject: Subject, setting: Setting, rows: int) -> dict[str, Any]:
    """Return the bytes by tier that a plan tells, without a device, and those a step moves."""
    from shardwise.engine.plans import plan_model

    ids = torch.empty(rows, subject.size.length, dtype=torch.int64, device="meta")
    config = setting.config(rows, "/")
    (plan,) = plan_model(subject.on_meta(), config, ranks=1, stages=[3], batch=ids).plans
    if plan.total is None:
        raise RuntimeError(plan.note)
    return {"device": plan.total, "host": 0, "disk": 0, **plan.elsewhere, "moved": plan.moved}


def fits(plan: dict[str, Any], there: dict[str, int]) -> bool:
    """Whether a plan leaves a margin on each tier."""
    return all(plan[tier] <= MARGIN * size for tier, size in there.items())


def most_rows(subject: Subject, setting: Setting, there: dict[str, int], rows: Sequence[int]) -> tuple[int, Any] | None:
    """Return the first micro-batch of some whose plan fits, and the plan; None: not even the state does."""
    for count in rows:
        plan = planned(subject, setting, count)
        if any(plan[tier] > MARGIN * there[tier] for tier in ("host", "disk")):
            return None  # with fewer rows there would be as much
        if fits(plan, there):
            return count, plan
    return None


# -- runs --------------------------------------------------------------------------------------------------------------


def trained(options: argparse.Namespace) -> Row:
    """Train the model of the options in this process; answer with times of steps and peaks after each step, too."""
    device = Device(options.device)
    if options.limit_bytes:
        device.limit(options.limit_bytes)
    subject, name = Subject(options.size, options.quick, options.layers, options.width), options.setting
    size = dataclasses.replace(subject.size, rows=options.rows)
    case = Case(size, True, device=options.device, recompute=True, directory=options.directory, build=subject.module)
    if name in OTHERS:
        run = OTHERS[name](case)
    else:
        keys = (SETTINGS | DIGITS)[name].config(options.rows, options.directory)
        if options.limit_bytes:
            keys["memory_limits"] = {"device": options.limit_bytes}
        run = shardwise(case, 3, init=name != RESIDENT, keys=keys)
    answer({"setup_gib": device.peaks()[0] / 2**30})
    run.step()  # makes the optimizer's state
    run.finish()
    device.forget()
    spent, found = list[dict[str, float]](), Row()
    for _ in range(options.steps):
        passes = device.seconds(run.passes)
        update = device.seconds(lambda: (run.update(), run.finish()))
        spent.append({"step_s": passes + update, "passes_s": passes, "update_s": update})
        allocated, reserved = device.peaks()
        sizes = {"allocated": allocated, "reserved": reserved, "host": highest_resident()}
        found = {**medians(spent), "steps": len(spent)}
        found |= {f"{name}_gib": value / 2**30 for name, value in sizes.items()}
        answer(found)
    run.close()
    return found


def limit_of(options: argparse.Namespace) -> dict[str, float]:
    """Return the limit of the device's memory, if it has one."""
    return {"limit_gib": options.limit_bytes / 2**30} if options.limit_bytes else {}


def run(options: argparse.Namespace, subject: Subject, setting: str, rows: int, plan: Any = None) -> Row:
    """Train in a process of its own; return the row."""
    arguments = ["--setting", setting, "--rows", str(rows), "--limit-bytes", str(options.limit_bytes)]
    deep = subject.name.startswith("GPT")
    arguments += ["--size", "13B" if deep else subject.name, "--layers", str(subject.size.layers if deep else 0)]
    with tempfile.TemporaryDirectory(dir=options.directory) as swap:
        found = child(*arguments, "--directory", swap, limit=options.limit)
    row: Row = {"system": setting, "setting": {"model": subject.name, **limit_of(options)}, "rows": rows}
    row |= {"billions": subject.parameters / 1e9}
    row |= {} if plan is None else {f"planned_{tier}_gib": plan[tier] / 2**30 for tier in ("device", "host", "disk")}
    row |= found
    if "step_s" in found:
        row.pop("failed", None)
        flops = subject.flops(rows) / found["step_s"]
        peak = Device(options.device).peak_flops(half=True)
        row |= {"tokens_per_s": rows * subject.size.length / found["step_s"], "tflops": flops / 1e12}
        row |= {"of_peak": flops / peak, "as_v100": flops / peak * V100_PEAK / 1e12} if peak else {}
    show([row])
    return row


# -- the three questions -----------------------------------------------------------------------------------------------


def cost(options: argparse.Namespace) -> Iterator[Row]:
    """One model at each setting; ratios are added after the last."""
    subject = Subject(options.size, options.quick)
    rows = options.rows or subject.size.rows
    names = installed(options.settings.split(";")) if options.settings else [*SETTINGS, *installed(OTHERS), RESIDENT]
    names = [name for name in names if name not in PLAIN]
    found: list[Row] = []
    for name in names:
        found.append(run(options, subject, name, rows))
        yield found[-1]
    found[-1]["setting"]["again"] = names[-1] in names[:-1]
    times = {row["system"]: row["step_s"] for row in found if "step_s" in row}
    for row in found:
        name = row["system"]
        for key, base in (("over_resident", RESIDENT), ("over_deepspeed", RIVALS.get(name))):
            if name in times and base in times:
                row[key] = row["step_s"] / times[base]


def largest(options: argparse.Namespace) -> Iterator[Row]:
    """The deepest model of each setting."""
    there = room(options)
    names = options.settings.split(";") if options.settings else list(SETTINGS)
    for name in names:
        setting = SETTINGS[name]

        def fit(layers: int, setting: Setting = setting) -> bool:
            return fits(planned(Subject("13B", options.quick, layers, options.width), setting, 1), there)

        layers = most_that(fit, options.most)
        if not layers:
            yield {"system": name, "failed": f"no layer fits {there}"}
            continue
        subject = Subject("13B", options.quick, layers, options.width)
        fitting = most_rows(subject, setting, there, (8, 4, 2, 1))
        assert fitting is not None  # one row does
        row = run(options, subject, name, *fitting)
        yield row
        if "step_s" not in row:  # the plan has told too little: how much too little?
            yield run(options, Subject("13B", options.quick, layers * 9 // 10, options.width), name, 1)
        if name == RESIDENT:
            for other in PLAIN:
                depth = layers
                while depth:
                    row = run(options, Subject("13B", options.quick, depth, options.width), other, fitting[0])
                    if "step_s" in row or depth == 1:
                        yield row
                        break
                    depth = depth * 9 // 10


def limited(options: argparse.Namespace) -> Iterator[Row]:
    """Models on a small device."""
    for size in options.limits.split(","):
        options.limit_bytes = int(float(size) * 2**30)
        there = room(options)
        for name in options.models.split(","):
            subject = Subject(name, options.quick)
            rows = (subject.size.rows,) if subject.is_t5 else ROWS
            for setting_name, setting in DIGITS.items():
                fitting = most_rows(subject, setting, there, rows)
                if fitting is not None:
                    yield run(options, subject, setting_name, *fitting)
                    break
            else:
                setting_of = {"model": name, **limit_of(options)}
                yield {"system": "any", "setting": setting_of, "failed": f"no plan fits {there}"}
            if not options.quick:
                yield run(options, subject, "plain PyTorch", subject.size.rows if subject.is_t5 else 1)


QUESTIONS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "cost": cost,
    "largest": largest,
    "limited": limited,
}


def main() -> None:
    """Answer one of the questions, and keep the rows."""
    options = options_of(__doc__, **data_of("options.toml")["offload_train"])
    serve(trained, options, own_group(1, options.device))
    rows, notes = list[Row](), {"there": room(options)}
    name = options.file or f"gpu_offload_{options.what}"
    for row in QUESTIONS[options.what](options):
        rows.append(row)
        save(options, name, rows, partial=True, **notes)
    save(options, name, rows, **notes)


if __name__ == "__main__":
    main()
