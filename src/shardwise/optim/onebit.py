"""Adam and LAMB that send one bit per element: OnebitAdam, OnebitLamb, ZeroOneAdam.

Adam's variance settles early in a training. Once it is frozen, the update is linear in the momentum, and errors of
compressing the momentum can be made up for in later steps. All three rest on that:

* `OnebitAdam` (Tang et al., 2021, arXiv 2102.02888) is Adam for `freeze_step` steps. Then each rank adds its own
  gradient to the momentum, and the momentum is averaged with one bit per element.
* `OnebitLamb` (Li et al., 2021, arXiv 2104.06069) is the same for LAMB, whose layerwise learning rates go on by a
  frozen coefficient and a factor from the variance of a gradient that is reconstructed from the momentum.
* `ZeroOneAdam` (Lu et al., 2022, arXiv 2202.06009) has no long warm-up: the variance is updated at growing intervals,
  and after it is frozen ranks make local steps and average their sum at growing intervals.

An element whose variance is zero when it is frozen (no rank has ever had a gradient for it) stays as it is: there is
nothing to scale its update by, and signs have no zero.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from shardwise.comm.compression.onebit import Scale
from shardwise.config.argument_models import called
from shardwise.config.schema import optimizers as schema
from shardwise.config.schema.base import Arguments
from shardwise.config.schema_index import keys_of
from shardwise.optim.communicating import Block, Communicating, Segment, decay_rates, parts
from shardwise.optim.layerwise import trust_ratio

_log = logging.getLogger("shardwise")

_Model = TypeVar("_Model", bound=Arguments)


class _Adam(Communicating):
    """Adam with decoupled weight decay (torch.optim.AdamW), in the terms that the compressed steps share."""

    def _step_plain(self, values: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        momentum, variance = self.moments(values)
        for part in parts(values):
            _advance(momentum[part], variance[part], gradient[part], group)
            self._descend(values[part], momentum[part], variance[part], group)

    def _step_exact(self) -> None:
        for block in self._blocks:
            for segment in block.segments:
                self._step_plain(segment.parameter, _gradient(block, segment), self.param_groups[segment.group])

    def _descend(
        self,
        values: torch.Tensor,
        momentum: torch.Tensor,
        variance: torch.Tensor,
        group: Mapping[str, Any],
        *,
        frozen: bool = False,
    ) -> None:
        """Make one Adam step, with torch's operations in torch's order."""
        lr, (first, second) = float(group["lr"]), decay_rates(group)
        if group["weight_decay"]:
            values.mul_(1 - lr * group["weight_decay"])
        values.addcdiv_(momentum, _root(variance, second, group["eps"], frozen), value=-lr / first)

    def _own_momenta(self) -> list[torch.Tensor]:
        """Add this rank's gradients to the momenta; return them, whole."""
        momenta = [self._momentum(block) for block in self._blocks]
        for block, momentum in zip(self._blocks, momenta, strict=True):
            assert block.gradient is not None
            for number, start, stop in block.lanes:
                beta = self.param_groups[number]["betas"][0]
                # The gradient is this rank's part of the mean; the momentum takes the rank's own as a whole.
                own = (1 - beta) * self._ranks.world
                momentum[start:stop].mul_(beta).add_(block.gradient[start:stop], alpha=own)
        return momenta

    def _step_averaged(self, momenta: list[torch.Tensor]) -> None:
        """Average the momenta over ranks, and step along them with the frozen variance."""
        self._mean(momenta)
        for block in self._blocks:
            for segment in block.segments:
                values, (momentum, variance) = segment.parameter, self.moments(segment.parameter)
                for part in parts(values):
                    group = self.param_groups[segment.group]
                    self._descend(values[part], momentum[part], variance[part], group, frozen=True)


