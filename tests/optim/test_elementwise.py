"""Our own optimizers: against torch and written-out formulas, in any cut, at any precision, and as torch optimizers."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import ConfigError, UsageError
from shardwise.memory import memory_sources
from shardwise.optim import Adagrad, Adam, AdamW, ElementwiseOptimizer, Lion, adam, elementwise
from shardwise.optim.elementwise import COMPENSATION
from shardwise.optim.rounding import random_bits, round_stochastically
from tests.optim.reference import step_with

OPTIONS: list[tuple[type[ElementwiseOptimizer], dict[str, Any]]] = [
    (AdamW, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}),
    (Adam, {"lr": 0.1, "weight_decay": 0.1, "adam_w_mode": False}),
    (Adam, {"lr": 0.1, "bias_correction": False, "betas": (0.0, 0.9)}),
    (Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.1}),
    (Lion, {"lr": 0.1, "weight_decay": 0.1, "betas": (0.8, 0.9)}),
]
VARIANTS = [pytest.param(cls, options, id=f"{cls.__name__}-{i}") for i, (cls, options) in enumerate(OPTIONS)]


def reference(cls: type, options: dict[str, Any], start: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """The algorithms as in their papers, one tensor operation after the other."""
    p, lr, decay = start.clone(), options["lr"], options.get("weight_decay", 0.0)
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    m, v = torch.zeros_like(p), torch.full_like(p, options.get("initial_accumulator_value", 0.0))
    for step, gradient in enumerate(gradients, 1):
        g = gradient.to(p.dtype)
        if cls is Lion:
            p = p * (1 - lr * decay) - lr * torch.sign(beta1 * m + (1 - beta1) * g)
            m = beta2 * m + (1 - beta2) * g
            continue
        decoupled = cls is AdamW or (cls is Adam and options.get("adam_w_mode", True))
        if decoupled:
            p = p * (1 - lr * decay)
        else:
            g = g + decay * p
        if cls is Adagrad:
            v = v + g * g
            p = p - lr / (1 + (step - 1) * options["lr_decay"]) * g / (v.sqrt() + 1e-10)
            continue
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        corrected = options.get("bias_correction", True)
        first, second = (1 - beta1**step, 1 - beta2**step) if corrected else (1.0, 1.0)
        p = p - lr / first * m / ((v / second).sqrt() + options.get("eps", 1e-8))
    return p


def some(numel: int, count: int, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    random = torch.Generator().manual_seed(seed)
    scales = [10.0 ** torch.randint(-4, 3, (1,), generator=random) for _ in range(count)]
    return torch.randn(numel, generator=random), [torch.randn(numel, generator=random) * scale for scale in scales]


def run(optimizer: torch.optim.Optimizer, weight: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    for gradient in gradients:
        weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "formula"])
@pytest.mark.parametrize(("cls", "options"), VARIANTS)
def test_against_the_formula(cls: Any, options: dict[str, Any], kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kernel:
        monkeypatch.setattr(adam, "fused_step", lambda *_: None)
    start, gradients = some(1000, 6)
    exact = reference(cls, options, start.double(), gradients)
    plain = reference(cls, options, start, gradients)
    weight = start.clone().requires_grad_()
    found = run(cls([weight], **options), weight, gradients)
    assert (found - exact).norm() <= 2 * (plain - exact).norm() + 1e-7 * exact.norm()
    wide = start.double().requires_grad_()
    torch.testing.assert_close(run(cls([wide], **options), wide, gradients), exact, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (AdamW, torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
        (lambda *a, **o: Adam(*a, adam_w_mode=False, **o), torch.optim.Adam, {"weight_decay": 0.1, "fused": True}),
        (AdamW, torch.optim.AdamW, {"betas": (0.8, 0.9), "weight_decay": 0.0, "fused": True}),
        (Adagrad, torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.5}),
    ],
)
def test_same_state_and_values_as_torch(ours: Any, theirs: Any, options: dict[str, Any]) -> None:
    start, gradients = some(333, 5)
    mine, other = start.clone().requires_grad_(), start.clone().requires_grad_()
    own = {key: value for key, value in options.items() if key != "fused"}
    optimizer, plain = ours([mine], lr=0.1, **own), theirs([other], lr=0.1, **options)
    run(optimizer, mine, gradients)
    run(plain, other, gradients)
    state, expected = optimizer.state[mine], plain.state[other]
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert (state[name].dtype, state[name].shape) == (value.dtype, value.shape)
    for found, wanted in [(mine, other), *((state[name], expected[name]) for name in state)]:
        if "fused" in options:
            assert torch.equal(found, wanted)  # the same kernel
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    # Torch's state is taken over.
    again = other.detach().clone().requires_grad_()
    second = ours([again], lr=0.7)
    second.load_state_dict(plain.state_dict())
    assert torch.equal(run(second, again, gradients[:2]), run(optimizer, mine, gradients[:2])) or "fused" not in options


@st.composite
def cuts(draw: st.DrawFn) -> list[int]:
    """Ends of consecutive ranges: multiples of 64 bytes, then the end, which may be anywhere."""
    numel = draw(st.integers(1, 400))
    inner = draw(st.lists(st.integers(0, numel // 16), max_size=6))
    return sorted({0, numel, *(16 * cut for cut in inner)})


@pytest.mark.parametrize("rounding", ["fp32", "nearest", "stochastic", "kahan", "narrow states"])
@pytest.mark.parametrize(("cls", "options"), VARIANTS)
@given(bounds=cuts(), seed=st.integers(0, 2**20), chunk=st.sampled_from([64, 128, 1 << 12]))
def test_ranges_step_like_the_whole_tensor(
    cls: Any, options: dict[str, Any], rounding: str, bounds: list[int], seed: int, chunk: int
) -> None:
    """Whatever the chunks and the cuts: same values, same copies, and gradients are not written."""
    dtype = torch.float32 if rounding == "fp32" else torch.bfloat16
    how: dict[str, Any] = {"rounding": rounding} if rounding in ("nearest", "stochastic", "kahan") else {}
    if rounding == "narrow states":
        how["state_dtype"] = torch.bfloat16
    start, gradients = some(bounds[-1], 3, seed)
    whole = start.to(dtype).requires_grad_()
    optimizer = cls([whole], **options, **how)
    parts = [torch.nn.Parameter(start[a:b].to(dtype)) for a, b in pairwise(bounds)]
    on_parts = cls(parts, **options, **how)
    outputs = [(p, torch.empty(p.numel(), dtype=torch.bfloat16)) for p in parts] if rounding == "fp32" else []
    limits, elementwise.LEAST_CHUNK = elementwise.LEAST_CHUNK, chunk
    try:
        for gradient in gradients:
            if dtype is torch.bfloat16:
                step_with(optimizer, gradients=[(whole, gradient * 0.37)])
            else:
                whole.grad = gradient * 0.37
                optimizer.step()
            pieces = [(p, gradient[a:b].clone()) for p, (a, b) in zip(parts, pairwise(bounds), strict=True)]
            step_with(
                on_parts,
                factor=0.37 if seed % 2 else torch.tensor(0.37),
                gradients=pieces,
                outputs=outputs,
                origins=[(p, [(0, a, 0, b - a)]) for p, (a, b) in zip(parts, pairwise(bounds), strict=True)],
            )
    finally:
        elementwise.LEAST_CHUNK = limits
    assert torch.equal(torch.cat([p.detach() for p in parts]), whole.detach())
    for p, output in outputs:
        assert torch.equal(output, p.detach().to(torch.bfloat16))


def test_closure_groups_missing_gradients_and_layouts() -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    idle, narrow = torch.ones(3, requires_grad=True), torch.ones(5, requires_grad=True)
    optimizer = AdamW([{"params": [image, idle]}, {"params": [narrow], "lr": 0.5}], lr=0.1)
    twin = [tensor.detach().clone().contiguous().requires_grad_() for tensor in (image, narrow)]
    plain = torch.optim.AdamW(
        [{"params": [twin[0]]}, {"params": [twin[1]], "lr": 0.5}], lr=0.1, weight_decay=0, fused=True
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = image.square().sum() + narrow.square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        assert optimizer.step(closure).requires_grad
        for mine, theirs in zip((image, narrow), twin, strict=True):
            assert mine.grad is not None
            theirs.grad = mine.grad.contiguous()
        plain.step()
    assert torch.equal(image, twin[0])
    assert torch.equal(narrow, twin[1])
    assert torch.equal(idle, torch.ones(3))
    assert idle not in optimizer.state
    empty = torch.zeros(0, requires_grad=True)
    empty.grad = torch.zeros(0)
    Lion([empty]).step()


@pytest.mark.parametrize("rounding", ["nearest", "stochastic", "kahan"])
def test_saved_and_copied_optimizers_go_on_exactly(rounding: str) -> None:
    start, gradients = some(100, 6)
    weight = start.to(torch.bfloat16).requires_grad_()
    optimizer = AdamW([weight], lr=1e-3, rounding=rounding, seed=5)
    run(optimizer, weight, gradients[:3])
    again = weight.detach().clone().requires_grad_()
    loaded = AdamW([again], lr=0.7, rounding=rounding, seed=5)
    loaded.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    assert loaded.state[again]["exp_avg"].dtype is torch.float32
    both = copy.deepcopy((optimizer, weight))
    expected = run(optimizer, weight, gradients[3:])
    assert torch.equal(run(loaded, again, gradients[3:]), expected)
    assert torch.equal(run(both[0], both[1], gradients[3:]), expected)


def test_step_counts_that_are_numbers_go_on() -> None:
    start, gradients = some(100, 5)
    weight = start.requires_grad_()
    optimizer = AdamW([weight], lr=1e-3)
    run(optimizer, weight, gradients[:3])
    again, saved = weight.detach().clone().requires_grad_(), copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = 3  # as old versions of torch save it
    loaded = AdamW([again], lr=1e-3)
    loaded.load_state_dict(saved)
    assert torch.equal(run(loaded, again, gradients[3:]), run(optimizer, weight, gradients[3:]))
    assert float(loaded.state[again]["step"]) == 5


# -- 16-bit parameters -------------------------------------------------------------------------------------------------


def test_stochastic_rounding_is_unbiased_and_reproducible() -> None:
    """The mean of many roundings is the value itself, for every distance between two bf16 numbers."""
    numel, steps = 1 << 16, 64
    exact = 1 + torch.arange(numel) / numel / 128  # from 1 to the next bf16 number
    totals = torch.zeros(numel, dtype=torch.float64)
    weight = torch.nn.Parameter(torch.ones(numel, dtype=torch.bfloat16))
    optimizer = Lion([weight], lr=1.0, rounding="stochastic", seed=3)
    for _ in range(steps):
        with torch.no_grad():
            weight.fill_(1.0)
        # Lion moves by lr * sign(c); the decay is off, so that values stay where the gradient puts them.
        optimizer.param_groups[0]["lr"] = 0.0
        step_with(optimizer, gradients=[(weight, torch.zeros(numel))])
        assert bool((weight == 1).all())  # what bf16 has is not moved
        totals += rounded(exact, optimizer, weight).double()
    error = totals / steps - exact.double()
    spread = (1 / 128) * 0.5 / math.sqrt(steps)
    assert error.abs().max() < 6 * spread
    assert abs(float(error.mean())) < 4 * spread / math.sqrt(numel)
    # Blocks of neighbours are as independent as single elements.
    assert error.view(-1, 256).mean(1).abs().max() < 6 * spread / math.sqrt(256)


def rounded(values: torch.Tensor, optimizer: ElementwiseOptimizer, weight: torch.nn.Parameter) -> torch.Tensor:
    bits = random_bits(
        values.numel(),
        [(0, 0, 0, values.numel())],
        seed=optimizer.seed,
        step=int(optimizer.state[weight]["step"]),
        stream=0,
        device=values.device,
        scratch=_empty,
    )
    return round_stochastically(values.clone(), bits)


def _empty(_: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def test_kahan_is_as_good_as_fp32_and_forgets_what_was_overwritten() -> None:
    start, gradients = some(256, 200)
    start = start.to(torch.bfloat16).float()
    wide, narrow = start.clone().requires_grad_(), torch.nn.Parameter(start.to(torch.bfloat16))
    plain, optimizer = AdamW([wide], lr=1e-4), AdamW([narrow], lr=1e-4, rounding="kahan")
    for gradient in gradients:
        step_with(plain, gradients=[(wide, gradient)])  # type: ignore[list-item]
        step_with(optimizer, gradients=[(narrow, gradient)])
    whole = narrow.detach().float() + optimizer.state[narrow][COMPENSATION].float()
    assert optimizer.state[narrow][COMPENSATION].dtype is torch.bfloat16
    # Each step may lose 2**-17 of the value.
    assert bool(((whole - wide).abs() <= 200 * 2.0**-17 * wide.abs() + 1e-6).all())
    with torch.no_grad():
        narrow.zero_()
    optimizer.param_groups[0]["lr"] = 0.0
    step_with(optimizer, gradients=[(narrow, gradients[0])])
    assert bool((narrow == 0).all())
    assert bool((optimizer.state[narrow][COMPENSATION] == 0).all())


def test_second_moments_in_bf16_can_fall() -> None:
    """To nearest they could not: 0.999 of a bf16 number rounds to the number itself."""
    weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = AdamW([weight], lr=0.0, state_dtype=torch.bfloat16)
    step_with(optimizer, gradients=[(weight, torch.ones(4096))])
    first = float(optimizer.state[weight]["exp_avg_sq"].float().mean())
    for _ in range(200):
        step_with(optimizer, gradients=[(weight, torch.zeros(4096))])
    last = optimizer.state[weight]["exp_avg_sq"]
    assert last.dtype is torch.bfloat16
    assert float(last.float().mean()) == pytest.approx(first * 0.999**200, rel=0.01)


@pytest.mark.parametrize(("cls", "states"), [(AdamW, 2), (Adagrad, 1), (Lion, 1)])
@pytest.mark.parametrize(
    ("dtype", "how", "per_state", "more"),
    [
        (torch.float32, {}, 4, 0),
        (torch.bfloat16, {}, 4, 0),
        (torch.bfloat16, {"rounding": "stochastic"}, 4, 0),
        (torch.bfloat16, {"rounding": "kahan"}, 4, 2),
        (torch.bfloat16, {"rounding": "kahan", "state_dtype": torch.bfloat16}, 2, 2),
        (torch.float16, {}, 4, 0),
        (torch.float64, {}, 8, 0),
    ],
)
def test_bytes_of_state(
    cls: Any, states: int, dtype: torch.dtype, how: dict[str, Any], per_state: int, more: int
) -> None:
    shapes = [(1000,), (10, 20)]
    weights = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    optimizer = cls(weights, **how)
    wanted = memory_sources(torch.nn.ParameterList(weights), optimizer=optimizer).optimizer
    assert wanted == 1200 * (states * per_state + more) + 2 * 4
    step_with(optimizer, gradients=[(p, torch.ones(p.numel())) for p in weights])
    found = sum(value.nbytes for state in optimizer.state.values() for value in state.values())
    assert found == wanted


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "options", "words"),
    [
        (Adam, {"lr": -1.0}, r"Adam\(lr=...\): expected a number >= 0, found -1.0"),
        (AdamW, {"betas": (0.9, 1.0)}, r"AdamW\(betas=...\): expected two numbers in \[0, 1\)"),
        (Adam, {"eps": math.nan}, r"Adam\(eps=...\)"),
        (Lion, {"weight_decay": "x"}, r"Lion\(weight_decay=...\)"),
        (Adagrad, {"lr_decay": True}, r"Adagrad\(lr_decay=...\)"),
        (Lion, {"rounding": "up"}, "expected one of nearest, stochastic, kahan, found 'up'"),
        (Adam, {"state_dtype": torch.float16}, "fp16 has too little range"),
    ],
)
def test_wrong_options(cls: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cls([torch.zeros(2)], **options)


def test_gradients_that_cannot_be_stepped() -> None:
    table = torch.nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"Adam\.step\(\): a gradient is sparse"):
        Adam(table.parameters()).step()
    weight = torch.nn.Parameter(torch.ones(2))
    loaded = AdamW([weight])
    loaded.load_state_dict(torch.optim.AdamW([weight], amsgrad=True).state_dict())
    with pytest.raises(UsageError, match=r"amsgrad=True.* Go on with torch\.optim\.AdamW"):
        loaded.step()
    weight = torch.nn.Parameter(torch.ones(2, dtype=torch.float16))
    weight.grad = torch.ones_like(weight)
    with pytest.raises(UsageError, match="for bf16 parameters, found fp16"):
        Adam([weight], rounding="kahan").step()
