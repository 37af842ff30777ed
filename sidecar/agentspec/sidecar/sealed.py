"""Archives that know which deletions they have seen."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from agentspec.sidecar.engine import ArchiveError
from agentspec.sidecar.epochs import ANY_MODEL, outer_namespaces

MAGIC = b"ASPE"
_LENGTH = struct.Struct("<I")


def seal(archive: bytes, namespace: str, model: str, epochs: Mapping[str, int]) -> bytes:
    """An archive with the epochs at which it was made.

    Args:
        archive: as `Engine.export_histories` gives it.
        namespace: that was exported.
        model: see `model_id`.
        epochs: ms, by `epoch_field`.
    """
    seen = {field: time_ms for field, time_ms in epochs.items() if _concerns(field, namespace, model)}
    header = json.dumps({"namespace": namespace, "epochs": seen}).encode()
    return MAGIC + _LENGTH.pack(len(header)) + header + archive


def unseal(raw: bytes, namespace: str, model: str, epochs: Mapping[str, int]) -> bytes:
    """The archive, if nothing of it was deleted since.

    Args:
        raw: sealed or not; what is not is taken for older than any deletion.
        namespace: that it is to go to.
        model: see `model_id`.
        epochs: ms, by `epoch_field`, as they are now.

    Raises:
        ArchiveError: something was, or the bytes are no sealed archive.
    """
    seen: dict[str, int] = {}
    if raw.startswith(MAGIC):
        header, raw = _split(raw)
        namespace = header["namespace"]
        for field, time_ms in header["epochs"].items():
            of = field.partition("|")[2]
            seen[of] = max(seen.get(of, 0), time_ms)
    for field, time_ms in epochs.items():
        deleted = field.partition("|")[2]
        last_seen = max((seen.get(outer, 0) for outer in outer_namespaces(deleted)), default=0)
        if _concerns(field, namespace, model) and time_ms > last_seen:
            raise ArchiveError(f"archive: the namespace {deleted} was deleted since it was made")
    return raw


def _split(raw: bytes) -> tuple[Mapping[str, Any], bytes]:
    begin = len(MAGIC) + _LENGTH.size
    try:
        end = begin + _LENGTH.unpack_from(raw, len(MAGIC))[0]
        header = json.loads(raw[begin:end])
        is_whole = isinstance(header["namespace"], str) and all(
            isinstance(time_ms, int) for time_ms in header["epochs"].values()
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
