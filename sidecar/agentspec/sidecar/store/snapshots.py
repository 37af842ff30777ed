"""A namespace's histories as a whole in Redis: written now and then by one engine, read by those that start."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from agentspec.sidecar.engine import ArchiveError, Engine
from agentspec.sidecar.epochs import Epochs
from agentspec.sidecar.store.codec import Codec, Entry, EntryError
from agentspec.sidecar.store.connection import Client, is_foreign
from agentspec.sidecar.store.deletion import sync
from agentspec.sidecar.store.figures import Tally
from agentspec.sidecar.store.keys import ModelKeys

LEASE_MS = 60_000
"""At most one snapshot of a namespace in that time."""
MIN_PARTS = 10
PART_TOKENS = 2_000_000
MIN_PART_TOKENS = 1000
LOG_KEPT_S = 120.0
"""What a snapshot holds stays in the log for so long, for followers that are behind."""
REPLACED_S = 60
"""Life of a snapshot after another one has taken its place."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What Redis says of one.

    Attributes:
        generation: its name.
        epoch: of the namespace when it was begun.
        position: entries of the log up to there are in it.
        num_parts: each has its part of every history, the oldest first.
        num_tokens: in all of it.
    """

    generation: str
    epoch: int
    position: str
    num_parts: int
    num_tokens: int


class Snapshots:
    """Reads and writes the snapshots of one model.

    Args:
        engine: whose histories they are.
        origin: number of the engine.
        keys: of its model.
        codec: reads and makes the bytes.
        epochs: of its namespaces.
        tally: counts.
        ttl_s: life of a snapshot.
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
    ) -> None:
        self._engine = engine
        self._origin = origin
        self._keys = keys
        self._codec = codec
        self._epochs = epochs
        self._tally = tally
        self._ttl_s = ttl_s

    def find(self, client: Client, namespace: str) -> Snapshot | None:
        """The newest snapshot of a namespace; None: there is none, or none of use.

        Raises:
            redis.RedisError: Redis can't be asked.
        """
        try:
            found = client.hgetall(self._keys.snapshot(namespace))
        except redis.ResponseError as error:
            if not is_foreign(error):
                raise
            self._tally.skip("schema")
            return None
        if not found:
            return None
        try:
            snapshot = Snapshot(
                generation=found[b"generation"].decode(),
                epoch=int(found[b"epoch"]),
                position=found[b"position"].decode(),
                num_parts=int(found[b"parts"]),
                num_tokens=int(found[b"tokens"]),
            )
        except (KeyError, ValueError):
            self._tally.skip("schema")
            return None
        if snapshot.epoch > self._epochs.of(namespace):
            sync(self._epochs, client)
        if snapshot.epoch < self._epochs.of(namespace):
            self._tally.skip("stale")
            return None
        return snapshot

    def load(self, client: Client, namespace: str, snapshot: Snapshot, number: int) -> int:
        """Add one part to the engine; returns the number of its tokens, 0 if it is of no use.

        Raises:
            redis.RedisError: Redis can't be asked.
        """
        key = self._keys.part(namespace, snapshot.generation, number)
        raw = client.get(key)
        if raw is None:
            self._tally.skip("missing")
            return 0
        try:
            entry = self._codec.decode(raw, key)
            with self._epochs.lock:
                if entry.epoch < self._epochs.of(namespace):
                    self._tally.skip("stale")
                    return 0
                num_tokens = self._engine.import_histories(entry.blocks, within=namespace)
        except EntryError as error:
            self._tally.skip(error.fault)
            return 0
        except ArchiveError:
            self._tally.skip("corrupt")
            return 0
        self._tally.count("loaded", namespace, num_tokens, len(raw))
        return num_tokens

    def take_lease(self, client: Client, namespace: str) -> bool:
        """Whether this engine is the one to write the next snapshot.

        Raises:
            redis.RedisError: Redis can't be asked.
        """
        return bool(client.set(self._keys.lease(namespace), str(self._origin), nx=True, px=LEASE_MS))

    def write(self, client: Client, namespace: str, position: str) -> Snapshot | None:
        """Write all that the engine holds of a namespace, in place of the snapshot before.

        Args:
            client: of the engine.
            namespace: under the lease.
            position: entries of the log up to there are in the engine.

        Returns:
            None: it was deleted meanwhile.

        Raises:
            redis.RedisError: Redis can't be asked; the snapshot before stays.
        """
        epoch = self._epochs.of(namespace)
        sizes = self._engine.history_sizes(namespace)
        num_tokens = sum(size.num_tokens for size in sizes if size.namespace == namespace)
        num_parts = max(min(MIN_PARTS, num_tokens // MIN_PART_TOKENS), num_tokens // PART_TOKENS, 1)
        snapshot = Snapshot(uuid.uuid4().hex[:12], epoch, position, num_parts, num_tokens)
        for number, archive in enumerate(self._engine.export_parts(namespace, num_parts)):
            key = self._keys.part(namespace, snapshot.generation, number)
            raw = self._codec.encode(Entry(self._origin, number, epoch, num_tokens // num_parts, archive), key)
            client.set(key, raw, px=int(self._ttl_s * 1000) + 1)
        sync(self._epochs, client)
        if self._epochs.of(namespace) != epoch:
            self._expire(client, namespace, snapshot)
            return None
        before = self.find(client, namespace)
        self._commit(client, namespace, snapshot)
        if before is not None:
            self._expire(client, namespace, before)
        self._tally.snapshots += 1
        return snapshot

    def _commit(self, client: Client, namespace: str, snapshot: Snapshot) -> None:
        key = self._keys.snapshot(namespace)
        values: dict[str, str | int] = {
            "generation": snapshot.generation,
            "epoch": snapshot.epoch,
            "position": snapshot.position,
            "parts": snapshot.num_parts,
            "tokens": snapshot.num_tokens,
        }
        client.hset(key, mapping=values)
        client.pexpire(key, int(self._ttl_s * 1000) + 1)
        kept = f"{int((time.time() - LOG_KEPT_S) * 1000)}-0"
        oldest = min(kept, snapshot.position, key=lambda entry_id: int(entry_id.partition("-")[0]))
        client.xtrim(self._keys.log(namespace), minid=oldest)

    def _expire(self, client: Client, namespace: str, snapshot: Snapshot) -> None:
        """Drop the parts of a snapshot, but not from under somebody who is reading them."""
        for number in range(snapshot.num_parts):
            client.expire(self._keys.part(namespace, snapshot.generation, number), REPLACED_S)


def parts_by_age(snapshots: dict[str, Snapshot]) -> Iterator[tuple[str, Snapshot, int]]:
    """Namespace, snapshot and number of each part: the newest of every namespace first, then the rest, oldest first."""
    for namespace, snapshot in snapshots.items():
        yield namespace, snapshot, snapshot.num_parts - 1
    for namespace, snapshot in snapshots.items():
        for number in range(snapshot.num_parts - 1):
            yield namespace, snapshot, number
