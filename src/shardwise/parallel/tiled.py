"""Tiled computation over tokens: only one tile's large intermediate tensors are in memory.

The backward pass recomputes a tile, and frees it before the next one. Modules are called once for each tile, so ZeRO
stage 3 unshards their parameters as for any repeated call. With T tokens and V words, logits and their gradient have
T x V numbers each, in the loss's precision. In tiles of t tokens both have t x V.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.device import numbers_on
from shardwise.errors import UsageError
from shardwise.parallel.data import IGNORED
from shardwise.parallel.sequence import shares
from shardwise.parallel.tensor.layers import ColumnParallel
from shardwise.parallel.tensor.loss import words_cross_entropy

TILE_BYTES = 256 << 20  # default bytes of logits in a tile


def run_tile(function: Callable[..., Any], *given: Any) -> Any:
    """Call a function on a tile, with activation checkpointing if gradients are enabled."""
    if not torch.is_grad_enabled():
        return function(*given)
    return checkpoint(function, *given, use_reentrant=False)


def tiles_of(tensor: torch.Tensor, tiles: int, dim: int) -> list[torch.Tensor]:
    """Return views of up to `tiles` parts along a dimension."""
    length = tensor.shape[dim]
    return list(tensor.split(shares(length, max(1, min(tiles, length))), dim))


class TiledMLP(nn.Module):
    """Token-wise module, computed in tiles of the tokens.

    Args:
        module: maps (rows, tokens, ...) to the same shape; outputs of a token must not depend on other tokens.
        tiles: number of tiles; None: tiles of about as many tokens as the input's width (ALST, 2506.13996).
        dim: dimension of the tokens.

    Example:
        >>> import torch
        >>> from shardwise.parallel import TiledMLP
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> x = torch.randn(2, 10, 8)
        >>> torch.testing.assert_close(TiledMLP(mlp, tiles=3)(x), mlp(x))
    """

    def __init__(self, module: nn.Module, tiles: int | None = None, dim: int = 1) -> None:
        super().__init__()
        if tiles is not None and tiles < 1:
            raise UsageError(f"TiledMLP(tiles={tiles}): expected a positive number")
        self.module, self.tiles, self.dim = module, tiles, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the module's output for all tokens."""
        tiles = self.tiles or -(-x.shape[self.dim] // max(1, x.shape[-1]))
        return torch.cat([run_tile(self.module, tile) for tile in tiles_of(x, tiles, self.dim)], dim=self.dim)


def tiled_loss(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    *,
    tiles: int | None = None,
    ignore_index: int = IGNORED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean cross entropy over labelled tokens, and their number, without all logits in memory.

    Args:
        head: output layer, a module that maps (tokens, width) to logits. If it is vocabulary-parallel, no rank holds
            all logits of a tile.
        hidden: (rows, tokens, width), input of the head.
        labels: (rows, tokens), at the same positions: `shift_labels` of `split`.
        tiles: number of tiles; None: tiles with about 256 MiB of logits.
        ignore_index: label of unlabelled tokens. Without labelled tokens the loss and its gradients are 0.

    Raises:
        UsageError: `hidden` and `labels` do not have the same tokens.

    Example:
        >>> import torch
        >>> from shardwise.parallel import tiled_loss
        >>> head, hidden = torch.nn.Linear(8, 50, bias=False), torch.randn(2, 10, 8)
        >>> labels = torch.randint(50, (2, 10))
        >>> loss, tokens = tiled_loss(head, hidden, labels, tiles=4)  # then engine.backward(loss, weight=tokens)
        >>> torch.testing.assert_close(
        ...     loss, torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
        ... )
    """
    if hidden.shape[:-1] != labels.shape:
        raise UsageError(
            f"tiled_loss: hidden has the shape {tuple(hidden.shape)} and labels {tuple(labels.shape)}; expected "
            "(rows, tokens, width) and (rows, tokens)"
        )
    flat, wanted = hidden.flatten(0, -2), labels.flatten()
    layer: object = head
    divided = layer if isinstance(layer, ColumnParallel) and not layer.gives_all else None

    def of_tile(part: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = head(part)
        if divided is not None:
            return words_cross_entropy(
                logits, targets, divided.group, divided.cut.sizes, ignore_index=ignore_index, reduction="sum"
            )
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide, targets, ignore_index=ignore_index, reduction="sum")

    if tiles is None:
        words = getattr(head, "out_features", None) or 1 << 17
        tiles = -(-flat.shape[0] * words * 4 // TILE_BYTES)
    parts = zip(tiles_of(flat, tiles, 0), tiles_of(wanted, tiles, 0), strict=True)
    total = torch.stack([run_tile(of_tile, part, targets) for part, targets in parts]).sum()
    tokens = (wanted != ignore_index).sum()
    return total / tokens.clamp(min=1), tokens


def sequence_tiled_compute(
    fn: Callable[..., Any],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str | None = None,
    compute_params: Sequence[torch.Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Return the output of a function on a sequence, computed in tiles of dimension 1 of its arguments.

    Args:
        fn: called once for each tile, with all arguments by name; returns one tensor.
        seqlen: tokens of the sequence.
        shards: number of tiles.
        kwargs_to_shard: arguments to be split, of shape (rows, tokens, ...).
        kwargs_to_pass: arguments of every tile.
        grad_requiring_tensor_key: accepted for existing code and ignored.
        compute_params: accepted for existing code and ignored.
        output_unshard_dimension: dimension of the tokens in the output; 0 for a scalar output.
        output_reduction: of scalar outputs: mean, weighted by the tokens of each tile, or sum. None: concatenate.

    Raises:
        UsageError: an argument does not have `seqlen` tokens, or the reduction is unknown.

    >>> x = torch.arange(6.0).view(1, 6, 1)
    >>> sequence_tiled_compute(lambda x: x * 2, 6, 4, {"x": x}, {}, output_reduction=None).flatten().tolist()
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    """
    if output_reduction not in (None, "mean", "sum"):
        raise UsageError(
            f'sequence_tiled_compute(output_reduction={output_reduction!r}): expected "mean", "sum" or None'
        )
    wrong = {name: tuple(v.shape) for name, v in kwargs_to_shard.items() if v is not None and v.shape[1] != seqlen}
    if wrong:
        raise UsageError(f"sequence_tiled_compute(seqlen={seqlen}): expected as many in dimension 1, found {wrong}")
    sizes = shares(seqlen, max(1, min(shards, seqlen)))
    names = list(kwargs_to_shard)
    cuts = [[None] * len(sizes) if v is None else v.split(sizes, dim=1) for v in kwargs_to_shard.values()]

    def of_tile(*parts: Any) -> Any:
        return fn(**dict(zip(names, parts, strict=True)), **kwargs_to_pass)

    outputs = [run_tile(of_tile, *parts) for parts in zip(*cuts, strict=True)]
    if output_reduction is None or outputs[0].numel() > 1:
        return torch.cat(outputs, dim=output_unshard_dimension)
    stacked = torch.stack([output.reshape(()) for output in outputs])
    if output_reduction == "mean":
        return (stacked * numbers_on(stacked.device, [size / seqlen for size in sizes], stacked.dtype)).sum()
    return stacked.sum()
