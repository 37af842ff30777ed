"""Where a Redis is: one server, one behind Sentinels, or a cluster."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

Kind = Literal["server", "sentinel", "cluster"]

_SCHEMES: dict[str, tuple[Kind, bool]] = {
    "redis": ("server", False),
    "rediss": ("server", True),
    "unix": ("server", False),
    "sentinel": ("sentinel", False),
    "sentinels": ("sentinel", True),
    "cluster": ("cluster", False),
    "clusters": ("cluster", True),
}
_PORTS: dict[Kind, int] = {"server": 6379, "sentinel": 26379, "cluster": 6379}
SCHEMES = ", ".join(f"{scheme}://" for scheme in _SCHEMES)


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL.

    Attributes:
        kind: what answers there.
        nodes: hosts and ports; empty for a Unix socket.
        is_encrypted: TLS.
        socket_path: of a Unix socket; else empty.
        service: name by which Sentinels know the server; else empty.
        database: its number.
        username: from the URL; may be empty, as may the password.
    """

    kind: Kind
    nodes: tuple[tuple[str, int], ...]
    is_encrypted: bool = False
    socket_path: str = ""
    service: str = ""
    database: int = 0
    username: str = ""
    password: str = field(default="", repr=False)

    def __str__(self) -> str:
        """The address without name and password, for log lines."""
        if self.socket_path:
            return f"unix://{self.socket_path}"
        nodes = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in self.nodes)
        scheme = next(name for name, found in _SCHEMES.items() if found == (self.kind, self.is_encrypted))
        return f"{scheme}://{nodes}" + (f"/{self.service}" if self.service else "")


def parse_address(url: str) -> RedisAddress:
    """Parse a URL.

    Args:
        url: ``redis://HOST:PORT/DATABASE``, ``rediss://…`` (TLS), ``unix:///PATH``,
            ``sentinel[s]://HOST:PORT,HOST:PORT/SERVICE``, ``cluster[s]://HOST:PORT,HOST:PORT``; each may hold
            ``USER:PASSWORD@``, and those of one server and of Sentinels ``?db=DATABASE``.

    Raises:
        ValueError: no such URL; says what is wrong and never quotes it, as it may hold a password.
    """
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise ValueError(f"expected a URL that begins with one of {SCHEMES}")
    kind, is_encrypted = _SCHEMES[parts.scheme]
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    is_socket = parts.scheme == "unix"
    if is_socket and (hosts or not parts.path):
        raise ValueError("expected unix:///PATH, with three slashes")
    service = parts.path.strip("/") if kind == "sentinel" else ""
    if kind == "sentinel" and not service:
        raise ValueError("expected the name of the service after the Sentinels: sentinel://HOST:PORT/SERVICE")
    if kind == "cluster" and parts.path.strip("/"):
        raise ValueError("expected no database: a cluster has only number 0")
    return RedisAddress(
        kind,
        () if is_socket else tuple(_node(node, _PORTS[kind]) for node in hosts.split(",")),
        is_encrypted,
        socket_path=unquote(parts.path) if is_socket else "",
        service=unquote(service),
        database=_database(parts, has_path_database=kind == "server" and not is_socket),
        username=unquote(username),
        password=unquote(password),
    )


def _node(text: str, default_port: int) -> tuple[str, int]:
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        host, _, port = text.partition(":")
    if not host:
        raise ValueError("expected a host")
    if not port:
        return host, default_port
    if not port.isdecimal() or not 1 <= int(port) <= 65535:
        raise ValueError("expected a port from 1 to 65535")
    return host, int(port)


def _database(parts: SplitResult, *, has_path_database: bool) -> int:
    query = parse_qs(parts.query, keep_blank_values=True)
    if unknown := [name for name in query if name != "db"]:
        raise ValueError(f"unknown parameter {unknown[0]}; only db is one")
    text = query["db"][0] if "db" in query else parts.path.strip("/") if has_path_database else ""
    if not text:
        return 0
    if not text.isdecimal() or len(text) > 9:
        raise ValueError("expected the number of a database")
    return int(text)
