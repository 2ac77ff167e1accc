"""Every schedule of streams that the engine makes is in order, and mistakes that are planted in it are found.

Four ranks are imagined, one after the other; their traces are checked together. A mistake is a change of the engine
that no test of values on a CPU could notice, because there everything has run when it has been launched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.comm.collective_queue import CollectiveQueue
from shardwise.engine import Engine
from shardwise.registry import declare_part
from shardwise.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from shardwise.zero.passes.reduce import Reducer
from shardwise.zero.passes.unshard import Unsharder
from tests.device import checking, recorded
from tests.device.recorded import record, record_all
from tests.device.recording import Trace, _RecordedMark
from tests.harness import thorough
from tests.harness.training import Setting
from tests.models import CASES, GPT, Case, Router, language, language_loss

WORLD = 4


# -- models ------------------------------------------------------------------------------------------------------------


class Keeps(GPT):
    """A view of a block's weight is kept beyond the block, and read when the block has been released."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []

        def look(module: Any, *_: Any) -> None:
            kept.append(next(module.parameters()).detach())

        def run(block: Any, x: torch.Tensor) -> torch.Tensor:
            if block is self.blocks[2]:
                kept.pop().sum()
            return block(x)  # type: ignore[no-any-return]

        self.run, hook = run, self.blocks[0].register_forward_pre_hook(look)
        found = super().forward(tokens)
        hook.remove()
        return found


