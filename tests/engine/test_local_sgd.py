"""Local SGD and DiLoCo: replicas against a simulation of all replicas in one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise.comm.communicator import Communicator, Handle
from shardwise.comm.compression import BlockCode
from shardwise.comm.compression.quantized import QuantizedMean
from shardwise.comm.ledger import Ledger
from shardwise.config import resolve
from shardwise.errors import CheckpointError, ConfigError, ConflictError, DesyncError, UsageError
from shardwise.pipeline.module import PipelineModule
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state, safe_set_full_fp32_param
from tests.harness import of_all_ranks, on_ranks, run_ranks, thorough
from tests.harness.training import config_of, digest, parameters_digest, take_steps
from tests.models import CASES

CASE = CASES["gpt"]
INNER = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
}


def engine_of(
    stage: int = 0,
    inner: str = "AdamW",
    size: int | None = 1,
    precision: str = "fp32",
    mesh: Any = None,
    model: Any = None,
    **local: Any,
) -> Any:
    model = CASE.make() if model is None else model
    local = {"enabled": True, "replica_size": size, **local}
    bf16: Any = {"enabled": precision != "fp32"}
    if precision == "bf16 only":
        bf16 |= {"master_weights": "none", "rounding": "nearest", "bf16_optimizer_states": True}
    config = config_of(stage, rows=4, zero={"reduce_bucket_size": 1500}, local_sgd=local, bf16=bf16)
    return shardwise.initialize(model=model, optimizer=INNER[inner](model.parameters()), config=config, mesh=mesh)[0]


def train(engine: Any, steps: range) -> None:
    take_steps(engine, CASE, steps)


class Simulated:
    """Replicas in one process, with DiLoCo's algorithm; `replicas` has the ranks of each replica."""

    def __init__(self, replicas: list[list[int]], inner: str, every: int, outer: Any) -> None:
        self.replicas, self.every = replicas, every
        self.models = [CASE.make() for _ in replicas]
        self.inner = [INNER[inner](model.parameters()) for model in self.models]
        self.agreed = CASE.make()
        self.outer = outer(list(self.agreed.parameters()))

    def number_of(self, rank: int) -> int:
        return next(number for number, ranks in enumerate(self.replicas) if rank in ranks)

    def step(self, number: int, exchanged: set[str] | None = None) -> None:
        for ranks, model, inner in zip(self.replicas, self.models, self.inner, strict=True):
            losses = [CASE.loss(model, CASE.data(number, 0, rank, torch.float32)) for rank in ranks]
            inner.zero_grad()
            (sum(losses) / len(losses)).backward()
            inner.step()
        if exchanged is None and (number + 1) % self.every == 0:
            exchanged = {name for name, _ in self.agreed.named_parameters()}
        if exchanged:
            self.exchange(exchanged)

    def exchange(self, names: set[str]) -> None:
        self.merge(self.changes(names), 0.0)

    def changes(self, names: set[str]) -> dict[str, torch.Tensor]:
        return {
            name: torch.stack([self.agreed.get_parameter(name) - m.get_parameter(name) for m in self.models]).detach()
            for name in names
        }

    def merge(self, changes: dict[str, torch.Tensor], mixing: float) -> None:
        for name, agreed in self.agreed.named_parameters():
            agreed.grad = changes[name].mean(0) if name in changes else None
        self.outer.step()
        for model in self.models:
            for name in changes:
                own, agreed = model.get_parameter(name).data, self.agreed.get_parameter(name).data
                own.copy_(mixing * own + (1 - mixing) * agreed)


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def assert_same(engine: Any, model: nn.Module, tolerance: float = 1e-5) -> None:
    found = engine.module_state_dict()
    for name, expected in model.state_dict().items():
        assert torch.allclose(found[name].float(), expected, rtol=tolerance, atol=tolerance), name


def as_simulated(engine: Any, simulated: Simulated, steps: range) -> None:
    number = simulated.number_of(dist.get_rank())
    for step in steps:
        simulated.step(step)
        train(engine, range(step, step + 1))
        assert_same(engine, simulated.models[number])


def across(engine: Any) -> int:
    """Bytes that this rank has sent to other replicas."""
    return sum(r.sent for r in engine.ledger.records() if r.group == "replicate" and ".initial" not in r.label)


