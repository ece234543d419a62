"""Calls of a kind seen before: the same bits, and everything that could see the difference sees none.

On a CPU the recorded launches run in Triton's interpreter; with a GPU the same tests make them there.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tra
from tests.ops.compare import exact_inputs
from tests.ops.test_fused import DEVICE, ON_GPU
from tests.slow import slow
from tra.ops import api, watchers
from tra.ops import inputs as operator_inputs
from tra.ops.triton import backward, decode_plan, direct_launch, eager, launch

pytestmark = pytest.mark.filterwarnings(  # of the interpreter
    "ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"
)


class InterpretedLaunch:
    """Stands for a compiled kernel: runs it in the interpreter, given pointers as a GPU's driver is."""

    function, packed_metadata = 0, ()

    def __init__(self, kernel: Any, arguments: Any, constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self.constants = {name: constants[name] for name in constants if name not in kernel.arg_names}
        self.dtypes = [x.dtype if isinstance(x, Tensor) else None for x in arguments]
        self.bytes = [x.untyped_storage().nbytes() - x.storage_offset() * x.itemsize if d else 0
                      for x, d in zip(arguments, self.dtypes, strict=True)]  # fmt: skip

    def run(self, x: int, y: int, z: int, _stream: int, _function: int, _metadata: Any, *rest: Any) -> None:
        import ctypes

        assert rest[:3] == (None, None, None)
        arguments = list(rest[3:])
        for place, (dtype, size) in enumerate(zip(self.dtypes, self.bytes, strict=True)):
            if dtype is not None:
                memory = (ctypes.c_uint8 * max(size, 16)).from_address(arguments[place] or id(self))
                arguments[place] = torch.frombuffer(memory, dtype=torch.uint8, count=max(size, 16)).view(dtype)
        self.kernel[(x, y, z)](*arguments, **self.constants)


@pytest.fixture(autouse=True)
def remembered(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Let calls be remembered, on a CPU too. Yield how many launches each direct call made."""
    eager.SEEN.clear()
    monkeypatch.setattr(eager, "takes", lambda x: x.device.type == DEVICE)
    monkeypatch.setattr(launch, "MAX_FULL_WALK_KEYS", 0)
    if not ON_GPU:
        driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
        monkeypatch.setattr(direct_launch, "_driver", lambda: SimpleNamespace(active=driver))
        monkeypatch.setattr(eager, "can_launch_directly", lambda: True)

        def interpret(kernel: Any, grid: Any, arguments: Any, constants: dict[str, Any]) -> InterpretedLaunch:
            kernel[grid](*arguments, **constants)
            return InterpretedLaunch(kernel, arguments, constants)

        monkeypatch.setattr(direct_launch, "launch_by_triton", interpret)
    launches: list[int] = []
    original = direct_launch.LaunchPlan.launch

    def counted(plan: Any, *arguments: Any) -> None:
        launches.append(len(plan.launches))
        original(plan, *arguments)

    monkeypatch.setattr(direct_launch.LaunchPlan, "launch", counted)
    yield launches
    eager.SEEN.clear()


def attend(*inputs: Tensor, **options: Any) -> Tensor:
    return tra.threshold_relative_attention(*inputs, impl="triton", **options)


def by_dispatcher(call: Callable[[], Any]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager, "takes", lambda _: False)
        return call()


def results(inputs: tuple[Tensor, ...], grad_out: Tensor | None, **options: Any) -> list[Tensor]:
    if options.get("dropout"):
        torch.manual_seed(5)
    out = attend(*inputs, **options)
    return [out.detach()] if grad_out is None else [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]


CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"heads": 2}, "tokens first", {"scale": 1, "tolerance": 0}),  # integers are taken as floats
    (
        {"heads": 4, "kv_heads": 2, "n_queries": 33, "n_keys": 80, "value_width": 40},
        "heads first",
        {"score_bound": 8.0},
    ),
    *[
        (sizes, layout, options)
        for sizes in ({"heads": 2}, {"heads": 2, "n_queries": 70, "width": 24, "dtype": torch.float32})
        for layout in ("heads first", "tokens first")
        for options in ({"score_bound": None, "scale": 0.5}, {"margin": 1.0, "tolerance": 0.0}, {"dropout": 0.25})
    ],
]


def inputs_for(sizes: dict[str, Any], layout: str, seed: int = 0) -> tuple[Tensor, ...]:
    """Return leaves on the device; with tokens first, heads of a token lie beside each other in memory."""
    inputs = exact_inputs(seed, **({"batch": 1, "heads": 1, "n_queries": 20, "dtype": torch.float16} | sizes))
    dtype = sizes.get("dtype", torch.float16)
    found = [x.detach().to(DEVICE, dtype) for x in inputs[:3]]
    if layout == "tokens first":
        found = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in found]
    return tuple(x.requires_grad_() for x in (*found, inputs[3].detach().to(DEVICE)))


@pytest.mark.parametrize(("sizes", "layout", "options"), [CASES[0], *slow(*CASES[1:])])
@pytest.mark.parametrize("training", [True, False])
def test_the_same_bits(
    sizes: dict[str, Any], layout: str, options: dict[str, Any], training: bool, remembered: list[int]
) -> None:
    """Output and gradients: by the dispatcher, when first seen, and when seen before, from other places in memory."""
    inputs = inputs_for(sizes, layout)
    grad_out = torch.randn(*inputs[0].shape[:3], inputs[2].shape[3]).to(inputs[0])

    def call() -> list[Tensor]:
        others = [x.detach().clone().requires_grad_(training) for x in inputs]
        return results(tuple(others), grad_out if training else None, **options)

    expected = by_dispatcher(call)
    # without a bound the norms of the keys are computed first
    planned = options.get("score_bound") is not None or options.get("tolerance") == 0.0
    for seen in (False, True):
        remembered.clear()
        for got, wanted in zip(call(), expected, strict=True):
            assert torch.equal(got, wanted)
            assert got.stride() == wanted.stride()
        assert remembered == ([1] * planned + [2] * training if seen else [])


@pytest.mark.parametrize("kind", ["growing", *slow("static", "grouped")])
def test_the_same_bits_in_decoding(kind: str, remembered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "PIECE_KEYS": 32,
        "MAX_FIRST_PIECES": 2,
        "MAX_SHORT_KEYS": 0,
        "MAX_ONE_PIECE_KEYS": 0,
        "LATER_PIECE_KEYS": 64,
    }
    for name, size in sizes.items():
        monkeypatch.setattr(decode_plan, name, size)
    monkeypatch.setattr(decode_plan, "processor_count", lambda _: 4)
    heads = {"heads": 4, "kv_heads": 2} if kind == "grouped" else {}
    query, key, value, gate = (x.detach() for x in inputs_for({"n_queries": 1, "n_keys": 320, **heads}, "tokens first"))
    launched = []
    for step in (0, 1, 2) if kind == "static" else (0, 1, 2, 3, 4):
        n_keys = 320 if kind == "static" else 190 + step
        lengths = torch.tensor([n_keys - step], device=DEVICE) if kind == "static" else None
        inputs = (query, key[:, :, :n_keys], value[:, :, :n_keys], gate)

        def call(inputs: Any = inputs, lengths: Any = lengths) -> Tensor:
            return attend(*inputs, key_lengths=lengths, score_bound=8.0)

        expected = by_dispatcher(call)
        remembered.clear()
        assert torch.equal(call(), expected)
        launched.append(sum(remembered))
    assert launched.count(0) == (1 if kind == "static" else 2)  # of 190..194 keys, two steps of 16
    assert max(launched) >= 3  # phases and their merge


def test_few_queries_with_lengths(remembered: list[int]) -> None:
    query, key, value, gate = (x.detach() for x in inputs_for({"n_queries": 3, "n_keys": 40}, "heads first"))
    lengths = torch.tensor([17], dtype=torch.int32, device=DEVICE)
    for _ in range(2):
        got = attend(query, key, value, gate, key_lengths=lengths)
        assert torch.equal(got, by_dispatcher(lambda: attend(query, key, value, gate, key_lengths=lengths)))
    assert len(remembered) == 1


def test_errors_are_the_same_after_good_calls() -> None:
    """A kind that was seen says nothing about others."""
    query, key, value, gate = (x.detach() for x in inputs_for({"n_queries": 3, "n_keys": 40}, "heads first"))
    attend(query, key, value, gate)
    for bad, message in (
        ((query, key, value[:, :, :39], gate), "value must match key"),
        ((query, key[:, :, :2], value[:, :, :2], gate), "more queries than keys"),
        ((query, key.float(), value, gate), "key must have query's dtype"),
        ((query, key[0], value, gate), "key must be"),
        ((query, key, value, gate.half()), "log_forget must be"),
        ((query.tolist(), key, value, gate), "query must be a tensor"),
    ):
        with pytest.raises(ValueError, match=message):
            attend(*bad)
    with pytest.raises(ValueError, match="tolerance must lie in"):
        attend(query, key, value, gate, tolerance=2.0)
    with pytest.raises(ValueError, match="unknown impl"):
        tra.threshold_relative_attention(query, key, value, gate, impl="fast")


@pytest.mark.parametrize("n_queries", [20, 1])
def test_one_tensor_in_several_places(n_queries: int, remembered: list[int]) -> None:
    """The next call of the kind has a tensor in each place."""
    inputs = inputs_for({"n_queries": n_queries, "n_keys": n_queries}, "heads first")
    one = (inputs[0], inputs[0], inputs[0], inputs[3])
    if n_queries == 1:
        one, inputs = (tuple(x.detach() for x in some) for some in (one, inputs))
        one = (one[0], one[0], one[0], one[3])

    def call(tensors: tuple[Tensor, ...]) -> list[Tensor]:
        out = attend(*tensors, score_bound=8.0)
        if n_queries == 1:
            return [out]
        return [out.detach(), *torch.autograd.grad(out, tensors, inputs[2].detach())]

    for tensors in (one, inputs, inputs, one):
        expected = by_dispatcher(lambda tensors=tensors: call(tensors))
        assert all(torch.equal(a, b) for a, b in zip(call(tensors), expected, strict=True))
    assert remembered


def test_it_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU has run it. Without a request every call goes through the dispatcher."""
    for name in eager.REQUESTS:
        monkeypatch.delenv(name, raising=False)
    on_gpu, on_cpu = (SimpleNamespace(is_cuda=is_cuda) for is_cuda in (True, False))
    assert not eager.asked_for(on_gpu)
    for name in eager.REQUESTS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert eager.asked_for(on_gpu)
            assert not eager.asked_for(on_cpu)
            patch.setenv(name, "0")
            assert not eager.asked_for(on_gpu)


@pytest.mark.parametrize("impl", ["reference", "blockwise"])
def test_other_implementations_ask_triton_for_nothing(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_launch, "_driver", lambda: pytest.fail("a driver was asked for"))
    inputs = [x.detach() for x in inputs_for({}, "heads first")]
    tra.threshold_relative_attention(*inputs, impl=impl)


def test_arrays_as_options() -> None:
    """They have no hash."""
    inputs = [x.detach() for x in inputs_for({}, "heads first")]
    for _ in range(2):
        assert torch.equal(attend(*inputs, scale=np.array(0.5)), attend(*inputs, scale=0.5))
    assert len(eager.SEEN) == 1


def test_tensors_as_options_are_not_remembered() -> None:
    """Their values may change."""
    inputs = [x.detach() for x in inputs_for({}, "heads first")]
    scale = torch.tensor(0.5)
    before = attend(*inputs, scale=scale)
    scale.fill_(0.25)
    assert not torch.equal(attend(*inputs, scale=scale), before)


def shifted(x: Tensor) -> Tensor:
    """Return a copy whose memory begins at an odd number."""
    room = x.new_empty(x.numel() + 1)
    return room[1:].view(x.shape).copy_(x)


def test_pointers_that_are_not_aligned(remembered: list[int]) -> None:
    inputs = tuple(x.detach() for x in inputs_for({}, "heads first"))
    expected = attend(*inputs, score_bound=8.0)
    for place in range(4):
        odd = tuple(shifted(x) if i == place else x for i, x in enumerate(inputs))
        assert torch.equal(attend(*odd, score_bound=8.0), expected)
    assert not remembered
    assert torch.equal(attend(*inputs, score_bound=8.0), expected)
    assert remembered


def test_a_negated_view() -> None:
    """Its memory holds the numbers with the other sign."""
    query, key, value, gate = (x.detach() for x in inputs_for({"dtype": torch.float32}, "heads first"))
    negated = torch.stack([torch.zeros_like(value), -value], -1)
    view = torch.view_as_complex(negated).conj().imag
    assert view.is_neg()
    strided = torch.stack([torch.zeros_like(value), value], -1)[..., 1]
    for _ in range(2):
        assert torch.equal(attend(query, key, view, gate), attend(query, key, strided, gate))
    leaves = [x.requires_grad_() for x in (query, key, value, gate)]
    out = attend(*leaves, score_bound=8.0)
    plain = torch.autograd.grad(out, leaves, strided, retain_graph=True)
    got = torch.autograd.grad(out, leaves, view)
    assert all(torch.equal(a, b) for a, b in zip(got, plain, strict=True))


class CountOperators(TorchDispatchMode):
    """Notes the names of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "tra":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


class Passing(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Subclass(Tensor):
    """A tensor of another class, which `__torch_function__` follows."""


def seen_inputs() -> tuple[Tensor, ...]:
    """Return inputs of a kind that was seen, forward and backward."""
    inputs = inputs_for({}, "heads first")
    attend(*inputs, score_bound=8.0).sum().backward()
    attend(*[x.detach() for x in inputs], score_bound=8.0)
    for x in inputs:
        x.grad = None
    return inputs


@pytest.fixture
def through_api(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the calls that take the way through the dispatcher."""
    calls: list[int] = []
    original = api.triton_attention

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return original(*arguments)

    monkeypatch.setattr(api, "triton_attention", counted)
    return calls


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dispatch mode": CountOperators,
    "function mode": Passing,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "saved tensor hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_whoever_watches_sees_the_operator(context: str, remembered: list[int], through_api: list[int]) -> None:
    inputs = seen_inputs()
    through_api.clear()
    remembered.clear()
    with CONTEXTS[context]() as watching:
        out = attend(*inputs, score_bound=8.0)
    assert through_api
    assert not remembered
    if context == "dispatch mode":
        assert watching.names == ["fused_forward"]
    if context == "profiler":
        assert "tra::fused_forward" in {event.name for event in watching.events()}
    if context == "saved tensor hooks":
        assert "fused_forward" in type(out.grad_fn).__name__
    attend(*inputs, score_bound=8.0)
    assert remembered


def test_backward_under_a_mode(remembered: list[int]) -> None:
    inputs = seen_inputs()
    out = attend(*inputs, score_bound=8.0)
    grad_out = torch.ones_like(out)
    expected = torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    remembered.clear()
    with CountOperators() as watching:
        got = torch.autograd.grad(out, inputs, grad_out)
    assert watching.names == ["fused_backward"]
    assert not remembered
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_selective_checkpoints_see_the_operator() -> None:
    """Its output is saved, so backward doesn't compute it again."""
    inputs = seen_inputs()
    asked: list[str] = []

    def policy(_context: Any, operator: Any, *_: Any, **__: Any) -> bool:
        asked.append(str(operator))
        return "fused_forward" in str(operator)

    def function(*leaves: Tensor) -> Tensor:
        return attend(*leaves, score_bound=8.0) * 2

    out = checkpoint(
        function, *inputs, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    )
    got = torch.autograd.grad(out.sum(), inputs)
    expected = torch.autograd.grad(function(*inputs).sum(), inputs)
    assert "tra.fused_forward.default" in asked
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("reentrant", [False, *slow(True)])
def test_checkpoints(reentrant: bool) -> None:
    inputs = seen_inputs()
    attend(*inputs, score_bound=8.0).sum().backward()
    expected = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    checkpoint(lambda *x: attend(*x, score_bound=8.0), *inputs, use_reentrant=reentrant).sum().backward()
    for x, grad in zip(inputs, expected, strict=True):
        assert x.grad is not None
        assert grad is not None
        assert torch.equal(x.grad, grad)


def test_compiled_graphs_and_exports_hold_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = seen_inputs()
    monkeypatch.setattr(operator_inputs, "reading_is_free", lambda _: False)  # as on a GPU, where values aren't checked
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(lambda *x: attend(*x, score_bound=8.0), fullgraph=True, backend=keep)(*inputs)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda *x: attend(*x, score_bound=8.0))(
        *[x.detach() for x in inputs]
    )
    for graph in (*graphs, traced):
        assert any("fused_forward" in str(node.target) for node in graph.graph.nodes)
    assert graphs


def test_jit_trace_holds_the_operator() -> None:
    inputs = [x.detach() for x in seen_inputs()]
    traced = torch.jit.trace(lambda *x: attend(*x, score_bound=8.0), tuple(inputs), check_trace=False)
    assert "tra::fused_forward" in str(traced.graph)


def test_fake_tensors(through_api: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_inputs, "reading_is_free", lambda _: False)
    inputs = [x.detach() for x in seen_inputs()]
    through_api.clear()
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in inputs]
        assert type(attend(*fakes, score_bound=8.0)) is type(fakes[0])
    assert through_api


