"""Brings what other engines of a draft server write into the engine of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from agentspec.draft.v1 import history_pb2
from agentspec.sidecar.engine import ArchiveError, Engine
from agentspec.sidecar.epochs import ANY_MODEL, Epochs, epoch_field
from agentspec.sidecar.sealed import unseal
from agentspec.sidecar.shared_blocks import Arrivals, SharedBlocks
from agentspec.sidecar.shared_messages import MAX_NAMESPACES, blocks_of, deletion_messages

from .history_figures import HistoryFigures
from .sidecar_link import FollowCall, Link, LinkError

FOLLOW_S = 60.0
"""Life of one call: the next one tells the server which namespaces are in use."""
MAX_ORIGINS = 1024  # remembered of one namespace


@dataclass(slots=True)
class Followed:
    """How far a namespace has come.

    Attributes:
        used_at: seconds, monotonic.
        has_history: whether what was written before it was followed is here.
        arrivals: blocks that have come.
    """

    used_at: float
    has_history: bool = False
    arrivals: Arrivals = field(default_factory=partial(Arrivals, MAX_ORIGINS))


class HistoryReceiver:
    """Follows the namespaces of one engine; all but `use` and `stop` is called by one thread.

    Args:
        engine: gets the blocks.
        fingerprint: of its model.
        epochs: of its namespaces.
        figures: counts.
        origin: of the engine's own blocks.
        namespace: that the engine serves, with those within it; followed from the start.
        ttl_s: a namespace that no request has used for so long is left.
        max_archive_bytes: of the history of one namespace; a larger one is refused.
    """

    def __init__(
        self,
        engine: Engine,
        fingerprint: str,
        epochs: Epochs,
        figures: HistoryFigures,
        *,
        origin: int,
        namespace: str,
        ttl_s: float,
        max_archive_bytes: int,
    ) -> None:
        self._engine = engine
        self._fingerprint = fingerprint
        self._epochs = epochs
        self._figures = figures
        self._origin = origin
        self._root = namespace
        self._ttl_s = ttl_s
        self._max_archive_bytes = max_archive_bytes
        self._lock = threading.Lock()
        self._followed: dict[str, Followed] = {}
        self._call: FollowCall | None = None
        self._is_outdated = False  # a namespace was added that the call does not name
        self._boot_id = 0
        self._position = 0
        self.use([namespace])

    def use(self, namespaces: Iterable[str]) -> None:
        """Note that requests use namespaces; new ones will be followed."""
        now = time.monotonic()
        with self._lock:
            for namespace in namespaces:
                if (followed := self._followed.get(namespace)) is not None:
                    followed.used_at = now
                    continue
                if len(self._followed) >= MAX_NAMESPACES:
                    others = self._followed.keys() - {self._root}
                    del self._followed[min(others, key=lambda name: self._followed[name].used_at)]
                self._followed[namespace] = Followed(now)
                self._is_outdated = True
        self._end_call_if_outdated()

    def may_send(self, namespace: str) -> bool:
        """Whether text of a namespace may go to the server: its history comes first, so that it can't hold the text."""
        with self._lock:
            followed = self._followed.get(namespace)
            return followed is None or followed.has_history

    def stop(self) -> None:
        """End the call that goes on; no other one is to be begun."""
        with self._lock:
            self._is_outdated = True
        self._end_call_if_outdated()

    def receive(self, link: Link) -> None:
        """Take in what comes, until a namespace is added or the call has lived long enough.

        Raises:
            LinkError: the server is gone or refuses; the next call goes on where this one ended.
        """
        request = self._request()
        call = link.follow(request, FOLLOW_S)
        with self._lock:
            self._call = call
        self._end_call_if_outdated()
        has_come = False
        try:
            for message in call:
                self._take(message)
                if not has_come:
                    has_come = True
                    self._bring_histories(link, request.new_namespaces)
        finally:
            with self._lock:
                self._call = None
            call.cancel()
        if not has_come and not call.is_cancelled:
            raise LinkError(f"no answer within {FOLLOW_S:g} s")

    def _end_call_if_outdated(self) -> None:
        with self._lock:
            call = self._call if self._is_outdated else None
        if call is not None:
            call.cancel()

    def _request(self) -> history_pb2.FollowBlocksRequest:
        self._leave_unused()
        with self._lock:
            self._is_outdated = False
            namespaces = {name: followed.has_history for name, followed in self._followed.items()}
        self._figures.num_namespaces = len(namespaces)
        # Only what this engine may be asked about: the server refuses the rest.
        deletions = {name: time_ms for name, time_ms in self._epochs.by_namespace().items() if self._serves(name)}
        return history_pb2.FollowBlocksRequest(
            model_fingerprint=self._fingerprint,
            namespaces=[name for name, has_history in namespaces.items() if has_history],
            new_namespaces=[name for name, has_history in namespaces.items() if not has_history],
            origin=self._origin,
            boot_id=self._boot_id,
            position=self._position,
            deletions=deletion_messages(deletions),
        )

    def _serves(self, namespace: str) -> bool:
        return namespace == self._root or namespace.startswith(f"{self._root}/")

    def _leave_unused(self) -> None:
        oldest = time.monotonic() - self._ttl_s
        with self._lock:
            for name in [name for name, followed in self._followed.items() if followed.used_at < oldest]:
                if name != self._root:
                    del self._followed[name]

    def _take(self, message: history_pb2.FollowBlocksResponse) -> None:
        times = {epoch_field(ANY_MODEL, one.namespace): one.epoch for one in message.deletions}
        self._epochs.raise_to(times)
        for one in message.shared_blocks:
            self._merge(blocks_of(one))
        self._figures.num_missed_tokens += message.num_dropped_tokens
        self._boot_id, self._position = message.boot_id, message.position

    def _merge(self, blocks: SharedBlocks) -> None:
        with self._lock:
            followed = self._followed.get(blocks.namespace)
        if followed is None:
            return
        with self._epochs.lock:
            is_news = blocks.epoch >= self._epochs.of(blocks.namespace)
            if is_news and followed.arrivals.add(blocks.origin, blocks.sequence):
                try:
                    num_tokens = self._engine.merge_blocks(blocks.namespace, blocks.blocks, origin=blocks.origin)
                except ArchiveError:
                    pass
                else:
                    self._figures.num_received_tokens += num_tokens
                    return
        self._figures.num_skipped_blocks += 1

    def _bring_histories(self, link: Link, namespaces: Iterable[str]) -> None:
        """Add what was written in namespaces before they were followed."""
        for namespace in namespaces:
            last_sequences: Mapping[int, int] = {}
            try:
                sealed = link.export(self._fingerprint, namespace, self._max_archive_bytes)
                with self._epochs.lock:
                    history = unseal(sealed, namespace, self._epochs.model, self._epochs.known())
                    num_tokens = self._engine.import_histories(history.archive, within=namespace)
            except LinkError as error:
                if not error.is_final:
                    raise
                self._figures.num_receive_failures += 1
            except ArchiveError:
                self._figures.num_receive_failures += 1
            else:
                self._figures.num_received_tokens += num_tokens
                last_sequences = history.last_sequences
            with self._lock:
                if (followed := self._followed.get(namespace)) is not None:
                    followed.has_history = True
                    followed.arrivals.raise_to(last_sequences)
