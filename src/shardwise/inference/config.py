"""Configuration of `init_inference`: a section of its own, with the keys that DeepSpeed documents."""

from __future__ import annotations

import difflib
import os
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, ValidationError, model_validator

from shardwise.config import load
from shardwise.config.schema.base import ConfigSection, Int, as_list, key, section
from shardwise.errors import ConfigError, ConflictError

_DTYPES = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "int8": "int8",
}
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

_KERNELS = "layers are compiled by torch.compile, which has no such option"
_EXPERTS = "experts are divided as the model's other layers are, over the tensor-parallel ranks"


def _dtype(value: Any) -> Any:
    if isinstance(value, tuple) and value:  # members of an enumeration of DeepSpeed's
        value = value[0]
    if isinstance(value, (str, torch.dtype)):
        name = str(value).removeprefix("torch.").lower()
        return _DTYPES.get(name, name)
    return value


def _enabled(value: Any) -> Any:
    return {"enabled": value} if isinstance(value, bool) else value


class TensorParallelRanks(ConfigSection):
    """`tensor_parallel`: ranks that share every layer."""

    enabled: bool = key(True, "false: every rank has the whole model.")
    tp_size: Int = key(1, "Adjacent ranks that share a copy of the model.", ge=1)
    tp_grain_size: Int = key(
        1,
        "Ranks have multiples of so many features of MLPs and words of heads; the last has the rest.",
        default_note="64 in DeepSpeed",
        ge=1,
    )
    mpu: Any = key(
        None, "Object whose get_tensor_model_parallel_group() (or get_model_parallel_group()) is `tp_group`."
    )
    tp_group: Any = key(None, "Process group of the ranks; null: adjacent ranks of all.")

    @property
    def group(self) -> Any:
        """Process group that the script has given; None without one."""
        if self.tp_group is not None or self.mpu is None:
            return self.tp_group
        names = ("get_tensor_model_parallel_group", "get_model_parallel_group")
        found = next((getattr(self.mpu, name) for name in names if hasattr(self.mpu, name)), None)
        if found is None:
            raise ConfigError(
                f"tensor_parallel.mpu: {type(self.mpu).__name__} has neither {names[0]}() nor {names[1]}()"
            )
        return found()


class QuantizedValues(ConfigSection):
    """`quant.weight`: how weights of linear layers are stored."""

    enabled: bool = key(True, "false: weights keep the dtype.")
    num_bits: Literal[4, 8] = key(8, "Bits of a weight.")
    q_type: Literal["symmetric", "asymmetric"] = key("symmetric", "asymmetric: groups have a zero point, too.")
    group_size: Int | None = key(
        None, "Inputs of an output feature that share a scale; null: all with 8 bits, 128 (or 32) with 4.", gt=0
    )
    q_groups: Int = key(1, "Groups of a tensor.", no_effect="scales are finer: see `group_size`", ge=1)


class QuantizedActivations(ConfigSection):
    """`quant.activation`: activations keep the dtype."""

    enabled: bool = key(False, "true is refused: only weights are quantised.", default_note="true in DeepSpeed")
    num_bits: Int = key(8, "Bits of an activation.", no_effect="activations keep the dtype")
    q_type: Literal["symmetric", "asymmetric"] = key("symmetric", "Kind.", no_effect="activations keep the dtype")
    q_groups: Int = key(1, "Groups of a tensor.", no_effect="activations keep the dtype")


class QuantizedAttention(ConfigSection):
    """`quant.qkv`: weights of attention are those of `quant.weight`."""

    enabled: bool = key(True, "Quantise queries, keys and values.", no_effect="they are quantised as all weights are")


class Quantization(ConfigSection):
    """`quant`: weight-only quantisation by torchao; written, or requested by `dtype` int8."""

    enabled: bool = key(True, "false: weights keep the dtype.")
    weight: QuantizedValues = section(QuantizedValues, "Weights.")
    activation: QuantizedActivations = section(QuantizedActivations, "Activations.")
    qkv: QuantizedAttention = section(QuantizedAttention, "Attention.")


