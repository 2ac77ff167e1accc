"""Stepping units on the host while the backward pass still runs (`offload_optimizer.super_offload`).

When the gradient of a unit is complete, a thread makes a copy of its master weights and of its optimizer state, and
steps the copy: with the factor that the step will have if nothing is clipped, and the options that the groups have now.
Nothing else is written, so that nobody sees a step that may not be taken. When the step comes, with just this factor
and these options, copies and originals change places, which moves no bytes; otherwise the unit is stepped as always,
and the copy is overwritten in the next window. Nothing has ever to be undone. The parameters are written in the step.

The copy lives where the original does: in the memory of the host, or in a second part of the file on a disk.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.compat import has_values
from shardwise.memory import Accountant, Category, Tier, twin_of
from shardwise.memory.places import Loans, Stored
from shardwise.utils.logging import logger, warn_once
from shardwise.zero.updates.parts import Part, flat_optimizer
from shardwise.zero.updates.update import equal_values

Factor = float | torch.Tensor


class EarlySteps:
    """See the module docstring. One engine has one, with one thread, which begins with the first unit.

    Between `offer` and whatever waits for the thread nobody may write gradients, masters or state, nor lend them: who
    does that calls `drop` before, who reads what is lent `settle`.

    Args:
        optimizer: the engine's.
        parts: what is stepped together, by unit.
        accountant: is told of the copies.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parts: Mapping[int, Part], accountant: Accountant) -> None:
        self._optimizer = optimizer
        self._accountant = accountant
        apart = {index: [section.steps_apart for section in part.sections] for index, part in parts.items()}
        self._parts = {index: part for index, part in parts.items() if apart[index] and all(apart[index])}
        self._drafts: dict[int, _Draft] = {}
        self._jobs: dict[int, _Job] = {}
        self._terms: _Terms | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._kept = self._lost = 0
        left = sum(bool(part.sections) for part in parts.values()) - len(self._parts)
        if left:
            _say(f"{left} of {left + len(self._parts)} units, which are on the device")

    def offer(self, index: int, factor: Factor) -> None:
        """Begin to step a unit whose gradient is complete, if that can be done.

        Args:
            index: of the unit.
            factor: what its gradient will probably be multiplied by.
        """
        part = self._parts.get(index)
        if part is None or not all(self._optimizer.state.get(segment) for _, _, segment in part.segments):
            return  # the first step makes the state
        flat = flat_optimizer(self._optimizer)
        if flat is None or not flat.takes_flat():
            _say(
                f"{type(self._optimizer).__name__}: early steps are made by Adam, AdamW, Adagrad and Lion of "
                "shardwise.optim, without hooks or wrappers of step() that may want gradients in .grad"
            )
            return
        self._terms = self._terms or _Terms.of(self._optimizer, factor)
        try:
            self._jobs[index] = self._begin(self._draft_of(index), self._terms)
        except Exception as error:  # such as a full disk; the pass goes on, for which other ranks wait
            self._jobs[index] = _Job(None, [], Future())
            self._jobs[index].future.set_exception(error)

    def _draft_of(self, index: int) -> _Draft:
        draft = self._drafts.get(index)
        if draft is None or not draft.is_of(self._optimizer):
            self._discard(index)
            draft = self._drafts[index] = _Draft(self._parts[index], self._optimizer, self._accountant)
        return draft

    def _begin(self, draft: _Draft, terms: _Terms) -> _Job:
        twin = twin_of(self._optimizer, draft.groups(terms.options, self._optimizer))
        versions = draft.versions()
        if not draft.has_values:  # a dry run, which threads would not be in
            with self._accountant.owning(None):  # no tracker sees temporaries of the thread
                draft.step(twin, terms.factor)
            done: Future[None] = Future()
            done.set_result(None)
            return _Job(draft, versions, done)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="shardwise-early")
        return _Job(draft, versions, self._thread.submit(draft.step, twin, terms.factor))

    def take(self, factor: Factor) -> set[int]:
        """Let the units that have been stepped just so be stepped; return which. The others are as they were.

        What the thread has not begun is left out.

        Args:
            factor: what gradients are multiplied by.

        Raises:
            Exception: what has gone wrong in the thread; nothing has been stepped then.
        """
        terms = self._terms
        jobs = self._end()
        kept: set[int] = set()
        try:
            for job in jobs.values():
                job.future.result()
            if terms is not None and terms.hold(self._optimizer, factor):
                kept = {index for index, job in jobs.items() if job.counts(self._optimizer)}
        finally:
            self._kept += len(kept)
            self._lost += len(jobs) - len(kept)
        for index in kept:
            self._drafts[index].adopt(self._optimizer)
        return kept

    def drop(self) -> None:
        """Forget what has been stepped early: gradients, masters, state or options are about to change."""
        for job in self._end().values():
            self._lost += 1
            error = job.future.exception()
            if error is not None:
                logger.warning("an early step, of which nothing is used, has failed: %r", error)

    def _end(self) -> dict[int, _Job]:
        """Wait for the thread; return what it has done, well or not."""
        begun = {index: job for index, job in self._jobs.items() if not job.future.cancel()}
        wait([job.future for job in begun.values()])
        self._jobs, self._terms = {}, None
        return begun

    def settle(self) -> None:
        """Wait until the thread has nothing to do."""
        wait([job.future for job in self._jobs.values()])

    def counted(self) -> tuple[int, int]:
        """Return how many units have been stepped early and taken over, and how many in vain, since the last call."""
        found = self._kept, self._lost
        self._kept = self._lost = 0
        return found

    def forget_copies(self) -> None:
        """Give the memory of the copies back, or their space on the disk."""
        self.drop()
        for index in list(self._drafts):
            self._discard(index)

    def close(self) -> None:
        """End the thread, and give everything back."""
        self.forget_copies()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _discard(self, index: int) -> None:
        draft = self._drafts.pop(index, None)
        if draft is not None:
            draft.discard()


