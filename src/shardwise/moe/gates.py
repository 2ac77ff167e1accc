"""MoE gates: choice and weights of experts for each token, and the load-balancing loss.

Top-1 as in Switch Transformers (arXiv 2101.03961), top-2 as in GShard (2006.16668), or top-k. Probabilities are at
least fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.errors import UsageError
from shardwise.moe.dispatch import DispatchPlan, counted, in_slots, ranked

JITTER = 1e-2  # Policy "Jitter" multiplies gate inputs by random numbers from 1 - JITTER to 1 + JITTER.

POLICIES = (None, "None", "Jitter", "RSample")


@dataclass(frozen=True)
class Routing:
    """Result of a gate."""

    experts: torch.Tensor  # [k, tokens]; the number of experts stands for none
    weights: torch.Tensor  # of each choice in the sum, 0 for dropped ones; [k, tokens]
    l_aux: torch.Tensor  # load-balancing loss; 1 if all experts are chosen equally
    exp_counts: torch.Tensor  # number of tokens that chose each expert, including dropped ones; [experts]
    order: DispatchPlan | None  # None: dropless
    capacity: int  # places of each expert


def capacity_of(tokens: int, experts: int, choices: int, factor: float, least: int) -> int:
    """Return the capacity of an expert in tokens: `factor` times the uniform load, at least `least`.

    >>> capacity_of(10, 4, 1, 1.0, 0), capacity_of(10, 4, 2, 1.2, 0), capacity_of(10, 4, 1, 1.0, 4)
    (3, 6, 4)
    """
    exact = tokens * choices * factor / experts
    return max(math.ceil(exact * (1 - 1e-12)), least)  # 1.1 * 10 exceeds 11 slightly in floating point


def route(
    logits: torch.Tensor,
    k: int,
    *,
    capacity_factor: float = 1.0,
    min_capacity: int = 4,
    drop_tokens: bool = True,
    use_rts: bool = True,
    sampled: bool = False,
    second_sampled: bool = False,
    used_token: torch.Tensor | None = None,
) -> Routing:
    """Choose experts for each token, from logits [tokens, experts].

    The loss is as in the papers: the number of experts times the sum over experts of mean probability times fraction of
    tokens (for k = 2 of first choices). With k > 1 weights are normalised over the experts that accept the token. With
    k = 2 all first choices precede second ones; with k > 2 an expert keeps its most probable choices.

    `drop_tokens` limits each expert to its capacity (`capacity_of`); with k = 1, `use_rts` drops random tokens (random
    token selection) instead of the last ones. `sampled` samples choices by their probabilities (Gumbel noise),
    `second_sampled` the second choice with k = 2. `used_token` is nonzero for tokens to route.
    """
    tokens, count = logits.shape
    probabilities = torch.softmax(logits, dim=1)
    scores = logits.detach()
    if sampled:
        scores = scores + _gumbel(scores)
    if k == 2 and second_sampled:
        first = scores.argmax(dim=1, keepdim=True)
        rest = (scores + _gumbel(scores)).scatter(1, first, -torch.inf)
        chosen = torch.cat([first, rest.argmax(dim=1, keepdim=True)], dim=1).T.contiguous()
    else:
        chosen = scores.topk(k, dim=1).indices.T.contiguous()
    weights = probabilities.gather(1, chosen.T).T
    experts = chosen
    if used_token is not None:
        used = used_token.reshape(1, -1).to(logits.device) != 0
        experts = torch.where(used, chosen, count)
        weights = weights * used
    judged = experts[:1] if k == 2 else experts
    parts = counted(judged, count + 1)[:count].to(logits.dtype) / max(judged.numel(), 1)
    l_aux = (probabilities.mean(dim=0) * parts).sum() * count if tokens else probabilities.sum()
    if not drop_tokens:
        counts = counted(experts, count + 1)[:count]
        return Routing(experts, _normalised(weights, k), l_aux, counts, None, 0)
    capacity = capacity_of(tokens, count, k, capacity_factor, min_capacity)
    before = None
    if k == 1 and use_rts:
        before = torch.argsort(torch.rand(tokens, dtype=torch.float32, device=logits.device))
    elif k > 2:
        before = torch.argsort(weights.detach().reshape(-1), descending=True, stable=True)
    number, sizes = ranked(experts, count, before)
    order = in_slots(experts, number, count, capacity)
    weights = weights * (order.place < count * capacity)
    return Routing(experts, _normalised(weights, k), l_aux, sizes[:count], order, capacity)


def _normalised(weights: torch.Tensor, k: int) -> torch.Tensor:
    if k == 1:
        return weights
    return weights / weights.sum(dim=0).clamp(min=torch.finfo(weights.dtype).eps)


def _gumbel(like: torch.Tensor) -> torch.Tensor:
    return -torch.empty_like(like).exponential_().log()


class _Router(nn.Linear):
    """A layer whose weight is read in fp32, and which is not called; nothing may quantise it (float8)."""


class TopKGate(nn.Module):
    """A linear gate without bias and its top-k choice (`route`).

    Args:
        model_dim: width of tokens.
        num_experts: number of experts.
        k: experts a token.
        capacity_factor, eval_capacity_factor: in training and in evaluation.
        min_capacity: minimum capacity of an expert.
        noisy_gate_policy: in training: "Jitter" multiplies gate inputs by numbers near 1 (`JITTER`); "RSample" samples
            experts by their probabilities. None: neither.
        drop_tokens: limit experts to their capacity.
        use_rts: random token selection in training (`route`).
        ep_group: ignored, because a gate uses only its own rank's tokens.
        top2_2nd_expert_sampling: with k = 2, in training, sample the second expert.

    Raises:
        UsageError: an argument is invalid, or `k` exceeds the number of experts.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: object = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        del ep_group  # a gate uses only its own rank's tokens
        if not 1 <= k <= num_experts:
            raise UsageError(f"MoE(k={k}, num_experts={num_experts}): expected 1 <= k <= num_experts")
        if noisy_gate_policy not in POLICIES:
            raise UsageError(f"MoE(noisy_gate_policy={noisy_gate_policy!r}): expected None, 'Jitter' or 'RSample'")
        self.wg = _Router(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor = capacity_factor
        self.eval_capacity_factor = eval_capacity_factor
        self.min_capacity = min_capacity
        self.noisy_gate_policy = None if noisy_gate_policy == "None" else noisy_gate_policy
        self.drop_tokens = drop_tokens
        self.use_rts = use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> Routing:
        """Return the routing of tokens [tokens, width]."""
        with torch.autocast(tokens.device.type, enabled=False):
            judged = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
            if self.training and self.noisy_gate_policy == "Jitter":
                judged = judged * torch.empty_like(judged).uniform_(1 - JITTER, 1 + JITTER)
            logits = F.linear(judged, self.wg.weight.to(judged.dtype))
            return route(
                logits,
                self.k,
                capacity_factor=self.capacity_factor if self.training else self.eval_capacity_factor,
                min_capacity=self.min_capacity,
                drop_tokens=self.drop_tokens,
                use_rts=self.use_rts and self.training,
                sampled=self.training and self.noisy_gate_policy == "RSample",
                second_sampled=self.training and self.top2_2nd_expert_sampling,
                used_token=used_token,
            )
