"""Loading parts of a checkpoint, into models with other names, other groups or another frozen base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.checkpoint import Checkpoint, LoadReport
from shardwise.errors import CheckpointError, UsageError
from tests.checkpoint.job import WIDTH, Model, Run, config, differences, rank
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import ADAMW, Setting, engine_of, start
from tests.models import CASES

LORA = CASES["lora"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], names: Any = None) -> bool:
    return all(torch.equal(one[name], other[name]) for name in (one if names is None else names))


# -- adapters on a frozen base -----------------------------------------------------------------------------------------


def adapter_engine(stage: int, seed: int, precision: str = "fp32") -> Any:
    return start(LORA, Setting(stage=stage, optimizer="AdamW", lr=0.02, precision=precision), LORA.make(seed))


def adapter_steps(engine: Any, first: int, count: int, dtype: torch.dtype = torch.float32) -> None:
    for step in range(first, first + count):
        engine.backward(LORA.loss(engine, LORA.data(step, 0, rank(), dtype)))
        engine.step()


@pytest.mark.parametrize(
    ("stage", "target_stage", "precision"),
    [
        (2, 1, "fp32"),
        (3, 3, "bf16"),
        *(thorough(stage, 3 - stage, "fp32") for stage in range(4)),
        *(thorough(stage, stage, "bf16") for stage in range(3)),
    ],
)
@on_ranks(2)
def test_adapters_and_their_base_come_from_different_checkpoints(
    stage: int, target_stage: int, precision: str, tmp_path: Path
) -> None:
    """A base in one checkpoint, adapters in another; a third engine, with other values, takes each from its own."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    source = adapter_engine(stage, 5, precision)
    source.save_checkpoint(f"{tmp_path}/base", tag="base")
    adapter_steps(source, 0, 3, dtype)
    source.save_checkpoint(f"{tmp_path}/adapters", exclude_frozen_parameters=True)
    saved = source.module_state_dict()
    adapter_steps(source, 3, 2, dtype)
    end = source.module_state_dict()

    with Checkpoint(f"{tmp_path}/adapters/global_step3") as files:
        assert not any("base" in tensor.name for tensor in files.manifest.tensors)
        assert sorted(files.manifest.excluded) == sorted(name for name in saved if "base" in name)
    base = [name for name in saved if "base" in name]
    trained = [name for name in saved if "base" not in name]

    target = adapter_engine(target_stage, 6, precision)
    before = target.module_state_dict()
    assert not any(torch.equal(before[name], saved[name]) for name in saved)
    target.load_checkpoint(f"{tmp_path}/adapters")
    found = target.module_state_dict()
    assert same(found, saved, trained) and same(found, before, base)
    report = target.last_load
    assert set(report.loaded) == set(trained) and set(report.left_out) == set(base)
    assert not report.differs and report.optimizer and report.path == f"{tmp_path}/adapters/global_step3"
    # The base comes from elsewhere, before or after.
    target.load_checkpoint(f"{tmp_path}/base", "base", load_module_only=True, include="*.base.*")
    assert set(target.last_load.loaded) == set(base) and set(target.last_load.skipped) == set(trained)
    assert same(target.module_state_dict(), saved)
    adapter_steps(target, 3, 2, dtype)
    if precision == "fp32" or stage == target_stage:
        assert same(target.module_state_dict(), end)


# -- parts and names ---------------------------------------------------------------------------------------------------


class Wrapped(nn.Module):
    """The same model one level deeper, as a wrapper that a training script adds."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = Model(seed, noise=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.inner(tokens)


def split(trained: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": trained[:4], "weight_decay": 0.1}, {"params": trained[4:], "lr": 0.02}]


def one_group(trained: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": trained, "lr": 0.03}]


def swapped(trained: list[nn.Parameter]) -> list[dict[str, Any]]:
    return split(trained)[::-1]


def grouped(model: nn.Module, stage: int, groups: Callable[[list[nn.Parameter]], list[dict[str, Any]]] = split) -> Any:
    parameters = groups([p for p in model.parameters() if p.requires_grad])
    return engine_of(model, stage, ADAMW, groups=parameters, train_micro_batch_size_per_gpu=3)


def steps(engine: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(1 + 64 * step + rank())
        engine.backward(engine(torch.randint(0, 13, (3,), generator=generator)))
        engine.step()


def make(path: str) -> None:
    engine = grouped(Model(1, noise=False), 1)
    steps(engine, 0, 2)
    engine.save_checkpoint(path, tag="a", client_state={"values": torch.arange(3.0)})
    steps(engine, 2, 2)
    end = engine.module_state_dict()
    if rank() == 0:
        torch.save(end, f"{path}/end.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of two ranks after two steps, and the weights after two more."""
    path = str(tmp_path_factory.mktemp("saved"))
    run_ranks(make, 2, path)
    return path


