"""Batches for sequence parallelism: each rank gets a range of the tokens of all rows.

Labels are shifted before the split, because the next token may be on another rank. Positions are those in the whole
sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from shardwise.errors import UsageError
from shardwise.parallel.sequence import SequenceGroup, needed, run_of, shares

IGNORED = -100  # label of tokens without a target

# The first of these keys in a batch determines the sequence length.
_TOKENS = ("input_ids", "inputs_embeds", "labels", "shift_labels", "position_ids")


def split(batch: Any, group: SequenceGroup | None = None) -> Any:
    """Return this rank's part of a batch that all ranks of its sequence-parallel group have.

    Args:
        batch: tensors of shape (rows, tokens, ...): one, a tuple or list, or a dictionary with `input_ids` or
            `inputs_embeds`. In a dictionary, tensors with that number of tokens are split and others are kept. `labels`
            become `shift_labels`, shifted left by one; missing `position_ids` are added.
        group: the ranks; None: the process's group.

    Raises:
        UsageError: there are fewer tokens than ranks, or the number of tokens is unknown.

    Example:
        >>> import torch
        >>> from shardwise.parallel import begin, end, split
        >>> group = begin(1)
        >>> split({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])})["shift_labels"]
        tensor([[   6,    7, -100]])
        >>> end()
    """
    group = group or needed()
    whole = complete(batch)
    _note_aligned(whole, group)
    return _part(whole, group.size, group.rank)


def first_part(batch: Any, size: int) -> Any:
    """Return the part of the first of `size` ranks of a batch, as `split`; for plans, also of meta tensors."""
    return batch if size == 1 else _part(complete(batch), size, 0)


def complete(batch: Any) -> Any:
    """Return an unsplit batch with shifted labels and positions, which depend on adjacent tokens."""
    if not isinstance(batch, Mapping):
        return batch
    found = dict(batch)
    if isinstance(found.get("labels"), torch.Tensor):
        labels = found.pop("labels")
        if found.get("shift_labels") is None:
            found["shift_labels"] = F.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
    if found.get("position_ids") is None:
        like = found[_key(found)]
        found["position_ids"] = torch.arange(like.shape[1], device=like.device).unsqueeze(0)
    return found


def _key(batch: Mapping[str, Any]) -> str:
    for name in _TOKENS:
        if isinstance(batch.get(name), torch.Tensor) and batch[name].dim() > 1:
            return name
    raise UsageError(
        f"a batch with the keys {list(batch)} cannot be split among the ranks of a sequence: expected one of "
        f"{', '.join(_TOKENS)}, of the form (rows, tokens, ...)"
    )


def _part(batch: Any, size: int, rank: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return _cut(batch, batch.shape[1] if batch.dim() > 1 else -1, size, rank)
    if isinstance(batch, Mapping):
        key = _key(batch)
        length = batch[key].shape[1]
        return {
            name: _cut(value, length, size, rank)
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == length
            else value
            for name, value in batch.items()
        }
    if isinstance(batch, (tuple, list)) and batch and all(isinstance(value, torch.Tensor) for value in batch):
        parts = [_part(value, size, rank) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    raise UsageError(
        f"a batch of type {type(batch).__name__} cannot be split among the ranks of a sequence: expected a tensor, a "
        "tuple or list of tensors, or a dictionary"
    )


def _cut(tensor: torch.Tensor, length: int, size: int, rank: int) -> torch.Tensor:
    if length < size:
        raise UsageError(
            f"sequence parallelism: a batch of shape {tuple(tensor.shape)} cannot be split among {size} ranks; "
            f"expected (rows, tokens, ...) with at least {size} tokens. Pad it, or lower sequence_parallel_size"
        )
    first, end = run_of(length, size, rank)
    return tensor[:, first:end].contiguous()


def _note_aligned(batch: Any, group: SequenceGroup) -> None:
    """Set `SequenceGroup.aligned` if positions restart in each rank's part."""
    positions = batch.get("position_ids") if isinstance(batch, Mapping) else None
    if group.aligned or group.size == 1 or not isinstance(positions, torch.Tensor):
        return
    length = batch[_key(batch)].shape[1]
    restarting = torch.cat([torch.arange(size, device=positions.device) for size in shares(length, group.size)])
    group.aligned = bool((positions.reshape(-1, length) == restarting).all())


