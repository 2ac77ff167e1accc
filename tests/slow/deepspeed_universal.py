"""Checkpoints of DeepSpeed's pipelines and universal checkpoints, in both directions, compared bit by bit.

    python -m tests.slow.deepspeed_universal --python PYTHON [--only NAME,NAME]

PYTHON is an interpreter that has DeepSpeed; shardwise is not needed there. Ranks train a small language model with it,
as a pipeline or as a plain model, save, write down the values that DeepSpeed's own functions for debugging return, and
train on. `ds_to_universal` converts the checkpoint. shardwise loads both, compares every element of master weights and
optimizer state, trains on, saves, and exports a universal checkpoint. DeepSpeed loads that one, and its values are
compared with those of shardwise's checkpoint. Result: bench/results/deepspeed_universal.json.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from harness import answer, in_job, job, leave_group, options_of

WIDTH, WORDS, ROWS, LENGTH, PARTS, BEFORE, AFTER = 10, 13, 4, 6, 2, 3, 3
"""Sizes; rows of a global micro-batch, micro-batches of a step, steps before and after the checkpoint."""
ENTRIES = ("fp32", "exp_avg", "exp_avg_sq")
_ROLE, _FOLDER, _CASE, _LOAD = (f"SHARDWISE_UNIVERSAL_{name}" for name in ("ROLE", "FOLDER", "CASE", "LOAD"))


@dataclass(frozen=True)
class Case:
    """A training run: pipeline stages (0: a plain model), ranks and ZeRO stage of DeepSpeed, dtype, and how shardwise
    loads: ranks, pipeline stages, ZeRO stage.
    """

    stages: int
    ranks: int
    zero: int
    dtype: str
    loads: tuple[tuple[int, int, int], ...]


CASES = {
    "pipeline stage 1 fp32": Case(2, 4, 1, "fp32", ((1, 1, 0), (2, 1, 3), (4, 2, 1), (4, 4, 2))),
    "pipeline stage 1 bf16": Case(2, 4, 1, "bf16", ((1, 1, 2), (4, 2, 1))),
    **{f"stage {zero} fp32": Case(0, 2, zero, "fp32", ((1, 0, 0), (2, 0, 3))) for zero in (1, 2, 3)},
    "stage 2 bf16": Case(0, 2, 2, "bf16", ((1, 0, 1), (2, 0, 3))),
}


class Words(nn.Module):
    """An embedding, whose weight is also that of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings."""
        return F.embedding(ids, self.weight)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the block's output."""
        y: torch.Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class Plain(nn.Module):
    """A plain model with a shared head and a frozen table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = Words(), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(3)), nn.LayerNorm(WIDTH)
        self.places.weight.requires_grad_(False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.words(ids) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return loss_of(head(self.words, self.norm(x)), labels)


def head(words: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return logits."""
    return F.linear(x, words.weight)  # type: ignore[arg-type]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def engine_of(library: str, case: Case, stages: int, zero: int, load: bool) -> Any:
    """Return an engine of either library."""
    torch.manual_seed(0)
    model: nn.Module = Plain()
    if case.stages:
        pipe = importlib.import_module("deepspeed.pipe" if library == "deepspeed" else "shardwise.pipe")
        first, last = (pipe.TiedLayerSpec("words", Words, **more) for more in ({}, {"forward_fn": head}))
        blocks = [pipe.LayerSpec(Block) for _ in range(4)]
        layers = [first, *blocks, pipe.LayerSpec(nn.LayerNorm, WIDTH), last]
        options: dict[str, Any] = {"num_stages": stages, "loss_fn": loss_of, "partition_method": "uniform"}
        model = pipe.PipelineModule(layers, **options)
    places = dist.get_world_size() // max(1, stages) if dist.is_initialized() else 1
    adam = {"lr": 0.01, "weight_decay": 0.1, **({"torch_adam": True} if library == "deepspeed" else {})}
    config = {
        "train_micro_batch_size_per_gpu": ROWS // places,
        "gradient_accumulation_steps": PARTS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": adam},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}},
        "zero_optimization": {"stage": zero},
        "bf16": {"enabled": case.dtype == "bf16"},
        "checkpoint": {"load_universal": load},
        "steps_per_print": 10**9,
    }
    trained = [p for p in model.parameters() if p.requires_grad] if library == "deepspeed" or not case.stages else None
    return importlib.import_module(library).initialize(model=model, model_parameters=trained, config=config)[0]