def _say(what: str) -> None:
    warn_once(f"offload_optimizer.super_offload: the step is made after the backward pass for {what}")


class _Terms(NamedTuple):
    """What a step depends on besides gradients, masters and state.

    Attributes:
        factor: on gradients.
        options: of each group, but for its parameters.
        settings: of the optimizer itself.
    """

    factor: Factor
    options: list[dict[str, Any]]
    settings: dict[str, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, factor: Factor) -> _Terms:
        """Return what holds now; it stays as it is whatever becomes of the optimizer."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
        return cls(factor, copy.deepcopy(groups), _settings(optimizer))

    def hold(self, optimizer: torch.optim.Optimizer, factor: Factor) -> bool:
        """Whether they are what holds now, to the bit."""
        if isinstance(factor, torch.Tensor) and not has_values(factor):
            return True  # a dry run
        flat = flat_optimizer(optimizer)
        now = self.of(optimizer, factor)
        return (
            flat is not None
            and flat.takes_flat()
            and type(factor) is type(self.factor)
            and float(factor) == float(self.factor)
            and now.settings == self.settings
            and len(now.options) == len(self.options)
            and all(
                a.keys() == b.keys() and all(equal_values(a[key], b[key]) for key in a)
                for a, b in zip(now.options, self.options, strict=True)
            )
        )


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    plain = (bool, int, float, str, torch.dtype, type(None))
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, plain)}


@dataclass
class _Job:
    """A unit that the thread steps.

    Attributes:
        draft: its copy; None: it could not be made.
        versions: of what it is a copy of, when it was given to the thread.
        future: of the work.
    """

    draft: _Draft | None
    versions: list[int]
    future: Future[None]

    def counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether nobody has written, or put other things into the place of, what has been copied."""
        draft = self.draft
        return draft is not None and draft.adoptable and draft.is_of(optimizer) and draft.versions() == self.versions


