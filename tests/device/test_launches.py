"""What a device is given in a step: launches and bytes that do not grow with the ranks, and nothing that is waited for.

On a recorded device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm import native
from shardwise.comm.communicator import Communicator
from shardwise.comm.compression import Feedback, Flat, Hops, QuantizedReduction, quantize, quantized
from shardwise.comm.compression.quantize import BlockCode
from shardwise.comm.ledger import Ledger
from shardwise.engine.parallel import SharedSequences
from shardwise.parallel import DistributedAttention, begin, end
from shardwise.parallel.tensor import mappings
from shardwise.parallel.tensor.group import TensorGroup
from shardwise.zero.passes.plain import PlainGradients
from shardwise.zero.units.gradient_buffers import GradientPlaces
from shardwise.zero.units.layout import FlatParam
from tests.device import recording as device
from tests.device.recorded import imagined, record
from tests.device.recording import COMPUTE, Event, recording
from tests.harness import thorough
from tests.harness.training import Setting, config_of
from tests.models import CASES
from tests.scale.test_groups import TENSOR, Net

CPU = torch.device("cpu")


def kernels(events: list[Event]) -> int:
    return sum(event.kind == "kernel" for event in events)


def sent(events: list[Event]) -> list[int]:
    """Bytes of each collective: of its inputs, or outputs where these are longer."""
    sizes = [[sum(s.stop - s.start for s in spans) for spans in (e.reads, e.writes)] for e in collectives(events)]
    return [max(size) for size in sizes]


def collectives(events: list[Event]) -> list[Event]:
    return [event for event in events if event.kind == "collective"]


def recorded(world: int, run: Callable[[], Any]) -> list[Event]:
    """What `run` does for the second time, on one of some ranks."""
    with imagined(world, 0), recording() as recorder:
        run()
        begun = len(recorder.trace.events)
        run()
        return recorder.trace.events[begun:]


# -- sequences ---------------------------------------------------------------------------------------------------------


def attended(world: int, keys: int, rows: int) -> list[Event]:
    tokens, heads, width = 4, 8, 2

    def add(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + (k + v).mean()

    def run() -> None:
        shapes = [(rows, n, tokens, width) for n in (heads, keys, keys)]
        given = [torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
        begin(world)
        attention = DistributedAttention(add, scatter_idx=1, gather_idx=2)
        attention(*given, lengths=[tokens] * world).sum().backward()
        end()

    return recorded(world, run)


@pytest.mark.parametrize(("keys", "rows"), [(8, 1), (8, 2), (2, 1)])
def test_exchanges_of_attention_have_as_many_launches_for_any_number_of_ranks(keys: int, rows: int) -> None:
    """Queries, keys and values are one collective, and the output is one; each again in the backward pass."""
    found = {world: attended(world, keys, rows) for world in (4, 8)}
    assert [len(collectives(events)) for events in found.values()] == [4, 4]
    copies = {world: Counter(e.name for e in events if e.kind == "kernel") for world, events in found.items()}
    assert kernels(found[8]) <= kernels(found[4]), copies
    one = rows * 4 * 2 * 2  # bytes of a head of this rank's tokens
    assert sent(found[8]) == [(8 + 16) * one, 8 * one, 8 * one, (8 + 16) * one]  # a rank has at least one key head


# -- tensors -----------------------------------------------------------------------------------------------------------


def mapped(world: int, name: str) -> list[Event]:
    def run() -> None:
        comm = Communicator(None, Ledger(), CPU)
        group = TensorGroup(comm, [[rank] for rank in range(world)], 0)
        x = torch.ones(16, 4, dtype=torch.bfloat16, requires_grad=True)
        if name in ("enter", "leave"):
            found = getattr(mappings, name)(x, group)
        elif name == "sum_split":
            found = mappings.sum_split(x, group, [16 // world] * world, 0)
        else:
            found = mappings.enter(mappings.gather_tokens(x, group, [16] * world, 0), group)
        found.backward(torch.ones_like(found))
        comm.destroy()

    return recorded(world, run)


@pytest.mark.parametrize(
    ("name", "most"),
    # Three kernels make the input, the gradient and its copy; the others are a copy, or a sum and its rounding.
    [("enter", 4), ("leave", 4), ("sum_split", 5), ("gather_tokens", 5)],
)
def test_an_exchange_of_tensor_parallel_layers_is_a_copy_or_a_sum(name: str, most: int) -> None:
    found = {world: mapped(world, name) for world in (4, 8)}
    for world, events in found.items():
        names = [event.name for event in events if event.kind == "kernel"]
        assert len(names) <= most, (world, names)
        assert "cat" not in names, (world, names)
    size = 2 * 16 * 4
    assert {sum(sent(events)) for events in found.values()} <= {size, 2 * size, 8 * size, 16 * size}


# -- parameters and gradients ------------------------------------------------------------------------------------------


def stepped(world: int, setting: Setting, name: str = "gpt") -> list[Event]:
    """The events of a third step."""
    begun: list[int] = []

    def note(_: Any) -> None:
        recorder = device.current()
        assert recorder is not None
        begun.append(len(recorder.trace.events))

    trace = record(CASES[name], setting, 0, world=world, steps=3, between=note)
    return trace.events[begun[1] : begun[2]]


@pytest.mark.parametrize("stage", [0, 3, thorough(1), thorough(2)])
def test_a_step_has_as_many_launches_for_any_number_of_ranks(stage: int) -> None:
    setting = Setting(stage, precision="bf16", optimizer="own AdamW", clip=1.0)
    few, many = (stepped(world, setting) for world in (4, 8))
    assert Counter(e.name for e in few if e.kind == "kernel") == Counter(e.name for e in many if e.kind == "kernel")
    assert len(collectives(few)) == len(collectives(many))


@pytest.mark.parametrize(("sums", "each"), [("fp32", 6), ("bf16", 4)])
def test_gradients_in_16_bits_at_stage_0_are_6_bytes_an_element_in_a_node(sums: str, each: int) -> None:
    """Each is exchanged in 16 bits, summed in fp32, and the sums are gathered: as exact as at the other stages.

    Sums in 16 bits, by choice, are reduced and gathered in these, as DDP's.
    """
    world = 4
    types = (("data_types", {"grad_accum_dtype": sums}),)
    events = stepped(world, Setting(0, precision="bf16", optimizer="own AdamW", extra=types))
    with imagined(1, 0):
        elements = sum(parameter.numel() for parameter in CASES["gpt"].make().parameters())
    exchanged = sum(size for event, size in zip(collectives(events), sent(events), strict=True) if size > 64 * world)
    assert elements * each <= exchanged <= 1.35 * elements * each  # padding of small tensors


def test_collectives_of_passes_run_on_the_queues_own_streams() -> None:
    """Not on another one of NCCL, with an event to and from it (`async_op`); only the norm's sum is launched so."""
    launched: list[tuple[str, bool]] = []
    launch = device._launched

    def noted(op: Any, pairs: Any, group: Any, *, async_op: bool) -> list[Any]:
        recorder = device.current()
        assert recorder is not None
        launched.append((recorder.stream, async_op))
        return launch(op, pairs, group, async_op=async_op)

    with mock.patch.object(device, "_launched", noted):
        stepped(4, Setting(3, precision="bf16", optimizer="own AdamW", clip=1.0))
    assert {stream for stream, _ in launched} == {COMPUTE, "gathers", "reductions"}
    assert {(stream, async_op) for stream, async_op in launched if stream != COMPUTE} == {
        ("gathers", False),
        ("reductions", False),
    }


