"""The decoders drawn at random, in one process: each part of them counts."""

from __future__ import annotations

import math

import pytest

from tests.parallel.random_decoders import Traits, alone, decoder


@pytest.mark.parametrize("seed", range(4))
def test_every_parameter_of_a_decoder_has_a_gradient(seed: int) -> None:
    for traits in (Traits.drawn(4 * n + seed) for n in range(5)):
        loss, grads = alone(traits)
        assert math.isfinite(loss), traits
        assert grads.keys() == dict(decoder(traits).named_parameters()).keys(), traits
        assert all(bool(grad.abs().max() > 0) for grad in grads.values()), traits
