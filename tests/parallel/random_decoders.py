"""Small decoders drawn at random: norms, gates, masks, gains and weights used by hand, as models of others have them.

A decoder is a function of its seed. `Traits.drawn(seed)` says what it is made of, `Decoder(traits)` is the model:
`model(ids)` returns the loss.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

WORDS, TOKENS, ROWS, BLOCKS = 24, 8, 2, 2
IGNORED = -100


@dataclass(frozen=True)
class Traits:
    """What a decoder is made of.

    Attributes:
        seed: of its weights.
        heads: of queries.
        keys: heads of keys and values.
        width: of a head.
        names: how the layers of attention are called: queries, keys, values, outcome.
        fused: queries, keys and values are one layer, under the first name.
        places: `learnt`, `rotary` or `alibi`.
        mask: `causal`, `window` or `none`.
        norm: `before`, `behind` or `both` sides of attention and MLP.
        parallel: attention and MLP get the same input.
        norms: the class: `rms`, `layer` or `gamma` (whose parameter is not called weight).
        heads_norm: a norm of queries and keys.
        heads_norm_name: what it is called.
        values_norm: values have one, too.
        head_gain: a parameter or a layer with a number for each head.
        mixed: what happens to the outcome of attention before the last layer.
        bias: layers have biases.
        mlp: names of the layers of the MLP: gate (or none), up, down.
        activation: of the MLP.
        inner: what happens between its layers.
        by_hand: weights that are used without calling their layer.
        gain: on what attention and MLP add to the stream.
        tied: the head's weight is that of the embedding.
        cap: logits are capped.
    """

    seed: int
    heads: int = 4
    keys: int = 2
    width: int = 4
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    fused: bool = False
    places: str = "learnt"
    mask: str = "causal"
    norm: str = "before"
    parallel: bool = False
    norms: str = "rms"
    heads_norm: str = "none"
    heads_norm_name: tuple[str, str] = ("q_norm", "k_norm")
    values_norm: bool = False
    head_gain: str = "none"
    mixed: str = "none"
    bias: bool = False
    mlp: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    activation: str = "silu"
    inner: str = "none"
    by_hand: str = "none"
    gain: bool = False
    tied: bool = False
    cap: bool = False

    @classmethod
    def drawn(cls, seed: int) -> Traits:
        """Draw the traits of a seed: half of all decoders are plain but for one or two of them."""
        chance = random.Random(seed)
        every = {
            "heads": [2, 4, 4],
            "keys": [0, 0, 2],
            "width": [4, 6],
            "names": [
                ("q_proj", "k_proj", "v_proj", "o_proj"),
                ("wq", "wk", "wv", "wo"),
                ("query", "key", "value", "dense"),
                ("q", "k", "v", "o"),
            ],
            "places": ["learnt", "rotary", "alibi"],
            "mask": ["causal", "window", "none"],
            "norm": ["before", "behind", "both"],
            "parallel": [False, True],
            "norms": ["rms", "layer", "gamma"],
            "heads_norm": ["width", "by head", "all", "shared", "function"],
            "heads_norm_name": [("q_norm", "k_norm"), ("ln_q", "ln_k"), ("q_layernorm", "k_layernorm")],
            "values_norm": [True],
            "head_gain": ["vector", "broadcast", "gate", "sinks", "temperature", "buffer"],
            "mixed": ["norm", "function", "gain", "gate", "scalar"],
            "bias": [False, True],
            "mlp": [("gate_proj", "up_proj", "down_proj"), ("", "fc1", "fc2"), ("w1", "w3", "w2"), ("", "wi", "wo")],
            "activation": ["silu", "gelu", "relu", "slope", "slopes"],
            "inner": ["norm", "function", "softmax", "gain", "scalar", "mean"],
            "by_hand": ["down", "up", "outcome"],
            "gain": [True],
            "tied": [True],
            "cap": [True],
        }
        harmless = ("heads", "keys", "width", "names", "mask", "norm", "norms", "parallel", "bias", "mlp")
        drawn = {name: chance.choice(every[name]) for name in harmless}
        if not drawn["keys"]:
            drawn["keys"] = drawn["heads"]
        special = [name for name in every if name not in harmless]
        for name in chance.sample(special, chance.choice([0, 1, 1, 1, 2, 2, 3])):
            drawn[name] = chance.choice(every[name])
        if drawn["keys"] == drawn["heads"] and chance.random() < 0.2:
            drawn |= {"fused": True, "names": ("qkv_proj", "", "", "o_proj")}
        return cls(seed, **drawn)

    def __str__(self) -> str:
        plain = Traits(self.seed)
        said = [f.name for f in fields(self) if f.name != "seed" and getattr(self, f.name) != getattr(plain, f.name)]
        return f"seed {self.seed}: " + ", ".join(f"{name}={getattr(self, name)!r}" for name in said)


class RMSNorm(nn.Module):
    def __init__(self, *shape: int, name: str = "weight") -> None:
        super().__init__()
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * getattr(self, self.name)


class Slope(nn.Module):
    """An activation that learns: of all features one slope, or of each its own."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((features,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, x * self.alpha)


