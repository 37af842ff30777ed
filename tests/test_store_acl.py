"""The ACL files that are shipped: enough for all that engines do, and for nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.redis_lab import MODEL, NAMESPACE, RedisServer, eventually, replica, running_redis
from tests.redis_topologies import Cluster, running_cluster

from agentspec.sidecar.store import keeper
from agentspec.sidecar.store.deletion import delete_shared
from agentspec.sidecar.store.keys import ModelKeys
from agentspec.sidecar.store.options import RedisOptions

REPOSITORY = Path(__file__).parents[1]
FILES = {version: REPOSITORY / f"deploy/redis/agentspec-{version}.acl" for version in ("7.0", "7.2")}
PASSWORD = "correct horse battery staple"  # noqa: S105  # of a server of the test
PLAN = "first we look at the plan, then we write it down"


def installed() -> str:
    """The file as an operator installs it."""
    return FILES["7.0"].read_text().replace("PASSWORD_SHA256", hashlib.sha256(PASSWORD.encode()).hexdigest())


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(PASSWORD)
    return path


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    path = tmp_path / "users.acl"
    path.write_text(installed())
    with running_redis(tmp_path / "redis", "--aclfile", str(path)) as running:
        yield running


def test_all_that_engines_do_is_allowed(
    server: RedisServer, password_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "MIN_SNAPSHOT_TOKENS", 40)
    monkeypatch.setattr(keeper, "HOUSEKEEPING_S", 0.1)
    options: dict[str, Any] = {"redis_username": "agentspec", "redis_password_file": password_file}
    with replica(server.url, **options) as a, replica(server.url, **options) as b:
        b.use()
        a.write(PLAN)
        eventually(lambda: b.knows(PLAN))
        eventually(lambda: a.store.figures().num_snapshots + b.store.figures().num_snapshots)
        with replica(server.url, **options) as late:
            eventually(lambda: late.knows(PLAN))
        delete_shared(RedisOptions(redis=server.url, **options), NAMESPACE)
        eventually(lambda: a.num_tokens == b.num_tokens == 0)
        assert {} == a.store.figures().num_failures == b.store.figures().num_failures


def test_what_engines_do_in_a_cluster_is_allowed(tmp_path: Path, password_file: Path) -> None:
    options: dict[str, Any] = {"redis_username": "agentspec", "redis_password_file": password_file}
    with ExitStack() as stack:
        cluster: Cluster = stack.enter_context(running_cluster(tmp_path / "cluster", num_replicas=0))
        for server in cluster.servers:
            with server.client() as client:
                rules = FILES["7.0"].read_text().splitlines()[1].split()
                hashed = hashlib.sha256(PASSWORD.encode()).hexdigest()
                client.execute_command(
                    "ACL", "SETUSER", *(rule.replace("PASSWORD_SHA256", hashed) for rule in rules[1:])
                )
        a, b = (stack.enter_context(replica(cluster.url, **options)) for _ in range(2))
        b.use()
        a.write(PLAN)
        eventually(lambda: b.knows(PLAN))
        assert {} == a.store.figures().num_failures == b.store.figures().num_failures


@pytest.mark.parametrize(
    "command",
    [
        ("SET", "mine", "x"),
        ("GET", "mine"),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("SUBSCRIBE", "x"),
        ("EVAL", "return redis.call('GET', KEYS[1])", "1", "mine"),
        ("EVAL", "return redis.call('FLUSHALL')", "0"),
    ],
)
def test_nothing_else_is(command: tuple[str, ...], server: RedisServer) -> None:
    with server.client(username="agentspec", password=PASSWORD) as client:
        client.set(ModelKeys(MODEL).lease(NAMESPACE), "1")
        with pytest.raises(redis.ResponseError, match=r"permission|can't run this command"):
            client.execute_command(*command)


def test_without_a_name_nobody_gets_in(server: RedisServer) -> None:
    with server.client() as client, pytest.raises(redis.AuthenticationError):
        client.get(ModelKeys(MODEL).lease(NAMESPACE))


def test_the_newer_file_differs_by_what_the_older_server_does_not_know() -> None:
    older, newer = (FILES[version].read_text().splitlines() for version in FILES)

    assert newer == [older[0], f"{older[1]} +client|setinfo"]
