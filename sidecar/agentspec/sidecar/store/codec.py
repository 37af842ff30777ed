"""Blocks as bytes in Redis: a header, the blocks, compressed and perhaps encrypted, and a checksum."""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

VERSION = 1
MAX_BLOCK_BYTES = 64 << 20
MIN_COMPRESSED_BYTES = 64
COMPRESSION_LEVEL = 3

# version, flags, origin, sequence, epoch, tokens
_HEADER = struct.Struct("<BBQQQI")
_CHECKSUM = struct.Struct("<I")
_COMPRESSED = 1
_ENCRYPTED = 2
_NONCE_BYTES = 12

Fault = Literal["schema", "corrupt", "key"]


class EntryError(ValueError):
    """These bytes are of no use here.

    Attributes:
        fault: `schema`: another version; `corrupt`: cut or changed; `key`: another key, or none where there is one.
    """

    def __init__(self, fault: Fault, reason: str) -> None:
        super().__init__(reason)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Entry:
    """What one engine shares at once of one namespace.

    Attributes:
        origin: number of the engine that wrote it.
        sequence: grows with each entry of the namespace from that engine.
        epoch: of the namespace when it was written.
        num_tokens: in the blocks.
        blocks: for `Engine.merge_blocks`, or an archive for `Engine.import_histories`.
    """

    origin: int
    sequence: int
    epoch: int
    num_tokens: int
    blocks: bytes


class Codec:
    """Writes and reads entries.

    Args:
        key: encrypts with AES-256-GCM; None: in the clear.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._cipher = AESGCM(key) if key is not None else None

    def encode(self, entry: Entry, place: str) -> bytes:
        """Bytes of an entry; `place` is the key that it goes to, and it is of use nowhere else if it is encrypted."""
        flags, payload = 0, entry.blocks
        if len(payload) >= MIN_COMPRESSED_BYTES:
            compressed = zlib.compress(payload, COMPRESSION_LEVEL)
            if len(compressed) < len(payload):
                flags, payload = _COMPRESSED, compressed
        if self._cipher is not None:
            flags |= _ENCRYPTED
        header = _HEADER.pack(VERSION, flags, entry.origin, entry.sequence, entry.epoch, entry.num_tokens)
        if self._cipher is not None:
            nonce = os.urandom(_NONCE_BYTES)
            payload = nonce + self._cipher.encrypt(nonce, payload, header + place.encode())
        body = header + payload
        return body + _CHECKSUM.pack(zlib.crc32(body))

    def decode(self, raw: bytes, place: str) -> Entry:
        """Read an entry.

        Raises:
            EntryError: it is of no use here.
        """
        if not raw:
            raise EntryError("corrupt", "an entry is empty")
        if raw[0] != VERSION:
            raise EntryError("schema", f"expected version {VERSION}, got {raw[0]}")
        if len(raw) < _HEADER.size + _CHECKSUM.size:
            raise EntryError("corrupt", "an entry is too short")
        body = raw[: -_CHECKSUM.size]
        if _CHECKSUM.unpack(raw[-_CHECKSUM.size :])[0] != zlib.crc32(body):
            raise EntryError("corrupt", "an entry's checksum is wrong")
        _, flags, origin, sequence, epoch, num_tokens = _HEADER.unpack_from(body)
        if flags & ~(_COMPRESSED | _ENCRYPTED):
            raise EntryError("schema", f"unknown flags {flags:#x}")
        payload = self._decrypt(body, place, is_encrypted=bool(flags & _ENCRYPTED))
        return Entry(origin, sequence, epoch, num_tokens, _decompress(payload) if flags & _COMPRESSED else payload)

    def _decrypt(self, body: bytes, place: str, *, is_encrypted: bool) -> bytes:
        header, payload = body[: _HEADER.size], body[_HEADER.size :]
        if self._cipher is None:
            if is_encrypted:
                raise EntryError("key", "an entry is encrypted and there is no key here")
            return payload
        if not is_encrypted:  # or whoever can write to Redis could go around the key
            raise EntryError("key", "an entry is not encrypted and there is a key here")
        try:
            return self._cipher.decrypt(payload[:_NONCE_BYTES], payload[_NONCE_BYTES:], header + place.encode())
        except (InvalidTag, ValueError):
            raise EntryError("key", "an entry was encrypted with another key, or belongs elsewhere") from None


def _decompress(payload: bytes) -> bytes:
    stream = zlib.decompressobj()
    try:
        blocks = stream.decompress(payload, MAX_BLOCK_BYTES)
    except zlib.error:
        raise EntryError("corrupt", "an entry can't be decompressed") from None
    if not stream.eof or stream.unused_data:
        raise EntryError("corrupt", f"an entry is cut, or larger than {MAX_BLOCK_BYTES} bytes")
    return blocks
