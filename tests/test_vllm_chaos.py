"""vLLM, two draft servers and Redis under load while one after another fails: outputs are those of plain decoding."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.history_lab import LinkedEngine
from tests.redis_lab import RedisServer, eventually, require_redis, running_redis
from tests.sidecar_lab import SidecarProcess, running_sidecar
from tests.vllm_lab import Lab, PlainEngine, count_ties, greedy, prompts

from agentspec.serving_patch.client import DraftClient, EmbeddedClient
from agentspec.serving_patch.history_link import HistoryLink
from agentspec.serving_patch.sidecar_client import SidecarClient
from agentspec.serving_patch.sidecar_messages import Vocabulary
from agentspec.sidecar.store.deletion import delete_shared
from agentspec.sidecar.store.options import RedisOptions

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

NUM_PROMPTS = 8
MAX_TOKENS = 24
FAULT_S = 0.3  # into a batch, which takes a second or more
TAGS = json.dumps({"workflow_id": "w", "stage": "s"})


@dataclass(slots=True)
class Draft:
    """A draft server that may be killed and started again."""

    socket: Path
    redis: str
    _stack: ExitStack
    process: SidecarProcess | None = None

    def start(self) -> None:
        self.process = self._stack.enter_context(running_sidecar(self.socket, "--redis", self.redis))

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.process.send_signal(number)


@dataclass(slots=True)
class World:
    """All that stands beside vLLM, and an engine on the other server that sees what comes through."""

    redis: RedisServer
    near: Draft
    far: Draft
    peer: LinkedEngine

    def keys(self) -> list[str]:
        with self.redis.client() as client:
            return [key.decode() for key in client.keys("as1:*:log:*")]

    def redis_command(self, *words: str) -> None:
        with self.redis.client() as client:
            client.execute_command(*words)

    def lock_redis(self) -> None:
        with self.redis.client() as client:
            client.config_set("requirepass", "changed")
            client.client_kill_filter(_type="normal", skipme=True)

    def unlock_redis(self) -> None:
        with self.redis.client(password="changed") as client:  # noqa: S106  # of a server of the test
            client.config_set("requirepass", "")

    def evict(self) -> None:
        with self.redis.client() as client:
            for key in self.keys():
                client.delete(key)

    def corrupt(self) -> None:
        with self.redis.client() as client:
            for key in self.keys():
                client.xadd(key, {"b": b"\x63 of another version, and cut"})
                client.xadd(key, {"other": b"field"})

    def delete(self) -> None:
        delete_shared(RedisOptions(redis=self.redis.url), "default")


def nothing(_: World) -> None:
    """The fault ends by itself."""


FAULTS: dict[str, tuple[Callable[[World], None], Callable[[World], None]]] = {
    "draft server killed": (lambda world: world.near.kill(), lambda world: world.near.start()),
    "draft server hangs": (
        lambda world: world.near.send(signal.SIGSTOP),
        lambda world: world.near.send(signal.SIGCONT),
    ),
    "Redis killed": (lambda world: world.redis.kill(), lambda world: world.redis.start()),
    "Redis pauses": (lambda world: world.redis_command("CLIENT", "PAUSE", "1500"), nothing),
    "Redis full": (
        lambda world: world.redis_command("CONFIG", "SET", "maxmemory", "1"),
        lambda world: world.redis_command("CONFIG", "SET", "maxmemory", "0"),
    ),
    "keys evicted": (World.evict, nothing),
    "all lost": (lambda world: world.redis_command("FLUSHALL"), nothing),
    "password changed": (World.lock_redis, World.unlock_redis),
    "foreign and cut entries": (World.corrupt, nothing),
    "namespace deleted": (World.delete, nothing),
    "other draft server killed": (lambda world: world.far.kill(), lambda world: world.far.start()),
}


@pytest.fixture
def vocabulary(lab: Lab) -> Vocabulary:
    return Vocabulary.of("chaos", lab.vocabulary)


@pytest.fixture
def world(lab: Lab, vocabulary: Vocabulary, tmp_path: Path) -> Iterator[World]:
    require_redis()
    with ExitStack() as stack:
        redis = stack.enter_context(running_redis(tmp_path / "redis"))
        near, far = (Draft(tmp_path / name / "draft.sock", redis.url, stack) for name in ("near", "far"))
        near.start()
        far.start()
        engine = lab.new_engine()
        link = HistoryLink(engine, far.socket, vocabulary, namespace="default", ttl_s=3600, max_archive_bytes=1 << 28)
        link.start()
        stack.callback(link.shutdown)
        yield World(redis, near, far, LinkedEngine(engine, link))


@pytest.fixture(params=["hybrid", "sidecar"])
def client(request: pytest.FixtureRequest, lab: Lab, vocabulary: Vocabulary, world: World) -> Iterator[DraftClient]:
    fallbacks = lab.scheduler._fallbacks
    if request.param == "sidecar":
        client = SidecarClient(world.near.socket, vocabulary, fallbacks=fallbacks)
        yield client
        lab.use(lab.new_client())
        client.shutdown()
        return
    engine = lab.new_engine()
    link = HistoryLink(
        engine, world.near.socket, vocabulary, namespace="default", ttl_s=3600, max_archive_bytes=1 << 28
    )
    link.start()
    yield EmbeddedClient(engine, fallbacks=fallbacks)
    lab.use(lab.new_client())
    link.shutdown()


def test_outputs_are_those_of_plain_decoding_whatever_fails(
    lab: Lab, plain_engine: PlainEngine, world: World, client: DraftClient
) -> None:
    params = greedy(MAX_TOKENS, extra_args={"agentspec": TAGS})
    expected = plain_engine.run(prompts(NUM_PROMPTS), greedy(MAX_TOKENS))
    lab.use(client, deadline_ms=30.0)

    def run() -> Any:
        outputs = lab.run(prompts(NUM_PROMPTS), params)
        return count_ties(expected, outputs)

    run()
    for fault, heal in FAULTS.values():
        failing = threading.Timer(FAULT_S, fault, [world])
        failing.start()
        run()
        failing.join()
        run()
        heal(world)
        run()

    world.peer.use()
    num_before = world.peer.engine.num_history_tokens()

    def reaches_the_peer() -> bool:
        run()
        return world.peer.engine.num_history_tokens() > num_before

    assert eventually(reaches_the_peer, 60)
    assert lab.fallbacks().get("hook_error", 0) == 0
