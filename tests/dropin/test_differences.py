"""Each row of docs/migrating.md is true: by a test here that `covers` it, or in a file of `ELSEWHERE`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from shardwise.config import accept, resolve
from shardwise.config.unsupported import value_at
from shardwise.errors import (
    ConfigError,
    ConflictError,
    NotScalarError,
    PipelineError,
    ReleasedParameterError,
    UsageError,
)
from tests.dropin.clients import drop_in
from tests.harness import on_ranks
from tests.harness.tables import tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrating.md"

TABLES = tables(__file__)
ELSEWHERE = TABLES["elsewhere"]
"""Row without a test here -> files below `tests` with the tests, or another row."""

COVERED: set[str] = set()
Test = TypeVar("Test", bound=Callable[..., None])


def covers(*rows: str) -> Callable[[Test], Test]:
    """Mark a test as that of rows."""
    COVERED.update(rows)
    return lambda test: test


def by_row(names: str, table: str) -> Callable[[Test], Test]:
    """Parametrize a test with the cases of a table; the first value of each is the name of its row."""
    covers(*(row for row, *_ in TABLES[table]))
    return pytest.mark.parametrize(names, [pytest.param(*case, id=row) for row, *case in TABLES[table]])


def test_every_row_has_a_test() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("## Every deliberate difference")[2]
    assert COVERED | ELSEWHERE.keys() == set(re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE))
    for place in " ".join(ELSEWHERE.values()).split():
        assert place in COVERED | ELSEWHERE.keys() or (ROOT / "tests" / place).exists(), place


# -- configuration ----------------------------------------------------------------------------------------------------


def accepted(**config: Any) -> Any:
    return resolve({"train_batch_size": 8, **config}, world_size=2)


def as_deepspeed(**config: Any) -> Any:
    """What a configuration means with `import deepspeed`."""
    return resolve(accept({"train_batch_size": 8, **config}), world_size=2)


@by_row("config, ignored", "ignored")
def test_keys_that_only_the_drop_in_ignores(config: dict[str, Any], ignored: list[str]) -> None:
    assert sorted({note.path for note in as_deepspeed(**config).ignored}) == ignored
    with pytest.raises(ConfigError) as error:
        accepted(**config)
    assert all(problem.path.startswith(tuple(ignored)) for problem in error.value.problems)


def test_a_rate_that_deepspeed_has_by_default() -> None:
    """0.001 is documented for WarmupDecayLR; our own configurations take the optimizer's."""
    schedule = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9}}
    found = as_deepspeed(scheduler=schedule)
    assert found.config.scheduler.params == {"total_num_steps": 9, "warmup_max_lr": 1e-3}
    assert [note.path for note in found.ignored] == ["scheduler.params.warmup_max_lr"]
    assert schedule["params"] == accepted(scheduler=schedule).config.scheduler.params == {"total_num_steps": 9}
    given = {"type": "WarmupDecayLR", "params": {"total_num_steps": 9, "warmup_max_lr": None}}
    assert as_deepspeed(scheduler=given).config.scheduler.params["warmup_max_lr"] is None


@by_row("config, path, value", "values")
def test_values(config: dict[str, Any], path: str, value: Any) -> None:
    assert value_at(accepted(**config).config, path) == value


@by_row("kind, config, paths", "without effect")
def test_keys_without_effect(kind: str, config: dict[str, Any], paths: list[str]) -> None:
    notes = getattr(accepted(**config), kind)
    assert sorted(note.path for note in notes) == paths and all(note.reason for note in notes)


@covers("old-keys", "prints-less", "trap-12", "trap-22")
def test_warnings() -> None:
    off = {name: {"enabled": False} for name in ("amp", "elasticity", "curriculum_learning", "nebula", "eigenvalue")}
    zero = {"stage": 3, "grad_hooks": True, "offload_param": {"device": "none", "nvme_path": None}}
    found = accepted(
        **off, sparse_gradients=True, graph_harvesting=True, aio={"thread_count": 4}, zero_optimization=zero
    )
    for key in ("graph_harvesting", "aio.thread_count"):
        assert sum(warning.startswith(key) for warning in found.warnings) == 1
    assert accepted(aio={"thread_count": 1}).warnings == []  # as Lightning always writes


