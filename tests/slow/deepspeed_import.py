"""Checkpoints that DeepSpeed itself has written, loaded into shardwise and compared bit by bit.

    python -m tests.slow.deepspeed_import --python PYTHON [--only NAME,NAME]

PYTHON is an interpreter that has DeepSpeed; shardwise is not needed there. Two ranks train a small GPT with it (tied
head, a frozen table of positions, odd sizes, a schedule, accumulation, clipping), save, write
down what they hold according to DeepSpeed's own functions for debugging, and train on. Then shardwise loads each
checkpoint at all stages on 1, 2 and 3 ranks. Every element of parameters and of optimizer state is compared, and the
losses of the steps that follow, on the same global batches. Result: bench/results/deepspeed_import.json.

The GPT also gets mixtures of experts, or is divided by DeepSpeed over two model-parallel ranks (AutoTP). Then ranks put
together what each of them holds, and shardwise loads it with `ep_size` or `autotp_size` 1 and 2.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from harness import answer, in_job, job, leave_group, options_of
from systems import GPT, Size

SIZE = Size(18, 2, 2, 37, 6, 7)
ROWS, PARTS, BEFORE, AFTER, PEERS = 6, 2, 4, 4, 2
"""Rows of a global micro-batch, micro-batches of a step, steps before and after the checkpoint, ranks of DeepSpeed."""
EXPERTS = 4
DIVISION = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*(qkv|up)\.weight$"], "partition_type": "column"},
        {"patterns": [r".*(out|down)\.weight$"], "partition_type": "row"},
    ],
}
"""How the GPT's layers are divided over model-parallel ranks."""

_FOLDER = "SHARDWISE_IMPORT_FOLDER"


@dataclass(frozen=True)
class Case:
    """One way of training with DeepSpeed.

    Attributes:
        stage: of ZeRO.
        dtype: "fp32" or "bf16".
        optimizer: "AdamW" or "SGD" of torch; "Adam": DeepSpeed's own for CPUs.
        groups: parameter groups.
        experts: `ep_size` of mixtures of experts behind the blocks; 0: there are none.
        tensor: model-parallel ranks.
        tied: the head has the embedding's weight.
        more: entries of its configuration.
    """

    stage: int
    dtype: str = "fp32"
    optimizer: str = "AdamW"
    groups: int = 1
    experts: int = 0
    tensor: int = 1
    tied: bool = True
    more: dict[str, Any] = field(default_factory=dict)

    def config(self, world: int) -> dict[str, Any]:
        """Return what both libraries are configured with."""
        found: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": ROWS // (world // self.tensor),
            "gradient_accumulation_steps": PARTS,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": self.stage, **self.more.get("zero_optimization", {})},
            "bf16": {"enabled": self.dtype == "bf16"},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}},
            **{key: value for key, value in self.more.items() if key != "zero_optimization"},
        }
        if self.optimizer == "Adam":
            found["optimizer"] = {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1}}
        if self.tensor > 1:
            found["tensor_parallel"] = {"autotp_size": self.tensor, "partition_config": DIVISION}
        return found

    @property
    def parameters_of(self) -> str:
        """Which parameters of DeepSpeed are compared: its debugging function tells of the wrong ones in round robin."""
        plain = self.stage == 0 or "round_robin_gradients" in self.more.get("zero_optimization", {})
        return "module" if plain else "safe_get_full_fp32_param"

    @property
    def state_of(self) -> str | None:
        """Which optimizer state is compared; None: none, and the losses that follow have to show whether it is right.

        "optimizer": that of the script's own object, for each parameter. "flat": the same where it steps flat tensors
        of DeepSpeed, for several groups below stage 3, where the debugging function fails.
        """
        if self.stage == 0:
            return "optimizer" if self.dtype == "fp32" else None
        if self.stage < 3 and (self.groups > 1 or self.experts):
            return "flat"
        return None if self.parameters_of == "module" else "safe_get_full_optimizer_state"

    def loaded(self, world: int) -> Iterator[Case]:
        """Yield the ways to load it on some ranks: every stage, with every `ep_size` or `autotp_size`."""
        sizes = [size for size in (1, 2) if world % size == 0] if self.experts or self.tensor > 1 else [0]
        for size in sizes:
            more: dict[str, Any] = {"experts": size} if self.experts else {"tensor": size or 1}
            yield from (replace(self, stage=stage, **more) for stage in range(4))


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}

