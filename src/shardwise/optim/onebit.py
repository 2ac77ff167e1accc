"""Adam and LAMB with one bit per element on the wire: OnebitAdam, OnebitLamb, ZeroOneAdam.

Adam's variance settles early in a training. With a frozen variance the update is linear in the momentum, hence later
steps correct the error of compressing the momentum. An element whose variance is zero when frozen (no rank has had a
gradient for it) is not updated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from shardwise.comm.compression.averaging import Block, ExactMean, Segment, average
from shardwise.comm.compression.onebit import OnebitAllReduce
from shardwise.config.argument_models import checked
from shardwise.config.schema import optimizers as schema
from shardwise.config.schema.base import Arguments
from shardwise.config.schema_index import keys_of
from shardwise.optim.comm_optimizer import CommOptimizer, chunks, decay_rates
from shardwise.optim.elementwise import Batch, ElementwiseOptimizer
from shardwise.optim.lamb import Lamb
from shardwise.optim.layerwise import Layerwise
from shardwise.precision.tensornorms import TensorRun

_log = logging.getLogger("shardwise")

_SHARED = ("lr", "betas", "eps", "weight_decay", "bias_correction")
"""Options of parameter groups."""

_KEPT = ("coefficient", "factor", "momentum_scale")
"""Values per tensor of the model that `OnebitLamb` keeps as options of the first group, saved with it."""


class _Onebit(CommOptimizer):
    """Base of optimizers that average a momentum with one bit per element; `order` is of the norm that scales preserve.

    Segments are 1-D.
    """

    order = 2
    joined = False
    freeze_step: int

    def _check(self, model: type[Arguments], given: dict[str, Any]) -> dict[str, Any]:
        """Keep the arguments of the constructor as attributes; return the options of parameter groups."""
        no_options = ("self", "params", "ignored", "__class__")
        found = checked(model, {name: given[name] for name in given if name not in no_options} | given["ignored"])
        for name, key in keys_of(model).items():
            value = getattr(found, name)
            if name not in _SHARED:
                setattr(self, name, value)
            if key.no_effect and value != key.default:
                _log.info("%s: %s=%r changes nothing: %s", type(self).__name__, name, value, key.no_effect)
        shared = {name: given[name] for name in _SHARED}
        return {**shared, "betas": tuple(given["betas"]), "step": 0, "variance_step": 0}

    @property
    def warm_up(self) -> int:
        """Steps before the variance is frozen."""
        return self.freeze_step

    def _method(self, block: Block) -> OnebitAllReduce:
        runs = [(start, stop) for _, start, stop in block.tensors]
        dtype = block.segments[0].parameter.dtype
        return OnebitAllReduce(self._ranks, block.numel, runs, dtype, block.name, order=self.order, joined=self.joined)


class _Adam(_Onebit, ElementwiseOptimizer):
    state_names = ("exp_avg", "exp_avg_sq")
    temporaries = 1

    @override
    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        first, second = group["betas"]
        moments = zip(batch.states["exp_avg"], batch.states["exp_avg_sq"], strict=True)
        for values, gradient, (momentum, variance) in zip(batch.values, batch.gradients, moments, strict=True):
            momentum.lerp_(gradient, 1 - first)
            variance.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            _descend(values, momentum, _root(variance, group), group)

    def _own_momenta(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        momenta = self.momenta(blocks)
        for number, momentum, gradient in self.lanes(blocks, momenta, [block.gradient for block in blocks]):
            beta = self.param_groups[number]["betas"][0]
            # `gradient` is this rank's summand of the mean; the momentum takes the local gradient.
            momentum.mul_(beta).add_(gradient, alpha=(1 - beta) * self._ranks.world)
        return momenta

    def _step_averaged(self, blocks: Sequence[Block]) -> None:
        self.average(blocks, self._own_momenta(blocks))
        for segment, group in self.segments(blocks):
            for values, momentum, variance in chunks(segment.parameter, *self.moments(segment.parameter)):
                _descend(values, momentum, _root(variance, group, frozen=True), group)


class OnebitAdam(_Adam):
    """1-bit Adam (Tang et al., 2021, arXiv 2102.02888): AdamW for `freeze_step` steps.

    Then the variance and its bias correction are frozen. Each rank adds its own gradient to the momentum, and
    `OnebitAllReduce` averages it with a scale for each parameter in each rank's range. In an engine it works with ZeRO
    stages 0 and 1. Elsewhere, and on one rank, it is `torch.optim.AdamW`. Raises ConfigError for a wrong value.

    Args:
        params, lr, betas, eps, weight_decay, bias_correction: as for `AdamW`.
        freeze_step: steps of warm-up: 15 to 20 % of the training (papers), and at least the learning rate's warm-up.
        ignored: amsgrad and eps_inside_sqrt (only False); cuda_aware and comm_backend_name, without effect.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(4))
        >>> optimizer = OnebitAdam([weight], lr=0.1, freeze_step=100)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> [round(value, 3) for value in weight.tolist()]
        [0.9, 0.9, 0.9, 0.9]
    """

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
        super().__init__(params, self._check(schema.OnebitAdamArguments, locals()))


class OnebitLamb(_Onebit, Lamb):
    """1-bit LAMB (Li et al., 2021, arXiv 2104.06069): `Lamb` for `freeze_step` steps.

    Then variances are frozen, and momenta are averaged as by `OnebitAdam`, on the same stages. Because all parameters
    of a rank's range share one scale, momenta are first scaled to one root mean square. Coefficients are the warm-up's
    moving averages (decay `coeff_beta`, from `min_coeff` to `max_coeff`) times a factor: the largest ratio, in the
    parameter, of the roots of the frozen variance and of one that continues with the gradient reconstructed from two
    momenta. The factor is from `factor_min` to `factor_max`, and changes by at most `factor_threshold` of itself in a
    step. Other arguments are as for `Lamb` and `OnebitAdam`. Raises ConfigError for a value without meaning.

    Example:
        >>> weight = torch.nn.Parameter(torch.full((4,), 2.0))
        >>> optimizer = OnebitLamb([weight], lr=0.01, freeze_step=100)
        >>> weight.sum().backward()
        >>> optimizer.step()
        >>> [round(value, 3) for value in weight.tolist()]
        [1.98, 1.98, 1.98, 1.98]
    """

    joined = True
    first_group_state = _KEPT
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
        defaults = self._check(schema.OnebitLambArguments, locals())
        limits = {"max_coeff": max_coeff, "min_coeff": min_coeff, "eps_inside_sqrt": False}
        Layerwise.__init__(self, params, {**defaults, **limits, **dict.fromkeys(_KEPT)})

    @override
    def detach(self) -> None:
        super().detach()
        self.param_groups[0].update(dict.fromkeys(_KEPT))

    def _is_exact(self, step: int) -> bool:
        return step < self.freeze_step or self.param_groups[0]["coefficient"] is None

    def _step(self) -> None:
        exact = self.exact_gradients()
        super()._step()
        if exact and self.attached and self._coefficients is not None:
            before, now = self.param_groups[0]["coefficient"], self._coefficients
            mean = now if before is None else self.coeff_beta * before.to(now) + (1 - self.coeff_beta) * now
            self.param_groups[0]["coefficient"] = mean

    def _step_averaged(self, blocks: Sequence[Block]) -> None:
        # The new momentum takes the gradient's memory; the old momentum is kept for the comparison.
        momenta, fresh = self.momenta(blocks), [block.gradient for block in blocks]
        scales = self._momentum_scales(blocks, momenta)
        for number, new, momentum in self.lanes(blocks, fresh, momenta):
            beta = self.param_groups[number]["betas"][0]
            new.mul_((1 - beta) * self._ranks.world).add_(momentum, alpha=beta)
        for block, new, scale in zip(blocks, fresh, scales, strict=True):
            torch._foreach_mul_(_views(new, block), scale)
        self.average(blocks, fresh)
        for block, new, scale in zip(blocks, fresh, scales, strict=True):
            torch._foreach_div_(_views(new, block), scale)
        kept = self.param_groups[0]
        coefficient = kept["coefficient"].to(momenta[0].device)
        ratios = torch.zeros_like(coefficient, dtype=torch.float32)
        for segment, group, old, new in self.segments(blocks, momenta, fresh):
            self._compare(segment, group, old, new, ratios)
        for old, new in zip(momenta, fresh, strict=True):
            old.copy_(new)
        kept["factor"] = self._next_factors(ratios)
        for segment, group in self.segments(blocks):
            values, (momentum, variance) = segment.parameter.detach(), self.moments(segment.parameter)
            for run in self._runs(segment):
                rate = coefficient[run.tensor] * kept["factor"][run.tensor] * float(group["lr"])
                for own, along, over in chunks(run.of(values), run.of(momentum), run.of(variance)):
                    update = (along / decay_rates(group)[0]).div_(_root(over, group, frozen=True))
                    own.sub_(update.add_(own, alpha=group["weight_decay"]).mul_(rate))

    def _momentum_scales(self, blocks: Sequence[Block], momenta: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the factor of each tensor's momentum during communication; the first compressed step fixes it."""
        kept, device = self.param_groups[0], momenta[0].device
        if kept["momentum_scale"] is None:
            views = [view for block, momentum in zip(blocks, momenta, strict=True) for view in _views(momentum, block)]
            counts = torch.tensor([view.numel() for view in views], dtype=torch.float32, device=device)
            roots = torch.stack(torch._foreach_norm(views)).float() / counts.clamp(min=1).sqrt()
            moving = roots > 0
            united = roots.sum() / moving.sum().clamp(min=1)
            numbers = torch.tensor([number for block in blocks for number, _, _ in block.tensors], device=device)
            known = torch.ones(len(kept["coefficient"]), dtype=torch.float32, device=device)
            kept["momentum_scale"] = known.index_copy_(0, numbers, torch.where(moving, united / roots, 1.0))
        single = kept["momentum_scale"].to(device).unbind()
        return [[single[number] for number, _, _ in block.tensors] for block in blocks]

    def _compare(
        self, segment: Segment, group: dict[str, Any], old: torch.Tensor, new: torch.Tensor, ratios: torch.Tensor
    ) -> None:
        """Update the variance with the reconstructed gradient; record the largest ratio of each tensor."""
        (first, second), state = group["betas"], self.state[segment.parameter]
        _, frozen = self.moments(segment.parameter)
        if "exp_avg_sq_fresh" not in state:
            state["exp_avg_sq_fresh"] = frozen.clone()
        fresh_group = {**group, "variance_step": group["step"]}
        for fresh, before, after in chunks(state["exp_avg_sq_fresh"], old, new):
            gradient = after.sub(before, alpha=first).div_(1 - first)
            fresh.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        for run in self._runs(segment):
            for still, fresh in chunks(run.of(frozen), run.of(state["exp_avg_sq_fresh"])):
                ratio = _root(still, group).div_(_root(fresh, fresh_group))
                ratios[run.tensor] = torch.maximum(ratios[run.tensor], ratio.max().float())

    def _next_factors(self, ratios: torch.Tensor) -> torch.Tensor:
        if any(block.stop - block.start < block.numel for block in self._blocks):  # ranks step different ranges
            everyone = ratios.new_empty(self._ranks.world, ratios.numel())
            self._ranks.all_gather([(everyone.view(-1), ratios)], "lamb.ratios", kind="small").wait()
            ratios = everyone.amax(0)
        before = self.param_groups[0]["factor"]
        before = torch.ones_like(ratios) if before is None else before.to(ratios)
        limited = ratios.clamp(before * (1 - self.factor_threshold), before * (1 + self.factor_threshold))
        return limited.clamp(self.factor_min, self.factor_max)

    def _runs(self, segment: Segment) -> list[TensorRun]:
        assert self.shardwise_norms is not None
        return [run for run in self.shardwise_norms.runs(segment.parameter) if run.start < run.stop]


