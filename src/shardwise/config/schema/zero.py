"""The `zero_optimization` section: which state is sharded over ranks, in which units, and its tier."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from shardwise.errors import ConfigError, ConflictError

from .base import STAGES, At, ConfigSection, Contradictions, ExactInt, Int, Names, key, section
from .offload import OffloadOptimizer, OffloadParam
from .tables import NotBuilt, with_unused_keys

Stage = Annotated[Literal[0, 1, 2, 3], ExactInt]


class LeafModule(ConfigSection):
    """`zero_optimization.leaf_module`: modules whose parameters are fetched together, as one unit."""

    classes: Names = key(
        [
            "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
            "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
            "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
        ],
        "Class names (dotted or bare) of modules to keep together.",
    )
    names: Names = key([], "Qualified names of modules to keep together, as in model.named_modules().")
    name_suffixes: Names = key([], "Ends of qualified names of modules to keep together.")


class LoCo(ConfigSection):
    """`zero_optimization.zeropp_loco_param`: error feedback for quantized gradient reduction."""

    err_beta: float = key(0.8, "Part of the stored error that stays in it; the rest is the newest error.", ge=0, lt=1)
    reset_T: Int = key(1024, "Steps after which the stored error is forgotten.", gt=0)


@with_unused_keys
class ZeroConfig(ConfigSection):
    """`zero_optimization`: sharding of optimizer state (1), gradients (2) and parameters (3)."""

    stage: Stage = key(0, "0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also parameters.")
    reduce_bucket_size: Int = key(500_000_000, "Most elements of one gradient reduction: an upper limit.", gt=0)
    allgather_bucket_size: Int = key(
        500_000_000, "Most elements of one gather of updated parameters: an upper limit.", gt=0
    )
    overlap_comm: bool | None = key(
        None,
        "Reduce gradients while the backward pass goes on. null: the library decides.",
        default_note="on at stage 3 only in DeepSpeed",
        no_effect="communication always overlaps, with the same results and memory",
    )
    ignore_unused_parameters: bool = key(True, "false: a parameter without a gradient is an error.")
    compute_grad_norm: bool = key(True, "false: skip the gradient norm (stages 1 and 2, without gradient_clipping).")
    legacy_stage1: bool = key(False, "Only false is accepted.")

    stage3_prefetch_bucket_size: Int | None = key(
        None,
        "Most elements gathered ahead (stage 3), but at least the next unit; 0: nothing; null: the next unit.",
        names=("prefetch_bucket_size",),
        default_note="5e7 in DeepSpeed (5e8 in its documentation)",
        ge=0,
    )
    stage3_param_persistence_threshold: Int | None = key(
        None,
        "Units of at most this many elements stay gathered (stage 3), in addition to those of null; 0: none. null: "
        "those whose release would not lower the peak.",
        names=("param_persistence_threshold",),
        default_note="1e5 elements of a parameter in DeepSpeed",
        ge=0,
    )
    stage3_model_persistence_threshold: Int = key(
        sys.maxsize,
        "Most elements that the previous key keeps gathered (stage 3).",
        names=("model_persistence_threshold",),
        ge=0,
    )
    stage3_max_live_parameters: Int = key(
        1_000_000_000, "Most elements gathered at a time on a rank (stage 3).", names=("max_live_parameters",), ge=0
    )
    stage3_gather_fp16_weights_on_model_save: bool = key(
        False,
        "Old name of stage3_gather_16bit_weights_on_model_save.",
        deprecated_for="zero_optimization.stage3_gather_16bit_weights_on_model_save",
    )
    sub_group_size: Int = key(
        1_000_000_000,
        "Largest number of elements in a unit whose optimizer state is offloaded: the host has, or steps, a few units "
        "at a time.",
        gt=0,
    )
    leaf_module: LeafModule = section(LeafModule, "Modules that are fetched as one unit (stage 3).")

    offload_param: OffloadParam | None = key(None, "Where sharded parameters live between uses (stage 3).")
    offload_optimizer: OffloadOptimizer | None = key(None, "Where optimizer state lives and is stepped.")
    zenflow: Annotated[Any, NotBuilt("zero_optimization.zenflow", optional=True)] = key(None, "Not built.")
    cpu_offload: bool | None = key(
        None, "Old form of offload_optimizer.device = cpu.", deprecated_for="zero_optimization.offload_optimizer.device"
    )
    cpu_offload_param: bool | None = key(
        None,
        "Old form of offload_param.device = cpu.",
        names=("cpu_offload_params",),
        deprecated_for="zero_optimization.offload_param.device",
    )
    cpu_offload_use_pin_memory: bool | None = key(
        None,
        "Old form of offload_optimizer.pin_memory.",
        deprecated_for="zero_optimization.offload_optimizer.pin_memory",
    )

    zero_hpz_partition_size: Int = key(
        1,
        "Ranks, of one machine if they fit, that share a second copy of the parameters, from which backward passes "
        "gather; 1: none (stage 3).",
        ge=1,
        stages=(3,),
    )
    zero_quantized_weights: bool = key(
        False, "Gather parameters for training as 8-bit integers; masters stay exact (stage 3).", stages=(3,)
    )
    zero_quantized_nontrainable_weights: bool = key(False, "Store frozen parameters as 8-bit integers.")
    zero_quantized_gradients: bool = key(
        False, "Reduce gradients as 4-bit integers, first within nodes (stage 3).", stages=(3,)
    )
    zeropp_loco_param: LoCo | None = key(
        None, "Error feedback for zero_quantized_gradients; null: the rounding error is lost."
    )
    zero_node_size: Int | None = key(
        None, "Ranks of a node, for zero_quantized_gradients; null: those of a machine.", ge=1
    )
    mics_shard_size: Int = key(
        -1, "Ranks, of one machine if they fit, over which state is divided (MiCS, HSDP); -1: all ranks."
    )
    mics_hierarchical_params_gather: bool = key(False, "Gather in two levels (across nodes, then within each).")
    optimizer_over_replicas: bool = key(
        False, "Divide optimizer state and master weights over the replicas of `mics_shard_size` (or a mesh), too."
    )

    enable_sanity_checks: bool = key(False, "Run internal consistency checks in every step.")

    @property
    def uses_disk(self) -> bool:
        """True if parameters or optimizer state live on a disk."""
        return "nvme" in {place.device for place in (self.offload_param, self.offload_optimizer) if place is not None}

    @property
    def steps_on_host(self) -> bool:
        """True if optimizer state is offloaded."""
        return self.offload_optimizer is not None and self.offload_optimizer.device != "none"

    def contradictions(self, at: At) -> Contradictions:
        """Yield keys of another stage, and keys without the key that they belong to."""
        if self.legacy_stage1:
            yield "legacy_stage1", "the old stage 1 no longer exists; remove the key", ConfigError
        for name, field in type(self).model_fields.items():
            extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
            stages = extra.get(STAGES)
            if isinstance(stages, list) and self.stage not in stages and getattr(self, name) != field.default:
                message = f"is for {at('stage')} {stages[0]}, found {self.stage}; remove the key or change the stage"
                yield name, message, ConflictError
        yield from self._offload(at)
        if not self.compute_grad_norm and self.stage not in (1, 2):
            message = f"false is for {at('stage')} 1 and 2, found {self.stage}; remove the key"
            yield "compute_grad_norm", message, ConflictError
        quantized = self.zero_quantized_gradients
        for name, on, what in (
            ("zeropp_loco_param", quantized, "which is off"),
            (
                "zero_node_size",
                quantized or self.mics_hierarchical_params_gather,
                f"and {at('mics_hierarchical_params_gather')}, which are off",
            ),
        ):
            if getattr(self, name) is not None and not on:
                message = f"is for {at('zero_quantized_gradients')}, {what}; remove the key or switch it on"
                yield name, message, ConflictError
        size = self.mics_shard_size
        if size < -1 or size == 0:
            yield "mics_shard_size", f"is {size}; write a number of ranks, or -1 for all of them", ConfigError

    def _offload(self, at: At) -> Contradictions:
        for name, place, least in (
            ("offload_optimizer", self.offload_optimizer, 1),
            ("offload_param", self.offload_param, 3),
        ):
            if place is None or place.device == "none":
                continue
            if self.stage < least:
                message = (
                    f"is {place.device}, which needs {at('stage')} {least}{'' if least == 3 else ' or more'}, found "
                    f"{self.stage}. Set the stage to {least} (on one rank, too), or remove the section"
                )
                yield f"{name}.device", message, ConflictError
            kinds = {"device": place.device, "gradients": getattr(place, "gradients", None)}
            on_disk = [key for key, kind in kinds.items() if kind == "nvme"]
            if on_disk and place.nvme_path in (None, "", "none", "None"):
                message = f"is not set, but `{on_disk[0]}` is nvme: name a directory on a fast disk, or write cpu"
                yield f"{name}.nvme_path", message, ConfigError
        state = self.offload_optimizer
        if state is not None and state.device != "none" and state.ratio < 1 and self.stage != 3:
            message = f"is {state.ratio:g}; below 1 it needs {at('stage')} 3, found {self.stage}"
            yield "offload_optimizer.ratio", message, ConflictError