# -- engines of two ranks ---------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A small model with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.ones(3))
        self.note = "of the module"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale


class Slope(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


class Own(torch.optim.AdamW):
    """A subclass."""


INPUT = torch.ones(2, 6)


def engine_of(model: nn.Module | None = None, kind: str = "Adam", client: Any = None, **config: Any) -> Any:
    """An engine made through the drop-in."""
    import deepspeed

    model = model or Net()
    whole = {"train_micro_batch_size_per_gpu": 2, **config}
    if client is None:
        whole["optimizer"] = {"type": kind, "params": {"lr": 1e-2}}
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=whole)[0]
    return deepspeed.initialize(model=model, optimizer=client(model.parameters()), config=whole)[0]


def stepped(engine: Any, times: int = 1) -> None:
    for _ in range(times):
        engine.backward(engine(INPUT.to(next(engine.module.parameters()).dtype)).float().mean())
        engine.step()


@covers("optimizer-object", "optimizer-step", "param-groups", "train-mode", "state-dict", "grad-norm", "exceptions")
@covers("parameter-shape", "reading-outside", "trap-16", "trap-19")
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
@drop_in()
def test_a_stage(stage: int) -> None:
    import deepspeed

    gathered = deepspeed.zero.GatheredParameters
    engine = engine_of(zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0})
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    assert isinstance(optimizer, torch.optim.Optimizer) and isinstance(optimizer, deepspeed.DeepSpeedOptimizer)
    segments = optimizer.param_groups[0]["params"]
    elements = sum(p.numel() for p in parameters) / (2 if stage else 1)
    assert elements < sum(p.numel() for p in segments) < elements + 64 * len(segments)
    assert all(p.dim() == 1 for p in segments)
    assert [tuple(p.shape) for p in parameters] == [(8, 6), (8,), (3, 8), (3,)]
    assert engine.eval() is engine and engine.train() is engine
    names = ["first.bias", "first.weight", "last.bias", "last.weight", "scale"]
    assert sorted(engine.module_state_dict()) == names
    if stage == 3:
        for read in (lambda: parameters[0].sum().item(), engine.state_dict):
            with pytest.raises(ReleasedParameterError):
                read()
        with gathered(parameters):
            before = parameters[0].detach().clone()
        with gathered([torch.ones(2), *parameters]), torch.no_grad():
            parameters[0].add_(1.0)
        with gathered(parameters):
            assert torch.equal(parameters[0].detach(), before)
            with pytest.raises(UsageError):
                gathered(parameters).__enter__()
    else:
        assert sorted(engine.state_dict()) == [f"module.{name}" for name in names]
    with pytest.raises(NotScalarError):
        engine.backward(engine(INPUT))
    engine.backward(engine(INPUT).mean())
    assert [parameter.grad for parameter in parameters] == [None] * 4
    with pytest.raises(UsageError, match=r"engine\.step\(\)"):
        optimizer.step()
    optimizer.zero_grad()  # drops nothing
    engine.step()
    assert engine.get_global_grad_norm() == float(engine.last_step.grad_norm) > 0 and engine.last_step.lr == (1e-2,)
    engine.destroy()


@covers("checkpoint-format", "client-state", "save-16bit", "trap-14", "trap-25")
@on_ranks(2)
@drop_in()
def test_checkpoints(tmp_path: Path) -> None:
    state = {"mine": 1, "module": 2, "checkpoint_parallel_dimensions": 3, "global_samples": 4}
    saved = set()
    for stage in (0, 3):
        engine = engine_of(zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0})
        weights, run = tmp_path / f"weights{stage}", tmp_path / f"run{stage}"
        assert engine.load_checkpoint(str(run)) == (None, None)
        engine.save_16bit_model(str(weights))
        engine.save_16bit_model(str(weights), "pytorch_model.bin")
        engine.save_checkpoint(str(run), client_state=state)
        assert engine.load_checkpoint(str(run))[1] == state
        torch.distributed.barrier()
        assert sorted(path.name for path in weights.iterdir()) == ["model.safetensors", "pytorch_model.bin"]
        files = [re.sub(r"[0-9a-f]{8}\.", ".", path.name) for path in sorted(run.rglob("*")) if path.is_file()]
        assert {Path(name).suffix for name in files} == {".safetensors", ".json", ""}
        saved.add(tuple(sorted(files)))
        engine.destroy()
    assert len(saved) == 1  # names depend on no stage


