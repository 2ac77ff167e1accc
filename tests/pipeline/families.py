"""Families of models as layers of a pipeline and from transformers, their data, and training with every gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import nn

import shardwise
from shardwise.moe import MoE
from shardwise.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from shardwise.zero.access import safe_get_full_optimizer_state

WORDS, WIDTH, HEADS, LENGTH, BLOCKS = 32, 16, 4, 6, 6

# -- layers ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of 4 heads, with rotary positions, a bias for scores, and other keys if they are given."""

    def __init__(self, groups: int = HEADS, causal: bool = True, bias: bool = True) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.k, self.v = (nn.Linear(WIDTH, groups * size, bias=bias) for _ in range(2))
        self.causal = causal

    def forward(self, x: torch.Tensor, scores: Any = None, other: Any = None, rotary: bool = False) -> torch.Tensor:
        other = x if other is None else other
        q, k, v = (
            layer(given).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer, given in ((self.q, x), (self.k, other), (self.v, other))
        )
        if rotary:
            q, k = rotated(q), rotated(k)
        k, v = (part.repeat_interleave(HEADS // part.shape[1], 1) for part in (k, v))
        weights = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = weights if scores is None else weights + scores
        if self.causal:
            weights = weights.masked_fill(torch.ones(weights.shape[-2:], dtype=torch.bool).triu(1), -1e9)
        found: torch.Tensor = self.o((weights.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        return found


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return queries or keys with rotary positions."""
    angles = torch.arange(x.shape[-2])[:, None] / 10.0 ** torch.arange(0, x.shape[-1], 2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


class Mlp(nn.Module):
    """Two linear layers, gated or not."""

    def __init__(self, gated: bool = False, inplace: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False) if gated else None
        self.act = nn.ReLU(inplace=True) if inplace else nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        found: torch.Tensor = self.down(y)
        return found


class Words(nn.Embedding):
    """Words, with learned positions or a norm."""

    def __init__(self, positions: bool = False, norm: bool = False) -> None:
        super().__init__(WORDS, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH) if positions else None
        self.norm = nn.LayerNorm(WIDTH) if norm else nn.Identity()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = super().forward(ids)
        x = x if self.positions is None else x + self.positions(torch.arange(ids.shape[1]))
        found: torch.Tensor = self.norm(x)
        return found


def head(words: Any, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of a tied head."""
    return F.linear(x, words.weight)


class GptBlock(nn.Module):
    """A block of GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x))
        found: torch.Tensor = x + self.mlp(self.norms[1](x))
        return found


class LlamaBlock(GptBlock):
    """A block of Llama: RMSNorm, grouped heads, rotary positions, a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(groups=2, bias=False), Mlp(gated=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norms[0](x), rotary=True)
        found: torch.Tensor = x + self.mlp(self.norms[1](x))
        return found


class BloomBlock(GptBlock):
    """A block of BLOOM: scores have a bias that grows with the distance."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slopes = 0.5 ** torch.arange(1, HEADS + 1).view(HEADS, 1, 1)
        places = torch.arange(x.shape[1])
        x = x + self.attention(self.norms[0](x), (places - places[:, None]) * slopes)
        found: torch.Tensor = x + self.mlp(self.norms[1](x))
        return found


class ExpertsBlock(GptBlock):
    """A block with experts, which pass on the sum of their auxiliary losses."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.mlp = MoE(WIDTH, Mlp(), 4, ep_size=ep_size, k=1, drop_tokens=False, use_rts=False)  # type: ignore[assignment]

    def forward(self, value: Any) -> Any:
        x, auxiliary = value if isinstance(value, tuple) else (value, torch.zeros(()))
        x = x + self.attention(self.norms[0](x))
        y, own, _ = self.mlp(self.norms[1](x))
        return x + y, auxiliary + own


class T5Block(nn.Module):
    """A block of the encoder or the decoder of T5; the first of each also computes the bias of scores for all."""

    def __init__(self, decoder: bool, first: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2 + decoder))
        self.attention, self.mlp = Attention(causal=decoder, bias=False), Mlp(inplace=True)
        self.cross = Attention(causal=False, bias=False) if decoder else None
        self.bias = nn.Embedding(2 * LENGTH, HEADS) if first else None

    def forward(self, value: Any) -> Any:
        name = "encoded" if self.cross is None else "decoded"
        x, scores = value[name], value.get(f"{name}_scores")
        if self.bias is not None:
            places = torch.arange(x.shape[1])
            scores = self.bias(places - places[:, None] + LENGTH).permute(2, 0, 1)
        x = x + self.attention(self.norms[0](x), scores)
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), other=value["encoded"])
        return {**value, name: x + self.mlp(self.norms[1](x)), f"{name}_scores": scores}


def encode(words: Any, pair: Any) -> Any:
    """Return the words of the encoder, and the ids for the decoder."""
    return {"encoded": words(pair[0]), "ids": pair[1]}


def decode(words: Any, value: Any) -> Any:
    """Return the words of the decoder, and what the encoder has computed."""
    return {"encoded": value["encoded"], "decoded": words(value["ids"])}


def decoded_head(words: Any, value: Any) -> torch.Tensor:
    """Return the logits of T5's tied head."""
    return F.linear(value["decoded"], words.weight)


class ResidualBlock(nn.Module):
    """A block of ResNet."""

    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        before = channels // stride
        self.convs = nn.ModuleList(
            [nn.Conv2d(before, channels, 3, stride, 1, bias=False), nn.Conv2d(channels, channels, 3, 1, 1, bias=False)]
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))
        self.short = nn.Conv2d(before, channels, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu_(self.norms[0](self.convs[0](x)))
        return F.relu_(self.norms[1](self.convs[1](y)) + self.short(x))


# -- models ------------------------------------------------------------------------------------------------------------


def gpt() -> list[Any]:
    words = TiedLayerSpec("words", Words, positions=True)
    tied = TiedLayerSpec("words", Words, positions=True, forward_fn=head)
    return [words, *(LayerSpec(GptBlock) for _ in range(BLOCKS)), LayerSpec(nn.LayerNorm, WIDTH), tied]


def llama() -> list[Any]:
    blocks = [LayerSpec(LlamaBlock) for _ in range(BLOCKS)]
    return [LayerSpec(Words), *blocks, LayerSpec(nn.RMSNorm, WIDTH), LayerSpec(nn.Linear, WIDTH, WORDS, bias=False)]


def bloom() -> list[Any]:
    tied = TiedLayerSpec("words", Words, norm=True, forward_fn=head)
    blocks = [LayerSpec(BloomBlock) for _ in range(BLOCKS)]
    return [TiedLayerSpec("words", Words, norm=True), *blocks, LayerSpec(nn.LayerNorm, WIDTH), tied]


def t5() -> list[Any]:
    return [
        TiedLayerSpec("words", Words, forward_fn=encode),
        *(LayerSpec(T5Block, False, i == 0) for i in range(3)),
        TiedLayerSpec("words", Words, forward_fn=decode),
        *(LayerSpec(T5Block, True, i == 0) for i in range(3)),
        TiedLayerSpec("words", Words, forward_fn=decoded_head),
    ]


def resnet() -> list[Any]:
    return [
        LayerSpec(nn.Conv2d, 3, 8, 3, padding=1, bias=False),
        LayerSpec(nn.BatchNorm2d, 8),
        LayerSpec(nn.ReLU, inplace=True),
        *(LayerSpec(ResidualBlock, channels, stride) for channels, stride in ((8, 1), (16, 2), (16, 1), (32, 2))),
        LayerSpec(nn.AdaptiveAvgPool2d, 1),
        nn.Flatten(),
        LayerSpec(nn.Linear, 32, 10),
    ]


def experts(ep_size: int = 1) -> list[Any]:
    blocks = [LayerSpec(ExpertsBlock, ep_size) for _ in range(BLOCKS)]
    return [LayerSpec(Words), *blocks, LayerSpec(_Joined), LayerSpec(_Logits)]


def divided_experts() -> list[Any]:
    return experts(2)


class _Joined(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, value: Any) -> Any:
        return super().forward(value[0]), value[1]


class _Logits(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)

    def forward(self, value: Any) -> Any:
        return super().forward(value[0]), value[1]


_SMALL = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def hf_gpt2() -> Any:
    sizes = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": HEADS, "n_positions": 16}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**_SMALL, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )


def hf_llama() -> Any:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_SMALL, **sizes, num_key_value_heads=2))


