"""Where a block path starts, how a tool's name refines it, and what happens when markers do not fit."""

from __future__ import annotations

import numpy as np
import pytest
from tests.tracked_output import Output

from agentspec.sidecar.engine import Engine, FinishReason, Sampling
from agentspec.sidecar.grammars import CHAT, DEEPSEEK, HARMONY, LLAMA, MISTRAL, REACT, BlockRule, Grammar
from agentspec.sidecar.tags import Tags


@pytest.mark.parametrize(
    ("grammar", "prompt", "path"),
    [
        (CHAT, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "text"),
        (CHAT, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n", "reasoning"),
        (CHAT, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "text"),
        (CHAT, "<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", "text"),
        (CHAT, "<|im_start|>user\n```py\n<|im_end|>\n<|im_start|>assistant\n", "text"),
        (CHAT, "<|im_start|>assistant\nHere:\n```python\ndef f", "code"),
        (CHAT, "<|im_start|>assistant\n```\nx\n```\n", "text"),
        (CHAT, '<|im_start|>assistant\n<tool_call>\n{"name": "search", "arguments": {', "tool_call/search"),
        (CHAT, "some template of its own: <think>\n", "reasoning"),
        (CHAT, "a document ends with a fence\n```\n", "text"),
        (CHAT, "", "text"),
        (DEEPSEEK, "<｜User｜>Hi<｜Assistant｜><think>", "reasoning"),
        (DEEPSEEK, "<｜User｜>Hi<｜Assistant｜><think></think>", "text"),
        (LLAMA, "<|start_header_id|>assistant<|end_header_id|>\n\n", "text"),
        (MISTRAL, "[INST]Hi[/INST]", "text"),
        (HARMONY, "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>analysis<|message|>", "reasoning"),
        (REACT, "Question: x\nThought 1:", "reasoning"),
        (REACT, "Question: x\nThought: y\nAction: ", "tool_call"),
        (REACT, "<|im_start|>assistant\nThought: so", "reasoning"),
        (REACT, "Question: x\n", "text"),
    ],
)
def test_the_first_block_is_what_the_prompt_ends_in(grammar: Grammar, prompt: str, path: str) -> None:
    assert path == Output(grammar, prompt=prompt.encode()).path


def test_a_marker_may_begin_in_the_prompt_and_end_in_the_output() -> None:
    output = Output(CHAT, prompt=b"<|im_start|>assistant\nx<thi")

    assert "reasoning" == output.write_bytes(b"nk>")


def test_a_start_far_before_the_end_of_a_prompt_is_not_read() -> None:
    prompt = b"<|im_start|>assistant\n<think>" + b"x" * 512

    assert "text" == Output(CHAT, prompt=prompt).path


def test_only_the_end_of_a_long_token_of_the_prompt_is_read() -> None:
    prompt = b"<|im_start|>assistant\n<think>" + b"x" * 512
    engine = Engine([prompt], CHAT)

    engine.open(1, np.zeros(1, np.int32), Tags(), Sampling())

    assert "text" == engine.block_path(1)


def test_a_line_starts_after_a_marker_that_ends_one() -> None:
    grammar = Grammar(
        (BlockRule("plan", b"<plan>\n", b"</plan>"), BlockRule("step", b"- ", parents=("plan",), anchor="line"))
    )

    assert "plan/step" == Output(grammar).write_bytes(b"<plan>\n- ")


def test_bare_json_is_an_output_start_after_the_template() -> None:
    prompt = b"<|start_header_id|>assistant<|end_header_id|>\n\n"

    assert "tool_call/search" == Output(LLAMA, prompt=prompt).write_bytes(b'{"name": "search"')


def test_the_tag_wins_over_the_prompt() -> None:
    assert "code" == Output(CHAT, prompt=b"<think>", block="code").path


def test_the_prompt_wins_over_the_structured_request() -> None:
    assert "reasoning" == Output(CHAT, prompt=b"<think>", is_structured=True).path


def test_a_forced_tool_names_the_first_block() -> None:
    assert "tool_call/search" == Output(CHAT, tool="search").path


def test_bare_json_goes_on_after_a_block_of_reasoning() -> None:
    output = Output(CHAT, is_structured=True)

    assert ["reasoning", "tool_call", "tool_call/code"] == [
        output.write_bytes(piece) for piece in (b"<think>", b"</think>", b'{"code": "```')
    ]


def test_markers_that_come_although_the_request_is_structured_open_their_own_block() -> None:
    assert "tool_call/search" == Output(CHAT, is_structured=True).write_bytes(b'<tool_call>\n{"name": "search"')


@pytest.mark.parametrize(
    ("call", "path"),
    [
        (b'{"name": "search"', "tool_call/search"),
        (b'{"name": "a.b_c-D9"', "tool_call/a.b_c-D9"),
        (b'{"name": "' + b"n" * 64 + b'"', "tool_call/" + "n" * 64),
        (b'{"name": "' + b"n" * 65 + b'"', "tool_call"),
        (b'{"name": ""', "tool_call"),
        (b'{"name": "search', "tool_call"),
        (b'{"type": "function", "name": "search"', "tool_call/search"),
        (b'{"name": "search", "arguments": {"name": "x"}', "tool_call/search"),
        (b'{"name": "search", "arguments": {"code": "```', "tool_call/search/code"),
        (b" " * 244 + b'"name": "s"', "tool_call/s"),
        (b" " * 245 + b'"name": "s"', "tool_call"),
        (b'{"full_name": "x"', "tool_call"),
    ],
)
def test_the_first_name_of_a_call_refines_its_path(call: bytes, path: str) -> None:
    assert path == Output(CHAT).write_bytes(b"<tool_call>\n" + call)


def test_a_name_outside_a_call_refines_nothing() -> None:
    assert "text" == Output(CHAT).write_bytes(b'{"name": "search"}')


def test_the_next_call_gets_its_own_name() -> None:
    call = b'<tool_call>\n{"name": "%s"}\n</tool_call>'

    assert "tool_call/edit" == Output(CHAT).write_bytes(call % b"search" + b'<tool_call>\n{"name": "edit"')


def test_tool_names_beyond_the_bound_share_one_path() -> None:
    output = Output(CHAT)
    for number in range(512):
        output.write_bytes(b'<tool_call>{"name": "t%d"}</tool_call>' % number)

    assert ["tool_call/other", "text", "code", "text", "tool_call/t7"] == [
        output.write_bytes(piece)
        for piece in (b'<tool_call>{"name": "t512"', b"</tool_call>", b"```", b"```", b'<tool_call>{"name": "t7"')
    ]


def test_the_tools_name_starts_a_block() -> None:
    """What the same tool was called with can then be drafted from the first token after its name."""
    tokens = [b"<tool_call>", b'{"name": "', b"search", b'",', b" arguments"]
    output = Output(CHAT, vocabulary=tokens)
    stats = {}
    for token in tokens:
        output.write(token)
        stats = {row.block: row.num_tokens for row in output.engine.stats()}

    assert {"text": 1, "tool_call": 3, "tool_call/search": 1} == stats


NESTED = Grammar(
    (
        BlockRule("plan", b"<plan>", b"</plan>"),
        BlockRule("step", b"- ", parents=("plan",), anchor="line"),
        BlockRule("code", b"```", b"```", ("plan", "step", "text")),
    )
)


@pytest.mark.parametrize(
    ("text", "path", "num_recoveries"),
    [
        (b"<plan>\n- a\n- b", "plan/step", 0),
        (b"<plan>\n- a ```x``` b", "plan/step", 0),
        (b"<plan>\n- a\n- b</plan>", "text", 0),
        (b"<plan>\n- a\n- ```b</plan>", "text", 1),
        (b"</plan>", "text", 1),
        (b"- a", "text", 0),
        (b"<plan>- a", "plan", 0),
        (b"<plan><plan>", "plan", 0),
        (b"</plan>" * 10_000, "text", 10_000),
        (b"\xff\xfe<plan>\xe2\x96\n- \x80", "plan/step", 0),
    ],
)
def test_what_does_not_fit_is_recovered_from_and_counted(text: bytes, path: str, num_recoveries: int) -> None:
    output = Output(NESTED)

    assert (path, num_recoveries) == (output.write_bytes(text), output.engine.num_recoveries())


def test_starts_beyond_the_depth_are_counted() -> None:
    output = Output(Grammar((BlockRule("a", b"(", b")", ("text", "a")),)))

    output.write_bytes(b"(" * 10_000)

    assert 10_000 - 16 == output.engine.num_recoveries()


def test_what_came_before_the_output_is_not_counted() -> None:
    outputs = [Output(CHAT, prompt=b"<|im_start|>assistant\n</think>"), Output(CHAT, block="reasoning/" * 20)]

    assert [0, 0] == [output.engine.num_recoveries() for output in outputs]


def test_a_closed_request_keeps_its_count() -> None:
    output = Output(CHAT)
    output.write_bytes(b"</think>")
    output.engine.close(1, FinishReason.STOP, 8, np.empty(0, np.int32))

    assert 1 == output.engine.num_recoveries()
