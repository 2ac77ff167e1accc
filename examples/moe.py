"""Train a model whose experts are divided over ranks, and see how busy they are.

    shardwise run --nproc 2 examples/moe.py [--ep-size 2] [--stage 2] [--steps 60]

Rows of several kinds are to be transformed, each kind by a matrix of its own; experts find the kinds by themselves. The
same command with `--ep-size 1` has all experts on every rank, and trains the same way.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

import shardwise
from shardwise.moe import ExpertUtilization, MoE

WIDTH, KINDS, EXPERTS = 32, 4, 8


class Model(nn.Module):
    """A layer of experts with a residual connection; returns its own loss."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        # All ranks build all experts, each with values of its own, and keep theirs.
        experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(EXPERTS)
        )
        self.moe = MoE(WIDTH, experts, EXPERTS, ep_size, k=2, drop_tokens=False, noisy_gate_policy="Jitter")

    def forward(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mixed, l_aux, _ = self.moe(rows)
        return (rows + mixed - targets).square().mean() + 0.01 * l_aux


def main() -> None:
    """Train, and tell which part of the rows each expert gets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep-size", type=int, default=2)
    parser.add_argument("--stage", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    shardwise.init_distributed(verbose=False)  # a rank keeps its own experts, so it must know its number
    torch.manual_seed(0)
    model = Model(options.ep_size)
    marks, matrices = torch.randn(KINDS, WIDTH), torch.randn(KINDS, WIDTH, WIDTH) / WIDTH**0.5
    config = {
        "train_micro_batch_size_per_gpu": 128,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": options.stage},
    }
    engine, *_ = shardwise.initialize(model=model, config=config)
    load = ExpertUtilization(engine.module)
    generator = torch.Generator().manual_seed(engine.global_rank)
    for step in range(options.steps):
        kinds = torch.randint(KINDS, (128,), generator=generator)
        rows = marks[kinds] + 0.3 * torch.randn(128, WIDTH, generator=generator)
        targets = torch.bmm(matrices[kinds], rows[..., None])[..., 0]
        loss = engine(rows.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
        if step % 20 == 0 or step + 1 == options.steps:
            parts = [round(100 * float(part)) for _, part, _ in load.events(engine.global_samples)]
            if engine.global_rank == 0:
                print(f"step {step:3d}  loss {loss.item():.3f}  percent of the choices by expert {parts}", flush=True)
    here = engine.moe_layers[0].deepspeed_moe.experts.num_local_experts
    print(f"rank {engine.global_rank} has {here} of {EXPERTS} experts", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
