"""The histories of one engine, shared through Redis: what its requests write goes out, what others' write comes in."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from agentspec.sidecar.block_feed import BlockFeed
from agentspec.sidecar.engine import Engine
from agentspec.sidecar.shared_blocks import Arrivals, BlockQueue, SharedBlocks
from agentspec.sidecar.store.codec import Codec
from agentspec.sidecar.store.connection import FAILURES, connect
from agentspec.sidecar.store.figures import StoreFigures, Tally
from agentspec.sidecar.store.follower import DeletionWatcher, Follower
from agentspec.sidecar.store.keeper import Keeper
from agentspec.sidecar.store.keys import NUM_SHARDS, ModelKeys
from agentspec.sidecar.store.options import RedisOptions, read_key
from agentspec.sidecar.store.publisher import Publisher
from agentspec.sidecar.store.snapshots import Snapshots
from agentspec.sidecar.worker import Worker

MAX_WAITING_TOKENS = 2_000_000
"""Taken and not yet published, while Redis is away; of more the oldest are dropped."""
STOP_TIMEOUT_S = 2.0
CATCH_UP_S = 2.0


class HistoryStore:
    """Shares the histories of one engine; its threads work until `shutdown`, whatever Redis does.

    Args:
        engine: whose histories they are; it may draft meanwhile, it locks itself.
        feed: of that engine, with its epochs; whoever made it starts it after the store and ends it before.
        options: with a URL.
        roots: namespaces that the engine may serve, each with those within it.
        ttl_s: life of a namespace in Redis that nobody uses.
        on_blocks: told of what others write, but for what snapshots hold; must neither block nor raise.
    """

    def __init__(
        self,
        engine: Engine,
        feed: BlockFeed,
        options: RedisOptions,
        *,
        roots: Sequence[str],
        ttl_s: float,
        on_blocks: Callable[[SharedBlocks], None] | None = None,
    ) -> None:
        address = options.redis_address()
        if address is None:
            raise ValueError("redis: expected a URL")
        self._tally = Tally()
        self._queue = BlockQueue(MAX_WAITING_TOKENS)
        self._published = Arrivals()
        self._feed = feed
        epochs, model = feed.epochs, feed.epochs.model
        keys = ModelKeys(model)
        codec = Codec(read_key(options.redis_key_file) if options.redis_key_file is not None else None)
        self.followers = [
            Follower(
                engine,
                published=self._published,
                keys=keys,
                codec=codec,
                epochs=epochs,
                tally=self._tally,
                on_blocks=on_blocks,
            )
            for _ in range(NUM_SHARDS if address.kind == "cluster" else 1)
        ]
        snapshots = Snapshots(
            engine, origin=feed.origin, keys=keys, codec=codec, epochs=epochs, tally=self._tally, ttl_s=ttl_s
        )
        self._keeper = Keeper(
            engine,
            keys=keys,
            epochs=epochs,
            snapshots=snapshots,
            followers=self.followers,
            tally=self._tally,
            roots=roots,
            ttl_s=ttl_s,
        )
        publisher = Publisher(self._queue, keys=keys, codec=codec, epochs=epochs, tally=self._tally, ttl_s=ttl_s)
        watcher = DeletionWatcher(epochs)
        worker = partial(
            Worker,
            peer="Redis",
            connect=partial(connect, options, address),
            failures=FAILURES,
            on_failure=self._tally.fail,
        )
        self._workers = [
            worker("agentspec-publish", begin=publisher.begin, work=publisher.publish, end=publisher.flush),
            worker("agentspec-keep", begin=self._keeper.begin, work=self._keeper.keep),
            worker("agentspec-deletions", begin=watcher.begin, work=watcher.read),
            *(worker("agentspec-follow", begin=one.begin, work=one.read) for one in self.followers),
        ]
        feed.subscribe(self.put, self.use)

    def start(self) -> None:
        """Begin to share; returns at once, also when Redis is away."""
        for worker in self._workers:
            worker.start()

    def shutdown(self) -> None:
        """Publish what waits and let go; takes two seconds at most."""
        for worker in self._workers:
            worker.stop()
        end = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))

    def put(self, blocks: SharedBlocks) -> None:
        """Publish blocks, of this engine or of another one that leaves it to this process."""
        self._published.add(blocks.origin, blocks.sequence)
        self._queue.put(blocks)

    def use(self, namespaces: Sequence[str]) -> None:
        """Note that requests use namespaces; they will be followed."""
        self._keeper.use(namespaces)

    def catch_up(self, namespace: str, timeout_s: float = CATCH_UP_S) -> bool:
        """Note the use of a namespace, and wait until what others wrote there before is here; returns whether it is."""
        end = time.monotonic() + timeout_s
        self.use([namespace])
        while not self._keeper.is_caught_up(namespace):
            if time.monotonic() > end:
                return False
            time.sleep(0.01)
        return True

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
            num_dropped_tokens=self._queue.num_dropped_tokens + self._feed.num_dropped_tokens,
            num_snapshots=tally.snapshots,
            delay_s=tally.delay_s,
        )
