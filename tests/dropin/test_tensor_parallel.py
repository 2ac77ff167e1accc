"""Tensor parallelism that the Trainer and Accelerate ask for: losses and weights of fewer ranks that do not have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.errors import ConflictError
from shardwise.parallel import end_tensors
from tests.dropin.clients import MISSING, Ranks, on_clients, tokens
from tests.dropin.test_accelerate import accelerator, train
from tests.dropin.test_trainer import Logged, config, trained
from tests.harness import thorough

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")


def llama(seed: int = 0) -> Any:
    """A Llama without dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False, bos_token_id=0))


def divided(directory: str, stage: int | None) -> tuple[Logged, float, Logged]:
    """Train, save, load and go on with divided tensors; without a stage plainly."""
    given = None if stage is None else config(stage) | {"tensor_parallel": {"autotp_size": 2}}
    found = trained(directory, given, llama)
    end_tensors()
    return found


@pytest.mark.parametrize(("world", "stage"), [thorough(2, 1), (2, 3), thorough(4, 3)])
def test_trainer(ranks: Ranks, tmp_path: Path, world: int, stage: int) -> None:
    plain, *_ = ranks(divided, world // 2, str(tmp_path / "plain"), None)[0]
    for first, difference, second in ranks(divided, world, str(tmp_path / "divided"), stage):
        assert len(plain["loss"]) == 6 and first["loss"] == pytest.approx(plain["loss"], rel=1e-4)
        assert first["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-4)
        assert first["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-2)
        assert second == first and difference < 1e-6


def accelerated(directory: str, how: str) -> Any:
    """Losses, those after going on from save_state, and the weights in between."""
    from accelerate.utils import ParallelismConfig

    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True},
    }
    options: dict[str, Any] = {}
    if how == "configuration":
        config["tensor_parallel"] = {"autotp_size": 2}
    elif how == "parallelism":
        config["train_micro_batch_size_per_gpu"] = 2
        sizes = {"dp_shard_size": torch.distributed.get_world_size() // 2, "tp_size": 2}
        options["parallelism_config"] = ParallelismConfig(**sizes)
    acc = accelerator({"hf_ds_config": config}, **options)
    net = llama()
    loader: Any = torch.utils.data.DataLoader(tokens(32), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2), loader)
    assert model.get_tensor_parallel_world_size() == (1 if how == "plain" else 2)
    losses = train(acc, model, optimizer, loader)
    acc.save_state(f"{directory}/{how}")
    state = acc.get_state_dict(model)
    after = train(acc, model, optimizer, loader)
    acc.load_state(f"{directory}/{how}")
    again = train(acc, model, optimizer, loader)
    model.destroy()
    end_tensors()
    return losses, after, again, state and {name: value.clone() for name, value in state.items()}


@pytest.mark.parametrize(
    ("world", "how"), [thorough(2, "configuration"), (2, "parallelism"), thorough(4, "parallelism")]
)
def test_accelerate(ranks: Ranks, tmp_path: Path, world: int, how: str) -> None:
    plain, _, _, weights = ranks(accelerated, world // 2, str(tmp_path), "plain")[0]
    for rank, (losses, after, again, state) in enumerate(ranks(accelerated, world, str(tmp_path), how)):
        assert losses == pytest.approx(plain, rel=1e-5)
        assert again == after != losses
        assert (state is None) == (rank > 0)
        if state is not None:
            assert state.keys() == weights.keys()
            for name, value in state.items():
                # 1 % of a step of 1e-2: where a gradient is nearly 0, AdamW makes a step of its rounding error.
                torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-4)


@on_clients(2)
def test_another_form_of_the_key_is_refused() -> None:
    section = {"tp": {"tp_size": 2}}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}, "tensor_parallel": section}
    acc = accelerator({"hf_ds_config": config})
    net = llama()
    with pytest.raises(ConflictError, match=r"Write tensor_parallel\.autotp_size: 2"):
        acc.prepare(net, torch.optim.AdamW(net.parameters()))
