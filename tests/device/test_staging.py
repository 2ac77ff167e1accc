"""Two buffers between a device and the host, with streams that are played: what arrives, and who waits for whom."""

from __future__ import annotations

import pytest
import torch

from shardwise.device.staging import Staging
from tests.device.streams import far

CPU = torch.device("cpu")
TENSORS = [
    torch.arange(100, dtype=torch.int64),
    torch.zeros(0),
    torch.randn(7, 5).t(),  # not contiguous
    torch.arange(33, dtype=torch.uint8),
    torch.tensor(3.0, dtype=torch.bfloat16),
    torch.randn(64),
]


def content(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) for tensor in tensors)


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize("most", [64, 192, 1 << 20])
def test_bytes_arrive_in_order(late: bool, most: int) -> None:
    size = sum(tensor.nbytes for tensor in TENSORS)
    with far(late) as streams:
        found = b""
        for part in Staging(CPU, size, most).to_host(TENSORS):
            found += bytes(part.tolist())
    assert found == content(TENSORS)
    (stream,) = streams
    buffer = min(most, size + -size % 64)
    assert stream.log[:2] == [f"memory {buffer}"] * 2
    # Every buffer but the last is full, and each is waited for once.
    assert stream.log.count("host waits") == -(-size // buffer)


def test_the_next_bytes_are_on_their_way_while_the_host_reads() -> None:
    tensors = [torch.randn(16) for _ in range(4)]
    with far() as streams:
        coming = Staging(CPU, 256, 64).to_host(tensors)
        next(coming)
        assert streams[0].log[2:] == ["follow", "copy 64", "follow", "copy 64", "host waits"]
        assert streams[0].done == 1
        next(coming)
        assert streams[0].log[7:] == ["follow", "copy 64", "host waits"]
        # Nobody reads on: what has begun is still waited for, as its memory is given back.
        coming.close()
        assert streams[0].log[10:] == ["host waits"]
        assert streams[0].done == 3


@pytest.mark.parametrize("late", [True, False], ids=["late", "early"])
@pytest.mark.parametrize(("numel", "most"), [(0, 64), (1, 64), (16, 64), (100, 64), (100, 1 << 20), (50, 128)])
def test_values_are_put_on_the_device(late: bool, numel: int, most: int) -> None:
    values, out = torch.randn(numel), torch.zeros(numel)
    firsts: list[int] = []

    def fill(part: torch.Tensor, first: int) -> None:
        firsts.append(first)
        part.copy_(values[first : first + part.numel()])

    with far(late):
        Staging(CPU, out.nbytes, most).to_device(out, fill)
    assert torch.equal(out, values)
    assert firsts == list(range(0, numel, min(most, max(64, -(-4 * numel // 64) * 64)) // 4))


def test_a_failure_leaves_nothing_on_its_way() -> None:
    out = torch.zeros(100)

    def fill(part: torch.Tensor, first: int) -> None:
        if first == 32:
            raise OSError("disk")
        part.fill_(1)

    with far() as streams:
        with pytest.raises(OSError, match="disk"):
            Staging(CPU, 400, 64).to_device(out, fill)
        assert streams[0].done == 2
    assert out.sum() == 32