# -- what is computed --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_diloco_of_two_replicas_is_that_of_one_process() -> None:
    for stage in (0, 3):
        engine = engine_of(stage, sync_every=3)
        as_simulated(engine, Simulated([[0], [1]], "AdamW", 3, nesterov), range(6))
        assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1
        engine.destroy()


@pytest.mark.parametrize("stage", [thorough(0), 1, thorough(2), thorough(3)])
@on_ranks(4)
def test_replicas_of_two_ranks(stage: int) -> None:
    engine = engine_of(stage, size=2, sync_every=3)
    as_simulated(engine, Simulated([[0, 1], [2, 3]], "AdamW", 3, nesterov), range(6))
    elements = sum(section.layout.numel for unit in engine.sharded.units for section in unit.trainable)
    assert 2 * 2 * elements <= across(engine) <= 2 * 2 * elements + 2 * 64  # 4 bytes of half of the elements, twice
    assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1
    engine.destroy()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replicate"))
    engine = engine_of(stage, size=None, mesh=mesh, sync_every=2, outer_optimizer={"type": "SGD", "momentum": 0.5})
    heavy_ball = lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5)  # noqa: E731
    as_simulated(engine, Simulated([[0, 2], [1, 3]], "AdamW", 2, heavy_ball), range(4))


@on_ranks(4)
def test_one_gather_of_master_weights_runs_while_the_one_before_is_merged() -> None:
    engine = engine_of(0, size=2, sync_every=1)
    own = engine.sharded.local._replicas.own
    names = {one.name for ones in engine.sharded.local._outer.values() for one in ones}
    launched, waited = Communicator.all_gather, Handle.wait
    order: list[str] = []

    def noted_launch(self: Communicator, pairs: Any, label: str, kind: str = "gather") -> Handle:
        if self is own and label in names:
            order.append("launch")
        return launched(self, pairs, label, kind)

    def noted_wait(self: Handle) -> None:
        if (self.record.group, self.record.op) == (own.name, "all_gather") and self.record.label in names:
            order.append("wait")
        waited(self)

    with mock.patch.object(Communicator, "all_gather", noted_launch), mock.patch.object(Handle, "wait", noted_wait):
        train(engine, range(1))
    count = len(names)
    assert count > 2 and order == ["launch", *["launch", "wait"] * (count - 1), "wait"]


@on_ranks(2)
def test_a_mean_after_each_step_is_data_parallel_sgd() -> None:
    found = []
    for local in ({"sync_every": 1, "outer_optimizer": {"type": "Average"}}, {"enabled": False, "replica_size": None}):
        engine = engine_of(1, "SGD", **local)
        train(engine, range(6))
        found.append(engine.module_state_dict())
        engine.destroy()
    for name, values in found[0].items():
        assert torch.allclose(values, found[1][name], rtol=1e-6, atol=1e-7), name


@on_ranks(2)
def test_fragments_are_exchanged_at_their_own_steps() -> None:
    engine = engine_of(1, sync_every=4, fragments=2)
    units = [{t.name for t in unit.tensors} for unit in engine.sharded.units]
    firsts = [set().union(*units[0::2]), set().union(*units[1::2])]
    simulated = Simulated([[0], [1]], "AdamW", 4, nesterov)
    for step in range(1, 11):
        chosen = [names for names, offset in zip(firsts, (0, 2), strict=True) if (step + offset) % 4 == 0]
        simulated.step(step, exchanged=set().union(*chosen))
        train(engine, range(step, step + 1))
        assert_same(engine, simulated.models[dist.get_rank()])
    simulated.step(11, exchanged={name for names in firsts for name in names})
    before = engine.sharded.local.diverged
    train(engine, range(11, 12))
    engine.synchronize_replicas()
    assert before
    assert not engine.sharded.local.diverged
    assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1


def in_flight(engine: Any) -> int:
    return sum(r.group == "replicate" and r.waited is None for r in engine.ledger.records())


