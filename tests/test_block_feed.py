"""Blocks on their way from one engine to another: what arrives drafts as if it had been written there."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine_player import NESTED, SMALL_VOCABULARY, bold_engine, fuzzing, seeded
from tests.reference import ReferenceEngine, Row, drafts_by_row, step_request, token_ids

from agentspec.sidecar.engine import ArchiveError, Engine, FinishReason, Parts, Sampling, TokenIds
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags

BYTES = [bytes([byte]) for byte in range(256)]
ORIGIN = 7
ROOM = 1 << 20


def text(words: str) -> TokenIds:
    return token_ids(*words.encode())


def sharing_engine(**options: int) -> Engine:
    engine = bold_engine(BYTES, CHAT, **options)
    engine.share_blocks(ROOM)
    return engine


def write(engine: Engine, handle: int, words: str, *, namespace: str = "n", tags: Tags | None = None) -> None:
    engine.open(handle, text("prompt"), tags or Tags(stage="s"), Sampling(), namespace=namespace)
    engine.close(handle, FinishReason.STOP, len(words), text(words))


def carry(source: Engine, target: Engine, origin: int = ORIGIN) -> int:
    return sum(
        target.merge_blocks(batch.namespace, batch.blocks, origin=origin) for batch in source.take_blocks().batches
    )


def draft_after(engine: Engine, words: str, *, namespace: str = "n", stage: str = "s") -> bytes:
    engine.open(99, text("!"), Tags(stage=stage, history="read"), Sampling(), namespace=namespace)
    drafts = engine.step(step_request([Row(99, 0, list(words.encode()), 16)]))
    engine.close(99, FinishReason.ERROR, 0, token_ids())
    return bytes(drafts_by_row(drafts)[0])


def step(engine: Engine, handle: int, position: int, words: str) -> None:
    engine.step(step_request([Row(handle, position, list(words.encode()), 0)]))


def test_an_engine_that_nobody_asked_keeps_nothing_for_others() -> None:
    engine = bold_engine(BYTES, CHAT)
    write(engine, 1, "the plan")

    assert engine.take_blocks().batches == []
    assert engine.take_blocks().namespaces == []


def test_a_block_that_closed_drafts_elsewhere_while_its_request_goes_on() -> None:
    source, target = sharing_engine(), bold_engine(BYTES, CHAT)
    source.open(1, text("prompt"), Tags(stage="s"), Sampling(), namespace="n")
    step(source, 1, 0, "<think>look at the plan</think>")
    step(source, 1, 31, "and")
    carry(source, target)

    assert draft_after(target, "<think>look at").startswith(b" the plan</th")


def test_an_open_block_is_handed_out_as_it_grows() -> None:
    source = sharing_engine()
    source.open(1, text("prompt"), Tags(stage="s"), Sampling(), namespace="n")
    for position in range(0, 100, 10):
        step(source, 1, position, "0123456789")

    assert [1 + 70] == [batch.num_tokens for batch in source.take_blocks().batches]


def test_a_text_goes_on_where_its_last_stretch_ended() -> None:
    source, target = sharing_engine(), bold_engine(BYTES, CHAT)
    words = "".join(chr(65 + place * place % 26) + chr(97 + place % 23) for place in range(90))
    source.open(1, text("prompt"), Tags(stage="s"), Sampling(), namespace="n")
    for position in range(0, len(words), 6):
        step(source, 1, position, words[position : position + 6])
        carry(source, target)
    source.close(1, FinishReason.STOP, len(words), token_ids())
    carry(source, target)
    target.check_integrity()

    assert target.export_histories("n") == source.export_histories("n")


def test_what_was_merged_is_passed_over_when_it_comes_again() -> None:
    source, target = sharing_engine(), bold_engine(BYTES, CHAT)
    source.open(1, text("prompt"), Tags(stage="s"), Sampling(), namespace="n")
    step(source, 1, 0, "<think>a</think>")
    step(source, 1, 16, "b")
    (batch,) = source.take_blocks().batches
    first = target.merge_blocks("n", batch.blocks, origin=ORIGIN)

    assert first > 0
    assert target.merge_blocks("n", batch.blocks, origin=ORIGIN) == 0
    assert target.merge_blocks("n", batch.blocks, origin=ORIGIN + 1) == first


def test_a_lost_stretch_costs_its_context_alone() -> None:
    source, target = sharing_engine(), bold_engine(BYTES, CHAT)
    source.open(1, text("prompt"), Tags(stage="s"), Sampling(), namespace="n")
    step(source, 1, 0, "<think>never seen</think>")
    step(source, 1, 25, "x")
    source.take_blocks()
    source.close(1, FinishReason.STOP, 26 + 12, text(" and the end"))
    carry(source, target)
    target.check_integrity()

    assert draft_after(target, "and the") == b" end"
    assert draft_after(target, "never") != b" seen</think>"


def test_namespaces_and_stages_stay_apart() -> None:
    source, target = sharing_engine(), bold_engine(BYTES, CHAT)
    write(source, 1, "first tenant", namespace="a")
    write(source, 2, "xyz", namespace="b")
    write(source, 3, "other stage", namespace="a", tags=Tags(stage="t"))
    taken = source.take_blocks()
    for batch in taken.batches:
        target.merge_blocks(batch.namespace, batch.blocks, origin=ORIGIN)

    assert {"a", "b"} == {batch.namespace for batch in taken.batches} == set(taken.namespaces)
    assert draft_after(target, "first", namespace="a") == b" tenant"
    assert draft_after(target, "first", namespace="b") == b""
    assert draft_after(target, "other", namespace="a", stage="t") == b" stage"


def test_a_call_that_only_reads_hands_out_nothing_but_its_namespace() -> None:
    source = sharing_engine()
    write(source, 1, "secret", tags=Tags(history="read"))
    taken = source.take_blocks()

    assert (taken.batches, taken.namespaces) == ([], ["n"])


def test_of_too_much_the_oldest_waits_in_vain_and_is_counted() -> None:
    source, target = bold_engine(BYTES, CHAT), bold_engine(BYTES, CHAT)
    source.share_blocks(40)
    write(source, 1, "the oldest of all blocks")
    write(source, 2, "the newest of all blocks")
    carry(source, target)

    assert source.num_unshared_tokens() == len("the oldest of all blocks") + 1
    assert draft_after(target, "the ").startswith(b"newest")


def test_a_deleted_namespace_is_not_handed_out() -> None:
    source = sharing_engine()
    write(source, 1, "secret", namespace="n/tag-a")
    write(source, 2, "public", namespace="nn")
    source.delete_namespace("n")

    assert ["nn"] == [batch.namespace for batch in source.take_blocks().batches]


def test_output_past_its_true_length_is_not_handed_out() -> None:
    source, target = sharing_engine(), bold_engine(BYTES, CHAT)
    source.open(1, text("prompt"), Tags(stage="s"), Sampling(), namespace="n")
    step(source, 1, 0, "the end. And more")
    source.close(1, FinishReason.STOP, 8, token_ids())
    carry(source, target)

    assert draft_after(target, "the ") == b"end."


def test_taking_waits_for_the_first_block() -> None:
    source = sharing_engine()
    thread = threading.Timer(0.05, write, (source, 1, "late"))
    thread.start()
    begin = time.monotonic()
    assert source.wait_for_blocks(20)
    assert time.monotonic() - begin < 10
    thread.join()

    assert source.take_blocks().namespaces == ["n"]


def test_waiting_gives_up_in_time() -> None:
    assert not sharing_engine().wait_for_blocks(0.01)


@pytest.mark.parametrize("place", range(0, 60, 3))
def test_changed_bytes_are_refused_or_taken_whole(place: int) -> None:
    source, target = sharing_engine(), bold_engine(BYTES, CHAT)
    write(source, 1, "<think>to search</think> and then to write")
    (batch,) = source.take_blocks().batches
    broken = bytearray(batch.blocks)
    broken[place % len(broken)] ^= 0xC1
    try:
        target.merge_blocks("n", bytes(broken), origin=ORIGIN)
    except ArchiveError:
        assert target.num_history_tokens() == 0
    target.check_integrity()


@pytest.mark.parametrize("blocks", [b"", b"\x02", b"\x01\x07", b"\x01\x02", b"\x01\x00"])
def test_bytes_that_are_no_blocks_are_refused(blocks: bytes) -> None:
    with pytest.raises(ArchiveError):
        bold_engine(BYTES, CHAT).merge_blocks("n", blocks, origin=ORIGIN)


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    source = sharing_engine()
    write(source, 1, "zzz")
    (batch,) = source.take_blocks().batches

    with pytest.raises(ArchiveError, match="outside the vocabulary of 100"):
        bold_engine(BYTES[:100], CHAT).merge_blocks("n", batch.blocks, origin=ORIGIN)


def test_a_request_under_another_stage_hands_out_as_another_text() -> None:
    source, target = sharing_engine(), bold_engine(BYTES, CHAT)
    source.open(1, text("p"), Tags(stage="s"), Sampling(), namespace="n")
    step(source, 1, 0, "<think>x</think>")
    step(source, 1, 16, "y")
    source.open(1, text("p"), Tags(stage="t"), Sampling(), namespace="n")
    step(source, 1, 0, "the other one")
    source.close(1, FinishReason.STOP, 13, token_ids())
    carry(source, target)
    target.check_integrity()

    assert draft_after(target, "the o", stage="t") == b"ther one"


def _pieces(random: Random, output: list[int]) -> Iterator[tuple[int, list[int]]]:
    position = 0
    while position < len(output):
        piece = output[position : position + random.choice([1, 2, 3, 30])]
        yield position, piece
        position += len(piece)


def _play(random: Random, is_strict: bool) -> tuple[Engine, Engine, ReferenceEngine]:
    """One request after the other on a source; a target gets its blocks; the oracle writes them itself."""
    parts = Parts(calibration=False, prior=False)
    source = Engine(SMALL_VOCABULARY, NESTED, is_strict=is_strict, parts=parts)
    target = Engine(SMALL_VOCABULARY, NESTED, is_strict=is_strict, parts=parts)
    oracle = ReferenceEngine(SMALL_VOCABULARY, NESTED, is_strict=is_strict, parts=parts)
    source.share_blocks(ROOM)
    for handle in range(random.randint(1, 6)):
        tags = Tags(workflow_id=random.choice(["w", "v"]), stage=random.choice(["s", "t"]))
        prompt = token_ids(*(random.randrange(8) for _ in range(random.choice([0, 3, 20]))))
        output = [random.choice([0, 1, 2, 3, 4]) for _ in range(random.choice([1, 5, 80, 200]))]
        for engine in (source, oracle):
            engine.open(handle, prompt, tags, Sampling(), namespace="n")
        for position, piece in _pieces(random, output):
            for engine in (source, oracle):
                engine.step(step_request([Row(handle, position, piece, 0)]))
            if random.random() < 0.5:
                carry(source, target)
        for engine in (source, oracle):
            engine.close(handle, FinishReason.STOP, len(output), token_ids())
    carry(source, target)
    return source, target, oracle


@fuzzing
@given(st.integers(0, 1 << 30), st.booleans())
def test_an_engine_fed_by_another_holds_and_drafts_what_the_oracle_does(seed: int, is_strict: bool) -> None:
    random = seeded(seed)
    source, target, oracle = _play(random, is_strict)
    target.check_integrity()

    assert target.export_histories("n") == source.export_histories("n")
    for handle in range(100, 110):
        tags = Tags(workflow_id="w", stage="s", history="read")
        words = [random.choice([0, 1, 2, 3, 4]) for _ in range(random.randint(0, 6))]
        drafts = []
        for engine in (target, oracle):
            engine.open(handle, token_ids(), tags, Sampling(), namespace="n")
            drafts.append(drafts_by_row(engine.step(step_request([Row(handle, 0, words, 16)]))))
            engine.close(handle, FinishReason.ERROR, 0, token_ids())
        assert drafts[1] == drafts[0]
