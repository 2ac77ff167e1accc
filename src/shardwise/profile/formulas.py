"""FLOP formulas of matrix-product operators that torch's counter lacks, in some or all versions.

As in torch, a multiplication and an addition are two operations. Attention counts every score, masked or not. Because a
fused backward kernel recomputes the scores, it has five products where the forward pass has two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Formula = Callable[..., int]
Shape = Sequence[int]


def _dot(one: Shape, *_: Any, **__: Any) -> int:
    return 2 * one[0]


def _matrix_vector(matrix: Shape, *_: Any, **__: Any) -> int:
    return 2 * matrix[0] * matrix[1]


def _added_matrix_vector(added: Shape, matrix: Shape, *_: Any, **__: Any) -> int:
    return 2 * matrix[0] * matrix[1]


def _added_product(added: Shape, one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(one) * other[-1]


def _product(one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    return 2 * math.prod(one) * other[-1]


def _grouped_product(one: Shape, other: Shape, *_: Any, **__: Any) -> int:
    # If the second matrix is split among the groups by columns, each group multiplies only its own part.
    groups = one[0] if len(one) == 3 and len(other) == 2 else 1
    return 2 * math.prod(one) // groups * other[-1]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    rows, heads, length, size = query
    return 2 * rows * heads * length * key[2] * (size + value[3])


def _attention_backward(gradient: Shape, query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    rows, heads, length, size = query
    return 2 * rows * heads * length * key[2] * (3 * size + 2 * value[3])


_FORMULAS: dict[str, Formula] = {
    "dot": _dot,
    "vdot": _dot,
    "mv": _matrix_vector,
    "addmv": _added_matrix_vector,
    "addbmm": _added_product,
    "_addmm_activation": _added_product,
    "_int_mm": _product,
    "_grouped_mm": _grouped_product,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
}


def formulas() -> dict[Any, Formula]:
    """Return the formula of each counted operator; formulas take shapes or tensors, and `out_val`."""
    from torch.utils.flop_counter import FlopCounterMode  # imported only for counting

    known = FlopCounterMode(display=False).flop_registry
    more = {
        getattr(torch.ops.aten, name): formula for name, formula in _FORMULAS.items() if hasattr(torch.ops.aten, name)
    }
    missing = {operator: formula for operator, formula in more.items() if operator not in known}
    return dict(FlopCounterMode(display=False, custom_mapping=missing).flop_registry)
