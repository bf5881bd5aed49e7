# Copyright 2026 The hf_carryover authors. Licensed under the Apache License, Version 2.0.
"""Requests to the Hub that are tried again when it was the network's or the server's fault."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from huggingface_hub.errors import HfHubHTTPError
from transformers.utils import logging


logger = logging.get_logger(__name__)

Result = TypeVar("Result")

ATTEMPTS = 5
LONGEST_WAIT = 30.0  # seconds


def is_transient(error: BaseException) -> bool:
    """Whether trying again may help: no answer, too many requests, or an error of the server."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, HfHubHTTPError):
            status = getattr(seen.response, "status_code", None)
            return status is None or status == 429 or status >= 500
        # huggingface_hub's HTTP client changed its package from release to release; its errors kept their names.
        names = {kind.__name__ for kind in type(seen).__mro__}
        if names & {"TransportError", "ConnectionError", "TimeoutError"}:
            return True
        # An upload in a thread wraps what went wrong.
        seen = seen.__cause__ or seen.__context__
    return False


def with_retries(call: Callable[[], Result], what: str, done: Callable[[], Result | None] | None = None) -> Result:
    """
    Call until it works.

    Args:
        call (`Callable`): What to do.
        what (`str`): Its name, for the log.
        done (`Callable`, *optional*):
            Asked before a further attempt whether the one before was carried out though its answer was lost: what it
            returns, if not `None`, is the result.

    Raises:
        The last error, when it is not transient or after 5 attempts.
    """
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except Exception as error:
            if not is_transient(error) or attempt == ATTEMPTS - 1:
                raise
            wait = min(LONGEST_WAIT, _asked_wait(error) or 2.0**attempt)
            logger.warning(f"{what} failed ({_first_line(error)}), trying again in {wait:.0f} s.")
            time.sleep(wait)
            if done is not None:
                result = done()
                if result is not None:
                    return result
    raise AssertionError("unreachable")


def _asked_wait(error: BaseException) -> float | None:
    """Seconds that the server asked to wait for."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    try:
        return float(headers.get("Retry-After"))
    except (TypeError, ValueError):
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


__all__ = ["is_transient", "with_retries"]
