"""LAMB, LARS and Muon written out on whole tensors, from the papers; LARS also on the base of layer-wise optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from shardwise.compat import allow_gradient_dtype
from shardwise.optim import Layerwise


class Written:
    """Parameter groups and state; `step` is the algorithm."""

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        self.param_groups = [{**defaults, **group} for group in groups]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}

    def step(self) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.grad is not None:
                        self.update(weight, weight.grad, self.state.setdefault(weight, {}), group)

    def update(self, w: torch.Tensor, g: torch.Tensor, s: dict[str, Any], o: dict[str, Any]) -> None:
        raise NotImplementedError


def moments(g: torch.Tensor, s: dict[str, Any], o: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, int]:
    first, second = o["betas"]
    s["t"] = s.get("t", 0) + 1
    s["m"] = first * s.get("m", 0 * g) + (1 - first) * g
    s["v"] = second * s.get("v", 0 * g) + (1 - second) * g * g
    return s["m"], s["v"], s["t"]


class WrittenLamb(Written):
    """You et al., 2020, algorithm 2."""

    def update(self, w: torch.Tensor, g: torch.Tensor, s: dict[str, Any], o: dict[str, Any]) -> None:
        m, v, t = moments(g, s, o)
        if o.get("bias_correction", True):
            m, v = m / (1 - o["betas"][0] ** t), v / (1 - o["betas"][1] ** t)
        root = (v + o["eps"]).sqrt() if o.get("eps_inside_sqrt") else v.sqrt() + o["eps"]
        r = m / root + o["weight_decay"] * w
        a, b = float(w.norm()), float(r.norm())
        s["ratio"] = min(max(a / b, o["min_coeff"]), o["max_coeff"]) if a and b else 1.0
        w -= o["lr"] * s["ratio"] * r


class Lars(Layerwise):
    """LARS (You et al., 2017) on the base: momentum of scaled directions."""

    shardwise_sharding = "norms"

    def __init__(self, params: Any, lr: float, trust: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "trust": trust, "momentum": momentum, "weight_decay": weight_decay})

    def direction(
        self, parameter: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> torch.Tensor:
        return gradient.add_(parameter, alpha=group["weight_decay"])

    def coefficient(self, weight: torch.Tensor, direction: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        ratio = group["trust"] * weight / direction
        return torch.where((weight > 0) & (direction > 0), ratio, torch.ones_like(ratio))

    def move(
        self, parameter: torch.Tensor, direction: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        parameter.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(direction).mul(group["lr"]))


class WrittenLars(Written):
    """You et al., 2017: momentum of steps in proportion to the norm of each tensor."""

    def update(self, w: torch.Tensor, g: torch.Tensor, s: dict[str, Any], o: dict[str, Any]) -> None:
        d = g + o["weight_decay"] * w
        a, b = float(w.norm()), float(d.norm())
        s["b"] = o["momentum"] * s.get("b", 0 * g) + (o["trust"] * a / b if a and b else 1.0) * d
        w -= o["lr"] * s["b"]


def by_dimensions(groups: Iterable[Any]) -> list[dict[str, Any]]:
    """The groups of Muon and of Adam, in one order."""
    entries = list(groups)
    found = []
    for group in entries if isinstance(entries[0], dict) else [{"params": entries}]:
        for flag in (True, False):
            members = [p for p in group["params"] if (p.dim() > 1) == flag]
            if members:
                found.append({**group, "params": members, "use_muon": flag})
    return found


def newton_schulz(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Jordan et al., 2024."""
    x = matrix / (matrix.norm() + 1e-7)
    if turned := x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if turned else x


class WrittenMuon(Written):
    """Jordan et al., 2024, for groups with `use_muon`; AdamW for the others."""

    def update(self, w: torch.Tensor, g: torch.Tensor, s: dict[str, Any], o: dict[str, Any]) -> None:
        if not o["use_muon"]:
            m, v, t = moments(g, s, o)
            if o.get("adam_w_mode", True):
                w *= 1 - o["lr"] * o["weight_decay"]
            m, v = m / (1 - o["betas"][0] ** t), v / (1 - o["betas"][1] ** t)
            w -= o["lr"] * m / (v.sqrt() + o["eps"])
            return
        s["b"] = o["momentum"] * s.get("b", 0 * g) + (1 - o["momentum"]) * g
        u = (1 - o["momentum"]) * g + o["momentum"] * s["b"] if o["nesterov"] else s["b"]
        if not u.numel():
            return
        u = u.reshape(-1, *u.shape[-2:]) if o.get("stacked") else u.reshape(1, len(u), -1)
        w *= 1 - o["lr"] * o["weight_decay"]
        scale = max(1.0, u.shape[1] / u.shape[2]) ** 0.5
        w -= o["lr"] * scale * torch.stack([newton_schulz(one, o["ns_steps"]) for one in u]).reshape(w.shape)


def step_with(
    optimizer: Any,
    gradients: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    factor: float | torch.Tensor = 1.0,
    outputs: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
    origins: Sequence[tuple[torch.Tensor, Sequence[tuple[int, int, int, int]]]] = (),
) -> None:
    """Step as an engine does: with gradients of any dtype, times a factor, and a copy of what has been updated."""
    optimizer.shardwise_origins = {id(parameter): found for parameter, found in origins}
    for parameter, gradient in gradients:
        wide = gradient if gradient.dtype.itemsize >= 4 else gradient.float()
        plain = isinstance(factor, float) and factor == 1.0
        given = (gradient if plain else wide.mul(factor)).view(parameter.shape)
        allow_gradient_dtype(parameter, given.dtype)
        parameter.grad = given
    optimizer.step()
    for parameter, output in outputs:
        output.copy_(parameter.detach())
