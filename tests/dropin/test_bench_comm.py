"""`ds_bench`: its options become a measurement, or are refused with the reason."""

from __future__ import annotations

import pytest

from shardwise.errors import CommandLineError, NotBuiltError
from shardwise.launch.commbench import OPS, CommWanted
from shardwise_deepspeed import communication
from shardwise_deepspeed.communication import bench_of, main


def test_options() -> None:
    one = bench_of([])
    assert (one.ops, one.sizes, one.share, one.trials, one.warmups) == (OPS, (4 << 24,), 0.3, 5, 1)
    assert one.unit == "Gbit/s" and not one.raw and one.dtypes == ("fp32",)
    wanted = bench_of(
        [
            *("--scan", "--all-reduce", "--pt2pt", "--maxsize", "12", "--dtype", "torch.bfloat16", "--trials", "9"),
            *("--warmups", "0", "--bw-unit", "GBps", "--raw", "--backend", "gloo", "--dist", "torch"),
        ]
    )
    assert set(wanted.ops) == {"all_reduce", "pt2pt"} and wanted.sizes == (1024, 8192) and wanted.share is None
    assert (wanted.dtypes, wanted.trials, wanted.warmups, wanted.unit, wanted.raw) == (("bf16",), 9, 0, "GB/s", True)
    assert bench_of(["--mem-factor", "0.1", "--local_rank", "0"]).share == 0.1


@pytest.mark.parametrize("option", ["--async-op", "--debug"])
def test_what_changes_nothing_says_so(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_of([option]) == bench_of([])
    assert capsys.readouterr().out.startswith(f"{option} changes nothing: ")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["--backend", "mpi"], NotBuiltError, "--backend mpi: only nccl and gloo"),
        (["--dtype", "torch.int32"], NotBuiltError, "--dtype torch.int32"),
        (["--dist", "mine"], CommandLineError, "--dist: invalid choice"),
        (["--bw-unit", "bps"], CommandLineError, "--bw-unit: invalid choice"),
        (["--maxsize", "64"], CommandLineError, "--maxsize 64"),
        (["--mem-factor", "2"], CommandLineError, "--mem-factor 2"),
        (["--all-together"], CommandLineError, "ds_bench --help"),
    ],
)
def test_what_is_refused(arguments: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bench_of(arguments)


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[CommWanted] = []

    def run(wanted: CommWanted) -> int:
        asked.append(wanted)
        return 1

    monkeypatch.setattr(communication, "measure", run)
    for arguments, code in ((["--broadcast"], 1), (["--maxsize", "x"], 2)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == code
    assert [one.ops for one in asked] == [("broadcast",)]
    assert capsys.readouterr().err.startswith("ds_bench: error: --maxsize x")
