"""Trains some steps and prints the norm of each step's gradient: a script of ranks.

Arguments: the stage of ZeRO, the number of steps, seconds between steps, and the directory to resume from (with a
pause only, because then copies are kept in memory).
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn

import shardwise


def main() -> None:
    """Train as the arguments say."""
    stage, steps, pause = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))
    config: dict[str, Any] = {
        "train_batch_size": 12,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.1,
        "checkpoint": {"memory_copies": {"every": 1}} if pause else {},
    }
    engine = shardwise.initialize(model, config=config).engine
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if pause:
        engine.resume(sys.argv[4])
    for step in range(engine.global_steps, steps):
        rows = torch.randn(12, 32, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]
        engine.backward(engine(rows).square().mean())
        engine.step()
        print("step", step, float(engine.get_global_grad_norm() or 0.0).hex(), flush=True)
        time.sleep(pause)  # ranks end here when a machine is lost: what is in the copies has also been printed
    engine.destroy()


if __name__ == "__main__":
    main()
