"""Models of transformers as pipelines: settings of their training, whose loss is that of the model."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.families import WORDS, build
from tests.pipeline.training import Setting

BLOCKS = 6
MORE: dict[str, dict[str, Any]] = {"t5": {"num_layers": 3, "num_decoder_layers": 3}}


def model_of(family: str) -> Any:
    """Return a model with equal weights in each call."""
    return build(family, **MORE.get(family, {"num_hidden_layers": BLOCKS}))


def with_lora(family: str) -> Any:
    """Return a model of which adapters are trained only."""
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    return peft.inject_adapter_in_model(config, build(family))


def called_with_inputs(model: Any) -> nn.Module:
    """Have a model called with a dictionary, as a pipeline is."""
    forward = model.forward
    model.forward = lambda inputs: forward(**inputs)
    return model  # type: ignore[no-any-return]


def batch(step: int, number: int, place: int, size: int) -> tuple[dict[str, torch.Tensor], None]:
    """Return a micro-batch in which one row is padded; it is that of `size` ranks."""
    copy = place // size if dist.is_initialized() else place
    generator = torch.Generator().manual_seed(10000 * step + 10 * number + copy)
    ids = torch.randint(2, WORDS, (2, 6), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, 4:], labels[0, 4:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, None


def own_loss(output: Any, labels: None) -> torch.Tensor:
    loss: torch.Tensor = output.loss
    return loss


def arguments(setting: Setting, make: Any, family: str) -> dict[str, Any]:
    return {"model": make(family)}


def whole(setting: Setting, make: Any, family: str) -> nn.Module:
    return called_with_inputs(make(family))


def setting_of(
    family: str, stages: int, schedule: str = "1f1b", zero: int = 0, make: Any = model_of, **how: Any
) -> Setting:
    """Return the setting of a family; its batches are for tensor-parallel groups of a size of the configuration."""
    size = how.get("tensor_parallel", {}).get("autotp_size", 1)
    return Setting(
        stages,
        schedule,
        zero,
        micro_batches=2,
        config={"pipeline": {"stages": stages}, **how},
        loss=own_loss,
        batches=partial(batch, size=size),
        given=partial(arguments, make=make, family=family),
        whole=partial(whole, make=make, family=family),
    )
