"""Kill a job again and again, in the middle of saves and of steps, and see that nothing is lost.

    python -m tests.slow.soak [--kills 100] [--nproc 2] [--seed 0]      (make soak)

A small model trains under `shardwise run --max-restarts`, with copies in memory every 2 steps and a checkpoint on disk
every 3. At random moments of a save or of a step a random rank is killed with SIGKILL from outside, until there have
been --kills of each kind. The launcher starts the ranks again and the script resumes by itself. Each time:

- the checkpoint that `latest` names is whole (every checksum), and is the one before the kill or the one being saved;
- training goes on from a state that is at least as new;
- the launcher has measured the recovery.

In the end all parameters, optimizer state, random numbers and the place in the data must equal, bit by bit, those of a
run that nobody has disturbed, and nothing may be left in memory. Results: bench/results/soak.json.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from harness import ROOT, options_of, save

_FOLDER = "SHARDWISE_SOAK_FOLDER"
COPY_EVERY, SAVE_EVERY = 2, 3
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-2}},
    "checkpoint": {"memory_copies": {"every": COPY_EVERY}},
}
RECOVERED = re.compile(r"recovered from the failure of rank \d+ in ([\d.]+) s.* ([\d.]+) s beyond the start")
PLACES = re.compile(r"copies in memory every \d+ steps in (/\S+)/engine")


# -- in the job --------------------------------------------------------------------------------------------------------


class Rank:
    """What this rank shows to whoever kills it: its phase in a byte of shared memory, and when to kill it.

    Args:
        folder: shared with the driver.
        rank: global rank.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        plan = json.loads((folder / f"plan_{attempt}.json").read_text())
        self.rank, self.steps = rank, plan["steps"]
        self.kind = plan["kind"] if plan["rank"] == rank else None
        self.after, self.share = plan["after"], plan["share"]
        self.seconds = {"save": 0.03, "train": 0.03}
        with open(folder / f"phase_{rank}", "r+b") as file:
            self.phase = mmap.mmap(file.fileno(), 1)
        self.driver = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.address = str(folder / "driver")

    def begin(self, kind: str) -> float:
        """A phase begins: ask to be killed in it if that is the plan."""
        self.phase[0] = ord(kind[0])
        if kind == self.kind:
            self.after -= 1
            if self.after == 0:
                told = {"pid": os.getpid(), "rank": self.rank, "delay": self.share * self.seconds[kind]}
                self.driver.sendto(json.dumps(told).encode(), self.address)
        return time.perf_counter()

    def end(self, kind: str, began: float) -> None:
        """A phase has ended."""
        self.seconds[kind] = time.perf_counter() - began
        self.phase[0] = ord("-")


def check_disk(runs: Path, progress: Path) -> tuple[int | None, list[str]]:
    """Return the step that `latest` names after it has been verified, and what is wrong with it."""
    from shardwise.checkpoint import verify
    from shardwise.checkpoint.listing import CheckpointDirectory

    said = [line.split() for line in progress.read_text().splitlines()] if progress.exists() else []
    begun = [int(step) for word, step in said if word == "saving"]
    done = [0, *(int(step) for word, step in said if word == "saved")]
    tag = CheckpointDirectory(str(runs)).latest() if runs.exists() else None
    if tag is None:
        return None, ["a checkpoint had been saved and there is no `latest`"] if done[1:] else []
    step = verify(str(runs / tag)).counters["global_steps"]
    allowed = {*done[-1:], *begun[-1:]}
    return step, [] if step in allowed else [f"latest is of step {step}, expected one of {sorted(allowed)}"]


