"""What the kernels in Triton are compiled to, without a device: registers, spills, widths of loads and stores.

    python bench/kernel_report.py [--arch 90]

Needs Triton, whose compiler and assembler need no GPU. For each variant: registers of a thread; bytes of local memory
(spills); how many loads and stores move 16, 8 or fewer bytes of a thread at once (kernels have a way without vectors,
for what lies at other addresses); fused multiply-adds and operations that flush small numbers to zero, of which there
should be none.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from _jobs import parser
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel

from shardwise.device import tritonkernels, tritonsteps

SHORT = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = [  # parameters, rounding, gradients, states, output
    "fp32 nearest fp32 fp32 bf16",
    "fp32 nearest bf16 fp32 bf16",
    "fp32 nearest fp32 fp32 -",
    "fp32 nearest fp32 bf16 bf16",
    "bf16 nearest bf16 fp32 -",
    "bf16 stochastic fp32 fp32 -",
    "bf16 stochastic bf16 bf16 -",
    "bf16 kahan fp32 fp32 -",
    "bf16 kahan bf16 bf16 -",
]
DECAYS = {"adam": ("value", "gradient"), "lion": ("value",), "adagrad": ("gradient",)}


def compiled(kernel: Any, arch: int, pointers: dict[str, str], integers: list[str], **given: Any) -> CompiledKernel:
    """Compile a kernel for aligned pointers and sizes; what is neither a pointer, an integer nor given is fp32."""
    kinds = {**pointers, **dict.fromkeys(integers, "i32"), **dict.fromkeys(given, "constexpr")}
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel,
        {name: kinds.get(name, "fp32") for name in kernel.arg_names},
        {(kernel.arg_names.index(name),): value for name, value in given.items()},
        {(place,): aligned for place, name in enumerate(kernel.arg_names) if name in (*pointers, "size")},
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"enable_fp_fusion": False})


def step(arch: int, algorithm: str, decay: str, precision: str) -> CompiledKernel:
    """Compile a variant of `shardwise.device.tritonsteps`."""
    parameter, rounding, gradient, state, output = precision.split()
    kinds = (tritonsteps._TYPES.get(SHORT.get(name)) for name in (gradient, parameter, state, output))
    random = {} if rounding == "stochastic" or state == "bf16" else {"keys": None}
    pointers = {"chunks": "*i32", "spans": "*i32", "rows": "*i64", "keys": "*i32", "factor": "*fp32"}
    return compiled(
        tritonsteps._step,
        arch,
        {name: kind for name, kind in pointers.items() if name not in random},
        ["stride"],
        ALGORITHM=algorithm,
        DECAY=decay,
        ROUNDING=rounding,
        **dict(zip(("GRADIENT", "PARAMETER", "STATE", "OUTPUT"), kinds, strict=True)),
        CHUNK=tritonsteps.CHUNK,
        **random,
    )


def described(kernel: CompiledKernel) -> str:
    """Return a line of figures."""
    text = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    widths = []
    for verb in ("ld", "st"):
        moved = re.findall(rf"\b{verb}\.global(?:\.v(\d))?\.b(\d+)", text)
        sizes = [int(count or 1) * int(bits) // 8 for count, bits in moved]
        widths.append(
            "/".join(str(sum(low <= size < high for size in sizes)) for low, high in ((16, 99), (8, 16), (1, 8)))
        )
    counted = f"fma {len(re.findall(r'fma[.]', text))} ftz {text.count('.ftz')}"
    held = f"{used['REG']:4d} registers {used['STACK'] + used['LOCAL']:3d} spilt"
    return f"{held}  loads {widths[0]:8s} stores {widths[1]:8s} {counted}"


def main() -> None:
    """Print a line for each variant."""
    options = parser(__doc__)
    options.add_argument("--arch", type=int, default=90, help="compute capability without the dot")
    arch = options.parse_args().arch
    for (algorithm, decays), precision in itertools.product(DECAYS.items(), STEPS):
        for decay in decays:
            kernel = step(arch, algorithm, decay, precision)
            print(f"step {algorithm:8s} {decay:9s}{precision:32s}{described(kernel)}", flush=True)
    for of, into, accumulate in itertools.product(("bf16", "fp16", "fp32"), ("fp32",), (False, True)):
        pointers = {"out": f"*{into}", "rows": f"*{of}"}
        kernel = compiled(
            tritonkernels._sum_rows,
            arch,
            pointers,
            ["size", "count"],
            ACCUMULATE=accumulate,
            BLOCK=tritonkernels._BLOCK,
        )
        print(f"sum  {of} into {into}{' accumulated' if accumulate else '':38s}{described(kernel)}", flush=True)


if __name__ == "__main__":
    main()
