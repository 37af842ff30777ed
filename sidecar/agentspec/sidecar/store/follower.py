"""Brings what other engines publish into this one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import redis

from agentspec.sidecar.engine import ArchiveError, Engine
from agentspec.sidecar.epochs import Epochs
from agentspec.sidecar.shared_blocks import Arrivals, SharedBlocks
from agentspec.sidecar.store.codec import Codec, EntryError
from agentspec.sidecar.store.connection import BLOCK_MS, Client, is_foreign
from agentspec.sidecar.store.deletion import sync
from agentspec.sidecar.store.figures import Tally
from agentspec.sidecar.store.keys import DELETIONS, ModelKeys

START = "0-0"
MAX_NAMESPACES = 4096
"""Followed at a time; of more, those that were used least lately are left."""
MAX_ORIGINS = 1024  # remembered of one namespace
ENTRIES_AT_ONCE = 64
CHECK_EVERY_S = 30.0

_Entry = tuple[bytes, dict[bytes, bytes]]


@dataclass(slots=True)
class Followed:
    """How far a namespace has been read.

    Attributes:
        position: id of the last entry.
        used_at: seconds, monotonic.
        is_caught_up: whether what was written before it was followed has been read.
        arrivals: entries that have come.
    """

    position: str
    used_at: float
    is_caught_up: bool = False
    arrivals: Arrivals = field(default_factory=partial(Arrivals, MAX_ORIGINS))


class Follower:
    """Follows the namespaces of one model, or those of one shard of it.

    Args:
        engine: gets the blocks.
        published: what this process publishes; it is passed over.
        keys: of its model.
        codec: reads the bytes.
        epochs: of its namespaces.
        tally: counts.
        on_blocks: told of what came.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        published: Arrivals,
        keys: ModelKeys,
        codec: Codec,
        epochs: Epochs,
        tally: Tally,
        on_blocks: Callable[[SharedBlocks], None] | None = None,
    ) -> None:
        self._engine = engine
        self._published = published
        self._on_blocks = on_blocks
        self._keys = keys
        self._codec = codec
        self._epochs = epochs
        self._tally = tally
        self._lock = threading.Lock()
        self._followed: dict[str, Followed] = {}
        self._by_key: dict[str, str] = {}
        self._checked_at = 0.0
        self._foreign: set[str] = set()  # keys that hold no stream; looked at again now and then

    def follow(self, namespace: str, position: str) -> None:
        """Follow a namespace from after a position on, or note that it is used."""
        now = time.monotonic()
        with self._lock:
            if namespace in self._followed:
                self._followed[namespace].used_at = now
                return
            if len(self._followed) >= MAX_NAMESPACES:
                self._leave(min(self._followed, key=lambda name: self._followed[name].used_at))
            self._followed[namespace] = Followed(position, now)
            self._by_key[self._keys.log(namespace)] = namespace

    def position(self, namespace: str) -> str | None:
        """How far a namespace has been read; None: it is not followed."""
        with self._lock:
            followed = self._followed.get(namespace)
            return followed.position if followed is not None else None

    def namespaces(self) -> dict[str, float]:
        """Those that are followed, and how many seconds ago each was used last."""
        now = time.monotonic()
        with self._lock:
            return {name: now - followed.used_at for name, followed in self._followed.items()}

    def leave_unused(self, max_age_s: float) -> None:
        """Leave the namespaces that nobody has used for so long."""
        for namespace, age_s in self.namespaces().items():
            if age_s > max_age_s:
                with self._lock:
                    self._leave(namespace)

    def _leave(self, namespace: str) -> None:
        del self._followed[namespace]
        del self._by_key[self._keys.log(namespace)]

    def begin(self, client: Client) -> None:
        """Learn what was deleted meanwhile."""
        sync(self._epochs, client)
        self._checked_at = 0.0

    def read(self, client: Client) -> None:
        """Read what is new, or wait a moment for it.

        Raises:
            redis.RedisError: it could not be read; the next call goes on there.
        """
        if time.monotonic() - self._checked_at > CHECK_EVERY_S:
            self._check_positions(client)
            self._checked_at = time.monotonic()
        with self._lock:
            positions = {
                key: self._followed[name].position for key, name in self._by_key.items() if key not in self._foreign
            }
        if not positions:
            return time.sleep(BLOCK_MS / 4000)
        unread = set(positions)
        try:
            found = _read(client, positions, BLOCK_MS)
        except redis.ResponseError as error:
            if not is_foreign(error):
                raise
            return self._check_positions(client)
        for key, entries in found:
            self._take(client, key, entries)
            if len(entries) == ENTRIES_AT_ONCE:
                unread.discard(key)
        self._note_caught_up(unread)
        return None

    def _note_caught_up(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                if (namespace := self._by_key.get(key)) is not None:
                    self._followed[namespace].is_caught_up = True

    def is_caught_up(self, namespace: str) -> bool:
        """Whether a namespace is followed, and what was written before has been read."""
        with self._lock:
            followed = self._followed.get(namespace)
            return followed is not None and followed.is_caught_up

    def _take(self, client: Client, key: str, entries: Iterable[_Entry]) -> None:
        with self._lock:
            namespace = self._by_key.get(key)
            followed = self._followed.get(namespace) if namespace is not None else None
        if namespace is None or followed is None:
            return
        stale: list[bytes] = []
        for entry_id, fields in entries:
            followed.position = entry_id.decode()
            if self._merge(client, namespace, followed, fields.get(b"b", b"")) == "stale":
                stale.append(entry_id)
            else:
                self._tally.delay_s = max(0.0, time.time() - int(entry_id.partition(b"-")[0]) / 1000)
        if stale:
            client.xdel(key, *stale)

    def _merge(self, client: Client, namespace: str, followed: Followed, raw: bytes) -> str:
        """Add an entry; returns why it is of no use, if it is not."""
        try:
            entry = self._codec.decode(raw, self._keys.log(namespace))
        except EntryError as error:
            return self._skip(error.fault)
        if self._published.covers(entry.origin, entry.sequence):
            return "own"
        if not followed.arrivals.add(entry.origin, entry.sequence):
            return self._skip("duplicate")
        if entry.epoch > self._epochs.of(namespace):
            sync(self._epochs, client)
        with self._epochs.lock:
            if entry.epoch < self._epochs.of(namespace):
                return self._skip("stale")
            try:
                num_tokens = self._engine.merge_blocks(namespace, entry.blocks, origin=entry.origin)
            except ArchiveError:
                return self._skip("corrupt")
        self._tally.count("received", namespace, num_tokens, len(raw))
        if self._on_blocks is not None:
            self._on_blocks(
                SharedBlocks(namespace, entry.origin, entry.sequence, entry.epoch, num_tokens, entry.blocks)
            )
        return ""

    def _skip(self, reason: str) -> str:
        self._tally.skip(reason)
        return reason

    def _check_positions(self, client: Client) -> None:
        """Start a stream again whose end lies before our position: a failover has lost its tail; pass over others."""
        sync(self._epochs, client)
        with self._lock:
            keys = [*self._by_key.items()]
        pipeline = client.pipeline(transaction=False)
        for key, _ in keys:
            pipeline.xrevrange(key, count=1)
        self._foreign.clear()
        for (key, namespace), last in zip(keys, pipeline.execute(raise_on_error=False), strict=True):
            if is_foreign(last):
                self._tally.fail(last)
                self._foreign.add(key)
            elif isinstance(last, list) and last:
                with self._lock:
                    followed = self._followed.get(namespace)
                    if followed is not None and _order(last[0][0].decode()) < _order(followed.position):
                        followed.position = START


class DeletionWatcher:
    """Looks at the epochs as soon as something is deleted anywhere.

    Args:
        epochs: brought up to date.
    """

    def __init__(self, epochs: Epochs) -> None:
        self._epochs = epochs
        self._position = "$"

    def begin(self, client: Client) -> None:
        """Learn what was deleted meanwhile."""
        last = client.xrevrange(DELETIONS, count=1)
        self._position = last[0][0].decode() if last else START
        sync(self._epochs, client)

    def read(self, client: Client) -> None:
        """Wait a moment for the next deletion.

        Raises:
            redis.RedisError: it could not be read.
        """
        for _, entries in _read(client, {DELETIONS: self._position}, BLOCK_MS):
            self._position = [*entries][-1][0].decode()
            sync(self._epochs, client)


def _read(client: Client, positions: dict[str, str], block_ms: int) -> list[tuple[str, list[_Entry]]]:
    reply = client.xread(positions, count=ENTRIES_AT_ONCE, block=block_ms)
    return [(key.decode(), entries) for key, entries in reply or ()]


def _order(entry_id: str) -> tuple[int, int]:
    time_ms, _, number = entry_id.partition("-")
    return int(time_ms), int(number or 0)
