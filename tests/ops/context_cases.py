"""What is checked of `context_parallel_attention`, for ranks that are threads and for ranks that are processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.ops.compare import Inputs, assert_within_rule, causal, contents, exact_inputs, padding, rounding_floor, run
from tests.ops.compare import run_plain as run_plainly
from tra.ops import SequenceParts, context_parallel_attention
from tra.ops.context import schedule
from tra.ops.context.transport import Message, Transport

SEGMENT = 16
"""Keys of the smallest segment in these tests, whose sequences are short."""


class Counts(NamedTuple):
    """What a rank received in a pass."""

    exchanges: int
    bytes: int


class CountingTransport:
    """A transport that counts."""

    def __init__(self, transport: Transport) -> None:
        self.transport, self.rank, self.ranks = transport, transport.rank, transport.ranks
        self.restart()

    def restart(self) -> None:
        self.exchanges = self.bytes = 0

    @property
    def counts(self) -> Counts:
        return Counts(self.exchanges, self.bytes)

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> Callable[[], None]:
        self.exchanges += 1
        self.bytes += sum(x.tensor.numel() * x.tensor.element_size() for x in receives)
        return self.transport.exchange(sends, receives)

    def all_gather(self, tensor: Tensor) -> Callable[[], Tensor]:
        return self.transport.all_gather(tensor)


@dataclass(frozen=True)
class Case:
    """One call."""

    length: int
    seed: int = 0
    heads: int = 2
    kv_heads: int = 2
    value_width: int | None = None
    dtype: torch.dtype = torch.float32
    padded: str | None = None  # where padding stands
    content: str | None = None  # a kind of `compare.contents`
    gates: float | None = None  # log_forget of every other row, in place of those at initialisation
    flattest: float | None = None  # no log_forget is above it
    nan: str | None = None  # the tensor that has a NaN, a third from its end
    documents: tuple[tuple[int, ...], ...] = ()  # of each row, where further documents begin
    options: dict[str, Any] = field(default_factory=dict)

    def inputs(self) -> Inputs:
        found = exact_inputs(
            self.seed,
            batch=2 if self.content is None else 1,
            heads=self.heads,
            kv_heads=self.kv_heads,
            n_queries=self.length,
            value_width=self.value_width,
            dtype=self.dtype,
        )
        found = Inputs(*(x.detach() for x in found))
        if self.content is not None:
            query, key = contents(self.content, self.seed, self.length, heads=self.heads)
            found = found._replace(query=query.to(self.dtype), key=key[:, : self.kv_heads].to(self.dtype))
        if self.gates is not None:
            found.log_forget[:, :, ::2] = self.gates
        if self.flattest is not None:
            found.log_forget.clamp_(max=self.flattest)
        if self.nan is not None:
            getattr(found, self.nan)[0, 0, self.nan_at] = math.nan
        return Inputs(*(x.requires_grad_() for x in found))

    @property
    def nan_at(self) -> int:
        return self.length * 2 // 3

    def key_mask(self) -> Tensor | None:
        return None if self.padded is None else padding(self.padded, 2 if self.content is None else 1, self.length)

    def document_ids(self) -> Tensor:
        """`[B, T]`: 0, 1, 0, 1, ..., as an id may come again."""
        ids = torch.zeros(len(self.documents), self.length, dtype=torch.int64)
        for row, begins in zip(ids, self.documents, strict=True):
            for begin in begins:
                row[begin] = 1
        return ids.cumsum(1) % 2

    def seen(self) -> Tensor:
        """The keys that queries see, `[B or 1, 1, T, T]`."""
        seen, mask = causal(self.length, self.length), self.key_mask()
        if mask is not None:
            seen = seen & mask[:, None, None]
        if self.documents:
            number = self.document_ids().diff(dim=1, prepend=torch.zeros(2, 1, dtype=torch.int64)).abs().cumsum(1)
            seen = seen & (number[:, None, :, None] == number[:, None, None])
        return seen

    def grad_out(self, inputs: Inputs) -> Tensor:
        generator = torch.Generator().manual_seed(9)
        return torch.randn(*inputs.query.shape[:3], inputs.value.shape[3], generator=generator).to(self.dtype)


class Shared(NamedTuple):
    """What a rank has after a call: whole tensors, and its own counts."""

    tensors: list[Tensor]  # output and four gradients
    forward: Counts
    backward: Counts


def run_shared(case: Case, transport: Transport, impl: str = "blockwise") -> Shared:
    """Run a case on one rank."""
    schedule.SMALLEST_SEGMENT = SEGMENT
    inputs, mask = case.inputs(), case.key_mask()
    counting = CountingTransport(transport)
    parts = SequenceParts(case.length, counting)
    own = Inputs(*(parts.take(x.detach(), 2).requires_grad_() for x in inputs))
    own_mask = None if mask is None else parts.take(mask, 1)
    if case.documents:
        parts = parts.with_documents(parts.take(case.document_ids(), 1))
    out = context_parallel_attention(*own, parts, key_mask=own_mask, impl=impl, **case.options)
    forward = counting.counts
    counting.restart()
    grads = torch.autograd.grad(out, own, parts.take(case.grad_out(inputs), 2))
    return Shared([parts.join(x, 2) for x in (out, *grads)], forward, counting.counts)


STEEP, FLAT = -1e30, -1e-4
CASES = {
    "odd": Case(97),
    "prime, grouped, values of another width": Case(131, heads=6, kv_heads=2, value_width=24),
    "two tokens a rank": Case(9),
    "promise": Case(97, options={"scale": 0.125, "score_bound": 8.0}),
    "no tolerance": Case(97, options={"tolerance": 0.0}),
    "padding left": Case(101, padded="left"),
    "padding right, promise": Case(101, padded="right", options={"scale": 0.125, "score_bound": 8.0}),
    "padding in between, margin": Case(101, padded="middle", options={"margin": 2.0}),
    "margin": Case(97, heads=4, options={"margin": 2.0}),
    "margin and threshold": Case(97, options={"margin": 0.5, "threshold": 0.25, "score_bound": 16.0}),
    "infinite margin": Case(97, options={"margin": math.inf}),
    "null rows": Case(150, content="null rows"),
    "null rows, margin": Case(150, content="null rows", options={"margin": 2.0}),
    "sparse": Case(150, content="sparse"),
    "far and strong": Case(150, content="far and strong", options={"score_bound": 64.0}),
    "steep": Case(130, gates=STEEP),
    "steep, margin": Case(130, gates=STEEP, options={"margin": 1.0}),
    "flat": Case(130, gates=FLAT),
    "half": Case(97, dtype=torch.float16, options={"scale": 0.125, "score_bound": 8.0}),
    "brain float": Case(97, dtype=torch.bfloat16, padded="left"),
    "negative scale": Case(70, options={"scale": -0.25}),
    "documents": Case(97, documents=((5, 6, 40, 77), (16, 32, 50)), kv_heads=1),
    "documents, margin": Case(101, documents=((33, 90), ()), options={"margin": 2.0}),
    "documents, flat": Case(
        130, gates=FLAT, documents=((1, 64, 65), (129,)), options={"scale": 0.125, "score_bound": 8.0}
    ),
}
"""Compared by the usual rule."""

BOUNDED: dict[str, Any] = {"scale": 0.125, "score_bound": 8.0}
ENDINGS = {
    "early": Case(960, flattest=-3.0, kv_heads=1, options=BOUNDED),
    "by norms": Case(960, flattest=-3.0, kv_heads=1, options={"scale": 0.125}),
    "never": Case(960, flattest=-3.0, kv_heads=1, options=BOUNDED | {"tolerance": 0.0}),
    "flat": Case(960, gates=FLAT, kv_heads=1, options=BOUNDED),
    "documents": Case(960, gates=FLAT, kv_heads=1, options=BOUNDED, documents=(tuple(range(60, 960, 60)),) * 2),
    "loose": Case(960, flattest=-1.5, kv_heads=1, dtype=torch.float64, options=BOUNDED | {"tolerance": 1e-3}),
}
NANS = {name: Case(96, nan=name, options={"scale": 0.125}) for name in ("query", "key", "value", "log_forget")}
ALL = (
    {f"rule: {name}": case for name, case in CASES.items()}
    | {f"end: {name}": case for name, case in ENDINGS.items()}
    | {f"nan: {name}": case for name, case in NANS.items()}
)


def check_rule(case: Case, shared: Sequence[Shared]) -> None:
    """Check output and gradients against float64, and that all ranks have the same."""
    inputs, seen = case.inputs(), case.seen()
    plain = {name: case.options[name] for name in ("scale", "threshold", "margin") if name in case.options}
    options = {name: value for name, value in case.options.items() if name != "tolerance"}
    grad_out, exact = case.grad_out(inputs), inputs.to(torch.float64)
    assert_within_rule(
        tuple(shared[0].tensors),
        run_plainly(inputs, grad_out, seen, **plain),
        run_plainly(exact, grad_out, seen, **plain)
        if case.documents  # which the reference takes in another form
        else run(exact, grad_out, "reference", **options, key_mask=case.key_mask()),
        rounding_floor(inputs, grad_out),
    )
    for rank in shared:
        assert all(torch.equal(a, b) for a, b in zip(rank.tensors, shared[0].tensors, strict=True))
    check_passes_agree(shared)


def check_passes_agree(shared: Sequence[Shared]) -> None:
    """Check that backward sent the keys that forward sent, and their gradients back."""
    for rank in shared:
        assert rank.backward.exchanges == 2 * rank.forward.exchanges
    assert sum(rank.backward.bytes for rank in shared) == 2 * sum(rank.forward.bytes for rank in shared)


def check_nan(case: Case, shared: Sequence[Shared]) -> None:
    """Check that a NaN shows where the definition shows it, and in no other sequence or, but for values, row before.

    A zero weight times a NaN value is NaN in any row.
    """
    assert case.nan is not None
    inputs, out = case.inputs(), shared[0].tensors[0]
    expected = run(inputs, case.grad_out(inputs), "reference", **case.options)[0][:, :, case.nan_at :].isnan()
    assert bool(expected.any())
    assert not bool((expected & ~out[:, :, case.nan_at :].isnan()).any())
    assert case.nan == "value" or not bool(out[:, :, : case.nan_at].isnan().any())
    assert not bool(out[1].isnan().any())
