"""Access to gradients, master weights and optimizer state of single parameters, between backward and step.

`full` functions take and return unsharded tensors, and are collectives: all ranks of the engine call them in the same
order. `local` functions of this rank's range are local, except for `safe_set_local_fp32_param`, and raise UsageError at
stages 0 to 2. Setters raise UsageError for a value of another size. All return None for a parameter of no engine. Of a
declared part of a tensor (`shardwise.declare_part`), `full` is the tensor, `local` this rank's range of the part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch

from shardwise.errors import UsageError
from shardwise.zero.model import ShardedModel
from shardwise.zero.owner import ParameterOwner
from shardwise.zero.units import released
from shardwise.zero.units.unit import UnitState

Run = tuple[int, int, torch.Tensor]

_KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of optimizer state."""


def _find(parameter: torch.Tensor) -> tuple[ShardedModel, int] | None:
    owner = released.owner_of(parameter)
    if not isinstance(owner, ParameterOwner) or owner.model.update is None:
        return None
    owner.model.hooks.settle()
    tensor = owner.model.registry.find(parameter)
    return None if tensor is None or not tensor.trainable else (owner.model, tensor.index)


def _acquired(model: ShardedModel, index: int, *, written: bool = False) -> AbstractContextManager[None]:
    return model.state.acquired([model.unit_of(index)], written=written)


def _assemble(model: ShardedModel, index: int, runs: Iterable[Run], dtype: torch.dtype, whole: bool) -> torch.Tensor:
    """Sum ranges, then parts, over ranks into the full tensor; `whole`: all ranks have all elements of the part."""
    tensor, ranks = model.registry[index], model.unit_of(index).domain.ranks
    flat = torch.zeros(tensor.numel + -tensor.numel % ranks.world, dtype=dtype, device=model.device)
    for start, stop, values in runs:
        flat[start:stop] = values if whole else flat[start:stop] + values.to(flat.device)  # some are on the host
    if not whole:
        # The sum is exact, because each element of master weights and state is nonzero on one rank at most.
        ranks.sum_large(flat, tensor.name)
    return model.wholes.assemble(index, flat[: tensor.numel].view(tensor.shape))


def _assemble_state(model: ShardedModel, index: int, runs: Iterable[Run], dtype: torch.dtype) -> torch.Tensor:
    if model.section_of(index).layout.cut:  # its owner has the whole tensor
        tensor, comm = model.registry[index], model.comm
        numel = math.prod(tensor.global_shape)
        flat = torch.zeros(numel + -numel % comm.world, dtype=dtype, device=model.device)
        for start, stop, values in runs:
            flat[start:stop] = values
        comm.sum_large(flat, tensor.name)
        return flat[:numel].view(tensor.global_shape)
    whole = model.section_of(index).levels.optimizer == 0
    return _assemble(model, index, model.state.own_runs(index, runs), dtype, whole)


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return a copy of a parameter's full master weights (fp32 or wider); without these, of its own values."""
    found = _find(param)
    if found is None:
        return None
    model, index = found
    assert model.update is not None
    section = model.section_of(index)
    model.share_changes()
    dtype = torch.promote_types(section.master_dtype, torch.float32)
    with _acquired(model, index):
        return _assemble_state(model, index, model.update.master_pieces(index), dtype)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter's full master weights and the parameter; all ranks give the same `value`.

    Raises UsageError if `value` has another shape, or parameters differ by rank (between averages of 0/1 Adam).
    """
    found = _find(param)
    if found is None:
        return
    model, index = found
    assert model.update is not None
    flat = _checked(model, index, value)
    model.update.check_agreed(f"parameter {model.registry[index].name!r}")
    model.share_changes()
    (unit,) = model.units_of([model.registry.parameters[index]])
    model.unsharder.reshard_kept([unit])
    unit.wait_for_unshard()
    if unit.state is not UnitState.SHARDED:
        model.state.values_of(index).copy_(flat)
        unit.store_shard()
    with _acquired(model, index, written=True):
        stepped = _as_stepped(model, index, value)
        for start, stop, master in model.update.master_pieces(index):
            master.copy_(stepped[start:stop])
    if unit.state is UnitState.SHARDED or model.local is not None:
        model.state.publish([unit])
    else:
        model.values_changed()
        model.shards_written()


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's full gradient before clipping; None: there is no gradient yet.

    It is the mean (or sum, as configured) over ranks and past (weighted) micro-batches, in the accumulation dtype.
    """
    found = _find(param)
    if found is None:
        return None
    model, index = found
    with _acquired(model, index):
        runs = model.state.gradient_runs(index)
        if runs is None:
            return None
        whole = _assemble(model, index, runs, model.section_of(index).accumulate_dtype, whole=False)
    return whole.mul_(model.gradient_factor(index))


