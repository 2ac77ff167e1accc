"""Signal handling of the launcher: one orderly shutdown. Invariant: the first signal is never lost."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Interrupts:
    """Handles signals in the block: the first one that ends the launcher calls `stop(signal)`, further ones
    `skip_grace_period`; SIGUSR1 and SIGUSR2 call `forward`. Signals that the launcher's parent ignores stay ignored.

    The functions are called between two instructions of the main thread, and only note what is to do.
    """

    stop: Callable[[signal.Signals], None]
    skip_grace_period: Callable[[], None]
    forward: Callable[[signal.Signals], None]
    received: signal.Signals | None = None
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
        self.stop(self.received)
