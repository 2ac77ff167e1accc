"""`shardwise profile`: counts the FLOPs of a model on fake tensors."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from torch import nn

    from shardwise.profile import ModuleProfile


def register(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command("profile")(profile)


def profile(
    models: Annotated[
        list[str],
        typer.Argument(
            help="As of `shardwise plan`: a name, sizes (n=24,h=1024,m=16), a directory or config.json of "
            "transformers, or module:function.",
            metavar="MODEL...",
        ),
    ],
    micro_batch: Annotated[int, typer.Option(metavar="N", help="Sequences in a micro-batch.")] = 1,
    length: Annotated[int, typer.Option(metavar="N", help="Tokens in a sequence.")] = 512,
    depth: Annotated[int, typer.Option(metavar="N", help="Depth of the deepest listed modules; -1: all.")] = 1,
    top: Annotated[int, typer.Option(metavar="N", help="Number of listed module classes per depth.")] = 1,
    recompute: Annotated[bool, typer.Option("--recompute", help="Recompute the layers of the named models.")] = False,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Run no backward pass.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print numbers as one JSON object.")] = False,
) -> None:
    """Print floating-point operations by module, from a micro-batch on fake tensors.

    No device is needed; the fake tensors are CPU tensors. The backward pass and recomputation are counted separately.
    Times are not measured.
    """
    from shardwise.errors import CommandLineError
    from shardwise.plan.models import named_model
    from shardwise.profile.report import report, summary

    if min(micro_batch, length, top) < 1 or depth < -1:
        raise CommandLineError("--micro-batch, --length and --top are 1 or more, --depth -1 or more.")
    found: dict[str, Any] = {}
    for name in models:
        counted = _counted(named_model(name, recompute), micro_batch, length, forward_only)
        if as_json:
            found[name] = counted.as_dict()
            continue
        size = f"{micro_batch} sequence{'s' * (micro_batch > 1)} of {length} tokens"
        head = summary(counted, title=f"{name}: {counted.parameters:,} parameters, {size}")
        typer.echo("\n".join([*report(counted, head, depth=depth, top=top), ""]))
    if as_json:
        typer.echo(json.dumps(found, indent=2))


def _counted(model: nn.Module, micro_batch: int, length: int, forward_only: bool) -> ModuleProfile:
    import warnings

    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from shardwise.errors import CommandLineError
    from shardwise.memory import fake_copy
    from shardwise.memory.dryrun import Answers, arguments_of, fake_values, loss_of, undisturbed, without_masks
    from shardwise.plan.models import micro_batch as micro_batch_of
    from shardwise.profile.counting import FlopCount
    from shardwise.profile.tree import profile_of

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_model = fake_copy(model, mode)
    args, kwargs = arguments_of(fake_values(micro_batch_of(model, micro_batch, length, pipeline=False), mode))
    count = FlopCount(fake_model)
    with undisturbed(), mode, warnings.catch_warnings(), torch.set_grad_enabled(not forward_only):
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        count.start()
        try:
            with count.counting(), Answers(), without_masks():
                output = fake_model(*args, **kwargs)
                if not forward_only:
                    loss_of(output).backward()
        except Exception as error:
            first = str(error).partition("\n")[0].rstrip(".")
            raise CommandLineError(
                f"{type(model).__name__} raises {type(error).__name__} on token ids of shape "
                f"[{micro_batch}, {length}]: {first}. Give a model that takes token ids as its only input; "
                "flops_profiler counts what others compute in a training run"
            ) from error
        finally:
            count.stop()
    return profile_of(count, timed=False)
