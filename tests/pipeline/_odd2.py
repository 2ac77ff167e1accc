import torch, sys
from torch import nn
import torch.nn.functional as F
from shardwise.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from tests.harness import run_ranks
from tests.pipeline.training import *
from tests.pipeline.gradients import compare, gradients_of_all

KINDS = ("1f1b", "zb-h1", "zbv")
emb = None


def closure():
    e = nn.Embedding(WORDS, WIDTH)
    return [
        e,
        LayerSpec(Block, WIDTH),
        LayerSpec(Block, WIDTH),
        LayerSpec(Block, WIDTH),
        lambda x: F.linear(x, e.weight),
    ]


def seq_bn():
    from tests.pipeline.test_odd_models import Normed

    n = Normed()
    return [nn.Embedding(WORDS, WIDTH), n, Block(WIDTH), n, Logits()]


class Drop(nn.Module):
    def __init__(s):
        super().__init__()
        s.l = nn.Linear(WIDTH, WIDTH)
        s.d = nn.Dropout(0.5)

    def forward(s, x):
        return x + s.d(s.l(x))


def drop():
    return [LayerSpec(nn.Embedding, WORDS, WIDTH), *(LayerSpec(Drop) for _ in range(4)), LayerSpec(Logits)]


def go(made, checks=KINDS, **o):
    try:
        compare([Setting(2, s, 0, made=made, options={"partition_method": "uniform", **o}) for s in checks], 2)
        print(made.__name__, "OK")
    except BaseException as e:
        print(made.__name__, type(e).__name__, str(e)[:500])


def main():
    go(closure)
    go(seq_bn, ("1f1b",))
    # dropout: recompute vs none, each schedule
    for s in ("gpipe", "1f1b", "zb-h1", "zbv"):
        ss = [
            Setting(2, s, 0, made=drop, options={"partition_method": "uniform", "activation_checkpoint_interval": i})
            for i in (0, 1, 2)
        ]
        for r in run_ranks(seeded_all, 2, ss):
            print(s, [all(torch.equal(r[0][k], x[k]) for k in r[0]) for x in r])


def seeded_all(ss):
    out = []
    from tests.pipeline.gradients import gradients

    for s in ss:
        torch.manual_seed(5)
        import tests.pipeline.training as t

        e = None
        out.append(gradients(s))
    return out


if __name__ == "__main__":
    main()