def batches(step: int, places: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's micro-batches of a step."""
    place = dist.get_rank() % places if dist.is_initialized() else 0
    for part in range(PARTS):
        generator = torch.Generator().manual_seed(step * PARTS + part)
        ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=generator).chunk(places)[place]
        yield ids, (ids * 3 + 1) % WORDS


def train(engine: Any, case: Case, stages: int, first: int, steps: int) -> list[float]:
    """Train; return the losses of global batches."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    losses = []
    for step in range(first, first + steps):
        parts = batches(step, world // max(1, stages))
        if case.stages:
            losses.append(float(engine.train_batch(parts)))
            continue
        total = torch.zeros(())
        for ids, labels in parts:
            loss = engine(ids, labels)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / PARTS
        if dist.is_initialized():
            dist.all_reduce(total)
        losses.append(float(total) / world)
    return losses


# -- with DeepSpeed ----------------------------------------------------------------------------------------------------


def peer() -> None:
    """Train and save, or load what shardwise has exported; write down the values, and train on."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed("gloo")
    folder, case, load = Path(os.environ[_FOLDER]), CASES[os.environ[_CASE]], os.environ.get(_LOAD)
    engine = engine_of("deepspeed", case, case.stages, case.zero, load is not None)
    if load is None:
        train(engine, case, case.stages, 0, BEFORE)
        engine.save_checkpoint(str(folder / "theirs"), tag="x")
    else:
        engine.load_checkpoint(load)
    values = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            held = [safe_get_full_fp32_param(parameter)]
            held += [safe_get_full_optimizer_state(parameter, entry) for entry in ENTRIES[1:]]
            values[name] = {entry: value.clone() for entry, value in zip(ENTRIES, held, strict=True)}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, values)
    losses = train(engine, case, case.stages, engine.global_steps, AFTER)
    if dist.get_rank() == 0:
        merged = {name: entries for part in parts for name, entries in part.items()}
        torch.save({"values": merged, "losses": losses}, folder / ("loaded.pt" if load else "held.pt"))
    engine.destroy()


# -- with shardwise ----------------------------------------------------------------------------------------------------


def load() -> None:
    """Load each form with one layout, compare, train on, and save."""
    import shardwise
    from shardwise.checkpoint.formats.deepspeed.layer_files import stage_name

    shardwise.init_distributed()
    folder, case = Path(os.environ[_FOLDER]), CASES[os.environ[_CASE]]
    _, stages, zero = map(int, os.environ[_LOAD].split(","))
    held = torch.load(folder / "held.pt", weights_only=True)
    rows = []
    for form, tag in (("saved", "x"), ("universal", "uni")):
        engine = engine_of("shardwise", case, stages, zero, False)
        engine.load_checkpoint(str(folder / "theirs"), tag=tag)
        compared = different = 0
        for tensor in engine.sharded.registry:
            name = stage_name(tensor.name, {"words": 0}) if case.stages else tensor.name
            for entry, values in held["values"].get(name, {}).items():
                of_entry = engine.sharded.update.state_pieces
                runs = engine.sharded.state.value_runs().get(tensor.index, ()) if entry == "fp32" else None
                for start, stop, view in of_entry(tensor.index, entry) if runs is None else runs:
                    compared += stop - start
                    different += int((view.detach().float() != values.flatten()[start:stop]).sum())
        counts = torch.tensor([compared, different])
        if dist.is_initialized():
            dist.all_reduce(counts)
        total = sum(value.numel() for entries in held["values"].values() for value in entries.values())
        assert counts[0] >= total, (counts, total)
        losses = train(engine, case, stages, BEFORE, AFTER)
        engine.save_checkpoint(str(folder / "ours"), tag="y")
        following = train(engine, case, stages, BEFORE + AFTER, AFTER)
        row = {"form": form, "zero": zero, "stages": stages, "compared": int(counts[0]), "differing": int(counts[1])}
        rows.append({**row, "loss_gap": gap(losses, held["losses"]), "following": following})
        engine.destroy()
    answer(rows)
    leave_group()


