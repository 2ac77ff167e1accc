"""Training of pipelines: equal to one process, and to each other, in every layout and schedule."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.errors import PeerLostError, UsageError
from shardwise.pipe import LayerSpec, PipelineModule, TiedLayerSpec, make_schedule
from shardwise.pipeline.idle import text_of
from shardwise.pipeline.lowering import with_communication
from shardwise.pipeline.messages import Receiver
from shardwise.profile.trace import merge, read, summarize
from shardwise.zero.passes.reduce import Reducer
from tests.harness import of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.garbage import tensors_in_cycles
from tests.pipeline.training import (
    MICRO_BATCHES,
    ROWS,
    WIDTH,
    WORDS,
    Block,
    Run,
    Setting,
    alone,
    batch,
    check,
    compare_training,
    data,
    engine_of,
    head,
    layers,
    loss_of,
    model_of,
    train,
    untied,
    whole_of,
)

SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "v-half", "v-min", "dualpipe-v"]


def equal(one: Run, other: Run) -> None:
    """Compare two runs bit by bit; norms of other layouts are summed in another order."""
    assert one.losses == other.losses
    torch.testing.assert_close(one.norms, other.norms, rtol=1e-12, atol=0)
    for name in one.parameters.keys() & other.parameters.keys():
        assert torch.equal(one.parameters[name], other.parameters[name]), name


@pytest.mark.parametrize(
    ("made", "stages", "places", "zero"),
    [
        thorough(untied, 2, 2, 1),
        thorough(untied, 2, 2, 3),
        (layers, 3, 1, 0),
        thorough(layers, 2, 2, 2),
        thorough(untied, 3, 1, 1),
    ],
)
def test_every_schedule_is_equal_to_one_process(made: Any, stages: int, places: int, zero: int) -> None:
    """Where copies of a tied weight are on one rank, their gradients are added up in another order."""
    names = SCHEDULES if zero < 3 else ["1f1b", "interleaved", "zb-h1", "zbv"]
    settings = [Setting(stages, schedule, zero, steps=2, made=made) for schedule in names]
    by_setting = compare_training(settings, stages * places)
    for runs in by_setting:
        for run in runs:
            for reference in by_setting[0] if made is untied else ():
                equal(run, reference)


def zero(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.zeros_(parameter)


def of_a_tutorial(setting: Setting) -> dict[str, Any]:
    """Return a model that has been initialized, and its parameters, which a script reads before the engine."""
    model = model_of(setting.stages, setting.made)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.apply(zero)
    assert state and not any(parameter.any() for parameter in model.parameters())
    model.load_state_dict(state)
    return {"model": model, "model_parameters": [p for p in model.parameters() if p.requires_grad]}


def test_scripts_may_read_parameters_before_the_engine_builds_stages() -> None:
    compare_training([Setting(2, zero=1, steps=2, given=of_a_tutorial)], 4)


@on_ranks(2)
def test_changes_of_modules_before_the_engine_are_kept_or_refused() -> None:
    model = model_of(2).eval()
    assert model.to(torch.float64) is model
    assert {(p.dtype, m.training) for m in model.modules() for p in m.parameters()} == {(torch.float64, False)}
    assert [name for name, _ in model.named_children()] == ["layers"]
    with pytest.raises(UsageError, match="the modules of this rank are unknown before its stages are built"):
        model_of(None).half()
    for moved in (model_of(None).to("cpu"), model_of(None).cpu()):
        assert moved.boundaries is None


@on_ranks(2)
def test_stages_that_were_used_before_the_engine_builds_others_are_refused() -> None:
    rank = dist.get_rank()
    text = rf"in stages \[{rank}\] of 2, and this rank gets stages \[{rank}, {rank + 2}\] of 4.*build\("
    with pytest.raises(UsageError, match=text):
        engine_of(Setting(2, "interleaved", given=of_a_tutorial))


def of_many_lengths(step: int, micro_batch: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return micro-batches whose lengths change inside of a step, and from step to step."""
    length = [8, 16, 8, 12][micro_batch] if step == 1 else 6 + step
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro_batch + place)
    ids = torch.randint(0, WORDS, (ROWS, length), generator=generator)
    return ids, ids


