"""The best setting: that of trying all, with shallow models as with whole ones; and configurations made from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

from shardwise.config import load, resolve
from shardwise.engine.dryrun import MemoryPlan
from shardwise.engine.plans import Planner, Room, Setting, offloads, planners_of
from shardwise.errors import CommandLineError, UsageError
from shardwise.launch.cli import app
from shardwise.launch.commands import choose as choose_command
from shardwise.launch.commands import plan as plan_command
from shardwise.memory import Tier
from shardwise.plan.architectures import Decoder, Shape
from shardwise.plan.clock import StepTime
from shardwise.plan.cluster import Cluster
from shardwise.plan.configurations import branches, decoder_of, get_training_config
from shardwise.plan.events import Event, Launch, Operator, Pass, Recorder, Wait
from shardwise.plan.layers import DeepPlanner, deep_planner, equal_layers
from shardwise.plan.rates import Machine
from shardwise.plan.search import Branch, Candidate, Objective, Search, candidates, in_words, search
from tests.harness import thorough

CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True}}
SHAPE = Shape(6, 64, 2, 96, llama=True)
CLUSTER = Cluster.of("a100-40", None, 8)
SAMPLE = torch.empty(1, 16, dtype=torch.int64, device="meta")


def decoder(recompute: bool = False, shape: Shape = SHAPE) -> nn.Module:
    with torch.device("meta"):
        return Decoder(shape, recompute=recompute)


def room(size: int) -> list[Room]:
    return [Room((Tier.DEVICE,), size)]


@pytest.mark.parametrize("stage", [thorough(0), 3, thorough(1), thorough(2)])
def test_a_deep_model_is_planned_from_shallow_ones(stage: int) -> None:
    (whole,), _ = planners_of(decoder(), {**CONFIG, "train_micro_batch_size_per_gpu": 1}, 4, SAMPLE)
    deep = deep_planner(whole.target, SAMPLE)
    assert isinstance(deep, DeepPlanner) and equal_layers(whole.target.module) == ("layers", 6)
    setting = replace(whole.target.setting, stage=stage, micro_batch=2)
    assert deep.window(setting)[0] == whole.window(setting)[0]
    # The model is shared with the shallow ones, and is as it was.
    assert len(whole.target.module.get_submodule("layers")) == 6


def test_layers_that_differ_are_not_taken_for_equal() -> None:
    unlike = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.Linear(8, 8, bias=False))
    assert equal_layers(unlike) is None and equal_layers(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))) is None
    assert equal_layers(nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))) == ("", 5)


class Imagined(Planner):
    """A planner of formulas: memory and seconds of a setting are sums of its numbers."""

    def __init__(self, ranks: int, resident: int, activations: int, speed: float, sent: float) -> None:
        self.target = replace(TARGET, setting=replace(TARGET.setting, ranks=ranks))
        self._batch, self._numbers = SAMPLE, (resident, activations, speed, sent)
        self._plans = {}

    def _run(self, setting: Setting, recorder: Any = None) -> tuple[MemoryPlan | None, str]:
        if recorder is not None:
            self.write(setting, recorder)
        return self.sizes(setting), ""

    def write(self, setting: Setting, recorder: Recorder) -> None:
        _, _, speed, sent = self._numbers
        passing = [Operator("", "mm", round(setting.micro_batch * 1e12 / speed), 0, "bf16")]
        members = tuple(range(setting.ranks))
        size = round(sent * 1e9 * (1 + (setting.stage == 3)))
        exchange: list[Event] = [Launch(1, "all_reduce", "", len(members), members, size, size, ""), Wait(1)]
        moved = 0 if setting.offload is None else round(2e9 * offloads().index(setting.offload))
        update: list[Event] = [*exchange, Operator("", "add", 0, moved, "")]
        passes = min(setting.accumulation, 3)
        recorder.passes = [Pass({"forward": [*passing], "step": update * (n == passes - 1)}) for n in range(passes)]

    def sizes(self, setting: Setting) -> MemoryPlan:
        resident, activations, *_ = self._numbers
        sharded = resident // (1, 2, 3, 4)[setting.stage] if setting.ranks > 1 else resident
        near = sharded >> (0 if setting.offload is None else offloads().index(setting.offload))
        total = near + activations * setting.micro_batch
        return MemoryPlan(
            {"activations": activations * setting.micro_batch}, total, {}, 0, {"host": 0, "disk": 0}, total, {}, {}
        )


(_whole,), _ = planners_of(decoder(), {**CONFIG, "train_micro_batch_size_per_gpu": 1}, 4, SAMPLE)
TARGET = _whole.target
NUMBERS = st.tuples(st.integers(1, 400), st.integers(1, 100), st.floats(0.1, 10), st.floats(0, 3))


@given(
    numbers=st.lists(NUMBERS, min_size=1, max_size=3),
    size=st.integers(1, 800),
    objective=st.sampled_from(["throughput", "latency", "cost", "ranks"]),
    batch=st.sampled_from([None, 8]),
)
def test_the_best_is_that_of_trying_all(
    numbers: list[tuple[int, int, float, float]], size: int, objective: Objective, batch: int | None
) -> None:
    def space() -> list[Candidate]:
        branches = [Branch(Imagined(1 << n, *each), 1 << n, n) for n, each in enumerate(numbers)]
        return [c for one in branches for c in candidates(one, offloads()[:3], batch=batch, micro_batches=(1, 2, 4, 8))]

    given_rooms = [Room((Tier.DEVICE,), size)]
    bounded, tried = (search(space(), given_rooms, CLUSTER, objective, everything=each) for each in (False, True))
    assert bounded.settings == tried.settings == bounded.planned + bounded.slower + bounded.unplanned
    assert bounded.planned <= tried.planned
    assert bool(bounded.ranking) == bool(tried.ranking)
    if not tried.ranking:
        assert bounded.smallest is not None and bounded.smallest.plan is not None
        least = min(c.branch.planner.window(c.setting)[0].total for c in space())  # type: ignore[union-attr]
        assert bounded.smallest.plan.total == least
        return
    first, same = bounded.ranking[0], tried.ranking[0]
    assert first.time is not None and same.time is not None
    # Of settings that are equal but for rounding either may be first.
    assert first.value(objective, first.time.total) == pytest.approx(same.value(objective, same.time.total), rel=1e-9)
    if first.setting.offload != offloads()[0]:  # only what does not fit otherwise, or would be slower, is offloaded
        near = replace(first.setting, offload=offloads()[0])
        others = [c for c in tried.ranking if c.setting == near and c.branch.ranks == first.branch.ranks]
        assert all(c.time is not None and c.time.total > first.time.total for c in others)


def test_a_configuration_of_a_size_and_a_number_of_cards() -> None:
    config = get_training_config(2e6, 2, batch=2, length=16)
    resolved = resolve(config, world_size=2).config
    assert (resolved.train_batch_size, resolved.bf16.enabled) == (2, True)
    assert sum(p.numel() for p in decoder(shape=decoder_of(1.3e9)).parameters()) == pytest.approx(1.3e9, rel=0.1)
    with pytest.raises(UsageError, match="number of parameters"):
        get_training_config(0, 4)


def test_ranks_that_share_sequences_are_searched_with_their_part() -> None:
    config = {**CONFIG, "sequence_parallel_size": 2}
    (one,) = branches(lambda _: nn.Embedding(8, 4), config, SAMPLE, ranks=[4])
    assert one.planner.batch.shape == (1, SAMPLE.shape[1] // 2)


OWN = """
import torch
from torch import nn
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
    def forward(self, tokens):
        values = self.tokens(tokens)
        for layer in self.layers:
            values = layer(values).relu()
        return values.sum()
