"""Numeric precision: fp16 with loss scaling, bf16, autocast, and the types of gradients and buffers."""

from __future__ import annotations

from typing import Literal

from .base import ConfigSection, DType, Int, Strings, key


class FP16(ConfigSection):
    """`fp16`: half-precision parameters, fp32 master weights, loss scaling."""

    enabled: bool = key(False, "Train in fp16.")
    auto_cast: bool = key(False, "Cast floating-point inputs of forward to fp16.")
    loss_scale: float = key(0.0, "Static loss scale; 0 means dynamic.", ge=0)
    initial_scale_power: Int = key(16, "The dynamic loss scale starts at 2 to this power.", ge=0)
    loss_scale_window: Int = key(1000, "Steps without overflow before the dynamic loss scale doubles.", gt=0)
    hysteresis: Int = key(2, "Overflows tolerated before the dynamic loss scale is halved.", ge=1)
    consecutive_hysteresis: bool = key(False, "Refill the tolerance after each step without overflow.")
    min_loss_scale: float = key(1.0, "Smallest dynamic loss scale; an overflow there ends the run.", gt=0)
    fp16_master_weights_and_grads: bool = key(
        False,
        "The optimizer steps the fp16 parameters themselves, rounded to nearest, and gradients are accumulated in "
        "fp16 unless data_types.grad_accum_dtype says otherwise.",
    )


class BF16(ConfigSection):
    """`bf16`: bfloat16 parameters with or without fp32 master weights, no loss scaling."""

    enabled: bool = key(False, "Train in bf16.")
    check_grad_overflow: bool = key(
        False,
        "Skip the step when a gradient is infinite or NaN; also in fp32, with enabled false.",
        default_note="true in DeepSpeed since 2026-06, false before",
    )
    immediate_grad_update: bool = key(
        False,
        "Add gradients to the fp32 accumulator as soon as they are computed.",
        no_effect="gradients are always accumulated as they are reduced",
    )
    master_weights: Literal["fp32", "none"] = key(
        "fp32", "What the optimizer steps: fp32 copies, or (none) the bf16 parameters themselves."
    )
    rounding: Literal["nearest", "stochastic", "kahan"] | None = key(
        None,
        "Rounding of updated parameters without master weights: to nearest, at random without bias, or with the "
        "rest kept in 2 more bytes. null: stochastic; nearest under bf16_master_weights_and_grads.",
    )
    bf16_master_weights_and_grads: bool = key(
        False,
        "master_weights none with rounding nearest; gradients are accumulated in bf16 unless "
        "data_types.grad_accum_dtype says otherwise.",
    )
    bf16_optimizer_states: bool = key(False, "Keep optimizer state in bf16; needs parameters without master weights.")


class TorchAutocast(ConfigSection):
    """`torch_autocast`: run forward under torch.autocast."""

    enabled: bool = key(False, "Run the engine's forward under torch.autocast; parameters stay fp32.")
    dtype: DType | None = key(
        None,
        "bf16 or fp16; null: bf16. With fp16 the other keys of the fp16 section hold.",
    )
    lower_precision_safe_modules: Strings | None = key(
        None,
        "Dotted names of module classes whose gradients are sent in dtype; null: Linear, Conv1d, Conv2d and Conv3d "
        "of torch.nn. communication_data_type overrides it.",
    )


class DataTypes(ConfigSection):
    """`data_types`: types of gradients, parameters and buffers."""

    grad_accum_dtype: DType | None = key(
        None,
        "Type of gradient sums; null: fp32.",
        default_note="the model's type in DeepSpeed",
    )
    param_dtype: DType | None = key(None, "Must agree with fp16 / bf16.")
    buffer_dtype: DType | None = key(None, "Cast floating-point buffers to this type.")
    keep_in_fp32_modules: Literal["auto"] | Strings = key(
        "auto", "Modules whose buffers stay fp32; auto: those that the model itself names."
    )