def test_shapes_may_change_between_micro_batches_and_steps() -> None:
    """NVIDIA-NeMo/Automodel#3530: another length inside of a step dropped accumulated gradients."""
    settings = [Setting(2, schedule, 1, steps=3, batches=of_many_lengths) for schedule in ("1f1b", "zbv")]
    compare_training(settings, 2)


LENGTHS = (5, 5, 7, 7, (8, 16, 8, 12), 7, 7)
"""Of the micro-batches of several evaluations."""


def of_lengths(step: int, micro_batch: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return micro-batches of an evaluation, or of training with the length of the last one."""
    lengths = LENGTHS[min(step, len(LENGTHS) - 1)]
    length = lengths if isinstance(lengths, int) else lengths[micro_batch]
    ids = torch.randint(0, WORDS, (ROWS, length), generator=torch.Generator().manual_seed(10 * step + micro_batch))
    return ids, ids


def evaluate(setting: Setting) -> tuple[list[int], list[float]]:
    """Evaluate, train twice, and evaluate again; return the forms that this rank waits for by batch, and losses."""
    engine, receive = engine_of(setting), Receiver._receive_form
    received: list[int] = []
    losses: list[float] = []

    def counted(self: Receiver) -> Any:
        received[-1] += 1
        return receive(self)

    with mock.patch.object(Receiver, "_receive_form", counted):
        for step in range(len(LENGTHS) + 3):
            received.append(0)
            trains = len(LENGTHS) <= step < len(LENGTHS) + 2
            losses.append(float((engine.train_batch if trains else engine.eval_batch)(data(setting, step))))
    engine.destroy()
    return received, losses


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", (0, 1)), thorough("interleaved", (1, 2))])
def test_no_rank_waits_for_forms_after_a_batch_of_the_same(schedule: str, stages: tuple[int, ...]) -> None:
    """Also in evaluation: the host waits for the device to read a form."""
    setting = Setting(2, schedule, batches=of_lengths, made=untied)
    model = whole_of(setting)
    expected = []
    for step in range(len(LENGTHS)):
        batches = [of_lengths(step, number, 0) for number in range(setting.micro_batches)]
        expected.append(sum(loss_of(model(inputs), labels).item() for inputs, labels in batches) / len(batches))
    for number, (received, losses) in zip(stages, run_ranks(evaluate, 2, setting), strict=True):
        every = number * setting.micro_batches
        assert received == [every, 0, every, 0, every, every, 0, every, 0, every]
        torch.testing.assert_close(losses[: len(expected)], expected, rtol=1e-6, atol=1e-6)


class Dropping(nn.Module):
    """Returns rows of which the number depends on values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(0, 1)[: int(x.abs().sum() * 100) % 5 + 1]


def dropping() -> list[Any]:
    return [*untied()[:3], LayerSpec(Dropping), *untied()[3:]]


def mean_of(output: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def of_unknown_shapes(dynamic: bool) -> str:
    options = {"partition_method": [0, 4, len(dropping())]}
    config = {"pipeline": {"dynamic_shape": dynamic}}
    setting = Setting(2, "1f1b", 1, steps=4, made=dropping, loss=mean_of, options=options, config=config)
    engine = engine_of(setting)
    try:
        for step in range(setting.steps):
            engine.train_batch(data(setting, step))
    except UsageError as error:
        return str(error)
    except PeerLostError:
        return "lost"
    return ""


def test_shapes_that_depend_on_values_need_a_key() -> None:
    assert run_ranks(of_unknown_shapes, 2, True) == ["", ""]
    first, second = run_ranks(of_unknown_shapes, 2, False)
    assert "Set `pipeline.dynamic_shape`, so that shapes are sent with each micro-batch" in first
    assert second == "lost"


class Nested(nn.Module):
    """Passes on a dictionary with a mask, None, a number, and a tensor that needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = {
                "x": value,
                "mask": torch.ones(value.shape[:2], dtype=torch.bool),
                "no": None,
                "count": 1,
                "y": value,
            }
        assert value["no"] is None
        x = self.linear(value["x"]) * value["mask"][..., None] + value["y"] * value["count"]
        return {**value, "x": torch.tanh(x), "count": value["count"] + 1, "kept": (x.detach(), [value["y"]])}


class Joined(nn.Module):
    """Makes a tensor of what `Nested` passes on."""

    def forward(self, value: Any) -> torch.Tensor:
        return value["x"] + value["kept"][1][0] + value["kept"][0]


def nested() -> list[Any]:
    return [*layers()[:2], *(LayerSpec(Nested) for _ in range(4)), LayerSpec(Joined), *layers()[-2:]]


@pytest.mark.parametrize(("stages", "schedules"), [(3, ["1f1b", "zb-h1"]), (2, ["interleaved"])])
def test_values_between_stages_may_be_nested(stages: int, schedules: list[str]) -> None:
    """Interleaved stages on one link have values of different forms."""
    settings = [Setting(stages, schedule, 1, made=nested) for schedule in schedules]
    compare_training(settings, stages)


class Placed(nn.Embedding):
    """An embedding with positions: a tied module of two parameters."""

    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)
        self.places = nn.Embedding(8, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) + self.places(torch.arange(ids.shape[1]))


def all_tied() -> list[Any]:
    again = TiedLayerSpec("words", Placed, forward_fn=head)
    return [TiedLayerSpec("words", Placed), *layers()[1:-1], again]


def test_tied_modules_share_all_parameters() -> None:
    settings = [Setting(stages, "1f1b", zero, made=all_tied) for stages, zero in [(2, 0), (2, 3)]]
    for runs in compare_training(settings, 4):
        copies = [run.parameters["layers.0.weight"] for run in runs if "layers.0.weight" in run.parameters]
        assert len(copies) == 4 and all(torch.equal(copy, copies[0]) for copy in copies)


def recomputing(interval: int, by_key: bool) -> tuple[Run, int]:
    calls = 0

    class Counted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return super().forward(x)

    def made() -> list[Any]:
        return [layers()[0], *(LayerSpec(Counted, WIDTH) for _ in range(6)), *layers()[-2:]]

    key = {"activation_checkpoint_interval": interval}
    config, options = ({"pipeline": key}, {}) if by_key else ({}, key)
    return train(Setting(2, "1f1b", 1, steps=1, made=made, options=options, config=config)), calls


def test_the_interval_of_recomputation_is_used() -> None:
    expected = alone(Setting(steps=1), 1)
    for interval, by_key, factor in ((0, False, 1), (1, False, 2), (2, False, 2), (1, True, 2)):
        found = run_ranks(recomputing, 2, interval, by_key)
        check([run for run, _ in found], expected)
        assert sum(calls for _, calls in found) == 6 * 4 * factor


@on_ranks(4)
def test_evaluation_changes_nothing_and_gives_all_ranks_the_loss() -> None:
    """pytorch/torchtitan#4742, #931: losses were missing, or -1, on ranks without the last stage."""
    setting = Setting(2, "1f1b", 1)
    engine = engine_of(setting)
    losses, evaluated = [], []
    for step in range(setting.steps):
        losses.append(float(engine.train_batch(data(setting, step))))
        evaluated.append(float(engine.eval_batch(data(setting, 90))))
        outputs = engine.inference_batch(data(setting, 90))
        each = engine.eval_batch(data(setting, 90), reduce_output=None)
        assert len(each) == setting.micro_batches and engine.module.training
    torch.testing.assert_close(losses, alone(setting, 2).losses, rtol=1e-6, atol=1e-6)
    assert of_all_ranks(evaluated) == [evaluated] * 4 and evaluated[0] != evaluated[1]
    assert (outputs is not None) == engine.is_last_stage()
    assert outputs is None or [len(outputs), *outputs[0].shape] == [4, 2, 5, WORDS]


LAYOUTS = [(4, 2, "1f1b", 3), thorough(1, 1, "1f1b", 0), (3, 3, "interleaved", 0)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("saved"))
    run_ranks(train, 4, Setting(2, "1f1b", 1, steps=1), 0, None, path)
    return path


@pytest.mark.parametrize(("world", "stages", "schedule", "zero"), LAYOUTS)
def test_checkpoints_load_into_every_layout(saved: str, world: int, stages: int, schedule: str, zero: int) -> None:
    expected = alone(Setting(steps=2), 2)
    places = world // stages
    setting = Setting(stages, schedule, zero, micro_batches=8 // places, steps=1, batches=Spread(places))
    for run in run_ranks(train, world, setting, 1, saved):
        torch.testing.assert_close(run.losses, expected.losses[1:], rtol=1e-5, atol=1e-6)
        for name, values in run.parameters.items():
            torch.testing.assert_close(values, expected.parameters[name], rtol=0, atol=2e-6, msg=name)


class Spread:
    """The samples of two places with 4 micro-batches each, on one or two places."""

    def __init__(self, places: int) -> None:
        self.places = places

    def __call__(self, step: int, number: int, place: int) -> Any:
        return batch(step, number, place) if self.places == 2 else batch(step, number // 2, number % 2)


def dropping_out() -> list[Any]:
    """Return layers whose random numbers are those of the rank."""
    return [*untied()[:2], LayerSpec(nn.Dropout, 0.2), *untied()[2:5], LayerSpec(nn.Dropout, 0.2), *untied()[5:]]


@pytest.mark.parametrize(("schedule", "zero"), [thorough("1f1b", 1), ("zbv", 3)])
@on_ranks(4)
def test_training_continues_from_a_checkpoint_bit_by_bit(tmp_path: Path, schedule: str, zero: int) -> None:
    setting = Setting(2, schedule, zero, made=dropping_out)
    engine = engine_of(setting)
    torch.manual_seed(17 + dist.get_rank())
    losses = []
    for step in range(3):
        if step == 1:
            engine.save_checkpoint(tmp_path)
        losses.append(float(engine.train_batch(data(setting, step))))
    engine.destroy()
    engine = engine_of(setting)
    engine.load_checkpoint(tmp_path)
    assert [float(engine.train_batch(data(setting, step))) for step in (1, 2)] == losses[1:]


@on_ranks(2)
def test_idle_times_are_those_of_all_ranks() -> None:
    setting = Setting(2, "1f1b")
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    with engine.record_idle() as times:
        engine.train_batch(data(setting, 1))
    assert 0 < times.idle_share < 1 and len(times.spans) == 2 * 2 * 4
    assert "idle share of all ranks" in str(times) and times.svg().startswith("<svg")
    assert of_all_ranks((str(times), times.idle_share)) == [(str(times), times.idle_share)] * 2


@pytest.mark.parametrize(
    ("schedule", "zero", "options"),
    [
        ("1f1b", 1, {}),
        ("zbv", 3, {}),
        *(thorough(name, zero, {}) for name in ("gpipe", "interleaved", "zb-h1", "dualpipe-v") for zero in (0, 2)),
        thorough("1f1b", 3, {"activation_checkpoint_interval": 1}),
        thorough("zb-h1", 1, {"activation_checkpoint_interval": 2}),
    ],
)
@on_ranks(2)
def test_a_step_leaves_no_tensor_in_a_cycle(schedule: str, zero: int, options: dict[str, Any]) -> None:
    """Received activations of all micro-batches stayed until the garbage collector ran."""
    setting = Setting(2, schedule, zero, options=options)
    engine = engine_of(setting)
    for step in range(3):
        batches: Any = list(data(setting, step))
        with tensors_in_cycles() if step == 2 else contextlib.nullcontext() as found:
            engine.train_batch(iter(batches))
            engine.eval_batch(iter(batches))
    assert found == []


class Echo(nn.Module):
    """Returns its input, and has a parameter that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.0 * self.weight


def distance(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (output - labels).abs().sum()


@pytest.mark.parametrize("source", ["training_data", thorough("deepspeed_io")])
@on_ranks(4)
def test_labels_belong_to_inputs(source: str) -> None:
    """deepspeedai/DeepSpeed#5729: outputs met labels of another batch. Here also if ranks have different seeds."""
    torch.manual_seed(dist.get_rank())
    samples = [(torch.full((1,), float(n)), torch.full((1,), float(n))) for n in range(32)]
    model = PipelineModule([LayerSpec(Echo) for _ in range(4)], num_stages=2, loss_fn=distance)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
    }
    data: Any = samples if source == "training_data" else None
    engine, _, _, _ = shardwise.initialize(model=model, config=config, training_data=data)
    if source == "deepspeed_io":
        engine.set_dataloader(engine.deepspeed_io(samples))
    seen: list[float] = []
    engine.set_batch_fn(lambda pair: (seen.extend(pair[0].flatten().tolist()), pair)[1])
    losses = [float(engine.train_batch()) for _ in range(6)]
    assert [*losses, float(engine.eval_batch())] == [0.0] * 7
    first, second, *others = of_all_ranks(seen)
    assert others == [first, second] and sorted(first[:16] + second[:16]) == list(range(32))


@on_ranks(2)
def test_labels_belong_to_inputs_also_after_another_schedule(tmp_path: Path) -> None:
    """With zbv the second rank reads no data, and with 1f1b it reads the labels."""

    def engine_with(schedule: str) -> Any:
        samples = [(torch.full((1,), float(n)), torch.full((1,), float(n))) for n in range(32)]
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "pipeline": {"schedule": schedule},
        }
        model = PipelineModule([LayerSpec(Echo) for _ in range(4)], num_stages=2, loss_fn=distance)
        return shardwise.initialize(model=model, config=config, training_data=samples)[0]

    engine = engine_with("zbv")
    losses = [float(engine.train_batch()) for _ in range(3)]
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    engine = engine_with("1f1b")
    engine.load_checkpoint(tmp_path)
    assert [*losses, *(float(engine.train_batch()) for _ in range(3))] == [0.0] * 6
    assert engine.training_dataloader.state_dict()["position"] == 24
    seen: list[float] = []
    engine.set_batch_fn(lambda pair: (seen.extend(pair[0].flatten().tolist()), pair)[1])
    engine.load_checkpoint(tmp_path)
    engine.train_batch()
    engine.load_checkpoint(tmp_path)
    engine.train_batch()
    assert seen[:4] == seen[4:]


def recorded(setting: Setting, directory: str) -> None:
    engine = engine_of(setting)
    engine.train_batch(data(setting, 0))
    with engine.record_timeline(directory):
        engine.train_batch(data(setting, 1))


def tracks(events: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the names of events in the order of time, by the name of the track, of tracks of stages."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    found: dict[str, list[str]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda event: event["ts"]):
        if "stage" in event["args"]:
            assert event["cat"] == ("stage" if event["name"][0] in "FBIW" else "message")
            found.setdefault(names[event["pid"], event["tid"]], []).append(event["name"])
    return found


@pytest.mark.parametrize("schedule", ["zb-h1", "zbv"])
def test_a_timeline_has_a_track_of_actions_for_each_stage(schedule: str, tmp_path: Path) -> None:
    run_ranks(recorded, 2, Setting(2, schedule, options={"partition_method": "uniform"}), str(tmp_path))
    made = with_communication(make_schedule(schedule, 2, MICRO_BATCHES))
    expected: dict[int, list[str]] = {}
    for action in made:
        expected.setdefault(action.stage, []).append(text_of(action).rpartition(" stage ")[0])
    timelines = read(tmp_path)
    for rank, timeline in enumerate(timelines):
        own = {stage for stage, of in enumerate(made.rank_of) if of == rank}
        assert tracks(timeline.events) == {f"stage {stage}": expected[stage] for stage in own}
        # Ranges of actions contain those of compute: the table of times counts neither twice.
        times = summarize([timeline]).ranks[0]
        assert sum(times.shares.values()) == pytest.approx(times.whole)
    merged = merge(timelines)
    assert tracks(merged) == {f"stage {n}, rank {made.rank_of[n]}": names for n, names in expected.items()}
    processes = {e["pid"]: e["args"]["name"].split(" on ")[0] for e in merged if e["name"] == "process_name"}
    assert processes == {0: "rank 0", 1: "rank 1", 2: "pipeline"}


def test_sums_of_copies_are_launched_together() -> None:
    launched, held = mock.Mock(), mock.Mock()
    Reducer.sum_copies(mock.Mock(_copies=[(held, mock.Mock(), launched), (held, mock.Mock(), launched)]))
    assert [name for name, *_ in launched.mock_calls] == ["all_reduce"] * 2 + ["all_reduce().wait"] * 2
    assert [name for name, *_ in held.mock_calls] == ["acquire_sums"] * 2 + ["release_sums", "settle"] * 2
