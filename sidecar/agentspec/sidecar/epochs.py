"""Deletion that lasts: when each namespace was deleted last, so that what was written before is refused everywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

ANY_MODEL = "*"
MAX_AHEAD_MS = 86_400_000
"""A deletion later than by a day is a mistake, and would refuse all text until then."""


def now_ms() -> int:
    """The clock of epochs: ms since 1970."""
    return time.time_ns() // 1_000_000


def epoch_field(model: str, namespace: str) -> str:
    """What a deletion is called by; `model` may be `ANY_MODEL`."""
    return f"{model}|{namespace}"


def outer_namespaces(namespace: str) -> Iterator[str]:
    """A namespace and those that it is within: ``a/b`` and ``a`` of ``a/b``."""
    while namespace:
        yield namespace
        namespace, _, _ = namespace.rpartition("/")


class Epochs:
    """When each namespace was deleted last, as far as this process knows, and the lock that keeps it true.

    An epoch is a time in ms since 1970, so that processes that never met can compare theirs; it only grows. Text
    belongs to the epoch that its engine knew when it was written. Whoever adds foreign text to the engine holds `lock`
    from the check of its epoch on: no deletion comes between.

    Args:
        model: see `model_id`.
        forget: deletes a namespace and those within it from the engine; returns the number of tokens.
    """

    def __init__(self, model: str, forget: Callable[[str], int]) -> None:
        self.lock = threading.RLock()
        self.model = model
        self._forget = forget
        self._times: dict[str, int] = {}
        self._listeners: list[Callable[[], None]] = []

    def listen(self, on_deletion: Callable[[], None]) -> None:
        """Have a function called after each deletion; it must not block."""
        self._listeners.append(on_deletion)

    def of(self, namespace: str) -> int:
        """The epoch of a namespace; grows with each deletion of it or of one that it is within."""
        with self.lock:
            return self._latest(namespace)

    def _latest(self, namespace: str) -> int:
        if not self._times:
            return 0
        return max(
            self._times.get(epoch_field(model, outer), 0)
            for outer in outer_namespaces(namespace)
            for model in (ANY_MODEL, self.model)
        )

    def next(self, namespace: str) -> int:
        """The epoch that a deletion at this moment begins."""
        return max(now_ms(), self.of(namespace) + 1)

    def known(self) -> dict[str, int]:
        """All of them, by `epoch_field`."""
        with self.lock:
            return dict(self._times)

    def by_namespace(self) -> dict[str, int]:
        """Those of this model, whichever models were meant with it."""
        found: dict[str, int] = {}
        for field, time_ms in self.known().items():
            namespace = field.partition("|")[2]
            found[namespace] = max(found.get(namespace, 0), time_ms)
        return found

    def raise_to(self, times: Mapping[str, int]) -> int:
        """Delete here what was deleted; return the number of tokens.

        Args:
            times: ms, by `epoch_field`; what is not later than the known one is passed over.
        """
        num_tokens, is_news = 0, False
        with self.lock:
            for field, time_ms in times.items():
                model, _, namespace = field.partition("|")
                if model not in (ANY_MODEL, self.model) or time_ms <= self._times.get(field, 0):
                    continue
                if time_ms > self._latest(namespace):
                    num_tokens += self._forget(namespace)
                    is_news = True
                self._times[field] = time_ms
        if is_news:
            for listener in self._listeners:
                listener()
        return num_tokens
