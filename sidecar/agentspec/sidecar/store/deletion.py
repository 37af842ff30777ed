"""Deletions in Redis: every engine that shares its histories there learns of them, now or when it comes back."""

from __future__ import annotations

import time
from collections.abc import Mapping

from agentspec.sidecar.epochs import ANY_MODEL, Epochs, epoch_field, now_ms
from agentspec.sidecar.store.connection import Client, connect
from agentspec.sidecar.store.keys import DELETIONS, EPOCHS, MODELS, ModelKeys
from agentspec.sidecar.store.options import RedisOptions

MAX_DELETIONS = 1000  # kept in the stream: it only wakes followers
MAX_EPOCH_DIGITS = 15

# An epoch never goes back, also after Redis has lost all its data.
_RAISE = """
for i = 1, #ARGV, 2 do
  local now = tonumber(redis.call('HGET', KEYS[1], ARGV[i]) or '0')
  if tonumber(ARGV[i + 1]) > now then redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
"""
# A deletion is later than the last one, whatever the clock of its machine says. The text of a number is made here:
# Redis would round it.
_DELETE = """
local last = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '0')
local time_ms = tonumber(ARGV[2])
if time_ms < last or (ARGV[3] == '' and time_ms == last) then time_ms = last + 1 end
local text = string.format('%.0f', time_ms)
redis.call('HSET', KEYS[1], ARGV[1], text)
return text
"""


def sync(epochs: Epochs, client: Client) -> None:
    """Bring this process and Redis to the later of their epochs.

    Raises:
        redis.RedisError: Redis can't be asked; nothing is lost.
    """
    found = read_epochs(client)
    epochs.raise_to(found)
    lost = [(field, time_ms) for field, time_ms in epochs.known().items() if time_ms > found.get(field, 0)]
    if lost:
        client.eval(_RAISE, 1, EPOCHS, *(str(value) for pair in lost for value in pair))


def read_epochs(client: Client) -> dict[str, int]:
    """All epochs, ms by `epoch_field`; what is no number is passed over.

    Raises:
        redis.RedisError: Redis can't be asked.
    """
    found = client.hgetall(EPOCHS)
    return {
        field.decode(errors="replace"): int(time_ms)
        for field, time_ms in found.items()
        if time_ms.isdigit() and len(time_ms) <= MAX_EPOCH_DIGITS
    }


def delete_shared(options: RedisOptions, namespace: str, model: str | None = None, *, epoch: int = 0) -> None:
    """Delete a namespace for good, from Redis and from every engine that shares its histories there.

    Args:
        options: with a URL.
        namespace: with those within it.
        model: see `model_id`; None: of all models.
        epoch: that the deletion begins, ms; 0: now.

    Raises:
        redis.RedisError: Redis can't be asked; to be called again.
    """
    address = options.redis_address()
    if address is None:
        raise ValueError("redis: expected a URL")
    client = connect(options, address)
    try:
        delete_in_redis(client, namespace, model, epoch=epoch)
    finally:
        client.close()


def delete_in_redis(client: Client, namespace: str, model: str | None = None, *, epoch: int = 0) -> None:
    """Delete a namespace and those within it from Redis, and from every engine that follows it or ever will.

    Args:
        client: may be anyone's.
        namespace: at least one character.
        model: see `model_id`; None: all.
        epoch: that the deletion begins, ms; 0: now.

    Raises:
        redis.RedisError: Redis can't be asked; to be called again.
    """
    field = epoch_field(model or ANY_MODEL, namespace)
    time_ms = client.eval(_DELETE, 1, EPOCHS, field, str(epoch or now_ms()), str(epoch or ""))
    client.xadd(DELETIONS, {"field": field, "time_ms": time_ms}, maxlen=MAX_DELETIONS, approximate=True)
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
    now = time.time() * 1000
    uses = {name: now - age_s * 1000 for name, age_s in namespaces.items()}
    if uses:
        client.zadd(keys.registry, uses, gt=True)
        client.zadd(MODELS, {keys.model: now})
    oldest = now - ttl_s * 1000
    client.zremrangebyscore(keys.registry, "-inf", oldest)
    client.zremrangebyscore(MODELS, "-inf", oldest)
    client.expire(keys.registry, int(ttl_s) + 1)
