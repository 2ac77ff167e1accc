"""Training on one CUDA device with state on the host or on a disk: what it costs, and how far it goes.

    python bench/gpu_offload.py --what cost [--size 1.4B]
    python bench/gpu_offload.py --what largest
    python bench/gpu_offload.py --what limited [--models "13B,T5-3B"] [--limits "32,24"]

All in bf16 with AdamW; blocks and the loss are recomputed.

cost: one model at each setting, shardwise and DeepSpeed, each in a process of its own; the resident run is measured
first and last. Time of a step, of its passes and of its update; TFLOP/s count model FLOPs (see gpu_train.py), so that
what is recomputed does not.

largest: for each setting the deepest GPT of a width (`--width`) whose plan fits the device, the machine's memory and
the disk with a margin; it is then trained. Plans are made without a device (`shardwise plan`). Others, which have no
plan, are tried: as deep as shardwise with everything on the device, and then less deep by a tenth until one trains.

limited: a model on a device that is limited to some GiB, as by the card that papers and articles have used. Settings
are tried from the one that keeps most digits of the state to the one that keeps fewest: the first whose plan fits this
machine is trained, with the largest micro-batch that fits. Beside it stands how the plain run ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from _gpu import V100_PEAK, Device, child, keep, one_rank, options_of, stated_peak, tell
from gpu_train import flops_per_token

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
        there = {
            name: {**place, "nvme_path": directory} if isinstance(place, dict) and "nvme_path" in place else place
            for name, place in self.zero.items()
        }
        return {
            "train_micro_batch_size_per_gpu": rows,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, **self.params}},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, **there},
            "steps_per_print": 0,
            **self.keys,
        }


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
PEERS = {
    "DeepSpeed 2, optimizer on the host": (2, "cpu", "none"),
    "DeepSpeed 3, optimizer on the host": (3, "cpu", "none"),
    "DeepSpeed 3, all on the host": (3, "cpu", "cpu"),
}
PLAIN = {"plain PyTorch": "alone", "FSDP2": "FSDP2"}
"""Others that have everything on the device, and their names in `_systems.py`."""
RIVALS = {
    "optimizer on the host": "DeepSpeed 2, optimizer on the host",
    "all on the host": "DeepSpeed 3, all on the host",
}
"""With which of them a setting is compared."""


class Subject:
    """A model that is trained.

    Args:
        name: of a size of `_systems.py`, or "T5-3B".
        quick: take a tiny one in its place.
    """

    def __init__(self, name: str, quick: bool = False) -> None:
        from _systems import SIZES

        self.name, self.quick = name, quick
        self.is_t5 = name.startswith("T5")
        self.size = SIZES["tiny" if quick else "13B" if self.is_t5 else name]
        if self.is_t5:
            self.size = dataclasses.replace(self.size, vocabulary=32128, rows=20, length=8 if quick else 128)

    @classmethod
    def deep(cls, layers: int, width: int, quick: bool) -> Subject:
        """Return a GPT of so many layers."""
        found = cls("13B", quick)
        found.name = f"GPT of {layers} layers"
        shape = {} if quick else {"width": width, "heads": width // 128}
        found.size = dataclasses.replace(found.size, layers=layers, **shape)
        return found

    def module(self) -> Any:
        """Return the model, which returns its own loss."""
        from _systems import GPT

        return T5(self.quick) if self.is_t5 else GPT(self.size, recompute=True)

    def case(self, rows: int, device: str) -> Any:
        """Return what `_systems` trains."""
        size = dataclasses.replace(self.size, rows=rows)
        return Case(size, True, device=device, recompute=True, subject=self)

    def on_meta(self) -> Any:
        """Return the model without its values."""
        import torch

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
        return flops_per_token(self.size) * rows * self.size.length


def T5(quick: bool) -> Any:
    """Return T5-3B of random values (Raffel et al., 2020), which is taught to repeat its input."""
    import torch
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


def _case_class() -> Any:
    import torch
    from _systems import Case as Base

    @dataclasses.dataclass(frozen=True)
    class Case(Base):
        subject: Any = None

        def model(self) -> Any:
            torch.manual_seed(0)
            with torch.device(self.device):
                return self.subject.module()

    return Case


def Case(*args: Any, **options: Any) -> Any:
    """Return a case of `_systems` whose model is a subject's."""
    return _case_class()(*args, **options)


# -- plans -------------------------------------------------------------------------------------------------------------


