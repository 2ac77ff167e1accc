"""What a name gives whose feature is not there: something to import, that raises with the reason when it is used.

Scripts import at their top what they use only under some option. So a class can be derived from, annotated with and
asked about (`isinstance` is false), a function can be passed on, and a constant can be held. Making an object, a call,
or any use of a value raises; reading an attribute of the class does, too.
"""

from __future__ import annotations

from abc import ABCMeta
from typing import Any, NoReturn

from shardwise.dropin.entries import Stub
from shardwise.errors import AbsentAttributeError, AbsentNameError


class _Class(ABCMeta):
    """Class of the classes, also of those that scripts derive from them (abc's, to mix with abstract ones)."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python itself asks for these, and takes an AttributeError for an answer
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise AbsentAttributeError(_text_of(cls))


def _text_of(cls: type) -> str:
    """Return the reason of the stand-in among the bases of a class."""
    return next(vars(base)["_shardwise_reason"] for base in cls.__mro__ if "_shardwise_reason" in vars(base))


def _refuse_to_make(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
    raise AbsentNameError(_text_of(cls))


class _Value:
    """A constant that is not known. It can be held and shown, and nothing else."""

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


def make(name: str, home: str, entry: Stub, text: str) -> Any:
    """Return what stands in for a name.

    Args:
        name: of the class, function or value.
        home: the module that it says it is of.
        entry: its row.
        text: what is raised.
    """
    if entry.kind in ("class", "exception"):
        bases = (Exception,) if entry.kind == "exception" else ()  # which `except` asks for
        body = {"__module__": home, "__doc__": f"Stands in: {text}.", "__new__": _refuse_to_make}
        return _Class(name, bases, {**body, "_shardwise_reason": text})
    if entry.kind == "function":

        def stand_in(*args: Any, **kwargs: Any) -> NoReturn:
            raise AbsentNameError(text)

        stand_in.__name__ = stand_in.__qualname__ = name
        stand_in.__module__, stand_in.__doc__ = home, f"Stands in: {text}."
        return stand_in
    return _Value(text)
