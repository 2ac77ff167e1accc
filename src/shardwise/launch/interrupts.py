"""Signal handling of the launcher: one orderly shutdown. Invariant: the first signal is never lost, and never
interrupts a critical section, such as the one between starting a process and recording it.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Interrupts:
    """Turns shutdown signals into one orderly shutdown of the launcher.

    The first signal raises `raised(signal)` in the main thread, or at the end of a critical section. Further signals
    call `skip_grace_period`. Signals that the launcher's parent ignores stay ignored. SIGUSR1 and SIGUSR2 go to
    `forward`.
    """

    raised: Callable[[signal.Signals], Exception]
    skip_grace_period: Callable[[], None]
    forward: Callable[[signal.Signals], None]
    received: signal.Signals | None = None
    _held: int = 0
    _pending: bool = False
    _before: dict[signal.Signals, object] = field(default_factory=dict)

    def __enter__(self) -> Interrupts:
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(sig) is not signal.SIG_IGN:
                passes_on = sig in (signal.SIGUSR1, signal.SIGUSR2)
                self._before[sig] = signal.signal(sig, self._pass_on if passes_on else self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)  # type: ignore[arg-type]

    def _pass_on(self, number: int, frame: object) -> None:
        self.forward(signal.Signals(number))

    def _handle(self, number: int, frame: object) -> None:
        if self.received is not None:
            self.skip_grace_period()
            return
        self.received = signal.Signals(number)
        if self._held:
            self._pending = True
        else:
            raise self.raised(self.received)

    @contextlib.contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """Hold back signals until the end of the block."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1
            if self._pending and not self._held:
                self._pending = False
                assert self.received is not None
                raise self.raised(self.received)
