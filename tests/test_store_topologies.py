"""Histories shared through a Redis that fails over: Sentinels, and a cluster that loses a node."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.redis_lab import (
    MODEL,
    RedisServer,
    Replica,
    eventually,
    free_port,
    replica,
    require_redis,
    running_redis,
)

from agentspec.sidecar.store.deletion import delete_in_redis, delete_shared
from agentspec.sidecar.store.keys import NUM_SHARDS, ModelKeys
from agentspec.sidecar.store.options import RedisOptions

PLAN = "first we look at the plan, then we write it down"
LATER = "0123456789 nobody ever planned to count like this"
LAST = "?! what else is there to say, asked the last of us"
FAILOVER_S = 60.0
SERVICE = "histories"


def share(writer: Replica, reader: Replica, words: str, namespace: str = "default") -> None:
    reader.use(namespace)
    writer.write(words, namespace=namespace)
    eventually(lambda: reader.knows(words, namespace=namespace), FAILOVER_S)


def has_synced(server: RedisServer) -> bool:
    """Whether a replica has all of its master."""
    with server.client() as client:
        return bool(client.info("replication").get("master_link_status") == "up")


@dataclass(slots=True)
class SentinelRedis:
    """A master, a replica of it and three Sentinels."""

    servers: list[RedisServer]
    ports: list[int]

    @property
    def url(self) -> str:
        return f"sentinel://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{SERVICE}"

    def master_port(self) -> int:
        with redis.Redis(port=self.ports[0]) as client:
            answer: Any = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
            return int(answer[1])

    def master(self) -> RedisServer:
        return next(server for server in self.servers if server.port == self.master_port())


@contextmanager
def sentinels(folder: Path) -> Iterator[SentinelRedis]:
    with ExitStack() as stack:
        first = stack.enter_context(running_redis(folder / "1", port=free_port()))
        second = stack.enter_context(
            running_redis(folder / "2", "--replicaof", f"127.0.0.1 {first.port}", port=free_port())
        )
        eventually(lambda: has_synced(second))
        found = SentinelRedis([first, second], [free_port() for _ in range(3)])
        for port in found.ports:
            stack.enter_context(_sentinel(folder / str(port), port, first.port))
        eventually(lambda: _knows_others(found.ports[0]))
        yield found


@contextmanager
def _sentinel(folder: Path, port: int, master: int) -> Iterator[None]:
    folder.mkdir()
    lines = [
        f"port {port}",
        f"dir {folder}",
        f"sentinel monitor {SERVICE} 127.0.0.1 {master} 2",
        f"sentinel down-after-milliseconds {SERVICE} 1000",
        f"sentinel failover-timeout {SERVICE} 5000",
    ]
    (folder / "sentinel.conf").write_text("\n".join(lines) + "\n")
    process = subprocess.Popen(["redis-server", str(folder / "sentinel.conf"), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _knows_others(port: int) -> bool:
    with suppress(redis.RedisError), redis.Redis(port=port) as client:
        answer: Any = client.execute_command("SENTINEL", "MASTER", SERVICE)
        seen = dict(zip(answer[::2], answer[1::2], strict=True)) if isinstance(answer, list) else answer
        found = {str(key if isinstance(key, str) else key.decode()): value for key, value in seen.items()}
        return int(found["num-slaves"]) == 1 and int(found["num-other-sentinels"]) == 2
    return False


def test_after_a_failover_engines_share_through_the_new_master(tmp_path: Path) -> None:
    require_redis()
    with sentinels(tmp_path) as found, replica(found.url) as a, replica(found.url) as b:
        share(a, b, PLAN)
        share(b, a, PLAN[::-1])
        master = found.master()

        master.kill()
        a.write(LATER)
        assert a.knows(LATER)

        eventually(lambda: found.master_port() != master.port, FAILOVER_S)
        eventually(lambda: b.knows(LATER), FAILOVER_S)
        share(b, a, LAST)
        assert a.num_tokens == b.num_tokens
        with replica(found.url) as late:
            late.use()
            eventually(lambda: late.knows(LATER) and late.knows(LAST), FAILOVER_S)


def test_a_deletion_holds_after_a_failover(tmp_path: Path) -> None:
    require_redis()
    with sentinels(tmp_path) as found, replica(found.url) as a, replica(found.url) as b:
        share(a, b, PLAN)
        master = found.master()
        with master.client() as client:
            delete_in_redis(client, "default")
            client.wait(1, 5000)
        eventually(lambda: a.num_tokens == b.num_tokens == 0)
        master.kill()
        eventually(lambda: found.master_port() != master.port, FAILOVER_S)

        share(a, b, LATER)
        assert a.num_tokens == b.num_tokens == len(LATER)


def test_sentinels_that_are_away_at_the_start_are_found_later(tmp_path: Path) -> None:
    require_redis()
    port = free_port()
    with (
        running_redis(tmp_path / "1", port=free_port()) as server,
        replica(f"sentinel://127.0.0.1:{port}/{SERVICE}") as a,
    ):
        a.write(PLAN)
        eventually(lambda: a.store.figures().num_failures)
        assert a.knows(PLAN)

        with _sentinel(tmp_path / "sentinel", port, server.port):
            eventually(lambda: a.store.figures().is_connected, FAILOVER_S)
            eventually(lambda: a.store.figures().num_entries.get("published"))


@dataclass(slots=True)
class Cluster:
    """Three masters with a replica each."""

    servers: list[RedisServer] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"cluster://{','.join(f'127.0.0.1:{server.port}' for server in self.servers)}"

    def owner(self, key: str) -> RedisServer:
        """The master of a key's slot."""
        alive = [server for server in self.servers if server.process is not None]
        with alive[0].client() as client:
            slot = int(client.cluster("KEYSLOT", key))
            for begin, end, master, *_ in client.execute_command("CLUSTER", "SLOTS"):
                if begin <= slot <= end:
                    return next(server for server in self.servers if server.port == int(master[1]))
        raise AssertionError(f"nobody has slot {slot}")

    def is_whole(self) -> bool:
        alive = [server for server in self.servers if server.process is not None]
        for server in alive:
            with server.client() as client:
                if client.cluster("INFO")["cluster_state"] != "ok":
                    return False
        return True


