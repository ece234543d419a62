"""Speed up eager calls on a GPU: skip PyTorch's dispatcher, and skip all checks in repeated calls.

A call through the dispatcher costs the host some ten times as much as PyTorch's own attention, so that small shapes
wait for the host. Here each kind of call (shapes, strides, dtypes, device, options) is checked once, by `api.py`. Its
launches are then recorded (`direct_launch.py`), and later calls only allocate and launch. Kernels and arguments stay
the same.

Whatever could see or change the operator's call takes the way through the dispatcher: see `tra/ops/watchers.py`.

No GPU has run this yet, and every measurement and test that a GPU has made went through the dispatcher. Until one has
run it, it has to be asked for: `TRA_DIRECT_CALL=1` in the environment, or `TRA_DIRECT_LAUNCH=1` for both.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tra.ops import choice
from tra.ops.dropout import draw_seed
from tra.ops.inputs import without_autocast
from tra.ops.options import AttentionOptions
from tra.ops.triton import launch
from tra.ops.triton.availability import HAS_TRITON, why_unavailable
from tra.ops.triton.backward import empty_gradients, run_backward
from tra.ops.triton.decode import decode_attention
from tra.ops.triton.direct_launch import (
    ALIGNMENT,
    TRITON,
    Launcher,
    LaunchPlan,
    LaunchRecorder,
    can_launch_directly,
    current_device,
    round_up,
)
from tra.ops.triton.forward import run_forward
from tra.ops.triton.launch import ForwardState, out_strides, rows_contiguous
from tra.ops.watchers import nothing_watches

MAX_KINDS = 512
"""Most kinds of calls that are kept; then the oldest is dropped."""
MAX_BACKWARD_PLANS = 16
"""Most backward plans of one kind, since gradients may come in several layouts."""
PLAIN_TYPES = (Tensor, torch.nn.Parameter)
NUMBER_TYPES = (float, int, bool, str, type(None))
"""Of options that are remembered: a tensor's value might change, and an array has no hash."""
DECODE_KEYS_STEP = 16
"""Keys of a growing cache up to the next multiple of this are one kind: tiles have multiples of it."""
REQUESTS = ("TRA_DIRECT_CALL", "TRA_DIRECT_LAUNCH")
"""Variables of the environment, either of which asks for calls past the dispatcher."""


def asked_for(query: Tensor) -> bool:
    """Return whether calls with such queries may come here."""
    return query.is_cuda and any(os.environ.get(name) == "1" for name in REQUESTS)


takes: Callable[[Tensor], bool] = asked_for
"""Tests and benchmarks that change what launchers read replace it."""


class Kind(NamedTuple):
    """A kind of call, and the pointers of this call's tensors."""

    key: Hashable
    pointers: list[int]
    training: bool
    decodes: bool
    """Whether it is a call of decoding. Its key has lengths only roughly, which the forward kernel couldn't use."""


def describe(tensors: Sequence[Tensor]) -> tuple[list[Any], list[int]] | None:
    """Return four facts about each tensor, and their pointers; None unless all are plain, aligned tensors."""
    facts: list[Any] = []
    pointers = []
    try:
        for x in tensors:
            if type(x) not in PLAIN_TYPES:
                return None
            pointer = x.data_ptr()
            if pointer == 0 or pointer % ALIGNMENT or x.is_neg():  # 0: PyTorch's zero tensors have no memory
                return None
            pointers.append(pointer)
            facts += (x.shape, x.stride(), x.dtype, x.device)
    except RuntimeError:  # tensors without memory or strides
        return None
    return facts, pointers


