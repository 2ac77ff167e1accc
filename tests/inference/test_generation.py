"""Generation on one rank and on ranks that share a model, against transformers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import GenerationConfig

import shardwise
from shardwise.comm.communicator import Communicator
from shardwise.comm.ledger import Ledger
from shardwise.errors import CheckpointError, UsageError
from shardwise.inference.generation import generate, numbers_of_first
from tests.harness import RankFailure, run_ranks, thorough
from tests.inference.models import ARGUMENTS, FAMILIES, answers, expected, generating, prompts


def shared(family: str, directory: str) -> Any:
    """Generate with the whole model on a rank, and with a model of which two ranks read their parts."""
    model = generating(family)
    wanted = expected(model, 3)
    if dist.get_rank() == 0:
        model.save_pretrained(directory)
    dist.barrier()
    found = []
    for size in (1, 2):
        with torch.device("meta"):
            blank = type(model)(copy.deepcopy(model.config))
        engine = shardwise.init_inference(blank, tensor_parallel={"tp_size": size}, dtype="fp32", checkpoint=directory)
        found += [answers(engine, rows, padding) for rows, padding in ((1, "left"), (3, "left"), (3, "right"))]
        share = sum(p.numel() for p in engine.module.parameters()) / sum(p.numel() for p in model.parameters())
        engine.destroy()
    return wanted, found, share


@pytest.mark.parametrize("family", ["t5", *map(thorough, sorted({*FAMILIES} - {"t5"}))])
def test_64_greedy_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    for wanted, found, share in run_ranks(shared, 2, family, str(tmp_path)):
        assert all(len(set(answer)) > 15 for answer in wanted)
        assert found == [wanted[:1], wanted, wanted] * 2
        assert share < 0.75


def sampled(size: int, zero: dict[str, Any]) -> Any:
    engine = shardwise.init_inference(generating("llama"), dtype="fp32", mp_size=size, zero=zero)
    assert size == 1 or dist.get_process_group_ranks(engine.mp_group) == [0, 1]
    torch.manual_seed(5 + dist.get_rank())
    out = engine.generate(**prompts(2, "left"), max_new_tokens=12, do_sample=True, pad_token_id=0, eos_token_id=7)
    engine.destroy()
    return out.tolist(), torch.rand(1).item()


@pytest.mark.parametrize("zero", [{}, {"stage": 3, "stage3_param_persistence_threshold": 0}])
def test_ranks_that_share_a_model_draw_the_first_rank_s_numbers(zero: dict[str, Any]) -> None:
    tokens, following = run_ranks(sampled, 1, 1, {})[0]
    own = torch.rand(1, generator=torch.Generator().manual_seed(6)).item()
    assert run_ranks(sampled, 2, 2, zero) == [(tokens, following), (tokens, own)]


def drawn(step: int) -> tuple[float, float]:
    comm = Communicator(None, Ledger(), torch.device("cpu"))
    torch.manual_seed(1 + step * dist.get_rank())
    with numbers_of_first(comm):
        inside = torch.rand(1).item()
    comm.destroy()
    return inside, torch.rand(1).item()


def test_ranks_with_other_random_numbers_keep_them() -> None:
    first, other = (torch.rand(2, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (1, 2))
    assert run_ranks(drawn, 2, 1) == [tuple(first), (first[0], other[0])]
    assert run_ranks(drawn, 2, 0) == [tuple(first)] * 2


def stopped() -> list[int]:
    """Return the lengths of answers of which each rank would stop at another length."""
    engine = shardwise.init_inference(generating("llama"), dtype="fp32", mp_size=2)
    first = dist.get_rank() == 0

    def length(**more: Any) -> int:
        out = engine.generate(**prompts(1, "left"), max_new_tokens=4, **ARGUMENTS, **more)
        return int(out.shape[1]) - 6

    def two(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= (8 if first else 7))

    never, now = 1e6, 1e-9
    found = [length(max_time=now if first else never), length(max_time=never if first else now)]
    found.append(length(stopping_criteria=[two]))
    engine.destroy()
    return found


def test_ranks_that_share_a_model_stop_when_the_first_does() -> None:
    assert run_ranks(stopped, 2) == [[1, 4, 2]] * 2


def different() -> None:
    engine = shardwise.init_inference(generating("llama"), dtype="fp32", tensor_parallel={"tp_size": 2})
    given = prompts(1, "left")
    if dist.get_rank() == 1:
        given["input_ids"][0, 0] += 1
    try:
        engine.generate(**given, max_new_tokens=2, **ARGUMENTS)
    finally:
        engine.destroy()


def test_different_prompts_on_ranks_that_share_a_model_are_refused() -> None:
    with pytest.raises(RankFailure, match=r"DesyncError.*prompts differ"):
        run_ranks(different, 2)


def test_half_precision_keeps_rotary_frequencies_and_t5_s_wide_layers() -> None:
    model = generating("llama")
    engine = shardwise.init_inference(model)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    assert not engine(torch.ones(1, 3, dtype=torch.long)).logits.requires_grad
    wide = shardwise.init_inference(generating("t5"), dtype=torch.half).module.encoder.block[0].layer[1]
    assert wide.DenseReluDense.wo.weight.dtype is torch.float32


def test_limits_and_times() -> None:
    engine = shardwise.init_inference(generating("llama"), dtype="fp32", max_tokens=10)
    with pytest.raises(UsageError, match=r"6 tokens of the prompt and 5 new ones exceed max_out_tokens = 10"):
        answers(engine, 1, "left", 5)
    with pytest.raises(UsageError, match="profile_model_time"):
        engine.model_times()
    engine.profile_model_time()
    answers(engine, 1, "left", 4)
    assert len(engine.model_times()) == 4 and engine.model_times() == []
    engine.destroy()
    with pytest.raises(UsageError, match="has been destroyed"):
        engine(torch.ones(1, 3, dtype=torch.long))


def test_the_length_that_transformers_takes_by_itself_is_limited() -> None:
    model = generating("llama")
    with pytest.raises(UsageError, match="6 tokens of the prompt and 20 new ones exceed max_out_tokens = 22"):
        generate(model, (), {**prompts(1, "left"), **ARGUMENTS}, limit=22)
    for given in ({"max_length": 10}, {"generation_config": GenerationConfig(max_length=10, pad_token_id=0)}):
        assert generate(model, (), {**prompts(1, "left"), **given}, limit=10).shape[1] <= 10
    # The prompt of an encoder is no part of the answer.
    assert generate(generating("t5"), (), {**prompts(1, "left"), "max_new_tokens": 4}, limit=4).shape[1] <= 5


@pytest.mark.thorough
def test_compiled_blocks_generate_the_same() -> None:
    engine = shardwise.init_inference(generating("llama"), dtype="fp32")
    before = answers(engine, 3, "left", 6)
    engine.compile(backend="eager")
    assert answers(engine, 3, "left", 6) == before
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


def test_models_without_values_need_a_checkpoint_that_fits(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(UsageError, match="on the meta device"):
        shardwise.init_inference(model)
    torch.save({"0.weight": torch.ones(4, 5)}, tmp_path / "weights.bin")
    with pytest.raises(
        CheckpointError, match=r"0.weight has shape \[4, 5\], and the model's \[4, 4\]; missing: 0.bias"
    ):
        shardwise.init_inference(model, checkpoint=str(tmp_path / "weights.bin"))
    torch.save({"0.weight": torch.ones(4, 4), "0.bias": torch.zeros(4)}, tmp_path / "weights.bin")
    engine = shardwise.init_inference(
        model, dtype="fp32", checkpoint={"type": "ds_model", "checkpoints": ["weights.bin"]}, base_dir=str(tmp_path)
    )
    assert engine(torch.ones(1, 4)).tolist() == [[4.0] * 4]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = torch.nn.Embedding(5, 4), torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.words.weight


def test_two_different_tensors_of_a_tied_parameter_are_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "weights.bin")
    for added in (0.0, 1.0):
        torch.save({"words.weight": torch.ones(5, 4), "head.weight": torch.ones(5, 4) + added}, path)
        if added:
            with pytest.raises(CheckpointError, match=r"words\.weight and head\.weight differ"):
                shardwise.init_inference(Tied(), dtype="fp32", checkpoint=path)
        else:
            assert shardwise.init_inference(Tied(), dtype="fp32", checkpoint=path).module.words.weight.sum() == 20


def by_policy() -> Any:
    """Divide by names of layers alone."""
    policy = {torch.nn.Module: ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")}
    model = generating("t5")
    model.register_buffer("seen", torch.full((2,), dist.get_rank() > 0))
    engine = shardwise.init_inference(model, dtype="fp32", mp_size=2, injection_policy=policy)
    found = answers(engine, 3, "right", 12)
    assert model.seen.tolist() == [False, False]  # the first rank's
    engine.destroy()
    return found


def test_policies_name_the_layers_that_are_divided() -> None:
    assert run_ranks(by_policy, 2) == [expected(generating("t5"), 3, 12)] * 2


def undivided() -> None:
    section = {"enabled": False, "tp_group": dist.group.WORLD}
    engine = shardwise.init_inference(generating("llama"), dtype="fp32", tensor_parallel=section)
    assert engine.mp_group is None
    assert sum(p.numel() for p in engine.module.parameters()) == sum(
        p.numel() for p in generating("llama").parameters()
    )
    engine.destroy()


def test_a_group_that_is_not_enabled_divides_nothing() -> None:
    run_ranks(undivided, 2)


def alone() -> None:
    shardwise.init_inference(torch.nn.Linear(4, 4), tensor_parallel={"tp_size": 2})


def test_models_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(RankFailure, match=r"ConfigError.*no layer of Linear is divided"):
        run_ranks(alone, 2)