class ZeroOneAdam(_Adam):
    """0/1 Adam (Lu et al., 2022, arXiv 2202.06009). Arguments as for `OnebitAdam`, except for the intervals.

    Before `var_freeze_step`, some steps reduce the gradient exactly and update the variance: `var_update_scaler` (the
    paper's kappa) of them at each interval of 1, 2, 4, 8 ... steps. Other steps average the momentum with one bit per
    element. Later, ranks make local steps and average their sum with one bit per element, at intervals of 1, 2, 4 ...
    up to `local_step_clipper` steps, each for `local_step_scaler` steps.

    The compression error is kept in units of the momentum (sum of updates over sum of their learning rates), which a
    zero or suddenly changed learning rate does not harm. At a constant rate and interval this is Algorithm 1 of the
    paper. Weight decay between averages uses the parameters of the last average.

    Because parameters differ between ranks between averages, only ZeRO stage 0 works. A checkpoint has the parameters
    of the last average and each rank's local updates since; on as many ranks training continues exactly. On one rank,
    and without an engine, this is AdamW. Raises ConfigError for a value without meaning.

    Example:
        >>> optimizer = ZeroOneAdam([torch.nn.Parameter(torch.ones(4))], var_freeze_step=12, var_update_scaler=2)
        >>> [step for step in range(20) if optimizer.updates_variance(step)]
        [0, 1, 2, 4, 6, 10]
    """

    ranks_differ = True
    order = 1
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
        super().__init__(params, self._check(schema.ZeroOneAdamArguments, locals()))

    # -- intervals: functions of the step number, hence equal on all ranks -------------------------------------------

    def updates_variance(self, step: int) -> bool:
        """Return True if step `step` (from 0) reduces the gradient exactly and updates the variance."""
        if step >= self.var_freeze_step:
            return False
        interval = 1 << (step // self.var_update_scaler + 1).bit_length() - 1
        return (step - self.var_update_scaler * (interval - 1)) % interval == 0

    def interval(self, step: int) -> int:
        """Return the number of steps between averages at step `step` (from 0)."""
        if step < self.var_freeze_step:
            return 1
        doublings = (step - self.var_freeze_step) // self.local_step_scaler
        return min(1 << min(doublings, 62), self.local_step_clipper)

    def averages(self, step: int) -> bool:
        """Return True if step `step` (from 0) averages the parameters."""
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

    # -- state between averages --------------------------------------------------------------------------------------

    @override
    def forget(self) -> None:
        super().forget()
        self._agree()

    def _agree(self) -> None:
        self._diverged = False
        self._rates = [[0.0, 0.0] for _ in self.param_groups]
        for block in self._blocks:
            if "sum" in block.kept:
                block.kept["sum"].zero_()

    @override
    def synchronized_values(self, block: Block, segment: Segment) -> torch.Tensor:
        values = block.kept["anchor"][segment.start : segment.stop] if self._diverged else segment.parameter
        return values.detach()

    @override
    def restore_synchronized(self) -> None:
        if self._diverged:
            for segment, _, anchor in self.segments(self._blocks, self._kept("anchor")):
                segment.parameter.detach().copy_(anchor)
        self._agree()

    @property
    def diverged(self) -> bool:
        """Whether ranks have made local steps since the last average."""
        return bool(self.attached and self._diverged)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make parameters equal on all ranks: average local updates since the last average exactly (a collective)."""
        if self.diverged:
            exact = [ExactMean(self._ranks, f"{block.name}.synchronize") for block in self._blocks]
            average(exact, self._kept("sum"), self._hold)
            self._by_rates(torch.div, self._kept("sum"), self._kept("momentum"))
            self._place()
            self._agree()
            self._written()

    @override
    def rank_state(self) -> dict[str, Any] | None:
        state = super().rank_state()
        return None if state is None else {**state, "apart": self._diverged, "rates": self._rates}

    def _errors(self, block: Block) -> dict[str, torch.Tensor]:
        local = ("momentum", "sum") if self._diverged else ()
        return super()._errors(block) | {name: block.kept[name] for name in local}

    def _load(self, state: Mapping[str, Any], blocks: Mapping[str, Block]) -> None:
        if state["apart"]:
            self.momenta(self._blocks)
            for block in self._blocks:
                self._begin(block)
            self._diverged, self._rates = True, [list(rates) for rates in state["rates"]]
        super()._load(state, blocks)
        if state["apart"]:
            self._place()
            self._written()

    # -- stepping ----------------------------------------------------------------------------------------------------

    def _step_averaged(self, blocks: Sequence[Block]) -> None:
        step = int(self.param_groups[0]["step"]) - 1
        if self.interval(step) == 1:
            super()._step_averaged(blocks)
            return
        momenta = self._own_momenta(blocks)
        if not self._diverged:
            for block in blocks:
                self._begin(block)
            self._diverged = True
        now = [float(group["lr"]) / decay_rates(group)[0] for group in self.param_groups]
        for rates, rate, group in zip(self._rates, now, self.param_groups, strict=True):
            rates[:] = rates[0] + rate, rates[1] + float(group["lr"])
        totals = self._kept("sum")
        for number, total, momentum in self.lanes(blocks, totals, momenta):
            total.add_(momentum, alpha=now[number])
        averages = self.averages(step)
        if averages:
            self._by_rates(torch.div, totals, momenta)
            self.average(blocks, momenta)
            self._by_rates(torch.mul, momenta, totals)
        self._place()
        if averages:
            self._agree()

    def _kept(self, name: str) -> list[torch.Tensor]:
        return [block.kept[name] for block in self._blocks]

    def _by_rates(self, operation: Any, given: Sequence[torch.Tensor], out: Sequence[torch.Tensor]) -> None:
        """Divide or multiply blocks by the sums of learning rates since the last average, unless zero."""
        for number, values, into in self.lanes(self._blocks, given, out):
            rate = self._rates[number][0]
            if rate or operation is torch.mul:
                operation(values, rate, out=into)

    def _begin(self, block: Block) -> None:
        for name in ("anchor", "sum"):
            if name not in block.kept:
                block.kept[name] = block.segments[0].parameter.detach().new_zeros(block.numel)
        for segment in block.segments:
            block.kept["anchor"][segment.start : segment.stop] = segment.parameter.detach()

    def _place(self) -> None:
        for segment, group, anchor, total in self.segments(self._blocks, self._kept("anchor"), self._kept("sum")):
            _, variance = self.moments(segment.parameter)
            left = 1 - self._rates[segment.group][1] * group["weight_decay"]
            for values, before, change, over in chunks(segment.parameter.detach(), anchor, total, variance):
                torch.mul(before, left, out=values)
                values.addcdiv_(change, _root(over, group, frozen=True), value=-1)


def _views(tensor: torch.Tensor, block: Block) -> list[torch.Tensor]:
    return [tensor[start:stop] for _, start, stop in block.tensors]


def _root(variance: torch.Tensor, group: Mapping[str, Any], *, frozen: bool = False) -> torch.Tensor:
    """Return the denominator of updates; infinity where a frozen variance is zero."""
    root = variance.sqrt().div_(decay_rates(group)[1]).add_(group["eps"])
    return root.masked_fill_(variance == 0, math.inf) if frozen else root


def _descend(values: torch.Tensor, momentum: torch.Tensor, root: torch.Tensor, group: Mapping[str, Any]) -> None:
    lr = float(group["lr"])
    if group["weight_decay"]:
        values.mul_(1 - lr * group["weight_decay"])
    values.addcdiv_(momentum, root, value=-lr / decay_rates(group)[0])
