"""Section of elastic batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwise.errors import ElasticConfigError

from .base import At, ConfigSection, Contradictions, Int, Ints, key
from .tables import with_unused_keys

VERSIONS = (0.1, 0.2)


@with_unused_keys
class Elasticity(ConfigSection):
    """`elasticity`: a global batch size that many numbers of ranks can keep."""

    enabled: bool = key(False, "Choose the three batch sizes from this section and the number of ranks.")
    max_train_batch_size: Int | None = key(None, "Largest acceptable `train_batch_size`; required.", gt=0, le=10**9)
    micro_batch_sizes: Ints | None = key(None, "Acceptable values of `train_micro_batch_size_per_gpu`; required.")
    min_gpus: Int = key(1, "Fewest ranks of the job.", ge=1)
    max_gpus: Int = key(10_000, "Most ranks of the job.", ge=1)
    prefer_larger_batch: bool = key(
        True,
        "Of batch sizes that fit equally many numbers of ranks take the largest; false: the smallest.",
        names=("prefer_large_batch",),
    )
    ignore_non_elastic_batch_info: bool = key(
        False, "Ignore the three batch keys; false: refuse them, because this section decides."
    )
    version: float = key(0.2, "0.1: any number of ranks. 0.2: whole nodes, and model parallelism.", words="0.1 or 0.2")
    num_gpus_per_node: Int = key(1, "Version 0.2: ranks of a node.", ge=1)
    model_parallel_size: Int = key(1, "Version 0.2: ranks that share a copy of the model or a sequence.", ge=1)

    def contradictions(self, at: At) -> Contradictions:
        """Yield what keeps the section from naming a batch size."""
        if self.enabled:
            for path, message in self._problems(at):
                yield path, message, ElasticConfigError

    def _problems(self, at: Callable[[str], str]) -> Iterator[tuple[str, str]]:
        largest, micros = self.max_train_batch_size, self.micro_batch_sizes
        if largest is None:
            yield "max_train_batch_size", "is missing; give the largest acceptable global batch size"
        if not micros:
            yield "micro_batch_sizes", "is missing; list the acceptable micro-batch sizes, such as [2, 4, 6]"
        elif min(micros) < 1:
            yield "micro_batch_sizes", f"has {min(micros)}; a micro-batch has one sample or more"
        elif largest is not None and max(micros) > largest:
            yield "micro_batch_sizes", f"has {max(micros)}, more than {at('max_train_batch_size')} = {largest}"
        if self.min_gpus > self.max_gpus:
            yield "min_gpus", f"is {self.min_gpus}, more than {at('max_gpus')} = {self.max_gpus}; exchange them"
        if self.version not in VERSIONS:
            yield "version", f"is {self.version:g}, which is unknown; write 0.1 or 0.2"
        elif self.version == 0.1 and self.model_parallel_size > 1:
            message = f"is {self.model_parallel_size}, and version 0.1 has no model parallelism; write"
            yield "model_parallel_size", f"{message} {at('version')} = 0.2"
        elif self.version == 0.2 and self.num_gpus_per_node % self.model_parallel_size:
            message = f"is {self.model_parallel_size}, which does not divide {at('num_gpus_per_node')}"
            yield "model_parallel_size", f"{message} = {self.num_gpus_per_node}"
