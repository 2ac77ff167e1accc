"""Pretrain a small GPT with ZeRO-3, from nothing, on text that comes with Python: the language reference.

    shardwise run --nproc 2 examples/pretrain_gpt.py --config examples/pretrain_gpt.json

Everything that concerns sharding is in the JSON file and in a few lines of `main`: `zero.Init`, `initialize`, and
`backward`, `step`, `resume` and `save_checkpoint` of the engine. The rest is an ordinary training script. It writes
text that the model makes before and after training, a loss curve, a table of where the memory went, and checkpoints.
Ctrl-C saves and stops; the same command then goes on, bit by bit as if it had never stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
from collections import Counter, defaultdict
from contextlib import nullcontext
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import shardwise
from shardwise.memory import track_activations

CONTEXT, VOCABULARY, WIDTH, HEADS, LAYERS = 128, 1024, 384, 6, 6  # 11.1 million parameters


# -- text --------------------------------------------------------------------------------------------------------------


class Pieces:
    """Byte-pair encoding: 256 bytes, and longer and longer pieces of words, the most frequent pair first."""

    def __init__(self, text: str, size: int) -> None:
        frequency = Counter(self.split(text))
        self.spelled = {word: [bytes([byte]) for byte in word.encode()] for word in frequency}
        self.pieces = [bytes([byte]) for byte in range(256)]
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        places: dict[tuple[bytes, bytes], set[str]] = defaultdict(set)

        def count(word: str, times: int) -> None:
            for pair in pairwise(self.spelled[word]):
                pairs[pair] += times
                places[pair].add(word)

        for word, times in frequency.items():
            count(word, times)
        self.merges: list[tuple[bytes, bytes]] = []
        for _ in range(size - 256):
            best = max(pairs, key=lambda pair: (pairs[pair], pair))  # ties too, so that all ranks merge alike
            self.merges.append(best)
            self.pieces.append(best[0] + best[1])
            for word in sorted(places.pop(best)):
                count(word, -frequency[word])
                self.spelled[word] = self.join(self.spelled[word], best)
                count(word, frequency[word])
        self.ids = {piece: index for index, piece in enumerate(self.pieces)}

    @staticmethod
    def split(text: str) -> list[str]:
        return re.findall(r" ?\w+| ?[^\w\s]+|\s+", text)

    @staticmethod
    def join(spelled: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
        joined: list[bytes] = []
        for piece in spelled:
            if joined and (joined[-1], piece) == pair:
                joined[-1] += piece
            else:
                joined.append(piece)
        return joined

    def spell(self, word: str) -> list[bytes]:
        if word not in self.spelled:
            self.spelled[word] = reduce(self.join, self.merges, [bytes([byte]) for byte in word.encode()])
        return self.spelled[word]

    def encode(self, text: str) -> list[int]:
        return [self.ids[piece] for word in self.split(text) for piece in self.spell(word)]

    def decode(self, ids: list[int]) -> str:
        return b"".join(self.pieces[index] for index in ids).decode(errors="replace")


def manual() -> tuple[str, str]:
    """Text for training and, from its end, text that is held out; no paragraph is in both, or twice in one."""
    from pydoc_data.topics import topics

    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    once = [re.sub(r"(.)\1{4,}", r"\1" * 4, paragraph) for paragraph in dict.fromkeys(paragraphs)]  # shorter rulers
    border = len(once) * 95 // 100
    return "\n\n".join(once[:border]), "\n\n".join(once[border:])


class Windows(torch.utils.data.Dataset[torch.Tensor]):
    """Overlapping pieces of CONTEXT + 1 tokens: each token but the first of a piece is a target."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.windows = tokens.unfold(0, CONTEXT + 1, CONTEXT // 2)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.windows[index]


