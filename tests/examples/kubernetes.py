"""Reads the manifests of examples/kubernetes, and gives the commands of their containers as Kubernetes would."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file
from torch import Tensor

EXAMPLES = Path(__file__).parents[2] / "examples"
SECRET = "0123456789abcdef"


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a file by kind."""
    found = list(yaml.safe_load_all((EXAMPLES / "kubernetes" / name).read_text()))
    return {each["kind"]: each for each in found}


def command(container: Mapping[str, Any], variables: Mapping[str, str], volume: Path, *more: str) -> list[str]:
    """Return the command of a container, run from examples/ with the checkpoints in `volume`; `more` is appended.

    Variables are replaced as a kubelet does it: those that are not set stay as they are.
    """
    words = [
        re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), word) for word in container["command"]
    ]
    assert words[0] == "shardwise" and not any("$(" in word for word in words)
    words = [word.replace("/checkpoints", str(volume)) for word in words[1:]]
    return [sys.executable, "-m", "shardwise.launch", *words, *more]


def job_variables(index: int) -> dict[str, str]:
    """Return the variables of a pod of an Indexed Job, and those of the manifest."""
    return {"JOB_COMPLETION_INDEX": str(index), "SHARDWISE_SECRET": SECRET}


def trainjob_variables(index: int) -> dict[str, str]:
    """Return the variables that the torch policy of Kubeflow Trainer sets, and those of the manifest."""
    train = manifests("trainjob.yaml")["TrainJob"]
    name, nodes = train["metadata"]["name"], train["spec"]["trainer"]["numNodes"]
    return {
        "PET_NNODES": str(nodes),
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": f"{name}-node-0-0.{name}",
        "PET_MASTER_PORT": "29500",
        "SHARDWISE_SECRET": SECRET,
    }


def state(checkpoint: Path) -> dict[str, Tensor]:
    """Return parameters and optimizer state of each rank's file of a checkpoint; other generators are not seeded."""
    return {
        f"{file.name.partition('of')[0]} {key}": tensor
        for file in checkpoint.glob("*.safetensors")
        for key, tensor in load_file(file).items()
        if key.startswith(("parameter/", "optimizer/"))
    }
