"""Generation by transformers' `generate` on ranks that share a model: equal prompts, random numbers and tokens."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.errors import DesyncError, UsageError
from shardwise.parallel.tensor.group import fingerprint
from shardwise.parallel.tensor.layers import ColumnParallel
from shardwise.trees import tensors_in


def generate(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    ranks: Communicator | None = None,
    streams: bool = False,
    limit: int | None = None,
    key: str = "max_out_tokens",
) -> Any:
    """Call `module.generate`; right-padded prompts of a decoder are moved to the right first, by their attention mask.

    Args:
        module: a model of transformers, or another with `generate`.
        args, kwargs: of `generate`.
        ranks: ranks that share each layer. They get the same prompts, draw random numbers as the first rank does,
            and, by `stopping_criteria`, compare tokens after each step and stop when the first rank's criteria do.
        streams: passes of ranks have to be equal in number, because weights are gathered in them (`synced_gpus`).
        limit: most tokens of prompt and answer, which the configuration has under `key`.

    Raises:
        UsageError: the model cannot generate, or `limit` would be exceeded.
        DesyncError: prompts or tokens of the ranks differ.
    """
    if not callable(getattr(module, "generate", None)):
        raise UsageError(f"generate(): {type(module).__name__} has no generate(); call the engine on inputs instead")
    given = dict(kwargs)
    args, given = _left_padded(module, args, given)
    if limit is not None:
        _check_length(module, args, given, limit, key)
    if streams and _takes(module, "synced_gpus"):
        given.setdefault("synced_gpus", dist.is_initialized() and dist.get_world_size() > 1)
    if ranks is None or ranks.world == 1:
        return module.generate(*args, **given)  # type: ignore[operator]
    gathered = ranks.exchange([fingerprint(one) for one in tensors_in((args, given))], "prompts")
    if any(other != gathered[0] for other in gathered):
        raise DesyncError(
            f"generate(): ranks {list(ranks.members)} share a model, and their prompts differ: {gathered}. Give "
            "them the same"
        )
    if _takes(module, "stopping_criteria"):
        given = _of_first(module, given, ranks)
    with numbers_of_first(ranks), _whole_logits(module):
        return module.generate(*args, **given)  # type: ignore[operator]


def _takes(module: nn.Module, name: str) -> bool:
    parameters = inspect.signature(cast(Any, module).generate).parameters
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


@contextlib.contextmanager
def _whole_logits(module: nn.Module) -> Iterator[None]:
    """Let output heads all-gather logits inside the block, also in training mode (`vocab_parallel_lm_head`)."""
    heads = [
        one
        for one in module.modules()
        if isinstance(one, ColumnParallel) and one.cut.whole_in_evaluation and one.training
    ]
    for head in heads:
        head.training = False
    try:
        yield
    finally:
        for head in heads:
            head.training = True


def _of_first(module: nn.Module, kwargs: dict[str, Any], ranks: Communicator) -> dict[str, Any]:
    """Return arguments whose criteria stop where the first rank's do, because clocks and scripts of ranks differ."""
    from transformers.generation import stopping_criteria as known

    given = list(kwargs.get("stopping_criteria") or ())
    # Criteria that depend on tokens only agree, and replace those of their class that generate() makes itself.
    of_tokens = (known.MaxLengthCriteria, known.StopStringCriteria, known.EosTokenCriteria)
    others = [one for one in given if not isinstance(one, of_tokens)]
    seconds = _setting(module, kwargs, "max_time")
    if seconds is not None:
        others.append(known.MaxTimeCriteria(seconds))
        kwargs = {**kwargs, "max_time": math.inf}
    criteria = known.StoppingCriteriaList(one for one in given if isinstance(one, of_tokens))
    criteria.append(EqualTokens(ranks, known.StoppingCriteriaList(others)))
    return {**kwargs, "stopping_criteria": criteria}