class SequenceLoader:
    """Splits the batches of a dataloader over the sequence-parallel group; all its ranks have the same batches.

    Wrap the dataloader of `initialize(training_data=...)` in it. Other attributes are those of the wrapped loader.

    Args:
        loader: yields batches for `split`.
        group: the ranks; None: the process's group at the time of iteration.
    """

    def __init__(self, loader: Any, group: SequenceGroup | None = None) -> None:
        self.loader = loader
        self._group = group

    def __iter__(self) -> Iterator[Any]:
        group = self._group or needed()
        return (split(batch, group) for batch in self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


class RoundRobinLoader:
    """Splits dataloaders that yield different batches on each rank; the group processes them one after another.

    In each round every rank loads one batch and sends each rank its part. The group then processes the batch of its
    first rank, of its second rank, and so on. Iteration ends with the first rank that runs out.

    Args:
        loader: yields dictionaries of tensors for `split`.
        group: the ranks; None: the process's group at the time of iteration.
    """

    def __init__(self, loader: Any, group: SequenceGroup | None = None, device: torch.device | None = None) -> None:
        self.loader = loader
        self._group = group
        self._device = device

    def __len__(self) -> int:
        return len(self.loader) * (self._group or needed()).size

    def __iter__(self) -> Iterator[Any]:
        group = self._group or needed()
        batches = iter(self.loader)
        while True:
            batch = next(batches, None)
            parts = None if batch is None else self._parts(batch, group)
            described = None if parts is None else [group.aligned, *map(_describe, parts)]
            told = group.comm.exchange(described, "sequence_batches")
            if any(found is None for found in told):
                return
            assert parts is not None
            group.aligned = any(found[0] for found in told)
            yield from self._handed_round(parts, [found[1 + group.rank] for found in told], group)

    def _parts(self, batch: Any, group: SequenceGroup) -> list[dict[str, torch.Tensor]]:
        if not isinstance(batch, Mapping) or not all(isinstance(v, torch.Tensor) for v in batch.values()):
            raise UsageError(
                f"RoundRobinLoader: ranks can hand round dictionaries of tensors, found {type(batch).__name__}"
                + (f" with {[k for k, v in batch.items() if not isinstance(v, torch.Tensor)]}" if batch else "")
            )
        whole = complete(batch)
        _note_aligned(whole, group)
        return [_part(whole, group.size, rank) for rank in range(group.size)]

    def _handed_round(
        self, parts: list[dict[str, torch.Tensor]], coming: list[Any], group: SequenceGroup
    ) -> Iterator[dict[str, torch.Tensor]]:
        device = group.comm.device
        flat = [torch.cat([_bytes(value, device) for value in part.values()]) for part in parts]
        sent, sizes = [part.numel() for part in flat], [sum(size for *_, size in items) for items in coming]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        group.comm.all_to_all(received, torch.cat(flat), sizes, sent, "sequence_batches").wait()
        for piece, items in zip(received.split(sizes), coming, strict=True):
            values = piece.split([size for *_, size in items])
            yield {
                name: value.clone().view(getattr(torch, dtype)).view(shape).to(self._device or device)
                for (name, dtype, shape, _), value in zip(items, values, strict=True)
            }

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)


def _describe(part: Mapping[str, torch.Tensor]) -> list[list[Any]]:
    return [[name, str(v.dtype).removeprefix("torch."), list(v.shape), v.nbytes] for name, v in part.items()]


def _bytes(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.to(device).contiguous().view(-1).view(torch.uint8)
