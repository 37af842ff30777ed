"""A redis-server of our own, which lives as long as a context."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

import redis

START_S = 15.0


class RedisMissingError(RuntimeError):
    """There is no redis-server, or it does not start."""


@contextmanager
def running_redis() -> Iterator[str]:
    """A server on a Unix socket that keeps nothing on disk; yields its URL.

    Raises:
        RedisMissingError: see there.
    """
    if shutil.which("redis-server") is None:
        raise RedisMissingError("redis-server is missing: install Redis 7 or newer")
    with tempfile.TemporaryDirectory(prefix="agentspec-redis-") as folder:
        url = f"unix://{folder}/redis.sock"
        command = ["redis-server", "--port", "0", "--unixsocket", f"{folder}/redis.sock"]
        command += ["--save", "", "--appendonly", "no", "--dir", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            _await_answer(url)
            yield url
        finally:
            process.terminate()
            process.wait(START_S)


def _await_answer(url: str) -> None:
    end = time.monotonic() + START_S
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
            except redis.RedisError as error:
                if time.monotonic() > end:
                    raise RedisMissingError(f"redis-server did not start: {error}") from None
                time.sleep(0.02)
            else:
                return
