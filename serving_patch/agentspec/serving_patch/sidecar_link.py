"""One connection to a draft server: a channel of its own, the vocabulary registered, then the one long stream."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc

from agentspec.draft.v1 import draft_pb2, draft_pb2_grpc, history_pb2, history_pb2_grpc

from .sidecar_messages import Vocabulary

PROBE_S = 0.2
ANSWER_S = 2.0
REGISTRATION_S = 60.0
EXPORT_S = 60.0
MAX_MESSAGE_BYTES = 64 << 20
STREAM_METHOD = f"/{draft_pb2.DESCRIPTOR.services_by_name['DraftService'].full_name}/DraftStream"


_FINAL = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
)


class LinkError(ConnectionError):
    """There is no draft server, or it refuses us; the message says which and why.

    Attributes:
        is_final: the same message would be refused again.
    """

    def __init__(self, reason: str, *, is_final: bool = False) -> None:
        super().__init__(reason)
        self.is_final = is_final


class FollowCall:
    """What a server sends of the blocks that others write; `cancel` may be called from any thread, and again.

    Attributes:
        is_cancelled: whether `cancel` was called.
    """

    def __init__(self, path: Path, call: Any) -> None:
        self._path = path
        self._call = call
        self.is_cancelled = False

    def __iter__(self) -> Iterator[history_pb2.FollowBlocksResponse]:
        """The messages, until the call is cancelled or has lived long enough.

        Raises:
            LinkError: the server ended it.
        """
        try:
            yield from self._call
        except grpc.RpcError as error:
            is_over = isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if not is_over and not self.is_cancelled:
                raise _link_error(self._path, error) from None

    def cancel(self) -> None:
        """End it."""
        self.is_cancelled = True
        self._call.cancel()


class Link:
    """A connection that was made; `close` may be called from any thread, and again.

    Args:
        path: the server's Unix socket.

    Raises:
        LinkError: nobody listens there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        _probe(path)
        self._channel = grpc.insecure_channel(
            f"unix:{path}",
            options=[
                ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the back-off of the last
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
                ("grpc.enable_retries", 0),
            ],
        )

    @property
    def _histories(self) -> Any:
        return history_pb2_grpc.HistoryServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated

    def greet(self) -> draft_pb2.GetServerInfoResponse:
        """Ask the server who it is.

        Raises:
            LinkError: no answer in time.
        """
        stub = draft_pb2_grpc.DraftServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        try:
            answer: draft_pb2.GetServerInfoResponse = stub.GetServerInfo(
                draft_pb2.GetServerInfoRequest(), timeout=ANSWER_S
            )
        except (grpc.RpcError, ValueError) as error:
            raise _link_error(self._path, error) from None
        return answer

    def register(self, vocabulary: Vocabulary) -> None:
        """Make the vocabulary known; the server builds what it needs of it.

        Raises:
            LinkError: refused, or no answer in time.
        """
        stub = draft_pb2_grpc.DraftServiceStub(self._channel)  # type: ignore[no-untyped-call]  # generated
        try:
            stub.RegisterTokenizer(vocabulary.parts(), timeout=REGISTRATION_S)
        except (grpc.RpcError, ValueError) as error:
            raise LinkError(f"{self._path}: the vocabulary was not registered: {_reason(error)}") from None

    def stream(self, messages: Iterable[bytes], on_message: Callable[[bytes], bool]) -> None:
        """Send messages and hand the answers on until the stream ends.

        Args:
            messages: asked for by a thread of gRPC; when it ends, so does the stream.
            on_message: called by a thread of gRPC as soon as an answer is there; returns true.

        Raises:
            LinkError: it ended before `messages` did.
        """
        try:
            # The answers are taken in by the deserializer: it runs on the thread that received them, one switch of
            # threads before an iterator would.
            method: Any = self._channel.stream_stream(STREAM_METHOD, None, on_message)
            for _ in method(iter(messages)):
                pass
        except (grpc.RpcError, ValueError) as error:
            raise _link_error(self._path, error) from None

    def append(self, request: history_pb2.AppendBlocksRequest) -> history_pb2.AppendBlocksResponse:
        """Give the server blocks.

        Raises:
            LinkError: it did not take them.
        """
        try:
            answer: history_pb2.AppendBlocksResponse = self._histories.AppendBlocks(request, timeout=ANSWER_S)
        except (grpc.RpcError, ValueError) as error:
            raise _link_error(self._path, error) from None
        return answer

    def follow(self, request: history_pb2.FollowBlocksRequest, timeout_s: float) -> FollowCall:
        """Have the server send what others write.

        Args:
            request: which namespaces, and from where on.
            timeout_s: the call ends after so long.

        Raises:
            LinkError: the link is closed.
        """
        try:
            return FollowCall(self._path, self._histories.FollowBlocks(request, timeout=timeout_s))
        except ValueError as error:
            raise _link_error(self._path, error) from None

    def export(self, fingerprint: str, namespace: str, max_bytes: int) -> bytes:
        """The archive of a namespace, without those within it.

        Args:
            fingerprint: of the model.
            namespace: one.
            max_bytes: a larger archive is refused.

        Raises:
            LinkError: refused, too large, or not here in time.
        """
        request = history_pb2.ExportHistoryRequest(
            model_fingerprint=fingerprint, namespace=namespace, without_inner=True
        )
        parts: list[bytes] = []
        num_bytes = 0
        try:
            call = self._histories.ExportHistory(request, timeout=EXPORT_S)
            for part in call:
                parts.append(part.archive_part)
                num_bytes += len(part.archive_part)
                if num_bytes > max_bytes:
                    call.cancel()
                    reason = f"the history of a namespace has more than {max_bytes} bytes"
                    raise LinkError(f"{self._path}: {reason}", is_final=True)
        except (grpc.RpcError, ValueError) as error:
            raise _link_error(self._path, error) from None
        return b"".join(parts)

    def close(self) -> None:
        """End the stream and every call."""
        self._channel.close()


def _probe(path: Path) -> None:
    """Look whether somebody listens; thirty times cheaper than a channel that finds out."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except OSError as error:
            raise LinkError(f"{path}: {error.strerror or error}") from None


def _link_error(path: Path, error: Exception) -> LinkError:
    is_final = isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call) and error.code() in _FINAL
    return LinkError(f"{path}: {_reason(error)}", is_final=is_final)


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
