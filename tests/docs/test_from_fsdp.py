"""docs/from-fsdp.md: both programs run and agree; the checkpoints that it names load; its words exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.config import resolve
from shardwise.config.schema_index import lookup
from tests.harness import run_ranks, thorough

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "from-fsdp.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def program(name: str) -> str:
    """The block that begins with this file name."""
    return next(block for block in BLOCKS if block.startswith(f"# {name}.py"))


@pytest.mark.thorough
def test_before_and_after_print_the_same_loss(tmp_path: Path) -> None:
    for name in ("common", "before", "after"):
        (tmp_path / f"{name}.py").write_text(program(name))
    losses = []
    for name in ("before", "after"):
        command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "2", f"{name}.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found = re.search(r"loss (\d+\.\d+)", done.stdout)
        assert found is not None, done.stdout
        losses.append(float(found[1]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0] < 1


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def saved_by_fsdp2(directory: str) -> None:
    """Train a step, and save what the page says: the model, model and optimizer, and a whole state dict."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network(1)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for part in (model[0], model[2], model):  # type: ignore[index]
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save(of_model, checkpoint_id=f"{directory}/fsdp")
    dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=f"{directory}/both")
    whole = {name: value.full_tensor() for name, value in of_model.items()}
    if torch.distributed.get_rank() == 0:
        torch.save(whole, f"{directory}/consolidated.pt")


def loaded(directory: str, stage: int) -> list[tuple[list[str], dict[str, torch.Tensor]]]:
    """What an engine has after each line of the page."""
    found = []
    lines = next(block for block in BLOCKS if "def of_model" in block)
    names: dict[str, Any] = {}
    exec(lines.partition("\n\n\n")[0], names)
    for path, rename in (("fsdp", None), ("both", names["of_model"]), ("consolidated.pt", None)):
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        engine, *_ = shardwise.initialize(
            model=network(5), config=config, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1)
        )
        result = engine.load_weights(f"{directory}/{path}", rename=rename)
        values = engine.module_state_dict()
        assert values is not None
        engine.backward(engine(torch.ones(1, 6)).sum())
        engine.step()
        found.append(([*result.missing, *result.unexpected], values))
        engine.destroy()
    return found


@pytest.mark.parametrize("world", [thorough(2), 3])
def test_checkpoints_of_fsdp2_load_into_an_engine(world: int, tmp_path: Path) -> None:
    run_ranks(saved_by_fsdp2, 2, str(tmp_path))
    saved = torch.load(tmp_path / "consolidated.pt", weights_only=True)
    assert not torch.equal(saved["0.weight"], network(1).state_dict()["0.weight"])
    for found in run_ranks(loaded, world, str(tmp_path), 3 if world == 3 else 0):
        for differences, values in found:
            assert not differences and values.keys() == saved.keys()
            assert all(torch.equal(values[name], saved[name]) for name in saved)


def beginning() -> list[float]:
    """The first weight of a model that every rank has made with a seed of its own."""
    rank = torch.distributed.get_rank()
    found = []
    for stage in range(4):
        model = network(rank + 1)
        model.register_buffer("own", torch.tensor(float(rank)))
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        engine, *_ = shardwise.initialize(model=model, config=config, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        values = engine.module_state_dict()
        assert values is not None and model.own == 0
        found.append(float(values["0.weight"][0, 0]))
        engine.destroy()
    return found


def test_parameters_and_buffers_begin_with_rank_0s_values() -> None:
    first = float(network(1).state_dict()["0.weight"][0, 0])
    assert run_ranks(beginning, 2) == [[first] * 4] * 2


def test_keys_and_calls_of_the_page_exist() -> None:
    keys = {
        "zero_optimization.leaf_module",
        "zero_optimization.zero_hpz_partition_size",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_max_live_parameters",
        "communication_data_type",
        "data_types.buffer_dtype",
        "data_types.grad_accum_dtype",
        "torch_autocast",
        "fp16.auto_cast",
        "gradient_predivide_factor",
        "prescale_gradients",
        "gradient_allreduce_op",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "checkpoint.async_save",
    }
    for key in keys:
        assert key.rpartition(".")[2] in TEXT and lookup(key)
    for name in set(re.findall(r"\bengine\.(\w+)", TEXT)) - {"last_step", "global_rank"}:
        assert callable(getattr(shardwise.Engine, name)), name
    assert callable(shardwise.utils.safe_get_full_optimizer_state)
    for section in re.findall(r'`("[a-z0-9_]+": (?:\{[^`]*\}|"[a-z0-9]+"|[\d.]+))`', TEXT):
        whole = f'"zero_optimization": {{{section}}}' if section.startswith('"stage"') else section
        resolve(f'{{"train_micro_batch_size_per_gpu": 1, {whole}}}', world_size=2)


def recomputed(wrapped: bool) -> list[float]:
    """Losses at stage 3 of a model whose blocks are wrapped for recomputation before the engine sees it."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
    if wrapped:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    engine, *_ = shardwise.initialize(model=model, config=config, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    losses = []
    for _ in range(3):
        loss = engine(torch.ones(2, 6)).square().mean()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


def test_wrapped_blocks_are_recomputed_as_before() -> None:
    assert run_ranks(recomputed, 2, True) == run_ranks(recomputed, 2, False)
