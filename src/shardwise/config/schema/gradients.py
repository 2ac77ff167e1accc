"""Gradient compression: the section, and the parameters of each `compression.type`."""

from __future__ import annotations

from typing import Any

from .base import Arguments, ConfigSection, Int, key

_START = "First steps, reduced exactly."


class PowerSGDOptions(Arguments):
    """`compression.params` of powerSGD (Vogels et al. 2019), with the names of torch's DDP hook."""

    matrix_approximation_rank: Int = key(1, "Rank of the approximation of each matrix.", ge=1)
    start_compressing_after_step: Int = key(1000, _START, names=("start_powerSGD_iter",), ge=0)
    use_error_feedback: bool = key(True, "Add what has not been sent to the next gradient.")
    warm_start: bool = key(True, "Start from the factors of the last step; false: from random ones.")
    orthogonalization_epsilon: float = key(
        0.0, "0: orthogonalize by QR; above: by Gram-Schmidt, with this added to the norms.", ge=0
    )
    min_compression_rate: float = key(2.0, "Send a matrix exactly if its factors are not so many times smaller.", gt=0)
    random_seed: Int = key(0, "Seed of the first factors.", ge=0)


class TopKOptions(Arguments):
    """`compression.params` of topk (Stich et al. 2018): the largest entries, with error feedback."""

    ratio: float = key(0.01, "Part of the gradient's entries that is sent.", gt=0, le=1)
    start_compressing_after_step: Int = key(0, _START, ge=0)
    use_error_feedback: bool = key(True, "Add what has not been sent to the next gradient.")


class DGCOptions(Arguments):
    """`compression.params` of dgc: Deep Gradient Compression (Lin et al. 2018), momentum SGD on sparse updates."""

    ratio: float = key(0.001, "Part of the entries that is sent, after the warm-up.", gt=0, le=1)
    start_compressing_after_step: Int = key(0, _START, ge=0)
    momentum: float = key(0.9, "Momentum, applied before sending; the optimizer must have none.", ge=0, lt=1)
    momentum_factor_masking: bool = key(True, "Forget the momentum of entries that have been sent.")
    local_clipping: float = key(
        0.0,
        "Largest L2 norm of each parameter's gradient, divided by the root of the number of ranks, before it is "
        "added; 0: no clipping.",
        ge=0,
    )
    warmup_steps: Int = key(
        0, "Compressed steps in which the part that is sent falls exponentially from 1/4 to `ratio`.", ge=0
    )


class Blocks(Arguments):
    """`compression.params` of int8 and int4: integers in blocks with a scale each, as ZeRO++ sends them."""

    block_size: Int = key(256, "Values to a scale; even.", ge=2, multiple_of=2)
    start_compressing_after_step: Int = key(0, _START, ge=0)
    use_error_feedback: bool = key(
        False, "Add the rounding error to the next gradient (error feedback).", names=("error_feedback",)
    )
    err_beta: float = key(0.0, "Part of what is kept that stays kept (LoCo); the rest is the newest error.", ge=0, lt=1)
    reset_T: Int | None = key(None, "Steps after which what is kept is forgotten; null: never.", gt=0)
    stochastic_rounding: bool = key(False, "Round at random, so that errors are zero on average.")
    quantize_copies: bool = key(False, "At stage 0, send the sums as integers, too.")


METHODS: dict[str, type[Arguments]] = {
    "powerSGD": PowerSGDOptions,
    "topk": TopKOptions,
    "dgc": DGCOptions,
    "int8": Blocks,
    "int4": Blocks,
}
"""Methods by `compression.type`, in any case, with their parameters."""


def canonical_method(written: str) -> str | None:
    """Return the name of a method as `METHODS` spells it, or None if it is unknown.

    >>> canonical_method("PowerSGD")
    'powerSGD'
    """
    return next((name for name in METHODS if name.lower() == written.lower()), None)


class Compression(ConfigSection):
    """`compression`: lossy compression of gradients on the wire."""

    type: str | None = key(None, "powerSGD, topk, dgc, int8 or int4, in any case; null or none: off.")
    params: dict[str, Any] = key({}, "Parameters of the method: see below.", free_form=True)

    @property
    def method(self) -> str | None:
        """The method as `METHODS` spells it, or None if compression is off. An unknown name is unchanged."""
        if self.type is None or self.type.lower() == "none":
            return None
        return canonical_method(self.type) or self.type
