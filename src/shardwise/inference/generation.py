"""Generation by transformers' `generate` on ranks that share a model: equal prompts, random numbers and tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.comm.communicator import Communicator
from shardwise.errors import DesyncError, UsageError
from shardwise.parallel.tensor.group import fingerprint
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
        ranks: ranks that share each layer. They get the same prompts, draw random numbers as the first rank does, and
            compare tokens after each step, so that all end together.
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
    if streams:
        given.setdefault("synced_gpus", dist.is_initialized() and dist.get_world_size() > 1)
    if ranks is None or ranks.world == 1:
        return module.generate(*args, **given)  # type: ignore[operator]
    gathered = ranks.exchange([fingerprint(one) for one in tensors_in((args, given))], "prompts")
    if any(other != gathered[0] for other in gathered):
        raise DesyncError(
            f"generate(): ranks {list(ranks.members)} share a model, and their prompts differ: {gathered}. Give "
            "them the same"
        )
    from transformers import StoppingCriteriaList

    criteria = StoppingCriteriaList([*(given.pop("stopping_criteria", None) or ()), EqualTokens(ranks)])
    with numbers_of_first(ranks):
        return module.generate(*args, **given, stopping_criteria=criteria)  # type: ignore[operator]


class EqualTokens:
    """Stopping criterion that never stops: raises a DesyncError if ranks have chosen different tokens."""

    def __init__(self, ranks: Communicator) -> None:
        self._ranks = ranks

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Compare the last tokens; return False for each row."""
        own = input_ids[:, -1].contiguous().to(self._ranks.device)
        every = own.new_empty(self._ranks.world * own.numel())
        mine = every[self._ranks.rank * own.numel() :][: own.numel()]
        mine.copy_(own)
        self._ranks.all_gather([(every, mine)], "tokens", kind="explicit").wait()
        if not bool((every.view(self._ranks.world, -1) == own).all()):
            raise DesyncError(
                f"generate(): ranks {list(self._ranks.members)} share a model and have chosen different tokens: "
                f"{every.view(self._ranks.world, -1).tolist()}. Their devices or libraries compute differently"
            )
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@contextlib.contextmanager
def numbers_of_first(ranks: Communicator) -> Iterator[None]:
    """Draw random numbers from the first rank's generators inside the block, which ends as on that rank."""
    cuda = ranks.device.type == "cuda"
    for state, put in (
        (torch.get_rng_state(), torch.set_rng_state),
        *([(torch.cuda.get_rng_state(ranks.device), torch.cuda.set_rng_state)] if cuda else []),
    ):
        values = state.to(ranks.device)
        ranks.broadcast(values, 0, "random_numbers").wait()
        put(values.cpu())
    yield


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


def _check_length(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], limit: int, key: str) -> None:
    config = kwargs.get("generation_config") or getattr(module, "generation_config", None)
    given = _prompt(args, kwargs)
    prompt = 0 if given is None or getattr(config, "is_encoder_decoder", False) else given.shape[1]
    new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    longest = kwargs.get("max_length", getattr(config, "max_length", None))
    total = prompt + new if new is not None else max(longest or 20, prompt)
    if total > limit:
        raise UsageError(
            f"generate(): {prompt} tokens of the prompt and {total - prompt} new ones exceed {key} = {limit}. Raise "
            f"{key}, or lower max_new_tokens"
        )
