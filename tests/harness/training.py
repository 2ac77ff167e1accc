"""Trains a case by engines on ranks (`trained`) and in a plain loop (`plain`), also in fp64, and compares outcomes.

The plain loop is what the contract compares with: one process goes through the global batch, keeps fp32 masters of
16-bit parameters, gives unused parameters zero gradients, clips with `torch.nn.utils.clip_grad_norm_` and steps a torch
optimizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import optim
from shardwise.memory import Accountant, track_activations
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_grad
from shardwise.zero.model import ShardedModel
from shardwise.zero.owner import ParameterOwner
from shardwise.zero.units import released
from tests.harness import run_ranks
from tests.harness.engines import end_engines
from tests.models import CASES, Case
from tests.optim.reference import Lars

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

SGD = {"type": "SGD", "params": {"lr": 0.1}}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2}}

Tensors = dict[str, torch.Tensor]
Run = tuple[int, int, torch.Tensor]
Maker = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Setting:
    """One way of training: everything but the model and the number of ranks."""

    stage: int = 0
    cap: int | None = None
    prefetch: bool = True
    accumulation: int = 1
    clip: float = 0.0
    precision: str = "fp32"
    optimizer: str = "SGD"
    lr: float = 0.1
    scale: float = 256.0
    keep: int | None = 0  # by default small models on few ranks have nothing to release at stage 3
    zero: tuple[tuple[str, Any], ...] = ()
    extra: tuple[tuple[str, Any], ...] = ()

    def config(self) -> dict[str, Any]:
        """The configuration for `shardwise.initialize`."""
        zero: dict[str, Any] = {"stage": self.stage}
        zero["stage3_param_persistence_threshold"] = self.keep
        if self.cap is not None:
            zero["reduce_bucket_size"] = self.cap
        if not self.prefetch:
            zero["stage3_prefetch_bucket_size"] = 0
        zero.update(self.zero)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": zero,
        }
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        if self.precision == "fp16":
            config["fp16"] = {"enabled": True, "loss_scale": self.scale}
        config.update(self.extra)
        return config

    def with_stage(self, stage: int, **changes: Any) -> Setting:
        return replace(self, stage=stage, **changes)


@dataclass
class Outcome:
    """What a training run gives: fp32 values by parameter name (whole tensors)."""

    masters: Tensors = field(default_factory=dict)
    gradients: list[Tensors] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    parameters: str = ""
    buffers: str = ""
    rescues: list[int] = field(default_factory=list)


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """A fingerprint of the bits of some tensors."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(str((tuple(tensor.shape), tensor.dtype)).encode())
        total.update(tensor.detach().cpu().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


class WholeSGD(torch.optim.SGD):
    """A subclass that does not say how it may be sharded: it gets whole tensors."""


class OwnAdamW(torch.optim.AdamW):
    """The same."""


class NormClipped(torch.optim.SGD):
    """Looks at whole tensors: each gradient is divided by its own norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                assert p.grad is not None and p.dim() == len(p.shape)
                p.grad /= p.grad.norm() + 1e-3
        super().step(closure)


ADAM = {"weight_decay": 0.05, "betas": (0.8, 0.9), "eps": 1e-6}
LAMB = {**ADAM, "max_coeff": 2.0, "min_coeff": 0.02}
MUON = {**ADAM, "momentum": 0.8}
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "AdamW": (torch.optim.AdamW, ADAM),
    "Adam": (torch.optim.Adam, ADAM),
    "Adagrad": (torch.optim.Adagrad, {"eps": 1e-6}),
    "RMSprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True, "eps": 1e-4}),
    "Adafactor": (torch.optim.Adafactor, {}),
    "torch Muon": (torch.optim.Muon, {"momentum": 0.8}),
    "own AdamW": (optim.AdamW, ADAM),
    "own Adam": (optim.Adam, {"adam_w_mode": False, "bias_correction": False}),
    "own Adagrad": (optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.05, "eps": 1e-6}),
    "Lion": (optim.Lion, {"weight_decay": 0.05, "betas": (0.8, 0.9)}),
    "Lamb": (optim.Lamb, LAMB),
    "Muon": (optim.Muon, MUON),
    "Lars": (Lars, {"trust": 0.01, "momentum": 0.9, "weight_decay": 0.05}),
    "subclass": (OwnAdamW, {"betas": (0.8, 0.9), "eps": 1e-6}),
    "norms": (NormClipped, {"momentum": 0.5}),
}
"""Classes, with options that make every part of their state matter."""


def make_optimizer(name: str, parameters: Any, lr: float) -> torch.optim.Optimizer:
    cls, options = OPTIMIZERS[name]
    return cls(list(parameters), lr=lr, **options)


def each(function: Callable[..., Any], cases: Sequence[Sequence[Any]]) -> list[Any]:
    """Call a function with several arguments in turn, in one call of the ranks; end the engines of each."""
    found = []
    for case in cases:
        found.append(function(*case))
        end_engines()
    return found


def config_of(
    stage: int = 3, optimizer: Any = None, *, rows: int = 2, zero: Any = None, **config: Any
) -> dict[str, Any]:
    """Return a configuration under which small units are released as well, of micro-batches of some rows."""
    sections = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **dict(zero or {})}}
    return {
        "train_micro_batch_size_per_gpu": rows,
        **sections,
        **({"optimizer": optimizer} if optimizer else {}),
        **config,
    }


def engine_of(model: nn.Module, stage: int = 3, optimizer: Any = None, *, groups: Any = None, **config: Any) -> Any:
    """Make an engine of `config_of`; the optimizer may be a section, then `groups` are its parameters, if not all."""
    section, given = (optimizer, None) if isinstance(optimizer, dict) else (None, optimizer)
    config = config_of(stage, section, **config)
    return shardwise.initialize(model=model, optimizer=given, model_parameters=groups, config=config)[0]


def least_peaks(accountant: Accountant, step: Callable[[], object], *, warm_up: int = 1) -> dict[str, int]:
    """Measure peaks by the name of the category, and under "total" of all: the least of three steps after some others.

    The least, because a thread of Gloo now and then holds tensors of a finished collective a moment longer.
    """
    for _ in range(warm_up):
        with track_activations(accountant):
            step()
    found = []
    for _ in range(3):
        accountant.reset_peak()
        with track_activations(accountant):
            step()
        peaks = {category.value: size for category, size in accountant.peak.items()}
        found.append(peaks | {"total": accountant.peak_total})
    return {name: min(peaks[name] for peaks in found) for name in found[0]}


def start(case: Case, setting: Setting, model: nn.Module | None = None, optimizer: Any = None) -> Any:
    """Make an engine for a case."""
    model = case.make() if model is None else model
    if optimizer is None:
        optimizer = make_optimizer(setting.optimizer, case.groups(model), setting.lr)
    engine, *_ = shardwise.initialize(model=model, optimizer=optimizer, config=setting.config())
    return engine


def masters(model: nn.Module) -> Tensors:
    """Whole master weights by name; where nothing is trained, whole parameters."""
    sharded = sharded_of(model)
    update = sharded.update
    sharded.take_changes()
    pieces: dict[str, tuple[torch.dtype, Sequence[Run]]] = {}
    with sharded.state.acquired(written=False):
        for tensor in sharded.registry:
            if tensor.trainable and update is not None:
                dtype = torch.promote_types(sharded.section_of(tensor.index).master_dtype, torch.float32)
                pieces[tensor.name] = dtype, sharded.state.own_runs(tensor.index, update.master_pieces(tensor.index))
        found = _assemble(sharded, pieces, whole=not sharded.plan.shard_optimizer)
    if found:
        _compare_one(model, found, safe_get_full_fp32_param)
    for name, parameter in model.named_parameters():
        if name not in found:
            with shardwise.zero.GatheredParameters(parameter):
                found[name] = parameter.detach().clone()
    return {name: found[name] for name, _ in model.named_parameters()}


def gradients(model: nn.Module) -> Tensors:
    """Whole gradients by name, after backward and before step."""
    sharded = sharded_of(model)
    sharded.hooks.settle()
    pieces: dict[str, tuple[torch.dtype, Sequence[Run]]] = {}
    with sharded.state.acquired(written=False):
        for tensor in sharded.registry:
            runs = (
                sharded.state.gradient_runs(tensor.index) if tensor.trainable and sharded.update is not None else None
            )
            if runs is not None:
                pieces[tensor.name] = sharded.section_of(tensor.index).accumulate_dtype, runs
        found = _assemble(sharded, pieces, whole=False)
    if found:
        index = {tensor.name: tensor.index for tensor in sharded.registry}
        for name, value in found.items():
            value.mul_(sharded.gradient_factor(index[name]))
        _compare_one(model, found, safe_get_full_grad)
    return found


def sharded_of(model: nn.Module) -> ShardedModel:
    """What the engine of a model has made of it."""
    owner = released.owner_of(next(model.parameters()))
    assert isinstance(owner, ParameterOwner)
    return owner.model


def _assemble(
    sharded: ShardedModel, pieces: Mapping[str, tuple[torch.dtype, Sequence[Run]]], *, whole: bool
) -> Tensors:
    """Put runs of all ranks together, with one all-reduce where the getters of single parameters need one each."""
    shapes = {tensor.name: tensor.shape for tensor in sharded.registry}
    found: Tensors = {}
    for dtype in dict.fromkeys(dtype for dtype, _ in pieces.values()):
        names = [name for name, (kind, _) in pieces.items() if kind is dtype]
        sizes = [torch.Size(shapes[name]).numel() for name in names]
        flat = torch.zeros(sum(sizes), dtype=dtype, device=sharded.device)
        views = dict(zip(names, flat.split(sizes), strict=True))
        for name, view in views.items():
            for start, stop, values in pieces[name][1]:
                view[start:stop] += values.to(view.device)
        if not whole:
            sharded.comm.all_reduce(flat, "of a test").wait()
        found.update((name, view.view(shapes[name])) for name, view in views.items())
    return found


def _compare_one(model: nn.Module, found: Tensors, getter: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Check that the getter of single parameters agrees; on a parameter in the middle, which is cut at odd places."""
    name = sorted(found)[len(found) // 2]
    value = getter(model.get_parameter(name))
    # Not torch.equal: after an overflow values may be no numbers.
    assert value is not None, name
    assert torch.allclose(value, found[name], rtol=0, atol=0, equal_nan=True), name


def parameters_digest(model: nn.Module) -> str:
    """Fingerprint of the whole parameters as the modules compute with them."""
    with shardwise.zero.GatheredParameters(list(model.parameters())):
        return digest(list(model.parameters()))


def take_steps(engine: Any, case: Case, numbers: Sequence[int], *, rank: int | None = None) -> list[float]:
    """Train on the data of some steps, those of this rank unless another one is named; return the last loss of each."""
    dtype = next(p.dtype for p in engine.module.parameters() if p.is_floating_point())
    rank = dist.get_rank() if rank is None else rank
    losses = []
    for number in numbers:
        for micro in range(engine.gradient_accumulation_steps()):
            loss = case.loss(engine, case.data(number, micro, rank, dtype))
            engine.backward(loss)
            engine.step()
        losses.append(float(loss.detach()))
    return losses


def bits(engine: Any) -> str:
    """Fingerprint of the whole masters and parameters."""
    return digest(list(masters(engine.module).values())) + parameters_digest(engine.module)


def goes_on(
    begin: Callable[[bool], Any], train: Callable[[Any, int, int], Any], directory: Any, middle: int, end: int
) -> Any:
    """Train with a checkpoint in the middle; check that another engine ends in the same state, and return it.

    Args:
        begin: makes an engine, which is given whether it is the second one.
        train: takes the steps from one number to another.
        directory: where the checkpoint is saved.
        middle: number of steps before the checkpoint.
        end: number of all steps.
    """
    found = []
    for again in (False, True):
        engine = begin(again)
        if again:
            engine.load_checkpoint(directory)
        else:
            train(engine, 0, middle)
            engine.save_checkpoint(directory)
        train(engine, middle, end)
        scaler = engine.loss_scaler.state_dict() if engine.loss_scaler is not None else {}
        found.append((bits(engine), scaler, engine.global_samples, engine.micro_steps))
        if not again:
            engine.destroy()
    assert found[0] == found[1]
    return engine


def resumes(name: str, writer: Setting, reader: Setting, directory: str) -> None:
    """Check that an engine goes on from another one's checkpoint; it has trained before, and has to forget it."""
    case = CASES[name]

    def begin(again: bool) -> Any:
        engine = start(case, reader if again else writer)
        take_steps(engine, case, range(7, 9) if again else [])
        return engine

    goes_on(begin, lambda engine, first, last: take_steps(engine, case, range(first, last)), directory, 2, 4)


def train(case: Case, setting: Setting, steps: int, between: Callable[[Any], None] = lambda engine: None) -> Outcome:
    """Train on this rank with the others; `between` gets the engine after each backward pass and each step."""
    engine = start(case, setting)
    outcome = Outcome()
    for step in range(steps):
        for micro in range(setting.accumulation):
            batch = case.data(step, micro, dist.get_rank(), DTYPES[setting.precision])
            loss = case.loss(engine, batch)
            engine.backward(loss)
            between(engine)
            if micro == setting.accumulation - 1:
                outcome.gradients.append(gradients(engine.module))
            engine.step()
            between(engine)
        outcome.losses.append(float(loss.detach()))
        outcome.norms.append(engine.get_global_grad_norm())
        outcome.rescues.append(engine.sharded.unsharder.late)
    outcome.masters = masters(engine.module)
    outcome.parameters = parameters_digest(engine.module)
    outcome.buffers = digest(list(engine.module.buffers()))
    engine.destroy()
    return outcome


Within = Callable[[], AbstractContextManager[Any]]


def train_all(name: str, settings: Sequence[Setting], steps: int = 3, within: Within = nullcontext) -> list[Outcome]:
    """Train a case with each setting in turn. Ranks other than 0 leave whole tensors out of their answer."""
    outcomes = []
    for setting in settings:
        with within():
            outcome = train(CASES[name], setting, steps)
        if dist.get_rank():
            seen = digest([*outcome.masters.values(), *(g for grads in outcome.gradients for g in grads.values())])
            outcome.masters = {"digest": torch.frombuffer(bytearray.fromhex(seen), dtype=torch.uint8)}
            outcome.gradients = []
        outcomes.append(outcome)
    return outcomes


def trained(
    name: str, settings: Sequence[Setting], ranks: int, steps: int = 3, within: Within = nullcontext
) -> list[Outcome]:
    """Train a case on ranks of the pool with each setting, inside of a context; all ranks see the same whole values."""
    return ranks_agree(run_ranks(train_all, ranks, name, settings, steps, within))


def ranks_agree(per_rank: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """Check that every rank saw the same whole values; return rank 0's outcomes."""
    first = per_rank[0]
    for others in per_rank[1:]:
        for mine, theirs in zip(first, others, strict=True):
            seen = digest([*mine.masters.values(), *(g for grads in mine.gradients for g in grads.values())])
            assert theirs.masters["digest"].numpy().tobytes().hex() == seen
            assert theirs.parameters == mine.parameters
            assert theirs.norms == mine.norms
    return list(first)


# -- plain loops -------------------------------------------------------------------------------------------------------


def plain(
    case: Case,
    setting: Setting,
    world: int,
    steps: int = 3,
    *,
    wide: bool = False,
    model: nn.Module | None = None,
    optimizer: Maker | None = None,
) -> Outcome:
    """Train in this process on the global batch.

    Args:
        case: what to train.
        setting: accumulation, clipping, precision and optimizer are taken from it.
        world: number of ranks whose data make the batch.
        steps: number of updates.
        wide: compute everything in fp64.
        model: start from this one.
        optimizer: makes the optimizer from parameters or groups.
    """
    model = case.make() if model is None else model
    compute = torch.float64 if wide else DTYPES[setting.precision]
    if wide:
        model = model.double()
    owned = [p for p in model.parameters() if p.requires_grad]
    # Masters keep the initial fp32 values; the model itself computes in the 16-bit type.
    kept = {p: _master(p) for p in owned}
    groups = [{**g, "params": [kept[p] for p in g["params"]]} for g in _as_groups(case.groups(model))]
    if setting.precision != "fp32" and not wide:
        for p in model.parameters():
            if p.is_floating_point():
                p.data = p.data.to(compute)
    chosen = optimizer(groups) if optimizer else make_optimizer(setting.optimizer, groups, setting.lr)
    scale = setting.scale if setting.precision == "fp16" and not wide else 1.0
    outcome = Outcome()
    names = {p: name for name, p in model.named_parameters()}
    for step in range(steps):
        for master in kept.values():
            master.grad = torch.zeros_like(master)
        for micro in range(setting.accumulation):
            for rank in range(world):
                loss = case.loss(model, case.data(step, micro, rank, compute))
                (loss * scale).backward()
                for p, master in kept.items():
                    if p.grad is not None:
                        assert master.grad is not None
                        master.grad += p.grad
                        p.grad = None
        for master in kept.values():
            assert master.grad is not None
            master.grad /= scale * world * setting.accumulation
        outcome.gradients.append({names[p]: m.grad.clone() for p, m in kept.items() if m.grad is not None})
        outcome.losses.append(float(loss.detach()))
        if setting.clip:
            outcome.norms.append(float(nn.utils.clip_grad_norm_(kept.values(), setting.clip)))
        chosen.step()
        with torch.no_grad():
            for p, master in kept.items():
                if p is not master:
                    p.copy_(master)
    outcome.masters = {name: (kept.get(p, p)).detach().clone() for name, p in model.named_parameters()}
    return outcome


def loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: Callable[[int], Iterable[torch.Tensor]], steps: int
) -> Tensors:
    """Step a model in this process on the mean of the losses of each step; return its parameters."""
    for step in range(steps):
        optimizer.zero_grad()
        torch.stack([*losses(step)]).mean().backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def _master(parameter: nn.Parameter) -> torch.Tensor:
    if parameter.dtype in (torch.float32, torch.float64):
        return nn.Parameter(parameter.detach().clone())
    return nn.Parameter(parameter.detach().float())


def _as_groups(given: Any) -> list[dict[str, Any]]:
    entries = list(given)
    return [dict(entry) for entry in entries] if isinstance(entries[0], dict) else [{"params": entries}]


# -- comparisons -------------------------------------------------------------------------------------------------------


def distance(first: Tensors, second: Tensors) -> dict[str, float]:
    """Norm of the difference of each tensor, in fp64."""
    assert first.keys() == second.keys()
    return {name: float((first[name].double() - second[name].double()).norm()) for name in first}


def assert_identical(first: Outcome, second: Outcome, what: str = "") -> None:
    """Same bits: masters, parameters, gradients, norms and losses."""
    for name, value in first.masters.items():
        assert torch.equal(value, second.masters[name]), f"{what}: master of {name} differs"
    assert first.parameters == second.parameters, what
    assert first.buffers == second.buffers, what
    for step, (mine, theirs) in enumerate(zip(first.gradients, second.gradients, strict=True)):
        for name, value in mine.items():
            assert torch.equal(value, theirs[name]), f"{what}: gradient of {name} differs in step {step}"
    # The norm is summed in fp64, in runs that depend on the layout; what uses it rounds it to fp32 first.
    assert first.norms == pytest.approx(second.norms, rel=1e-12), what
    assert first.losses == second.losses, what


def assert_close(found: Tensors, expected: Tensors, relative: float, what: str = "") -> None:
    """Each tensor is within `relative` of its norm.

    A gradient that is zero but for rounding (of a bias in front of a normalisation, say) has no digits in common with
    another order of summation: it may differ by a rounding of the largest gradient, from which it is what remains.
    """
    largest = max((float(value.double().norm()) for value in expected.values()), default=0.0)
    rounding = torch.finfo(torch.float32).eps * largest
    for name, gap in distance(found, expected).items():
        size = float(expected[name].double().norm())
        assert gap <= relative * size + (rounding if size < 10 * rounding else 1e-12), (
            f"{what}: {name} is {gap / max(size, 1e-30):.2e} of its norm {size:.2e} off"
        )


def assert_no_worse(found: Tensors, loop: Tensors, exact: Tensors, what: str = "", slack: float = 1e-7) -> None:
    """Each tensor is no farther from the fp64 loop than twice the plain loop is, plus `slack` of its norm."""
    ours, theirs = distance(found, exact), distance(loop, exact)
    for name, gap in ours.items():
        allowed = 2 * theirs[name] + slack * float(exact[name].double().norm())
        assert gap <= allowed, f"{what}: {name} is {gap:.2e} from the fp64 loop, the plain loop {theirs[name]:.2e}"
