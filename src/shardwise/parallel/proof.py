"""Check of sequence parallelism: compares a model on split sequences with the same model on whole ones.

Attention over one rank's tokens, positions that restart on each rank, and masks of one rank's tokens give wrong results
without an error. So before the first training pass each rank runs the model twice, without gradients and dropout: on a
few whole sequences, and on its part of the same tokens. Module outputs must agree. The sequences have a few tokens of
the batch from each rank, with padding and packed samples if the batch has them.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.compat import belongs_to_transformers
from shardwise.errors import ShardwiseError, UsageError
from shardwise.parallel.data import IGNORED
from shardwise.parallel.sequence import SequenceGroup, runs_of, whole_sequences
from shardwise.trees import tensors_in
from shardwise.utils.logging import warn_once

TOKENS = 8
"""Maximum number of tokens of each rank."""

_LIMITS = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
"""By dtype: smallest difference of a token that exceeds rounding, relative to the tensor's largest value."""


_RAISED = (RuntimeError, IndexError, TypeError, ValueError, AttributeError, KeyError)
"""Errors of torch and Python that do not mention sequences."""


@dataclass
class _Call:
    """Arguments of a forward pass on whole sequences, and on this rank's part."""

    whole: tuple[tuple[Any, ...], dict[str, Any]]
    own: tuple[tuple[Any, ...], dict[str, Any]]
    tokens: int

    @property
    def weights(self) -> list[int]:
        """How many of this rank's tokens have a label, and how many are not 0, by each tensor of integers."""
        args, kwargs = self.own
        some = [x for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor) and x.dim() > 1]
        return [int((x != none).sum()) for x in some if not x.is_floating_point() for none in (IGNORED, 0)]


@dataclass
class _Seen:
    name: str
    taken: list[torch.Tensor]
    returned: list[torch.Tensor]


