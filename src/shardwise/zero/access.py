"""Whole gradients, master weights and optimizer state of single parameters, for looking and changing between backward
and step.

Each function is a collective: every rank of the engine calls it, in the same order. A tensor that no engine owns gives
None.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardwise.errors import UsageError
from shardwise.zero import released
from shardwise.zero.communicated import CommunicatedUpdate
from shardwise.zero.model import ShardedModel

Run = tuple[int, int, torch.Tensor]

_KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types that optimizer state may have."""


def _find(parameter: torch.Tensor) -> tuple[ShardedModel, int] | None:
    owner = released.owner_of(parameter)
    if not isinstance(owner, ShardedModel) or owner.update is None:
        return None
    owner.hooks.settle()
    tensor = owner.registry.find(parameter)
    return None if tensor is None or not tensor.trainable else (owner, tensor.index)


def _assemble(model: ShardedModel, index: int, runs: Iterable[Run], dtype: torch.dtype, whole: bool) -> torch.Tensor:
    """Put runs of all ranks together; each element is stored on exactly one rank, or on all (`whole`)."""
    tensor = model.registry[index]
    flat = torch.zeros(tensor.numel, dtype=dtype, device=model.device)
    for start, stop, values in runs:
        flat[start:stop] = values
    if not whole:
        # Every element is zero on all ranks but one, so that the sum is exact.
        model.comm.all_reduce(flat, tensor.name).wait()
    return flat.view(tensor.shape)


def safe_get_full_fp32_param(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a parameter's whole master weights (fp32, or wider where the parameter is).

    Of parameters that have none it is the parameter's own value.
    """
    found = _find(parameter)
    if found is None:
        return None
    model, index = found
    assert model.update is not None
    section = model.section_of(index)
    model.take_changes()
    runs = model.update.master_pieces(index)
    dtype = torch.promote_types(section.master_dtype, torch.float32)
    return _assemble(model, index, runs, dtype, not model.plan.shard_optimizer)


def safe_set_full_fp32_param(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter's whole master weights, and the parameter with them; the same `value` on every rank.

    Raises:
        UsageError: `value` has another shape.
    """
    found = _find(parameter)
    if found is None:
        return
    model, index = found
    assert model.update is not None
    flat = _checked(model, index, value)
    registered = model.registry.parameters[index]
    gathered = model.gather([registered])
    model.values_of(index).copy_(flat)
    for unit in model.units_of([registered]):
        unit.store_shard()
    for start, stop, master in model.update.master_pieces(index):
        master.copy_(flat[start:stop])
    model.let_go(gathered)


def safe_get_full_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's whole gradient as the step will see it before clipping, or None if there is none yet.

    It is the mean (or sum, as configured) over ranks and the micro-batches so far, with the loss scale divided out, in
    the dtype in which gradients are accumulated. Where micro-batches have weights, it is their weighted mean so far.
    """
    found = _find(parameter)
    if found is None:
        return None
    model, index = found
    runs = model.gradient_runs(index)
    if runs is None:
        return None
    dtype = model.section_of(index).accumulate_dtype
    whole = _assemble(model, index, runs, dtype, whole=False)
    return whole.mul_(model.gradient_factor())


def safe_set_full_grad(parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter's whole gradient (as `safe_get_full_grad` gives it); the same `value` on every rank.

    Raises:
        UsageError: `value` has another shape, or gradients have not been reduced yet.
    """
    found = _find(parameter)
    if found is None:
        return
    model, index = found
    flat = _checked(model, index, value)
    assert model.reducer is not None
    if model.reducer.partial and model.reducer.local:
        raise UsageError(
            f"safe_set_full_grad: {type(model.optimizer).__name__} takes each rank's own gradient in this step and "
            "compresses what it makes of it, so there is no whole gradient that could be set"
        )
    if model.reducer.partial:
        raise UsageError(
            "safe_set_full_grad: gradients of this window are not reduced yet; call it after the last micro-batch"
        )
    section, factor = model.section_of(index), model.gradient_factor()
    for piece in section.layout.pieces(section.master_start, section.master_stop):
        if piece.index == index:
            target = section.whole_gradient[piece.offset : piece.offset + piece.stop - piece.start]
            target.copy_(flat[piece.start : piece.stop].to(target.dtype) / factor)


def safe_get_full_optimizer_state(parameter: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of a whole optimizer state tensor (`exp_avg`, `momentum_buffer`, ...), or None before the first
    step.

    Only states of the parameter's own shape are known by this function.
    """
    found = _find(parameter)
    if found is None:
        return None
    model, index = found
    assert model.update is not None
    runs = model.update.state_pieces(index, optim_state_key)
    # Ranks that store nothing of it learn its type, too.
    known = torch.tensor([float(any(run[2].dtype is kind for run in runs)) for kind in _KINDS], device=model.device)
    model.comm.all_reduce(known, "optimizer_state.known").wait()
    dtype = next((kind for kind, count in zip(_KINDS, known.tolist(), strict=True) if count), None)
    if dtype is None:
        return None
    return _assemble(model, index, runs, dtype, not model.plan.shard_optimizer)


def safe_set_full_optimizer_state(parameter: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set a whole optimizer state tensor; the same `value` on every rank. Nothing happens before the first step.

    Raises:
        UsageError: `value` has another shape.
    """
    found = _find(parameter)
    if found is None:
        return
    model, index = found
    assert model.update is not None
    flat = _checked(model, index, value)
    for start, stop, state in model.update.state_pieces(index, optim_state_key):
        state.copy_(flat[start:stop])
    if isinstance(model.update, CommunicatedUpdate):
        model.update.state_was_set()


def _checked(model: ShardedModel, index: int, value: torch.Tensor) -> torch.Tensor:
    tensor = model.registry[index]
    if tuple(value.shape) != tensor.shape:
        raise UsageError(f"parameter {tensor.name!r} has shape {tensor.shape}, the given value {tuple(value.shape)}")
    return value.detach().to(model.device).reshape(-1)