def test_subclasses(through_api: list[int], remembered: list[int]) -> None:
    inputs = seen_inputs()
    for place in range(4):
        through_api.clear()
        remembered.clear()
        attend(*[x.detach().as_subclass(Subclass) if i == place else x.detach() for i, x in enumerate(inputs)])
        assert through_api
        assert not remembered


@pytest.mark.parametrize("transform", ["grad", *slow("vjp", "vmap")])
def test_transforms(transform: str, through_api: list[int], remembered: list[int]) -> None:
    inputs = [x.detach() for x in seen_inputs()]
    through_api.clear()
    remembered.clear()

    def function(query: Tensor) -> Tensor:
        return attend(query, *inputs[1:], score_bound=8.0).float().sum()

    calls: dict[str, Callable[[], object]] = {
        "grad": lambda: torch.func.grad(function)(inputs[0]),
        "vjp": lambda: torch.func.vjp(function, inputs[0]),
        "vmap": lambda: torch.func.vmap(function)(inputs[0][None].expand(2, -1, -1, -1, -1)),
    }
    with suppress(RuntimeError):  # PyTorch doesn't differentiate such operators by torch.func
        calls[transform]()
    assert through_api
    assert not remembered


def test_forward_mode_still_refuses() -> None:
    inputs = [x.detach() for x in seen_inputs()]
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: attend(q, *inputs[1:], score_bound=8.0), (inputs[0],), (inputs[0],))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="no forward-mode derivative"):
        attend(forward_ad.make_dual(inputs[0], inputs[0]), *inputs[1:], score_bound=8.0)


