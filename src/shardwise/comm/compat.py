"""Names of torch.distributed that differ between torch 2.11 and 2.13, in one place.

2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor` to `*_single` and warns at every call of the old
names, so the new name is taken where it exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
