"""Adam and LAMB with one bit per element on the wire: OnebitAdam, OnebitLamb, ZeroOneAdam.

Adam's variance settles early in a training. With a frozen variance the update is linear in the momentum, hence later
steps correct the error of compressing the momentum. An element whose variance is zero when frozen (no rank has had a
gradient for it) is not updated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from shardwise.comm.compression.averaging import Averages, Block, ExactMean, Segment
from shardwise.comm.compression.onebit import OnebitAllReduce, Scale
from shardwise.config.argument_models import checked
from shardwise.config.schema import optimizers as schema
from shardwise.config.schema.base import Arguments
from shardwise.config.schema_index import keys_of
from shardwise.optim.comm_optimizer import CommOptimizer, decay_rates, parts
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
    """Base of optimizers that average a momentum with one bit per element."""

    scale: Scale = "norm"
    joined = False

    def _check(self, model: type[Arguments], given: dict[str, Any]) -> dict[str, Any]:
        """Keep the arguments of the constructor as attributes; return the options of parameter groups."""
        names = given.keys() - {"self", "params", "ignored", "__class__"}
        found = checked(model, {**{name: given[name] for name in names}, **given["ignored"]})
        for name, key in keys_of(model).items():
            value = getattr(found, name)
            if name not in _SHARED:
                setattr(self, name, value)
            if key.no_effect and value != key.default:
                _log.info("%s: %s=%r changes nothing: %s", type(self).__name__, name, value, key.no_effect)
        shared = {name: given[name] for name in _SHARED}
        return {**shared, "betas": tuple(given["betas"]), "step": 0, "variance_step": 0}

    def _method(self, block: Block) -> OnebitAllReduce:
        values = block.segments[0].parameter
        runs = [(start, stop) for _, start, stop in block.tensors]
        how = values.dtype, values.device, block.name
        return OnebitAllReduce(self._ranks, block.numel, runs, *how, scale=self.scale, joined=self.joined)


class _Adam(_Onebit, ElementwiseOptimizer):
    state_names = ("exp_avg", "exp_avg_sq")

    @override
    def update(self, batch: Batch, group: Mapping[str, Any]) -> None:
        first, second = group["betas"]
        moments = zip(batch.states["exp_avg"], batch.states["exp_avg_sq"], strict=True)
        for values, gradient, (momentum, variance) in zip(batch.values, batch.gradients, moments, strict=True):
            momentum.lerp_(gradient, 1 - first)
            variance.mul_(second).addcmul_(gradient, gradient, value=1 - second)
            self._descend(values, momentum, variance, group)

    @override
    def temporaries_of(self, group: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> int:
        return 1

    def _descend(
        self,
        values: torch.Tensor,
        momentum: torch.Tensor,
        variance: torch.Tensor,
        group: Mapping[str, Any],
        *,
        frozen: bool = False,
    ) -> None:
        lr, (first, second) = float(group["lr"]), decay_rates(group)
        if group["weight_decay"]:
            values.mul_(1 - lr * group["weight_decay"])
        values.addcdiv_(momentum, _root(variance, second, group["eps"], frozen), value=-lr / first)

    def _own_momenta(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        momenta = [self.momentum(block) for block in blocks]
        for block, momentum in zip(blocks, momenta, strict=True):
            assert block.gradient is not None
            for number, start, stop in block.lanes:
                beta = self.param_groups[number]["betas"][0]
                # `gradient` is this rank's summand of the mean; the momentum takes the local gradient.
                own = (1 - beta) * self._ranks.world
                momentum[start:stop].mul_(beta).add_(block.gradient[start:stop], alpha=own)
        return momenta

    def _step_averaged(self, blocks: Sequence[Block]) -> None:
        self._averages.average(blocks, self._own_momenta(blocks))
        for segment, group in self.segments(blocks):
            momentum, variance = self.moments(segment.parameter)
            for part in parts(segment.parameter):
                self._descend(segment.parameter[part], momentum[part], variance[part], group, frozen=True)


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
        super().__init__(params, self._check(schema.OnebitAdamArguments, locals()))

    @property
    def warm_up(self) -> int:
        """Steps before the variance is frozen."""
        return self.freeze_step


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

    shardwise_sharding = "communicates"
    joined = True
    freeze_step: int
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

    @property
    def warm_up(self) -> int:
        """Steps before the variance is frozen."""
        return self.freeze_step

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
        momenta = [self.momentum(block) for block in blocks]
        scales = self._momentum_scales(blocks, momenta)
        fresh = []
        for block, momentum, scale in zip(blocks, momenta, scales, strict=True):
            # The new momentum takes the gradient's memory; the old momentum is kept for the comparison.
            assert block.gradient is not None
            for number, start, stop in block.lanes:
                beta = self.param_groups[number]["betas"][0]
                own = block.gradient[start:stop].mul_((1 - beta) * self._ranks.world)
                own.add_(momentum[start:stop], alpha=beta)
            torch._foreach_mul_(_views(block.gradient, block), scale)
            fresh.append(block.gradient)
        self._averages.average(blocks, fresh)
        kept = self.param_groups[0]
        coefficient = kept["coefficient"].to(momenta[0].device)
        ratios = torch.zeros_like(coefficient, dtype=torch.float32)
        for block, momentum, new, scale in zip(blocks, momenta, fresh, scales, strict=True):
            torch._foreach_div_(_views(new, block), scale)
            for segment in block.segments:
                where = slice(segment.start, segment.stop)
                self._compare(segment, momentum[where], new[where], ratios)
            momentum.copy_(new)
        kept["factor"] = self._next_factors(ratios)
        for segment, group in self.segments(blocks):
            values, (momentum, variance) = segment.parameter.detach(), self.moments(segment.parameter)
            for run in self._runs(segment):
                rate = coefficient[run.tensor] * kept["factor"][run.tensor] * float(group["lr"])
                own, along, over = run.of(values), run.of(momentum), run.of(variance)
                for part in parts(own):
                    update = _direction(own[part], along[part], over[part], group)
                    own[part].sub_(update.mul_(rate))

    def _momentum_scales(self, blocks: Sequence[Block], momenta: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the factor of each tensor's momentum during communication; the first compressed step fixes it."""
        kept, device = self.param_groups[0], momenta[0].device
        if kept["momentum_scale"] is None:
            norms = [n for block, m in zip(blocks, momenta, strict=True) for n in torch._foreach_norm(_views(m, block))]
            counts = [stop - start for block in blocks for _, start, stop in block.tensors]
            roots = torch.stack(norms).float() / torch.tensor(counts, device=device).clamp(min=1).sqrt()
            moving = roots > 0
            united = roots.sum() / moving.sum().clamp(min=1)
            numbers = torch.tensor([number for block in blocks for number, _, _ in block.tensors], device=device)
            known = torch.ones(len(kept["coefficient"]), device=device)
            kept["momentum_scale"] = known.index_copy_(0, numbers, torch.where(moving, united / roots, 1.0))
        single = kept["momentum_scale"].to(device).unbind()
        return [[single[number] for number, _, _ in block.tensors] for block in blocks]

    def _compare(self, segment: Segment, old: torch.Tensor, new: torch.Tensor, ratios: torch.Tensor) -> None:
        """Update the variance with the reconstructed gradient; record the largest ratio of each tensor."""
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
        for run in self._runs(segment):
            still, moving = run.of(frozen), run.of(fresh)
            for part in parts(still):
                ratio = _root(still[part], root, eps).div_(_root(moving[part], fresh_root, eps))
                ratios[run.tensor] = torch.maximum(ratios[run.tensor], ratio.max().float())

    def _next_factors(self, ratios: torch.Tensor) -> torch.Tensor:
        if any(block.stop - block.start < block.numel for block in self._blocks):  # ranks step different ranges
            everyone = torch.empty(self._ranks.world, ratios.numel(), dtype=ratios.dtype, device=ratios.device)
            self._ranks.all_gather([(everyone.view(-1), ratios)], "lamb.ratios", kind="small").wait()
            ratios = everyone.amax(0)
        before = self.param_groups[0]["factor"]
        before = torch.ones_like(ratios) if before is None else before.to(ratios)
        change = self.factor_threshold
        limited = torch.minimum(torch.maximum(ratios, before * (1 - change)), before * (1 + change))
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
        self._anchors: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        self._agree()

    def _agree(self) -> None:
        self._diverged = False
        self._rates = [[0.0, 0.0] for _ in self.param_groups]
        for total in self._sums.values():
            total.zero_()

    @override
    def extra_tensors(self) -> Iterator[torch.Tensor]:
        yield from super().extra_tensors()
        yield from self._anchors.values()
        yield from self._sums.values()

    @override
    def synchronized_values(self, segment: Segment) -> torch.Tensor:
        for block in self._blocks if self._diverged else ():
            if any(segment.parameter is own.parameter for own in block.segments):
                return self._anchors[block.name][segment.start : segment.stop]
        return super().synchronized_values(segment)

    @override
    def restore_synchronized(self) -> None:
        for block in self._blocks if self._diverged else ():
            for segment in block.segments:
                segment.parameter.detach().copy_(self._anchors[block.name][segment.start : segment.stop])
        self._agree()

    @property
    def diverged(self) -> bool:
        """Whether ranks have made local steps since the last average."""
        return bool(self.attached and self._diverged)

    @torch.no_grad()
    def synchronize(self) -> None:
        """Make parameters equal on all ranks: average local updates since the last average exactly (a collective)."""
        if self.diverged:
            totals = [self._sums[block.name] for block in self._blocks]
            exact = Averages(lambda block: ExactMean(self._ranks, f"{block.name}.synchronize"), self._hold)
            exact.average(self._blocks, totals)
            self._by_rates(torch.div, totals, [self._momenta[block.name] for block in self._blocks])
            self._place()
            self._agree()
            self._written()

    @override
    def rank_state(self) -> dict[str, Any] | None:
        state = super().rank_state()
        return None if state is None else {**state, "apart": self._diverged, "rates": self._rates}

    def _block_state(self, block: Block) -> dict[str, torch.Tensor]:
        state = super()._block_state(block)
        if self._diverged:
            state = {**state, "momentum": self._momenta[block.name], "sum": self._sums[block.name]}
        return state

    @override
    def load_rank_state(self, state: Mapping[str, Any] | None) -> bool:
        fits = super().load_rank_state(state)
        if state is not None and fits and state["apart"]:
            self._rates = [list(rates) for rates in state["rates"]]
            self._diverged = True
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
        if not self._diverged:
            for block in blocks:
                self._begin(block)
            self._diverged = True
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
        """Divide or multiply blocks by the sums of learning rates since the last average, unless zero."""
        for block, values, into in zip(self._blocks, given, out, strict=True):
            for number, start, stop in block.lanes:
                rate = self._rates[number][0]
                if rate or operation is torch.mul:
                    operation(values[start:stop], rate, out=into[start:stop])

    def _begin(self, block: Block) -> None:
        if block.name not in self._anchors:
            example = block.segments[0].parameter
            self._anchors[block.name] = torch.zeros(block.numel, dtype=example.dtype, device=example.device)
            self._sums[block.name] = torch.zeros_like(self._anchors[block.name])
        for segment in block.segments:
            self._anchors[block.name][segment.start : segment.stop] = segment.parameter.detach()

    def _place(self) -> None:
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


def _views(tensor: torch.Tensor, block: Block) -> list[torch.Tensor]:
    return [tensor[start:stop] for _, start, stop in block.tensors]


def _root(variance: torch.Tensor, correction: float, eps: float, frozen: bool = False) -> torch.Tensor:
    """Return the denominator of updates; infinity where a frozen variance is zero."""
    root = variance.sqrt().div_(correction).add_(eps)
    return root.masked_fill_(variance == 0, math.inf) if frozen else root


def _direction(
    values: torch.Tensor, momentum: torch.Tensor, variance: torch.Tensor, group: Mapping[str, Any]
) -> torch.Tensor:
    first, second = decay_rates(group)
    update = (momentum / first).div_(_root(variance, second, group["eps"], True))
    return update.add_(values, alpha=group["weight_decay"])
