"""The histories of one served model, shared: with engines that follow this server, and with other servers by Redis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from agentspec.sidecar.block_feed import BlockFeed
from agentspec.sidecar.block_relay import BlockRelay
from agentspec.sidecar.engine import Engine
from agentspec.sidecar.epochs import Epochs
from agentspec.sidecar.sealed import seal, unseal
from agentspec.sidecar.shared_blocks import Arrivals, SharedBlocks
from agentspec.sidecar.store.options import RedisOptions
from agentspec.sidecar.store.store import HistoryStore


class BlockSharing:
    """Shares the histories of one engine; its threads work from `start` to `shutdown`.

    Args:
        engine: whose histories they are.
        model: see `model_id`.
        options: without a URL nothing goes to other servers.
        roots: namespaces that the engine may serve, each with those within it.
        ttl_s: life of a namespace in Redis that nobody uses.

    Attributes:
        epochs: of the model's namespaces.
        relay: for engines that follow.
        store: in Redis; None: there is none.
    """

    def __init__(
        self, engine: Engine, model: str, options: RedisOptions, *, roots: Sequence[str], ttl_s: float
    ) -> None:
        self._engine = engine
        self._arrivals = Arrivals()
        self.epochs = Epochs(model, engine.delete_namespace)
        self.relay = BlockRelay()
        self._feed = BlockFeed(engine, self.epochs)
        self._feed.subscribe(self.relay.put)
        self.epochs.listen(self.relay.wake)
        self.store: HistoryStore | None = None
        if options.redis is not None:
            self.store = HistoryStore(engine, self._feed, options, roots=roots, ttl_s=ttl_s, on_blocks=self.relay.put)

    def start(self) -> None:
        """Begin to share; returns at once, also when Redis is away."""
        if self.store is not None:
            self.store.start()
        self._feed.start()

    def shutdown(self) -> None:
        """Publish what waits and let go."""
        self._feed.shutdown()
        if self.store is not None:
            self.store.shutdown()

    def append(self, blocks: SharedBlocks) -> int | None:
        """Add what another engine wrote, and pass it on; returns the number of its tokens.

        Returns:
            None: it has come before, or its namespace was deleted since it was written.

        Raises:
            ArchiveError: the bytes are no blocks of this model.
        """
        with self.epochs.lock:
            if blocks.epoch < self.epochs.of(blocks.namespace):
                return None
            if not self._arrivals.is_new(blocks.origin, blocks.sequence):
                return None
            num_tokens = self._engine.merge_blocks(blocks.namespace, blocks.blocks, origin=blocks.origin)
            self._arrivals.add(blocks.origin, blocks.sequence)
        self.relay.put(blocks)
        if self.store is not None:
            self.store.put(blocks)
        return num_tokens

    def use(self, namespaces: Iterable[str]) -> None:
        """Note that engines that follow use namespaces."""
        if self.store is not None:
            self.store.use([*namespaces])

    def export(self, namespace: str, *, without_inner: bool = False) -> bytes:
        """The archive of a namespace, what others wrote there included; it won't bring back what is deleted later.

        Args:
            namespace: with those within it.
            without_inner: but without them.
        """
        if self.store is not None:
            self.store.catch_up(namespace)
        last_sequences = self.relay.last_sequences(namespace) if without_inner else {}
        if without_inner:
            (archive,) = self._engine.export_parts(namespace, 1)
        else:
            archive = self._engine.export_histories(namespace)
        return seal(archive, namespace, self.epochs.model, self.epochs.known(), last_sequences)

    def import_archive(self, archive: bytes, namespace: str) -> int:
        """Add an archive of `export`; return the number of its tokens.

        Raises:
            ArchiveError: it is none, holds what is outside of the namespace, or something of it was deleted since.
        """
        # Without Redis a deletion is this server's alone, and whoever imports an archive means to have it back.
        known = self.epochs.known() if self.store is not None else {}
        archive, _ = unseal(archive, namespace, self.epochs.model, known)
        num_tokens = self._engine.import_histories(archive, within=namespace)
        if self.store is not None:
            self.store.note_import(namespace, num_tokens)
        return num_tokens
