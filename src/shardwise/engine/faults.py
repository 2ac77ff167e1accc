"""Fault tolerance: checkpoints on signals, in-memory checkpoints, and resuming from the newest complete state."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

import torch

from shardwise.checkpoint import directory
from shardwise.checkpoint.agree import collective_step
from shardwise.checkpoint.formats.deepspeed import recognised
from shardwise.checkpoint.listing import CheckpointDirectory, CheckpointListing, Head
from shardwise.checkpoint.load import NoCompleteCheckpointError
from shardwise.checkpoint.match import Options
from shardwise.checkpoint.peer_replicas import VERSIONS, InMemoryCheckpoints, MemoryCopy, Version
from shardwise.comm.environment import MEMORY_DIRECTORY, RECOVERY_FILE
from shardwise.comm.stall_watchdog import StallWatch, stop_watching, watch
from shardwise.engine.anomalies import Anomaly
from shardwise.engine.background import saved_bytes
from shardwise.engine.signals import SignalWatch, signal_named
from shardwise.errors import (
    AnomalyError,
    CheckpointError,
    CheckpointPathError,
    NonFiniteStateError,
    UsageError,
)
from shardwise.memory import Category
from shardwise.units import format_size
from shardwise.utils.logging import logger

if TYPE_CHECKING:
    from shardwise.checkpoint.collect import TrainingState
    from shardwise.comm.communicator import Communicator
    from shardwise.config import Resolution
    from shardwise.engine.batch import Batches
    from shardwise.engine.checkpointing import Checkpoints
    from shardwise.engine.dryrun import MemoryPlan
    from shardwise.engine.step import TrainStep
    from shardwise.zero.model import ShardedModel

EXIT_BASE = 128
"""Exit code of a job that ends on a signal, minus the signal's number; as in shells: 143 for SIGTERM."""

_engines = count()
"""Numbers of this process's engines with in-memory copies; the same on all ranks and after every restart."""


