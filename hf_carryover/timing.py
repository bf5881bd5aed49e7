# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Where the time of a round goes."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Iterator

import torch


# What a round is split into. `verify` is what the decoding loop does between the target's pass and the next draft
# (choosing or judging tokens), `sampling` the drawing of proposals, `bookkeeping` whatever is none of the others.
PHASES = ("target", "draft", "projection", "carry", "sampling", "verify", "bookkeeping")


class _Split:
    """An open [`split_times`]: where its target is, and the clock of the `generate` call that runs."""

    def __init__(self, device: torch.device):
        self.device = device
        self.clock: PhaseClock | None = None

    def lap(self, phase: str) -> None:
        if self.clock is not None:
            self.clock.lap(phase)


_SPLIT: contextvars.ContextVar[_Split | None] = contextvars.ContextVar("hf_carryover_split_times", default=None)


class PhaseClock:
    """
    A stopwatch whose laps have names: each lap is charged with everything since the one before, so that the parts sum
    up to the whole.

    Args:
        device (`torch.device`, *optional*):
            An accelerator to wait for at every lap. Without it, and by default, nothing waits: on an accelerator the
            laps then say when work was *submitted*.
    """

    def __init__(self, device: torch.device | None = None):
        self.device = device
        self.totals: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Begin anew: what lies before is charged to nothing."""
        self.totals.update(dict.fromkeys(PHASES, 0.0))
        self._last = self._now()

    def lap(self, phase: str) -> None:
        """Charge the milliseconds since the last lap to `phase`, one of `PHASES`."""
        now = self._now()
        self.totals[phase] += 1000 * (now - self._last)
        self._last = now

    def _now(self) -> float:
        if self.device is not None and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.perf_counter()


@contextlib.contextmanager
def split_times(target: torch.nn.Module) -> Iterator[None]:
    """
    Within this context the reports of assisted generation with `target` have their times split into `PHASES`
    ([`GenerationReport.phases`]). It waits for the accelerator at every step, which costs a little: use it to see
    where time goes, not to measure speed.

    Example:

    ```python
    >>> with split_times(model):
    ...     model.generate(**inputs, assistant_model=drafter)
    >>> drafter.last_report.phases
    {'target': 812.4, 'draft': 71.9, 'projection': 6.3, ...}
    ```
    """
    split = _Split(next(target.parameters()).device)
    token = _SPLIT.set(split)
    hooks = [
        target.register_forward_pre_hook(lambda *_: split.lap("bookkeeping")),
        target.register_forward_hook(lambda *_: split.lap("target")),
    ]
    try:
        yield
    finally:
        _SPLIT.reset(token)
        for hook in hooks:
            hook.remove()


def new_clock() -> PhaseClock | None:
    """The clock of a `generate` call inside [`split_times`], else `None`."""
    split = _SPLIT.get()
    if split is None:
        return None
    split.clock = PhaseClock(split.device)
    return split.clock


__all__ = ["PHASES", "PhaseClock", "split_times"]
