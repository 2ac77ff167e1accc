"""ZeRO-Inference: weights on host or disk, streamed unit by unit; and weights that no rank ever has whole."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise.errors import UsageError
from shardwise.memory import Tier
from tests.harness import RankFailure, run_ranks, thorough
from tests.inference.models import answers, expected, generating

NEW = 64


def on(device: str, directory: str) -> dict[str, Any]:
    """Return the section for weights on a tier, all of them: by default small models stay in the host's memory."""
    offload = {"device": device, **({"nvme_path": directory, "max_in_cpu": 0} if device == "nvme" else {})}
    return {"stage": 3, "offload_param": offload, "stage3_param_persistence_threshold": 0}


def streamed(device: str, directory: str, new: int) -> Any:
    """Answer with weights on a tier; ranks have answers of other lengths."""
    model = generating("llama")
    lengths = [new, new - 5]
    wanted = expected(model, 3, lengths[dist.get_rank()])
    if dist.get_rank() == 0:
        model.save_pretrained(f"{directory}/model")
    dist.barrier()
    with torch.device("meta"):
        blank = type(model)(model.config)
    engine = shardwise.init_inference(blank, dtype="fp32", zero=on(device, directory), checkpoint=f"{directory}/model")
    found = [answers(engine, rows, "right", lengths[dist.get_rank()]) for rows in (1, 3)]
    if device != "none":
        tier = {"cpu": Tier.HOST, "nvme": Tier.DISK}[device]
        assert engine._streamed.accountant.moved(tier).read > 0
    engine.destroy()
    return wanted, found


@pytest.mark.parametrize("device", ["cpu", thorough("nvme"), thorough("none")])
def test_weights_on_other_tiers_give_the_same_tokens(device: str, tmp_path: Path) -> None:
    for wanted, found in run_ranks(streamed, 2, device, str(tmp_path), NEW):
        assert found == [wanted[:1], wanted]


def test_weights_on_a_disk_give_the_same_tokens(tmp_path: Path) -> None:
    for wanted, found in run_ranks(streamed, 2, "nvme", str(tmp_path), 8):
        assert found == [wanted[:1], wanted]


def kib(name: str) -> int:
    """Return a number of this process."""
    return int(re.findall(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[0])


def peak(checkpoint: Any, given: dict[str, Any]) -> Any:
    """Return the peak resident bytes of reading a model, beyond those before, and those of the rank's parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kib("VmRSS")
    engine = shardwise.init_inference(model, dtype="fp32", checkpoint=checkpoint, **given)
    after = kib("VmHWM")
    own = sum(p.nbytes for p in engine.module.parameters())
    engine.destroy()
    return (after - before) << 10, own


SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def test_no_rank_has_the_whole_model_while_it_is_read(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    total = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path)
    del model
    for grown, own in run_ranks(peak, 2, str(tmp_path), {"mp_size": 2}):
        assert own < 0.55 * total
        assert grown < own + 0.15 * total, (grown, own, total)


def test_weights_go_to_the_disk_without_being_in_memory(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 6}))
    total = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size="200MB")
    del model
    files = {"checkpoints": [path.name for path in sorted(tmp_path.glob("*.safetensors"))]}
    assert len(files["checkpoints"]) > 1
    given = {"zero": on("nvme", str(tmp_path)), "base_dir": str(tmp_path)}
    ((grown, _),) = run_ranks(peak, 1, files, given)
    assert grown < 0.5 * total, (grown, total)
    files["checkpoints"].pop()
    with pytest.raises(RankFailure, match="do not fit the model: missing: "):
        run_ranks(peak, 1, files, given)


def test_weights_without_values_are_refused() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    with pytest.raises(UsageError, match=r"2 parameters are on the meta device \(0.weight\)"):
        shardwise.init_inference(model, zero=on("cpu", ""))


def test_native_checkpoints_are_read_in_parts(tmp_path: Path) -> None:
    model = generating("llama")
    wanted = expected(model, 1, 6)
    engine, *_ = shardwise.initialize(model=model, config={"train_batch_size": 1})
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    with torch.device("meta"):
        blank = type(model)(model.config)
    served = shardwise.init_inference(blank, dtype="fp32", checkpoint=str(tmp_path))
    assert answers(served, 1, "left", 6) == wanted


def test_streamed_weights_of_another_dtype_are_cast() -> None:
    model = generating("llama").bfloat16()
    ids = torch.arange(3, 9).view(1, 6)
    with torch.no_grad():
        wanted = copy.deepcopy(model).float()(ids).logits
    engine = shardwise.init_inference(model, dtype="fp32", zero=on("cpu", ""))
    found = engine(ids).logits
    engine.destroy()
    assert found.dtype is torch.float32
    assert torch.allclose(found, wanted, atol=1e-5)