def norm_of(traits: Traits, *shape: int) -> nn.Module:
    if traits.norms == "layer" and len(shape) == 1:
        return nn.LayerNorm(shape[0])
    return RMSNorm(*shape, name="gamma" if traits.norms == "gamma" else "weight")


def plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)


class Attention(nn.Module):
    def __init__(self, traits: Traits) -> None:
        super().__init__()
        self.traits, self.head_dim = traits, traits.width
        self.num_heads, self.num_key_value_heads = traits.heads, traits.keys
        inner, keys, wide = traits.heads * traits.width, traits.keys * traits.width, traits.heads * traits.width
        q, k, v, o = traits.names
        if traits.fused:
            self.add_module(q, nn.Linear(wide, inner + 2 * keys, bias=traits.bias))
        else:
            for name, outputs in ((q, inner), (k, keys), (v, keys)):
                self.add_module(name, nn.Linear(wide, outputs, bias=traits.bias))
        self.add_module(o, nn.Linear(inner, wide, bias=traits.bias))
        first, second = traits.heads_norm_name
        if traits.heads_norm == "shared":
            self.qk_norm = norm_of(traits, traits.width)
        elif traits.heads_norm in ("width", "by head", "all"):
            shapes: dict[str, Any] = {
                "width": ((traits.width,), (traits.width,)),
                "by head": ((traits.heads, 1, traits.width), (traits.keys, 1, traits.width)),
                "all": ((inner,), (keys,)),
            }
            for name, shape in zip((first, second), shapes[traits.heads_norm], strict=True):
                self.add_module(name, norm_of(traits, *shape))
        if traits.values_norm:
            self.v_norm = norm_of(traits, traits.width)
        if traits.head_gain in ("vector", "broadcast", "sinks", "temperature"):
            shape = {"vector": (traits.heads,), "sinks": (traits.heads,), "temperature": (1,)}.get(traits.head_gain)
            self.per_head = nn.Parameter(torch.ones(shape or (traits.heads, 1, 1)))
        elif traits.head_gain == "gate":
            self.g_proj = nn.Linear(wide, traits.heads)
        elif traits.head_gain == "buffer":
            self.register_buffer("scales", torch.linspace(0.5, 1.5, traits.heads).view(-1, 1, 1))
        if traits.mixed == "norm":
            self.inner_norm = norm_of(traits, inner)
        elif traits.mixed in ("gain", "scalar"):
            self.mix = nn.Parameter(torch.ones(inner if traits.mixed == "gain" else 1))
        elif traits.mixed == "gate":
            self.gate = nn.Linear(wide, inner)
        if traits.places == "alibi":
            self.register_buffer("slopes", 2.0 ** -torch.arange(1, traits.heads + 1).float())

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        traits = self.traits
        q, k, v = self._projected(x)
        if traits.heads_norm == "shared":
            q, k = self.qk_norm(q), self.qk_norm(k)
        elif traits.heads_norm == "function":
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        elif traits.heads_norm in ("width", "by head"):
            q, k = (getattr(self, name)(one) for name, one in zip(traits.heads_norm_name, (q, k), strict=True))
        if traits.values_norm:
            v = self.v_norm(v)
        if traits.places == "rotary":
            q, k = turned(q, positions), turned(k, positions)
        y = plain_attention(q, k, v, self._mask(x, positions))
        if traits.head_gain in ("vector", "broadcast", "temperature"):
            y = y * self.per_head.view(-1, 1, 1)
        elif traits.head_gain == "sinks":
            y = y * torch.sigmoid(q.sum(-1, keepdim=True) - self.per_head.view(-1, 1, 1))
        elif traits.head_gain == "gate":
            y = y * torch.sigmoid(self.g_proj(x)).transpose(1, 2).unsqueeze(-1)
        elif traits.head_gain == "buffer":
            y = y * self.scales
        return self._outcome(self._mixed(y.transpose(1, 2).flatten(2), x))

    def _projected(self, x: torch.Tensor) -> list[torch.Tensor]:
        traits = self.traits
        if traits.fused:
            parts = getattr(self, traits.names[0])(x).chunk(3, -1)
        else:
            parts = tuple(getattr(self, name)(x) for name in traits.names[:3])
        if traits.heads_norm == "all":
            normed = (getattr(self, name)(one) for name, one in zip(traits.heads_norm_name, parts[:2], strict=True))
            parts = (*normed, parts[2])
        return [part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts]

    def _mask(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        traits = self.traits
        if traits.mask == "causal" and traits.places != "alibi":
            return None
        apart = (positions[:, :, None] - positions[:, None, :]).unsqueeze(1)
        seen = torch.ones_like(apart, dtype=torch.bool) if traits.mask == "none" else apart >= 0
        if traits.mask == "window":
            seen = seen & (apart < 4)
        mask = torch.zeros(apart.shape, dtype=x.dtype, device=x.device).masked_fill(~seen, float("-inf"))
        if traits.places == "alibi":
            mask = mask - apart.abs() * self.slopes.to(x.dtype).view(-1, 1, 1)
        return mask

    def _mixed(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mixed = self.traits.mixed
        if mixed == "norm":
            return self.inner_norm(y)
        if mixed == "function":
            return F.layer_norm(y, y.shape[-1:])
        if mixed in ("gain", "scalar"):
            return y * self.mix
        if mixed == "gate":
            return y * torch.sigmoid(self.gate(x))
        return y

    def _outcome(self, y: torch.Tensor) -> torch.Tensor:
        layer = getattr(self, self.traits.names[3])
        if self.traits.by_hand == "outcome":
            return F.linear(y, layer.weight, layer.bias)
        return layer(y)


class MLP(nn.Module):
    def __init__(self, traits: Traits) -> None:
        super().__init__()
        self.traits = traits
        wide = traits.heads * traits.width
        inner = 2 * wide
        gate, up, down = traits.mlp
        for name in filter(None, (gate, up)):
            self.add_module(name, nn.Linear(wide, inner, bias=traits.bias))
        self.add_module(down, nn.Linear(inner, wide, bias=traits.bias))
        if traits.activation in ("slope", "slopes"):
            self.act = Slope(1 if traits.activation == "slope" else inner)
        if traits.inner == "norm":
            self.middle = norm_of(traits, inner)
        elif traits.inner in ("gain", "scalar"):
            self.middle = nn.Parameter(torch.ones(inner if traits.inner == "gain" else ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        traits = self.traits
        gate, up, down = (getattr(self, name) if name else None for name in traits.mlp)
        activation = self.act if hasattr(self, "act") else getattr(F, traits.activation)
        wide = F.linear(x, up.weight, up.bias) if traits.by_hand == "up" else up(x)
        y = activation(wide) if gate is None else activation(gate(x)) * wide
        if traits.inner == "norm":
            y = self.middle(y)
        elif traits.inner in ("gain", "scalar"):
            y = y * self.middle
        elif traits.inner == "function":
            y = F.normalize(y, dim=-1)
        elif traits.inner == "softmax":
            y = y.softmax(-1)
        elif traits.inner == "mean":
            y = y - y.mean(-1, keepdim=True)
        return F.linear(y, down.weight, down.bias) if traits.by_hand == "down" else down(y)


class Block(nn.Module):
    def __init__(self, traits: Traits) -> None:
        super().__init__()
        self.traits = traits
        wide = traits.heads * traits.width
        self.attention, self.mlp = Attention(traits), MLP(traits)
        for kind in ("before", "behind"):
            if traits.norm in (kind, "both"):
                for part in ("attention", "mlp"):
                    self.add_module(f"norm_{kind}_{part}", norm_of(traits, wide))
        if traits.gain:
            self.gain1, self.gain2 = (nn.Parameter(torch.ones(wide)) for _ in range(2))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.traits.parallel:
            return x + self._added("attention", x, positions) + self._added("mlp", x)
        x = x + self._added("attention", x, positions)
        return x + self._added("mlp", x)

    def _added(self, part: str, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        before, behind = (getattr(self, f"norm_{kind}_{part}", nn.Identity()) for kind in ("before", "behind"))
        made = getattr(self, part)(before(x), *more)
        y = behind(made[0] if isinstance(made, tuple) else made)
        return y * (self.gain1 if part == "attention" else self.gain2) if self.traits.gain else y


class Decoder(nn.Module):
    """A language model of two blocks."""

    def __init__(self, traits: Traits) -> None:
        super().__init__()
        self.traits = traits
        wide = traits.heads * traits.width
        self.words = nn.Embedding(WORDS, wide)
        if traits.places == "learnt":
            self.places = nn.Embedding(4 * TOKENS, wide)
        self.blocks = nn.ModuleList(Block(traits) for _ in range(BLOCKS))
        self.norm = norm_of(traits, wide)
        self.lm_head = nn.Linear(wide, WORDS, bias=False)
        if traits.tied:
            self.lm_head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of the next tokens."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        labels = F.pad(ids[:, 1:], (0, 1), value=IGNORED)
        x = self.words(ids)
        if self.traits.places == "learnt":
            x = x + self.places(positions)
        for block in self.blocks:
            x = block(x, positions)
        logits = self.lm_head(self.norm(x))
        if self.traits.cap:
            logits = torch.tanh(logits / 4) * 4
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def turned(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None].to(x.dtype) * 0.5 ** torch.arange(half, dtype=x.dtype, device=x.device)
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def decoder(traits: Traits, dtype: torch.dtype = torch.float64) -> Decoder:
    """Build a decoder; no gain, norm or bias is at its usual first value, so that each of them counts."""
    torch.manual_seed(traits.seed)
    model = Decoder(traits).to(dtype)
    chance = torch.Generator().manual_seed(traits.seed)
    with torch.no_grad():
        for parameter in model.parameters():
            shift = torch.randn(parameter.shape, generator=chance, dtype=torch.float64).to(dtype)
            parameter.add_(0.3 * shift)
    return model


def ids_of(step: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (ROWS, TOKENS), generator=torch.Generator().manual_seed(50 + step))


def alone(traits: Traits) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and gradients of one process."""
    model = decoder(traits)
    loss = model(ids_of(0))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def differing(
    loss: float,
    grads: dict[str, torch.Tensor],
    expected: tuple[float, dict[str, torch.Tensor]],
    bound: float = 1e-5,
) -> list[str]:
    """Return what differs from one process: the loss, and gradients by name."""
    found = [] if abs(loss - expected[0]) <= bound * abs(expected[0]) else [f"loss {loss}, expected {expected[0]}"]
    most = max(float(grad.norm()) for grad in expected[1].values())
    for name, wanted in expected[1].items():
        off = float((grads[name].double() - wanted.double()).norm())
        if off > bound * float(wanted.norm()) + 1e-3 * bound * most:
            found.append(f"gradient of {name}: {off / max(float(wanted.norm()), 1e-30):.1e}")
    return found
