"""PowerSGD: matrices of gradients are sent as the factors of a low-rank approximation.

Vogels et al., "PowerSGD: Practical low-rank gradient compression for distributed optimization", 2019. M is a rank's
gradient plus its error. One step of the power method from the last factor Q gives the factors of the sum of all ranks'
matrices: P = orthogonalized sum of M Q, and the sum of M^T P, which is the next Q. Each rank keeps the error M - P (M^T
P)^T.

Every parameter with two or more dimensions is a matrix, first dimension by the rest. Vectors, and matrices with hardly
smaller factors, are sent exactly, in one collective with the first factors. Factors are summed in rank order, and every
rank computes each block of rows of their product alike: all ranks and ZeRO stages get the same bits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from typing_extensions import override

from shardwise.comm.compression.base import Configured, Flat, Running, working_dtype

if TYPE_CHECKING:
    from shardwise.config.schema import gradients

_BLOCK = 1 << 17  # elements of a product of factors that are computed at a time


class Split(NamedTuple):
    """Layout of a flat parameter: (first element, elements) of compressed matrices and of exact parameters.

    `kept` has the shapes in the error, the matrices; `first` those in the first message, P of all matrices and the
    exact parameters; `second` those in the second message, Q of all matrices.
    """

    matrices: list[tuple[int, int]]
    exact: list[tuple[int, int]]
    kept: list[tuple[int, ...]]
    first: list[tuple[int, ...]]
    second: list[tuple[int, ...]]


def elements(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the number of elements of all shapes."""
    return sum(map(math.prod, shapes))


