"""Configurations as people publish them start, or are refused for the keys that the table names. Nothing else."""

from __future__ import annotations

import contextlib
import json
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardwise.config import accept, resolve
from shardwise.errors import ConfigError, NotBuiltError
from shardwise.launch.cli import app
from shardwise.monitor import Service, registry
from shardwise.monitor import monitor as monitors
from tests.dropin.clients import MISSING, Ranks, forget, mean_over_ranks
from tests.dropin.published import DIRECTORY, PAGE, WORLD, Published, facts_of, published
from tests.harness import thorough

FILES = published()
CASES = [thorough(entry) if entry.thorough else entry for entry in FILES]
STEPS = 2
PLAIN_LR = 1e-3


class MixtralExperts(nn.Module):
    """Stacked, as transformers has them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(4, 48, 16) / 4)
        self.down_proj = nn.Parameter(torch.randn(4, 16, 24) / 5)
        self.act_fn = nn.SiLU()

    def forward(self, values: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("th,eih->tei", values, self.gate_up_proj).chunk(2, dim=-1)
        every = torch.einsum("tei,ehi->teh", self.act_fn(gate) * up, self.down_proj)
        return (every.gather(1, chosen[..., None].expand(-1, -1, 16)) * weights[..., None]).sum(1)


class MixtralBlock(nn.Module):
    """Each row goes to two of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), MixtralExperts()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.softmax(self.gate(values), dim=1).topk(2, dim=1)
        mixed: torch.Tensor = values + self.experts(values, chosen, weights)
        return mixed


class Tiny(nn.Module):
    """A model with a table and two layers; `config` is what the Trainer reads sizes from."""

    def __init__(self, sparse: bool, experts: bool, layers: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.mix = MixtralBlock() if experts else nn.Identity()
        self.config = SimpleNamespace(hidden_size=16)
        self.table = nn.Embedding(32, 16, sparse=sparse)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.table(tokens)
        for layer in self.layers:
            h = layer(h)
        h = self.mix(h.mean(1))
        return self.down(torch.tanh(self.up(h))).float().square().mean()


class TinyBert(nn.Module):
    """Names that patterns of BERT's configurations find."""

    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(32, 16)
        self.attention = nn.ModuleDict({"self": nn.Linear(16, 16)})
        self.intermediate, self.output = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.attention["self"](self.word_embeddings(tokens).mean(1))
        return self.output(torch.tanh(self.intermediate(h))).float().square().mean()


def tiny(raw: dict[str, Any]) -> nn.Module:
    """Return a model with what a configuration speaks of."""
    torch.manual_seed(3)
    if "compression_training" in raw:
        return TinyBert()
    routing = raw.get("data_efficiency", {}).get("data_routing", {}).get("random_ltd", {})
    layers = routing.get("total_layer_num", 3 if "progressive_layer_drop" in raw else 0)
    return Tiny(bool(raw.get("sparse_gradients")), "expert_parallel" in raw, layers)


def micro_batch(step: int, micro: int, rank: int, rows: int) -> torch.Tensor:
    seed = 1 + rank + WORLD * (micro + 1000 * step)
    return torch.randint(32, (rows, 4), generator=torch.Generator().manual_seed(seed))


def prepared(path: str, steps: int) -> Any:
    """The configuration as the Trainer hands it to the engine, made by the Trainer's own code."""
    from transformers import TrainingArguments

    forget()
    arguments = TrainingArguments(
        str(Path(path).parent),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=PLAIN_LR,
        max_steps=steps,
        warmup_steps=1,
        report_to=[],
        deepspeed=path,
    )
    filled = arguments.hf_deepspeed_config
    filled.trainer_config_finalize(arguments, tiny({}), steps)
    forget()
    return filled.config


class Nowhere(Service):
    """A service without its package, and without a network."""

    def __init__(self, section: Any) -> None:
        pass


@contextlib.contextmanager
def writing_nowhere() -> Iterator[None]:
    """Have packages of monitors, and nothing come of it: tests/monitor has the services."""
    known, make = registry._is_there, monitors.make
    registry._is_there, monitors.make = lambda module: True, lambda name, section: Nowhere(section)
    try:
        yield
    finally:
        registry._is_there, monitors.make = known, make


def outcome(name: str, path: str, through_trainer: bool) -> dict[str, Any]:
    """Start a file and train two steps; what became of it."""
    import deepspeed

    found: dict[str, Any] = {"name": name}
    engine = None
    try:
        config = prepared(path, 10) if through_trainer else path
        found["handed"] = config
        raw = config if isinstance(config, dict) else resolve(accept(config), world_size=WORLD).raw
        model = tiny(raw)
        client = None if "optimizer" in raw else torch.optim.AdamW(model.parameters(), lr=PLAIN_LR)
        with writing_nowhere():
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), optimizer=client, config=config
            )
        found["facts"] = {**facts_of(engine._resolution), "stage": engine.zero_optimization_stage()}
        found["losses"] = [float(loss) for loss in trained(engine)]
    except ConfigError as error:
        found["refused"] = [(problem.path, problem.message) for problem in error.problems]
        found["built"] = isinstance(error, NotBuiltError) or any(p.error is NotBuiltError for p in error.problems)
    except Exception:
        found["failed"] = traceback.format_exc()
    finally:
        if engine is not None:
            engine.destroy()
    return found


