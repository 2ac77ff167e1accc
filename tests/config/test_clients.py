"""What clients write in the place of "auto", and what they read, goes through."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.config import resolve
from shardwise.config.integrations import FILLS, READ
from shardwise.config.schema_index import lookup

SENT: dict[str, tuple[Any, ...]] = {
    "train_batch_size": (1, 32),
    "train_micro_batch_size_per_gpu": (1, 8),
    "gradient_accumulation_steps": (1, 4),
    "gradient_clipping": (1.0, 0.0, 0, 0.3, None),
    "optimizer.params.lr": (5e-05, 1, 0, 0.0),
    "optimizer.params.betas": ([0.9, 0.999], (0.9, 0.95)),
    "optimizer.params.eps": (1e-08, 0.0),
    "optimizer.params.weight_decay": (0.0, 0, 0.01),
    "scheduler.params.warmup_min_lr": (0,),
    "scheduler.params.warmup_max_lr": (5e-05, None),
    "scheduler.params.warmup_num_steps": (0, 1, 100),
    "scheduler.params.total_num_steps": (0, 1000),
    "fp16.enabled": (False, True),
    "bf16.enabled": (False, True),
    "zero_optimization.reduce_bucket_size": (589824, 64),
    "zero_optimization.stage3_prefetch_bucket_size": (530841, 57),
    "zero_optimization.stage3_param_persistence_threshold": (7680, 80),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (False, True),
    "zero_optimization.offload_optimizer.device": ("none",),
    "zero_optimization.offload_param.device": ("none",),
    "zero_optimization.offload_optimizer.nvme_path": ("none", None),
    "zero_optimization.offload_param.nvme_path": ("none", None),
}
"""Values that clients really send in the place of "auto"."""


def config_with(path: str, value: Any) -> dict[str, Any]:
    """A configuration of the Trainer's kind in which one value is set."""
    schedule = {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_num_steps": 1, "total_num_steps": 9}}
    source: dict[str, Any] = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "scheduler": schedule,
        "zero_optimization": {"stage": 3},
    }
    place = source
    *above, last = path.split(".")
    for name in above:
        place = place.setdefault(name, {})
    place[last] = value
    if path != "train_batch_size" and path in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        del source["train_batch_size"]
        source.setdefault("train_micro_batch_size_per_gpu", 1)
    return source


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, values in SENT.items() for value in values])
def test_every_value_that_a_client_sends_is_taken(path: str, value: Any) -> None:
    config = resolve(config_with(path, value)).config
    *above, last = path.split(".")
    place: Any = config
    for name in above:
        place = place[name] if isinstance(place, dict) else getattr(place, name)
    found = place.get(last) if isinstance(place, dict) else getattr(place, last)
    assert found == (0.0 if (path, value) == ("gradient_clipping", None) else value)


def test_the_tables_name_keys_that_there_are() -> None:
    assert SENT.keys() == FILLS.keys()
    for path in (*FILLS, *READ):
        section, _, rest = path.partition(".params.")
        assert lookup(f"{section}.params" if rest else path)
