"""Generation between steps of training: gathered once, streamed, or on tensor-parallel copies; adapters merged."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise.config import resolve
from shardwise.errors import ConfigError, UsageError
from tests.harness import RankFailure, run_ranks, thorough
from tests.harness.training import config_of
from tests.inference.models import ARGUMENTS, answers, expected, generating, prompts

NEW = 8
SGD = {"type": "SGD", "params": {"lr": 0.3}}


def adapted(family: str = "llama") -> nn.Module:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_alpha=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers, for what peft reads
        found: nn.Module = peft.get_peft_model(generating(family), settings)
    return found


def step(engine: Any, number: int) -> None:
    ids = torch.arange(3, 11).view(2, 4) + 2 * number + dist.get_rank()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()


def whole(engine: Any, lora: bool) -> Any:
    """Return a plain model with the engine's weights."""
    plain = adapted() if lora else generating("llama")
    plain.load_state_dict(engine.module_state_dict())
    return plain.eval()


def phases(stage: int, lora: bool, section: dict[str, Any], zero: dict[str, Any]) -> Any:
    """Train, answer twice, train, answer; return answers with those of plain models, and collectives of the second."""
    model = adapted() if lora else generating("llama")
    config = config_of(stage, SGD, rows=2, zero=zero, hybrid_engine={"enabled": True, **section})
    engine, *_ = shardwise.initialize(model=model, config=config)
    rows, found, counts = 1 + (dist.get_rank() if section.get("inference_tp_size", 1) == 1 else 0), [], []
    for number in range(2):
        engine.train()
        step(engine, number)
        before = engine.module_state_dict()
        engine.eval()
        for _ in range(2):
            launched = sum(engine.job.launched())
            found.append(answers(engine, rows, "right", NEW))
            counts.append(sum(engine.job.launched()) - launched)
            assert not engine.training
        during = engine.module_state_dict()
        assert all(torch.equal(before[name], during[name]) for name in before)
        engine.train()
        after = engine.module_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        found.append(expected(whole(engine, lora), rows, NEW))
    step(engine, 3)
    trained = engine.module_state_dict()
    engine.destroy()
    return found, counts, trained


@pytest.mark.parametrize(
    ("stage", "lora", "section", "zero"),
    [
        thorough(0, False, {"inference_tp_size": 2}, {}),
        (3, True, {}, {}),
        (3, False, {"inference_tp_size": 2, "pin_parameters": False}, {"offload_param": {"device": "cpu"}}),
        thorough(1, True, {"inference_tp_size": 2}, {}),
        thorough(2, False, {"pin_parameters": False}, {}),
        thorough(3, True, {"inference_tp_size": 2}, {}),
    ],
)
def test_training_and_answers_alternate(stage: int, lora: bool, section: Any, zero: Any) -> None:
    results = run_ranks(phases, 2, stage, lora, section, zero)
    for found, counts, _ in results:
        assert found[0] == found[1] == found[2] and found[3] == found[4] == found[5]
        assert found[0] != found[3]
        if section == {} and stage == 3:  # gathered once
            assert counts[0] > 0 and counts[1] == 0
    for name, values in results[0][2].items():
        assert torch.equal(values, results[1][2][name])


def window(stage: int, section: dict[str, Any], zero: dict[str, Any]) -> Any:
    """Train two windows of two micro-batches, with and without answers between these."""
    results, found = [], []
    for asked in (False, True):
        hybrid = {"enabled": True, **section}
        config = config_of(stage, SGD, rows=2, zero=zero, gradient_accumulation_steps=2, hybrid_engine=hybrid)
        engine, *_ = shardwise.initialize(model=generating("llama").train(), config=config)
        for number in range(4):
            step(engine, number)
            if asked and number % 2 == 0:
                engine.eval()
                found.append(answers(engine, 2, "right", NEW))
                engine.train()
                found.append(answers(engine, 2, "right", NEW))
                found.append(expected(whole(engine, False), 2, NEW))
        results.append(engine.module_state_dict())
        engine.destroy()
    return results, found


