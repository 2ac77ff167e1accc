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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise.comm.compression.averaging import Averages, Block, ExactMean, Segment
from shardwise.comm.compression.onebit import OnebitAllReduce, Scale
from shardwise.config.argument_models import checked
from shardwise.config.schema import optimizers as schema
from shardwise.config.schema.base import Arguments
from shardwise.config.schema_index import keys_of
from shardwise.optim.comm_optimizer import CommOptimizer, decay_rates, parts
from shardwise.optim.layerwise import trust_ratio

_log = logging.getLogger("shardwise")

_SHARED = ("lr", "betas", "eps", "weight_decay", "bias_correction")
"""Arguments that parameter groups have."""


class _Onebit(CommOptimizer):
    """What optimizers that average a momentum with one bit per element have in common.

    Attributes:
        scale: what the scales of compressed values preserve.
        joined: whether the values of all parameters of a rank's range share one scale.
    """

    scale: Scale = "norm"
    joined = False

    def __init__(self, params: Iterable[Any], model: type[Arguments], given: dict[str, Any]) -> None:
        found = checked(model, given)
        for name, key in keys_of(model).items():
            value = getattr(found, name)
            if name not in _SHARED:
                setattr(self, name, value)
            if key.no_effect and value != key.default:
                _log.info("%s: %s=%r changes nothing: %s", type(self).__name__, name, value, key.no_effect)
        super().__init__(params, {**{key: given[key] for key in _SHARED}, "betas": tuple(given["betas"])})

    def _method(self, block: Block) -> OnebitAllReduce:
        values = block.segments[0].parameter
        runs = [(start, stop) for _, start, stop in block.tensors]
        how = values.dtype, values.device, block.name
        return OnebitAllReduce(self._ranks, block.numel, runs, *how, scale=self.scale, joined=self.joined)


class _Adam(_Onebit):
    """Adam with decoupled weight decay (torch.optim.AdamW), in the terms that the compressed steps share."""

    def _step_exact(self, blocks: Sequence[Block]) -> None:
        for segment, gradient, group in self.segments(blocks):
            momentum, variance = self.moments(segment.parameter)
            for part in parts(segment.parameter):
                _advance(momentum[part], variance[part], gradient[part], group)
                self._descend(segment.parameter[part], momentum[part], variance[part], group)

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

    def _own_momenta(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        """Add this rank's gradients to the momenta; return them, whole."""
        momenta = [self.momentum(block) for block in blocks]
        for block, momentum in zip(blocks, momenta, strict=True):
            assert block.gradient is not None
            for number, start, stop in block.lanes:
                beta = self.param_groups[number]["betas"][0]
                # The gradient is this rank's part of the mean; the momentum takes the rank's own as a whole.
                own = (1 - beta) * self._ranks.world
                momentum[start:stop].mul_(beta).add_(block.gradient[start:stop], alpha=own)
        return momenta

    def _step_averaged(self, blocks: Sequence[Block]) -> None:
        """Average the momenta over ranks, and step along them with the frozen variance."""
        self._averages.average(blocks, self._own_momenta(blocks))
        for segment, _, group in self.segments(blocks):
            momentum, variance = self.moments(segment.parameter)
            for part in parts(segment.parameter):
                self._descend(segment.parameter[part], momentum[part], variance[part], group, frozen=True)


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
        ignored: amsgrad and eps_inside_sqrt (only False), cuda_aware and comm_backend_name (nccl, mpi, compressed,
            hccl or gloo), accepted for existing configurations; the backend is torch.distributed's.

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
    freeze_step: int

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        freeze_step: int = 100000,
        **ignored: Any,
    ) -> None:
        super().__init__(params, schema.OnebitAdamArguments, _arguments(locals()))

    @property
    def warm_up(self) -> int:
        """Steps before the variance is frozen."""
        return self.freeze_step


