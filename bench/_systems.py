"""The systems that are compared: each gives a function that makes a training step, of the same GPT on the same data.

All use fused AdamW. In 16 bits, DDP and the run without communication compute under autocast on fp32 weights, FSDP2 and
DeepSpeed and shardwise compute on 16-bit copies of fp32 weights. In fp16 all scale the loss dynamically.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Size:
    """Shape of a GPT and of a rank's micro-batch.

    Attributes:
        width, layers, heads, vocabulary: of the model; head and embedding are not tied.
        rows, length: sequences in a micro-batch, and tokens in a sequence.
    """

    width: int
    layers: int
    heads: int
    vocabulary: int
    rows: int
    length: int

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in GPT(self).parameters())


SIZES = {
    "tiny": Size(16, 2, 4, 32, 1, 8),
    "7M": Size(256, 8, 8, 1024, 2, 128),
    "27M": Size(512, 8, 8, 1024, 4, 128),
    "53M": Size(1024, 4, 16, 1024, 4, 128),
    "98M": Size(768, 12, 12, 8192, 1, 64),
    "163M": Size(768, 12, 12, 50304, 8, 1024),
    "400M": Size(1024, 24, 16, 50304, 8, 1024),
    "1.4B": Size(2048, 24, 16, 50304, 8, 1024),
    "13B": Size(5120, 40, 40, 50304, 24, 1024),
}


class Block(nn.Module):
    """A pre-norm transformer block; a head's queries, keys and values lie side by side, so that ranks have heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Mix positions, then features."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT that returns its own loss.

    Args:
        size: its shape.
        recompute: blocks, and the loss row by row, are computed again in the backward pass.
    """

    def __init__(self, size: Size, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.tokens, self.places = nn.Embedding(size.vocabulary, size.width), nn.Embedding(size.length, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, size.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of the ids themselves."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        if not self.recompute:
            for block in self.blocks:
                x = block(x)
            return self.loss(x, ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        rows = [checkpoint(self.loss, x[i : i + 1], ids[i : i + 1], use_reentrant=False) for i in range(len(ids))]
        return torch.stack(rows).mean()

    def loss(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of what the blocks have made of some rows."""
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids.flatten())


@dataclass(frozen=True)
class Case:
    """What is trained, and how.

    Attributes:
        size: of the model and the batch.
        bf16: whether the precision is bf16; fp32 otherwise.
        accumulation: micro-batches a step.
        device: where.
        tensor: ranks that have one copy of the model among them, and the same samples.
        fp16: whether the precision is fp16.
        recompute: activations are recomputed.
    """

    size: Size
    bf16: bool
    accumulation: int = 1
    device: str = "cpu"
    tensor: int = 1
    fp16: bool = False
    recompute: bool = False

    @property
    def half(self) -> torch.dtype | None:
        """In which 16-bit dtype is computed, if in one."""
        return torch.bfloat16 if self.bf16 else torch.float16 if self.fp16 else None

    def batch(self) -> torch.Tensor:
        """Return the rank's micro-batch, the same in every step."""
        copy = dist.get_rank() // self.tensor if dist.is_initialized() else 0
        generator = torch.Generator().manual_seed(1 + copy)
        shape = (self.size.rows, self.size.length)
        return torch.randint(0, self.size.vocabulary, shape, generator=generator).to(self.device)

    def model(self) -> GPT:
        """Return the model, the same on every rank."""
        torch.manual_seed(0)
        if self.device == "cpu":
            return GPT(self.size, self.recompute)
        with torch.device(self.device):
            return GPT(self.size, self.recompute)


class Run:
    """A system with its model, in training.

    Attributes:
        ids: the tokens of every micro-batch; may be replaced between steps.
        accountant, ledger: what counts the system's tensor bytes and its collectives, where it does that.
    """

    accountant: Any = None
    ledger: Any = None

    def __init__(self, case: Case) -> None:
        self.case = case
        self.ids = case.batch()

    def loss(self) -> torch.Tensor:
        """Run the model forward."""
        raise NotImplementedError

    def backward(self, loss: torch.Tensor) -> None:
        """Run the model backward."""
        raise NotImplementedError

    def passes(self) -> None:
        """Make the forward and backward passes of a step."""
        raise NotImplementedError

    def update(self) -> None:
        """Apply the gradients."""
        raise NotImplementedError

    def step(self) -> None:
        """Make one optimizer step of the case's accumulation."""
        self.passes()
        self.update()

    def evaluate(self) -> None:
        """Run the model forward without gradients."""
        with torch.no_grad():
            self.loss()

    def finish(self) -> None:
        """Wait for what the last step has left under way."""

    def close(self) -> None:
        """Free what it holds."""