@dataclass(eq=False, repr=False)
class FaultTolerance:
    """Saves on signals, copies state into memory, and resumes. Methods are collective unless noted."""

    _sharded: ShardedModel
    _resolution: Resolution
    _job: Communicator
    _step: TrainStep
    _batches: Batches
    _checkpoints: Checkpoints
    _signals: SignalWatch

    def __post_init__(self) -> None:
        self.resumed: Resumed | None = None
        self.copies: InMemoryCheckpoints | None = None
        self._exit_on: frozenset[int] = frozenset()
        self._save_on_signal_to = ""
        self._copies_wait = False
        self._given_client_state: Callable[[], Mapping[str, Any]] | None = None
        self._first_step = FirstStep(self._job.rank)
        self._stalls: StallWatch | None = None

    def guard(self) -> None:
        """Start the configured stall watchdog, signal handlers and in-memory copies (all ranks call)."""
        limit = float(self._resolution.config.stall_limit)
        if limit and self._job.world > 1:
            ranks = list(self._job.members)
            secret = str(self._job.share_object(secrets.token_hex(32), "stall_limit"))
            facts = weakref.WeakMethod(self._facts)  # the watchdog's thread does not keep an engine that is dropped
            rank = ranks[self._job.rank]
            self._stalls = watch(ranks, rank, limit, secret, self._job.ledger, lambda: (facts() or dict)())
        section = self._resolution.config.checkpoint
        if section.on_signal is not None:
            signals = section.on_signal
            assert signals.save_dir is not None  # checked with the rest of the configuration
            self.checkpoint_on_signal(signals.save_dir, exit_on=signals.exit_on, save_on=signals.save_on)
        if section.memory_copies is not None:
            wanted = section.memory_copies
            self.copies = InMemoryCheckpoints(
                self._sharded.state,
                os.path.join(self._memory_directory(wanted.directory), f"engine{next(_engines)}"),
                wanted.every,
                wanted.replicas,
                lambda buffer: self._sharded.accountant.hold(Category.BUFFERS, buffer),
                self._checkpoints.numbers,
            )
            self.copies.check_finite = self._resolution.config.non_finite != "ignore"
            self._tell_where()

    def _facts(self) -> dict[str, Any]:
        loader = self._batches.training_dataloader
        return {"step": self._step.global_steps, "loader": "" if loader is None else loader.progress}

    def _memory_directory(self, given: str | None) -> str:
        found = given or os.environ.get(MEMORY_DIRECTORY)
        if not found:
            raise UsageError(
                "checkpoint.memory_copies: there is no place for copies that outlive this process. Start "
                "the job with `shardwise run`, which makes one in /dev/shm and removes it at the end, or name a "
                "directory in checkpoint.memory_copies.directory, on a tmpfs such as /dev/shm"
            )
        return found

    def _tell_where(self) -> None:
        copies = self.copies
        assert copies is not None
        if self._job.rank:
            return
        if len(copies.nodes) == 1:
            reach = "all ranks share one memory, so they outlive processes and not the machine"
        else:
            reach = f"each of {len(copies.nodes)} nodes also keeps those of {copies.replicas} other(s)"
        logger.info("copies in memory every %d steps in %s: %s", copies.every, copies.path, reach)

    # -- state of the script -----------------------------------------------------------------------------------------

    def provide_client_state(self, function: Callable[[], Mapping[str, Any]] | None) -> None:
        """Set the function that returns the script's state for saves by the engine: on signals and in memory.

        It is called on every rank at the end of a `step()` (counters and dataloader position are those of the next
        step) and returns the `client_state` of `save_checkpoint`. None: no state.
        """
        if function is not None and not callable(function):
            raise UsageError(
                f"engine.provide_client_state(function): expected a function without arguments that returns a "
                f"dictionary, found {type(function).__name__}; pass lambda: {{...}}"
            )
        self._given_client_state = function

    def _client_state(self) -> Mapping[str, Any]:
        return {} if self._given_client_state is None else self._given_client_state()

    # -- signals -----------------------------------------------------------------------------------------------------

    def checkpoint_on_signal(
        self,
        save_dir: str | os.PathLike[str],
        exit_on: Iterable[str] = ("SIGTERM",),
        save_on: Iterable[str] = ("SIGUSR1",),
    ) -> None:
        """Save a checkpoint when any rank receives a signal; also configured by the section `checkpoint.on_signal`.

        All ranks save together at the end of the step in which the signal arrives (on a GPU: of that or the next step);
        every step's all-reduce exchanges the signals. After `exit_on` every rank raises SystemExit with code 128 +
        signal (143 for SIGTERM), which `shardwise run` does not count as a failure.

        Args:
            save_dir: as for `save_checkpoint`.
            exit_on: names of signals after which the job ends.
            save_on: names of signals after which training continues, even if the save fails, which is logged.

        Raises:
            CheckpointPathError: `save_dir` cannot be used.
            UsageError: a name is no signal that can be handled, or is in both lists; ranks give different signals; or
                the caller is not the main thread.

        Example:
            >>> import os, signal, shardwise, tempfile
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> runs = tempfile.mkdtemp()
            >>> engine.checkpoint_on_signal(runs)
            >>> os.kill(os.getpid(), signal.SIGUSR1)  # as a scheduler would
            >>> _ = engine.backward(engine(torch.ones(2, 4)).mean())
            >>> engine.step()
            >>> sorted(os.listdir(runs))
            ['global_step1', 'latest']
            >>> engine.destroy()
        """
        self._sharded.check_open("engine.checkpoint_on_signal()")
        with collective_step(self._job, "checkpoint_on_signal") as agreed:
            parent = os.path.abspath(directory.check_directory(save_dir, "save_dir"))
            ends = {signal_named(name) for name in exit_on}
            saves = {signal_named(name) for name in save_on}
            both = sorted(number.name for number in ends & saves)
            if both:
                raise UsageError(
                    f"checkpoint on a signal: {', '.join(both)} cannot both end the job (exit_on) and let it go on "
                    "(save_on); leave it in one of them"
                )
            agreed.local = sorted(int(number) for number in ends | saves)
        if any(said != agreed.gathered[0] for said in agreed.gathered):
            raise UsageError(
                f"checkpoint on a signal: ranks watch different signals ({agreed.gathered}); give all ranks the same"
            )
        self._signals.listen(ends | saves)
        self._exit_on = frozenset(ends)
        self._save_on_signal_to = parent

    def check_signals(self) -> None:
        """Act on signals now, in phases without steps; a small collective. Raises SystemExit if the job ends."""
        self._sharded.check_there("engine.check_signals()")
        facts = self._signals.facts(self._job.rank)
        if facts:
            told = torch.tensor(facts, dtype=torch.float64, device=self._sharded.device)
            self._job.all_reduce(told, "signals").wait()
            self._signals.hear(told.tolist())
        self._act_on_signals()

    def _act_on_signals(self) -> None:
        due = self._signals.take_due()
        if not due:
            return
        names = " and ".join(sorted(number.name for number in due))
        ends = sorted(due & self._exit_on)
        began = time.perf_counter()
        try:
            self._checkpoints.background.wait()
        except CheckpointError as error:  # of an asynchronous save; the save below is made nevertheless
            if self._job.rank == 0:
                logger.error("%s", error)
        try:
            with collective_step(self._job, "the function given to provide_client_state()"):
                client = self._client_state()
            # Synchronous, because the job may be killed soon.
            self._checkpoints.save_checkpoint(self._save_on_signal_to, client_state=client, asynchronous=False)
        except Exception as error:
            goes_on = not ends and isinstance(error, CheckpointError)
            if self._job.rank == 0:
                after = "training goes on" if goes_on else "the job ends WITHOUT it"
                logger.error("%s asked for a checkpoint, which could not be saved; %s: %s", names, after, error)
            self._signals.done()
            if not goes_on:
                raise
            return
        self._signals.done()
        if self._job.rank == 0:
            after = f"the job ends with code {EXIT_BASE + ends[0]}" if ends else "training goes on"
            logger.info(
                "%s: saved step %d in %s in %.2f s; %s",
                names,
                self._step.global_steps,
                self._save_on_signal_to,
                time.perf_counter() - began,
                after,
            )
        if ends:
            self._remove_copies()  # the checkpoint on disk is newer
            raise SystemExit(EXIT_BASE + ends[0])

    # -- in-memory copies --------------------------------------------------------------------------------------------

    def copy_to_memory(self) -> MemoryCopy:
        """Copy the training state into memory now, in addition to `checkpoint.memory_copies.every`.

        Raises:
            UsageError: `checkpoint.memory_copies` is not configured, or an accumulation window holds gradients.
            CheckpointError: memory is too small, on all ranks alike; the newest copy is kept.
        """
        self._sharded.check_there("engine.copy_to_memory()")
        if self.copies is None:
            raise UsageError(
                "engine.copy_to_memory(): the configuration asks for no copies; add "
                '{"checkpoint": {"memory_copies": {"every": 10}}} to it'
            )
        self._sharded.hooks.settle()
        first = self.copies.last is None
        made = self.copies.copy(self._to_copy)
        if first and self._job.rank == 0:
            logger.info(
                "the first copy in memory blocked training for %.3f s; rank 0 keeps up to %d x %s",
                made.seconds,
                VERSIONS,
                format_size(made.held_bytes),
            )
        return made

    def _to_copy(self) -> tuple[TrainingState, dict[str, Any]]:
        if self._sharded.state.holds_gradients:
            raise UsageError(
                "copy_to_memory(): gradients of an unfinished accumulation window are held, and copies do not hold "
                "gradients. Copy after the engine.step() that ends a window (every "
                f"{self._batches.steps} micro-batches)"
            )
        self._checkpoints.check_can_save()
        config = self._batches.effective(self._resolution)
        state = self._checkpoints.training_state(self._client_state())
        return state, {"layout": self._checkpoints.layout(), "config": config}

    def notes_on_copies(self, plan: MemoryPlan | None) -> list[str]:
        """Describe the memory that in-memory copies take outside of this process."""
        copies = self.copies
        if copies is None:
            return []
        planned = ""
        if plan is not None:
            size = (1 + copies.replicas) * saved_bytes(self._sharded, plan.peaks[Category.OPTIMIZER.value])
            planned = f"{VERSIONS} x {format_size(size)} planned"
        made = copies.last
        measured = "" if made is None else f"{VERSIONS} x {format_size(made.held_bytes)} measured"
        sizes = ", ".join(text for text in (planned, measured) if text)
        return [f"Copies in memory are outside of this process, in {copies.path}: {sizes} for this rank."]

    # -- at the end of each step -------------------------------------------------------------------------------------

    def after_boundary(self) -> None:
        """Act on signals, and copy the state into memory when due."""
        if self._first_step.awaited:
            if self._sharded.device.type == "cuda":
                torch.cuda.synchronize(self._sharded.device)
            self._first_step.taken(self._step.global_steps)
        self._act_on_signals()
        if self.copies is not None and self._step.global_steps % self.copies.every == 0:
            self.update_copy()

    def update_copy(self) -> None:
        """Copy the state into memory, if configured; after a first copy, log errors (all ranks call)."""
        copies = self.copies
        if copies is None:
            return
        try:
            self.copy_to_memory()
            self._copies_wait = False
        except NonFiniteStateError as error:
            if self._job.rank == 0 and not self._copies_wait:
                logger.error("step %d: %s", self._step.global_steps, error)
            self._copies_wait = True  # logged once
        except CheckpointError as error:
            if copies.last is None:
                raise  # the first copy failed: the configuration is wrong
            if self._job.rank == 0:
                logger.error("no copy in memory at step %d; training goes on: %s", self._step.global_steps, error)

    def rewind(self) -> None:
        """Undo the step by loading the newest in-memory copy since the last load; an AnomalyError without one. The
        dataloader position stays.
        """
        step, why = self._step, self._step.rewinding
        assert why is not None
        step.rewinding = None
        at, rewinds = step.global_steps - 1, step.anomalies.rewinds + 1
        self._sharded.hooks.settle()
        copies = self.copies
        for version in copies.versions() if copies is not None else ():
            assert copies is not None
            if version.name not in self._checkpoints.numbers.copies:
                continue
            with copies.assembled(version) as name:
                if name is None:
                    continue
                self._checkpoints.restore(copies.path, name, Options(verify=False), going_back=True)
            step.anomalies.rewinds = rewinds
            most = self._resolution.config.anomaly_watch.max_rewinds
            advice = "where it recurs, leave out the data of these steps, or lower the learning rate"
            step.anomalies.note(
                Anomaly("rewind", at, why, "rewind", value=float(version.steps), advice=advice),
                "step %d: back to the copy in memory of step %d (rewind %d of %d); the data goes on where it is. %s",
                at,
                version.steps,
                rewinds,
                most,
                why,
            )
            return
        raise AnomalyError(
            f"step {at}: {why}. There is no whole copy in memory to go back to yet: copies are made every "
            f"{0 if copies is None else copies.every} steps (checkpoint.memory_copies.every). The step was not taken"
        )

    def end(self) -> None:
        """Restore signal handlers; remove copies in a configured directory, unless an exception is being handled."""
        self._signals.close()
        if sys.exc_info()[0] is None:
            self._remove_copies()
        self.copies = None

    def end_watch(self) -> None:
        """Stop the stall watchdog, after this rank's last collective."""
        if self._stalls is not None:
            stop_watching(self._stalls)
            self._stalls = None  # breaks the reference cycle

    def _remove_copies(self) -> None:
        section = self._resolution.config.checkpoint.memory_copies
        if self.copies is not None and section is not None and section.directory:
            self.copies.remove()

    # -- resuming ----------------------------------------------------------------------------------------------------

    def resume(self, save_dir: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Load the newest complete state: an in-memory copy, or a checkpoint on disk.

        A script that calls this before its training loop can be restarted after any failure, also by `shardwise run
        --max-restarts`. Of equally new states the in-memory copy is used. On disk it is the checkpoint that
        `load_checkpoint` loads without a tag. Incomplete and damaged states are skipped, and the reason is logged. ZeRO
        stage and number of ranks may have changed; learning rate and schedule continue.

        Args:
            save_dir: directory that is passed to `save_checkpoint`; need not exist yet.

        Returns:
            The script's state (`client_state`, or the result of the `provide_client_state` function); None without a
            saved state. `engine.resumed` has source, path and duration.

        Raises:
            CheckpointPathError: `save_dir` cannot be used, or differs between ranks.
            CheckpointError: saved states exist, but are of another model, all damaged, or cannot be listed.

        Example:
            >>> import shardwise, tempfile
            >>> config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config=config)
            >>> runs = tempfile.mkdtemp()
            >>> state = engine.resume(runs) or {"epoch": 0}  # nothing there yet
            >>> engine.save_checkpoint(runs, client_state={"epoch": 3})
            True
            >>> engine.resume(runs), engine.resumed.source
            ({'epoch': 3}, 'disk')
            >>> engine.destroy()
        """
        self._sharded.check_there("engine.resume()")
        self._checkpoints.background.await_last()  # a failure is raised by the next save or wait
        self._sharded.hooks.settle()
        began = time.perf_counter()
        with collective_step(self._job, "resume") as looked:
            parent = directory.check_directory(save_dir, "save_dir")
            on_disk = CheckpointDirectory(parent).newest_first() if self._job.rank == 0 else CheckpointListing()
            if self._job.rank == 0 and not on_disk.heads and recognised(parent):
                raise directory.wrong_level(parent)
            looked.local = [parent, max((head.sequence for head in on_disk.heads), default=0)]
        if any(said[0] != looked.gathered[0][0] for said in looked.gathered):
            raise CheckpointPathError(
                f"engine.resume(save_dir): ranks name different directories "
                f"({', '.join(sorted({repr(said[0]) for said in looked.gathered}))}); pass the same on every rank"
            )
        self._checkpoints.numbers.see(looked.gathered[0][1])
        if self.copies is not None:
            self.copies.run = os.path.abspath(parent)
        found = self._resume_newest(parent, on_disk)
        if found is None:
            self._first_step.found_nothing = True
            return None
        source, path, client = found
        seconds = time.perf_counter() - began
        self.resumed = Resumed("memory" if source == "memory" else "disk", path, self._step.global_steps, seconds)
        self._first_step.restored(self.resumed)
        if self._job.rank == 0:
            logger.info("resumed at step %d from %s (%s) in %.2f s", self._step.global_steps, source, path, seconds)
        return client

    def _resume_newest(self, parent: str, on_disk: CheckpointListing) -> tuple[str, str, dict[str, Any]] | None:
        """Try in-memory copies and checkpoints, newest first; only rank 0 lists those on disk."""
        copies = self.copies
        versions = [] if copies is None else copies.versions()
        with collective_step(self._job, "resume") as agreed:
            turns = in_turn(versions, on_disk.heads)
            # Other ranks do not need the names.
            agreed.local = [turn if isinstance(turn, int) else None for turn in turns]
            if self._job.rank == 0:
                for note in on_disk.notes:
                    logger.warning("%s", note)
        failure: CheckpointError | None = None
        for number, index in enumerate(agreed.gathered[0]):
            if index is None:
                order = turns[number] if self._job.rank == 0 else ()
                assert not isinstance(order, int)
                try:
                    path, client = self._checkpoints.restore(parent, None, Options(order=order))
                except NoCompleteCheckpointError as error:  # on all ranks alike
                    failure = error
                    continue
                assert path is not None
                return "disk", path, {} if client is None else client
            assert copies is not None
            with copies.assembled(versions[index]) as name:
                if name is None:
                    continue
                _, client = self._checkpoints.restore(copies.path, name, Options(verify=False))
                assert self._step.global_steps == versions[index].steps
                return "memory", copies.path, {} if client is None else client
        if failure is not None:
            raise CheckpointError(
                f"{failure}. There are checkpoints, and none of them can be used; remove them to begin anew"
            )
        return None


def in_turn(versions: Sequence[Version], heads: Sequence[Head]) -> list[int | tuple[str, ...]]:
    """Return the order of trial: indices of in-memory copies (newest first), or tags of checkpoints (`heads`).
    Of equally new states, the in-memory copy comes first.
    """
    turns: list[int | tuple[str, ...]] = []
    waiting = list(range(len(versions)))
    tags: list[str] = []
    for head in heads:
        while waiting and versions[waiting[0]].sequence >= (head.sequence if head.copy is None else head.copy):
            turns += [tuple(tags)] if tags else []
            turns.append(waiting.pop(0))
            tags = []
        tags.append(head.tag)
    return [*turns, *([tuple(tags)] if tags else []), *waiting]


# -- recovery time -----------------------------------------------------------------------------------------------------

_ready: float | None = None


def note_ready() -> None:
    """Record the time at which the process was ready for `initialize`; only the first call counts."""
    global _ready
    if _ready is None:
        _ready = time.time()


@dataclass(frozen=True)
class Resumed:
    """Result of `engine.resume()`; `path`: directory of the in-memory copies or of the checkpoint."""

    source: Literal["memory", "disk"]
    path: str
    steps: int
    seconds: float


class FirstStep:
    """Reports the first step after a restart or `engine.resume()`; rank 0 reports.

    Attributes:
        awaited: a first step is still to be reported.
        found_nothing: `engine.resume()` has found no saved state.
    """

    def __init__(self, rank: int) -> None:
        self.found_nothing = False
        self._rank = rank
        self._file = os.environ.get(RECOVERY_FILE) or None
        self._resumed: Resumed | None = None
        self._restored: float | None = None
        self.awaited = self._file is not None

    def restored(self, resumed: Resumed) -> None:
        """Record that the state has been restored."""
        self._resumed, self._restored, self.awaited = resumed, time.time(), True

    def taken(self, steps: int) -> None:
        """Report the first step; `steps` is `global_steps` after it."""
        now = time.time()
        if self._rank == 0 and self._restored is not None:
            logger.info("the first step after resuming ended %.2f s after the state was back", now - self._restored)
        if self._rank == 0 and self._file is not None:
            told = {
                "ready": _ready,
                "restored": self._restored,
                "asked": self.found_nothing,
                "source": None if self._resumed is None else self._resumed.source,
                "steps": steps - 1,
                "stepped": now,
            }
            # Another engine of this process may have reported already, or the launcher may have exited.
            temporary = f"{self._file}.{os.getpid()}"
            with contextlib.suppress(OSError):
                if not os.path.exists(self._file):
                    with open(temporary, "w", encoding="utf-8") as stream:
                        json.dump(told, stream)
                    os.replace(temporary, self._file)
        self._file, self._restored, self.awaited = None, None, False
