"""Position ids for models of transformers that derive them from padding, computed for whole sequences.

RoBERTa and related models count tokens that are no padding, from the padding token's id on; OPT tokens kept by the
attention mask. A rank with a range of a row cannot count them. Hooks replace the row positions of
`shardwise.parallel.split`; a script's own `position_ids` stay.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.compat import has_values
from shardwise.parallel.sequence import SequenceGroup

Shares = Callable[[bool], SequenceGroup | None]


class _Positions:
    """Forward pre-hook of a module that takes `position_ids`."""

    def __init__(self, shares: Shares) -> None:
        self.shares = shares

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = self.shares(module.training)
        if group is None:
            return None
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        given = bound.arguments.get("position_ids")
        rows, own, source = self.source(module, bound.arguments)
        if source is None or not has_values(source):
            return None
        if given is not None:
            layout = group.layout(own, rows, given, None, given.device)
            if layout.first != 0:
                return None
            lengths = layout.lengths
        else:
            lengths = group.lengths(own, rows)
        whole = self.positions(module, group.whole(source.expand(rows, own), lengths))
        start = sum(lengths[: group.rank])
        bound.arguments["position_ids"] = whole[:, start : start + own]
        return bound.args, bound.kwargs

    def source(self, module: Any, given: dict[str, Any]) -> tuple[int, int, torch.Tensor | None]:
        """Return rows, tokens, and the tensor that this rank's positions depend on."""
        raise NotImplementedError

    def positions(self, module: Any, whole: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class _FromPaddingToken(_Positions):
    def source(self, module: Any, given: dict[str, Any]) -> tuple[int, int, torch.Tensor | None]:
        ids = given.get("input_ids")
        if ids is None:
            embedded = given["inputs_embeds"]
            ids = torch.full(embedded.shape[:2], module.padding_idx + 1, device=embedded.device)
        return (*ids.shape, ids)

    def positions(self, module: Any, whole: torch.Tensor) -> torch.Tensor:
        kept = whole.ne(module.padding_idx).long()
        return kept.cumsum(1) * kept + module.padding_idx


class _FromMask(_Positions):
    def source(self, module: Any, given: dict[str, Any]) -> tuple[int, int, torch.Tensor | None]:
        mask = given["attention_mask"]
        return (*mask.shape, mask)

    def positions(self, module: Any, whole: torch.Tensor) -> torch.Tensor:
        kept = whole.long()
        return kept.cumsum(1) * kept - 1


def count_positions(model: nn.Module, shares: Shares) -> None:
    """Install hooks that compute positions of whole sequences where a model derives them from padding."""
    for module in model.modules():
        known = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _Positions)]
        for hook in known:
            hook.shares = shares
        if known:
            continue
        takes = inspect.signature(module.forward).parameters
        if "position_ids" not in takes:
            continue
        places = (module, sys.modules.get(type(module).__module__))
        counts = any(hasattr(place, "create_position_ids_from_input_ids") for place in places)
        if counts and "input_ids" in takes and hasattr(module, "padding_idx"):
            module.register_forward_pre_hook(_FromPaddingToken(shares), with_kwargs=True)
        elif type(module).__name__ == "OPTLearnedPositionalEmbedding":
            module.register_forward_pre_hook(_FromMask(shares), with_kwargs=True)