class OnebitAdam(_Adam):
    """1-bit Adam.

    From Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed", 2021,
    arXiv 2102.02888.

    For `freeze_step` steps this is `torch.optim.AdamW`. Then the variance is frozen; the momentum, to which each rank
    has added its own gradient, is averaged over ranks by `shardwise.comm.compression.OnebitAllReduce`, with a scale for
    each parameter in each rank's range.

    In an engine it works with ZeRO stages 0 and 1. On one rank, and outside of an engine, it is AdamW throughout.

    Args:
        params: as of any torch optimizer.
        lr: learning rate.
        betas: decay of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: decoupled weight decay.
        bias_correction: divide the moments by the sums of their weights; that of the variance is frozen with it.
        freeze_step: steps of warm-up. The papers take 15 to 20 % of the training, and at least the learning rate's
            warm-up.
        amsgrad: only False.
        eps_inside_sqrt: only False.
        cuda_aware: accepted for existing configurations; the backend is torch.distributed's.
        comm_backend_name: accepted for existing configurations: nccl, mpi, compressed, hccl or gloo.

    Raises:
        ConfigError: a value has no meaning.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = OnebitAdam([weight], lr=0.1, freeze_step=100)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> [round(value, 3) for value in weight.tolist()]
        [0.9, 0.9, 0.9, 0.9]
    """

    shardwise_sharding = "communicates"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        freeze_step: int = 100000,
        amsgrad: bool = False,
        eps_inside_sqrt: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        found = _checked(schema.OnebitAdamArguments, locals())
        self.freeze_step = found.freeze_step
        super().__init__(params, _common(lr, betas, eps, weight_decay, bias_correction))

    @property
    def warm_up(self) -> int:
        """See `Communicating.warm_up`."""
        return self.freeze_step

    def _is_exact(self, step: int) -> bool:
        return step < self.freeze_step

    def _step_compressed(self) -> None:
        self._step_averaged(self._own_momenta())


