"""Gradients of blocks for the check of sequence parallelism.

Because a custom autograd function or a tensor hook may mix tokens in the backward pass only, one block of each kind is
copied with random weights. The copy computes the gradient of its input on whole sequences and on this rank's part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.parallel.deterministic import Deterministic
from shardwise.parallel.recording import Passes, Recording, apart, leave_out_statistics, token_dimension
from shardwise.parallel.sequence import whole_sequences
from shardwise.parallel.tensor.check import frozen
from shardwise.parallel.tensor.copies import copied, declared, map_inputs, random_weight, whole_shape
from shardwise.parallel.tensor.watch import undisturbed
from shardwise.trees import tensors_in
from shardwise.utils.logging import warn_once

_LIMIT = 1e-3  # smallest error of a token beyond rounding, relative to the tensor's largest value


def gradient_difference(
    passes: Passes, whole: Recording, own: Recording, job: Communicator, *, training: bool
) -> str | None:
    """Return the first block of any rank with other gradients for split sequences, in words (all ranks call)."""
    skipped = []
    for path, block in passes.blocks.items():
        if not all(job.exchange(path in whole.given and path in own.given, "sequence_proof")):
            continue
        pair = _Pair(passes, block, training)
        failed = job.exchange(pair.run_whole(whole.given[path]), "sequence_proof")
        problem = next((text for text in failed if text), None)
        found = None
        if problem is None:
            found, problem = pair.run_own(own.given[path])
        told = job.exchange(found, "sequence_proof")
        for rank, text in enumerate(told):
            if text is not None:
                return f"on rank {rank} {path} ({type(block).__name__}) {text}"
        if problem is not None:
            skipped.append(f"{path} ({problem})")
    if skipped and job.rank == 0:
        warn_once(
            f"sequence parallelism: gradients of {', '.join(skipped)} cannot be compared with one process. Custom "
            "autograd functions and hooks in these blocks must treat each token by itself"
        )
    return None


class _Pair:
    def __init__(self, passes: Passes, block: nn.Module, training: bool) -> None:
        self._training, self._restore = training, passes.restore
        self._block, self._group, self._tokens = block, passes.group, passes.call.tokens
        self._device = passes.group.comm.device
        own = next((p.dtype for p in block.parameters() if p.is_floating_point()), torch.float32)
        first = torch.float64 if self._device.type == "cpu" else torch.float32
        self._dtypes = list(dict.fromkeys((first, torch.float32, own)))

    def run_whole(self, given: Any) -> str | None:
        """Compute in the first dtype that works; return the error of the first dtype, in words."""
        problem = None
        while self._dtypes:
            try:
                with undisturbed(self._device), whole_sequences(self._group):
                    hidden, output = self._forward(given)
                    self._seed = torch.randn(output.shape, generator=self._generator(), device=self._device)
                    self._output = output.detach()
                    self._gradient = _gradient(hidden, output, self._seed)
                return None
            except Exception as error:
                problem = problem or _said(error)
                self._dtypes = self._dtypes[1:]
        return problem

    def run_own(self, given: Any) -> tuple[str | None, str | None]:
        try:
            with undisturbed(self._device):
                hidden, output = self._forward(given)
                dim = token_dimension(self._output.shape, output.shape, self._group.size, self._tokens)
                if dim is None:
                    return None, f"its output has the shape {list(output.shape)}"
                seed = self._seed.narrow(dim, self._group.rank * self._tokens, self._tokens)
                gradient = _gradient(hidden, output, seed.contiguous())
        except Exception as error:
            return None, _said(error)
        for name, expected, found in (
            ("returns other numbers", self._output, output.detach()),
            ("has another gradient of its input", self._gradient, gradient),
        ):
            limit = _LIMIT if found.dtype.itemsize > 2 else None
            off = apart([expected], [found], self._group, self._tokens, limit)
            if off is not None:
                return f"{name} with random weights (by {off:.1e} of the largest)", None
        return None, None

    def _forward(self, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self._restore()
        dtype = self._dtypes[0]
        names = {name: number for number, (name, _) in enumerate(self._block.named_parameters())}
        parts = declared(self._block)

        def values(name: str, parameter: nn.Parameter) -> torch.Tensor:
            if not parameter.is_floating_point():
                return parameter.detach().clone()
            shape = whole_shape(parameter) if name in parts else tuple(parameter.shape)
            return random_weight(names.get(name, 0), shape, self._device).to(dtype)

        hidden: list[torch.Tensor] = []

        def change(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            made = tensor.detach().to(dtype, copy=True)
            if not hidden and made.dim() > 1:
                hidden.append(made.requires_grad_())
                return made.clone()  # because a block may modify its input in place
            return made

        copy = copied(self._block, values, dtype, None).requires_grad_(False)
        leave_out_statistics(copy if self._training else copy.eval())
        args, kwargs = map_inputs(given, change)
        with Deterministic(), frozen(self._block):
            made = copy(*args, **kwargs)
        return hidden[0], next(tensor for tensor in tensors_in(made) if tensor.is_floating_point())

    def _generator(self) -> torch.Generator:
        return torch.Generator(self._device).manual_seed(0)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _gradient(hidden: torch.Tensor, output: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    with Deterministic():
        (found,) = torch.autograd.grad(output, hidden, seed.to(output.dtype), allow_unused=True)
    return torch.zeros_like(hidden) if found is None else found
