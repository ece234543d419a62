"""Keys that decoding keeps and the forward kernel drops, or the reverse: there should be none. On a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks import command
from tra.ops.options import AttentionOptions
from tra.ops.triton import decode, decode_plan, forward  # noqa: F401 forward registers its operator


@torch.no_grad()
def mismatches(
    rows: int,
    *,
    warps: int | None = None,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    draws: int = 20,
    content: str = "random",
    heads: int = 8,
    length: int = 128,
    device: str = "cuda",
) -> int:
    """Count the keys, of `draws · heads · length²`, that decoding keeps and the forward kernel drops, or the reverse.

    Values are unit vectors, so an output is a row of weights, and 0 where a key is dropped. A query decodes alone, in
    blocks of `rows` rows.

    Args:
        content: Of queries and keys: "random"; "cancelling", whose products are 0 but for the order in which they are
            rounded; "exact", multiples of 1/4, on which no difference is possible.
    """
    generator = torch.Generator(device).manual_seed(rows)
    value = torch.eye(length, device=device, dtype=dtype).expand(1, heads, -1, -1)
    gates = torch.zeros(1, heads, length, device=device)
    first = torch.zeros(1, length, device=device, dtype=torch.int32)
    found = 0
    for _ in range(draws):
        query, key = (torch.randn(1, heads, length, width, device=device, generator=generator) for _ in range(2))
        if content == "exact":
            query, key = ((x * 4).round() / 4 for x in (query, key))
        if content == "cancelling":
            half, order = width // 2, torch.randperm(width, device=device, generator=generator)
            query[..., half:], key[..., half:] = -query[..., :half], key[..., :half]
            query, key = query[..., order], key[..., order]
        query, key = query.to(dtype), key.to(dtype)
        in_blocks = torch.ops.tra.fused_forward(
            query, key, value, gates, first, first + length - 1, None, 1e-3, 0.0, 0.0, None, 0.0, 0.0, False
        )[0]
        (tile, *_) = decode_plan.decode_tiles(width, length, query.element_size(), query.device)
        alone = decode.decode_attention(
            query[0].transpose(0, 1)[:, :, None], key.expand(length, -1, -1, -1), value.expand(length, -1, -1, -1),
            gates[0].T[..., None], None, None, None, AttentionOptions(scale=1e-3),
            tile=tile._replace(rows=rows, warps=warps or tile.warps),
        )  # fmt: skip
        found += int(((alone[:, :, 0].transpose(0, 1) > 0) != (in_blocks[0] > 0)).sum())
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = command.parser("decode_mismatches", __doc__).parse_args(arguments)
    device = command.require_gpu(command.pick_device(options.device))
    rows = [
        {"width": width, "content": content, "mismatches": mismatches(16, width=width, content=content)}
        for width in (64, 128)
        for content in ("random", "cancelling")
    ]
    command.show({"device": str(device), "rows": rows}, options.json)
    return 0


if __name__ == "__main__":
    command.run(main)
