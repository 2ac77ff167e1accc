"""What one CUDA device does at best: products, copies, and the way to the host and back.

    python bench/gpu_device.py

These are what the other benchmarks of one device are compared with. A product of matrices counts 2 n^3 operations, a
copy on the device bytes read and bytes written, a copy to or from the host its bytes once. "Both ways" copies to and
from the host on two streams at once; bytes of both count. "Launch" is the time of the host for one small kernel.
"""

from __future__ import annotations

from typing import Any

from _gpu import Device, keep, options_of

SIDE, COPIED, MOVED, LAUNCHED = 8192, 2 << 30, 1 << 30, 1000


def products(device: Device, quick: bool) -> list[dict[str, Any]]:
    """Return the FLOP/s of a large product by dtype; the numbers are random, as zeros may be multiplied faster."""
    import torch

    side, rows = 256 if quick else SIDE, []
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        a, b = (torch.randn(side, side, device=device.kind).to(dtype) for _ in range(2))
        seconds = device.fastest(lambda a=a, b=b: torch.mm(a, b))
        rows.append({"what": f"product, {name}", "tflops": 2 * side**3 / seconds / 1e12})
    return rows


def copies(device: Device, quick: bool) -> list[dict[str, Any]]:
    """Return the GB/s of copies on the device, and between it and the host."""
    import torch

    source = torch.empty(1 << 20 if quick else COPIED, dtype=torch.uint8, device=device.kind).random_()
    target = torch.empty_like(source)
    seconds = device.fastest(lambda: target.copy_(source))
    rows = [{"what": "copy on the device", "gb_per_s": 2 * source.nbytes / seconds / 1e9}]
    size = 1 << 20 if quick else MOVED
    down, up = target[:size], source[:size]
    for pinned in (True, False) if device.is_cuda else (False,):
        host, other = (torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
        kind = "page-locked" if pinned else "pageable"
        for what, action in (
            (f"to the device, {kind}", lambda host=host: down.copy_(host, non_blocking=True)),
            (f"to the host, {kind}", lambda host=host: host.copy_(up, non_blocking=True)),
        ):
            rows.append({"what": what, "gb_per_s": size / device.fastest(action) / 1e9})
        if pinned:
            streams = [torch.cuda.Stream() for _ in range(2)]

            def both(host: Any = host, other: Any = other, streams: Any = streams) -> None:
                with torch.cuda.stream(streams[0]):
                    down.copy_(host, non_blocking=True)
                with torch.cuda.stream(streams[1]):
                    other.copy_(up, non_blocking=True)

            rows.append({"what": "both ways, page-locked", "gb_per_s": 2 * size / device.fastest(both) / 1e9})
    return rows


def launches(device: Device) -> list[dict[str, Any]]:
    """Return the microseconds that the host takes for one small kernel."""
    import torch

    one = torch.zeros(1, device=device.kind)

    def many() -> None:
        for _ in range(LAUNCHED):
            one.add_(1)

    many()
    best = min(device.launching(many) for _ in range(5))
    return [{"what": "launch", "microseconds": best / LAUNCHED * 1e6}]


def speeds(device: Device, quick: bool) -> list[dict[str, Any]]:
    """Return all of it."""
    rows = [*products(device, quick), *copies(device, quick), *launches(device)]
    device.forget()
    return rows


def main() -> None:
    """Measure, print and keep it."""
    options = options_of(__doc__)
    device = Device(options.device)
    rows = speeds(device, options.quick)
    for row in rows:
        (unit, value) = next((key, value) for key, value in row.items() if key != "what")
        print(f"{row['what']:28s} {value:10.2f} {unit}", flush=True)
    keep(options, "device", rows, name=device.name, memory=device.total)


if __name__ == "__main__":
    main()