def kind_of(
    query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, key_lengths: Tensor | None, *numbers: Any
) -> Kind | None:
    """Return the kind of a call of `threshold_relative_attention`; None if it has to take the way of all calls.

    The last of the numbers is `impl`.
    """
    tensors = (query, key, value, log_forget)
    if not (type(query) in PLAIN_TYPES and takes(query) and HAS_TRITON and nothing_watches()):
        return None
    if not all(type(number) in NUMBER_TYPES for number in numbers) or numbers[-1] not in ("auto", "triton"):
        return None
    if (described := describe(tensors if key_lengths is None else (*tensors, key_lengths))) is None:
        return None
    if os.environ.get("TRA_AUTOTUNE"):  # may be set at any time, and measures at the first call of a kind
        return None
    facts, pointers = described
    training = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    few = query.shape[2:3] <= (choice.MAX_DECODE_QUERIES,) and key.dim() == value.dim() == 4
    decodes = few and not training and key.shape[2] == value.shape[2]
    if decodes:
        n_keys = key.shape[2]
        steps = -(-n_keys // DECODE_KEYS_STEP) if n_keys >= DECODE_KEYS_STEP else -n_keys
        facts[4], facts[8] = (*key.shape[:2], steps, key.shape[3]), (*value.shape[:2], value.shape[3])
    return Kind((current_device(), training, decodes, numbers, *facts), pointers, training, decodes)


def _launcher(record: bool, tensors: Sequence[Tensor | None], numbers: tuple[str, ...] = ()) -> Launcher:
    """Return a launcher, which records if `record` is set and possible.

    It can't record if one tensor is given twice, since the next call of the kind may have two tensors there.
    """
    places = [id(x) for x in tensors if x is not None]
    return LaunchRecorder(tensors, numbers) if record and len(set(places)) == len(places) else TRITON


class ForwardCall:
    """Calls of one kind to the forward kernel, with or without gradients."""

    def __init__(self, query: Tensor, value: Tensor, options: AttentionOptions, training: bool) -> None:
        self.row_shape = tuple(query.shape[:3])
        self.out_layout = ((*self.row_shape, value.shape[3]), out_strides(query, value.shape[3]))
        self.dtype, self.device, self.training = query.dtype, query.device, training
        self.options = options
        keep_error = training and query.dtype != torch.float32
        self.error_numbers = math.prod(self.out_layout[0]) if keep_error else 0
        error_bytes = round_up(self.error_numbers * self.dtype.itemsize)
        row_bytes = round_up(4 * math.prod(self.row_shape))
        self.offsets = (0, error_bytes, error_bytes + row_bytes, error_bytes + 2 * row_bytes)
        self.kept_bytes = error_bytes + 3 * row_bytes
        self.plan: LaunchPlan | None = None
        self.may_record = True
        self.backward_plans: dict[Hashable, LaunchPlan | None] = {}

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, _: Tensor | None, pointers: list[int]
    ) -> Tensor:
        if self.training:
            result: Tensor = _Attention.apply(query, key, value, log_forget, self, pointers)
            return result
        return self.forward(query, key, value, log_forget, pointers)[0]

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, pointers: list[int]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the output, the rest of a `ForwardState` in one tensor, and the seed of dropout."""
        out = torch.empty_strided(*self.out_layout, dtype=self.dtype, device=self.device)
        kept = torch.empty(self.kept_bytes, dtype=torch.uint8, device=self.device)
        seed = draw_seed(self.device) if self.options.dropout > 0 else None
        direct = can_launch_directly()
        if self.plan is not None and direct:
            self.plan.launch(self.device, [*pointers, *self._pointers(seed, out, kept)])
            return out, kept, seed
        state = self.state(out, kept)
        launcher = _launcher(direct and self.may_record, (query, key, value, log_forget, seed, *state))
        with without_autocast(self.device):
            run_forward(state, query, key, value, log_forget, None, None, seed, self.options, launcher)
        if isinstance(launcher, LaunchRecorder):
            self.plan, self.may_record = launcher.plan(), False
        return out, kept, seed

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_forget: Tensor,
        out: Tensor,
        kept: Tensor,
        seed: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Return `Gradients`. A backward pass that is itself differentiated goes through the dispatcher."""
        early = self.options.tolerance > 0
        inputs = (query, key, value, log_forget)
        grad_out = rows_contiguous(grad_out)
        described = None
        if not torch.is_grad_enabled() and nothing_watches() and current_device() == (self.device.index or 0):
            described = describe((grad_out, *inputs, out, kept))
        if described is None:
            o = self.options
            numbers = (o.scale, o.threshold, o.margin, o.score_bound, o.dropout, early)
            with without_autocast(self.device):
                result: tuple[Tensor, ...] = torch.ops.tra.fused_backward(
                    grad_out, *inputs, None, None, seed, *self.state(out, kept), *numbers
                )
            return result
        facts, pointers = tuple(described[0]), described[1]
        grads = empty_gradients(*inputs)
        direct = can_launch_directly()
        if (plan := self.backward_plans.get(facts)) is not None and direct:
            plan.launch(
                self.device,
                [*pointers[:5], *self._pointers(seed, out, kept), *[x.data_ptr() for x in grads]],
            )
            return grads
        state = self.state(out, kept)
        record = direct and facts not in self.backward_plans
        launcher = _launcher(record, (grad_out, *inputs, seed, *state, *grads))
        with without_autocast(self.device):
            run_backward(grads, grad_out, *inputs, None, None, seed, state, self.options, early, launcher=launcher)
        if isinstance(launcher, LaunchRecorder):
            remember(self.backward_plans, facts, launcher.plan(), MAX_BACKWARD_PLANS)
        return grads

    def _pointers(self, seed: Tensor | None, out: Tensor, kept: Tensor) -> list[int]:
        start = kept.data_ptr()
        return [0 if seed is None else seed.data_ptr(), out.data_ptr(), *[start + offset for offset in self.offsets]]

    def state(self, out: Tensor, kept: Tensor) -> ForwardState:
        """Return the results of `forward` as views."""
        n_rows = math.prod(self.row_shape)

        def part(index: int, numbers: int, dtype: torch.dtype) -> Tensor:
            begin = self.offsets[index]
            return kept[begin : begin + numbers * dtype.itemsize].view(dtype)

        error = part(0, self.error_numbers, self.dtype)
        if self.error_numbers:
            error = error.as_strided(*self.out_layout)
        dtypes = (torch.float32, torch.float32, torch.int32)
        rows = (part(index + 1, n_rows, dtype).view(self.row_shape) for index, dtype in enumerate(dtypes))
        return ForwardState(out, error, *rows)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, call: ForwardCall, pointers: list[int]
    ) -> Tensor:
        out, kept, seed = call.forward(query, key, value, log_forget, pointers)
        ctx.save_for_backward(query, key, value, log_forget, out, kept, seed)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx, grad_out: Tensor):  # type: ignore[no-untyped-def]
        return *ctx.call.backward(grad_out, *ctx.saved_tensors), None, None