class Experts(ConfigSection):
    """`moe`: models with experts need no keys."""

    enabled: bool = key(True, "The model has experts.", no_effect="the model says so")
    ep_size: Int = key(1, "Ranks that divide the experts.", no_effect=_EXPERTS)
    moe_experts: Annotated[list[Int], BeforeValidator(lambda v: [v] if isinstance(v, int) else as_list(v))] = key(
        [1], "Number of experts.", names=("num_experts",), no_effect="the model says so"
    )
    type: Literal["standard", "residual"] = key("standard", "Kind of layer.", no_effect="the model says so")
    ep_mp_group: Any = key(None, "Group of tensor-parallel experts.", no_effect=_EXPERTS)
    ep_group: Any = key(None, "Group of expert-parallel ranks.", no_effect=_EXPERTS)


class CheckpointPaths(ConfigSection):
    """`checkpoint_config`: another form of `checkpoint`."""

    checkpoint_dir: str | None = key(None, "As `checkpoint`.")
    save_mp_checkpoint_path: str | None = key(None, "As the key of that name.")
    base_dir: str = key("", "As `base_dir`.")


class InferenceConfig(ConfigSection):
    """A complete configuration of `init_inference`."""

    dtype: Annotated[Literal["fp32", "fp16", "bf16", "int8"], BeforeValidator(_dtype)] = key(
        "fp16", "Type of weights and activations, by any usual name; int8: quantised weights, and bf16 otherwise."
    )
    tensor_parallel: TensorParallelRanks = section(TensorParallelRanks, "Layers shared by ranks.", names=("tp",))
    quant: Quantization | None = key(None, "Weight-only quantisation.")
    zero: dict[str, Any] = key(
        {}, "Section `zero_optimization` of a stage-3 engine that streams weights from host or disk.", free_form=True
    )
    aio: dict[str, Any] = key({}, "Section `aio` of the same engine.", free_form=True)
    checkpoint: str | dict[str, Any] | None = key(
        None,
        "Weights that each rank reads its part of: a directory or file, or (a JSON file with) an object whose "
        "`checkpoints` lists files. A model on the meta device is then never whole.",
    )
    base_dir: str = key("", "Directory of relative paths in `checkpoint`.")
    checkpoint_config: CheckpointPaths = section(CheckpointPaths, "Another form of it.", names=("ckpt_config",))
    replace_with_kernel_inject: bool = key(
        False,
        "Compile the model's blocks by torch.compile at their first call.",
        names=("kernel_inject",),
    )
    injection_policy: dict[Any, Any] | None = key(
        None,
        "Class of a block -> names of its layers that are divided by input features; classes are not compared.",
        names=("injection_dict",),
        free_form=True,
    )
    injection_policy_tuple: Annotated[list[Any], BeforeValidator(as_list)] | None = key(
        None, "The names, as in `tensor_parallel` of a training configuration."
    )
    max_out_tokens: Int | None = key(
        None,
        "Most tokens of prompt and answer; null: no limit.",
        names=("max_tokens",),
        default_note="1024 in DeepSpeed",
        gt=0,
    )
    min_out_tokens: Int = key(
        1, "Tokens that there must be memory for.", names=("min_tokens",), no_effect="caches grow as needed", ge=1
    )
    keep_module_on_host: bool = key(
        False,
        "Keep the undivided module in host memory.",
        no_effect="layers are divided where they are, and each rank's parts are moved",
    )
    enable_cuda_graph: bool = key(False, 'true is refused: pass mode="reduce-overhead" to engine.compile().')
    use_triton: bool = key(False, "Use Triton's kernels.", no_effect=_KERNELS)
    triton_autotune: bool = key(False, "Tune Triton's kernels.", no_effect=_KERNELS)
    triangular_masking: bool = key(
        True, "Causal attention of injected kernels.", names=("tm",), no_effect="the model's own mask is used"
    )
    moe: Annotated[Experts, BeforeValidator(_enabled)] = section(Experts, "Models with experts.")
    set_empty_params: bool = key(
        False, "Build injected layers without values.", no_effect="a model on the meta device has none"
    )
    save_mp_checkpoint_path: str | None = key(
        None, "null only: parts are read from whole checkpoints, and none are written."
    )
    return_tuple: bool = key(True, "Blocks return tuples.", no_effect="blocks are the model's own")
    training_mp_size: Int = key(1, "Tensor-parallel degree of the checkpoint.", no_effect="checkpoints say so", ge=1)
    replace_method: str = key("auto", "Old key.", no_effect="layers are divided in place")
    config: dict[str, Any] | None = key(
        None, "The model's configuration.", names=("args",), no_effect="the model has it", free_form=True
    )
    transposed_mode: bool = key(False, "Layout of injected weights.", no_effect="weights are the model's own")

    @model_validator(mode="before")
    @classmethod
    def _spelled(cls, given: Any) -> Any:
        return _canonical(given) if isinstance(given, dict) else given

    @property
    def bits(self) -> QuantizedValues | None:
        """Section of quantised weights, if they are requested."""
        quant = self.quant
        if self.dtype != "int8" and (quant is None or not quant.enabled or not quant.weight.enabled):
            return None
        return QuantizedValues() if quant is None else quant.weight

    @property
    def torch_dtype(self) -> torch.dtype:
        """Type of activations, and of weights that are not quantised."""
        return TORCH_DTYPES.get(self.dtype, torch.bfloat16)


