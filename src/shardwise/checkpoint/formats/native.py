"""Writing a checkpoint of shardwise in one process, from content of another format."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardwise.checkpoint import directory, manifest, manifestfile, nested_json
from shardwise.checkpoint.collect import RankSavePlan
from shardwise.checkpoint.listing import CheckpointDirectory, StateNumbers
from shardwise.checkpoint.manifest import PARAMETER, Manifest, Slice, StoredTensor
from shardwise.checkpoint.safetensors_reader import Spec
from shardwise.checkpoint.safetensors_writer import TensorWriter, file_order
from shardwise.checkpoint.save import versions
from shardwise.checkpoint.weights_writer import Pieces


class NativeWriter:
    """Writes a checkpoint of shardwise with one file of tensors (a `WeightsWriter`).

    `content` describes it: tensors with any slices, and trees of plain Python values.
    """

    def __init__(self, target: str, tag: str, content: Manifest) -> None:
        self._target, self._tag = target, tag
        self._draft = directory.StagingDirectory(target, tag)
        self._part = RankSavePlan(f"rank00000of00001-{self._draft.token}.safetensors")
        self._content = replace(content, **self._trees(content))
        self._tensors = {f"{t.kind}/{t.name}" + ("" if t.rank is None else f"@{t.rank}"): t for t in content.tensors}
        specs = {key: Spec(tensor.dtype, tuple(tensor.shape)) for key, tensor in self._part.tensors.items()}
        specs |= {key: Spec(tensor.torch_dtype, tensor.shape) for key, tensor in self._tensors.items()}
        self._order = file_order(specs)
        self._writer = TensorWriter(os.path.join(self._draft.path, self._part.file), specs, checksums=True)

    def order(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield the name in the file of each tensor to be written, in order; tensors of trees are written between."""
        for key in self._order:
            if key in self._tensors:
                yield key, self._tensors[key]
            else:
                self._writer.write(key, self._part.tensors[key])

    def write(self, name: str, kind: str, pieces: Pieces) -> None:
        """Write a tensor."""
        for start, values in pieces:
            self._writer.write_part(name, start, values)

    def finish(self) -> list[str]:
        """Write the manifest, publish the checkpoint, and let `latest` name it."""
        facts = self._writer.close()
        assert facts is not None
        stored = []
        for key, tensor in self._tensors.items():
            slices = (Slice(self._part.file, key, 0, tensor.numel),)
            stored.append(replace(tensor, slices=slices if tensor.numel or tensor.kind != PARAMETER else ()))
        number = StateNumbers().after(self._target)
        made = replace(
            self._content,
            tag=self._tag,
            created=time.time(),
            versions={**versions(), **self._content.versions},
            layout={"sequence": number, **self._content.layout},
            files={self._part.file: facts},
            tensors=manifest.in_order(stored, [[t.name for t in stored if t.kind == PARAMETER]]),
        )
        directory.write_file(os.path.join(self._draft.path, manifest.NAME), manifestfile.to_bytes(made))
        self._draft.publish()
        CheckpointDirectory(self._target).set_latest(self._tag)
        return [self._part.file]

    def abandon(self) -> None:
        """Remove everything written; after `finish` nothing."""
        self._writer.abandon()
        self._draft.discard()

    def _trees(self, content: Manifest) -> dict[str, Any]:
        def encoded(value: Any, what: str) -> Any:
            return nested_json.encode(value, what, self._part.store_tensor)

        found = content.optimizer
        if found is not None:
            groups = encoded(found["groups"], "optimizer.param_groups")
            found = {**found, "groups": groups, "values": encoded(found["values"], "optimizer.state")}
        return {
            "optimizer": found,
            "scheduler": encoded(content.scheduler, "state of the learning-rate schedule"),
            "scaler": encoded(content.scaler, "state of the loss scaler"),
            "extra": encoded(content.extra, "extra state of modules"),
            "client": encoded(content.client, "client_state"),
        }
