"""`shardwise plan`: tables of models on ranks that are not there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwise.comm.setup import destroy
from shardwise.engine.plans import plan_model
from shardwise.pipe import LayerSpec, PipelineModule
from shardwise.plan.architectures import SHAPES, Decoder, Shape
from shardwise.plan.models import named_model
from tests.harness import thorough
from tests.launch.conftest import Call

Shown = Callable[..., str]


def own() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))


def test_published_sizes() -> None:
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in Decoder(shape).parameters()) for name, shape in SHAPES.items()}
    assert sizes["bloom-560m"] == 559_214_592
    assert sizes["bloom-1b1"] == 1_065_314_304
    assert sizes["bloom-7b1"] == 7_069_016_064
    assert sizes["llama-7b"] == 6_738_415_616
    assert sizes["llama-13b"] == 13_015_864_320
    assert sizes["llama-70b"] == 68_976_648_192


def documented(claim: str) -> list[str]:
    """Figures by stage in the row of a claim in docs/articles.md."""
    text = (Path(__file__).parents[2] / "docs" / "articles.md").read_text()
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {claim}"))
    return row.split("|")[3].removesuffix(" GB ").strip().split(" / ")


@pytest.mark.parametrize("stages", ["1", thorough("0,2,3")])
def test_the_documented_figures_of_a_published_case(shown: Shown, stages: str) -> None:
    lines = shown("plan", "bloom-560m", "--ranks", "8", "--stages", stages).splitlines()
    assert lines[0] == (
        "bloom-560m: 559,214,592 parameters, 8 ranks, fp32, micro-batch of 1 x 512 tokens, accumulation 1"
    )
    table = {row.split()[0]: row.split()[1:] for row in lines[2 : 3 + stages.count(",")]}
    assert list(table) == stages.split(",")
    shown = documented("BLOOM-560M, fp32, 8 ranks, 1 x 512: stages 0 / 1 / 2 / 3")
    assert len(shown) == 4
    for stage, row in table.items():
        gigabytes = [float(cell) * 1.073741824 for cell in row]
        assert gigabytes[-1] == pytest.approx(float(shown[int(stage)]), abs=0.06)
        assert gigabytes[4] == pytest.approx(3.08, abs=0.01)
        assert row[:3] == (["2.08", "2.08", "4.17"] if stage == "0" else [row[0], "0.26", "0.52"])


def test_bytes_of_a_model_of_ones_own(shown: Shown, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"train_batch_size": 64, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}))
    name = f"{__name__}:own"
    text = shown("plan", name, "--config", str(config), "--ranks", "4", "--stages", "0,2", "--length", "16", "--json")
    found = json.loads(text)[name]
    assert found["parameters"] == 64 * 32 + 32 * 64 + 64
    assert [plan["stage"] for plan in found["plans"]] == [0, 2]
    assert all(plan["peaks"]["activations"] > 0 and not plan["note"] for plan in found["plans"])
    assert found["plans"][0]["peaks"]["optimizer state"] == 0
    without = json.loads(shown("plan", name, "--length", "0", "--stages", "1", "--json"))[name]["plans"][0]
    assert "activations" not in without["peaks"] and without["total"]


OFFLOADED = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"},
        "offload_param": {"device": "cpu"},
    },
}


def test_state_elsewhere_and_what_it_costs(shown: Shown, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(OFFLOADED))
    given = [f"{__name__}:own", "--config", str(config), "--stages", "3", "--length", "0"]
    limits = ["--device-limit", "1MB", "--host-limit", "1MB", "--disk-limit", "100KB", "--local-ranks", "2"]
    plan = json.loads(shown("plan", *given, *limits, "--json"))[f"{__name__}:own"]["plans"][0]
    assert plan["fits"] is True and plan["elsewhere"]["disk"] > 0
    assert plan["moved"]["disk"]["read"] >= plan["elsewhere"]["disk"] * 0.9
    text = shown("plan", *given, *limits[:-1], "8", "--disk-speed", "2,0.5")
    assert "fits" in text.splitlines()[1] and text.splitlines()[2].endswith(" no")  # the disk is shared by more
    assert "KiB on host: a step reads " in text
    assert "KiB on disk: a step reads " in text and "at 2.00 GB/s and 500.00 MB/s" in text
    unknown = shown("plan", *given, "--device-limit", "1MB", "--host-limit", "1MB")
    assert unknown.splitlines()[2].endswith(" ?") and "--disk-limit" in unknown  # the column says why
    assert unknown.splitlines()[1].split()[-2] == "KiB"
    without = shown("plan", *given)
    assert "fits" not in without and "KiB on disk: a step reads " in without


def stages() -> nn.Module:
    layers = [LayerSpec(nn.Embedding, 64, 32), *(LayerSpec(nn.Linear, 32, 32) for _ in range(3))]
    return PipelineModule(layers, loss_fn=mean)


def mean(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return output.mean()


def test_positions_of_a_pipeline(shown: Shown, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    adam = {"type": "AdamW", "params": {"lr": 0.1}}
    pipeline = {"stages": 2, "schedule": "gpipe"}
    config.write_text(json.dumps({"train_batch_size": 4, "optimizer": adam, "pipeline": pipeline}))
    name = f"{__name__}:stages"
    given = [name, "--ranks", "4", "--micro-batches", "4", "--length", "8"]
    found = json.loads(shown("plan", *given, "--config", str(config), "--json"))[name]
    assert [(plan["stage"], plan["pipeline_rank"]) for plan in found["plans"]] == [(1, 0), (1, 1)]
    assert not any(plan["note"] for plan in found["plans"])
    assert found["schedule"]["name"] == "gpipe" and found["schedule"]["in_flight"] == [4, 4]
    lines = shown("plan", *given, "--pp", "2", "--schedule", "zb-h1", "--stages", "0,2", "--length", "0").splitlines()
    assert lines[1].split()[:3] == ["zero", "rank", "parameters"]
    assert [line.split()[:2] for line in lines[2:6]] == [["0", "0"], ["0", "1"], ["2", "0"], ["2", "1"]]
    assert lines[6] == "zb-h1, 4 micro-batches, simulated; idle: for stages of equal times"
    assert lines[8].split() == ["0", "0", "to", "1", "3,104", "2", "7.7%"]
    assert lines[10].split() == ["all", "5,216", "7.7%"]


def test_a_named_model_as_a_pipeline(shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of all positions are those of the whole, where copies of the embedding count once for each."""
    with torch.device("meta"):
        for name, copies in (("llama-7b", 1), ("bloom-560m", 2)):
            monkeypatch.setitem(SHAPES, name, Shape(2, 64, 4, 128, llama=name == "llama-7b"))
            whole = named_model(name, False, pipeline=True)
            assert [tuple(p.shape) for p in whole.parameters()] == [
                tuple(p.shape) for p in Decoder(SHAPES[name]).parameters()
            ]
            assert isinstance(whole, PipelineModule)
            text = shown("plan", name, "--pp", "2", "--length", "0", "--json")
            counts = json.loads(text)[name]["schedule"]["parameters"]
            tied = SHAPES[name].vocabulary * SHAPES[name].width
            assert sum(counts) == sum(p.numel() for p in whole.parameters()) + (copies - 1) * tied


