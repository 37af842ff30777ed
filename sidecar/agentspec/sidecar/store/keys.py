"""Names of keys in Redis. `as1` is the version of the schema; a part in braces decides the slot in a cluster."""

from __future__ import annotations

import hashlib
import zlib

import numpy as np
from numpy.typing import NDArray

SCHEMA = "as1"
NUM_SHARDS = 8
EPOCHS = f"{SCHEMA}:epochs"
"""Hash: when a namespace was deleted, ms since 1970, by `epoch_field`."""
DELETIONS = f"{SCHEMA}:deletions"
"""Stream: one entry a deletion, so that followers look at the epochs at once."""
MODELS = f"{SCHEMA}:models"
"""Sorted set: models by last use, ms."""


def vocabulary_digest(token_lengths: NDArray[np.uint32], token_bytes: bytes) -> bytes:
    """Equal for equal tokens alone."""
    return hashlib.sha256(token_lengths.tobytes() + token_bytes).digest()


def model_id(fingerprint: str, digest: bytes) -> str:
    """The name of a model in Redis, 16 hex digits.

    Args:
        fingerprint: what a client calls it.
        digest: of its vocabulary: nobody reads the tokens of another one by the choice of a name.
    """
    return hashlib.sha256(fingerprint.encode() + digest).hexdigest()[:16]


class ModelKeys:
    """Keys of one model. A namespace lies in one shard, so that one call reads many.

    Args:
        model: see `model_id`.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.registry = f"{SCHEMA}:{{{model}}}:namespaces"

    def shard(self, namespace: str) -> int:
        """Which shard a namespace lies in."""
        return zlib.crc32(namespace.encode()) % NUM_SHARDS

    def log(self, namespace: str) -> str:
        """Stream of blocks as they are written."""
        return self._key("log", namespace)

    def snapshot(self, namespace: str) -> str:
        """Hash that describes the newest snapshot."""
        return self._key("snapshot", namespace)

    def part(self, namespace: str, generation: str, number: int) -> str:
        """One part of a snapshot."""
        return self._key(f"part:{generation}:{number}", namespace)

    def lease(self, namespace: str) -> str:
        """Held by whoever writes a snapshot."""
        return self._key("lease", namespace)

    def _key(self, kind: str, namespace: str) -> str:
        return f"{SCHEMA}:{{{self.model}/{self.shard(namespace)}}}:{kind}:{namespace}"
