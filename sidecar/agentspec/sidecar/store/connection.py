"""Connections to Redis: one server, Sentinels or a cluster behind the same few commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.credentials import CredentialProvider
from redis.retry import Retry
from redis.sentinel import Sentinel

from agentspec.sidecar.store.address import RedisAddress
from agentspec.sidecar.store.options import RedisOptions

BLOCK_MS = 500
"""Longest wait of a read for something new."""
CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 3.0
"""A server that hangs is noticed within it; longer than the wait of a read."""
CLIENT_NAME = "agentspec"

FAILURES = (redis.RedisError, OSError, ValueError)
"""What a call may raise while Redis is gone, full, foreign or being reconfigured: never a reason to stop.

ValueError: a file with a password that can't be decoded.
"""


def is_foreign(answer: object) -> bool:
    """Whether Redis said that a key holds what we never wrote: to ask again won't help, other keys are well."""
    return isinstance(answer, redis.ResponseError) and str(answer).startswith("WRONGTYPE")


class Commands(Protocol):
    """The commands that are used, of a server, of a cluster or of a pipeline, and what they answer outside of the last.

    redis-py's own types hold the answers of its asynchronous clients too. Any error of `FAILURES` may come.
    """

    def xadd(
        self, name: str, fields: Mapping[str, Any], *, maxlen: int | None = None, approximate: bool = True
    ) -> bytes | None:
        """Append to a stream."""
        ...

    def xrevrange(self, name: str, *, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """The last entries of a stream."""
        ...

    def expire(self, name: str, time: int) -> bool:
        """Give a key a life in seconds."""
        ...

    def exists(self, name: str) -> int:
        """Whether there is a key."""
        ...


class Pipeline(Commands, Protocol):
    """Commands that go out together."""

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        """Their answers, in order."""
        ...


class Client(Commands, Protocol):
    """A client of whatever kind of Redis. Not to be used by two threads at a time."""

    def close(self) -> None:
        """Let go of the connections."""
        ...

    def pipeline(self, transaction: bool = ...) -> Pipeline:
        """Gather commands."""
        ...

    def ping(self) -> bool:
        """Whether it answers."""
        ...

    def eval(self, script: str, numkeys: int, *keys_and_args: str) -> Any:
        """Run a script."""
        ...

    def get(self, name: str) -> bytes | None:
        """A string."""
        ...

    def set(self, name: str, value: bytes | str, *, px: int | None = None, nx: bool = False) -> bool | None:
        """Write a string, for so many milliseconds."""
        ...

    def delete(self, *names: str) -> int:
        """Remove keys of one slot."""
        ...

    def pexpire(self, name: str, time: int) -> bool:
        """Give a key a life in milliseconds."""
        ...

    def hgetall(self, name: str) -> dict[bytes, bytes]:
        """All fields of a hash."""
        ...

    def hset(self, name: str, *, mapping: Mapping[str, str | int]) -> int:
        """Write fields of a hash."""
        ...

    def hincrby(self, name: str, key: str, amount: int) -> int:
        """Raise a field of a hash."""
        ...

    def xread(
        self, streams: Mapping[str, str], *, count: int, block: int
    ) -> Sequence[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]] | None:
        """New entries of streams of one slot; waits up to `block` milliseconds for one."""
        ...

    def xdel(self, name: str, *ids: bytes) -> int:
        """Remove entries of a stream."""
        ...

    def xlen(self, name: str) -> int:
        """Entries of a stream."""
        ...

    def xtrim(self, name: str, *, maxlen: int | None = None, minid: str | None = None, approximate: bool = True) -> int:
        """Drop the oldest entries of a stream."""
        ...

    def zadd(self, name: str, mapping: Mapping[str, float], *, gt: bool = False) -> int:
        """Set scores in a sorted set."""
        ...

    def zrange(self, name: str, start: int, end: int) -> list[bytes]:
        """Members of a sorted set."""
        ...

    def zrevrange(self, name: str, start: int, end: int) -> list[bytes]:
        """The same, the highest score first."""
        ...

    def zrem(self, name: str, *values: str) -> int:
        """Remove members of a sorted set."""
        ...

    def zremrangebyscore(self, name: str, min: str, max: float) -> int:  # redis-py's names
        """Remove members of a sorted set by score."""
        ...


class _PasswordFile(CredentialProvider):
    def __init__(self, username: str, path: Path) -> None:
        self._username = username
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        password = self._path.read_text().strip()
        return (self._username, password) if self._username else (password,)


def connect(options: RedisOptions, address: RedisAddress) -> Client:
    """A client that connects when it is used, and has no retries of its own: who uses it backs off.

    Raises:
        redis.RedisError: no Sentinel or no node of a cluster answers.
    """
    settings = _settings(options, address)
    if address.kind == "cluster":
        nodes = [_untyped(ClusterNode)(host, port) for host, port in address.nodes]
        cluster = RedisCluster(startup_nodes=nodes, require_full_coverage=False, **settings)
        return cast(Client, cluster)
    if address.kind == "sentinel":
        # Sentinels know nothing of the server's users; they have the same certificates.
        own = {name: value for name, value in settings.items() if name not in _CREDENTIALS}
        sentinel = _untyped(Sentinel)([*address.nodes], sentinel_kwargs=own, **settings)
        return cast(Client, sentinel.master_for(address.service, db=address.database))
    if address.socket_path:
        return cast(Client, redis.Redis(unix_socket_path=address.socket_path, db=address.database, **settings))
    host, port = address.nodes[0]
    return cast(Client, redis.Redis(host=host, port=port, db=address.database, **settings))


def _untyped(call: Any) -> Any:
    return call


_CREDENTIALS = ("credential_provider", "username", "password")


def _settings(options: RedisOptions, address: RedisAddress) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": ANSWER_TIMEOUT_S,
        "socket_keepalive": True,
        "retry": Retry(NoBackoff(), 0),
        "client_name": CLIENT_NAME,
        "protocol": 2,
    }
    username = options.redis_username or address.username
    if options.redis_password_file is not None:
        settings["credential_provider"] = _PasswordFile(username, options.redis_password_file)
    else:
        settings |= {"username": username or None, "password": address.password or None}
    if address.is_encrypted:
        settings |= {
            "ssl": True,
            "ssl_ca_certs": _text(options.redis_tls_ca),
            "ssl_certfile": _text(options.redis_tls_cert),
            "ssl_keyfile": _text(options.redis_tls_key),
        }
    return settings


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None
