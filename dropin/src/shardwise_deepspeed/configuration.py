"""DeepSpeedConfig: a configuration without an engine; and functions that read single keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.comm.api import get_world_size
from shardwise.config import Config, accept, load, resolve
from shardwise.config.export import without_secrets
from shardwise.config.normalize import scan
from shardwise.config.read import Document
from shardwise.config.schema.precision import BF16, FP16
from shardwise.config.validate import validate
from shardwise.errors import UsageError
from shardwise.utils.logging import logger
from shardwise.zero.units.plan import TABLE
from shardwise_deepspeed.constants import GRADIENT_CLIPPING_DEFAULT


class DeepSpeedConfig:
    """A resolved configuration, from a dict, a path, or base64 or text JSON.

    Sections and keys are attributes by their names in the file (`config.zero_optimization.stage`). `mpu` gives the
    number of data-parallel ranks (`world_size`) by `get_data_parallel_world_size()`; None: all ranks. `mesh_device` is
    None. Raises ConfigError with every offending key.

    >>> DeepSpeedConfig({"train_batch_size": 8}).train_micro_batch_size_per_gpu
    8
    """

    def __init__(self, config: Any, mpu: Any = None, mesh_device: Any = None) -> None:
        if mesh_device is not None:
            raise UsageError("DeepSpeedConfig(mesh_device=...): meshes of several dimensions are not built yet")
        document = accept(config)
        self.world_size = get_world_size() if mpu is None else int(mpu.get_data_parallel_world_size())
        ranks = self.world_size if mpu is None else self.world_size * _ranks_of_a_copy(document)
        self._resolution = resolve(document, world_size=ranks)
        self._param_dict = self._resolution.written
        self.zero_config = self._resolution.config.zero_optimization
        self.zero_optimization_stage = self.zero_config.stage
        self.zero_enabled = bool(TABLE[self.zero_config.stage].optimizer)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in Config.model_fields:
            return getattr(self._resolution.config, name)
        raise AttributeError(f"DeepSpeedConfig has no attribute {name!r}, and configurations no key of this name")

    def print_user_config(self) -> None:
        """Log the configuration as given, without secrets."""
        logger.info("configuration: %s", without_secrets(self._param_dict))


def _ranks_of_a_copy(document: Document) -> int:
    """Return the number of ranks that share a copy of the model or a sequence, as configured."""
    config, _, _ = validate(scan(document.data))
    stages = config.pipeline.stages
    positions = 1 if stages == "auto" or config.pipeline.enabled is False else stages
    return positions * config.tensor_parallel.size * config.sequence_parallel_size


def load_ds_config(config: Any) -> dict[str, Any]:
    """Return a configuration as a dictionary; a path is read."""
    return load(config)


def get_gradient_clipping(param_dict: Mapping[str, Any]) -> float:
    """Return `gradient_clipping` of a configuration."""
    return param_dict.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT)


def get_bfloat16_config(param_dict: Mapping[str, Any]) -> BF16:
    """Return section `bf16` (or its old name `bfloat16`) of a configuration."""
    section: BF16 = section_of("bf16", param_dict.get("bf16") or param_dict.get("bfloat16"))
    return section


def get_float16_config(param_dict: Mapping[str, Any]) -> FP16:
    """Return section `fp16` of a configuration."""
    section: FP16 = section_of("fp16", param_dict.get("fp16"))
    return section


def section_of(name: str, values: Any) -> Any:
    """Return a section of a configuration, with its defaults."""
    return getattr(resolve(accept({name: {} if values is None else values, "train_batch_size": 1})).config, name)


def get_scalar_param(param_dict: Mapping[str, Any], param_name: str, param_default_value: Any) -> Any:
    """Return a value of a dictionary, or a default."""
    return param_dict.get(param_name, param_default_value)


get_list_param = get_dict_param = get_scalar_param


def dict_raise_error_on_duplicate_keys(ordered_pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return pairs as a dictionary (`object_pairs_hook`). Raises ValueError for a duplicate."""
    pairs = list(ordered_pairs)
    twice = [str(key) for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"keys that occur twice: {', '.join(twice)}")
    return dict(pairs)