@pytest.mark.parametrize(
    ("stage", "size", "mixing", "overlap"),
    [thorough(1, 1, None, 2), (3, 2, 0.0, 1), thorough(0, 1, 0.25, 1), thorough(0, 2, None, 2)],
)
@on_ranks(4)
def test_exchanges_overlap_the_following_steps(stage: int, size: int, mixing: float | None, overlap: int) -> None:
    engine = engine_of(stage, size=size, sync_every=6, fragments=2, overlap_steps=overlap, overlap_mixing=mixing)
    units = [{t.name for t in unit.tensors} for unit in engine.sharded.units]
    parts = {0: set().union(*units[0::2]), 3: set().union(*units[1::2])}  # by step of an interval
    simulated = Simulated([list(range(r, r + size)) for r in range(0, 4, size)], "AdamW", 6, nesterov)
    number, changes = simulated.number_of(dist.get_rank()), {}
    for step in range(1, 15):
        simulated.step(step, exchanged=set())
        if (step - overlap) % 3 == 0 and changes:
            simulated.merge(changes, 0.5 if mixing is None else mixing)
        if step % 3 == 0:
            changes = simulated.changes(parts[step % 6])
        train(engine, range(step, step + 1))
        assert bool(in_flight(engine)) == (step % 3 < overlap and step >= 3), step
        assert_same(engine, simulated.models[number])
    elements = sum(section.layout.numel for unit in engine.sharded.units for section in unit.trainable)
    replicas = 4 // size
    whole = 2 * 4 * elements // size * (replicas - 1) // replicas  # two exchanges of each fragment
    assert 2 * whole * 0.98 <= across(engine) <= 2 * whole * 1.02 + 512  # and digests
    simulated.step(15, exchanged=set())
    train(engine, range(15, 16))
    assert in_flight(engine)
    ledger = engine.ledger
    if overlap == 1:
        simulated.merge(simulated.changes(parts[3]), 0.5 if mixing is None else mixing)
        simulated.exchange(set().union(*parts.values()))
        engine.synchronize_replicas()
        assert_same(engine, simulated.models[number])
        assert not engine.sharded.local.diverged
        assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1
    engine.destroy()
    assert not any(record.waited is None for record in ledger.records())


@on_ranks(2)
def test_overlapped_exchanges_of_bf16_parameters_without_masters() -> None:
    engine = engine_of(1, precision="bf16 only", sync_every=2, overlap_steps=1)
    train(engine, range(1, 4))
    assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 2  # half of the way to the agreed values
    engine.synchronize_replicas()
    assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1


@pytest.mark.parametrize("bits", [8, 4])
@on_ranks(2)
def test_quantised_exchanges_have_error_feedback_and_the_same_bits(bits: int) -> None:
    random = torch.Generator().manual_seed(dist.get_rank())
    job = Communicator(None, Ledger(), torch.device("cpu"))
    mean, total, sent = QuantizedMean(job, 1000, BlockCode(bits), "test", job.device), 0.0, 0.0
    for _ in range(20):
        values = torch.randn(1000, generator=random)
        exact = sum(of_all_ranks(values.clone())) / 2
        for _ in mean.average(values):
            pass
        assert len(set(of_all_ranks(digest([values])))) == 1
        total, sent = total + exact, sent + values
    rest = sum(of_all_ranks(mean.errors["worker"])) / 2 + torch.cat(of_all_ranks(mean.errors["server"]))
    assert torch.allclose(sent + rest, total, atol=1e-4)  # what has not been sent is kept
    assert float(rest.norm() / total.norm()) < (0.01 if bits == 8 else 0.2)


@on_ranks(2)
def test_bytes_between_replicas() -> None:
    sent = {}
    for name, local in {
        "each step": {"sync_every": 1},
        "4 steps": {"sync_every": 4},
        "4 steps, fragments": {"sync_every": 4, "fragments": 2},
        "8 bits": {"sync_every": 4, "quantize_bits": 8},
        "4 bits": {"sync_every": 4, "quantize_bits": 4},
    }.items():
        engine = engine_of(1, **local)
        train(engine, range(2))
        before = across(engine) if name == "each step" else 0
        train(engine, range(2, 8))
        sent[name] = across(engine) - before
        elements = sum(unit.trainable[0].layout.numel for unit in engine.sharded.units)
        engine.destroy()
    exact = 2 * 4 * elements  # two exchanges: a reduce-scatter and an all-gather of half of 4 bytes to the one other
    assert exact <= sent["4 steps"] <= exact * 1.02
    assert sent["each step"] == pytest.approx(3 * sent["4 steps"], rel=0.01)
    assert sent["4 steps, fragments"] == pytest.approx(sent["4 steps"], rel=0.02)
    assert sent["8 bits"] < 0.30 * sent["4 steps"]
    assert sent["4 bits"] < 0.18 * sent["4 steps"]


