"""Redis with Sentinels, and as a cluster, all in processes of their own."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from tests.redis_lab import RedisServer, eventually, free_port, require_redis, running_redis

SERVICE = "histories"


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
def running_sentinels(folder: Path) -> Iterator[SentinelRedis]:
    with ExitStack() as stack:
        first = stack.enter_context(running_redis(folder / "1", port=free_port()))
        second = stack.enter_context(
            running_redis(folder / "2", "--replicaof", f"127.0.0.1 {first.port}", port=free_port())
        )
        eventually(lambda: has_synced(second))
        found = SentinelRedis([first, second], [free_port() for _ in range(3)])
        for port in found.ports:
            stack.enter_context(sentinel(folder / str(port), port, first.port))
        eventually(lambda: _knows_others(found.ports[0]))
        yield found


@contextmanager
def sentinel(folder: Path, port: int, master: int) -> Iterator[None]:
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


@dataclass(slots=True)
class Cluster:
    """Masters, and replicas of them."""

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


@contextmanager
def running_cluster(folder: Path, *, num_replicas: int = 1) -> Iterator[Cluster]:
    """Three masters, each with so many replicas."""
    require_redis()
    flags = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-config-file", "nodes.conf"]
    with ExitStack() as stack:
        found = Cluster()
        for number in range(3 * (1 + num_replicas)):
            server = running_redis(folder / str(number), *flags, port=_cluster_port())
            found.servers.append(stack.enter_context(server))
        nodes = [f"127.0.0.1:{server.port}" for server in found.servers]
        subprocess.run(
            [*("redis-cli", "--cluster", "create"), *nodes, "--cluster-replicas", str(num_replicas), "--cluster-yes"],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )
        eventually(found.is_whole, 30)
        yield found