class OnebitLamb(_Onebit):
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
        ignored: amsgrad and eps_inside_sqrt (only False), cuda_aware and comm_backend_name (nccl, mpi, compressed,
            hccl or gloo), accepted for existing configurations; the backend is torch.distributed's.

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
    freeze_step: int
    min_coeff: float
    max_coeff: float
    coeff_beta: float
    factor_min: float
    factor_max: float
    factor_threshold: float

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
        **ignored: Any,
    ) -> None:
        super().__init__(params, schema.OnebitLambArguments, _arguments(locals()))

    @property
    def warm_up(self) -> int:
        """Steps before the variance is frozen."""
        return self.freeze_step

    def forget(self) -> None:
        """See `CommOptimizer.forget`."""
        super().forget()
        self._known = False

    def _step_exact(self, blocks: Sequence[Block]) -> None:
        self._learn() if self.attached else self._remember(blocks)
        squares = torch.zeros(2, len(self._numbers), dtype=torch.float64, device=self._device)
        for segment, gradient, group in self.segments(blocks):
            momentum, variance = self.moments(segment.parameter)
            for part in parts(segment.parameter):
                _advance(momentum[part], variance[part], gradient[part], group)
            for place, values, (own, second) in self._runs(segment, momentum, variance):
                for part in parts(values):
                    update = _direction(values[part], own[part], second[part], group)
                    squares[:, place] += _squares(values[part], update).to(self._device)
        if self._divided:
            self._ranks.all_reduce(squares, "lamb.norms").wait()
        norms = squares.sqrt().float()
        coefficients = trust_ratio(norms[0], norms[1], self.min_coeff, self.max_coeff)
        before = self._values["coefficient"]
        averaged = self.coeff_beta * before + (1 - self.coeff_beta) * coefficients
        self._values["coefficient"] = torch.where(torch.isnan(before), coefficients, averaged)
        if not self.attached:
            for block, coefficient in zip(blocks, self._values["coefficient"].unbind(), strict=True):
                self.state[block.segments[0].parameter]["coefficient"] = coefficient
        self._descend(blocks, coefficients, frozen=False)

    def _remember(self, blocks: Sequence[Block]) -> None:
        """Take over the coefficients that parameters have outside of an engine."""
        devices = {block.segments[0].parameter.device for block in blocks}
        self._device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        known = [self.state[block.segments[0].parameter].get("coefficient", torch.nan) for block in blocks]
        single = [torch.as_tensor(value, dtype=torch.float32, device=self._device) for value in known]
        self._values = {"coefficient": torch.stack(single) if single else torch.empty(0, device=self._device)}
        self._numbers = {place: place for place in range(len(blocks))}

    def _descend(self, blocks: Sequence[Block], coefficients: torch.Tensor, *, frozen: bool) -> None:
        for segment, _, group in self.segments(blocks):
            for place, values, (own, second) in self._runs(segment, *self.moments(segment.parameter)):
                for part in parts(values):
                    update = _direction(values[part], own[part], second[part], group, frozen=frozen)
                    values[part].sub_(update.mul_(coefficients[place] * float(group["lr"])))

    def _step_averaged(self, blocks: Sequence[Block]) -> None:
        self._learn()
        begins = not self._momenta
        momenta = [self.momentum(block) for block in blocks]
        if begins:
            self._begin(momenta)
        single = iter(self._values["momentum_scale"].unbind())
        scales = [[next(single) for _ in block.tensors] for block in blocks]
        fresh = []
        for block, momentum, scale in zip(blocks, momenta, scales, strict=True):
            # The gradient's memory becomes that of the new momentum, so that the old one is there to compare with.
            assert block.gradient is not None
            for number, start, stop in block.lanes:
                beta = self.param_groups[number]["betas"][0]
                own = block.gradient[start:stop].mul_((1 - beta) * self._ranks.world)
                own.add_(momentum[start:stop], alpha=beta)
            torch._foreach_mul_(_views(block.gradient, block), scale)
            fresh.append(block.gradient)
        self._averages.average(blocks, fresh)
        ratios = torch.zeros(len(self._numbers), dtype=torch.float32, device=self._device)
        for block, momentum, new, scale in zip(blocks, momenta, fresh, scales, strict=True):
            torch._foreach_div_(_views(new, block), scale)
            for segment in block.segments:
                where = slice(segment.start, segment.stop)
                self._compare(segment, momentum[where], new[where], ratios)
            momentum.copy_(new)
        self._values["factor"] = self._next_factors(ratios)
        self._descend(blocks, self._values["coefficient"] * self._values["factor"], frozen=True)

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
        return limited.clamp(self.factor_min, self.factor_max)

    @property
    def _divided(self) -> bool:
        """Whether ranks step different ranges."""
        return any(block.stop - block.start < block.numel for block in self._blocks)

    def _runs(
        self, segment: Segment, *tensors: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, tuple[torch.Tensor, ...]]]:
        """Yield the place, the values and the ranges of `tensors` of each parameter in a segment."""
        values = segment.parameter.detach()
        for number, start, stop in segment.pieces:
            if start < stop:
                own: Any = slice(start, stop) if self.attached else ...
                yield self._numbers[number], values[own], tuple(tensor[own] for tensor in tensors)


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
        ignored: amsgrad and eps_inside_sqrt (only False), cuda_aware and comm_backend_name (nccl, mpi, compressed,
            hccl or gloo), accepted for existing configurations; the backend is torch.distributed's.

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
    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

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
        **ignored: Any,
    ) -> None:
        super().__init__(params, schema.ZeroOneAdamArguments, _arguments(locals()))

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
        """Steps before intervals between averages begin to grow."""
        return self.var_freeze_step + (self.local_step_scaler if self.local_step_clipper > 1 else 0)

    def _is_exact(self, step: int) -> bool:
        return self.updates_variance(step)

    # -- what is kept between averages -------------------------------------------------------------------------------

    def forget(self) -> None:
        """See `CommOptimizer.forget`."""
        super().forget()
        self._anchors: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._agree()

    def _agree(self) -> None:
        self._apart = False
        self._rates = [[0.0, 0.0] for _ in self.param_groups]
        for total in self._sums.values():
            total.zero_()

    def kept(self) -> Iterator[torch.Tensor]:
        """See `CommOptimizer.kept`."""
        yield from super().kept()
        yield from self._anchors.values()
        yield from self._sums.values()

    def agreed(self, segment: Segment) -> torch.Tensor:
        """See `CommOptimizer.agreed`."""
        for block in self._blocks if self._apart else ():
            if any(segment.parameter is own.parameter for own in block.segments):
                return self._anchors[block.name][segment.start : segment.stop]
        return super().agreed(segment)

    def withdraw(self) -> None:
        """See `CommOptimizer.withdraw`."""
        for block in self._blocks if self._apart else ():
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
        if self.apart:
            totals = [self._sums[block.name] for block in self._blocks]
            exact = Averages(lambda block: ExactMean(self._ranks, f"{block.name}.synchronize"), self._hold)
            exact.average(self._blocks, totals)
            self._by_rates(torch.div, totals, [self._momenta[block.name] for block in self._blocks])
            self._place()
            self._agree()
            self._written()

    def rank_state(self) -> dict[str, Any] | None:
        """See `CommOptimizer.rank_state`."""
        state = super().rank_state()
        return None if state is None else {**state, "apart": self._apart, "rates": self._rates}

    def _block_state(self, block: Block) -> dict[str, torch.Tensor]:
        state = super()._block_state(block)
        if self._apart:
            state = {**state, "momentum": self._momenta[block.name], "sum": self._sums[block.name]}
        return state

    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        """See `CommOptimizer.load_rank_state`."""
        fits = super().load_rank_state(state)
        if state is not None and fits and state["apart"]:
            self._rates = [list(rates) for rates in state["rates"]]
            self._apart = True
            self._place()
            self._written()
        return fits

    def _load_block(self, block: Block, saved: Mapping[str, torch.Tensor]) -> None:
        super()._load_block(block, saved)
        if "sum" in saved:
            self._begin(block)
            self.momentum(block).copy_(saved["momentum"])
            self._sums[block.name].copy_(saved["sum"])

    # -- stepping ----------------------------------------------------------------------------------------------------

    def _step_averaged(self, blocks: Sequence[Block]) -> None:
        step = int(self.param_groups[0]["step"]) - 1
        if self.interval(step) == 1:
            super()._step_averaged(blocks)
            return
        momenta = self._own_momenta(blocks)
        if not self._apart:
            for block in blocks:
                self._begin(block)
            self._apart = True
        for number, group in enumerate(self.param_groups):
            self._rates[number][0] += float(group["lr"]) / decay_rates(group)[0]
            self._rates[number][1] += float(group["lr"])
        totals = [self._sums[block.name] for block in blocks]
        for block, momentum, total in zip(blocks, momenta, totals, strict=True):
            for number, start, stop in block.lanes:
                group = self.param_groups[number]
                total[start:stop].add_(momentum[start:stop], alpha=float(group["lr"]) / decay_rates(group)[0])
        averages = self.averages(step)
        if averages:
            self._by_rates(torch.div, totals, momenta)
            self._averages.average(blocks, momenta)
            self._by_rates(torch.mul, momenta, totals)
        self._place()
        if averages:
            self._agree()

    def _by_rates(self, operation: Any, given: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
        """Divide or multiply blocks by the sums of learning rates since the last average, where they are not zero."""
        for block, values, into in zip(self._blocks, given, out, strict=True):
            for number, start, stop in block.lanes:
                rate = self._rates[number][0]
                if rate or operation is torch.mul:
                    operation(values[start:stop], rate, out=into[start:stop])

    def _begin(self, block: Block) -> None:
        """Remember the parameters on which all ranks agree."""
        if block.name not in self._anchors:
            example = block.segments[0].parameter
            self._anchors[block.name] = torch.zeros(block.numel, dtype=example.dtype, device=example.device)
            self._sums[block.name] = torch.zeros_like(self._anchors[block.name])
        for segment in block.segments:
            self._anchors[block.name][segment.start : segment.stop] = segment.parameter.detach()

    def _place(self) -> None:
        """Put the parameters where the updates since the last average lead from there."""
        for block in self._blocks:
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


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a constructor, but for parameters, from its local variables."""
    names = given.keys() - {"self", "params", "ignored", "__class__"}
    return {**{name: given[name] for name in names}, **given["ignored"]}


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
