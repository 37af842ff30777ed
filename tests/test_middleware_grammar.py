"""Block grammars of the middleware: what is refused when they are made, and that the engine reads the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from tests.openai_server import running_server

from agentspec.middleware import AgentSpecMiddleware, Block, BlockGrammar, grammar
from agentspec.sidecar import grammar_store, grammars
from agentspec.sidecar.grammar_store import content_id, parse_grammar
from agentspec.sidecar.grammars import PRESETS, BlockRule, GrammarError

ANY_BLOCK: Any = Block
ANY_GRAMMAR: Any = BlockGrammar
THOUGHT = Block("reasoning", start="Thought:", anchor="line")


# --- contract with the engine


def test_the_engine_reads_a_grammar_as_it_was_meant() -> None:
    ours = BlockGrammar(
        Block("plan", start=("## Plan", "# Plan"), end="## End"),
        Block("tool_call", start="Action:", parents=("text", "plan"), anchor="line", tool_name_after=(" ", "")),
    )

    assert parse_grammar(ours.to_json()).rules == (
        BlockRule("plan", (b"## Plan", b"# Plan"), b"## End"),
        BlockRule("tool_call", b"Action:", (), ("text", "plan"), "line", (b" ", b"")),
    )


def test_bounds_are_those_of_the_engine() -> None:
    assert (grammar.MAX_BLOCKS, grammar.MAX_INLINE_BYTES) == (grammars.MAX_RULES, grammar_store.MAX_INLINE_BYTES)
    assert grammar.ROOT_BLOCK == grammars.ROOT_BLOCK


NAMES = st.sampled_from(["text", "code", "plan", "bad name", ""])
MARKERS = st.lists(st.text(alphabet="ab<\ud800é", max_size=3), max_size=3).map(tuple)


@given(
    st.lists(
        st.tuples(NAMES, MARKERS, st.none() | MARKERS, st.lists(NAMES, max_size=2).map(tuple), st.none() | MARKERS),
        max_size=4,
    )
)
def test_what_is_accepted_here_is_accepted_by_the_engine(sources: list[Any]) -> None:
    try:
        ours = BlockGrammar(
            *(Block(name, start, end, parents, tool_name_after=after) for name, start, end, parents, after in sources)
        )
    except ValueError:
        return

    assert len(parse_grammar(ours.to_json()).rules) == len(sources)
    assert content_id(ours.to_json())


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_engines_own_presets_are_not_ambiguous_here(name: str) -> None:
    def text(markers: Any) -> Any:
        return markers.decode() if isinstance(markers, bytes) else tuple(marker.decode() for marker in markers) or None

    blocks = tuple(
        Block(rule.name, text(rule.start), text(rule.end), rule.parents, rule.anchor, text(rule.tool_name_after))
        for rule in PRESETS[name].rules
    )

    grammar._check_unambiguous(blocks)


# --- bad input


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Block("", start="a"), ValueError, "got ''"),
        (lambda: Block("a b", start="a"), ValueError, "got 'a b'"),
        (lambda: ANY_BLOCK(7, start="a"), TypeError, "got int: 7"),
        (lambda: Block("plan", start=""), ValueError, "block 'plan': start: .* got ''"),
        (lambda: Block("plan", start=("a", "")), ValueError, r"got \('a', ''\)"),
        (lambda: Block("plan", start=()), ValueError, r"got \(\)"),
        (lambda: ANY_BLOCK("plan", start=b"a"), TypeError, "got bytes: b'a'"),
        (lambda: Block("plan", start=("a", "a")), ValueError, "start: marker 'a' is given twice"),
        (lambda: Block("plan", start="a", end=""), ValueError, "end: .* got ''"),
        (lambda: Block("plan", start="\ud800"), ValueError, r"'\\ud800'"),
        (lambda: ANY_BLOCK("plan", start="a", anchor="start"), ValueError, "got 'start'"),
        (lambda: ANY_BLOCK("plan", start="a", parents="text"), TypeError, "got 'text'"),
        (lambda: Block("text", start="a", end="b"), ValueError, "takes no end"),
        (BlockGrammar, ValueError, "got 0"),
        (lambda: ANY_GRAMMAR("plan"), TypeError, "got str: 'plan'"),
        (lambda: BlockGrammar(Block("plan", start="a", parents=("nest",))), ValueError, "unknown parent 'nest'"),
        (lambda: BlockGrammar(THOUGHT, Block("plan", start="Thought:")), ValueError, "'Thought:' is used twice"),
        (
            lambda: BlockGrammar(Block("a", start="<tool"), Block("b", start="<tool_call>")),
            ValueError,
            "'<tool' is complete before '<tool_call>'",
        ),
        (
            lambda: BlockGrammar(Block("a", start="tool"), Block("b", start="<tool_call>")),
            ValueError,
            "'tool' is complete before '<tool_call>'",
        ),
        (lambda: BlockGrammar(Block("plan", start="x" * 1100)), ValueError, "at most 1024 bytes as JSON, got 11.*plan"),
        (lambda: AgentSpecMiddleware(grammars={"a": 7}), TypeError, "got int: 7"),  # type: ignore[dict-item]
        (lambda: AgentSpecMiddleware(grammars={"": THOUGHT}), ValueError, "got ''"),  # type: ignore[dict-item]
        (lambda: AgentSpecMiddleware(grammars=""), ValueError, "got ''"),
    ],
)
def test_a_bad_grammar_is_refused_with_its_value(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_a_marker_that_ends_with_another_one_is_not_ambiguous() -> None:
    nested = BlockGrammar(Block("a", start="call>"), Block("b", start="<tool_call>"))

    assert len(nested.blocks) == 2


def test_an_unknown_field_would_be_refused_by_the_engine() -> None:
    with pytest.raises(GrammarError, match="ends"):
        parse_grammar({"blocks": [{"name": "a", "start": "a", "end": None, "ends": "b"}]})


# --- on the wire


def test_each_stage_sends_its_own_grammar() -> None:
    react = BlockGrammar(THOUGHT, Block("tool_call", start="Action:", anchor="line", tool_name_after=" "))
    spec = AgentSpecMiddleware(workflow_id="wf", grammars={"writer/draft": react, "review": "harmony", "*": "chat"})
    with running_server() as server:
        llm = ChatOpenAI(model="m", base_url=server.url, api_key="x")  # type: ignore[arg-type]  # SecretStr

        def ask(state: MessagesState) -> dict[str, Any]:
            llm.invoke("hi")
            return {}

        inner = StateGraph(MessagesState).add_node("draft", ask).add_edge(START, "draft").compile()
        builder = StateGraph(MessagesState)
        builder.add_node("writer", inner)
        builder.add_node("review", ask)
        builder.add_node("end", ask)
        builder.add_edge(START, "writer")
        builder.add_edge("writer", "review")
        builder.add_edge("review", "end")
        spec.wrap(builder.compile()).invoke({"messages": [HumanMessage("hi")]})
        first = server.tags[0].grammar

        assert first == react.to_json()
        assert isinstance(first, dict)
        assert parse_grammar(first).rules[1].name_marks == (b" ",)
        assert [tags.grammar for tags in server.tags[1:]] == ["harmony", "chat"]
        assert max(len(json.dumps(body["vllm_xargs"])) for body in server.bodies) <= 2048
