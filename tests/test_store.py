"""Histories shared through a real Redis: what one engine's requests write, another one drafts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.redis_lab import MODEL, NAMESPACE, RedisServer, Replica, eventually, replica, running_redis
from tests.reference import Row, step_request, token_ids

from agentspec.sidecar.engine import ArchiveError, FinishReason, Sampling
from agentspec.sidecar.epochs import ANY_MODEL, epoch_field
from agentspec.sidecar.store import deletion, keeper
from agentspec.sidecar.store.codec import Codec, Entry
from agentspec.sidecar.store.deletion import delete_in_redis, read_epochs
from agentspec.sidecar.store.keys import EPOCHS, ModelKeys
from agentspec.sidecar.tags import Tags

PLAN = "first we look at the plan, then we write it down"
OTHER = "0123456789 nobody ever planned to count like this"
KEYS = ModelKeys(MODEL)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty(server: RedisServer) -> None:
    with server.client() as client:
        client.flushall()


@pytest.fixture
def a(server: RedisServer) -> Iterator[Replica]:
    with replica(server.url) as one:
        yield one


@pytest.fixture
def b(server: RedisServer) -> Iterator[Replica]:
    with replica(server.url) as one:
        yield one


def words(num_tokens: int, seed: int = 0) -> str:
    """A text in which each stretch of three characters says what follows."""
    return "".join(chr(97 + (place * place * (seed + 3) + place // 7) % 26) for place in range(num_tokens))


def test_a_block_closed_on_one_engine_drafts_on_another(a: Replica, b: Replica) -> None:
    b.use()
    a.write(PLAN)

    eventually(lambda: b.knows(PLAN))


def test_an_open_block_arrives_before_its_end(a: Replica, b: Replica) -> None:
    b.use()
    a.engine.open(1, token_ids(*b"?"), Tags(stage="s"), Sampling(), namespace=NAMESPACE)
    text = words(200).encode()
    for position in range(0, 200, 10):
        a.engine.step(step_request([Row(1, position, [*text[position : position + 10]], 0)]))

    eventually(lambda: b.num_tokens >= 64)


def test_what_an_engine_wrote_itself_is_not_stored_twice(a: Replica, b: Replica) -> None:
    a.use()
    b.use()
    a.write(PLAN)
    eventually(lambda: b.knows(PLAN))

    assert len(PLAN) == a.num_tokens == b.num_tokens


def test_an_entry_that_comes_twice_is_stored_once(server: RedisServer, a: Replica, b: Replica) -> None:
    b.use()
    a.write(PLAN)
    eventually(lambda: b.knows(PLAN))
    with server.client() as client:
        ((_, fields),) = client.xrange(KEYS.log(NAMESPACE))
        client.xadd(KEYS.log(NAMESPACE), fields)
    eventually(lambda: b.store.figures().num_skipped.get("duplicate"))

    assert len(PLAN) == b.num_tokens


def test_a_namespace_that_nobody_uses_is_not_followed(a: Replica, b: Replica) -> None:
    b.use()
    a.write(OTHER, namespace="default/other")
    a.write(PLAN)
    eventually(lambda: b.knows(PLAN))

    assert {NAMESPACE} == b.followed()
    assert len(PLAN) == b.num_tokens


def test_a_namespace_is_brought_in_when_it_is_used_first(a: Replica, b: Replica) -> None:
    a.write(OTHER, namespace="default/other")
    eventually(lambda: a.store.figures().num_entries.get("published"))
    assert 0 == b.num_tokens
    b.use("default/other")

    eventually(lambda: b.knows(OTHER, namespace="default/other"))
    assert not b.knows(OTHER)


def test_models_never_see_each_others_text(server: RedisServer, a: Replica) -> None:
    with replica(server.url, model="f" * 16) as other:
        other.use()
        a.write(PLAN)
        eventually(lambda: a.store.figures().num_entries.get("published"))
        time.sleep(0.2)

        assert 0 == other.num_tokens


def test_what_is_deleted_is_gone_on_all_engines_and_in_redis(server: RedisServer, a: Replica, b: Replica) -> None:
    b.use("default/x")
    a.write(PLAN, namespace="default/x")
    eventually(lambda: b.num_tokens)
    with server.client() as client:
        delete_in_redis(client, NAMESPACE)
    eventually(lambda: not a.num_tokens and not b.num_tokens)

    with server.client() as client:
        assert not client.exists(KEYS.log("default/x"))


def test_a_namespace_lives_on_after_its_deletion(server: RedisServer, a: Replica, b: Replica) -> None:
    b.use()
    with server.client() as client:
        delete_in_redis(client, NAMESPACE)
    eventually(lambda: b.sharing.epochs.of(NAMESPACE) == a.sharing.epochs.of(NAMESPACE) > 0)
    a.write(PLAN)

    eventually(lambda: b.knows(PLAN))


def test_text_of_before_a_deletion_is_refused_and_removed(server: RedisServer, b: Replica) -> None:
    b.use()
    with server.client() as client:
        delete_in_redis(client, NAMESPACE)
        late = Entry(origin=7, sequence=1, epoch=0, num_tokens=4, blocks=b"\x01")
        client.xadd(KEYS.log(NAMESPACE), {"b": Codec().encode(late, KEYS.log(NAMESPACE))})
        eventually(lambda: b.store.figures().num_skipped.get("stale"))

        eventually(lambda: 0 == client.xlen(KEYS.log(NAMESPACE)))
    assert 0 == b.num_tokens


def test_of_two_deletions_in_one_millisecond_the_second_is_later(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deletion, "now_ms", lambda: 1_800_000_000_000)
    with server.client() as client:
        for expected in (1_800_000_000_000, 1_800_000_000_001):
            delete_in_redis(client, NAMESPACE)
            assert {epoch_field(ANY_MODEL, NAMESPACE): expected} == read_epochs(client)
        delete_in_redis(client, NAMESPACE, epoch=1_800_000_000_001)  # the same one, asked for again
        assert {epoch_field(ANY_MODEL, NAMESPACE): 1_800_000_000_001} == read_epochs(client)


def test_an_epoch_survives_the_loss_of_all_data(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentspec.sidecar.store.follower.CHECK_EVERY_S", 0.1)
    with replica(server.url) as one, server.client() as client:
        one.use()
        delete_in_redis(client, NAMESPACE)
        eventually(lambda: one.sharing.epochs.of(NAMESPACE))
        epoch = one.sharing.epochs.of(NAMESPACE)
        client.flushall()

        eventually(lambda: client.hget(EPOCHS, f"*|{NAMESPACE}") == str(epoch).encode())


def test_an_archive_of_before_a_deletion_is_refused(server: RedisServer, a: Replica) -> None:
    a.write(PLAN)
    archive = a.sharing.export(NAMESPACE)
    with server.client() as client:
        delete_in_redis(client, "default")
    eventually(lambda: a.sharing.epochs.of(NAMESPACE))

    with pytest.raises(ArchiveError, match="the namespace default was deleted since it was made"):
        a.sharing.import_archive(archive, NAMESPACE)
    a.write(OTHER)
    assert len(OTHER) <= a.sharing.import_archive(a.sharing.export(NAMESPACE), NAMESPACE)


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", "corrupt"),
        (b"\x01", "corrupt"),
        (b"\x07" + b"x" * 60, "schema"),
        (Codec().encode(Entry(7, 1, 0, 4, b"\x09nonsense"), KEYS.log(NAMESPACE)), "corrupt"),
        (Codec().encode(Entry(7, 1, 0, 4, b"x" * 999), KEYS.log(NAMESPACE))[:-5] + b"12345", "corrupt"),
        (Codec(b"k" * 32).encode(Entry(7, 1, 0, 4, b"\x01"), KEYS.log(NAMESPACE)), "key"),
    ],
)
def test_a_foreign_or_broken_entry_is_skipped_and_counted(
    server: RedisServer, a: Replica, b: Replica, raw: bytes, fault: str
) -> None:
    b.use()
    with server.client() as client:
        client.xadd(KEYS.log(NAMESPACE), {"b": raw})
    a.write(PLAN)

    eventually(lambda: b.knows(PLAN))
    assert {fault: 1} == b.store.figures().num_skipped
    assert len(PLAN) == b.num_tokens


def test_text_is_encrypted_with_the_key_of_a_file(server: RedisServer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0a" * 32 + "\n")
    text = "the secret of the house is the number of its doors " * 4
    with (
        replica(server.url, redis_key_file=key) as one,
        replica(server.url, redis_key_file=key) as two,
        replica(server.url) as outsider,
    ):
        two.use()
        outsider.use()
        one.write(text)
        eventually(lambda: two.knows(text))
        eventually(lambda: outsider.store.figures().num_skipped.get("key"))

        assert 0 == outsider.num_tokens
    with server.client() as client:
        ((_, fields),) = client.xrange(KEYS.log(NAMESPACE))
        with pytest.raises(ValueError, match="there is no key here"):
            Codec().decode(fields[b"b"], KEYS.log(NAMESPACE))
        with pytest.raises(ValueError, match="belongs elsewhere"):
            Codec(b"\x0a" * 32).decode(fields[b"b"], KEYS.log("default/other"))


def test_all_keys_have_an_end_but_those_that_make_deletion_final(server: RedisServer, a: Replica, b: Replica) -> None:
    b.use()
    a.write(PLAN)
    eventually(lambda: b.knows(PLAN))
    with server.client() as client:
        lasting = {key.decode() for key in client.keys("*") if client.ttl(key) == -1}

    assert lasting <= {EPOCHS, "as1:models", "as1:deletions"}


class TestSnapshots:
    @pytest.fixture(autouse=True)
    def _often(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(keeper, "HOUSEKEEPING_S", 0.05)

    @pytest.fixture
    def filled(self, server: RedisServer) -> Iterator[Replica]:
        """An engine that has written a snapshot of 30 texts."""
        with replica(server.url) as one:
            one.use()
            for seed in range(30):
                one.write(words(1000, seed), stage=f"s{seed % 3}")
            eventually(lambda: one.store.figures().num_snapshots)
            yield one

    def test_an_engine_that_starts_later_has_it_all(self, server: RedisServer, filled: Replica) -> None:
        filled.write(PLAN)
        eventually(lambda: filled.store.figures().num_tokens.get("published", 0) >= 30_000 + len(PLAN))
        with replica(server.url) as late:
            eventually(lambda: late.store.figures().is_complete)
            eventually(lambda: late.num_tokens == filled.num_tokens)
            late.engine.check_integrity()

            assert late.knows(PLAN)
            assert late.draft_after(words(40, 5), stage="s2") == filled.draft_after(words(40, 5), stage="s2")
            assert late.store.figures().num_tokens["loaded"] > 20_000

    def test_no_more_than_one_engine_writes_it(self, server: RedisServer, filled: Replica) -> None:
        with replica(server.url) as other:
            eventually(lambda: other.store.figures().is_complete)
            filled.write(words(9000, 77))
            time.sleep(0.5)

            assert 1 == other.store.figures().num_snapshots + filled.store.figures().num_snapshots

    def test_one_that_redis_has_lost_is_written_again(
        self, server: RedisServer, filled: Replica, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(keeper, "SEARCH_S", 0.1)
        with server.client() as client:
            client.flushall()
            eventually(lambda: client.exists(KEYS.snapshot(NAMESPACE)))
        with replica(server.url) as late:
            eventually(lambda: late.num_tokens == filled.num_tokens)

    def test_a_deleted_one_never_comes_back(self, server: RedisServer, filled: Replica) -> None:
        with server.client() as client:
            kept = {key: client.dump(key) for key in client.keys("as1:{*") if not key.endswith(b"namespaces")}
            registry = client.dump(KEYS.registry)
            delete_in_redis(client, NAMESPACE)
            eventually(lambda: filled.num_tokens == 0)
            for key, value in kept.items():  # as a Redis restored from a backup, but for the epochs
                client.restore(key, 0, value, replace=True)
            client.restore(KEYS.registry, 0, registry, replace=True)
        with replica(server.url) as late:
            eventually(lambda: late.store.figures().num_skipped.get("stale", 0) >= 2)

            assert 0 == late.num_tokens

    def test_parts_that_are_missing_or_broken_cost_only_themselves(self, server: RedisServer, filled: Replica) -> None:
        with server.client() as client:
            parts = sorted(client.keys("as1:{*part:*"))
            client.delete(parts[0])
            client.set(parts[1], b"\x01broken beyond repair, but long enough for a header")
        with replica(server.url) as late:
            eventually(lambda: late.store.figures().is_complete)

            assert {"missing": 1, "corrupt": 1} == late.store.figures().num_skipped
            assert 0.7 * filled.num_tokens < late.num_tokens < 0.9 * filled.num_tokens


def test_a_namespace_outside_of_the_roots_is_not_brought_in_at_the_start(server: RedisServer, a: Replica) -> None:
    a.write(OTHER, namespace="elsewhere")
    eventually(lambda: a.store.figures().num_entries.get("published"))
    with replica(server.url) as late:
        eventually(lambda: late.store.figures().is_complete)

        assert set() == late.followed()


def test_the_rest_goes_out_when_the_process_ends(server: RedisServer, b: Replica) -> None:
    b.use()
    with replica(server.url) as one:
        eventually(lambda: one.store.figures().is_connected)
        one.write(PLAN)

    eventually(lambda: b.knows(PLAN))


def test_without_redis_an_engine_drafts_and_what_waits_is_bounded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with replica(f"unix://{tmp_path}/nobody.sock") as one:
        one.write(PLAN)
        eventually(lambda: one.store.figures().num_failures)

        assert one.knows(PLAN)
        figures = one.store.figures()
        assert (False, False, False) == (figures.is_connected, figures.is_ready, figures.is_complete)
        assert {"ConnectionError"} == {*figures.num_failures}


def test_a_password_is_never_repeated(caplog: pytest.LogCaptureFixture) -> None:
    with replica("redis://me:geheim@127.0.0.1:1/0") as one:
        eventually(lambda: one.store.figures().num_failures)

    assert "geheim" not in caplog.text


def test_an_aborted_request_is_shared_as_far_as_it_came(a: Replica, b: Replica) -> None:
    b.use()
    a.engine.open(1, token_ids(*b"?"), Tags(stage="s"), Sampling(), namespace=NAMESPACE)
    a.engine.step(step_request([Row(1, 0, [*PLAN.encode()], 0)]))
    a.engine.close(1, FinishReason.ABORT, len(PLAN), token_ids())

    eventually(lambda: b.knows(PLAN))