@pytest.mark.parametrize(
    ("stage", "section", "zero"),
    [
        (0, {"inference_tp_size": 2}, {}),
        thorough(2, {"pin_parameters": False}, {}),
        (3, {}, {}),
        thorough(3, {"inference_tp_size": 2}, {"offload_param": {"device": "cpu"}}),
    ],
)
def test_answers_between_micro_batches_change_nothing(stage: int, section: Any, zero: Any) -> None:
    for (alone, asked), found in run_ranks(window, 2, stage, section, zero):
        assert all(torch.equal(alone[name], asked[name]) for name in alone)
        assert found[0] == found[1] == found[2] != found[3] and found[3] == found[4] == found[5]


def shared() -> Any:
    """Answer with a model that tensor parallelism divides in training, and after weights were loaded."""
    config = config_of(1, SGD, rows=2, tensor_parallel={"autotp_size": 2}, hybrid_engine={"enabled": True})
    engine, *_ = shardwise.initialize(model=generating("mixtral"), config=config)
    given = torch.arange(3, 11).view(2, 4)
    engine.backward(engine(input_ids=given, labels=given).loss)
    engine.step()
    engine.eval()
    found = answers(engine, 3, "left", 20)
    plain = generating("mixtral")
    plain.load_state_dict(engine.module_state_dict())
    engine.destroy()
    return found, expected(plain, 3, 20)


@pytest.mark.thorough
def test_models_divided_in_training_answer() -> None:
    for found, wanted in run_ranks(shared, 2):
        assert found == wanted


def loaded(stage: int, optimizer: Any) -> Any:
    """Answer by copies before and after weights are loaded, and changed as data."""
    section = {"enabled": True, "inference_tp_size": 2}
    engine, *_ = shardwise.initialize(
        model=generating("llama"), config=config_of(stage, optimizer, rows=2, hybrid_engine=section)
    )
    engine.eval()
    found = [answers(engine, 1, "left", NEW)]
    other = generating("llama", seed=5)
    engine.load_module_state_dict(other.state_dict())
    found += [answers(engine, 1, "left", NEW), expected(other, 1, NEW)]
    weight = engine.module.lm_head.weight
    with shardwise.zero.GatheredParameters(weight, modifier_rank=0):
        weight.data.copy_(weight.data.flip(0))
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.flip(0))
    found += [answers(engine, 1, "left", NEW), expected(other, 1, NEW)]
    engine.destroy()
    return found


@pytest.mark.parametrize("optimizer", [SGD, None])
def test_copies_follow_weights_that_are_loaded_or_changed(optimizer: Any) -> None:
    for before, after, wanted, changed, flipped in run_ranks(loaded, 2, 3, optimizer):
        assert before != after == wanted
        assert wanted != changed == flipped


def refreshed(stage: int, section: dict[str, Any]) -> Any:
    """Answer before and after a refresh; return answers with those of plain models, and the collectives of the last."""
    config = config_of(stage, SGD, rows=2, hybrid_engine={"enabled": True, **section})
    engine, *_ = shardwise.initialize(model=generating("llama"), config=config)
    engine.eval()
    answers(engine, 1, "left", NEW)
    engine.module.model.layers[0].requires_grad_(False)
    assert any(engine.refresh())
    found = [answers(engine, 1, "left", NEW), expected(whole(engine, False), 1, NEW)]
    launched = sum(engine.job.launched())
    found.append(answers(engine, 1, "left", NEW))
    launched = sum(engine.job.launched()) - launched
    engine.offload_states()  # reshards what the answers have gathered
    engine.reload_states()
    engine.train()
    step(engine, 0)
    engine.destroy()
    return found, launched


@pytest.mark.parametrize(("stage", "section"), [(1, {"inference_tp_size": 2}), thorough(3, {})])
def test_answers_follow_a_refresh(stage: int, section: dict[str, Any]) -> None:
    for (first, wanted, second), launched in run_ranks(refreshed, 2, stage, section):
        assert first == wanted == second
        assert launched == 0 or section  # gathered once


def streamed(stage: int) -> Any:
    """Generate answers of other lengths on the ranks, without a section."""
    engine, *_ = shardwise.initialize(model=generating("llama"), config=config_of(stage, SGD, rows=2))
    engine.eval()
    new = 3 + 4 * dist.get_rank()
    found = answers(engine, 1, "left", new), expected(whole(engine, False), 1, new)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [3, thorough(0)])
