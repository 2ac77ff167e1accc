"""nanoGPT's train.py, with its DDP replaced by deepspeed.initialize: groups by weight decay, its own learning rates.

deepspeed --no_local_rank --num_gpus 2 nanogpt.py --config=z3.json
"""

import inspect
import json
import math
import os
import sys

import deepspeed
import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

# -- settings, replaced by --name=value: this is how nanoGPT is configured, so that it refuses any other argument
config = ""
plain = False
dtype = "float32"
seed = 1337
batch_size, block_size, gradient_accumulation_steps = 4, 16, 4
n_layer, n_head, n_embd, vocab_size = 2, 2, 16, 64
learning_rate, min_lr, warmup_iters, lr_decay_iters, max_iters = 1e-2, 1e-3, 2, 6, 6
weight_decay, beta1, beta2, grad_clip = 1e-1, 0.9, 0.95, 1.0
eval_interval, eval_iters = 3, 2


def configure(arguments):
    for argument in arguments:
        name, _, value = argument.removeprefix("--").partition("=")
        if name not in globals():
            raise ValueError(f"Unknown config key: {name}")
        globals()[name] = value if isinstance(globals()[name], str) else type(globals()[name])(eval(value))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        rows, length, _ = x.shape
        parts = self.c_attn(self.ln_1(x)).split(n_embd, dim=2)
        q, k, v = (part.view(rows, length, n_head, n_embd // n_head).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(rows, length, n_embd))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1), ignore_index=-1)

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters and torch.cuda.is_available()
        return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), **({"fused": True} if fused else {}))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


def main(given=None):
    configure(sys.argv[1:] if given is None else given)
    deepspeed.init_distributed()
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    steps = gradient_accumulation_steps // world
    torch.manual_seed(seed + rank)
    data = np.tile(np.random.default_rng(0).integers(0, vocab_size, 64, dtype=np.uint16), 32)

    def get_batch():
        places = torch.randint(len(data) - block_size, (batch_size,))
        x, y = (
            torch.stack([torch.from_numpy(data[i + by : i + by + block_size].astype(np.int64)) for i in places])
            for by in (0, 1)
        )
        return x, y

    with torch.random.fork_rng():
        torch.manual_seed(0)
        raw_model = GPT()
    optimizer = raw_model.configure_optimizers()
    if plain:
        model = nn.parallel.DistributedDataParallel(raw_model)
    else:
        with open(config) as file:
            settings = json.load(file)
        settings |= {"train_micro_batch_size_per_gpu": batch_size, "gradient_accumulation_steps": steps}
        settings |= {"gradient_clipping": grad_clip, "zero_allow_untested_optimizer": True}
        model, optimizer, _, _ = deepspeed.initialize(model=raw_model, optimizer=optimizer, config=settings)
    ctx = torch.autocast("cpu", torch.bfloat16, enabled=plain and dtype == "bfloat16")

    @torch.no_grad()
    def estimate_loss():
        model.eval()
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            X, Y = get_batch()
            with ctx:
                _, loss = model(X, Y)
            losses[k] = loss.item()
        model.train()
        return losses.mean().item()

    told = {"losses": [], "evaluations": []}
    X, Y = get_batch()
    for iter_num in range(max_iters):
        for group in optimizer.param_groups:
            group["lr"] = get_lr(iter_num)
        if iter_num % eval_interval == 0:
            told["evaluations"].append(estimate_loss())
        for micro_step in range(steps):
            if plain:
                model.require_backward_grad_sync = micro_step == steps - 1
            with ctx:
                _, loss = model(X, Y)
            told["losses"].append(loss.item())
            X, Y = get_batch()
            if plain:
                (loss / steps).backward()
            else:
                model.backward(loss)
                model.step()
        if plain:
            nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return told


if __name__ == "__main__":
    found = main()
    if os.environ["RANK"] == "0":
        print("told", json.dumps(found))
