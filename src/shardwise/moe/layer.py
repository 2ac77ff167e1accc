"""MoE layer: gate, experts and the dispatch of tokens. Modules and parameters have DeepSpeed's names."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from shardwise.compat import has_values
from shardwise.errors import NotBuiltError, UsageError
from shardwise.moe.dispatch import in_turn
from shardwise.moe.exchange import ExpertGroup, ExpertParallelModule, mark_experts
from shardwise.moe.experts import Experts, GroupSizes, in_turn_of, through_slots
from shardwise.moe.gates import Routing, TopKGate


class MOELayer(nn.Module):
    """A gate and the experts of this rank."""

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.checked = False  # sizes of an exchange have been compared with a wait of the host

    def forward(
        self, tokens: torch.Tensor, group: ExpertGroup, label: str, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Routing]:
        """Return the expert outputs of tokens [tokens, width], and the routing."""
        routing: Routing = self.gate(tokens, used_token)
        count = len(routing.exp_counts)
        if routing.order is not None:
            if has_values(tokens):
                group.check_sizes(len(tokens), routing.capacity, label, waits=not self.checked)
                self.checked = True
            rows = routing.order.spread(tokens)
            made = through_slots(group, rows, count, self.experts, label)
            return routing.order.joined(made, routing.weights), routing
        counts = group.count_rows(routing.exp_counts, routing.experts.numel(), label)
        some = used_token is not None
        order = in_turn(routing.experts, sum(map(sum, counts.read()[0])) if some else None)
        made = in_turn_of(group, order.spread(tokens), counts, self._by_expert, label)
        return order.joined(made, routing.weights), routing

    def _by_expert(self, rows: torch.Tensor, sizes: GroupSizes) -> torch.Tensor:
        return torch.cat(self.experts(rows.split(sizes.on_host())))


class MoE(ExpertParallelModule):
    """A mixture of experts (docs/moe.md).

    Args:
        hidden_size: width of tokens.
        expert: a module from [tokens, width] to [tokens, width], such as an MLP, which every expert copies. Or an
            nn.ModuleList of `num_experts` modules, the same on every rank, of which this rank keeps its own; initial
            values then differ between experts and do not depend on `ep_size`.
        num_experts: experts of the layer.
        ep_size: ranks of the expert-parallel group; divides `num_experts` and the number of ranks.
        k: experts a token.
        capacity_factor: capacity of an expert in training, as a multiple of the uniform load.
        eval_capacity_factor: the same in evaluation.
        min_capacity: minimum capacity of an expert in tokens.
        use_residual: add an expert for all tokens, both weighted by a learnt coefficient (PR-MoE, arXiv 2201.05596).
        noisy_gate_policy: None, "Jitter" or "RSample" (`shardwise.moe.gates.TopKGate`).
        drop_tokens: drop tokens beyond the capacity (their output is 0). False: no limit.
        use_rts: with k = 1, in training, drop random tokens.
        use_tutel: not built.
        enable_expert_tensor_parallelism: not built.
        top2_2nd_expert_sampling: with k = 2, in training, sample the second expert.

    Attributes:
        num_local_experts: experts of this rank.
        expert_group_name: "ep_size_" and the size.

    Raises:
        UsageError: sizes do not divide one another, or experts cannot be assigned to ranks yet.
        NotBuiltError: an option is not built.

    Example:
        >>> layer = MoE(8, nn.Linear(8, 8), num_experts=4, k=2)
        >>> output, l_aux, exp_counts = layer(torch.ones(3, 5, 8))
        >>> output.shape, exp_counts.sum().item()
        (torch.Size([3, 5, 8]), 30)
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if use_tutel:
            raise NotBuiltError("MoE(use_tutel=True) is not built: tokens are sorted in plain torch; leave it out")
        if enable_expert_tensor_parallelism:
            raise NotBuiltError(
                "MoE(enable_expert_tensor_parallelism=True) is not built: experts are divided over ranks by `ep_size`, "
                "and a ZeRO stage divides each of them further; leave it out"
            )
        if ep_size < 1 or num_experts < 1 or num_experts % ep_size:
            raise UsageError(
                f"MoE(num_experts={num_experts}, ep_size={ep_size}): the number of experts must be a multiple of the "
                "ranks over which they are divided"
            )
        self.num_experts, self.ep_size = num_experts, ep_size
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.use_residual = use_residual
        self._first: int | None = None
        local, one = expert, expert
        if isinstance(expert, nn.ModuleList):
            local, one = self._own(expert), expert[0]
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            None,
            top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(gate, Experts(local, self.num_local_experts))
        mark_experts(self.deepspeed_moe.experts.parameters(), ep_size)
        if use_residual:
            self.mlp = copy.deepcopy(one)
            self.coefficient = nn.Linear(hidden_size, 2)

    def _own(self, experts: nn.ModuleList) -> nn.ModuleList:
        if len(experts) != self.num_experts:
            raise UsageError(f"MoE(expert=...): {len(experts)} experts are given, num_experts is {self.num_experts}")
        if self.ep_size == 1:
            return experts
        if not (dist.is_available() and dist.is_initialized()):
            raise UsageError(
                f"MoE without its groups: of a list of experts each of ep_size={self.ep_size} ranks keeps its own, and "
                "this process does not know its rank yet. Call shardwise.init_distributed() before, or give one "
                "expert, which is copied"
            )
        self._first = dist.get_rank() % self.ep_size * self.num_local_experts
        return nn.ModuleList(list(experts)[self._first : self._first + self.num_local_experts])

    @property
    def listed(self) -> bool:
        """True if this rank has kept its part of a list of experts."""
        return self._first is not None

    @override
    def bind(self, path: str, group: ExpertGroup) -> None:
        self.group, self.path, self.deepspeed_moe.checked = group, path or "MoE", False
        first, _ = group.own(self.num_experts)
        if self._first is not None and self._first != first and group.comm is not None and not group.comm.imagined:
            raise UsageError(
                f"{path}: was built with the experts from {self._first} on, and this rank's place in its group has "
                f"those from {first} on. Lists of experts are for groups of consecutive ranks of all processes "
                "(no mpu, no use_data_before_expert_parallelism, no tensor_parallel); give one expert, which is copied"
            )
        inside = (
            f"{path}.deepspeed_moe.experts.deepspeed_experts" if path else "deepspeed_moe.experts.deepspeed_experts"
        )
        for number, expert in enumerate(self.deepspeed_moe.experts.deepspeed_experts):
            for name, parameter in expert.named_parameters():
                group.declare(parameter, name=f"{inside}.{first + number}.{name}")

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Route tokens to experts.

        Args:
            hidden_states: [..., hidden_size].
            used_token: one number a token; tokens with 0 go to no expert.

        Returns:
            The output; the load-balancing loss, to be added to the script's loss with a factor (0.01 in the papers);
            the number of this rank's tokens that chose each expert.

        Raises:
            UsageError: the expert-parallel group does not exist yet; or, with dropping, ranks of a group have different
                numbers of tokens (on GPUs in the first forward pass; later ones fail on the device).
        """
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        group = self.bound()
        made, routing = self.deepspeed_moe(tokens, group, self.path, used_token)
        self.count(routing.exp_counts)
        output = made.view(hidden_states.shape)
        if self.use_residual:
            residual = self.mlp(hidden_states)
            residual = residual[0] if isinstance(residual, tuple) else residual
            share = torch.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + residual * share[..., 1:]
        return output, routing.l_aux, routing.exp_counts
