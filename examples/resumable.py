"""A training script that survives: killed ranks, preemption, a changed number of ranks.

    shardwise run --nproc 2 --max-restarts 3 examples/resumable.py

Kill a rank with `kill -9`, and the job goes on from copies in memory within seconds. Send the launcher SIGTERM, as
schedulers do, and it saves and ends; start it again, also with another --nproc, and it goes on from there. This takes
the two sections under "checkpoint" in the JSON file, and the two lines of `main` that have a comment.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn

import shardwise


class Sums(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Numbers, and the sine of their sum."""

    def __init__(self, count: int) -> None:
        self.numbers = torch.rand(count, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.numbers[index], self.numbers[index].sum().sin()


def main() -> None:
    """Train to the end, whatever happens in between."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--out", default="resumable_out", help="folder for checkpoints")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds after each step, to have time to disturb it")
    parser.add_argument("--local_rank", type=int, help="given by launchers; not needed")
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    config["checkpoint"]["on_signal"]["save_dir"] = args.out

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
    engine, _, loader, _ = shardwise.initialize(model=model, training_data=Sums(4096), config=config)

    state = engine.resume(args.out) or {"best": float("inf")}  # the newest complete state there is, or none
    engine.provide_client_state(lambda: state)  # saved with copies in memory and on signals
    batches = iter(shardwise.RepeatingLoader(loader))
    while engine.global_steps < args.steps:
        for _ in range(engine.gradient_accumulation_steps()):
            numbers, wanted = next(batches)
            loss = nn.functional.mse_loss(engine(numbers).squeeze(-1), wanted)
            engine.backward(loss)
            engine.step()
        state["best"] = min(state["best"], loss.item())
        if engine.global_steps % 100 == 0:
            engine.save_checkpoint(args.out, client_state=state)
        if engine.global_rank == 0 and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps}  best loss {state['best']:.5f}", flush=True)
        time.sleep(args.pause)
    engine.save_checkpoint(args.out, client_state=state)
    engine.destroy()


if __name__ == "__main__":
    main()
