"""Optimizers by name: which class, which options, and how wrong ones are reported."""

from __future__ import annotations

import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwise
from shardwise import optim
from shardwise.errors import ConfigError
from shardwise.optim import build, names


def parameter(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(1.0, 5.0, dtype=dtype))


def make(name: str, options: dict[str, Any] | None = None) -> torch.optim.Optimizer:
    return build(name, [parameter()], options or {}, device="cpu")


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        *((name, optim.AdamW) for name in ("Adam", "ADAM", "AdamW", "adamw")),
        ("Adagrad", optim.Adagrad),
        ("LION", optim.Lion),
        ("sgd", torch.optim.SGD),
        ("rmsprop", torch.optim.RMSprop),
    ],
)
def test_names_in_any_case(name: str, cls: type[torch.optim.Optimizer]) -> None:
    options = {"lr": 0.5, "weight_decay": 0.1, **({"betas": [0.8, 0.9]} if cls is optim.AdamW else {})}
    optimizer = make(name, options)
    assert type(optimizer) is cls and make(name).defaults["weight_decay"] == 0
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.5, 0.1)
    assert "betas" not in options or (optimizer.defaults["betas"] == (0.8, 0.9) and options["betas"] == [0.8, 0.9])


def test_adam_w_mode_false_adds_the_decay_to_the_gradient() -> None:
    optimizer = make("Adam", {"adam_w_mode": False, "weight_decay": 0.1})
    assert type(optimizer) is optim.Adam
    assert optimizer.defaults["decoupled_weight_decay"] is False
    with pytest.raises(ConfigError, match=r"adam_w_mode: false contradicts `optimizer\.type` AdamW"):
        make("AdamW", {"adam_w_mode": False})


def test_options_of_torch_alone_build_torch() -> None:
    for option in ({"amsgrad": True}, {"maximize": True}, {"foreach": False}, {"fused": True}, {"capturable": True}):
        assert type(make("adam", option)) is torch.optim.AdamW
        assert type(make("adam", {**option, "adam_w_mode": False})) is torch.optim.Adam
    assert make("adam", {"maximize": True}).defaults["fused"] is True
    assert type(make("adagrad", {"maximize": True})) is torch.optim.Adagrad
    nothing = {"amsgrad": False, "maximize": False, "foreach": None, "fused": None, "capturable": False}
    assert type(make("adam", nothing)) is optim.AdamW
    for key in ("bias_correction", "fp32_optimizer_states"):
        with pytest.raises(ConfigError, match=rf"{key}: false contradicts `optimizer\.params\.amsgrad` true"):
            make("adam", {key: False, "amsgrad": True})
        with pytest.raises(ConfigError, match="torch_adam` true"):
            make("adam", {key: False, "torch_adam": True})
    with pytest.raises(
        ConfigError, match=r"fp32_optimizer_states: false contradicts `optimizer\.params\.maximize` true"
    ):
        make("adagrad", {"fp32_optimizer_states": False, "maximize": True})


def test_torch_adam_and_explicit_choices_are_kept() -> None:
    assert make("adamw", {"torch_adam": True}).defaults["fused"] is None
    for options, decay in [({"torch_adam": True}, 0.01), ({"torch_adam": True, "weight_decay": 0.0}, 0.0), ({}, 0.0)]:
        assert make("adamw", options).defaults["weight_decay"] == decay
    assert make("adamw", {"fused": False}).defaults["fused"] is False
    optimizer = make("adamw", {"foreach": True})
    assert (optimizer.defaults["foreach"], optimizer.defaults["fused"]) == (True, None)
    assert make("adamw", {"differentiable": True}).defaults["fused"] is None
    assert make("adamw", {"torch_adam": True, "fused": True}).defaults["fused"] is True


def test_set_grad_none_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "shardwise"):
        make("adam", {"set_grad_none": False})
    assert "set_grad_none changes nothing" in caplog.text


def test_bias_correction_and_narrow_states() -> None:
    assert make("adam", {"bias_correction": False}).defaults["bias_correction"] is False
    weight = parameter(torch.bfloat16)
    narrow = {"fp32_optimizer_states": False}
    for name in ("adam", "adagrad", "lion"):
        assert build(name, [weight], narrow, device="cpu").state_dtype is torch.bfloat16
        assert build(name, [parameter()], narrow, device="cpu").state_dtype is torch.float32
        optimizer = build(name, [parameter()], narrow, device="cpu", parameter_dtype=torch.bfloat16)
        assert optimizer.state_dtype is torch.bfloat16
        with pytest.raises(ConfigError, match=r"fp32_optimizer_states: .* found fp16 parameters"):
            build(name, [parameter(torch.float16)], narrow, device="cpu")
        with pytest.raises(ConfigError, match="found parameters of several types"):
            build(name, [parameter(), weight], narrow, device="cpu")


def test_groups_names_and_generators_are_accepted() -> None:
    first, second = parameter(), parameter()
    groups = [{"params": (p for p in [first]), "lr": 0.5}, {"params": second}]
    optimizer = build("adam", groups, {"lr": 0.1}, device="cpu")
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.1]
    assert optimizer.param_groups[0]["params"][0] is first
    named = build("sgd", {"w": first}.items(), {"lr": 0.1}, device="cpu")
    assert named.param_groups[0]["param_names"] == ["w"]


