"""Checkpoints that DeepSpeed itself has written, loaded into shardwise and compared bit by bit.

    python bench/deepspeed_import.py --python PYTHON [--only NAME,NAME]

PYTHON is an interpreter that has DeepSpeed; shardwise is not needed there. Two ranks train a small GPT with it (tied
head, a frozen table of positions, odd sizes, a schedule, accumulation, clipping), save, write
down what they hold according to DeepSpeed's own functions for debugging, and train on. Then shardwise loads each
checkpoint at all stages on 1, 2 and 3 ranks. Every element of parameters and of optimizer state is compared, and the
losses of the steps that follow, on the same global batches. Result: bench/results/deepspeed_import.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _jobs import answer, in_job, parser, ranks, read
from _systems import GPT, Size
from torch import nn

SIZE = Size(18, 2, 2, 37, 6, 7)
ROWS, PARTS, BEFORE, AFTER, PEERS = 6, 2, 4, 4, 2
"""Rows of a global micro-batch, micro-batches of a step, steps before and after the checkpoint, ranks of DeepSpeed."""

_FOLDER = "SHARDWISE_IMPORT_FOLDER"


@dataclass(frozen=True)
class Case:
    """One way of training with DeepSpeed.

    Attributes:
        stage: of ZeRO.
        dtype: "fp32" or "bf16".
        optimizer: "AdamW" or "SGD" of torch; "Adam": DeepSpeed's own for CPUs.
        groups: parameter groups.
        more: entries of its configuration.
    """

    stage: int
    dtype: str = "fp32"
    optimizer: str = "AdamW"
    groups: int = 1
    more: dict[str, Any] = field(default_factory=dict)

    def config(self, world: int) -> dict[str, Any]:
        """Return what both libraries are configured with."""
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS // world,
            "gradient_accumulation_steps": PARTS,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.stage, **self.more.get("zero_optimization", {})},
            "bf16": {"enabled": self.dtype == "bf16"},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}},
            **{key: value for key, value in self.more.items() if key != "zero_optimization"},
        }
        if self.optimizer == "Adam":
            found["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}}
        return found


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}

CASES = {
    **{f"stage {stage} {dtype}": Case(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")},
    **{f"stage {stage} SGD": Case(stage, optimizer="SGD") for stage in (1, 3)},
    **{f"stage {stage} 2 groups": Case(stage, groups=2) for stage in (0, 2, 3)},
    "stage 2 round robin": Case(2, more={"zero_optimization": {"round_robin_gradients": True}}),
    "stage 1 aligned": Case(1, more={"zero_optimization": {"parameter_alignment": True}}),
    "stage 3 sub-groups": Case(3, more={"zero_optimization": {"sub_group_size": 500}}),
    **{f"stage {stage} CPUAdam": Case(stage, "bf16", "Adam", more=OFFLOAD) for stage in (2, 3)},
}


def model_and_groups(case: Case) -> tuple[GPT, list[dict[str, Any]]]:
    """Return the model, the same on every rank, and its parameter groups."""
    torch.manual_seed(0)
    model = GPT(SIZE)
    model.head.weight = model.tokens.weight
    model.places.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.groups == 1:
        return model, [{"params": trained, "weight_decay": 0.1}]
    return model, [
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
    ]


def torch_optimizer(case: Case, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
    """Return the optimizer that the script passes; None: the configuration names it."""
    if case.optimizer == "SGD":
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    return torch.optim.AdamW(groups, lr=0.01) if case.optimizer == "AdamW" else None


def batch(number: int, rank: int, world: int) -> torch.Tensor:
    """Return a rank's rows of a global micro-batch."""
    generator = torch.Generator().manual_seed(number)
    whole = torch.randint(0, SIZE.vocabulary, (ROWS, SIZE.length), generator=generator)
    return whole.chunk(world)[rank]


def train(engine: Any, first: int, steps: int) -> list[float]:
    """Train some steps; return the losses of the global micro-batches."""
    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for number in range(first * PARTS, (first + steps) * PARTS):
        loss = engine(batch(number, rank, world))
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


# -- with DeepSpeed --------------------------------------------------------------------------------------------------


