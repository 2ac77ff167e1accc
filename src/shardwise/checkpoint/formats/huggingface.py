"""Weights of the Hugging Face libraries: one file, or several with an index, safetensors or `torch.save`.

Of a safetensors file only the requested bytes are read. A file of `torch.save` is mapped into memory and loaded with
`weights_only=True`: it cannot run code.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pathlib
import sys
import tempfile
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardwise.checkpoint.formats.torch_file import TorchFile
from shardwise.checkpoint.formats.weight_files import PICKLED
from shardwise.checkpoint.manifest import Slice, StoredTensor, name_of, outline
from shardwise.checkpoint.safetensors_reader import Spec, TensorFile
from shardwise.checkpoint.weights_reader import ReadRange, StateDictReader, WeightsReader, in_one_file
from shardwise.errors import CheckpointError, CheckpointPathError
from shardwise.utils.logging import logger

_INDEX = ".index.json"
_NAMES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.bin",
)
_WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which scripts save a state dict."""


def open_files(path: str) -> WeightsReader | None:
    """Open a file or directory of weights; None if it is neither. Raises CheckpointError if it is unreadable."""
    if not os.path.isdir(path):
        return _open(path)
    for name in _NAMES:
        if os.path.isfile(os.path.join(path, name)):
            return _open(os.path.join(path, name))
    only = sorted(name for name in os.listdir(path) if name.endswith(".safetensors") and not name.startswith("."))
    if len(only) == 1:
        return _open(os.path.join(path, only[0]))
    if only:
        raise CheckpointPathError(
            f"{path}: holds {len(only)} safetensors files ({outline(only, 3)}) and no model.safetensors.index.json "
            "that lists the model's files; give one file"
        )
    return None


def _open(path: str) -> WeightsReader | None:
    files = _listed(path) if path.endswith(_INDEX) else [path]
    if all(file.endswith(".safetensors") for file in files):
        return SafetensorsReader(path, files)
    if all(file.endswith(PICKLED) for file in files):
        return StateFileReader(path, files)
    if path.endswith(_INDEX):
        raise CheckpointError(f"{path}: expected names of .safetensors or of .bin files, found {outline(files, 3)}")
    return None


def _listed(path: str) -> list[str]:
    try:
        with open(path, "rb") as file:
            names = sorted(set(json.load(file)["weight_map"].values()))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not an index of weights ({type(error).__name__}: {error})") from error
    for name in names:
        # Only files of the index's own directory are opened.
        if os.path.basename(name) != name or name in ("", ".", ".."):
            raise CheckpointError(f"{path}: names the file {name!r}; expected names of files in its directory")
    if not names:
        raise CheckpointError(f"{path}: names no file")
    return [os.path.join(os.path.dirname(path), name) for name in names]


class SafetensorsReader(WeightsReader):
    """Weights in safetensors files; no two hold the same tensor."""

    what = "safetensors"

    def __init__(self, path: str, files: list[str]) -> None:
        self.path = path
        self._files: dict[str, TensorFile] = {}
        self._tensors: dict[str, StoredTensor] = {}
        try:
            for file in files:
                self._files[file] = TensorFile(file)
                for name, spec in self._files[file].specs.items():
                    _check_new(name, self._tensors, file)
                    self._tensors[name] = in_one_file(name, spec.shape, spec.dtype, file)
        except BaseException:
            self.close()
            raise

    @override
    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    @override
    def opened(self, tensor: StoredTensor, part: Slice) -> ReadRange:
        return functools.partial(self._files[part.file].read_into, part.key)

    @override
    def close(self) -> None:
        for file in self._files.values():
            file.close()


class StateFileReader(StateDictReader):
    """Weights in files of `torch.save` (1.6 or newer, tensors only), mapped into memory: only copied pages are read."""

    what = "torch.save"

    def __init__(self, path: str, files: list[str]) -> None:
        values: dict[str, torch.Tensor] = {}
        for file in files:
            for name, value in _load(file).items():
                _check_new(name, values, file)
                values[name] = value
        super().__init__(values, path)


def _check_new(name: str, known: Container[str], file: str) -> None:
    if name in known:
        raise CheckpointError(f"{file}: tensor {name!r} is in another file of these weights, too")


def _load(path: str) -> dict[str, torch.Tensor]:
    values = _unwrapped(TorchFile(path, mapped=True).content, path)
    tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
    others = [name for name in values if name not in tensors]
    if others:
        logger.warning("%s: entries that are not tensors are passed over: %s", path, outline(others))
    strange = [name for name, value in tensors.items() if value.layout is not torch.strided or value.is_quantized]
    if strange:
        raise CheckpointError(f"{path}: sparse and quantized tensors cannot be read: {outline(strange)}")
    return tensors


def _unwrapped(loaded: Any, path: str) -> dict[str, Any]:
    if isinstance(loaded, Mapping) and not any(isinstance(value, torch.Tensor) for value in loaded.values()):
        loaded = next((loaded[key] for key in _WRAPPERS if isinstance(loaded.get(key), Mapping)), loaded)
    if (
        not isinstance(loaded, Mapping)
        or not all(isinstance(name, str) for name in loaded)
        or not any(isinstance(value, torch.Tensor) for value in loaded.values())
    ):
        raise CheckpointError(
            f"{path}: expected a state dict (tensors by name), at the top level or under one of the keys "
            f"{', '.join(_WRAPPERS)}; found {type(loaded).__name__}"
            + (f" with keys {outline([str(key) for key in loaded])}" if isinstance(loaded, Mapping) else "")
        )
    return dict(loaded)


# -- configuration files of transformers' models -----------------------------------------------------------------------


def config_files(model: nn.Module, specs: Iterable[Spec]) -> dict[str, bytes]:
    """Return `from_pretrained`'s other files by name, for weights of `specs`; none for other libraries' models."""
    kind = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    source: Any = getattr(model, "pretrained_model", model)  # of a module that runs the layers of such a model
    if kind is None or not isinstance(source, kind):
        return {}
    config = copy.deepcopy(source.config)
    config.architectures = [type(source).__name__]
    sizes: Counter[str] = Counter()
    for spec in specs:
        if spec.dtype.is_floating_point:
            sizes[name_of(spec.dtype)] += spec.nbytes
    if sizes:
        config.dtype = sizes.most_common(1)[0][0]
    found = _saved(config, "config")
    if getattr(source, "generation_config", None) is not None and source.can_generate():
        try:
            found |= _saved(source.generation_config, "generation_config")
        except CheckpointError as error:  # contradictory settings: a warning, to keep the weights
            logger.warning("%s; the file is left out", error)
    return found


def _saved(config: Any, what: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as directory:
        try:
            config.save_pretrained(directory)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"the model's {what} cannot be written by transformers: {reason}") from error
        return {path.name: path.read_bytes() for path in sorted(pathlib.Path(directory).iterdir())}
