"""Checks of `compression`: method, parameters, and keys that it cannot be combined with."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.errors import ConflictError

from .argument_models import check, checked
from .problems import Problem
from .schema.base import Arguments
from .schema.gradients import METHODS, DGCOptions, TopKOptions
from .schema.root import Config
from .schema_index import nearest

_SENDING_VALUES = ("topk", "dgc")
_AT = "compression.params.{}"


def method_parameters(config: Config) -> Arguments | None:
    """Return the parameters of the configured method, defaults filled in, or None if compression is off.

    >>> from shardwise.config import resolve
    >>> config = {"train_batch_size": 2, "compression": {"type": "TOPK", "params": {"ratio": 0.1}}}
    >>> method_parameters(resolve(config).config)
    TopKOptions(ratio=0.1, start_compressing_after_step=0, use_error_feedback=True)
    """
    name = config.compression.method
    return None if name is None else checked(METHODS[name], config.compression.params, _AT, name)


def sends_values(config: Config) -> bool:
    """Return True if the configured method sends selected entries, in the communication dtype."""
    return config.compression.method in _SENDING_VALUES


def check_compression(config: Config) -> list[Problem]:
    """Return the problems of the method's name and parameters, and of keys that contradict it."""
    name, params = config.compression.method, config.compression.params
    if name is None:
        off = config.compression.type is not None or not params
        reason = 'the compression has no `type`; add one, such as "type": "powerSGD"'
        return [] if off else [Problem("compression.params", reason)]
    if name not in METHODS:
        close = nearest(name, list(METHODS))
        advice = f'did you mean "{close}"?' if close else f"known: {', '.join(METHODS)}"
        return [Problem("compression.type", f"there is no method {name!r} of gradient compression; {advice}")]
    found = check(METHODS[name], params, _AT, name)
    return [*(found if isinstance(found, list) else ()), *_wire(config, name)]


def doubtful_compression(config: Config) -> list[str]:
    """Return settings that are allowed and probably not meant."""
    method = method_parameters(config)
    if isinstance(method, TopKOptions | DGCOptions) and method.ratio >= 0.5:
        return [
            f"compression.params.ratio: an entry that is sent takes its value and 4 bytes for its position, so "
            f"{method.ratio:g} of them are no fewer bytes than the gradient"
        ]
    return []


def _wire(config: Config, name: str) -> Iterator[Problem]:
    if config.communication_data_type == "fp16" and sends_values(config):
        reason = (
            f'"fp16" cannot be combined with `compression.type` "{name}": what has been kept and is sent later may be '
            'larger than fp16 can hold; use "bf16" or "fp32"'
        )
        yield Problem("communication_data_type", reason, ConflictError)
