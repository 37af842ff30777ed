"""The histories of one engine, shared through Redis: what its requests write goes out, what others' write comes in."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial

from agentspec.sidecar.engine import Engine
from agentspec.sidecar.store.codec import Codec
from agentspec.sidecar.store.connection import connect
from agentspec.sidecar.store.deletion import seal, unseal
from agentspec.sidecar.store.epochs import Epochs
from agentspec.sidecar.store.figures import StoreFigures, Tally
from agentspec.sidecar.store.follower import DeletionWatcher, Follower
from agentspec.sidecar.store.keeper import Keeper
from agentspec.sidecar.store.keys import NUM_SHARDS, ModelKeys
from agentspec.sidecar.store.options import RedisOptions, read_key
from agentspec.sidecar.store.publisher import Publisher
from agentspec.sidecar.store.snapshots import Snapshots
from agentspec.sidecar.store.worker import Worker

MAX_WAITING_TOKENS = 2_000_000
"""Written and not yet published, while Redis is away; of more the oldest are dropped."""
STOP_TIMEOUT_S = 2.0


class HistoryStore:
    """Shares the histories of one engine; its threads work until `shutdown`, whatever Redis does.

    Args:
        engine: whose histories they are; it may draft meanwhile, it locks itself.
        model: see `model_id`.
        options: with a URL.
        roots: namespaces that the engine may serve, each with those within it.
        ttl_s: life of a namespace in Redis that nobody uses.
    """

    def __init__(
        self, engine: Engine, model: str, options: RedisOptions, *, roots: Sequence[str], ttl_s: float
    ) -> None:
        address = options.redis_address()
        if address is None:
            raise ValueError("redis: expected a URL")
        self.model = model
        self._engine = engine
        self._tally = Tally()
        self.epochs = Epochs(model, engine.delete_namespace)
        keys = ModelKeys(model)
        codec = Codec(read_key(options.redis_key_file) if options.redis_key_file is not None else None)
        origin = secrets.randbits(64)
        self.followers = [
            Follower(
                engine,
                origin=origin,
                keys=keys,
                codec=codec,
                epochs=self.epochs,
                tally=self._tally,
            )
            for _ in range(NUM_SHARDS if address.kind == "cluster" else 1)
        ]
        snapshots = Snapshots(
            engine, origin=origin, keys=keys, codec=codec, epochs=self.epochs, tally=self._tally, ttl_s=ttl_s
        )
        self._keeper = Keeper(
            engine,
            keys=keys,
            epochs=self.epochs,
            snapshots=snapshots,
            followers=self.followers,
            tally=self._tally,
            roots=roots,
            ttl_s=ttl_s,
        )
        publisher = Publisher(
            engine,
            origin=origin,
            keys=keys,
            codec=codec,
            epochs=self.epochs,
            tally=self._tally,
            ttl_s=ttl_s,
            on_use=self._keeper.use,
        )
        watcher = DeletionWatcher(self.epochs)
        worker = partial(Worker, connect=partial(connect, options, address), tally=self._tally)
        self._workers = [
            worker("agentspec-publish", begin=publisher.begin, work=publisher.publish, end=publisher.flush),
            worker("agentspec-keep", begin=self._keeper.begin, work=self._keeper.keep),
            worker("agentspec-deletions", begin=watcher.begin, work=watcher.read),
            *(worker("agentspec-follow", begin=one.begin, work=one.read) for one in self.followers),
        ]

    def start(self) -> None:
        """Begin to share; returns at once, also when Redis is away."""
        self._engine.share_blocks(MAX_WAITING_TOKENS)
        for worker in self._workers:
            worker.start()

    def shutdown(self) -> None:
        """Publish what waits and let go; takes two seconds at most."""
        for worker in self._workers:
            worker.stop()
        end = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
        self._engine.share_blocks(0)

    def seal(self, archive: bytes, namespace: str) -> bytes:
        """An exported archive that will not bring back what is deleted later."""
        return seal(archive, namespace, self.model, self.epochs.known())

    def unseal(self, raw: bytes, namespace: str) -> bytes:
        """The archive to import into a namespace.

        Raises:
            ArchiveError: something of it was deleted since it was made.
        """
        return unseal(raw, namespace, self.model, self.epochs.known())

    def note_import(self, namespace: str, num_tokens: int) -> None:
        """Note text that only a snapshot will take to engines that start later."""
        self._tally.note_fresh(namespace, num_tokens)

    def num_fresh_tokens(self, namespace: str) -> int:
        """Tokens that went or came since the last snapshot."""
        return self._tally.fresh[namespace]

    def figures(self) -> StoreFigures:
        """What has been seen; cheap and thread-safe."""
        tally = self._tally
        return StoreFigures(
            is_connected=all(worker.is_connected for worker in self._workers),
            is_ready=self._keeper.is_ready,
            is_complete=self._keeper.is_complete,
            num_namespaces=sum(len(follower.namespaces()) for follower in self.followers),
            num_entries=dict(tally.entries),
            num_tokens=dict(tally.tokens),
            num_bytes=dict(tally.bytes),
            num_skipped=dict(tally.skipped),
            num_failures=dict(tally.failures),
            num_dropped_tokens=tally.dropped_tokens + self._engine.num_unshared_tokens(),
            num_snapshots=tally.snapshots,
            delay_s=tally.delay_s,
        )