class PlainRun(Run):
    """A module that behaves like a plain one; micro-batches but the last run under the given context."""

    def __init__(
        self, case: Case, model: nn.Module, first_micro_batches: Callable[[], Any] = nullcontext, autocast: bool = True
    ) -> None:
        super().__init__(case)
        self.model, self.first_micro_batches = model, first_micro_batches
        self.autocast = case.half if autocast else None
        self.optimizer = _adamw(model.parameters())
        self.scaler = torch.amp.GradScaler(case.device, enabled=case.fp16)

    def loss(self) -> torch.Tensor:
        """Run the model forward."""
        with torch.autocast(self.case.device, dtype=self.autocast, enabled=self.autocast is not None):
            return self.model(self.ids)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the model backward."""
        loss.backward()

    def passes(self) -> None:
        """Make the forward and backward passes of a step."""
        parts = self.case.accumulation
        with self.first_micro_batches() if parts > 1 else nullcontext():
            for _ in range(parts - 1):
                self.scaler.scale(self.loss() / parts).backward()
        self.scaler.scale(self.loss() / parts).backward()

    def update(self) -> None:
        """Apply the gradients."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


class EngineRun(Run):
    """An engine with the methods of DeepSpeed's."""

    def __init__(self, case: Case, engine: Any) -> None:
        super().__init__(case)
        self.engine = engine
        self.accountant, self.ledger = getattr(engine, "accountant", None), getattr(engine, "ledger", None)

    def loss(self) -> torch.Tensor:
        """Run the model forward."""
        return self.engine(self.ids)

    def backward(self, loss: torch.Tensor) -> None:
        """Run the model backward."""
        self.engine.backward(loss)

    def passes(self) -> None:
        """Make the forward and backward passes of a step, with the calls of `step` that belong to them."""
        for _ in range(self.case.accumulation - 1):
            self.engine.backward(self.loss())
            self.engine.step()
        self.engine.backward(self.loss())

    def update(self) -> None:
        """Apply the gradients."""
        self.engine.step()

    def finish(self) -> None:
        """Wait for what the last step has left under way."""
        if self.ledger is not None:
            self.engine.sharded.finish_gathers()

    def close(self) -> None:
        """Free what it holds."""
        self.engine.destroy()


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:  # DTensors of different meshes cannot be stepped together
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-4, weight_decay=0.0, fused=True)


def alone(case: Case) -> Run:
    """No communication: every rank trains its own copy."""
    return PlainRun(case, case.model())


def ddp(case: Case) -> Run:
    """DistributedDataParallel; gradients are reduced in the last micro-batch."""
    model = nn.parallel.DistributedDataParallel(case.model())
    return PlainRun(case, model, model.no_sync)