def gap(losses: list[float], others: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, others, strict=True))


def back(folder: Path, case: Case) -> dict[str, Any]:
    """Compare what DeepSpeed has loaded with shardwise's checkpoint."""
    from shardwise.checkpoint import Checkpoint
    from shardwise.checkpoint.formats.deepspeed.layer_files import stage_name

    loaded = torch.load(folder / "loaded.pt", weights_only=True)
    compared = different = 0
    with Checkpoint(str(folder / "ours" / "y")) as saved:
        for tensor in saved.manifest.of_kind("parameter"):
            if tensor.trainable:
                name = stage_name(tensor.name, {"words": 0}) if case.stages else tensor.name
                for entry, values in loaded["values"][name].items():
                    own = tensor if entry == "fp32" else saved.find(tensor.name, f"optimizer/{entry}")
                    compared += values.numel()
                    different += int((saved.read(own) != values.float()).sum())
    return {"compared": compared, "differing": different, "losses": loaded["losses"]}


def main() -> None:
    """Run all cases, and keep what was found."""
    options = options_of(__doc__, python=sys.executable, only="")
    if in_job():
        load()
        return
    if os.environ.get(_ROLE) == "peer":
        peer()
        return
    from harness import save

    from shardwise.checkpoint import Checkpoint
    from shardwise.checkpoint.formats.universal_writer import write_universal

    names = options.only.split(",") if options.only else ["stage 2 fp32"] if options.quick else list(CASES)
    os.environ.update({"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})
    rows = []
    for name in names:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as text:
            folder = Path(text)
            os.environ.update({_FOLDER: text, _CASE: name})
            os.environ.pop(_LOAD, None)  # of the case before
            before = len(rows)
            command = [options.python, "-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(case.ranks), sys.argv[0]]
            plain = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            subprocess.run(command, check=True, env={**plain, _ROLE: "peer"}, stdout=sys.stderr)
            convert = [options.python, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
            convert += ["--input_folder", str(folder / "theirs/x"), "--output_folder", str(folder / "theirs/uni")]
            subprocess.run(convert, check=True, env=plain, stdout=sys.stderr)
            for layout in case.loads:
                os.environ[_LOAD] = ",".join(map(str, layout))
                own = [{"case": name, "ranks": layout[0], **row} for row in job(layout[0])]
                following = [row.pop("following") for row in own]
                rows += own
            with Checkpoint(str(folder / "ours" / "y")) as saved:
                write_universal(
                    saved, folder / "back", "uni", stages=case.stages > 0, tied={"words": 0} if case.stages else None
                )
            role = {_ROLE: "peer", _LOAD: str(folder / "back")}
            subprocess.run(command, check=True, env={**plain, **role}, stdout=sys.stderr)
            there = back(folder, case)
            loss = gap(there.pop("losses"), following[-1])
            rows.append({"case": name, "form": "exported", "ranks": case.ranks, **there, "loss_gap": loss})
        for row in rows[before:]:
            print(
                f"{row['case']:22} {row['form']:10} on {row['ranks']}: {row['differing']} of {row['compared']} "
                f"elements differ, losses by {row['loss_gap']:.1e}",
                flush=True,
            )
    keys = ("form", "ranks", "stages", "zero")
    kept = [
        {"system": row.pop("case"), "setting": {key: row.pop(key) for key in keys if key in row}, **row}
        for row in [dict(row) for row in rows]
    ]
    save(options, "deepspeed_universal", kept, steps=[BEFORE, AFTER])
    if any(row["differing"] for row in rows):
        sys.exit("values differ")


if __name__ == "__main__":
    main()
