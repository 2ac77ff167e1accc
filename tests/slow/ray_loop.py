"""A training loop that Ray Train and `shardwise run` execute alike; writes the losses of each rank to a file.

    python -m tests.slow.ray_loop FOLDER      # under `shardwise run`
    python -m tests.slow.ray_loop FOLDER ray  # two workers; the second is killed once, after step 12

Checkpoints are reported after steps 5, 10, 15 and 20; two are kept.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise

CONFIG = {
    "train_batch_size": 16,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}
STEPS, KILLED_AFTER = 20, 12


def train(settings: dict[str, Any]) -> None:
    """Train for STEPS steps, or continue."""
    folder, on_ray = Path(settings["folder"]), settings["ray"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    numbers = torch.rand(STEPS * 16, 8)
    data = torch.utils.data.TensorDataset(numbers, numbers.sum(1, keepdim=True).sin())
    engine, _, loader, _ = shardwise.initialize(model=model, training_data=data, config=CONFIG)
    assert loader is not None
    state = {"attempts": 0}
    if on_ray:
        state = shardwise.ray.resume(engine) or state
        state["attempts"] += 1
    log = (folder / f"losses.{engine.global_rank}").open("a", buffering=1)
    marker = folder / "killed"
    for numbers, wanted in loader:
        loss = nn.functional.mse_loss(engine(numbers), wanted)
        engine.backward(loss)
        engine.step()
        log.write(f"{state['attempts']} {engine.global_steps} {loss.item().hex()}\n")
        if on_ray:
            due = engine.global_steps % 5 == 0
            shardwise.ray.report(engine, {"step": engine.global_steps}, checkpoint=due, client_state=state)
        if on_ray and engine.global_steps == KILLED_AFTER and engine.global_rank == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    engine.destroy()


def main() -> None:
    """Train under `shardwise run`, or with Ray."""
    settings = {"folder": sys.argv[1], "ray": sys.argv[2:] == ["ray"]}
    if not settings["ray"]:
        train(settings)
        return
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    run = RunConfig(
        storage_path=f"{sys.argv[1]}/storage",
        name="a",
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    scaling = ScalingConfig(num_workers=2)
    result = TorchTrainer(train, train_loop_config=settings, scaling_config=scaling, run_config=run).fit()
    print("kept", result.metrics, Path(result.checkpoint.path).name, len(result.best_checkpoints))


if __name__ == "__main__":
    main()
