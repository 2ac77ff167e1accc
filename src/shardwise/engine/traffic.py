"""Offload traffic of a step: bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step moves between a tier ("disk", "host") and its users, on the rank with most.

    Speeds are in bytes a second of one rank, measured while all ranks transfer, or as given.

    >>> print(Traffic("disk", 4 * 10**9, 2 * 10**9, 2e9, 1e9))
    disk: a step reads 4.00 GB and writes 2.00 GB on each rank, at 2.00 and 1.00 GB/s: +4.0 s a step if nothing \
hides it.
    """

    tier: str
    read: int
    written: int
    read_speed: float
    write_speed: float

    @property
    def seconds(self) -> float:
        """Seconds that the traffic adds to a step without overlap."""
        return self.read / self.read_speed + self.written / self.write_speed

    def __str__(self) -> str:
        return (
            f"{self.tier}: a step reads {self.read / 1e9:.2f} GB and writes {self.written / 1e9:.2f} GB on each rank, "
            f"at {self.read_speed / 1e9:.2f} and {self.write_speed / 1e9:.2f} GB/s: +{self.seconds:.1f} s a step if "
            "nothing hides it."
        )
