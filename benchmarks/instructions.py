"""What the kernels become on Hopper, without a GPU: `python -m benchmarks.instructions`.

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

from tra.ops.triton import backward_kernels as _backward_kernels
from tra.ops.triton import block_shapes as _tiles
from tra.ops.triton import decode
from tra.ops.triton import decode_kernels as _decode_kernel
from tra.ops.triton import forward_kernel as _forward_kernel

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
FLOAT32 = ("FORGET", "LONGEST", "REF", "TOTAL", "PAIRS", "OFFSETS", "FACTOR", "PARTS", "STATS")
TYPES = dict.fromkeys(FLOAT32, "fp32") | dict.fromkeys(("STOP", "SPAN", "CAME"), "i32")
FLOATS = ("score_scale", "scale", "cut", "bound", "log_tolerance", "drop_scale")
ABSENT = ("FIRST", "LAST", "SEED", "MASK")
ONE = ("stride_f", "group")
ROUND = ("n_queries", "n_rows", "chunk")


def compiled(kernel: Any, warps: int, stages: int, constants: dict[str, Any], registers: int = 0) -> Any:
    """As a layer's training launches it: plainly causal, one head per key head, lengths and so on multiples of 16."""
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(parameter.name for parameter in kernel.params):
        given = constants | dict.fromkeys(ABSENT) | dict.fromkeys(ONE, 1)
        if name in given:
            signature[name], fixed[(index,)] = "constexpr", given[name]
        elif name.isupper():
            signature[name], hints[(index,)] = "*" + TYPES.get(name, "bf16"), [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in FLOATS else "i64" if name == "drop_below" else "i32"
            if name in ROUND or (name.startswith("stride") and name != "stride_s"):
                hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, fixed, hints)
    options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def said(tool: str, *arguments: str, content: bytes, suffix: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(content)
        file.flush()
        result = subprocess.run([TOOLS / tool, *arguments, file.name], capture_output=True, text=True, check=True)
    return result.stdout + result.stderr


def loops(sass: str) -> list[int]:
    """Instructions of innermost loops with products, in order."""
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
    made = compiled(kernel, warps, stages, constants, registers)
    verbose = said(
        "ptxas", "-v", "--gpu-name=sm_90a", "-o", "/dev/null", content=made.asm["ptx"].encode(), suffix=".ptx"
    )
    registers, spilt = (re.search(what, verbose) for what in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    assert registers is not None
    assert spilt is not None
    counted = loops(said("cuobjdump", "-sass", content=made.asm["cubin"], suffix=".cubin"))
    print(f"{name:34} {registers[1]:>9} {spilt[1]:>6} {made.metadata.shared:>8}   {', '.join(map(str, counted))}")


def main() -> None:
    print(f"Triton {triton.__version__}, bfloat16, sm_90a; loops: where rows end, then whole pairs")
    print(f"{'':34} registers  spilt   shared   instructions of loops")
    for width in (64, 128):
        size = {"D": width, "DV": width, "BD": width, "BDV": width, "PRECISION": "ieee"}
        plain = {"RANGES": False, "ONLINE": False, "EXACT": False, "DROPOUT": False} | size
        (forward, *_) = _tiles.FORWARD[2, width]
        block = {"BM": forward.rows, "BN": forward.keys, "STEEPEST": 120.0}
        more = {"NORMS": False, "EARLY": False, "KEEP_LOW": False, "SHIFT": 0.0}
        kernel = _forward_kernel.forward_kernel
        show(f"forward, {width}", kernel, forward.warps, forward.stages, plain | block | more, forward.registers)
        for walks, table in (("long", _tiles.BACKWARD), ("short", _tiles.BACKWARD_SHORT)):
            (backward, *_) = table[2, width]
            block = {"BM": backward.rows, "BN": backward.query_keys, "COARSER": backward.keys // backward.query_keys}
            more = {"STEEPEST": 120.0, "BEFORE": True}
            show(
                f"dq, {walks} walks, {width}", _backward_kernels.query_gradient_kernel, backward.query_warps,
                backward.query_stages, plain | block | more, backward.query_registers,
            )  # fmt: skip
            block = {"BM": backward.key_rows, "BN": backward.keys, "RATIO": backward.rows // backward.key_rows}
            more = {"EVEN": True, "SKIP": walks == "short", "ACCUMULATE": False, "BEFORE": True}
            more |= {"THREADS": 32 * backward.key_warps}
            kernel = _backward_kernels.key_gradient_kernel
            name = f"dk dv, {walks} walks, {width}"
            show(name, kernel, backward.key_warps, backward.key_stages, plain | block | more)
        (tile, *_) = decode.TILES[2, width]
        block = {"BM": tile.rows, "BN": tile.keys, "CHUNK": 16, "UNIT": 8, "n_queries": 1}
        more = {"RANGES": False, "MASKED": False, "EARLY": True, "LATER": False, "ALONE": False, "EXACT": False}
        for fixed in (True, False):
            name = f"decode, {'fixed' if fixed else 'running'} reference, {width}"
            show(name, _decode_kernel.decode_kernel, tile.warps, tile.stages, size | block | more | {"FIXED": fixed})


if __name__ == "__main__":
    main()
