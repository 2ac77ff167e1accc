"""What it costs that state lives elsewhere: bytes a step, seconds, and the life of the disk."""

from __future__ import annotations

from dataclasses import dataclass

RATED = 600
"""Times its size that a disk is taken to be good for, where nobody says (usual ratings: 300 to 1800)."""
_DAY = 86400


@dataclass(frozen=True)
class Traffic:
    """What a step moves between a tier and where it is used.

    Attributes:
        tier: "disk", or "host" (to and from the device).
        read: bytes that come from the tier in a step, of the rank that has most.
        written: bytes that are stored there.
        read_speed: bytes a second of one rank, measured while all read, or as given.
        write_speed: the same of writing.
        all_written: bytes that all ranks of a machine store in a step on the disk that gets most.
        rated: bytes that this disk may be written; None if unknown.
        assumed: whether that is `RATED` times its size, and nobody has said so.

    Example:
        >>> traffic = Traffic("disk", 4 * 10**9, 2 * 10**9, 2e9, 1e9, 2 * 10**9, 600 * 10**12)
        >>> traffic.seconds, round(traffic.days, 1)
        (4.0, 13.9)
        >>> print(traffic)
        disk: a step reads 4.00 GB and writes 2.00 GB on each rank, at 2.00 and 1.00 GB/s: +4.0 s a step if nothing \
hides it. At that pace 43.20 TB a day are written; a drive rated for 600 TB lasts 13.9 days.
    """

    tier: str
    read: int
    written: int
    read_speed: float
    write_speed: float
    all_written: int = 0
    rated: int | None = None
    assumed: bool = False

    @property
    def seconds(self) -> float:
        """What a step takes longer if nothing hides it."""
        return self.read / self.read_speed + self.written / self.write_speed

    @property
    def written_a_day(self) -> float:
        """Bytes that all ranks store on the disk in a day of steps that take no longer than that."""
        return self.all_written * _DAY / self.seconds if self.seconds else 0.0

    @property
    def days(self) -> float | None:
        """How long the disk lasts at that pace; None if its rating is unknown, or nothing is written."""
        return None if self.rated is None or not self.written_a_day else self.rated / self.written_a_day

    def __str__(self) -> str:
        said = (
            f"{self.tier}: a step reads {self.read / 1e9:.2f} GB and writes {self.written / 1e9:.2f} GB on each rank, "
            f"at {self.read_speed / 1e9:.2f} and {self.write_speed / 1e9:.2f} GB/s: +{self.seconds:.1f} s a step if "
            "nothing hides it."
        )
        if self.days is None or self.rated is None:
            return said
        assumed = f" ({RATED} times its size, an assumption: memory_limits.disk_endurance)" if self.assumed else ""
        return (
            f"{said} At that pace {self.written_a_day / 1e12:.2f} TB a day are written; a drive rated for "
            f"{self.rated / 1e12:.0f} TB{assumed} lasts {self.days:.3g} days."
        )
