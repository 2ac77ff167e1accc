"""Set-ups that cannot work: each ends in an error on every rank that says what, where and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.errors import ShardwiseError
from shardwise.parallel import end_tensors
from tests.harness import run_ranks
from tests.parallel.tensor.clients import Unit, megatron, parallelized
from tests.parallel.tensor.models import ROWS, RULES, data, decoder


def config(size: int | None = 2, rules: Any = RULES, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "tensor_parallel": {"partition_config": rules} | ({} if size is None else {"autotp_size": size}),
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        **more,
    }


def start(model: nn.Module | None = None, settings: Any = None, **more: Any) -> Any:
    return shardwise.initialize(model=model or decoder(), config=settings or config(), **more)[0]


def sizes() -> None:
    start(settings=config(3))


def features() -> None:
    rules = {"layer_specs": [{"patterns": [r"\.q\."], "partition_type": "column"}]}
    model = decoder()
    for block in model.blocks:
        block.q = nn.Linear(16, 1)
    start(model, config(2, rules))


def unknown() -> None:
    start(settings=config(2, {"use_default_specs": False, "layer_specs": [{"patterns": ["no_such_layer"]}]}))


def other_plans() -> None:
    pattern = r"\.up\." if dist.get_rank() else r"\.q\."
    own = [{"patterns": [pattern], "partition_type": "column", "gather_output": True}]
    start(settings=config(2, {"layer_specs": own}))


def other_inputs() -> None:
    engine = start()
    try:
        engine(data(dist.get_rank(), ROWS))
    finally:
        engine.destroy()


def divided_otherwise() -> None:
    model = decoder()
    shardwise.tp_model_init(model, 2, None, {"tensor_parallel": {"partition_config": RULES}})
    try:
        start(model, config(4))
    finally:
        end_tensors()


def other_order() -> None:
    start(settings=config(None), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp")))


def mesh_and_config() -> None:
    start(settings=config(4), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))


def mesh_of_unknown() -> None:
    start(settings=config(None), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp")))


def after_the_end() -> None:
    model = decoder()
    engine = start(model)
    engine.destroy()
    model(data(0, ROWS))


def unmarked() -> None:
    start(settings=config(None, RULES), mpu=Unit(2))


def marked_without_dimension() -> None:
    unit = Unit(2)
    model = megatron(unit)
    model.blocks[1].o.weight.partition_dim = -1
    start(model, config(None), mpu=unit)


def marked_otherwise() -> None:
    unit = Unit(2)
    model = megatron(unit)
    if dist.get_rank() % 2:
        model.blocks[0].up.bias.tensor_model_parallel = False
    start(model, config(None), mpu=unit)


def unit_with_another_dimension() -> None:
    unit = Unit(2)
    groups = [dist.new_group([rank]) for rank in range(4)]
    unit.data = groups[dist.get_rank()]
    start(megatron(unit), config(None), mpu=unit)


def mesh_of_dtensors() -> None:
    model = parallelized(decoder(), 2)
    start(model, config(None), mesh=init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp")))


def two_dimensions() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    model = decoder()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Shard(0), Shard(1)]))
    start(model, config(None))


def sequences_without_loader() -> None:
    engine = start(settings=config(2, sequence_parallel_size=2))
    try:
        engine(data(0, ROWS))
    finally:
        engine.destroy()


def rows_without_group() -> None:
    shardwise.tp_model_init(decoder(), 3)


CASES: dict[Callable[[], None], tuple[str, str]] = {
    sizes: ("ConflictError", "tensor_parallel.autotp_size"),
    features: ("ConfigError", "blocks.0.q"),
    unknown: ("ConfigError", "layer_specs[0].patterns"),
    other_plans: ("DesyncError", "tensor_parallel.partition_config.layer_specs"),
    other_inputs: ("DesyncError", "have one copy of the model"),
    divided_otherwise: ("ConflictError", "autotp_size"),
    other_order: ("UsageError", "init_device_mesh('cpu', (2, 2), mesh_dim_names=('dp', 'tp'))"),
    mesh_and_config: ("ConflictError", "autotp_size"),
    mesh_of_unknown: ("UsageError", "'cp': 2"),
    after_the_end: ("UsageError", "no engine"),
    unmarked: ("UsageError", "parameter.tensor_model_parallel"),
    marked_without_dimension: ("UsageError", "'blocks.1.o.weight'"),
    marked_otherwise: ("UsageError", "'blocks.0.up.bias'"),
    unit_with_another_dimension: ("UsageError", "get_data_parallel_group()"),
    mesh_of_dtensors: ("ConflictError", "4 ranks"),
    two_dimensions: ("UsageError", "'head.weight'"),
    sequences_without_loader: ("UsageError", "exchange of heads"),
    rows_without_group: ("ConflictError", "tp_size"),
}
"""Class of the error, and the key, name or value that the message has."""


def wrong(number: int) -> tuple[str, str]:
    try:
        list(CASES)[number]()
    except (ShardwiseError, TypeError, ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_wrong_set_ups_say_what_to_do(case: Any) -> None:
    found = run_ranks(wrong, 4, list(CASES).index(case))
    kind, key = CASES[case]
    assert all(name for name, _ in found)
    assert found[0][0] == kind and key in found[0][1], found[0]
