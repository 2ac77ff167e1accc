"""Families of transformers over shared sequences: results and gradients of one process, or a refusal by name."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from shardwise.errors import UsageError
from shardwise.parallel import begin, end, share_attention, split
from shardwise.parallel.block_gradients import _Pair
from tests.harness import run_ranks
from tests.parallel.models import sharing, warned

transformers = pytest.importorskip("transformers")

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 60,
    "max_position_embeddings": 64,
}
BERT = {**{k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}, "pad_token_id": 1}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GEMMA = {**LLAMA, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6, "attn_logit_softcapping": 2.0}
GPT = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODERN = {
    "local_attention": 8,
    "global_attn_every_n_layers": 2,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
OPT = {"vocab_size": 60, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
XGLM = {"vocab_size": 60, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "dropout": 0.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": 5}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA),
    "gpt_oss": (
        "GptOssForCausalLM",
        {**LLAMA, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5},
    ),
    "bert": ("BertForMaskedLM", {**BERT, **NO_DROPOUT}),
    "roberta": ("RobertaForMaskedLM", {**BERT, **NO_DROPOUT}),
    "xlm_roberta": ("XLMRobertaForMaskedLM", {**BERT, **NO_DROPOUT}),
    "camembert": ("CamembertForMaskedLM", {**BERT, **NO_DROPOUT}),
    "modernbert": ("ModernBertForMaskedLM", {**BERT, **MODERN}),
    "opt": ("OPTForCausalLM", {**OPT, "max_position_embeddings": 64, "dropout": 0.0, "word_embed_proj_dim": 32}),
    "biogpt": ("BioGptForCausalLM", {**BERT, **NO_DROPOUT, "activation_dropout": 0.0, "layerdrop": 0.0}),
    "bloom": ("BloomForCausalLM", {"vocab_size": 60, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "gptj": ("GPTJForCausalLM", {**GPT, **GPT_DROPOUT, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {
            "vocab_size": 60,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "window_size": 5,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 64,
        },
    ),
    "codegen": ("CodeGenForCausalLM", {**GPT, **GPT_DROPOUT, "rotary_dim": 4}),
    "gpt2": ("GPT2LMHeadModel", {**GPT, **GPT_DROPOUT}),
    "mpt": ("MptForCausalLM", {"vocab_size": 60, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "xglm": ("XGLMForCausalLM", {**XGLM, "attention_dropout": 0.0, "activation_dropout": 0.0, "layerdrop": 0.0}),
}
CORES = {
    "llama": ("sdpa", "eager", "ring"),
    "mistral": ("sdpa", "eager", "ring"),
    "modernbert": ("sdpa", "eager", "ring"),
}
KINDS = ("plain", "left", "right", "packed")
TOKENS = 13


def model_of(family: str, core: str, dropout: float = 0.0) -> Any:
    name, sizes = FAMILIES[family]
    sizes = {key: dropout if "drop" in key else value for key, value in sizes.items()}
    torch.manual_seed(7)
    kind = getattr(transformers, name)
    config = kind.config_class(**sizes)
    config._attn_implementation = "sdpa" if core == "ring" else core
    config.use_cache = False
    model = kind(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)  # so that positions and masks count
    return model


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids}
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        padding = slice(0, 5) if kind == "left" else slice(4, TOKENS)  # on the right a rank has nothing else
        mask[0, padding] = 0
        ids[0, padding] = 1
        batch["attention_mask"] = mask
    if kind == "packed":
        batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(TOKENS - 5)]).expand(2, -1).contiguous()
    return batch


def loss_of(logits: torch.Tensor, first: int) -> torch.Tensor:
    places = torch.arange(first, first + logits.shape[1], dtype=logits.dtype).view(1, -1, 1)
    return (torch.log_softmax(logits, -1)[..., ::7] * (1 + places / 10)).sum()


def shared(cases: list[tuple[str, str, str]]) -> list[Any]:
    """Logits of this rank's tokens, and the sum over ranks of all gradients."""
    found = []
    for family, core, kind in cases:
        group = begin(2)
        try:
            model = share_attention(model_of(family, core), core)
            logits = model(**split(batch_of(kind))).logits
            loss_of(logits, group.rank * (TOKENS - TOKENS // 2)).backward()
            grads = {}
            for name, parameter in model.named_parameters():
                grads[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.distributed.all_reduce(grads[name], group=group.group)
            found.append((logits.detach(), grads))
        except UsageError as error:
            found.append(str(error))
        finally:
            end()
    return found


def cases_of(families: list[str]) -> list[tuple[str, str, str]]:
    cases = []
    for family in families:
        default = (
            "eager" if family in ("gemma2", "gpt_oss", "bloom", "gptj", "gpt_neo", "codegen", "mpt", "xglm") else "sdpa"
        )
        for core in CORES.get(family, (default,)):
            cases += [(family, core, kind) for kind in KINDS]
    return cases


def check(cases: list[tuple[str, str, str]]) -> None:
    wrong = []
    for case, *told in zip(cases, *run_ranks(shared, 2, cases), strict=True):
        family, core, kind = case
        if isinstance(told[0], str):
            wrong.append(f"{case}: {told[0]}")
            continue
        model = model_of(family, core)
        batch = batch_of(kind)
        expected = model(**batch).logits
        loss_of(expected, 0).backward()
        logits = torch.cat([part for part, _ in told], dim=1)
        if not torch.allclose(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.detach().abs().max())):
            wrong.append(f"{case}: logits differ by {float((logits - expected).abs().max()):.1e}")
        whole = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            off = float((told[0][1][name] - grad).abs().max())
            if off > 1e-4 * float(grad.abs().max()) + 1e-6 * float(whole.abs().max()):
                wrong.append(f"{case}: gradient of {name} differs by {off:.1e} of {float(grad.abs().max()):.1e}")
                break
    assert not wrong, "\n".join(wrong)


QUICK = ["gemma2", "gpt_oss", "roberta", "opt", "modernbert", "bloom", "mpt", "xglm"]


@pytest.mark.thorough
def test_families_over_shared_sequences_are_those_of_one_process() -> None:
    check(cases_of(list(FAMILIES)))


def test_padding_positions_and_scores_of_families() -> None:
    check([case for number, case in enumerate(cases_of(QUICK)) if number % 3 == 1])


def compared(cases: list[tuple[str, str, str]]) -> list[list[str]]:
    """Warnings and the error of a model with dropout in its first training pass, which is compared with one process."""
    found = []
    for family, core, kind in cases:
        model = share_attention(model_of(family, core, dropout=0.1), core)
        engine = sharing(model, 0)
        with (
            warned() as texts,
            mock.patch.object(_Pair, "run_own", autospec=True, side_effect=_Pair.run_own) as run,
        ):
            error = ""
            try:
                engine(**split(batch_of(kind)))
            except UsageError as refused:
                error = str(refused)
        engine.destroy()
        blocks = "" if run.call_count else "no block is compared"
        found.append([text for text in (error, blocks, *texts) if text])
    return found


def check_compared(cases: list[tuple[str, str, str]]) -> None:
    cases = [case for case in cases if case[1] != "ring"]  # which has no dropout
    for found in run_ranks(compared, 2, cases):
        assert {case: told for case, told in zip(cases, found, strict=True) if told} == {}


@pytest.mark.thorough
def test_all_families_with_dropout_pass_the_comparison() -> None:
    check_compared(cases_of(list(FAMILIES)))


def test_families_with_dropout_pass_the_comparison() -> None:
    check_compared([case for number, case in enumerate(cases_of(list(FAMILIES))) if number % 9 == 4])


def test_models_that_cannot_share_sequences_are_refused_by_name() -> None:
    sizes: dict[str, Any] = {"vocab_size": 60, "d_model": 32, "num_layers": 1, "num_heads": 4, "d_kv": 8, "d_ff": 32}
    t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    with pytest.raises(UsageError, match=r"T5ForConditionalGeneration .*an encoder and a decoder have different"):
        share_attention(t5)
    with pytest.raises(UsageError, match=r"T5EncoderModel .*relative positions"):
        share_attention(transformers.T5EncoderModel(transformers.T5Config(**sizes, is_encoder_decoder=False)))
    with pytest.raises(UsageError, match=r"BloomForCausalLM does not let others compute its attention .sdpa."):
        share_attention(model_of("bloom", "eager"), "sdpa")


def test_a_loss_of_imbalance_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("shardwise.parallel.huggingface.warn_once", told.append)
    for adds in (False, True):
        config = transformers.MixtralConfig(**LLAMA, num_local_experts=4, output_router_logits=adds)
        share_attention(transformers.MixtralForCausalLM(config), "sdpa")
    (text,) = told
    assert text.startswith("MixtralForCausalLM adds a loss of imbalance") and "router_aux_loss_coef to 0" in text
