"""Mode `hybrid` without vLLM: engines that draft by themselves and share through a real draft server."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from tests.history_lab import NAMESPACE, LinkedEngine, linked_engine
from tests.redis_lab import running_redis
from tests.sidecar_lab import VOCABULARY, SidecarProcess, eventually, running_sidecar

from agentspec.draft.v1 import history_pb2
from agentspec.serving_patch import history_receiver
from agentspec.serving_patch.history_figures import register_histories
from agentspec.serving_patch.sidecar_messages import Vocabulary

PLAN = "the plan is to search for papers"
NEWS = "0123456789abcdefghijklmnopqrstuv"
INNER = f"{NAMESPACE}/team"
STEP_S = 0.25  # far above what a step takes, far below any wait for a peer


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "draft.sock"


@pytest.fixture
def server(socket: Path) -> Iterator[SidecarProcess]:
    with running_sidecar(socket) as server:
        yield server


@pytest.fixture
def start(socket: Path) -> Iterator[Callable[..., LinkedEngine]]:
    """Starts engines, and waits until they are linked."""
    with ExitStack() as stack:

        def start(at: Path = socket, *, has_server: bool = True, **options: Any) -> LinkedEngine:
            engine = stack.enter_context(linked_engine(at, **options))
            if has_server:
                eventually(lambda: engine.is_linked)
            return engine

        yield start


def delete(server: SidecarProcess, namespace: str = NAMESPACE) -> int:
    histories: Any = server.histories()
    return int(histories.DeleteNamespace(history_pb2.DeleteNamespaceRequest(namespace=namespace)).num_tokens)


def is_refused(engine: LinkedEngine) -> bool:
    return engine.link.figures().num_receive_failures > 0


@pytest.mark.usefixtures("server")
def test_what_one_engine_writes_another_one_drafts(start: Callable[..., LinkedEngine]) -> None:
    one, other = start(), start()
    one.write(PLAN)

    eventually(lambda: other.knows(PLAN))
    other.write(NEWS)
    eventually(lambda: one.knows(NEWS))


@pytest.mark.usefixtures("server")
def test_an_open_block_is_drafted_elsewhere_before_its_request_ends(start: Callable[..., LinkedEngine]) -> None:
    one, other = start(), start()
    handle = one.open()
    for position in range(0, 8 * len(PLAN), len(PLAN)):
        one.step(handle, position, PLAN)

    eventually(lambda: other.knows(PLAN))


@pytest.mark.usefixtures("server")
def test_text_is_held_once_wherever_it_came_from(start: Callable[..., LinkedEngine]) -> None:
    one, other = start(), start()
    for number in range(20):
        one.write(f"{number:02} {PLAN}")
        other.write(f"{number:02} {NEWS}")
    size = 20 * (2 * 3 + len(PLAN) + len(NEWS))

    eventually(lambda: sum(one.sizes()) == sum(other.sizes()) == size)
    late = start()
    eventually(lambda: sum(late.sizes()) == size)
    time.sleep(0.3)  # an echo would come now
    assert [[size]] * 3 == [engine.sizes() for engine in (one, other, late)]


@pytest.mark.usefixtures("server")
def test_a_namespace_is_brought_in_when_it_is_used_first(start: Callable[..., LinkedEngine]) -> None:
    one, other = start(), start()
    one.write(PLAN, namespace=INNER)
    time.sleep(0.3)
    assert not any(other.sizes(INNER))

    other.use(INNER)

    eventually(lambda: other.knows(PLAN, namespace=INNER))
    one.write(NEWS, namespace=INNER)
    eventually(lambda: other.knows(NEWS, namespace=INNER))


@pytest.mark.usefixtures("server")
def test_text_written_before_the_link_came_up_is_sent_and_held_once(
    start: Callable[..., LinkedEngine], tmp_path: Path
) -> None:
    early = start(tmp_path / "later.sock", has_server=False)
    early.write(PLAN)
    with running_sidecar(tmp_path / "later.sock"):
        other = start(tmp_path / "later.sock")

        eventually(lambda: other.knows(PLAN))
        assert [len(PLAN)] == early.sizes() == other.sizes()


def test_after_a_restart_of_the_server_nothing_that_is_written_is_missed(
    start: Callable[..., LinkedEngine], server: SidecarProcess, socket: Path
) -> None:
    one, other = start(), start()
    one.write(PLAN)
    eventually(lambda: other.knows(PLAN))
    server.kill()
    eventually(lambda: not one.is_linked and not other.is_linked)
    one.write(NEWS)
    other.write(NEWS[::-1])
    assert one.knows(PLAN)

    with running_sidecar(socket):
        eventually(lambda: other.knows(NEWS) and one.knows(NEWS[::-1]))
        size = len(PLAN) + 2 * len(NEWS)
        assert [[size]] * 2 == [one.sizes(), other.sizes()]


def test_a_pause_of_the_server_loses_nothing_and_holds_up_no_step(
    start: Callable[..., LinkedEngine], server: SidecarProcess
) -> None:
    one, other = start(), start()
    server.process.send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    one.write(PLAN)
    assert one.knows(PLAN)
    assert time.monotonic() - begin < STEP_S
    eventually(lambda: one.link.figures().num_send_failures > 0)
    server.process.send_signal(signal.SIGCONT)

    eventually(lambda: other.knows(PLAN))
    assert [len(PLAN)] == other.sizes()


def test_an_engine_ends_in_time_beside_a_server_that_hangs(server: SidecarProcess, socket: Path) -> None:
    with linked_engine(socket) as engine:
        eventually(lambda: engine.is_linked)
        server.process.send_signal(signal.SIGSTOP)
        engine.write(PLAN)
        begin = time.monotonic()

    assert time.monotonic() - begin < 4


def test_deletion_reaches_all_engines(start: Callable[..., LinkedEngine], server: SidecarProcess) -> None:
    one, other = start(), start()
    one.write(PLAN)
    one.write(PLAN, namespace=INNER)
    eventually(lambda: other.knows(PLAN))

    delete(server)

    eventually(lambda: not any(other.sizes()) and not any(one.sizes()))
    assert not any(start().sizes())
    one.write(NEWS)
    eventually(lambda: other.knows(NEWS))


def test_a_deletion_reaches_engines_that_a_new_server_has_not_heard_of(
    start: Callable[..., LinkedEngine], server: SidecarProcess, socket: Path
) -> None:
    one = start()
    one.write(PLAN)
    eventually(lambda: one.link.figures().num_sent_tokens > 0)
    server.kill()
    eventually(lambda: not one.is_linked)
    one.write(NEWS)  # waits to be sent, and belongs to an epoch that will be over

    with running_sidecar(socket) as again:
        assert 0 == delete(again)
        eventually(lambda: one.is_linked)
        eventually(lambda: not any(one.sizes()))
        assert not any(start().sizes())


def test_deleted_text_does_not_come_back_from_an_engine_that_was_cut_off(
    start: Callable[..., LinkedEngine], tmp_path: Path
) -> None:
    first, second = tmp_path / "1" / "draft.sock", tmp_path / "2" / "draft.sock"
    with running_redis(tmp_path / "redis") as redis, running_sidecar(second, "--redis", redis.url) as server:
        with running_sidecar(first, "--redis", redis.url):
            one, other = start(first), start(second)
            one.write(PLAN)
            eventually(lambda: other.knows(PLAN))
        eventually(lambda: not one.is_linked)
        one.write(NEWS)

        delete(server)
        eventually(lambda: not any(other.sizes()))
        other.write(PLAN[::-1])

        with running_sidecar(first, "--redis", redis.url):
            eventually(lambda: one.knows(PLAN[::-1]))
            late = start(second)
            eventually(lambda: [len(PLAN)] == one.sizes() == other.sizes() == late.sizes())


def test_a_deletion_that_a_new_server_has_not_seen_is_told_to_it(
    start: Callable[..., LinkedEngine], server: SidecarProcess, socket: Path
) -> None:
    one = start()
    one.write(PLAN)
    eventually(lambda: one.link.figures().num_sent_tokens > 0)
    delete(server)
    eventually(lambda: not any(one.sizes()))
    server.kill()

    with running_sidecar(socket) as again:
        eventually(lambda: one.is_linked)
        one.write(NEWS)
        eventually(lambda: start().knows(NEWS))
        assert 0 < delete(again)
        eventually(lambda: not any(one.sizes()))


def test_engines_of_two_servers_share_through_redis(start: Callable[..., LinkedEngine], tmp_path: Path) -> None:
    first, second = tmp_path / "1" / "draft.sock", tmp_path / "2" / "draft.sock"
    with (
        running_redis(tmp_path / "redis") as redis,
        running_sidecar(first, "--redis", redis.url),
        running_sidecar(second, "--redis", redis.url) as server,
    ):
        one, other = start(first), start(second)
        one.write(PLAN)
        eventually(lambda: other.knows(PLAN))
        other.write(NEWS)
        eventually(lambda: one.knows(NEWS))
        late = start(second)
        eventually(lambda: [len(PLAN) + len(NEWS)] == one.sizes() == other.sizes() == late.sizes())

        delete(server)
        eventually(lambda: not any(one.sizes()) and not any(other.sizes()))


def test_an_engine_of_a_foreign_namespace_gets_and_gives_nothing(
    start: Callable[..., LinkedEngine], socket: Path
) -> None:
    with running_sidecar(socket, "--namespace", NAMESPACE):
        one = start()
        stranger = start(has_server=False, namespace="other")
        one.write(PLAN)
        stranger.write(NEWS, namespace="other")
        stranger.write(NEWS, namespace=NAMESPACE)  # not through a hook: it would refuse to

        eventually(lambda: is_refused(stranger))
        assert not stranger.knows(PLAN)
        assert not stranger.knows(PLAN, namespace="other")
        assert [len(PLAN)] == one.sizes()
        assert [len(PLAN)] == start().sizes()


@pytest.mark.usefixtures("server")
def test_engines_of_two_models_share_nothing(start: Callable[..., LinkedEngine], socket: Path) -> None:
    with running_sidecar(socket.parent / "two.sock", "--max-models", "2"):
        one = start(socket.parent / "two.sock")
        other = start(socket.parent / "two.sock", model=Vocabulary.of("another", VOCABULARY))
        one.write(PLAN)
        eventually(lambda: one.link.figures().num_sent_tokens > 0)
        time.sleep(0.3)

        assert not any(other.sizes())


@pytest.mark.usefixtures("server")
def test_a_namespace_that_nobody_uses_is_left_and_comes_back_whole(
    start: Callable[..., LinkedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_receiver, "FOLLOW_S", 0.2)
    one, other = start(), start(ttl_s=0.5)
    other.use(INNER)
    eventually(lambda: other.link.figures().num_namespaces == 2)
    eventually(lambda: other.link.figures().num_namespaces == 1)
    one.write(PLAN, namespace=INNER)
    eventually(lambda: one.link.figures().num_sent_tokens > 0)
    assert not any(other.sizes(INNER))

    other.use(INNER)

    eventually(lambda: other.knows(PLAN, namespace=INNER))


@pytest.mark.usefixtures("server")
def test_what_comes_is_read_across_many_calls(
    start: Callable[..., LinkedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history_receiver, "FOLLOW_S", 0.05)
    one, other = start(), start()
    for number in range(100):
        one.write(f"{number:03} {PLAN}")
        time.sleep(0.005)

    eventually(lambda: other.sizes() == one.sizes() == [100 * (4 + len(PLAN))])
    assert other.link.figures().num_receive_failures == 0


@pytest.mark.usefixtures("server")
def test_a_history_that_is_too_large_is_not_taken_and_the_rest_is(
    start: Callable[..., LinkedEngine],
) -> None:
    one = start()
    one.write(PLAN * 100)
    eventually(lambda: one.link.figures().num_sent_tokens > 0)
    small = start(max_archive_bytes=1000)

    eventually(lambda: is_refused(small))
    one.write(NEWS)
    eventually(lambda: small.knows(NEWS))
    assert [len(NEWS)] == small.sizes()


@pytest.mark.usefixtures("server")
def test_the_metrics_tell_what_was_shared(start: Callable[..., LinkedEngine]) -> None:
    one, other = start(), start()
    reader = InMemoryMetricReader()
    register_histories(MeterProvider([reader]).get_meter("test"), other.link.figures)
    one.write(PLAN)
    eventually(lambda: other.knows(PLAN))

    data = reader.get_metrics_data()
    assert data is not None
    seen: dict[Any, Any] = {
        (metric.name, *(point.attributes or {}).values()): getattr(point, "value", None)
        for metric in data.resource_metrics[0].scope_metrics[0].metrics
        for point in metric.data.data_points
    }

    assert 1 == seen["agentspec_hybrid_connected", "sent"] == seen["agentspec_hybrid_connected", "received"]
    assert 1 == seen["agentspec_hybrid_namespaces",]
    assert 0 == seen["agentspec_hybrid_tokens", "sent"] == seen["agentspec_hybrid_lost_tokens", "received"]
    assert len(PLAN) <= seen["agentspec_hybrid_tokens", "received"] <= len(PLAN) + 1