@on_ranks(2)
def test_norm_loss_and_options_of_a_replica() -> None:
    engine = engine_of(0, "SGD", sync_every=2)
    rank, model = dist.get_rank(), CASE.make()
    CASE.loss(model, CASE.data(0, 0, rank, torch.float32)).backward()
    own = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
    train(engine, range(1))
    assert engine.get_global_grad_norm() == pytest.approx(float(own), rel=1e-5)
    engine.optimizer.param_groups[0]["lr"] = 0.05 + 0.01 * rank
    with pytest.raises(DesyncError, match="parameter groups differ between replicas"):
        train(engine, range(1, 2))


# -- state -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "precision"), [(3, "fp32"), (1, "bf16")])
@on_ranks(2)
def test_initial_and_changed_parameters_are_those_of_one_rank(stage: int, precision: str) -> None:
    torch.manual_seed(dist.get_rank())
    model = CASE.build()
    engine = engine_of(stage, precision=precision, model=model, sync_every=2)
    assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1
    parameter = next(engine.module.parameters())
    with shardwise.zero.GatheredParameters(parameter, modifier_rank=1):
        if dist.get_rank() == 1:
            parameter.data.fill_(0.5)
    assert torch.equal(safe_get_full_fp32_param(parameter), torch.full(parameter.shape, 0.5))
    safe_set_full_fp32_param(parameter, torch.full(parameter.shape, 0.125))
    assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1
    with shardwise.zero.GatheredParameters(parameter):
        assert float(parameter.mean()) == 0.125
    train(engine, range(1))
    with pytest.raises(UsageError, match="synchronize_replicas"):
        safe_set_full_fp32_param(parameter, torch.zeros(parameter.shape))
    train(engine, range(1, 2))
    assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1
    assert 0 < float((safe_get_full_fp32_param(parameter) - 0.125).abs().max()) < 0.1


@on_ranks(4)
def test_refused_changes_change_nothing() -> None:
    """Between exchanges neither block stores a change; all parameters are resharded, and training goes on."""
    engine = engine_of(3, size=2, sync_every=2)
    train(engine, range(1))
    parameters = list(engine.module.parameters())
    before = parameters_digest(engine.module)
    with (
        pytest.raises(UsageError, match="synchronize_replicas"),
        shardwise.zero.GatheredParameters(parameters, modifier_rank=0),
    ):
        pass
    assert parameters_digest(engine.module) == before
    with pytest.raises(UsageError, match="synchronize_replicas"), engine.gathered():
        for parameter in parameters:
            parameter.data.zero_()
            torch.autograd.graph.increment_version(parameter)
    assert parameters_digest(engine.module) == before
    train(engine, range(1, 2))
    assert len(set(of_all_ranks(parameters_digest(engine.module)))) == 1


@on_ranks(2)
def test_parameters_written_between_exchanges_are_not_lost_by_an_exchange_at_once() -> None:
    engine = engine_of(sync_every=2)
    train(engine, range(1))
    parameter = next(engine.module.parameters())
    with torch.no_grad():
        parameter.fill_(0.5)
    with pytest.raises(UsageError, match="changed while replicas differ"):
        engine.synchronize_replicas()


@pytest.mark.parametrize(
    ("stage", "fragments", "overlap"),
    [(3, 2, 0), (1, 1, 3), thorough(0, 1, 0), thorough(3, 1, 3), thorough(1, 2, 1), thorough(0, 2, 0)],
)
@on_ranks(2)
def test_resumed_between_exchanges(tmp_path: Path, stage: int, fragments: int, overlap: int) -> None:
    local: dict[str, Any] = {"sync_every": 4, "fragments": fragments, "overlap_steps": overlap}
    if fragments == 2 or stage == 3:
        local |= {"quantize_bits": 8, "precision": "bf16"}
    engine = engine_of(stage, **local)
    train(engine, range(6))
    engine.save_checkpoint(str(tmp_path), asynchronous=fragments == 2)
    assert not in_flight(engine)
    agreed = engine.sharded.local.layout()
    train(engine, range(6, 10))
    expected = parameters_digest(engine.module)
    engine.destroy()
    engine = engine_of(stage, **local)
    engine.load_checkpoint(str(tmp_path))
    assert engine.sharded.local.layout() == agreed
    train(engine, range(6, 10))
    assert parameters_digest(engine.module) == expected


