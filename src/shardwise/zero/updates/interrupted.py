"""Steps and passes that an error of a disk has ended: what all ranks learn of it, and what is still whole.

Where state lives on a disk, ranks tell each other before they exchange what is read from disks, and at the end of each
step, whether theirs have failed: so all raise, and none waits for another. What has not been stepped can be stepped
later, with the same bits, and what a disk has not taken stays in memory. A pass has no such end: there the other ranks
wait for one that has failed until it has gone.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from shardwise.comm.communicator import Communicator
from shardwise.errors import CheckpointError, OffloadError, UsageError
from shardwise.zero.updates.update import Update

_UNTOUCHED = (
    "Nothing has been stepped: engine.step() tries again, and engine.save_checkpoint() saves the state as it was before"
)
_REPEAT = "The state is that after the last step: call engine.zero_grad() and repeat the window, or save a checkpoint"
_ALONE = "End the process, and go on from the last checkpoint"

Told = list[Any]
"""What a failure says, and whether values are lost, as ranks exchange it; empty: there is none."""


class Interruptions:
    """See the module docstring.

    Args:
        job: all ranks that step together.
        on_disk: something that a step reads or writes is on a disk.

    Attributes:
        halfway: why the state is between two steps; empty if it is not.
    """

    def __init__(self, job: Communicator, *, on_disk: bool) -> None:
        self.halfway = ""
        self._job = job
        self._on_disk = on_disk
        self._no_way = ""  # why it cannot be gone on with
        self._alone = ""
        self._agreed: weakref.ref[OffloadError] | None = None  # its frames hold memory

    @contextlib.contextmanager
    def stepping(self, update: Update) -> Iterator[None]:
        """Step inside of the block; all ranks raise if a disk of one of them has failed.

        Args:
            update: steps.

        Raises:
            OffloadError: it says on which rank, and how to go on.
        """
        if not self._on_disk:
            yield
            return
        failure: OffloadError | None = None
        try:
            with contextlib.ExitStack() as lent:
                together = update.together()
                if together is not None:
                    with self.agreeing():
                        lent.enter_context(together)
                yield
        except OffloadError as error:
            if self._is_agreed(error):
                raise
            failure = error
        everyone = self._job.exchange([told_of(failure), *update.progress()], "disks")
        told = [said for said, *_ in everyone]
        if not any(told):
            self.halfway = ""
            return
        stepped, units = (sum(said[place] for said in everyone) for place in (1, 2))
        where = f"{stepped} of {units} units" + (f" of {self._job.world} ranks" if self._job.world > 1 else "")
        self.halfway = f"{where} had been stepped when a disk failed in engine.step()" if stepped else ""
        goes_on = f"{where} have been stepped: engine.step() steps the others, and nothing can be saved before"
        if stepped == units:
            goes_on = "All units have been stepped: engine.step() ends the step, and nothing can be saved before"
        try:
            self._raise(told, failure, goes_on if stepped else _UNTOUCHED)
        finally:
            del failure

    @contextlib.contextmanager
    def agreeing(self) -> Iterator[None]:
        """Use disks inside of the block, before anything is stepped; all ranks raise if one of theirs has failed.

        Raises:
            OffloadError: it says on which rank. Everything that has been done can be done again.
        """
        failure: OffloadError | None = None
        try:
            yield
        except OffloadError as error:
            failure = error
        try:
            if self._on_disk:
                self.raise_untouched(self._job.exchange(told_of(failure), "disks"), failure)
            elif failure is not None:
                raise failure
        finally:
            del failure

    def raise_untouched(self, told: Sequence[Told], failure: OffloadError | None) -> None:
        """Raise on all ranks if a disk has failed on some, before anything was stepped (all ranks call).

        Args:
            told: of each rank, by `told_of`.
            failure: of this rank.

        Raises:
            OffloadError: see above.
        """
        if any(told):
            self._raise(told, failure, _UNTOUCHED)

    def _raise(self, told: Sequence[Told], failure: OffloadError | None, goes_on: str) -> NoReturn:
        rank, (said, _) = next((rank, said) for rank, said in enumerate(told) if said)
        lost = [rank for rank, said in enumerate(told) if said and said[1]]
        if lost:
            goes_on = f"What the disk of rank {lost[0]} had is lost: go on from the last checkpoint"
        what = failure.what if failure is not None else f"engine.step(): on rank {rank}: {said}"
        agreed = OffloadError(what, goes_on, lost=bool(lost))
        self._agreed = weakref.ref(agreed)
        try:
            raise agreed from failure
        finally:
            del agreed, failure

    @contextlib.contextmanager
    def watching(self, *, in_pass: bool) -> Iterator[None]:
        """Take note if a disk fails inside of the block while other ranks wait for this one, and say how to go on.

        Args:
            in_pass: the block is a forward or backward pass.
        """
        try:
            yield
        except OffloadError as error:
            if self._job.world > 1 and not self._is_agreed(error):
                self._alone = error.what
                error.advise(f"The other ranks wait for this one. {_ALONE}")
            elif in_pass and not error.lost:
                error.advise(_REPEAT)
            raise

    def leaves_state_whole(self, error: OffloadError) -> bool:
        """Whether all ranks have this error of a step, and state is as it was before the step."""
        return not self.halfway and (self._job.world == 1 or self._is_agreed(error))

    def _is_agreed(self, error: OffloadError) -> bool:
        return self._agreed is not None and error is self._agreed()

    def give_up(self) -> None:
        """The gradients of the step are dropped: what has not been stepped never will be."""
        if self.halfway:
            self._no_way = "Its gradients have been dropped"

    def loaded(self) -> None:
        """All state has been replaced."""
        self.halfway = self._no_way = ""

    def check_reachable(self, what: str) -> None:
        """Raise where the other ranks are waiting in a pass, and would not take part in anything else.

        Raises:
            UsageError: it says that `what` cannot be done.
        """
        if self._alone:
            raise UsageError(
                f"{what}: a disk has failed on this rank in the middle of a pass, in which the other ranks wait for "
                f"it ({self._alone}). {_ALONE}"
            )

    def check_can_step(self) -> None:
        """Raise where a step would come on top of half of another one.

        Raises:
            UsageError: see above.
        """
        if self._no_way:
            raise UsageError(f"engine.step(): {self.halfway}. {self._no_way}: load a checkpoint")

    def check_whole(self, what: str, otherwise: str) -> None:
        """Raise where the state is between two steps.

        Args:
            what: cannot be done then.
            otherwise: from what one could go on.

        Raises:
            CheckpointError: see above.
        """
        if self.halfway:
            way = self._no_way or "Call engine.step(), which ends the step"
            raise CheckpointError(f"{what}: {self.halfway}. {way}; or go on from {otherwise}")


def told_of(failure: OffloadError | None) -> Told:
    """Return what the other ranks learn of a failure."""
    return [] if failure is None else [failure.what, failure.lost]
