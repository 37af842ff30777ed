"""What a Redis may do while engines share histories: drafts go on, and what can be shared afterwards is."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import trustme
from tests.redis_lab import (
    MODEL,
    NAMESPACE,
    RedisServer,
    Replica,
    eventually,
    free_port,
    replica,
    running_redis,
)

from agentspec.sidecar.store import follower, publisher
from agentspec.sidecar.store.deletion import delete_in_redis
from agentspec.sidecar.store.keys import EPOCHS, ModelKeys

PLAN = "first we look at the plan, then we write it down"
LATER = "0123456789 nobody ever planned to count like this"
LAST = "?! what else is there to say, asked the last of us"
LOG = ModelKeys(MODEL).log(NAMESPACE)
WRITE_S = 0.1  # far above what storing a text takes, far below any wait for a server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path / "redis") as running:
        yield running


@pytest.fixture
def a(server: RedisServer) -> Iterator[Replica]:
    with replica(server.url) as one:
        yield one


@pytest.fixture
def b(server: RedisServer) -> Iterator[Replica]:
    with replica(server.url) as one:
        yield one


def failures(one: Replica) -> dict[str, int]:
    return dict(one.store.figures().num_failures)


def share(writer: Replica, reader: Replica, words: str, namespace: str = NAMESPACE) -> None:
    """A text goes from one to the other; what was there before has arrived then, too."""
    reader.use(namespace)
    writer.write(words, namespace=namespace)
    eventually(lambda: reader.knows(words, namespace=namespace), 30)


class Load:
    """Writes numbered texts without a pause; keeps the longest time that one took."""

    def __init__(self, writer: Replica) -> None:
        self._writer = writer
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.num_texts = 0
        self.longest_s = 0.0

    def _run(self) -> None:
        while not self._stop.is_set():
            begin = time.monotonic()
            self._writer.write(f"{self.num_texts:05} {PLAN}")
            self.longest_s = max(self.longest_s, time.monotonic() - begin)
            self.num_texts += 1
            time.sleep(0.002)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def test_a_server_that_is_killed_and_restarted_under_load_costs_only_what_was_in_it(
    server: RedisServer, a: Replica, b: Replica
) -> None:
    share(a, b, LATER)
    with Load(a) as load:
        eventually(lambda: load.num_texts > 50)
        server.kill()
        eventually(lambda: failures(a) and failures(b))
        num_texts = load.num_texts
        eventually(lambda: load.num_texts > num_texts + 100)
        assert a.knows(LATER)
        assert b.knows(LATER)
        server.start()
        eventually(lambda: a.store.figures().is_connected and b.store.figures().is_connected, 30)
        num_texts = load.num_texts
        eventually(lambda: load.num_texts > num_texts + 50)

    assert load.longest_s < WRITE_S
    share(a, b, LAST)
    share(b, a, LAST[::-1])
    # Nothing that waited was lost: at most what the killed server had taken and nobody had read yet.
    missing = a.num_tokens - b.num_tokens
    assert 0 <= missing <= 100 * (len(PLAN) + 7)
    assert 0 == a.store.figures().num_dropped_tokens


@pytest.mark.parametrize("fault", ["SIGSTOP", "CLIENT PAUSE"])
def test_a_server_that_hangs_for_seconds_holds_up_nothing_and_loses_nothing(
    fault: str, server: RedisServer, a: Replica, b: Replica
) -> None:
    share(a, b, LATER)
    assert server.process is not None
    with Load(a) as load:
        if fault == "SIGSTOP":
            server.process.send_signal(signal.SIGSTOP)
        else:
            with server.client() as client:
                client.client_pause(5000)
        num_texts = load.num_texts
        eventually(lambda: failures(a).get("TimeoutError"), 30)
        server.process.send_signal(signal.SIGCONT)

    assert load.num_texts > num_texts + 100
    assert load.longest_s < WRITE_S
    share(a, b, LAST)
    eventually(lambda: a.num_tokens == b.num_tokens, 30)


def test_a_full_server_takes_no_more_until_it_has_room(
    server: RedisServer, a: Replica, b: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "FULL_PAUSE_S", 0.2)
    share(a, b, PLAN)
    with server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        a.write(LATER)
        eventually(lambda: failures(a).get("OutOfMemoryError"))
        eventually(lambda: a.store.figures().num_dropped_tokens >= len(LATER))
        assert a.knows(LATER)

        client.config_set("maxmemory", "0")
    share(a, b, LAST)
    assert not b.knows(LATER)


def test_a_key_that_was_evicted_is_begun_anew(server: RedisServer, a: Replica, b: Replica) -> None:
    share(a, b, PLAN)
    with server.client() as client:
        assert 1 == client.delete(LOG)

    share(a, b, LATER)
    share(b, a, LAST)
    with replica(server.url) as late:
        eventually(lambda: late.knows(LATER) and late.knows(LAST))


def test_a_flush_loses_no_deletion_and_stops_no_sharing(
    server: RedisServer, a: Replica, b: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "CHECK_EVERY_S", 0.2)
    share(a, b, PLAN)
    with server.client() as client:
        stale = client.xrange(LOG)[0][1]
        delete_in_redis(client, NAMESPACE)
        eventually(lambda: a.num_tokens == b.num_tokens == 0)
        client.flushall()

        eventually(lambda: client.exists(EPOCHS))
        client.xadd(LOG, stale)
        share(a, b, LATER)
        share(b, a, LAST)
        with replica(server.url) as late:
            late.use()
            eventually(lambda: late.store.figures().num_skipped.get("stale"))
            eventually(lambda: late.knows(LATER) and late.knows(LAST))
            assert not late.knows(PLAN)
            assert not b.knows(PLAN)


def test_a_foreign_type_at_our_key_is_counted_and_other_namespaces_go_on(
    server: RedisServer, a: Replica, b: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "CHECK_EVERY_S", 0.5)
    share(a, b, PLAN)
    with server.client() as client:
        client.delete(LOG)
        client.set(LOG, "no stream")
        a.write(LATER)
        eventually(lambda: failures(a).get("ResponseError"))
        share(a, b, LAST, namespace="default/other")
        eventually(lambda: failures(b).get("ResponseError"))
        share(a, b, LAST[::-1], namespace="default/other")
        client.delete(LOG)
    eventually(lambda: a.store.figures().is_connected and b.store.figures().is_connected, 30)
    share(a, b, LAST)


def test_a_wrong_password_is_told_apart_and_a_corrected_file_is_enough(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("wrong\n")
    with (
        running_redis(tmp_path / "redis", "--requirepass", "right") as server,
        replica(server.url, redis_password_file=password) as a,
    ):
        a.write(PLAN)
        eventually(lambda: failures(a).get("AuthenticationError"))
        assert a.knows(PLAN)
        password.write_text("right\n")
        eventually(lambda: a.store.figures().is_connected, 30)

        with replica(server.url, redis_password_file=password) as b:
            eventually(lambda: b.knows(PLAN))


def test_an_engine_that_was_cut_off_brings_nothing_back_that_was_deleted(server: RedisServer, b: Replica) -> None:
    door = server.folder / "door.sock"
    door.symlink_to(server.socket)
    with replica(f"unix://{door}") as a, server.client() as client:
        share(a, b, PLAN)
        share(b, a, LATER)
        door.unlink()
        client.client_kill_filter(_type="normal", skipme=True)
        eventually(lambda: failures(a))
        a.write(LAST)
        delete_in_redis(client, NAMESPACE)
        eventually(lambda: b.num_tokens == 0)
        assert a.knows(PLAN)

        door.symlink_to(server.socket)

        eventually(lambda: a.num_tokens == 0, 30)
        share(a, b, PLAN[::-1])
        assert a.num_tokens == b.num_tokens == len(PLAN)
        with replica(server.url) as late:
            late.use()
            eventually(lambda: late.num_tokens == len(PLAN))


class TlsRedis:
    """A Redis that asks for a certificate; its own and those of its clients may be made anew."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = trustme.CA()
        self.port = free_port()
        folder.mkdir()
        self.authority.cert_pem.write_to_path(folder / "ca.pem")
        for name in ("server", "client"):
            self.write(name)

    def write(self, name: str, authority: trustme.CA | None = None, **life: Any) -> None:
        issued = (authority or self.authority).issue_cert("localhost", common_name=name, **life)
        issued.cert_chain_pems[0].write_to_path(self.folder / f"{name}.crt")
        issued.private_key_pem.write_to_path(self.folder / f"{name}.key")

    @property
    def flags(self) -> list[str]:
        files = {"cert-file": "server.crt", "key-file": "server.key", "ca-cert-file": "ca.pem"}
        pairs = ((f"--tls-{name}", str(self.folder / file)) for name, file in files.items())
        return ["--tls-port", str(self.port), *(word for pair in pairs for word in pair)]

    @contextmanager
    def replica(self) -> Iterator[Replica]:
        names = {"redis_tls_ca": "ca.pem", "redis_tls_cert": "client.crt", "redis_tls_key": "client.key"}
        files: dict[str, Any] = {name: self.folder / file for name, file in names.items()}
        with replica(f"rediss://localhost:{self.port}", **files) as one:
            yield one