@covers("full-grad", "trap-15")
@on_ranks(2)
@drop_in()
def test_fp16() -> None:
    model = Slope()
    engine = engine_of(model, "SGD", fp16={"enabled": True, "initial_scale_power": 4})
    engine.backward(engine(torch.full((4,), 2.0, dtype=torch.float16)).float())
    gradient = shardwise.utils.safe_get_full_grad(model.weight)
    assert gradient is not None and (float(gradient[0]), engine.cur_scale) == (2.0, 16.0)
    engine.destroy()
    engine = engine_of(fp16={"enabled": True, "auto_cast": True})
    engine(INPUT)
    engine.destroy()
    engine = engine_of(bf16={"enabled": True})
    assert (engine.module.first.weight.dtype, engine.module.scale.dtype) == (torch.bfloat16, torch.float32)
    with pytest.raises(UsageError, match="inputs are float32"):
        engine(INPUT)
    engine.destroy()


@covers("first-rates", "trap-5", "trap-6", "trap-7", "trap-8", "trap-9")
@on_ranks(2)
@drop_in()
def test_counts() -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"}}
    engine = engine_of(gradient_accumulation_steps=2, scheduler=schedule)
    assert type(engine.config) is dict and engine.train_batch_size() == 8 and not engine.is_compiled
    assert engine.communication_data_type is torch.float32 and engine.note == "of the module"
    loss = engine(INPUT).mean()
    assert torch.equal(engine.backward(loss), loss / 2)
    engine.step()
    assert engine.global_steps == 0
    rates = []
    for _ in range(3):
        stepped(engine)
        rates.append(engine.last_step.lr[0])
        engine.set_gradient_accumulation_boundary(True)
    assert engine.global_steps == 3 and rates == pytest.approx([0.0, 0.001, 0.002])
    engine.destroy()


@covers("comms-logger", "fewer-exclusions", "untested-optimizers")
@on_ranks(2)
@drop_in()
def test_defaults() -> None:
    import deepspeed.comm as dist

    dist.comms_logger.comms_dict = {}
    engine = engine_of(comms_logger={"enabled": False})
    stepped(engine)
    assert not dist.comms_logger.comms_dict
    engine.destroy()
    for kind, client, config in (
        ("Own", Own, {"zero_optimization": {"stage": 2}}),
        ("Lamb", None, {"fp16": {"enabled": True, "loss_scale": 128}}),
        ("OneBitAdam", None, {"zero_optimization": {"stage": 1}}),
        ("AdamW", None, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    ):
        engine = engine_of(None, kind, client, **config)
        stepped(engine)
        assert engine.was_step_applied() and type(engine.optimizer).__name__.lower() == kind.lower()
        engine.destroy()


@covers("zero-init")
@on_ranks(2)
@drop_in()
def test_building() -> None:
    import deepspeed

    before = (torch.empty, torch.zeros, torch.arange)
    with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
        assert (torch.empty, torch.zeros, torch.arange) == before
        model = Net()
        engine = engine_of(model, zero_optimization={"stage": 3})  # inside of the context, as frameworks do
        assert torch.ones(3, 3).shape == (3, 3)
    stepped(engine)
    engine.destroy()


@covers("exceptions", "trap-20")
def test_classes_of_errors() -> None:
    assert issubclass(ConflictError, AssertionError)
    with pytest.raises(AssertionError, match="batch related parameters"):
        accepted(train_micro_batch_size_per_gpu=3)
    assert issubclass(ConfigError, shardwise.errors.ShardwiseError) and issubclass(UsageError, RuntimeError)
    for call in ("forward", "backward", "step"):
        with pytest.raises(PipelineError, match=r"engine\.train_batch\(\)"):
            getattr(shardwise.engine.PipelineEngine, call)(mock.Mock(spec=shardwise.engine.PipelineEngine))
    assert not hasattr(shardwise.Engine, "train_batch")
