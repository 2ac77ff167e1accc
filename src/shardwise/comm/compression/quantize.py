"""Symmetric quantisation in blocks: the codes in which gradients and weights are sent.

Each block of values has one fp32 scale, its largest magnitude divided by the largest code. Every value becomes `code =
round(value / scale)`, in 8 bits (-127..127) or 4 bits (-7..7, two to a byte). A row of values becomes one message of
bytes: scales first, then codes.

Invariants:

- Rounded to nearest, the error of a value is at most half a scale, (largest magnitude of its block) / (2 * 127), or
  / (2 * 7) in 4 bits, and a few roundings of fp32. Stochastic rounding doubles that bound and is unbiased.
- A block with a non-finite value decodes to non-finite values: the receiver still finds an overflow.
- A block of zeros decodes to zeros. So does a block with magnitudes below 2 ** -119, because its scale would not be a
  normal number.
- The same values on the same type of device give the same codes, however they are split into calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from shardwise.compat import has_values

BLOCK = 256
"""Values to a scale. For gradients of a small transformer, blocks of 2048 have 3.3 times the mean square error of
blocks of 256, which send 1.4 % more in 8 bits and 2.7 % more in 4. Blocks of 64 have half, for another 5 and 9 %.
"""

CHUNK = 1 << 18
"""Most values that a CPU codes at a time, to keep scratch memory in its cache."""

DEVICE_CHUNK = 1 << 23
"""The same on a device, where launches cost more than memory."""

PARTS = 16
"""Parts in which a CPU codes fewer values, to keep scratch memory small; a part has at least `LEAST` values."""
LEAST = 1 << 13

SMALLEST = 2.0**-119
"""Blocks with a smaller largest magnitude count as zeros."""

_SCALE_BYTES = 4


def in_parts(device: torch.device) -> bool:
    """Return True if rows are coded and added one after the other, in parts for a CPU's cache; False: at once."""
    return device.type == "cpu"


