"""Repeat launches without Triton's work on the host.

For every launch, Triton binds and specialises each argument, builds a key from all arguments, and looks the kernel up.
This takes longer than a short kernel. A `LaunchRecorder` lets Triton launch the kernels of a call once, and records the
compiled kernels and their arguments. The `LaunchPlan` launches them again, with other pointers.

A plan may only be used for calls with the same shapes, strides, dtypes, device and options. Triton also specialises on
whether pointers are multiples of 16, so a plan is for calls in which all pointers are.

This depends on how Triton 3.6 calls a compiled kernel: `kernel.run(*grid, stream, function, metadata, hook's metadata,
hooks, *arguments)`, with pointers as integers or tensors. With other versions no plan is made, and Triton launches.

This has not run on a GPU yet. Until it has, it is off unless the environment has `TRA_DIRECT_LAUNCH=1`.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

TRITON_VERSIONS = ("3.6.",)
"""Versions of Triton whose source was checked for this."""
ALIGNMENT = 16
"""Bytes. Triton compiles separate kernels for pointers that are multiples of it, as PyTorch's allocations are."""
SCRATCH_ALIGNMENT = 256
"""Bytes to which the parts of one allocation are aligned."""


class Launcher:
    """Launches kernels as Triton does."""

    def begin(self) -> None:
        """Begin the launches of a call, or begin them again after launches that failed."""

    def empty(self, size: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor that only the kernels of this call use."""
        return torch.empty(size, dtype=dtype, device=device)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        kernel[grid](*arguments, **constants)


TRITON = Launcher()


class DirectLaunch(NamedTuple):
    """One launch of a plan."""

    run: Callable[..., None]
    grid: tuple[int, ...]
    function: int
    metadata: Any
    constants: tuple[Any, ...]
    choose: Callable[[Sequence[Any]], tuple[Any, ...]]
    """Picks the arguments, in order, from a call's pointers and numbers and then `constants`."""


class LaunchPlan(NamedTuple):
    """The launches of a call, without tensors. Pointers are given in the order of the recorder's `tensors`."""

    launches: tuple[DirectLaunch, ...]
    scratch_offsets: tuple[int, ...]
    scratch_bytes: int

    def launch(self, device: torch.device, pointers: list[int], *numbers: int) -> None:
        """Launch the kernels on the current stream of the device, which must be the current one."""
        if self.scratch_bytes:  # freed in stream order, like any tensor
            scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
            start = scratch.data_ptr()
            pointers = [*pointers, *[start + offset for offset in self.scratch_offsets]]
        stream = _driver().active.get_current_stream(device.index)
        values = (*pointers, *numbers)
        for run, grid, function, metadata, constants, choose in self.launches:
            run(*grid, stream, function, metadata, None, None, None, *choose(values + constants))


class LaunchRecorder(Launcher):
    """Launches kernels as Triton does, and records the launches.

    Args:
        tensors: Tensors that the kernels read and write, besides those that `empty` returns.
        numbers: Names of the kernels' number arguments that change from call to call. No kernel may specialise on them.
    """

    def __init__(self, tensors: Sequence[Tensor | None], numbers: tuple[str, ...] = ()) -> None:
        self._tensors = tuple(tensors)
        self._numbers = numbers
        self.begin()

    def begin(self) -> None:
        self._scratch: list[Tensor] = []
        self._launches: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = []

    def empty(self, size: int | Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self._scratch.append(super().empty(size, dtype, device))
        return self._scratch[-1]

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        fixed = set(kernel.arg_names) - set(getattr(kernel, "do_not_specialize", kernel.arg_names))
        assert not fixed & set(self._numbers)  # Triton may need another kernel for another number
        compiled = launch_by_triton(kernel, grid, arguments, constants)
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        named = {name: given[name] for name in kernel.arg_names}
        self._launches.append((compiled, grid, named))

    def plan(self) -> LaunchPlan | None:
        """Return the plan of the launches since `begin`; None if they can't be made directly."""
        places = {id(x): place for place, x in enumerate((*self._tensors, *self._scratch)) if x is not None}
        offsets, end = [], 0
        for x in self._scratch:
            offsets.append(end)
            end += round_up(x.numel() * x.element_size())
        if not self._launches:
            return None
        n_values = len(self._tensors) + len(self._scratch) + len(self._numbers)
        launches = []
        for compiled, grid, named in self._launches:
            if compiled is None:
                return None
            constants: list[Any] = []
            chosen = []
            for name, value in named.items():
                if isinstance(value, Tensor):
                    if id(value) not in places or value.data_ptr() % ALIGNMENT:
                        return None
                    chosen.append(places[id(value)])
                elif name in self._numbers:
                    chosen.append(n_values - len(self._numbers) + self._numbers.index(name))
                else:
                    chosen.append(n_values + len(constants))
                    constants.append(value)
            sizes = (*grid, 1, 1)
            run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
            launches.append(DirectLaunch(run, sizes[:3], function, metadata, tuple(constants), itemgetter(*chosen)))
        return LaunchPlan(tuple(launches), tuple(offsets), end)


def round_up(n_bytes: int) -> int:
    """Return a number of bytes rounded up, where the next part of an allocation may begin."""
    return math.ceil(n_bytes / SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


def launch_by_triton(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any]) -> Any:
    """Launch a kernel, and return the compiled kernel; None if it can't be launched directly."""
    compiled = kernel[grid](*arguments, **constants)
    return None if kernel.pre_run_hooks or hasattr(compiled, "result") else compiled


def current_device() -> int:
    """Return the number of the device that Triton launches on."""
    number: int = _driver().active.get_current_device()
    return number


@functools.cache
def _driver() -> Any:
    from triton.runtime import driver

    return driver


@functools.cache
def _runtime_knobs() -> Any:
    """Return Triton's settings of launches; None if direct launches are not possible."""
    import triton

    is_wanted = os.environ.get("TRA_DIRECT_LAUNCH") == "1"
    is_known = triton.__version__.startswith(TRITON_VERSIONS) and torch.version.hip is None
    return triton.knobs.runtime if is_wanted and is_known else None


def can_launch_directly() -> bool:
    """Return whether direct launches are asked for, Triton's version is known, and no profiler hooks into launches."""
    knobs = _runtime_knobs()
    if knobs is None:
        return False
    enter, leave = knobs.launch_enter_hook, knobs.launch_exit_hook
    return not (getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