CASES = {
    **{f"stage {stage} {dtype}": Case(stage, dtype) for stage in range(4) for dtype in ("fp32", "bf16")},
    **{f"stage {stage} SGD": Case(stage, optimizer="SGD") for stage in (1, 3)},
    **{f"stage {stage} 2 groups": Case(stage, groups=2) for stage in (0, 2, 3)},
    "stage 2 round robin": Case(2, more={"zero_optimization": {"round_robin_gradients": True}}),
    "stage 1 aligned": Case(1, more={"zero_optimization": {"parameter_alignment": True}}),
    "stage 3 sub-groups": Case(3, more={"zero_optimization": {"sub_group_size": 500}}),
    **{f"stage {stage} CPUAdam": Case(stage, "bf16", "Adam", more=OFFLOAD) for stage in (2, 3)},
    # at stage 0 DeepSpeed saves copies of tied parameters beside experts, and nothing that tells so
    **{f"stage {i} ep_size {size}": Case(i, experts=size, tied=i > 0) for i in range(3) for size in (1, 2)},
    **{f"stage {stage} autotp_size 2": Case(stage, tensor=2) for stage in range(3)},
}


class Mixture(nn.Module):
    """A mixture of experts with its residual; no token is dropped, so that losses do not depend on ranks."""

    def __init__(self, library: str, ep_size: int) -> None:
        super().__init__()
        moe = importlib.import_module(f"{library}.moe.layer").MoE
        expert = nn.Sequential(nn.Linear(SIZE.width, 7), nn.GELU(), nn.Linear(7, SIZE.width))
        self.norm = nn.LayerNorm(SIZE.width)
        self.moe = moe(SIZE.width, expert, EXPERTS, ep_size, capacity_factor=float(EXPERTS), use_rts=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send each token through one expert."""
        mixed: torch.Tensor = self.moe(self.norm(x))[0]
        return x + mixed


def global_name(name: str, case: Case) -> str:
    """Return a parameter's name with the number of its expert in the whole model; DeepSpeed counts from 0 on a rank."""
    first = dist.get_rank() % case.experts * (EXPERTS // case.experts) if case.experts else 0
    return re.sub(r"(?<=deepspeed_experts\.)\d+", lambda found: str(first + int(found[0])), name)


def model_and_groups(case: Case, library: str) -> tuple[GPT, list[dict[str, Any]]]:
    """Return the model, the same on every rank but for its experts, and its parameter groups."""
    torch.manual_seed(0)
    model = GPT(SIZE)
    if case.experts:
        model.blocks.extend(Mixture(library, case.experts) for _ in range(2))
    if case.tied:
        model.head.weight = model.tokens.weight
    model.places.weight.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.experts:
        utils = importlib.import_module(
            "shardwise_deepspeed.experts" if library == "shardwise" else f"{library}.moe.utils"
        )
        whole = {"params": trained, "name": "trained", "weight_decay": 0.1}
        return model, utils.split_params_into_different_moe_groups_for_optimizer([whole])
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


def train(engine: Any, case: Case, first: int, steps: int) -> list[float]:
    """Train some steps; return the losses of the global micro-batches."""
    rank, world = dist.get_rank() // case.tensor, dist.get_world_size() // case.tensor
    losses = []
    for number in range(first * PARTS, (first + steps) * PARTS):
        loss = engine(batch(number, rank, world))
        engine.backward(loss)
        engine.step()
        total = loss.detach().double()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses


# -- with DeepSpeed --------------------------------------------------------------------------------------------------


def train_peer(folder: Path, names: list[str]) -> None:
    """Train, save and train on with DeepSpeed, on every rank."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    for name in names:
        case = CASES[name]
        model, groups = model_and_groups(case, "deepspeed")
        for parameter_name, parameter in model.named_parameters():
            if "deepspeed_experts" in parameter_name:  # the layer makes all alike
                number = int(re.findall(r"deepspeed_experts\.(\d+)", global_name(parameter_name, case))[0])
                nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
        shapes = {global_name(key, case): value.shape for key, value in model.named_parameters()}
        optimizer = torch_optimizer(case, groups)
        config = {**case.config(PEERS), "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=groups, config=config)
        train(engine, case, 0, BEFORE)
        engine.save_checkpoint(str(folder / name), client_state={"epoch": 3})
        parts: list[Any] = [None] * PEERS
        dist.all_gather_object(parts, dict(peer_values(model, optimizer, case)))
        held = dict(joined(parts, shapes))
        after = {"losses": train(engine, case, BEFORE, AFTER), "lr": engine.get_lr()}
        if dist.get_rank() == 0:
            torch.save({"values": held, **after}, folder / name / "held.pt")
        engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


def peer_values(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, case: Case
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what DeepSpeed says that this rank holds: `<entry> <parameter>` and the value."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    entries = ["momentum_buffer"] if case.optimizer == "SGD" else ["exp_avg", "exp_avg_sq"]
    flats = flat_state(optimizer, entries) if case.state_of == "flat" and optimizer is not None else []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        plain = case.parameters_of == "module"
        values = {"parameter": parameter.detach() if plain else safe_get_full_fp32_param(parameter)}
        if case.state_of == "flat":
            values |= place(flats, parameter.detach())
        elif case.state_of == "optimizer":
            assert optimizer is not None
            values |= {entry: optimizer.state[parameter][entry] for entry in entries}
        elif case.state_of:
            values |= {entry: safe_get_full_optimizer_state(parameter, entry) for entry in entries}
        yield from ((f"{entry} {global_name(name, case)}", value.cpu().clone()) for entry, value in values.items())


def flat_state(optimizer: torch.optim.Optimizer, entries: list[str]) -> list[dict[str, torch.Tensor]]:
    """Return what each group of the optimizer steps and its state, those of all ranks one after another."""
    own = []
    for group in optimizer.param_groups:
        flat = {entry: torch.cat([optimizer.state[p][entry].flatten() for p in group["params"]]) for entry in entries}
        own.append({"parameter": torch.cat([p.detach().flatten() for p in group["params"]]), **flat})
    parts: list[Any] = [None] * PEERS
    dist.all_gather_object(parts, own)
    return [
        {key: torch.cat([held[key] for held in groups]) for key in groups[0]} for groups in zip(*parts, strict=True)
    ]


def place(flats: list[dict[str, torch.Tensor]], values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state of a parameter, which lies where the flat parameters have its values."""
    places = [
        (flat, slice(start, start + values.numel()))
        for flat in flats
        for start in (flat["parameter"] == values.flatten()[0]).nonzero().flatten().tolist()
        if torch.equal(flat["parameter"][start : start + values.numel()], values.flatten())
    ]
    if len(places) != 1:
        raise ValueError(f"a parameter of shape {tuple(values.shape)} lies at {len(places)} places of the optimizer's")
    flat, where = places[0]
    return {key: value[where].view_as(values) for key, value in flat.items() if key != "parameter"}


def joined(parts: list[dict[str, torch.Tensor]], shapes: dict[str, torch.Size]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole values of what ranks hold: parts along the dimension that is too short, otherwise equal copies."""
    for key in dict.fromkeys(key for held in parts for key in held):
        found = [held[key] for held in parts if key in held]
        shape = shapes.get(key.partition(" ")[2], found[0].shape)
        short = [dimension for dimension, size in enumerate(shape) if found[0].shape[dimension] != size]
        if not short and not all(torch.equal(found[0], copy) for copy in found):
            raise ValueError(f"ranks of DeepSpeed have different values of {key}")
        yield key, torch.cat(found, short[0]) if short else found[0]


# -- with shardwise --------------------------------------------------------------------------------------------------


def load(folder: Path, names: list[str]) -> None:
    """Load every checkpoint at every stage, on every rank; answer with what differs."""
    import shardwise

    shardwise.init_distributed()
    rows = []
    for name in names:
        held = torch.load(folder / name / "held.pt", weights_only=True)
        saved = CASES[name]
        for case in saved.loaded(dist.get_world_size()):
            row = {"saved": name, "parameters_of": saved.parameters_of, "state_of": saved.state_of, "stage": case.stage}
            if saved.experts or saved.tensor > 1:
                row["ep_size" if saved.experts else "autotp_size"] = case.experts or case.tensor
            rows.append({**row, **compare(shardwise, folder / name, case, held)})
    answer(rows)
    leave_group()


def compare(shardwise: Any, path: Path, case: Case, held: dict[str, Any]) -> dict[str, Any]:
    """Load one checkpoint in one way, compare, and train on."""
    model, groups = model_and_groups(case, "shardwise")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    more = {key: value for key, value in case.more.items() if key != "zero_optimization"}
    config = {
        **case.config(dist.get_world_size()),
        **more,
        "zero_optimization": {"stage": case.stage},
        "steps_per_print": 0,
    }
    engine, *_ = shardwise.initialize(
        model=model, optimizer=torch_optimizer(case, groups), model_parameters=groups, config=config
    )
    _, client = engine.load_checkpoint(str(path))
    assert client == {"epoch": 3}
    keys = [(entry, parameter) for entry, _, parameter in (key.partition(" ") for key in held["values"])]
    counts = torch.tensor([differing(engine, *key, held["values"][" ".join(key)]) for key in keys])
    dist.all_reduce(counts)
    missed = [key for key, count in zip(keys, counts, strict=True) if count[0] < held["values"][" ".join(key)].numel()]
    if missed:
        raise ValueError(f"not all elements were compared: {missed}")
    losses = train(engine, case, BEFORE, AFTER)
    gap = max(abs(one - other) / abs(other) for one, other in zip(losses, held["losses"], strict=True))
    lr = max(abs(one - other) for one, other in zip(engine.get_lr(), held["lr"], strict=True))
    engine.destroy()
    return {"compared": int(counts[:, 0].sum()), "differing": int(counts[:, 1].sum()), "loss_gap": gap, "lr_gap": lr}


def differing(engine: Any, entry: str, name: str, values: torch.Tensor) -> tuple[int, int]:
    """Return how many elements of this rank were compared, and how many differ in any bit."""
    sharded = engine.sharded
    tensor = next((t for t in sharded.registry if name in (t.name, *t.aliases)), None)
    if tensor is None:
        return 0, 0  # an expert of other ranks
    divided = tensor.box is not None and sharded.state.box_of(tensor) is not None
    flat = (tensor.cut(values) if divided else values).reshape(-1)
    index = tensor.index
    values_of = sharded.state.value_runs
    runs = values_of().get(index, ()) if entry == "parameter" else sharded.update.state_pieces(index, entry)
    compared = different = 0
    for start, stop, view in runs:
        own = view.detach().to(flat.dtype)  # fewer digits where DeepSpeed only tells of 16-bit values
        compared += stop - start
        different += int((own != flat[start:stop]).sum())
    return compared, different


def main() -> None:
    """Train with DeepSpeed, load with shardwise, and keep what was found."""
    options = options_of(__doc__, python=sys.executable, only="")
    names = chosen(options)
    if os.environ.get(_FOLDER) and not in_job():
        train_peer(Path(os.environ[_FOLDER]), names)
        return
    if in_job():
        load(Path(os.environ[_FOLDER]), names)
        return
    from harness import save

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update({_FOLDER: folder, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})
        command = [options.python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PEERS)]
        for tensor in sorted({CASES[name].tensor for name in names}):  # DeepSpeed keeps the ranks of the first model
            alike = [name for name in names if CASES[name].tensor == tensor]
            subprocess.run([*command, sys.argv[0], "--only", ",".join(alike)], check=True)
        for world in (1, 2, 3):
            rows += [{"ranks": world, **row} for row in job(world)]
    for row in rows:
        into = "".join(f", {key} {row[key]}" for key in ("ep_size", "autotp_size") if key in row)
        print(
            f"{row['saved']:22} -> stage {row['stage']} on {row['ranks']}{into}: "
            f"{row['differing']} of {row['compared']} elements differ, losses by {row['loss_gap']:.1e}, "
            f"rate by {row['lr_gap']:.1e}"
        )
    version = subprocess.run(
        [options.python, "-c", "import importlib.metadata as m; print(m.version('deepspeed'), m.version('torch'))"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    notes = {"peer": {"deepspeed": version[0], "torch": version[1], "ranks": PEERS}, "steps": [BEFORE, AFTER]}
    save(options, "deepspeed_import", [_kept(row) for row in rows], **notes)
    if any(row["differing"] for row in rows):
        sys.exit("values differ")


def _kept(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as it is kept: the kind of checkpoint and what it was compared with are settings."""
    against = "module" if row["parameters_of"] == "module" else "debugging functions"
    against += {None: " alone", "optimizer": ", optimizer", "flat": ", optimizer"}.get(row["state_of"], "")
    _, stage, kind = row["saved"].split(" ", 2)
    setting = {"kind": kind, "saved_stage": stage, "against": against}
    setting |= {key: row.pop(key) for key in ("ranks", "stage", "ep_size", "autotp_size") if key in row}
    return {"system": row.pop("saved"), "setting": setting, **row}


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the names of the cases."""
    if options.only:
        return options.only.split(",")
    return ["stage 2 bf16", "stage 3 bf16"] if options.quick else list(CASES)


if __name__ == "__main__":
    main()
