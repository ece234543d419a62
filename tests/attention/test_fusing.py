"""`fuse_projections`: the same results as unfused, and an error wherever a part must be called as a module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

import tra
from tests.slow import slow
from tra.attention import MECHANISMS, Attention, ThresholdRelativeAttention
from tra.attention.shared import base, forget_gate
from tra.attention.shared.fusing import one_product_is_best
from tra.hub import TRAConfig, TRAForCausalLM

pytestmark = pytest.mark.filterwarnings(  # of the interpreter
    "ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton", "ignore::RuntimeWarning:numpy"
)
ATTENTION = [name for name, kind in MECHANISMS.items() if issubclass(kind, Attention)]
GATED = ["tra", "forgetting", "tra-distance-only", "tra-plain-distance"]
PROJECTIONS = ["q_proj", "k_proj", "v_proj"]
PARTS = [*PROJECTIONS, "gate.linear"]


def results(layer: Attention, x: Tensor) -> list[Tensor]:
    out = layer(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize("mechanism", ATTENTION)
def test_one_product_is_three(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = MECHANISMS[mechanism](32, 4, 2, fuse_projections=True).double()
    x = torch.randn(2, 20, 32, dtype=torch.float64, requires_grad=True)
    expected = results(layer, x)
    monkeypatch.setattr(base, "one_product_is_best", lambda _: True)
    called = []
    monkeypatch.setattr(nn.Linear, "forward", _counting(nn.Linear.forward, called))
    found = results(layer, x)
    assert not {layer.q_proj, layer.k_proj, layer.v_proj} & set(called)
    assert layer.o_proj in called
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    layer.fuse_projections = False
    called.clear()
    layer(x)
    assert {layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj} <= set(called)


def _counting(forward, called):  # type: ignore[no-untyped-def]
    def counted(layer: nn.Linear, x: Tensor) -> Tensor:
        called.append(layer)
        return forward(layer, x)

    return counted


def test_where_one_product_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu: Any = type("OnGpu", (), {"is_cuda": True})()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert one_product_is_best(on_gpu)
    assert not one_product_is_best(torch.zeros(1))
    with torch.no_grad():
        assert not one_product_is_best(on_gpu)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: False)
    assert not one_product_is_best(on_gpu)


class Adapter(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 1 - super().forward(x)


class Quantised(Tensor):
    pass


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def replace(layer: nn.Module, name: str, part: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(layer.get_submodule(parent), child, part)


def with_bias(layer: nn.Module, name: str) -> None:
    replace(layer, name, biased := nn.Linear(32, layer.get_submodule(name).out_features))  # type: ignore[arg-type]
    nn.init.ones_(biased.bias)


def with_forward(layer: nn.Module, name: str) -> None:
    part = layer.get_submodule(name)
    original = part.forward
    part.forward = lambda x: 2 * original(x)  # type: ignore[method-assign]


def with_other_weight(layer: nn.Module, name: str) -> None:
    part = layer.get_submodule(name)
    part.weight = nn.Parameter(part.weight.detach().as_subclass(Quantised))


CHANGES: dict[str, tuple[Callable[[nn.Module, str], object], str]] = {
    "adapter": (
        lambda layer, name: replace(
            layer, name, Adapter(32, layer.get_submodule(name).out_features, bias="gate" in name)
        ),
        r"is a tests\.attention\.test_fusing\.Adapter",
    ),
    "bias": (with_bias, r"has a bias|is a torch.*Linear"),
    "hook": (lambda layer, name: layer.get_submodule(name).register_forward_hook(lambda *_: None), "has hooks"),
    "changing hook": (
        lambda layer, name: layer.get_submodule(name).register_forward_hook(lambda _, __, out: out + 1),
        "has hooks",
    ),
    "pre-hook": (lambda layer, name: layer.get_submodule(name).register_forward_pre_hook(lambda *_: None), "has hooks"),
    "backward hook": (
        lambda layer, name: layer.get_submodule(name).register_full_backward_hook(lambda *_: None),
        "has hooks",
    ),
    "forward": (with_forward, "has a forward of its own"),
    "parametrization": (
        lambda layer, name: parametrize.register_parametrization(layer.get_submodule(name), "weight", Doubled()),
        r"is a torch\.nn\.utils\.parametrize\.Parametrized",
    ),
    "weight": (with_other_weight, r"holds a tests\.attention\.test_fusing\.Quantised"),
    "weight norm": (
        lambda layer, name: nn.utils.weight_norm(layer.get_submodule(name)),
        "has hooks",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mechanism", ["tra", *slow("forgetting", "tra-distance-only", "tra-plain-distance")])
def test_fused_parts_must_be_plain(mechanism: str, change: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In training, on any device; unfused and without gradients, whatever stands there is called."""
    torch.manual_seed(0)
    x = torch.randn(1, 6, 32)
    fused, unfused = (MECHANISMS[mechanism](32, 4, fuse_projections=on) for on in (True, False))
    unfused.load_state_dict(fused.state_dict())
    plain = fused(x)
    assert torch.equal(unfused(x), plain)
    apply, problem = CHANGES[change]
    torch.manual_seed(1)
    apply(fused, name)
    torch.manual_seed(1)
    apply(unfused, name)
    message = f"fuse_projections=True multiplies by {name}'s weight itself, but {name} ({problem}).*"
    with pytest.raises(ValueError, match=message + "build the layer with fuse_projections=False"):
        fused(x)
    monkeypatch.setattr(base, "one_product_is_best", lambda _: True)
    changed = unfused(x)
    with torch.no_grad():
        torch.testing.assert_close(unfused(x), changed)
    monkeypatch.setattr(base, "one_product_is_best", lambda _: False)
    with torch.no_grad():
        torch.testing.assert_close(fused(x), changed)
    if change in ("adapter", "bias", "changing hook", "forward", "parametrization") and mechanism == "tra":
        assert not torch.allclose(changed, plain)