@pytest.fixture
def tls(tmp_path: Path) -> Iterator[TlsRedis]:
    found = TlsRedis(tmp_path / "tls")
    with running_redis(tmp_path / "redis", *found.flags):
        yield found


def test_text_goes_over_tls_between_those_whom_the_authority_knows(tls: TlsRedis) -> None:
    with tls.replica() as a, tls.replica() as b:
        share(a, b, PLAN)

        tls.write("client", trustme.CA())
        with tls.replica() as stranger:
            eventually(lambda: failures(stranger))
            assert not stranger.store.figures().is_connected
            assert not stranger.knows(PLAN)


def test_a_certificate_that_has_expired_is_refused_until_there_is_a_new_one(tls: TlsRedis) -> None:
    tls.write("client", not_before=_days(-2), not_after=_days(-1))
    with tls.replica() as a:
        a.write(PLAN)
        eventually(lambda: failures(a))
        assert a.knows(PLAN)
        assert not a.store.figures().is_connected
        tls.write("client")
        eventually(lambda: a.store.figures().is_connected, 30)

        with tls.replica() as b:
            eventually(lambda: b.knows(PLAN))


def test_an_expired_certificate_of_the_server_is_refused(tmp_path: Path) -> None:
    tls = TlsRedis(tmp_path / "tls")
    tls.write("server", not_before=_days(-2), not_after=_days(-1))
    with running_redis(tmp_path / "redis", *tls.flags), tls.replica() as a:
        a.write(PLAN)
        eventually(lambda: failures(a))

        assert a.knows(PLAN)
        assert not a.store.figures().is_connected


def _days(count: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=count)