def hf_bloom() -> Any:
    return transformers.BloomForCausalLM(
        transformers.BloomConfig(**_SMALL, hidden_size=WIDTH, n_layer=BLOCKS, n_head=HEADS)
    )


def hf_t5() -> Any:
    sizes = {"d_model": WIDTH, "d_ff": 24, "num_layers": 3, "num_decoder_layers": 3, "num_heads": HEADS, "d_kv": 4}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**_SMALL, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
    )


# -- data and losses ---------------------------------------------------------------------------------------------------


def _generator(step: int, number: int, place: int) -> torch.Generator:
    return torch.Generator().manual_seed(10000 * step + 10 * number + place)


def tokens(step: int, number: int, place: int) -> Any:
    ids = torch.randint(0, WORDS, (2, LENGTH), generator=_generator(step, number, place))
    return ids, ids


def token_pairs(step: int, number: int, place: int) -> Any:
    ids = torch.randint(0, WORDS, (2, 2 * LENGTH - 2), generator=_generator(step, number, place))
    return (ids[:, :LENGTH], ids[:, LENGTH:]), ids[:, LENGTH:]


def images(step: int, number: int, place: int) -> Any:
    generator = _generator(step, number, place)
    return torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)


def dictionary(step: int, number: int, place: int) -> Any:
    ids = torch.randint(2, WORDS, (2, LENGTH), generator=_generator(step, number, place))
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[0, 4:], labels[0, 4:] = 0, -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}, None


