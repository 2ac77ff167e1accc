"""Checkpoint sections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from shardwise.errors import ConfigError, ConflictError

from .base import At, ConfigSection, Contradictions, Int, as_list, key, section
from .tables import with_unused_keys


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


TagValidation = Annotated[
    Literal["ignore", "warn", "fail"],
    BeforeValidator(_lower),
    WithJsonSchema(
        {"enum": [w for word in ("ignore", "warn", "fail") for w in (word, word.capitalize(), word.upper())]}
    ),
]
WriterType = Annotated[
    Literal["mock", "python", "fast"],
    BeforeValidator(_lower),
    WithJsonSchema({"enum": [w for word in ("mock", "python", "fast") for w in (word, word.upper())]}),
]
Signals = Annotated[
    list[Literal["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU"]], BeforeValidator(as_list)
]
"""Names of signals that a process can handle."""


@with_unused_keys
class ParallelWrite(ConfigSection):
    """`checkpoint.parallel_write`."""


@with_unused_keys
class WriterOptions(ConfigSection):
    """`checkpoint.writer`: engine that writes checkpoint files."""

    type: WriterType = key(
        "fast",
        '"fast" writes large files past the page cache (O_DIRECT), "python" through it; without this section '
        'background saves are fast, others not; "mock" is refused.',
    )
    decoupled: bool = key(False, "The same as `checkpoint.async_save`.")
    show_statistics: bool = key(False, "Log bytes, seconds and GB/s of each save, on rank 0.")


class OnSignal(ConfigSection):
    """`checkpoint.on_signal`: a checkpoint when a rank is sent a signal. Not a section of DeepSpeed."""

    save_dir: str | None = key(None, "Directory as for `save_checkpoint`; required.", min_length=1)
    exit_on: Signals = key(
        ["SIGTERM"], "Signals after which the job saves and ends with 128 + signal. SIGINT: with `--grace`."
    )
    save_on: Signals = key(["SIGUSR1"], "Signals after which the job saves and goes on.")

    def contradictions(self, at: At) -> Contradictions:
        """Yield a missing directory, and signals with two meanings or none."""
        if self.save_dir is None:
            message = "is missing; name the directory in which checkpoints are saved when a signal comes"
            yield "save_dir", message, ConfigError
        both = sorted(set(self.exit_on) & set(self.save_on))
        if both:
            message = (
                f"has {both[0]}, and so has {at('save_on')}; the job cannot both end and go on after a signal, so "
                "leave it in one of them"
            )
            yield "exit_on", message, ConflictError
        if not self.exit_on and not self.save_on:
            message = f"names no signal, and {at('save_on')} names none; name one, or remove the section"
            yield "exit_on", message, ConfigError


class MemoryCopiesOptions(ConfigSection):
    """`checkpoint.memory_copies`: training state in memory, outside of the processes. Not a section of DeepSpeed."""

    every: Int = key(10, "Steps between two copies.", gt=0)
    replicas: Int = key(1, "Other nodes that keep a copy of each part.", ge=0)
    directory: str | None = key(
        None, "Where copies are kept, on a tmpfs of each node; null: the directory of `shardwise run`.", min_length=1
    )


@with_unused_keys
class CheckpointOptions(ConfigSection):
    """`checkpoint`."""

    tag_validation: TagValidation = key("warn", "What to do when ranks name different tags.")
    async_save: bool = key(False, "Save in the background, by a thread.")
    keep_last: Int | None = key(
        None,
        "The newest so many checkpoints stay, of those whose tags differ only in the number of steps at their end; "
        "null: all.",
        gt=0,
    )
    keep_every: Int | None = key(None, "With `keep_last`: those at multiples of so many steps stay as well.", gt=0)
    load_universal: bool = key(
        False,
        "`load_checkpoint` without a tag loads the universal checkpoint that the file `latest_universal` names; "
        "without this key only where there is no other checkpoint.",
    )
    use_node_local_storage: bool = key(False, "Directories are local to a node: its first rank creates them.")
    parallel_write: ParallelWrite = section(ParallelWrite, "Division of writing.")
    writer: WriterOptions | None = key(None, "Engine that writes files.")
    on_signal: OnSignal | None = key(None, "Checkpoints when a rank is sent a signal.")
    memory_copies: MemoryCopiesOptions | None = key(None, "Copies of the training state in memory.")

    def contradictions(self, at: At) -> Contradictions:
        """Yield keys without the key that they belong to, and a writer that writes nothing."""
        if self.keep_every is not None and self.keep_last is None:
            message = (
                f"is {self.keep_every} and keeps checkpoints in addition to the newest, but without {at('keep_last')} "
                "all stay; add it or remove this key"
            )
            yield "keep_every", message, ConflictError
        if self.writer is not None and self.writer.type == "mock":
            message = 'is "mock", which writes nothing; a checkpoint that is not there cannot be loaded, so remove it'
            yield "writer.type", message, ConfigError
        decoupled = self.writer is not None and self.writer.decoupled
        if decoupled and not self.async_save and "async_save" in self.model_fields_set:
            message = f"is true, but {at('async_save')} is false; both mean saves in the background, so remove one"
            yield "writer.decoupled", message, ConflictError

    @property
    def in_background(self) -> bool:
        """Whether saves are asynchronous by default."""
        return self.async_save or (self.writer is not None and self.writer.decoupled)

    def writes_directly(self, *, background: bool) -> bool:
        """Return True if large files bypass the page cache where possible: as `writer.type` requests; without it in
        background saves, because direct writes leave processor time and the page cache to training.
        """
        return background if self.writer is None else self.writer.type == "fast"
