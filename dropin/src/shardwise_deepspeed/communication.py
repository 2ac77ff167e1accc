"""The command `ds_bench`: its options, passed to `shardwise bench comm`, refused, or reported as without effect."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from shardwise.errors import CommandLineError, NotBuiltError, ShardwiseError
from shardwise.launch.commands.bench import parse_count
from shardwise.launch.commbench import DTYPES, OPS, CommWanted, run, sizes_between

_FLAGS = {"pt2pt": "pt2pt", **{op.replace("_", "-"): op for op in OPS if op != "pt2pt"}}
_UNITS = {"Gbps": "Gbit/s", "GBps": "GB/s"}
_BACKENDS = ("nccl", "gloo")
_WITHOUT_EFFECT = {
    "async-op": "every collective is launched without blocking and then waited for, as training does",
    "debug": "the results of all collectives are checked, always",
}
_ITEM = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
_NAMES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float64": "fp64"}
_SMALLEST = 1 << 10
_MOST = 40


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandLineError(f"{message}. `{self.prog} --help` shows the options.")


def bench_of(arguments: list[str]) -> CommWanted:
    """Return the benchmark that a command line of `ds_bench` requests. Raises CommandLineError for an unknown option or
    a wrong value, NotBuiltError for an unsupported option.

    >>> wanted = bench_of(["--scan", "--all-reduce", "--maxsize", "16"])
    >>> wanted.ops, wanted.sizes
    (('all_reduce',), (1024, 16384, 262144))
    """
    parser = _Parser(prog="ds_bench", description="Measure collectives.", allow_abbrev=False)
    add = parser.add_argument
    add("--local_rank", type=int, help=argparse.SUPPRESS)
    add("--trials", default="5", metavar="N", help="trials that count")
    add("--warmups", default="1", metavar="N", help="trials before them")
    add("--maxsize", default="24", metavar="N", help="largest message: 2^N elements")
    add("--scan", action="store_true", help="messages of all sizes up to --maxsize; else one")
    add("--mem-factor", default="0.3", metavar="F", help="without --scan: share of the memory for the message")
    add("--dtype", default="torch.float32", metavar="NAME", help="number type")
    add("--bw-unit", default="Gbps", metavar="UNIT", help=" or ".join(_UNITS))
    add("--raw", action="store_true", help="print numbers without units")
    add("--backend", default=None, metavar="NAME", help="nccl where there are devices, else gloo")
    add("--dist", default="deepspeed", metavar="NAME", help="deepspeed or torch: both are measured")
    for flag in _FLAGS:
        add(f"--{flag}", action="store_true", help="measure it; without any such option: all")
    for option, why in _WITHOUT_EFFECT.items():
        add(f"--{option}", action="store_true", help=f"no effect: {why}")
    given = parser.parse_args(arguments)
    for option, why in _WITHOUT_EFFECT.items():
        if getattr(given, option.replace("-", "_")):
            print(f"--{option} changes nothing: {why}")
    if given.dist not in ("deepspeed", "torch"):
        raise CommandLineError(f"--dist {given.dist}: choose deepspeed or torch.")
    if given.backend is not None and given.backend not in _BACKENDS:
        raise NotBuiltError(f"--backend {given.backend}: only {' and '.join(_BACKENDS)} are used here.")
    if given.bw_unit not in _UNITS:
        raise CommandLineError(f"--bw-unit {given.bw_unit}: choose {' or '.join(_UNITS)}.")
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
    try:
        code = run(bench_of(sys.argv[1:] if args is None else args))
    except ShardwiseError as error:
        print(f"ds_bench: error: {error}", file=sys.stderr)
        code = 2 if isinstance(error, CommandLineError) else 1
    sys.exit(code)
