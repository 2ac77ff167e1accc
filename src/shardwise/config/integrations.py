"""Client libraries of a configuration: the values they write for "auto", and the keys they read.

The Trainer (transformers), Accelerate, Lightning and TRL share the file with the engine. A key without effect on the
engine may control one of them, and is not called harmless.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .normalize import Scan
from .problems import Note, dotted


class Fill(NamedTuple):
    """A value that clients write in the place of an "auto": the Trainer's default (None: it depends on the model or the
    data), the client and argument that write it, and values that clients really send, for the tests.
    """

    value: Any
    source: str
    sent: tuple[Any, ...]


_WIDTH = "Trainer, Accelerate: from the model's hidden_size"
_LR = "Trainer: learning_rate (default 5e-5); Accelerate: lr of DummyOptim"
FILLS: dict[str, Fill] = {
    "train_batch_size": Fill(None, "Trainer, Accelerate: micro-batch x accumulation x processes", (1, 32)),
    "train_micro_batch_size_per_gpu": Fill(
        None, "Trainer: per_device_train_batch_size; Accelerate, Lightning: batch size of the DataLoader", (1, 8)
    ),
    "gradient_accumulation_steps": Fill(
        None, "Trainer, Accelerate: gradient_accumulation_steps; Lightning: accumulate_grad_batches", (1, 4)
    ),
    "gradient_clipping": Fill(
        1.0,
        "Trainer: max_grad_norm (default 1.0); Accelerate: 1.0; Lightning: gradient_clip_val or 0",
        (1.0, 0.0, 0, 0.3, None),
    ),
    "optimizer.params.lr": Fill(5e-5, _LR, (5e-5, 1, 0, 0.0)),
    "optimizer.params.betas": Fill([0.9, 0.999], "Trainer: adam_beta1, adam_beta2", ([0.9, 0.999], (0.9, 0.95))),
    "optimizer.params.eps": Fill(1e-8, "Trainer: adam_epsilon (default 1e-8)", (1e-8, 0.0)),
    "optimizer.params.weight_decay": Fill(
        0.0, "Trainer: weight_decay (default 0); Accelerate: that of DummyOptim", (0.0, 0, 0.01)
    ),
    "scheduler.params.warmup_min_lr": Fill(0, "Trainer, Accelerate: 0", (0,)),
    "scheduler.params.warmup_max_lr": Fill(
        5e-5, "Trainer: learning_rate (default 5e-5); Accelerate: lr of the optimizer", (5e-5, None)
    ),
    "scheduler.params.warmup_num_steps": Fill(
        1,
        "Trainer: warmup_steps, and 1 where there is no warm-up; Accelerate: that of DummyScheduler; both 0 before "
        "transformers 5 and Accelerate 1.15",
        (0, 1, 100),
    ),
    "scheduler.params.total_num_steps": Fill(
        None, "Trainer: number of training steps, 0 for evaluation only; Accelerate: that of DummyScheduler", (0, 1000)
    ),
    "fp16.enabled": Fill(False, "Trainer: fp16 (default false); Accelerate: mixed_precision", (False, True)),
    "bf16.enabled": Fill(False, "Trainer: bf16 (default false); Accelerate: mixed_precision", (False, True)),
    "zero_optimization.reduce_bucket_size": Fill(None, f"{_WIDTH}^2; TRL for evaluation: the same", (589824, 64)),
    "zero_optimization.stage3_prefetch_bucket_size": Fill(
        None, f"{_WIDTH}^2 x 0.9; TRL for evaluation: the same without rounding", (530841, 57)
    ),
    "zero_optimization.stage3_param_persistence_threshold": Fill(
        None, f"{_WIDTH} x 10; TRL for evaluation: the same", (7680, 80)
    ),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Fill(
        False, "Accelerate, and with it the Trainer: zero3_save_16bit_model (default false)", (False, True)
    ),
    "zero_optimization.offload_optimizer.device": Fill(
        "none", "Accelerate, and with it the Trainer: offload_optimizer_device (default none)", ("none",)
    ),
    "zero_optimization.offload_param.device": Fill(
        "none", "Accelerate, and with it the Trainer: offload_param_device (default none)", ("none",)
    ),
    "zero_optimization.offload_optimizer.nvme_path": Fill(
        None, "Accelerate, and with it the Trainer: offload_optimizer_nvme_path (default none)", ("none", None)
    ),
    "zero_optimization.offload_param.nvme_path": Fill(
        None, "Accelerate, and with it the Trainer: offload_param_nvme_path (default none)", ("none", None)
    ),
}
"""By key; for other keys the clients keep "auto", and the engine chooses."""

READ: dict[str, str] = {
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": (
        "Accelerate (get_state_dict, save_model), and with it the Trainer: at stage 3 without true it does not save "
        "weights as one model"
    ),
    "zero_force_ds_cpu_optimizer": "Accelerate: unless false, it exchanges your optimizer where one is offloaded",
    "zero_allow_untested_optimizer": (
        "Lightning: at stage 3 it needs the key to evaluate or predict; the Trainer and Accelerate set it themselves"
    ),
    "zero_optimization.offload_optimizer.device": "Accelerate, Trainer, Lightning: which optimizer they make",
    "zero_optimization.offload_param.device": "Accelerate, Trainer: whether the job counts as one with offload",
    "activation_checkpointing": "Lightning: it calls checkpointing.configure with the section",
    "tensor_parallel.autotp_size": "Accelerate, Trainer: it divides the number of ranks that load data of their own",
    "steps_per_print": "Accelerate, and with it the Trainer: it is replaced by infinity, which means never",
    "communication_data_type": "Accelerate: on ROCm it writes fp32 there if the key is not given",
}
"""Keys that a client acts upon, with or without an effect on the engine."""


def read_by_clients(found: Scan) -> dict[str, str]:
    """Return the keys of a configuration that clients act upon, by canonical path, with the clients' action."""
    given = {dotted(path) for path in found.given}
    return {path: source for path, source in READ.items() if path in given}


def fills(found: Scan) -> list[Note]:
    """Return a note on each "auto" that clients replace, with the Trainer's default."""
    return [
        Note(dotted(found.given[path]), fill.value, f"filled by the client. {fill.source}")
        for path in found.autos
        if (fill := FILLS.get(dotted(path))) is not None
    ]
