"""Hugging Face models as layers of a pipeline, after a comparison of stages with the whole model."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.errors import ConfigError, UsageError
from shardwise.pipeline.layers import Recompute, seeded
from shardwise.pipeline.transformer import Plan, TransformerLayers, pieces_of


def to_layers(model: Any, example: Any = None) -> TransformerLayers:
    """Return the layers of a Hugging Face model for a `PipelineModule`.

    The layers are the embedding, each block, and the head; in encoder-decoder models also the start of the decoder. The
    first stage takes a mapping of the model's keyword arguments (tensors), or the token numbers only. The last stage
    returns the model's output (of use_cache=False); with `labels` in the inputs, the output has the loss. Between
    stages travel the hidden states, other block arguments that depend on parameters, and the inputs.

    A small model of the same class and configuration is split and compared with itself, with and without padding: the
    outputs and all gradients must be equal bit by bit. One gradient may round differently: if a parameter has three
    uses, as in T5, stages with two of the uses add the three terms in another order.

    The model may be on the meta device: `build(..., device=...)` initializes the parameters of the rank's own stages,
    each module under a seed of its own from one number that is drawn here.

    Args:
        model: a `transformers.PreTrainedModel`.
        example: a small model of the same class and configuration; None: made from the configuration.

    Raises:
        ConfigError: the model has no list of blocks, or its stages are not proved to be equal to the model.
    """
    import transformers

    if not isinstance(model, transformers.PreTrainedModel):
        raise UsageError(
            f"to_layers: expected a transformers.PreTrainedModel, found {type(model).__name__}. Write other models "
            "as a list of LayerSpecs"
        )
    with seeded(0), torch.device("cpu"):
        plan = _checked_plan(example if example is not None else _reduced(model), type(model).__name__)
    return TransformerLayers(model, plan)


def _block_lists(model: Any) -> list[str]:
    """Return the names of the lists of blocks: those of `base_model_pp_plan`, else the outermost lists of layers."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    found = {name: blocks for name, blocks in found.items() if len({type(block) for block in blocks}) == 1}
    base = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
    planned = [f"{base}.{name}".strip(".") for name in getattr(model.config, "base_model_pp_plan", None) or ()]
    if any(name in found for name in planned):
        return [name for name in planned if name in found]
    outer = {n: b for n, b in found.items() if not any(n.startswith(f"{other}.") for other in found)}
    from transformers.modeling_layers import GradientCheckpointingLayer

    blocks = [name for name, of in outer.items() if isinstance(of[0], GradientCheckpointingLayer)]
    if not blocks:
        raise ConfigError(f"{type(model).__name__}: the model has no list of blocks. Write a list of LayerSpecs")
    return blocks


# Sizes of a reduced model, by the names of configurations.
_WIDTHS = {
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 64,
    "ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_ff": 64,
    "n_inner": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "vocab_size": 96,
}
_DEPTHS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "max_window_layers")
_BLOCKS = 4


def _reduced(model: Any) -> Any:
    """Return a small model on the CPU of the same class and options."""
    config = copy.deepcopy(model.config)
    heads, groups = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    wide = getattr(config, "word_embed_proj_dim", None) not in (None, config.hidden_size)
    for name, size in _WIDTHS.items():
        if getattr(config, name, None) is not None and not isinstance(getattr(type(config), name, None), property):
            setattr(config, name, size)
    if wide:
        config.word_embed_proj_dim = 16
    if groups is not None:
        config.num_key_value_heads = 4 if groups == heads else 1 if groups == 1 else 2
    kinds = getattr(config, "layer_types", None) or []
    chosen = kinds[:_BLOCKS] if set(kinds) <= set(kinds[:_BLOCKS]) else [*kinds[:1], *dict.fromkeys(kinds)]
    for name in _DEPTHS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(getattr(config, name), len(chosen) or _BLOCKS))
    if chosen:
        config.layer_types = chosen
    for name, value in list(vars(config).items()):
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, value % _WIDTHS["vocab_size"])
    if "flash" in (getattr(config, "_attn_implementation", None) or ""):
        config._attn_implementation = "sdpa"
    try:
        return type(model)(config)
    except Exception as error:
        raise _no_example(type(model).__name__, error) from error


def _no_example(title: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"{title}: a small model of this configuration, with which pipeline stages would be compared, fails ({error}). "
        "Pass a small model of the same class and options: to_layers(model, example=...)"
    )


def _samples(model: Any) -> list[dict[str, torch.Tensor]]:
    """Return inputs of a small model: without padding, and with padding on either side."""
    known = inspect.signature(model.forward).parameters
    tokens = torch.randint(3, model.config.get_text_config().vocab_size, (3, 10), device="cpu")
    inputs = {model.main_input_name: tokens}
    mask = torch.ones_like(tokens)
    mask[0, 7:], mask[1, :4] = 0, 0
    if "decoder_input_ids" in known:
        inputs["decoder_input_ids"] = tokens.flip(0)[:, :6]
    target = inputs.get("decoder_input_ids", tokens)
    choices = [{"labels": target}, {"labels": torch.tensor([0, 1, 1], device="cpu")}] if "labels" in known else []
    for labels in choices:
        try:
            model(**inputs, **labels)
        except (ValueError, RuntimeError, IndexError):
            continue
        inputs |= labels
        break
    return [inputs, inputs | {"attention_mask": mask}] if "attention_mask" in known else [inputs]


