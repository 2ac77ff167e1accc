"""Where state lives, and how it is lent to the device.

A place takes the memory of a tensor over and keeps its values: in the memory of the host, in files. The tensor itself
stays what it is, with all its views, but has memory only while it is lent: somebody asks for it (`start`), waits until
the values are there (`finish`), uses them, and gives them back, written or only read. Between `start` and `finish`
other work can be done. What lives on the device is there always, and costs nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from typing_extensions import override

from shardwise.compat import can_hand_memory_on, hand_memory_on
from shardwise.device.ranges import launched, named, watched
from shardwise.memory.accountant import Accountant, Category, Tier

_NOTHING = contextlib.nullcontext()


class Stored(Protocol):
    """The values of one tensor in a place; the tensor is lent when it has been taken over.

    Attributes:
        staged: bytes of the host through which values go on their way between the place and where they are used.
    """

    staged: int

    def start(self, *, read: bool) -> None:
        """Give the tensor memory again and begin to bring the values; its content is undefined unless `read`."""

    def finish(self) -> None:
        """Let the current stream go on when the values are there."""

    def give_back(self, *, written: bool) -> None:
        """Take the tensor's memory when the current stream has used it; begin to store the values if `written`."""

    def copy_to(self, target: torch.Tensor) -> None:
        """Bring what has been stored into another tensor like this one, for the current stream (on any thread)."""

    def settle(self, leave: Callable[[torch.UntypedStorage], None] | None = None) -> None:
        """Have the host wait until the tensor's memory, taken by `give_back`, is free.

        Args:
            leave: takes it instead of the system (where the place lags, and nothing is staged).
        """

    def look_ahead(self, target: torch.Tensor | None = None) -> None:
        """Begin to bring the values to where `copy_to` or `start` has them sooner, if that takes time.

        Args:
            target: where `copy_to` will bring them. What it holds is undefined until then.
        """

    def in_place(self) -> torch.Tensor:
        """Return the stored bytes for the host to read and write, when all copies are made (where `at_hand`)."""

    def shared(self) -> torch.Tensor:
        """Return the stored bytes for the host to keep (where `at_hand`).

        From now on whoever stores values has the host wait until they are there. It waits itself, with `in_place`, for
        copies that read what it is going to write.
        """


class StateHome(Protocol):
    """A place for tensors of one device.

    Attributes:
        tier: on what it is.
        lends: whether what lives there has memory only while it is lent.
        at_hand: whether the host can work on what lives there without its being lent.
        lags: whether memory that is given back written is free only when it has been stored, on which the host waits.
        used_on: where it is used; None: on the engine's device.
    """

    tier: Tier
    lends: bool
    at_hand: bool
    lags: bool
    used_on: torch.device | None

    def keep(self, tensor: torch.Tensor) -> Stored | None:
        """Take over the memory of a contiguous tensor that has one of its own; None: it stays where it is."""

    def close(self) -> None:
        """Give back what the place has; nothing is kept there any more."""


class Resident(StateHome):
    """Where tensors are used: every one stays where it is.

    Args:
        tier: on what that is.
        used_on: see `StateHome`.
    """

    lends = False
    at_hand = True
    lags = False

    def __init__(self, tier: Tier, used_on: torch.device | None = None) -> None:
        self.tier = tier
        self.used_on = used_on

    @override
    def keep(self, tensor: torch.Tensor) -> None: ...

    @override
    def close(self) -> None: ...


ON_DEVICE = Resident(Tier.DEVICE)
ON_HOST = Resident(Tier.HOST, torch.device("cpu"))
"""The memory of the host, for what the processor works on there."""


def tier_in_use(home: StateHome) -> Tier:
    """Return on what lies what lives in a place, while it is used."""
    return Tier.DEVICE if home.used_on is None else Tier.HOST


