"""The boundary that keeps whatever breaks in here out of the user's call."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0


class FailOpen:
    """Boundary around what runs inside the user's call: an error in the block is counted and does not leave it.

    `num_failures` counts by the error's class. At most one line a minute is logged; it names the class and the
    place, not the message, which could quote a prompt.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_failures: Counter[str] = Counter()
        self._clock = clock
        self._silent_until_s = float("-inf")
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        with self._lock:
            self.num_failures[type(error).__name__] += 1
            total = self.num_failures.total()
            is_silent = self._clock() < self._silent_until_s
            if not is_silent:
                self._silent_until_s = self._clock() + LOG_INTERVAL_S
        if not is_silent:
            log.warning("LLM call left untagged: %s at %s (%d so far)", type(error).__name__, _place(trace), total)
        return True


def _place(trace: TracebackType | None) -> str:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else "?"


fail_open = FailOpen()