def fsdp2(case: Case, reshard: bool, group: int = 0) -> Run:
    """fully_shard of every block and of the rest, over groups of so many ranks (0: over all)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, world = case.model(), dist.get_world_size()
    kind = case.half
    grid, names = ((world // group, group), ("replicate", "shard")) if group else ((world,), ("shard",))
    options = {
        "mesh": init_device_mesh(case.device, grid, mesh_dim_names=names),
        "mp_policy": MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32 if kind else None),
        "reshard_after_forward": reshard,
    }
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)

    @contextmanager
    def within_groups() -> Iterator[None]:
        # Micro-batches but the last are summed within the group, as its documentation advises.
        model.set_requires_all_reduce(False)
        yield
        model.set_requires_all_reduce(True)

    return PlainRun(case, model, within_groups if group else nullcontext, autocast=False)


def _config(case: Case, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": case.size.rows,
        "gradient_accumulation_steps": case.accumulation,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": case.bf16},
        "fp16": {"enabled": case.fp16},
    }


def deepspeed(case: Case, stage: int) -> Run:
    """DeepSpeed with torch's fused AdamW and its own default settings."""
    import deepspeed as peer

    model = case.model()
    config = _config(case, stage) | {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    engine, *_ = peer.initialize(model=model, optimizer=_adamw(model.parameters()), config=config)
    return EngineRun(case, engine)


COLUMNS, ROWS = ("qkv", "up"), ("out", "down")
"""Layers of a block that ranks with one copy of the model divide by output and by input features."""


def torch_tensor(case: Case) -> Run:
    """torch's tensor parallelism, and FSDP2 of the ranks with the same part if there are several."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, copies = case.model(), dist.get_world_size() // case.tensor
    mesh = init_device_mesh(case.device, (copies, case.tensor), mesh_dim_names=("data", "tensor"))
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    parallelize_module(model, mesh["tensor"], {"head": ColwiseParallel(output_layouts=Replicate())})
    if copies > 1:
        kind = torch.bfloat16 if case.bf16 else None
        policy = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32 if case.bf16 else None)
        for block in model.blocks:
            fully_shard(block, mesh=mesh["data"], mp_policy=policy)
        fully_shard(model, mesh=mesh["data"], mp_policy=policy)
    return PlainRun(case, model, autocast=copies == 1)


def shardwise(case: Case, stage: int, init: bool = False, keys: dict[str, Any] | None = None, **zero: Any) -> Run:
    """shardwise with its default settings but those given.

    Args:
        case: what is trained.
        stage: of ZeRO.
        init: the model is built under zero.Init.
        keys: of the configuration.
        zero: keys of its section `zero_optimization`.
    """
    import shardwise as ours

    adamw = {"type": "AdamW", "params": {"lr": 1e-4}}
    config = _config(case, stage) | {"optimizer": adamw, "steps_per_print": 0}
    config["zero_optimization"] |= zero
    if keys is not None:
        config |= keys
    if case.tensor > 1:
        specs = [
            {"patterns": [rf"\.({'|'.join(COLUMNS)})\.weight$"], "partition_type": "column"},
            {"patterns": [rf"\.({'|'.join(ROWS)})\.weight$"], "partition_type": "row"},
            {"patterns": [r"^head\.weight$"], "partition_type": "column", "gather_output": True},
        ]
        config["tensor_parallel"] = {"autotp_size": case.tensor, "partition_config": {"layer_specs": specs}}
    with ours.zero.Init(config_dict_or_path=config) if init else nullcontext():
        model = case.model()
    engine, *_ = ours.initialize(model=model, config=config)
    del model
    return EngineRun(case, engine)


SYSTEMS: dict[str, Callable[[Case], Run]] = {
    "alone": alone,
    "DDP": ddp,
    "FSDP2": lambda case: fsdp2(case, reshard=True),
    "FSDP2 no reshard": lambda case: fsdp2(case, reshard=False),
    **{f"DeepSpeed {stage}": lambda case, stage=stage: deepspeed(case, stage) for stage in range(4)},
    **{f"shardwise {stage}": lambda case, stage=stage: shardwise(case, stage) for stage in range(4)},
    "shardwise 3 Init": lambda case: shardwise(case, 3, init=True),
}


def forced(case: Case, stage: int) -> Run:
    """shardwise on one rank that divides state, gathers, releases and reduces as several do, over itself."""
    from shardwise.zero.units.plan import Plan

    with mock.patch.object(Plan, "of", functools.partial(Plan.of, forced=True)):
        # By default everything stays gathered at stage 3: on one rank nothing is saved by its release.
        return shardwise(case, stage, stage3_param_persistence_threshold=0)


ONE: dict[str, Callable[[Case], Run]] = {
    "alone": SYSTEMS["alone"],
    "shardwise": SYSTEMS["shardwise 0"],
    "DDP": SYSTEMS["DDP"],
    "FSDP2": SYSTEMS["FSDP2"],
    "FSDP2 no reshard": SYSTEMS["FSDP2 no reshard"],
    **{f"shardwise {stage} forced": lambda case, stage=stage: forced(case, stage) for stage in range(4)},
    **{f"DeepSpeed {stage}": SYSTEMS[f"DeepSpeed {stage}"] for stage in range(4)},
}
"""Systems on one rank. Without being forced, shardwise divides nothing there, whatever the stage."""


TENSOR: dict[str, tuple[int, Callable[[Case], Run]]] = {
    "FSDP2 + TP 2": (2, torch_tensor),
    "shardwise 1 + TP 2": (2, lambda case: shardwise(case, 1)),
    "shardwise 3 + TP 2": (2, lambda case: shardwise(case, 3)),
    "TP 4": (4, torch_tensor),
    "shardwise 1 + TP 4": (4, lambda case: shardwise(case, 1)),
}
"""Systems that divide matrices over ranks, and over how many: torch's own first, then what is compared with it."""


GROUP = 2
GROUPED: dict[str, Callable[[Case], Run]] = {
    "FSDP2": SYSTEMS["FSDP2"],
    "shardwise 3": SYSTEMS["shardwise 3"],
    "FSDP2 groups": lambda case: fsdp2(case, reshard=True, group=GROUP),
    "shardwise 3 groups": lambda case: shardwise(case, 3, mics_shard_size=GROUP),
    "shardwise 3 groups, optimizer over all": lambda case: shardwise(
        case, 3, mics_shard_size=GROUP, optimizer_over_replicas=True
    ),
    "shardwise 2 groups, optimizer over all": lambda case: shardwise(
        case, 2, mics_shard_size=GROUP, optimizer_over_replicas=True
    ),
}
"""Systems that divide state over groups of `GROUP` neighbouring ranks, and the same without groups."""


AIO = {"block_size": 2 << 20, "queue_depth": 8, "intra_op_parallelism": 1}
SUB_GROUP = 10_000_000
"""Elements of DeepSpeed's optimizer on a disk that are stepped together; by default it would be the whole model."""
BUFFERS = {"optimizer": 12, "parameters": 48}
"""Of DeepSpeed for what is on a disk: with 5 and 8 it ends in assertions ("Not enough buffers")."""
FEW_LIVE = {
    "stage3_max_live_parameters": 30_000_000,
    "stage3_max_reuse_distance": 0,
    "stage3_prefetch_bucket_size": 10_000_000,
}
"""Of DeepSpeed for parameters on a disk: by default it would keep those of a model of this size, and lack buffers."""


def _place(device: str, directory: str) -> dict[str, Any]:
    return {"device": device, "nvme_path": directory} if device == "nvme" else {"device": device}


def offloaded(case: Case, stage: int, directory: str, optimizer: str, parameters: str = "none") -> Run:
    """shardwise with its default settings, and state elsewhere.

    Args:
        case: what is trained.
        stage: of ZeRO.
        directory: on a disk.
        optimizer, parameters: where they are: "none", "cpu" or "nvme".
    """
    keys: dict[str, Any] = {"offload_optimizer": _place(optimizer, directory)}
    if parameters != "none":
        keys["offload_param"] = _place(parameters, directory)
    if parameters == "nvme":
        keys["offload_param"]["max_in_cpu"] = 0
    return shardwise(case, stage, **keys)


def offloaded_peer(case: Case, stage: int, directory: str, optimizer: str, parameters: str = "none") -> Run:
    """DeepSpeed with its own optimizer for the host and its default settings, and state elsewhere; see `offloaded`.

    On a disk it reads and writes while it steps, and has buffers for the largest tensors.
    """
    import deepspeed as peer

    model = case.model()
    largest = max(parameter.numel() for parameter in model.parameters())
    disk = (
        {"pipeline_read": True, "pipeline_write": True, "buffer_count": BUFFERS["optimizer"]}
        if optimizer == "nvme"
        else {}
    )
    zero: dict[str, Any] = {"offload_optimizer": _place(optimizer, directory) | disk}
    if optimizer == "nvme":
        zero["sub_group_size"] = SUB_GROUP
    if parameters != "none":
        zero["offload_param"] = _place(parameters, directory)
    if parameters == "nvme":
        zero["offload_param"] |= {"buffer_count": BUFFERS["parameters"], "buffer_size": largest, "max_in_cpu": 0}
        zero |= FEW_LIVE
    config = _config(case, stage) | {"steps_per_print": 10**9, "aio": AIO}
    config["zero_optimization"] |= zero
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.0}}
    engine, *_ = peer.initialize(model=model, config=config)
    return EngineRun(case, engine)