@dataclass(frozen=True)
class Where:
    """The names of the places in which each kind of state lives.

    Master weights live with the optimizer's state; where the parameters themselves are updated, with the parameters.

    Attributes:
        optimizer: place of the optimizer's state.
        gradients: place of accumulated gradients.
        parameters: place of the parameters between uses.
        share: part of the elements whose optimizer state and gradients are not on the device; whole units are.
        near: elements of a rank's parameters that stay on the host where the place is slower than that.
    """

    optimizer: str = "device"
    gradients: str = "device"
    parameters: str = "device"
    share: float = 1.0
    near: int = 0

    @property
    def names(self) -> set[str]:
        """The places that are asked for."""
        return {self.optimizer, self.gradients, self.parameters}


ALL_ON_DEVICE = Where()


@dataclass(frozen=True)
class Homes:
    """The places in which each kind of state lives.

    Attributes:
        optimizer: of what is stepped in segments.
        whole: of what is stepped in whole tensors, which is done on the device.
        gradients: of accumulated gradients.
        parameters: of the parameters between uses.
        near: of the first `Where.near` elements of these.
    """

    optimizer: StateHome = ON_DEVICE
    whole: StateHome = ON_DEVICE
    gradients: StateHome = ON_DEVICE
    parameters: StateHome = ON_DEVICE
    near: StateHome = ON_DEVICE

    def close(self) -> None:
        """Give back what the places have; nothing lives there any more."""
        for home in (self.optimizer, self.whole, self.gradients, self.parameters, self.near):
            home.close()


ALL_AT_HAND = Homes()


@dataclass
class _Loan:
    """A tensor that lives elsewhere.

    Attributes:
        fresh: it has never been stored.
        view: what is stored, as a tensor like it on the host.
        staged: bytes of the host that are taken now, because it is on its way.
        given: its memory was given to it here, and is not that with which it has come.
    """

    tensor: torch.Tensor
    stored: Stored
    category: Category
    fresh: bool = True
    view: torch.Tensor | None = None
    staged: int = 0
    given: bool = False


class Spare:
    """Memory of the host that tensors have left behind, for the next ones that are as large.

    New memory costs the processor the time to clear it. There is never more than has been lent at once: before a tensor
    gets new memory, as much of what has been left goes back to the system.

    Args:
        accountant: is told of the bytes.

    Attributes:
        bytes: that are left now.
    """

    def __init__(self, accountant: Accountant) -> None:
        self.bytes = 0
        self._accountant = accountant
        self._counted = 0
        self._left: list[torch.UntypedStorage] = []

    def leave(self, storage: torch.UntypedStorage) -> None:
        """Take the memory of a storage (see `count`)."""
        size = storage.nbytes()
        if not (can_hand_memory_on and storage.resizable()):  # who has a NumPy array of it would see what comes next
            storage.resize_(0)
        elif size:
            kept = torch.UntypedStorage(0, device=storage.device)
            hand_memory_on(storage, kept)
            self._left.append(kept)
            self.bytes += size

    def give(self, storage: torch.UntypedStorage, size: int) -> None:
        """Give a storage without memory `size` bytes, of undefined content, if as many were left; else make room."""
        fits = next((number for number, kept in enumerate(self._left) if kept.nbytes() == size), None)
        if fits is not None:
            hand_memory_on(self._left.pop(fits), storage)
            self.bytes -= size
        else:
            self._free(size)
        self.count()

    def count(self) -> None:
        """Tell the accountant of what is left."""
        self._accountant.add(Category.BUFFERS, self.bytes - self._counted, Tier.HOST)
        self._counted = self.bytes

    def clear(self) -> None:
        """Give everything back to the system."""
        self._free(self.bytes)
        self.count()

    def _free(self, size: int) -> None:
        while self._left and size > 0:
            freed = self._left.pop(0).nbytes()
            self.bytes -= freed
            size -= freed


