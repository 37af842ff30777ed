"""Histories shared through a Redis that fails over: Sentinels, and a cluster that loses a node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.redis_lab import MODEL, RedisServer, Replica, eventually, free_port, replica, require_redis, running_redis
from tests.redis_topologies import SERVICE, Cluster, has_synced, running_cluster, running_sentinels, sentinel

from agentspec.sidecar.store.deletion import delete_in_redis, delete_shared
from agentspec.sidecar.store.keys import NUM_SHARDS, ModelKeys
from agentspec.sidecar.store.options import RedisOptions

PLAN = "first we look at the plan, then we write it down"
LATER = "0123456789 nobody ever planned to count like this"
LAST = "?! what else is there to say, asked the last of us"
FAILOVER_S = 60.0


def share(writer: Replica, reader: Replica, words: str, namespace: str = "default") -> None:
    reader.use(namespace)
    writer.write(words, namespace=namespace)
    eventually(lambda: reader.knows(words, namespace=namespace), FAILOVER_S)


def test_after_a_failover_engines_share_through_the_new_master(tmp_path: Path) -> None:
    require_redis()
    with running_sentinels(tmp_path) as found, replica(found.url) as a, replica(found.url) as b:
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
    with running_sentinels(tmp_path) as found, replica(found.url) as a, replica(found.url) as b:
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

        with sentinel(tmp_path / "sentinel", port, server.port):
            eventually(lambda: a.store.figures().is_connected, FAILOVER_S)
            eventually(lambda: a.store.figures().num_entries.get("published"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster")) as found:
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
