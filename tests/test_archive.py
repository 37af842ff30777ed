"""Saved histories: what comes back, and what is refused."""

from __future__ import annotations

import pytest
from tests.engine_player import bold_engine
from tests.reference import Row, drafts_by_row, step_request, token_ids

from agentspec.sidecar.engine import ArchiveError, Engine, FinishReason, Sampling, TokenIds
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags

VOCABULARY = [bytes([byte]) for byte in range(256)]


def text(words: str) -> TokenIds:
    return token_ids(*words.encode())


def write(engine: Engine, handle: int, words: str, *, namespace: str = "n", stage: str = "s") -> None:
    engine.open(handle, text("prompt"), Tags(stage=stage), Sampling(), namespace=namespace)
    engine.close(handle, FinishReason.STOP, len(words), text(words))


def draft_after(engine: Engine, words: str, *, namespace: str = "n", stage: str = "s") -> bytes:
    engine.open(99, text("!"), Tags(stage=stage), Sampling(), namespace=namespace)
    drafts = engine.step(step_request([Row(99, 0, list(words.encode()), 16)]))
    engine.close(99, FinishReason.ERROR, 0, token_ids())
    return bytes(drafts_by_row(drafts)[0])


@pytest.fixture
def engine() -> Engine:
    return bold_engine(VOCABULARY, CHAT)


@pytest.fixture
def archive(engine: Engine) -> bytes:
    write(engine, 1, "the plan is <think>to search</think> and then to write")
    write(engine, 2, "other tenant", namespace="n/tag-b")
    write(engine, 3, "unrelated", namespace="nn")
    return engine.export_histories("n")


def test_an_imported_history_drafts_like_its_source(engine: Engine, archive: bytes) -> None:
    copy = bold_engine(VOCABULARY, CHAT)
    copy.import_histories(archive)
    copy.check_integrity()

    assert draft_after(copy, "the plan") == draft_after(engine, "the plan") != b""


def test_an_imported_output_is_drafted_after_the_same_end_of_a_prompt() -> None:
    source, copy = bold_engine(VOCABULARY, CHAT), bold_engine(VOCABULARY, CHAT)
    for handle, (prompt, answer) in enumerate([("red?", "stop"), ("green?", "drive")]):
        source.open(handle, text(prompt), Tags(), Sampling())
        source.close(handle, FinishReason.STOP, len(answer), text(answer))
    copy.import_histories(source.export_histories(""))
    copy.check_integrity()

    copy.open(9, text("is it red?"), Tags(), Sampling())
    assert bytes(drafts_by_row(copy.step(step_request([Row(9, 0, [], 16)])))[0]) == b"stop"
    assert copy.num_history_tokens() == source.num_history_tokens()


def test_an_archive_holds_a_namespace_and_those_within_it_only(archive: bytes) -> None:
    copy = bold_engine(VOCABULARY, CHAT)
    copy.import_histories(archive)

    assert draft_after(copy, "other ", namespace="n/tag-b").startswith(b"tenant")
    assert draft_after(copy, "unrel", namespace="nn") == b""


def test_export_of_an_import_is_the_same_archive(archive: bytes) -> None:
    copy = bold_engine(VOCABULARY, CHAT)
    copy.import_histories(archive)

    assert copy.export_histories("n") == archive


@pytest.mark.parametrize("place", range(4, 120, 7))
def test_a_flipped_bit_is_refused_and_changes_nothing(archive: bytes, place: int) -> None:
    copy = bold_engine(VOCABULARY, CHAT)
    broken = bytearray(archive)
    broken[place] ^= 4

    with pytest.raises(ArchiveError):
        copy.import_histories(bytes(broken))

    assert copy.num_history_tokens() == 0


@pytest.mark.parametrize("length", [0, 3, 11, 40, -1])
def test_a_cut_archive_is_refused_and_changes_nothing(archive: bytes, length: int) -> None:
    copy = bold_engine(VOCABULARY, CHAT)

    with pytest.raises(ArchiveError):
        copy.import_histories(archive[:length])

    assert copy.num_history_tokens() == 0


