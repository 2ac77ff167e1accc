"""A small training job under a limit of its address space, run as a script by test_oom.py.

Arguments: JSON with `config`, `room` (MiB beyond what the process has before the model exists), `width`, `rows`,
`where` (what is to be built under the limit). Prints one line of JSON: what was raised, or how many steps were taken.
"""

from __future__ import annotations

import json
import resource
import sys

import torch
from torch import nn

import shardwise
from shardwise.memory import OutOfMemoryError, virtual_bytes


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.ones(2, requires_grad=True).sum().backward()  # starts what PyTorch starts once
    shardwise.init_distributed(verbose=False)
    before = virtual_bytes()
    assert before is not None
    resource.setrlimit(resource.RLIMIT_AS, (before + (asked["room"] << 20), resource.RLIM_INFINITY))
    torch.manual_seed(0)
    narrow, wide = 64, asked["width"]
    layers = [nn.Sequential(nn.Linear(narrow, wide), nn.GELU(), nn.Linear(wide, narrow)) for _ in range(4)]
    try:
        engine, *_ = shardwise.initialize(model=nn.Sequential(*layers), config=asked["config"])
        for _ in range(2):
            for _ in range(engine.gradient_accumulation_steps()):
                x = torch.randn(engine.train_micro_batch_size_per_gpu(), narrow)
                loss = engine(x).square().mean()
                engine.backward(loss)
                engine.step()
    except OutOfMemoryError as error:
        told = {"text": str(error), "requested": error.requested}
        told["cause"] = type(error.__cause__).__name__
        print(json.dumps(told), flush=True)
        sys.exit(3)
    print(json.dumps({"steps": engine.global_steps}), flush=True)


if __name__ == "__main__":
    main()