def test_ranks_with_answers_of_other_lengths_end_together(stage: int) -> None:
    for found, wanted in run_ranks(streamed, 2, stage):
        assert found == wanted


def in_training() -> Any:
    """Generate in training and in evaluation mode."""
    section = {"autotp_size": 2, "vocab_parallel_lm_head": True}
    engine, *_ = shardwise.initialize(model=generating("llama"), config=config_of(1, SGD, tensor_parallel=section))
    engine.train()
    found = [answers(engine, 2, "left", NEW)]
    assert all(module.training for module in engine.modules())
    engine.eval()
    found.append(answers(engine, 2, "left", NEW))
    engine.destroy()
    return found


def test_divided_heads_give_all_logits_also_in_training_mode() -> None:
    assert run_ranks(in_training, 2) == [[expected(generating("llama"), 2, NEW)] * 2] * 2


class Greedy(nn.Module):
    """Model with a `generate` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = generating("llama")

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.inner(input_ids=tokens, use_cache=False).logits
        return logits

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(NEW):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens


def of_its_own(stage: int, size: int) -> list[list[int]]:
    config = config_of(stage, SGD, tensor_parallel={"autotp_size": size})
    engine, *_ = shardwise.initialize(model=Greedy(), config=config)
    found: list[list[int]] = engine.generate(prompts(1, "left")["input_ids"]).tolist()
    engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "size"), [(1, 2), (3, 1)])
def test_models_answer_by_a_generate_of_their_own(stage: int, size: int) -> None:
    wanted = Greedy().generate(prompts(1, "left")["input_ids"]).tolist()
    assert run_ranks(of_its_own, 2, stage, size) == [wanted] * 2


class Fused(nn.Linear):
    """Layer with an adapter as DeepSpeed-Chat's."""

    def __init__(self) -> None:
        super().__init__(4, 4, bias=False)
        self.right, self.left = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 4))
        self.fused = False

    def fuse_lora_weight(self) -> None:
        self.weight.data += self.right @ self.left
        self.fused = True

    def unfuse_lora_weight(self) -> None:
        self.weight.data -= self.right @ self.left
        self.fused = False


def test_adapters_are_merged_as_a_snapshot() -> None:
    from shardwise.inference.adapters import merged

    model = nn.ModuleList([Fused(), adapted()])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.arange(3, 9).view(1, 6)
    plain = model[1](ids).logits
    with torch.no_grad(), merged(model) as count:
        assert count == 5 and model[0].fused
        assert not torch.equal(model[0].weight, before["0.weight"])
        assert torch.allclose(model[1](ids).logits, plain, atol=1e-4)
    assert not model[0].fused
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ZeroDivisionError), merged(model):
        raise ZeroDivisionError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def other_shapes() -> None:
    config = config_of(0, SGD, rows=2, hybrid_engine={"enabled": True, "inference_tp_size": 2, "max_out_tokens": 10})
    engine, *_ = shardwise.initialize(model=generating("llama"), config=config)
    try:
        with pytest.raises(UsageError, match=r"exceed hybrid_engine.max_out_tokens = 10"):
            answers(engine, 1, "left", 5)
        given = {name: value[:, dist.get_rank() :] for name, value in prompts(1, "left").items()}
        engine.generate(**given, max_new_tokens=2, **ARGUMENTS)
    finally:
        engine.destroy()


def test_prompts_of_other_shapes_on_ranks_that_share_a_copy_are_refused() -> None:
    with pytest.raises(RankFailure, match=r"UsageError.*their prompts have the shapes"):
        run_ranks(other_shapes, 2)


def test_sections_that_cannot_be_served_are_refused() -> None:
    base = {"train_batch_size": 2}
    with pytest.raises(ConfigError, match=r"hybrid_engine.enable_cuda_graph: .*write false"):
        resolve({**base, "hybrid_engine": {"enabled": True, "enable_cuda_graph": True}})
    with pytest.raises(ConfigError, match=r"hybrid_engine.max_out_tokens: expected an integer"):
        resolve({**base, "hybrid_engine": {"max_out_tokens": "many"}})
    engine, *_ = shardwise.initialize(model=nn.Linear(2, 2), config=base)
    with pytest.raises(UsageError, match="Linear has no generate"):
        engine.generate()
    engine.destroy()