def test_every_listed_name_builds() -> None:
    matrix = torch.nn.Parameter(torch.ones(4, 4))
    for name in names():
        assert isinstance(build(name, [matrix], {}, device="cpu"), torch.optim.Optimizer)


def fake_mup() -> ModuleType:
    """What the package mup has, in the form in which it has it: functions that return torch's optimizers."""

    def make(name: str) -> Any:
        def made(params: Any, impl: Any = None, decoupled_wd: bool = False, **kwargs: Any) -> Any:
            entries = list(params)
            for group in entries if isinstance(entries[0], dict) else [{"params": entries}]:
                for p in group["params"]:
                    assert hasattr(p, "infshape"), "set_base_shapes was not called"
            return (impl or getattr(torch.optim, name))(entries, **kwargs)

        return made

    module = ModuleType("mup")
    for ours, theirs in {"MuAdam": "Adam", "MuAdamW": "AdamW", "MuSGD": "SGD"}.items():
        setattr(module, ours, make(theirs))
    return module


def test_optimizers_of_the_package_mup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mup", None)
    for name in ("muadam", "MuAdamW", "musgd"):
        with pytest.raises(ConfigError, match=r"package mup, which is not installed .* 'pip install mup'"):
            make(name, {"lr": 0.1})
    monkeypatch.setitem(sys.modules, "mup", fake_mup())
    weight = parameter()
    with pytest.raises(ConfigError, match="set_base_shapes"):
        build("MuAdam", [weight], {"lr": 0.1}, device="cpu")
    weight.infshape = None
    for name, cls in {"muadam": "Adam", "MuAdamW": "AdamW", "musgd": "SGD"}.items():
        built = build(name, [weight], {"lr": 0.1}, device="cpu")
        assert type(built).__name__ == cls and built.param_groups[0]["lr"] == 0.1
    assert build("muadam", [weight], {"betas": [0.8, 0.9]}, device="cpu").defaults["betas"] == (0.8, 0.9)
    for options, message in (({"bettas": 1}, "bettas"), ({"lr": "auto"}, "auto"), ({"max_grad_norm": 1}, "clipping")):
        with pytest.raises(ConfigError, match=message):
            build("muadam", [weight], options, device="cpu")
    engine, optimizer, *_ = shardwise.initialize(
        model=torch.nn.ParameterList([weight]),
        config={"train_batch_size": 1, "optimizer": {"type": "MuSGD", "params": {"lr": 0.5}}},
    )
    before = weight.detach().clone()
    engine.backward(weight.sum())
    engine.step()
    assert type(optimizer) is torch.optim.SGD and torch.equal(weight, before - 0.5)
    engine.destroy()


def test_unknown_names_and_options_suggest_near_ones() -> None:
    with pytest.raises(ConfigError, match='did you mean "AdamW"'):
        make("AdammW")
    with pytest.raises(ConfigError, match=r"optimizer\.params\.weight_deacy: .* did you mean `.*weight_decay`"):
        make("adam", {"weight_deacy": 0.1})
    with pytest.raises(ConfigError, match=r"did you mean `.*adam_w_mode`"):
        make("adam", {"adamw_mode": True})
    with pytest.raises(ConfigError, match=r"did you mean `.*momentum`"):
        make("SGD", {"momentun": 0.1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": "auto"}, 'params.lr: "auto"'),
        ({"amsgrad": True, "lr": -1.0}, r"optimizer\.params\.lr: expected a number >= 0, found -1\.0"),
        ({"rounding": "kahan"}, "no such argument"),
        ({"betas": "x"}, "two numbers"),
        ({"torch_adam": "yes"}, "expected true or false"),
        ({"fused": True, "foreach": True}, "refuses"),
    ],
)
def test_wrong_values_name_the_key(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make("adam", options)


def test_plain_implementation_only_where_torch_refuses_fused(caplog: pytest.LogCaptureFixture) -> None:
    on_meta = torch.nn.Parameter(torch.empty(4, device="meta"))
    with caplog.at_level(logging.WARNING, "shardwise"):
        optimizer = build("adam", [on_meta], {"amsgrad": True}, device="meta")
    assert optimizer.defaults["fused"] is None
    assert "AdamW runs its plain implementation, because torch says: `fused=True` requires" in caplog.text
    with pytest.raises(ConfigError, match=r"optimizer\.params\.fused: true is not possible"):
        build("adam", [on_meta], {"fused": True}, device="meta")
    with pytest.raises(ConfigError, match=r"optimizer\.params\.fused: true is not possible"):
        build("SGD", [on_meta], {"fused": True}, device="meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_fused_for_every_floating_type_on_the_host(dtype: torch.dtype) -> None:
    assert build("adam", [parameter(dtype)], {"maximize": True}, device="cpu").defaults["fused"] is True


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}])
def test_dry_run_makes_the_same_choice(options: dict[str, Any]) -> None:
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(4, device="cuda"))
        optimizer = build("adam", [weight], options, device="cuda")
        weight.grad = torch.empty_like(weight)
        optimizer.step()
    assert optimizer.defaults.get("fused") is (True if options else None)
    assert optimizer.state[weight]["exp_avg"].device.type == "cuda"
