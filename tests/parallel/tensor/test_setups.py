"""Set-ups that cannot work: each ends in an error on every rank that says what, where and what to do."""

from __future__ import annotations

import re
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


CASES: dict[Callable[[], None], str] = {
    sizes: r"tensor_parallel.autotp_size: is 3, but there are 4 ranks.*choose a divisor of 4",
    features: "2 ranks cannot divide the 1 features of blocks.0.q; numbers up to 1 would do",
    unknown: r"layer_specs\[0\].patterns: no parameter of Decoder matches 'no_such_layer'; its matrices are",
    other_plans: r"config tensor_parallel.partition_config.layer_specs: .* on rank 0, .* on rank 1",
    other_inputs: r"ranks \[\d, \d\] have one copy of the model .* their inputs differ.*get_data_parallel_rank",
    divided_otherwise: "autotp_size: is 4, but the arguments of initialize.. give 2",
    other_order: r"tp': 2, 'dp': 2.*lie otherwise.*init_device_mesh\('cpu', \(2, 2\), mesh_dim_names=\('dp', 'tp'\)\)",
    mesh_and_config: "autotp_size: is 4, but the arguments of initialize.. give 2; remove one",
    mesh_of_unknown: r"'cp': 2.*is not supported: it may have one dimension each of pipeline .*, replicate",
    after_the_end: "there is no engine that connects them",
    unmarked: "no parameter of Decoder says that it is a part: set parameter.tensor_model_parallel = True",
    marked_without_dimension: r"'blocks.1.o.weight'.*partition_dim is -1: set parameter.partition_dim",
    marked_otherwise: "have marked other parameters as parts.*'blocks.0.up.bias'",
    unit_with_another_dimension: r"get_data_parallel_group\(\) has ranks \[0\] here.*without further dimensions",
    mesh_of_dtensors: "says that 4 ranks have a copy of the model, and the model is divided over 2",
    two_dimensions: r"'head.weight' is a DTensor with the placements .*Do not call fully_shard",
    sequences_without_loader: "without any exchange of heads",
    rows_without_group: "tp_size is 3, but there are 4 ranks",
}


def wrong(number: int) -> str:
    case = list(CASES)[number]
    try:
        case()
    except ShardwiseError as error:
        return str(error)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"
    return "nothing"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_wrong_set_ups_say_what_to_do(case: Any) -> None:
    found = run_ranks(wrong, 4, list(CASES).index(case))
    assert all(said != "nothing" for said in found)
    assert re.search(CASES[case], found[0], re.DOTALL), found[0]
