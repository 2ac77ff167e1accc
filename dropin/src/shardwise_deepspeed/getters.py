"""Engine methods that each return one configuration value, under the names that existing scripts call.

New code reads `config.zero_optimization` and so on. Values of the running engine are in `state_getters`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.precision.autocast import autocast_dtype
from shardwise.precision.dtypes import parse_dtype, policy_from_config
from shardwise.zero.units.plan import TABLE, Row
from shardwise_deepspeed.key_getters import KeyGetters

if TYPE_CHECKING:
    from shardwise.config import Resolution


class ConfigGetters(KeyGetters):
    """The methods of getters.toml, and those that compute their value.

    >>> from shardwise.config import resolve
    >>> class Reader(ConfigGetters):
    ...     def __init__(self, resolution): self._resolution = resolution
    >>> Reader(resolve({"train_batch_size": 8, "zero_optimization": {"stage": 2}})).zero_optimization_stage()
    2
    """

    _resolution: Resolution

    def zero_optimization(self) -> bool:
        """Return True if optimizer state is sharded."""
        return bool(_row(self).optimizer)

    def zero_optimization_partition_gradients(self) -> bool:
        """Return True if gradients are sharded."""
        return bool(_row(self).gradients)

    def zero_optimization_partition_weights(self) -> bool:
        """Return True if parameters are sharded."""
        return bool(_row(self).parameters)

    def zero_has_nvme_offload(self) -> bool:
        """Return True if parameters or optimizer state are offloaded to disk."""
        zero = self._resolution.config.zero_optimization
        return any(at is not None and at.device == "nvme" for at in (zero.offload_param, zero.offload_optimizer))

    def optimizer_params(self) -> dict[str, Any] | None:
        """Return `optimizer.params` of the configuration; None if empty."""
        return self._resolution.config.optimizer.params or None

    def scheduler_params(self) -> dict[str, Any] | None:
        """Return `scheduler.params` of the configuration; None if empty."""
        return self._resolution.config.scheduler.params or None

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """Return (dtype of the parameters, dtype of the gradient accumulator)."""
        policy = policy_from_config(self._resolution.config)
        return policy.compute_dtype or torch.float32, policy.accumulate_dtype

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """Return the dtype of torch_autocast, whether or not it is on; None if it is off and has none."""
        name = self._resolution.config.torch_autocast.dtype
        return autocast_dtype(self._resolution.config) if name is None else parse_dtype(name, "torch_autocast.dtype")

    def initial_dynamic_scale(self) -> float:
        """Return the first loss scale."""
        return 2**self._resolution.config.fp16.initial_scale_power

    def dynamic_loss_scale_args(self) -> dict[str, Any] | None:
        """Return settings of the dynamic loss scale, None if the scale is static or disabled."""
        fp16 = self._resolution.config.fp16
        if not fp16.enabled or fp16.loss_scale:
            return None
        return {
            "init_scale": 2**fp16.initial_scale_power,
            "scale_window": fp16.loss_scale_window,
            "delayed_shift": fp16.hysteresis,
            "consecutive_hysteresis": fp16.consecutive_hysteresis,
            "min_scale": fp16.min_loss_scale,
        }

    def amp_params(self) -> dict[str, Any]:
        """Return further keys of section `amp`."""
        return dict(self._resolution.config.amp.model_extra or {})

    def compile_autosp(self) -> bool:
        """Return True if `compile.passes` has "autosp"."""
        return "autosp" in (self._resolution.config.compile.passes or ())

    def compile_autotp(self) -> bool:
        """Return True if `compile.passes` has "autotp"."""
        return "autotp" in (self._resolution.config.compile.passes or ())

    def checkpoint_writer_enabled(self) -> bool:
        """Return True if there is a section `checkpoint.writer`."""
        return self._resolution.config.checkpoint.writer is not None

    def wall_clock_breakdown(self) -> bool:
        """Return True if times of parts of a step are logged."""
        return self._resolution.config.wall_clock_breakdown or self._resolution.config.flops_profiler.enabled

    def is_elastic_model_parallel_supported(self) -> bool:
        """Return True if section `elasticity` is on, in a version with model parallelism."""
        return self._resolution.config.elasticity.enabled and self._resolution.config.elasticity.version >= 0.2


def _row(getters: ConfigGetters) -> Row:
    return TABLE[getters._resolution.config.zero_optimization.stage]
