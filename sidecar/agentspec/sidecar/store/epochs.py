"""Deletion that lasts: an epoch of each namespace, so that what was written before it is refused everywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping

from agentspec.sidecar.store.connection import Client
from agentspec.sidecar.store.keys import ANY_MODEL, DELETIONS, EPOCHS, MODELS, ModelKeys, epoch_field

MAX_DELETIONS = 1000  # kept in the stream: it only wakes followers

# An epoch never goes back, also after Redis has lost all its data.
_RAISE = """
for i = 1, #ARGV, 2 do
  local now = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or '0')
  if tonumber(ARGV[i + 1]) > now then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
"""


def outer_namespaces(namespace: str) -> Iterator[str]:
    """A namespace and those that it is within: ``a/b`` and ``a`` of ``a/b``."""
    while namespace:
        yield namespace
        namespace, _, _ = namespace.rpartition("/")


class Epochs:
    """How often each namespace was deleted, as far as this process knows, and the lock that keeps it true.

    Whoever adds foreign text to the engine holds `lock` from the check of its epoch on: no deletion comes between.

    Args:
        model: see `model_id`.
        forget: deletes a namespace and those within it from the engine.
    """

    def __init__(self, model: str, forget: Callable[[str], object]) -> None:
        self.lock = threading.RLock()
        self._model = model
        self._forget = forget
        self._counts: dict[str, int] = {}

    def of(self, namespace: str) -> int:
        """The epoch of a namespace; grows with each deletion of it or of one that it is within."""
        with self.lock:
            return self._sum(namespace)

    def _sum(self, namespace: str) -> int:
        if not self._counts:
            return 0
        return sum(
            self._counts.get(epoch_field(model, outer), 0)
            for outer in outer_namespaces(namespace)
            for model in (ANY_MODEL, self._model)
        )

    def known(self) -> dict[str, int]:
        """All of them, by field of `EPOCHS`."""
        with self.lock:
            return dict(self._counts)

    def raise_to(self, counts: Mapping[str, int]) -> None:
        """Delete here what was deleted elsewhere.

        Args:
            counts: by field of `EPOCHS`; what is not above the known one is passed over.
        """
        with self.lock:
            for field, count in counts.items():
                model, _, namespace = field.partition("|")
                if model in (ANY_MODEL, self._model) and count > self._counts.get(field, 0):
                    self._forget(namespace)
                    self._counts[field] = count

    def sync(self, client: Client) -> None:
        """Bring this process and Redis to the higher of their epochs.

        Raises:
            redis.RedisError: Redis can't be asked; nothing is lost.
        """
        found = read_epochs(client)
        self.raise_to(found)
        with self.lock:
            lost = [(field, count) for field, count in self._counts.items() if count > found.get(field, 0)]
        if lost:
            client.eval(_RAISE, 1, EPOCHS, *(str(value) for pair in lost for value in pair))


def read_epochs(client: Client) -> dict[str, int]:
    """All epochs, by field of `EPOCHS`; what is no number is passed over.

    Raises:
        redis.RedisError: Redis can't be asked.
    """
    found = client.hgetall(EPOCHS)
    return {
        field.decode(errors="replace"): int(count)
        for field, count in found.items()
        if count.isdigit() and len(count) < 10
    }


def delete_in_redis(client: Client, namespace: str, model: str | None = None) -> None:
    """Delete a namespace and those within it from Redis, and from every engine that follows it or ever will.

    Args:
        client: may be anyone's.
        namespace: at least one character.
        model: see `model_id`; None: all.

    Raises:
        redis.RedisError: Redis can't be asked; to be called again.
    """
    field = epoch_field(model or ANY_MODEL, namespace)
    count = client.hincrby(EPOCHS, field, 1)
    client.xadd(DELETIONS, {"field": field, "count": count}, maxlen=MAX_DELETIONS, approximate=True)
    for found in [model] if model else [name.decode() for name in client.zrange(MODELS, 0, -1)]:
        _delete_text(client, ModelKeys(found), namespace)


def _delete_text(client: Client, keys: ModelKeys, namespace: str) -> None:
    inside = [name.decode() for name in client.zrange(keys.registry, 0, -1)]
    inside = [name for name in inside if name == namespace or name.startswith(f"{namespace}/")]
    for name in {*inside, namespace}:
        for key in (keys.log(name), keys.snapshot(name), keys.lease(name)):  # parts of snapshots, found by none, expire
            client.delete(key)
    if inside:
        client.zrem(keys.registry, *inside)


def note_use(client: Client, keys: ModelKeys, namespaces: Mapping[str, float], ttl_s: float) -> None:
    """Tell that namespaces are in use, and forget those that were not for `ttl_s` seconds.

    Args:
        client: of the model's engine.
        keys: of the model.
        namespaces: seconds since each was used.
        ttl_s: life of what nobody uses.
    """
    now_ms = time.time() * 1000
    uses = {name: now_ms - age_s * 1000 for name, age_s in namespaces.items()}
    if uses:
        client.zadd(keys.registry, uses, gt=True)
        client.zadd(MODELS, {keys.model: now_ms})
    oldest = now_ms - ttl_s * 1000
    client.zremrangebyscore(keys.registry, "-inf", oldest)
    client.zremrangebyscore(MODELS, "-inf", oldest)
    client.expire(keys.registry, int(ttl_s) + 1)