def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter's full gradient, in the scale of `safe_get_full_grad`; all ranks give the same `value`.

    Raises UsageError if `value` has another shape, or gradients have not been reduced yet.
    """
    found = _find(param)
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
    if model.reducer.unfinished:
        raise UsageError(
            "safe_set_full_grad: gradients of this window are not reduced yet; call it after the last micro-batch"
        )
    section, factor = model.section_of(index), model.gradient_factor(index)
    with _acquired(model, index, written=True):
        for piece in section.layout.pieces(section.master_start, section.master_stop):
            if piece.index == index:
                target = section.whole_gradient[piece.offset : piece.offset + piece.stop - piece.start]
                target.copy_(flat[piece.start : piece.stop].to(target.dtype) / factor)


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.Tensor], update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Replace full gradients by `update_func(full gradient, parameter)`; parameters and results are equal on all ranks.

    Parameters without a gradient are skipped. Raises UsageError as `safe_set_full_grad`.
    """
    for parameter in param_list:
        gradient = safe_get_full_grad(parameter)
        if gradient is not None:
            safe_set_full_grad(parameter, update_func(gradient, parameter))


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of full optimizer state of the parameter's shape (`exp_avg`, ...); None before the first step."""
    found = _find(param)
    if found is None:
        return None
    model, index = found
    assert model.update is not None
    with _acquired(model, index):
        runs = model.update.state_pieces(index, optim_state_key)
        # Ranks without state need the dtype, too.
        held = [float(any(run[2].dtype is kind for run in runs)) for kind in _KINDS]
        known = torch.tensor(held, dtype=torch.float32, device=model.device)
        # Ranks with an empty part need it, too.
        ranks = model.comm if model.wholes.divided(index) else model.unit_of(index).domain.ranks
        ranks.all_reduce(known, "optimizer_state.known").wait()
        dtype = next((kind for kind, count in zip(_KINDS, known.tolist(), strict=True) if count), None)
        if dtype is None:
            return None
        return _assemble_state(model, index, runs, dtype)


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set full optimizer state to the same `value` (else UsageError) on all ranks; no effect before the first step."""
    found = _find(param)
    if found is None:
        return
    model, index = found
    assert model.update is not None
    _checked(model, index, value)
    model.await_copies()
    with _acquired(model, index, written=True):
        stepped = _as_stepped(model, index, value)
        for start, stop, state in model.update.state_pieces(index, optim_state_key):
            state.copy_(stepped[start:stop])
    model.update.state_was_set()


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return a 1-D copy of this rank's range of master weights (stage 3, else UsageError), maybe empty."""
    found = _find_local(param, "safe_get_local_fp32_param")
    if found is None:
        return None
    model, index = found
    assert model.update is not None
    dtype = torch.promote_types(model.section_of(index).master_dtype, torch.float32)
    with _acquired(model, index):
        return _joined(model, (master.to(dtype) for _, _, master in model.update.master_pieces(index)), dtype)


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's range of a parameter's master weights at stage 3, and the parameter (all ranks call).

    Each rank gives its own `value`. Raises UsageError for another number of elements, or stages 0 to 2.
    """
    found = _find_local(param, "safe_set_local_fp32_param")
    if found is None:
        return
    model, index = found
    assert model.update is not None
    if model.local is not None:
        raise UsageError(
            "safe_set_local_fp32_param: not with local_sgd, because ranks of one place in all replicas "
            "need one value. Take safe_set_full_fp32_param"
        )
    model.share_changes()
    with _acquired(model, index, written=True):
        _fill(model, index, [master for _, _, master in model.update.master_pieces(index)], value)
    model.state.publish(model.units_of([param]))


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return a 1-D copy of this rank's range of `safe_get_full_grad` at stage 3; None: there is no gradient yet.

    Raises UsageError at stages 0 to 2, or if gradients have not been reduced yet.
    """
    found = _find_local(param, "safe_get_local_grad")
    if found is None:
        return None
    model, index = found
    with _acquired(model, index):
        runs = _local_gradient(model, index, "safe_get_local_grad")
        if runs is None:
            return None
        here = _joined(model, runs, model.section_of(index).accumulate_dtype)
    return here.mul_(model.gradient_factor(index))


