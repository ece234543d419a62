"""Handle what may end a run before its last step: signals, a full disk, and numbers that overflow."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from tra.runs import RunFolder
from tra.training.checkpoint import describe_checkpoint, load_checkpoint
from tra.training.distributed import RankLostError


class DiskFullError(Exception):
    """The disk is full. What was saved before is intact."""


class NonFiniteError(Exception):
    """The loss or the weights are infinite or not a number. The last good checkpoint is kept."""


class StepAbandonedError(Exception):
    """A signal ended a step before the optimizer changed anything."""


class StopRequest:
    """The signal that asked the run to stop, if one did."""

    signal: str | None = None
    may_abandon = False
    """Whether a signal ends the current step by a StepAbandonedError, since steps may take minutes."""


@contextmanager
def catch_stop_signals() -> Iterator[StopRequest]:
    """Record SIGTERM and Ctrl-C instead of obeying them. A second one ends the process at once.

    After a RankLostError SIGTERM is ignored for good.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def record(number: int, _frame: object) -> None:
        request.signal = signal.Signals(number).name
        signal.signal(number, before[signal.Signals(number)])
        if request.may_abandon:
            request.may_abandon = False
            raise StepAbandonedError

    for number in before:
        signal.signal(number, record)
    try:
        yield request
    except RankLostError:  # torchrun sends SIGTERM to the other processes, which first have to report why they end
        before[signal.SIGTERM] = signal.SIG_IGN
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def answer_signals_in_backward(layer: nn.Module, _inputs: object, output: object) -> None:
    """Make a layer's backward run some Python, where signals can be handled. A hook for `register_forward_hook`."""
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(lambda _: None)


@contextmanager
def explain_full_disk(run: RunFolder) -> Iterator[None]:
    """Turn the error of a full disk into a DiskFullError that says which checkpoint is left."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        state = load_checkpoint(run.checkpoint_folder, lambda _: None, read=describe_checkpoint)
        kept = f"the checkpoint of step {state.step:,} is intact" if state else "there was no checkpoint yet"
        raise DiskFullError(
            f"the disk is full ({error.strerror}), writing to {run.path}; {kept}: make room, then go on with --resume"
        ) from None
