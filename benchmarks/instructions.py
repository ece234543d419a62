"""Count what the compiler makes of the kernels on Hopper, without a GPU: `python -m benchmarks.instructions`.

Compiles them for sm_90a in bfloat16 and reads the SASS: registers, bytes spilt, shared memory, and the instructions of
every innermost loop that holds products. The log is `results/bench/instructions.txt`.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tra.ops.triton import backward_kernels, block_shapes, decode_kernels, decode_plan, forward_kernel

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
FLOAT32 = (
    "FORGET",
    "LONGEST_KEY",
    "REF",
    "TOTAL",
    "SLOPE_INNER",
    "OFFSETS",
    "NORM_FACTOR",
    "PIECE_SUMS",
    "PIECE_STATS",
)
TYPES = dict.fromkeys(FLOAT32, "fp32") | dict.fromkeys(
    ("STOP", "WALK_ENDS", "ROW_BLOCKS", "FIRST", "LAST", "TABLE"), "i32"
)
FLOATS = (
    "score_scale",
    "scale",
    "raw_threshold",
    "raw_lower_cut",
    "headroom",
    "threshold",
    "bound",
    "log_tolerance",
    "older_keys",
    "drop_scale",
)
ABSENT = ("FIRST", "LAST", "SEED", "MASK", "TABLE", "table_pages", "COUNTED", "COUNTED_RIGHT")
EQUAL_ONE = ("stride_f", "group")
MULTIPLES_OF_16 = ("n_queries", "n_rows", "chunk")


def compiled(kernel: Any, warps: int, stages: int, constants: dict[str, Any], registers: int = 0) -> Any:
    """Compile as for a layer in training: causal, one head per key head, lengths and so on multiples of 16."""
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(parameter.name for parameter in kernel.params):
        absent = () if constants.get("PAGE_BLOCKS") else ABSENT
        given = constants | dict.fromkeys(absent) | dict.fromkeys(EQUAL_ONE, 1) | {"MASK": None}
        if name in given:
            signature[name], fixed[(index,)] = "constexpr", given[name]
        elif name.isupper():
            signature[name], hints[(index,)] = "*" + TYPES.get(name, "bf16"), [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i64" if name == "drop_below" else "i32"
            if name in MULTIPLES_OF_16 or (name.startswith("stride") and name != "stride_s"):
                hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, hints)
    options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def output_of(tool: str, *arguments: str, content: bytes, suffix: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        result = subprocess.run([TOOLS / tool, *arguments, file.name], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def loops(sass: str) -> list[int]:
    """Return the number of instructions of each innermost loop with products, in order."""
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)
    places = {int(place, 16): index for index, (place, _) in enumerate(lines)}
    found: list[tuple[int, int]] = []
    for index, (place, text) in enumerate(lines):
        target = re.search(r"BRA.*0x([0-9a-f]+)", text)
        if target and int(target[1], 16) < int(place, 16):
            found.append((places[int(target[1], 16)], index))
    found = [(a, b) for a, b in found if any("HGMMA" in text for _, text in lines[a : b + 1])]
    inner = [(a, b) for a, b in found if not any((c, d) != (a, b) and a <= c and d <= b for c, d in found)]
    return [b - a + 1 for a, b in sorted(inner)]


def show(name: str, kernel: Any, warps: int, stages: int, constants: dict[str, Any], registers: int = 0) -> None:
    kernel_code = compiled(kernel, warps, stages, constants, registers)
    verbose = output_of(
        "ptxas", "-v", "--gpu-name=sm_90a", "-o", "/dev/null", content=kernel_code.asm["ptx"].encode(), suffix=".ptx"
    )
    registers, spilt = (re.search(what, verbose) for what in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    assert registers is not None
    assert spilt is not None
    counted = loops(output_of("cuobjdump", "-sass", content=kernel_code.asm["cubin"], suffix=".cubin"))
    shared = kernel_code.metadata.shared
    print(f"{name:44} {registers[1]:>9} {spilt[1]:>6} {shared:>8}   {', '.join(map(str, counted))}")


def main() -> None:
    print(f"Triton {triton.__version__}, bfloat16, sm_90a; loops: where rows end, then whole pairs")
    print(f"{'':44} registers  spilt   shared   instructions of loops")
    for margin, label in ((0, ""), (1, ", margin 2"), (2, ", margin ∞")):
        show_all(margin, label)


def show_all(margin: int, label: str) -> None:
    """Print a line for each kernel, compiled with this MARGIN."""
    for width in (64, 128):
        size = {"D": width, "DV": width, "BD": width, "BDV": width, "MARGIN": margin, "PRECISION": "ieee"}
        plain = {"RANGES": False, "ONLINE": False, "FLOAT32": False, "DROPOUT": False} | size
        (forward, *_) = block_shapes.FORWARD[2, width]
        block = {"BM": forward.rows, "BN": forward.keys, "STEEPEST": 120.0}
        more = {"NORMS": False, "EARLY": False, "KEEP_OUT_ERROR": False, "REF_SHIFT": 0.0, "PIECE": False}
        kernel = forward_kernel.forward_kernel
        show(f"forward, {width}{label}", kernel, forward.warps, forward.stages, plain | block | more, forward.registers)
        for walks, table in (("long", block_shapes.BACKWARD), ("short", block_shapes.BACKWARD_SHORT)):
            (backward, *_) = table[2, width]
            block = {
                "BM": backward.rows,
                "BN": backward.query_keys,
                "KEY_RATIO": backward.keys // backward.query_keys,
            }
            more = {"STEEPEST": 120.0, "BEFORE_NORM": True, "PIECE": False}
            show(
                f"dq, {walks} walks, {width}{label}", backward_kernels.query_gradient_kernel, backward.query_warps,
                backward.query_stages, plain | block | more, backward.query_registers,
            )  # fmt: skip
            block = {
                "BM": backward.key_rows,
                "BN": backward.keys,
                "ROW_RATIO": backward.rows // backward.key_rows,
            }
            more = {"EVEN": True, "SKIP": walks == "short", "ACCUMULATE": False, "BEFORE_NORM": True}
            more |= {"THREADS": 32 * backward.key_warps}
            kernel = backward_kernels.key_gradient_kernel
            name = f"dk dv, {walks} walks, {width}{label}"
            show(name, kernel, backward.key_warps, backward.key_stages, plain | block | more)
        (tile, *_) = decode_plan.TILES[2, width]
        block = {"BM": tile.rows, "BN": tile.keys, "PIECES_AT_ONCE": 16, "STRIDE_UNIT": 8, "n_queries": 1}
        more = {
            "RANGES": False,
            "MASKED": False,
            "EARLY": True,
            "LATER_PHASE": False,
            "ONE_PIECE": False,
            "FLOAT32": False,
        }
        for fixed, pages in ((True, 0), (False, 0), (True, 1)):
            name = f"decode, {'fixed' if fixed else 'running'} reference, {'pages, ' * pages}{width}{label}"
            more |= {"FIXED_REFERENCE": fixed, "PAGE_BLOCKS": pages, "RANGES": pages > 0}
            show(name, decode_kernels.decode_kernel, tile.warps, tile.stages, size | block | more)


if __name__ == "__main__":
    main()
