"""Builders of operators, which build nothing: each reports the module of shardwise with the feature, if there is one.

Scripts check `CPUAdamBuilder().is_compatible()` before they use a feature, and call `load()` to compile it early. A
builder is compatible if the feature works, on any machine and without a compiler.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import ClassVar

import torch

from shardwise.errors import NotBuiltError, UsageError
from shardwise_deepspeed.entries import read, reasons

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


def _builders() -> Iterator[type[OpBuilder]]:
    found = read("operators.toml")
    rows = [(cls, name, home, "") for cls, (name, home) in found["served"].items()]
    rows += [(cls, name, None, reasons().get(why, why)) for cls, (name, why) in found["absent"].items()]
    for cls, name, home, reason in rows:
        text = f"The operator {name!r}: {f'`{home}` does its work' if home else reason}."
        body = {"NAME": name, "home": home, "reason": reason, "__doc__": text, "__module__": __name__}
        yield type(cls, (OpBuilder,), body)


_BY_CLASS = {cls.__name__: cls for cls in _builders()}
globals().update(_BY_CLASS)

ALL_OPS: dict[str, OpBuilder] = {cls.NAME: cls() for cls in _BY_CLASS.values()}
"""Name of an operator -> its builder."""

COMPATIBLE_OPS: dict[str, bool] = {name: builder.is_compatible() for name, builder in ALL_OPS.items()}
"""Name of an operator -> whether the feature works here, hence also whether it is installed."""


def op_builder(class_name: str) -> type[OpBuilder] | None:
    """Return the class of a builder by name, or None."""
    return _BY_CLASS.get(class_name)


def create_op_builder(class_name: str) -> OpBuilder:
    """Return a builder by class name. Raises UsageError if the name is unknown."""
    found = op_builder(class_name)
    if found is None:
        raise UsageError(f"no builder of operators is called {class_name!r}; there are {', '.join(sorted(_BY_CLASS))}")
    return found()
