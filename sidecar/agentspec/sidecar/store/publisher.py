"""Takes what the engine's requests have written to Redis."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import redis

from agentspec.sidecar.engine import BlockBatch, Engine
from agentspec.sidecar.store.codec import Codec, Entry
from agentspec.sidecar.store.connection import Client
from agentspec.sidecar.store.epochs import Epochs, note_use
from agentspec.sidecar.store.figures import Tally
from agentspec.sidecar.store.keys import ModelKeys

WAIT_S = 0.25
"""Longest wait for something to publish."""
GATHER_S = 0.01
"""Least time from one round to the next: small blocks share an entry, and the engine's process has other work."""
MAX_LOG_ENTRIES = 100_000
"""Of one namespace; the oldest are dropped, snapshots hold them."""
FULL_PAUSE_S = 30.0
EXPIRE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class _Waiting:
    namespace: str
    raw: bytes
    num_tokens: int
    epoch: int


class Publisher:
    """Publishes for one engine.

    Args:
        engine: asked for what was written; it bounds what waits, and drops the oldest.
        origin: number of the engine, as others see it.
        keys: of its model.
        codec: makes the bytes.
        epochs: of its namespaces.
        tally: counts.
        ttl_s: life of a namespace in Redis that nobody writes.
        on_use: told of namespaces that requests have used.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        origin: int,
        keys: ModelKeys,
        codec: Codec,
        epochs: Epochs,
        tally: Tally,
        ttl_s: float,
        on_use: Callable[[list[str]], None],
    ) -> None:
        self._engine = engine
        self._origin = origin
        self._keys = keys
        self._codec = codec
        self._epochs = epochs
        self._tally = tally
        self._ttl_s = ttl_s
        self._on_use = on_use
        self._sequence = 0
        self._waiting: deque[_Waiting] = deque()
        self._expires: dict[str, float] = {}
        self._begun_at = 0.0
        self._full_until = 0.0

    def begin(self, client: Client) -> None:
        """Learn what was deleted meanwhile, before anything goes out under an old epoch."""
        self._epochs.sync(client)

    def publish(self, client: Client, wait_s: float = WAIT_S) -> None:
        """Publish what there is, or wait a moment for it.

        Raises:
            redis.RedisError: it could not be published; the next call tries again.
        """
        if time.monotonic() < self._full_until:
            return time.sleep(wait_s)
        time.sleep(max(0.0, self._begun_at + GATHER_S - time.monotonic()))
        if not self._waiting and self._engine.wait_for_blocks(wait_s):
            self._take()
        self._begun_at = time.monotonic()
        if self._waiting:
            self._send(client)
        return None

    def flush(self, client: Client) -> None:
        """Publish the rest; the process ends."""
        self.publish(client, 0)

    def _take(self) -> None:
        with self._epochs.lock:  # a deletion takes what waits out of the engine before it raises the epoch
            taken = self._engine.take_blocks()
            epochs = {batch.namespace: self._epochs.of(batch.namespace) for batch in taken.batches}
        if taken.namespaces:
            self._on_use(taken.namespaces)
        for batch in taken.batches:
            self._waiting.append(self._encode(batch, epochs[batch.namespace]))

    def _encode(self, batch: BlockBatch, epoch: int) -> _Waiting:
        self._sequence += 1
        entry = Entry(self._origin, self._sequence, epoch, batch.num_tokens, batch.blocks)
        return _Waiting(
            batch.namespace, self._codec.encode(entry, self._keys.log(batch.namespace)), batch.num_tokens, epoch
        )

    def _send(self, client: Client) -> None:
        for entry in [entry for entry in self._waiting if entry.epoch < self._epochs.of(entry.namespace)]:
            self._waiting.remove(entry)  # deleted while Redis could not be reached
        pipeline = client.pipeline(transaction=False)
        sent = [*self._waiting]
        for entry in sent:
            key = self._keys.log(entry.namespace)
            pipeline.xadd(key, {"b": entry.raw}, maxlen=MAX_LOG_ENTRIES, approximate=True)
        due = self._due_expiries({entry.namespace for entry in sent})
        for namespace in due:
            pipeline.expire(self._keys.log(namespace), int(self._ttl_s) + 1)
        answers = pipeline.execute(raise_on_error=False)
        self._waiting.clear()
        self._settle(client, sent, answers[: len(sent)])
        if due:
            note_use(client, self._keys, dict.fromkeys(due, 0.0), self._ttl_s)

    def _settle(self, client: Client, sent: list[_Waiting], answers: list[object]) -> None:
        full: set[str] = set()
        failure: Exception | None = None
        for entry, answer in zip(sent, answers, strict=True):
            if not isinstance(answer, Exception):
                self._tally.count("published", entry.namespace, entry.num_tokens, len(entry.raw))
            elif isinstance(answer, redis.OutOfMemoryError):
                full.add(entry.namespace)
                self._tally.drop(entry.num_tokens)
            elif isinstance(answer, redis.ResponseError) and not isinstance(answer, redis.ReadOnlyError):
                self._tally.drop(entry.num_tokens)  # a foreign type at our key, or no right: it would fail again
                failure = answer
            else:
                self._waiting.append(entry)
                failure = answer
        if full:
            self._make_room(client, full)
        if failure is not None:
            raise failure

    def _make_room(self, client: Client, namespaces: set[str]) -> None:
        """Redis is full: give back half of what these hold, once, and leave it in peace for a while."""
        for namespace in namespaces:
            key = self._keys.log(namespace)
            client.xtrim(key, maxlen=client.xlen(key) // 2, approximate=False)
        self._tally.fail(redis.OutOfMemoryError())
        self._full_until = time.monotonic() + FULL_PAUSE_S

    def _due_expiries(self, namespaces: set[str]) -> list[str]:
        now = time.monotonic()
        due = [name for name in namespaces if now >= self._expires.get(name, 0)]
        for name in due:
            self._expires[name] = now + min(EXPIRE_EVERY_S, self._ttl_s / 2)
        if len(self._expires) > 2 * len(namespaces) + 1024:
            self._expires = {name: at for name, at in self._expires.items() if at > now}
        return due
