"""Deletion by hand, and archives that know which deletions they have seen."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from agentspec.sidecar.engine import ArchiveError
from agentspec.sidecar.store.connection import connect
from agentspec.sidecar.store.epochs import delete_in_redis
from agentspec.sidecar.store.keys import ANY_MODEL
from agentspec.sidecar.store.options import RedisOptions

MAGIC = b"ASPE"
_LENGTH = struct.Struct("<I")


def delete_shared(options: RedisOptions, namespace: str, model: str | None = None) -> None:
    """Delete a namespace for good, from Redis and from every engine that shares its histories there.

    Args:
        options: with a URL.
        namespace: with those within it.
        model: see `model_id`; None: of all models.

    Raises:
        redis.RedisError: Redis can't be asked; to be called again.
    """
    address = options.redis_address()
    if address is None:
        raise ValueError("redis: expected a URL")
    client = connect(options, address)
    try:
        delete_in_redis(client, namespace, model)
    finally:
        client.close()


def seal(archive: bytes, namespace: str, model: str, epochs: Mapping[str, int]) -> bytes:
    """An archive with the epochs at which it was made.

    Args:
        archive: as `Engine.export_histories` gives it.
        namespace: that was exported.
        model: see `model_id`.
        epochs: by field of `EPOCHS`.
    """
    seen = {field: count for field, count in epochs.items() if _concerns(field, namespace, model)}
    header = json.dumps({"namespace": namespace, "epochs": seen}).encode()
    return MAGIC + _LENGTH.pack(len(header)) + header + archive


def unseal(raw: bytes, namespace: str, model: str, epochs: Mapping[str, int]) -> bytes:
    """The archive, if nothing of it was deleted since.

    Args:
        raw: sealed or not; what is not is taken for older than any deletion.
        namespace: that it is to go to.
        model: see `model_id`.
        epochs: as they are now.

    Raises:
        ArchiveError: something was, or the bytes are no sealed archive.
    """
    seen: Mapping[str, Any] = {}
    if raw.startswith(MAGIC):
        header, raw = _split(raw)
        namespace, seen = header["namespace"], header["epochs"]
    for field, count in epochs.items():
        if _concerns(field, namespace, model) and count > seen.get(field, 0):
            deleted = field.partition("|")[2]
            raise ArchiveError(f"archive: the namespace {deleted} was deleted since it was made")
    return raw


def _split(raw: bytes) -> tuple[Mapping[str, Any], bytes]:
    begin = len(MAGIC) + _LENGTH.size
    try:
        end = begin + _LENGTH.unpack_from(raw, len(MAGIC))[0]
        header = json.loads(raw[begin:end])
        is_whole = isinstance(header["namespace"], str) and all(
            isinstance(count, int) for count in header["epochs"].values()
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise ArchiveError("archive: its header was cut or changed")
    return header, raw[end:]


def _concerns(field: str, namespace: str, model: str) -> bool:
    of_model, _, deleted = field.partition("|")
    inner, outer = (namespace, deleted) if len(namespace) >= len(deleted) else (deleted, namespace)
    return of_model in (ANY_MODEL, model) and (inner == outer or inner.startswith(f"{outer}/"))
