"""Checkpoints made by hand, of any size, for tests of what reads and writes weights."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from shardwise.checkpoint import Manifest, Slice, StoredTensor, WeightsReader, manifest, manifestfile
from shardwise.checkpoint.safetensors_writer import write_tensors


def save_by_hand(
    path: str,
    tensors: Mapping[str, torch.Tensor],
    *,
    aliases: Mapping[str, Sequence[str]] | None = None,
    frozen: Sequence[str] = (),
    cuts: int = 1,
    sequence: int = 1,
) -> None:
    """Write a checkpoint whose parameters are cut into several runs, in two files."""
    os.makedirs(path)
    parts: tuple[dict[str, torch.Tensor], ...] = ({}, {})
    names = [f"rank0000{n}of00002-0123456{n}.safetensors" for n in range(2)]
    stored = []
    for number, (name, tensor) in enumerate(tensors.items()):
        flat, slices = tensor.reshape(-1), []
        for cut in range(cuts):
            start, stop = flat.numel() * cut // cuts, flat.numel() * (cut + 1) // cuts
            if start < stop:
                file = (number + cut) % 2
                parts[file][f"{name}[{start}:{stop}]"] = flat[start:stop]
                slices.append(Slice(names[file], f"{name}[{start}:{stop}]", start, stop))
        also = tuple((aliases or {}).get(name, ()))
        dtype = str(tensor.dtype).removeprefix("torch.")
        stored.append(
            StoredTensor(
                name,
                "parameter",
                tuple(tensor.shape),
                dtype,
                tuple(slices),
                also,
                trainable=name not in frozen,
                group=0,
            )
        )
    files = {name: write_tensors(os.path.join(path, name), part) for name, part in zip(names, parts, strict=True)}
    made = Manifest(
        tag=os.path.basename(path),
        created=1.0,
        versions={"shardwise": "0"},
        layout={"sequence": sequence, "world": 2},
        config={},
        files=files,
        tensors=stored,
        counters={"global_steps": 3},
    )
    with open(os.path.join(path, manifest.NAME), "wb") as file:
        file.write(manifestfile.to_bytes(made))


def read_range(source: WeightsReader, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
    """Return elements `[start, stop)` of a flattened tensor."""
    tensor = source.tensors()[name]
    out = torch.empty((tensor.numel if stop is None else stop) - start, dtype=tensor.torch_dtype)
    source.read_into(tensor, start, out)
    return out
