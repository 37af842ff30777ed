"""The services of a contract as gRPC handlers: one place for parsing, callers and errors."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from agentspec.sidecar.callers import CallContext, Caller, Callers
from agentspec.sidecar.refusal import RefusalError, exhausted, invalid
from agentspec.sidecar.tracing import OK, Tracing, note_code

log = structlog.get_logger()

# A span of these would end with the engine.
ENDLESS = ("/agentspec.draft.v1.DraftService/DraftStream", "/agentspec.draft.v1.HistoryService/FollowBlocks")

_Message = TypeVar("_Message", bound=Message)
_Value = TypeVar("_Value")


class Context(CallContext, Protocol):
    """What a handler uses of gRPC's context of a call. Messages are bytes, so that a bad one can be answered."""

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`."""
        ...

    async def write(self, message: bytes) -> None:
        """Send a message; returns when the transport took it."""
        ...

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Metadata of the call."""
        ...

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """End the call with a status."""
        ...


Handler = Callable[[Any, Caller], Awaitable[Message]]
DownloadHandler = Callable[[Any, Context, Caller], Awaitable[None]]
StreamHandler = Callable[[Context, Caller], Awaitable[Message | None]]


def parse(message_class: type[_Message], raw: bytes) -> _Message:
    """Read a message.

    Raises:
        RefusalError: the bytes are none.
    """
    try:
        return message_class.FromString(raw)
    except DecodeError:
        raise invalid("", f"{len(raw)} bytes are no {message_class.__name__}") from None


class Calls:
    """Turns methods into gRPC handlers and counts what was refused.

    Args:
        callers: knows who calls.
        max_message_bytes: of an answer.
        tracing: makes a span of each call that ends by itself.
    """

    def __init__(self, callers: Callers, max_message_bytes: int, tracing: Tracing | None = None) -> None:
        self._callers = callers
        self._max_message_bytes = max_message_bytes
        self._tracing = tracing or Tracing()
        self._streams: set[asyncio.Task[Any]] = set()
        self._is_draining = False
        self._refusals: Counter[str] = Counter()

    def note_refusal(self, code: grpc.StatusCode) -> None:
        """Count a refusal."""
        self._refusals[code.name] += 1

    def refusals(self) -> dict[str, int]:
        """Counts by name of the gRPC code since the server started."""
        return dict(self._refusals)

    def service(
        self,
        descriptor: ServiceDescriptor,
        unary: Mapping[str, Handler],
        streams: Mapping[str, StreamHandler],
        downloads: Mapping[str, DownloadHandler] | None = None,
    ) -> grpc.GenericRpcHandler:
        """Handlers of a service.

        Args:
            descriptor: of the contract.
            unary: methods of one message and one answer, by name.
            streams: those that read many; what they return is their last answer.
            downloads: those of one message that write many.
        """
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for method in descriptor.methods:
            path = f"/{descriptor.full_name}/{method.name}"
            request_class = GetMessageClass(method.input_type)
            if method.name in unary:
                handlers[method.name] = grpc.unary_unary_rpc_method_handler(
                    functools.partial(self._answer, path, unary[method.name], request_class)
                )
            elif downloads and method.name in downloads:
                handlers[method.name] = grpc.unary_stream_rpc_method_handler(
                    functools.partial(self._send, path, downloads[method.name], request_class)
                )
            elif method.name in streams:
                handlers[method.name] = _stream_handler(
                    method, functools.partial(self._follow, path, streams[method.name])
                )
        return grpc.method_handlers_generic_handler(descriptor.full_name, handlers)

    async def drain(self, timeout_s: float) -> None:
        """End all streams with UNAVAILABLE, each when the message at hand is answered.

        Args:
            timeout_s: longest wait for them.
        """
        self._is_draining = True
        streams = [*self._streams]
        for task in streams:
            task.cancel()
        if streams:
            await asyncio.wait(streams, timeout=timeout_s)

    async def _answer(
        self, path: str, handler: Handler, request_class: type[Message], raw: bytes, context: Context
    ) -> bytes:
        async def call() -> bytes:
            answer = await handler(parse(request_class, raw), self._callers.of(context))
            if (size := answer.ByteSize()) > self._max_message_bytes:
                raise exhausted(
                    "", f"the answer has {size} bytes, the limit is {self._max_message_bytes}: ask for less"
                )
            return answer.SerializeToString()

        return await self._traced(path, call(), context)

    async def _send(
        self, path: str, handler: DownloadHandler, request_class: type[Message], raw: bytes, context: Context
    ) -> None:
        async def call() -> None:
            await handler(parse(request_class, raw), context, self._callers.of(context))

        if path in ENDLESS:
            self._note_stream()
        return await self._traced(path, call(), context)

    def _note_stream(self) -> None:
        """`drain` ends the call at hand."""
        task = asyncio.current_task()
        if task is not None:
            self._streams.add(task)
            task.add_done_callback(self._streams.discard)

    async def _follow(self, path: str, handler: StreamHandler, _: Any, context: Context) -> bytes | None:
        async def call() -> bytes | None:
            answer = await handler(context, self._callers.of(context))
            return None if answer is None else answer.SerializeToString()

        self._note_stream()
        return await self._traced(path, call(), context)

    async def _traced(self, path: str, call: Awaitable[_Value], context: Context) -> _Value:
        """Answer a call within a span of its own, if it is one that ends by itself."""
        if path in ENDLESS:
            return await self._guard(call, context)
        with self._tracing.call(path, _metadata(context)):
            return await self._guard(call, context)

    async def _guard(self, call: Awaitable[_Value], context: Context) -> _Value:
        try:
            answer = await call
            note_code(OK)
            return answer
        except RefusalError as error:
            self.note_refusal(error.code)
            note_code(error.code)
            await context.abort(error.code, str(error))
        except asyncio.CancelledError:
            if not self._is_draining:
                raise
            note_code(grpc.StatusCode.UNAVAILABLE)
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the server is draining; try again")
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # the boundary: gRPC would answer UNKNOWN, with the text of the error
            self.note_refusal(grpc.StatusCode.INTERNAL)
            note_code(grpc.StatusCode.INTERNAL)
            log.exception("call_failed", error=type(error).__name__)
            await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: a bug of the server, see its log")
        raise AssertionError("abort raises")


def _metadata(context: Context) -> dict[str, str]:
    """Texts of a call's metadata, by key."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _stream_handler(method: Any, behaviour: Callable[..., Any]) -> grpc.RpcMethodHandler[Any, Any]:
    if not method.server_streaming:
        return grpc.stream_unary_rpc_method_handler(behaviour)
    return grpc.stream_stream_rpc_method_handler(behaviour)
