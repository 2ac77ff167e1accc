"""Engines of `deepspeed.initialize`: this library's, with the getters of DeepSpeed's and reasons for absent members."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise import engine, pipe
from shardwise_deepspeed.entries import absent_member
from shardwise_deepspeed.getters import ConfigGetters


class _Explained:
    """Module whose errors for absent members of DeepSpeed's class (its path, its word in messages) have the reason."""

    _absent_from = ("", "")

    if not TYPE_CHECKING:  # For type checkers an unknown name is one of `nn.Module`.

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                path, word = self._absent_from
                if (error := absent_member(path, name, word)) is not None:
                    raise error from None
                raise


class DeepSpeedEngine(_Explained, engine.Engine, ConfigGetters):
    """An engine with DeepSpeed's getters of the configuration."""

    _absent_from = ("deepspeed.DeepSpeedEngine", "engine")
    store_checkpoint = engine.Engine.save_checkpoint

    def get_pld_theta(self) -> float | None:
        """Return the part of layer outputs that progressive layer dropping keeps; None without it."""
        return None if self.progressive_layer_drop is None else self.progressive_layer_drop.get_theta()


class PipelineEngine(DeepSpeedEngine, engine.PipelineEngine):
    """An engine of a pipeline with DeepSpeed's getters."""


class PipelineModule(_Explained, pipe.PipelineModule):
    """`shardwise.pipe.PipelineModule`, with reasons for absent members."""

    _absent_from = ("deepspeed.runtime.pipe.module.PipelineModule", "PipelineModule")