def trained(engine: Any) -> Iterator[float]:
    """Losses of two steps, and one of the model that they have made; means over the ranks."""
    rank = torch.distributed.get_rank()
    rows, count = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    for step in range(STEPS):
        total = torch.zeros(())
        for micro in range(count):
            loss = engine(micro_batch(step, micro, rank, rows))
            total += loss.detach() / count
            engine.backward(loss)
            engine.step()
        assert engine.global_steps == step + 1
        yield mean_over_ranks(total)
    with torch.no_grad():
        yield mean_over_ranks(engine(micro_batch(STEPS, 0, 0, 8)))


def outcomes(files: list[tuple[str, str, bool]]) -> list[dict[str, Any]]:
    return [outcome(*file) for file in files]


@pytest.fixture(scope="module")
def ran(ranks: Ranks, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """Outcomes of the files of this run by name; both ranks have the same."""
    cases = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked = {case.params["entry"].name for case in cases if case is not None}
    files = [(entry.name, str(entry.path), entry.through_trainer) for entry in FILES if entry.name in asked]
    if MISSING:
        files = [file for file in files if not file[2]]
    found: list[dict[str, Any]] = []
    for begin in range(0, len(files), 10):
        first, second = ranks(outcomes, WORLD, files[begin : begin + 10])
        assert first == second
        found += first
    return {each["name"]: each for each in found}


def test_the_table_has_every_file() -> None:
    assert {entry.name for entry in FILES} == {path.stem for path in DIRECTORY.glob("*.json")} - {"table"}
    assert all((entry.starts is None) == bool(entry.refused) for entry in FILES)


@pytest.mark.parametrize("entry", CASES, ids=lambda entry: entry.name)
def test_it_starts_or_is_refused_as_the_table_says(
    entry: Published, ran: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Also by `shardwise check`."""
    if entry.name not in ran:
        pytest.skip(f"not installed: {', '.join(MISSING)}")
    found = ran[entry.name]
    assert "failed" not in found, found["failed"]
    if entry.starts is None:
        assert tuple(path for path, _ in found["refused"]) == entry.refused
        # The key, what is wrong or not there, and what to do.
        assert all(len(message.split("; ")) > 1 for _, message in found["refused"])
    else:
        assert "refused" not in found, found["refused"]
        assert found["facts"] == entry.starts
        assert len(found["losses"]) == STEPS + 1 and all(torch.isfinite(torch.tensor(found["losses"])))
    check(entry, entry.path, known=not entry.through_trainer)
    if isinstance(found.get("handed"), dict):
        filled = tmp_path / "filled.json"
        filled.write_text(json.dumps(found["handed"]))
        check(entry, filled, known=True)


def check(entry: Published, path: Path, known: bool) -> None:
    """Hold `shardwise check` of a file against the table; batch sizes if they are `known`."""
    checked = CliRunner().invoke(app, ["check", str(path), "--world", str(WORLD), "--json"])
    told = json.loads(checked.stdout)
    assert told["ok"] is (entry.starts is not None) and checked.exit_code == (0 if told["ok"] else 1)
    if entry.starts is None:
        assert all(f"{key} (line " in told["error"] or f"{key}: " in told["error"] for key in entry.refused)
    elif known:
        sizes = {name: size for name, size in entry.starts.items() if name.startswith(("train", "gradient"))}
        assert {name: told["effective"][name] for name in sizes} == sizes


def test_the_page_is_up_to_date() -> None:
    PAGE.check()