def test_autocast_changes_nothing(remembered: list[int]) -> None:
    inputs = seen_inputs()
    grad_out = torch.ones_like(inputs[2])
    expected = results(inputs, grad_out, score_bound=8.0)
    for known in (True, False):
        if not known:
            eager.SEEN.clear()
        remembered.clear()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            got = results(inputs, grad_out, score_bound=8.0)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, expected, strict=True))
        assert bool(remembered) == known


@pytest.mark.parametrize("kind", ["twice", *slow("batched")])
def test_what_backward_cannot_do_is_the_same_error(kind: str) -> None:
    """Differentiating twice, and gradients of a batch at once."""

    def call() -> str:
        inputs = seen_inputs()
        out = attend(*inputs, score_bound=8.0)
        grad_out = torch.ones_like(out).requires_grad_(kind == "twice")
        try:
            if kind == "twice":
                grads = torch.autograd.grad(out, inputs, grad_out, create_graph=True)
                sum(x.sum() for x in grads).backward()
            else:
                torch.autograd.grad(out, inputs, grad_out[None].expand(2, *out.shape), is_grads_batched=True)
        except (RuntimeError, NotImplementedError) as error:
            return f"{type(error).__name__}: {str(error)[:60]}"
        return "no error"

    assert call() == by_dispatcher(call)


