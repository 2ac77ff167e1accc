"""Numeric precision: fp16 with loss scaling, bf16, autocast, and the types of gradients and buffers."""

from __future__ import annotations

from typing import Literal

from shardwise.errors import ConflictError

from .base import At, ConfigSection, Contradictions, DType, Int, Strings, key
from .tables import with_unused_keys


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


@with_unused_keys
class BF16(ConfigSection):
    """`bf16`: bfloat16 parameters with or without fp32 master weights, no loss scaling."""

    enabled: bool = key(False, "Train in bf16.")
    check_grad_overflow: bool = key(
        False,
        "Skip the step when a gradient is infinite or NaN; also in fp32, with enabled false.",
        default_note="true in DeepSpeed since 2026-06, false before",
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

    def contradictions(self, at: At) -> Contradictions:
        """Yield keys that need parameters without master weights."""
        alias = self.bf16_master_weights_and_grads
        if alias and self.master_weights == "fp32" and "master_weights" in self.model_fields_set:
            message = f'is "fp32", but {at("bf16_master_weights_and_grads")} = true means "none"; remove one of them'
            yield "master_weights", message, ConflictError
        if alias or self.master_weights == "none":
            return
        if self.rounding is not None:
            message = (
                f'is "{self.rounding}", but fp32 master weights are not rounded; set {at("master_weights")} to "none", '
                "or remove this key"
            )
            yield "rounding", message, ConflictError
        if self.bf16_optimizer_states:
            message = (
                f'needs {at("bf16_master_weights_and_grads")} to be true, or {at("master_weights")} to be "none"; with '
                "fp32 master weights write `optimizer.params.fp32_optimizer_states` = false"
            )
            yield "bf16_optimizer_states", message, ConflictError


class TorchAutocast(ConfigSection):
    """`torch_autocast`: run forward under torch.autocast."""

    enabled: bool = key(False, "Run the engine's forward under torch.autocast; parameters stay fp32.")
    dtype: DType | None = key(None, "bf16 or fp16; null: bf16. With fp16 the other keys of the fp16 section hold.")
    lower_precision_safe_modules: Strings | None = key(
        None,
        "Dotted names of module classes whose gradients are sent in dtype; null: Linear, Conv1d, Conv2d and Conv3d "
        "of torch.nn. communication_data_type overrides it.",
    )

    def contradictions(self, at: At) -> Contradictions:
        """Yield a type that autocast does not cast to."""
        if self.enabled and self.dtype == "fp32":
            message = 'is "fp32", which autocast does not cast to; write "bf16" or "fp16", or switch autocast off'
            yield "dtype", message, ConflictError


class Float8(ConfigSection):
    """`float8`: matrix products of linear layers in 8 bits, by torchao; parameters keep their dtype."""

    enabled: bool = key(False, "Replace the linear layers of the model by torchao's for training in float8.")
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = key(
        "tensorwise", "Scales of a tensor or of its rows; the last keeps products for gradients of weights in 16 bits."
    )
    filter_fqns: Strings = key([], "Layers whose names contain one of these texts are left as they are.")
    emulate: bool = key(False, "Compute the products in fp32 from rounded values, on devices without float8.")
    all_gather: bool = key(
        False,
        "Gather weights of these layers in 8 bits at stage 3; the layers compute the same. Scales are powers of two "
        "then; the recipe is tensorwise.",
    )

    def contradictions(self, at: At) -> Contradictions:
        """Yield a recipe whose weights cannot be gathered in 8 bits."""
        if self.all_gather and self.recipe != "tensorwise":
            message = f'needs {at("recipe")} "tensorwise": scales of rows are not known before the all-gather'
            yield "all_gather", message, ConflictError


class DataTypes(ConfigSection):
    """`data_types`: types of gradients, parameters and buffers."""

    grad_accum_dtype: DType | None = key(
        None,
        "Type of gradient sums; null: fp32. bf16 halves the bytes of gradients that go to the host or a disk, and of "
        "the sums that stage 0 gathers.",
        default_note="the model's type in DeepSpeed",
    )
    param_dtype: DType | None = key(None, "Must agree with fp16 / bf16.")
    buffer_dtype: DType | None = key(None, "Cast floating-point buffers to this type.")
    keep_in_fp32_modules: Literal["auto"] | Strings = key(
        "auto", "Modules whose buffers stay fp32; auto: those that the model itself names."
    )
