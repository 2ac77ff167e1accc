"""Tiny models of transformers, and how one process trains them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

WORDS, TOKENS, ROWS = 40, 7, 2

_ENCODER: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 4}
_CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_FOUR = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_JAMBA = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "expert_layer_period": 1,
    "expert_layer_offset": 0,
    "attn_layer_period": 2,
    "attn_layer_offset": 0,
    "use_mamba_kernels": False,
    "mamba_d_state": 4,
}
_GPT2: dict[str, Any] = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_FALCON = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8}
_T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4}
_T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
_OPT = {"word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}
_XGLM = {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64}
_NEO = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 5, "max_position_embeddings": 64}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("ApertusForCausalLM", _DECODER),
    "bert": ("BertForMaskedLM", {**_ENCODER, **_CALM}),
    "bigcode": ("GPTBigCodeForCausalLM", {**_GPT2, "multi_query": True}),
    "biogpt": ("BioGptForCausalLM", {**_ENCODER, **_CALM, "activation_dropout": 0.0, "layerdrop": 0.0}),
    "bitnet": ("BitNetForCausalLM", _DECODER),
    "bloom": ("BloomForCausalLM", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "camembert": ("CamembertForMaskedLM", {**_ENCODER, **_CALM}),
    "codegen": ("CodeGenForCausalLM", {**_GPT2, "rotary_dim": 4}),
    "cohere": ("CohereForCausalLM", {**_DECODER, "use_qk_norm": True}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", {**_DECODER, **_LATENT, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_DECODER, **_LATENT, "q_lora_rank": 8}),
    "doge": ("DogeForCausalLM", _DECODER),
    "falcon": ("FalconForCausalLM", {**_FALCON, "multi_query": True, "new_decoder_architecture": False}),
    "falcon alibi": ("FalconForCausalLM", {**_FALCON, "multi_query": False, "alibi": True}),
    "falcon new": ("FalconForCausalLM", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gemma2": ("Gemma2ForCausalLM", {**_DECODER, "head_dim": 4}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "gpt_neo": ("GPTNeoForCausalLM", {"vocab_size": WORDS, **_NEO, "attention_types": [[["global", "local"], 1]]}),
    "gpt_neox": ("GPTNeoXForCausalLM", _DECODER),
    "gpt_oss": ("GptOssForCausalLM", {**_DECODER, **_FOUR, "head_dim": 4}),
    "gptj": ("GPTJForCausalLM", {**_GPT2, "rotary_dim": 4}),
    "granitemoe": ("GraniteMoeForCausalLM", {**_DECODER, **_FOUR}),
    "jamba": ("JambaForCausalLM", {**_DECODER, **_JAMBA}),
    "llama": ("LlamaForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "llama untied": ("LlamaForCausalLM", {**_DECODER, "num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", {**_DECODER, "sliding_window": 5}),
    "mixtral": ("MixtralForCausalLM", {**_DECODER, "num_local_experts": 4, "output_router_logits": True}),
    "mobilebert": ("MobileBertForMaskedLM", {**_ENCODER, **_CALM, "embedding_size": 32, "intra_bottleneck_size": 32}),
    "modernbert": (
        "ModernBertForMaskedLM",
        {**_ENCODER, "global_attn_every_n_layers": 1, "embedding_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "mpnet": ("MPNetForMaskedLM", {**_ENCODER, **_CALM}),
    "mpt": ("MptForCausalLM", {"vocab_size": WORDS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "olmo2": ("Olmo2ForCausalLM", _DECODER),
    "opt": ("OPTForCausalLM", {**_ENCODER, **_OPT, "ffn_dim": 24}),
    "phi": ("PhiForCausalLM", _DECODER),
    "phi3": ("Phi3ForCausalLM", _DECODER),
    "phimoe": ("PhimoeForCausalLM", {**_DECODER, **_FOUR}),
    "qwen2": ("Qwen2ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**_DECODER, **_MOE, "shared_expert_intermediate_size": 16, "output_router_logits": True},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**_DECODER, "head_dim": 6}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_DECODER, **_MOE, "head_dim": 4, "decoder_sparse_step": 1}),
    "roberta": ("RobertaForMaskedLM", {**_ENCODER, **_CALM}),
    "stablelm": ("StableLmForCausalLM", {**_DECODER, "qk_layernorm": True}),
    "t5": ("T5ForConditionalGeneration", _T5),
    "t5 gated": ("T5ForConditionalGeneration", {**_T5, "feed_forward_proj": "gated-gelu"}),
    "xglm": ("XGLMForCausalLM", {"vocab_size": WORDS, **_XGLM, **_OPT, "activation_dropout": 0.0, "layerdrop": 0.0}),
    "xlm_roberta": ("XLMRobertaForMaskedLM", {**_ENCODER, **_CALM}),
}
"""Name -> class of transformers and the arguments of its configuration."""


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, noise: float = 0.1, **more: Any) -> Any:
    """Build a tiny model; values are larger than at a usual start, so that each part of it counts."""
    name, arguments = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(seed)
    model = kind(kind.config_class(**{**arguments, **more}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=noise)
    return model.to(dtype)


def batch(family: str, step: int, rows: int) -> dict[str, torch.Tensor]:
    """Return the inputs of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(3, WORDS, (rows, TOKENS), generator=generator)
    labels = torch.randint(3, WORDS, (rows, TOKENS), generator=generator) if family.startswith("t5") else ids
    return {"input_ids": ids, "labels": labels}


def alone(
    family: str,
    steps: int,
    copies: int,
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
    dtype: torch.dtype = torch.float64,
    **more: Any,
) -> Any:
    """Train in one process; return losses, the last gradients and the parameters."""
    model = prepare(build(family, experts_implementation="eager", **more)).to(dtype)  # what is grouped is not fp64
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(steps):
        given = batch(family, step, copies * ROWS)
        loss = model(**given).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, grads, {name: p.detach().clone() for name, p in model.named_parameters()}
