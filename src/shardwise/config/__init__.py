"""The configuration: reading it, checking it, and filling in what it leaves open.

One strict schema (`Config`) describes every key. A configuration goes through `resolve`, which either returns
a `Resolution` with every value settled and a reason for each that the user did not write, or raises one error
that lists everything that is wrong. Nothing here imports torch unless an optimizer or schedule of torch has
to be looked up.
"""

from .arguments import CONFIG_ARGUMENTS, config_arguments, config_path, config_source
from .deepspeed import accept
from .export import KeyRow, describe, effective, json_schema
from .placeholders import assume
from .problems import Note
from .read import load
from .resolve import Resolution, resolve
from .runtime_facts import Facts
from .schema import Config

__all__ = [
    "CONFIG_ARGUMENTS",
    "Config",
    "Facts",
    "KeyRow",
    "Note",
    "Resolution",
    "accept",
    "assume",
    "config_arguments",
    "config_path",
    "config_source",
    "describe",
    "effective",
    "json_schema",
    "load",
    "resolve",
]
