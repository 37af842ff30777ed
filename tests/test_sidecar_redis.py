"""Draft servers that share their histories through a real Redis, as their clients and operators see them."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.redis_lab import RedisServer, eventually, free_port, running_redis
from tests.sidecar_lab import FINGERPRINT, SidecarProcess, i32, running_sidecar

from agentspec.draft.v1 import history_pb2
from agentspec.sidecar.__main__ import main

ANSWER = b"the plan is to search for papers"


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def start(redis_server: RedisServer, tmp_path: Path) -> Callable[..., Any]:
    """Starts a server, whose model is known, by a name of its own."""

    @contextmanager
    def start(name: str, *flags: str) -> Iterator[SidecarProcess]:
        socket = tmp_path / name / "draft.sock"
        with running_sidecar(socket, "--redis", redis_server.url, *flags) as server:
            server.registered()
            yield server

    return start


def append(server: SidecarProcess, text: bytes = ANSWER) -> None:
    block = history_pb2.Block(stage="writer", token_ids=i32(*text))
    histories: Any = server.histories()
    histories.AppendBlocks(history_pb2.AppendBlocksRequest(model_fingerprint=FINGERPRINT, blocks=[block]))


def num_tokens(server: SidecarProcess) -> int:
    histories: Any = server.histories()
    answer = histories.ListKeys(history_pb2.ListKeysRequest(model_fingerprint=FINGERPRINT))
    return sum(key.num_tokens for key in answer.keys)


def delete(server: SidecarProcess, namespace: str = "default") -> int:
    histories: Any = server.histories()
    return int(histories.DeleteNamespace(history_pb2.DeleteNamespaceRequest(namespace=namespace)).num_tokens)


def run(server: SidecarProcess, *words: str) -> Any:
    name, *rest = words
    return CliRunner().invoke(main, [name, "--socket", str(server.socket), *rest])


def test_what_one_server_stores_another_one_has(start: Callable[..., Any]) -> None:
    with start("a") as a, start("b") as b:
        append(b, b"so that it follows the namespace")
        append(a)

        assert eventually(lambda: num_tokens(b) == num_tokens(a) == 2 * len(ANSWER))


def test_a_server_that_starts_later_has_it_too(start: Callable[..., Any]) -> None:
    with start("a") as a:
        append(a)
        assert 0 == a.terminate()
    with start("b") as b:
        assert eventually(lambda: num_tokens(b) == len(ANSWER))


def test_deletion_reaches_all_servers_and_those_that_come_later(start: Callable[..., Any]) -> None:
    with start("a") as a, start("b") as b:
        append(a)
        append(b)
        eventually(lambda: num_tokens(b) == num_tokens(a) == 2 * len(ANSWER))

        assert 2 * len(ANSWER) == delete(a)
        eventually(lambda: num_tokens(b) == 0)
        with start("c") as c:
            eventually(lambda: serving(c, "redis"))
            assert 0 == num_tokens(c)


def test_an_embedded_engines_text_is_deleted_without_a_server(
    start: Callable[..., Any], redis_server: RedisServer
) -> None:
    with start("a") as a:
        append(a)
        eventually(lambda: serving(a, "redis"))
        result = CliRunner().invoke(main, ["delete-shared", "default", "--yes", "--redis", redis_server.url])

        assert (0, "default is deleted\n") == (result.exit_code, result.output)
        assert eventually(lambda: num_tokens(a) == 0)


def test_deletion_without_redis_says_that_it_is_not_final(start: Callable[..., Any], redis_server: RedisServer) -> None:
    with start("a") as a:
        append(a)
        redis_server.kill()
        with pytest.raises(grpc.RpcError) as refused:
            delete(a)

        assert grpc.StatusCode.UNAVAILABLE == refused.value.code()
        assert "forgotten here, but Redis does not answer" in str(refused.value.details())
        assert 0 == num_tokens(a)
        redis_server.start()
        assert 0 == delete(a)


def test_an_export_of_before_a_deletion_is_not_taken_back(start: Callable[..., Any], tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with start("a") as a:
        append(a)
        eventually(lambda: serving(a, "redis"))
        assert 0 == run(a, "export", "default", "-o", str(saved)).exit_code
        assert 0 == run(a, "import", str(saved)).exit_code
        delete(a)
        result = run(a, "import", str(saved))

        assert 1 == result.exit_code
        assert "the namespace default was deleted since it was made" in result.output
    with running_sidecar(tmp_path / "alone.sock") as alone:  # without Redis nothing is known of it
        alone.registered()
        assert 0 == run(alone, "import", str(saved)).exit_code


def serving(server: SidecarProcess, service: str) -> bool:
    stub: Any = health_pb2_grpc.HealthStub(server.channel())
    try:
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service))
    except grpc.RpcError:
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_redis_has_a_health_of_its_own(start: Callable[..., Any], redis_server: RedisServer) -> None:
    drafts = "agentspec.draft.v1.DraftService"
    with start("a") as a:
        eventually(lambda: serving(a, "redis"))
        redis_server.kill()
        eventually(lambda: not serving(a, "redis"))

        assert serving(a, drafts)


def test_the_metrics_tell_what_was_shared(start: Callable[..., Any]) -> None:
    port = free_port()
    with start("a", "--metrics-port", str(port)) as a:
        append(a)

        def metrics() -> str:
            return str(urllib.request.urlopen(f"http://localhost:{port}/metrics").read().decode())

        published = f'agentspec_redis_tokens_total{{direction="published"}} {len(ANSWER) + 1}.0'
        eventually(lambda: published in metrics())
        assert "agentspec_redis_connected 1.0" in metrics()
        assert "agentspec_redis_dropped_tokens_total 0.0" in metrics()
