"""Facts of the machines of a job, compared before the start: versions, script and files, environment, clock."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from shardwise.errors import LaunchError
from shardwise.launch.interfaces import VARIABLES
from shardwise.launch.job import Job

EXPORTED = (
    *("COMET_", "CUBLAS_", "CUDA_", "CUDNN_", "DEEPSPEED_", "EFA_", "FI_", "GLOO_", "HF_", "KMP_", "MKL_", "MLFLOW_"),
    *("MV2_", "NCCL_", "OMP_", "PYTHON", "PYTORCH_", "RDMAV_", "SHARDWISE_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_"),
    *("TRITON_", "UCX_", "WANDB_"),
)
"""Beginnings of the names of variables that the launcher passes on to other machines."""

_OF_ONE_MACHINE = (
    "CUDA_VISIBLE_DEVICES",
    "SHARDWISE_MACHINE",
    "SHARDWISE_MEMORY_DIRECTORY",
    "SHARDWISE_RECOVERY_FILE",
)
_FILES = (".shardwise_env", os.environ.get("DS_ENV_FILE", ".deepspeed_env"))
"""Files of further variables, in the current directory and the home directory."""

_WHOLE, _EDGE = 16 << 20, 1 << 20
"""Bytes up to which all of a file is compared; of a larger one its size, and this much at its beginning and its end."""

MOST_CLOCK_S = 60.0
"""Seconds between two clocks from which on they are reported: certificates and times of checkpoints go wrong."""


def exported(names: Sequence[str] = (), env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables for other machines: by rule, from files, and `names` (as NAME or NAME=VALUE).

    Raises LaunchError for a name that is not set, a wrong line of a file, or an interface that is loopback.
    """
    found = {name: value for name, value in env.items() if name.startswith(EXPORTED) and name not in _OF_ONE_MACHINE}
    for folder in dict.fromkeys((Path.home(), Path.cwd())):
        for name in _FILES:
            found |= _read(folder / name)
    found |= named(names, env)
    for name in VARIABLES:
        if found.get(name) in ("lo", "lo0"):
            raise LaunchError(
                f"{name}={found[name]}: machines do not reach each other over the loopback interface. Unset it; the "
                "interface on the way to the launcher is taken."
            )
    return found


def named(names: Sequence[str], env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `--export`, as NAME or NAME=VALUE. Raises LaunchError for a name that is not set.

    >>> named(("A", "B=2"), {"A": "1"})
    {'A': '1', 'B': '2'}
    """
    found = {}
    for entry in names:
        name, equals, value = entry.partition("=")
        if not equals and name not in env:
            raise LaunchError(f"--export {name}: this variable is not set here. Set it, or give --export {name}=VALUE.")
        found[name] = value if equals else env[name]
    return found


def _read(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        text = line.strip().removeprefix("export ")
        name, equals, value = text.partition("=")
        if text and not text.startswith("#"):
            if not equals or not name.strip().isidentifier():
                raise LaunchError(f"{path}, line {number}: expected NAME=VALUE, found {line!r}.")
            found[name.strip()] = value.strip().strip("'\"")
    return found


@dataclass(frozen=True)
class Facts:
    """Facts of one machine; variables by digest, and files, too (none if the job is not checked). `port` is open for
    other machines of the job before the start; `speed` is that of the interface, in bytes per second, if the driver
    knows.
    """

    host: str
    clock: float
    versions: dict[str, str]
    files: dict[str, str]
    variables: dict[str, str]
    memory: int
    disk: int
    interface: str = ""
    address: str = ""
    port: int = 0
    speed: float | None = None
    devices: list[str] = field(default_factory=list)
    processes: int = 0


def facts_of(job: Job, env: Mapping[str, str], **more: Any) -> Facts:
    """Return the facts of this machine for a job whose ranks get the environment `env`."""
    import torch

    import shardwise

    named = [] if job.module else [job.script]
    named += [part for arg in job.args for part in (arg, arg.partition("=")[2]) if part and os.path.isfile(part)]
    named = [] if job.unchecked else named
    return Facts(
        host=platform.node(),
        clock=time.time(),
        versions={
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "shardwise": shardwise.__version__,
        },
        files={name: _digest_of_file(name) for name in dict.fromkeys(named)},
        variables={name: _digest(value.encode()) for name, value in env.items() if name.startswith(EXPORTED)},
        memory=psutil.virtual_memory().available,
        disk=shutil.disk_usage(tempfile.gettempdir()).free,
        **more,
    )


def differences(facts: Sequence[tuple[str, Facts, float]]) -> list[str]:
    """Return the differences between machines that would make a job fail, or train something else: for each (name,
    facts, time here when they arrived) in words, compared with the first.
    """
    first, own, arrived = facts[0]
    found = []
    for name, other, came in facts[1:]:
        for what, version in own.versions.items():
            if other.versions.get(what) != version:
                found.append(
                    f"{name}: {what} {other.versions.get(what)}, and {version} on {first}. Install the same on both "
                    f"(the interpreter is {sys.executable})."
                )
        for file, digest in own.files.items():
            if other.files.get(file) != digest:
                how = f"has other content than on {first}" if other.files.get(file) else f"is missing, in {os.getcwd()}"
                found.append(f"{name}: {file} {how}. Copy it there, or use a file system that all machines share.")
        names = sorted(
            variable
            for variable in {*own.variables, *other.variables}
            if own.variables.get(variable) != other.variables.get(variable) and variable not in _OF_ONE_MACHINE
        )
        if names:
            found.append(
                f"{name}: the environment differs from that of {first}: {', '.join(names)}. Unset them there, or pass "
                "one value to all with --export NAME=VALUE."
            )
        off = (came - other.clock) - (arrived - own.clock)
        if abs(off) > MOST_CLOCK_S:
            found.append(f"{name}: its clock is {abs(off):.0f} s from that of {first}. Set it (chrony, ntp).")
    return found


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _digest_of_file(name: str) -> str:
    try:
        with open(name, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            if size <= _WHOLE:
                return _digest(file.read(_WHOLE))
            first = file.read(_EDGE)
            file.seek(size - _EDGE)
            return _digest(str(size).encode() + first + file.read(_EDGE))
    except OSError:
        return ""
