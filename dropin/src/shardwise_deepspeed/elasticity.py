"""Elastic batch sizes by DeepSpeed's functions, and the command `ds_elastic`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from shardwise.config import load
from shardwise.config.elasticity import SCHEDULED, check_scheduled, elastic_batch, micro_batch, section_of
from shardwise.errors import ElasticConfigError
from shardwise_deepspeed.options import Parser, run


def compute_elastic_config(
    ds_config: Mapping[str, Any], target_deepspeed_version: str, world_size: int = 0, return_microbatch: bool = False
) -> tuple[int, list[int]] | tuple[int, list[int], int]:
    """Return the global batch size and the numbers of ranks that can keep it; with `world_size` or `return_microbatch`
    also the micro-batch size (of `WORLD_SIZE` ranks if `world_size` is 0). `target_deepspeed_version` is not used.

    Raises:
        ElasticConfigError: the section `elasticity` is missing, off, incomplete or contradictory.
        ElasticWorldSizeError: so many ranks cannot keep the batch size.

    >>> section = {"enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17],
    ...            "min_gpus": 32, "max_gpus": 1500, "version": 0.1}
    >>> batch, valid, micro = compute_elastic_config({"elasticity": section}, "0.18.0", world_size=64)
    >>> batch, len(valid), micro
    (9792, 23, 17)
    """
    if not elasticity_enabled(ds_config):
        raise ElasticConfigError(
            "elasticity: the configuration has no such section, or it is off; add "
            '"elasticity": {"enabled": true, "max_train_batch_size": N, "micro_batch_sizes": [...]}'
        )
    section = section_of(ds_config["elasticity"])
    check_scheduled(section, os.environ)
    batch = elastic_batch(section)
    valid = list(batch.world_sizes)
    ranks = world_size or (int(os.environ.get("WORLD_SIZE", 0)) if return_microbatch else 0)
    if not ranks:
        if return_microbatch:
            raise ElasticConfigError("elasticity: a micro-batch size needs the number of ranks; pass world_size")
        return batch.train, valid
    return batch.train, valid, micro_batch(section, batch, ranks)


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return True if section `elasticity` of a configuration is on."""
    return bool((ds_config.get("elasticity") or {}).get("enabled", False))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Raise ElasticConfigError if the scheduler's section (DEEPSPEED_ELASTICITY_CONFIG) has another batch or version.
    Without the variable nothing is compared.
    """
    if SCHEDULED in os.environ:
        check_scheduled(section_of(runtime_elastic_config_dict), os.environ)


def main(args: list[str] | None = None) -> None:
    """Run `ds_elastic` and exit with its code; `args` default to those of this process."""
    run("ds_elastic", _show, args)


def _show(arguments: list[str]) -> int:
    given = Parser("ds_elastic").given(arguments)
    config = load(given.config)
    found = compute_elastic_config(config, "", given.world_size)
    print(json.dumps(config["elasticity"], indent=4, sort_keys=True))
    names = ("final_batch_size", "valid_gpus", "micro_batch_size")
    for name, value in zip(names, found, strict=False):
        print(f"{name} {'.' * (20 - len(name))} {value}")
    return 0
