"""Muon: momentum with an orthogonalised direction for matrices, and Adam for other parameters.

Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024 (kellerjordan.github.io/posts/muon). A
Newton-Schulz iteration, matrix products only, replaces a matrix's direction by (nearly) the nearest matrix with
orthonormal rows or columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from shardwise.config.argument_models import called
from shardwise.config.schema import optimizers as schema
from shardwise.errors import ConfigError
from shardwise.optim.base import Optimizer
from shardwise.registry import part_of

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic a x + b x^3 + c x^5, which brings singular values near one in few steps (Jordan et al., 2024)."""

ADAM_NAMES = ("embed", "lm_head")
"""Adam steps matrices with one of these in their name."""

MUON_LR, ADAM_LR = 0.02, 3e-4

TOGETHER = 16
"""Most matrices in one batched product. Because a single matrix leaves a device mostly idle, products are batched."""

ELEMENTS = 1 << 24
"""Most elements in one batched product; a larger matrix keeps a device busy by itself."""


def orthogonalize(matrix: torch.Tensor, steps: int = 5, method: str = "gram") -> torch.Tensor:
    """Return a matrix with the singular vectors of `matrix` and singular values near one (0.7 to 1.2 in 5 steps).

    Because only directions count, it runs in bf16 on GPUs and fp32 on CPUs (fp64 for fp64). Singular values below about
    1e-3 of the Frobenius norm need more steps. `matrix` may be a batch of one shape. Method "standard" multiplies
    full-size matrices in each step. "gram" gives the same but for rounding from Gram matrices of the shorter side,
    which is cheaper for wide and tall matrices (if sides differ by less than 1.5 times, it runs "standard").

    Example:
        >>> found = orthogonalize(torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 2.0]]), steps=5)
        >>> [[abs(round(value)) for value in row] for row in found.tolist()]
        [[1, 0, 0], [0, 0, 1]]
    """
    return _iterate(_normalize(matrix.clone()), steps, method).to(matrix.dtype)


def _normalize(matrix: torch.Tensor) -> torch.Tensor:
    low = torch.bfloat16 if matrix.device.type != "cpu" else torch.float32
    over = None if matrix.dim() == 2 else (-2, -1)
    matrix.div_(torch.linalg.vector_norm(matrix, dim=over, keepdim=over is not None) + 1e-7)
    return matrix.to(torch.float64 if matrix.dtype is torch.float64 else low)


def _iterate(found: torch.Tensor, steps: int, method: str) -> torch.Tensor:
    tall = found.shape[-2] > found.shape[-1]
    if tall:
        found = found.mT
    rows, columns = found.shape[-2:]
    if method == "gram" and 2 * columns >= 3 * rows:
        # Rounding can make small eigenvalues of a Gram matrix negative, which grow: the Gram matrix is recomputed.
        most = 2 if found.dtype is torch.bfloat16 else 3
        while steps > 0:
            found = _by_gram_matrices(found, min(most, steps))
            steps -= most
    else:
        for _ in range(steps):
            found = _added(found, _polynomial(found @ found.mT), found, beta=COEFFICIENTS[0])
    return found.mT if tall else found


def _added(
    matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float, alpha: float = 1.0
) -> torch.Tensor:
    return (torch.addmm if matrix.dim() == 2 else torch.baddbmm)(matrix, left, right, beta=beta, alpha=alpha)


def _polynomial(gram: torch.Tensor) -> torch.Tensor:
    return _added(gram, gram, gram, beta=COEFFICIENTS[1], alpha=COEFFICIENTS[2])


