"""What `deepspeed.git_version_info` says of torch and of the device. Reading it asks CUDA for its version."""

from __future__ import annotations

import torch

_CUDA = torch.cuda.is_available()


def _short(version: str | None) -> str:
    """Return the first two numbers of a version."""
    return ".".join((version or "0.0").split(".")[:2])


TORCH_INFO: dict[str, str | bool] = {
    "version": _short(torch.__version__),
    "bf16_support": torch.cuda.is_bf16_supported() if _CUDA else True,
    "cuda_version": _short(torch.version.cuda),
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if _CUDA else "none",
    "hip_version": _short(torch.version.hip),
}
"""Versions of torch and of what it was built with; "0.0" for what it was built without."""

ACCELERATOR_NAME = "cuda" if _CUDA else "cpu"
"""The kind of device that there is."""
