"""Time of planning a large model on many ranks that do not exist, on one core.

    OMP_NUM_THREADS=1 python bench/plan_time.py [--model llama-70b] [--ranks 1024] [--length 2048]

A window of training is run on tensors without memory for each case: with and without activations. Beside time on the
wall stands that of the process, which others on the machine do not lengthen.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from _jobs import parser, read
from _machine import save

from shardwise.engine.plans import plan_model
from shardwise.launch.architectures import SHAPES, Decoder


def measure(name: str, ranks: int, stage: int, length: int) -> dict[str, Any]:
    """Plan once; return the figures."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    wall, process = time.perf_counter(), time.process_time()
    with torch.device("meta"):
        model = Decoder(SHAPES[name], recompute=True)
    batch = torch.empty(1, length, dtype=torch.int64, device="meta") if length else None
    (plan,) = plan_model(model, config, ranks=ranks, stages=[stage], batch=batch).plans
    return {
        "system": f"stage {stage}, {length} tokens" if length else f"stage {stage}, without activations",
        "wall_s": round(time.perf_counter() - wall, 1),
        "process_s": round(time.process_time() - process, 1),
        "total": plan.total,
        "peaks": plan.peaks,
    }


def main() -> None:
    """Measure, print and keep the figures."""
    options = parser(__doc__)
    options.add_argument("--model", default="llama-70b", choices=SHAPES)
    options.add_argument("--ranks", type=int, default=1024)
    options.add_argument("--length", type=int, default=2048)
    chosen = read(options)
    if chosen.quick:
        chosen.model, chosen.ranks, chosen.length = "bloom-560m", 8, 64
    torch.set_num_threads(1)
    rows = []
    for stage, length in ((3, 0), (3, chosen.length), (1, chosen.length)):
        rows.append(measure(chosen.model, chosen.ranks, stage, length))
        row = rows[-1]
        print(f"{row['system']}: {row['wall_s']} s, {row['process_s']} s of the process, {row['total'] / 1e9:.2f} GB")
    save(chosen.results, "plan_time", rows, model=chosen.model, ranks=chosen.ranks, length=chosen.length)


if __name__ == "__main__":
    main()