def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's range of a gradient at stage 3, if there is one, in the scale of `safe_get_local_grad`.

    Raises UsageError for another number of elements, at stages 0 to 2, or if gradients are not reduced yet.
    """
    found = _find_local(param, "safe_set_local_grad")
    if found is None:
        return
    model, index = found
    with _acquired(model, index, written=True):
        runs = _local_gradient(model, index, "safe_set_local_grad")
        if runs is not None:
            _fill(model, index, runs, value / model.gradient_factor(index))


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return a 1-D copy of this rank's range of optimizer state (stage 3, else UsageError); None before a step."""
    found = _find_local(param, "safe_get_local_optimizer_state")
    if found is None:
        return None
    model, index = found
    assert model.update is not None
    with _acquired(model, index):
        runs = [state for _, _, state in model.update.state_pieces(index, optim_state_key)]
        if runs:
            return _joined(model, runs, runs[0].dtype)
    if model.update.master_ranges(index):
        return None
    with model.state.acquired(written=False):
        return _empty_state(model, optim_state_key)


def _empty_state(model: ShardedModel, key: str) -> torch.Tensor | None:
    """Return empty state of a parameter of which this rank has no range; None before the first step."""
    assert model.update is not None
    for tensor in model.registry:
        for _, _, state in model.update.state_pieces(tensor.index, key) if tensor.trainable else ():
            return state.new_empty(0)
    return torch.empty(0, device=model.device) if model.stepped else None


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Set this rank's range of optimizer state (stage 3 and its size, else UsageError); no effect before a step."""
    found = _find_local(param, "safe_set_local_optimizer_state")
    if found is None:
        return
    model, index = found
    assert model.update is not None
    with _acquired(model, index, written=True):
        runs = [state for _, _, state in model.update.state_pieces(index, optim_state_key)]
        if runs:
            model.await_copies()
            _fill(model, index, runs, value)
    if runs:
        model.update.state_was_set()


def _find_local(parameter: torch.Tensor, what: str) -> tuple[ShardedModel, int] | None:
    found = _find(parameter)
    if found is not None and not found[0].plan.shard_parameters:
        raise UsageError(
            f"{what}: every rank has whole parameters at stages 0 to 2, and no part of its own; take "
            f"{what.replace('local', 'full')}"
        )
    return found


def _local_gradient(model: ShardedModel, index: int, what: str) -> list[torch.Tensor] | None:
    assert model.reducer is not None
    if model.reducer.unfinished:
        raise UsageError(f"{what}: gradients of this window are not reduced yet; call it after the last micro-batch")
    runs = model.state.gradient_runs(index)
    return None if runs is None else [values for _, _, values in runs]


def _joined(model: ShardedModel, runs: Iterable[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(
        [torch.empty(0, dtype=dtype, device=model.device), *(run.detach().to(model.device) for run in runs)]
    )


def _fill(model: ShardedModel, index: int, runs: list[torch.Tensor], value: torch.Tensor) -> None:
    held = sum(run.numel() for run in runs)
    if value.numel() != held:
        raise UsageError(
            f"parameter {model.registry[index].name!r}: this rank's part has {held} elements, the given value "
            f"{value.numel()}"
        )
    flat = value.detach().to(model.device).reshape(-1)
    for run, part in zip(runs, flat.split([run.numel() for run in runs]), strict=True):
        run.copy_(part)


def _as_stepped(model: ShardedModel, index: int, value: torch.Tensor) -> torch.Tensor:
    if model.section_of(index).layout.cut:
        return value.detach().to(model.device).reshape(-1)
    return _checked(model, index, value)


def _checked(model: ShardedModel, index: int, value: torch.Tensor) -> torch.Tensor:
    tensor = model.registry[index]
    if tuple(value.shape) != tensor.global_shape:
        raise UsageError(
            f"parameter {tensor.name!r} has shape {tensor.global_shape}, the given value {tuple(value.shape)}"
            + (f" (it is given whole; this rank has the part {tensor.box})" if tensor.box is not None else "")
        )
    return tensor.cut(value.detach()).to(model.device).reshape(-1)
