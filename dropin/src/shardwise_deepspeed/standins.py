"""Stubs: importable objects that raise with the reason when used, because scripts import names for unused options.

A stub class can be a base class, an annotation and an argument of `isinstance` (false). A stub function can be passed
on, a stub constant held. Construction, calls, attributes of the class and any use of a value raise.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, NoReturn

from shardwise.errors import AbsentAttributeError, AbsentNameError
from shardwise_deepspeed.entries import Stub


class _Class(ABCMeta):
    """Metaclass of stub classes and their subclasses (derived from abc's, to combine with abstract classes)."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python looks these up and expects AttributeError
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise AbsentAttributeError(_text_of(cls))


def _text_of(cls: type) -> str:
    return next(vars(base)["_shardwise_reason"] for base in cls.__mro__ if "_shardwise_reason" in vars(base))


def _refuse_to_make(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
    raise AbsentNameError(_text_of(cls))


class _Value:
    """An unknown constant, which can only be held and printed."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AbsentAttributeError(self._text)

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AbsentNameError(self._text)

    __call__ = __bool__ = __len__ = __iter__ = __contains__ = __getitem__ = __str__ = __format__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = __int__ = __float__ = __index__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __or__ = __and__ = _refuse


def make(name: str, entry: Stub, text: str) -> Any:
    """Return a stub with a name, its entry, and the error's message `text`."""
    if entry.kind in ("class", "exception"):
        bases = (Exception,) if entry.kind == "exception" else ()  # for `except`
        body = {"__module__": entry.home, "__doc__": f"Stands in: {text}.", "__new__": _refuse_to_make}
        return _Class(name, bases, {**body, "_shardwise_reason": text})
    if entry.kind == "function":

        def stand_in(*args: Any, **kwargs: Any) -> NoReturn:
            raise AbsentNameError(text)

        stand_in.__name__ = stand_in.__qualname__ = name
        stand_in.__module__, stand_in.__doc__ = entry.home, f"Stands in: {text}."
        return stand_in
    return _Value(text)