def room(options: argparse.Namespace) -> dict[str, int]:
    """Return the bytes that there are on each tier."""
    there = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    disk = shutil.disk_usage(options.directory).free
    return {"device": options.limit_bytes or Device(options.device).total, "host": there, "disk": disk}


def planned(subject: Subject, setting: Setting, rows: int) -> dict[str, Any]:
    """Return the bytes by tier that a plan tells, without a device, and those a step moves."""
    import torch

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


def deepest(make: Callable[[int], Subject], setting: Setting, there: dict[str, int], most: int) -> int:
    """Return the most layers, up to `most`, whose plan fits."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(planned(make(middle), setting, 1), there) else (low, middle - 1)
    return low


# -- runs --------------------------------------------------------------------------------------------------------------


def trained(options: argparse.Namespace) -> None:
    """Train what is asked for in this process; tell the times of steps and the peaks, step by step."""
    from _systems import offloaded_peer, shardwise

    device = Device(options.device)
    if options.limit_bytes:
        device.limit(options.limit_bytes)
    subject = subject_of(options)
    case = subject.case(options.rows, options.device)
    name = options.setting
    if name in PEERS:
        run = offloaded_peer(case, PEERS[name][0], options.swap, *PEERS[name][1:])
    elif name in PLAIN:
        from _systems import SYSTEMS

        run = SYSTEMS[PLAIN[name]](case)
    else:
        setting = (SETTINGS | DIGITS)[name]
        keys = setting.config(options.rows, options.swap)
        if options.limit_bytes:
            keys["memory_limits"] = {"device": options.limit_bytes}
        init = name != RESIDENT
        run = shardwise(case, 3, init=init, keys=keys)
    tell({"state": "built", "setup_allocated": device.peaks()[0]})
    run.step()  # makes the optimizer's state
    run.finish()
    device.forget()
    passes, updates = [], []
    for _ in range(options.steps):
        passes.append(device.seconds(run.passes))
        updates.append(device.seconds(lambda: (run.update(), run.finish())))
        both = [a + b for a, b in zip(passes, updates, strict=True)]
        allocated, reserved = device.peaks()
        tell(
            {
                "step_s": statistics.median(both),
                "passes_s": statistics.median(passes),
                "update_s": statistics.median(updates),
                "steps": len(both),
                "allocated": allocated,
                "reserved": reserved,
                "host": _resident(),
            }
        )
    run.close()


def _resident() -> int:
    from _jobs import resident

    return resident("VmHWM")


def subject_of(options: argparse.Namespace) -> Subject:
    """Return the model that a child trains."""
    if options.layers:
        return Subject.deep(options.layers, options.width, options.quick)
    return Subject(options.size, options.quick)


def run(options: argparse.Namespace, subject: Subject, setting: str, rows: int, plan: Any = None) -> dict[str, Any]:
    """Train in a process of its own; return the row."""
    arguments = ["--child", "train", "--setting", setting, "--rows", str(rows)]
    arguments += ["--limit-bytes", str(options.limit_bytes), "--size", subject.name]
    if subject.name.startswith("GPT"):
        arguments += ["--size", "13B", "--layers", str(subject.size.layers)]
    with tempfile.TemporaryDirectory(dir=options.directory) as swap:
        found = child(*arguments, "--swap", swap, limit=options.limit)
    row: dict[str, Any] = {"setting": setting, "model": subject.name, "parameters": subject.parameters, "rows": rows}
    row |= {} if plan is None else {f"planned_{tier}": plan[tier] for tier in ("device", "host", "disk")}
    row |= {key: value for key, value in found.items() if key != "state"}
    if "step_s" in found:
        row.pop("failed", None)
        flops = subject.flops(rows) / found["step_s"]
        peak = stated_peak(options.name, half=True)
        row |= {
            "tokens_per_s": rows * subject.size.length / found["step_s"],
            "tflops": flops / 1e12,
            "of_peak": flops / peak if peak else None,
            "as_v100": flops / peak * V100_PEAK / 1e12 if peak else None,
        }
    show(row)
    return row


def show(row: dict[str, Any]) -> None:
    """Print a row."""
    what = f"{row['setting'][:72]:72s} {row['model']:18s} {row['parameters'] / 1e9:6.2f} B x {row['rows']:3d}"
    if "step_s" not in row:
        print(f"{what}  failed: {row['failed']}", flush=True)
        return
    print(
        f"{what}  step {row['step_s']:7.3f} s (passes {row['passes_s']:.3f}, update {row['update_s']:.3f})  "
        f"{row['tokens_per_s']:7.0f} tokens/s {row['tflops']:6.1f} TFLOP/s  "
        f"allocated {row['allocated'] / 2**30:5.2f} GiB, host {row['host'] / 2**30:6.2f} GiB",
        flush=True,
    )


# -- the three questions -----------------------------------------------------------------------------------------------


def cost(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One model at each setting."""
    from _systems import available

    subject = Subject(options.size, options.quick)
    rows = options.rows or subject.size.rows
    names = [*SETTINGS, *(PEERS if "DeepSpeed 2" in available() else ()), RESIDENT]
    if options.settings:
        names = options.settings.split(";")
    found = [run(options, subject, name, rows) for name in names]
    times = {row["setting"]: row["step_s"] for row in found if "step_s" in row}
    for row in found:
        name = row["setting"]
        if name in times and RESIDENT in times:
            row["over_resident"] = row["step_s"] / times[RESIDENT]
        if name in times and RIVALS.get(name) in times:
            row["over_deepspeed"] = row["step_s"] / times[RIVALS[name]]
    return found