def values_in(path: str) -> dict[str, torch.Tensor]:
    with Checkpoint(f"{path}/a") as files:
        return files.module_values()


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_parts_are_loaded_by_patterns(saved: str, stage: int) -> None:
    expected = values_in(saved)
    engine = grouped(Model(2, noise=False), stage)
    before = engine.module_state_dict()

    def load(**options: Any) -> tuple[list[str], LoadReport]:
        """Load into the values of before; return what has changed."""
        engine.load_module_state_dict(before)
        engine.load_checkpoint(saved, "a", **options)
        found = engine.module_state_dict()
        changed = [name for name in found if not torch.equal(found[name], before[name])]
        assert same(found, expected, changed)
        return changed, engine.last_load

    only = {"load_module_only": True}
    blocks = [name for name in before if name.startswith("blocks.")]
    embedding = ["embedding.weight", "head.weight"]
    # The norms' values differ from the initial ones because they have been trained.
    changed, report = load(include="blocks.*", **only)
    assert changed == blocks and sorted(report.loaded) == sorted(blocks)
    assert set(report.skipped) == set(before) - set(blocks) - {"head.weight"} and not report.differs
    changed, _ = load(include=["blocks.0.*", "temperature"], exclude="*.bias", **only)
    assert set(changed) == {"blocks.0.inner.weight", "blocks.0.norm.weight", "temperature"}
    # A tied parameter goes by any of its names.
    changed, _ = load(include="head.*", **only)
    assert changed == embedding
    changed, report = load(exclude="head.weight", **only)
    assert not set(embedding) & set(changed) and "embedding.weight" in report.skipped
    changed, report = load(include=["blocks.*", "blcks.*"], load_module_strict=False, **only)
    assert changed == blocks and report.unused == ("include 'blcks.*'",) and "blcks" in str(report)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"include": "blocks.*"},
        CheckpointError,
        "include and exclude leave out trained parameters (temperature, embedding.weight",
    ),
    ({"include": ["blcks.*"], "load_module_only": True}, CheckpointError, "no name is matched by: include 'blcks.*'"),
    ({"exclude": [3]}, UsageError, "exclude: expected patterns such as 'blocks.*', found 3"),
    ({"rename": {"x": "y"}}, CheckpointError, "no name is matched by: rename 'x'"),
    ({"rename": {"x": 3}}, UsageError, "rename: expected {name in the checkpoint: name in the model}"),
    ({"rename": [(r"^blocks\.0\.", "blocks.1.")]}, CheckpointError, "rename gives the name 'blocks.1.inner.weight' to"),
    ({"rename": [("(", "x")]}, UsageError, "rename: '(' is not a regular expression"),
    ({"rename": [("(blocks)", r"\2")]}, UsageError, r"rename: the replacement '\\2' of '(blocks)' is wrong"),
    ({"rename": "blocks"}, UsageError, "a list of (regular expression, replacement), or a function"),
    ({"rename": lambda name: None}, UsageError, "rename: the function returned None for 'temperature'"),
    ({"rename": lambda name: 1 / 0}, UsageError, "rename: the function failed on 'temperature': ZeroDivision"),
    ({"rename": lambda name: "x" + name}, CheckpointError, "missing in the checkpoint: temperature, nothing, embed"),
    ({"rename": {"temperature": "heat"}}, CheckpointError, "not in the model: heat"),
    ({"include": "*", "custom_load_fn": print}, UsageError, "custom_load_fn is given everything"),
]


@on_ranks(2)
def test_what_cannot_be_asked_for_is_refused_on_all_ranks_and_changes_nothing(saved: str) -> None:
    engine = grouped(Model(2, noise=False), 3)
    steps(engine, 100, 1)
    before, state = engine.module_state_dict(), engine.get_lr()
    for options, kind, message in REFUSED:
        with pytest.raises(kind) as caught:
            engine.load_checkpoint(saved, "a", **options)
        assert type(caught.value) is kind and message in str(caught.value), (options, str(caught.value))
    # Ranks that were asked for different things all say so.
    with pytest.raises(UsageError, match="pass the same include, exclude and rename on every rank"):
        engine.load_checkpoint(saved, "a", load_module_only=True, include=["blocks.*", "head.*"][rank()])
    told = "failed on rank 1: UsageError: rename" if rank() == 0 else "the function failed on 'temperature'"
    with pytest.raises((CheckpointError, UsageError), match=told):
        engine.load_checkpoint(saved, "a", rename=lambda name: name if rank() == 0 else 1 / 0)
    assert same(before, engine.module_state_dict()) and engine.get_lr() == state
    assert engine.last_load is None
    engine.load_checkpoint(saved, "a")