def train(folder: Path) -> None:
    """Train until killed, or to the end."""
    import numpy
    import torch
    from torch import nn

    import shardwise

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(64, 48)
            blocks = [nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48)) for _ in range(4)]
            self.blocks = nn.ModuleList(blocks)
            self.head = nn.Linear(48, 64)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = x + block(x)
            return nn.functional.cross_entropy(self.head(x).float(), (tokens * 7 + 3) % 64)

    runs, progress = folder / "runs", folder / "progress"
    shardwise.init_distributed(verbose=False)
    first = torch.distributed.get_rank() == 0
    on_disk, wrong = check_disk(runs, progress) if first else (None, [])
    # Only a run that begins depends on it: what is saved replaces everything else.
    seed = os.getpid() if (runs / "latest").exists() else 1
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)
    torch.distributed.barrier()
    data = list(torch.randint(0, 64, (400,), generator=torch.Generator().manual_seed(2)))
    engine, _, loader, _ = shardwise.initialize(model=Model(), training_data=data, config=CONFIG)
    rank = Rank(folder, engine.global_rank)
    engine.resume(runs)
    if first:
        if on_disk is not None:
            _say(progress, f"saved {on_disk}")  # by an attempt that was killed before it could say so
        found = engine.resumed
        if on_disk is not None and engine.global_steps < on_disk:
            wrong.append(f"resumed at step {engine.global_steps}, and step {on_disk} is on disk")
        told = {"step": engine.global_steps, "source": found and found.source, "wrong": wrong}
        with open(folder / "resumed", "a") as file:
            file.write(json.dumps(told) + "\n")
    if engine.global_steps == 0:
        engine.save_checkpoint(runs, tag="odd")  # the initial weights
    batches = iter(shardwise.RepeatingLoader(loader))
    while engine.global_steps < rank.steps:
        began = rank.begin("train")
        for _ in range(engine.gradient_accumulation_steps()):
            engine.backward(engine(next(batches)))
            engine.step()
        rank.end("train", began)
        step = engine.global_steps
        if step % SAVE_EVERY == 0:
            if first:
                _say(progress, f"saving {step}")
            began = rank.begin("save")
            engine.save_checkpoint(runs, tag="even" if step % 2 == 0 else "odd")
            rank.end("save", began)
            if first:
                _say(progress, f"saved {step}")
    engine.save_checkpoint(folder / "end", tag="end")
    engine.destroy()


def _say(file: Path, line: str) -> None:
    with open(file, "a") as stream:
        stream.write(line + "\n")


# -- the driver --------------------------------------------------------------------------------------------------------


class Driver:
    """Starts the job, plans the kills and carries them out.

    Args:
        folder: shared with the job.
        kills: of each kind.
        nproc: number of ranks.
        seed: of the plan.
    """

    def __init__(self, folder: Path, kills: int, nproc: int, seed: int) -> None:
        self.folder, self.kills, self.nproc = folder, kills, nproc
        self.random = random.Random(seed)
        self.done = {"save": 0, "train": 0}
        self.attempt = 0
        self.last_step = 0
        self.ended = threading.Event()
        self.phases = []
        for rank in range(nproc):
            path = folder / f"phase_{rank}"
            path.write_bytes(b"-")
            with open(path, "r+b") as file:
                self.phases.append(mmap.mmap(file.fileno(), 1))
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / "driver"))
        self.socket.settimeout(0.2)
        self.plan()

    def plan(self) -> None:
        """Write down what happens to the next attempt."""
        left = [kind for kind, count in self.done.items() if count < self.kills]
        found: dict[str, Any] = {"kind": None, "rank": None, "after": 0, "share": 0.0, "steps": 1 << 40}
        if left:
            kind = self.random.choice(left)
            after = self.random.randint(1, 2 if kind == "save" else 2 * SAVE_EVERY)
            share = self.random.uniform(0.0, 1.0)
            found.update(kind=kind, rank=self.random.randrange(self.nproc), after=after, share=share)
        else:
            said = (self.folder / "resumed").read_text().splitlines()
            self.last_step = max(json.loads(line)["step"] for line in said) + 20
            found["steps"] = self.last_step
        (self.folder / f"plan_{self.attempt}.json").write_text(json.dumps(found))

    def kill(self) -> None:
        """Do as the ranks ask, until the job has ended."""
        while not self.ended.is_set():
            try:
                told = json.loads(self.socket.recv(1000))
            except TimeoutError:
                continue
            moment = time.perf_counter() + told["delay"]
            while time.perf_counter() < moment:
                time.sleep(0.0001)
            os.kill(told["pid"], signal.SIGSTOP)  # it stays where it is until the next plan is written
            phase = chr(self.phases[told["rank"]][0])
            self.done["save" if phase == "s" else "train"] += 1
            self.attempt += 1
            self.plan()
            os.kill(told["pid"], signal.SIGKILL)
            if sys.stderr.isatty():
                print(f"\r{self.done['save']} saves and {self.done['train']} steps killed", end="", file=sys.stderr)

    def run(self) -> str:
        """Run the job to its end; return what the launcher has said."""
        thread = threading.Thread(target=self.kill, daemon=True)
        thread.start()
        try:
            return launch(self.folder, self.nproc, 4 * self.kills + 10)
        finally:
            self.ended.set()
            thread.join()
            self.socket.close()