OFFLOADED: dict[str, dict[str, Callable[[Case, str], Run]]] = {
    "host": {
        "shardwise 3": lambda case, directory: shardwise(case, 3),
        "shardwise 2, optimizer on host": lambda case, directory: offloaded(case, 2, directory, "cpu"),
        "shardwise 3, optimizer on host": lambda case, directory: offloaded(case, 3, directory, "cpu"),
        "shardwise 3, all on host": lambda case, directory: offloaded(case, 3, directory, "cpu", "cpu"),
        "DeepSpeed 2, optimizer on host": lambda case, directory: offloaded_peer(case, 2, directory, "cpu"),
        "DeepSpeed 3, optimizer on host": lambda case, directory: offloaded_peer(case, 3, directory, "cpu"),
        "DeepSpeed 3, all on host": lambda case, directory: offloaded_peer(case, 3, directory, "cpu", "cpu"),
    },
    "disk": {
        "shardwise 3": lambda case, directory: shardwise(case, 3),
        "shardwise 3, optimizer on disk": lambda case, directory: offloaded(case, 3, directory, "nvme"),
        "shardwise 3, all on disk": lambda case, directory: offloaded(case, 3, directory, "nvme", "nvme"),
        "DeepSpeed 3, optimizer on disk": lambda case, directory: offloaded_peer(case, 3, directory, "nvme"),
        "DeepSpeed 3, all on disk": lambda case, directory: offloaded_peer(case, 3, directory, "nvme", "nvme"),
    },
}
"""Systems with state elsewhere, by what takes turns; they are given a directory on a disk."""


def available() -> list[str]:
    """Return the names of the systems that are installed."""
    found = importlib.util.find_spec("deepspeed") is not None
    return [name for name in SYSTEMS if found or not name.startswith("DeepSpeed")]