@dataclass
class _Copy:
    """A tensor that is stepped instead of another one.

    Attributes:
        live: the other one.
        draft: the tensor.
        loans: lend `live`, if it has no memory of its own.
        stored: where `draft` is kept then.
        accountant: is told of the bytes.
    """

    live: torch.Tensor
    draft: torch.Tensor
    loans: Loans
    stored: Stored | None
    accountant: Accountant

    @classmethod
    def of(cls, live: torch.Tensor, loans: Loans, accountant: Accountant) -> _Copy:
        """Make a copy, without the values."""
        draft = torch.empty_like(live)
        if loans.stored(live) is None:
            accountant.hold(Category.BUFFERS, draft, Tier.HOST)
            return cls(live, draft, loans, None, accountant)
        stored = loans.home.keep(draft)
        assert stored is not None
        accountant.disregard(draft)
        accountant.add(Category.BUFFERS, draft.nbytes, loans.home.tier)
        return cls(live, draft, loans, stored, accountant)

    def rest(self) -> None:
        """Take the memory that it was made with, if it is kept elsewhere."""
        if self.stored is not None:
            self.stored.give_back(written=False)
            self.stored.settle()

    def start(self) -> None:
        """Have memory."""
        if self.stored is not None:
            self.stored.start(read=False)
            self.accountant.add(Category.BUFFERS, self.draft.nbytes, Tier.HOST)

    def bring(self) -> None:
        """Have the values."""
        stored = self.loans.stored(self.live)
        if stored is None:
            self.draft.copy_(self.live)
        else:
            stored.copy_to(self.draft)
            self.accountant.move(self.loans.home.tier, read=self.draft.nbytes)

    def give_back(self, *, written: bool) -> None:
        """Begin to store what has been `written`."""
        if self.stored is not None:
            self.stored.give_back(written=written)
            self.accountant.move(self.loans.home.tier, written=self.draft.nbytes if written else 0)

    def settle(self) -> None:
        """Have no memory any more."""
        if self.stored is not None:
            try:
                self.stored.settle()
            finally:
                self.accountant.remove(Category.BUFFERS, self.draft.nbytes, Tier.HOST)

    def exchange(self) -> None:
        """Let it and the other one have each other's values."""
        if self.stored is None:
            self.live.data, self.draft.data = self.draft.data, self.live.data
        else:
            self.loans.exchange(self.live, self.stored)

    def discard(self) -> None:
        """It is not wanted any more."""
        if self.stored is not None:
            self.accountant.remove(Category.BUFFERS, self.draft.nbytes, self.loans.home.tier)
            self.stored = None