@on_ranks(2)
def test_an_exchange_ends_without_a_result_where_other_parameters_are_loaded(tmp_path: Path) -> None:
    engine = engine_of(1, sync_every=4, overlap_steps=2)
    train(engine, range(3))
    engine.save_checkpoint(str(tmp_path), tag="before")
    train(engine, range(3, 5))
    assert in_flight(engine)
    engine.load_checkpoint(str(tmp_path), tag="before", load_optimizer_states=False)
    assert not in_flight(engine)
    found, initial = engine.module_state_dict(), CASE.make().state_dict()  # the parameters last agreed on
    assert all(torch.equal(value, initial[name]) for name, value in found.items())
    assert not engine.sharded.local.acts(6)  # where the exchange would have been merged


def saved(directory: str) -> dict[str, torch.Tensor]:
    engine = engine_of(1, sync_every=4)
    train(engine, range(8))
    engine.save_checkpoint(directory, tag="agreed")
    values = {name: value.clone() for name, value in engine.module_state_dict().items()}
    train(engine, range(8, 9))
    engine.save_checkpoint(directory, tag="apart")
    assert not torch.equal(next(iter(values.values())), next(iter(engine.module_state_dict().values())))
    return values


def loaded(directory: str, values: dict[str, torch.Tensor], **local: Any) -> list[str]:
    engine = engine_of(3, **local)
    engine.load_checkpoint(directory, tag="agreed")
    assert all(torch.equal(value, values[name]) for name, value in engine.module_state_dict().items())
    momentum = None
    if engine.sharded.local is not None:
        momentum = safe_get_full_optimizer_state(next(engine.module.parameters()), "outer_momentum")
        assert momentum.abs().sum() > 0
    assert not any("outer_momentum" in state for state in engine.optimizer.state.values())
    with pytest.raises(CheckpointError, match="2 replicas between two exchanges"):
        engine.load_checkpoint(directory, tag="apart")
    engine.load_checkpoint(directory, tag="apart", load_optimizer_states=False)
    assert all(torch.equal(value, values[name]) for name, value in engine.module_state_dict().items())
    train(engine, range(8, 11))
    engine.synchronize_replicas()
    return of_all_ranks(parameters_digest(engine.module))


def test_loaded_by_other_replicas(tmp_path: Path) -> None:
    values = run_ranks(saved, 2, str(tmp_path))[0]
    for ranks, local in ((4, {"sync_every": 4}), (2, {"sync_every": 4, "size": 2}), (1, {"enabled": False})):
        digests = run_ranks(loaded, ranks, str(tmp_path), values, **local)[0]
        assert len(set(digests)) == 1


@on_ranks(2)
def test_exchanges_may_be_quantized_from_a_checkpoint_on(tmp_path: Path) -> None:
    for number, bits in enumerate([None, 8, 4]):
        engine = engine_of(sync_every=2, quantize_bits=bits)
        if number:
            engine.load_checkpoint(str(tmp_path))
            assert engine.global_steps == 3 * number
        train(engine, range(3 * number, 3 * number + 3))
        engine.save_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("stage", "fragments", "bits", "overlap"),
    [thorough(0, 1, None, 0), (1, 1, 8, 0), thorough(3, 2, None, 0), thorough(1, 1, None, 1), thorough(3, 1, 8, 1)],
)
@on_ranks(2)
def test_memory_is_planned(stage: int, fragments: int, bits: int | None, overlap: int) -> None:
    local: Any = {"fragments": fragments, "quantize_bits": bits, "overlap_steps": overlap}
    engine = engine_of(stage, sync_every=2, precision="bf16", **local)
    train(engine, range(2))
    engine.accountant.reset_peak()
    train(engine, range(2, 4))
    rows = {row.name: row for row in engine.memory_report(CASE.data(0, 0, 0, torch.float32)["tokens"]).rows}
    for name in ("parameters", "gradients", "master weights", "optimizer state", "communication buffers"):
        most = rows[name].measured * 1.03 + 2048  # scratch of quantised messages is planned for the largest at once
        assert rows[name].measured <= rows[name].planned <= most, (stage, rows[name])
    state = rows["optimizer state"].measured / rows["master weights"].measured
    errors = 0 if bits is None else 1.5  # of own values, and of the means of half of them
    assert state == pytest.approx(4 + errors, rel=0.01)  # two moments, agreed values, outer momentum


