"""What the tests of transformers, Accelerate and Lightning share: ranks of their own, a tiny model, a clean state.

These libraries ask when they are imported whether DeepSpeed is there, and remember the answer. So these tests run on a
pool of ranks of their own, in which shardwise takes DeepSpeed's place before anything imports them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.data import EngineDataLoader
from shardwise_deepspeed import attributes, parameters
from shardwise_deepspeed.modules import Finder
from tests.harness import worker
from tests.harness.pool import Pool

MISSING = [name for name in ("transformers", "accelerate", "peft") if find_spec(name) is None]

Ranks = Callable[..., list[Any]]


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """Put sys.meta_path, sys.modules and the log level back afterwards."""
    path, level = list(sys.meta_path), logging.getLogger("shardwise").level
    assert not _imported() and not any(isinstance(finder, Finder) for finder in path)
    try:
        yield
    finally:
        sys.meta_path[:] = path
        logging.getLogger("shardwise").setLevel(level)
        detach()
        for name in _imported():
            del sys.modules[name]


def detach() -> None:
    """Remove the attributes of the drop-in from classes of torch and of the library."""
    added = ((nn.Parameter, parameters.ANSWERS), (torch.optim.Optimizer, attributes.ANSWERS))
    for owner, names in (*added, (EngineDataLoader, attributes.LOADER)):
        for name in names:
            if name in vars(owner):
                delattr(owner, name)


def _imported() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "deepspeed"]


@contextlib.contextmanager
def drop_in() -> Iterator[None]:
    """`import deepspeed` gives shardwise in the block, or in a function that this decorates."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        yield  # a rank on which another test has installed it
        return
    with plainly():
        shardwise.install_as_deepspeed()
        yield


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    """`ranks(fn, world, *args)`, as `run_ranks`, on processes that see shardwise as DeepSpeed.

    All modules of this directory share them: importing transformers takes longer than most tests.
    """
    yield from own_ranks(as_deepspeed)


def own_ranks(prepared: Callable[..., Any]) -> Iterator[Ranks]:
    """Give a `ranks` whose functions are called by `prepared`, and end its processes afterwards."""
    pool = Pool()

    def run(fn: Callable[..., Any], world: int, *args: Any) -> list[Any]:
        return pool.run(prepared, world, (fn, *args), {}, 120, True)

    try:
        yield run
    finally:
        pool.close()


def on_clients(world: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test whose body runs on each of `world` ranks that see shardwise as DeepSpeed."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks: Ranks | None = None, **given: Any) -> None:
            if worker.serving or ranks is None:
                body(**given)
            else:
                ranks(functools.partial(test, **given), world)

        own = inspect.signature(body)
        fixture = inspect.Parameter("ranks", inspect.Parameter.KEYWORD_ONLY)
        test.__signature__ = own.replace(parameters=[*own.parameters.values(), fixture])  # type: ignore[attr-defined]
        return test

    return decorate


def as_deepspeed(fn: Callable[..., Any], *args: Any) -> Any:
    """Run a function where `import deepspeed` gives shardwise."""
    shardwise.install_as_deepspeed()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    # Calls between these libraries, and from them to torch, are outside of these tests.
    warnings.filterwarnings("default", category=FutureWarning, module=r"(transformers|accelerate|peft|lightning)\.")
    forget()
    return fn(*args)


def forget() -> None:
    """Let the next Trainer or Accelerator begin without what the one before has left."""
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]


def gpt2(seed: int = 0) -> Any:
    """A GPT-2 of two small blocks without dropout, from its configuration."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, bos_token_id=0, eos_token_id=0))


def tokens(count: int) -> torch.Tensor:
    """Rows of 16 tokens, always the same."""
    return torch.randint(0, 64, (count, 16), generator=torch.Generator().manual_seed(1))


def mean_over_ranks(value: torch.Tensor) -> float:
    """Average a number of all ranks."""
    total = value.detach().double().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()
