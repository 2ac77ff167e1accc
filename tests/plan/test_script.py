"""Scripts up to their `initialize`: what is taken, and that they end there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.comm.setup import destroy
from shardwise.errors import CommandLineError, ConfigError, UsageError
from shardwise.pipe import PipelineModule
from shardwise.plan.script import ScriptModel, model_of_script
from shardwise.trees import tensors_in

Taken = Callable[..., ScriptModel]

HEAD = """
import os, sys, torch, shardwise
import torch.distributed as dist
from torch import nn
from shardwise import pipe
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
"""


def loop(given: str = "", model: str = "nn.Linear(4, 4)") -> str:
    """A script with further arguments of `initialize`, which must not go on."""
    return f"{HEAD}\nshardwise.initialize(model={model}, config=CONFIG{given})\nraise RuntimeError('went on')\n"


@pytest.fixture(autouse=True)
def alone() -> None:
    """End the process group that an engine of another test may have left."""
    destroy()


@pytest.fixture
def taken(tmp_path: Path) -> Taken:
    """Write a script and return what it gives to `initialize` on 8 ranks."""

    def take(text: str, *arguments: str, ranks: int = 8, with_batch: bool = True) -> ScriptModel:
        path = tmp_path / "train.py"
        path.write_text(text)
        return model_of_script(str(path), arguments, ranks, 4, dict, with_batch=with_batch)

    return take


def test_a_script_that_is_one_of_eight_ranks(taken: Taken, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ), list(sys.path), list(sys.argv)
    found = taken(
        HEAD
        + """
from helper import width
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
print(sys.argv[1:], [os.environ[name] for name in names])
dist.init_process_group("nccl")
shardwise.init_distributed()
assert dist.get_world_size() == 8 and dist.get_rank() == 0
value = torch.ones(3)
dist.all_reduce(value)
dist.barrier()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        shared = nn.Parameter(torch.zeros(width, width))
        shared.kept = True
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)
        self.one.weight = shared
        self.other.weight = shared
        self.register_buffer("steps", torch.ones(3))

with shardwise.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
    net = Net()
net.to("cuda", torch.bfloat16).cuda()
nn.init.normal_(net.one.bias)
try:
    shardwise.initialize(model=net, config=CONFIG, optimizer=torch.optim.SGD(net.parameters(), lr=0.5))
except Exception:
    pass
raise RuntimeError("after initialize")
""",
        "--lr",
        "1",
        ranks=8,
    )
    shown = capsys.readouterr()
    assert not shown.out and "['--lr', '1'] ['0', '8', '0', '4']" in shown.err
    assert (dict(os.environ), sys.path, sys.argv) == before and not dist.is_initialized()
    assert all(parameter.is_meta for parameter in found.model.parameters())
    assert found.model.one.weight is found.model.other.weight and found.model.one.weight.kept
    assert found.model.one.bias.dtype is torch.bfloat16 and not found.model.steps.is_meta
    assert found.optimizer.param_groups[0]["params"][0] is found.model.one.weight
    assert found.batch is None and found.config.train_batch_size == 16
    assert torch.nn.Linear(2, 2).to(torch.float64).weight.device.type == "cpu"  # as before the script


@pytest.fixture(autouse=True)
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module beside the script."""
    (tmp_path / "helper.py").write_text("width = 16\n")
    monkeypatch.delitem(sys.modules, "helper", raising=False)


@pytest.mark.parametrize("with_batch", [True, False])
def test_a_micro_batch_of_the_data(taken: Taken, with_batch: bool) -> None:
    data = ", training_data=[float(i) for i in range(64)], collate_fn=lambda rows: {'input': torch.tensor(rows)}"
    batch = taken(loop(data), with_batch=with_batch).batch
    assert batch is None if not with_batch else batch["input"].shape == (2,)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("(torch.ones(4), torch.ones(1))", [(2, 4)]),
        ("{'input': torch.ones(4), 'labels': torch.ones(1)}", [(2, 4)]),
        ("torch.ones(4)", [(2, 4)]),
    ],
)
def test_the_part_of_a_batch_that_the_model_takes(taken: Taken, row: str, expected: list[tuple[int, ...]]) -> None:
    batch = taken(loop(f", training_data=[{row}] * 64")).batch
    assert [tuple(tensor.shape) for tensor in tensors_in(batch)] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (", mesh=(4, 2)", {"sequence_parallel_size": 2}),
        (", mesh=(2, 2, 2)", {"sequence_parallel_size": 2, "tensor_parallel": {"autotp_size": 2}}),
        (
            ", mesh=dist.device_mesh.init_device_mesh('cpu', (2, 4), mesh_dim_names=('replicate', 'shard'))",
            {"zero_optimization": {"mics_shard_size": 4}},
        ),
        (
            ", mesh=dist.device_mesh.init_device_mesh('cpu', (2, 4), mesh_dim_names=('pp', 'shard'))",
            {"pipeline": {"stages": 2}},
        ),
    ],
)
def test_keys_that_a_mesh_stands_for(taken: Taken, given: str, expected: dict[str, Any]) -> None:
    found = taken(loop(given))
    assert {name: value for name, value in found.settings.items() if name in expected} == expected


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("pipe.PipelineModule([pipe.LayerSpec(nn.Linear, 4, 4)] * 2, num_stages=2)", ""),
        ("nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))", ", loss_fn=lambda out, labels: out.mean()"),
    ],
)
def test_a_pipeline(taken: Taken, model: str, loss: str) -> None:
    found = taken(loop(f"{loss}, training_data=torch.ones(64, 4)", model))
    assert isinstance(found.model, PipelineModule) and len(list(found.model.parameters())) == 4
    inputs, labels = found.batch
    assert inputs is labels and inputs.shape == (2, 4)


def test_the_drop_in(taken: Taken) -> None:
    text = loop(", model_parameters=None, dist_init_required=True").replace("shardwise.init", "deepspeed.init")
    found = taken(f"import shardwise_deepspeed.clients as deepspeed\n{text}")
    assert found.settings == {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", r"train.py has ended before it called initialize\(\) of shardwise.*module:function"),
        ("import sys; sys.exit(3)", "has ended with exit code 3 before"),
        ("def f():\n    return 1 / 0\nf()\n", "has raised ZeroDivisionError: division by zero; this was before"),
        ("f(", "has raised SyntaxError"),
    ],
)
def test_scripts_that_do_not_get_there(
    taken: Taken, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=message):
        taken(text)
    shown = capsys.readouterr().err
    assert ("Error" in shown) == ("raised" in message)
    if "division" in message:
        assert 'train.py", line 3, in <module>' in shown and "runpy" not in shown


def test_what_initialize_refuses_is_refused(taken: Taken) -> None:
    with pytest.raises(ConfigError, match="train_micro_batch_size_per_gpuu"):
        taken(loop().replace("size_per_gpu", "size_per_gpuu"))
    with pytest.raises(CommandLineError, match="there is no such script"):
        model_of_script("nowhere.py", (), 8, 8, dict, with_batch=True)
