"""Estimates of the memory of model states, without an engine.

Bytes per parameter, in mixed precision with Adam: 2 for the 16-bit weight, 4 for the fp32 gradient, 12 for the fp32
master weight and two moments (Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
models", 2020, section 3). Stage 2 shards the latter two. Stage 3 shards all three, and unshards the largest layer and
the next one. Without `zero.Init` every process builds the model in fp32. Activations and buffers are not included;
`engine.memory_report()` and `engine.memory_plans()` are exact and include them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

WEIGHT, GRADIENT, STATES, BUILT = 2, 4, 12, 4
"""Bytes per parameter; see the module."""

_GB = 2**30


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Return (bytes of host memory per node, bytes per GPU) for the model states of ZeRO stage 2. With `cpu_offload`
    gradients, master weights and optimizer state are on the host. `additional_buffer_factor` scales host memory.
    """
    gpus = num_gpus_per_node * num_nodes
    built = BUILT * total_params * num_gpus_per_node
    if cpu_offload:
        host, gpu = max(built, (GRADIENT + STATES) * total_params / num_nodes), float(WEIGHT * total_params)
    else:
        host, gpu = built, WEIGHT * total_params + (GRADIENT + STATES) * total_params / gpus
    return int(host * additional_buffer_factor), int(gpu)


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return (bytes of host memory per node, bytes per GPU, of these unsharded layers) for ZeRO stage 3. Arguments as
    for stage 2; `cpu_offload_params` (only with `cpu_offload`) puts weights on the host, and `zero_init` builds the
    model a layer at a time.
    """
    gpus = num_gpus_per_node * num_nodes
    layers = 2 * WEIGHT * largest_layer_params
    built = BUILT * num_gpus_per_node * (largest_layer_params if zero_init else total_params)
    if not cpu_offload:
        moved, sharded = 0, WEIGHT + GRADIENT + STATES
    elif cpu_offload_params:
        moved, sharded = WEIGHT + GRADIENT + STATES, 0
    else:
        moved, sharded = GRADIENT + STATES, WEIGHT
    host = max(built, moved * total_params / num_nodes)
    return int(host * additional_buffer_factor), int(layers + sharded * total_params / gpus), layers


def _count(model: nn.Module) -> tuple[int, int]:
    """Return the parameters of a model and of its largest layer (module with parameters of its own)."""
    total = sum(parameter.numel() for parameter in model.parameters())
    layers = (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return total, max(layers, default=0)


def _print(title: str, gpus: int, nodes: int, rows: list[dict[str, bool]], of: Callable[..., tuple[int, ...]]) -> None:
    on = f"{nodes} node{'s' * (nodes != 1)} of {gpus} GPU{'s' * (gpus != 1)}"
    print(f"Estimated memory needed for model states on {on}, {title}.")
    print("  per node |   per GPU | settings")
    for settings in rows:
        host, gpu = of(num_gpus_per_node=gpus, num_nodes=nodes, **settings)[:2]
        named = ", ".join(f"{name}={int(value)}" for name, value in settings.items())
        print(f"{host / _GB:8.2f}GB |{gpu / _GB:8.2f}GB | {named}")


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print `estimate_zero2_model_states_mem_needs` with and without offload."""
    of = partial(estimate_zero2_model_states_mem_needs, total_params, additional_buffer_factor=additional_buffer_factor)
    rows = [{"cpu_offload": True}, {"cpu_offload": False}]
    _print(f"{total_params / 1e6:.0f}M parameters, ZeRO stage 2", num_gpus_per_node, num_nodes, rows, of)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the `_all_cold` table for the sizes of a model."""
    total, _ = _count(model)
    estimate_zero2_model_states_mem_needs_all_cold(total, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print `estimate_zero3_model_states_mem_needs` with each kind of offload."""
    estimate = partial(estimate_zero3_model_states_mem_needs, total_params, largest_layer_params)
    of = partial(estimate, additional_buffer_factor=additional_buffer_factor)
    rows = [
        {"cpu_offload": offload, "cpu_offload_params": params, "zero_init": init}
        for offload, params in ((True, True), (True, False), (False, False))
        for init in (True, False)
    ]
    title = (
        f"{total_params / 1e6:.0f}M parameters, {largest_layer_params / 1e6:.0f}M in the largest layer, ZeRO stage 3"
    )
    _print(title, num_gpus_per_node, num_nodes, rows, of)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the `_all_cold` table for the sizes of a model."""
    total, largest = _count(model)
    estimate_zero3_model_states_mem_needs_all_cold(
        total, largest, num_gpus_per_node, num_nodes, additional_buffer_factor
    )
