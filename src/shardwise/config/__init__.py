"""The configuration: schema, reading, checking, and resolving "auto".

One strict schema (`Config`) describes every key. `resolve` gives a reason for each value that the user did not write,
or raises one error that lists all problems. torch is imported only to look up one of its optimizers or schedules.
"""

from .deepspeed import accept
from .export import KeyRow, describe, effective, json_schema
from .integrations import assume
from .problems import Note
from .read import load
from .resolve import Resolution, resolve
from .runtime_facts import Facts
from .schema import Config

__all__ = [
    "Config",
    "Facts",
    "KeyRow",
    "Note",
    "Resolution",
    "accept",
    "assume",
    "describe",
    "effective",
    "json_schema",
    "load",
    "resolve",
]
