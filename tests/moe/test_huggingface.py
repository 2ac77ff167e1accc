"""Models of transformers whose experts are divided: the same outputs, gradients and checkpoints."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.checkpoint import export
from shardwise.config import resolve
from shardwise.config.schema.parallel import ExpertParallel
from shardwise.errors import ConfigError
from shardwise.moe.huggingface import StackedExperts, convert
from shardwise.registry import part_of
from shardwise.utils import safe_get_full_fp32_param, safe_get_full_grad
from tests.families import WORDS, build
from tests.harness import run_ranks, thorough
from tests.harness.training import SGD, config_of
from tests.optim.reference import WrittenMuon

FAMILIES = [
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "phimoe",
    "granitemoe",
    "jamba",
]
PRESETS = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def made(family: str) -> Any:
    more = {"n_group": 2} if family == "deepseek_v3" else {}
    model = build(family, 7, noise=0.02, use_cache=False, output_router_logits=False, **more)
    return model.eval() if family == "phimoe" else model  # in training it draws the experts of each token


def tokens(rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(WORDS, (2, 10), generator=generator)


def section(**keys: Any) -> ExpertParallel:
    return ExpertParallel(enabled=True, **keys)


def away(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).detach().norm() / expected.detach().norm().clamp(min=1e-6))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_computes_the_same(family: str) -> None:
    plain = made(family)
    model = copy.deepcopy(plain)
    parameters = dict(model.named_parameters())
    found = convert(model, section(preset_model=family if family in PRESETS else None))
    assert found and all(isinstance(model.get_submodule(name), StackedExperts) for name in found)
    # Names and objects are what they were.
    after = dict(model.named_parameters())
    assert after.keys() == parameters.keys() and all(p is parameters[n] for n, p in after.items())
    ids = tokens(0)
    own, expected = (one(input_ids=ids, labels=ids) for one in (model, plain))
    assert away(own.logits, expected.logits) < 1e-6
    own.loss.backward()
    expected.loss.backward()
    for name, parameter in plain.named_parameters():
        if parameter.grad is not None:
            assert away(after[name].grad, parameter.grad) < 1e-6, name  # type: ignore[arg-type]


def trained(families: list[str], stage: int, ep_size: int, path: str, built: bool) -> dict[str, Any]:
    told = {}
    for family in families:
        with shardwise.zero.Init(enabled=built):
            model = made(family)
        divided = {"enabled": True, "autoep_size": ep_size}
        config = config_of(stage, SGD, gradient_clipping=1.0, expert_parallel=divided)
        engine, *_ = shardwise.initialize(model=model, config=config)
        rows = []
        for step in range(2):
            ids = tokens(dist.get_rank(), step)
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            grads = {n: safe_get_full_grad(p) for n, p in engine.module.named_parameters()}
            boxes = {n: part_of(p).box for n, p in engine.module.named_parameters()}
            engine.step()
            rows.append((loss.item(), float(engine.last_step.grad_norm), grads))
        engine.save_checkpoint(path, tag=family)
        engine.destroy()
        told[family] = rows, boxes
    return told


@pytest.mark.parametrize(
    ("families", "stage", "world", "built"),
    [
        (["mixtral"], 3, 4, True),
        thorough(["mixtral", "qwen3_moe"], 3, 2, True),
        thorough(FAMILIES, 1, 2, False),
        thorough(FAMILIES, 3, 4, True),
    ],
)
def test_divided_experts_train_as_one_process(
    families: list[str], stage: int, world: int, built: bool, tmp_path: Path
) -> None:
    told = run_ranks(trained, world, families, stage, 2, str(tmp_path), built)
    for family in families:
        model = made(family)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad(set_to_none=False)
            losses = [model(input_ids=tokens(r, step), labels=tokens(r, step)).loss for r in range(world)]
            (torch.stack(losses).sum() / world).backward()
            norm = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
            for rank in range(world):
                rows, boxes = told[rank][family]
                loss, whole, grads = rows[step]
                assert loss == pytest.approx(losses[rank].item(), rel=1e-6)
                assert whole == pytest.approx(norm, rel=1e-5)
                divided = 0
                for name, parameter in model.named_parameters():
                    divided += boxes[name] is not None
                    if parameter.grad is not None:
                        difference = (grads[name] - parameter.grad).norm()  # both of the whole tensor
                        assert difference <= 2e-6 * parameter.grad.norm() + 1e-9, (name, step)
                assert divided == len([n for n, _ in model.named_parameters() if ".experts." in n]) > 0
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    # The checkpoint is one of the model that it was: exported weights load into it.
    export(tmp_path / families[0], tmp_path / "weights")
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "weights" / "model.safetensors")
    model = made(families[0])
    report = model.load_state_dict(weights, strict=False)
    assert not report.unexpected_keys and set(report.missing_keys) <= {"lm_head.weight"}


MUON = {"lr": 0.05, "weight_decay": 0.1}


def stepped_by_muon(family: str, settings: list[tuple[int, str]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for stage, device in settings:
        keys = {"expert_parallel": {"enabled": True, "autoep_size": 2}}
        config = config_of(
            stage, {"type": "Muon", "params": MUON}, zero={"offload_optimizer": {"device": device}}, **keys
        )
        engine, *_ = shardwise.initialize(model=made(family), config=config)
        for step in range(2):
            ids = tokens(dist.get_rank(), step)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        values = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
        found.append({n: value.clone() for n, value in values.items() if value is not None})
        engine.destroy()
    return found


def test_muon_steps_each_divided_expert_by_itself() -> None:
    """With biases of experts, which are stacks of vectors."""
    model = made("gpt_oss")
    groups: list[dict[str, Any]] = [{"params": [], "use_muon": flag, "stacked": True} for flag in (True, False)]
    for name, parameter in model.named_parameters():
        vector = parameter.dim() < 2 or any(word in name for word in ("embed", "lm_head", "_bias"))
        groups[vector]["params"].append(parameter)
    written = WrittenMuon(groups, momentum=0.95, nesterov=True, ns_steps=5, betas=(0.9, 0.95), eps=1e-10, **MUON)
    for step in range(2):
        for rank in range(2):
            (model(input_ids=tokens(rank, step), labels=tokens(rank, step)).loss / 2).backward()
        written.step()
        model.zero_grad()
    for found in run_ranks(stepped_by_muon, 2, "gpt_oss", [(1, "none"), (3, "none"), (3, "cpu")]):
        for name, parameter in model.named_parameters():
            assert all(torch.equal(values[name], found[0][name]) for values in found), name
            assert (found[0][name] - parameter.detach()).abs().max() < 1e-3, name  # a step is of about 0.05


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"expert_activation": "gelu"}, r"would compute something else: results differ by"),
        (
            {"expert_w1": "down_proj", "expert_w2": "gate_up_proj"},
            r"cannot be called with tokens|would compute something",
        ),
    ],
)
def test_experts_that_would_compute_something_else_are_refused(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        convert(made("mixtral"), section(**keys))


class Named(torch.nn.Module):
    """Experts under other names, gate and up projections apart."""

    def __init__(self) -> None:
        super().__init__()
        self.route = torch.nn.Linear(8, 4)
        self.mine = torch.nn.Module()
        shapes = {"one": (4, 12, 8), "two": (4, 8, 12), "three": (4, 12, 8)}
        for name, shape in shapes.items():
            self.mine.register_parameter(name, torch.nn.Parameter(torch.randn(shape)))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        weights, chosen = torch.softmax(self.route(values), dim=1).topk(2, dim=1)
        return self.mine(values, chosen, weights)


NAMES = {
    "expert_pattern": "mine",
    "router_pattern": "route",
    "expert_w1": "one",
    "expert_w2": "two",
    "expert_w3": "three",
}


def test_patterns_mean_names_as_they_are_without_adapters() -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(made("mixtral"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    (found,) = convert(model, section(moe_layer_pattern=r"^model\.layers\.1\."))
    assert found.startswith("base_model.model.model.layers.1.")


def test_names_and_activation_of_the_configuration() -> None:
    model = torch.nn.Sequential(Named(), Named())
    assert convert(model, section(moe_layer_pattern="^1$", **NAMES, expert_activation="quick_gelu")) == ["1.mine"]
    assert not isinstance(model[0].mine, StackedExperts)
    values, layer = torch.randn(5, 8), model[1]
    weights, chosen = torch.softmax(layer.route(values), dim=1).topk(2, dim=1)
    rows = torch.zeros(5, 8)
    for row, (value, own, factors) in enumerate(zip(values, chosen.tolist(), weights, strict=True)):
        for factor, e in zip(factors, own, strict=True):
            gate, up = layer.mine.one[e] @ value, layer.mine.three[e] @ value
            rows[row] += factor * (gate * torch.sigmoid(1.702 * gate) * up) @ layer.mine.two[e].T
    assert away(layer(values), rows) < 1e-6


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (
            {},
            r"has no block with the children 'experts' \(with stacked parameters gate_up_proj, down_proj\) and 'gate'",
        ),
        ({**NAMES, "moe_layer_pattern": "^2$"}, r"whose name matches '\^2\$'"),
        ({**NAMES, "preset_model": "mixtral"}, r"of the family 'mixtral'"),
        (
            {**NAMES, "autoep_size": 3, "expert_activation": "silu"},
            r"autoep_size: 3 ranks cannot have as many of the 4",
        ),
        ({**NAMES, "expert_activation": "sillu"}, r"expert_activation: 'sillu' is no function"),
        (NAMES, r"the experts of 0.mine have no `act_fn`"),
        ({**NAMES, "num_experts_attr": "experts"}, r"model.config.experts is None, and 0.mine has 4 experts"),
        ({**NAMES, "expert_w3": None}, r"the experts of 0.mine \(Module\) have three; only those"),
    ],
)
def test_what_is_not_in_the_model(keys: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        convert(torch.nn.Sequential(Named()), section(**keys))


ROUTERS = {
    "route_norm": True,
    "route_scale": 2.0,
    "score_apply": "pre",
    "num_expert_groups": 2,
    "num_limited_groups": 1,
    "score_func": "sigmoid",
    "top_k": 2,
    "routed_scaling_factor": 2.0,
    "comm_backend": "deepep",
}


def test_keys_that_ask_for_another_router_are_refused() -> None:
    for key, value in ROUTERS.items():
        with pytest.raises(ConfigError, match=f"expert_parallel.{key}"):
            resolve({"train_batch_size": 1, "expert_parallel": {"enabled": True, key: value}})
