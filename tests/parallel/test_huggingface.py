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
from tests.families import build
from tests.harness import on_ranks, run_ranks
from tests.parallel.accelerated import alone
from tests.parallel.models import data


def made() -> Any:
    return build("llama", max_position_embeddings=64, attn_implementation="sdpa", use_cache=False)


def whole() -> torch.Tensor:
    return data(0, 1)["input_ids"]


@on_ranks(2)
def test_a_model_may_be_shared_again_for_training_only() -> None:
    plain = build("roberta", 7).eval()
    group = begin(2)
    shared = share_attention(share_attention(build("roberta", 7)), in_eval=False).eval()
    with torch.no_grad():
        torch.testing.assert_close(shared(whole()).logits, plain(whole()).logits)
    assert group.exchanges == 0
    end()


@on_ranks(2)
def test_in_evaluation_each_rank_may_have_whole_sequences() -> None:
    model = made().eval()
    with torch.no_grad():
        expected = model(whole()).logits
        new = model.generate(whole()[:, :5], max_new_tokens=4, do_sample=False)
        assert torch.equal(share_attention(made()).eval()(whole()).logits, expected)  # without a group
        group = begin(2)
        other = share_attention(made()).eval()
        shared = share_attention(made(), in_eval=False).eval()
        torch.testing.assert_close(shared(whole()).logits, expected)
        assert torch.equal(shared.generate(whole()[:, :5], max_new_tokens=4, do_sample=False), new)
        assert group.exchanges == 0
        part = expected.tensor_split([8], dim=1)[group.rank]  # another model still shares sequences in evaluation
        torch.testing.assert_close(other(**split({"input_ids": whole()})).logits, part)
    end()


@on_ranks(2)
def test_models_may_share_a_configuration() -> None:
    """A student trains, and its teacher has whole sequences in evaluation."""
    plain = made()
    padded = torch.ones_like(whole())
    padded[:, :2] = 0
    expected = plain(whole(), attention_mask=padded).logits[:, 2:]
    group = begin(2)
    student = share_attention(plain, in_eval=False).train()
    teacher = type(student)(student.config)
    assert teacher.config is student.config
    teacher.load_state_dict(student.state_dict())
    share_attention(teacher, in_eval=False).eval()
    own = student(**split({"input_ids": whole(), "attention_mask": padded})).logits
    part = expected.tensor_split([6], dim=1)[group.rank]
    torch.testing.assert_close(own[:, own.shape[1] - part.shape[1] :], part)
    torch.testing.assert_close(teacher(whole(), attention_mask=padded).logits[:, 2:], expected)
    end()


def as_deepspeed_does(size: int) -> Any:
    """What Accelerate and the Trainer do, with names of DeepSpeed."""
    import shardwise

    shardwise.install_as_deepspeed()
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF, UlyssesSPDataLoaderAdapter
    from deepspeed.utils import groups

    deepspeed.init_distributed()
    model = made()
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
    model = made()
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