@pytest.mark.parametrize(("dtype", "name"), [(torch.float16, "_foreach_copy_"), (torch.bfloat16, "_chunk_cat")])
def test_gradients_of_a_flat_parameter_are_joined_by_one_launch(dtype: torch.dtype, name: str) -> None:
    """torch's kernel of `_chunk_cat` converts bf16 to fp32 only; it launches a copy for each other tensor."""
    gradients = [torch.full(shape, value, dtype=dtype) for value, shape in ((0.1, (2, 3)), (0.7, (4,)))]
    flat = torch.empty(10)
    with recording() as recorder:
        GradientPlaces(10, [(0, 6), (6, 4)]).join(list(gradients), flat)
    assert [event.name for event in recorder.trace.events if event.kind == "kernel"] == [name]
    assert torch.equal(flat, torch.cat([gradient.reshape(-1) for gradient in gradients]).float())


class Weights(nn.Module):
    """Several weights, and one that is not used."""

    def __init__(self, weights: int) -> None:
        super().__init__()
        self.used = [f"weight{n}" for n in range(weights)]
        for name in (*self.used, "unused"):
            self.register_parameter(name, nn.Parameter(torch.ones(4, 4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.used:
            x = x @ getattr(self, name)
        return x


def averaged(layers: int, weights: int) -> tuple[int, list[Event]]:
    """The number of units, and the events of averaging gradients without an optimizer, after a second pass."""
    begun: list[int] = []
    average, tolist = PlainGradients._average, torch.Tensor.tolist

    def noted(self: PlainGradients) -> None:
        begun.append(len(recorder.trace.events))
        average(self)

    def read(self: torch.Tensor) -> Any:
        # torch's function modes, by which the recorder sees reads, do not reach callbacks of a backward pass.
        recorder.add(Event("read", "tolist", recorder.stream))
        return tolist(self)

    with (
        imagined(8, 0),
        recording() as recorder,
        mock.patch.object(PlainGradients, "_average", noted),
        mock.patch.object(torch.Tensor, "tolist", read),
    ):
        config = config_of(0, rows=1, zero={"reduce_bucket_size": 16 * (weights + 1)}, stall_limit=0)
        model = nn.Sequential(*(Weights(weights) for _ in range(layers)))
        engine = shardwise.initialize(model=model, config=config)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 4)).sum())
        events = recorder.trace.events[begun[-1] :]
        units = len(engine.sharded.units)
        with recorder.silent(), mock.patch.object(Communicator, "barrier"):
            engine.destroy()
    return units, events


