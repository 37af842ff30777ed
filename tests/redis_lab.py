"""A Redis as a process of its own, and engines that share their histories through it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.engine_player import bold_engine
from tests.reference import Row, drafts_by_row, step_request, token_ids

from agentspec.sidecar.block_sharing import BlockSharing
from agentspec.sidecar.engine import Engine, FinishReason, Sampling
from agentspec.sidecar.store.options import RedisOptions
from agentspec.sidecar.store.store import HistoryStore
from agentspec.sidecar.tags import Tags

VOCABULARY = [bytes([byte]) for byte in range(256)]
MODEL = "0123456789abcdef"
NAMESPACE = "default"
START_S = 10.0
ANSWER_S = 15.0
TTL_S = 3600.0


def require_redis() -> None:
    """Skip where there is no redis-server, fail under CI."""
    if shutil.which("redis-server") is None:
        if os.environ.get("CI"):
            pytest.fail("redis-server is missing")
        pytest.skip("redis-server is missing")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(fact: Callable[[], Any], timeout_s: float = ANSWER_S) -> Any:
    """Wait until something is true, and return it."""
    end = time.monotonic() + timeout_s
    while not (value := fact()):
        assert time.monotonic() < end, "never became true"
        time.sleep(0.005)
    return value


@dataclass(slots=True)
class RedisServer:
    """One server; its address stays the same when it is killed and started again."""

    folder: Path
    flags: tuple[str, ...] = ()
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> Path:
        return self.folder / "redis.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def start(self) -> None:
        self.process = subprocess.Popen(
            [
                *(
                    "redis-server",
                    "--port",
                    str(self.port),
                    "--unixsocket",
                    str(self.socket),
                    "--dir",
                    str(self.folder),
                ),
                *("--save", "", "--appendonly", "no", *self.flags),
            ],
            stdout=subprocess.DEVNULL,
        )
        eventually(self._answers, START_S)

    def _answers(self) -> bool:
        with redis.Redis(unix_socket_path=str(self.socket)) as client:
            try:
                return bool(client.ping())
            except redis.AuthenticationError:
                return True
            except redis.RedisError:
                return False

    @contextmanager
    def client(self, **options: Any) -> Iterator[Any]:
        """Any: redis-py's types name the answers of asynchronous clients too."""
        with redis.Redis(unix_socket_path=str(self.socket), **options) as client:
            yield client

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(START_S)
            self.process = None
            self.socket.unlink(missing_ok=True)


@contextmanager
def running_redis(folder: Path, *flags: str, port: int = 0) -> Iterator[RedisServer]:
    require_redis()
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(folder, flags, port)
    server.start()
    try:
        yield server
    finally:
        server.kill()


@dataclass(slots=True)
class Replica:
    """An engine whose histories are shared."""

    engine: Engine
    sharing: BlockSharing
    _next_handle: int = 1000
    _stack: ExitStack = field(default_factory=ExitStack)

    def write(self, words: str, *, namespace: str = NAMESPACE, stage: str = "s", workflow: str = "") -> None:
        """One request, opened and closed."""
        self._next_handle += 1
        tokens = token_ids(*words.encode())
        tags = Tags(stage=stage, workflow_id=workflow)
        self.engine.open(self._next_handle, token_ids(*b"prompt"), tags, Sampling(), namespace=namespace)
        self.engine.close(self._next_handle, FinishReason.STOP, len(tokens), tokens)

    def use(self, namespace: str = NAMESPACE) -> None:
        """A request that writes nothing, so that the namespace is followed."""
        self._next_handle += 1
        tags = Tags(stage="s", history="read")
        self.engine.open(self._next_handle, token_ids(*b"!"), tags, Sampling(), namespace=namespace)
        self.engine.close(self._next_handle, FinishReason.ERROR, 0, token_ids())
        eventually(lambda: namespace in self.followed())

    @property
    def store(self) -> HistoryStore:
        assert self.sharing.store is not None
        return self.sharing.store

    def followed(self) -> set[str]:
        return {name for follower in self.store.followers for name in follower.namespaces()}

    def draft_after(self, words: str, *, namespace: str = NAMESPACE, stage: str = "s") -> str:
        """What it would draft for a request that has written so far."""
        self._next_handle += 1
        self.engine.open(
            self._next_handle, token_ids(*b"!"), Tags(stage=stage, history="read"), Sampling(), namespace=namespace
        )
        drafts = self.engine.step(step_request([Row(self._next_handle, 0, list(words.encode()), 16)]))
        self.engine.close(self._next_handle, FinishReason.ERROR, 0, token_ids())
        return bytes(drafts_by_row(drafts)[0]).decode()

    def knows(self, words: str, *, namespace: str = NAMESPACE, stage: str = "s") -> bool:
        """Whether it drafts the second half of a text after the first."""
        half = len(words) // 2
        draft = self.draft_after(words[:half], namespace=namespace, stage=stage)
        return draft.startswith(words[half : half + 4])

    @property
    def num_tokens(self) -> int:
        return self.engine.num_history_tokens()


@contextmanager
def replica(
    url: str, *, model: str = MODEL, roots: tuple[str, ...] = (NAMESPACE,), ttl_s: float = TTL_S, **options: Any
) -> Iterator[Replica]:
    engine = bold_engine(VOCABULARY)
    sharing = BlockSharing(
        engine, model, RedisOptions.model_validate({"redis": url, **options}), roots=roots, ttl_s=ttl_s
    )
    sharing.start()
    try:
        yield Replica(engine, sharing)
    finally:
        sharing.shutdown()