@on_ranks(2)
def test_a_load_that_is_not_strict_tells_what_differed(saved: str) -> None:
    class Wide(Model):
        def __init__(self) -> None:
            super().__init__(2, noise=False)
            self.temperature = nn.Parameter(torch.ones(2))
            self.extra = nn.Parameter(torch.ones(3))
            del self.nothing
            self.register_buffer("count", torch.zeros(1))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens)).square().mean() * self.temperature.sum()

    engine = grouped(Wide(), 3)
    with pytest.raises(CheckpointError, match=r"exclude=\['temperature'\]") as caught:
        engine.load_checkpoint(saved, "a", load_module_only=True)
    report = caught.value.report
    assert set(report.missing) == {"extra", "count"} and report.unexpected == ("nothing",)
    assert report.wrong_shape == (("temperature", (), (2,)),)
    message = str(caught.value)
    assert "temperature (checkpoint [], model [2])" in message and "missing in the checkpoint: extra, count" in message
    with pytest.raises(CheckpointError, match="of another shape"):
        engine.load_checkpoint(saved, "a", load_module_only=True, load_module_strict=False)
    engine.load_checkpoint(saved, "a", load_module_only=True, load_module_strict=False, exclude="temperature")
    report = engine.last_load
    assert set(report.missing) == {"extra", "count"} and report.unexpected == ("nothing",)
    assert report.skipped == ("temperature",) and report.differs
    assert "missing in the checkpoint: extra, count" in str(report)
    expected, found = values_in(saved), engine.module_state_dict()
    assert same(found, expected, report.loaded) and torch.equal(found["extra"], torch.ones(3))


@pytest.mark.parametrize("stage", [thorough(1), 3])
@on_ranks(2)
def test_names_may_have_changed(saved: str, stage: int) -> None:
    expected, end = values_in(saved), torch.load(f"{saved}/end.pt", weights_only=True)
    for rules in (
        [(r"^", "inner.")],
        [("^blocks", "parts"), ("^(?!parts)", "inner."), ("^parts", "inner.blocks")],
        {name: f"inner.{name}" for name in expected},
        lambda name: f"inner.{name}",
    ):
        engine = grouped(Wrapped(2), stage)
        steps(engine, 100, 1)
        engine.load_checkpoint(saved, "a", rename=rules)
        report = engine.last_load
        assert report.renamed["temperature"] == "inner.temperature" and not report.differs
        found = {name.removeprefix("inner."): value for name, value in engine.module_state_dict().items()}
        assert same(found, expected)
        steps(engine, 2, 2)
        found = {name.removeprefix("inner."): value for name, value in engine.module_state_dict().items()}
        assert same(found, end), "the optimizer's state has come along"
    # One parameter, under its other name; what the rest has is missing.
    engine = grouped(Wrapped(2), stage)
    engine.load_checkpoint(
        saved, "a", rename={"head.weight": "inner.embedding.weight"}, include="inner.embedding.*", load_module_only=True
    )
    assert torch.equal(engine.module_state_dict()["inner.head.weight"], expected["embedding.weight"])


# -- parameter groups --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_groups_that_have_changed(saved: str) -> None:
    end = torch.load(f"{saved}/end.pt", weights_only=True)
    for groups, message in (
        (one_group, "its optimizer has 2 parameter groups, this engine's has 1"),
        (swapped, "embedding.weight (group 0 in the checkpoint, 1 here)"),
    ):
        engine = grouped(Model(2, noise=False), 2, groups)
        before, settings = engine.module_state_dict(), [dict(g, params=0) for g in engine.optimizer.param_groups]
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(saved, "a")
        assert message in str(caught.value) and "load_param_groups=False" in str(caught.value)
        assert same(before, engine.module_state_dict())
        engine.load_checkpoint(saved, "a", load_param_groups=False)
        assert [dict(g, params=0) for g in engine.optimizer.param_groups] == settings
        steps(engine, 2, 2)
        # Swapped groups have the settings that they had, so training goes on as it would have.
        assert same(engine.module_state_dict(), end) == (groups is swapped)


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as some optimizers of others do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


