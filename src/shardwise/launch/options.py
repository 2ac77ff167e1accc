"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

Request = TypeVar("Request")


def command_of(kind: type[Request], run: Callable[[Request], None]) -> Callable[..., None]:
    """Return a function for typer that calls `run`, whose docstring it has, with a `kind`. Its parameters are the
    annotated fields of `kind`; a field that is a tuple may be repeated.
    """

    def command(**given: Any) -> None:
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in given.items()}
        # Typer gives None for an option that may be repeated and is absent.
        run(kind(**{name: value for name, value in fields.items() if not (value is None and name in repeated)}))

    hints, parameters, repeated = get_type_hints(kind, include_extras=True), [], set()
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        hint, default = hints[field.name], field.default
        if get_origin(hint) is not Annotated:
            continue
        given, option = get_args(hint)[:2]
        if get_origin(given) is tuple:
            repeated.add(field.name)
            given, default = (list[str], default) if default is dataclasses.MISSING else (list[str] | None, None)
        empty = inspect.Parameter.empty if default is dataclasses.MISSING else default
        annotation = Annotated[given, option]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=empty, annotation=annotation)
        )
    command.__doc__ = run.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