def test_gradients_without_an_optimizer_have_as_many_launches_for_any_number_of_parameters() -> None:
    (few, three), (units, many) = averaged(2, 3), averaged(2, 9)
    assert units == few and kernels(many) <= kernels(three), Counter(e.name for e in many if e.kind == "kernel")


def test_the_host_reads_at_most_once_after_a_pass_without_an_optimizer() -> None:
    units, events = averaged(6, 2)
    assert units > 3 and len([event for event in events if event.kind == "read"]) == 1


def quantized_sums(world: int, hops: bool) -> list[Event]:
    """A reduction of quantised blocks, coded as on a device; in two hops with 8 ranks a node."""

    def run() -> None:
        comm = Communicator(None, Ledger(), CPU)
        nodes = [list(range(first, first + 8)) for first in range(0, world, 8)]
        method = QuantizedReduction(
            comm, BlockCode(4), lambda _: None, hops=Hops.of(comm, nodes) if hops else None, feedback=Feedback(0.5)
        )
        flat = Flat("a", torch.ones(world * 600), torch.zeros(600), None, ())
        method.reduce([flat], "a", accumulate=False, scale=1.0, wire_dtype=None).wait()
        comm.destroy()

    with (
        mock.patch.object(quantize, "in_parts", lambda device: False),
        mock.patch.object(quantized, "in_parts", lambda device: False),
    ):
        return recorded(world, run)


@pytest.mark.parametrize("hops", [False, True])
def test_reductions_of_quantised_blocks_have_as_many_launches_for_any_number_of_ranks(hops: bool) -> None:
    few, many = (quantized_sums(world, hops) for world in (16, 1024))
    assert kernels(many) <= kernels(few), Counter(event.name for event in many if event.kind == "kernel")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_rank_order_takes_a_kernel_for_each_rank(dtype: torch.dtype, accumulate: bool) -> None:
    """As `deterministic_reduce` says: the order is promised, and a tree of sums would form others."""
    values = [1e8, 1.0, -1e8, 1.0, 3.0]
    rows, out = torch.tensor(values).to(dtype).repeat_interleave(4).view(-1, 4), torch.full((4,), 2.0)
    with recording() as recorder:
        native.sum_rows(out, rows, accumulate=accumulate)
    assert kernels(recorder.trace.events) <= len(values) + accumulate
    total = torch.zeros(())
    for value in values:
        total = total + torch.tensor(value).to(dtype).float()
    assert torch.equal(out, (total + 2.0 * accumulate).expand(4))


# -- whole tensors -----------------------------------------------------------------------------------------------------


MUON = Setting(1, precision="bf16", optimizer="Muon")


