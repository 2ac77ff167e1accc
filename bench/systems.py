"""The systems that are compared: each gives a function that makes a training step, of the same GPT on the same data.

All use fused AdamW. In 16 bits, DDP and the run without communication compute under autocast on fp32 weights, FSDP2 and
DeepSpeed and shardwise compute on 16-bit copies of fp32 weights. In fp16 all scale the loss dynamically.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import trimmed
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

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs of a trained token, 6 N + 12 L d T (Chowdhery et al., 2022, appendix B).

        N counts the parameters of blocks, norm and head but not the embeddings; the causal half is not taken off.
        """
        embeddings = (self.vocabulary + self.length) * self.width
        return 6 * (self.parameters - embeddings) + 12 * self.layers * self.width * self.length


SIZES = {
    "tiny": Size(16, 2, 4, 32, 1, 8),
    "7M": Size(256, 8, 8, 1024, 2, 128),
    "27M": Size(512, 8, 8, 1024, 4, 128),
    "53M": Size(1024, 4, 16, 1024, 4, 128),
    "98M": Size(768, 12, 12, 8192, 1, 64),
    "163M": Size(768, 12, 12, 50304, 8, 1024),
    "400M": Size(1024, 24, 16, 50304, 8, 1024),
    "1.4B": Size(2048, 24, 16, 50304, 8, 1024),
    "7B": Size(4096, 32, 32, 50304, 8, 1024),
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
        x = self.hidden(ids)
        if not self.recompute:
            return self.loss(x, ids)
        rows = [checkpoint(self.loss, x[i : i + 1], ids[i : i + 1], use_reentrant=False) for i in range(len(ids))]
        return torch.stack(rows).mean()

    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Return what the blocks make of ids."""
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x

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
        directory: on a disk, for state that lives there.
        build: makes another model that returns its own loss.
    """

    size: Size
    bf16: bool
    accumulation: int = 1
    device: str = "cpu"
    tensor: int = 1
    fp16: bool = False
    recompute: bool = False
    directory: str = ""
    build: Callable[[], Any] | None = None

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

    def model(self) -> Any:
        """Return the model, the same on every rank."""
        torch.manual_seed(0)
        with torch.device(self.device) if self.device != "cpu" else nullcontext():
            return self.build() if self.build is not None else GPT(self.size, self.recompute)


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


def config_of(rows: int, lr: float = 1e-4, **sections: Any) -> dict[str, Any]:
    """Return a configuration: micro-batches of so many rows, AdamW, and further sections."""
    optimizer = {"type": "AdamW", "params": {"lr": lr}}
    return {"train_micro_batch_size_per_gpu": rows, "optimizer": optimizer, **sections}


def alone(case: Case) -> Run:
    """No communication: every rank trains its own copy."""
    return PlainRun(case, case.model())


def ddp(case: Case) -> Run:
    """DistributedDataParallel; gradients are reduced in the last micro-batch."""
    model = nn.parallel.DistributedDataParallel(case.model())
    return PlainRun(case, model, model.no_sync)


def _fully_shard(case: Case, model: Any, mesh: Any, reshard: bool | None = None) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=case.half, reduce_dtype=torch.float32 if case.half else None)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)


