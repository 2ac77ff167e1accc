"""Peak throughput of devices for dense matrix products without sparsity, from vendors' data sheets."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch


class Peak(NamedTuple):
    """Peak throughput in 10^12 FLOPs a second, and a label with device and number type."""

    tflops: float
    name: str


# Words of the driver's device name -> TFLOP/s; the first match counts.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    ("B200", {"16-bit": 2250.0, "TF32": 1125.0, "FP32": 75.0}),
    ("H100 PCIe", {"16-bit": 756.0, "TF32": 378.0, "FP32": 51.0}),
    ("H100 NVL", {"16-bit": 835.0, "TF32": 417.0, "FP32": 60.0}),
    ("H100", {"16-bit": 989.0, "TF32": 494.0, "FP32": 67.0}),
    ("GH200", {"16-bit": 989.0, "TF32": 494.0, "FP32": 67.0}),
    ("H200 NVL", {"16-bit": 835.0, "TF32": 417.0, "FP32": 60.0}),
    ("H200", {"16-bit": 989.0, "TF32": 494.0, "FP32": 67.0}),
    ("A100", {"16-bit": 312.0, "TF32": 156.0, "FP32": 19.5}),
    ("L40S", {"16-bit": 362.0, "TF32": 183.0, "FP32": 91.6}),
    ("L4", {"16-bit": 121.0, "TF32": 60.0, "FP32": 30.3}),
    ("A40", {"16-bit": 149.7, "TF32": 74.8, "FP32": 37.4}),
    ("A10", {"16-bit": 125.0, "TF32": 62.5, "FP32": 31.2}),
    ("RTX 4090", {"16-bit": 165.2, "TF32": 82.6, "FP32": 82.6}),
    ("RTX 3090", {"16-bit": 71.0, "TF32": 35.6, "FP32": 35.6}),
    ("V100-PCIE", {"16-bit": 112.0, "FP32": 14.0}),
    ("V100-SXM2", {"16-bit": 125.0, "FP32": 15.7}),
    ("T4", {"16-bit": 65.0, "FP32": 8.1}),
)


def peak_of(name: str, dtype: torch.dtype) -> Peak | None:
    """Return the peak of a device, or None if unknown. fp32 means TF32 if torch may use it.

    >>> peak_of("NVIDIA H100 80GB HBM3", torch.bfloat16)
    Peak(tflops=989.0, name='H100, 16-bit')
    >>> peak_of("Some CPU", torch.float32)
    """
    rounds = torch.backends.cuda.matmul.fp32_precision == "tf32"  # by either of torch's interfaces
    kind = "16-bit" if dtype.itemsize == 2 else "TF32" if rounds else "FP32"
    for part, peaks in _PEAKS:
        if re.search(rf"\b{part}\b", name):
            kind = "FP32" if kind == "TF32" and kind not in peaks else kind  # no TF32 units
            return Peak(peaks[kind], f"{part}, {kind}") if dtype.itemsize in (2, 4) and kind in peaks else None
    return None
