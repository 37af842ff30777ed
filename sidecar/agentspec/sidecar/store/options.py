"""Options of the shared histories, the same for a draft server and for vLLM."""

from __future__ import annotations

import binascii
import stat
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, field_serializer, model_validator
from pydantic_core import PydanticCustomError

from agentspec.sidecar.store.address import RedisAddress, parse_address

KEY_BYTES = 32


def _check_url(url: str | None) -> str | None:
    try:
        if url is not None:
            parse_address(url)
    except ValueError as error:
        # Not the value error itself: pydantic would quote the URL, which may hold a password.
        raise PydanticCustomError("redis", "{reason}", {"reason": str(error)}) from None
    return url


def read_key(path: Path) -> bytes:
    """Read a key of AES-256.

    Args:
        path: 32 bytes, or 64 hex digits with or without a newline.

    Raises:
        ValueError: the file can't be read, or holds something else.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    if len(raw) == KEY_BYTES:
        return raw
    try:
        key = binascii.unhexlify(raw.strip())
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(f"expected {KEY_BYTES} bytes or {2 * KEY_BYTES} hex digits in {path}, got {len(raw)} bytes")
    return key


class RedisOptions(BaseModel):
    """How histories are shared; without `redis` they stay in the process."""

    redis: Annotated[
        str | None,
        AfterValidator(_check_url),
        Field(
            repr=False,
            description="URL of the Redis by which engines share histories: redis[s]://HOST:PORT, unix:///PATH, "
            "sentinel[s]://HOST:PORT,…/SERVICE or cluster[s]://HOST:PORT,…; default: not shared.",
        ),
    ] = None
    redis_username: Annotated[str | None, Field(description="Its user; default: the one in the URL.")] = None
    redis_password_file: Annotated[
        Path | None, Field(description="File that holds its password; read again at every connection.")
    ] = None
    redis_tls_ca: Annotated[
        Path | None, Field(description="Authorities that sign its certificate, PEM; default: the system's.")
    ] = None
    redis_tls_cert: Annotated[Path | None, Field(description="Certificate to show to it, PEM.")] = None
    redis_tls_key: Annotated[Path | None, Field(description="Private key of that certificate, PEM.")] = None
    redis_key_file: Annotated[
        Path | None,
        Field(description="AES-256 key, 32 bytes or 64 hex digits, encrypts all text in Redis; every engine needs it."),
    ] = None

    @model_validator(mode="after")
    def _check_redis(self) -> RedisOptions:
        given = [name for name in RedisOptions.model_fields if name != "redis" and getattr(self, name) is not None]
        if self.redis is None:
            if given:
                raise PydanticCustomError("redis", "redis: {name} needs it", {"name": given[0]})
            return self
        address = parse_address(self.redis)
        tls = [name for name in given if name.startswith("redis_tls_")]
        if tls and not address.is_encrypted:
            reason = "expected a URL with TLS, such as rediss://HOST:PORT"
            raise PydanticCustomError(
                "redis", "redis: {reason}, as {name} is given", {"reason": reason, "name": tls[0]}
            )
        for name, other in (("redis_tls_cert", "redis_tls_key"), ("redis_tls_key", "redis_tls_cert")):
            if name in given and other not in given:
                raise PydanticCustomError("redis", "{other}: {name} needs it", {"name": name, "other": other})
        for name in (name for name in given if isinstance(getattr(self, name), Path)):
            _check_file(name, getattr(self, name))
        return self

    @field_serializer("redis")
    def _hide_password(self, url: str | None) -> str | None:
        return str(parse_address(url)) if url is not None else None

    def redis_address(self) -> RedisAddress | None:
        """Where the Redis is, if histories are shared."""
        return parse_address(self.redis) if self.redis is not None else None


def _check_file(name: str, path: Path) -> None:
    try:
        if name == "redis_key_file":
            read_key(path)
        elif not stat.S_ISREG(path.stat().st_mode):
            raise ValueError(f"{path} is no file")
        else:
            path.open("rb").close()
    except OSError as error:
        raise PydanticCustomError("redis", "{name}: cannot read {path}: {error}", _context(name, path, error)) from None
    except ValueError as error:
        raise PydanticCustomError("redis", "{name}: {error}", _context(name, path, error)) from None


def _context(name: str, path: Path, error: Exception) -> dict[str, str]:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return {"name": name, "path": str(path), "error": reason}