class Loans:
    """Tensors that live in one place and are lent together; a loan inside of another one brings nothing.

    Args:
        home: the place.
        accountant: is told of the bytes.
        label: whose tensors they are, for profilers and timelines.

    Attributes:
        away: whether what lives in the place is lent.
        lent: how often they are lent now.
        spare: where memory of the host comes from, and goes to, meanwhile; see `in_turn`.

    Example:
        >>> loans = Loans(ON_DEVICE, Accountant())
        >>> loans.keep(Category.MASTER, torch.zeros(4))
        >>> with loans.lent_out(written=True):
        ...     loans.away
        False
    """

    def __init__(self, home: StateHome, accountant: Accountant, label: str = "") -> None:
        self.home = home
        self.away = home.lends
        self.lent = 0
        self._label = label
        self._on_its_way: list[Callable[[], None]] = []  # to be called when all is there, or stored
        self.spare: Spare | None = None
        self._accountant = accountant
        self._tier = tier_in_use(home)
        self._written = False
        self._kept: dict[int, _Loan] = {}  # by storage
        self._unsettled: list[_Loan] = []

    def keep(self, category: Category, tensor: torch.Tensor) -> None:
        """Count a tensor, and let it live in the place from now on (from the end of the loan, if there is one)."""
        if not self.away:
            self._accountant.hold(category, tensor, self.home.tier)
            return
        if id(tensor.untyped_storage()) in self._kept:
            return
        size = tensor.untyped_storage().nbytes()
        alone = tensor.is_contiguous() and tensor.nbytes == size
        with self._accountant.owning(None):
            stored = self.home.keep(tensor) if alone and size else None
        if stored is None:
            self._accountant.hold(category, tensor, self._tier)
            return
        self._accountant.disregard(tensor)  # its memory comes and goes: told by the bytes
        self._accountant.add(category, size, self._tier)
        self._accountant.add(category, size, self.home.tier)
        loan = _Loan(tensor, stored, category)
        self._kept[id(tensor.untyped_storage())] = loan
        if not self.lent:
            self._return(loan, written=True)
            self.settle()

    def keep_only(self, category: Category, tensors: Sequence[torch.Tensor]) -> None:
        """Have these tensors and no others of a category."""
        wanted = {id(tensor.untyped_storage()) for tensor in tensors}
        for key, loan in list(self._kept.items()):
            if loan.category is category and key not in wanted:
                self.forget(loan.tensor)
        for tensor in tensors:
            self.keep(category, tensor)

    def forget(self, tensor: torch.Tensor) -> None:
        """Leave a tensor, with the memory that it has now, to whoever has it; nothing happens if it is not here."""
        self.settle()
        loan = self._kept.pop(id(tensor.untyped_storage()), None)
        if loan is not None:
            self._arrived(loan)
            self._accountant.remove(loan.category, tensor.nbytes, self.home.tier)
            if self.lent:
                self._accountant.remove(loan.category, tensor.nbytes, self._tier)

    def clear(self) -> None:
        """Forget everything."""
        for loan in list(self._kept.values()):
            self.forget(loan.tensor)

    @property
    def storages(self) -> Collection[int]:
        """The `id` of each storage whose memory is taken and given here."""
        return self._kept.keys()

    def start(self, *, read: bool = True) -> None:
        """Begin to lend everything; of undefined content, if it is not lent already, unless `read`."""
        if not self.lent:
            self.settle()
        self.lent += 1
        if self.lent == 1:
            with self._shown("lend"):
                if read:
                    self._set_out("bring")
                for loan in self._kept.values():
                    loan.given = True
                    spare = self._spare_of(loan)
                    if spare is not None:
                        spare.give(loan.tensor.untyped_storage(), loan.tensor.nbytes)
                    self._accountant.add(loan.category, loan.tensor.nbytes, self._tier)
                    if read:
                        self._coming(loan, loan.stored.staged)
                        self._move(read=loan.tensor.nbytes)
                    with self._accountant.owning(None):
                        loan.stored.start(read=read)

    def _shown(self, what: str) -> AbstractContextManager[Any]:
        return named(what, self._label, self._size) if self._kept and watched() else _NOTHING

    @property
    def _size(self) -> int:
        return sum(loan.tensor.nbytes for loan in self._kept.values())

    def _set_out(self, what: str) -> None:
        if self._kept and watched():
            self._on_its_way.append(launched(what, self._label, self._size))

    def _land(self) -> None:
        while self._on_its_way:
            self._on_its_way.pop()()

    def finish(self) -> None:
        """Let the current stream go on when everything is there."""
        with self._shown("wait for loan"):
            for loan in self._kept.values():
                if not loan.fresh:
                    loan.stored.finish()
                    self._arrived(loan)
        self._land()

    def give_back(self, *, written: bool) -> None:
        """End a loan. What is not lent any more is stored if one of the loans has written it; see `settle`."""
        self.lent -= 1
        self._written |= written
        if not self.lent:
            self._land()
            written, self._written = self._written, False
            with self._shown("store"), contextlib.ExitStack() as all_of_them:
                if written:
                    self._set_out("take")
                for loan in reversed(self._kept.values()):
                    all_of_them.callback(self._return, loan, written=written or loan.fresh)

    def _return(self, loan: _Loan, *, written: bool) -> None:
        self._arrived(loan)
        if written:
            self._coming(loan, loan.stored.staged)
            self._move(written=loan.tensor.nbytes)
        self._unsettled.append(loan)
        with self._accountant.owning(None):
            loan.stored.give_back(written=written)
        loan.fresh = False
        if not (self.home.lags and written):
            self.settle()

    def settle(self) -> None:
        """Have the memory of what was given back: where it is still being stored the host waits for that.

        Raises:
            OffloadError: something could not be stored, and is lost.
        """
        if not self._unsettled:
            return
        with self._shown("wait for store"), contextlib.ExitStack() as all_of_them:
            all_of_them.callback(self._land)
            while self._unsettled:
                loan = self._unsettled.pop()
                spare = self._spare_of(loan)
                if spare is not None:
                    all_of_them.callback(spare.count)
                all_of_them.callback(self._accountant.remove, loan.category, loan.tensor.nbytes, self._tier)
                all_of_them.callback(self._arrived, loan)
                all_of_them.callback(loan.stored.settle, *(() if spare is None else (spare.leave,)))

    def spare_memory(self) -> Spare:
        """Return what keeps memory between loans, of which the accountant is told."""
        return Spare(self._accountant)

    def _spare_of(self, loan: _Loan) -> Spare | None:
        """Return what has memory for a tensor: one of the host that values are read into, and written from.

        State that the optimizer makes in its first step comes with memory of its own, which would come on top.
        """
        return self.spare if self.home.lags and loan.given and not loan.stored.staged else None

    def in_place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor for the host to read and write, where they are stored (if `home.at_hand`)."""
        loan = self._kept.get(id(tensor.untyped_storage()))
        if loan is None or self.lent:
            return tensor
        values = loan.stored.in_place()
        if loan.view is None:
            loan.view = values.view(tensor.dtype).view(tensor.shape)
        return loan.view

    def shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values of a tensor where they are stored, for the host to keep; see `Stored.shared`."""
        loan = self._kept.get(id(tensor.untyped_storage()))
        return tensor if loan is None else loan.stored.shared().view(tensor.dtype).view(tensor.shape)

    @contextlib.contextmanager
    def lent_out(self, *, read: bool = True, written: bool) -> Iterator[None]:
        """Lend everything inside of the block."""
        self.start(read=read)
        come = False
        try:
            self.finish()
            come = True
            yield
        finally:
            try:
                self.give_back(written=written and come)
            finally:
                self.settle()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Let views be made of everything inside of the block; there are no values behind them, and no memory is used.

        torch makes no views of what has no memory. What is allocated here is never touched.
        """
        storages = [] if self.lent else [loan.tensor.untyped_storage() for loan in self._kept.values()]
        self.settle()
        try:
            for loan, storage in zip(self._kept.values(), storages, strict=False):
                storage.resize_(loan.tensor.nbytes)
            yield
        finally:
            for storage in storages:
                storage.resize_(0)

    def read(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """Return the values of a tensor: itself if it is there, else a copy, in `into` if that is given."""
        loan = self._kept.get(id(tensor.untyped_storage()))
        if loan is None or self.lent:
            return tensor if into is None else into.copy_(tensor)
        target = torch.empty_like(tensor) if into is None else into
        self._move(read=tensor.nbytes)
        self._coming(loan, loan.stored.staged)
        with named("copy", self._label, tensor.nbytes), self._accountant.owning(None):
            loan.stored.copy_to(target)
        self._arrived(loan)
        return target

    def look_ahead(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> None:
        """Begin to bring the values of a tensor that will be `read` next (into the same memory), if that takes time."""
        loan = self._kept.get(id(tensor.untyped_storage()))
        if loan is not None and self.home.lags and not (self.lent or loan.staged):
            self._coming(loan, loan.stored.staged if into is not None else tensor.nbytes)
            with self._accountant.owning(None):
                loan.stored.look_ahead(into)

    def _move(self, *, read: int = 0, written: int = 0) -> None:
        self._accountant.move(self.home.tier, read=read, written=written)
        if self.home.tier is Tier.DISK and self.home.used_on is None:
            self._accountant.move(Tier.HOST, read=read, written=written)  # by way of the host

    def _coming(self, loan: _Loan, staged: int) -> None:
        if staged and not loan.staged:
            loan.staged = staged
            self._accountant.add(Category.BUFFERS, staged, Tier.HOST)

    def _arrived(self, loan: _Loan) -> None:
        if loan.staged:
            self._accountant.remove(Category.BUFFERS, loan.staged, Tier.HOST)
            loan.staged = 0


Borrowed = tuple[Loans, bool | None]
"""What is lent, and whether it will be written; None: all of it will, so that its values need not be brought."""

T = TypeVar("T")


@contextlib.contextmanager
def borrowed(wanted: Sequence[Borrowed]) -> Iterator[None]:
    """Have all of some loans inside of the block."""
    try:
        with _lent(wanted) as finish:
            finish()
            yield
    finally:
        settle(wanted)


@contextlib.contextmanager
def _lent(wanted: Sequence[Borrowed]) -> Iterator[Callable[[], None]]:
    """Begin to borrow, and give the block what ends that; at its end everything is given back.

    What has not come, because of an error, is not stored: it would take the place of good values; nor is what should
    have been overwritten and has not.
    """
    come = done = False

    def finish() -> None:
        nonlocal come
        for loans, _ in wanted:
            loans.finish()
        come = True

    started: list[Borrowed] = []
    try:
        for borrows in wanted:
            borrows[0].start(read=borrows[1] is not None)
            started.append(borrows)
        yield finish
        done = True
    finally:
        with contextlib.ExitStack() as all_of_them:
            for loans, written in reversed(started):
                all_of_them.callback(loans.give_back, written=done if written is None else written and come)


def settle(wanted: Sequence[Borrowed]) -> None:
    """Have the memory of what has been borrowed and given back."""
    with contextlib.ExitStack() as all_of_them:
        for loans, _ in reversed(wanted):
            all_of_them.callback(loans.settle)


@contextlib.contextmanager
def _sparing(wanted: Sequence[Borrowed]) -> Iterator[Spare | None]:
    """Let what is given back inside of the block leave its memory to what is lent there next; in the end, to nobody."""
    lagging = [loans for loans, _ in wanted if loans.home.lags and loans.spare is None]
    if not (lagging and can_hand_memory_on):
        yield None
        return
    spare = lagging[0].spare_memory()
    try:
        for loans in lagging:
            loans.spare = spare
        yield spare
    finally:
        for loans in lagging:
            loans.spare = None
        spare.clear()


def in_turn(
    parts: Sequence[tuple[T, Sequence[Borrowed]]],
    use: Callable[[T], None],
) -> None:
    """Use parts of something one after the other, each lent meanwhile.

    While one is waited for and used the next one is on its way, and the one before may still be being stored: there is
    memory for three, whatever their number, and one leaves its memory of the host to the third after it.

    Args:
        parts: each with what it borrows.
        use: is called with each.
    """
    everything = [borrows for _, wanted in parts for borrows in wanted]
    with _sparing(everything) as spare:
        try:
            with contextlib.ExitStack() as ahead:
                for number, (part, wanted) in enumerate(parts):
                    with ahead.pop_all(), _lent(wanted) as finish:
                        if number >= 2:
                            settle(parts[number - 2][1])
                        for loans, written in parts[number + 1][1] if number + 1 < len(parts) else ():
                            loans.start(read=written is not None)
                            ahead.callback(loans.give_back, written=False)
                        if spare is not None:
                            spare.clear()  # of other sizes
                        finish()
                        use(part)
        finally:
            settle(everything)
