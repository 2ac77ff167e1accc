"""Compression in engines, against a loop in one process that writes each method out."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.comm.fake import FakeCommunicator
from shardwise.compression import Compression, init_compression, redundancy_clean
from shardwise.errors import CheckpointError, ConfigError, ConflictError, DesyncError, UsageError
from shardwise.pipeline.module import PipelineModule
from shardwise.recompute import checkpoint
from tests.compression.test_quantize import plain as rounded
from tests.harness import on_ranks, run_ranks, thorough
from tests.harness.training import config_of, each, goes_on, masters

STEPS, ROWS = 5, 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


def made() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(11, (ROWS, 3), generator=generator), torch.randn(ROWS, 3, 4, generator=generator)


def method(groups: Any, **shared: Any) -> dict[str, Any]:
    return {
        "shared_parameters": {"enabled": True, **shared},
        "different_groups": {
            name: {"params": params, "modules": modules} for name, (modules, params) in groups.items()
        },
    }


SECTIONS: dict[str, dict[str, Any]] = {
    "weights": {
        "weight_quantization": method(
            {
                "falling": (["up", "words"], {"start_bits": 6, "target_bits": 4, "quantization_period": 2}),
                "binary": (["down"], {"start_bits": 1, "target_bits": 1}),
            },
            schedule_offset=1,
            quantize_groups=2,
        )
    },
    "mixed": {
        "weight_quantization": method(
            {"all": (["*"], {"start_bits": 3, "target_bits": 3})},
            quantization_type="asymmetric",
            fp16_mixed_quantize={"enabled": True, "quantize_change_ratio": 0.3},
        )
    },
    "inputs": {
        "activation_quantization": method(
            {"some": (["up", "head"], {"bits": 4})}, schedule_offset=1, quantization_type="asymmetric"
        )
    },
    "static": {
        "activation_quantization": method(
            {"some": (["down"], {"bits": 4})}, schedule_offset=2, range_calibration="static"
        )
    },
    "sparse": {"sparse_pruning": method({"some": (["up", "down"], {"dense_ratio": 0.4})}, schedule_offset=2)},
    "movement": {
        "sparse_pruning": method({"some": (["up"], {"dense_ratio": 0.5})}, schedule_offset=0, method="topk"),
        "row_pruning": method({"some": (["up"], {"dense_ratio": 0.6})}, schedule_offset=2, method="topk"),
    },
    "heads": {
        "head_pruning": method({"some": (["down"], {"dense_ratio": 0.5})}, schedule_offset=1, method="l1", num_heads=4),
        "weight_quantization": method({"some": (["down"], {"start_bits": 8, "target_bits": 8})}),
    },
}


class Plain:
    """One process with the global batch; each method is written out in `weight` and `inputs`."""

    def __init__(self, kind: str, ranks: int) -> None:
        self.kind, self.ranks, self.net = kind, ranks, made()
        self.masks: dict[str, torch.Tensor] = {}
        self.bounds: torch.Tensor | None = None
        self.scores: dict[str, nn.Parameter] = {}
        up = self.net.up.weight.detach()
        if kind == "movement":
            self.scores = {"sparse": nn.Parameter(up.abs()), "row": nn.Parameter(up.abs().mean(1))}
        self.optimizer = torch.optim.SGD([*self.net.parameters(), *self.scores.values()], lr=0.2)

    @staticmethod
    def top(sizes: torch.Tensor, ratio: float) -> torch.Tensor:
        count = round(ratio * sizes.numel())
        limit = sizes.detach().flatten().sort(descending=True).values[count - 1]
        return (sizes.detach() >= limit).to(sizes.dtype)

    def straight(self, values: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        return values + (found.to(values.dtype) - values).detach()

    def quantize(self, values: torch.Tensor, bits: int, symmetric: bool, groups: int) -> torch.Tensor:
        parts = values.detach().flatten().chunk(groups)
        return torch.cat([rounded(part, bits, symmetric) for part in parts]).view(values.shape).to(values.dtype)

    def weight(self, name: str, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        layer = getattr(self.net, name)
        weight, bias = layer.weight, getattr(layer, "bias", None)
        if self.kind == "weights" and step >= 1 and name in ("up", "words", "down"):
            bits = 1 if name == "down" else max(4, 6 - (step - 1) // 2)
            weight = self.straight(weight, self.quantize(weight, bits, True, 2))
        if self.kind == "mixed" and name != "words":
            part = min(1.0, 0.3 * (step + 1))
            mean = (1 - part) * weight.detach() + part * self.quantize(weight, 3, False, 1)
            weight = self.straight(weight, mean)
        if self.kind == "sparse" and step >= 2 and name in ("up", "down"):
            if name not in self.masks:
                self.masks[name] = self.top(weight.abs(), 0.4)
            weight = weight * self.masks[name]
        if self.kind == "movement" and name == "up":
            for number, (key, ratio) in enumerate({"sparse": 0.5, "row": 0.6}.items()):
                if step >= 2 * number:
                    mask = self.straight(self.scores[key], self.top(self.scores[key], ratio))
                    weight = weight * (mask if number == 0 else mask.unsqueeze(1))
                    bias = bias if number == 0 else bias * mask
        if self.kind == "heads" and name == "down":
            if step >= 1:
                if name not in self.masks:
                    sizes = weight.detach().abs().view(6, 4, 2).mean((0, 2))
                    self.masks[name] = self.top(sizes, 0.5).repeat_interleave(2)
                weight = weight * self.masks[name]
            weight = self.straight(weight, self.quantize(weight, 8, True, 1))
        return weight, bias

    def inputs(self, name: str, x: torch.Tensor, step: int) -> torch.Tensor:
        if self.kind == "inputs" and name in ("up", "head") and step >= 1:
            tokens = x.flatten(0, -2)
            return self.straight(x, torch.stack([rounded(token, 4, False) for token in tokens]).view(x.shape))
        if self.kind == "static" and name == "down":
            seen = torch.stack([x.detach().min(), x.detach().max()])
            bounds, self.seen = self.bounds, seen
            if step >= 2:
                assert bounds is not None
                size = bounds.abs().max()
                near = x.clamp(-size, size)
                return self.straight(near, ((near / size * 7).round() / 7 * size))
        return x

    def layer(self, name: str, x: torch.Tensor, step: int) -> torch.Tensor:
        return F.linear(self.inputs(name, x, step), *self.weight(name, step))

    def step(self, step: int) -> float:
        pairs = [batch(step, rank) for rank in range(self.ranks)]
        x = F.embedding(torch.cat([tokens for tokens, _ in pairs]), self.weight("words", step)[0])
        x = self.layer("head", x + self.layer("down", F.gelu(self.layer("up", x, step)), step), step)
        loss = (x - torch.cat([target for _, target in pairs])).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.kind == "static":
            self.bounds = self.seen if self.bounds is None else 0.9 * self.bounds + 0.1 * self.seen
        return float(loss.detach())


def engine_of(kind: str, stage: int, **config: Any) -> Any:
    sgd = {"type": "SGD", "params": {"lr": 0.2}}
    source = config_of(stage, sgd, rows=ROWS, compression_training=SECTIONS[kind], **config)
    return shardwise.initialize(model=made(), config=source)[0]


def train(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens, target = batch(step, dist.get_rank())
        loss = (engine(tokens).float() - target).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def as_plain(kind: str, stage: int) -> None:
    engine = engine_of(kind, stage)
    reference = Plain(kind, dist.get_world_size())
    for step in range(STEPS):
        found = torch.tensor(train(engine, range(step, step + 1)))
        dist.all_reduce(found)
        assert abs(float(found) / dist.get_world_size() - reference.step(step)) < 1e-5, (kind, stage, step)
    own = masters(engine.module)
    for name, expected in reference.net.named_parameters():
        assert torch.allclose(own[name], expected, atol=2e-5), (kind, stage, name)
    for key, expected in reference.scores.items():
        assert torch.allclose(own[f"up.{key}_scores"], expected, atol=2e-5)
    if kind == "static":
        assert torch.allclose(engine.module.down.input_bounds, reference.bounds, atol=1e-5)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [("static", 3), ("movement", 3)]),
        (2, [(kind, 3) for kind in SECTIONS]),
        thorough(2, [("weights", 0), ("sparse", 1), ("movement", 2)]),
    ],
)
def test_each_method_trains_as_written_out(ranks: int, cases: list[tuple[str, int]]) -> None:
    run_ranks(each, ranks, as_plain, cases)


@pytest.mark.parametrize("stage", [thorough(stage) for stage in range(4)])
def test_each_method_trains_as_written_out_at_each_stage(stage: int) -> None:
    run_ranks(each, 2, as_plain, [(kind, stage) for kind in SECTIONS])


@pytest.mark.parametrize("kinds", [("static", "movement"), thorough(("mixed", "sparse"))])
@on_ranks(2)
def test_resuming_is_as_never_stopping(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    for number, kind in enumerate(kinds):

        def begin(again: bool, kind: str = kind, second: int = number) -> Any:
            engine = engine_of(kind, second if again else 3)
            train(engine, range(7, 8 if again else 7))  # what has to be forgotten
            return engine

        goes_on(begin, lambda engine, *steps: train(engine, range(*steps)), tmp_path / kind, 3, STEPS).destroy()


@pytest.mark.parametrize("kind", ["sparse", "weights"])
def test_an_engine_of_weights_only_evaluates_the_compressed_model(kind: str, tmp_path: Path) -> None:
    engine, tokens = engine_of(kind, 0), batch(9, 0)[0]
    train(engine, range(STEPS))
    engine.save_checkpoint(tmp_path)
    expected = engine.eval()(tokens)
    engine.destroy()
    again = engine_of(kind, 0)
    again.load_checkpoint(tmp_path, load_module_only=True)
    assert torch.equal(again.eval()(tokens), expected)
    again.train()
    train(again, range(1))
    again.save_checkpoint(tmp_path, tag="later")
    last = engine_of(kind, 0)
    last.load_checkpoint(tmp_path, tag="later")
    steps = [compression.step for one in (again, last) if (compression := Compression.of(one.module))]
    assert last.global_steps == 1 and steps == [STEPS + 1] * 2
    if kind == "sparse":
        again.export(tmp_path / "files")
        other = engine_of(kind, 0)
        other.load_weights(tmp_path / "files")
        assert torch.equal(other.eval()(tokens), again.eval()(tokens))


def test_stages_give_equal_bits_also_in_low_precision_and_with_accumulation() -> None:
    run_ranks(_equal_bits, 2)


def _equal_bits() -> None:
    for kind, more in (("sparse", {}), ("weights", {"bf16": {"enabled": True}, "gradient_accumulation_steps": 2})):
        found = []
        for stage in (2, 3):
            engine = engine_of(kind, stage, **more)
            train(engine, range(2 * STEPS))
            found.append(masters(engine.module))
            levels = engine.module.up.weight
            engine.destroy()
            assert len(levels.unique()) > 2**5  # the parameter itself is not rounded to 2 groups of 15 levels
        assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


# -- requests that would do nothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "error", "text"),
    [
        (
            {"weight_quantization": method({"a": (["attention"], {"start_bits": 8, "target_bits": 8})})},
            ConfigError,
            r"different_groups.a.modules: 'attention' matches no linear layer.*The model has words, up, down, head",
        ),
        (
            {"row_pruning": method({"a": (["words"], {"dense_ratio": 0.5})})},
            ConfigError,
            r"row_pruning.different_groups.a.modules: 'words' matches no linear layer",
        ),
        (
            {"sparse_pruning": method({"a": (["up"], {"dense_ratio": 0.5}), "b": (["*"], {"dense_ratio": 0.5})})},
            ConfigError,
            "'up' is in another group of `compression_training.sparse_pruning`",
        ),
        (
            {"weight_quantization": method({"a": (["up"], {"start_bits": 8, "target_bits": 8})}, quantize_groups=7)},
            UsageError,
            r"quantize_groups = 7 does not divide 'up' of shape \[8, 6\]",
        ),
        (
            {"head_pruning": method({"a": (["down"], {"dense_ratio": 0.5})}, num_heads=3)},
            ConfigError,
            "num_heads: 3 heads do not divide the 8 inputs of 'down'",
        ),
        (
            {"sparse_pruning": method({"a": (["*"], {"dense_ratio": 0.5})}, method="snip_momentum")},
            ConfigError,
            'sparse_pruning.shared_parameters.method: is "snip_momentum", .* write "topk"',
        ),
        (
            {"weight_quantization": {"shared_parameters": {"enabled": True}}},
            ConfigError,
            "weight_quantization.different_groups: is empty",
        ),
        (
            {"layer_reduction": {"enabled": True, "other_module_name": ["up"]}},
            UsageError,
            "layer_reduction needs a teacher: call shardwise.compression.init_compression",
        ),
    ],
)
def test_a_request_that_would_do_nothing_is_refused(section: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        shardwise.initialize(model=made(), config={"train_batch_size": 4, "compression_training": section})


def compressed_stage() -> None:
    group = method({"some": (["0"], {"start_bits": 8, "target_bits": 8})})
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    init_compression(model, {"compression_training": {"weight_quantization": group}})
    model = PipelineModule(list(model), num_stages=2, loss_fn=F.mse_loss)
    with pytest.raises(DesyncError if dist.get_rank() else ConflictError, match=r"that of '0' with redundancy_clean"):
        shardwise.initialize(model=model, config={"train_batch_size": 4})


def test_a_stage_that_init_compression_has_prepared_is_refused() -> None:
    run_ranks(compressed_stage, 2)


def test_other_refusals() -> None:
    section = SECTIONS["sparse"]
    pipeline = PipelineModule([nn.Linear(4, 4)], num_stages=1, loss_fn=nn.functional.mse_loss)
    with pytest.raises(ConflictError, match="cannot be combined with a pipeline"):
        shardwise.initialize(model=pipeline, config={"train_batch_size": 4, "compression_training": section})
    config = {"compression_training": SECTIONS["static"]}
    prepared = init_compression(nn.Sequential(OrderedDict(down=nn.Linear(4, 4))), config)
    with pytest.raises(ConflictError, match=r"local_sgd, .*end that of 'down' with redundancy_clean"):
        shardwise.initialize(model=prepared, config={"train_batch_size": 4, "local_sgd": {"enabled": True}})
    pipeline = PipelineModule(redundancy_clean(prepared, config), loss_fn=nn.functional.mse_loss)
    shardwise.initialize(model=pipeline, config={"train_batch_size": 4}).engine.destroy()
    expert = made()
    shardwise.declare_part(expert.up.weight, ranks=[0])
    with pytest.raises(UsageError, match=r"only some ranks have the weight of 'up' \(experts\)"):
        shardwise.initialize(model=expert, config={"train_batch_size": 4, "compression_training": section})
    with pytest.raises(ConflictError, match="cannot be combined with local_sgd"):
        engine_of("sparse", 0, local_sgd={"enabled": True})
    model = init_compression(made(), {"compression_training": section})
    with pytest.raises(UsageError, match="prepared already"):
        init_compression(model, {"compression_training": section})
    with pytest.raises(ConflictError, match="another section than initialize"):
        shardwise.initialize(model=model, config={"train_batch_size": 4, "compression_training": SECTIONS["heads"]})
    with pytest.raises(ConfigError, match="no section `compression_training`"):
        init_compression(made(), {"train_batch_size": 4})
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = {"train_batch_size": 4, "compression_training": SECTIONS["movement"]}
    with pytest.raises(UsageError, match=r"does not have 'up.sparse_scores'"):
        shardwise.initialize(model=model, config=source, optimizer=optimizer)


def test_a_failed_initialize_leaves_the_model_as_it_was() -> None:
    def fails(parameters: Any) -> Any:
        raise RuntimeError("no optimizer")

    section = {**SECTIONS["movement"], **SECTIONS["static"], **SECTIONS["weights"]}
    source = {"train_batch_size": 4, "compression_training": section}
    model, tokens = made(), batch(0, 0)[0]
    names, expected = list(model.state_dict()), model(tokens)
    wrong = {"row_pruning": method({"a": (["up"], {"dense_ratio": 0.5}), "b": (["no"], {"dense_ratio": 0.5})})}
    for config, error in ((source, RuntimeError), ({**source, "compression_training": wrong}, ConfigError)):
        with pytest.raises(error):
            shardwise.initialize(model=model, config=config, optimizer=fails)
        assert Compression.of(model) is None and list(model.state_dict()) == names
        assert torch.equal(model(tokens), expected)
    init_compression(model, source)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shardwise.initialize(model=model, config=source, optimizer=optimizer)[0].destroy()


# -- the schedule and the state ----------------------------------------------------------------------------------------


def test_a_prepared_model_follows_an_engine_without_the_section() -> None:
    model = init_compression(made(), {"compression_training": SECTIONS["sparse"]})
    names = [name for name, _ in made().named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    engine = shardwise.initialize(
        model=model, config={"train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    )[0]
    train(engine, range(2))
    compression = Compression.of(engine.module)
    assert compression is not None and compression.step == 2
    assert not model.down.sparse_mask.eq(0).all()


def test_masks_of_other_weights_are_decided_again(tmp_path: Path) -> None:
    torch.manual_seed(9)
    other = shardwise.initialize(model=Net(), config={"train_batch_size": ROWS})[0]
    other.save_checkpoint(tmp_path)
    section = {"sparse_pruning": method({"a": (["up"], {"dense_ratio": 0.4})}, schedule_offset=0)}
    engine = shardwise.initialize(model=made(), config={"train_batch_size": ROWS, "compression_training": section})[0]
    before = engine.module.up.sparse_mask.clone()
    with pytest.raises(CheckpointError, match=r"up.sparse_mask"):
        engine.load_checkpoint(tmp_path, load_module_only=True)
    engine.load_checkpoint(tmp_path, load_module_only=True, load_module_strict=False)
    after = engine.module.up.sparse_mask.clone()
    engine.load_module_state_dict(made().state_dict(), strict=False)
    assert not torch.equal(before, after)
    assert torch.equal(before, engine.module.up.sparse_mask)


def test_a_mask_of_a_loaded_state_dict_is_kept() -> None:
    section = {"sparse_pruning": method({"a": (["up", "down"], {"dense_ratio": 0.4})}, schedule_offset=1)}
    config = config_of(0, {"type": "SGD", "params": {"lr": 2.0}}, rows=ROWS, compression_training=section)
    tokens = batch(9, 0)[0]
    engine = shardwise.initialize(model=init_compression(made(), config), config=config)[0]
    train(engine, range(4))
    model = engine.module
    engine.destroy()
    state, expected = {name: value.clone() for name, value in model.state_dict().items()}, model(tokens)

    def loaded() -> Any:
        found = init_compression(made(), config)
        found.load_state_dict(state)
        return found

    assert torch.equal(loaded()(tokens), expected)
    assert torch.allclose(redundancy_clean(loaded(), config)(tokens), expected, atol=1e-6)
    again = loaded()
    assert torch.equal(copy.deepcopy(again)(tokens), expected)
    filled = init_compression(made(), config)
    for name, value in state.items():
        filled.state_dict()[name].copy_(value)
    for one in (again, filled):
        engine = shardwise.initialize(model=one, config=config)[0]
        train(engine, range(2))
        assert torch.equal(one.up.sparse_mask, state["up.sparse_mask"])
        engine.destroy()


def loaded_on_first(stage: int) -> list[bool]:
    """Load a mask on the first rank only, which is not that of the weights; return the mask of the engine."""
    section = {"sparse_pruning": method({"a": (["up"], {"dense_ratio": 0.4})}, schedule_offset=0)}
    config = config_of(stage, {"type": "SGD", "params": {"lr": 0.1}}, rows=ROWS, compression_training=section)
    model = init_compression(made(), config)
    if dist.get_rank() == 0:
        state = model.state_dict()
        model.load_state_dict({**state, "up.sparse_mask": ~state["up.sparse_mask"]})
    engine = shardwise.initialize(model=model, config=config)[0]
    train(engine, range(2))
    found = engine.module.up.sparse_mask.tolist()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_masks_are_taken_over_from_the_first_rank(stage: int) -> None:
    first, second = run_ranks(loaded_on_first, 2, stage)
    assert first == second and any(first)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = made(), made()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.first(tokens) + self.second(tokens)


def test_masks_of_a_prepared_part_follow_loaded_weights(tmp_path: Path) -> None:
    section = {"sparse_pruning": method({"a": (["up"], {"dense_ratio": 0.4})}, schedule_offset=0)}
    model, config = Parts(), config_of(0, {"type": "SGD", "params": {"lr": 0.1}}, rows=ROWS)
    init_compression(model.second, {"compression_training": section})
    engine = shardwise.initialize(model=model, config=config)[0]
    before = model.second.up.sparse_mask.clone()
    other = {name: -value.flip(-1) for name, value in Parts().state_dict().items()}
    engine.load_module_state_dict(other, strict=False)
    assert not torch.equal(model.second.up.sparse_mask, before)
    engine.destroy()


def test_two_prepared_parts_are_refused() -> None:
    section = {"compression_training": {"sparse_pruning": method({"a": (["up"], {"dense_ratio": 0.4})})}}
    model = Parts()
    init_compression(model.first, section)
    init_compression(model.second, section)
    with pytest.raises(UsageError, match=r"2 parts of the model \('first', 'second'\). Prepare the whole model once"):
        shardwise.initialize(model=model, config={"train_batch_size": ROWS})


def test_bits_are_logged_and_modules_that_are_not_called_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    section = {
        "weight_quantization": method(
            {"a": (["*"], {"start_bits": 5, "target_bits": 4, "quantization_period": 1})}, quantize_verbose=True
        )
    }
    model = made()
    model.spare = nn.Linear(2, 2)
    init_compression(model, {"compression_training": section})
    compression = Compression.of(model)
    assert compression is not None
    with caplog.at_level("INFO"):
        model(batch(0, 0)[0])
        compression.advance(1)
    assert "step 1: the weight of down is quantized to 4 bits" in caplog.text
    assert "1 modules have not been called (spare)" in caplog.text


def test_stochastic_rounding_is_the_same_on_all_ranks_and_by_step() -> None:
    section = {
        "weight_quantization": method({"a": (["up"], {"start_bits": 3, "target_bits": 3})}, rounding="stochastic")
    }
    models = [init_compression(made(), {"compression_training": section}) for _ in range(2)]
    tokens = batch(0, 0)[0]
    # Numbers of a generator of the CPU would be copied to a device in each forward pass.
    with mock.patch.object(torch, "Generator", side_effect=AssertionError):
        first, again = models[0](tokens), models[1](tokens)
    assert torch.equal(first, again)
    Compression.of(models[1]).advance(1)  # type: ignore[union-attr]
    assert not torch.equal(first, models[1](tokens))


def test_recomputed_blocks_and_models_built_sharded_train_with_equal_bits() -> None:
    run_ranks(_recomputed, 2)


class Recomputed(Net):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        return self.head(x + checkpoint(lambda x: self.down(F.gelu(self.up(x))), x))


def _recomputed() -> None:
    section = {**SECTIONS["movement"], **SECTIONS["static"]}
    section["weight_quantization"] = method(
        {"all": (["up", "down"], {"start_bits": 4, "target_bits": 4})}, rounding="stochastic"
    )
    found = []
    for kind in (Net, Recomputed):
        torch.manual_seed(5)
        with shardwise.zero.Init(enabled=kind is Recomputed):
            model = kind()
        init_compression(model, {"compression_training": section})
        sgd = {"type": "SGD", "params": {"lr": 0.2}}
        source = config_of(3, sgd, rows=ROWS, compression_training=section)
        engine = shardwise.initialize(model=model, config=source)[0]
        train(engine, range(STEPS))
        found.append({**masters(engine.module), "bounds": engine.module.down.input_bounds})
        engine.destroy()
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_exchanged_bounds_do_not_grow_with_the_ranks() -> None:
    found = []
    for world in (2, 8):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        section = {"activation_quantization": method({"a": (["*"], {"bits": 4})}, range_calibration="static")}
        init_compression(model, {"compression_training": section})
        ranks = FakeCommunicator(world, torch.device("cpu"))
        compression = Compression.of(model)
        assert compression is not None
        model(torch.randn(3, 4))
        compression.advance(1, ranks)
        found.append(sum(record.size for record in ranks.ledger.records() if record.label == "input_bounds"))
    assert found[0] == found[1] > 0


# -- the older section -------------------------------------------------------------------------------------------------


def moq(**keys: Any) -> dict[str, Any]:
    section = {
        "enabled": True,
        "quantize_bits": {"start_bits": 6, "target_bits": 3},
        "quantize_schedule": {"quantize_period": 2, "schedule_offset": 1},
        "quantize_groups": 2,
    }
    return {"train_batch_size": ROWS, "quantize_training": {**section, **keys}}


def test_quantize_training_lowers_bits_with_doubling_periods() -> None:
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = shardwise.initialize(model=made(), config={**moq(), **sgd})[0]
    compression = Compression.of(engine.module)
    assert compression is not None and list(compression.modules) == ["up", "down", "head"]
    weights = compression.modules["up"].weights
    assert weights is not None
    assert [None if (now := weights.bits(step)) is None else now[0] for step in range(17)] == [
        *[None, 6, 6, 5, 5, 5, 5, 4, 4, 4, 4, 4, 4, 4, 4, 3, 3]
    ]
    assert compression.last_step == 15
    train(engine, range(2))
    with torch.no_grad():
        out = engine(batch(9, 0)[0])
    engine.destroy()
    assert torch.equal(engine.module(batch(9, 0)[0]), out)


def test_quantize_training_and_its_successor_are_refused_together() -> None:
    both = {**moq(), "compression_training": SECTIONS["weights"]}
    with pytest.raises(ConflictError, match=r"quantize_training: and `compression_training.weight_quantization` both"):
        shardwise.initialize(model=made(), config=both)
    with pytest.raises(
        ConfigError, match=r"quantize_training.eigenvalue.enabled: this version does not have eigenvalue"
    ):
        shardwise.initialize(model=made(), config=moq(eigenvalue={"enabled": True}))
    with pytest.raises(ConflictError, match=r"quantize_bits.target_bits: is 16, above"):
        shardwise.initialize(model=made(), config=moq(quantize_bits={"start_bits": 8, "target_bits": 16}))
