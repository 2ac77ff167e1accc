"""`shardwise run`: start a script as several processes, on this machine or on several."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from shardwise.launch.job import Job
from shardwise.launch.start import run_job


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command(
        "run",
        context_settings={
            # All arguments from the script's name on belong to the script.
            "allow_interspersed_args": False,
            # --num_gpus and --num-gpus are one option.
            "token_normalize_func": lambda token: token.replace("_", "-"),
        },
    )(command())


def command() -> Callable[..., None]:
    """Return the function of the command, with a parameter for each annotated field of `Job`."""

    def run(**given: Any) -> None:
        """Run SCRIPT as several processes, and end with the code of the first that fails."""
        fields: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in given.items()}
        # Typer gives None for an option that may be repeated and is absent.
        fields = {name: value for name, value in fields.items() if not (value is None and name in repeated)}
        raise typer.Exit(run_job(Job(**fields, progress="off" if given["quiet"] else "auto")))

    hints, parameters, repeated = get_type_hints(Job, include_extras=True), [], set()
    for field in dataclasses.fields(Job):
        hint, default = hints[field.name], field.default
        if get_origin(hint) is not Annotated:
            continue
        kind, option = get_args(hint)[:2]
        if get_origin(kind) is tuple:
            kind, default = list[str] | None, None
            repeated.add(field.name)
        empty = inspect.Parameter.empty if default is dataclasses.MISSING else default
        annotation = Annotated[kind, option]  # type: ignore[valid-type]
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=empty, annotation=annotation)
        )
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
