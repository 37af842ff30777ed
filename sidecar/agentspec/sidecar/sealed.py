"""Archives that know which deletions they have seen, and which blocks they hold."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from agentspec.sidecar.engine import ArchiveError
from agentspec.sidecar.epochs import ANY_MODEL, outer_namespaces

MAGIC = b"ASPE"
_FRAME = struct.Struct("<II")  # length and CRC-32 of the header


class Unsealed(NamedTuple):
    """What was sealed.

    Attributes:
        archive: for `Engine.import_histories`.
        last_sequences: of the shared blocks in it, by origin.
    """

    archive: bytes
    last_sequences: Mapping[int, int]


def seal(
    archive: bytes, namespace: str, model: str, epochs: Mapping[str, int], last_sequences: Mapping[int, int]
) -> bytes:
    """An archive with the epochs at which it was made.

    Args:
        archive: as `Engine.export_histories` gives it.
        namespace: that was exported.
        model: see `model_id`.
        epochs: ms, by `epoch_field`.
        last_sequences: see `Unsealed`.
    """
    seen = {field: time_ms for field, time_ms in epochs.items() if _concerns(field, namespace, model)}
    header = json.dumps({"namespace": namespace, "epochs": seen, "last_sequences": dict(last_sequences)}).encode()
    return MAGIC + _FRAME.pack(len(header), zlib.crc32(header)) + header + archive


def unseal(raw: bytes, namespace: str, model: str, epochs: Mapping[str, int]) -> Unsealed:
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
    last_sequences: dict[int, int] = {}
    if raw.startswith(MAGIC):
        header, raw = _split(raw)
        namespace = header["namespace"]
        last_sequences = {int(origin): sequence for origin, sequence in header["last_sequences"].items()}
        for field, time_ms in header["epochs"].items():
            of = field.partition("|")[2]
            seen[of] = max(seen.get(of, 0), time_ms)
    for field, time_ms in epochs.items():
        deleted = field.partition("|")[2]
        last_seen = max((seen.get(outer, 0) for outer in outer_namespaces(deleted)), default=0)
        if _concerns(field, namespace, model) and time_ms > last_seen:
            raise ArchiveError(f"archive: the namespace {deleted} was deleted since it was made")
    return Unsealed(raw, last_sequences)


def _split(raw: bytes) -> tuple[Mapping[str, Any], bytes]:
    begin = len(MAGIC) + _FRAME.size
    try:
        length, checksum = _FRAME.unpack_from(raw, len(MAGIC))
        text = raw[begin : begin + length]
        header = json.loads(text)
        is_whole = (
            (len(text), zlib.crc32(text)) == (length, checksum)
            and isinstance(header["namespace"], str)
            and all(isinstance(time_ms, int) for time_ms in header["epochs"].values())
            and all(isinstance(sequence, int) for sequence in header["last_sequences"].values())
            and all(map(str.isdecimal, header["last_sequences"]))
        )
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        is_whole = False
    if not is_whole:
        raise ArchiveError("archive: its header was cut or changed")
    return header, raw[begin + length :]


def _concerns(field: str, namespace: str, model: str) -> bool:
    of_model, _, deleted = field.partition("|")
    inner, outer = (namespace, deleted) if len(namespace) >= len(deleted) else (deleted, namespace)
    return of_model in (ANY_MODEL, model) and (inner == outer or inner.startswith(f"{outer}/"))