@dataclass
class _Recording:
    """Module calls, ordered by their end."""

    seen: list[_Seen] = field(default_factory=list)

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for name, module in model.named_modules():

            def ended(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                taken = tensors_in((args, kwargs))
                self.seen.append(_Seen(name, [x.detach() for x in taken], [x.detach() for x in tensors_in(output)]))

            handles.append(module.register_forward_hook(ended, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextlib.contextmanager
def _without_observers(model: nn.Module) -> Iterator[None]:
    """Disable forward hooks of scripts, because they may collect outputs."""
    before = [(module._forward_hooks, dict(module._forward_hooks)) for module in model.modules()]
    try:
        for hooks, all_ in before:
            for key, hook in all_.items():
                if not _needed(hook):
                    del hooks[key]
        yield
    finally:
        for hooks, all_ in before:
            added = dict(hooks)  # such as those that transformers adds in the first forward pass
            hooks.clear()
            hooks.update(all_ | added)


def _needed(hook: Any) -> bool:
    return getattr(hook, "may_wait_for_ranks", False) or belongs_to_transformers(hook)


def difference(
    run: Callable[..., Any],
    model: nn.Module,
    group: SequenceGroup,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    divided: bool,
) -> str | None:
    """Return the difference between split and whole sequences in words; None if there is none.

    All ranks of the job call, because parameters may be sharded over them.

    Args:
        args: of the first forward pass.
        kwargs: of the first forward pass.
        divided: the model is tensor-parallel, and the following pass compares its layers with unsharded ones.

    Raises:
        UsageError: the model cannot run on a rank's own tokens.
    """
    call = _call_of(model, group, args, kwargs)
    if call is None:
        return None
    modes = {module: module.training for module in model.modules()}
    whole, own = _Recording(), _Recording()
    exchanges = group.exchanges
    group.comparing = True
    try:
        model.eval()
        with torch.no_grad(), _without_observers(model):
            try:
                with own.of(model):  # first, as what cannot be shared says so by name
                    mine = run(*call.own[0], **call.own[1])
            except (ShardwiseError, torch.OutOfMemoryError):
                raise
            except _RAISED as error:
                if divided:
                    return None  # because the comparison of tensor-parallel blocks names the layer
                behind = f" behind {own.seen[-1].name}" if own.seen else ""
                raise UsageError(
                    f"sequence parallelism over {group.size} ranks: {type(model).__name__} raises "
                    f"{type(error).__name__}{behind} when it runs on a rank's own tokens ({error}). If it runs in one "
                    "process, it cannot share sequences: set sequence_parallel_size to 1"
                ) from error
            with whole_sequences(group), whole.of(model):
                expected = run(*call.whole[0], **call.whole[1])
    finally:
        group.comparing = False
        for module, training in modes.items():
            module.training = training
    if group.exchanges == exchanges:
        return None  # the pass that follows is refused for it
    found = _first_difference(whole.seen, own.seen, group, call.tokens) or _pooled(expected, mine)
    apart = _loss_apart(model, tensors_in(expected), tensors_in(mine), call, group)
    return found or apart


def _call_of(model: nn.Module, group: SequenceGroup, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
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
    return _Call(
        (tuple(whole[:count]), given),
        (tuple(own_values[:count]), dict(zip(kwargs, own_values[count:], strict=True))),
        few,
    )


@dataclass
class _Batch:
    """A batch of one row with the first tokens of each rank.

    Attributes:
        few: tokens of each rank.
        rows, own: rows and tokens of this rank's arguments.
        padded: some tokens are padding.
        runs: position range [first, end) of each rank; None: positions are not consecutive.
    """

    group: SequenceGroup
    few: int
    rows: int
    own: int
    padded: bool
    runs: list[list[int] | None]

    @property
    def packed(self) -> bool:
        """Whether several samples are packed into a row."""
        return any(run is None for run in self.runs) or any(
            run[0] != before[1] for before, run in itertools.pairwise(self.runs) if run and before
        )

    @property
    def counted(self) -> bool:
        """Whether positions are 0, 1, 2, ..."""
        return not self.packed and self.runs[0] is not None and self.runs[0][0] == 0

    def has_tokens(self, value: Any) -> bool:
        """Whether this rank's tokens are in the tensor's second dimension."""
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
        """Return this rank's part of the result of `whole` for a value."""
        if not self.has_tokens(value):
            return whole
        first = self.group.rank * self.few
        return whole[:, first : first + self.few].contiguous()


def _first_difference(whole: list[_Seen], own: list[_Seen], group: SequenceGroup, few: int) -> str | None:
    expected: dict[tuple[str, int], _Seen] = {}
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
        off = _apart(other.returned, seen.returned, group, few)
        if off is not None:
            alike = len(other.taken) == len(seen.taken) and _apart(other.taken, seen.taken, group, few) is None
            how = "returns" if alike else "is given"
            return (
                f"{seen.name or 'the model'} {how} other numbers (what it returns differs by {off:.1e} of the largest)"
            )
    return None


def _pooled(expected: Any, mine: Any) -> str | None:
    """Return how an output of the model differs that has a row of numbers for each sequence."""
    for number, (whole, own) in enumerate(zip(tensors_in(expected), tensors_in(mine), strict=False)):
        if whole.dim() != 2 or whole.shape != own.shape or len(whole) != 1 or not whole.is_floating_point():
            continue
        off = float((whole - own).abs().nan_to_num(0, 0, 0).max()) / (float(whole.abs().max()) or 1.0)
        if off > _LIMITS[whole.dtype]:
            return (
                f"the model returns other numbers for a sequence (output {number} of shape {list(own.shape)} differs "
                f"by {off:.1e} of the largest), as it takes a token, a mean or a maximum of this rank's tokens"
            )
    return None


def _loss_apart(
    model: nn.Module, whole: list[torch.Tensor], own: list[torch.Tensor], call: _Call, group: SequenceGroup
) -> str | None:
    """Return how the loss of whole sequences can be no mean, and no sum, of the losses of the ranks (all ranks call).

    A mean with any weights lies between the least and the largest. Of one by other weights than those of tokens and
    labels a warning is logged.
    """
    losses = [[x for x in some if x.dim() == 0 and x.is_floating_point()][:1] for some in (whole, own)]
    told = group.comm.exchange([[float(some[0]) if some else None for some in losses], call.weights], "sequence_loss")
    expected = told[0][0][0]
    every = [(mine, [1, *weights]) for (_, mine), weights in told if mine is not None and math.isfinite(mine)]
    if expected is None or not math.isfinite(expected) or not every or _balances(model):
        return None
    found = [mine for mine, _ in every]
    limit = _LIMITS[losses[0][0].dtype] * max(map(abs, [expected, *found]))
    means = [
        sum(mine * some[index] for mine, some in every) / (sum(some[index] for _, some in every) or 1)
        for index in range(len(every[0][1]))
    ]
    if any(abs(one - expected) <= limit for one in [sum(found), *means]):
        return None
    shown = f"{expected:.5g} of whole sequences, {', '.join(f'{mine:.5g}' for mine in found)} of the ranks' tokens"
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
    """Whether a model may add a loss of imbalance of experts, which is of each rank's tokens."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(getattr(config, "output_router_logits", False) for config in configs) or any(
        type(module).__name__ == "MoE" for module in model.modules()
    )


def _apart(whole: list[torch.Tensor], own: list[torch.Tensor], group: SequenceGroup, few: int) -> float | None:
    """Return the difference of tensors beyond rounding; None if there is none, or they cannot be compared."""
    for expected, found in zip(whole, own, strict=True):
        dimension = _token_dimension(expected.shape, found.shape, group.size, few)
        if dimension is None or not expected.numel() or expected.is_complex():
            continue
        part = expected.narrow(dimension, group.rank * found.shape[dimension], found.shape[dimension])
        dtype = expected.dtype if expected.is_floating_point() else torch.float64
        wide = torch.promote_types(dtype, torch.float32)
        scale = float(expected.to(wide).nan_to_num(0, 0, 0).abs().max()) or 1.0
        off = (part.to(wide) - found.to(wide)).abs().nan_to_num(0, 0, 0).movedim(dimension, 0).flatten(1).amax(
            1
        ) / scale
        wrong = int((off > _LIMITS[dtype]).sum())
        # In 16 bits, routers may select other experts for some tokens.
        if wrong > (0 if wide is dtype else len(off) // 4):
            return float(off.max())
    return None


def _token_dimension(whole: torch.Size, own: torch.Size, ranks: int, few: int) -> int | None:
    """Return the only dimension with different sizes, if it is the token dimension.

    Dimension 0 is excluded, because tokens may be reordered there (rows of experts).
    """
    if len(whole) != len(own):
        return None
    differ = [number for number, sizes in enumerate(zip(whole, own, strict=True)) if sizes[0] != sizes[1]]
    if len(differ) != 1 or differ[0] == 0 or own[differ[0]] != few or whole[differ[0]] != few * ranks:
        return None
    return differ[0]
