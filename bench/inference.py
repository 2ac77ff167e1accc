"""What generation takes: memory and tokens a second, in bf16 and int8, on one rank or shared by two, and with weights
streamed from host and disk (ZeRO-Inference).

    OMP_NUM_THREADS=1 python bench/inference.py [--hidden 1024] [--layers 8] [--new 32] [--rounds 5] [--directory DIR]

A Llama of random weights answers `--rows` prompts of 32 tokens greedily. Weights are read from one file; each way is a
job of its own. "weights" are the bytes of a rank's parameters, "resident" how much a rank has grown since before it had
read them, "peak" by how much at most.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness import Device, Row, forget_peak, highest_resident, job, options_of, save, serve, show, trimmed

WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (1, {"dtype": "bf16"}),
    "int8": (1, {"dtype": "int8"}),
    "bf16, 2 ranks": (2, {"dtype": "bf16"}),
    "int8, 2 ranks": (2, {"dtype": "int8"}),
    "bf16 from the host": (1, {"dtype": "bf16", "zero": {"stage": 3, "offload_param": {"device": "cpu"}}}),
    "bf16 from a disk": (
        1,
        {"dtype": "bf16", "zero": {"stage": 3, "offload_param": {"device": "nvme", "max_in_cpu": 0}}},
    ),
}


def model_of(options: Any) -> Any:
    """Return a Llama without values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden = options.hidden
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def written(options: Any, folder: Path) -> str:
    """Write random weights, piece by piece, and return their directory."""
    from safetensors.torch import save_file

    torch.manual_seed(0)
    values = {
        name: torch.randn(one.shape, dtype=torch.bfloat16) * 0.02
        if one.dim() > 1
        else torch.ones_like(one, device="cpu")
        for name, one in model_of(options).named_parameters()
    }
    save_file({name: one.to(torch.bfloat16) for name, one in values.items()}, folder / "model.safetensors")
    return str(folder)


def measure(options: Any) -> Row:
    """Generate; return the figures of this rank."""
    import shardwise

    size, settings = WAYS[options.what]
    if "zero" in settings:
        offload = {**settings["zero"]["offload_param"], "nvme_path": options.folder}
        settings = {**settings, "zero": {**settings["zero"], "offload_param": offload}}
    model = model_of(options)
    before = trimmed()
    forget_peak()
    engine = shardwise.init_inference(model, tensor_parallel={"tp_size": size}, checkpoint=options.folder, **settings)
    peak, after = highest_resident() - before, trimmed() - before
    ids = torch.arange(options.rows * 32, device=engine.device).view(options.rows, 32)
    given = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    generate = functools.partial(engine.generate, ids, max_new_tokens=options.new, **given)
    seconds = [Device(options.device).seconds(generate) for _ in range(options.rounds + 1)]
    rate = options.rows * options.new / statistics.median(seconds[1:])
    kept = None if "zero" in settings else sum(_bytes(one) for one in model.parameters()) / 2**20
    engine.destroy()
    return {"tokens_per_s": rate, "weights_mib": kept, "resident_mib": after / 2**20, "peak_mib": peak / 2**20}


def _bytes(parameter: Any) -> int:
    inner = getattr(parameter, "__tensor_flatten__", None)
    return parameter.nbytes if inner is None else sum(getattr(parameter, name).nbytes for name in inner()[0])


def main() -> None:
    """Measure each way in a job of its own."""
    quick = {"hidden": 64, "layers": 2, "new": 4, "rounds": 1}
    options = options_of(
        __doc__, quick, hidden=1024, layers=8, new=32, rows=4, rounds=5, directory="", what="", folder=""
    )
    serve(measure, options)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        written(options, Path(folder))
        for name, (size, _) in WAYS.items():
            figures = job(size, "--what", name, "--folder", folder)
            rows.append({"system": name, "setting": {"rows": options.rows, "hidden": options.hidden}, **figures})
            show([rows[-1]])
    save(options, "inference", rows)


if __name__ == "__main__":
    main()