class OnebitLamb(Communicating):
    """1-bit LAMB.

    From Li et al., "1-bit LAMB: Communication Efficient Large-Scale Large-Batch Training with LAMB's Convergence
    Speed", 2021, arXiv 2104.06069.

    For `freeze_step` steps this is LAMB (You et al., 2020, arXiv 1904.00962): Adam's update of each parameter, weight
    decay added, times a coefficient, |parameter| / |update| between `min_coeff` and `max_coeff`. Then variances are
    frozen, and momenta are averaged as by `OnebitAdam`, but scaled to one root mean square before, so that one scale
    serves all parameters in a rank's range. Coefficients are the warm-up's moving averages times a factor: the largest
    ratio, in the parameter, of the roots of the frozen variance and of one that goes on with the gradient that is
    reconstructed from two momenta. The factor changes by at most `factor_threshold` of itself in a step and stays
    between `factor_min` and `factor_max`.

    In an engine it works with ZeRO stages 0 and 1. On one rank, and outside of an engine, it is LAMB throughout.

    Args:
        params: as of any torch optimizer.
        lr: learning rate.
        betas: decay of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: weight decay, part of the update that the coefficient multiplies.
        bias_correction: divide the moments by the sums of their weights.
        freeze_step: steps of warm-up.
        max_coeff: largest coefficient in the warm-up.
        min_coeff: smallest coefficient in the warm-up.
        coeff_beta: decay of the moving average of coefficients.
        factor_max: largest factor.
        factor_min: smallest factor.
        factor_threshold: largest relative change of the factor in one step.
        amsgrad: only False.
        eps_inside_sqrt: only False.
        cuda_aware: accepted for existing configurations; the backend is torch.distributed's.
        comm_backend_name: accepted for existing configurations: nccl, mpi, compressed, hccl or gloo.

    Raises:
        ConfigError: a value has no meaning.

    Example:
        >>> weight = torch.nn.Parameter(torch.full((4,), 2.0))
        >>> optimizer = OnebitLamb([weight], lr=0.01, freeze_step=100)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> [round(value, 3) for value in weight.tolist()]
        [1.98, 1.98, 1.98, 1.98]
    """

    shardwise_sharding = "communicates"
    joined = True
    tensor_keys = ("coefficient", "factor", "momentum_scale")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        freeze_step: int = 100000,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        amsgrad: bool = False,
        eps_inside_sqrt: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        found = _checked(schema.OnebitLambArguments, locals())
        self.freeze_step = found.freeze_step
        self.coefficients = (min_coeff, max_coeff)
        self.coeff_beta = coeff_beta
        self.factors = (factor_min, factor_max)
        self.factor_threshold = factor_threshold
        super().__init__(params, _common(lr, betas, eps, weight_decay, bias_correction))

    @property
    def warm_up(self) -> int:
        """See `Communicating.warm_up`."""
        return self.freeze_step

    def _is_exact(self, step: int) -> bool:
        return step < self.freeze_step

    def _step_plain(self, values: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        momentum, variance = self.moments(values)
        state = self.state[values]
        squares = torch.zeros(2, dtype=torch.float64, device=values.device)
        for part in parts(values):
            _advance(momentum[part], variance[part], gradient[part], group)
            squares += _squares(values[part], _direction(values[part], momentum[part], variance[part], group))
        norms = squares.sqrt().float()
        coefficient = trust_ratio(norms[0], norms[1], *self.coefficients)
        state["coefficient"] = self._averaged(state.get("coefficient"), coefficient)
        for part in parts(values):
            update = _direction(values[part], momentum[part], variance[part], group)
            values[part].sub_(update.mul_(coefficient * float(group["lr"])))

    def _averaged(self, before: torch.Tensor | None, coefficient: torch.Tensor) -> torch.Tensor:
        """Return the moving average of coefficients, which begins with the first."""
        if before is None:
            return coefficient
        beta = self.coeff_beta
        return torch.where(torch.isnan(before), coefficient, beta * before + (1 - beta) * coefficient)

    def forget(self) -> None:
        """See `Communicating.forget`."""
        super().forget()
        self._known = False

    def _step_exact(self) -> None:
        self._learn()
        squares = torch.zeros(2, len(self._numbers), dtype=torch.float64, device=self._device)
        for block, segment, group in self._segments():
            momentum, variance = self.moments(segment.parameter)
            gradient = _gradient(block, segment)
            for part in parts(segment.parameter):
                _advance(momentum[part], variance[part], gradient[part], group)
            for place, values, (own, second) in self._runs(segment, momentum, variance):
                for part in parts(values):
                    squares[:, place] += _squares(
                        values[part], _direction(values[part], own[part], second[part], group)
                    )
        if self._divided:
            self._ranks.all_reduce(squares, "lamb.norms").wait()
        norms = squares.sqrt().float()
        coefficients = trust_ratio(norms[0], norms[1], *self.coefficients)
        self._values["coefficient"] = self._averaged(self._values["coefficient"], coefficients)
        self._descend(coefficients, frozen=False)

    def _descend(self, coefficients: torch.Tensor, *, frozen: bool) -> None:
        for _, segment, group in self._segments():
            for place, values, (own, second) in self._runs(segment, *self.moments(segment.parameter)):
                for part in parts(values):
                    update = _direction(values[part], own[part], second[part], group, frozen=frozen)
                    values[part].sub_(update.mul_(coefficients[place] * float(group["lr"])))

    def _step_compressed(self) -> None:
        self._learn()
        begins = not self._whole
        momenta = [self._momentum(block) for block in self._blocks]
        if begins:
            self._begin(momenta)
        scales = self._momentum_scales()
        fresh = []
        for block, momentum, scale in zip(self._blocks, momenta, scales, strict=True):
            # The gradient's memory becomes that of the new momentum, so that the old one is there to compare with.
            assert block.gradient is not None
            for number, start, stop in block.lanes:
                beta = self.param_groups[number]["betas"][0]
                own = block.gradient[start:stop].mul_((1 - beta) * self._ranks.world)
                own.add_(momentum[start:stop], alpha=beta)
            torch._foreach_mul_(_views(block.gradient, block), scale)
            fresh.append(block.gradient)
        self._mean(fresh)
        ratios = torch.zeros(len(self._numbers), dtype=torch.float32, device=self._device)
        for block, momentum, new, scale in zip(self._blocks, momenta, fresh, scales, strict=True):
            torch._foreach_div_(_views(new, block), scale)
            for segment in block.segments:
                where = slice(segment.start, segment.stop)
                self._compare(segment, momentum[where], new[where], ratios)
            momentum.copy_(new)
        self._values["factor"] = self._next_factors(ratios)
        coefficients = self._values["coefficient"] * self._values["factor"]
        self._descend(coefficients, frozen=True)

    def _begin(self, momenta: list[torch.Tensor]) -> None:
        """Decide what each parameter's momentum is multiplied by while it travels, unless that is known already."""
        norms: list[torch.Tensor] = []
        counts: list[int] = []
        for block, momentum in zip(self._blocks, momenta, strict=True):
            norms += torch._foreach_norm(_views(momentum, block))
            counts += [stop - start for _, start, stop in block.tensors]
        roots = torch.stack(norms).float() / torch.tensor(counts, device=self._device).clamp(min=1).sqrt()
        moving = roots > 0
        united = roots.sum() / moving.sum().clamp(min=1)
        decided = torch.where(moving, united / roots, 1.0)
        known = self._values["momentum_scale"]
        self._values["momentum_scale"] = torch.where(torch.isnan(known), decided, known)

    def _momentum_scales(self) -> list[list[torch.Tensor]]:
        single = iter(self._values["momentum_scale"].unbind())
        return [[next(single) for _ in block.tensors] for block in self._blocks]

    def _learn(self) -> None:
        """Let every rank know what is kept for each parameter: a checkpoint gives it only to those that step it."""
        if self._known or not self._divided:
            return
        self._known = True
        own = torch.stack([self._values[key] for key in self.tensor_keys])
        everyone = torch.empty(self._ranks.world, *own.shape, dtype=own.dtype, device=own.device)
        self._ranks.all_gather([(everyone.view(-1), own.view(-1))], "lamb.coefficients", kind="small").wait()
        known = everyone[0]
        for values in everyone[1:]:
            known = torch.where(torch.isnan(known), values, known)
        self._values = dict(zip(self.tensor_keys, known.unbind(), strict=True))

    def _compare(self, segment: Segment, old: torch.Tensor, new: torch.Tensor, ratios: torch.Tensor) -> None:
        """Go on with the variance by the reconstructed gradient, and note the largest ratio of each parameter."""
        group, state = self.param_groups[segment.group], self.state[segment.parameter]
        (first, second), eps = group["betas"], group["eps"]
        _, frozen = self.moments(segment.parameter)
        if "exp_avg_sq_fresh" not in state:
            state["exp_avg_sq_fresh"] = frozen.clone()
        fresh = state["exp_avg_sq_fresh"]
        _, root = decay_rates(group)
        _, fresh_root = decay_rates({**group, "variance_step": group["step"]})
        for part in parts(fresh):
            gradient = new[part].sub(old[part], alpha=first).div_(1 - first)
            fresh[part].mul_(second).addcmul_(gradient, gradient, value=1 - second)
        for place, _, (still, moving) in self._runs(segment, frozen, fresh):
            for part in parts(still):
                ratio = _root(still[part], root, eps).div_(_root(moving[part], fresh_root, eps))
                ratios[place] = torch.maximum(ratios[place], ratio.max().float())

    def _next_factors(self, ratios: torch.Tensor) -> torch.Tensor:
        if self._divided:
            everyone = torch.empty(self._ranks.world, ratios.numel(), dtype=ratios.dtype, device=ratios.device)
            self._ranks.all_gather([(everyone.view(-1), ratios)], "lamb.ratios", kind="small").wait()
            ratios = everyone.amax(0)
        before = torch.nan_to_num(self._values["factor"], nan=1.0)
        change = self.factor_threshold
        limited = torch.minimum(torch.maximum(ratios, before * (1 - change)), before * (1 + change))
        return limited.clamp(*self.factors)

    @property
    def _divided(self) -> bool:
        """Whether ranks step different ranges."""
        return any(block.stop - block.start < block.numel for block in self._blocks)

    def _segments(self) -> Iterator[tuple[Block, Segment, dict[str, Any]]]:
        for block in self._blocks:
            for segment in block.segments:
                yield block, segment, self.param_groups[segment.group]

    def _runs(
        self, segment: Segment, *tensors: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, tuple[torch.Tensor, ...]]]:
        """Yield the place, the values and the parts of `tensors` of each parameter's run in a segment."""
        for number, start, stop in segment.pieces:
            if start < stop:
                runs = tuple(tensor[start:stop] for tensor in tensors)
                yield self._numbers[number], segment.parameter.detach()[start:stop], runs


