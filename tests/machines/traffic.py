"""Trains some steps, and prints the bytes that each machine has sent, and those of the ledger: a script of ranks."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import shardwise

WIDTH, LAYERS, STEPS = 512, 6, 8


def sent_by(interface: str) -> int:
    """Return the bytes that an interface of this machine has sent."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if interface + ":" in line)
    return int(line.split(":")[1].split()[8])


def across(members: list[int], rank: int, op: str, machines: list[str]) -> float:
    """Return the share of what a rank sends in a collective that goes to other machines.

    Gloo's all-gather is a ring; in an exchange each rank sends an equal part to each other one.
    """
    if op == "all_gather":
        return float(machines[members[(members.index(rank) + 1) % len(members)]] != machines[rank])
    return sum(machines[other] != machines[rank] for other in members) / (len(members) - 1)


def main() -> None:
    """Train with the configuration in the arguments."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
    config = {"train_micro_batch_size_per_gpu": 1, **json.loads(sys.argv[1])}
    engine = shardwise.initialize(model, config=config).engine
    job, rank = engine.job, dist.get_rank()

    def step() -> None:
        engine.backward(engine(torch.randn(1, WIDTH)).square().mean())
        engine.step()

    for _ in range(3):
        step()
    job.barrier()
    start, before, began = job.ledger.sequence, sent_by("eth0"), time.perf_counter()
    for _ in range(STEPS):
        step()
    job.barrier()
    seconds, counted = (time.perf_counter() - began) / STEPS, sent_by("eth0") - before
    machines = list(job.nodes())
    records = [record for record in job.ledger.records(start) if record.members and record.sent]
    known = sum(record.sent * across(list(record.members), rank, record.op, machines) for record in records)
    rows = job.exchange([machines[rank], counted, known], "traffic")
    if rank == 0:
        own = [row for row in rows if row[0] == machines[0]]
        found = {"seconds": seconds, "sent": own[0][1] / STEPS, "ledger": sum(row[2] for row in own) / STEPS}
        print("traffic", json.dumps(found), flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
