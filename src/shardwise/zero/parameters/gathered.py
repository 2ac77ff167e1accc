"""GatheredParameters: unsharded parameters outside of forward and backward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import nn

from shardwise.comm.ledger import user_line
from shardwise.errors import UsageError
from shardwise.utils.logging import warn_once
from shardwise.zero.units import released


class GatheredParameters:
    """Unshard parameters for the duration of a `with` block; every rank must enter it.

    A declared part of a tensor (`shardwise.declare_part`) is the whole tensor in the block, in its global shape. It can
    be read, initialised or loaded as in one process. Its layer cannot compute in the block.

    Args:
        params: a parameter or an iterable of parameters; parameters of no engine are ignored.
        modifier_rank: global rank whose changes all ranks take over, into fp32 master weights too. None drops changes
            to sharded parameters and to parts, with a warning.
        fwd_module: accepted for existing code, without effect, because uses outside of the module are detected.
        enabled: False disables the block.

    Raises:
        UsageError: a parameter is gathered by an enclosing block, or some elements of a tensor are on no rank, or
            belong to other parameters.

    Example:
        >>> import shardwise, torch
        >>> layer = torch.nn.Linear(2, 2)
        >>> with shardwise.zero.GatheredParameters(layer.weight, modifier_rank=0):
        ...     _ = layer.weight.data.zero_()
    """

    _open: set[int] = set()  # noqa: RUF012  (parameters gathered by an open block in this process)

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        if isinstance(params, nn.Parameter):
            params = [params]
        found: dict[int, nn.Parameter] = {}
        if enabled and isinstance(params, Iterable):
            for parameter in params:
                if isinstance(parameter, nn.Parameter) and released.owner_of(parameter) is not None:
                    found[id(parameter)] = parameter
        self._parameters = list(found.values())
        self._modifier_rank = modifier_rank
        self._gathered: list[tuple[released.Owner, list[nn.Parameter], Any]] = []

    def __enter__(self) -> GatheredParameters:
        for parameter in self._parameters:
            if id(parameter) in self._open:
                raise UsageError(
                    f"a parameter of shape {tuple(parameter.shape)} is already gathered by an enclosing "
                    "GatheredParameters; close that block first, or gather all parameters in one block"
                )
        owners: dict[int, tuple[released.Owner, list[nn.Parameter]]] = {}
        for parameter in self._parameters:
            owner = released.owner_of(parameter)
            assert owner is not None
            owners.setdefault(id(owner), (owner, []))[1].append(parameter)
        try:
            for owner, parameters in owners.values():
                self._gathered.append((owner, parameters, owner.gather(parameters)))
        except BaseException:
            self._put_back(None)
            raise
        self._open.update(id(parameter) for parameter in self._parameters)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.difference_update(id(parameter) for parameter in self._parameters)
        if kind is None and self._modifier_rank is None:
            self._warn_of_discarded()
        self._put_back(self._modifier_rank if kind is None else None)

    def _warn_of_discarded(self) -> None:
        names = [name for owner, _, gathered in self._gathered for name in owner.discarded(gathered)]
        if names:
            which = f"parameter {names[0]!r} was" if len(names) == 1 else f"{names[0]!r} and {len(names) - 1} more were"
            warn_once(
                f"GatheredParameters at {user_line()}: {which} changed in the block, and the change is lost, because "
                "no modifier_rank is given and the values are sharded. Pass modifier_rank=0 to give rank 0's values to "
                "all ranks; if the values are changed for the block only, ignore this"
            )

    def _put_back(self, src: int | None) -> None:
        with contextlib.ExitStack() as stack:  # all of them, also after an error
            while self._gathered:
                owner, parameters, gathered = self._gathered.pop()
                stack.callback(owner.put_back, parameters, gathered, src)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Accepted for existing code, without effect, because uses outside of the parameter's own module are detected.

    Raises UsageError if the arguments are not a module and a parameter.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise UsageError(
            "register_external_parameter(module, parameter) expects an nn.Module and an nn.Parameter, got "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Counterpart of `register_external_parameter`, without effect."""
    register_external_parameter(module, parameter)
