"""The global gradient norm, the same to the bit however the gradients are split.

Squares are summed in fp64 parameter by parameter (each rank over its own runs of each parameter), added over ranks in
rank order in one small all-reduce, and combined in registration order. fp32 squares are exact in fp64, so that what the
split can change is far below the fp32 result's last bit. A non-finite norm is an overflow: any infinite or NaN gradient
makes it so.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sums_of_squares(runs: Sequence[tuple[int, torch.Tensor]], parameters: int, device: torch.device) -> torch.Tensor:
    """Return this rank's sum of squares of each parameter.

    Args:
        runs: pairs (index of a parameter, 1-D run of its gradient); a parameter may have several.
        parameters: number of parameters.
        device: of the result.

    Returns:
        fp64 tensor of `parameters` elements.
    """
    sums = torch.zeros(parameters, dtype=torch.float64, device=device)
    filled = [(index, run) for index, run in runs if run.numel()]
    if filled:
        norms = torch.stack(torch._foreach_norm([run for _, run in filled], 2, dtype=torch.float64))
        indices = torch.tensor([index for index, _ in filled], device=device)
        sums.index_add_(0, indices, norms.square())
    return sums


def combine(sums: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the global norm of gradients whose true value is `scale` times what was summed (0-D fp64 tensor)."""
    # cumsum adds one after the other, in registration order; sum() would pick its own tree.
    total = sums.cumsum(0)[-1] if sums.numel() else sums.new_zeros(())
    return total.sqrt() * scale


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return the factor of `torch.nn.utils.clip_grad_norm_`: min(1, max_norm / (norm + 1e-6)), in fp32.

    The norm is rounded to fp32 first: what differs in its fp64 bits then differs nowhere.
    """
    rounded = norm.float()
    return (max_norm / (rounded + 1e-6)).clamp(max=1.0)
