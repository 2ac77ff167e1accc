"""The inference engine: a model that is divided over ranks, cast and quantised, and generates."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardwise.errors import ConflictError, UsageError
from shardwise.inference.config import InferenceConfig, checkpoint_of, directory_of, rows_of
from shardwise.inference.division import InferenceRanks, divide_for_inference
from shardwise.inference.generation import generate
from shardwise.inference.loading import check_has_values, load_parts, materialize_model, paths_of
from shardwise.inference.quantization import quantize_weights
from shardwise.parallel.tensor.entry import copy_first, disconnect, divided_over, written_buffers
from shardwise.parallel.tensor.watch import begin_pass
from shardwise.registry import part_of, takes_compute_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from shardwise.comm.communicator import Communicator
    from shardwise.parallel.tensor.layers import Parallel


class InferenceEngine(nn.Module):
    """A model for inference; built by `shardwise.init_inference`, with its arguments.

    Args:
        model: changed in place. On the meta device it gets its weights from the configuration's `checkpoint`.
        config: as `read_config` returns it.
        device: of this rank.
        streamed: an engine that gathers the model's weights in each pass (ZeRO stage 3), if there is one. It has cast
            and divided the model already.

    Attributes:
        module: the model.
        device: of this rank.
        mp_group: process group of the ranks that share it; None without any.
    """

    def __init__(self, model: nn.Module, config: InferenceConfig, device: torch.device, streamed: Any = None) -> None:
        super().__init__()
        self._inference_config = config
        self._streamed = streamed
        self._times: list[float] = []
        self._hooks: list[RemovableHandle] = []
        self.is_compiled = False
        self.module = model
        self.device = device
        self._ranks: InferenceRanks | None = None
        self._layers: Sequence[Parallel] = ()
        if streamed is None:
            self._ranks = _ranks_of(config, device)
            try:
                self._prepare(model, config, device)
            except BaseException:
                self._ranks.close()
                raise
        shared = self._shared
        self.mp_group: dist.ProcessGroup | None = None if shared is None else shared.process_group
        model.eval()
        if config.replace_with_kernel_inject:
            self.compile()

    def _prepare(self, model: nn.Module, config: InferenceConfig, device: torch.device) -> None:
        ranks = self._ranks
        assert ranks is not None
        checkpoint = checkpoint_of(config)
        meta = check_has_values(model, checkpoint)
        cast(model, config.torch_dtype)
        if ranks.tensor is not None and checkpoint is None and divided_over(model) is None:
            copy_first(written_buffers(model), ranks.everybody)
        self._layers = divide_for_inference(model, ranks, rows_of(config), config.tensor_parallel.tp_grain_size)
        if meta:
            materialize_model(model, device)
        if checkpoint is not None:
            load_parts(model, paths_of(checkpoint, directory_of(config)), ranks.everybody)
        group = ranks.tensor
        if group is not None:
            if checkpoint is None:  # parts were copied when they were divided
                own = ((name, one) for name, one in model.named_parameters() if part_of(one).ranks is None)
                copy_first(own, ranks.everybody)
            self._hooks += [
                model.register_forward_pre_hook(lambda module, _: begin_pass(module)),
                model.register_forward_hook(group.end_pass),
            ]
        model.to(device)
        if config.bits is not None:
            quantize_weights(model, config.bits, device)

    @property
    def _shared(self) -> Communicator | None:
        """Ranks that share each layer; None: every rank has whole layers."""
        if self._ranks is not None:
            group = self._ranks.tensor
        else:
            tensors = self._streamed._tensors
            group = None if tensors is None else tensors.group
        return None if group is None else group.comm

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                module = self.__dict__.get("_modules", {}).get("module")
                if module is None or name == "module":
                    raise
                return getattr(module, name)

    @torch.no_grad()
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model's forward pass without gradients and return its output.

        Ranks that share the model call with the same inputs.
        """
        self._check_open("forward()")
        return (self.module if self._streamed is None else self._streamed)(*inputs, **kwargs)

    def generate(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the model's `generate` with its arguments, and return what it returns.

        Right-padded prompts of decoders become left-padded, by `attention_mask`. Ranks that share the model give the
        same prompts, draw the first rank's random numbers, end when its criteria say, and return the same tokens. Where
        weights are streamed, all ranks run as many passes as the longest answer needs.

        Raises:
            UsageError: the model has no `generate`, or `max_out_tokens` would be exceeded.
            DesyncError: ranks that share the model have other prompts, or have chosen other tokens.
        """
        self._check_open("generate()")
        return generate(
            self.module,
            inputs,
            kwargs,
            ranks=self._shared,
            streams=self._streamed is not None,
            limit=self._inference_config.max_out_tokens,
        )

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Compile the model's blocks (elements of module lists) in place by `torch.compile`; later calls do nothing.

        `compile_kwargs` and `options` are those of `torch.compile`; shapes are dynamic unless they say otherwise. A
        model without module lists is compiled as one.
        """
        if self.is_compiled:
            return
        self.is_compiled = True
        arguments: dict[str, Any] = {"dynamic": True, "backend": backend, **(compile_kwargs or {}), **options}
        for block in _blocks(self.module) or [self.module]:
            block.compile(**arguments)

    def profile_model_time(self, use_cuda_events: bool = True) -> None:
        """Measure each forward pass of the model from now on (`model_times`).

        With `use_cuda_events` passes on CUDA are timed by events; the host waits for each pass in any case.
        """
        begins: list[Any] = []
        cuda = self.device.type == "cuda"

        def begin(*_: Any) -> None:
            if cuda:
                torch.cuda.synchronize(self.device)
            begins.append(_event() if cuda and use_cuda_events else time.perf_counter())

        def end(*_: Any) -> None:
            first = begins.pop()
            last = _event() if cuda and use_cuda_events else None
            if cuda:
                torch.cuda.synchronize(self.device)
            self._times.append(1e3 * (time.perf_counter() - first) if last is None else first.elapsed_time(last))

        self._hooks += [self.module.register_forward_pre_hook(begin), self.module.register_forward_hook(end)]
        self._profiled = True

    _profiled = False

    def model_times(self) -> list[float]:
        """Return the milliseconds of forward passes since the last call; a UsageError before `profile_model_time`."""
        if not self._profiled:
            raise UsageError("model_times(): no times are measured. Call profile_model_time() before")
        found, self._times = self._times, []
        return found

    def destroy(self) -> None:
        """Disconnect the ranks (all call). A divided model cannot be called afterwards; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._ranks is not None:
            self._ranks.close()
            if self._ranks.tensor is not None:
                disconnect(self._layers, self._ranks.tensor)
        if self._streamed is not None:
            self._streamed.destroy()
        self._ranks = self._streamed = None
        self._destroyed = True

    _destroyed = False

    def _check_open(self, call: str) -> None:
        if self._destroyed:
            raise UsageError(f"{call}: the inference engine has been destroyed. Call init_inference() again")


def _ranks_of(config: InferenceConfig, device: torch.device) -> InferenceRanks:
    section = config.tensor_parallel
    group, size = section.group, section.tp_size
    if not section.enabled:
        return InferenceRanks(1, device, group)
    if group is not None and size not in (1, dist.get_world_size(group)):
        raise ConflictError(
            f"tensor_parallel: tp_size is {size}, and tp_group has {dist.get_world_size(group)} ranks. Leave one of "
            "them out"
        )
    return InferenceRanks(size if group is None else dist.get_world_size(group), device, group)


def cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model's floating-point parameters and saved buffers in place.

    Modules that transformers keeps in fp32 (`_keep_in_fp32_modules` for fp16, `_keep_in_fp32_modules_strict`) do so,
    and buffers that no checkpoint has (rotary frequencies) keep their dtype.
    """
    wide = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype is torch.float16:
        wide |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for path, module in model.named_modules():
        wanted = torch.float32 if wide & set(path.split(".")) else dtype
        for parameter in module._parameters.values():
            if parameter is not None and takes_compute_dtype(parameter) and parameter.dtype != wanted:
                parameter.data = parameter.data.to(wanted)
        for name, buffer in module._buffers.items():
            if buffer is not None and takes_compute_dtype(buffer) and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(wanted)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost elements of module lists."""
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and id(module) not in inside:
            found += list(module)
            inside.update(id(inner) for inner in module.modules())
    return found


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