@on_ranks(4)
def test_signals_weights_and_init(tmp_path: Path) -> None:
    rank, config = dist.get_rank(), {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    config["local_sgd"] = {"enabled": True, "replica_size": 2, "sync_every": 3}
    with shardwise.zero.Init():
        model = CASE.make()
    engine = shardwise.initialize(model=model, optimizer=INNER["AdamW"](model.parameters()), config=config)[0]
    simulated = Simulated([[0, 1], [2, 3]], "AdamW", 3, nesterov)
    engine.checkpoint_on_signal(str(tmp_path / "on_signal"), save_on=["SIGUSR1"])
    for step in range(5):
        if step == 3 and rank == 3:
            os.kill(os.getpid(), signal.SIGUSR1)
        as_simulated(engine, simulated, range(step, step + 1))
    engine.save_16bit_model(str(tmp_path), "own.bin")
    found = torch.load(tmp_path / "own.bin")
    assert all(torch.equal(found[name], v) for name, v in engine.module_state_dict().items()) or rank > 1
    train(engine, range(5, 6))
    assert [path.name for path in (tmp_path / "on_signal").iterdir() if path.is_dir()] == ["global_step6"]


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"fp16": {"enabled": True}}, "fp16.enabled"),
        ({"non_finite": "skip"}, "non_finite"),
        ({"bf16": {"enabled": True, "check_grad_overflow": True}}, "bf16.check_grad_overflow"),
        ({"anomaly_watch": {"enabled": True, "loss_spike": "skip"}}, "anomaly_watch.loss_spike"),
        ({"checkpoint": {"memory_copies": {"every": 10}}}, "checkpoint.memory_copies"),
        ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}}, "optimizer.type"),
        ({"compression": {"type": "int8"}}, "compression.type"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "zero_quantized_gradients"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "mics_shard_size"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer"),
        ({"pipeline": {"stages": 2}}, "pipeline.stages"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 2}}, "expert_parallel.enabled"),
        ({"local_sgd": {"enabled": True, "replica_size": 3}}, "local_sgd.replica_size"),
        ({"local_sgd": {"enabled": True, "sync_every": 2, "fragments": 3}}, "local_sgd.fragments"),
        ({"local_sgd": {"enabled": True, "sync_every": 4, "overlap_steps": 4}}, "local_sgd.overlap_steps"),
        ({"local_sgd": {"enabled": True, "overlap_mixing": 0.5}}, "local_sgd.overlap_mixing"),
        ({"local_sgd": {"outer_optimizer": {"type": "Average", "lr": 1.0}}}, "local_sgd.outer_optimizer.lr"),
    ],
)
def test_refused_settings(config: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError, match=path):
        resolve({"train_batch_size": 8, "local_sgd": {"enabled": True}, **config}, world_size=4)


@on_ranks(2)
def test_refused_models() -> None:
    with pytest.raises(ConflictError, match="fragments: is 50"):
        engine_of(1, fragments=50)
    model = CASE.make()
    config = {"train_micro_batch_size_per_gpu": 2, "local_sgd": {"enabled": True, "replica_size": 1}}
    with pytest.raises(ConflictError, match="one value of state per element"):
        shardwise.initialize(model=model, config={**config, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}})
    layers = PipelineModule([nn.Linear(4, 4)], num_stages=1, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ConflictError, match="this model is a pipeline"):
        shardwise.initialize(model=layers, config={**config, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})


@on_ranks(1)
def test_one_replica_has_an_outer_optimizer_too() -> None:
    engine = engine_of(2, size=None, sync_every=2, quantize_bits=4)
    as_simulated(engine, Simulated([[0]], "AdamW", 2, nesterov), range(6))
    assert not across(engine)