@pytest.mark.parametrize("mechanism", GATED)
def test_a_gate_that_is_replaced(mechanism: str) -> None:
    layer = MECHANISMS[mechanism](32, 4, fuse_projections=True)
    layer.gate = nn.Sequential(layer.gate)
    with pytest.raises(ValueError, match=r"but gate is a torch\.nn\.modules\.container\.Sequential"):
        layer(torch.randn(1, 6, 32))


def test_compiled_gates_of_other_parts_are_an_error_without_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """There sums multiply by the weight."""
    x, gate = torch.randn(1, 6, 32), forget_gate.ForgetGate(32, 4, 0.0, fused=True)
    with_forward(gate, "linear")
    monkeypatch.setattr(forget_gate, "sums_are_best", lambda *_: True)
    with torch.no_grad(), pytest.raises(ValueError, match="linear has a forward of its own"):
        gate(x)
    gate.fused = False
    torch.testing.assert_close(gate(x), nn.functional.logsigmoid(gate.linear(x)).mT)


def test_hooks_for_all_modules() -> None:
    layers = {on: ThresholdRelativeAttention(32, 2, fuse_projections=on) for on in (True, False)}
    x = torch.randn(2, 9, 32)
    for register in (
        nn.modules.module.register_module_forward_hook,
        nn.modules.module.register_module_forward_pre_hook,
        nn.modules.module.register_module_full_backward_hook,
    ):
        handle = register(lambda *_: None)  # type: ignore[arg-type]
        try:
            layers[False](x)
            with pytest.raises(ValueError, match="hooks for all modules: build the layer with fuse_projections=False"):
                layers[True](x)
        finally:
            handle.remove()
        layers[True](x)


@pytest.mark.parametrize("name", tra.ThresholdRelativeAttention.fused_methods)
def test_a_method_that_the_operator_skips_cannot_be_overridden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = getattr(ThresholdRelativeAttention, name)
    kind = type("Own", (ThresholdRelativeAttention,), {name: lambda self, *args, **rest: original(self, *args, **rest)})
    message = rf"fuse_projections=True doesn't call it, but {{}} overrides {name}: .* fuse_projections=False"
    with pytest.raises(ValueError, match=message.format("Own")):
        kind(32, 2, fuse_projections=True)
    x = torch.randn(2, 9, 32)
    assert kind(32, 2)(x).shape == x.shape
    layer = ThresholdRelativeAttention(32, 2, fuse_projections=True)
    monkeypatch.setattr(layer, name, getattr(layer, name))
    with pytest.raises(ValueError, match=message.format("ThresholdRelativeAttention")):
        layer(x)


