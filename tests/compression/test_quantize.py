"""Fake quantization against plain formulas."""

from __future__ import annotations

import pytest
import torch

from shardwise.compression.masks import pack, unpack
from shardwise.compression.modules import InputQuantizer
from shardwise.compression.quantize import Scales, quantized, quantized_inputs, straight_through
from shardwise.optim.rounding import uniform


def plain(values: torch.Tensor, bits: int, symmetric: bool) -> torch.Tensor:
    """Round each element of one group on its own, in fp64."""
    wide = values.double().flatten().tolist()
    if symmetric and bits == 1:
        size = sum(map(abs, wide)) / len(wide)
        found = [size if value >= 0 else -size for value in wide]
    elif symmetric and bits == 2:
        limit = 0.7 * sum(map(abs, wide)) / len(wide)
        large = [abs(value) for value in wide if abs(value) > limit]
        found = [(value > 0) * 2.0 - 1 if abs(value) > limit else 0.0 for value in wide]
        found = [sign * sum(large) / len(large) for sign in found]
    elif symmetric:
        scale = max(map(abs, wide)) / (2 ** (bits - 1) - 1)
        found = [round(value / scale) * scale for value in wide]
    else:
        low, high = min(0.0, *wide), max(0.0, *wide)
        scale = (high - low) / (2**bits - 1)
        zero = round(-low / scale)
        found = [(min(max(round(value / scale) + zero, 0), 2**bits - 1) - zero) * scale for value in wide]
    return torch.tensor(found, dtype=torch.float64).view(values.shape)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [1, 2, 3, 8, 16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_are_rounded_as_by_the_formula_group_by_group(bits: int, symmetric: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(6, 5, generator=torch.Generator().manual_seed(bits)) + 0.3).to(dtype)
    found = quantized(weight, bits, symmetric=symmetric, scales=Scales(3))
    expected = torch.cat([plain(rows, bits, symmetric) for rows in weight.split(2)])
    assert found.dtype == dtype
    assert torch.allclose(found.double(), expected, atol={torch.bfloat16: 2e-2}.get(dtype, 1e-6))
    if dtype is torch.float64:
        again = quantized(found, bits, symmetric=symmetric, scales=Scales(3))
        assert bits == 2 or torch.allclose(again, found, atol=1e-12)
        assert all(len(rows.unique()) <= 2**bits for rows in found.split(2))


def test_zeros_stay_zeros_and_scales_of_nothing_are_no_numbers() -> None:
    for symmetric in (True, False):
        for bits in (1, 2, 4):
            found = quantized(torch.zeros(2, 3), bits, symmetric=symmetric, scales=Scales(2))
            assert torch.equal(found, torch.zeros(2, 3))
    binary = quantized(torch.tensor([[0.0, 2.0], [-4.0, 0.0]]), 1, symmetric=True, scales=Scales())
    assert binary.tolist() == [[0.0, 3.0], [-3.0, 0.0]]
    pruned = torch.tensor([[0.0, 0.7, 3.1]])
    assert quantized(pruned, 4, symmetric=False, scales=Scales())[0, 0] == 0


def test_rows_of_a_part_have_the_scales_of_the_whole() -> None:
    weight = torch.randn(8, 6)
    for bits, symmetric in ((1, True), (2, True), (4, True), (4, False)):
        expected = quantized(weight, bits, symmetric=symmetric, scales=Scales(2))
        halves = [weight[:, :3], weight[:, 3:]]
        rows = torch.arange(8) // 4
        sent: list[list[torch.Tensor]] = [[], []]
        for own in (0, 1):  # the first pass records what each rank sends, the second answers
            quantized(halves[own], bits, symmetric=symmetric, scales=Scales(2, rows, _recorder(sent[own])))
        for own in (0, 1):
            other = iter(sent[1 - own])
            found = quantized(
                halves[own],
                bits,
                symmetric=symmetric,
                scales=Scales(2, rows, lambda values, other=other: torch.stack([values, next(other)])),
            )
            if bits > 2:  # ternary weights send what depends on answers
                assert torch.allclose(found, expected[:, 3 * own : 3 * own + 3], atol=1e-6)


def _recorder(into: list[torch.Tensor]):
    def gather(values: torch.Tensor) -> torch.Tensor:
        into.append(values)
        return values.unsqueeze(0)

    return gather


def test_stochastic_rounding_has_the_value_as_its_mean() -> None:
    weight = torch.tensor([[1.0, 0.3, -0.45]]).repeat(4000, 1)
    noise = torch.rand(weight.shape, generator=torch.Generator().manual_seed(0))
    found = quantized(weight, 3, symmetric=True, scales=Scales(), noise=noise)
    assert len(found[:, 1].unique()) == 2
    assert torch.allclose(found.mean(0), weight[0], atol=0.01)


def test_noise_is_uniform_and_independent_of_neighbours_and_steps() -> None:
    cpu = torch.device("cpu")
    one, other = (uniform([256, 384], [[(0, 256)], [(0, 384)]], seed=3, step=step, device=cpu) for step in (1, 2))
    assert float(one.min()) >= 0 and float(one.max()) < 1
    assert torch.allclose(one.flatten().histc(16, 0, 1) / one.numel(), torch.tensor(1 / 16), atol=3e-3)
    for a, b in ((one[:, 1:], one[:, :-1]), (one[1:], one[:-1]), (one, other)):
        assert abs(float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])) < 0.015


def test_gradients_pass_straight_and_stop_outside_of_static_bounds() -> None:
    weight = torch.randn(3, 4, requires_grad=True)
    rounded = quantized(weight, 4, symmetric=True, scales=Scales())
    out = straight_through(weight, rounded)
    assert torch.equal(out, rounded)
    (out * torch.arange(12.0).view(3, 4)).sum().backward()
    assert torch.equal(weight.grad, torch.arange(12.0).view(3, 4))
    values = torch.tensor([-3.0, -0.5, 0.5, 3.0], requires_grad=True)
    found = quantized_inputs(values, 8, symmetric=False, bounds=torch.tensor([-1.0, 1.0]))
    found.sum().backward()
    assert found.abs().max() < 1.01
    assert values.grad.tolist() == [0, 1, 1, 0]


def test_dynamic_bounds_are_those_of_a_token_or_an_image() -> None:
    values = torch.tensor([[[1.0, 0.26], [100.0, 26.0]]])
    tokens = quantized_inputs(values, 4, symmetric=True)
    assert torch.allclose(tokens[0, 1], tokens[0, 0] * 100, rtol=1e-5)
    image = quantized_inputs(values.view(1, 1, 2, 2), 4, symmetric=True, dim=1)
    assert image[0, 0, 0].tolist() == [0, 0]


@pytest.mark.parametrize("static", [True, False])
def test_inputs_without_elements_pass(static: bool) -> None:
    quantizer, layer = InputQuantizer(8, False, static, 0, False), torch.nn.Linear(3, 2)
    quantizer.attach(layer)
    for shape in ((0, 3), (3, 0)):
        nothing = torch.empty(shape)
        assert quantizer(layer, nothing, 0, note=True) is nothing
    assert quantizer.seen is None


def test_bits_of_a_mask_come_back() -> None:
    for shape in ((3, 5), (8,), (1,), (4, 4)):
        mask = torch.rand(shape) < 0.5
        assert torch.equal(unpack(pack(mask), shape), mask)
        assert len(pack(mask)) == -(-mask.numel() // 8)