def _views(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    pieces = flat[: elements(shapes)].split([math.prod(shape) for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def split(shapes: Sequence[tuple[int, torch.Size]], rank: int, min_rate: float) -> Split:
    """Choose the compressed parameters of a flat parameter, at a ratio of matrix to factors of at least `min_rate`.

    >>> found = split([(0, torch.Size([64, 32])), (2048, torch.Size([32]))], rank=2, min_rate=2.0)
    >>> found.kept, found.first, found.second
    ([(64, 32)], [(64, 2), (32,)], [(32, 2)])
    """
    found = Split([], [], [], [], [])
    for offset, shape in shapes:
        numel = shape.numel()
        rows = shape[0] if len(shape) > 1 else 0
        columns = numel // rows if rows else 0
        used = min(rank, rows, columns)
        if used and (rows + columns) * used * min_rate < numel:
            found.matrices.append((offset, numel))
            found.kept.append((rows, columns))
            found.first.append((rows, used))
            found.second.append((columns, used))
        elif numel:
            found.exact.append((offset, numel))
    found.first.extend((numel,) for _, numel in found.exact)
    return found


def orthogonalize(matrix: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Return an orthonormal basis of the columns: by QR, or by Gram-Schmidt with `epsilon` added to the norms.

    QR returns as many vectors as columns for any rank.
    """
    if epsilon == 0.0:
        return torch.linalg.qr(matrix).Q
    basis = matrix.clone()
    for number in range(basis.shape[1]):
        column = basis[:, number]
        column.div_(torch.linalg.vector_norm(column) + epsilon)
        rest = basis[:, number + 1 :]
        rest.sub_(torch.outer(column, column @ rest))
    return basis


class PowerSGD(Configured):
    """Reduces matrices as the factors of a low-rank approximation."""

    parameters: gradients.PowerSGDOptions

    @override
    def reduce(
        self, flats: Sequence[Flat], label: str, *, accumulate: bool, scale: float, wire_dtype: torch.dtype | None
    ) -> Running:
        jobs = [_Job(flat, self, scale) for flat in flats]
        firsts = [job.first for job in jobs]
        handle = self.comm.reduce_scatter([(self._own(first), first) for first in firsts], label)

        def finish() -> None:
            self._spread(firsts, label)
            rest = [job for job in jobs if job.matrices]
            if rest:
                seconds = [job.factorize() for job in rest]
                owns = [torch.empty_like(self._own(second)) for second in seconds]
                under_way = self.comm.reduce_scatter(list(zip(owns, seconds, strict=True)), label)
                for buffer in (*owns, *under_way.scratch):
                    self.hold(buffer)
                if self.parameters.use_error_feedback:
                    for job in rest:
                        job.keep_error()
                under_way.wait()
                for own, second in zip(owns, seconds, strict=True):
                    self._own(second).copy_(own)
                self._spread(seconds, label)
            for job in jobs:
                job.store(accumulate)

        return Running(handle, finish, firsts)

    def _own(self, message: torch.Tensor) -> torch.Tensor:
        return message.view(self.comm.world, -1)[self.comm.rank]

    def _spread(self, messages: Sequence[torch.Tensor], label: str) -> None:
        pairs = [(message, self._own(message)) for message in messages]
        self.comm.all_gather(pairs, label, kind="replicate").wait()

    def message(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of at least `numel` elements, a multiple of the number of ranks."""
        world = self.comm.world
        return self.buffer(max(1, -(-numel // world)) * world, dtype=dtype)

    def seeded(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return random initial factors, equal on all ranks."""
        step = 0 if self.parameters.warm_start else self.steps
        text = f"{self.parameters.random_seed} {name} {step}"
        generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big"))
        return torch.randn(numel, generator=generator, dtype=dtype, device="cpu").to(self.comm.device)


class _Job:
    """The reduction of one flat parameter, until the first message is complete: P = M Q of all matrices."""

    def __init__(self, flat: Flat, method: PowerSGD, scale: float) -> None:
        chosen = method.parameters
        self.flat, self.method = flat, method
        self.dtype = working_dtype(flat.full.dtype)
        self.split = split(flat.shapes, chosen.matrix_approximation_rank, chosen.min_compression_rate)
        self.first = method.message(elements(self.split.first), self.dtype)
        self.matrices = self._with_error(scale) if self.split.matrices else []
        found = _views(self.first, self.split.first)
        self.p, self.exact = found[: len(self.matrices)], found[len(self.matrices) :]
        if self.matrices:
            for matrix, p, q in zip(self.matrices, self.p, self._factors(), strict=True):
                torch.mm(matrix, q, out=p)
        for (offset, numel), place in zip(self.split.exact, self.exact, strict=True):
            place.copy_(flat.full[offset : offset + numel])

    def _with_error(self, scale: float) -> list[torch.Tensor]:
        flat, method, shapes = self.flat, self.method, self.split.kept
        given = [
            flat.full[offset : offset + numel].view(shape)
            for (offset, numel), shape in zip(self.split.matrices, shapes, strict=True)
        ]
        if not method.parameters.use_error_feedback:
            wide = [matrix.to(self.dtype) for matrix in given]
            for matrix in wide if flat.full.dtype is not self.dtype else ():
                method.hold(matrix)
            return wide
        errors = _views(method.kept.at(f"{flat.name}.error", elements(shapes), self.dtype, scale), shapes)
        return [error.add_(matrix) for error, matrix in zip(errors, given, strict=True)]

    def _factors(self) -> list[torch.Tensor]:
        """Return Q of the last step; for Gram-Schmidt with random columns in place of zero ones, which would stay."""
        shapes, method = self.split.second, self.method
        kept = method.kept.tensors.get(f"{self.flat.name}.factor")
        # One of another size is of a checkpoint with another rank.
        factors = _views(kept, shapes) if kept is not None and kept.numel() == elements(shapes) else []
        if factors and not method.parameters.orthogonalization_epsilon:  # QR recovers from zeros
            return factors
        seeded = _views(method.seeded(self.flat.name, elements(shapes), self.dtype), shapes)
        pairs = zip(factors, seeded, strict=True) if factors else ()
        return [torch.where(q.any(dim=0), q, other) for q, other in pairs] or seeded

    def factorize(self) -> torch.Tensor:
        """Orthogonalize the summed P in place; return the second message, with M^T P."""
        self.second = self.method.message(elements(self.split.second), self.dtype)
        self.q = _views(self.second, self.split.second)
        for matrix, p, q in zip(self.matrices, self.p, self.q, strict=True):
            finite = p.isfinite().all()
            basis = orthogonalize(p.nan_to_num(0.0, 0.0, 0.0), self.method.parameters.orthogonalization_epsilon)
            # If any rank's matrix is not finite, only that is sent: the whole matrix stays in the error.
            p.copy_(torch.where(finite, basis, 0.0))
            torch.mm(matrix.t(), p, out=q)
        return self.second

    def keep_error(self) -> None:
        for matrix, p, q in zip(self.matrices, self.p, self.q, strict=True):
            matrix.addmm_(p, q.t(), alpha=-1)

    def store(self, accumulate: bool) -> None:
        flat, method = self.flat, self.method
        out = flat.own if flat.whole is None else flat.whole
        start = method.comm.rank * flat.own.numel() if flat.whole is None else 0
        if not accumulate:
            out.zero_()
        for (offset, _), values in zip(self.split.exact, self.exact, strict=True):
            _add(out, start, offset, values)
        if not self.matrices:
            return
        for (offset, _), p, q in zip(self.split.matrices, self.p, self.q, strict=True):
            for block in p.split(max(1, _BLOCK // len(q))):
                numel = len(block) * len(q)
                if offset < start + out.numel() and start < offset + numel:
                    _add(out, start, offset, torch.mm(block, q.t()).view(-1))
                offset += numel
        if method.parameters.warm_start:
            numel = elements(self.split.second)
            method.kept.at(f"{flat.name}.factor", numel, self.dtype, 1.0).copy_(self.second[:numel])


def _add(out: torch.Tensor, start: int, offset: int, values: torch.Tensor) -> None:
    """Add the overlap of values, which begin at `offset`, with a range that begins at `start`."""
    low, high = max(start, offset), min(start + out.numel(), offset + values.numel())
    if low < high:
        out[low - start : high - start].add_(values[low - offset : high - offset])
