"""Accounting of every byte that an engine holds."""

from shardwise.memory.accountant import Accountant, Category

__all__ = ["Accountant", "Category"]
