"""Converting DeepSpeed's trainer state: loss scale, schedule, counters, the optimizer's class."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardwise.checkpoint.formats.torch_file import TensorAttributes
from shardwise.errors import CheckpointError

TIED_LAYERS = "shardwise_tied_layers"
"""Key of model states that `universal_writer` adds: the first layer of each key of shared modules."""

OWN_KEYS = frozenset(
    "module buffer_names optimizer param_shapes frozen_param_shapes frozen_param_fragments shared_params lr_scheduler "
    "data_sampler random_ltd sparse_tensor_module_names csr_tensor_module_names skipped_steps global_steps "
    "global_samples dp_world_size mp_world_size checkpoint_parallel_dimensions num_experts ds_autoep_layers "
    f"universal_checkpoint_info ds_config ds_version {TIED_LAYERS}".split()
)
"""Keys of the file of model states that do not belong to the script's `client_state`, stored among them."""

_ENTRIES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Lamb"), frozenset({"exp_avg", "exp_avg_sq"})),
    "Lion": frozenset({"exp_avg"}),
    "Adamax": frozenset({"exp_avg", "exp_inf"}),
    "Adagrad": frozenset({"sum"}),
    "Adadelta": frozenset({"square_avg", "acc_delta"}),
    "SGD": frozenset({"momentum_buffer"}),
}
"""Elementwise entries of state, by class of optimizer."""

_ADAM = ("adam", "adamw")

_SETTINGS = frozenset(
    {"lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay", "amsgrad"}
)
"""Settings of parameter groups with the same meaning for every optimizer."""

_WITHOUT_EFFECT = (bool, int, float, type(None))
"""Types of settings that request nothing if they are zero."""

_FORM = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "step", "name", "param_names", "moe"}
)
"""Entries of parameter groups that select an implementation, or are known from elsewhere."""


def scaler_state(scaler: Any) -> dict[str, Any] | None:
    """Return the state of a loss scaler (object or dictionary) as that of `LossScaler`; None without loss scaling.

    DeepSpeed doubles its scale when the number of steps since the last overflow is a multiple of the window; shardwise
    after as many consecutive steps without overflow.

    >>> scaler_state({"dynamic_loss_scale": True, "cur_scale": 256.0, "cur_iter": 6, "last_overflow_iter": 2,
    ...               "scale_window": 1000})["clean_steps"]
    2
    """
    found = vars(scaler) if isinstance(scaler, TensorAttributes) else scaler
    if not isinstance(found, Mapping) or not isinstance(found.get("cur_scale"), (int, float)):
        return None
    dynamic = bool(found.get("dynamic", found.get("dynamic_loss_scale", False)))
    scale = float(found["cur_scale"])
    if not dynamic and scale == 1.0:
        return None
    since = int(found.get("cur_iter", 0)) - int(found.get("last_overflow_iter", -1)) - 1
    window = max(1, int(found.get("scale_window", 1000)))
    return {
        "dynamic": dynamic,
        "scale": scale,
        "tolerance": max(1, int(found.get("cur_hysteresis", 1))),
        "clean_steps": (since - 1) % window if since > 0 else 0,
        "reference_weight": None,
    }


def counters(model: Mapping[str, Any], world: int) -> dict[str, int]:
    """Return the counters; the configuration has the accumulation window. Raises CheckpointError if one is missing."""
    found = {}
    for name in ("global_steps", "skipped_steps", "global_samples"):
        value = model.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CheckpointError(
                f"{name}: expected a number of model states, found {value!r}: a layout that is not known"
            )
        found[name] = value
    window = _accumulation(model.get("ds_config"), world)
    return {**found, "micro_steps": found["global_steps"] * window, "gradient_accumulation_steps": window}


def _at(config: Any, *keys: str) -> Any:
    for key in keys:
        config = config.get(key) if isinstance(config, Mapping) else None
    return config


def _accumulation(config: Any, world: int) -> int:
    keys = ("gradient_accumulation_steps", "train_batch_size", "train_micro_batch_size_per_gpu")
    given, whole, micro = (_at(config, key) for key in keys)
    if isinstance(given, int) and given > 0:
        return given
    if isinstance(whole, int) and isinstance(micro, int) and micro > 0:
        return max(1, whole // (micro * world))
    return 1


def configured_optimizer(config: Any) -> str | None:
    """Return `optimizer.type` of a configuration, or None if the script passed its own optimizer."""
    name = _at(config, "optimizer", "type")
    return name if isinstance(name, str) else None


def data_before_experts(config: Any) -> bool:
    """Return True if expert-data-parallel groups were adjacent ranks."""
    return bool(_at(config, "use_data_before_expert_parallelism"))


def reordered(config: Any) -> bool:
    """Return True if parameters were reordered for communication (`round_robin_gradients`)."""
    return bool(_at(config, "zero_optimization", "round_robin_gradients"))


def class_of(config: Any, entries: Collection[str], settings: Sequence[Mapping[str, Any]]) -> str | None:
    """Return this library's one class that continues with elementwise state entries and settings, or None."""
    named = configured_optimizer(config)
    if named is not None and named.lower() in _ADAM:
        options = config["optimizer"].get("params") or {}
        return "AdamW" if named.lower() == "adamw" or options.get("adam_w_mode", True) else "Adam"
    if named is not None:
        return next((known for known in _ENTRIES if known.lower() == named.lower()), None)
    decoupled = {group.get("decoupled_weight_decay") for group in settings} - {None}
    if set(entries) == _ENTRIES["Adam"] and len(decoupled) == 1:
        return "AdamW" if decoupled == {True} else "Adam"
    fitting = [name for name, expected in _ENTRIES.items() if set(entries) == expected]
    return fitting[0] if len(fitting) == 1 else None


def refusal(config: Any, entries: Collection[str], target: str) -> str | None:
    """Return why class `target` cannot continue with elementwise state entries (empty before step 1), or None."""
    named = configured_optimizer(config)
    if named is not None:
        same = named.lower() == target.lower() or (named.lower() in _ADAM and target.lower() in _ADAM)
        if not same and named.lower() in {name.lower() for name in _ENTRIES}:
            return f"holds state of the optimizer {named}, this engine has {target}"
    expected = _ENTRIES.get(target)
    more = {"max_exp_avg_sq"} if target in ("Adam", "AdamW") else set()
    if entries and expected is not None and not expected <= set(entries) <= expected | more:
        return (
            f"holds optimizer state with the entries {sorted(entries)}, and {target}, which this engine has, keeps "
            f"{sorted(expected)}"
        )
    return None


def fitting_settings(
    settings: Mapping[str, Any], known: Collection[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return loadable settings of a group, and others that request other behaviour; `known` None: unknown."""
    kept: dict[str, Any] = {}
    left: dict[str, Any] = {}
    for name, value in settings.items():
        if name in _FORM:
            continue
        if name in _SETTINGS if known is None else name in known:
            kept[name] = value
        elif value is not True if name == "bias_correction" else not isinstance(value, _WITHOUT_EFFECT) or value:
            left[name] = value
    if known is None and not kept.get("amsgrad"):
        kept.pop("amsgrad", None)
    return kept, left


def plain_json(value: Any) -> Any:
    """Return a configuration as JSON, with other values as text."""
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
