"""What the shared histories have seen since the process started."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["published", "received", "loaded"]


@dataclass(frozen=True, slots=True)
class StoreFigures:
    """Figures of one model's store, or of several together.

    Attributes:
        is_connected: whether Redis answers.
        is_ready: whether the newest tenth of what was shared is here, or Redis has not answered at all yet.
        is_complete: all of it is here.
        num_namespaces: that are followed.
        num_entries, num_tokens, num_bytes: that were published, received as others wrote them, or loaded from
            snapshots; bytes as they are in Redis.
        num_skipped: entries that are of no use here, by reason.
        num_failures: of calls to Redis, by kind.
        num_dropped_tokens: that could not be published: too many waited, or Redis was full.
        num_snapshots: that were written.
        delay_s: from the writing of the entry that came last to its arrival, by both machines' clocks.
    """

    is_connected: bool
    is_ready: bool
    is_complete: bool
    num_namespaces: int
    num_entries: dict[Direction, int]
    num_tokens: dict[Direction, int]
    num_bytes: dict[Direction, int]
    num_skipped: dict[str, int]
    num_failures: dict[str, int]
    num_dropped_tokens: int
    num_snapshots: int
    delay_s: float


class Tally:
    """Counts of a store's threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.entries: Counter[Direction] = Counter()
        self.tokens: Counter[Direction] = Counter()
        self.bytes: Counter[Direction] = Counter()
        self.fresh: Counter[str] = Counter()
        """Tokens that went or came since the last snapshot, by namespace."""
        self.skipped: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self.snapshots = 0
        self.delay_s = 0.0

    def count(self, direction: Direction, namespace: str, num_tokens: int, num_bytes: int) -> None:
        """An entry came, or went."""
        if direction != "loaded":
            self.note_fresh(namespace, num_tokens)
        with self._lock:
            self.entries[direction] += 1
            self.tokens[direction] += num_tokens
            self.bytes[direction] += num_bytes

    def skip(self, reason: str) -> None:
        """An entry is of no use here."""
        with self._lock:
            self.skipped[reason] += 1

    def fail(self, error: Exception) -> None:
        """A call failed."""
        with self._lock:
            self.failures[type(error).__name__] += 1

    def note_fresh(self, namespace: str, num_tokens: int) -> None:
        """Tokens of a namespace are in no snapshot."""
        with self._lock:
            self.fresh[namespace] += num_tokens

    def settle(self, namespace: str, num_tokens: int) -> None:
        """Tokens of a namespace are in a snapshot."""
        with self._lock:
            self.fresh[namespace] -= num_tokens
            if self.fresh[namespace] <= 0:
                del self.fresh[namespace]


def sum_figures(all_figures: Iterable[StoreFigures]) -> StoreFigures | None:
    """Figures of several stores as one; None: there are none."""
    found = [*all_figures]
    if not found:
        return None

    def total(name: str) -> Counter[Any]:
        return sum((Counter(getattr(figures, name)) for figures in found), Counter())

    return StoreFigures(
        is_connected=all(figures.is_connected for figures in found),
        is_ready=all(figures.is_ready for figures in found),
        is_complete=all(figures.is_complete for figures in found),
        num_namespaces=sum(figures.num_namespaces for figures in found),
        num_entries=total("num_entries"),
        num_tokens=total("num_tokens"),
        num_bytes=total("num_bytes"),
        num_skipped=total("num_skipped"),
        num_failures=total("num_failures"),
        num_dropped_tokens=sum(figures.num_dropped_tokens for figures in found),
        num_snapshots=sum(figures.num_snapshots for figures in found),
        delay_s=max(figures.delay_s for figures in found),
    )
