"""Check of sequence parallelism: compares a model on split sequences with the same model on whole ones.

Because attention, restarting positions and masks of one rank's tokens give wrong results without an error, each rank
runs the model twice before the first training pass, without gradients and dropout: on a few whole sequences, and on its
part of the tokens. Module outputs must agree. The sequences have a few tokens of the batch from each rank, with padding
and packed samples if the batch has them. Both passes are in evaluation mode; a third, on this rank's part, is in
training mode. If a module returns other numbers there, training mode runs on whole sequences, too.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.errors import UsageError
from shardwise.parallel.block_gradients import gradient_difference
from shardwise.parallel.recording import LIMITS, Call, Passes, Recording, Seen, apart, has_capacity, is_needed, unlike
from shardwise.parallel.sequence import SequenceGroup, runs_of
from shardwise.trees import tensors_in
from shardwise.utils.logging import warn_once

TOKENS = 8  # maximum number of tokens of each rank


def difference(
    run: Callable[..., Any],
    model: nn.Module,
    group: SequenceGroup,
    job: Communicator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    divided: bool,
    stage: bool = False,
) -> str | None:
    """Return the first difference of any rank between split and whole sequences in words; None if there is none.

    All ranks of the job call, because parameters may be sharded over them. `divided`: a later pass compares the layers
    of a tensor-parallel model. `stage`: the model is a pipeline stage, which may have no attention. Raises a UsageError
    if the model cannot run on a rank's own tokens.
    """
    call = _call_of(model, group, args, kwargs)
    if not all(job.exchange(call is not None, "sequence_proof")):
        return "the inputs of a stage have no tokens in the second dimension, or all tokens" if stage else None
    assert call is not None
    passes = Passes(run, model, group, call)
    try:
        return _difference(passes, job, divided, stage)
    finally:
        passes.restore()


def _difference(passes: Passes, job: Communicator, divided: bool, stage: bool) -> str | None:
    model, group = passes.model, passes.group
    exchanges = group.exchanges
    own = passes.own(training=False)  # first, because unsupported calls name themselves
    if isinstance(own, str):
        if divided:
            return None  # because the comparison of tensor-parallel blocks names the layer
        raise UsageError(
            f"sequence parallelism over {group.size} ranks: {type(model).__name__} raises {own}. If it runs in one "
            "process, it cannot share sequences: set sequence_parallel_size to 1"
        )
    whole = passes.whole(training=False)
    if group.exchanges == exchanges and not stage:
        return None  # the following pass is refused for this reason
    if found := _first_of(job, _compared(passes, whole, own)):
        return found
    found, why = _training_difference(passes, own, job)
    found = found or gradient_difference(passes, whole, own, job, training=why is None)
    if found is not None:
        return found
    if why is not None and job.rank == 0:
        warn_once(
            f"sequence parallelism: {type(model).__name__} in training mode cannot be compared with one process: "
            f"{why}. In evaluation mode it agrees. Code that runs in training only must treat each token by itself"
        )
    _warn_of_hooks(model, job)
    return None


def _training_difference(passes: Passes, own: Recording, job: Communicator) -> tuple[str | None, str | None]:
    """Return the first rank's difference in training mode, and a reason why passes cannot be compared."""
    trained = passes.own(training=True)
    alike = not isinstance(trained, str) and unlike(own, trained, exact=True) is None
    if all(job.exchange(alike, "sequence_proof")):
        return None, None
    failed = _first_of(job, trained if isinstance(trained, str) else None)
    if failed is not None:
        return None, failed
    assert not isinstance(trained, str)
    whole = passes.whole(training=True)
    found = _first_of(job, _compared(passes, whole, trained))
    if found is None:
        return None, None
    again = passes.whole(training=True, again=True)
    why = _first_of(job, "the model draws random numbers" if whole.drew else unlike(whole, again))
    return (f"{found}, in training mode", None) if why is None else (None, f"{found}; {why}")


