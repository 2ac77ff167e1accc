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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from shardwise.comm.compression.base import Compressor, Flat, Running, working_dtype

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config.schema import gradients

_BLOCK = 1 << 17  # elements of a product of factors that are computed at a time


@dataclass(frozen=True)
class Matrix:
    """A compressed parameter as a matrix: `rows` by `columns`, with factors of `rank` columns.

    First elements: `offset` in the flat parameter, `error` in its error, `p` and `q` in its factors.
    """

    offset: int
    rows: int
    columns: int
    rank: int
    error: int
    p: int
    q: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    def view(self, flat: torch.Tensor, first: int) -> torch.Tensor:
        """Return the matrix in a flat tensor."""
        return flat[first : first + self.numel].view(self.rows, self.columns)

    def p_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its first factor (rows by rank) in a message."""
        return flat[self.p : self.p + self.rows * self.rank].view(self.rows, self.rank)

    def q_in(self, flat: torch.Tensor) -> torch.Tensor:
        """Return its second factor (columns by rank) in a message."""
        return flat[self.q : self.q + self.columns * self.rank].view(self.columns, self.rank)


@dataclass(frozen=True)
class Split:
    """Layout of a flat parameter in messages: the first has P of all `matrices` and the exact parameters, the second Q.

    `exact` has, of each parameter: first element in the flat parameter, number of elements, first element in the
    message. `kept`, `first` and `second` are the elements of the error and of the messages.
    """

    matrices: tuple[Matrix, ...]
    exact: tuple[tuple[int, int, int], ...]
    kept: int
    first: int
    second: int


def split(shapes: Sequence[tuple[int, torch.Size]], rank: int, min_rate: float) -> Split:
    """Choose the compressed parameters of a flat parameter, at a ratio of matrix to factors of at least `min_rate`.

    >>> found = split([(0, torch.Size([64, 32])), (2048, torch.Size([32]))], rank=2, min_rate=2.0)
    >>> found.matrices[0].rows, found.first, found.second
    (64, 160, 64)
    """
    matrices: list[Matrix] = []
    vectors = []
    error = first = second = 0
    for offset, shape in shapes:
        numel = shape.numel()
        rows = shape[0] if len(shape) > 1 else 0
        columns = numel // rows if rows else 0
        used = min(rank, rows, columns)
        if used and (rows + columns) * used * min_rate < numel:
            matrices.append(Matrix(offset, rows, columns, used, error, first, second))
            error, first, second = error + numel, first + rows * used, second + columns * used
        elif numel:
            vectors.append((offset, numel))
    exact = []
    for offset, numel in vectors:
        exact.append((offset, numel, first))
        first += numel
    return Split(tuple(matrices), tuple(exact), error, first, second)


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


class PowerSGD(Compressor):
    """Reduces matrices as the factors of a low-rank approximation."""

    def __init__(
        self, parameters: gradients.PowerSGDOptions, comm: Communicator, hold: Callable[[torch.Tensor], None]
    ) -> None:
        super().__init__(comm, parameters.start_compressing_after_step, hold)
        self.parameters = parameters

    @override
    def reduce(
        self, flats: Sequence[Flat], label: str, *, accumulate: bool, scale: float, wire_dtype: torch.dtype | None
    ) -> Running:
        jobs = [_Job(flat, self, scale) for flat in flats]
        for job in jobs:
            job.project()
        firsts = [job.first for job in jobs]
        handle = self.comm.reduce_scatter([(self._own(first), first) for first in firsts], label)

        def finish() -> None:
            self._spread(firsts, label)
            rest = [job for job in jobs if job.split.matrices]
            for job in rest:
                job.factorize(self.parameters.orthogonalization_epsilon)
            if rest:
                seconds = [job.second for job in rest]
                owns = [torch.empty_like(self._own(second)) for second in seconds]
                under_way = self.comm.reduce_scatter(list(zip(owns, seconds, strict=True)), label)
                for buffer in (*owns, *under_way.scratch):
                    self.hold(buffer)
                if self.parameters.use_error_feedback:
                    for job in rest:
                        job.keep_rest()
                under_way.wait()
                for own, second in zip(owns, seconds, strict=True):
                    self._own(second).copy_(own)
                self._spread(seconds, label)
            for job in jobs:
                job.store(self.comm.rank, accumulate)
                if job.split.matrices and self.parameters.warm_start:
                    job.keep_factor()

        return Running([handle], finish, firsts)

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
    def __init__(self, flat: Flat, method: PowerSGD, scale: float) -> None:
        chosen = method.parameters
        parts = split(flat.shapes, chosen.matrix_approximation_rank, chosen.min_compression_rate)
        self.flat, self.split = flat, parts
        self.dtype = working_dtype(flat.full.dtype)
        self._method = method
        self.first = method.message(parts.first, self.dtype)
        self._matrices = self._with_what_is_kept(scale)

    def _with_what_is_kept(self, scale: float) -> list[torch.Tensor]:
        flat, method = self.flat, self._method
        if not method.parameters.use_error_feedback:
            wide = [m.view(flat.full, m.offset).to(self.dtype) for m in self.split.matrices]
            if flat.full.dtype is not self.dtype:
                for matrix in wide:
                    method.hold(matrix)
            return wide
        if not self.split.matrices:
            return []
        error = method.kept.at(f"{flat.name}.error", self.split.kept, self.dtype, scale)
        return [m.view(error, m.error).add_(m.view(flat.full, m.offset)) for m in self.split.matrices]

    @property
    def _factor(self) -> str:
        return f"{self.flat.name}.factor"

    def project(self) -> None:
        """Form M Q of all matrices, and copy exact parameters into the message."""
        if self.split.matrices:
            start = self._method.kept.get(self._factor)
            if start is None or self._method.parameters.orthogonalization_epsilon:  # else QR recovers from zeros
                seeded = self._method.seeded(self.flat.name, self.split.second, self.dtype)
                start = seeded if start is None else self._revived(start, seeded)
            for place, matrix in zip(self.split.matrices, self._matrices, strict=True):
                torch.mm(matrix, place.q_in(start), out=place.p_in(self.first))
        for offset, numel, place_in in self.split.exact:
            self.first[place_in : place_in + numel].copy_(self.flat.full[offset : offset + numel])

    def _revived(self, factors: torch.Tensor, seeded: torch.Tensor) -> torch.Tensor:
        """Return factors with random columns in place of zero columns, because zeros would stay."""
        pairs = [(place.q_in(factors), place.q_in(seeded)) for place in self.split.matrices]
        return torch.cat([torch.where(q.any(dim=0), q, other).view(-1) for q, other in pairs])

    def factorize(self, epsilon: float) -> None:
        """Orthogonalize the summed P in place, and form M^T P."""
        self.second = self._method.message(self.split.second, self.dtype)
        for place, matrix in zip(self.split.matrices, self._matrices, strict=True):
            p = place.p_in(self.first)
            finite = p.isfinite().all()
            basis = orthogonalize(p.nan_to_num(0.0, 0.0, 0.0), epsilon)
            # If any rank's matrix is not finite, only that is sent: the whole matrix stays in the error.
            p.copy_(torch.where(finite, basis, 0.0))
            torch.mm(matrix.t(), p, out=place.q_in(self.second))

    def keep_rest(self) -> None:
        for place, matrix in zip(self.split.matrices, self._matrices, strict=True):
            matrix.addmm_(place.p_in(self.first), place.q_in(self.second).t(), alpha=-1)

    def keep_factor(self) -> None:
        kept = self._method.kept.get(self._factor)
        summed = self.second[: self.split.second]
        if kept is None:
            self._method.kept.put(self._factor, summed.clone())
        else:
            kept.copy_(summed)

    def store(self, rank: int, accumulate: bool) -> None:
        flat = self.flat
        out = flat.own if flat.whole is None else flat.whole
        start = rank * flat.own.numel() if flat.whole is None else 0
        if not accumulate:
            out.zero_()
        for offset, numel, place_in in self.split.exact:
            _add(out, start, offset, self.first[place_in : place_in + numel])
        for place in self.split.matrices:
            p, q = place.p_in(self.first), place.q_in(self.second)
            height = max(1, _BLOCK // place.columns)
            for row in range(0, place.rows, height):
                offset = place.offset + row * place.columns
                block = p[row : row + height]
                if offset < start + out.numel() and start < offset + block.shape[0] * place.columns:
                    _add(out, start, offset, torch.mm(block, q.t()).view(-1))


def _add(out: torch.Tensor, start: int, offset: int, values: torch.Tensor) -> None:
    """Add the overlap of values, which begin at `offset`, with a range that begins at `start`."""
    low, high = max(start, offset), min(start + out.numel(), offset + values.numel())
    if low < high:
        out[low - start : high - start].add_(values[low - offset : high - offset])