def cross_entropy(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def with_auxiliary(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output[0], labels) + 0.1 * output[1]


@dataclass(frozen=True)
class Family:
    """A kind of model.

    Attributes:
        made: layers, or a model of transformers, whose loss is its own.
        tied: name of a parameter that the first and the last layer share.
    """

    made: Callable[[], Any]
    batches: Callable[[int, int, int], Any] = tokens
    loss: Any = cross_entropy
    tied: str = ""

    def model(self, stages: int, **options: Any) -> nn.Module:
        """Return the model with equal weights in each call."""
        torch.manual_seed(0)
        found = self.made()
        if isinstance(found, nn.Module):
            return found
        return PipelineModule(found, num_stages=stages, loss_fn=self.loss, **options)

    def loss_of(self, model: nn.Module, inputs: Any, labels: Any) -> torch.Tensor:
        """Return the loss of one process."""
        if isinstance(model, PipelineModule):
            found: torch.Tensor = self.loss(model(inputs), labels)
        else:
            found = model(**inputs).loss
        return found


FAMILIES = {
    "gpt": Family(gpt, tied="layers.0.weight"),
    "llama": Family(llama),
    "bloom": Family(bloom, tied="layers.0.weight"),
    "t5": Family(t5, token_pairs, tied="layers.0.weight"),
    "resnet": Family(resnet, images),
    "experts": Family(experts, loss=with_auxiliary),
    "hf-gpt2": Family(hf_gpt2, dictionary, None, "transformer.wte.weight"),
    "hf-llama": Family(hf_llama, dictionary, None),
    "hf-bloom": Family(hf_bloom, dictionary, None, "transformer.word_embeddings.weight"),
    "hf-t5": Family(hf_t5, dictionary, None, "shared.weight"),
}

# -- training ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run of a family; `tensor`: ranks of a tensor-parallel group, `expert`: of an expert-parallel one."""

    family: str
    stages: int
    schedule: str = "1f1b"
    zero: int = 0
    micro_batches: int = 2
    steps: int = 5
    tensor: int = 1
    expert: int = 1
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    """Losses and gradient norms by step; of each tensor the gradient of the first step, and the values after the last.

    Attributes:
        boxes: part of the whole tensor that this rank has, if not all; gradients are whole.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    values: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    boxes: dict[str, Any] = field(default_factory=dict)


def alone(family: Family, micro_batches: int, places: int, steps: int = 5) -> Trained:
    """Train in one process with plain PyTorch."""
    model = family.model(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, norms, first = [], [], {}
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for number in range(micro_batches):
            for place in range(places):
                loss = family.loss_of(model, *family.batches(step, number, place)) / (micro_batches * places)
                loss.backward()
                total += float(loss.detach())
        losses.append(total)
        first = first or {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        first = {name: grad.clone() for name, grad in first.items()} if step == 0 else first
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return Trained(losses, norms, first, values, {name: b.clone() for name, b in model.named_buffers()})


def engine_of(case: Case) -> Any:
    """Return the engine of a case."""
    family = FAMILIES[case.family]
    if case.expert > 1:
        family = Family(divided_experts, family.batches, family.loss)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.micro_batches,
        "zero_optimization": {"stage": case.zero, "stage3_param_persistence_threshold": 0},
        "pipeline": {"stages": case.stages, "schedule": case.schedule},
        "tensor_parallel": {"autotp_size": case.tensor},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "gradient_clipping": 1e6,  # computes the norm
        **case.config,
    }
    return shardwise.initialize(model=family.model(case.stages), config=config)[0]


def train(case: Case) -> Trained:
    """Train on this rank."""
    engine, family = engine_of(case), FAMILIES[case.family]
    place = dist.get_rank() % (dist.get_world_size() // case.stages) // case.tensor
    losses, norms, first = [], [], {}
    tensors = list(zip(engine.sharded.registry, engine.sharded.registry.parameters, strict=True))
    for step in range(case.steps):
        batches = [family.batches(step, number, place) for number in range(case.micro_batches)]
        losses.append(float(engine.train_batch(iter(batches))))
        norms.append(float(engine.last_step.grad_norm))
        if step == 0:
            for tensor, parameter in tensors:
                momentum = safe_get_full_optimizer_state(parameter, "momentum_buffer")
                first[tensor.name] = torch.zeros(parameter.shape) if momentum is None else momentum.clone()
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    boxes = {tensor.name: tensor.box for tensor, _ in tensors if tensor.box is not None}
    engine.destroy()
    values = {tensor.name: parameter.detach().clone() for tensor, parameter in tensors}
    return Trained(losses, norms, first, values, buffers, boxes)


def train_all(cases: Sequence[Case]) -> list[Trained]:
    """Train several cases one after the other on this rank."""
    return [train(case) for case in cases]


def part_of(values: torch.Tensor, box: Any) -> torch.Tensor:
    """Return a part of a tensor."""
    for dim, ranges in enumerate(box or ()):
        pairs = [ranges] if isinstance(ranges[0], int) else ranges
        index = torch.cat([torch.arange(first, end) for first, end in pairs])
        values = values.index_select(dim, index)
    return values


def check(found: Trained, expected: Trained, where: str, *, buffers: bool = True) -> None:
    """Compare a rank with one process: to 2e-6 of each tensor's norm, and 1e-7 of that of all.

    `buffers`: data-parallel ranks have running statistics of their own samples.
    """
    torch.testing.assert_close(found.losses, expected.losses[: len(found.losses)], rtol=1e-5, atol=1e-6, msg=where)
    torch.testing.assert_close(found.norms, expected.norms[: len(found.norms)], rtol=1e-5, atol=1e-6, msg=where)
    kinds = [("gradient", found.gradients, expected.gradients)]
    if len(found.losses) == len(expected.losses):
        kinds += [("value", found.values, expected.values)]
        kinds += [("buffer", found.buffers, expected.buffers)] if buffers else []
    for kind, mine, theirs in kinds:
        whole = math.sqrt(sum(float(t.double().square().sum()) for t in theirs.values()))
        for name, values in mine.items():
            wanted = (part_of(theirs[name], found.boxes.get(name)) if kind == "value" else theirs[name]).double()
            error, size = float((values.double() - wanted).norm()), float(wanted.norm())
            assert error <= 2e-6 * size + 1e-7 * whole, f"{where}: {kind} of {name}: error {error:.1e} of {size:.1e}"
