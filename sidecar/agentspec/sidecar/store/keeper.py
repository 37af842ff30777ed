"""Keeps a model's namespaces: brings in what others wrote before, and writes snapshots when enough is new."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from agentspec.sidecar.engine import Engine
from agentspec.sidecar.epochs import Epochs
from agentspec.sidecar.store.connection import Client
from agentspec.sidecar.store.deletion import note_use, sync
from agentspec.sidecar.store.figures import Tally
from agentspec.sidecar.store.follower import START, Follower
from agentspec.sidecar.store.keys import ModelKeys
from agentspec.sidecar.store.snapshots import Snapshot, Snapshots, parts_by_age

WAIT_S = 0.25
HOUSEKEEPING_S = 10.0
SEARCH_S = 60.0
"""Between two looks for snapshots that Redis has lost."""
MAX_WARM_NAMESPACES = 1024
MIN_SNAPSHOT_TOKENS = 20_000
"""New text of a namespace that is worth a snapshot, if it is also a quarter of the last one."""
SNAPSHOT_AGE_S = 900.0
MIN_AGED_TOKENS = 1000
"""New text that is worth a snapshot when the last one is old."""


@dataclass(frozen=True, slots=True)
class _Last:
    """The snapshot of a namespace that was written or seen last, and when."""

    generation: str
    num_tokens: int
    seen_at: float


_NONE = _Last("", 0, 0.0)


class Keeper:
    """Keeps the namespaces of one engine.

    Args:
        engine: whose histories are kept.
        keys: of its model.
        epochs: of its namespaces.
        snapshots: of its model.
        followers: one, or one of each shard, in order.
        tally: tells how much is new.
        roots: namespaces that the engine may serve, each with those within it.
        ttl_s: life of a namespace that nobody uses.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        keys: ModelKeys,
        epochs: Epochs,
        snapshots: Snapshots,
        followers: Sequence[Follower],
        tally: Tally,
        roots: Sequence[str],
        ttl_s: float,
    ) -> None:
        self._engine = engine
        self._keys = keys
        self._epochs = epochs
        self._snapshots = snapshots
        self._followers = followers
        self._roots = roots
        self._ttl_s = ttl_s
        self._used: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._tally = tally
        self._last: dict[str, _Last] = {}
        self._kept_at = self._searched_at = 0.0
        self.is_ready = False
        self.is_complete = False

    def use(self, namespaces: Sequence[str]) -> None:
        """Note that requests use namespaces; they will be followed."""
        for namespace in namespaces:
            self._used.put(namespace)

    def is_caught_up(self, namespace: str) -> bool:
        """Whether all is here that others have written to a namespace."""
        return self._follower_of(namespace).is_caught_up(namespace)

    def begin(self, client: Client) -> None:
        """Learn what was deleted meanwhile; at the first time, bring in what was written before.

        Raises:
            redis.RedisError: Redis can't be asked; to be called again.
        """
        sync(self._epochs, client)
        if not self.is_complete:
            found = client.zrevrange(self._keys.registry, 0, 4 * MAX_WARM_NAMESPACES)
            names = [name.decode(errors="replace") for name in found]
            self._bring([name for name in names if self._is_served(name)][:MAX_WARM_NAMESPACES], client)
            self.is_complete = True

    def keep(self, client: Client) -> None:
        """Bring in the namespaces that are new, keep house now and then, or wait a moment.

        Raises:
            redis.RedisError: Redis can't be asked.
        """
        used: set[str] = set()
        with suppress(queue.Empty):
            used.add(self._used.get(timeout=WAIT_S))
            while True:
                used.add(self._used.get_nowait())
        for namespace in used:
            if (follower := self._follower_of(namespace)).position(namespace) is not None:
                follower.follow(namespace, START)
        new = [name for name in used if self._follower_of(name).position(name) is None]
        if new:
            try:
                self._bring(new, client)
            except Exception:
                self.use(new)
                raise
        if time.monotonic() - self._kept_at > HOUSEKEEPING_S:
            self._kept_at = time.monotonic()
            self._keep_house(client)

    def _is_served(self, namespace: str) -> bool:
        return any(namespace == root or namespace.startswith(f"{root}/") for root in self._roots)

    def _bring(self, namespaces: Sequence[str], client: Client) -> None:
        found = {name: snapshot for name in namespaces if (snapshot := self._snapshots.find(client, name))}
        for number, (namespace, snapshot, part) in enumerate(parts_by_age(found)):
            if number == len(found):
                self._follow(namespaces, found)
            self._snapshots.load(client, namespace, snapshot, part)
        self._follow(namespaces, found)

    def _follow(self, namespaces: Sequence[str], found: dict[str, Snapshot]) -> None:
        for namespace in namespaces:
            snapshot = found.get(namespace)
            self._follower_of(namespace).follow(namespace, snapshot.position if snapshot else START)
            if snapshot:
                self._last[namespace] = _Last(snapshot.generation, snapshot.num_tokens, time.monotonic())
        self.is_ready = True

    def _follower_of(self, namespace: str) -> Follower:
        return self._followers[self._keys.shard(namespace) % len(self._followers)]

    def _keep_house(self, client: Client) -> None:
        ages: dict[str, float] = {}
        for follower in self._followers:
            follower.leave_unused(self._ttl_s)
            ages |= follower.namespaces()
        note_use(client, self._keys, ages, self._ttl_s)
        due = {name for name in ages if self._is_due(name)}
        if time.monotonic() - self._searched_at > SEARCH_S:
            self._searched_at = time.monotonic()
            due |= self._missing(client, [*ages])
        for namespace in due:
            if self._snapshots.take_lease(client, namespace):
                self._write(client, namespace)

    def _is_due(self, namespace: str) -> bool:
        fresh = self._tally.fresh[namespace]
        last = self._last.get(namespace, _NONE)
        if fresh >= MIN_SNAPSHOT_TOKENS and fresh >= last.num_tokens / 4:
            return True
        return fresh >= MIN_AGED_TOKENS and time.monotonic() - last.seen_at > SNAPSHOT_AGE_S

    def _missing(self, client: Client, namespaces: Sequence[str]) -> set[str]:
        """Those that have no snapshot, though there is much to put into one: Redis has lost it."""
        pipeline = client.pipeline(transaction=False)
        for namespace in namespaces:
            pipeline.exists(self._keys.snapshot(namespace))
        missing = {name for name, count in zip(namespaces, pipeline.execute(), strict=True) if not count}
        sizes = {name: self._engine.history_sizes(name) for name in missing}
        return {
            name
            for name in missing
            if sum(size.num_tokens for size in sizes[name] if size.namespace == name) >= MIN_SNAPSHOT_TOKENS
        }

    def _write(self, client: Client, namespace: str) -> None:
        position = self._follower_of(namespace).position(namespace)
        if position is None:
            return
        fresh = self._tally.fresh[namespace]
        found = self._snapshots.find(client, namespace)
        last = self._last.get(namespace, _NONE)
        if found is None or found.generation == last.generation:
            found = self._snapshots.write(client, namespace, position)
        if found is not None:  # else it was deleted
            self._last[namespace] = _Last(found.generation, found.num_tokens, time.monotonic())
        self._tally.settle(namespace, fresh)
