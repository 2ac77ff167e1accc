"""Sparse attention and the transformer layer under DeepSpeed's names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import shardwise
from shardwise.errors import UsageError
from tests.attention.test_models import SECTION, Own, data, made
from tests.attention.test_sparse import plain, seen
from tests.dropin.clients import plainly
from tests.harness import on_ranks
from tests.harness.training import SGD, config_of


def test_a_pretrained_model_gets_longer_and_sparse(installed: None) -> None:
    import deepspeed.ops.sparse_attention as ops

    utils = ops.SparseAttentionUtils
    tokenizer = SimpleNamespace(model_max_length=64, init_kwargs={})
    assert utils.update_tokenizer_model_max_length(tokenizer, 96).init_kwargs == {"model_max_length": 96}
    model = made("bert").eval()
    layout = ops.BSLongformerSparsityConfig(num_heads=8, block=16)
    with pytest.raises(UsageError, match="call extend_position_embedding first"):
        utils.replace_model_self_attention_with_sparse_self_attention(model, 96, layout)
    before = set(model.state_dict())
    utils.extend_position_embedding(model, 96)
    ids = torch.randint(3, 40, (2, 90))
    more, padded, mask, *_ = utils.pad_to_block_size(16, ids, torch.ones(2, 90), None, None, None, 0, None)
    assert mask.sum(1).tolist() == [90, 90] and torch.equal(utils.pad_to_block_size(16, ids)[2], mask.long())
    table = model.get_input_embeddings()
    embedded = utils.pad_to_block_size(16, None, inputs_embeds=table(ids), model_embeddings=table)
    assert torch.equal(embedded[5], table(padded))
    assert utils.pad_to_block_size(90, ids)[:2] == (0, ids)
    with pytest.raises(UsageError, match="pass input_ids or inputs_embeds"):
        utils.pad_to_block_size(16, None)
    utils.replace_model_self_attention_with_sparse_self_attention(model, 96, layout)
    assert set(model.state_dict()) == before
    found = utils.unpad_sequence_output(more, model(input_ids=padded, attention_mask=mask).logits)
    every = made("bert", attn_implementation="sdpa").eval()
    utils.extend_position_embedding(every, 96)
    every.load_state_dict(model.state_dict())
    shown = torch.zeros(1, 8, 90, 90).masked_fill(~seen(layout, 90), torch.finfo(torch.float32).min)
    torch.testing.assert_close(found, every(input_ids=ids, attention_mask=shown).logits, rtol=1e-4, atol=1e-4)
    # Of one layer only: the other one attends to all blocks.
    dense = every(input_ids=ids).logits
    utils.replace_self_attention_layer_with_sparse_self_attention_layer(every.config, [], layout)
    torch.testing.assert_close(every(input_ids=ids).logits, dense, rtol=1e-4, atol=1e-4)
    utils.replace_self_attention_layer_with_sparse_self_attention_layer(
        every.config, [every.bert.encoder.layer[0]], layout
    )
    assert float((every(input_ids=ids).logits - dense).detach().abs().max()) > 1e-2


def test_self_attention_of_bert(installed: None) -> None:
    import deepspeed.ops.sparse_attention as ops

    config = SimpleNamespace(hidden_size=32, num_attention_heads=4)
    layout = ops.FixedSparsityConfig(num_heads=4, block=16)
    layer = ops.BertSparseSelfAttention(config, layout)
    x = torch.randn(2, 61, 32)
    mask = torch.zeros(2, 1, 1, 61)
    mask[..., 50:] = -10000.0
    q, k, v = (part(x).view(2, 61, 4, 8).transpose(1, 2) for part in (layer.query, layer.key, layer.value))
    expected = plain(q, k, v, seen(layout, 61, 2048), mask).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, mask), expected)


def test_the_section_as_a_dictionary(installed: None) -> None:
    from deepspeed.runtime.config import get_sparse_attention, get_sparse_attention_mode, get_sparse_attention_type

    assert get_sparse_attention({}) is None
    found = get_sparse_attention({"sparse_attention": {"num_local_blocks": 8}})
    assert found == {
        "mode": "fixed",
        "block": 16,
        "different_layout_per_head": False,
        "num_local_blocks": 8,
        "num_global_blocks": 1,
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
    }
    assert (get_sparse_attention_mode({}), get_sparse_attention_type({})) == ("fixed", "bidirectional")


@on_ranks(1)
def test_the_section_is_left_to_the_script() -> None:
    config = config_of(0, SGD, sparse_attention=SECTION)
    model, texts = made("llama"), list[str]()
    dense = model(**data(0)).loss.detach()
    with plainly(), mock.patch("shardwise.engine.sparse.warn_once", texts.append):
        shardwise.install_as_deepspeed()
        import deepspeed

        engine, *_ = deepspeed.initialize(model=model, config=config)
        assert torch.equal(engine(**data(0)).loss, dense)
        assert len(texts) == 1 and "leaves this section to the script" in texts[0]
        engine.destroy()
        deepspeed.initialize(model=Own(True), config=config)[0].destroy()
    assert len(texts) == 1


PARTS = {
    "attention.self.query": ("attn_qkv", slice(0, 32)),
    "attention.self.key": ("attn_qkv", slice(32, 64)),
    "attention.self.value": ("attn_qkv", slice(64, 96)),
    "attention.output.dense": ("attn_o", slice(None)),
    "attention.output.LayerNorm": ("attn_n", slice(None)),
    "intermediate.dense": ("inter_", slice(None)),
    "output.dense": ("output_", slice(None)),
    "output.LayerNorm": ("norm_", slice(None)),
}


def with_gradients(layer: nn.Module, x: torch.Tensor, mask: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    found = layer(x, mask)
    found = found[0] if isinstance(found, tuple) else found
    (found * weights).sum().backward()
    return [found.detach(), x.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("recompute", [False, True])
def test_a_transformer_layer_is_that_of_bert(installed: None, recompute: bool) -> None:
    from deepspeed import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

    torch.manual_seed(0)
    reference = made("bert").bert.encoder.layer[0].train()
    config = DeepSpeedTransformerConfig.from_dict(
        {
            "batch_size": 2,
            "hidden_size": 32,
            "intermediate_size": 24,
            "heads": 8,
            "attn_dropout_ratio": 0.0,
            "hidden_dropout_ratio": 0.0,
            "num_hidden_layers": 2,
            "initializer_range": 0.02,
            "pre_layer_norm": False,
            "gelu_checkpoint": recompute,
            "return_tuple": True,
            "other": 1,
        }
    )
    parts = dict(reference.named_parameters())
    values = [[parts[f"{name}.{end}"] for name in PARTS] for end in ("weight", "bias")]
    layer = DeepSpeedTransformerLayer(config, *values)
    x, weights = (torch.randn(2, 9, 32) for _ in range(2))
    mask = torch.zeros(2, 1, 1, 9)
    mask[1, ..., 6:] = torch.finfo(torch.float32).min
    own, other = (x.clone().requires_grad_() for _ in range(2))
    for one, two in zip(
        with_gradients(layer, own, mask, weights), with_gradients(reference, other, mask, weights), strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    for name, (part, rows) in PARTS.items():
        for end in ("weight", "bias"):
            gradient = layer.get_parameter(f"{part}{end[0]}").grad[rows]
            torch.testing.assert_close(gradient, parts[f"{name}.{end}"].grad, rtol=1e-4, atol=1e-4)


def test_norms_before_the_parts(installed: None) -> None:
    from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

    torch.manual_seed(0)
    reference = nn.TransformerEncoderLayer(
        32, 4, 64, 0.0, "gelu", layer_norm_eps=1e-12, batch_first=True, norm_first=True
    )
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    config = DeepSpeedTransformerConfig(hidden_size=32, intermediate_size=64, heads=4, num_hidden_layers=2)
    layer = DeepSpeedTransformerLayer(config)
    theirs = dict(reference.named_parameters())
    pairs = {
        "attn_qkv": ("self_attn.in_proj_weight", "self_attn.in_proj_bias"),
        "attn_o": ("self_attn.out_proj.weight", "self_attn.out_proj.bias"),
        "norm_": ("norm1.weight", "norm1.bias"),
        "attn_n": ("norm2.weight", "norm2.bias"),
        "inter_": ("linear1.weight", "linear1.bias"),
        "output_": ("linear2.weight", "linear2.bias"),
    }
    with torch.no_grad():
        for name, both in pairs.items():
            for end, value in zip("wb", both, strict=True):
                layer.get_parameter(name + end).copy_(theirs[value])
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(layer(x), reference(x), rtol=1e-4, atol=1e-5)
    visible = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    expected = reference(x, src_mask=nn.Transformer.generate_square_subsequent_mask(9), is_causal=True)
    torch.testing.assert_close(layer(x, visible), expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="encoder_hidden_states cannot be used"):
        layer(x, encoder_hidden_states=x)
    with pytest.raises(UsageError, match="hidden_size=30 and heads=4"):
        DeepSpeedTransformerConfig(hidden_size=30, heads=4)


def test_a_layer_begins_as_configured(installed: None) -> None:
    from deepspeed.ops.transformer import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

    sizes: dict[str, Any] = {"hidden_size": 256, "heads": 4, "num_hidden_layers": 8, "initializer_range": 0.1}
    layer = DeepSpeedTransformerLayer(DeepSpeedTransformerConfig(**sizes, hidden_dropout_ratio=0.5, training=False))
    assert abs(float(layer.inter_w.detach().std()) - 0.1) < 0.005
    assert abs(float(layer.output_w.detach().std()) - 0.1 / 4) < 0.002
    x = torch.randn(1, 4, 256)
    assert torch.equal(layer(x), layer(x))
    layer.train()
    assert not torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize(
    ("option", "floats"),
    [
        ("gelu_checkpoint", 2 * 9 * 64),
        ("normalize_invertible", 2 * 9 * 32),
        ("attn_dropout_checkpoint", 2 * 4 * 9 * 9 + 2 * 9 * 32),
    ],
)
def test_recomputed_parts_are_not_saved(installed: None, option: str, floats: int, before: bool) -> None:
    from deepspeed import DeepSpeedTransformerConfig, DeepSpeedTransformerLayer

    config = DeepSpeedTransformerConfig(
        hidden_size=32,
        intermediate_size=64,
        heads=4,
        attn_dropout_ratio=0.1,
        hidden_dropout_ratio=0.1,
        num_hidden_layers=2,
        pre_layer_norm=before,
    )
    torch.manual_seed(0)
    layer, x, weights = DeepSpeedTransformerLayer(config), torch.randn(2, 9, 32), torch.randn(2, 9, 32)
    own = {parameter.data_ptr() for parameter in layer.parameters()}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    results = []
    for value in (False, True):
        setattr(config, option, value)
        layer.zero_grad()
        saved.clear()
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = layer(leaf := x.clone().requires_grad_())
        size = sum(storage.nbytes() for storage in saved.values())
        (found * weights).sum().backward()
        results.append((size, [found.detach(), leaf.grad, *(parameter.grad for parameter in layer.parameters())]))
    (whole, expected), (less, recomputed) = results
    assert whole - less >= 4 * floats
    assert all(torch.equal(one, two) for one, two in zip(expected, recomputed, strict=True))
