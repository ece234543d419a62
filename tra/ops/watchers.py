"""Find out whether anything besides plain autograd could see or change a call of an operator.

PyTorch has no public functions for most of this. If a version lacks one of the names below, every call counts as
watched, and goes through the dispatcher, which is always right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tra.ops.forward_mode import in_forward_mode


def _questions() -> tuple[Callable[[], Any], ...]:
    """Return functions without arguments, each of which returns something false if no watcher of its kind is active."""
    native: Any = torch._C
    hooks = native._autograd._top_saved_tensors_default_hooks
    transforms = native._functorch.peek_interpreter_stack
    return (
        torch.compiler.is_compiling,
        native._len_torch_dispatch_stack,  # fake tensors, tracing, selective checkpointing, counters of operations
        native._len_torch_function_stack,
        vars(torch._ops)["_len_torch_dispatch_stack_pre_dispatch"],  # exports
        transforms,  # torch.func
        native._get_tracing_state,  # torch.jit.trace
        vars(torch.autograd)["_profiler_enabled"],  # a profiler shows operators by name
        lambda: hooks(False),  # they see which tensors are saved
        in_forward_mode,
    )


try:
    _QUESTIONS = _questions()
except (AttributeError, KeyError):
    _QUESTIONS = (lambda: True,)


def nothing_watches() -> bool:
    """Return whether nothing but plain autograd would see a call of an operator."""
    return not any(active() for active in _QUESTIONS)