def test_muon_finds_its_exchanges_once_and_has_one_ahead() -> None:
    cut: list[str] = []
    pieces = FlatParam.pieces

    def counted(self: FlatParam, start: int, stop: int) -> Any:
        cut.append("whole" if self.whole else "ranges")
        return pieces(self, start, stop)

    with mock.patch.object(FlatParam, "pieces", counted):
        few, many = (stepped(world, MUON) for world in (2, 8))
        before = Counter(cut)
        record(CASES["gpt"], MUON, 0, world=8, steps=1)
        once = Counter(cut) - before
        record(CASES["gpt"], MUON, 0, world=8, steps=3)
        assert Counter(cut) - before - once == once  # later steps ask nothing
    exchanges = [e for e in many if e.kind == "collective" and e.stream == COMPUTE and e.name.startswith("exchange")]
    assert len(exchanges) > 4
    # The second of a kind is launched before the first is waited for.
    numbers = {event.number for event in exchanges}
    order = [e.kind for e in many if e.group == exchanges[0].group and e.number in numbers]
    assert order[:2] == ["collective", "collective"], order
    assert kernels(many) <= kernels(few) + len(exchanges)


class Layers(nn.Module):
    """Layers of which a tensor-parallel rank has parts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer["down"](layer["up"](x).relu())
        return x.sum()


@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor"])
def test_exchanges_of_parts_are_launched_one_ahead(optimizer: str) -> None:
    """Those of gradients, and those of values: each is under way while the next unit's is prepared."""
    config = config_of(
        1,
        {"type": optimizer, "params": {"lr": 0.1}},
        rows=1,
        bf16={"enabled": True},
        stall_limit=0,
        tensor_parallel=TENSOR,
        zero={"reduce_bucket_size": 200},
    )
    with imagined(8, 0), recording() as recorder:
        engine = shardwise.initialize(model=Layers(), config=config)[0]
        for _ in range(2):
            engine.backward(engine(torch.ones(1, 8, dtype=torch.bfloat16)))
            begun = len(recorder.trace.events)
            engine.step()
        events = recorder.trace.events[begun:]
        with recorder.silent(), mock.patch.object(Communicator, "barrier"):
            engine.destroy()
    exchanges = [e for e in collectives(events) if e.stream == COMPUTE and e.name.startswith("exchange")]
    (group,), numbers = {e.group for e in exchanges}, {e.number for e in exchanges}
    half, rest = divmod(len(exchanges), 2)
    assert half > 4 and not rest
    launched = arrived = 0
    for kind in [e.kind for e in events if e.group == group and e.number in numbers]:
        if kind == "collective":
            launched += 1
            continue
        assert launched >= arrived // half * half + min(arrived % half + 2, half)
        arrived += 1
    assert arrived == launched == len(exchanges)


# -- waits -------------------------------------------------------------------------------------------------------------

ENGINES: dict[str, dict[str, Any]] = {
    "tensors": {"tensor_parallel": TENSOR},
    "sequences": {"sequence_parallel_size": 2},
    "tensors, sequences": {"tensor_parallel": TENSOR, "sequence_parallel_size": 2},
    "Muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
    "experts of one rank": {},
}


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("stage", [1, thorough(3)])
def test_the_host_does_not_wait_in_a_step(name: str, stage: int) -> None:
    """As under `torch.cuda.set_sync_debug_mode("error")`, from the third step on."""
    optimizer = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}  # torch's Adam reads step counts on the host
    given = {"optimizer": optimizer, **ENGINES[name]}
    config = config_of(stage, rows=1, bf16={"enabled": True}, stall_limit=0, **given)
    with imagined(8, 0), recording() as recorder, mock.patch.object(SharedSequences, "compare"):
        model: nn.Module = Net(1 if "experts" in name else 0)
        engine = shardwise.initialize(model=model, config=config)[0]
        for _ in range(3):
            begun = len(recorder.trace.events)
            with mock.patch.object(SharedSequences, "compare"):  # imagined ranks have no tokens
                engine.backward(engine(torch.ones(1, 2, 8, dtype=torch.bfloat16)))
            engine.step()
        events = recorder.trace.events[begun:]
        with recorder.silent(), mock.patch.object(Communicator, "barrier"):
            engine.destroy()
    assert collectives(events)
    assert [event for event in events if event.kind in ("read", "poll")] == []