def fsdp2(case: Case, reshard: bool, group: int = 0) -> Run:
    """fully_shard of every block and of the rest, over groups of so many ranks (0: over all)."""
    from torch.distributed.device_mesh import init_device_mesh

    model, world = case.model(), dist.get_world_size()
    grid, names = ((world // group, group), ("replicate", "shard")) if group else ((world,), ("shard",))
    _fully_shard(case, model, init_device_mesh(case.device, grid, mesh_dim_names=names), reshard)

    @contextmanager
    def within_groups() -> Iterator[None]:
        # Micro-batches but the last are summed within the group, as its documentation advises.
        model.set_requires_all_reduce(False)
        yield
        model.set_requires_all_reduce(True)

    return PlainRun(case, model, within_groups if group else nullcontext, autocast=False)


def _config(case: Case, stage: int, **zero: Any) -> dict[str, Any]:
    return config_of(
        case.size.rows,
        gradient_accumulation_steps=case.accumulation,
        zero_optimization={"stage": stage, **zero},
        bf16={"enabled": case.bf16},
        fp16={"enabled": case.fp16},
    )


def deepspeed(case: Case, stage: int) -> Run:
    """DeepSpeed with torch's fused AdamW and its own default settings."""
    import deepspeed as peer

    model = case.model()
    config = _config(case, stage) | {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    del config["optimizer"]
    engine, *_ = peer.initialize(model=model, optimizer=_adamw(model.parameters()), config=config)
    return EngineRun(case, engine)


COLUMNS, ROWS = ("qkv", "up"), ("out", "down")
"""Layers of a block that ranks with one copy of the model divide by output and by input features."""
LAYER_SPECS = [
    {"patterns": [rf"\.({'|'.join(COLUMNS)})\.weight$"], "partition_type": "column"},
    {"patterns": [rf"\.({'|'.join(ROWS)})\.weight$"], "partition_type": "row"},
    {"patterns": [r"^head\.weight$"], "partition_type": "column", "gather_output": True},
]
"""The same for shardwise."""


def torch_tensor(case: Case) -> Run:
    """torch's tensor parallelism, and FSDP2 of the ranks with the same part if there are several."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, copies = case.model(), dist.get_world_size() // case.tensor
    mesh = init_device_mesh(case.device, (copies, case.tensor), mesh_dim_names=("data", "tensor"))
    plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
    for block in model.blocks:
        parallelize_module(block, mesh["tensor"], plan)
    parallelize_module(model, mesh["tensor"], {"head": ColwiseParallel(output_layouts=Replicate())})
    if copies > 1:
        _fully_shard(case, model, mesh["data"])
    return PlainRun(case, model, autocast=copies == 1)


def engine_config(case: Case, stage: int, keys: dict[str, Any] | None = None, **zero: Any) -> dict[str, Any]:
    """Return shardwise's configuration; arguments as of `shardwise`."""
    config = _config(case, stage, **zero) | {"steps_per_print": 0} | (keys or {})
    if case.tensor > 1:
        config["tensor_parallel"] = {"autotp_size": case.tensor, "partition_config": {"layer_specs": LAYER_SPECS}}
    return config


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

    config = engine_config(case, stage, keys, **zero)
    with ours.zero.Init(config_dict_or_path=config) if init else nullcontext():
        model = case.model()
    engine, *_ = ours.initialize(model=model, config=config)
    del model
    return EngineRun(case, engine)


def forced(case: Case, stage: int) -> Run:
    """shardwise on one rank that divides state, gathers, releases and reduces as several do, over itself."""
    from shardwise.zero.units.plan import Plan

    with mock.patch.object(Plan, "of", functools.partial(Plan.of, forced=True)):
        # By default everything stays gathered at stage 3: on one rank nothing is saved by its release.
        return shardwise(case, stage, stage3_param_persistence_threshold=0)


def ddp_of_imagined_ranks(case: Case) -> Run:
    """DDP that does not ask the imagined ranks' sums for a result, which they have not."""

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses the annotations of `typing`
        buffer = bucket.buffer()
        dist.all_reduce(buffer, async_op=True).wait()
        done = torch.futures.Future(devices=[buffer.device] if case.device == "cuda" else None)
        done.set_result(buffer)
        return done

    run = ddp(case)
    run.model.register_comm_hook(None, reduce)
    return run


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


def _place(device: str, case: Case) -> dict[str, Any]:
    return {"device": device, "nvme_path": case.directory} if device == "nvme" else {"device": device}


def offloaded(case: Case, stage: int, optimizer: str, parameters: str = "none") -> Run:
    """shardwise with its default settings, and state elsewhere: "none", "cpu" or "nvme"."""
    keys: dict[str, Any] = {"offload_optimizer": _place(optimizer, case)}
    if parameters != "none":
        keys["offload_param"] = _place(parameters, case)
    if parameters == "nvme":
        keys["offload_param"]["max_in_cpu"] = 0
    return shardwise(case, stage, **keys)


def offloaded_peer(case: Case, stage: int, optimizer: str, parameters: str = "none") -> Run:
    """DeepSpeed with its own optimizer for the host and its default settings, and state elsewhere; see `offloaded`.

    On a disk it reads and writes while it steps, and has buffers for the largest tensors.
    """
    import deepspeed as peer

    model = case.model()
    zero: dict[str, Any] = {"offload_optimizer": _place(optimizer, case)}
    if optimizer == "nvme":
        zero["offload_optimizer"] |= {"pipeline_read": True, "pipeline_write": True}
        zero["offload_optimizer"]["buffer_count"] = BUFFERS["optimizer"]
        zero["sub_group_size"] = SUB_GROUP
    if parameters != "none":
        zero["offload_param"] = _place(parameters, case)
    if parameters == "nvme":
        largest = max(parameter.numel() for parameter in model.parameters())
        zero["offload_param"] |= {"buffer_count": BUFFERS["parameters"], "buffer_size": largest, "max_in_cpu": 0}
        zero |= FEW_LIVE
    config = _config(case, stage, **zero) | {"steps_per_print": 10**9, "aio": AIO}
    config["optimizer"]["params"]["weight_decay"] = 0.0
    engine, *_ = peer.initialize(model=model, config=config)
    return EngineRun(case, engine)


def in_directory(zero: dict[str, Any], directory: str) -> dict[str, Any]:
    """Return keys of `zero_optimization` with a directory as each `nvme_path`."""
    return {
        name: {**place, "nvme_path": directory} if isinstance(place, dict) and "nvme_path" in place else place
        for name, place in zero.items()
    }


def loaded(make: Callable[[Case], Run], case: Case) -> int:
    """Load all code of a system by training a model of a few kilobytes; return the resident size after it."""
    small = make(replace(case, size=SIZES["tiny"]))
    for _ in range(2):
        small.step()
    small.evaluate()
    small.finish()
    small.close()
    del small
    return trimmed()


# -- what is compared --------------------------------------------------------------------------------------------------

Make = Callable[[Case], Run]
GROUP = 2
"""Neighbouring ranks of a group of the set "groups"."""


def _stages(make: Callable[..., Run], stages: Iterable[int] = range(4), **options: Any) -> dict[int, Make]:
    return {stage: functools.partial(make, stage=stage, **options) for stage in stages}


ZERO: dict[str, Make] = {
    "alone": alone,
    "DDP": ddp,
    "FSDP2": functools.partial(fsdp2, reshard=True),
    "FSDP2 no reshard": functools.partial(fsdp2, reshard=False),
    **{f"DeepSpeed {stage}": make for stage, make in _stages(deepspeed).items()},
    **{f"shardwise {stage}": make for stage, make in _stages(shardwise).items()},
    "shardwise 3 Init": functools.partial(shardwise, stage=3, init=True),
}


def _tensor(make: Make, size: int) -> Make:
    return lambda case: make(replace(case, tensor=size))


def _offloaded(kind: str, name: str) -> dict[str, Make]:
    both = {"shardwise": offloaded, "DeepSpeed": offloaded_peer}
    every = (("2, optimizer", 2, False), ("3, optimizer", 3, False), ("3, all", 3, True))
    return {
        f"{system} {what} on {name}": functools.partial(
            make, stage=stage, optimizer=kind, **({"parameters": kind} if whole else {})
        )
        for system, make in both.items()
        for what, stage, whole in every
        if kind == "cpu" or stage == 3
    }


SETS: dict[str, dict[str, Make]] = {
    "zero": ZERO,
    # On one rank. Without being forced, shardwise divides nothing there, whatever the stage.
    "one": {
        "alone": alone,
        "shardwise": ZERO["shardwise 0"],
        **{name: ZERO[name] for name in ("DDP", "FSDP2", "FSDP2 no reshard")},
        **{f"shardwise {stage} forced": make for stage, make in _stages(forced).items()},
        **{f"DeepSpeed {stage}": ZERO[f"DeepSpeed {stage}"] for stage in range(4)},
    },
    "imagined": {
        **{name: ZERO[name] for name in ("alone", "DDP", "FSDP2", "FSDP2 no reshard")},
        "DDP": ddp_of_imagined_ranks,
        **{f"shardwise {stage}": ZERO[f"shardwise {stage}"] for stage in range(4)},
    },
    # State divided over groups of neighbouring ranks, and the same without groups.
    "groups": {
        "FSDP2": ZERO["FSDP2"],
        "shardwise 3": ZERO["shardwise 3"],
        "FSDP2 groups": functools.partial(fsdp2, reshard=True, group=GROUP),
        "shardwise 3 groups": functools.partial(shardwise, stage=3, mics_shard_size=GROUP),
        **{
            f"shardwise {stage} groups, optimizer over all": make
            for stage, make in _stages(shardwise, (3, 2), mics_shard_size=GROUP, optimizer_over_replicas=True).items()
        },
    },
    # Matrices divided over 2 or 4 ranks: torch's own first, then what is compared with it.
    "tensor": {
        "FSDP2 + TP 2": _tensor(torch_tensor, 2),
        "shardwise 1 + TP 2": _tensor(ZERO["shardwise 1"], 2),
        "shardwise 3 + TP 2": _tensor(ZERO["shardwise 3"], 2),
        "TP 4": _tensor(torch_tensor, 4),
        "shardwise 1 + TP 4": _tensor(ZERO["shardwise 1"], 4),
    },
    "host": {"shardwise 3": ZERO["shardwise 3"], **_offloaded("cpu", "host")},
    "disk": {"shardwise 3": ZERO["shardwise 3"], **_offloaded("nvme", "disk")},
}


BASES = {"zero": ("DDP", "alone"), "groups": ("FSDP2 groups",), "host": ("shardwise 3",), "disk": ("shardwise 3",)}
"""Systems of a set that the others' times are divided by: the first that takes part. Default: that without ranks."""


def base_of(kind: str, name: str, names: Iterable[str]) -> str:
    """Return the system of a set that the time of one is divided by."""
    there = list(names)
    wanted = ("TP 4" if name.endswith("TP 4") else "FSDP2 + TP 2",) if kind == "tensor" else BASES.get(kind, ("alone",))
    return next((other for other in wanted if other in there), there[0])


def installed(names: Iterable[str]) -> list[str]:
    """Return the systems whose packages are installed."""
    found = importlib.util.find_spec("deepspeed") is not None
    return [name for name in names if found or not name.startswith("DeepSpeed")]