# Old key -> section and key.
_MOVED = {
    "mp_size": ("tensor_parallel", "tp_size"),
    "mpu": ("tensor_parallel", "mpu"),
    "ep_size": ("moe", "ep_size"),
    "ep_group": ("moe", "ep_group"),
    "expert_group": ("moe", "ep_group"),
    "ep_mp_group": ("moe", "ep_mp_group"),
    "expert_mp_group": ("moe", "ep_mp_group"),
    "moe_experts": ("moe", "moe_experts"),
    "moe_type": ("moe", "type"),
}


def read_config(config: Any = None, **kwargs: Any) -> InferenceConfig:
    """Return the configuration of a dictionary, a JSON file or text, or an `InferenceConfig`, and keyword arguments.

    Raises:
        ConflictError: a key has two values.
        ConfigError: a key is unknown, or a value is wrong; with the path of each, and the fix.
    """
    if isinstance(config, InferenceConfig):
        given = {name: getattr(config, name) for name in config.model_fields_set}
    else:
        given = {} if config is None else dict(config) if isinstance(config, dict) else load(config)
    if "injection_policy" in kwargs and not isinstance(kwargs["injection_policy"], (dict, type(None))):
        raise ConfigError("injection_policy: expected a dictionary of names by class")
    values = _canonical(given)
    for name, value in _canonical(kwargs).items():
        if name in values and isinstance(value, dict) and isinstance(values[name], dict):
            values[name] = _joined(values[name], value, name)
        elif name in values and values[name] != value:
            raise _twice(name, values[name], value)
        else:
            values[name] = value
    try:
        found = InferenceConfig.model_validate(values)
    except ValidationError as error:
        lines = [_line(detail) for detail in error.errors(include_url=False, include_context=False)]
        raise ConfigError("init_inference(): " + "; ".join(dict.fromkeys(lines))) from None
    _check(found)
    return found


def _canonical(given: dict[str, Any], at: str = "", kind: Any = InferenceConfig) -> dict[str, Any]:
    """Return keys under their first spelling; old keys move to their section."""
    names = {
        spelling: name
        for name, field in kind.model_fields.items()
        for spelling in (name, *((field.json_schema_extra or {}).get("x-other-names", ())))
    }
    found: dict[str, Any] = {}
    for written, value in given.items():
        name = names.get(written, written)
        if not at and written in _MOVED:
            name, inner = _MOVED[written]
            value = {inner: value}
        if not at and name in _SECTIONS:
            value = _enabled(value)
            if isinstance(value, dict):
                value = _canonical(value, name, _SECTIONS[name])
        if name in found and isinstance(value, dict) and isinstance(found[name], dict):
            found[name] = _joined(found[name], value, name)
        elif name in found and found[name] != value:
            raise _twice(f"{at}{'.' if at else ''}{name}", found[name], value)
        else:
            found[name] = value
    return found


_SECTIONS: dict[str, type[ConfigSection]] = {
    "tensor_parallel": TensorParallelRanks,
    "moe": Experts,
    "checkpoint_config": CheckpointPaths,
}


def _joined(one: dict[str, Any], other: dict[str, Any], at: str) -> dict[str, Any]:
    for name, value in other.items():
        if name in one and one[name] is not value and one[name] != value:
            raise _twice(f"{at}.{name}", one[name], value)
    return {**one, **other}