def _by_gram_matrices(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Run X <- P(X X^T) X as G <- P(G) G P(G), and apply the product of all P(G) once: all of these commute."""
    gram = matrix @ matrix.mT
    product: torch.Tensor | None = None
    for step in range(steps):
        factor = _polynomial(gram)
        factor.diagonal(dim1=-2, dim2=-1).add_(COEFFICIENTS[0])
        product = factor if product is None else factor @ product
        if step + 1 < steps:
            gram = factor @ gram @ factor
    return matrix if product is None else product @ matrix


class Muon(Optimizer):
    """Muon for hidden matrices and Adam for other parameters, in one optimizer.

    A group's flag `use_muon` chooses. Groups without it are split: parameters of two or more dimensions get Muon,
    unless their name contains "embed" or "lm_head" or their attribute `use_muon` is False. `model.named_parameters()`
    and `optimizer.type: "muon"` give names; without names embeddings get Muon. A parameter of more dimensions needs
    `stacked`, also in groups, except for experts that `expert_parallel` divides: each of their matrices is stepped.

    With b the momentum buffer, b <- momentum * b + (1 - momentum) * g, and u = (1 - momentum) * g + momentum * b
    (nesterov) or b: W <- (1 - lr * weight_decay) W - lr * sqrt(max(1, rows / columns)) * orthogonalize(u). Under an
    engine one rank steps each parameter; operations are balanced.

    Args:
        params: parameters, (name, parameter) pairs, or groups.
        lr: learning rate of both halves; None: 0.02 for Muon, 3e-4 for Adam.
        muon_lr, adam_lr: learning rate of one half, in place of `lr`.
        weight_decay: of both halves, decoupled.
        momentum, nesterov: of Muon, as above.
        ns_steps, ns_method: `steps` and `method` of `orthogonalize`.
        stacked: parts of names of stacks of matrices, which are the last two dimensions. True: all parameters of more
            than two dimensions. False: none is, and such a parameter (a convolution) is a matrix of `shape[0]` rows.
        betas, eps: of Adam.
        adam_w_mode: False: Adam adds the decay to the gradient.
        torch_adam: Adam runs the implementation that torch picks, not the fused one.

    Raises:
        ConfigError: a value is out of its range, or `stacked` does not say what a parameter is.
        ValueError: a group for Muon has a vector.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> optimizer = Muon(model.named_parameters(), lr=0.01)
        >>> [(group["use_muon"], [tuple(p.shape) for p in group["params"]]) for group in optimizer.param_groups]
        [(True, [(2, 3)]), (False, [(2,)])]
    """

    shardwise_sharding = "mixed"

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        muon_lr: float | None = None,
        adam_lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_method: str = "gram",
        stacked: bool | str | Sequence[str] | None = None,
        adam_w_mode: bool = True,
        torch_adam: bool = False,
    ) -> None:
        found = called(schema.MuonArguments, locals())
        self._lrs = {
            True: next(rate for rate in (muon_lr, lr, MUON_LR) if rate is not None),
            False: next(rate for rate in (adam_lr, lr, ADAM_LR) if rate is not None),
        }
        defaults = {
            "lr": None,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "betas": tuple(betas),
            "eps": eps,
            "nesterov": nesterov,
            "ns_steps": found.ns_steps,
            "ns_method": ns_method,
            "adam_w_mode": adam_w_mode,
            # torch's name: the state of fused steps has its step count on the device.
            "fused": None if torch_adam else True,
        }
        self._stacked = found.stacked
        self._single: set[torch.Size] = set()  # shapes of tensors that are one matrix each
        super().__init__(list(muon_groups(params, stacked=stacked)), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; a group without `use_muon` must have parameters of one kind only."""
        if len(list(muon_groups([param_group], stacked=self._stacked))) != 1:
            raise ValueError("add_param_group: matrices and vectors in one group; set use_muon, and add two groups")
        flag = bool(param_group["use_muon"])
        if param_group.get("lr") is None:
            param_group["lr"] = self._lrs[flag]
        group = {**self.defaults, **param_group}
        param_group["ns_steps"] = called(schema.MuonArguments, group).ns_steps
        super().add_param_group(param_group)
        if flag:
            for parameter in param_group["params"]:
                if _dimensions(parameter) < 2:
                    self.param_groups.pop()
                    raise ValueError(
                        f"use_muon: a parameter of shape {tuple(parameter.shape)} is no matrix; put it into a group "
                        "with use_muon False"
                    )
            if not param_group["stacked"]:
                self._single.update(parameter.shape for parameter in param_group["params"])

    @staticmethod
    def shardwise_group_sharding(group: Mapping[str, Any]) -> str:
        """Return the sharding of a group: "whole" for matrices."""
        return "whole" if group["use_muon"] else "elementwise"

    def shardwise_cost(self, shape: Sequence[int]) -> float:
        """Return the operations to orthogonalise a tensor's matrices, up to a factor; owners are balanced by it."""
        if tuple(shape) in self._single:
            shape = (shape[0], math.prod(shape[1:]))
        short, long = sorted(shape[-2:])
        return float(math.prod(shape[:-2]) * short * short * (2 * long + short))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state; in those of earlier versions each tensor is one matrix."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("stacked", False)

    def _step(self) -> None:
        for group in self.param_groups:
            if not group["use_muon"]:
                self._step_adam(group)
                continue
            alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[_Matrix]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "momentum_buffer" not in state:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    tensors = (parameter.detach(), parameter.grad, state["momentum_buffer"])
                    for views in zip(*(_matrices(tensor, group["stacked"]) for tensor in tensors), strict=True):
                        kind = (views[0].shape, views[0].dtype, views[0].device)
                        alike.setdefault(kind, []).append(_Matrix(*views))
            for (shape, _, device), matrices in alike.items():
                if shape.numel():
                    many = together(shape, device)
                    for first in range(0, len(matrices), many):
                        if many > 1:
                            self._step_together(matrices[first : first + many], group, many)
                        else:
                            self._step_matrix(matrices[first], group)

    def _step_together(self, matrices: Sequence[_Matrix], group: dict[str, Any], many: int) -> None:
        """Step at most `many` matrices of one shape in products of that fixed size: other matrices change no bit."""
        values, buffers = [matrix.values for matrix in matrices], [matrix.buffer for matrix in matrices]
        gradients = [matrix.gradient.to(matrix.values.dtype) for matrix in matrices]
        directions: Sequence[torch.Tensor] = buffers
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        if group["nesterov"]:
            directions = torch._foreach_lerp(gradients, buffers, group["momentum"])
        rows = values[0].shape[0]
        stacked = directions[0].new_zeros(many, rows, values[0].numel() // rows)
        torch._foreach_copy_(list(stacked[: len(matrices)].unbind()), [found.flatten(1) for found in directions])
        del directions
        found = _iterate(_normalize(stacked), group["ns_steps"], group["ns_method"]).to(values[0].dtype)
        del stacked
        if group["weight_decay"]:
            torch._foreach_mul_(values, 1 - group["lr"] * group["weight_decay"])
        scale = -group["lr"] * max(1.0, rows / found.shape[-1]) ** 0.5
        steps = [one.reshape(own.shape) for one, own in zip(found.unbind(), values, strict=False)]
        torch._foreach_add_(values, steps, alpha=scale)

    def _step_matrix(self, matrix: _Matrix, group: dict[str, Any]) -> None:
        values = matrix.values
        # No reference is kept here: each tensor is freed after its last use.
        found = _iterate(
            _normalize(self._direction(matrix.gradient.to(values.dtype), matrix.buffer, group).flatten(1)),
            group["ns_steps"],
            group["ns_method"],
        )
        if group["weight_decay"]:
            values.mul_(1 - group["lr"] * group["weight_decay"])
        rows, columns = found.shape
        found = found.to(values.dtype).reshape(values.shape)
        values.add_(found, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)

    @staticmethod
    def _direction(gradient: torch.Tensor, buffer: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer.clone()

    def _step_adam(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            return
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                on = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=on)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        step = adamw if group["adam_w_mode"] else adam
        beta1, beta2 = group["betas"]
        step(
            parameters,
            [p.grad.to(p.dtype) for p in parameters],
            [self.state[p]["exp_avg"] for p in parameters],
            [self.state[p]["exp_avg_sq"] for p in parameters],
            [],
            [self.state[p]["step"] for p in parameters],
            fused=group["fused"],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def together(shape: Sequence[int], device: torch.device) -> int:
    """Return the size of (padded) batched products; only the shape counts: others must not change a matrix's bits."""
    if device.type == "cpu":  # one product keeps a CPU busy
        return 1
    return max(1, min(TOGETHER, ELEMENTS // max(1, math.prod(shape))))


class _Matrix(NamedTuple):
    """Views of a matrix that is stepped by itself."""

    values: torch.Tensor
    gradient: torch.Tensor
    buffer: torch.Tensor


def _matrices(tensor: torch.Tensor, stacked: bool) -> list[torch.Tensor]:
    if not stacked or tensor.dim() <= 2:
        return [tensor]
    return [matrix for part in tensor.unbind() for matrix in _matrices(part, stacked)]


def muon_groups(
    params: Iterable[Any],
    names: Mapping[int, Sequence[str]] | None = None,
    stacked: bool | str | Sequence[str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield parameter groups with flags `use_muon` and `stacked`; mixed groups are split.

    Because a schedule may write its learning rate there, a group of one kind stays the same dictionary. `names` has
    further names by `id(parameter)`. `stacked` applies to groups without this key, as the argument of `Muon`.

    Raises:
        ConfigError: a parameter for Muon has more than two dimensions, and `stacked` does not say what it is.
    """
    entries = list(params)
    groups: list[dict[str, Any]] = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    for group in groups:
        members = group["params"]
        stacks = called(schema.MuonArguments, {"stacked": stacked, **group}).stacked
        kinds: dict[tuple[bool, bool], list[Any]] = {}
        for entry in [members] if isinstance(members, torch.Tensor) else list(members):
            name, parameter = entry if isinstance(entry, tuple) else ("", entry)
            known = [one for one in (name, *(names or {}).get(id(parameter), ())) if one]
            use = bool(group["use_muon"]) if "use_muon" in group else _is_for_muon(parameter, known)
            kinds.setdefault((use, use and _is_stacked(parameter, known, stacks)), []).append(entry)
        if len(kinds) > 1:
            for use, are_stacks in sorted(kinds, reverse=True):
                yield {**group, "params": kinds[use, are_stacks], "use_muon": use, "stacked": are_stacks}
        else:
            for (use, are_stacks), found in (kinds or {(bool(group.get("use_muon")), False): []}).items():
                group.update(params=found, use_muon=use, stacked=are_stacks)
            yield group


def _is_for_muon(parameter: torch.Tensor, names: Iterable[str]) -> bool:
    chosen = getattr(parameter, "use_muon", None)
    if chosen is not None:
        return bool(chosen)
    return _dimensions(parameter) >= 2 and not any(word in name.lower() for name in names for word in ADAM_NAMES)


def _dimensions(parameter: torch.Tensor) -> int:
    return parameter.dim() - part_of(parameter).is_stack


def _is_stacked(parameter: torch.Tensor, names: Sequence[str], stacked: bool | list[str] | None) -> bool:
    if parameter.dim() <= 2:
        return stacked is not False
    if part_of(parameter).is_stack:
        return True
    if isinstance(stacked, bool):
        return stacked
    if any(part in name for part in stacked or () for name in names):
        return True
    named, shape = f"parameter {names[0]!r}" if names else "a parameter", list(parameter.shape)
    raise ConfigError(
        f"Muon: {named} of shape {shape} is no matrix. If it is a stack of matrices, declare it in `stacked`, by "
        f"a part of its name or true (false: it is one matrix of {shape[0]} rows). Or let Adam step it: put it into a "
        "group with `use_muon` false, or set parameter.use_muon = False"
    )
