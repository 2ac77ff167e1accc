"""Which files of tests `make test` runs a part of.

They try every case of a large product (models x stages x ranks x precisions ...), most of which would find the same
mistakes; all of them together take longer than a change should wait. One case in N is run, always the same, and at
least one of each function. `make exhaustive` runs all; so does naming a case on the command line.
"""

from __future__ import annotations

import zlib

ONE_IN = {
    "checkpoint/test_deepspeed.py": 5,
    "checkpoint/test_resume.py": 5,
    "comm/compression/test_methods.py": 2,
    "hf/test_families.py": 2,
    "memory/test_exhausted.py": 3,
    "memory/test_monotone.py": 5,
    "memory/test_report.py": 2,
    "optim/test_muon.py": 2,
    "optim/test_onebit.py": 5,
    "zero/test_compression.py": 3,
    "zero/test_costs.py": 5,
    "zero/test_cut_short.py": 3,
    "zero/test_gathered.py": 3,
    "zero/test_graphs.py": 3,
    "zero/test_init.py": 3,
    "zero/test_layerwise.py": 3,
    "zero/test_loops.py": 5,
    "zero/test_masters.py": 3,
    "zero/test_mixed_precision.py": 5,
    "zero/test_numerics.py": 5,
    "zero/test_optimizers.py": 5,
    "zero/test_sparse.py": 3,
    "zero/test_transports.py": 3,
    "zero/test_whole.py": 3,
    "zero/test_zeropp.py": 3,
}
"""File below `tests/` -> how many cases there are for each that is run."""


def is_sampled(file: str, case: str) -> bool:
    """Whether a case of a file is among those that are run; about one in N, spread evenly over all parameters."""
    return zlib.crc32(case.encode()) % ONE_IN.get(file, 1) == 0
