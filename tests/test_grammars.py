"""Grammars: their form, the presets' choice on real chat templates, and the store of those that requests name."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from tests.tracked_output import Output

from agentspec.sidecar.engine import Engine, Sampling
from agentspec.sidecar.grammar_store import GrammarStore, content_id, parse_grammar, read_grammars
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
    GrammarError,
    choose_grammar,
)
from agentspec.sidecar.tags import Tags

PLAN = {"blocks": [{"name": "plan", "start": "<plan>", "end": "</plan>"}]}


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([BlockRule("", b"<a>", b"</a>")], "block rule '': name must be 1 to 64"),
        ([BlockRule("a/b", b"<a>", b"</a>")], "block rule 'a/b': name must be 1 to 64"),
        ([BlockRule("n" * 65, b"<a>", b"</a>")], "name must be 1 to 64"),
        ([BlockRule("a", ())], "block rule 'a': expected a start marker, got none"),
        ([BlockRule("a", b"", b"</a>")], "block rule 'a': a start or end marker must not be empty"),
        ([BlockRule("a", b"<a>", b"")], "block rule 'a': a start or end marker must not be empty"),
        ([BlockRule("a", b"<a>", (b"</a>", b""))], "block rule 'a': a start or end marker must not be empty"),
        ([BlockRule("text", b"<a>", b"</a>")], "block rule 'text': opens nothing, so it takes no end"),
        ([BlockRule("text", b"<a>", tool_name_after=b"")], "block rule 'text': opens nothing, so it takes no end"),
        ([BlockRule("a", b"<a>", parents=("text", "b"))], "block rule 'a': unknown parent 'b'"),
        (
            [BlockRule("a", b"<a>"), BlockRule("b", (b"<b>", b"<a>"))],
            "block rule 'b': start marker b'<a>' is used twice",
        ),
        ([BlockRule(f"r{i}", b"<%d>" % i) for i in range(61)], "at most 60 rules, got 61"),
        ([BlockRule("a", b"<" * 5000)], "at most 4096 bytes of markers, got 5"),
    ],
)
def test_a_grammar_out_of_form_is_refused_with_rule_and_field(rules: list[BlockRule], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        Grammar(tuple(rules))


def test_an_empty_answer_start_is_refused() -> None:
    with pytest.raises(GrammarError, match="an answer start must not be empty"):
        Grammar((), (b"",))


@pytest.mark.parametrize("name", PRESETS)
def test_a_hundred_of_each_preset_fit_into_the_memory_of_all_grammars(name: str) -> None:
    engine = Engine([b"x"], PRESETS[name])

    assert list(range(1, 100)) == [engine.add_grammar(PRESETS[name]) for _ in range(99)]


# What decides, in the words of the families' templates; the special tokens are theirs.
TEMPLATES = [
    ('{{ \'<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}', CHAT),
    ("{{ '<|start_header_id|>' + role + '<|end_header_id|>' }}{{ '<tool_call>' }}", CHAT),
    ("{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}", LLAMA),
    ("{{ '<|python_tag|>' + call.name + '.call(' }}", LLAMA),
    ("{{ '[TOOL_CALLS]' + call.name + '[ARGS]' }}", MISTRAL),
    ("{{ '<|start|>assistant<|channel|>analysis<|message|>' + thinking }}", HARMONY),
    ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.type + '<｜tool▁sep｜>' }}", DEEPSEEK),
    ("{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'invoke name=\"' }}", DEEPSEEK),
    ("{{ 'Use this form.\\nThought: why\\nAction: tool\\nObservation: result' }}", REACT),
    ("{{ '<|im_start|>' + role + '\\n' + content + '<|im_end|>' }}", CHAT),
    ("", CHAT),
]


@pytest.mark.parametrize(("template", "grammar"), TEMPLATES)
def test_the_template_chooses_the_preset(template: str, grammar: Grammar) -> None:
    assert choose_grammar(template, []) is grammar


@pytest.mark.parametrize(
    ("tokens", "grammar"),
    [
        (["<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"], CHAT),
        (["<|begin_of_text|>", "<|start_header_id|>", "<|python_tag|>", "<|eom_id|>"], LLAMA),
        (["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"], MISTRAL),
        (["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"], HARMONY),
        (["<｜User｜>", "<｜tool▁calls▁begin｜>"], DEEPSEEK),
        (["<s>", "</s>"], CHAT),
        ([], CHAT),
    ],
)
def test_special_tokens_choose_where_there_is_no_template(tokens: list[str], grammar: Grammar) -> None:
    assert choose_grammar(None, tokens) is grammar


def test_the_template_of_a_fine_tuned_model_wins_over_its_base_models_tokens() -> None:
    template = "{{ '<|im_start|>assistant\\n' }}"

    assert choose_grammar(template, ["<|start_header_id|>", "<|python_tag|>"]) is CHAT


SEARCH_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}


def written(form: dict[str, Any]) -> Iterator[str]:
    """One text that a structural tag of xgrammar allows, in pieces."""
    match form["type"]:
        case "const_string":
            yield form["value"]
        case "any_text":
            yield "so"
        case "json_schema":
            yield '{"q": "x"}'
        case "regex":
            yield "0"
        case "sequence":
            for element in form["elements"]:
                yield from written(element)
        case "triggered_tags":
            yield from written(form["tags"][0])
        case "tags_with_separator":
            for tag in form["tags"]:
                yield from written(tag)
                yield form["separator"]
        case "tag":
            yield form["begin"]
            yield from written(form["content"])
            yield form["end"] if isinstance(form["end"], str) else form["end"][0]
        case other:
            raise AssertionError(f"unknown form {other}")


@pytest.mark.parametrize(
    ("family", "grammar"),
    [
        ("qwen_3", CHAT),
        ("qwen_3_coder", CHAT),
        ("glm_4_7", CHAT),
        ("minimax", CHAT),
        ("kimi", CHAT),
        ("llama", LLAMA),
        ("harmony", HARMONY),
        ("deepseek_r1", DEEPSEEK),
        ("deepseek_v3_1", DEEPSEEK),
        ("deepseek_v3_2", DEEPSEEK),
        ("deepseek_v4", DEEPSEEK),
    ],
)
def test_what_structured_decoding_makes_a_family_write_has_reasoning_and_named_calls(
    family: str, grammar: Grammar
) -> None:
    """xgrammar, which comes with vLLM, holds each family's real form of a tool call."""
    builtin = pytest.importorskip("xgrammar.builtin_structural_tag")
    tag = builtin.get_model_structural_tag(family, tools=[SEARCH_TOOL], tool_choice="required", reasoning="enabled")
    text = list(written(tag.model_dump()["format"]))
    output = Output(grammar, prompt=b"" if grammar in (LLAMA, HARMONY) else b"<think>\n")
    seen = {output.path, *(output.write_bytes(piece.encode()) for piece in text)}

    expected = {"tool_call/search", "text"} if grammar is LLAMA else {"reasoning", "tool_call/search", "text"}
    assert expected == {path.removesuffix("/code") for path in seen if path != "tool_call"} | {"text"}