def chunk_of(numel: int, device: torch.device) -> int:
    """Return how many of `numel` values are coded at a time."""
    return min(CHUNK, max(-(-numel // PARTS), LEAST)) if in_parts(device) else DEVICE_CHUNK


def _uncounted(scratch: torch.Tensor) -> None:
    """Count nothing."""


@dataclass(frozen=True)
class BlockCode:
    """A code of values in 8 or 4 `bits`, with an even number of values to a scale (`block`).

    `hold` counts scratch memory until it is freed: up to 64 MiB on a device, 96 MiB to round stochastically.

    Raises:
        ValueError: another number of bits, or a block that is not even and positive.

    >>> code = BlockCode(bits=8, block=4)
    >>> values = torch.tensor([[1.0, -2.0, 0.5, 0.0, 127.0, 3.0]])
    >>> messages = torch.empty(1, code.nbytes(6), dtype=torch.uint8)
    >>> code.encode(values, messages)
    >>> back = torch.empty(1, 6)
    >>> code.decode(messages, back)
    >>> [round(v, 2) for v in back[0].tolist()]
    [1.01, -2.0, 0.5, 0.0, 127.0, 3.0]
    """

    bits: int = 8
    block: int = BLOCK
    hold: Callable[[torch.Tensor], None] = field(default=_uncounted, compare=False)

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"codes have 4 or 8 bits, found {self.bits}")
        if self.block < 2 or self.block % 2:
            raise ValueError(f"a block has an even number of values, found {self.block}")

    @property
    def levels(self) -> int:
        return 127 if self.bits == 8 else 7

    def nbytes(self, numel: int) -> int:
        """Return the bytes of the message for a row of `numel` values (a multiple of 4)."""
        scales, codes = self._sizes(numel)
        return scales + codes + -codes % _SCALE_BYTES

    def scratch_bytes(self, rows: int, numel: int, device: torch.device) -> int:
        """Return the most scratch memory for coding `rows` rows."""
        return 2 * 4 * min(max(chunk_of(rows * numel, device), self.block), rows * (numel + numel % 2))

    def encode(
        self,
        values: torch.Tensor,
        messages: torch.Tensor,
        *,
        error: torch.Tensor | None = None,
        memory: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> None:
        """Quantise each row of `values` into the row of `messages`.

        With `error` the sent values are values + error, and then error = memory * error + (1 - memory) * (intended -
        sent values).

        Args:
            values: (rows, numel) in a floating dtype; read in fp32.
            messages: (rows, nbytes(numel)) uint8; rows begin at multiples of 4 bytes.
            error: as `values`, or None.
            memory: weight of the old error; 0: plain error feedback.
            generator: for stochastic rounding; None: to nearest.
        """
        if not values.numel():
            return
        scales, codes = self._parts(messages, values.shape[1])
        copied = error is not None or values.dtype != torch.float32
        scratch = self._scratch(len(values), values.shape[1], values.device)
        wide = scratch[:0]
        for rows, begin, end, width in self._tiles(values):
            wanted = values[rows, begin:end]
            missing = -(end - begin) % width
            if copied or missing:
                if not wide.numel():
                    wide = self._scratch(len(values), values.shape[1], values.device)
                wanted = _shaped(wide, wanted.shape[0], end - begin + missing)
                wanted[:, : end - begin].copy_(values[rows, begin:end])
                wanted[:, end - begin :].zero_()
            blocks = wanted.unflatten(1, (-1, width))
            flat = _shaped(scratch, len(wanted), wanted.shape[1])
            work = flat.view(blocks.shape)
            if error is not None:
                # Sums of mixed types are slow; copies that convert are not.
                kept, own = flat[:, : end - begin], wanted[:, : end - begin]
                own.add_(kept.copy_(error[rows, begin:end]))
            torch.abs(blocks, out=work)
            top = work.amax(2, keepdim=True)
            nothing = top < SMALLEST
            scale = (top / self.levels).masked_fill_(nothing, 0.0)
            torch.mul(blocks, (self.levels / top).masked_fill_(nothing, 0.0), out=work)
            if generator is None:
                work.round_()
            else:
                noise = torch.rand(work.shape, generator=generator, dtype=work.dtype, device=work.device)
                self.hold(noise)
                work.add_(noise).floor_().clamp_(-self.levels, self.levels)
                del noise  # before that of the next tile
            places, range_ = self._places(begin, end, width)
            scales[rows, places] = scale.squeeze(2)
            self._pack(work, codes[rows, range_])
            if error is not None:
                self._unpack(codes[rows, range_], work)
                blocks.sub_(work.mul_(scale))
                if memory:
                    own.mul_(1.0 - memory).add_(kept.copy_(error[rows, begin:end]), alpha=memory)
                error[rows, begin:end].copy_(own)

    def decode(self, messages: torch.Tensor, out: torch.Tensor) -> None:
        """Write the values of each row of `messages` into the row of `out`: (rows, numel) in any floating dtype."""
        if not out.numel():
            return
        scales, codes = self._parts(messages, out.shape[1])
        scratch = self._scratch(len(out), out.shape[1], out.device)
        for rows, begin, end, width in self._tiles(out):
            values = self._values(scratch, scales, codes, rows, begin, end, width)
            out[rows, begin:end].copy_(values[:, : end - begin])

    def add_up(self, messages: torch.Tensor, out: torch.Tensor, *, accumulate: bool = False) -> None:
        """Set (or add to) 1-D `out` the sum over the rows of uint8 `messages`, in fp32.

        A CPU adds in the order of the rows; a device adds all at once, in an order that depends on the shape only.
        """
        if not out.numel():
            return
        scales, codes = self._parts(messages, out.numel())
        together = 1 if in_parts(out.device) else len(messages)
        first = self._scratch(together, out.numel(), out.device)
        next_ = self._scratch(1, out.numel(), out.device) if together < len(messages) else first
        for _, begin, end, width in self._tiles(out.unsqueeze(0), together):
            total = self._values(first, scales, codes, slice(0, together), begin, end, width)
            if together > 1:
                total = total.sum(0, keepdim=True)
            for term in range(together, len(messages)):
                total.add_(self._values(next_, scales, codes, slice(term, term + 1), begin, end, width))
            target, total = out[begin:end], total[0, : end - begin]
            if accumulate:
                target.add_(total)
            else:
                target.copy_(total)

    def _sizes(self, numel: int) -> tuple[int, int]:
        return _SCALE_BYTES * -(-numel // self.block), numel if self.bits == 8 else -(-numel // 2)

    def _parts(self, messages: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales, codes = self._sizes(numel)
        assert messages.shape[1] == scales + codes + -codes % _SCALE_BYTES, (messages.shape, numel)
        return messages[:, :scales].view(torch.float32), messages[:, scales : scales + codes]

    def _tiles(self, values: torch.Tensor, terms: int = 1) -> Iterator[tuple[slice, int, int, int]]:
        """Yield rows, first and last column, and values to a block of each tile; the rest of a row is one block.

        Each value of a tile has a number of `terms`, which take scratch memory. In a dry run one tile of each kind
        represents all, which take the same memory.
        """
        (rows, numel), device, all_ = values.shape, values.device, has_values(values)
        whole = numel - numel % self.block
        most = max(chunk_of(rows * numel, device) // (terms * self.block), 1) * self.block
        for start, stop, width in ((0, whole, self.block), (whole, numel, numel - whole + numel % 2)):
            if start == stop:
                continue
            columns = min(stop - start, most)
            together = max(most // (stop - start), 1)
            for row in range(0, rows, together):
                for begin in range(start, stop, columns):
                    yield slice(row, row + together), begin, min(begin + columns, stop), width
                    if not all_:
                        break
                if not all_:
                    break

    def _places(self, begin: int, end: int, width: int) -> tuple[slice, slice]:
        first = begin // self.block
        scales = slice(first, first + -(-(end - begin) // width))
        return scales, slice(begin, end) if self.bits == 8 else slice(begin // 2, -(-end // 2))

    def _scratch(self, rows: int, numel: int, device: torch.device) -> torch.Tensor:
        # Made once for all tiles, because the system zeroes new memory each time.
        scratch = torch.empty(self.scratch_bytes(rows, numel, device) // 8, dtype=torch.float32, device=device)
        self.hold(scratch)
        return scratch

    def _values(
        self,
        scratch: torch.Tensor,
        scales: torch.Tensor,
        codes: torch.Tensor,
        rows: slice,
        begin: int,
        end: int,
        width: int,
    ) -> torch.Tensor:
        """Return (rows, columns) fp32 values in `scratch`, columns padded to whole blocks."""
        places, range_ = self._places(begin, end, width)
        scale = scales[rows, places].unsqueeze(2)
        values = _shaped(scratch, scale.shape[0], scale.shape[1] * width)
        blocks = values.view(*scale.shape[:2], width)
        self._unpack(codes[rows, range_], blocks)
        # Not fused with a sum, because a multiply-add would round differently, and only where the compiler forms one.
        blocks.mul_(scale)
        return values

    def _pack(self, work: torch.Tensor, codes: torch.Tensor) -> None:
        """Write (rows, blocks, width) whole numbers; 4 bits overwrite `work` (second half of a block: high bits)."""
        if self.bits == 8:
            codes.view(torch.int8).copy_(work.flatten(1)[:, : codes.shape[1]])
        else:
            low, high = work.chunk(2, 2)
            low.add_(high, alpha=16).add_(8 + 8 * 16)
            codes.unflatten(1, (-1, low.shape[2])).copy_(low)

    def _unpack(self, codes: torch.Tensor, work: torch.Tensor) -> None:
        if self.bits == 8:
            flat = work.flatten(1)
            flat[:, : codes.shape[1]].copy_(codes.view(torch.int8))
            flat[:, codes.shape[1] :].zero_()
        else:
            low, high = work.chunk(2, 2)
            packed = codes.unflatten(1, (-1, low.shape[2]))
            low.copy_(packed & 15)
            high.copy_(packed >> 4)
            work.sub_(8)


def _shaped(scratch: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return scratch[: rows * columns].view(rows, columns)
