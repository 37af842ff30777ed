"""Reading traces: trace files, users' own logs, what is broken in them, and their tokens."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.trace_lab import byte_tokenizer, corpus_of, trace_line, write_lines, write_tokenizer

from agentspec.benchmarks.blocks import block_starts
from agentspec.benchmarks.corpus import read_corpus
from agentspec.benchmarks.tokenizer import QWEN3, Tokenizer, TokenizerError, ensure_packaged_tokenizer
from agentspec.sidecar.traces import Message, TraceFile, find_traces, read_trace


def read_lines(folder: Path, lines: list[dict[str, Any] | str], name: str = "t.jsonl") -> TraceFile:
    return read_trace(write_lines(folder / name, lines))


def test_prompt_is_built_from_earlier_steps_and_shared_texts(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [
        trace_line("r", 0, "one", prompt=[{"role": "system", "ref": "rules"}, {"role": "user", "content": "go"}]),
        trace_line("r", 1, "two", prompt_base=0, prompt_keep=1, prompt=[{"role": "assistant", "output_of": 0}]),
    ]
    (tmp_path / "t.refs.json.gz").write_bytes(gzip.compress(json.dumps({"rules": "be brief"}).encode()))

    found = read_lines(tmp_path, lines, "t.jsonl.gz")

    assert [] == found.problems
    assert (Message("system", "be brief"), Message("assistant", "one")) == found.calls[1].prompt


def test_each_answer_of_a_conversation_is_a_call(tmp_path: Path) -> None:
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": f"{role} {index}"} for index, role in enumerate(roles)]

    found = read_lines(tmp_path, [{"messages": messages}], "support.jsonl")

    assert [(2, "assistant 2"), (4, "assistant 4")] == [(len(call.prompt), call.output) for call in found.calls]
    assert {("support", "support", "support:1")} == {(c.workload, c.workflow, c.run_id) for c in found.calls}


@pytest.mark.parametrize(
    "answer",
    [
        {"response": {"choices": [{"message": {"role": "assistant", "content": "yes"}}]}},
        {"response": {"body": {"choices": [{"message": {"role": "assistant", "content": "yes"}}]}}},
        {"choices": [{"message": {"content": "yes"}}]},
        {"response": {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}},
        {"output": "yes"},
    ],
)
def test_logged_request_is_one_call_with_the_whole_prompt(tmp_path: Path, answer: dict[str, Any]) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]

    found = read_lines(tmp_path, [{"request": {"messages": messages}, "thread_id": "7", "stage": "s"} | answer])

    assert [("yes", 3, "7", "s")] == [(c.output, len(c.prompt), c.run_id, c.node) for c in found.calls]


def test_tool_calls_are_written_as_the_model_writes_them(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}

    found = read_lines(tmp_path, [{"messages": [{"role": "user", "content": "q"}, answer]}])

    assert '<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>' == found.calls[0].output


def test_broken_line_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    found = read_lines(tmp_path, [trace_line("a", 0, "x"), '{"run_id": ', trace_line("b", 0, "y")])

    assert ["x", "y"] == [call.output for call in found.calls]
    assert [f"{tmp_path}/t.jsonl:2: broken line"] == [
        str(problem)[: len(str(tmp_path)) + 23] for problem in found.problems
    ]


def test_line_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'{"messages": "\xff"}\n' + json.dumps(trace_line("a", 0, "x")).encode())

    found = read_trace(path)

    assert ([1], 1) == ([problem.line for problem in found.problems], len(found.calls))


def test_cut_off_archive_keeps_what_was_read(tmp_path: Path) -> None:
    lines = [trace_line(f"r{index}", 0, f"{index:x}" * 50) for index in range(2000)]
    path = write_lines(tmp_path / "t.jsonl.gz", lines)
    path.write_bytes(path.read_bytes()[:-200])

    found = read_trace(path)

    assert 1 == len(found.problems)
    assert found.problems[0].line == len(found.calls) + 1 > 1


def test_unknown_schema_names_the_fields_that_came(tmp_path: Path) -> None:
    found = read_lines(tmp_path, [{"speaker": "me", "words": []}])

    assert ["unknown schema: expected a trace line or `messages`, got the fields speaker, words"] == [
        problem.reason for problem in found.problems
    ]


def test_run_ends_at_a_missing_reference_and_others_go_on(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [
        trace_line("a", 0, "x"),
        trace_line("a", 1, "y", prompt=[{"role": "user", "ref": "gone"}]),
        trace_line("a", 2, "z", prompt_base=1, prompt_keep=1),
        trace_line("b", 0, "w"),
    ]

    found = read_lines(tmp_path, lines)

    assert ["x", "w"] == [call.output for call in found.calls]
    assert [0, 2] == [problem.line for problem in found.problems]  # no companion file, and the line that needs it


def test_prompts_without_outputs_are_counted_and_no_problem(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [
        {"question_id": 1, "turns": ["a", "b"]},
        {"messages": [{"role": "user", "content": "a"}]},
    ]

    found = read_lines(tmp_path, lines)

    assert ([], [], 2) == (found.calls, found.problems, found.num_prompts)


def test_name_that_is_too_long_for_a_tag_is_a_problem(tmp_path: Path) -> None:
    found = read_lines(tmp_path, [trace_line("a", 0, "x", workflow="w" * 257)])

    assert ["workflow: longer than 256 bytes"] == [problem.reason for problem in found.problems]


def test_empty_file_is_a_problem(tmp_path: Path) -> None:
    assert 1 == len(read_lines(tmp_path, []).problems)


def test_folder_is_read_by_suffix_and_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz", "a.refs.json.gz", "notes.txt"):
        (tmp_path / name).touch()

    assert ["a.jsonl.gz", "b.jsonl"] == [path.name for path in find_traces(tmp_path)]


values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["role", "content", "ref", "output_of", "tool_calls", "function", "message"]), inner
        )
    ),
    max_leaves=8,
)
names = [
    "run_id",
    "step",
    "prompt",
    "prompt_base",
    "prompt_keep",
    "output",
    "messages",
    "request",
    "response",
    "choices",
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.sampled_from(names), values), max_size=4))
def test_no_line_makes_the_reader_raise(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    found = read_lines(tmp_path, [*lines, trace_line("whole", 0, "x")])

    assert "x" == found.calls[-1].output


# --- blocks ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a<think>b</think>c", [(0, "prose"), (8, "think"), (17, "prose")]),
        ("```py\nx```", [(0, "prose"), (3, "code"), (10, "prose")]),
        ("```py\nx", [(0, "prose"), (3, "code")]),
        ('{\n "a": 1\n}\nb', [(0, "prose"), (1, "json"), (11, "prose")]),
        ("{ not closed\n }", [(0, "prose")]),
        ("a {\n}", [(0, "prose")]),
    ],
)
def test_block_begins_after_its_marker_and_ends_with_it(text: str, expected: list[tuple[int, str]]) -> None:
    assert expected == block_starts(text)


def test_tool_block_is_refined_by_the_name_once_it_is_out() -> None:
    text = '<tool_call>\n{"name": "search", "arguments": {"name": "x"}}\n</tool_call>'

    assert ["prose", "tool_call", "tool_call/search", "prose"] == [label for _, label in block_starts(text)]
    assert '<tool_call>\n{"name": "search"' == text[: block_starts(text)[2][0]]


# --- tokens ---


def test_output_ends_with_the_end_token_and_the_prompt_with_the_answers_header(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [trace_line("a", 0, "hi", prompt=[{"role": "user", "content": "yo"}])])
    vocabulary = byte_tokenizer(tmp_path).vocabulary()

    call = corpus.calls[0]

    assert b"hi<|im_end|>" == b"".join(vocabulary[token] for token in call.output)
    assert b"<|im_start|>user\nyo<|im_end|>\n<|im_start|>assistant\n" == b"".join(
        vocabulary[token] for token in call.prompt_tokens(1000)
    )
    assert call.prompt_tokens(1000)[-3:].tolist() == call.prompt_tokens(3).tolist()
    assert [] == call.prompt_tokens(0).tolist()


def test_tokens_carry_the_block_in_which_they_stand(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [trace_line("a", 0, "é<think>b</think>")])

    call = corpus.calls[0]
    labels = [corpus.block_names[block] for block in call.blocks]

    assert ["prose"] * 9 + ["think"] * 10 == labels  # é is two tokens; the end token starts no block of its own
    assert [0, 9] == np.flatnonzero(call.is_block_start).tolist()


def test_cached_tokens_are_those_of_the_first_reading(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [trace_line("a", 0, "<think>x"), "broken", trace_line("b", 0, "y")]
    first = corpus_of(tmp_path, lines)
    assert 1 == len(list((tmp_path / "cache").iterdir()))

    second = corpus_of(tmp_path, lines)

    assert first.problems == second.problems
    assert first.block_names == second.block_names
    assert [call.output.tolist() for call in first.calls] == [call.output.tolist() for call in second.calls]


def test_cache_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    first = corpus_of(tmp_path, [trace_line("a", 0, "x")])
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(path.read_bytes()[:100])

    assert first.calls[0].output.tolist() == corpus_of(tmp_path, [trace_line("a", 0, "x")]).calls[0].output.tolist()


def test_tokenizer_that_loses_text_is_named_with_file_and_line(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [trace_line("a", 0, "fine"), trace_line("b", 0, "Lost")], is_lossy=True)

    assert ["a"] == [call.run_id for call in corpus.calls]
    assert [(f"{tmp_path}/trace.jsonl", 2)] == [(problem.path, problem.line) for problem in corpus.problems]
    assert "does not give the output back: expected 'Lost' at character 0, got 'lost'" in corpus.problems[0].reason


def test_prompt_files_are_listed(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "q.jsonl", [{"turns": ["a"]}])

    corpus = read_corpus([path], byte_tokenizer(tmp_path), tmp_path / "cache")

    assert ((str(path), 1),) == corpus.prompt_files


def test_vocabulary_of_a_tokenizer_without_chat_markers_has_no_end_token(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [trace_line("a", 0, "hi")], special=())

    assert 2 == len(corpus.calls[0].output)


def test_call_without_any_token_is_left_out(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, [trace_line("a", 0, ""), trace_line("b", 0, "x")], special=())

    assert (["b"], ()) == ([call.run_id for call in corpus.calls], corpus.problems)


def test_file_that_is_no_tokenizer_is_named_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"version": ')

    with pytest.raises(TokenizerError, match=rf"{path}: not a tokenizer.json: .*line 1 column 12"):
        Tokenizer(path)


def test_missing_npm_is_named_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)

    with pytest.raises(TokenizerError, match="--tokenizer FILE"):
        ensure_packaged_tokenizer(QWEN3, tmp_path)


def test_cached_tokenizer_with_another_digest_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = tmp_path / QWEN3.sha256 / "tokenizer.json"
    cached.parent.mkdir()
    write_tokenizer(cached)
    monkeypatch.setattr(shutil, "which", lambda _name: None)

    with pytest.raises(TokenizerError, match="npm"):
        ensure_packaged_tokenizer(QWEN3, tmp_path)