# -- model -------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a multilayer perceptron, each behind a normalisation and around a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """Decoder whose head is its embedding. Given windows of CONTEXT + 1 tokens it returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * LAYERS) ** 0.5 if residual else 0.02)
        self.head.weight = self.tokens.weight

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()

    def forward(self, windows: torch.Tensor, targets: bool = True) -> torch.Tensor:
        if not targets:
            return self.logits(windows)
        return F.cross_entropy(self.logits(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


# -- what is looked at -------------------------------------------------------------------------------------------------


@torch.no_grad()
def write(engine: Any, pieces: Pieces, prompt: str, length: int) -> str:
    """Continue a prompt. All ranks draw the same tokens, and parameters are gathered once for all of them."""
    tokens = pieces.encode(prompt)
    generator = torch.Generator().manual_seed(1)
    with engine.gathered():
        for _ in range(length):
            logits = engine(torch.tensor([tokens[-CONTEXT:]]), targets=False)[0, -1] / 0.7
            likely = logits.topk(20)
            chosen = torch.multinomial(likely.values.softmax(-1), 1, generator=generator)
            tokens.append(int(likely.indices[chosen]))
    return pieces.decode(tokens)


@torch.no_grad()
def held_out_loss(engine: Any, windows: Windows) -> float:
    """Mean loss on text that is not trained on, divided among the ranks."""
    mine = torch.stack([windows[index] for index in range(engine.global_rank, len(windows), engine.world_size)])
    with engine.gathered():
        found = torch.stack([engine(part).double() * len(part) for part in mine.split(8)]).sum()
    total = torch.stack([found, torch.tensor(float(len(mine)), dtype=torch.float64)])
    dist.all_reduce(total)
    return float(total[0] / total[1])


def draw(losses: list[float], held_out: list[tuple[int, float]], path: Path) -> None:
    """Save the loss curve as a picture; without matplotlib there is none."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no loss curve: matplotlib is not installed (pip install matplotlib)")
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    smooth = [sum(losses[max(0, i - 9) : i + 1]) / len(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, label="training, each step")
    axes.plot(steps, smooth, color="tab:blue", label="training, mean of 10")
    axes.plot(*zip(*held_out, strict=True), "o", color="tab:red", label="held-out text")
    axes.set(xlabel="step", ylabel="loss (nats a token)", title="GPT, ZeRO-3, Python language reference")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


# -- training ----------------------------------------------------------------------------------------------------------


def finished(out: Path, steps: int) -> bool:
    """Whether a run with this output folder has come to its end."""
    latest = out / "latest"
    tag = latest.read_text().strip() if latest.is_file() else ""
    return (out / "sample.txt").is_file() and int(tag.removeprefix("global_step") or 0) >= steps


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".json"))
    parser.add_argument("--steps", type=int, help="stop after this many; default: the length of the schedule")
    parser.add_argument("--save-every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--sample", type=int, default=100, help="tokens of text to write at the end")
    parser.add_argument("--out", type=Path, default=Path("demo_out"))
    parser.add_argument("--local_rank", type=int, help="given by launchers; not needed")
    args = parser.parse_args()
    config = json.loads(args.config.read_text())
    config["checkpoint"]["on_signal"]["save_dir"] = str(args.out)
    steps = args.steps or config["scheduler"]["params"]["total_num_steps"]
    config["progress"] = {"mode": "auto", "total_steps": steps}
    main_rank = os.environ.get("RANK", "0") == "0"

    def say(text: str) -> None:
        if main_rank:
            print(text, flush=True)

    if finished(args.out, steps):
        say(f"all {steps} steps have been taken; results are in {args.out}. Remove it to begin anew (make demo-again)")
        return
    say(f"everything is written to {args.out.resolve()}; first the text is cut into tokens")
    text, rest = manual()
    pieces = Pieces(text, VOCABULARY)
    training, held_out = torch.tensor(pieces.encode(text)), Windows(torch.tensor(pieces.encode(rest)))

    torch.manual_seed(0)
    with shardwise.zero.Init(config_dict_or_path=config):
        model = GPT()
    engine, _, loader, _ = shardwise.initialize(model=model, training_data=Windows(training), config=config)
    state: dict[str, Any] = engine.resume(args.out) or {"losses": [], "held_out": []}
    engine.provide_client_state(lambda: state)  # saved when Ctrl-C comes
    losses, checks, prompt = state["losses"], state["held_out"], 'The "with" statement'
    if not checks:
        checks.append((0, held_out_loss(engine, held_out)))
        before = write(engine, pieces, prompt, min(40, args.sample))
        say(f"{len(training):,} tokens, {sum(p.numel() for p in model.parameters()):,} parameters")
        say(f"--- before training (held-out loss {checks[0][1]:.3f}) ---\n{before}\n")
    elif engine.global_steps:
        say(f"going on after step {engine.global_steps} of {steps}")

    batches = iter(shardwise.RepeatingLoader(loader))
    batch = next(batches) if engine.global_steps >= steps else None  # stopped after the last step
    engine.accountant.reset_peak()  # what was evaluated so far had the whole model gathered
    say(f"{steps - engine.global_steps} steps to go; Ctrl-C pauses")
    try:
        while engine.global_steps < steps:
            last = engine.global_steps == steps - 1
            with track_activations(engine.accountant) if last else nullcontext():
                batch = next(batches)
                loss = engine(batch)
                engine.backward(loss)
                mean = loss.detach().clone()
                dist.all_reduce(mean)
                losses.append(float(mean) / engine.world_size)
                engine.step()  # after Ctrl-C it saves and raises SystemExit
            if engine.global_steps % args.save_every == 0 and not last:
                engine.save_checkpoint(args.out, client_state=state)
    except SystemExit:
        say(
            f"paused after step {engine.global_steps} of {steps}, saved in {args.out}. The same command goes on from "
            "there; to begin anew remove that folder (make demo-again)"
        )
        raise

    report = engine.memory_report(batch)
    checks.append((engine.global_steps, held_out_loss(engine, held_out)))
    after = write(engine, pieces, prompt, args.sample)
    engine.save_checkpoint(args.out, client_state=state, asynchronous=False)
    if main_rank:
        print(f"--- after {engine.global_steps} steps (held-out loss {checks[-1][1]:.3f}) ---\n{after}\n")
        report.print()
        (args.out / "memory.json").write_text(json.dumps(report.as_dict(), indent=2))
        draw(losses, checks, args.out / "loss.png")
        (args.out / "sample.txt").write_text(after)
        first, last_ones = losses[0], losses[-10:]
        print(f"training loss {first:.3f} -> {sum(last_ones) / len(last_ones):.3f} (mean of the last {len(last_ones)})")
        print(f"held-out loss {checks[0][1]:.3f} -> {checks[-1][1]:.3f}")
        print(f"in {os.path.relpath(args.out)}: the checkpoint global_step{engine.global_steps}, ", end="")
        print(", ".join(sorted(p.name for p in args.out.iterdir() if p.suffix in (".png", ".txt", ".json"))))
    engine.destroy()


if __name__ == "__main__":
    main()