class EqualTokens:
    """Stopping criterion of ranks that share a model: stops the rows that `criteria` stop on the first rank.

    Raises a DesyncError if ranks have chosen different tokens.
    """

    def __init__(self, ranks: Communicator, criteria: Callable[..., torch.Tensor]) -> None:
        self._ranks, self._criteria = ranks, criteria

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Compare the last tokens; return the first rank's decision for each row, (rows,)."""
        stops = self._criteria(input_ids, scores, **kwargs)
        own = torch.cat([input_ids[:, -1], stops.to(input_ids.dtype)]).to(self._ranks.device)
        every = own.new_empty(self._ranks.world * own.numel())
        mine = every[self._ranks.rank * own.numel() :][: own.numel()]
        mine.copy_(own)
        self._ranks.all_gather([(every, mine)], "tokens", kind="explicit").wait()
        tokens, decisions = every.view(self._ranks.world, 2, -1).unbind(1)
        if not bool((tokens == tokens[0]).all()):
            raise DesyncError(
                f"generate(): ranks {list(self._ranks.members)} share a model and have chosen different tokens: "
                f"{tokens.tolist()}. Their devices or libraries compute differently"
            )
        return decisions[0].bool().to(input_ids.device)


@contextlib.contextmanager
def numbers_of_first(ranks: Communicator) -> Iterator[None]:
    """Draw random numbers from the first rank's generators inside the block.

    Ranks whose generators had other states have these again afterwards: they may train on other data. Equal ones stay
    equal.
    """
    own: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = []
    states: list[tuple[torch.Tensor, Callable[[torch.Tensor], None]]] = [(torch.get_rng_state(), torch.set_rng_state)]
    if ranks.device.type == "cuda":
        states.append((torch.cuda.get_rng_state(ranks.device), torch.cuda.set_rng_state))
    for state, put in states:
        values = state.to(ranks.device, copy=True)
        ranks.broadcast(values, 0, "random_numbers").wait()
        first = values.cpu()
        put(first)
        if not torch.equal(first, state):
            own.append((state, put))
    try:
        yield
    finally:
        for state, put in own:
            put(state)


def _left_padded(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    mask, given = kwargs.get("attention_mask"), _prompt(args, kwargs)
    if mask is None or given is None or mask.shape != given.shape[:2] or bool((mask[:, -1] != 0).all()):
        return args, kwargs
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return args, kwargs
    # By a stable sort of the mask, masked positions come first, and tokens keep their order.
    order = (mask != 0).to(torch.int8).argsort(dim=1, stable=True)

    def moved(tokens: torch.Tensor) -> torch.Tensor:
        index = order if tokens.dim() == 2 else order.unsqueeze(-1).expand_as(tokens)
        return tokens.gather(1, index)

    names = ("input_ids", "inputs", "inputs_embeds", "attention_mask", "token_type_ids", "position_ids")
    found = {name: moved(one) if name in names and torch.is_tensor(one) else one for name, one in kwargs.items()}
    return (moved(args[0]), *args[1:]) if args and torch.is_tensor(args[0]) else args, found


def _prompt(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    given = [*args[:1], *(kwargs.get(name) for name in ("input_ids", "inputs", "inputs_embeds"))]
    return next((one for one in given if torch.is_tensor(one)), None)


def _setting(module: nn.Module, kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an argument of `generate`, or the value of a generation configuration; None: neither has it."""
    configs = kwargs.get("generation_config"), getattr(module, "generation_config", None)
    values = [kwargs.get(name), *(getattr(config, name, None) for config in configs)]
    return next((value for value in values if value is not None), None)


def _check_length(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int, key: str) -> None:
    own, config = getattr(module, "generation_config", None), getattr(module, "config", None)
    given = _prompt(args, kwargs)
    prompt = 0 if given is None or getattr(config, "is_encoder_decoder", False) else given.shape[1]
    new, longest = (_setting(module, kwargs, name) for name in ("max_new_tokens", "max_length"))
    default = None if own is None else type(own)().max_length  # 20 in versions 4 of transformers
    if new is not None:
        total = prompt + new
    elif longest != default or kwargs.get("max_length") is not None:
        total = max(longest, prompt)
    else:  # transformers takes 20 tokens, as far as the model has positions
        total = max(min(prompt + 20, getattr(config, "max_position_embeddings", None) or prompt + 20), prompt)
    if total > limit:
        raise UsageError(
            f"generate(): {prompt} tokens of the prompt and {total - prompt} new ones exceed {key} = {limit}. Raise "
            f"{key}, or lower max_new_tokens"
        )
