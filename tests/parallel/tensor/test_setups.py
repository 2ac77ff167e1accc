"""Set-ups that cannot work: each ends in an error on every rank that says what, where and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.parallel import end_tensors
from tests.harness import on_ranks
from tests.harness.engines import forget_engines
from tests.harness.training import SGD, config_of
from tests.parallel.tensor.clients import Unit, megatron, parallelized
from tests.parallel.tensor.models import ROWS, data, decoder
from tests.parallel.tensor.together import RULES


def config(size: int | None = 2, rules: Any = RULES, **more: Any) -> dict[str, Any]:
    section = {"partition_config": rules} | ({} if size is None else {"autotp_size": size})
    return config_of(0, SGD, **{"tensor_parallel": section, **more})


def start(model: nn.Module | None = None, settings: Any = None, **more: Any) -> Any:
    return shardwise.initialize(model=model or decoder(), config=settings or config(), **more)[0]


def meshed(sizes: tuple[int, ...], names: tuple[str, ...], settings: Any = None, model: Any = None) -> None:
    start(model, settings or config(None), mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))


def features() -> None:
    model = decoder()
    for block in model.blocks:
        block.q = nn.Linear(16, 1)
    start(model, config(2, {"layer_specs": [{"patterns": [r"\.q\."], "partition_type": "column"}]}))


def other_plans() -> None:
    pattern = r"\.up\." if dist.get_rank() else r"\.q\."
    own = [{"patterns": [pattern], "partition_type": "column", "gather_output": True}]
    start(settings=config(2, {"layer_specs": own}))


def called(step: int, **more: Any) -> None:
    engine = start(settings=config(2, **more))
    try:
        engine(data(step, ROWS))
    finally:
        engine.destroy()


def divided_otherwise() -> None:
    model = decoder()
    shardwise.tp_model_init(model, 2, None, {"tensor_parallel": {"partition_config": RULES}})
    try:
        start(model, config(4))
    finally:
        end_tensors()


def after_the_end() -> None:
    model = decoder()
    start(model).destroy()
    model(data(0, ROWS))


def marked(change: Callable[[Any], None], data_group: bool = False) -> None:
    """A client's layers, of which a mark is changed."""
    unit = Unit(2)
    model = megatron(unit)
    change(model)
    if data_group:
        groups = [dist.new_group([rank]) for rank in range(4)]
        unit.data = groups[dist.get_rank()]
    start(model, config(None), mpu=unit)


def without_dimension(model: Any) -> None:
    model.blocks[1].o.weight.partition_dim = -1


def on_some_ranks(model: Any) -> None:
    if dist.get_rank() % 2:
        model.blocks[0].up.bias.tensor_model_parallel = False


def two_dimensions() -> None:
    model = decoder()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0), Shard(1)]))
    start(model, config(None))


UNKNOWN = {"use_default_specs": False, "layer_specs": [{"patterns": ["no_such_layer"]}]}
CASES: dict[str, tuple[Callable[[], Any], str, str]] = {
    "sizes": (lambda: start(settings=config(3)), "ConflictError", "tensor_parallel.autotp_size"),
    "features": (features, "ConfigError", "blocks.0.q"),
    "tokens without a last norm": (
        lambda: start(settings=config(2, tensor_parallel={**config(2)["tensor_parallel"], "sequence_parallel": True})),
        "ConfigError",
        "expected one norm behind blocks",
    ),
    "unknown": (lambda: start(settings=config(2, UNKNOWN)), "ConfigError", "layer_specs[0].patterns"),
    "other plans": (other_plans, "DesyncError", "tensor_parallel.partition_config.layer_specs"),
    "other inputs": (lambda: called(dist.get_rank()), "DesyncError", "have one copy of the model"),
    "divided otherwise": (divided_otherwise, "ConflictError", "autotp_size"),
    "other order": (
        lambda: meshed((2, 2), ("tp", "dp")),
        "UsageError",
        "init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))",
    ),
    "mesh and config": (lambda: meshed((2, 2), ("dp", "tp"), config(4)), "ConflictError", "autotp_size"),
    "mesh of unknown": (lambda: meshed((2, 2), ("cp", "tp")), "UsageError", "'cp': 2"),
    "after the end": (after_the_end, "UsageError", "no engine"),
    "unmarked": (
        lambda: start(settings=config(None), mpu=Unit(2)),
        "UsageError",
        "parameter.tensor_model_parallel",
    ),
    "without a dimension": (lambda: marked(without_dimension), "UsageError", "'blocks.1.o.weight'"),
    "on some ranks": (lambda: marked(on_some_ranks), "UsageError", "'blocks.0.up.bias'"),
    "another group": (lambda: marked(id, True), "UsageError", "get_data_parallel_group()"),
    "mesh of DTensors": (
        lambda: meshed((1, 4), ("dp", "tp"), model=parallelized(decoder(), 2)),
        "ConflictError",
        "4 ranks",
    ),
    "two dimensions": (two_dimensions, "UsageError", "'head.weight'"),
    "sequences": (lambda: called(0, sequence_parallel_size=2), "UsageError", "exchange of heads"),
    "rows without a group": (lambda: shardwise.tp_model_init(decoder(), 3), "ConflictError", "tp_size"),
}
"""What is wrong, class of the error, and the key, name or value that the message has."""


@pytest.mark.parametrize("name", CASES)
@on_ranks(4)
def test_wrong_set_ups_say_what_to_do(name: str) -> None:
    call, kind, key = CASES[name]
    with pytest.raises((ShardwiseError, TypeError, ValueError, RuntimeError)) as caught:
        call()
    assert dist.get_rank() or (caught.type.__name__ == kind and key in str(caught.value)), caught.value
    forget_engines()
