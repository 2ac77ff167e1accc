"""A cable that takes time: moves frames between two TAP devices, in both directions, each after a set delay.

    python -m tests.machines.delay SECONDS DEVICE DEVICE

For kernels without netem. The devices exist while the program runs; it prints a line once they do.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
_LARGEST = 1 << 16


def tap(name: str) -> int:
    """Make a TAP device; return the descriptor that reads and writes its frames."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


def frame_of(device: int) -> bytes | None:
    """Return the next frame that a device has sent, or None."""
    try:
        return os.read(device, _LARGEST)
    except BlockingIOError:
        return None


def move(delay: float, first: int, second: int) -> None:
    """Move frames until the process is ended."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # in order of time, because all wait equally long
    while True:
        left = None if not waiting else max(0.0, waiting[0][0] - time.monotonic())
        for device in select.select([first, second], [], [], left)[0]:
            while (frame := frame_of(device)) is not None:
                waiting.append((time.monotonic() + delay, second if device == first else first, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, frame = waiting.popleft()
            try:
                os.write(device, frame)
            except OSError:  # the device is down: a cable that is out
                continue


if __name__ == "__main__":
    ends = [tap(name) for name in sys.argv[2:4]]
    print("there", flush=True)
    move(float(sys.argv[1]), *ends)