@pytest.mark.parametrize(
    ("version", "thinks"), [("v2", False), ("v3", False), ("v7", False), ("v11", False), ("v13", True)]
)
def test_mistrals_own_templates_choose_and_follow_the_preset(version: str, thinks: bool) -> None:
    templates = pytest.importorskip("mistral_common.integrations.chat_templates.chat_templates")
    jinja2 = pytest.importorskip("jinja2")
    template = templates.generate_chat_template(
        spm=False,
        tokenizer_version=templates.TokenizerVersion(version),
        image_support=False,
        audio_support=False,
        thinking_support=thinks,
        default_system_prompt=None,
        plain_thinking_support=False,
        use_special_token_variables=False,
        model_settings_fields=None,
        reasoning_effort_values=None,
        reasoning_effort_default=None,
    )
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "search", "arguments": {"q": "needle"}}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    render = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(template).render  # text
    prompt = render(messages=messages, tools=[SEARCH_TOOL])
    whole = render(
        messages=[*messages, {"role": "assistant", "content": "", "tool_calls": [call]}], tools=[SEARCH_TOOL]
    )
    answer = whole.removeprefix(prompt)
    output = Output(MISTRAL, prompt=prompt.encode())

    assert choose_grammar(template, []) is MISTRAL
    assert whole != answer
    assert ["text", "tool_call/search"] == [output.path, output.write_bytes(answer[: answer.index("needle")].encode())]


