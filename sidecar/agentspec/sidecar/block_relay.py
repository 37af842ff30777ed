"""The last blocks of a model on their way to the engines that follow them, each at its own pace."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentspec.sidecar.shared_blocks import Arrivals, SharedBlocks

MAX_BYTES = 16 << 20
"""Kept for readers that are slow or come back."""
MAX_NAMESPACES = 4096
MAX_ORIGINS = 1024  # remembered of one namespace


@dataclass(eq=False, slots=True)
class Reader:
    """One engine that follows.

    Attributes:
        namespaces: that it follows.
        new_namespaces: that it follows from where the relay ended when it came.
        origin: of its own blocks, which it does not get.
        wake: called when something has come, on whatever thread; must not block.
        position: of what it has not read.
        opened_at: position at which it came.
        num_dropped_tokens: that it was too slow for, since it last asked.
    """

    namespaces: frozenset[str]
    new_namespaces: frozenset[str]
    origin: int
    wake: Callable[[], None]
    position: int = 0
    opened_at: int = 0
    num_dropped_tokens: int = 0

    def wants(self, blocks: SharedBlocks, position: int) -> bool:
        """Whether the blocks at a position are for it."""
        if blocks.origin == self.origin:
            return False
        is_new = position >= self.opened_at
        return blocks.namespace in self.namespaces or (is_new and blocks.namespace in self.new_namespaces)


class BlockRelay:
    """Keeps the last blocks by position, which grows by one with each. May be used by any thread.

    Args:
        max_bytes: of more the oldest are dropped.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: deque[SharedBlocks] = deque()
        self._num_bytes = 0
        self._first = 0  # position of the oldest that is kept
        self._readers: list[Reader] = []
        self._arrivals: OrderedDict[str, Arrivals] = OrderedDict()

    @property
    def num_readers(self) -> int:
        """Engines that follow now."""
        return len(self._readers)

    def put(self, blocks: SharedBlocks) -> None:
        """Add blocks, and wake those who follow them."""
        with self._lock:
            position = self._first + len(self._kept)
            self._kept.append(blocks)
            self._note(blocks)
            self._num_bytes += len(blocks.blocks)
            while self._num_bytes > self._max_bytes:
                self._drop_oldest()
            readers = [reader for reader in self._readers if reader.wants(blocks, position)]
        for reader in readers:
            reader.wake()

    def last_sequences(self, namespace: str) -> dict[int, int]:
        """Of what has come of a namespace, by origin: no one who has these needs them again."""
        with self._lock:
            arrivals = self._arrivals.get(namespace)
            return arrivals.last_sequences() if arrivals is not None else {}

    def wake(self) -> None:
        """Have all readers look."""
        for reader in [*self._readers]:
            reader.wake()

    def open(self, reader: Reader, position: int | None) -> None:
        """Add a reader.

        Args:
            reader: to be closed.
            position: it goes on there, or at the oldest that is kept; None: at what comes next.
        """
        with self._lock:
            end = self._first + len(self._kept)
            reader.opened_at = end
            reader.position = end if position is None else min(max(position, self._first), end)
            self._readers.append(reader)

    def close(self, reader: Reader) -> None:
        """Take a reader away."""
        with self._lock:
            self._readers.remove(reader)

    def read(self, reader: Reader, max_bytes: int) -> Sequence[SharedBlocks]:
        """What comes next for a reader, at least one of them if there is any; moves its position."""
        found: list[SharedBlocks] = []
        num_bytes = 0
        with self._lock:
            end = self._first + len(self._kept)
            while reader.position < end:
                blocks = self._kept[reader.position - self._first]
                if reader.wants(blocks, reader.position):
                    num_bytes += len(blocks.blocks)
                    if found and num_bytes > max_bytes:
                        break
                    found.append(blocks)
                reader.position += 1
        return found

    def take_dropped(self, reader: Reader) -> int:
        """Tokens that a reader was too slow for since the last call."""
        with self._lock:
            num_tokens, reader.num_dropped_tokens = reader.num_dropped_tokens, 0
            return num_tokens

    def _note(self, blocks: SharedBlocks) -> None:
        arrivals = self._arrivals.setdefault(blocks.namespace, Arrivals(MAX_ORIGINS))
        arrivals.add(blocks.origin, blocks.sequence)
        self._arrivals.move_to_end(blocks.namespace)
        if len(self._arrivals) > MAX_NAMESPACES:
            self._arrivals.popitem(last=False)

    def _drop_oldest(self) -> None:
        blocks = self._kept.popleft()
        self._num_bytes -= len(blocks.blocks)
        for reader in self._readers:
            if reader.position == self._first:
                reader.position += 1
                if reader.wants(blocks, self._first):
                    reader.num_dropped_tokens += blocks.num_tokens
        self._first += 1