@pytest.mark.slow
def test_gradients_in_other_layouts() -> None:
    inputs = seen_inputs()
    shape = inputs[2].shape
    for grad_out in (
        torch.ones(()).to(inputs[2]).expand(shape),
        torch.randn(shape).to(inputs[2]).transpose(1, 2).contiguous().transpose(1, 2),
        torch.randn(*shape[:3], 2 * shape[3]).to(inputs[2])[..., ::2],
        shifted(torch.randn(shape).to(inputs[2])),
    ):
        expected = by_dispatcher(lambda g=grad_out: results(inputs, g, score_bound=8.0))
        for _ in range(2):
            got = results(inputs, grad_out, score_bound=8.0)
            assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_chunks_in_backward_are_not_recorded(remembered: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan would hold at once what chunks need one after another."""
    monkeypatch.setattr(backward, "_transient_bytes", lambda _: 1)
    inputs = inputs_for({"n_queries": 70}, "heads first")
    grad_out = torch.ones_like(inputs[2])
    expected = by_dispatcher(lambda: results(inputs, grad_out, score_bound=8.0))
    for _ in range(2):
        assert all(map(torch.equal, results(inputs, grad_out, score_bound=8.0), expected))
    assert remembered == [1]  # the forward


def test_no_tensor_stays_alive_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "MAX_KINDS", 3)
    alive = []
    for length in range(17, 22):
        inputs = inputs_for({"heads": 1, "batch": 1, "n_queries": length}, "heads first")
        out = attend(*inputs, score_bound=8.0)
        out.sum().backward()
        alive += [weakref.ref(x) for x in (*inputs, out, *[x.grad for x in inputs])]
        assert len(eager.SEEN) <= 3
    del inputs, out
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at once: every launch gets the pointers of its own call."""
    wrong: list[Any] = []
    monkeypatch.setattr(eager, "MAX_KINDS", 4)

    class Stub:
        function, packed_metadata = 0, ()

        def __init__(self, kernel: Any, arguments: Any) -> None:
            self.places = [kernel.arg_names.index(name) for name in ("n_queries", "Q", "OUT")]

        def run(self, *arguments: Any) -> None:
            length, query, out = (arguments[9 + place] for place in self.places)
            if current.length != length or current.query != query or out in (0, query):
                wrong.append((current.length, length))

    current = threading.local()
    if ON_GPU:
        monkeypatch.setattr(direct_launch, "_driver", lambda: SimpleNamespace(active=SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda _: 0)))  # fmt: skip
        monkeypatch.setattr(eager, "can_launch_directly", lambda: True)
    monkeypatch.setattr(direct_launch, "launch_by_triton", lambda k, _, arguments, __: Stub(k, arguments))

    def work(number: int) -> None:
        for turn in range(60):
            length = 17 + (number * 7 + turn) % 9
            query, key, value = torch.zeros(3, 1, 2, length, 16, device=DEVICE)
            current.length, current.query = length, query.data_ptr()
            out = attend(query, key, value, torch.zeros(1, 2, length, device=DEVICE), score_bound=8.0)
            if out.shape != query.shape:
                wrong.append(out.shape)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(eager.SEEN) <= 4


