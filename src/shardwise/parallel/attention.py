"""Sequence-parallel attention (Ulysses) around any single-process attention."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.compat import has_values
from shardwise.device import numbers_on
from shardwise.errors import UsageError
from shardwise.parallel.sequence import SequenceGroup, active, group_of, needed
from shardwise.parallel.ulysses import key_runs, query_runs, repeats, to_heads, to_tokens
from shardwise.registry.heads import some_heads


def shared_attention(
    attention: Callable[..., torch.Tensor],
    group: SequenceGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    *,
    grouped: bool = True,
) -> torch.Tensor:
    """Return the attention of this rank's tokens to the whole sequence (all ranks of the group call).

    Tensors are (rows, this rank's tokens, all heads, width); `attention` maps (rows, all tokens, some heads, width) to
    the same shape. `grouped`: it accepts fewer key heads than query heads, in the model's proportion.
    """
    heads, keys = query.shape[2], key.shape[2]
    if min(lengths) < 1:
        raise UsageError(
            f"sequence parallelism: the ranks have {list(lengths)} tokens of a sequence, and each needs at least one; "
            f"pad sequences to {group.size} tokens, or lower sequence_parallel_size"
        )
    runs = query_runs(heads, group.size)
    wanted = key_runs(heads, keys, runs)
    q, k, v = query, key, value
    if group.size > 1:
        q, k, v = to_heads(group, [query, key, value], lengths, [runs, wanted, wanted])
    belongs = repeats(heads, keys, runs[group.rank])
    if not (grouped and belongs == heads // keys) and belongs != 1:
        places = belongs if isinstance(belongs, list) else [n // belongs for n in range(q.shape[2])]
        index = numbers_on(k.device, places, torch.int64)
        k, v = k.index_select(2, index), v.index_select(2, index)
    with some_heads(*runs[group.rank]) if group.size > 1 else contextlib.nullcontext():
        found = attention(q, k, v)
    return to_tokens(group, found, lengths, runs) if group.size > 1 else found


class DistributedAttention(nn.Module):
    """Sequence-parallel attention (Ulysses) around a single-process attention.

    The local attention gets all tokens and some of the heads. Masks refer to positions in the whole sequence. Dropout
    uses each rank's own random numbers.

    Args:
        local_attention: called as `local_attention(query, key, value, *args, **kwargs)` with tensors in this module's
            layout. With fewer key heads than query heads it gets equal numbers of both, unless the model's proportion
            is possible.
        sequence_process_group: the ranks; None: the group of the engine, or of `shardwise.parallel.begin`.
        scatter_idx: dimension of the heads.
        gather_idx: dimension of the tokens. The defaults are DeepSpeed's layout (tokens, rows, heads, width).
            `torch.nn.functional.scaled_dot_product_attention` has heads in dimension 1 and tokens in 2.
        sp_stream, num_kv_heads: accepted for existing code and ignored.

    Example:
        >>> import torch
        >>> from torch.nn.functional import scaled_dot_product_attention
        >>> from shardwise.parallel import DistributedAttention, begin, end
        >>> group = begin(1)
        >>> attention = DistributedAttention(scaled_dot_product_attention, scatter_idx=1, gather_idx=2)
        >>> q = torch.randn(2, 4, 8, 16)  # rows, heads, tokens, width
        >>> attention(q, q, q, is_causal=True).shape
        torch.Size([2, 4, 8, 16])
        >>> end()
    """

    def __init__(
        self,
        local_attention: Callable[..., Any],
        sequence_process_group: SequenceGroup | dist.ProcessGroup | None = None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
        num_kv_heads: int | None = None,
    ) -> None:
        super().__init__()
        if sorted({scatter_idx, gather_idx}) not in ([0, 2], [1, 2]):
            raise UsageError(
                f"DistributedAttention(scatter_idx={scatter_idx}, gather_idx={gather_idx}): heads and tokens are in "
                "dimensions 2 and 0, 2 and 1, or 1 and 2 of four"
            )
        self.local_attn = local_attention
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx
        self._group = group_of(sequence_process_group)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        lengths: Sequence[int] | None = None,
        batch_dim_idx: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return the attention output of this rank's tokens (all ranks of the group call).

        Tensors have this rank's tokens with all heads; key and value may have a divisor of the query heads. Further
        arguments are for the local attention. `lengths` are the tokens of each rank; None: exchanged once in each
        forward pass of an engine. `batch_dim_idx`, or a number as first argument, is ignored.

        Raises:
            UsageError: there are fewer query heads than ranks, a rank has no token, no sequence-parallel group exists,
                or a mask covers this rank's tokens only.
        """
        if args and isinstance(args[0], int) and not isinstance(args[0], bool):
            args = args[1:]
        group = active(self._group or needed())
        own = query.shape[self.gather_idx]
        if lengths is None:
            rows = query.shape[3 - self.scatter_idx - self.gather_idx]
            lengths = group.lengths(own, rows) if has_values(query) else [own] * group.size
        elif len(lengths) != group.size or lengths[group.rank] != own:
            raise UsageError(
                f"DistributedAttention: lengths={list(lengths)} should be the tokens of each of {group.size} ranks, "
                f"and rank {group.rank} has {own}"
            )
        if group.size > 1:
            _check_masks([*args, *kwargs.values()], own, self.local_attn)

        def local(*whole: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.local_attn(*map(self._back, whole), *args, **kwargs)
            return self._forth(found)

        q, k, v = map(self._forth, (query, key, value))
        return self._back(shared_attention(local, group, q, k, v, lengths, grouped=False))

    def _forth(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim((self.gather_idx, self.scatter_idx), (1, 2))

    def _back(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.movedim((1, 2), (self.gather_idx, self.scatter_idx))


def _check_masks(arguments: Sequence[Any], own: int, attention: Any) -> None:
    """Refuse masks and biases of one rank's tokens, because the local attention gets the tokens of all ranks."""
    for value in arguments:
        if (
            isinstance(value, torch.Tensor)
            and value.dim() > 1
            and value.shape[-1] == own
            and value.shape[-2] in (1, own)
        ):
            name = getattr(attention, "__name__", type(attention).__name__)
            raise UsageError(
                f"DistributedAttention({name}): an argument of shape {tuple(value.shape)} is for the {own} tokens of "
                "this rank, and the local attention gets the tokens of all ranks and some of the heads. Make masks "
                "inside of the local attention, for whole sequences"
            )
