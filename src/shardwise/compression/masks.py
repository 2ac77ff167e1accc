"""Masks of pruned weights.

`l1` keeps what is largest when the method begins (Han et al., 1506.02626). `topk` keeps what has the largest scores,
which are parameters: their gradient is that of the mask, straight through (Sanh et al., "Movement Pruning",
2005.07683). Scores begin as the sizes, so that both methods begin with one mask.

The mask of single elements is packed, 8 to a byte, because each rank has the whole of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from shardwise.boxes import Region, ranges
from shardwise.compression.quantize import straight_through
from shardwise.registry import cut


@dataclass
class Mask:
    """The mask of a module's weight, in the module's buffer `<method>_mask` or parameter `<method>_scores`.

    Attributes:
        method: "sparse", "row", "head" or "channel".
        learned: `topk`.
        ratio: part that is kept.
        begins: first step with the mask.
        shape: shape of the whole weight.
        parts: rows, heads or channels of the weight; 0: single elements.
        dim: dimension of the weight in which parts lie.
        decided: True if the buffer has the mask. An undecided buffer is 0.
    """

    method: str
    learned: bool
    ratio: float
    begins: int
    shape: tuple[int, ...]
    parts: int = 0
    dim: int = 0
    decided: bool = False

    @property
    def key(self) -> str:
        """Name of the buffer or parameter in the module."""
        return f"{self.method}_{'scores' if self.learned else 'mask'}"

    @property
    def fixed(self) -> bool:
        """True if the buffer has the mask, which applies also before `begins`: it was loaded."""
        return self.decided and not self.learned

    def attach(self, module: nn.Module, weight: torch.Tensor) -> None:
        """Add the undecided buffer, or the parameter, to a module; `weight` is the whole one."""
        if self.learned:
            module.register_parameter(self.key, nn.Parameter(self._sizes(weight.detach()).to(weight.dtype)))
            self.decided = True
            return
        bytes_of_elements = -(-weight.numel() // 8)
        size, dtype = self.parts or bytes_of_elements, torch.bool if self.parts else torch.uint8
        device = torch.device("cpu") if weight.is_meta else weight.device
        module.register_buffer(self.key, torch.zeros(size, dtype=dtype, device=device))

    def decide(self, module: nn.Module, weight: torch.Tensor) -> None:
        """Fill the buffer from the whole weight."""
        kept = self._top(self._sizes(weight.detach()))
        self._buffer(module).copy_(kept if self.parts else pack(kept))
        self.decided = True

    def read(self, module: nn.Module) -> None:
        """Set `decided` from the buffer."""
        self.decided = self.learned or bool(self._buffer(module).any())

    def clear(self, module: nn.Module) -> None:
        """Make a mask undecided."""
        if not self.learned:
            self._buffer(module).zero_()
            self.decided = False

    def kept(self, module: nn.Module) -> torch.Tensor:
        """Return the mask of the whole weight as booleans: one for each part, or element."""
        if self.learned:
            return self._top(module.get_parameter(self.key).detach())
        buffer = self._buffer(module)
        return buffer if self.parts else unpack(buffer, self.shape)

    def values(self, module: nn.Module, dims: int, box: Region | None, along: int | None = None) -> torch.Tensor:
        """Return the mask in a shape that multiplies a parameter.

        Args:
            module: module with the mask.
            dims: dimensions of its weight, or of another parameter that has the parts in dimension `along` (a bias).
            box: this rank's part of the parameter; None: the whole.
            along: dimension with the parts; None: `dim`.
        """
        mask = self.kept(module)
        if self.learned:
            scores = module.get_parameter(self.key)
            mask = straight_through(scores, mask.to(scores.dtype))
        if not self.parts:
            return mask if box is None else cut(mask, box)
        dim = self.dim if along is None else along
        size = self.shape[self.dim]
        mask = mask.repeat_interleave(size // self.parts)
        if box is not None:
            mask = torch.cat([mask[first:end] for first, end in ranges(box)[dim]])
        return mask.view([-1 if d == dim else 1 for d in range(dims)])

    def _sizes(self, weight: torch.Tensor) -> torch.Tensor:
        sizes = weight.abs().to(torch.promote_types(weight.dtype, torch.float32))
        return sizes.movedim(self.dim, 0).reshape(self.parts, -1).mean(1) if self.parts else sizes

    def _top(self, sizes: torch.Tensor) -> torch.Tensor:
        """Keep the largest; of equal ones the first, on every device."""
        flat = sizes.flatten()
        count = max(1, round(self.ratio * flat.numel()))
        kept = torch.zeros_like(flat, dtype=torch.bool)
        kept[flat.sort(descending=True, stable=True).indices[:count]] = True
        return kept.view_as(sizes)

    def _buffer(self, module: nn.Module) -> torch.Tensor:
        return module.get_buffer(self.key)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Return booleans as bits of bytes, the first in the lowest bit; unused bits are 0.

    >>> pack(torch.tensor([True, False, True, True, False, False, False, False, True])).tolist()
    [13, 1]
    """
    flat = mask.flatten().to(torch.uint8)
    flat = nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8, device=flat.device)).sum(1).to(torch.uint8)


def unpack(packed: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the booleans of `pack` in a shape.

    >>> unpack(torch.tensor([13, 1], dtype=torch.uint8), (3, 3)).int().tolist()
    [[1, 0, 1], [1, 0, 0], [0, 0, 1]]
    """
    bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return bits.flatten()[: torch.Size(shape).numel()].view(shape).bool()
