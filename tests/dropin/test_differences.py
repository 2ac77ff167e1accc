"""Each row of docs/migrating.md is true: a test here, or in a file of `ELSEWHERE`."""

from __future__ import annotations

import ast
import copy
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from shardwise.config import accept, resolve
from shardwise.errors import (
    AbsentNameError,
    BatchSizeError,
    ConfigError,
    ConflictError,
    NotBuiltError,
    PipelineError,
    UsageError,
)
from shardwise_deepspeed.entries import absent_members
from shardwise_deepspeed.entries import read as read_toml
from shardwise_deepspeed.launcher import job_of
from tests.harness.pool import Pool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "migrating.md"
Facts = dict[str, Any]


def rows() -> list[str]:
    """Identifiers in the first column of the page's tables of differences and traps, in order."""
    text = PAGE.read_text(encoding="utf-8").partition("## Every deliberate difference")[2]
    return re.findall(r"^\| `([a-z0-9-]+)` \|", text, re.MULTILINE)


ELSEWHERE = {
    "buckets": "memory/test_monotone.py",
    "hjson": "config/test_load.py",
    "same-bits": "zero/test_numerics.py",
    "branches": "engine/test_engine.py",
    "idle-step": "engine/test_idle_steps.py",
    "moe-questions": "dropin/test_names.py",
    "atomic-saves": "checkpoint/test_kill.py checkpoint/test_going_on.py",
    "save-dir": "checkpoint/test_failures.py",
    "stuck-ranks": "comm/test_whereabouts.py",
    "failing-rank": "launch/test_failure.py",
    "trap-3": "comms-logger",
    "trap-10": "untested-optimizers",
    "trap-13": "client-state",
    "trap-18": "loss-scale",
    "trap-24": "save-16bit",
    "trap-26": "old-keys",
}
"""Row without a test here -> files below `tests` with the tests, or another row."""


def test_every_row_has_a_test() -> None:
    names = [node.name for node in ast.parse(Path(__file__).read_text()).body if isinstance(node, ast.FunctionDef)]
    here = {name.removeprefix("test_").replace("_", "-") for name in names if name.startswith("test_")}
    assert here - {"every-row-has-a-test"} | ELSEWHERE.keys() == set(rows())
    for place in " ".join(ELSEWHERE.values()).split():
        assert place in here or (ROOT / "tests" / place).exists(), place


# -- what two ranks find ----------------------------------------------------------------------------------------------


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

    torch.manual_seed(0)
    model = model or Net()
    whole = {"train_micro_batch_size_per_gpu": 2, **config}
    if client is None:
        whole["optimizer"] = {"type": kind, "params": {"lr": 1e-2}}
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=whole)[0]
    return deepspeed.initialize(model=model, optimizer=client(model.parameters()), config=whole)[0]