class ZeroOneAdam(_Adam):
    """0/1 Adam.

    From Lu et al., "Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam", 2022, arXiv 2202.06009.

    Until `var_freeze_step` some steps reduce the gradient exactly and update the variance: `var_update_scaler` of them
    at each interval, of 1, 2, 4, 8 ... steps. The steps between average the momentum with one bit per element. After
    `var_freeze_step` ranks make steps of their own and average their sum with one bit per element: at intervals of 1,
    2, 4 ... steps, each for `local_step_scaler` steps, but of at most `local_step_clipper`.

    What a rank has not said is kept in units of the momentum, that is, of the sum of updates over the sum of their
    learning rates; at a constant rate and interval this is Algorithm 1 of the paper, and a learning rate of zero or a
    sudden change of it does no harm. Weight decay between averages is that of the parameters of the last one.

    Between averages ranks have different parameters, so it works with ZeRO stage 0 only. A checkpoint has the
    parameters of the last average, and what each rank has done since, with which training goes on exactly on as many
    ranks; `synchronize()` makes ranks equal at once. On one rank, and outside of an engine, this is AdamW.

    Args:
        params: as of any torch optimizer.
        lr: learning rate.
        betas: decay of momentum and variance.
        eps: added to the root of the variance.
        weight_decay: decoupled weight decay.
        bias_correction: divide the moments by the sums of their weights.
        var_freeze_step: step at which the variance is frozen.
        var_update_scaler: updates of the variance at each interval (kappa in the paper).
        local_step_scaler: steps for which an interval between averages lasts.
        local_step_clipper: longest interval between averages.
        amsgrad: only False.
        eps_inside_sqrt: only False.
        cuda_aware: accepted for existing configurations; the backend is torch.distributed's.
        comm_backend_name: accepted for existing configurations: nccl, mpi, compressed, hccl or gloo.

    Raises:
        ConfigError: a value has no meaning.

    Example:
        >>> optimizer = ZeroOneAdam([torch.nn.Parameter(torch.ones(4))], var_freeze_step=12, var_update_scaler=2)
        >>> [step for step in range(20) if optimizer.updates_variance(step)]
        [0, 1, 2, 4, 6, 10]
    """

    shardwise_sharding = "communicates"
    ranks_differ = True
    scale: Scale = "mean"

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        var_freeze_step: int = 100000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        eps_inside_sqrt: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        found = _checked(schema.ZeroOneAdamArguments, locals())
        self.var_freeze_step = found.var_freeze_step
        self.var_update_scaler = found.var_update_scaler
        self.local_step_scaler = found.local_step_scaler
        self.local_step_clipper = found.local_step_clipper
        super().__init__(params, _common(lr, betas, eps, weight_decay, bias_correction))

    # -- when what happens: functions of the number of steps, so that nothing has to be agreed ------------------------

    def updates_variance(self, step: int) -> bool:
        """Return whether the step with this number (from 0) reduces the gradient exactly and updates the variance."""
        if step >= self.var_freeze_step:
            return False
        interval = 1 << (step // self.var_update_scaler + 1).bit_length() - 1
        return (step - self.var_update_scaler * (interval - 1)) % interval == 0

    def interval(self, step: int) -> int:
        """Return how many steps are made from average to average at the step with this number (from 0)."""
        if step < self.var_freeze_step:
            return 1
        doublings = (step - self.var_freeze_step) // self.local_step_scaler
        return min(1 << min(doublings, 62), self.local_step_clipper)

    def averages(self, step: int) -> bool:
        """Return whether ranks agree on parameters again in the step with this number (from 0)."""
        interval = self.interval(step)
        if interval == 1 or self.interval(step + 1) != interval:
            return True
        shorter = (interval - 1).bit_length()  # doublings that led to this interval
        return (step - self.var_freeze_step - shorter * self.local_step_scaler + 1) % interval == 0

    @property
    def warm_up(self) -> int:
        """See `Communicating.warm_up`."""
        return self.var_freeze_step + (self.local_step_scaler if self.local_step_clipper > 1 else 0)

    def _is_exact(self, step: int) -> bool:
        return self.updates_variance(step)

    def _updates_variance(self, step: int) -> bool:
        return not self.attached or self._alone or self.updates_variance(step)

    # -- what is kept between averages -------------------------------------------------------------------------------

    def forget(self) -> None:
        """See `Communicating.forget`."""
        super().forget()
        self._anchors: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._rates = [[0.0, 0.0] for _ in self.param_groups]
        self._apart = False

    def kept(self) -> Iterator[torch.Tensor]:
        """See `Communicating.kept`."""
        yield from super().kept()
        yield from self._anchors.values()
        yield from self._sums.values()

    def agreed(self, segment: Segment) -> torch.Tensor:
        """See `Communicating.agreed`."""
        if self._apart:
            for block in self._blocks:
                if any(segment.parameter is own.parameter for own in block.segments):
                    return self._anchors[block.name][segment.start : segment.stop]
        return super().agreed(segment)

    def withdraw(self) -> None:
        """See `Communicating.withdraw`."""
        if self._apart:
            for block in self._blocks:
                self._sums[block.name].zero_()
                for segment in block.segments:
                    segment.parameter.detach().copy_(self._anchors[block.name][segment.start : segment.stop])
            self._agree()

    @property
    def apart(self) -> bool:
        """Whether ranks have made steps of their own since the last average."""
        return bool(self.attached and self._apart)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make the parameters of all ranks equal now: their updates since the last average are averaged exactly.

        A collective: every rank calls it, for instance before an evaluation. Where ranks are equal nothing happens.
        """
        if not self.apart:
            return
        world = self._ranks.world
        for block in self._blocks:
            total = self._sums[block.name]
            own = torch.empty(block.numel // world, dtype=total.dtype, device=total.device)
            label = f"{block.name}.synchronize"
            self._ranks.reduce_scatter([(own, total)], label).wait()
            self._ranks.all_gather([(total, own.div_(world))], label, kind="reduce").wait()
            for number, start, stop in block.lanes:
                if self._rates[number][0]:
                    torch.div(total[start:stop], self._rates[number][0], out=self._whole[block.name][start:stop])
            self._place(block)
            total.zero_()
        self._agree()
        self._written()

    def _agree(self) -> None:
        self._apart = False
        self._rates = [[0.0, 0.0] for _ in self.param_groups]

    def rank_state(self) -> dict[str, Any] | None:
        """See `Communicating.rank_state`."""
        state = super().rank_state()
        return None if state is None else {**state, "apart": self._apart, "rates": self._rates}

    def _block_state(self, block: Block) -> dict[str, torch.Tensor]:
        state = super()._block_state(block)
        if self._apart:
            state = {**state, "momentum": self._whole[block.name], "sum": self._sums[block.name]}
        return state

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """See `Communicating.load_rank_state`."""
        fits = super().load_rank_state(state)
        if state is not None and fits and state["apart"]:
            self._rates = [list(rates) for rates in state["rates"]]
            self._apart = True
            for block in self._blocks:
                self._place(block)
            self._written()
        return fits

    def _load_block(self, block: Block, saved: Mapping[str, torch.Tensor]) -> None:
        super()._load_block(block, saved)
        if "sum" in saved:
            self._begin(block)
            self._momentum(block).copy_(saved["momentum"])
            self._sums[block.name].copy_(saved["sum"])

    # -- stepping ----------------------------------------------------------------------------------------------------

    def _step_compressed(self) -> None:
        step = self._steps - 1
        momenta = self._own_momenta()
        if self.interval(step) == 1:
            self._step_averaged(momenta)
            return
        if not self._apart:
            for block in self._blocks:
                self._begin(block)
            self._apart = True
        for number, group in enumerate(self.param_groups):
            self._rates[number][0] += float(group["lr"]) / decay_rates(group)[0]
            self._rates[number][1] += float(group["lr"])
        for block, momentum in zip(self._blocks, momenta, strict=True):
            for number, start, stop in block.lanes:
                group = self.param_groups[number]
                rate = float(group["lr"]) / decay_rates(group)[0]
                self._sums[block.name][start:stop].add_(momentum[start:stop], alpha=rate)
        averages = self.averages(step)
        if averages:
            for block, momentum in zip(self._blocks, momenta, strict=True):
                for number, start, stop in block.lanes:
                    if self._rates[number][0]:
                        torch.div(self._sums[block.name][start:stop], self._rates[number][0], out=momentum[start:stop])
            self._mean(momenta)
            for block, momentum in zip(self._blocks, momenta, strict=True):
                for number, start, stop in block.lanes:
                    torch.mul(momentum[start:stop], self._rates[number][0], out=self._sums[block.name][start:stop])
        for block in self._blocks:
            self._place(block)
            if averages:
                self._sums[block.name].zero_()
        if averages:
            self._agree()

    def _begin(self, block: Block) -> None:
        """Remember the parameters on which all ranks agree."""
        if block.name not in self._anchors:
            example = block.segments[0].parameter
            self._anchors[block.name] = torch.zeros(block.numel, dtype=example.dtype, device=example.device)
            self._sums[block.name] = torch.zeros_like(self._anchors[block.name])
        for segment in block.segments:
            self._anchors[block.name][segment.start : segment.stop] = segment.parameter.detach()

    def _place(self, block: Block) -> None:
        """Put the parameters where the updates since the last average lead from there."""
        anchors, sums = self._anchors[block.name], self._sums[block.name]
        for segment in block.segments:
            group, values = self.param_groups[segment.group], segment.parameter.detach()
            _, root = decay_rates(group)
            _, variance = self.moments(segment.parameter)
            left = 1 - self._rates[segment.group][1] * group["weight_decay"]
            own = slice(segment.start, segment.stop)
            for part in parts(values):
                torch.mul(anchors[own][part], left, out=values[part])
                values[part].addcdiv_(sums[own][part], _root(variance[part], root, group["eps"], True), value=-1)


def _checked(model: type[_Model], given: dict[str, Any]) -> _Model:
    """Check what a constructor is given, and say which of it changes nothing."""
    found = called(model, given)
    for name, key in keys_of(model).items():
        if key.no_effect and given[name] != key.default:
            _log.info("%s: %s=%r changes nothing: %s", model.__name__, name, given[name], key.no_effect)
    return found


def _common(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float, bias_correction: bool
) -> dict[str, Any]:
    return {
        "lr": lr,
        "betas": tuple(betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "bias_correction": bias_correction,
    }


def _gradient(block: Block, segment: Segment) -> torch.Tensor:
    assert block.gradient is not None
    return block.gradient[segment.start - block.start : segment.stop - block.start]


def _views(tensor: torch.Tensor, block: Block) -> list[torch.Tensor]:
    return [tensor[start:stop] for _, start, stop in block.tensors]


def _advance(momentum: torch.Tensor, variance: torch.Tensor, gradient: torch.Tensor, group: Mapping[str, Any]) -> None:
    first, second = group["betas"]
    momentum.lerp_(gradient, 1 - first)
    variance.mul_(second).addcmul_(gradient, gradient, value=1 - second)


def _root(variance: torch.Tensor, correction: float, eps: float, frozen: bool = False) -> torch.Tensor:
    """Return what updates are divided by; infinity where a frozen variance is zero."""
    root = variance.sqrt().div_(correction).add_(eps)
    return root.masked_fill_(variance == 0, math.inf) if frozen else root


def _direction(
    values: torch.Tensor,
    momentum: torch.Tensor,
    variance: torch.Tensor,
    group: Mapping[str, Any],
    *,
    frozen: bool = False,
) -> torch.Tensor:
    """Return LAMB's update before its coefficient."""
    first, second = decay_rates(group)
    update = (momentum / first).div_(_root(variance, second, group["eps"], frozen))
    return update.add_(values, alpha=group["weight_decay"])


def _squares(values: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
    """Return the sums of squares of both, in fp64."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in (values, update)]
    return torch.stack(norms).square_()