def _twice(name: str, one: Any, other: Any) -> ConflictError:
    return ConflictError(
        f"{name}: has two values, {one!r} and {other!r} (config and keyword arguments). Keep one of them"
    )


def _line(detail: Any) -> str:
    path = [part for part in detail["loc"] if isinstance(part, (str, int))]
    where = ".".join(map(str, path))
    if detail["type"] != "extra_forbidden":
        return f"{where}: {detail['msg']}, found {detail['input']!r:.80}"
    place: Any = InferenceConfig
    for part in path[:-1]:
        place = _SECTIONS.get(str(part)) or {"quant": Quantization, "weight": QuantizedValues}.get(str(part), place)
    near = difflib.get_close_matches(str(path[-1]), [*place.model_fields, *_MOVED], n=1)
    return f"{where}: unknown key" + (f"; did you mean {near[0]!r}?" if near else "; remove it")


def _check(config: InferenceConfig) -> None:
    if config.enable_cuda_graph:
        raise ConfigError(
            'enable_cuda_graph: there is no such switch; call engine.compile(mode="reduce-overhead"), by which '
            "torch.compile records CUDA graphs"
        )
    if config.save_mp_checkpoint_path is not None or config.checkpoint_config.save_mp_checkpoint_path is not None:
        raise ConfigError(
            "save_mp_checkpoint_path: each rank reads its part of a whole checkpoint, so that no divided one is "
            "needed. Remove the key"
        )
    quant = config.quant
    if quant is not None and quant.enabled and quant.activation.enabled:
        raise ConfigError(
            "quant.activation.enabled: only weights are quantised; write false, or remove quant.activation"
        )
    if config.dtype == "int8" and quant is not None:
        if not (quant.enabled and quant.weight.enabled):
            raise ConflictError('dtype is int8, and quant has "enabled": false. Keep one of them')
        if quant.weight.num_bits != 8:
            raise ConflictError('quant.weight.num_bits is 4, and dtype int8. Write "dtype": "bf16"')
    directory = config.checkpoint_config.checkpoint_dir
    if directory is not None and config.checkpoint is not None:
        raise _twice("checkpoint", config.checkpoint, directory)
    if config.zero.keys() - {"stage"} and not config.zero.get("stage", 0):
        raise ConfigError(
            f'zero: without "stage": 3, {", ".join(config.zero)} would do nothing. Add it, or remove zero'
        )
    if config.aio and not config.zero.get("stage", 0):
        raise ConfigError('aio: is of the engine that streams weights. Add zero with "stage": 3, or remove aio')
    if config.zero and config.bits is not None:
        raise ConflictError("zero: streamed weights cannot be quantised; remove quant (or dtype int8), or zero")
    if config.injection_policy is not None and config.injection_policy_tuple is not None:
        raise _twice("injection_policy", config.injection_policy, config.injection_policy_tuple)


def checkpoint_of(config: InferenceConfig) -> Any:
    """Return the path, or the object with a list of files, under `checkpoint` or `checkpoint_config`; None without."""
    return config.checkpoint if config.checkpoint is not None else config.checkpoint_config.checkpoint_dir


def directory_of(config: InferenceConfig) -> str:
    """Return the directory of relative paths."""
    return os.fspath(config.base_dir or config.checkpoint_config.base_dir)


def rows_of(config: InferenceConfig) -> list[Any] | None:
    """Return the names of layers divided by input features, of either policy key; None without one."""
    if config.injection_policy_tuple is not None:
        return config.injection_policy_tuple
    if config.injection_policy is None:
        return None
    names: list[Any] = []
    for given in config.injection_policy.values():
        if not isinstance(given, (str, list, tuple)):
            raise ConfigError(
                "injection_policy: expected names of layers, as ('self_attn.o_proj', 'mlp.down_proj'), found "
                f"{given!r:.80}; classes of policies are not used"
            )
        names += [given] if isinstance(given, str) else list(given)
    return names


def default_inference_config() -> dict[str, Any]:
    """Return the default configuration of `init_inference`.

    >>> default_inference_config()["tensor_parallel"]["tp_size"]
    1
    """
    return InferenceConfig().model_dump()