def test_an_archive_of_another_vocabulary_is_refused(archive: bytes) -> None:
    with pytest.raises(ArchiveError, match="another vocabulary"):
        Engine(VOCABULARY[::-1], CHAT).import_histories(archive)


def test_an_imported_text_larger_than_the_memory_keeps_its_end() -> None:
    source, small = bold_engine(VOCABULARY, CHAT), bold_engine(VOCABULARY, CHAT, history_bytes=1 << 17)
    write(
        source,
        1,
        "".join(chr(97 + place * place % 26) + chr(97 + place // 26 % 26) for place in range(8000)) + "the end",
    )
    small.import_histories(source.export_histories("n"))
    small.check_integrity()

    assert draft_after(small, "the ") == b"end"
    assert small.memory_bytes() <= 1 << 17


def test_a_deleted_namespace_never_drafts_again(engine: Engine, archive: bytes) -> None:
    engine.open(7, text("prompt"), Tags(stage="s"), Sampling(), namespace="n")
    engine.delete_namespace("n")
    engine.step(step_request([Row(7, 0, list(b"the plan is late"), 0)]))
    engine.close(7, FinishReason.STOP, 16, token_ids())

    assert draft_after(engine, "the plan") == b""
    assert draft_after(engine, "other ", namespace="n/tag-b") == b""
    assert draft_after(engine, "unrel", namespace="nn").startswith(b"ated")
    engine.check_integrity()


def test_unused_histories_are_forgotten_and_used_ones_stay(engine: Engine) -> None:
    write(engine, 1, "forgotten")
    engine.open(2, text("prompt"), Tags(stage="open"), Sampling(), namespace="n")

    assert engine.forget_unused(3600) == 0
    assert engine.forget_unused(0) == len("forgotten")
    assert draft_after(engine, "forg") == b""
    engine.check_integrity()


def test_an_archive_of_another_namespace_is_refused_and_changes_nothing(archive: bytes) -> None:
    copy = bold_engine(VOCABULARY, CHAT)

    with pytest.raises(ArchiveError, match="namespace n, expected m"):
        copy.import_histories(archive, within="m")

    assert copy.num_history_tokens() == 0
    assert copy.import_histories(archive, within="n") > 0


def test_sizes_are_those_of_a_namespace_and_of_those_within_it(engine: Engine, archive: bytes) -> None:
    sizes = engine.history_sizes("n")

    assert [(size.namespace, size.stage) for size in sizes] == [("n", "s"), ("n/tag-b", "s")]
    assert sizes[1].num_tokens == len("other tenant")
    assert sum(size.num_bytes for size in sizes) < engine.memory_bytes()


def test_an_appended_text_is_drafted_and_not_counted() -> None:
    engine = bold_engine(VOCABULARY, CHAT)
    engine.append(text("the plan is <think>to search</think> and more"), Tags(stage="s"), namespace="n")
    engine.check_integrity()

    assert engine.stats() == []
    assert engine.budget_stats() == []
    assert engine.num_open_requests() == 0
    assert draft_after(engine, "the plan").startswith(b" is")


def test_an_appended_text_is_stored_whole_whatever_an_engine_may_store() -> None:
    engine = Engine(VOCABULARY, CHAT, stored_tokens_per_s=1)
    for number in range(3):
        engine.append(text(f"answer {number} of many"), Tags(stage="s"), namespace="n")

    assert engine.num_dropped_tokens() == 0
    assert engine.num_history_tokens() == 3 * len("answer 0 of many")


def test_an_appended_text_outside_of_the_vocabulary_is_refused_and_leaves_nothing_open() -> None:
    engine = bold_engine(VOCABULARY, CHAT)

    with pytest.raises(ValueError, match="token id 256"):
        engine.append(token_ids(1, 256), Tags(), namespace="n")

    assert engine.num_open_requests() == 0
    assert engine.num_history_tokens() == 0