def launch(folder: Path, nproc: int, restarts: int) -> str:
    """Run the job in a folder; return its standard error."""
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", str(nproc), "--no-local-rank"]
    command += ["--max-restarts", str(restarts), __file__]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, _FOLDER: str(folder), "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        sys.exit(f"the job has failed with code {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-6000:]}")
    return done.stderr


def undisturbed(folder: Path, nproc: int, steps: int) -> None:
    """Run the same job without a kill."""
    for rank in range(nproc):
        (folder / f"phase_{rank}").write_bytes(b"-")
    plan = {"kind": None, "rank": None, "after": 0, "share": 0.0, "steps": steps}
    (folder / "plan_0.json").write_text(json.dumps(plan))
    launch(folder, nproc, 0)


def state(path: Path) -> dict[str, Any]:
    """Return everything that a checkpoint holds, in a form that can be compared bit by bit."""
    import torch

    from shardwise.checkpoint import Checkpoint

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value.tolist() if hasattr(value, "tolist") else value

    found: dict[str, Any] = {}
    with Checkpoint(str(path)) as saved:
        for stored in saved.manifest.tensors:
            values = saved.read(stored).view(-1).view(torch.uint8)
            found[f"{stored.kind} {stored.name} {stored.rank}"] = values.tolist()
        found["ranks"] = [plain(saved.decode(tree)) for tree in saved.manifest.ranks]
        found["scheduler"] = plain(saved.decode(saved.manifest.scheduler))
        found["optimizer"] = saved.manifest.optimizer
        found["counters"] = saved.manifest.counters
    return found


def left_in_memory(said: str) -> list[str]:
    """Return the directories in memory that a job has named and that are still there."""
    return sorted({path for path in PLACES.findall(said) if Path(path).exists()})


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run the soak; return its figures."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="shardwise-soak-", dir=options.directory) as place:
        disturbed, whole = Path(place) / "a", Path(place) / "b"
        disturbed.mkdir()
        whole.mkdir()
        driver = Driver(disturbed, options.kills, options.nproc, options.seed)
        said = driver.run()
        undisturbed(whole, options.nproc, driver.last_step)
        resumed = [json.loads(line) for line in (disturbed / "resumed").read_text().splitlines()]
        one, other = state(disturbed / "end" / "end"), state(whole / "end" / "end")
        differ = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
        shutil.rmtree(disturbed / "runs")
    times = [(float(whole_time), float(beyond)) for whole_time, beyond in RECOVERED.findall(said)]
    totals, beyond = ([pair[i] for pair in times] for i in range(2))
    wrong = [line for found in resumed for line in found["wrong"]] + differ + left_in_memory(said)
    for line in wrong:
        print(line, file=sys.stderr)
    sources = [found["source"] for found in resumed]
    return {
        "system": "shardwise 3",
        "setting": {"ranks": options.nproc, "seed": options.seed},
        "steps": driver.last_step,
        "killed_saving": driver.done["save"],
        "killed_training": driver.done["train"],
        **{f"resumed_from_{source}": sources.count(source) for source in ("memory", "disk")},
        "lost": len(wrong),
        "recoveries": len(times),
        "recovery_median_s": statistics.median(totals),
        "recovery_worst_s": max(totals),
        "beyond_start_median_s": statistics.median(beyond),
        "beyond_start_worst_s": max(beyond),
        "taken_s": time.perf_counter() - began,
    }


def main() -> None:
    """Be the job or its driver."""
    if _FOLDER in os.environ:
        train(Path(os.environ[_FOLDER]))
        return
    options = options_of(
        __doc__, quick={"kills": 2}, kills=100, nproc=2, seed=0, directory=tempfile.gettempdir(), limit_s=5.0
    )
    result = soak(options)
    save(options, "soak", [result], command="python -m tests.slow.soak " + " ".join(sys.argv[1:]))
    print(json.dumps(result, indent=1))
    if result["lost"] or result["beyond_start_worst_s"] >= options.limit_s:
        sys.exit("something has been lost, or recovery was too slow")


if __name__ == "__main__":
    main()
