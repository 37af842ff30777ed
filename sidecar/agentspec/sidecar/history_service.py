"""`HistoryService`: what the histories of a server hold, saved, loaded, deleted; for callers with the history role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from agentspec.draft.v1 import history_pb2
from agentspec.sidecar.callers import Caller
from agentspec.sidecar.engine import ArchiveError, BlockStats
from agentspec.sidecar.epochs import ANY_MODEL, epoch_field, now_ms
from agentspec.sidecar.following import Following
from agentspec.sidecar.refusal import RefusalError, exhausted, invalid
from agentspec.sidecar.rpc import Calls, Context, parse
from agentspec.sidecar.served_model import ServedModel
from agentspec.sidecar.served_models import ServedModels, check_fingerprint
from agentspec.sidecar.server_options import ServerOptions
from agentspec.sidecar.shared_messages import read_following
from agentspec.sidecar.store.connection import FAILURES
from agentspec.sidecar.store.deletion import delete_shared
from agentspec.sidecar.wire import check_batch, check_name

PART_BYTES = 1 << 20
PART_S = 30
MAX_TRANSFERS = 2  # exports and imports at a time: each holds a whole archive


_Value = TypeVar("_Value")


class HistoryService:
    """Answers for all models of a server.

    Args:
        models: what is served.
        calls: makes the handlers.
        options: of the server.
    """

    def __init__(self, models: ServedModels, calls: Calls, options: ServerOptions) -> None:
        self._models = models
        self._calls = calls
        self._options = options
        # A model's histories take four times the bytes of their archive: what is larger would not stay.
        self._max_archive_bytes = int(options.history_bytes) // options.max_models // 2
        self._transfers = asyncio.Semaphore(MAX_TRANSFERS)

    def handler(self) -> grpc.GenericRpcHandler:
        """The service, to be added to a gRPC server."""
        return self._calls.service(
            history_pb2.DESCRIPTOR.services_by_name["HistoryService"],
            {
                "AppendBlocks": self.append_blocks,
                "GetStats": self.get_stats,
                "ListKeys": self.list_keys,
                "DeleteNamespace": self.delete_namespace,
            },
            {"ImportHistory": self.import_history},
            {"ExportHistory": self.export_history, "FollowBlocks": self.follow_blocks},
        )

    async def append_blocks(self, request: history_pb2.AppendBlocksRequest, caller: Caller) -> Message:
        """Store finished texts; the first that is refused ends the call."""
        caller.check_history_role()
        model = self._models.get(request.model_fingerprint)
        check_batch(len(request.blocks), "blocks")
        check_batch(len(request.shared_blocks), "shared_blocks")
        num_tokens = await asyncio.to_thread(model.append, caller, request.blocks)
        num_shared, num_skipped = await asyncio.to_thread(model.append_shared, caller, request.shared_blocks)
        return history_pb2.AppendBlocksResponse(num_tokens=num_tokens + num_shared, num_skipped=num_skipped)

    async def follow_blocks(self, request: history_pb2.FollowBlocksRequest, context: Context, caller: Caller) -> None:
        """Send what others write, until the engine or the server ends."""
        caller.check_history_role()
        model = self._models.get(request.model_fingerprint)
        with Following(model.sharing, read_following(request, caller), boot_id=self._models.boot_id) as following:
            async for message in following.messages():
                await self._within(context.write(message.SerializeToString()), "the reader took no blocks")

    async def get_stats(self, request: history_pb2.GetStatsRequest, caller: Caller) -> Message:
        """Counts of the caller's namespaces."""
        caller.check_history_role()
        models = [_stats_of(model, caller) for model in self._named(request.model_fingerprint)]
        return history_pb2.GetStatsResponse(models=models)

    async def list_keys(self, request: history_pb2.ListKeysRequest, caller: Caller) -> Message:
        """The histories of a namespace, or of all that the caller may use."""
        caller.check_history_role()
        model = self._models.get(request.model_fingerprint)
        namespaces = [caller.namespace(request.namespace)] if request.namespace else caller.namespaces
        return history_pb2.ListKeysResponse(
            keys=[
                history_pb2.HistoryKey(
                    namespace=size.namespace, stage=size.stage, num_tokens=size.num_tokens, num_bytes=size.num_bytes
                )
                for namespace in namespaces
                for size in model.engine.history_sizes(namespace)
            ]
        )

    async def delete_namespace(self, request: history_pb2.DeleteNamespaceRequest, caller: Caller) -> Message:
        """Forget a namespace in one model, or in all."""
        caller.check_history_role()
        check_name(request.namespace, "namespace", can_be_empty=False)
        namespace = caller.namespace(request.namespace)
        models = self._named(request.model_fingerprint)
        of_model = models[0].sharing.epochs.model if request.model_fingerprint else None
        epoch = max((model.sharing.epochs.next(namespace) for model in models), default=now_ms())
        times = {epoch_field(of_model or ANY_MODEL, namespace): epoch}
        if of_model is None:
            self._models.note_deletion(namespace, epoch)
        num_tokens = 0
        for model in models:
            num_tokens += await asyncio.to_thread(model.sharing.epochs.raise_to, times)
        if self._options.redis is not None:
            await self._delete_shared(namespace, of_model, epoch)
        return history_pb2.DeleteNamespaceResponse(num_tokens=num_tokens)

    async def export_history(self, request: history_pb2.ExportHistoryRequest, context: Context, caller: Caller) -> None:
        """Send the archive of a namespace in parts."""
        caller.check_history_role()
        namespace = caller.namespace(request.namespace)
        model = self._models.get(request.model_fingerprint)
        async with self._transfers:
            archive = await asyncio.to_thread(model.sharing.export, namespace, without_inner=request.without_inner)
            for begin in range(0, len(archive), PART_BYTES):
                part = history_pb2.ExportHistoryResponse(archive_part=archive[begin : begin + PART_BYTES])
                await self._within(context.write(part.SerializeToString()), "the reader took no part")

    async def import_history(self, context: Context, caller: Caller) -> Message:
        """Take an archive in parts, and add it."""
        caller.check_history_role()
        async with self._transfers:
            target: tuple[str, ServedModel] | None = None
            parts: list[bytes] = []
            size = 0
            async for part in self._parts(context):
                target = target or self._target(part, caller)
                if len(part.archive_part) > PART_BYTES:
                    raise exhausted(
                        "archive_part", f"expected at most {PART_BYTES} bytes, got {len(part.archive_part)}"
                    )
                parts.append(part.archive_part)
                size += len(part.archive_part)
                if size > self._max_archive_bytes:
                    raise exhausted(
                        "archive_part",
                        f"the archive is larger than half of a model's history_bytes, {self._max_archive_bytes}",
                    )
            namespace, model = target or self._target(history_pb2.ImportHistoryRequest(), caller)
            try:
                num_tokens = await asyncio.to_thread(model.sharing.import_archive, b"".join(parts), namespace)
            except ArchiveError as error:
                raise invalid("archive_part", str(error)) from None
        return history_pb2.ImportHistoryResponse(num_tokens=num_tokens)

    async def _delete_shared(self, namespace: str, model: str | None, epoch: int) -> None:
        """Delete what is in Redis and on every other server.

        Raises:
            RefusalError: Redis can't be asked.
        """
        try:
            await asyncio.to_thread(delete_shared, self._options, namespace, model, epoch=epoch)
        except FAILURES as error:
            reason = f"forgotten here, but Redis does not answer ({type(error).__name__}): ask again"
            raise RefusalError(grpc.StatusCode.UNAVAILABLE, "", reason) from None

    def _target(self, head: history_pb2.ImportHistoryRequest, caller: Caller) -> tuple[str, ServedModel]:
        return caller.namespace(head.namespace), self._models.get(head.model_fingerprint)

    async def _parts(self, context: Context) -> AsyncIterator[history_pb2.ImportHistoryRequest]:
        while True:
            raw = await self._within(context.read(), "no part came")
            if raw is grpc.aio.EOF:
                return
            yield parse(history_pb2.ImportHistoryRequest, raw)

    @staticmethod
    async def _within(transfer: Awaitable[_Value], failure: str) -> _Value:
        """Wait for one part: a peer that hangs must not keep others from their transfers."""
        try:
            async with asyncio.timeout(PART_S):
                return await transfer
        except TimeoutError:
            raise exhausted("", f"{failure} within {PART_S} s") from None

    def _named(self, fingerprint: str) -> Sequence[ServedModel]:
        if not fingerprint:
            return self._models.all()
        check_fingerprint(fingerprint)
        return [self._models.get(fingerprint)]


def _stats_of(model: ServedModel, caller: Caller) -> history_pb2.ModelStats:
    sizes = [size for namespace in caller.namespaces for size in model.engine.history_sizes(namespace)]
    return history_pb2.ModelStats(
        model_fingerprint=model.fingerprint,
        num_open_requests=model.num_open_requests(caller),
        history_bytes=sum(size.num_bytes for size in sizes),
        blocks=[_message(row) for row in model.engine.stats() if caller.may_use(row.namespace)],
    )


def _message(row: BlockStats) -> history_pb2.BlockStats:
    return history_pb2.BlockStats(
        namespace=row.namespace,
        workflow_id=row.workflow_id,
        stage=row.stage,
        block_path=row.block,
        num_steps=row.num_steps,
        num_drafts=row.num_drafts,
        num_draft_tokens=row.num_draft_tokens,
        num_accepted_tokens=row.num_accepted_tokens,
        num_tokens=row.num_tokens,
    )
