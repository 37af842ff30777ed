"""The least that a round trip to another process costs: length-prefixed messages on a Unix socket, no gRPC, no engine.

`python -m agentspec.benchmarks.framed_peer SOCKET` serves until it is terminated.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

HEADER = struct.Struct("<II")  # bytes that follow, bytes that are wanted back
LENGTH = struct.Struct("<I")
CONNECT_S = 30.0


class FramedClient:
    """A blocking client; use it as a context.

    Args:
        path: of the peer's socket.
    """

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_S)
        self._socket.connect(str(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def ask(self, message: bytes, answer_bytes: int) -> bytes:
        """Send a message and return the answer, which has the length that was asked for.

        Raises:
            ConnectionError: the peer is gone.
        """
        self._socket.sendall(HEADER.pack(len(message), answer_bytes) + message)
        (length,) = LENGTH.unpack(self._read(LENGTH.size))
        return self._read(length)

    def _read(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(length - len(parts))
            if not part:
                raise ConnectionError("the framed peer closed its socket")
            parts += part
        return bytes(parts)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            length, answer_bytes = HEADER.unpack(await reader.readexactly(HEADER.size))
            await reader.readexactly(length)
            writer.write(LENGTH.pack(answer_bytes) + bytes(answer_bytes))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _serve(path: str) -> None:
    server = await asyncio.start_unix_server(_answer, path)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
