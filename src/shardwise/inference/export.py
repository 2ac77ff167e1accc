"""Export of a model by torch.export, ONNX and TensorRT, compared with the model on the inputs of the export."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardwise.errors import UsageError
from shardwise.inference.division import tensor_group_of

Format = Literal["torch", "onnx", "tensorrt"]
_SUFFIXES = {"torch": ".pt2", "onnx": ".onnx", "tensorrt": ".ts"}


def export(
    model: Any,
    path: str | os.PathLike[str],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    format: Format = "torch",
    dynamic_shapes: Any = None,
    tolerance: float = 1e-3,
) -> float:
    """Write a model's forward pass to a file for other programs, and compare what the file computes with the model.

    Args:
        model: undivided module, or `InferenceEngine` of one, in evaluation mode.
        path: file; its suffix is `.pt2` (torch.export), `.onnx`, or `.ts` (TensorRT).
        args, kwargs: inputs of the export, and of the comparison.
        format: `torch`; `onnx` needs onnx and onnxscript, and onnxruntime for the comparison; `tensorrt` needs
            torch_tensorrt and a CUDA device.
        dynamic_shapes: as of `torch.export.export`; None: shapes are those of the inputs.
        tolerance: largest difference, relative to the largest output.

    Returns:
        The largest difference.

    Raises:
        UsageError: the model is divided over ranks, training, or has weights elsewhere; a package is missing; or the
            outputs differ by more than `tolerance`. No file is left then.

    Example:
        >>> import os, tempfile, torch
        >>> path = os.path.join(tempfile.mkdtemp(), "model.pt2")
        >>> export(torch.nn.Linear(4, 2).eval(), path, (torch.ones(1, 4),)) < 1e-3
        True
    """
    module: nn.Module = getattr(model, "module", model) if not hasattr(type(model), "export") else model
    named = dict(kwargs or {})
    if format not in _SUFFIXES:
        raise UsageError(f"export(format={format!r}): it is one of {', '.join(_SUFFIXES)}")
    target = Path(path)
    if target.suffix != _SUFFIXES[format]:
        raise UsageError(f"export({os.fspath(path)!r}): a file of format {format!r} ends in {_SUFFIXES[format]}")
    if module.training:
        raise UsageError(
            "export(): the model is in training mode, in which dropout would be written. Call eval() before"
        )
    group = tensor_group_of(module)
    if group is not None or any(parameter.is_meta for parameter in module.parameters()):
        where = "on the meta device" if group is None else f"divided over {group.size} ranks"
        raise UsageError(f"export(): the model is {where}. Export one with all weights (tp_size 1)")
    draft = target.with_name(f".{target.stem}.draft{target.suffix}")
    try:
        with torch.no_grad():
            wanted = _values(module(*args, **named))
            found = _WRITERS[format](module, draft, tuple(args), named, dynamic_shapes)
        if len(found) != len(wanted):
            raise UsageError(f"export(): the file has {len(found)} outputs, and the model {len(wanted)}")
        scale = max((float(one.abs().max()) for one in wanted if one.numel()), default=0.0) or 1.0
        pairs = zip(found, wanted, strict=True)
        worst = max((float((a - b).abs().max()) / scale for a, b in pairs if b.numel()), default=0.0)
        if not worst <= tolerance:
            raise UsageError(
                f"export(): what {format} computes differs from the model by {worst:.2e} of the largest output, more "
                f"than tolerance = {tolerance:.2e}. Export in fp32, or raise tolerance"
            )
        for extra in target.parent.glob(f"{draft.name}.data"):
            raise UsageError(f"export(): the model has more than 2 GB, which ONNX keeps in another file ({extra.name})")
        os.replace(draft, target)
    finally:
        draft.unlink(missing_ok=True)
    return worst


def _values(made: Any) -> list[torch.Tensor]:
    return [one.detach().double().cpu() for one in tree_leaves(made) if torch.is_tensor(one)]


def _torch(module: nn.Module, path: Path, args: Any, kwargs: Any, shapes: Any) -> list[torch.Tensor]:
    program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    torch.export.save(program, path)
    return _values(torch.export.load(path).module()(*args, **kwargs))


def _onnx(module: nn.Module, path: Path, args: Any, kwargs: Any, shapes: Any) -> list[torch.Tensor]:
    try:
        import onnxruntime

        torch.onnx.export(
            module,
            args,
            str(path),
            kwargs=kwargs,
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
    except ImportError as error:
        raise UsageError(f"export(format='onnx'): {error}. Install shardwise[onnx]") from error
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = [one.cpu().numpy() for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)]
    names = [one.name for one in session.get_inputs()]
    if len(names) != len(given):
        raise UsageError(f"export(format='onnx'): the file has inputs {names}, and {len(given)} tensors were given")
    return _values([torch.from_numpy(one) for one in session.run(None, dict(zip(names, given, strict=True)))])


def _tensorrt(module: nn.Module, path: Path, args: Any, kwargs: Any, shapes: Any) -> list[torch.Tensor]:
    try:
        import torch_tensorrt
    except ImportError as error:
        raise UsageError(
            f"export(format='tensorrt'): {error}. Install torch-tensorrt for this version of torch, on a machine with "
            "a CUDA device; or write format 'onnx', which TensorRT reads"
        ) from error
    program = torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    compiled = torch_tensorrt.dynamo.compile(program, arg_inputs=args, kwarg_inputs=kwargs)
    torch_tensorrt.save(compiled, str(path), output_format="torchscript", arg_inputs=args, kwarg_inputs=kwargs)
    return _values(torch.jit.load(str(path))(*args, **kwargs))


_WRITERS = {"torch": _torch, "onnx": _onnx, "tensorrt": _tensorrt}
