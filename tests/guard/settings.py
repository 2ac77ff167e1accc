"""The settings whose bits are stored, and their training through public names only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

import shardwise
from shardwise.parallel import split
from shardwise.parallel.data import complete
from shardwise.registry import part_of
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.parallel.tensor.together import ROWS, RULES, data, decoder, loss_of

STEPS = 3


@dataclass(frozen=True)
class Setting:
    """One way to train the decoder.

    Attributes:
        name: of its row.
        world: number of ranks.
        config: sections of the configuration; those of `zero_optimization` are in `zero`.
        zero: see above.
        experts: ranks over which experts are divided; 0: no experts.
    """

    name: str
    world: int
    config: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)
    experts: int = 0

    @property
    def sequence(self) -> int:
        """Number of ranks that share a sequence."""
        return int(self.config.get("sequence_parallel_size", 1))


_BF16 = {"bf16": {"enabled": True}}
_FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
_PRECISIONS: dict[str, dict[str, Any]] = {"fp32": {}, "bf16": _BF16, "fp16": _FP16}
_TENSOR = {"tensor_parallel": {"autotp_size": 2, "partition_config": RULES}}
_TOKENS = {"tensor_parallel": {**_TENSOR["tensor_parallel"], "sequence_parallel": True}}
_SEQUENCE = {"sequence_parallel_size": 2}
_HOST, _DISK = {"device": "cpu"}, {"device": "nvme", "nvme_path": "a directory is put here"}


def _optimizer(name: str, **options: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": {"lr": 0.01, **options}}}


def _settings() -> Iterable[Setting]:
    for world in (1, 2):
        for precision, section in _PRECISIONS.items():
            for stage in range(4):
                if world == 2 or precision != "fp16":
                    yield Setting(f"stage {stage}, {precision}, {world} ranks", world, section, {"stage": stage})
    three = {"gradient_accumulation_steps": 3}
    for stage in range(4):
        yield Setting(f"stage {stage}, accumulation", 2, {**three, **_BF16}, {"stage": stage})
        yield Setting(f"stage {stage}, 3 ranks", 3, {}, {"stage": stage})
    small = {"reduce_bucket_size": 300, "stage3_prefetch_bucket_size": 0, "overlap_comm": False}
    for stage in (1, 3):
        yield Setting(f"stage {stage}, small buckets", 2, three, {"stage": stage, **small})
    yield Setting("stage 2, offloaded optimizer", 2, {**three, **_BF16}, {"stage": 2, "offload_optimizer": _HOST})
    both = {"offload_optimizer": _HOST, "offload_param": _HOST}
    for world in (1, 2):
        yield Setting(f"stage 3, all offloaded, {world} ranks", world, _BF16, {"stage": 3, **both})
    disk = {"offload_optimizer": _DISK, "offload_param": _DISK}
    yield Setting("stage 3, all on disk", 2, {**three, **_BF16}, {"stage": 3, **disk})
    yield Setting("stage 1, optimizer on disk", 2, {}, {"stage": 1, "offload_optimizer": _DISK})
    for stage, name, options in (
        (0, "SGD", {"momentum": 0.9}),
        (3, "SGD", {"momentum": 0.9, "nesterov": True}),
        (2, "Lion", {}),
        (2, "Adagrad", {}),
        (3, "Lamb", {}),
        (1, "Lamb", {}),
        (3, "Muon", {}),
        (1, "Muon", {}),
        (0, "OneBitAdam", {"freeze_step": 1}),
        (0, "ZeroOneAdam", {"var_freeze_step": 2}),
        (0, "OneBitLamb", {"freeze_step": 1}),
    ):
        yield Setting(f"stage {stage}, {name}", 2, _optimizer(name, **options), {"stage": stage})
    yield Setting("stage 3, MiCS", 4, {}, {"stage": 3, "mics_shard_size": 2})
    yield Setting("stage 2, MiCS", 4, three, {"stage": 2, "mics_shard_size": 2})
    yield Setting("stage 3, hpZ", 4, _BF16, {"stage": 3, "zero_hpz_partition_size": 2})
    yield Setting("stage 3, quantized weights", 2, _BF16, {"stage": 3, "zero_quantized_weights": True})
    yield Setting("stage 3, quantized gradients", 4, _BF16, {"stage": 3, "zero_quantized_gradients": True})
    for stage in (0, 1, 3):
        yield Setting(f"stage {stage}, tensors", 2, _TENSOR, {"stage": stage})
    yield Setting("stage 3, tensors, 4 ranks", 4, {**_TENSOR, **_BF16, **three}, {"stage": 3})
    yield Setting("stage 2, tensors with shared tokens", 4, _TOKENS, {"stage": 2})
    for stage in (1, 3):
        yield Setting(f"stage {stage}, sequences", 2, _SEQUENCE, {"stage": stage})
        yield Setting(f"stage {stage}, experts", 2, {}, {"stage": stage}, experts=2)
    yield Setting("stage 2, tensors and sequences", 4, {**_TENSOR, **_SEQUENCE}, {"stage": 2})
    yield Setting("stage 3, sequences and experts", 4, {**_SEQUENCE, **_BF16}, {"stage": 3}, experts=2)


SETTINGS = {setting.name: setting for setting in _settings()}


def trained(name: str, disk: str) -> list[str]:
    """Train on this rank; return hashes of losses, gradients and parameters."""
    setting = SETTINGS[name]
    losses, gradients, parameters = (hashlib.sha256() for _ in range(3))
    shardwise.init_distributed(verbose=False)
    model = decoder(setting.sequence > 1, setting.experts)
    engine, *_ = shardwise.initialize(model=model, config=_config(setting, disk))
    for step in range(STEPS):
        for micro in range(engine.gradient_accumulation_steps()):
            copy, batch = engine.get_data_parallel_rank(), data(step, micro, engine.dp_world_size)
            rows = {key: value[copy * ROWS : (copy + 1) * ROWS] for key, value in batch.items()}
            loss, tokens = loss_of(engine, split(rows) if setting.sequence > 1 else complete(rows))
            losses.update(_bytes(loss))
            engine.backward(loss, weight=tokens)
            if engine.is_gradient_accumulation_boundary():
                _add(gradients, engine.module, safe_get_full_grad)
            engine.step()
        _add(parameters, engine.module, safe_get_full_fp32_param)
    engine.destroy()
    return [each.hexdigest()[:12] for each in (losses, gradients, parameters)]


def _config(setting: Setting, disk: str) -> dict[str, Any]:
    zero = {
        key: {**value, "nvme_path": disk} if isinstance(value, dict) and "nvme_path" in value else value
        for key, value in setting.zero.items()
    }
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.5,
        **_optimizer("AdamW", weight_decay=0.1),
        **setting.config,
        "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero},
    }


def _add(total: Any, model: torch.nn.Module, get: Any) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = get(parameter)
            total.update((part_of(parameter).name or name).encode())
            total.update(b"none" if value is None else _bytes(value))


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return bytes(flat.view(torch.uint8).numpy())
