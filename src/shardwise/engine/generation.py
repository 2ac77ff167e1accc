"""Generation by an engine that trains: with weights gathered in each pass, once for several answers, or sent to
tensor-parallel copies (`hybrid_engine`).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.errors import UsageError
from shardwise.inference.adapters import merged
from shardwise.inference.division import InferenceRanks, divide_for_inference
from shardwise.inference.generation import generate
from shardwise.inference.loading import materialize_model
from shardwise.inference.reshard import WeightSync
from shardwise.parallel.tensor.copies import copied, whole_shape
from shardwise.trees import tensors_in

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.config.schema.inference import HybridEngine
    from shardwise.engine.parallel import SharedTensors
    from shardwise.zero.model import ShardedModel


class Generation:
    """Answers of an engine; `section` says how weights are held meanwhile."""

    def __init__(
        self, sharded: ShardedModel, section: HybridEngine, job: Communicator, tensors: SharedTensors | None
    ) -> None:
        self.sharded, self._section, self._job, self._tensors = sharded, section, job, tensors
        self.device = sharded.device
        self._held: contextlib.ExitStack | None = None
        self._shared: tuple[nn.Module, InferenceRanks, WeightSync] | None = None
        self._sent: tuple[int, int] | None = None

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module's `generate` with its arguments, and return what it returns (all ranks call).

        Ranks may have other prompts, and answers of other lengths. At ZeRO stage 3 weights are gathered in each pass,
        and all ranks run as many as the longest answer needs. With `hybrid_engine.enabled` they are gathered once,
        until `engine.train()`, low-rank adapters are merged, and the model is in evaluation mode; with
        `inference_tp_size` above 1 they are sent to tensor-parallel copies instead, whose ranks answer all their
        prompts (of one shape) together. Right-padded prompts of decoders become left-padded.

        Raises:
            UsageError: the model has no `generate`, the engine has been destroyed, `max_out_tokens` would be exceeded,
                or prompts of ranks that share a copy have other shapes.
            DesyncError: ranks that share a model have got other prompts, or chosen other tokens.
        """
        self.sharded.check_there("engine.generate()", values=True)
        module, section = self.sharded.module, self._section
        shared = None if self._tensors is None else self._tensors.group.comm
        if not section.enabled:
            streams = self._job.world > 1 and any(unit.sharded for unit in self.sharded.units)
            if streams and self._job.world != dist.get_world_size():
                raise UsageError(
                    "engine.generate(): parameters are sharded over a part of the ranks, and transformers counts "
                    "passes of all. Call it inside `with engine.gathered():`, as engine.module.generate()"
                )
            return generate(module, inputs, kwargs, ranks=shared, streams=streams)
        training = module.training
        modes = [(inner, inner.training) for inner in module.modules()]
        module.eval()
        try:
            if section.inference_tp_size > 1:
                return self._together(inputs, kwargs)
            with contextlib.ExitStack() as stack:
                if self._held is None:
                    held = contextlib.ExitStack()
                    held.enter_context(self.sharded.owner.whole())
                    if training or not section.pin_parameters:
                        stack.push(held)
                    else:
                        self._held = held
                stack.enter_context(merged(module))
                return generate(module, inputs, kwargs, ranks=shared, **self._limit)
        finally:
            for inner, mode in modes:
                inner.training = mode
            if section.release_inference_cache and self.device.type == "cuda":
                torch.cuda.empty_cache()

    @property
    def _limit(self) -> dict[str, Any]:
        return {"limit": self._section.max_out_tokens, "key": "hybrid_engine.max_out_tokens"}

    def release(self) -> None:
        """Reshard parameters before training goes on."""
        held, self._held = self._held, None
        if held is not None:
            held.close()

    # -- tensor-parallel copies ----------------------------------------------------------------------------------------

    def _together(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._shared is None:
            self._shared = self._copy()
        module, ranks, sync = self._shared
        # Version counters grow with changes by scripts and steps, and `values_version` with all of the engine's.
        changes = sum(parameter._version for parameter in self.sharded.registry.parameters)
        versions = changes, self.sharded.values_version
        if any(self._job.exchange(versions != self._sent or not self._section.pin_parameters, "copies_are_old")):
            sync()
            self._sent = versions
        assert ranks.tensor is not None
        comm = ranks.tensor.comm
        given = tensors_in((inputs, kwargs))
        rows = given[0].shape[0] if given else 0
        shapes = comm.exchange([list(one.shape) for one in given], "prompt_shapes")
        if any(other != shapes[0] for other in shapes) or any(shape[0] != rows for shape in shapes[0]):
            raise UsageError(
                f"engine.generate(): ranks {list(comm.members)} share a copy (hybrid_engine.inference_tp_size), and "
                f"their prompts have the shapes {shapes}. Pad them to one shape"
            )

        def everyone(value: Any) -> Any:
            if not torch.is_tensor(value):
                return value
            flat = value.contiguous().reshape(-1)
            out = flat.new_empty(comm.world * flat.numel())
            comm.all_gather([(out, flat)], "prompts", kind="explicit").wait()
            return out.view(comm.world * rows, *value.shape[1:])

        args, named = tuple(map(everyone, inputs)), {name: everyone(value) for name, value in kwargs.items()}
        with merged(module):
            answers = generate(module, args, named, ranks=comm, **self._limit)
        if not torch.is_tensor(answers):
            raise UsageError(
                "engine.generate(): with hybrid_engine.inference_tp_size above 1 answers are tokens: leave "
                "return_dict_in_generate out"
            )
        return answers.view(comm.world, -1, *answers.shape[1:])[comm.rank]

    def _copy(self) -> tuple[nn.Module, InferenceRanks, WeightSync]:
        """Build the tensor-parallel copy, from the meta device, and the plan by which weights reach it."""
        meta = torch.device("meta")
        dtypes = {tensor.name: tensor.dtype for tensor in self.sharded.registry}

        def blank(name: str, parameter: nn.Parameter) -> torch.Tensor:
            return torch.empty(whole_shape(parameter), dtype=dtypes.get(name, parameter.dtype), device=meta)

        module = copied(self.sharded.module, blank, torch.float32, None)
        for path, own in self.sharded.module.named_modules():
            buffers = module.get_submodule(path)._buffers
            buffers.update((name, None if one is None else one.clone()) for name, one in own._buffers.items())
        module.eval()
        ranks = InferenceRanks(self._section.inference_tp_size, self.device, self._job.process_group)
        divide_for_inference(module, ranks, None, 1)
        materialize_model(module, self.device)
        return module, ranks, WeightSync(self, module, self._job)

    def close(self) -> None:
        """Free the copy and its ranks (all ranks call)."""
        self.release()
        if self._shared is not None:
            self._shared[1].close()
            self._shared = self._sent = None
