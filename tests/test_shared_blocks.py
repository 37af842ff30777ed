"""Shared blocks on their way: queues, arrivals, relays, epochs and sealed archives against plain oracles."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.sidecar.block_relay import BlockRelay, Reader
from agentspec.sidecar.engine import ArchiveError
from agentspec.sidecar.epochs import ANY_MODEL, Epochs, epoch_field, now_ms, outer_namespaces
from agentspec.sidecar.sealed import MAGIC, seal, unseal
from agentspec.sidecar.shared_blocks import Arrivals, BlockQueue, SharedBlocks

MODEL = "m"
NAMESPACES = ("a", "a/b", "c")


def shared(sequence: int, *, namespace: str = "a", origin: int = 1, num_tokens: int = 10) -> SharedBlocks:
    return SharedBlocks(namespace, origin, sequence, 0, num_tokens, bytes(num_tokens))


def reader(*namespaces: str, new: Sequence[str] = (), origin: int = 0) -> Reader:
    return Reader(frozenset(namespaces), frozenset(new), origin, lambda: None)


def sequences(blocks: Sequence[SharedBlocks]) -> list[int]:
    return [one.sequence for one in blocks]


blocks_of_all = st.lists(
    st.builds(
        shared,
        st.integers(1, 9),
        namespace=st.sampled_from(NAMESPACES),
        origin=st.integers(1, 3),
        num_tokens=st.integers(1, 9),
    ),
    max_size=30,
)


@given(blocks_of_all, st.integers(1, 60))
def test_a_queue_keeps_the_newest_that_fit_in_order(blocks: list[SharedBlocks], room: int) -> None:
    queue = BlockQueue(room)
    for one in blocks:
        queue.put(one)
    kept = list(blocks)
    while sum(one.num_tokens for one in kept) > room:
        kept.pop(0)

    assert kept == queue.take(0)
    assert queue.num_dropped_tokens == sum(one.num_tokens for one in blocks) - sum(one.num_tokens for one in kept)
    assert [] == queue.take(0)


def test_what_is_put_back_comes_before_what_was_put_meanwhile() -> None:
    queue = BlockQueue(100)
    for sequence in (1, 2):
        queue.put(shared(sequence))
    taken = queue.take(0)
    queue.put(shared(3))
    queue.put_back(taken)

    assert [1, 2, 3] == sequences(queue.take(0))


def test_a_queue_wakes_whoever_waits_for_it() -> None:
    queue = BlockQueue(100)
    timer = threading.Timer(0.05, queue.put, [shared(1)])
    timer.start()

    assert [1] == sequences(queue.take(20))
    timer.join()


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 9))))
def test_blocks_are_new_as_long_as_the_numbers_of_their_origin_grow(arrived: list[tuple[int, int]]) -> None:
    arrivals, last = Arrivals(), dict[int, int]()
    for origin, sequence in arrived:
        assert arrivals.add(origin, sequence) == (sequence > last.get(origin, -1))
        last[origin] = max(sequence, last.get(origin, -1))

    assert arrivals.last_sequences() == last
    other = Arrivals()
    other.raise_to(last)
    assert not any(other.add(origin, sequence) for origin, sequence in arrived)


def test_an_origin_is_covered_from_its_first_arrival_to_its_last() -> None:
    arrivals = Arrivals()
    arrivals.add(1, 5)
    arrivals.add(1, 8)

    assert [False, True, True, True, False] == [arrivals.covers(1, sequence) for sequence in (4, 5, 6, 8, 9)]
    assert not arrivals.covers(2, 5)


def test_of_too_many_origins_the_one_heard_of_least_lately_is_forgotten() -> None:
    arrivals = Arrivals(2)
    for origin, sequence in ((1, 1), (2, 1), (1, 2), (3, 1)):
        arrivals.add(origin, sequence)

    assert {1: 2, 3: 1} == arrivals.last_sequences()


@given(blocks_of_all, blocks_of_all, st.integers(1, 40))
def test_a_reader_gets_what_others_wrote_in_its_namespaces_from_where_it_began(
    before: list[SharedBlocks], after: list[SharedBlocks], max_bytes: int
) -> None:
    relay = BlockRelay()
    for one in before:
        relay.put(one)
    behind, fresh = reader("a", new=["c"], origin=1), reader("a", "c", origin=1)
    relay.open(behind, 0)
    relay.open(fresh, None)
    for one in after:
        relay.put(one)

    def read_all(one: Reader) -> list[SharedBlocks]:
        found: list[SharedBlocks] = []
        while blocks := relay.read(one, max_bytes):
            assert sum(len(block.blocks) for block in blocks[:-1]) <= max_bytes
            found += blocks
        return found

    def wanted(blocks: list[SharedBlocks], *namespaces: str) -> list[SharedBlocks]:
        return [one for one in blocks if one.namespace in namespaces and one.origin != 1]

    assert read_all(behind) == wanted(before, "a") + wanted(after, "a", "c")
    assert read_all(fresh) == wanted(after, "a", "c")
    assert behind.position == fresh.position == len(before) + len(after)
    assert 0 == relay.take_dropped(behind)


def test_a_slow_reader_is_told_what_it_missed_and_goes_on_at_what_is_kept() -> None:
    relay = BlockRelay(max_bytes=20)
    slow = reader("a")
    relay.open(slow, None)
    for sequence in range(5):
        relay.put(shared(sequence))
        relay.put(shared(sequence, namespace="c", num_tokens=1))

    assert 40 == relay.take_dropped(slow)
    assert 0 == relay.take_dropped(slow)
    assert [4] == sequences(relay.read(slow, 1000))


def test_a_relay_wakes_those_whom_blocks_concern() -> None:
    relay, woken = BlockRelay(), list[str]()
    for name, namespace in (("one", "a"), ("other", "c")):
        relay.open(replace(reader(namespace), wake=partial(woken.append, name)), None)
    relay.put(shared(1))
    assert ["one"] == woken

    relay.wake()
    assert ["one", "one", "other"] == woken


def test_a_relay_remembers_what_came_of_a_namespace_whoever_reads() -> None:
    relay = BlockRelay(max_bytes=1)
    for origin, sequence in ((1, 3), (2, 1), (1, 4)):
        relay.put(shared(sequence, origin=origin))

    assert {1: 4, 2: 1} == relay.last_sequences("a")
    assert {} == relay.last_sequences("c")


@given(
    st.lists(
        st.tuples(st.sampled_from([MODEL, ANY_MODEL, "other"]), st.sampled_from(NAMESPACES), st.integers(0, 5)),
        max_size=12,
    )
)
def test_an_epoch_is_the_latest_deletion_of_a_namespace_or_an_outer_one(times: list[tuple[str, str, int]]) -> None:
    forgotten: list[str] = []

    def forget(namespace: str) -> int:
        forgotten.append(namespace)
        return 1

    epochs = Epochs(MODEL, forget)
    latest = dict.fromkeys(NAMESPACES, 0)
    for model, deleted, time_ms in times:
        is_news = model != "other" and time_ms > latest[deleted]
        num_before = len(forgotten)
        assert epochs.raise_to({epoch_field(model, deleted): time_ms}) == int(is_news)
        assert forgotten[num_before:] == [deleted] * is_news
        for namespace in NAMESPACES:
            if model != "other" and deleted in outer_namespaces(namespace):
                latest[namespace] = max(latest[namespace], time_ms)

    assert latest == {namespace: epochs.of(namespace) for namespace in NAMESPACES}


def test_the_next_epoch_grows_even_beside_a_clock_that_is_ahead() -> None:
    epochs = Epochs(MODEL, lambda _: 0)
    ahead = now_ms() + 60_000
    epochs.raise_to({epoch_field(MODEL, "a"): ahead})

    assert ahead + 1 == epochs.next("a/b")
    assert now_ms() - 1000 < epochs.next("c") <= now_ms()


def test_a_deletion_wakes_listeners_once() -> None:
    epochs, calls = Epochs(MODEL, lambda _: 0), list[int]()
    epochs.listen(lambda: calls.append(1))
    for _ in range(2):
        epochs.raise_to({epoch_field(MODEL, "a"): 5, epoch_field(ANY_MODEL, "c"): 5})

    assert [1] == calls


def test_an_archive_comes_back_with_what_is_in_it() -> None:
    sealed = seal(b"text", "a", MODEL, {epoch_field(MODEL, "a"): 3}, {2**64 - 1: 7})

    assert (b"text", {2**64 - 1: 7}) == unseal(sealed, "a", MODEL, {epoch_field(ANY_MODEL, "a"): 3})


@pytest.mark.parametrize("deleted", ["a", "a/b"])
def test_an_archive_of_before_a_deletion_is_refused(deleted: str) -> None:
    sealed = seal(b"text", "a", MODEL, {epoch_field(MODEL, deleted): 3}, {})

    with pytest.raises(ArchiveError, match=f"namespace {deleted} was deleted"):
        unseal(sealed, "a", MODEL, {epoch_field(MODEL, deleted): 4})


@given(st.data())
def test_a_header_that_was_cut_or_changed_is_refused(data: st.DataObject) -> None:
    sealed = bytearray(seal(b"", "a", MODEL, {epoch_field(MODEL, "a"): 3}, {1: 2}))
    place = data.draw(st.integers(len(MAGIC), len(sealed) - 1))
    if data.draw(st.booleans()):
        del sealed[place:]
    else:
        sealed[place] ^= data.draw(st.integers(1, 255))

    with pytest.raises(ArchiveError, match="cut or changed"):
        unseal(bytes(sealed), "a", MODEL, {})


def test_a_header_of_an_earlier_version_is_refused() -> None:
    header = json.dumps({"namespace": "a", "epochs": {}}).encode()

    with pytest.raises(ArchiveError, match="cut or changed"):
        unseal(MAGIC + len(header).to_bytes(4, "little") + header, "a", MODEL, {})
