"""Two tables of keys with features that this version lacks.

`UNSUPPORTED`: without the feature the run would differ, or lack its purpose. A configuration that requests it is
refused with an alternative; a section that is off, or holds only defaults, is accepted. If only the speed differs, the
reader for DeepSpeed's files (`accept`) accepts the key with a warning. `IGNORED`: without the feature the run prints
less, or differs in speed, and the key is accepted with a warning. Building a feature removes its line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwise.errors import NotBuiltError

from .normalize import Scan
from .problems import Note, Problem, dotted
from .schema.root import Config


@dataclass(frozen=True)
class Unsupported:
    """One feature: its key, name, predicate of values that request it, and alternative, which may depend on other keys.
    `within` are switches that must be on as well. `speed_only`: results are the same without the feature.
    """

    path: str
    feature: str
    requests: Callable[[Any], bool]
    instead: str | Callable[[Config], str]
    within: tuple[str, ...] = ()
    speed_only: bool = False


@dataclass(frozen=True)
class Ignored:
    """One key that is accepted without effect: the predicate of values that request it, and the missing feature."""

    path: str
    requests: Callable[[Any], bool]
    missing: str


def _on(value: Any) -> bool:
    return value is True


def _given(value: Any) -> bool:
    return value is not None


def _sparse(value: Any) -> bool:
    return value is not None and value.mode != "dense"


_COMPRESSION = (
    "weight_quantization",
    "activation_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
)
_SHARD = "`zero_optimization.stage` 3 makes room for large layers on many ranks"
_PRECISION = 'switch it off and write "bf16": {"enabled": true} (or fp16, or torch_autocast)'
_SAMPLES = "order the samples in the script's own dataset or sampler, and switch this off"
_ROUTES = "leave it out: the model's own router decides, as the model's config says"
_COMPRESSED = "train the plain model, or compress it with a library for that (torch.ao); switch this off"

UNSUPPORTED: tuple[Unsupported, ...] = (
    Unsupported("amp.enabled", "Apex AMP, which torch has replaced", _on, _PRECISION),
    Unsupported("msamp.enabled", "MS-AMP", _on, _PRECISION),
    Unsupported(
        "aio.use_gds",
        "GPUDirect Storage",
        _on,
        "switch it off: data goes from disk to the device through page-locked memory of the host",
        speed_only=True,
    ),
    Unsupported(
        "zero_optimization.offload_optimizer.super_offload",
        "steps of the host optimizer during the backward pass (SuperOffload), which measured slower than without",
        _on,
        "remove the key; the bits are the same",
        speed_only=True,
    ),
    Unsupported(
        "zero_optimization.zenflow",
        "ZenFlow, which steps a part of the gradients some steps late, and so trains with other numbers",
        _given,
        "remove the section; `zero_optimization.offload_optimizer` by itself steps everything in time",
    ),
    Unsupported(
        "zero_optimization.zero_quantized_nontrainable_weights",
        "frozen weights stored as integers",
        _on,
        "switch it off; stage 3 divides frozen weights over the ranks as they are",
    ),
    Unsupported(
        "sparse_attention",
        "sparse attention",
        _sparse,
        'remove the section, or write the mode "dense"; torch has block masks (torch.nn.attention.flex_attention)',
    ),
    Unsupported(
        "tensor_parallel.kernel_inject",
        "kernels that take the place of layers",
        _on,
        "switch it off; torch.nn.functional.scaled_dot_product_attention and engine.compile() choose fused kernels",
        speed_only=True,
    ),
    Unsupported(
        "tensor_parallel.vocab_parallel_ce_backend",
        "a cross entropy of Liger for split logits",
        lambda value: value == "liger",
        'write "torch": the library\'s own sends three numbers a token',
        speed_only=True,
    ),
    Unsupported(
        "tensor_parallel.tp.mpu",
        "a model-parallel unit inside of the configuration",
        _given,
        "pass it as shardwise.initialize(mpu=...)",
    ),
    Unsupported(
        "tensor_parallel.tp.tp_group",
        "a process group inside of the configuration",
        _given,
        "write the number of ranks as `tensor_parallel.autotp_size`: adjacent ranks form a group; or pass "
        "shardwise.initialize(mpu=...)",
    ),
    *(
        Unsupported(
            f"expert_parallel.{name}",
            what,
            requests,
            instead,
            within=("expert_parallel.enabled",),
            speed_only=name == "comm_backend",
        )
        for name, what, requests, instead in (
            ("route_norm", "routers of its own", _given, _ROUTES),
            ("route_scale", "routers of its own", lambda value: value != 1, _ROUTES),
            (
                "score_apply",
                "routing weights that are applied before the experts",
                lambda v: v == "pre",
                'write "auto"',
            ),
            ("num_expert_groups", "routers of its own", _given, _ROUTES),
            ("num_limited_groups", "routers of its own", _given, _ROUTES),
            ("score_func", "routers of its own", lambda value: value != "auto", _ROUTES),
            ("top_k", "routers of its own", lambda value: value != "auto", _ROUTES),
            ("routed_scaling_factor", "routers of its own", lambda value: value != "auto", _ROUTES),
            ("comm_backend", "DeepEP", lambda value: value == "deepep", 'write "comm"'),
        )
    ),
    Unsupported("nebula.enabled", "Nebula", _on, "switch it off; `checkpoint.async_save` saves in the background"),
    Unsupported("datastates_ckpt", "DataStates", _given, "remove it; `checkpoint.async_save` saves in the background"),
    Unsupported(
        "data_efficiency.data_sampling.curriculum_learning.enabled",
        "curriculum learning",
        _on,
        _SAMPLES,
        within=("data_efficiency.enabled", "data_efficiency.data_sampling.enabled"),
    ),
    Unsupported(
        "data_efficiency.data_sampling.dynamic_batching.enabled",
        "batches of equal token count",
        _on,
        "switch it off; make such batches in the script and weigh their losses (engine.backward(loss, weight=tokens))",
        within=("data_efficiency.enabled", "data_efficiency.data_sampling.enabled"),
    ),
    Unsupported(
        "data_efficiency.data_routing.random_ltd.enabled",
        "random layer-token dropping",
        _on,
        "switch it off; the model then sees all tokens in all layers",
        within=("data_efficiency.enabled", "data_efficiency.data_routing.enabled"),
    ),
    Unsupported("curriculum_learning.enabled", "curriculum learning", _on, _SAMPLES),
    Unsupported(
        "progressive_layer_drop.enabled",
        "progressive layer dropping",
        _on,
        "switch it off; the model then gets no layers to skip",
    ),
    *(
        Unsupported(f"compression_training.{name}.shared_parameters.enabled", "model compression", _on, _COMPRESSED)
        for name in _COMPRESSION
    ),
    Unsupported("compression_training.layer_reduction.enabled", "layer reduction", _on, _COMPRESSED),
    Unsupported(
        "weight_quantization",
        "quantized weights",
        lambda value: value is not None and value.enabled,
        "remove the section; stage 3 divides weights over the ranks as they are",
    ),
    Unsupported("quantize_training.enabled", "quantization in training", _on, _COMPRESSED),
    Unsupported("quantize_training.eigenvalue.enabled", "eigenvalue estimation", _on, _COMPRESSED),
    Unsupported("eigenvalue.enabled", "eigenvalue estimation", _on, _COMPRESSED),
    Unsupported(
        "elasticity.enabled",
        "elastic batch sizes",
        _on,
        "switch it off and write `train_batch_size`; `shardwise run --max-restarts` goes on with fewer ranks after a "
        "failure, and checkpoints fit any number of them",
    ),
    Unsupported(
        "autotuning.enabled",
        "autotuning",
        _on,
        "switch it off; `shardwise check` shows what is in force, and engine.memory_report() what it takes",
    ),
    Unsupported("autotuning.model_info.profile", "autotuning", _on, "switch it off"),
    Unsupported(
        "hybrid_engine.enabled",
        "the hybrid engine",
        _on,
        "switch it off, and generate with the trained module under `shardwise.zero.GatheredParameters`",
    ),
    Unsupported(
        "compile.deepcompile",
        "compiler passes (DeepCompile)",
        _on,
        "switch it off; engine.compile() uses torch.compile",
        speed_only=True,
    ),
)

IGNORED: tuple[Ignored, ...] = (
    Ignored(
        "checkpoint.use_node_local_storage",
        _on,
        "a checkpoint is one directory; save to one that all machines of the job see",
    ),
    Ignored("disable_python_gc", _on, "garbage collection is left to Python; gc.disable() in the script does it"),
    Ignored("graph_harvesting", _on, "kernels of the optimizer are not recorded as CUDA graphs"),
    Ignored("zero_optimization.enable_sanity_checks", _on, "there are no further checks to switch on"),
)


def value_at(config: Config, path: str) -> Any:
    """Return the value at a dotted path, None if a section on the way is absent."""
    place: Any = config
    for name in path.split("."):
        place = getattr(place, name) if place is not None else None
    return place


def check_built(config: Config, found: Scan, lenient: bool) -> list[Problem]:
    """Return one problem for each requested feature that this version lacks; with `lenient` (the file was read by
    `accept`) not for features that change only the speed.
    """
    return [
        Problem(_as_written(entry.path, found), f"{_missing(entry)}; {_instead(entry, config)}", NotBuiltError)
        for entry in UNSUPPORTED
        if _is_requested(entry, config) and not (lenient and entry.speed_only)
    ]


def ignored_features(config: Config, found: Scan) -> list[Note]:
    """Return a note on each key of `IGNORED` that requests its feature."""
    ignored = [
        Note(_as_written(entry.path, found), value, f"accepted, and changes nothing: {entry.missing}")
        for entry in IGNORED
        if entry.requests(value := value_at(config, entry.path))
    ]
    slower = [
        Note(_as_written(entry.path, found), value_at(config, entry.path), f"{_missing(entry)}; results are the same")
        for entry in UNSUPPORTED
        if entry.speed_only and _is_requested(entry, config)
    ]
    return ignored + slower


def _is_requested(entry: Unsupported, config: Config) -> bool:
    on = all(value_at(config, switch) for switch in entry.within)
    return on and entry.requests(value_at(config, entry.path))


def _missing(entry: Unsupported) -> str:
    return f"this version does not have {entry.feature}"


def _instead(entry: Unsupported, config: Config) -> str:
    return entry.instead if isinstance(entry.instead, str) else entry.instead(config)


def _as_written(path: str, found: Scan) -> str:
    """Return the user's spelling of a key, or of the first key below it (deprecated keys may stand for a section)."""
    parts = tuple(path.split("."))
    below = (written for given, written in found.given.items() if given[: len(parts)] == parts)
    return dotted(found.given.get(parts) or next(below, parts))