def _warn_of_hooks(model: nn.Module, job: Communicator) -> None:
    for name, module in model.named_modules():
        for hook in [*module._backward_hooks.values(), *module._backward_pre_hooks.values()]:
            if not is_needed(hook) and job.rank == 0:
                warn_once(
                    f"sequence parallelism: the backward hook {getattr(hook, '__qualname__', type(hook).__name__)} of "
                    f"{name or 'the model'} gets gradients of a rank's own tokens, and is not compared with one "
                    "process. A gradient that the hook returns must depend on each token by itself"
                )
                return


def _first_of(job: Communicator, found: str | None) -> str | None:
    told = job.exchange(found, "sequence_proof")
    return next((f"on rank {rank} {text}" for rank, text in enumerate(told) if text is not None), None)


def _compared(passes: Passes, whole: Recording, own: Recording) -> str | None:
    found = _first_difference(whole.seen, own.seen, passes.group, passes.call.tokens)
    found = found or _pooled(whole.output, own.output)
    loss = _loss_apart(passes.model, tensors_in(whole.output), tensors_in(own.output), passes.call, passes.group)
    return found or loss


def _call_of(model: nn.Module, group: SequenceGroup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """Return the arguments of both passes; None if all ranks have whole sequences, which is refused later."""
    takes = inspect.signature(model.forward).parameters
    named = [*zip([*takes, *[""] * len(args)], args, strict=False), *kwargs.items()]
    tensors = [(name, value) for name, value in named if isinstance(value, torch.Tensor)]
    rows, own = next(((len(x), x.shape[1]) for _, x in tensors if x.dim() > 1), (0, 0))
    positions = next((x for name, x in tensors if name == "position_ids" and x.dim() == 2), None)
    padded = any(not bool(x.all()) for name, x in tensors if name == "attention_mask")
    told = group.comm.exchange([own, padded, runs_of(positions)], "sequence_proof")
    if not group.aligned and all(run == [0, length] for length, _, run in told):
        return None
    few = min(TOKENS, *(length for length, *_ in told))
    if few < 1:
        return None
    batch = _Batch(group, few, rows, own, padded=any(entry[1] for entry in told), runs=[entry[2] for entry in told])
    whole = [batch.whole(value, name) for name, value in named]
    own_values = [batch.part(new, old) for new, (_, old) in zip(whole, named, strict=True)]
    count = len(args)
    given = dict(zip(kwargs, whole[count:], strict=True))
    optional = "position_ids" not in takes or takes["position_ids"].default is not inspect.Parameter.empty
    if "position_ids" in given and batch.counted and optional:
        del given["position_ids"]  # made by `split`; in one process the model computes its own
    return Call(
        (tuple(whole[:count]), given),
        (tuple(own_values[:count]), dict(zip(kwargs, own_values[count:], strict=True))),
        few,
    )


@dataclass
class _Batch:
    group: SequenceGroup
    few: int  # tokens of each rank; the batch has one row with its first tokens
    rows: int  # of this rank's arguments
    own: int  # tokens of this rank's arguments
    padded: bool
    runs: list[list[int] | None]  # position range [first, end) of each rank; None: not consecutive

    @property
    def packed(self) -> bool:
        return any(run is None for run in self.runs) or any(
            run[0] != before[1] for before, run in itertools.pairwise(self.runs) if run and before
        )

    @property
    def counted(self) -> bool:
        return not self.packed and self.runs[0] is not None and self.runs[0][0] == 0

    def has_tokens(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[1] == self.own

    def whole(self, value: Any, name: str) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        tokens = self.few * self.group.size
        if not self.has_tokens(value):
            return value[:1] if value.dim() > 0 and len(value) == self.rows else value
        if name == "position_ids":
            first = self.runs[0][0] if self.runs[0] is not None else 0
            places = torch.arange(tokens, device=value.device) + first
            if self.packed:
                places[self.few + 1 :] -= self.few + 1
            return places.view(1, -1).to(value.dtype)
        if name == "attention_mask":
            mask = torch.ones(1, tokens, dtype=value.dtype, device=value.device)
            mask[:, : self.few // 2 if self.padded else 0] = 0
            return mask
        if value.is_floating_point():
            generator = torch.Generator("cpu").manual_seed(value.dim())
            drawn = torch.randn(1, tokens, *value.shape[2:], generator=generator, device="cpu")
            return drawn.to(value.device, value.dtype)
        part = value[:1, : self.few]
        flat = part.reshape(1, self.few, -1).movedim(2, 0).reshape(-1, self.few)
        found = self.group.whole(flat, [self.few] * self.group.size)
        return found.view(-1, tokens).T.reshape(1, tokens, *value.shape[2:])

    def part(self, whole: Any, value: Any) -> Any:
        if not self.has_tokens(value):
            return whole
        first = self.group.rank * self.few
        return whole[:, first : first + self.few].contiguous()


def _first_difference(whole: list[Seen], own: list[Seen], group: SequenceGroup, few: int) -> str | None:
    expected: dict[tuple[str, int], Seen] = {}
    calls: dict[str, int] = {}
    for seen in whole:
        calls[seen.name] = calls.get(seen.name, 0) + 1
        expected[seen.name, calls[seen.name]] = seen
    calls = {}
    for seen in own:
        calls[seen.name] = calls.get(seen.name, 0) + 1
        other = expected.get((seen.name, calls[seen.name]))
        if other is None or len(other.returned) != len(seen.returned):
            continue
        off = apart(other.returned, seen.returned, group, few)
        if off is not None:
            alike = len(other.taken) == len(seen.taken) and apart(other.taken, seen.taken, group, few) is None
            how = "returns" if alike else "is given"
            return (
                f"{seen.name or 'the model'} {how} other numbers (what it returns differs by {off:.1e} of the largest)"
            )
    return None


def _pooled(expected: Any, mine: Any) -> str | None:
    for number, (whole, own) in enumerate(zip(tensors_in(expected), tensors_in(mine), strict=False)):
        if whole.dim() != 2 or whole.shape != own.shape or len(whole) != 1 or not whole.is_floating_point():
            continue
        off = float((whole - own).abs().nan_to_num(0, 0, 0).max()) / (float(whole.abs().max()) or 1.0)
        if off > LIMITS[whole.dtype]:
            return (
                f"the model returns other numbers for a sequence (output {number} of shape {list(own.shape)} differs "
                f"by {off:.1e} of the largest), as it takes a token, a mean or a maximum of this rank's tokens"
            )
    return None


def _loss_apart(
    model: nn.Module, whole: list[torch.Tensor], own: list[torch.Tensor], call: Call, group: SequenceGroup
) -> str | None:
    """Return how the loss of whole sequences can be no mean, and no sum, of the ranks' losses (all ranks call)."""
    losses = [[x for x in some if x.dim() == 0 and x.is_floating_point()][:1] for some in (whole, own)]
    told = group.comm.exchange([[float(some[0]) if some else None for some in losses], call.weights], "sequence_loss")
    expected = told[0][0][0]
    every = [(mine, [1, *weights]) for (_, mine), weights in told if mine is not None and math.isfinite(mine)]
    if expected is None or not math.isfinite(expected) or not every or _balances(model):
        return None
    found = [mine for mine, _ in every]
    limit = LIMITS[losses[0][0].dtype] * max(map(abs, [expected, *found]))
    means = [
        sum(mine * some[index] for mine, some in every) / (sum(some[index] for _, some in every) or 1)
        for index in range(len(every[0][1]))
    ]
    if any(abs(one - expected) <= limit for one in [sum(found), *means]):
        return None
    shown = f"{expected:.5g} of whole sequences, {', '.join(f'{mine:.5g}' for mine in found)} of the ranks' tokens"
    # A mean with any weights lies between the smallest and the largest.
    if not min(found) - 10 * limit <= expected <= max(found) + 10 * limit:
        return f"the model returns a loss that is neither a mean nor a sum of the ranks' losses ({shown})"
    if group.rank == 0:
        warn_once(
            f"sequence parallelism: the loss that {type(model).__name__} returns is no mean of the ranks' losses by "
            f"their tokens or labels ({shown}). If the model shifts labels, or takes a mean of tokens, gradients are "
            "not those of one process: have it return logits, and compute the loss by shardwise.parallel.token_loss"
        )
    return None


def _balances(model: nn.Module) -> bool:
    """Return True if the model may add an expert load-balancing loss, which is of each rank's tokens."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "output_router_logits", False) for config in configs) or any(
        has_capacity(module) for module in model.modules()
    )
