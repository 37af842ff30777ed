"""Blocks on their way from one engine to others."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MAX_ORIGINS = 4096


@dataclass(frozen=True, slots=True)
class SharedBlocks:
    """What one engine shares at once of one namespace.

    Attributes:
        namespace: whose text it is.
        origin: number of the engine that wrote it, random.
        sequence: grows with each of that engine.
        epoch: of the namespace when it was written, see `Epochs`.
        num_tokens: in the blocks.
        blocks: for `Engine.merge_blocks`.
    """

    namespace: str
    origin: int
    sequence: int
    epoch: int
    num_tokens: int
    blocks: bytes


class BlockQueue:
    """Blocks that wait for a peer; of too many the oldest are dropped and counted.

    Args:
        max_tokens: that may wait.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._waiting: deque[SharedBlocks] = deque()
        self._num_tokens = 0
        self._changed = threading.Condition()
        self.num_dropped_tokens = 0

    def put(self, blocks: SharedBlocks) -> None:
        """Add blocks."""
        with self._changed:
            self._waiting.append(blocks)
            self._num_tokens += blocks.num_tokens
            self._drop()
            self._changed.notify()

    def take(self, timeout_s: float) -> list[SharedBlocks]:
        """All that waits; waits a while for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, timeout_s)
            taken = [*self._waiting]
            self._waiting.clear()
            self._num_tokens = 0
            return taken

    def put_back(self, taken: Sequence[SharedBlocks]) -> None:
        """Return what could not be sent; it comes first again."""
        with self._changed:
            self._waiting.extendleft(reversed(taken))
            self._num_tokens += sum(blocks.num_tokens for blocks in taken)
            self._drop()

    def drop(self, num_tokens: int) -> None:
        """Count tokens that were taken and won't be sent."""
        with self._changed:
            self.num_dropped_tokens += num_tokens

    def _drop(self) -> None:
        while self._num_tokens > self._max_tokens:
            blocks = self._waiting.popleft()
            self._num_tokens -= blocks.num_tokens
            self.num_dropped_tokens += blocks.num_tokens


class Arrivals:
    """Which blocks have come to this process from the engines that wrote them. May be used by any thread.

    Args:
        max_origins: engines that are remembered; of more the one that was heard of least lately is forgotten.
    """

    def __init__(self, max_origins: int = MAX_ORIGINS) -> None:
        self._max_origins = max_origins
        self._lock = threading.Lock()
        self._seen: OrderedDict[int, tuple[int, int]] = OrderedDict()  # by origin: first and last sequence

    def is_new(self, origin: int, sequence: int) -> bool:
        """Whether blocks have not come yet, as `add` tells."""
        with self._lock:
            return sequence > self._seen.get(origin, (0, -1))[1]

    def add(self, origin: int, sequence: int) -> bool:
        """Note blocks; returns whether they are new, which those of an engine are as long as their numbers grow."""
        with self._lock:
            first, last = self._seen.get(origin, (sequence, -1))
            if sequence <= last:
                return False
            self._seen[origin] = first, sequence
            self._seen.move_to_end(origin)
            if len(self._seen) > self._max_origins:
                self._seen.popitem(last=False)
            return True

    def raise_to(self, last_sequences: Mapping[int, int]) -> None:
        """Note that all has come up to these sequences, by origin."""
        for origin, sequence in last_sequences.items():
            self.add(origin, sequence)

    def last_sequences(self) -> dict[int, int]:
        """The last that has come, by origin."""
        with self._lock:
            return {origin: last for origin, (_, last) in self._seen.items()}

    def covers(self, origin: int, sequence: int) -> bool:
        """Whether blocks came by this way: what an engine wrote before its first arrival did not."""
        with self._lock:
            first, last = self._seen.get(origin, (0, -1))
            return first <= sequence <= last
