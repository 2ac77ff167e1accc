"""DeepSpeedConfig: a configuration outside of an engine."""

from __future__ import annotations

from typing import Any

from shardwise.comm.api import get_world_size
from shardwise.config import Config, load, resolve
from shardwise.errors import UsageError
from shardwise.utils.logging import logger
from shardwise.zero.plan import TABLE


class DeepSpeedConfig:
    """A configuration that has been checked, with what it leaves open filled in.

    Sections and keys are attributes by their names in the file (`config.zero_optimization.stage`); so are the names
    that only this class has, given below.

    Args:
        config: dict, path, or base64 or text JSON.
        mpu: gives the number of data-parallel ranks by `get_data_parallel_world_size()`; None: all ranks.
        mesh_device: accepted if None.

    Attributes:
        world_size: number of data-parallel ranks it was made for.
        zero_config: section `zero_optimization`.
        zero_enabled: whether anything is sharded.
        zero_optimization_stage: the stage.

    Raises:
        ConfigError: it is wrong; the message names every offending key.

    >>> DeepSpeedConfig({"train_batch_size": 8}).train_micro_batch_size_per_gpu
    8
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if mesh_device is not None:
            raise UsageError("DeepSpeedConfig(mesh_device=...): meshes of several dimensions are not built yet")
        self.world_size = get_world_size() if mpu is None else int(mpu.get_data_parallel_world_size())
        self._resolution = resolve(config, world_size=self.world_size)
        self._param_dict = self._resolution.raw
        self.zero_config = self._resolution.config.zero_optimization
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = TABLE[self.zero_config.stage].optimizer

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in Config.model_fields:
            return getattr(self._resolution.config, name)
        raise AttributeError(f"DeepSpeedConfig has no attribute {name!r}, and configurations no key of this name")

    def print_user_config(self) -> None:
        """Log the configuration as it was given."""
        logger.info("configuration: %s", self._param_dict)


def load_ds_config(config: Any) -> dict[str, Any]:
    """Return a configuration as a dictionary; a path is read."""
    return load(config)