def lora(model: nn.Module, *names: str) -> LoraConfig:
    return LoraConfig(r=2, target_modules=list(names), init_lora_weights=False, bias="none")


def lora_parameters(model: nn.Module) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if "lora_" in name]


def by_hand(plain: nn.Module, adapted: nn.Module, *arguments: Tensor) -> Any:
    """The output of the model as it was, with the weights that adapters stand for: W + s B A."""
    weights = {}
    for name, part in adapted.named_modules():
        if isinstance(part, LoraLinear):
            low, high = part.lora_A["default"].weight, part.lora_B["default"].weight
            weights[f"{name}.weight"] = part.base_layer.weight + part.scaling["default"] * high @ low
    assert weights
    return functional_call(plain, weights, arguments)


def assert_same_step(found: Tensor, expected: Tensor, parameters: list[Tensor], **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, **tolerance)
    gradients = [torch.autograd.grad(out.square().sum(), parameters) for out in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("name", [*PARTS, "o_proj"])
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_lora_on_a_bare_layer(name: str, impl: str) -> None:
    dtype = torch.float32 if impl == "triton" else torch.float64
    torch.manual_seed(0)
    plain = ThresholdRelativeAttention(32, 2, impl=impl).to(dtype)
    x = torch.randn(2, 20, 32, dtype=dtype)
    adapted = inject_adapter_in_model(lora(plain, name), copy.deepcopy(plain))
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if impl == "triton" else {}
    assert not torch.allclose(adapted(x), plain(x))
    assert_same_step(adapted(x), by_hand(plain, adapted, x), lora_parameters(adapted), **tolerance)


@pytest.mark.parametrize("name", [*PARTS, "o_proj"])
def test_lora_on_a_decoder(name: str) -> None:
    """An error with fusing, which is on by default; the right step without."""
    ids = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
    config = {"vocab_size": 11, "d_model": 32, "n_layers": 2, "n_heads": 2}
    torch.manual_seed(0)
    fused, plain = (
        tra.Decoder(tra.DecoderConfig(**config)),
        tra.Decoder(tra.DecoderConfig(**config, fuse_projections=False)),
    )
    fused = inject_adapter_in_model(lora(fused, name), fused)
    if name == "o_proj":
        fused(ids)
    else:
        with pytest.raises(
            ValueError, match=rf"{name} is a peft\.tuners\.lora\.layer\.Linear: .*fuse_projections=False"
        ):
            fused(ids)
    plain = plain.double()
    nn.init.normal_(plain.embed_tokens.weight)
    adapted = inject_adapter_in_model(lora(plain, name), copy.deepcopy(plain))
    assert_same_step(adapted(ids), by_hand(plain, adapted, ids), lora_parameters(adapted))


@pytest.mark.parametrize("names", [[*PARTS, "o_proj"], "all-linear"], ids=str)
def test_lora_on_a_language_model(names: list[str] | str) -> None:
    ids = torch.randint(11, (2, 12), generator=torch.Generator().manual_seed(0))
    sizes = {"vocab_size": 11, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    plain = TRAForCausalLM(TRAConfig(**sizes)).double()
    nn.init.normal_(plain.model.embed_tokens.weight)
    config = LoraConfig(r=2, target_modules=names, init_lora_weights=False, bias="none")
    adapted = get_peft_model(copy.deepcopy(plain), config)
    expected = by_hand(plain, adapted.get_base_model(), ids).logits
    assert any("gate.linear.lora_A" in name for name, _ in adapted.named_parameters())
    assert_same_step(adapted(ids).logits, expected, lora_parameters(adapted))
    fused = get_peft_model(TRAForCausalLM(TRAConfig(**sizes, fuse_projections=True)), config)
    with pytest.raises(ValueError, match="fuse_projections=False"):
        fused(ids)
