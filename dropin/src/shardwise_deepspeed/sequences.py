"""Sequence parallelism under DeepSpeed's names and with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.device import numbers_on
from shardwise.errors import UsageError
from shardwise.parallel import RoundRobinLoader, SequenceGroup, begin, current, sequence_tiled_compute, share_attention
from shardwise.parallel.huggingface import register
from shardwise.parallel.sequence import group_of, needed
from shardwise.parallel.tiled import run_tile, tiles_of


class UlyssesSPAttentionHF:
    """Sequence-parallel attention of transformers; see `shardwise.parallel.share_attention`."""

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int | None = None,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        max_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> SequenceGroup:
        """Create the sequence-parallel groups, replace the attention; return the `mpu` for `initialize`. A collective.

        Args:
            model_name_or_path: a model, to change its attention; or a name, to change attention of this kind
                everywhere.
            core_attn_implementation: the attention of one process, such as `sdpa`.
            sequence_parallel_size: size of a group.
            micro_batch_size, seq_length, seq_length_is_variable, max_length: without effect: ranks exchange lengths.
            disable_in_eval: in evaluation mode each rank has its own unsplit sequences.
        """
        existing = current()
        group = existing if existing is not None and existing.size == sequence_parallel_size else None
        group = group or begin(sequence_parallel_size)
        if isinstance(model_name_or_path, nn.Module):
            share_attention(model_name_or_path, core_attn_implementation, in_eval=not disable_in_eval)
        else:
            register(core_attn_implementation, core_attn_implementation, in_eval=not disable_in_eval)
        return group


class UlyssesSPDataLoaderAdapter(RoundRobinLoader):
    """A loader of different batches (dicts of tensors) by rank; a sequence-parallel group takes each in turn."""

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        group = group_of(sp_group) or needed()
        if (group.rank, group.size) != (sp_rank, sp_world_size):
            raise UsageError(
                f"UlyssesSPDataLoaderAdapter(sp_rank={sp_rank}, sp_world_size={sp_world_size}): in sp_group this is "
                f"rank {group.rank} of {group.size}"
            )
        super().__init__(dl, group, torch.device(device))


class SequenceTiledCompute:
    """`sequence_tiled_compute` with separate arguments."""

    @staticmethod
    def apply(
        fn: Callable[..., Any],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str | None,
        compute_params: Sequence[torch.Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        """Return the result of `fn` on a sequence; `args` are the values of the keys, in their order."""
        given: Mapping[str, Any] = dict(zip([*keys_to_shard, *keys_to_pass], args, strict=True))
        cut, passed = ({key: given[key] for key in keys} for keys in (keys_to_shard, keys_to_pass))
        more = (grad_requiring_tensor_key, compute_params, output_unshard_dimension, output_reduction)
        return sequence_tiled_compute(fn, seqlen, shards, cut, passed, *more)


class TiledMLP:
    """An MLP in tiles of the tokens; `shardwise.parallel.TiledMLP` is a module for it."""

    @staticmethod
    def apply(
        fn: Callable[[Any, torch.Tensor], torch.Tensor],
        self: Any,
        x: torch.Tensor,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return `fn(self, x)` for (rows, tokens, width), computed in `shards` tiles of the tokens."""
        return torch.cat([run_tile(fn, self, tile) for tile in tiles_of(x, shards, x.dim() - 2)], dim=x.dim() - 2)


class TiledFusedLogitsLoss:
    """A loss from hidden states in tiles of the tokens; `shardwise.parallel.tiled_loss` is a function for it."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Sequence[torch.Tensor] | None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        """Return the mean, or the sum, over tiles of `fn(self, x, y)`, a loss with its first argument (as the output
        layer); tiles are weighted by tokens. `x` is (rows, tokens, width), `y` (rows, tokens). `mask` selects tokens
        (None: all); a tile gets these only, as (tokens, width) and (tokens). `compute_params` has no effect.
        """
        if output_reduction not in ("mean", "sum"):
            raise UsageError(f'TiledFusedLogitsLoss: output_reduction {output_reduction!r}; expected "mean" or "sum"')
        losses, counts = [], []
        masks = [None] * shards if mask is None else tiles_of(mask, shards, 1)
        for part, wanted, kept in zip(tiles_of(x, shards, 1), tiles_of(y, shards, 1), masks, strict=False):
            if kept is not None:
                part, wanted = part[kept], wanted[kept]
            if wanted.numel():
                losses.append(run_tile(fn, self, part, wanted).reshape(()))
                counts.append(wanted.numel())
        if not losses:
            return x.sum() * 0.0
        stacked = torch.stack(losses)
        if output_reduction == "sum":
            return stacked.sum()
        return (stacked * numbers_on(stacked.device, counts, stacked.dtype)).sum() / sum(counts)


def initialize_sequence_parallel(sequence_parallel_size: int) -> None:
    """Create the sequence-parallel groups (a collective)."""
    begin(sequence_parallel_size)


def get_sequence_parallel_group() -> Any:
    """Return the sequence-parallel group."""
    return needed().group


def get_sequence_parallel_world_size() -> int:
    """Return the size of the sequence-parallel group."""
    return needed().size


def get_sequence_parallel_rank() -> int:
    """Return this process's rank in the sequence-parallel group."""
    return needed().rank
