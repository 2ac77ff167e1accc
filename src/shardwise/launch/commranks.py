"""Rank process of `shardwise bench comm`: `python -m shardwise.launch.commranks PLAN FILE`.

PLAN is JSON (`shardwise.launch.commbench.CommWanted.plan`); rank 0 writes the results to FILE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def measured(plan: dict[str, Any]) -> dict[str, Any]:
    """Start the process group, run the benchmark `plan`, and destroy the group; return the same on all ranks."""
    import torch
    import torch.distributed as dist

    from shardwise.comm.communicator import Communicator
    from shardwise.comm.ledger import Ledger
    from shardwise.comm.setup import destroy, init_distributed, local_rank
    from shardwise.device.choice import choose_device
    from shardwise.launch.comm_measure import Plan, measure
    from shardwise.precision.dtypes import parse_dtype

    init_distributed(verbose=False)
    device = choose_device(local_rank()) if dist.get_backend() != "gloo" else torch.device("cpu")
    comm = Communicator(None, Ledger(), device, name="bench")
    wanted = Plan(
        ops=tuple(plan["ops"]),
        dtypes=tuple(parse_dtype(name, "--dtype") for name in plan["dtypes"]),
        sizes=tuple(plan["sizes"]),
        trials=plan["trials"],
        warmups=plan["warmups"],
    )
    found = {
        "ranks": comm.world,
        "backend": dist.get_backend(),
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "trials": wanted.trials,
        "warmups": wanted.warmups,
        **measure(comm, wanted),
        "rank": comm.rank,
    }
    comm.destroy()
    destroy()
    return found


def main() -> None:
    """Run the benchmark as one rank of a job."""
    found = measured(json.loads(sys.argv[1]))
    if found["rank"] == 0:
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
