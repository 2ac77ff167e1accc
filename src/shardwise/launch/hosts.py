"""Machines and slots of a job: hostfiles and include / exclude filters.

A slot is a place for one process; on a machine with CUDA devices, the device of that number. Invariant: every entry of
the text is used, or refused with its line. A hostfile has one machine in a line, as `worker-0 slots=8 max_slots=8`, and
`#` starts a comment. A filter has machines separated by `@`, each with its slots, or none for all:
`worker-0@worker-1:0,2`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path

from shardwise.errors import CommandLineError

DEFAULT_HOSTFILE = "/job/hostfile"
"""Read if it exists and no other is given; cluster software for DeepSpeed jobs writes it there."""

_LINE = re.compile(
    r"(?P<host>[^\s=:@,-][^\s=:@,]*)\s+slots\s*=\s*(?P<slots>[0-9]{1,6})(\s+max[_-]slots\s*=\s*(?P<most>[0-9]{1,6}))?"
)


def parse_hostfile(text: str, name: str) -> dict[str, int]:
    """Return the machines of a hostfile with their numbers of slots, in order; `name` is that of the file, for errors.

    Raises CommandLineError if a line has another form, a machine occurs twice, or the file is empty.

    >>> parse_hostfile("a slots=2  # the first\\nb slots=4", "hosts")
    {'a': 2, 'b': 4}
    """
    hosts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None or int(match["slots"]) < 1:
            raise CommandLineError(
                f"{name}, line {number}: expected `host slots=N` with N from 1 up, found {content!r}."
            )
        if match["most"] is not None and int(match["slots"]) > int(match["most"]):
            raise CommandLineError(f"{name}, line {number}: slots is more than max_slots in {content!r}.")
        if match["host"] in hosts:
            raise CommandLineError(f"{name}, line {number}: {match['host']} occurs twice. Keep one line per host.")
        hosts[match["host"]] = int(match["slots"])
    if not hosts:
        raise CommandLineError(f"{name} names no host. Expected lines such as `worker-0 slots=8`.")
    return hosts


def has_hostfile() -> bool:
    """Whether the default hostfile exists."""
    return Path(DEFAULT_HOSTFILE).is_file()


def read_hostfile(path: str | None) -> dict[str, int] | None:
    """Read the hostfile at `path`, or the default one if `path` is None and it exists; else return None."""
    if path is None and not has_hostfile():
        return None
    file = Path(DEFAULT_HOSTFILE if path is None else path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandLineError(f"Cannot read the hostfile {file}: {error}.") from error
    return parse_hostfile(text, f"hostfile {file}")


def parse_filter(text: str, option: str) -> dict[str, tuple[int, ...]]:
    """Return the machines of a filter (from `option`) with their slots; an empty tuple means all.

    Raises CommandLineError if the text has another form, or names a machine or a slot twice.

    >>> parse_filter("a@b:0,2", "--include")
    {'a': (), 'b': (0, 2)}
    """
    hosts: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        host, colon, listed = part.strip().partition(":")
        numbers = [slot.strip() for slot in listed.split(",")] if colon else []
        if not host or not all(re.fullmatch(r"[0-9]{1,6}", slot) for slot in numbers):
            raise CommandLineError(
                f"{option} {text}: expected NAME or NAME:slot,slot joined by @, such as localhost:0,1, found {part!r}."
            )
        slots = tuple(int(slot) for slot in numbers)
        if host in hosts or len(set(slots)) < len(slots):
            raise CommandLineError(f"{option} {text}: {part.strip()!r} repeats a host or a slot.")
        hosts[host] = slots
    return hosts


def check_filters(include: str | None, exclude: str | None) -> None:
    """Check that at most one filter is given. Raises `CommandLineError`."""
    if include and exclude:
        raise CommandLineError("--include and --exclude cannot be combined. Give one of them.")


def select(
    available: Mapping[str, tuple[int, ...]], include: str | None, exclude: str | None
) -> dict[str, tuple[int, ...]]:
    """Return the slots of a job, in the order of `available`; machines without slots are left out.

    Raises CommandLineError for two filters, an unknown machine or slot, or if nothing is left.

    >>> select({"a": (0, 1), "b": (0, 1)}, None, "a@b:0")
    {'b': (1,)}
    """
    check_filters(include, exclude)
    if not include and not exclude:
        return dict(available)
    option, text = ("--include", include) if include else ("--exclude", exclude)
    assert text is not None
    named = parse_filter(text, option)
    for host, slots in named.items():
        if host not in available:
            raise CommandLineError(f"{option} {text}: no host {host!r} here, only {', '.join(available)}.")
        absent = [slot for slot in slots if slot not in available[host]]
        if absent:
            raise CommandLineError(f"{option} {text}: {host} has no slot {absent[0]}, only {_listed(available[host])}.")
    chosen = {}
    for host, slots in available.items():
        wanted = named.get(host)
        if include:
            kept = () if wanted is None else tuple(s for s in slots if not wanted or s in wanted)
        else:
            kept = slots if wanted is None else tuple(s for s in slots if wanted and s not in wanted)
        if kept:
            chosen[host] = kept
    if not chosen:
        raise CommandLineError(f"{option} {text} leaves no slot to run on.")
    return chosen


def is_address(host: str) -> bool:
    """Whether `host` is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_this_machine(host: str) -> bool:
    """Whether `host` is a name or address of this machine."""
    if host in ("localhost", socket.gethostname(), socket.gethostname().partition(".")[0]):
        return True
    try:
        addresses = {(family, info[0]) for family, *_, info in socket.getaddrinfo(host, 0)}
    except OSError:
        return False
    for family, address in addresses:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                # Only addresses of this machine can be bound; nothing is sent.
                probe.bind((address, 0))
                return True
            except OSError:
                continue
    return False


def _listed(slots: tuple[int, ...]) -> str:
    return ", ".join(map(str, slots))
