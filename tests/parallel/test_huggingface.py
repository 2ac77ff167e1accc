"""Models of transformers over shared sequences: masks of the whole sequence, evaluation, DeepSpeed's way to ask."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.nn.functional

from shardwise.parallel import begin, end, share_attention, split
from shardwise.parallel.data import complete
from tests.harness import run_ranks, thorough
from tests.parallel.accelerated import alone
from tests.parallel.models import VOCABULARY, data


def model_of(kind: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attn_implementation="sdpa",
        use_cache=False,
    )
    torch.manual_seed(7)
    if kind == "window":
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=5))
    return LlamaForCausalLM(LlamaConfig(**sizes))


def batch_of(kind: str) -> dict[str, torch.Tensor]:
    batch = data(0, 1, packed=kind == "packed")
    if kind == "padding":
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, -4:] = 0
        batch["attention_mask"][1, :3] = 0
    return batch


def logits(kind: str, core: str) -> Any:
    """Logits of this rank's tokens, and the sum of all parameters' gradients over ranks."""
    group = begin(2)
    model = share_attention(model_of(kind), core)
    batch = split(batch_of(kind))
    labels = batch.pop("shift_labels")
    if core == "flex_attention":  # on a CPU it has no backward pass
        with torch.no_grad():
            found = model(**batch).logits
        end()
        return found, None
    found = model(**batch).logits
    found[labels != -100].square().sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.distributed.all_reduce(gradient, group=group.group)
    end()
    return found.detach(), gradient


@pytest.mark.parametrize(
    ("kind", "core"),
    [
        ("packed", "sdpa"),
        ("padding", "sdpa"),
        ("window", "sdpa"),
        ("plain", "ring"),
        thorough("packed", "flex_attention"),
    ],
)
def test_masks_are_those_of_whole_sequences(kind: str, core: str) -> None:
    model, batch = model_of(kind), complete(batch_of(kind))
    labels = batch.pop("shift_labels")
    expected = model(**batch).logits
    expected[labels != -100].square().sum().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    told = run_ranks(logits, 2, kind, core)
    found = torch.cat([part for part, _ in told], dim=1)
    real = batch.get("attention_mask", torch.ones_like(labels)).bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)
    if (
        kind != "padding" and core != "flex_attention"
    ):  # what padding computes is nobody's business, but it has labels here
        torch.testing.assert_close(told[0][1], gradient, rtol=1e-3, atol=1e-4)


def evaluated() -> Any:
    group = begin(2)
    model = share_attention(model_of("plain"), in_eval=False)
    batch = complete(batch_of("plain"))
    batch.pop("shift_labels")
    model.eval()
    with torch.no_grad():
        whole = model(**batch).logits
        new = model.generate(batch["input_ids"][:, :5], max_new_tokens=4, do_sample=False)
    exchanged = group.exchanges
    end()
    return whole, new, exchanged


def test_in_evaluation_each_rank_may_have_whole_sequences() -> None:
    model, batch = model_of("plain").eval(), complete(batch_of("plain"))
    batch.pop("shift_labels")
    with torch.no_grad():
        expected = model(**batch).logits
        new = model.generate(batch["input_ids"][:, :5], max_new_tokens=4, do_sample=False)
    for whole, tokens, exchanged in run_ranks(evaluated, 2):
        torch.testing.assert_close(whole, expected)
        assert torch.equal(tokens, new) and exchanged == 0


def as_deepspeed_does(size: int) -> Any:
    """What Accelerate and the Trainer do, with names of DeepSpeed."""
    import shardwise

    shardwise.install_as_deepspeed()
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups

    deepspeed.init_distributed()
    model = model_of("plain")
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        sequence_parallel_size=size,
        seq_length=None,
        seq_length_is_variable=True,
        core_attn_implementation="sdpa",
        micro_batch_size=2,
        disable_in_eval=True,
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": 2 * torch.distributed.get_world_size() // size,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = deepspeed.initialize(model=model, config_params=config, mpu=mpu)
    own = [data(groups._get_sequence_parallel_rank(), 1)]  # one batch on each rank
    loader = UlyssesSPDataLoaderAdapter(
        own,
        sp_rank=groups._get_sequence_parallel_rank(),
        sp_group=groups._get_sequence_parallel_group(),
        sp_world_size=groups._get_sequence_parallel_world_size(),
        device=engine.device,
    )
    losses = []
    for batch in loader:
        loss = engine(**batch, labels=batch["shift_labels"]).loss
        counted = (batch["shift_labels"] != -100).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the Trainer calls it all the same
            gather, group = torch.distributed.nn.functional.all_gather, mpu.get_sequence_parallel_group()
            given = (loss, counted)  # on Gloo torch's own fails in a group of the second rank alone
            parts, tokens = (torch.stack(gather(v, group=group) if size > 1 else [v]) for v in given)
        loss = (parts * tokens).sum() / tokens.sum()
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    sizes = [groups._get_data_parallel_world_size(), groups._get_sequence_data_parallel_world_size()]
    engine.destroy()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    end()
    return losses, weights, sizes


@pytest.mark.parametrize("size", [1, 2])
def test_scripts_of_deepspeed_train_exactly(size: int) -> None:
    """Of a size of one each rank has the same batch."""
    model = model_of("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    expected = []
    for step in range(size):
        batch = complete(data(step, 1))
        loss = model(**batch, labels=batch["shift_labels"]).loss
        expected.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for losses, weights, sizes in run_ranks(as_deepspeed_does, 2, size):
        assert sizes == [2 // size, 2]
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, value in model.named_parameters():
            torch.testing.assert_close(weights[name], value.detach(), rtol=1e-4, atol=1e-6)


def test_without_a_group_the_model_is_as_before() -> None:
    batch = complete(batch_of("packed"))
    batch.pop("shift_labels")
    plain, shared = model_of("packed"), share_attention(model_of("packed"))
    assert torch.equal(plain(**batch).logits, shared(**batch).logits)


@pytest.mark.thorough
def test_accelerate_shares_sequences() -> None:
    """`ParallelismConfig(sp_backend="deepspeed")`, with one sample after the other of each rank's loader."""
    script = str(Path(__file__).parent / "accelerated.py")
    command = [sys.executable, "-m", "shardwise.launch", "run", "--nproc", "2", "--no-local-rank", script, "shared"]
    environment = {**os.environ, "ACCELERATE_USE_DEEPSPEED": "true"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line.split()[line.split().index("losses") + 1 :] for line in done.stdout.splitlines() if "losses" in line]
    assert len(told) == 2
    for losses in told:
        assert [float(loss) for loss in losses] == pytest.approx(alone(), rel=1e-5)