def _bus_is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port + 10_000))
        except OSError:
            return False
    return True


def _cluster_port() -> int:
    while (port := free_port()) > 55_000 or not _bus_is_free(port):
        pass
    return port


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_redis()
    folder = tmp_path_factory.mktemp("cluster")
    flags = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-config-file", "nodes.conf"]
    with ExitStack() as stack:
        found = Cluster()
        for number in range(6):
            server = running_redis(folder / str(number), *flags, port=_cluster_port())
            found.servers.append(stack.enter_context(server))
        nodes = [f"127.0.0.1:{server.port}" for server in found.servers]
        subprocess.run(
            ["redis-cli", "--cluster", "create", *nodes, "--cluster-replicas", "1", "--cluster-yes"],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )
        eventually(found.is_whole, 30)
        yield found


def namespaces_of_all_shards() -> list[str]:
    """One for each of the eight slots that a model's namespaces are spread over."""
    keys = ModelKeys(MODEL)
    by_shard: dict[int, str] = {}
    number = 0
    while len(by_shard) < NUM_SHARDS:
        by_shard.setdefault(keys.shard(f"default/{number}"), f"default/{number}")
        number += 1
    return [*by_shard.values()]


def test_namespaces_of_all_shards_are_shared_in_a_cluster(cluster: Cluster) -> None:
    with replica(cluster.url) as a, replica(cluster.url) as b:
        for number, namespace in enumerate(namespaces_of_all_shards()):
            share(a, b, f"{number} {PLAN}", namespace)
            share(b, a, f"{number} {LATER}", namespace)

        with replica(cluster.url) as late:
            for number, namespace in enumerate(namespaces_of_all_shards()):
                late.use(namespace)
                eventually(lambda: late.knows(f"{number} {LATER}", namespace=namespace))  # noqa: B023  # called at once


def test_a_deletion_in_a_cluster_is_final(cluster: Cluster) -> None:
    with replica(cluster.url) as a, replica(cluster.url) as b:
        for namespace in namespaces_of_all_shards():
            share(a, b, PLAN, namespace)
        delete_shared(RedisOptions(redis=cluster.url), "default")

        eventually(lambda: a.num_tokens == b.num_tokens == 0)
        share(a, b, LAST, namespaces_of_all_shards()[0])
        assert a.num_tokens == b.num_tokens == len(LAST)


def test_a_cluster_that_loses_a_node_goes_on_with_its_replica(cluster: Cluster) -> None:
    keys = ModelKeys(MODEL)
    for server in cluster.servers:
        eventually(lambda: _is_master(server) or has_synced(server), 30)  # noqa: B023  # called at once
    with replica(cluster.url) as a, replica(cluster.url) as b:
        for namespace in namespaces_of_all_shards():
            share(a, b, PLAN, namespace)
        namespace = namespaces_of_all_shards()[0]
        owner = cluster.owner(keys.log(namespace))

        owner.kill()
        begin = time.monotonic()
        a.write(LATER, namespace=namespace)
        assert a.knows(LATER, namespace=namespace)
        assert time.monotonic() - begin < 1

        eventually(lambda: b.knows(LATER, namespace=namespace), FAILOVER_S)
        for number, other in enumerate(namespaces_of_all_shards()):
            share(b, a, f"{number} {LAST}", other)
        owner.start()
        eventually(cluster.is_whole, 30)


def _is_master(server: RedisServer) -> bool:
    with server.client() as client:
        return bool(client.info("replication")["role"] == "master")
