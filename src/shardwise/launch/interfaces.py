"""Network interfaces of this machine: the one of a group's traffic, and their speeds."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_NET = Path("/sys/class/net")
_SIOCGIFADDR = 0x8915
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that name the interface, by backend."""


class Interface(NamedTuple):
    """One interface, named as in GLOO_SOCKET_IFNAME. `address` is IPv4, or empty. `speed` is the driver's, in bytes per
    second; None for loopback and many virtual ones. `loopback` does not leave the machine.
    """

    name: str
    address: str
    speed: float | None
    loopback: bool


def interfaces(net: Path = _NET) -> list[Interface]:
    """Return the interfaces of this machine that are up.

    >>> any(found.loopback and found.speed is None for found in interfaces())
    True
    """
    found = []
    for _, name in socket.if_nameindex():
        loopback = name in ("lo", "lo0")
        if loopback or _read(net / name / "operstate") in ("up", "unknown"):
            megabits = _read(net / name / "speed")
            known = megabits.lstrip("-").isdecimal() and int(megabits) > 0
            found.append(Interface(name, _address(name), int(megabits) * 1e6 / 8 if known else None, loopback))
    return found


def interface_variable(backend: str, env: Mapping[str, str] = os.environ) -> str:
    """Return the interface that the environment names for a backend, or "".

    >>> interface_variable("gloo", {"GLOO_SOCKET_IFNAME": "eth0"}), interface_variable("nccl", {})
    ('eth0', '')
    """
    return env.get(f"{backend.upper()}_SOCKET_IFNAME", "")


def of_address(address: str, known: list[Interface]) -> str:
    """Return the interface with an address, or the address of a host name; empty without one."""
    try:
        number = socket.gethostbyname(address)
    except OSError:
        return ""
    return next((found.name for found in known if found.address == number), "")


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # reading the speed of an interface that is down is an error, too
        return ""
