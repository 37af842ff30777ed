"""One connection to a draft server: a channel of its own, the vocabulary registered, then the one long stream."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc

from agentspec.draft.v1 import draft_pb2, draft_pb2_grpc

from .sidecar_messages import Vocabulary

PROBE_S = 0.2
ANSWER_S = 2.0
REGISTRATION_S = 60.0
MAX_MESSAGE_BYTES = 64 << 20
STREAM_METHOD = f"/{draft_pb2.DESCRIPTOR.services_by_name['DraftService'].full_name}/DraftStream"


class LinkError(ConnectionError):
    """There is no draft server, or it refuses us; the message says which and why."""


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
            raise LinkError(f"{self._path}: {_reason(error)}") from None
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
            raise LinkError(f"{self._path}: {_reason(error)}") from None

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


def _reason(error: Exception) -> str:
    if isinstance(error, grpc.RpcError) and isinstance(error, grpc.Call):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
