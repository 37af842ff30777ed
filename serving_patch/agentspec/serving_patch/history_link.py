"""The histories of an engine that drafts by itself, shared through a draft server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from pathlib import Path

from agentspec.draft.v1 import history_pb2
from agentspec.sidecar.block_feed import BlockFeed
from agentspec.sidecar.engine import Engine
from agentspec.sidecar.epochs import Epochs
from agentspec.sidecar.shared_blocks import BlockQueue, SharedBlocks
from agentspec.sidecar.shared_messages import shared_blocks_message
from agentspec.sidecar.worker import Worker

from .history_figures import HistoryFigures
from .history_receiver import HistoryReceiver
from .sidecar_link import Link, LinkError
from .sidecar_messages import Vocabulary

MAX_WAITING_TOKENS = 2_000_000
"""Taken and not yet sent, while the server is away; of more the oldest are dropped."""
WAIT_S = 0.25
"""Longest wait for something to send."""
MAX_BATCH = 1024
MAX_BATCH_BYTES = 1 << 20
STOP_TIMEOUT_S = 2.0


class HistoryLink:
    """Shares the histories of one engine; its threads work from `start` to `shutdown`, whatever the server does.

    Args:
        engine: whose histories they are; it may draft meanwhile, it locks itself.
        socket: of the draft server, which may come later.
        vocabulary: of the target model.
        namespace: that the engine serves, with those within it.
        ttl_s: a namespace that no request has used for so long is not followed any more.
        max_archive_bytes: of the history of one namespace, which comes when it is used first; a larger one is refused.
    """

    def __init__(
        self,
        engine: Engine,
        socket: Path,
        vocabulary: Vocabulary,
        *,
        namespace: str,
        ttl_s: float,
        max_archive_bytes: int,
    ) -> None:
        self._vocabulary = vocabulary
        self._figures = HistoryFigures()
        self._epochs = Epochs(vocabulary.fingerprint, engine.delete_namespace)
        self._queue = BlockQueue(MAX_WAITING_TOKENS)
        self._feed = BlockFeed(engine, self._epochs)
        self._receiver = HistoryReceiver(
            engine,
            vocabulary.fingerprint,
            self._epochs,
            self._figures,
            origin=self._feed.origin,
            namespace=namespace,
            ttl_s=ttl_s,
            max_archive_bytes=max_archive_bytes,
        )
        self._feed.subscribe(self._queue.put, self._receiver.use)
        worker = partial(
            Worker,
            peer=f"the draft server at {socket}",
            connect=partial(Link, socket),
            begin=self._introduce,
            failures=(LinkError,),
        )
        self._sending = worker(
            "agentspec-send", work=self._send, end=partial(self._send, wait_s=0.0), on_failure=self._note_send_failure
        )
        self._receiving = worker(
            "agentspec-receive", work=self._receiver.receive, on_failure=self._note_receive_failure
        )

    def start(self) -> None:
        """Begin to share; returns at once, also when the server is away."""
        self._sending.start()
        self._receiving.start()
        self._feed.start()

    def shutdown(self) -> None:
        """Send what waits and let go; takes a few seconds at most."""
        self._feed.shutdown()
        self._sending.stop()
        self._receiving.stop()
        self._receiver.stop()
        end = time.monotonic() + STOP_TIMEOUT_S
        self._sending.join(STOP_TIMEOUT_S)
        self._receiving.join(max(0.0, end - time.monotonic()))

    def figures(self) -> HistoryFigures:
        """What has been seen; cheap and thread-safe."""
        return replace(
            self._figures,
            is_sending=self._sending.is_connected,
            is_receiving=self._receiving.is_connected,
            num_dropped_tokens=self._queue.num_dropped_tokens + self._feed.num_dropped_tokens,
        )

    def _introduce(self, link: Link) -> None:
        models = {model.model_fingerprint for model in link.greet().models}
        if self._vocabulary.fingerprint not in models:
            link.register(self._vocabulary)

    def _send(self, link: Link, wait_s: float = WAIT_S) -> None:
        """Send what waits, in order.

        Raises:
            LinkError: the server did not take it; what it may take later waits again.
        """
        waiting = self._queue.take(wait_s)
        # What was deleted while the server could not be reached goes nowhere.
        waiting = [blocks for blocks in waiting if blocks.epoch >= self._epochs.of(blocks.namespace)]
        ready = [*takewhile(lambda blocks: self._receiver.may_send(blocks.namespace), waiting)]
        num_sent = 0
        try:
            for batch in _batches(ready):
                num_sent += len(batch)
                self._send_batch(link, batch)
        except LinkError as error:
            if not error.is_final:
                num_sent -= len(batch)
            raise
        finally:
            self._queue.put_back(waiting[num_sent:])
        if len(ready) < len(waiting):
            time.sleep(wait_s)

    def _send_batch(self, link: Link, batch: Sequence[SharedBlocks]) -> None:
        request = history_pb2.AppendBlocksRequest(
            model_fingerprint=self._vocabulary.fingerprint,
            shared_blocks=[shared_blocks_message(blocks) for blocks in batch],
        )
        num_tokens = sum(blocks.num_tokens for blocks in batch)
        try:
            answer = link.append(request)
        except LinkError as error:
            if error.is_final:
                self._queue.drop(num_tokens)
            raise
        self._figures.num_sent_tokens += num_tokens
        self._figures.num_skipped_blocks += answer.num_skipped

    def _note_send_failure(self, _: Exception) -> None:
        self._figures.num_send_failures += 1

    def _note_receive_failure(self, _: Exception) -> None:
        self._figures.num_receive_failures += 1


def _batches(waiting: Sequence[SharedBlocks]) -> Iterator[Sequence[SharedBlocks]]:
    """Cut what waits into messages that the server takes."""
    begin = num_bytes = 0
    for index, blocks in enumerate(waiting):
        num_bytes += len(blocks.blocks)
        if index > begin and (num_bytes > MAX_BATCH_BYTES or index - begin == MAX_BATCH):
            yield waiting[begin:index]
            begin, num_bytes = index, len(blocks.blocks)
    if begin < len(waiting):
        yield waiting[begin:]
