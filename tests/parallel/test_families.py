"""Families of transformers over shared sequences: results and gradients of one process, or a refusal by name."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from shardwise.errors import UsageError
from shardwise.parallel import begin, end, share_attention, split
from shardwise.parallel.block_gradients import _Pair
from shardwise.parallel.huggingface import register
from tests.families import FAMILIES as FAMILIES_OF
from tests.families import WORDS, build
from tests.harness import on_ranks, run_ranks, thorough
from tests.parallel.models import sharing, warned

transformers = pytest.importorskip("transformers")

FAMILIES = [
    *("llama", "mistral", "gemma2", "gpt_oss", "bert", "roberta", "xlm_roberta", "camembert", "modernbert", "opt"),
    *("biogpt", "bloom", "gptj", "gpt_neo", "codegen", "gpt2", "mpt", "xglm"),
]
EAGER = ("gemma2", "gpt_oss", "bloom", "gptj", "gpt_neo", "codegen", "mpt", "xglm")
"""Families of which only the plain attention is shared."""
CORES = dict.fromkeys(("llama", "mistral", "modernbert"), ("sdpa", "eager", "ring"))
MORE: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 1},
    "gemma2": {"sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "gpt_oss": {"sliding_window": 5},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},
}
KINDS = ("plain", "left", "right", "packed")
TOKENS = 13


def model_of(family: str, core: str, dropout: float = 0.0) -> Any:
    sizes = {"max_position_embeddings": 64, "use_cache": False, **MORE.get(family, {})}
    rates = {key: dropout for key in FAMILIES_OF[family][1] if "drop" in key}
    model = build(family, 7, **sizes, **rates, attn_implementation="eager" if core == "eager" else "sdpa").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)  # so that positions and masks count
    return model


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(1))
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
            with torch.set_grad_enabled(core != "flex_attention"):  # on a CPU it has no backward pass
                logits = model(**split(batch_of(kind))).logits
            if core == "flex_attention":
                found.append((logits, {}))
                continue
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
        default = "eager" if family in EAGER else "sdpa"
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
        for name, parameter in model.named_parameters() if told[0][1] else ():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            off = float((told[0][1][name] - grad).abs().max())
            if off > 1e-4 * float(grad.abs().max()) + 1e-6 * float(whole.abs().max()):
                wrong.append(f"{case}: gradient of {name} differs by {off:.1e} of {float(grad.abs().max()):.1e}")
                break
    assert not wrong, "\n".join(wrong)


def divided(cases: list[tuple[str, str, bool]]) -> list[torch.Tensor]:
    """Return logits of this rank's tokens with two tensor-parallel ranks; `late`: shared after `initialize`."""
    found = []
    for family, core, late in cases:
        model = model_of(family, core)
        if not late:
            share_attention(model, core)
        engine = sharing(model, 1, tensor_parallel={"autotp_size": 2})
        if late:
            share_attention(model, core)
        engine.eval()
        with torch.no_grad():
            found.append(engine(**split(batch_of("left"))).logits)
        engine.destroy()
    return found


@pytest.mark.parametrize(
    "cases",
    [
        [("bloom", "eager", True), ("mpt", "eager", False), ("llama", "sdpa", True)],
        thorough([("bloom", "eager", False), ("mpt", "eager", True)]),
    ],
    ids=["some", "others"],
)
def test_tensor_parallel_ranks_share_sequences(cases: list[tuple[str, str, bool]]) -> None:
    """Blocks pass the comparison with whole ones, and distance biases are of a rank's own heads."""
    for (family, core, late), *parts in zip(cases, *run_ranks(divided, 4, cases), strict=True):
        expected = model_of(family, core).eval()(**batch_of("left")).logits.detach()
        for place in range(2):
            found = torch.cat(parts[place::2], 1)
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())), (family, late)


QUICK = ["gemma2", "gpt_oss", "roberta", "opt", "modernbert", "bloom", "mpt", "xglm"]


EXTRA = [("llama", "sdpa", "packed"), ("llama", "ring", "plain"), ("mistral", "sdpa", "plain")]


@pytest.mark.parametrize(
    "cases",
    [
        [*EXTRA, *(case for number, case in enumerate(cases_of(QUICK)) if number % 5 == 1)],
        thorough([*cases_of(FAMILIES), ("llama", "flex_attention", "packed")]),
    ],
    ids=["some", "all"],
)
def test_families_over_shared_sequences_are_those_of_one_process(cases: list[tuple[str, str, str]]) -> None:
    check(cases)


@pytest.mark.parametrize("every", [thorough(1), 18])
@on_ranks(2)
def test_families_with_dropout_pass_the_comparison(every: int) -> None:
    for family, core, kind in cases_of(FAMILIES)[every // 2 :: every]:
        if core == "ring":  # which has no dropout
            continue
        model = share_attention(model_of(family, core, dropout=0.1), core)
        engine = sharing(model, 0)
        with (
            warned() as texts,
            mock.patch.object(_Pair, "run_own", autospec=True, side_effect=_Pair.run_own) as run,
        ):
            engine(**split(batch_of(kind)))
        engine.destroy()
        assert run.call_count and not texts, (family, core, kind)


def test_models_that_cannot_share_sequences_are_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"T5ForConditionalGeneration .*an encoder and a decoder have different"):
        share_attention(build("t5"))
    encoder = transformers.T5EncoderModel(transformers.T5Config(**FAMILIES_OF["t5"][1], is_encoder_decoder=False))
    with pytest.raises(UsageError, match=r"T5EncoderModel .*relative positions"):
        share_attention(encoder)
    with pytest.raises(UsageError, match=r"BloomForCausalLM does not let others compute its attention .sdpa."):
        share_attention(model_of("bloom", "eager"), "sdpa")


@on_ranks(2)
def test_attention_that_may_be_causal_or_not_is_refused() -> None:
    register("sdpa", "shardwise_sdpa")
    attention = transformers.AttentionInterface()["shardwise_sdpa"]
    group = begin(2)
    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(UsageError, match="Identity does not have is_causal"):
        attention(nn.Identity(), q, q, q)
    assert attention(nn.Identity(), q, q, q, is_causal=True)[0].shape == (1, 3, 2, 4) and group.size == 2
    end()


def test_a_loss_of_imbalance_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("shardwise.parallel.huggingface.warn_once", told.append)
    for adds in (False, True):
        share_attention(build("mixtral", output_router_logits=adds), "sdpa")
    (text,) = told
    assert text.startswith("MixtralForCausalLM adds a loss of imbalance") and "router_aux_loss_coef to 0" in text