"""


def run(*given: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["choose", *given])
    return done.exit_code, done.output + str(done.exception or "")


def test_the_command_writes_reasons_beside_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chosen_model.py").write_text(OWN)
    options = ["--ranks", "2", "--card", "h100", "--length", "8", "--batch", "2"]
    zero = {"stage": 2, "reduce_bucket_size": 12345, "cpu_offload": True}
    Path("own.json").write_text(json.dumps({**CONFIG, "zero_optimization": zero}))
    more = ["--config", "own.json", "--cost-budget", "1000,2,10", "--out", "best.json"]
    code, text = run("chosen_model:Model", *options, *more)
    assert code == 0, text
    assert "best.json has the first setting" in text and "10 steps cost " in text
    written = Path("best.json").read_text()
    assert "// 2 ranks: the most samples a second, of " in written and "rates of data sheets" in written
    config: dict[str, Any] = load("best.json")
    assert resolve(config, world_size=2).config.train_batch_size == 2
    zero = config["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == "none" and zero["reduce_bucket_size"] == 12345
    code, text = run("chosen_model:Model", *options, "--device-limit", "1KiB")
    assert code != 0 and "nothing fits. The least: " in text and "--host-limit" in text


def test_settings_without_rates_are_named_where_nothing_fits() -> None:
    planner = Imagined(2, 400, 1, 1, 0)
    least = planner.plan(TARGET.setting, room(1))
    found = Search(smallest=Candidate(Branch(planner, 2), TARGET.setting, least), unknown="the disk was not measured")
    assert in_words(found).endswith("to spare in it). Others cannot be planned: the disk was not measured.")


def test_machines_of_a_card_have_8_ranks() -> None:
    given: dict[str, Any] = {"ranks": 64, "card": "h100", "link": "infiniband-ndr", "host_limit": "1TiB"}
    for ranks, local, sharers in ((64, None, 8), (4, None, 4), (64, 16, 16)):
        chosen = choose_command.Request("m", **{**given, "ranks": ranks, "local_ranks": local})
        rates = choose_command._rates(chosen)
        assert rates.ranks_per_machine == sharers
        assert [room.size for room in choose_command._rooms(chosen, rates)][1] == (1 << 40) // sharers
        planned = plan_command.Request(given=("llama-7b",), **{**given, "ranks": ranks, "local_ranks": local})
        assert [room.size for room in planned.rooms()] == [(1 << 40) // sharers]
    measured = plan_command.Request(given=("llama-7b",), ranks=64, host_limit="1TiB")
    assert measured.rooms()[0].size == 1 << 34


def test_a_budget_that_is_too_small() -> None:
    step = StepTime(total=3.6)
    best = Candidate(Branch(Imagined(2, 1, 1, 1, 0), 2), TARGET.setting, None, step)
    request = choose_command.Request("m", card="h100", cost_budget="8,2,1000")  # 3,600 s x 2 ranks x 2 an hour
    choose_command.check_cost(request, best)
    with pytest.raises(CommandLineError, match=r"cost 4, more than 3, .* enough for 750 steps"):
        choose_command.check_cost(replace(request, cost_budget="3,2,1000"), best)


def test_the_speed_of_a_disk_is_given(tmp_path: Path) -> None:
    path = str(tmp_path / "machine.json")
    Machine(when="", host_name="", processor="", cores=1, device="cpu", torch="", threads=1).save(path)
    request = choose_command.Request("m", time=path, disk=".", disk_limit="1TiB", disk_speed="2,0.5")
    rates: Any = choose_command._rates(request)
    assert rates.disk == (2e9, 0.5e9)
    request = replace(request, disk_speed=None)
    with pytest.raises(CommandLineError, match="has no speed of a disk"):
        choose_command._rates(request)
    rates.save(path)
    assert choose_command._rates(request).disk == (2e9, 0.5e9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give --card NAME or --time FILE"),
        (("--card", "h100", "--objective", "speed"), "--objective speed: give one of throughput"),
        (("--card", "h101"), "h100"),
        (("--card", "h100", "--tensor", "1,x"), "--tensor 1,x: give numbers above 0"),
        (("--card", "h100", "--disk-limit", "1TiB"), "give --disk DIR, too"),
        (("--card", "h100", "--disk-speed", "2,1"), "--disk-speed is for --time"),
        (("--card", "h100", "--ranks", "0"), "are 1 or more"),
    ],
)
def test_bad_requests(options: tuple[str, ...], message: str) -> None:
    code, text = run("llama-7b", *options)
    assert code != 0 and message in text
