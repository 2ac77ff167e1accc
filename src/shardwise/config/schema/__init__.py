"""The schema of the configuration: one strict pydantic model per section, `Config` at the root."""

from .base import AUTO, ConfigSection
from .root import Config
from .zero import ZeroConfig

__all__ = ["AUTO", "Config", "ConfigSection", "ZeroConfig"]
