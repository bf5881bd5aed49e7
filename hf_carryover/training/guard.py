# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""One bad batch must not end a run: a step whose gradient is not finite moves nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch


logger = logging.getLogger(__name__)


class StepGuard:
    """
    Looks at the gradients before every step of an optimizer. transformers clips them by their norm, which turns a
    single `nan` into a gradient, and with the step into weights, of nothing else.

    Args:
        policy (`str`): `"skip"` drops such a step, its gradients and nothing more; `"stop"` raises.
        agree (`Callable[[torch.Tensor], torch.Tensor]`):
            Sums a flag over all processes, so that all drop the same steps.

    Attributes:
        skipped (`int`): Steps dropped so far.
    """

    def __init__(self, policy: str, agree: Callable[[torch.Tensor], torch.Tensor]):
        self.policy, self.agree = policy, agree
        self.skipped = 0

    @torch.no_grad()
    def __call__(self, optimizer: torch.optim.Optimizer, args, kwargs) -> None:
        """
        The hook, see [`torch.optim.Optimizer.register_step_pre_hook`].

        Raises:
            FloatingPointError: If the policy is `"stop"`, or the weights themselves are not finite any more.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        norms = torch.stack([norm.float() for norm in torch._foreach_norm([p.grad for p in parameters])])
        bad = int(self.agree((~torch.isfinite(norms.sum())).long()))
        if not bad:
            return
        if not all(bool(torch.isfinite(p).all()) for p in parameters):
            raise FloatingPointError(
                "The drafter's weights are not finite. Resume from an earlier checkpoint, at a smaller learning rate."
            )
        if self.policy == "stop":
            raise FloatingPointError(
                'The gradient of this step is not finite, and `non_finite_steps` is "stop". The weights are still '
                'those before it. Look at the recordings of the step, or go on without it: `non_finite_steps="skip"`.'
            )
        self.skipped += 1
        for parameter in parameters:
            parameter.grad = None  # not 0: that would still apply momentum and weight decay
        logger.warning("Skipped a step whose gradient is not finite (%d so far).", self.skipped)


__all__ = ["StepGuard"]