def test_sizes_and_a_configuration(shown: Shown, call: Call, tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps({"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}))
    given = ("n=1,h=32,m=2", str(config), "--ranks", "2", "--stages", "1", "--length", "16")
    assert "micro-batch of 4 x 16 tokens, accumulation 1" in shown("plan", *given)
    assert "micro-batch of 2 x 16 tokens, accumulation 3" in shown(
        "plan", *given, "--micro-batch", "2", "--accumulation", "3"
    )
    text = shown("plan", "n=1,h=32,m=2,b=3,l=8", "--stages", "0,1", "--json")
    found = json.loads(text)["n=1,h=32,m=2,b=3,l=8"]
    assert found["parameters"] == 32 * (13 + 12 * 32) and found["plans"][0]["peaks"]["activations"]
    assert "flops" in shown("profile", "n=1,h=32,m=2", "--length", "8").lower()
    for more, message in (
        (("n=1,h=32,m=2,b=3", "--micro-batch", "2"), "n=1,h=32,m=2,b=3 and --micro-batch 2: give one of the two"),
        (("n=1,h=32,m=2,l=3", "--length", "2"), "n=1,h=32,m=2,l=3 and --length 2: give one of the two"),
        (("gpt2", "--length", "1025"), "--length 1025: gpt2 takes sequences of 1024 tokens at most"),
        (("n=1,h=32,m=2", str(config), "--config", str(config)), "give one configuration"),
        (("n=1,h=32,m=2", str(config), "--precision", "bf16"), "the configuration decides; leave the option out"),
        (("n=1,h=32,m=2", "--rank", "2"), "--rank: there is no such option; only a script"),
        (("n=1,h=32,m=2", str(tmp_path / "none.json")), "there is no file"),
        ((str(config),), "it is no configuration of a model of transformers"),
        (("nowhere.py",), "nowhere.py: there is no such script"),
        (("train.py", "--recompute"), "train.py decides by itself what it recomputes"),
    ):
        code, out, error = call("plan", *more)
        assert code and not out and message in error


SCRIPT = """
import argparse, torch, shardwise
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
parser.add_argument("--config")
parser.add_argument("--data", action="store_true")
options = parser.parse_args()
print("running")
shardwise.init_distributed()
model = torch.nn.Sequential(torch.nn.Embedding(64, options.width), torch.nn.Linear(options.width, 64))
config = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "bf16": {"enabled": True}}
data = torch.zeros(64, 16, dtype=torch.int64) if options.data else None
shardwise.initialize(model=model, config=options.config or config, training_data=data)
raise RuntimeError("the script went on")
"""


def test_a_script(shown: Shown, call: Call, tmp_path: Path) -> None:
    destroy()  # of another test's engine
    script, config = tmp_path / "train.py", tmp_path / "ds.json"
    script.write_text(SCRIPT)
    config.write_text(json.dumps({"train_batch_size": 16, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}))
    given = (str(script), "--width", "32", "--ranks", "4", "--stages", "0,3")
    code, out, error = call("plan", *given, "--data", "--json")
    found = json.loads(out)[str(script)]
    assert code == 0 and "running" in error and found["parameters"] == 64 * 32 + 32 * 64 + 64
    assert all(plan["peaks"]["activations"] for plan in found["plans"])
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64))
    adam = {"train_batch_size": 32, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "bf16": {"enabled": True}}
    ids = torch.zeros(8, 16, dtype=torch.int64)
    direct = plan_model(model, adam, ranks=4, stages=[0, 3], batch=ids).plans
    assert [plan["peaks"] for plan in found["plans"]] == [plan.peaks for plan in direct]
    assert f"{script}: 4,160 parameters, 4 ranks, bf16, micro-batch of 8 of training_data" in shown(
        "plan", *given, "--data"
    )
    assert "micro-batch of 4 x 512 token ids, because initialize has no training_data" in shown(
        "plan", *given, "--config", str(config)
    )
    assert "micro-batch of 4 x 512 token ids" in shown("plan", *given, "--", "--config", str(config))
    assert "micro-batch of 2 of training_data" in shown("plan", *given, "--data", "--micro-batch", "2")
    assert "no activations" in shown("plan", *given, "--data", "--length", "0")
    code, out, error = call("plan", *given, "--precision", "fp16")
    assert code == 2 and "--precision fp16: the configuration decides" in error
    script.write_text("print('nothing')")
    code, out, error = call("plan", *given)
    assert code == 1 and not out and "has ended before it called initialize()" in error


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        (("resumable.py", "--ranks", "2", "--stages", "1"), "parameters, 2 ranks, fp32, micro-batch of 8 of"),
        thorough(("pipeline.py", "--ranks", "2"), "1,627,392 parameters, 2 ranks, fp32, micro-batch of 4 of"),
        thorough(("pretrain_gpt.py", "--stages", "3"), "11,089,920 parameters, 8 ranks, bf16, micro-batch of 4 of"),
        thorough(("tensor_parallel.py", "--stages", "1"), "791,680 parameters, 8 ranks, fp32, micro-batch of 4 of"),
        thorough(("finetune_hf.py", "--stages", "2"), "826,368 parameters, 8 ranks, fp32, micro-batch of 4 of"),
        thorough(("offload.py", "--stages", "3"), "21,168,896 parameters, 8 ranks, bf16, micro-batch of 4 x 512"),
    ],
)
def test_examples(shown: Shown, example: tuple[str, ...], expected: str) -> None:
    destroy()
    name, *options = example
    text = shown("plan", str(Path(__file__).parents[2] / "examples" / name), *options)
    assert f"{name}: " in text and expected in text and "not planned" not in text