def test_what_it_asks_of_pytorch_exists() -> None:
    """Else every call would go through the dispatcher, right but slow."""
    assert len(watchers._QUESTIONS) > 1
    assert watchers.nothing_watches()


def test_triton_hooks_are_called_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler's hooks on launches: launches go through Triton while they are set."""
    knobs = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    monkeypatch.setattr(direct_launch, "_runtime_knobs", lambda: knobs)
    assert direct_launch.can_launch_directly()
    knobs.launch_enter_hook.calls.append(print)
    assert not direct_launch.can_launch_directly()
    knobs.launch_enter_hook = print
    assert not direct_launch.can_launch_directly()
    monkeypatch.setattr(direct_launch, "_runtime_knobs", lambda: None)
    assert not direct_launch.can_launch_directly()


def test_without_direct_launches(monkeypatch: pytest.MonkeyPatch, remembered: list[int]) -> None:
    """With another Triton the dispatcher is still left out, and Triton launches."""
    monkeypatch.setattr(eager, "can_launch_directly", lambda: False)
    inputs = inputs_for({}, "heads first")
    grad_out = torch.ones_like(inputs[2])
    expected = by_dispatcher(lambda: results(inputs, grad_out, score_bound=8.0))
    for _ in range(2):
        assert all(map(torch.equal, results(inputs, grad_out, score_bound=8.0), expected))
    assert eager.SEEN
    assert not remembered
