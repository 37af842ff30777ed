"""Takes what the engine's requests have written to Redis."""

from __future__ import annotations

import time

import redis

from agentspec.sidecar.epochs import Epochs
from agentspec.sidecar.shared_blocks import BlockQueue, SharedBlocks
from agentspec.sidecar.store.codec import Codec, Entry
from agentspec.sidecar.store.connection import FAILURES, Client
from agentspec.sidecar.store.deletion import note_use, sync
from agentspec.sidecar.store.figures import Tally
from agentspec.sidecar.store.keys import ModelKeys

WAIT_S = 0.25
"""Longest wait for something to publish."""
MAX_LOG_ENTRIES = 100_000
"""Of one namespace; the oldest are dropped, snapshots hold them."""
FULL_PAUSE_S = 30.0
EXPIRE_EVERY_S = 60.0


class Publisher:
    """Publishes for one process.

    Args:
        blocks: to be published.
        keys: of the model.
        codec: makes the bytes.
        epochs: of its namespaces.
        tally: counts.
        ttl_s: life of a namespace in Redis that nobody writes.
    """

    def __init__(
        self, blocks: BlockQueue, *, keys: ModelKeys, codec: Codec, epochs: Epochs, tally: Tally, ttl_s: float
    ) -> None:
        self._blocks = blocks
        self._keys = keys
        self._codec = codec
        self._epochs = epochs
        self._tally = tally
        self._ttl_s = ttl_s
        self._expires: dict[str, float] = {}
        self._full_until = 0.0

    def begin(self, client: Client) -> None:
        """Learn what was deleted meanwhile, before anything goes out under an old epoch."""
        sync(self._epochs, client)

    def publish(self, client: Client, wait_s: float = WAIT_S) -> None:
        """Publish what there is, or wait a moment for it.

        Raises:
            redis.RedisError: it could not be published; the next call tries again.
        """
        if time.monotonic() < self._full_until:
            return time.sleep(wait_s)
        waiting = self._blocks.take(wait_s)
        # What was deleted while Redis could not be reached goes nowhere.
        if waiting := [blocks for blocks in waiting if blocks.epoch >= self._epochs.of(blocks.namespace)]:
            self._send(client, waiting)
        return None

    def flush(self, client: Client) -> None:
        """Publish the rest; the process ends."""
        self.publish(client, 0)

    def _send(self, client: Client, sent: list[SharedBlocks]) -> None:
        raws = [self._encode(blocks) for blocks in sent]
        pipeline = client.pipeline(transaction=False)
        for blocks, raw in zip(sent, raws, strict=True):
            key = self._keys.log(blocks.namespace)
            pipeline.xadd(key, {"b": raw}, maxlen=MAX_LOG_ENTRIES, approximate=True)
        due = self._due_expiries({blocks.namespace for blocks in sent})
        for namespace in due:
            pipeline.expire(self._keys.log(namespace), int(self._ttl_s) + 1)
        try:
            answers = pipeline.execute(raise_on_error=False)
        except FAILURES:
            self._blocks.put_back(sent)
            raise
        self._settle(client, sent, raws, answers[: len(sent)])
        if due:
            note_use(client, self._keys, dict.fromkeys(due, 0.0), self._ttl_s)

    def _encode(self, blocks: SharedBlocks) -> bytes:
        entry = Entry(blocks.origin, blocks.sequence, blocks.epoch, blocks.num_tokens, blocks.blocks)
        return self._codec.encode(entry, self._keys.log(blocks.namespace))

    def _settle(self, client: Client, sent: list[SharedBlocks], raws: list[bytes], answers: list[object]) -> None:
        full: set[str] = set()
        again: list[SharedBlocks] = []
        failure: Exception | None = None
        for blocks, raw, answer in zip(sent, raws, answers, strict=True):
            if not isinstance(answer, Exception):
                self._tally.count("published", blocks.namespace, blocks.num_tokens, len(raw))
            elif isinstance(answer, redis.OutOfMemoryError):
                full.add(blocks.namespace)
                self._blocks.drop(blocks.num_tokens)
            elif isinstance(answer, redis.ResponseError) and not isinstance(answer, redis.ReadOnlyError):
                self._blocks.drop(blocks.num_tokens)  # a foreign type at our key, or no right: it would fail again
                failure = answer
            else:
                again.append(blocks)
                failure = answer
        if again:
            self._blocks.put_back(again)
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
