"""The block tracker, through the engine's `block_path`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.reference import Row, drafts_by_row, step_request, token_ids
from tests.reference_tracker import ReferenceTracker

from agentspec.sidecar.engine import Engine, FinishReason, Sampling
from agentspec.sidecar.grammars import CHAT, BlockRule, Grammar
from agentspec.sidecar.tags import Tags

BYTES = [bytes([byte]) for byte in range(256)]
MARKERS = [b"<think>", b"</think>", b"<tool_call>", b"</tool_call>", b"```"]
# Markers inside and across each other, a block inside itself, start equal to end, one that ends another but may stand
# where that may not.
TWISTED = Grammar(
    (
        BlockRule("a", b"(", b")", ("text", "a", "b")),
        BlockRule("b", b"((", b"))", ("text", "a")),
        BlockRule("c", b"|", b"|", ("text", "a", "d")),
        BlockRule("d", b"(|", b"|)", ("text", "c", "d")),
        BlockRule("e", b"\x00\xff", b"\xff\x00"),
        BlockRule("f", b"x<x", b"y"),
        BlockRule("g", b"<x", b"<y", ("a",)),
        BlockRule("h", b"x", b"x<y", ("f", "g")),
    )
)
CHAT_PIECES = st.sampled_from([*MARKERS, b"<", b"`", b"``", b"</", b"think>", b"x", b"\xf0\x9f", b"<think></think"])
TWISTED_PIECES = st.sampled_from([b"(", b")", b"|", b"((", b"|)", b"\x00", b"\xff", b"x", b"<", b"y"])


class Tracked:
    """One open request of an engine, fed with bytes that are cut into tokens at will."""

    def __init__(self, tokens: Iterable[bytes], grammar: Grammar = CHAT, block: str = "") -> None:
        pieces = sorted(set(tokens))
        self.ids = {piece: token for token, piece in enumerate(pieces)}
        self.engine = Engine(pieces, grammar)
        self.engine.open(1, token_ids(), Tags(block=block), Sampling())
        self.num_output = 0

    def write(self, *tokens: bytes) -> str:
        row = Row(1, self.num_output, [self.ids[token] for token in tokens], room=0)
        assert not self.engine.step(step_request([row])).resync_handles.size
        self.num_output += len(tokens)
        return self.engine.block_path(1)


def path_after(tokens: Sequence[bytes], grammar: Grammar = CHAT, block: str = "") -> str:
    return Tracked(tokens, grammar, block).write(*tokens)


def cut(text: bytes, sizes: Sequence[int]) -> list[bytes]:
    tokens = []
    for size in sizes:
        tokens.append(text[:size])
        text = text[size:]
    return [*tokens, text]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (b"plain", "text"),
        (b"<think>", "reasoning"),
        (b"<think>a</think>", "text"),
        (b"<tool_call>", "tool_call"),
        (b"<think><tool_call>```py", "reasoning/tool_call/code"),
        (b"<think><tool_call>``` ```", "reasoning/tool_call"),
        (b"<tool_call><think>", "tool_call"),
        (b"</think>", "text"),
        (b"</tool_call></think>```", "code"),
        (b"<think></tool_call>", "reasoning"),
        (b"<tool_call>```</tool_call>", "text"),
        (b"<<think>", "reasoning"),
        (b"<thin<think>", "reasoning"),
        (b"<think", "text"),
        (b"``x`", "text"),
        (b"````", "code"),
        (b"``````", "text"),
    ],
)
def test_markers_open_and_close_blocks(text: bytes, path: str) -> None:
    assert path == path_after([text])


@given(st.lists(CHAT_PIECES, max_size=12).map(b"".join), st.lists(st.integers(0, 9), max_size=40))
def test_markers_split_over_tokens_in_any_way_give_the_same_block_path(text: bytes, sizes: list[int]) -> None:
    assert path_after([text]) == path_after(cut(text, sizes))


@given(st.lists(CHAT_PIECES | st.binary(max_size=3), max_size=20))
def test_every_block_path_equals_that_of_the_reference(tokens: list[bytes]) -> None:
    assert_paths_equal_the_reference(tokens, CHAT)


@given(st.lists(TWISTED_PIECES | st.lists(TWISTED_PIECES).map(b"".join), max_size=40))
@example([b"(((|)|)", b"))", b")"])
@example([b"("] * 20 + [b")"] * 20)
@example([b"(x<x", b"x", b"x<y", b"<y", b")", b"x<xx", b"x<y", b"y"])
def test_markers_that_overlap_follow_the_reference(tokens: list[bytes]) -> None:
    assert_paths_equal_the_reference(tokens, TWISTED)


@given(
    st.lists(TWISTED_PIECES, max_size=10),
    st.lists(st.sampled_from(["a", "b", "c", "text", "other", "", "f/g"]), max_size=20).map("/".join),
)
def test_a_start_block_follows_the_reference(tokens: list[bytes], block: str) -> None:
    assert_paths_equal_the_reference(tokens, TWISTED, block)


def assert_paths_equal_the_reference(tokens: Sequence[bytes], grammar: Grammar, block: str = "") -> None:
    tracked = Tracked(tokens, grammar, block)
    reference = ReferenceTracker(grammar, block)
    expected, actual = [reference.path], [tracked.engine.block_path(1)]
    for token in tokens:
        reference.advance(token)
        expected.append(reference.path)
        actual.append(tracked.write(token))

    assert expected == actual


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise(text: bytes) -> None:
    tracked = Tracked(BYTES)

    tracked.write(*cut(text, [1] * len(text))[:-1])

    tracked.engine.check_integrity()


@pytest.mark.parametrize(
    ("block", "tokens", "path"),
    [
        ("reasoning", [b"a"], "reasoning"),
        ("reasoning", [b"</think>"], "text"),
        ("tool_call/search", [b"a"], "tool_call/search"),
        ("tool_call/search", [b"</tool_call>"], "text"),
        ("tool_call/edit/code", [b"a"], "tool_call/edit/code"),
        ("tool_call/edit/code", [b"```"], "tool_call/edit"),
        ("tool_call/edit", [b"```"], "tool_call/edit/code"),
        ("plan", [b"</think>"], "plan"),
        ("plan", [b"<think>"], "plan/reasoning"),
        ("plan", [b"<think>", b"</think>"], "plan"),
        ("text", [b"a"], "text"),
        ("text/tool_call", [b"</tool_call>"], "text"),
        ("//reasoning//", [b"a"], "reasoning"),
    ],
)
def test_the_start_block_is_that_of_the_tag_refined_by_the_names_that_are_no_rule(
    block: str, tokens: list[bytes], path: str
) -> None:
    assert path == path_after(tokens, block=block)


def test_structured_output_without_a_tag_starts_in_a_tool_call() -> None:
    engine = Engine(BYTES, CHAT)

    engine.open(1, token_ids(), Tags(), Sampling(is_structured=True))

    assert "tool_call" == engine.block_path(1)


def test_the_tag_wins_over_structured_output() -> None:
    engine = Engine(BYTES, CHAT)

    engine.open(1, token_ids(), Tags(block="reasoning"), Sampling(is_structured=True))

    assert "reasoning" == engine.block_path(1)


def test_ten_thousand_nested_starts_end_at_a_bounded_depth() -> None:
    path = path_after([b"("] * 10_000, Grammar((BlockRule("a", b"(", b")", ("text", "a")),)))

    assert "/".join(["a"] * 16) == path


def test_the_tracker_finds_the_top_level_again_after_ten_thousand_nested_starts() -> None:
    grammar = Grammar((BlockRule("a", b"(", b")", ("text", "a")),))

    assert "text" == path_after([b"("] * 10_000 + [b")"] * 10_000, grammar)


def test_a_start_block_deeper_than_the_bound_is_cut() -> None:
    grammar = Grammar((BlockRule("a", b"(", b")", ("text", "a")),))

    assert "/".join(["a"] * 16) == path_after([], grammar, "/".join(["a"] * 100))


def test_two_rules_with_one_name_hold_the_same_blocks() -> None:
    grammar = Grammar(
        (
            BlockRule("reasoning", b"<think>", b"</think>"),
            BlockRule("reasoning", b"<thought>", b"</thought>"),
            BlockRule("code", b"```", b"```", ("reasoning",)),
        )
    )

    assert "reasoning/code" == path_after([b"<thought>```"], grammar)


@pytest.mark.parametrize("tokens", [[b"<think>a", b"</think><think>"], [b"```a", b"``````"]])
def test_a_block_that_starts_in_the_token_that_ends_another_is_a_new_block(tokens: list[bytes]) -> None:
    """In strict mode nothing of the first block may then be drafted across the token."""
    tracked = Tracked([*tokens, b"b", b"c"])
    tracked.write(*tokens, b"b")
    tracked.engine.close(1, FinishReason.STOP, 3, token_ids())
    strict = Engine(sorted(tracked.ids), CHAT, is_strict=True)
    for handle, text in ((1, [*tokens, b"b", b"c"]), (2, [tokens[0]])):
        strict.open(handle, token_ids(), Tags(), Sampling())
        drafts = strict.step(step_request([Row(handle, 0, [tracked.ids[token] for token in text])]))
        if handle == 1:
            strict.close(1, FinishReason.STOP, len(text), token_ids())

    assert [[tracked.ids[tokens[1]]]] == drafts_by_row(drafts)


def test_tokens_without_bytes_change_nothing() -> None:
    assert "reasoning" == path_after([b"<thi", b"", b"nk>", b""])


def test_block_path_of_an_unknown_request_is_refused_and_named() -> None:
    engine = Engine(BYTES, CHAT)

    with pytest.raises(ValueError, match="handle: 7 is not open"):
        engine.block_path(7)


def test_more_block_paths_than_labels_share_one_named_other() -> None:
    engine = Engine(BYTES, CHAT)
    for handle in range(5000):
        engine.open(handle, token_ids(), Tags(block=f"kind{handle}", history="off"), Sampling())

    assert {"kind0", "other"} == {engine.block_path(handle) for handle in (0, 4999)}


def test_a_vocabulary_of_every_byte_value_is_taken() -> None:
    engine = Engine([bytes([byte]) * 3 for byte in np.arange(256, dtype=np.uint8)], CHAT)

    engine.open(1, token_ids(96), Tags(), Sampling())

    assert "text" == engine.block_path(1)


@pytest.mark.parametrize("num_rules", [61, 100])
def test_a_grammar_of_too_many_rules_is_refused(num_rules: int) -> None:
    rules = tuple(BlockRule(f"r{i}", b"<%d>" % i, b"</%d>" % i) for i in range(num_rules))

    with pytest.raises(ValueError, match=f"at most 60 rules.*got {num_rules}"):
        Engine(BYTES, Grammar(rules))