def _checked_plan(small: Any, title: str) -> Plan:
    """Return the plan of a small model whose stages have been compared with the whole."""
    small.train()
    lists = _block_lists(small)
    try:
        samples = _samples(small)
        _whole(small, samples[0])
    except Exception as error:
        raise _no_example(title, error) from error
    try:
        plan = _trace(small, lists, samples[0])
        layers = TransformerLayers(small, plan)
        for sample in samples:
            _compare(small, layers, sample)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{title}: the model cannot be divided into pipeline stages by its list of blocks ({', '.join(lists)}): a "
            f"stage failed ({type(error).__name__}: {error}). Write the model as a list of LayerSpecs"
        ) from error
    return plan


def _trace(model: Any, lists: list[str], sample: dict[str, torch.Tensor]) -> Plan:
    """Run a model and record its plan."""
    plan, done = Plan([]), dict.fromkeys(lists, 0)
    pieces = dict(pieces_of(model, lists))
    plan.segments = {name: set() for name in pieces}

    def at_piece(name: str, whole: bool, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        middle = plan.lists and done[plan.lists[-1]] < len(model.get_submodule(plan.lists[-1]))
        if middle and pieces[name].state_dict():
            raise ConfigError(f"{type(model).__name__}: {name} is called between blocks, which stages cannot divide")
        plan.segments[name].add(len(plan.lists))
        given = next((item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)), None)
        if whole and given is not None and isinstance(output, torch.Tensor) and output.ndim == given.ndim + 1:
            plan.widens.add(name)

    def at_block(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if name not in plan.lists:
            plan.lists.append(name)
            plan.tuples.append(len(output) if isinstance(output, tuple) else 0)
            plan.carried.append((set(), set()))
        arguments = list(inspect.signature(type(module).forward).parameters)[1:]
        named = {**dict(zip(arguments, args, strict=False)), **kwargs}
        carried = plan.carried[plan.lists.index(name)][done[name] > 0]
        carried |= {n for n, value in named.items() if isinstance(value, torch.Tensor) and value.requires_grad}
        done[name] += 1

    with ExitStack() as stack:
        for name, piece in pieces.items():
            for inner, module in piece.named_modules():
                hook = partial(at_piece, name, not inner)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        for name in lists:
            for block in model.get_submodule(name):
                hook = partial(at_block, name)
                stack.callback(block.register_forward_hook(hook, with_kwargs=True).remove)
        _whole(model, sample)
    return plan


def _whole(model: Any, sample: Mapping[str, torch.Tensor]) -> Any:
    options = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    return model(**sample, **options, return_dict=True)


def _compare(model: Any, layers: TransformerLayers, sample: dict[str, torch.Tensor]) -> None:
    """Compare the stages of a small model with the whole, and add fields that differ to `plan.dropped`."""
    stages = [layers.build(i, i, i + 1, Recompute()) for i in range(len(layers.places))]
    for stage in stages:
        stage.train(model.training)
    with seeded(1):
        whole = _whole(model, sample)
    passed: list[tuple[Any, Any]] = []
    value: Any = sample
    with seeded(1):
        for stage in stages:
            given = tree_map(_detached, value) if passed else value
            value = stage(given)
            passed.append((given, value))
    plan, title = layers.plan, type(model).__name__
    wrong = {name for name in whole if not _equal(whole[name], value.get(name))}
    main = {"loss", next(name for name in whole if name != "loss")}
    if wrong & main:
        raise ConfigError(f"{title}: as pipeline stages, the model gives another {', '.join(sorted(wrong & main))}")
    plan.dropped |= wrong
    kept = [name for name in whole if name not in plan.dropped]
    expected = _gradients(model, [([], [whole[name] for name in kept])])
    found = _gradients(model, [*[pair for pair in passed[:-1]], (passed[-1][0], [value[name] for name in kept])])
    if differing := [name for name, gradient in expected.items() if not _equal(gradient, found[name])]:
        raise ConfigError(
            f"{title}: as pipeline stages, the model gives another gradient of {', '.join(differing[:3])} "
            f"({len(differing)} of {len(expected)} parameters differ)"
        )


def _detached(item: Any) -> Any:
    return item.detach().requires_grad_(item.requires_grad) if isinstance(item, torch.Tensor) else item


def _equal(one: Any, other: Any) -> bool:
    mine, theirs = tree_leaves(one), tree_leaves(other)
    return len(mine) == len(theirs) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a is b
        for a, b in zip(mine, theirs, strict=True)
    )


def _gradients(model: Any, passed: list[tuple[Any, Any]]) -> dict[str, torch.Tensor | None]:
    """Return the gradients of all parameters after the backward passes of stages, the last first."""
    grads: list[Any] | None = None
    for given, output in reversed(passed):
        results = _trainable(output)
        places = [torch.arange(result.numel(), device="cpu").view_as(result) for result in results]
        starts = grads if grads is not None else [torch.cos(place) for place in places]
        torch.autograd.backward(results, starts)
        grads = [leaf.grad for leaf in _trainable(given)]
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def _trainable(value: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(value) if isinstance(item, torch.Tensor) and item.requires_grad]
