"""The block tracker on the outputs of real model families, and against the reference on any other text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.reference_tracker import ReferenceTracker
from tests.tracked_output import Output

from agentspec.sidecar.grammars import (
    CHAT,
    DEEPSEEK,
    HARMONY,
    LLAMA,
    MISTRAL,
    PRESETS,
    REACT,
    BlockRule,
    Grammar,
)

# Pieces of text that begin, end, cut and mix up the markers of a grammar.
MORE_PIECES = [
    b"x",
    b"\n",
    b" ",
    b'"',
    b"<",
    b"function",
    b"search",
    b"search[",
    b"a" * 70,
    b"\xff",
    b"\xe2\x96",
    b"}}, {",
]


# One output of each form of a family, each stretch with the block path after it.
OUTPUTS: dict[str, tuple[Grammar, list[tuple[str, str]]]] = {
    "chat": (
        CHAT,
        [
            ("<think>\nLet me see", "reasoning"),
            ("\n</think>\n\nI will search.", "text"),
            ('<tool_call>\n{"name', "tool_call"),
            ('": "search",', "tool_call/search"),
            (' "arguments": {"name": "x"}}\n</tool_call>', "text"),
            ('\n<tool_call>\n{"name":"edit", "arguments": {"code": "```', "tool_call/edit/code"),
            ('py```"}}', "tool_call/edit"),
            ("\n</tool_call>", "text"),
        ],
    ),
    "chat, XML arguments": (
        CHAT,
        [
            ("<tool_call>\n<function=read_file>", "tool_call/read_file"),
            ("\n<parameter=path>\na.py\n</parameter>\n</function>\n</tool_call>", "text"),
        ],
    ),
    "chat, the name first": (
        CHAT,
        [
            ("<tool_call>get_weather", "tool_call"),
            ("\n<arg_key>city</arg_key>", "tool_call/get_weather"),
            ("\n<arg_value>x</arg_value>\n</tool_call>", "text"),
        ],
    ),
    "chat, a list of calls": (
        CHAT,
        [
            ('<tool_calls>[{"name": "search",', "tool_call/search"),
            (' "arguments": {}}]</tool_calls>', "text"),
        ],
    ),
    "chat, MiniMax": (
        CHAT,
        [
            ('<minimax:tool_call>\n<invoke name="search">', "tool_call/search"),
            ("\n</invoke>\n</minimax:tool_call>", "text"),
        ],
    ),
    "chat, Kimi": (
        CHAT,
        [
            ("<|tool_calls_section_begin|><|tool_call_begin|>functions.search:", "tool_call/search"),
            ("0<|tool_call_argument_begin|>{}<|tool_call_end|>", "text"),
        ],
    ),
    "llama, python tag": (
        LLAMA,
        [
            ("<|python_tag|>", "tool_call"),
            ('{"name": "search", ', "tool_call/search"),
            ('"parameters": {}}', "tool_call/search"),
            ("<|eom_id|>", "text"),
        ],
    ),
    "llama, bare JSON": (
        LLAMA,
        [
            ('{"name": "search",', "tool_call/search"),
            (' "parameters": {"name": "x"}}; {"name": "edit",', "tool_call/edit"),
            (' "parameters": {}}', "tool_call/edit"),
        ],
    ),
    "llama, typed JSON": (
        LLAMA,
        [
            ('{"type": "function",', "tool_call"),
            (' "name": "search", ', "tool_call/search"),
            ('"parameters": {}}', "tool_call/search"),
        ],
    ),
    "llama, function tag": (
        LLAMA,
        [
            ("<function=search>", "tool_call/search"),
            ('{"q": 1}</function>', "text"),
        ],
    ),
    "llama, JSON later in the text": (
        LLAMA,
        [
            ('So: {"name": "x"', "text"),
        ],
    ),
    "mistral": (
        MISTRAL,
        [
            ("[THINK]so", "reasoning"),
            ("[/THINK]Now.", "text"),
            ("[TOOL_CALLS]search[", "tool_call/search"),
            ('ARGS]{"name": "x"}', "tool_call/search"),
            ("[TOOL_CALLS]edit[ARGS]", "tool_call/edit"),
            ("{}", "tool_call/edit"),
        ],
    ),
    "mistral, call id": (
        MISTRAL,
        [
            ("[TOOL_CALLS]search[CALL_ID]", "tool_call/search"),
            ("abc[ARGS]{}", "tool_call/search"),
        ],
    ),
    "mistral, JSON list": (
        MISTRAL,
        [
            ('[TOOL_CALLS] [{"name": "search", ', "tool_call/search"),
            ('"arguments": {"q": {}}}, {"name": "edit"', "tool_call/edit"),
            (', "arguments": {}}]', "tool_call/edit"),
        ],
    ),
    "harmony": (
        HARMONY,
        [
            ("<|channel|>analysis<|message|>so", "reasoning"),
            ("<|end|><|start|>assistant", "text"),
            ("<|channel|>commentary to=functions.search <", "tool_call/search"),
            ('|constrain|>json<|message|>{"q": "``` to=x"}', "tool_call/search/code"),
            ("<|call|>", "text"),
        ],
    ),
    "harmony, the recipient first": (
        HARMONY,
        [
            (" to=functions.search<", "tool_call/search"),
            ("|channel|>commentary json<|message|>{}<|call|>", "text"),
        ],
    ),
    "harmony, built-in tool": (
        HARMONY,
        [
            ("<|channel|>analysis to=browser.search code<|message|>", "tool_call/browser.search"),
            ("{}<|call|>", "text"),
        ],
    ),
    "harmony, preamble and answer": (
        HARMONY,
        [
            ("<|channel|>commentary<|message|>First, to=x ", "text"),
            ("<|end|><|start|>assistant<|channel|>final<|message|>4, to=y ", "text"),
        ],
    ),
    "deepseek, V3 and R1": (
        DEEPSEEK,
        [
            ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>", "tool_call"),
            ("search\n", "tool_call/search"),
            ("```json\n{}", "tool_call/search/code"),
            ("\n```<｜tool▁call▁end｜>", "text"),
            ("\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>edit\n", "tool_call/edit"),
            ("```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "text"),
        ],
    ),
    "deepseek, V3.1": (
        DEEPSEEK,
        [
            ("<think>so", "reasoning"),
            ("</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>", "tool_call/search"),
            ("{}<｜tool▁call▁end｜>", "text"),
            ("<｜tool▁call▁begin｜>edit<｜tool▁sep｜>{}", "tool_call/edit"),
            ("<｜tool▁calls▁end｜>", "text"),
        ],
    ),
    "deepseek, V3.2": (
        DEEPSEEK,
        [
            ('so</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="search">', "tool_call/search"),
            ('\n<｜DSML｜parameter name="q" string="true">x</｜DSML｜parameter>\n</｜DSML｜invoke>\n', "text"),
            ("</｜DSML｜function_calls>", "text"),
        ],
    ),
    "react": (
        REACT,
        [
            ("Thought: I need it. Action: no", "reasoning"),
            ("\nAction: search\n", "tool_call/search"),
            ("Action Input: ```x", "tool_call/search/code"),
            ("```\nObservation: 3", "observation"),
            ("\nThought:", "reasoning"),
            (" so\nFinal Answer:", "text"),
            (" 4", "text"),
        ],
    ),
    "react, numbered": (
        REACT,
        [
            ("Thought 1: x\nAction 1: Search[", "tool_call/Search"),
            ("entity]\nObservation 1: y\nThought 12: z", "reasoning"),
            ("\nAction 12: Finish[", "tool_call/Finish"),
        ],
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_an_output_of_the_family_has_its_block_paths(name: str) -> None:
    grammar, stretches = OUTPUTS[name]
    output = Output(grammar)

    assert stretches == [(text, output.write_bytes(text.encode())) for text, _ in stretches]


def pieces(grammar: Grammar) -> list[bytes]:
    markers = {mark for rule in grammar.rules for mark in (*rule.starts, *rule.ends, *rule.name_marks) if mark}
    halves = {half for mark in markers for half in (mark[: len(mark) // 2], mark[len(mark) // 2 :])}
    return sorted({*markers, *halves, *MORE_PIECES} - {b""})


@st.composite
def texts(draw: st.DrawFn) -> tuple[Grammar, list[bytes]]:
    grammar = draw(st.sampled_from(list(PRESETS.values())))
    return grammar, draw(st.lists(st.sampled_from(pieces(grammar)), max_size=25))


MARKERS = st.sampled_from([b"(", b")", b"((", b"|", b"\n", b"\n(", b"|)", b"x"])
KINDS = st.sampled_from(["a", "tool_call", "text"])


@st.composite
def grammars(draw: st.DrawFn) -> Grammar:
    drawn = draw(
        st.lists(
            st.builds(
                BlockRule,
                KINDS,
                st.lists(MARKERS, min_size=1, max_size=2, unique=True).map(tuple),
                st.lists(MARKERS, max_size=2).map(tuple),
                st.lists(KINDS, min_size=1, max_size=3).map(tuple),
                st.sampled_from(["anywhere", "line", "output"]),
                st.lists(MARKERS | st.just(b""), max_size=2).map(tuple),
            ),
            max_size=4,
        )
    )
    rules = [replace(rule, end=(), tool_name_after=()) if rule.name == "text" else rule for rule in drawn]
    starts = [start for rule in rules for start in rule.starts]
    kinds = {"text", *(rule.name for rule in rules)}
    assume(len(starts) == len(set(starts)) and all(kinds.issuperset(rule.parents) for rule in rules))
    return Grammar(tuple(rules), (b">",))


@settings(deadline=None)  # engines on a busy machine
@given(
    grammars(),
    st.lists(MARKERS | st.just(b">"), max_size=4).map(b"".join),
    st.lists(MARKERS, max_size=20),
    st.booleans(),
)
def test_any_grammar_follows_the_reference(
    grammar: Grammar, prompt: bytes, tokens: list[bytes], is_structured: bool
) -> None:
    output = Output(grammar, prompt=prompt, is_structured=is_structured)
    reference = ReferenceTracker(grammar, prompt=prompt, is_structured=is_structured)
    expected, actual = [(reference.path, 0)], [(output.path, output.engine.num_recoveries())]
    for token in tokens:
        reference.advance(token)
        expected.append((reference.path, reference.num_recoveries))
        actual.append((output.write_bytes(token), output.engine.num_recoveries()))

    assert expected == actual


@settings(deadline=None)
@given(texts())
@example((CHAT, [b"<tool_call>", b"functions.", b"<function=", b"search", b">"]))
@example((HARMONY, [b" to=", b"functions.", b"search", b"<"]))
@example((REACT, [b"\nThought:", b"```", b"\nAction:", b"```", b"\nAction:", b" ", b"search", b"\n"]))
def test_every_block_path_and_recovery_of_a_preset_equals_the_reference(text: tuple[Grammar, list[bytes]]) -> None:
    grammar, tokens = text
    output = Output(grammar, vocabulary=sorted({*tokens, b"-"}))
    reference = ReferenceTracker(grammar)
    expected, actual = [(reference.path, 0)], [(output.path, output.engine.num_recoveries())]
    for token in tokens:
        reference.advance(token)
        expected.append((reference.path, reference.num_recoveries))
        actual.append((output.write(token), output.engine.num_recoveries()))

    assert expected == actual


@settings(deadline=None)
@given(texts(), st.lists(st.integers(0, 30), max_size=60))
def test_no_cut_into_tokens_changes_a_block_path(text: tuple[Grammar, list[bytes]], cuts: list[int]) -> None:
    grammar, tokens = text
    whole, at = b"".join(tokens), np.cumsum([0, *cuts]).tolist()
    other_tokens = [whole[begin:end] for begin, end in zip(at, [*at[1:], None], strict=True)]

    paths_after = [
        Output(grammar, vocabulary=sorted({*split, b"-"})).write(*split) for split in (tokens, other_tokens, [whole])
    ]

    assert [paths_after[0]] * 3 == paths_after


@settings(deadline=None)
@given(texts(), texts(), st.booleans(), st.sampled_from(["", "search"]), st.booleans())
@example((CHAT, [b"<think>"]), (CHAT, []), True, "", True)
@example((CHAT, []), (CHAT, [b"<think>", b"</think>", b"```", b"```", b"<tool_call>", b"</tool_call>"]), True, "", True)
def test_every_start_equals_the_reference(
    start: tuple[Grammar, list[bytes]],
    text: tuple[Grammar, list[bytes]],
    is_structured: bool,
    tool: str,
    has_template: bool,
) -> None:
    grammar, prefill = start
    prompt = b"<|im_start|>assistant" * has_template + b"".join(prefill)
    output = Output(grammar, prompt=prompt, is_structured=is_structured, tool=tool)
    reference = ReferenceTracker(grammar, prompt=prompt, is_structured=is_structured, tool=tool)
    expected, actual = [reference.path], [output.path]
    for piece in text[1]:
        reference.advance(piece)
        expected.append(reference.path)
        actual.append(output.write_bytes(piece))

    assert expected == actual
