"""`DraftService`: the draft contract over the models of a server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message

from agentspec.draft.v1 import draft_pb2
from agentspec.sidecar.callers import Caller
from agentspec.sidecar.refusal import RefusalError, exhausted, invalid
from agentspec.sidecar.rpc import Calls, Context, parse
from agentspec.sidecar.served_model import Client, ServedModel
from agentspec.sidecar.served_models import ServedModels, VocabularyParts
from agentspec.sidecar.server_options import ServerOptions, package_version
from agentspec.sidecar.tracing import Tracing
from agentspec.sidecar.wire import check_batch, write_drafts

MAX_TRACEPARENT_BYTES = 128
# Prompts of more bytes than that are opened on a thread: it takes a millisecond, and steps of others go on.
MAX_INLINE_BYTES = 4 * 2048
MAX_REGISTRATIONS = 2  # at a time: each may hold a vocabulary of 64 MiB
REGISTRATION_S = 60
FIRST_MESSAGE_S = 10  # a stream without it is no engine's, and takes a call's place

_Item = TypeVar("_Item", draft_pb2.OpenRequest, draft_pb2.CloseRequest)


class DraftService:
    """Answers for all clients of a server.

    Args:
        models: what is served.
        calls: makes the handlers.
        options: of the server.
        tracing: makes the spans of sampled steps.
    """

    def __init__(
        self, models: ServedModels, calls: Calls, options: ServerOptions, tracing: Tracing | None = None
    ) -> None:
        self._tracing = tracing or Tracing()
        self._models = models
        self._calls = calls
        self._options = options
        self._version = package_version()
        self._registrations = asyncio.Semaphore(MAX_REGISTRATIONS)

    def handler(self) -> grpc.GenericRpcHandler:
        """The service, to be added to a gRPC server."""
        return self._calls.service(
            draft_pb2.DESCRIPTOR.services_by_name["DraftService"],
            {
                "GetServerInfo": self.get_server_info,
                "RegisterGrammar": self.register_grammar,
                "OpenRequests": self.open_requests,
                "CloseRequests": self.close_requests,
                "Draft": self.draft,
            },
            {"RegisterTokenizer": self.register_tokenizer, "DraftStream": self.draft_stream},
        )

    async def get_server_info(self, _: draft_pb2.GetServerInfoRequest, __: Caller) -> Message:
        """Version, models and limits."""
        return draft_pb2.GetServerInfoResponse(
            version=self._version,
            boot_id=self._models.boot_id,
            models=[model.describe() for model in self._models.all()],
            max_message_bytes=self._options.max_message_bytes,
            max_open_requests=self._options.max_open_requests,
        )

    async def register_tokenizer(self, context: Context, caller: Caller) -> Message:
        """Take a vocabulary in parts and build its engine."""
        async with self._registrations:
            parts = VocabularyParts()
            try:
                async with asyncio.timeout(REGISTRATION_S):
                    while (raw := await context.read()) is not grpc.aio.EOF:
                        parts.add(parse(draft_pb2.RegisterTokenizerRequest, raw))
            except TimeoutError:
                raise exhausted("", f"the vocabulary did not come within {REGISTRATION_S} s") from None
            model = await self._models.register(parts.finish(), caller)
        return draft_pb2.RegisterTokenizerResponse(model=model.describe())

    async def register_grammar(self, request: draft_pb2.RegisterGrammarRequest, caller: Caller) -> Message:
        """Make a grammar known by an id."""
        namespace = caller.namespace(request.namespace)
        model = self._models.get(request.model_fingerprint)
        model.register_grammar(namespace, request.grammar_id, request.grammar_json)
        return draft_pb2.RegisterGrammarResponse()

    async def open_requests(self, request: draft_pb2.OpenRequestsRequest, caller: Caller) -> Message:
        """Open requests; the first that is refused ends the call, those before it are open."""
        model = self._models.get(request.model_fingerprint, code=grpc.StatusCode.FAILED_PRECONDITION)
        client = model.client(request.client_id, caller)
        check_batch(len(request.requests), "requests")
        for error in await self._each(model, client, request.requests, "requests", model.open):
            raise error
        return draft_pb2.OpenRequestsResponse(boot_id=self._models.boot_id)

    async def close_requests(self, request: draft_pb2.CloseRequestsRequest, caller: Caller) -> Message:
        """Close requests; the first that is refused ends the call."""
        model = self._models.get(request.model_fingerprint)
        client = model.client(request.client_id, caller)
        check_batch(len(request.requests), "requests")
        unknown: list[int] = []

        def close(client: Client, item: draft_pb2.CloseRequest) -> None:
            if not model.close(client, item):
                unknown.append(item.handle)

        for error in await self._each(model, client, request.requests, "requests", close):
            raise error
        return draft_pb2.CloseRequestsResponse(unknown_handles=unknown)

    async def draft(self, request: draft_pb2.DraftRequest, caller: Caller) -> Message:
        """Draft for one step."""
        model = self._models.get(request.model_fingerprint)
        client = model.client(request.client_id, caller)
        response = draft_pb2.DraftResponse(boot_id=self._models.boot_id)
        try:
            drafts = model.step(client, request.step)
        except RefusalError as error:
            raise error.within("step") from None
        write_drafts(drafts, client.first_handle, response.drafts)
        model.hear_of(client, np.frombuffer(request.step.handles, np.int64).tolist())
        return response

    async def draft_stream(self, context: Context, caller: Caller) -> None:
        """Serve one engine until its stream ends; then close what it has left open."""
        try:
            async with asyncio.timeout(FIRST_MESSAGE_S):
                raw = await context.read()
        except TimeoutError:
            raise exhausted("", f"the first message did not come within {FIRST_MESSAGE_S} s") from None
        if raw is grpc.aio.EOF:
            return
        message = parse(draft_pb2.DraftStreamRequest, raw)
        model = self._models.get(message.model_fingerprint, code=grpc.StatusCode.FAILED_PRECONDITION)
        client = model.connect(caller)
        try:
            hello = draft_pb2.DraftStreamResponse(boot_id=self._models.boot_id, client_id=client.client_id)
            await context.write(hello.SerializeToString())
            while raw is not grpc.aio.EOF:
                for answer in await self._answers(model, client, raw):
                    await context.write(answer.SerializeToString())
                raw = await context.read()
        finally:
            model.disconnect(client)

    async def _answers(self, model: ServedModel, client: Client, raw: bytes) -> list[draft_pb2.DraftStreamResponse]:
        try:
            message = parse(draft_pb2.DraftStreamRequest, raw)
        except RefusalError as error:
            return [self._refused(error, 0)]
        step_id = message.step.step_id
        answers: list[draft_pb2.DraftStreamResponse] = []
        try:
            if message.closes:
                check_batch(len(message.closes), "closes")
                errors = await self._each(model, client, message.closes, "closes", model.close)
                answers += [self._refused(error, step_id) for error in errors]
            if message.opens:
                check_batch(len(message.opens), "opens")
                errors = await self._each(model, client, message.opens, "opens", model.open)
                answers += [self._refused(error, step_id) for error in errors]
        except RefusalError as error:
            return [self._refused(error, step_id)]
        if message.HasField("step"):
            answers.append(self._step(model, client, message.step))
        return answers

    def _step(self, model: ServedModel, client: Client, step: draft_pb2.Step) -> draft_pb2.DraftStreamResponse:
        response = draft_pb2.DraftStreamResponse()
        try:
            if len(step.traceparent) > MAX_TRACEPARENT_BYTES:
                raise invalid("traceparent", f"expected at most {MAX_TRACEPARENT_BYTES} bytes")
            with self._tracing.step(step.traceparent, len(step.handles) // 8) as span:
                drafts = model.step(client, step)
                span.set_attribute("agentspec.num_draft_tokens", len(drafts.draft_token_ids))
        except RefusalError as error:
            return self._refused(error.within("step"), step.step_id)
        write_drafts(drafts, client.first_handle, response.drafts)
        return response

    def _refused(self, error: RefusalError, step_id: int) -> draft_pb2.DraftStreamResponse:
        self._calls.note_refusal(error.code)
        code: Any = error.code.value[0]
        return draft_pb2.DraftStreamResponse(
            error=draft_pb2.StreamError(step_id=step_id, code=code, field=error.field, message=str(error))
        )

    async def _each(
        self,
        model: ServedModel,
        client: Client,
        items: Sequence[_Item],
        name: str,
        apply: Callable[[Client, _Item], object],
    ) -> list[RefusalError]:
        """Apply a function to each item of a message; return what it refused, by path of the item."""
        if sum(map(len_of_tokens, items)) <= MAX_INLINE_BYTES:
            return [*_apply(client, items, name, apply)]
        thread = asyncio.ensure_future(asyncio.to_thread(lambda: [*_apply(client, items, name, apply)]))
        try:
            return await asyncio.shield(thread)
        except asyncio.CancelledError:
            await thread  # else it would open requests of a client that is gone already
            raise


def len_of_tokens(item: draft_pb2.OpenRequest | draft_pb2.CloseRequest) -> int:
    """Bytes of the tokens that an item brings."""
    if isinstance(item, draft_pb2.OpenRequest):
        return len(item.prompt_token_ids)
    return len(item.tail_token_ids)


def _apply(
    client: Client, items: Iterable[_Item], name: str, apply: Callable[[Client, _Item], object]
) -> Iterator[RefusalError]:
    for index, item in enumerate(items):
        try:
            apply(client, item)
        except RefusalError as error:
            yield error.within(f"{name}[{index}]")