def raised(call: Any) -> str:
    """The class and message of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def stepped(engine: Any, times: int = 1) -> None:
    for _ in range(times):
        engine.backward(engine(INPUT).mean())
        engine.step()


def at_stage(stage: int, directory: str) -> Facts:
    """What one engine shows."""
    import deepspeed

    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    engine = engine_of(zero_optimization=zero)
    optimizer, parameters = engine.optimizer, list(engine.module.parameters())
    found: Facts = {
        "optimizer": isinstance(optimizer, torch.optim.AdamW | shardwise.optim.Adam)
        and isinstance(optimizer, torch.optim.Optimizer),
        "is_deepspeed_optimizer": isinstance(optimizer, deepspeed.DeepSpeedOptimizer),
        "groups": [tuple(p.shape) for p in optimizer.param_groups[0]["params"]],
        "elements": sum(p.numel() for p in parameters),
        "shapes": [tuple(p.shape) for p in parameters],
        "modes": (engine.eval() is engine, engine.train() is engine),
        "read": raised(lambda: parameters[0].sum().item()),
        "state_dict": raised(engine.state_dict) or sorted(engine.state_dict()),
        "module_state_dict": sorted(engine.module_state_dict() or {}),
        "copy": raised(lambda: copy.deepcopy(engine.module)),
        "non_scalar": raised(lambda: engine.backward(engine(INPUT))),
        "no_sync": raised(lambda: engine.no_sync().__enter__()),
        "no_checkpoint": engine.load_checkpoint(f"{directory}/absent"),
        "attributes": [
            name
            for name in ("ds_id", "ds_numel", "ds_shape", "ds_status", "ds_tensor", "all_gather", "partition")
            if hasattr(parameters[0], name)
        ],
        "instance": sorted(vars(parameters[0])),
    }
    engine.inside_no_sync_ctxt = False
    engine.backward(engine(INPUT).mean())
    found["gradients"] = [parameter.grad for parameter in parameters]
    found["optimizer_step"] = raised(optimizer.step)
    optimizer.zero_grad()
    engine.step()
    found["norm"] = (engine.get_global_grad_norm(), float(engine.last_step.grad_norm), engine.last_step.lr)
    gathered = deepspeed.zero.GatheredParameters
    if stage == 3:
        with gathered(parameters):
            before = parameters[0].detach().clone()
        with gathered([torch.ones(2), *parameters]), torch.no_grad():
            parameters[0].add_(1.0)
        with gathered(parameters):
            found["dropped"] = torch.equal(parameters[0].detach(), before)
            found["nested"] = raised(lambda: gathered(parameters).__enter__())
    engine.save_16bit_model(f"{directory}/weights{stage}")
    engine.save_16bit_model(f"{directory}/weights{stage}", "pytorch_model.bin")
    state = {"mine": 1, "module": 2, "checkpoint_parallel_dimensions": 3, "global_samples": 4}
    engine.save_checkpoint(f"{directory}/saved{stage}", client_state=state)
    found["client_state"] = engine.load_checkpoint(f"{directory}/saved{stage}")[1] == state
    torch.distributed.barrier()
    for name in ("weights", "saved"):
        found[name] = sorted(path.name for path in Path(f"{directory}/{name}{stage}").rglob("*") if path.is_file())
    engine.destroy()
    return found


def stages(directory: str) -> Facts:
    return {str(stage): at_stage(stage, directory) for stage in range(4)}


def accumulated(stage: int, **config: Any) -> float:
    """A gradient of 1 and 63 of 2^-9, added up in 64 micro-batches of a bf16 model."""
    model = Slope()
    engine = engine_of(
        model,
        "SGD",
        gradient_accumulation_steps=64,
        bf16={"enabled": True},
        zero_optimization={"stage": stage},
        **config,
    )
    for step in range(64):
        value = 1.0 if step == 0 else 2.0**-9
        engine.backward(engine(torch.full((4,), value, dtype=torch.bfloat16)).float() * 64)
        if step == 63:
            gradient = shardwise.utils.safe_get_full_grad(model.weight)
            assert gradient is not None
            found = float(gradient[0])
        engine.step()
    engine.destroy()
    return found


def scaled_gradient() -> tuple[float, float]:
    """A gradient as it is read with fp16, and the loss scale."""
    model = Slope()
    engine = engine_of(model, "SGD", fp16={"enabled": True, "initial_scale_power": 4})
    engine.backward(engine(torch.full((4,), 2.0, dtype=torch.float16)).float())
    gradient = shardwise.utils.safe_get_full_grad(model.weight)
    assert gradient is not None
    found = float(gradient[0]), engine.cur_scale
    engine.destroy()
    return found


def scales(stage: int) -> tuple[list[float], list[int], str]:
    """Loss scales after overflows until the run ends, counts of steps, and the error."""
    fp16 = {"enabled": True, "initial_scale_power": 2, "hysteresis": 2, "min_loss_scale": 2}
    engine = engine_of(fp16=fp16, zero_optimization={"stage": stage})
    seen: list[float] = []

    def overflow() -> None:
        for _ in range(5):
            engine.backward(engine(INPUT.half()).float().mean() * float("inf"))
            engine.step()
            seen.append(engine.cur_scale)

    error = raised(overflow)
    counts = [engine.global_steps, engine.skipped_steps]
    engine.destroy()
    return seen, counts, error


def rates() -> list[float]:
    """Learning rates of the first updates of a warm-up."""
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 10, "warmup_type": "linear"}}
    engine = engine_of(scheduler=schedule)
    found = []
    for _ in range(3):
        stepped(engine)
        assert engine.last_step is not None
        found.append(engine.last_step.lr[0])
    engine.destroy()
    return found


def counting() -> Facts:
    """Boundaries of accumulation, and what backward returns."""
    engine = engine_of(gradient_accumulation_steps=2)
    loss = engine(INPUT).mean()
    returned = engine.backward(loss)
    engine.step()
    found: Facts = {"returned": float(returned.detach() / loss.detach()), "after_one": engine.global_steps}
    stepped(engine)
    found["after_two"] = engine.global_steps
    engine.set_gradient_accumulation_boundary(True)
    stepped(engine, 2)
    found["declared"] = engine.global_steps
    found["module"] = engine.note
    found["getters"] = (type(engine.config) is dict, engine.train_batch_size(), engine.is_compiled)
    found["data_type"] = str(engine.communication_data_type)
    engine.destroy()
    return found


def casts() -> Facts:
    """Types in bf16, and of fp16 with auto_cast."""
    engine = engine_of(bf16={"enabled": True})
    module = engine.module
    found: Facts = {
        "types": (str(module.first.weight.dtype), str(module.scale.dtype)),
        "input": raised(lambda: engine(INPUT)),
    }
    engine.destroy()
    engine = engine_of(fp16={"enabled": True, "auto_cast": True})
    found["auto_cast"] = raised(lambda: engine(INPUT))
    engine.destroy()
    return found


def defaults() -> Facts:
    """What configurations lead to."""
    import deepspeed.comm as dist

    dist.comms_logger.comms_dict = {}
    engine = engine_of(comms_logger={"enabled": False}, steps_per_print=float("inf"))
    stepped(engine)
    found: Facts = {
        "clipping": engine.gradient_clipping(),
        "checks": engine._resolution.config.bf16.check_grad_overflow,
        "logged": len(dist.comms_logger.comms_dict),
    }
    engine.destroy()
    engine = engine_of(client=Own, zero_optimization={"stage": 2})
    stepped(engine)
    found["own"] = type(engine.optimizer).__name__
    engine.destroy()
    for kind, config in (
        ("Lamb", {"fp16": {"enabled": True, "loss_scale": 128}}),
        ("OneBitAdam", {"zero_optimization": {"stage": 1}}),
        ("AdamW", {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    ):
        engine = engine_of(kind=kind, **config)
        engine.backward(engine(INPUT.to(next(engine.module.parameters()).dtype)).float().mean())
        engine.step()
        found[kind] = engine.was_step_applied()
        engine.destroy()
    return found


def building() -> Facts:
    """What zero.Init does to torch."""
    import deepspeed
    from deepspeed.runtime.zero import partition_parameters

    before = (torch.empty, torch.zeros, torch.arange)
    calls: list[int] = []
    wrapper = partition_parameters.zero_wrapper_for_fp_tensor_constructor
    partition_parameters.zero_wrapper_for_fp_tensor_constructor = lambda *a, **k: calls.append(1)
    try:
        with deepspeed.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
            same = (torch.empty, torch.zeros, torch.arange) == before
            model = Net()
            # Inside of the context, as frameworks do.
            engine = engine_of(model, zero_optimization={"stage": 3})
            plain = torch.ones(3, 3)
    finally:
        partition_parameters.zero_wrapper_for_fp_tensor_constructor = wrapper
    stepped(engine)
    engine.destroy()
    return {"same": same, "calls": len(calls), "plain": tuple(plain.shape)}


def found_by_ranks(directory: str) -> Facts:
    shardwise.install_as_deepspeed()
    return {
        **stages(directory),
        "accumulated": [accumulated(0), accumulated(2), accumulated(2, data_types={"grad_accum_dtype": "bf16"})],
        "scaled_gradient": scaled_gradient(),
        "scales": [scales(0), scales(1)],
        "rates": rates(),
        "counting": counting(),
        "casts": casts(),
        "defaults": defaults(),
        "building": building(),
    }


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Facts]:
    """All of the above, once, on two ranks that see shardwise as DeepSpeed."""
    pool = Pool()
    directory = str(tmp_path_factory.mktemp("differences"))
    yield pool.run(found_by_ranks, 2, (directory,), {}, 120, True)[0]
    pool.close()


def accepted(**config: Any) -> Any:
    return resolve({"train_batch_size": 8, **config}, world_size=2)


def as_deepspeed(**config: Any) -> Any:
    """What a configuration means with `import deepspeed`."""
    return resolve(accept({"train_batch_size": 8, **config}), world_size=2)


# -- configuration ----------------------------------------------------------------------------------------------------


def test_unknown_keys() -> None:
    typo = {"gradient_clipp1ng": 1.0}
    for read in (accepted, as_deepspeed):
        with pytest.raises(ConfigError, match="gradient_clipp1ng: unknown key; did you mean `gradient_clipping`"):
            read(**typo)
    unknown = {"seed": 1, "bf16": {"enabled": True, "loss_scale": 0}, "optimizer": {"type": "Adam", "lr": 0.1}}
    assert {note.path for note in as_deepspeed(**unknown).ignored} == {"seed", "bf16.loss_scale", "optimizer.lr"}
    with pytest.raises(ConfigError, match="3 problems"):
        accepted(**unknown)


def test_other_stages() -> None:
    moved = {"device": "cpu"}
    for stage, name, value in (
        (2, "offload_param", moved),
        (0, "offload_optimizer", moved),
        (1, "cpu_offload_param", True),
    ):
        found = as_deepspeed(zero_optimization={"stage": stage, name: value})
        assert [note.path for note in found.ignored] == [f"zero_optimization.{name}"]
        with pytest.raises(ConflictError, match=r"needs `zero_optimization\.stage`"):
            accepted(zero_optimization={"stage": stage, name: value})
    zeropp = {"stage": 2, "zero_quantized_gradients": True, "zero_hpz_partition_size": 8}
    assert len(as_deepspeed(zero_optimization=zeropp).ignored) == 2


def test_switched_off() -> None:
    found = as_deepspeed(fp16={"enabled": False, "loss_scale": "x"}, elasticity={"micro_batch_sizes": "2,4"})
    assert [note.path for note in found.ignored] == ["fp16.loss_scale"]


def test_zero_values() -> None:
    fp16 = {"enabled": True, "min_loss_scale": 0, "hysteresis": 0}
    found = as_deepspeed(fp16=fp16, gradient_clipping=-1, steps_per_print="inf")
    config = found.config
    assert (config.fp16.min_loss_scale, config.fp16.hysteresis) == (2.0**-24, 1)
    assert (config.gradient_clipping, config.steps_per_print) == (0, None) and len(found.ignored) == 4
    assert as_deepspeed(zero_optimization={"stage": 3, "sub_group_size": 0}).ignored


def test_node_local() -> None:
    assert "one directory" in as_deepspeed(checkpoint={"use_node_local_storage": True}).ignored[0].reason
    assert "one directory" in accepted(checkpoint={"use_node_local_storage": True}).warnings[0]


def test_auto() -> None:
    found = accepted(gradient_clipping="auto", prescale_gradients="auto", zero_optimization={"stage": "auto"})
    assert found.config.gradient_clipping == 0 and found.config.zero_optimization.stage == 0
    noted = {note.path for note in found.notes if note.reason}
    assert noted >= {"gradient_clipping", "prescale_gradients", "zero_optimization.stage"}


def test_clipping_default(facts: Facts) -> None:
    assert facts["defaults"]["clipping"] == 0
    assert accepted(gradient_clipping=1.0).config.gradient_clipping == 1


def test_overflow_default(facts: Facts) -> None:
    assert facts["defaults"]["checks"] is False


def test_accumulation_dtype(facts: Facts) -> None:
    assert facts["accumulated"] == [1.123046875, 1.123046875, 1.0]


def test_comms_logger(facts: Facts) -> None:
    assert facts["defaults"]["logged"] == 0


def test_overlap() -> None:
    for given in (True, False):
        found = accepted(zero_optimization={"stage": 2, "overlap_comm": given})
        assert [note.path for note in found.no_effect] == ["zero_optimization.overlap_comm"]


def test_tuning_keys() -> None:
    keys = ("contiguous_gradients", "reduce_scatter", "allgather_partitions", "round_robin_gradients")
    sizes = ("sub_group_size", "stage3_max_reuse_distance")
    found = accepted(zero_optimization={"stage": 3, **dict.fromkeys(keys, False), **dict.fromkeys(sizes, 5e8)})
    assert {note.path for note in found.no_effect} == {f"zero_optimization.{name}" for name in (*keys, *sizes)}
    assert all(note.reason for note in found.no_effect)


def test_persistence() -> None:
    zero = accepted(zero_optimization={"stage": 3}).config.zero_optimization
    assert zero.stage3_param_persistence_threshold is None and zero.stage3_prefetch_bucket_size is None


def test_untested_optimizers(facts: Facts) -> None:
    assert facts["defaults"]["own"] == "Own"
    found = accepted(zero_allow_untested_optimizer=True)
    assert [note.path for note in found.read_by_clients] == ["zero_allow_untested_optimizer"] and not found.no_effect


def test_old_keys() -> None:
    off = {
        name: {"enabled": False}
        for name in ("amp", "elasticity", "curriculum_learning", "nebula", "progressive_layer_drop", "eigenvalue")
    }
    accepted(**off, graph_harvesting=False, sparse_gradients=True, zero_optimization={"stage": 1, "grad_hooks": True})
    assert accepted(optimizer={"type": "OneBitLamb", "params": {"lr": 0.1}}).config.optimizer.type == "onebitlamb"


def test_not_built() -> None:
    with pytest.raises(NotBuiltError, match="GPUDirect Storage; switch it off"):
        accepted(aio={"use_gds": True})
    lenient = resolve(accept({"train_batch_size": 1, "aio": {"use_gds": True}, "compile": {"deepcompile": True}}))
    assert [note.path for note in lenient.ignored] == ["aio.use_gds", "compile.deepcompile"]


def test_prints_less() -> None:
    keys = {"graph_harvesting": True}
    warned = accepted(**keys).warnings
    assert [warning.partition(":")[0] for warning in warned] == [*keys]


def test_fewer_exclusions(facts: Facts) -> None:
    assert [facts["defaults"][kind] for kind in ("Lamb", "OneBitAdam", "AdamW")] == [True, True, True]
    with pytest.raises(ConflictError, match="stage 0 or 1"):
        accepted(optimizer={"type": "OneBitAdam", "params": {}}, zero_optimization={"stage": 2})


def test_contradictions() -> None:
    with pytest.raises(ConflictError, match="leave them out"):
        accepted(managed_gradient_accumulation=False, gradient_accumulation_steps=4)
    for more in ({"prescale_gradients": True}, {"gradient_predivide_factor": 2.0}):
        with pytest.raises(ConflictError, match="divides by nothing"):
            accepted(gradient_allreduce_op="sum", **more)


def test_quoted_numbers() -> None:
    with pytest.raises(ConfigError, match=r"0\.001"):
        accepted(optimizer={"type": "AdamW", "params": {"lr": "0.001"}})
    assert accepted(zero_optimization={"reduce_bucket_size": "5e8"}).config.zero_optimization.reduce_bucket_size == 5e8


def test_no_warmup() -> None:
    accepted(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 0}})


def test_warmup_type() -> None:
    with pytest.raises(ConfigError, match='expected one of "log", "linear"'):
        accepted(scheduler={"type": "WarmupLR", "params": {"warmup_type": "logarithmic"}})


def test_exceptions(facts: Facts) -> None:
    with pytest.raises(ValueError, match="2 problems"):
        accepted(zero_optimization={"stage": 4}, fp61={})
    assert issubclass(ConflictError, AssertionError) and issubclass(BatchSizeError, AssertionError)
    with pytest.raises(AssertionError, match="both true"):
        accepted(fp16={"enabled": True}, bf16={"enabled": True})
    with pytest.raises(AssertionError, match="batch related parameters"):
        accepted(train_micro_batch_size_per_gpu=3)
    assert facts["0"]["non_scalar"].startswith("NotScalarError: ") and issubclass(UsageError, RuntimeError)
    assert facts["2"]["no_sync"].startswith("SyncError: ") and not facts["1"]["no_sync"]
    assert issubclass(ConfigError, shardwise.errors.ShardwiseError)
    assert issubclass(UsageError, shardwise.errors.ShardwiseError)


# -- the engine -------------------------------------------------------------------------------------------------------


def test_optimizer_object(facts: Facts) -> None:
    for stage in "0123":
        assert facts[stage]["optimizer"] and facts[stage]["is_deepspeed_optimizer"]


def test_optimizer_step(facts: Facts) -> None:
    for stage in "0123":
        assert facts[stage]["optimizer_step"].startswith("UsageError: ")
        assert "engine.step()" in facts[stage]["optimizer_step"]
        # The optimizer's zero_grad() before the engine's step has dropped nothing.
        assert facts[stage]["norm"][0] > 0


def test_param_groups(facts: Facts) -> None:
    for stage, ranks in (("0", 1), ("1", 2), ("2", 2), ("3", 2)):
        shapes, elements = facts[stage]["groups"], facts[stage]["elements"]
        assert all(len(shape) == 1 for shape in shapes)
        assert elements / ranks < sum(shape[0] for shape in shapes) < elements / ranks + 16 * 4 * len(shapes)


def test_first_rates(facts: Facts) -> None:
    assert facts["rates"] == pytest.approx([0.0, 0.001, 0.002])


def test_loss_scale(facts: Facts) -> None:
    for seen, counts, error in facts["scales"]:
        # The first overflow is tolerated, the second halves the scale, the third ends the run.
        assert (seen, counts) == ([4.0, 2.0], [2, 2])
        assert error.startswith("LossScaleError: ") and "fp16.min_loss_scale 2" in error


def test_full_grad(facts: Facts) -> None:
    gradient, scale = facts["scaled_gradient"]
    assert (gradient, scale) == (2.0, 16.0)


def test_train_mode(facts: Facts) -> None:
    assert all(facts[stage]["modes"] == (True, True) for stage in "0123")


def test_state_dict(facts: Facts) -> None:
    names = ["first.bias", "first.weight", "last.bias", "last.weight", "scale"]
    for stage in "012":
        assert facts[stage]["state_dict"] == [f"module.{name}" for name in names]
    assert facts["3"]["state_dict"].startswith("ReleasedParameterError: ")
    assert "engine.module_state_dict()" in facts["3"]["state_dict"]
    assert all(facts[stage]["module_state_dict"] == names for stage in "0123")


def test_coalesce() -> None:
    assert not hasattr(shardwise.Engine, "coalesce_grad_reduction")
    assert "no_sync" in absent_members("deepspeed.DeepSpeedEngine")["coalesce_grad_reduction"]


def test_grad_norm(facts: Facts) -> None:
    for stage in "0123":
        norm, of_the_step, used = facts[stage]["norm"]
        assert norm == of_the_step and used == (1e-2,)


# -- stage 3 ----------------------------------------------------------------------------------------------------------


def test_parameter_shape(facts: Facts) -> None:
    assert facts["3"]["shapes"] == facts["0"]["shapes"] == [(8, 6), (8,), (3, 8), (3,)]


def test_parameter_state(facts: Facts) -> None:
    assert facts["3"]["attributes"] == ["ds_id", "ds_numel", "ds_shape", "ds_status"]
    assert facts["3"]["instance"] == [] and facts["0"]["attributes"] == []


def test_reading_outside(facts: Facts) -> None:
    assert facts["3"]["read"].startswith("ReleasedParameterError: ")
    assert "'first.weight'" in facts["3"]["read"] and "GatheredParameters(" in facts["3"]["read"]
    assert facts["2"]["read"] == ""


def test_zero_init(facts: Facts) -> None:
    assert facts["building"] == {"same": True, "calls": 0, "plain": (3, 3)}


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoint_format(facts: Facts) -> None:
    for stage in "0123":
        assert {Path(name).suffix for name in facts[stage]["saved"]} == {".safetensors", ".json", ""}


def test_client_state(facts: Facts) -> None:
    assert all(facts[stage]["client_state"] for stage in "0123")


def test_save_16bit(facts: Facts) -> None:
    for stage in "0123":
        assert facts[stage]["weights"] == ["model.safetensors", "pytorch_model.bin"]


# -- around it --------------------------------------------------------------------------------------------------------


def test_import() -> None:
    code = (
        "import shardwise, sys; shardwise.install_as_deepspeed(); import deepspeed\n"
        "print('torch' in sys.modules, any(name.startswith('triton') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.usefixtures("installed")
def test_absent_names() -> None:
    import deepspeed

    with pytest.raises(AbsentNameError, match="inference is not built yet"):
        deepspeed.InferenceEngine(model=None)
    assert not hasattr(deepspeed.comm, "cdb")
    with pytest.raises(AbsentNameError, match="DeepSpeed's own backends"):
        from deepspeed.comm import cdb  # noqa: F401


@pytest.mark.usefixtures("installed")
def test_one_logger() -> None:
    from deepspeed.utils import logger

    level = logging.getLogger("shardwise").level
    logger.setLevel(logging.ERROR)
    assert logging.getLogger("shardwise").level == logging.ERROR
    logging.getLogger("shardwise").setLevel(level)


def test_estimates() -> None:
    from shardwise_deepspeed.estimates import estimate_zero2_model_states_mem_needs as estimate

    _, device = estimate(total_params=10**9, num_gpus_per_node=1, num_nodes=1, cpu_offload=False)
    assert device == 18 * 10**9


def test_one_machine() -> None:
    assert job_of(["--num_gpus", "2", "train.py"]).resources.nproc == 2
    assert {"no_ssh", "force_multi"} <= set(read_toml("options.toml")["deepspeed"]["refused"])


# -- traps ------------------------------------------------------------------------------------------------------------


def test_trap_1() -> None:
    from shardwise.optim import build

    weight = nn.Parameter(torch.ones(2))
    for options, decoupled in (({}, True), ({"adam_w_mode": False}, False)):
        made = build("adam", [weight], options, device=torch.device("cpu"), named=[], parameter_dtype=None)
        assert made.param_groups[0]["decoupled_weight_decay"] is decoupled


def test_trap_2() -> None:
    assert accepted().config.steps_per_print is None


def test_trap_4() -> None:
    for stage in range(4):
        assert accepted(zero_optimization={"stage": stage}).config.zero_optimization.overlap_comm is True


def test_trap_5(facts: Facts) -> None:
    assert facts["counting"]["returned"] == 0.5


def test_trap_6(facts: Facts) -> None:
    assert (facts["counting"]["after_one"], facts["counting"]["after_two"]) == (0, 1)
    assert [counts for _, counts, _ in facts["scales"]] == [[2, 2], [2, 2]]


def test_trap_7(facts: Facts) -> None:
    assert facts["counting"]["declared"] == 3


def test_trap_8(facts: Facts) -> None:
    assert facts["counting"]["module"] == "of the module"
    assert all(name.startswith("module.") for name in facts["1"]["state_dict"])


def test_trap_9(facts: Facts) -> None:
    assert facts["counting"]["getters"] == (True, 8, False)
    assert facts["counting"]["data_type"] == "torch.float32"


def test_trap_11() -> None:
    with pytest.raises(ConfigError, match='"auto" has no meaning here'):
        accepted(amp={"enabled": False, "opt_level": "O1"}, autotuning={"arg_mappings": {"lr": "auto"}})


def test_trap_12() -> None:
    section = {"device": "none", "nvme_path": None}
    found = accepted(
        steps_per_print=float("inf"),
        zero_optimization={"stage": 3, "reduce_bucket_size": 5e8, "offload_param": section},
    )
    assert found.config.zero_optimization.reduce_bucket_size == 500_000_000


def test_trap_14(facts: Facts) -> None:
    patterns = [re.sub(r"[0-9a-f]{8}\.", ".", name) for name in facts["0"]["saved"]]
    for stage in "123":
        assert [re.sub(r"[0-9a-f]{8}\.", ".", name) for name in facts[stage]["saved"]] == patterns


def test_trap_15(facts: Facts) -> None:
    assert facts["casts"]["types"] == ("torch.bfloat16", "torch.float32")
    assert facts["casts"]["input"].startswith("UsageError: ") and "inputs are float32" in facts["casts"]["input"]
    assert facts["casts"]["auto_cast"] == ""


def test_trap_16(facts: Facts) -> None:
    assert facts["3"]["dropped"] and facts["3"]["nested"].startswith("UsageError: ")


def test_trap_17(facts: Facts) -> None:
    # The engine was made inside of the context.
    assert facts["building"]["same"]


def test_trap_19(facts: Facts) -> None:
    assert all(facts[stage]["gradients"] == [None] * 4 for stage in "0123")


def test_trap_20() -> None:
    from shardwise import Engine
    from shardwise.engine import PipelineEngine

    for call in (PipelineEngine.forward, PipelineEngine.backward, PipelineEngine.step):
        with pytest.raises(PipelineError, match=r"engine\.train_batch\(\)"):
            call(mock.Mock(spec=PipelineEngine))
    assert not hasattr(Engine, "train_batch")


def test_trap_21() -> None:
    found = accepted(aio={"thread_count": 4})
    assert found.config.aio.intra_op_parallelism == 4 and "aio.thread_count" in found.warnings[0]
    assert accepted(aio={"thread_count": 1}).warnings == []  # as Lightning always writes


def test_trap_22() -> None:
    found = accepted(elasticity={"prefer_large_batch": True}, zero_optimization={"grad_hooks": True})
    assert found.config.elasticity.prefer_larger_batch


def test_trap_23() -> None:
    assert job_of(["--num_gpus", "2", "train.py"]).local_rank
    assert not job_of(["--no_local_rank", "train.py"]).local_rank


def test_trap_25(facts: Facts) -> None:
    assert all(facts[stage]["no_checkpoint"] == (None, None) for stage in "0123")