def largest(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The deepest model of each setting."""
    there = room(options)
    found: list[dict[str, Any]] = []
    names = options.settings.split(";") if options.settings else list(SETTINGS)
    for name in names:
        setting = SETTINGS[name]
        layers = deepest(lambda n: Subject.deep(n, options.width, options.quick), setting, there, options.most)
        if not layers:
            found.append({"setting": name, "failed": f"no layer fits {there}"})
            continue
        subject = Subject.deep(layers, options.width, options.quick)
        fitting = most_rows(subject, setting, there, (8, 4, 2, 1))
        assert fitting is not None  # one row does
        found.append(run(options, subject, name, *fitting))
        if "step_s" not in found[-1]:  # the plan has told too little: how much too little?
            found.append(run(options, Subject.deep(layers * 9 // 10, options.width, options.quick), name, 1))
        if name == RESIDENT:
            for other in PLAIN:
                depth = layers
                while depth:
                    row = run(options, Subject.deep(depth, options.width, options.quick), other, fitting[0])
                    if "step_s" in row or depth == 1:
                        found.append(row)
                        break
                    depth = depth * 9 // 10
    return found


def limited(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Models on a small device."""
    found: list[dict[str, Any]] = []
    for size in options.limits.split(","):
        options.limit_bytes = int(float(size) * 2**30)
        there = room(options)
        for name in options.models.split(","):
            subject = Subject(name, options.quick)
            rows = (subject.size.rows,) if subject.is_t5 else ROWS
            first = len(found)
            for setting_name, setting in DIGITS.items():
                fitting = most_rows(subject, setting, there, rows)
                if fitting is not None:
                    found.append(run(options, subject, setting_name, *fitting))
                    break
            else:
                found.append({"setting": "any", "model": name, "failed": f"no plan fits {there}"})
            if not options.quick:
                found.append(run(options, subject, "plain PyTorch", subject.size.rows if subject.is_t5 else 1))
            for row in found[first:]:
                row["limit_gib"] = float(size)
    return found


def quick(options: argparse.Namespace) -> None:
    """Make the options those of a quick run."""
    options.steps, options.most, options.models, options.limits = 1, 3, "tiny,T5-tiny", "32"
    options.size = options.size if options.child else "tiny"  # a child is told which of the models it trains
    options.rows = options.rows or 1
    options.settings = options.settings or (f"{RESIDENT};all on the host;all on the disk")


def main() -> None:
    """Answer one of the questions, and keep the rows."""
    options = options_of(
        __doc__,
        quick=quick,
        what="cost",
        size="1.4B",
        rows=0,
        steps=3,
        width=4096,
        most=120,
        layers=0,
        models="13B,T5-3B",
        limits="32,24",
        settings="",
        setting="",
        directory="",
        swap="",
        limit_bytes=0,
        limit=300,
    )
    if options.child:
        with one_rank(options.device):
            trained(options)
        return
    questions = {"cost": cost, "largest": largest, "limited": limited}
    if options.what not in questions:
        raise SystemExit(f"--what {options.what}: give {', '.join(questions)}")
    options.name = Device(options.device).name
    rows = questions[options.what](options)
    keep(options, f"offload {options.what}", rows, there=room(options))


if __name__ == "__main__":
    main()