@pytest.mark.parametrize("version", ["v32", "v4"])
def test_deepseeks_own_encoding_starts_and_calls_as_the_preset_says(version: str) -> None:
    encoding = _vllm_module(f"tokenizers/deepseek_{version}_encoding.py")
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": '{"q": "needle"}'}}
    messages = [
        {"role": "system", "content": "Help.", "tools": [SEARCH_TOOL]},
        {"role": "user", "content": "Hi"},
    ]
    answer = {"role": "assistant", "content": "", "reasoning": "so", "reasoning_content": "so", "tool_calls": [call]}
    prompt = encoding.encode_messages(messages, "thinking")
    whole = encoding.encode_messages([*messages, answer], "thinking")
    output = Output(DEEPSEEK, prompt=prompt.encode())
    written_answer = whole.removeprefix(prompt)

    assert ["reasoning", "tool_call/search"] == [
        output.path,
        output.write_bytes(written_answer[: written_answer.index("needle")].encode()),
    ]


def _vllm_module(path: str) -> ModuleType:
    """A file of vLLM that stands alone, without the minutes of importing the rest."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    file = Path(spec.origin).parent / path
    if not file.exists():
        pytest.skip(f"this vLLM has no {path}")
    module_spec = importlib.util.spec_from_file_location(file.stem, file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def test_a_grammar_is_read_from_its_json_form() -> None:
    source = {
        "blocks": [
            {"name": "plan", "start": ["<plan>", "<steps>"], "end": None, "anchor": "line"},
            {"name": "tool_call", "start": "[", "end": ["]", ")"], "parents": ["plan"], "tool_name_after": ["", "!"]},
        ],
        "answer_starts": ["A:"],
    }

    assert parse_grammar(source) == Grammar(
        (
            BlockRule("plan", (b"<plan>", b"<steps>"), anchor="line"),
            BlockRule("tool_call", b"[", (b"]", b")"), ("plan",), tool_name_after=(b"", b"!")),
        ),
        (b"A:",),
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "grammar blocks: Field required"),
        ({"blocks": 3}, "grammar blocks: .*got 3"),
        ({"blocks": [], "extra": 1}, "grammar extra: Extra inputs are not permitted, got 1"),
        ({"blocks": [{"name": "a", "start": "<"}]}, "grammar blocks.0.end: Field required"),
        ({"blocks": [{"name": "a", "start": 7, "end": None}]}, r"grammar blocks.0.start.*: .*got 7"),
        ({"blocks": [{"name": "a", "start": "<", "end": None, "anchor": "no"}]}, "grammar blocks.0.anchor: .*got 'no'"),
        ({"blocks": [{"name": "a", "start": "", "end": None}]}, "block rule 'a': a start or end marker"),
        (
            {"blocks": [{"name": "a", "start": "<", "end": None, "parents": ["b"]}]},
            "block rule 'a': unknown parent 'b'",
        ),
        ({"blocks": [{"name": "a", "start": "\ud800", "end": None}]}, "grammar blocks.0.start"),
    ],
)
def test_a_json_form_that_is_no_grammar_is_refused_with_field_and_value(source: dict[str, Any], message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        parse_grammar(source)


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(GrammarError) as error:
        parse_grammar({"blocks": "x" * 10_000})

    assert len(str(error.value)) < 200


def test_a_folder_of_grammars_is_read_by_file_name(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "notes.txt").write_text("not a grammar")

    assert {"plan": parse_grammar(PLAN)} == read_grammars(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "bad.json: Expecting"),
        (b"[]", "bad.json: grammar grammar"),
        (b"\xff", "bad.json: "),
        (b"[" * 100_000, "bad.json: larger than 65536 bytes"),
        (b"[" * 60_000, "bad.json: "),
        (b'{"blocks": [{"name": "a/b", "start": "<", "end": null}]}', "bad.json: block rule 'a/b'"),
    ],
)
def test_a_file_that_is_no_grammar_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.json").write_bytes(content)

    with pytest.raises(GrammarError, match=message):
        read_grammars(tmp_path)


class Target:
    """Holds a number of grammars and counts what was built."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.held: dict[int, Grammar] = {}
        self.num_built = 0

    def add_grammar(self, grammar: Grammar) -> int:
        if len(self.held) >= self.room:
            return -1
        self.num_built += 1
        self.held[self.num_built] = grammar
        return self.num_built

    def remove_grammar(self, grammar_id: int) -> None:
        del self.held[grammar_id]


def inline(name: str) -> dict[str, Any]:
    return {"blocks": [{"name": name, "start": f"<{name}>", "end": f"</{name}>"}]}