class DecodeCall:
    """Calls of one kind to the decode kernels. The number of keys may grow, see `DECODE_KEYS_STEP`."""

    def __init__(self, query: Tensor, value: Tensor, options: AttentionOptions) -> None:
        self.out_layout = ((*query.shape[:3], value.shape[3]), out_strides(query, value.shape[3]))
        self.dtype, self.device, self.options = query.dtype, query.device, options
        self.plan: LaunchPlan | None = None
        self.may_record = True

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_forget: Tensor,
        key_lengths: Tensor | None,
        pointers: list[int],
    ) -> Tensor:
        out = torch.empty_strided(*self.out_layout, dtype=self.dtype, device=self.device)
        n_keys = key.shape[2]
        first = last = None
        if key_lengths is not None:
            last = key_lengths[:, None].long()
            n_queries = query.shape[2]
            last = last - 1 if n_queries == 1 else last + torch.arange(-n_queries, 0, device=self.device)
            last = last.clamp_(max=n_keys - 1).to(torch.int32)
            first = torch.zeros_like(last)
        direct = can_launch_directly()
        if self.plan is not None and direct:
            ranges = [0, 0] if first is None or last is None else [first.data_ptr(), last.data_ptr()]
            self.plan.launch(self.device, [*pointers[:4], *ranges, out.data_ptr()], n_keys)
            return out
        tensors = (query, key, value, log_forget, first, last)
        launcher = _launcher(direct and self.may_record, (*tensors, out), ("n_keys",))
        with without_autocast(self.device):
            decode_attention(*tensors, None, self.options, out=out, launcher=launcher)
        if isinstance(launcher, LaunchRecorder):
            self.plan, self.may_record = launcher.plan(), False
        return out


EagerCall = ForwardCall | DecodeCall
SEEN: dict[Hashable, EagerCall] = {}
"""Kinds of calls that have passed all checks. The values hold no tensors."""
_lock = threading.Lock()


def learn(
    kind: Kind, query: Tensor, key: Tensor, value: Tensor, log_forget: Tensor, options: AttentionOptions
) -> EagerCall | None:
    """Return the object that takes calls of a kind, which was checked and chosen for the kernels, and keep it.

    None if such calls go through the dispatcher: on other devices than the current one, with a negative scale, or with
    `key_lengths` in the forward kernel.
    """
    width = max(query.shape[3], value.shape[3])
    on_current = (query.device.index or 0) == current_device()
    if why_unavailable(query.device, query.dtype, width) or not on_current:
        return None
    options = AttentionOptions(*(None if number is None else float(number) for number in astuple(options)))  # type: ignore[arg-type]
    if not options.scale > 0:
        return None
    decoding = choice.choose(choice.WITHIN_TRITON, choice.Call(query, key, value, log_forget, options)) == "decode"
    if decoding != kind.decodes or (not decoding and len(kind.pointers) > 4):
        return None
    call: EagerCall
    if decoding:
        call = DecodeCall(query, value, options)
    else:
        tolerance = options.tolerance if key.shape[2] > launch.MAX_FULL_WALK_KEYS else 0.0
        call = ForwardCall(query, value, replace(options, tolerance=tolerance), kind.training)
    remember(SEEN, kind.key, call, MAX_KINDS)
    return call


def remember(known: dict[Hashable, Any], key: Hashable, value: Any, most: int) -> None:
    """Set a key, and drop the oldest key if there are more than `most`."""
    with _lock:
        known[key] = value
        while len(known) > most:
            del known[next(iter(known))]