class _Draft:
    """A copy of the masters and the state of a part.

    Args:
        part: the part.
        optimizer: has state for all of it.
        accountant: is told of the bytes.

    Attributes:
        adoptable: it has been stepped, and has what the original has.
    """

    def __init__(self, part: Part, optimizer: torch.optim.Optimizer, accountant: Accountant) -> None:
        self.adoptable = False
        self._part = part
        self._masters: dict[int, _Copy] = {}  # by `id` of the section
        self._segments: list[nn.Parameter] = []
        self._states: list[dict[str, _Copy]] = []
        self._others: list[dict[str, Any]] = []  # what is no tensor, copied anew in each step
        try:
            self._make(optimizer, accountant)
        except BaseException:
            self.discard()
            raise

    def _make(self, optimizer: torch.optim.Optimizer, accountant: Accountant) -> None:
        for section in self._part.sections:
            assert section.master is not None
            self._masters[id(section)] = _Copy.of(section.master, section.optimizer_loans, accountant)
        for section, place, segment in self._part.segments:
            draft = self._masters[id(section)].draft[place]
            self._segments.append(nn.Parameter(draft, requires_grad=False))
            self._states.append(copies := {})
            for key, value in optimizer.state[segment].items():
                if isinstance(value, torch.Tensor):
                    copies[key] = _Copy.of(value, section.optimizer_loans, accountant)
        for made in self._copies():
            made.rest()

    def _copies(self) -> Iterator[_Copy]:
        yield from self._masters.values()
        for state in self._states:
            yield from state.values()

    @property
    def has_values(self) -> bool:
        """Whether this is no dry run."""
        return all(has_values(made.draft) for made in self._masters.values())

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether what it is a copy of is still what is stepped."""
        if any(section.master is not self._masters[id(section)].live for section in self._part.sections):
            return False
        for (_, _, segment), copies in zip(self._part.segments, self._states, strict=True):
            state = optimizer.state.get(segment, {})
            tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            if tensors.keys() != copies.keys():
                return False
            if any(
                value is not copies[key].live or value.dtype != copies[key].draft.dtype
                for key, value in tensors.items()
            ):
                return False
        return True

    def versions(self) -> list[int]:
        """Return how often what it is a copy of has been written by operators."""
        live = [*(made.live for made in self._copies()), *(segment for _, _, segment in self._part.segments)]
        return [tensor._version for tensor in live]

    def groups(self, options: list[dict[str, Any]], optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Return parameter groups with these options for an optimizer that steps the copy.

        What is no tensor in the state is copied now.
        """
        drafts = {id(s): draft for (_, _, s), draft in zip(self._part.segments, self._segments, strict=True)}
        self._others = [
            {k: copy.deepcopy(v) for k, v in optimizer.state[s].items() if not isinstance(v, torch.Tensor)}
            for _, _, s in self._part.segments
        ]
        return [
            {**chosen, "params": [drafts[id(p)] for p in group["params"] if id(p) in drafts]}
            for chosen, group in zip(options, optimizer.param_groups, strict=True)
        ]

    def step(self, twin: torch.optim.Optimizer, factor: Factor) -> None:
        """Copy the values, and step them; runs on the thread.

        Args:
            twin: has the copy in its groups, and no state.
            factor: on the gradients.
        """
        self.adoptable = False
        flat = flat_optimizer(twin)
        assert flat is not None
        part, drafts = self._part, self._segments
        with torch.no_grad(), self._lent():
            given = [
                {**{key: made.draft for key, made in copies.items()}, **others}
                for copies, others in zip(self._states, self._others, strict=True)
            ]
            twin.state.update({draft: dict(state) for draft, state in zip(drafts, given, strict=True)})
            shown = {id(section): section.stepped_gradient for section in part.sections}
            gradients = [(d, shown[id(s)][place]) for d, (s, place, _) in zip(drafts, part.segments, strict=True)]
            origins = [(draft, found) for draft, (_, found) in zip(drafts, part.origins, strict=True)]
            flat.step_flat(factor=factor, gradients=gradients, outputs=[], origins=origins)
            made = [twin.state[draft] for draft in drafts]
            self._others = [
                {key: state.get(key) for key in others} for state, others in zip(made, self._others, strict=True)
            ]
            # State in another type than before, say, is left to the step.
            self.adoptable = all(
                state.keys() == before.keys()
                and all(value is before[key] for key, value in state.items() if isinstance(value, torch.Tensor))
                for state, before in zip(made, given, strict=True)
            )

    @contextlib.contextmanager
    def _lent(self) -> Iterator[None]:
        """Have the values of what is copied inside of the block; those that are there at its end are kept."""
        written = False

        def give_back(made: _Copy) -> None:
            made.give_back(written=written)

        with contextlib.ExitStack() as settled, contextlib.ExitStack() as started:
            for made in self._copies():
                made.start()
                settled.callback(made.settle)
                started.callback(give_back, made)
            for made in self._copies():
                made.bring()
            yield
            written = True

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the copy what is stepped, and the other way round."""
        for made in self._copies():
            made.exchange()
        for (section, place, segment), draft in zip(self._part.segments, self._segments, strict=True):
            master = self._masters[id(section)]
            if master.stored is None:
                segment.data, draft.data = master.live[place], master.draft[place]
        for (_, _, segment), others in zip(self._part.segments, self._others, strict=True):
            optimizer.state[segment].update(others)
        self.adoptable = False

    def discard(self) -> None:
        """It is not wanted any more."""
        for made in self._copies():
            made.discard()