@pytest.mark.parametrize("tag", ["", {}])
def test_no_grammar_in_the_tag_is_the_engines_own(tag: dict[str, Any] | str) -> None:
    assert 0 == GrammarStore(Target()).find("", tag)


def test_an_inline_grammar_is_built_once_whatever_the_order_of_its_keys() -> None:
    target = Target()
    store = GrammarStore(target)
    reordered = {"blocks": [dict(reversed(PLAN["blocks"][0].items()))]}

    numbers = {store.find("a", grammar) for grammar in (PLAN, reordered, PLAN)}

    assert ({1}, {1: parse_grammar(PLAN)}) == (numbers, target.held)


def test_no_namespace_gets_the_number_of_another() -> None:
    store = GrammarStore(Target())

    assert store.find("a", PLAN) != store.find("b", PLAN)


def test_presets_and_the_servers_own_grammars_are_found_by_id() -> None:
    target = Target()
    store = GrammarStore(target, {"plan": parse_grammar(PLAN)})

    numbers = [store.find(namespace, grammar) for namespace in "ab" for grammar in ("react", "plan")]

    assert ([1, 2, 1, 2], [REACT, parse_grammar(PLAN)]) == (numbers, list(target.held.values()))


def test_the_least_recently_used_grammar_of_a_full_namespace_is_forgotten() -> None:
    target = Target()
    store = GrammarStore(target)
    store.find("other", PLAN)
    first = [store.find("a", inline(f"n{i}")) for i in range(64)]
    store.find("a", inline("n0"))
    store.find("a", inline("n64"))

    assert 65 == len(target.held)
    assert first[1] not in target.held
    assert {1, first[0]} <= target.held.keys()


def test_where_memory_runs_out_the_least_recently_used_namespace_gives() -> None:
    target = Target(room=2)
    store = GrammarStore(target)
    numbers = [store.find(namespace, PLAN) for namespace in "abc"]

    assert numbers[1:] == list(target.held)


def test_a_grammar_without_memory_is_refused() -> None:
    with pytest.raises(GrammarError, match="no memory"):
        GrammarStore(Target(room=0)).find("a", PLAN)


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("nowhere", "unknown id 'nowhere'"),
        ({"blocks": [{"name": "a", "start": "<" * 1024, "end": None}]}, "at most 1024 bytes inline, got 1071"),
        ({"blocks": [{"name": "a", "start": b"<", "end": None}]}, "not JSON"),
        ({"blocks": "no"}, "grammar blocks"),
    ],
)
def test_a_tag_that_names_no_grammar_is_refused(tag: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        GrammarStore(Target()).find("", tag)


def test_a_grammar_nested_too_deeply_is_refused() -> None:
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"blocks": nested}

    with pytest.raises(GrammarError, match="not JSON"):
        content_id(nested)


def test_a_request_follows_the_grammar_of_its_tag() -> None:
    engine = Engine([b"<plan>", b"<think>"], CHAT)
    store = GrammarStore(engine)
    tokens = np.zeros(1, np.int32)
    tags: list[dict[str, Any] | str] = [PLAN, ""]
    for handle, tag in enumerate(tags):
        engine.open(handle, tokens, Tags(), Sampling(), grammar_id=store.find("", tag))

    assert ["plan", "text"] == [engine.block_path(handle) for handle in (0, 1)]


def test_an_open_request_keeps_a_forgotten_grammar() -> None:
    output = Output(CHAT)
    number = output.engine.add_grammar(parse_grammar(PLAN))
    output.engine.open(1, np.empty(0, np.int32), Tags(), Sampling(), grammar_id=number)
    output.engine.remove_grammar(number)

    assert "plan" == output.write_bytes(b"<plan>")


def test_all_grammars_together_are_bounded() -> None:
    engine = Engine([b"x"], CHAT)
    markers = tuple(bytes([32 + i % 90, 33 + i // 90]) + b"abcdefgh" for i in range(250))
    large = Grammar((BlockRule("a", markers),))

    numbers = [engine.add_grammar(large) for _ in range(100)]

    assert 0 < numbers.index(-1) < 100
    engine.remove_grammar(1)
    assert engine.add_grammar(large) > 0


def test_an_unknown_number_is_the_engines_own_grammar() -> None:
    output = Output(CHAT)
    output.engine.open(1, np.empty(0, np.int32), Tags(), Sampling(), grammar_id=99)

    assert "reasoning" == output.write_bytes(b"<think>")
