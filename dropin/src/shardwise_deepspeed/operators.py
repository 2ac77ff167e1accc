"""Builders of operators, which build nothing: each reports the module of shardwise with the feature, if there is one.

Scripts check `CPUAdamBuilder().is_compatible()` before they use a feature, and call `load()` to compile it early. A
builder is compatible if the feature works, on any machine and without a compiler.
"""

from __future__ import annotations

import importlib
import logging
from types import ModuleType
from typing import ClassVar

import torch

from shardwise.errors import NotBuiltError, UsageError
from shardwise_deepspeed.entries import reasons

_WHY = reasons()
_logger = logging.getLogger("shardwise")


class OpBuilder:
    """Base of the builders: `home` is the module with the feature, or None with the `reason`."""

    NAME: ClassVar[str] = ""
    home: ClassVar[str | None] = None
    reason: ClassVar[str] = "it is the base of the builders"

    @property
    def name(self) -> str:
        """Name of the operator."""
        return self.NAME

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Return True if torch was built for ROCm."""
        return torch.version.hip is not None

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True if the feature works here; with `verbose` log why it does not."""
        if self.home is None and verbose:
            _logger.warning("%s: %s", type(self).__name__, self.reason)
        return self.home is not None

    def load(self, verbose: bool = True) -> ModuleType:
        """Return the module with the feature, not the operator's functions (but `aio_handle`). Raises NotBuiltError."""
        if self.home is None:
            raise NotBuiltError(f"{type(self).__name__}().load(): {self.reason}.")
        return importlib.import_module(self.home)


def _builder(cls: str, name: str, home: str | None, reason: str) -> type[OpBuilder]:
    text = f"The operator {name!r}: {f'`{home}` does its work' if home else reason}."
    return type(
        cls, (OpBuilder,), {"NAME": name, "home": home, "reason": reason, "__doc__": text, "__module__": __name__}
    )


def _done(cls: str, name: str, home: str) -> type[OpBuilder]:
    return _builder(cls, name, home, "")


def _missing(cls: str, name: str, reason: str) -> type[OpBuilder]:
    return _builder(cls, name, None, reason)


CPUAdamBuilder = _done("CPUAdamBuilder", "cpu_adam", "shardwise.optim.adam")
CPUAdagradBuilder = _done("CPUAdagradBuilder", "cpu_adagrad", "shardwise.optim.adagrad")
CPULionBuilder = _done("CPULionBuilder", "cpu_lion", "shardwise.optim.lion")
FusedAdamBuilder = _done("FusedAdamBuilder", "fused_adam", "shardwise.optim.adam")
FusedLambBuilder = _done("FusedLambBuilder", "fused_lamb", "shardwise.optim.lamb")
FusedLionBuilder = _done("FusedLionBuilder", "fused_lion", "shardwise.optim.lion")
AsyncIOBuilder = _done("AsyncIOBuilder", "async_io", "shardwise_deepspeed.aio")
GDSBuilder = _missing("GDSBuilder", "gds", _WHY["direct"])
PinMemoryBuilder = _missing("PinMemoryBuilder", "pin_memory", "memory is pinned by torch itself (tensor.pin_memory())")
SparseAttnBuilder = _missing("SparseAttnBuilder", "sparse_attn", _WHY["sparse"])
RandomLTDBuilder = _missing("RandomLTDBuilder", "random_ltd", _WHY["data"])
EvoformerAttnBuilder = _missing("EvoformerAttnBuilder", "evoformer_attn", _WHY["layers"])
TransformerBuilder = _missing("TransformerBuilder", "transformer", _WHY["layers"])
StochasticTransformerBuilder = _missing("StochasticTransformerBuilder", "stochastic_transformer", _WHY["layers"])
DeepCompileBuilder = _missing("DeepCompileBuilder", "dc", _WHY["compiler"])
FPQuantizerBuilder = _missing("FPQuantizerBuilder", "fp_quantizer", _WHY["linear"])
QuantizerBuilder = _missing("QuantizerBuilder", "quantizer", _WHY["compress"])
InferenceBuilder = _missing("InferenceBuilder", "transformer_inference", _WHY["inference"])
InferenceCoreBuilder = _missing("InferenceCoreBuilder", "inference_core_ops", _WHY["inference"])
InferenceCutlassBuilder = _missing("InferenceCutlassBuilder", "cutlass_ops", _WHY["inference"])
RaggedOpsBuilder = _missing("RaggedOpsBuilder", "ragged_device_ops", _WHY["inference"])
RaggedUtilsBuilder = _missing("RaggedUtilsBuilder", "ragged_ops", _WHY["inference"])
SpatialInferenceBuilder = _missing("SpatialInferenceBuilder", "spatial_inference", _WHY["inference"])
UtilsBuilder = _missing("UtilsBuilder", "utils", "tensors are flattened by torch itself")

ALL_OPS: dict[str, OpBuilder] = {cls.NAME: cls() for cls in OpBuilder.__subclasses__()}
"""Name of an operator -> its builder."""

COMPATIBLE_OPS: dict[str, bool] = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
"""Name of an operator -> whether the feature works here, hence also whether it is installed."""

_BY_CLASS = {type(builder).__name__: type(builder) for builder in ALL_OPS.values()}


def op_builder(class_name: str) -> type[OpBuilder] | None:
    """Return the class of a builder by name, or None."""
    return _BY_CLASS.get(class_name)


def create_op_builder(class_name: str) -> OpBuilder:
    """Return a builder by class name. Raises UsageError if the name is unknown."""
    found = op_builder(class_name)
    if found is None:
        raise UsageError(f"no builder of operators is called {class_name!r}; there are {', '.join(sorted(_BY_CLASS))}")
    return found()
