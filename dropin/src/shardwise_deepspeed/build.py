"""Contents of `deepspeed.git_version_info`. Reading it queries CUDA for its version."""

from __future__ import annotations

import torch

_CUDA = torch.cuda.is_available()


def _short(version: str | None) -> str:
    return ".".join((version or "0.0").split(".")[:2])


TORCH_INFO: dict[str, str | bool] = {
    "version": _short(torch.__version__),
    "bf16_support": torch.cuda.is_bf16_supported() if _CUDA else True,
    "cuda_version": _short(torch.version.cuda),
    "nccl_version": ".".join(map(str, torch.cuda.nccl.version())) if _CUDA else "none",
    "hip_version": _short(torch.version.hip),
}
"""Versions of torch and of its libraries; "0.0" for absent ones."""

ACCELERATOR_NAME = "cuda" if _CUDA else "cpu"
"""Kind of the present device."""
