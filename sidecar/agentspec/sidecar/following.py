"""One engine that drafts by itself and follows what the others of its model write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Self

from agentspec.draft.v1 import history_pb2
from agentspec.sidecar.block_relay import Reader
from agentspec.sidecar.block_sharing import BlockSharing
from agentspec.sidecar.epochs import epoch_field, outer_namespaces
from agentspec.sidecar.shared_messages import FollowRequest, deletion_messages, shared_blocks_message

MAX_MESSAGE_BYTES = 1 << 20
NOTE_USE_S = 30.0


class Following:
    """Reads the relay of a model for one engine; a context, used by the server's loop alone.

    Args:
        sharing: of the model.
        request: what the engine asked for.
        boot_id: of this server.
    """

    def __init__(self, sharing: BlockSharing, request: FollowRequest, *, boot_id: int) -> None:
        self._sharing = sharing
        self._request = request
        self._boot_id = boot_id
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._reader = Reader(request.namespaces, request.new_namespaces, request.origin, self._wake)
        self._namespaces = request.namespaces | request.new_namespaces
        self._told: dict[str, int] = {}

    def __enter__(self) -> Self:
        model = self._sharing.epochs.model
        times = {epoch_field(model, namespace): epoch for namespace, epoch in self._request.deletions.items()}
        self._sharing.epochs.raise_to(times)
        request = self._request
        position = None
        if request.boot_id:
            position = request.position if request.boot_id == self._boot_id else 0
        self._sharing.relay.open(self._reader, position)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sharing.relay.close(self._reader)

    async def messages(self) -> AsyncIterator[history_pb2.FollowBlocksResponse]:
        """What the engine is to be told, without end; the first at once."""
        self._sharing.use(self._namespaces)
        yield self._message()
        while True:
            try:
                async with asyncio.timeout(NOTE_USE_S):
                    await self._changed.wait()
            except TimeoutError:
                self._sharing.use(self._namespaces)
                continue
            self._changed.clear()
            while (message := self._message()).shared_blocks or message.deletions or message.num_dropped_tokens:
                yield message

    def _wake(self) -> None:
        with suppress(RuntimeError):  # the server has ended
            self._loop.call_soon_threadsafe(self._changed.set)

    def _message(self) -> history_pb2.FollowBlocksResponse:
        deletions = self._new_deletions()  # before the blocks: those of a later epoch come after it
        blocks = self._sharing.relay.read(self._reader, MAX_MESSAGE_BYTES)
        return history_pb2.FollowBlocksResponse(
            num_dropped_tokens=self._sharing.relay.take_dropped(self._reader),
            shared_blocks=[shared_blocks_message(one) for one in blocks],
            boot_id=self._boot_id,
            position=self._reader.position,
            deletions=deletion_messages(deletions),
        )

    def _new_deletions(self) -> Mapping[str, int]:
        found = {
            namespace: epoch
            for namespace, epoch in self._sharing.epochs.by_namespace().items()
            if epoch > self._told.get(namespace, 0) and self._concerns(namespace)
        }
        self._told |= found
        return found

    def _concerns(self, deleted: str) -> bool:
        return any(
            deleted in outer_namespaces(namespace) or deleted.startswith(f"{namespace}/")
            for namespace in self._namespaces
        )