class Recomputed(GPT):
    """Blocks that are computed once more in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.forward = self._again(block.forward)

    @staticmethod
    def _again(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *given: checkpoint(forward, *given, use_reentrant=False)


def case_of(name: str) -> Case:
    return Case("recomputed", Recomputed, language, language_loss) if name == "recomputed" else CASES[name]


SETTINGS = {
    "bf16": Setting(clip=1.0, optimizer="AdamW", precision="bf16"),
    "accumulation": Setting(clip=1.0, optimizer="AdamW", precision="bf16", accumulation=2),
    "fp16": Setting(clip=1.0, optimizer="AdamW", precision="fp16", accumulation=2),
    "fp32": Setting(optimizer="momentum"),
    "deterministic": Setting(optimizer="momentum", extra=(("deterministic_reduce", True),)),
    "no_prefetch": Setting(precision="bf16", prefetch=False),
    "hsdp": Setting(precision="bf16", optimizer="AdamW", zero=(("mics_shard_size", 4),), accumulation=2),
    "local_sgd": Setting(
        precision="bf16",
        optimizer="AdamW",
        extra=(("local_sgd", {"enabled": True, "replica_size": 2, "sync_every": 1, "quantize_bits": 8}),),
    ),
    "local_sgd_exact": Setting(
        optimizer="momentum", extra=(("local_sgd", {"enabled": True, "replica_size": 2, "sync_every": 1}),)
    ),
    "local_sgd_overlapping": Setting(
        precision="bf16",
        optimizer="AdamW",
        extra=(("local_sgd", {"enabled": True, "replica_size": 2, "sync_every": 2, "overlap_steps": 1}),),
    ),
    "zeropp": Setting(
        precision="bf16",
        optimizer="AdamW",
        zero=(("zero_quantized_weights", True), ("zero_hpz_partition_size", 2), ("zero_quantized_gradients", True)),
    ),
}


def problems(case: Case, setting: Setting, world: int = WORLD, **how: Any) -> list[str]:
    return [str(problem) for problem in checking.check(record_all(case, setting, world=world, **how))]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "stage"), [("gpt", 0), ("recomputed", 3), ("mixture", 2), ("odd_mlp", 1), ("two_towers", 3)]
)
def test_models_at_every_stage(name: str, stage: int) -> None:
    assert problems(case_of(name), SETTINGS["accumulation"].with_stage(stage)) == []


@pytest.mark.parametrize(
    ("setting", "stage"),
    [
        ("zeropp", 3),
        *(thorough(name, 1 + 2 * (number % 2)) for number, name in enumerate(SETTINGS) if name != "zeropp"),
    ],
)
def test_settings(setting: str, stage: int) -> None:
    assert problems(CASES["gpt"], SETTINGS[setting].with_stage(stage), 8 if setting == "hsdp" else 4) == []


@pytest.mark.parametrize(("setting", "stage"), [thorough("fp32", 0), thorough("accumulation", 0), ("accumulation", 3)])
def test_one_rank(setting: str, stage: int) -> None:
    """It waits for nobody, and still must not leave what it computes to a stream that nobody waits for."""
    for name in ("gpt", "odd_mlp"):
        assert problems(CASES[name], SETTINGS[setting].with_stage(stage), 1) == []


def with_parts() -> Any:
    """A model every second block of which only every second rank shares."""
    model = CASES["gpt"].build()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for name, parameter in model.named_parameters():
        block = re.search(r"\.(\d+)\.", name)
        if block and int(block[1]) % 2:
            declare_part(parameter, ranks=range(rank % 2, world, 2), name=f"{name} of {rank % 2}")
    return model


@pytest.mark.parametrize(
    ("stage", "setting"), [thorough(1, "bf16"), thorough(1, "hsdp"), (3, "accumulation"), thorough(3, "hsdp")]
)
def test_parameters_that_some_ranks_share(setting: str, stage: int) -> None:
    case = dataclasses.replace(CASES["gpt"], build=with_parts)
    assert problems(case, SETTINGS[setting].with_stage(stage), 4) == []


@pytest.mark.parametrize(
    "name", [*map(thorough, ("gpt_functional_head", "lora", "frozen_middle", "borrower", "detached")), "gpt_groups"]
)
def test_other_models(name: str) -> None:
    assert problems(case_of(name), SETTINGS["accumulation"].with_stage(3), 2) == []


MANY = dataclasses.replace(CASES["router"], build=lambda: Router(experts=8))


def routed(engine: Any, micro: int, rank: int) -> torch.Tensor:
    """After a first step in which all ranks agree, rank 1 uses an expert long before its usual place once more."""
    route = [6, *range(8)] if micro and rank == 1 else list(range(8))
    return MANY.loss(engine, {**MANY.data(micro, 0, rank, torch.bfloat16), "route": route})


@contextlib.contextmanager
def ordered_by(who: str) -> Iterator[None]:
    """The device orders reductions in all steps after the first, or the host does, as after ranks have differed.

    A rank that is recorded hears nothing of the others.
    """
    blocks = property(lambda self: False) if who == "host" else Reducer.on_device
    with (
        mock.patch.object(Unsharder, "take_ahead", lambda self: False),
        mock.patch.object(Reducer, "on_device", blocks),
    ):
        yield


def test_memory_that_a_script_still_reads_is_given_back_behind_that() -> None:
    case = Case("keeps", lambda: Keeps(layers=4), language, language_loss)
    assert problems(case, SETTINGS["bf16"].with_stage(3), 2) == []
    with mock.patch("shardwise.zero.units.unit.is_shared", lambda tensor: False):
        assert any(found.startswith("early") for found in problems(case, SETTINGS["bf16"].with_stage(3), 2))


@pytest.mark.parametrize(("stage", "who"), [(3, "host"), thorough(3, "device"), thorough(2, "device")])
def test_branches_that_differ_by_rank(stage: int, who: str) -> None:
    with ordered_by(who):
        assert problems(MANY, SETTINGS["bf16"].with_stage(stage), 4, loss=routed) == []
        assert problems(CASES["router"], SETTINGS["accumulation"].with_stage(stage), 4) == []


def evaluated(engine: Any) -> None:
    engine.eval()
    with torch.no_grad():
        CASES["gpt"].loss(engine, CASES["gpt"].data(99, 0, 0, torch.bfloat16))
    engine.train()


def changed(engine: Any) -> None:
    parameters = list(engine.module.parameters())[:3]
    with shardwise.zero.GatheredParameters(parameters, modifier_rank=0), torch.no_grad():
        parameters[0].mul_(0.5)


def read(engine: Any) -> None:
    parameter = next(engine.module.parameters())
    safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter) * 0.5)


def looked_at(engine: Any) -> None:
    with engine.gathered():
        evaluated(engine)
    engine.module_state_dict()


@pytest.mark.parametrize(
    ("between", "stage"), [(read, 3), thorough(evaluated, 1), thorough(changed, 3), thorough(looked_at, 3)]
)
def test_what_scripts_do_between_steps(stage: int, between: Callable[[Any], None]) -> None:
    assert problems(CASES["gpt"], SETTINGS["bf16"].with_stage(stage), 2, between=between) == []


def test_the_trace_has_what_a_step_does() -> None:
    trace = record(CASES["gpt"], SETTINGS["bf16"].with_stage(3), 0)
    kinds = {event.kind for event in trace.events}
    assert kinds >= {"kernel", "collective", "mark", "wait", "arrive", "block", "take", "give"}
    streams = {event.stream for event in trace.events if event.kind == "collective"}
    assert streams == {"compute", "gathers", "reductions"}  # the norm's sum is on the first


@pytest.mark.parametrize(("precision", "stage"), [("fp32", 3), thorough("bf16", 3), thorough("bf16", 1)])
def test_the_host_does_not_wait_for_the_device_in_a_step(precision: str, stage: int) -> None:
    # torch's Adam reads its step counts, which lie on the host.
    setting = dataclasses.replace(SETTINGS["bf16"], precision=precision, optimizer="momentum").with_stage(stage)
    begun: list[int] = []
    trace = record(CASES["gpt"], setting, 0, between=lambda _: begun.append(len(recorded.recording_now().trace.events)))
    # In the first step inputs are looked at once, and ranks agree on the order of units.
    assert [event for event in trace.events[begun[0] :] if event.kind == "read"] == []


@pytest.mark.parametrize("queues", ["1", "8"])
def test_one_hardware_queue_for_all_streams_is_warned_of(
    queues: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    record(CASES["odd_mlp"], SETTINGS["fp32"].with_stage(3), 0, world=2, steps=1)
    warned = [record.message for record in caplog.records if "CUDA_DEVICE_MAX_CONNECTIONS=1" in record.message]
    assert len(warned) == (queues == "1")


HOSTS = [thorough(0, "gpt"), thorough(2, "gpt"), thorough(2, "lora"), (3, "detached")]
HOSTS += [thorough(3, name) for name in ("gpt", "recomputed", "lora", "gpt_groups", "gpt_functional_head", "borrower")]


@pytest.mark.parametrize(("stage", "name"), HOSTS)
def test_the_host_neither_waits_nor_polls_in_a_backward_pass(name: str, stage: int) -> None:
    """From the second step on: the first one finds the order of units."""
    places: list[int] = []
    case, setting = case_of(name), SETTINGS["accumulation"].with_stage(stage)

    def loss(engine: Any, micro: int, rank: int) -> torch.Tensor:
        found = case.loss(engine, case.data(micro, 0, rank, torch.bfloat16))
        places.append(len(recorded.recording_now().trace.events))
        return found

    step, ends = Engine.step, []

    def stepped(self: Engine, *given: Any) -> None:
        ends.append(len(recorded.recording_now().trace.events))
        step(self, *given)

    with mock.patch.object(Engine, "step", stepped):
        trace = record(case, setting, 0, steps=3, loss=loss)
    for begin, end in list(zip(places, ends, strict=True))[setting.accumulation :]:
        events = trace.events[begin:end]
        assert any(event.kind == "collective" for event in events) or stage == 0
        assert [event for event in events if event.kind in ("block", "poll", "read")] == []
        assert not any(event.kind == "say" and event.name in ("fetch", "want") for event in events)


def test_units_that_ranks_need_in_different_orders_make_the_host_wait_again() -> None:
    """A rank that is ahead fetches a unit; all ranks hear of it in the step, and order reductions on the host."""
    ordered: list[bool] = []

    def noted(engine: Any) -> None:
        ordered.append(engine.sharded.reducer.on_device)

    record(MANY, SETTINGS["bf16"].with_stage(3), 1, loss=routed, between=noted)
    assert ordered == [True, False, False]


# -- mistakes ----------------------------------------------------------------------------------------------------------

Plant = Callable[[], contextlib.AbstractContextManager[Any]]
PLANTS: dict[str, tuple[Plant, str, str, Setting]] = {}
"""How each is planted, what the checker says of it, and the case and setting in which it would go wrong."""


def plant(kind: str, name: str = "gpt", stage: int = 3, **changes: Any) -> Callable[[Plant], Plant]:
    def add(made: Plant) -> Plant:
        setting = dataclasses.replace(SETTINGS["accumulation"], **changes).with_stage(stage)
        PLANTS[made.__name__] = (contextlib.contextmanager(made), kind, name, setting)  # type: ignore[arg-type,type-var]
        return made

    return add


@contextlib.contextmanager
def unawaited() -> Iterator[None]:
    """No stream waits for an event that a queue of collectives has recorded on its stream."""
    wait = _RecordedMark.wait

    def waited(self: _RecordedMark) -> None:
        marks = {event.number: event.stream for event in self._recorder.trace.events if event.kind == "mark"}
        if not marks.get(self.number, "").startswith(("gathers", "reductions")):
            wait(self)

    with mock.patch.object(_RecordedMark, "wait", waited):
        yield


@plant("race")
def a_unit_computes_before_its_gather_has_ended() -> Iterator[None]:
    with unawaited():
        yield


@plant("early", stage=2)
def gradients_are_given_back_while_they_are_sent() -> Iterator[None]:
    with mock.patch.object(CollectiveQueue, "synchronize", lambda self, link, what: None):
        yield


@plant("race", stage=2)
def gradients_are_sent_before_they_are_there() -> Iterator[None]:
    launch = Reducer._launch

    def launched(self: Reducer, gradients: Any) -> None:
        with mock.patch.object(CollectiveQueue, "follow", lambda self: None):
            launch(self, gradients)

    with mock.patch.object(Reducer, "_launch", launched):
        yield


@pytest.mark.parametrize("name", [*map(thorough, list(PLANTS)[:-1]), list(PLANTS)[-1]])
def test_mistakes_of_one_rank_are_found(name: str) -> None:
    planted, kind, case, setting = PLANTS[name]
    assert checking.check_order(record(CASES[case], setting, 0, steps=2)) == []
    with planted():
        found = checking.check_order(record(CASES[case], setting, 0, steps=2))
    assert {problem.kind for problem in found} >= {kind}, found


def test_an_answer_behind_what_the_peer_computes_is_found() -> None:
    """As review finding F1: the peer's stream waits for a gather that the rank which asks cannot launch."""

    def last(engine: Any, micro: int, rank: int) -> torch.Tensor:
        # The peers are played before it, and have launched what their streams wait for.
        return routed(engine, micro, 1 if rank == WORLD - 1 else 0)

    with ordered_by("host"), mock.patch.object(recorded, "ANSWERS", "compute"):
        (found,) = checking.check_progress(record_all(MANY, SETTINGS["bf16"].with_stage(3), loss=last))
    assert found.kind == "stuck"
    assert f"rank {WORLD - 1}: host for say fetch" in found.text


def traces() -> list[Trace]:
    return record_all(CASES["gpt"], SETTINGS["bf16"].with_stage(3), world=2, steps=1)


def test_ranks_that_launch_in_another_order_are_found() -> None:
    first, second = traces()
    places = [n for n, event in enumerate(second.events) if event.kind == "collective" and event.stream == "gathers"]
    a, b = next((a, b) for a, b in itertools.pairwise(places) if second.events[a].name != second.events[b].name)
    second.events[a], second.events[b] = (
        dataclasses.replace(second.events[b], number=second.events[a].number),
        dataclasses.replace(second.events[a], number=second.events[b].number),
    )
    (found,) = checking.check_progress([first, second])
    assert found.kind == "order" and "rank 0" in found.text and "rank 1" in found.text