def train_peer(folder: Path, names: list[str]) -> None:
    """Train, save and train on with DeepSpeed, on every rank."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    for name in names:
        case = CASES[name]
        model, groups = model_and_groups(case)
        config = {**case.config(PEERS), "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=torch_optimizer(case, groups), model_parameters=groups, config=config
        )
        train(engine, 0, BEFORE)
        engine.save_checkpoint(str(folder / name), client_state={"epoch": 3})
        held = dict(peer_values(model, case))
        after = {"losses": train(engine, BEFORE, AFTER), "lr": engine.get_lr()}
        if dist.get_rank() == 0:
            torch.save({"values": held, **after}, folder / name / "held.pt")
        engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


def peer_values(model: nn.Module, case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what DeepSpeed says that it holds: `<entry> <parameter>` and the whole value.

    Its functions tell of the wrong parameters with `round_robin_gradients`, and fail for the optimizer state of two
    groups at stages 1 and 2. There, and at stage 0, the module's own values are taken, and the losses that follow have
    to show whether the optimizer's state is right.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    entries = ["momentum_buffer"] if case.optimizer == "SGD" else ["exp_avg", "exp_avg_sq"]
    plain = case.stage == 0 or "round_robin_gradients" in case.more.get("zero_optimization", {})
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        values = {"parameter": parameter.detach() if plain else safe_get_full_fp32_param(parameter)}
        if not plain and (case.groups == 1 or case.stage == 3):
            values |= {entry: safe_get_full_optimizer_state(parameter, entry) for entry in entries}
        yield from ((f"{entry} {name}", value.cpu().clone()) for entry, value in values.items())


# -- with shardwise --------------------------------------------------------------------------------------------------


def load(folder: Path, names: list[str]) -> None:
    """Load every checkpoint at every stage, on every rank; answer with what differs."""
    import shardwise

    shardwise.init_distributed()
    rows = []
    for name in names:
        held = torch.load(folder / name / "held.pt", weights_only=True)
        for stage in range(4):
            rows.append({"saved": name, "stage": stage, **compare(shardwise, folder / name, CASES[name], stage, held)})
    answer(rows)


def compare(shardwise: Any, path: Path, case: Case, stage: int, held: dict[str, Any]) -> dict[str, Any]:
    """Load one checkpoint into one stage, compare, and train on."""
    model, groups = model_and_groups(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    more = {key: value for key, value in case.more.items() if key != "zero_optimization"}
    config = {**case.config(dist.get_world_size()), **more, "zero_optimization": {"stage": stage}, "steps_per_print": 0}
    engine, *_ = shardwise.initialize(
        model=model, optimizer=torch_optimizer(case, groups), model_parameters=groups, config=config
    )
    _, client = engine.load_checkpoint(str(path))
    assert client == {"epoch": 3}
    counts = torch.zeros(2, dtype=torch.int64)
    for name, values in held["values"].items():
        entry, _, parameter = name.partition(" ")
        counts += torch.tensor(differing(engine, entry, parameter, values))
    dist.all_reduce(counts)
    losses = train(engine, BEFORE, AFTER)
    gap = max(abs(one - other) / abs(other) for one, other in zip(losses, held["losses"], strict=True))
    lr = max(abs(one - other) for one, other in zip(engine.get_lr(), held["lr"], strict=True))
    engine.destroy()
    return {"compared": int(counts[0]), "differing": int(counts[1]), "loss_gap": gap, "lr_gap": lr}


def differing(engine: Any, entry: str, name: str, values: torch.Tensor) -> tuple[int, int]:
    """Return how many elements of this rank were compared, and how many differ in any bit."""
    sharded = engine.sharded
    index = next(t.index for t in sharded.registry if name in (t.name, *t.aliases))
    runs = sharded.value_runs()[index] if entry == "parameter" else sharded.update.state_pieces(index, entry)
    flat = values.reshape(-1)
    compared = different = 0
    for start, stop, view in runs:
        own = view.detach().to(flat.dtype)  # fewer digits where DeepSpeed only tells of 16-bit values
        compared += stop - start
        different += int((own != flat[start:stop]).sum())
    return compared, different


def main() -> None:
    """Train with DeepSpeed, load with shardwise, and keep what was found."""
    found = parser(__doc__)
    found.add_argument("--python", default=sys.executable, help="interpreter that has DeepSpeed")
    found.add_argument("--only", help="names of cases, separated by commas")
    options = read(found)
    names = chosen(options)
    if os.environ.get(_FOLDER) and not in_job():
        train_peer(Path(os.environ[_FOLDER]), names)
        return
    if in_job():
        load(Path(os.environ[_FOLDER]), names)
        return
    from _machine import save

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({_FOLDER: folder, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})
        command = [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PEERS)]
        subprocess.run([*command, sys.argv[0], *sys.argv[1:]], check=True)
        for world in (1, 2, 3):
            rows += [{"ranks": world, **row} for row in ranks(world)]
    for row in rows:
        print(
            f"{row['saved']:22} -> stage {row['stage']} on {row['ranks']}: {row['differing']} of {row['compared']} "
            f"elements differ, losses by {row['loss_gap']:.1e}, rate by {row['lr_gap']:.1e}"
        )
    version = subprocess.run(
        [options.python, "-c", "import importlib.metadata as m; print(m.version('deepspeed'), m.version('torch'))"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    notes = {"peer": {"deepspeed": version[0], "torch": version[1], "ranks": PEERS}, "steps": [BEFORE, AFTER]}
    save(options.results, "deepspeed_import", rows, **notes)
    if any(row["differing"] for row in rows):
        sys.exit("values differ")


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the names of the cases."""
    if options.only:
        return options.only.split(",")
    return ["stage 2 bf16", "stage 3 bf16"] if options.quick else list(CASES)


if __name__ == "__main__":
    main()
