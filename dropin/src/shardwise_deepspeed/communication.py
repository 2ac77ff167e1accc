"""The command `ds_bench`: its options, passed to `shardwise bench comm`."""

from __future__ import annotations

from typing import NoReturn

from shardwise.errors import CommandLineError, NotBuiltError
from shardwise.launch.commands.bench import parse_count
from shardwise.launch.commbench import DTYPES, OPS, CommWanted, sizes_between
from shardwise.launch.commbench import run as measure
from shardwise_deepspeed.options import Parser, run

_FLAGS = {"pt2pt": "pt2pt", **{op.replace("_", "-"): op for op in OPS if op != "pt2pt"}}
_UNITS = {"Gbps": "Gbit/s", "GBps": "GB/s"}
_BACKENDS = ("nccl", "gloo")
_ITEM = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float64": "fp64"}
_SMALLEST = 1 << 10
_MOST = 40


def bench_of(arguments: list[str]) -> CommWanted:
    """Return the benchmark that a command line of `ds_bench` requests. Raises CommandLineError for an unknown option or
    a wrong value, NotBuiltError for an unsupported option.

    >>> wanted = bench_of(["--scan", "--all-reduce", "--maxsize", "16"])
    >>> wanted.ops, wanted.sizes
    (('all_reduce',), (1024, 16384, 262144))
    """
    parser = Parser("ds_bench")
    given = parser.given(arguments)
    if given.backend is not None and given.backend not in _BACKENDS:
        raise NotBuiltError(f"--backend {given.backend}: only {' and '.join(_BACKENDS)} are used here.")
    name = given.dtype.removeprefix("torch.").lower()
    dtype = _NAMES.get(name, name)
    if dtype not in DTYPES:
        raise NotBuiltError(f"--dtype {given.dtype}: choose among {', '.join(DTYPES)}.")
    largest = _largest(given.maxsize) * _ITEM[dtype]
    return CommWanted(
        ops=tuple(op for flag, op in _FLAGS.items() if getattr(given, flag.replace("-", "_"))) or OPS,
        dtypes=(dtype,),
        sizes=sizes_between(min(_SMALLEST, largest), largest) if given.scan else (largest,),
        share=None if given.scan else _share(given.mem_factor),
        trials=parse_count(given.trials, "--trials"),
        warmups=parse_count(given.warmups, "--warmups") if given.warmups != "0" else 0,
        unit=_UNITS[given.bw_unit],
        raw=given.raw,
    )


def _largest(text: str) -> int:
    power = parse_count(text, "--maxsize")
    if power > _MOST:
        raise CommandLineError(f"--maxsize {text}: a message has 2^N elements; give N up to {_MOST}.")
    return 1 << power


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise CommandLineError(f"--mem-factor {text}: give a number above 0, up to 1.")
    return share


def main(args: list[str] | None = None) -> NoReturn:
    """Run `ds_bench` and exit with its code; `args` default to those of this process."""
    run("ds_bench", lambda arguments: measure(bench_of(arguments)), args)