@on_ranks(1)
def test_counters_in_groups_that_are_left_out_are_told(tmp_path: Path) -> None:
    model, fresh = nn.Linear(3, 5), nn.Linear(3, 5)
    engine = engine_of(model, 1, Counting(model.parameters(), lr=0.1, momentum=0.9))
    engine.backward(engine(torch.ones(2, 3)).square().sum())
    engine.step()
    engine.save_checkpoint(tmp_path)
    other = engine_of(fresh, 1, Counting([{"params": [*fresh.parameters()], "k": 0}], lr=0.1, momentum=0.9))
    other.load_checkpoint(tmp_path, load_param_groups=False)
    assert any("k (1 in the checkpoint, 0 here)" in note for note in other.last_load.notes)


@pytest.mark.parametrize(("stage", "world"), [(1, 1), (3, 2)])
@on_ranks("world")
def test_step_counts_that_differ_in_one_group_go_on(stage: int, world: int, tmp_path: Path) -> None:
    """Parameters of one group that have been stepped differently often keep their step counts in an engine that has
    started without them."""
    model = nn.Linear(3, 5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    nn.functional.linear(torch.ones(2, 3), model.weight.detach(), model.bias).square().sum().backward()
    optimizer.step()
    first = engine_of(model, stage, optimizer)
    first.backward(first(torch.ones(2, 3)).square().sum())
    first.step()
    first.save_checkpoint(tmp_path, tag="a")
    fresh = nn.Linear(3, 5)
    second = engine_of(fresh, stage, torch.optim.Adam(fresh.parameters(), lr=0.1))
    second.load_checkpoint(tmp_path, "a")
    found = []
    for engine in (first, second):
        for _ in range(2):
            engine.backward(engine(torch.ones(2, 3)).square().sum())
            engine.step()
        found += [engine.module_state_dict()["weight"], engine.module_state_dict()["bias"]]
        counts = sorted(float(state["step"]) for state in engine.optimizer.state.values())
        assert set(counts) <= {3.0, 4.0}, counts
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


# -- what is read ------------------------------------------------------------------------------------------------------


class Masks(nn.Module):
    """Two layers with one buffer, or with one each."""

    def __init__(self, names: str, shared: bool) -> None:
        super().__init__()
        mask = torch.ones(3)
        for name in names:
            layer = nn.Linear(3, 1)
            layer.register_buffer("mask", mask if shared else mask.clone())
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x * layer.mask).square().mean() for layer in self.children())


@on_ranks(1)
def test_a_shared_buffer_is_found_under_any_of_its_names(tmp_path: Path) -> None:
    first = engine_of(Masks("ab", shared=True), 1, ADAMW)
    first.module.a.mask.fill_(0.5)
    first.save_checkpoint(tmp_path)
    for names, shared in (("ba", True), ("ab", False)):
        engine = engine_of(Masks(names, shared), 1, ADAMW)
        engine.load_checkpoint(tmp_path)
        assert engine.module.a.mask.tolist() == engine.module.b.mask.tolist() == [0.5] * 3


@pytest.mark.parametrize("stage", [2, thorough(3)])
@on_ranks(2)
def test_training_goes_on_after_a_load_in_inference_mode(stage: int, tmp_path: Path) -> None:
    first, other = Run(config(stage), noise=False), Run(config(stage), seed=2, noise=False).until(1)
    first.step()
    first.engine.save_checkpoint(tmp_path)
    with torch.inference_mode():
        other.load(tmp_path)
    first.step()
    other.step()
    assert differences(first.fingerprint(), other.fingerprint()) == []


# -- what is damaged or does not fit -----------------------------------------------------------------------------------


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        ("SGD", "holds state of the optimizer AdamW, this engine has SGD"),
        ("AdamW", "has no optimizer state for trained parameters: extra.weight, extra.bias"),
    ],
)
@on_ranks(2)
def test_another_optimizer_is_refused(saved: str, optimizer: str, expected: str) -> None:
    model = Other()
    groups = [{"params": [*model.parameters()][n::2]} for n in range(2)]
    engine = engine_of(model, 2, {"type": optimizer, "params": {"lr": 0.1}}, groups=groups)
    before = engine.module_state_dict()
    with pytest.raises(CheckpointError, match=f"{expected}.*load_optimizer_states=False"):
        engine.load_checkpoint(saved, "a", load_module_strict=False)
    assert same(before, engine.module_state_dict())


@on_ranks(2)
def test_a_schedule_that_would_begin_anew_is_an_error(tmp_path: Path) -> None:
    Run(config(1, scheduler=None), seed=1).engine.save_checkpoint(tmp_path)
    target = Run(config(1), seed=2)
    before = target.fingerprint()
    with pytest.raises(CheckpointError, match="saved without a learning-rate scheduler"):
        target.load(tmp_path)
    assert differences(before, target.fingerprint()) == []
    assert target.load(tmp_path, load_lr_scheduler_states=False)[0] is not None
