"""How the commands of `agentspec-sidecar` reach a running server."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import grpc

from agentspec.draft.v1 import draft_pb2
from agentspec.draft.v1.draft_pb2_grpc import DraftServiceStub
from agentspec.draft.v1.history_pb2_grpc import HistoryServiceStub
from agentspec.sidecar.options import ENV_PREFIX
from agentspec.sidecar.server_options import ServerOptions

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SOCKET = ServerOptions.model_fields["socket"].default


class Connection:
    """A channel to a server and its services.

    Args:
        channel: closed by its owner.
        timeout_s: longest time of one call.
    """

    def __init__(self, channel: grpc.Channel, timeout_s: float) -> None:
        self.channel = channel
        self.timeout_s = timeout_s
        self.drafts: Any = DraftServiceStub(channel)  # type: ignore[no-untyped-call]  # generated
        self.histories: Any = HistoryServiceStub(channel)  # type: ignore[no-untyped-call]  # generated

    def model(self, fingerprint: str | None) -> str:
        """The model that a command means: the named one, or the only one of the server.

        Raises:
            click.UsageError: none is named, and the server has none or several.
        """
        if fingerprint:
            return fingerprint
        info: draft_pb2.GetServerInfoResponse = self.drafts.GetServerInfo(
            draft_pb2.GetServerInfoRequest(), timeout=self.timeout_s
        )
        known = [model.model_fingerprint for model in info.models]
        if len(known) == 1:
            return known[0]
        if known:
            raise click.UsageError(f"the server has several models, choose one with --model: {', '.join(known)}")
        raise click.UsageError("the server knows no model yet: an engine registers its own when it connects")


def connecting(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of a connection; it gets the connection as its first argument."""

    @functools.wraps(command)
    def connected(
        *,
        socket: Path,
        tcp: str | None,
        ca: Path | None,
        cert: Path | None,
        key: Path | None,
        timeout_s: float,
        **rest: Any,
    ) -> None:
        with _channel(socket, tcp, (ca, cert, key)) as channel, _named_errors():
            command(Connection(channel, timeout_s), **rest)

    flags = (
        click.option(
            "--socket",
            type=click.Path(path_type=Path),
            default=_SOCKET,
            show_default=True,
            envvar=f"{ENV_PREFIX}SOCKET",
            show_envvar=True,
            help="Unix socket of the server.",
        ),
        click.option("--tcp", metavar="HOST:PORT", help="Reach it over TCP instead, with the three files below."),
        click.option("--ca", type=_FILE, help="Authorities that sign the server's certificate, PEM."),
        click.option("--cert", type=_FILE, help="Certificate chain of this client, PEM."),
        click.option("--key", type=_FILE, help="Its private key, PEM."),
        click.option(
            "--timeout-s", type=click.FloatRange(0, min_open=True), default=60.0, show_default=True, help="Of a call."
        ),
    )
    wrapped: Callable[..., None] = connected
    for flag in reversed(flags):
        wrapped = flag(wrapped)
    return wrapped


@contextmanager
def _channel(socket: Path, tcp: str | None, files: tuple[Path | None, ...]) -> Iterator[grpc.Channel]:
    if tcp is None:
        with grpc.insecure_channel(f"unix:{socket.absolute()}") as channel:
            yield channel
        return
    ca, cert, key = (None if path is None else path.read_bytes() for path in files)
    if ca is None or cert is None or key is None:
        raise click.UsageError("--tcp needs --ca, --cert and --key")
    with grpc.secure_channel(tcp, grpc.ssl_channel_credentials(ca, key, cert)) as channel:
        yield channel


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise click.ClickException(f"{error.code().name}: {error.details()}") from None
