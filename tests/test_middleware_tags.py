"""Tag schema of the middleware, the merge into `vllm_xargs`, and the hook into the openai client."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from agentspec.middleware import AgentSpecMiddleware, stage, tags
from agentspec.middleware.tags import CallerTags, PayloadTags, fit_name, merge_xargs, payload_tags
from agentspec.sidecar.tags import (
    FLAT_PREFIX,
    MAX_NAME_BYTES,
    MAX_TAGS_BYTES,
    MAX_TOOLS,
    TAGS_KEY,
    Tags,
    TagsError,
    decode_tags,
)

CALLER = CallerTags(workflow_id="wf", stage="writer/draft", agent_id="writer", iteration=2, branch=0)
NAMES = st.text(max_size=400)
IDS = ("query_id", "thread_id", "batch_id", "call_id", "task_id")
LONG = "\x01" * 300
ALL_LONG: Any = dict.fromkeys(("workflow_id", "stage", "agent_id", *IDS), LONG)


def sent_xargs(xargs: Any, caller: CallerTags, payload: PayloadTags) -> dict[str, Any]:
    return merge_xargs(xargs, caller, payload).xargs


def tool(name: str, description: str = "", **properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def json_schema(name: str, **properties: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {key: {"type": kind} for key, kind in properties.items()}}
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def system(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": text}, {"role": "user", "content": "go"}]}


# --- contract with the engine


# What the middleware can send: each field with the largest value that it sends, and the next one, which it never does.
SENT: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("workflow_id", "stage", "agent_id", "block"), ("x" * 256, "x" * 257)),
    **dict.fromkeys(("query_id", "thread_id", "batch_id", "call_id", "task_id"), ("x" * 256, "x" * 257)),
    **dict.fromkeys(("toolset", "schema_id", "prompt_version"), ("x" * 256, "x" * 257)),
    **dict.fromkeys(("iteration", "visit", "call_index", "branch"), (2**53, 2**53 + 1)),
    **dict.fromkeys(("context_chars", "n_messages"), (2**53, 2**53 + 1)),
    "v": (1, 2),
    "tools": (["x"] * 32, ["x"] * 33),
    "grammar": ("x" * 256, "x" * 257),
    "speculate": (False, "no"),
    "max_draft_tokens": (64, 65),
    "history": ("off", "write"),
}


def test_the_table_has_every_field_that_can_be_sent() -> None:
    assert set(SENT) == set(tags.TAG_FIELDS)
    assert set(Tags.model_fields) - set(SENT) == {"namespace"}


@pytest.mark.parametrize("name", sorted(SENT))
def test_a_field_has_the_type_and_bound_that_the_engine_knows(name: str) -> None:
    largest, too_large = SENT[name]

    assert getattr(decode_tags({TAGS_KEY: json.dumps({name: largest})}), name) == largest
    with pytest.raises(TagsError, match=name):
        decode_tags({TAGS_KEY: json.dumps({name: too_large})})


@pytest.mark.parametrize("name", sorted({*CallerTags.__slots__, *PayloadTags.__slots__}))
def test_the_largest_value_of_a_field_is_sent_whole(name: str) -> None:
    largest = SENT[name][0]
    if name in CallerTags.__slots__:
        sent = sent_xargs({}, CallerTags(**{name: largest}), PayloadTags())
    else:
        payload: dict[str, Any] = {name: tuple(largest) if name == "tools" else largest}
        sent = sent_xargs({}, CallerTags(), PayloadTags(**payload))

    assert getattr(decode_tags(sent), name) == largest


def test_what_the_application_says_wins_over_what_the_body_says() -> None:
    caller = CallerTags(block="code", prompt_version="v7")
    sent = decode_tags(sent_xargs({}, caller, PayloadTags(block="tool_call", prompt_version="hash", toolset="ts")))

    assert (sent.block, sent.prompt_version, sent.toolset) == ("code", "v7", "ts")


def test_bounds_are_those_of_the_engine() -> None:
    ours = (tags.TAGS_KEY, tags.FLAT_PREFIX, tags.MAX_TAGS_BYTES, tags.MAX_NAME_BYTES, tags.MAX_TOOLS)

    assert ours == (TAGS_KEY, FLAT_PREFIX, MAX_TAGS_BYTES, MAX_NAME_BYTES, MAX_TOOLS)


def test_filled_fields_arrive_in_the_engine_unchanged() -> None:
    caller = CallerTags("wf", "a/b", "role", "q", "th", "ba", "ca", "ta", 1, 2, 3, 4)
    payload = PayloadTags("ts", "Plan:1", "pv", ("one", "two"), 10, 2, "tool_call/one")

    decoded = decode_tags(sent_xargs({}, caller, payload))

    for given_tags in (caller, payload):
        for name in given_tags.__dataclass_fields__:
            sent = getattr(given_tags, name)
            assert sent is None or getattr(decoded, name) == (list(sent) if isinstance(sent, tuple) else sent)


@given(
    st.builds(CallerTags, *[NAMES] * 8, *[st.integers(min_value=-1, max_value=2**60)] * 4),
    st.builds(
        PayloadTags, NAMES, NAMES, NAMES, st.lists(NAMES, max_size=50).map(tuple), st.integers(), st.none(), NAMES
    ),
)
@example(CallerTags(**ALL_LONG), PayloadTags(LONG, tools=(LONG,) * 40, block=LONG))
@example(CallerTags(stage="\ud800"), PayloadTags())
def test_whatever_names_and_counts_are_the_engine_decodes_them(caller: CallerTags, payload: PayloadTags) -> None:
    xargs = sent_xargs({}, caller, payload)

    decode_tags(xargs)
    assert len(xargs[TAGS_KEY]) <= MAX_TAGS_BYTES
    assert xargs[TAGS_KEY].isascii()


def test_absent_tags_have_no_key() -> None:
    sent = json.loads(sent_xargs({}, CallerTags(stage="a", branch=0, task_id=""), PayloadTags())[TAGS_KEY])

    assert sent == {"v": 1, "stage": "a", "branch": 0}


def test_many_long_tool_names_leave_the_tags_within_a_kibibyte() -> None:
    payload = PayloadTags(toolset="abc", tools=tuple(f"{'tool' * 15}_{index}" for index in range(32)))

    text = sent_xargs({}, CALLER, payload)[TAGS_KEY]

    assert len(text) <= tags.AIM_TAGS_BYTES
    assert json.loads(text)["toolset"] == "abc"


def test_a_typical_agent_call_with_twenty_tools_keeps_every_name_within_a_kibibyte() -> None:
    ids: Any = dict.fromkeys(IDS, "01a22eaa-694b-7086-8cc2-560c59452a7f")
    caller = CallerTags(
        "code-review", "reviewer/model", "reviewer", iteration=3, visit=3, call_index=1, branch=7, **ids
    )
    payload = payload_tags({**system("Review."), "tools": [tool(f"tool_{index}", x="string") for index in range(20)]})

    text = sent_xargs({}, caller, payload)[TAGS_KEY]

    assert len(json.loads(text)["tools"]) == 20
    assert len(text) <= tags.AIM_TAGS_BYTES


@given(st.text(alphabet="a\u00e9\u8bbe\U0001f600", min_size=200, max_size=400))
def test_cut_names_fit(name: str) -> None:
    assert len(fit_name(name).encode()) <= MAX_NAME_BYTES


def test_long_names_that_differ_at_the_end_stay_different() -> None:
    assert fit_name("x" * 300 + "a") != fit_name("x" * 300 + "b")


# --- hand-set keys


def test_hand_set_json_wins_over_flat_keys_and_both_over_ours() -> None:
    xargs = {"agentspec": '{"stage":"json"}', "agentspec_stage": "flat", "agentspec_agent_id": "flat"}

    decoded = decode_tags(sent_xargs(xargs, CALLER, PayloadTags()))

    assert (decoded.stage, decoded.agent_id, decoded.workflow_id) == ("json", "flat", "wf")


def test_entries_that_are_not_ours_stay_and_the_users_dict_is_not_changed() -> None:
    xargs = {"mine": [1, 2], "agentspec": '{"speculate":false}'}
    before = dict(xargs)

    merged = sent_xargs(xargs, CALLER, PayloadTags())

    assert xargs == before
    assert merged["mine"] == [1, 2]
    assert not decode_tags(merged).speculate


def test_a_hand_set_inline_grammar_is_kept_whole() -> None:
    grammar = {"blocks": [{"name": "block", "start": "<s>" * 20, "end": "</s>"}] * 12}
    xargs = {"agentspec": json.dumps({"grammar": grammar})}

    decoded = decode_tags(sent_xargs(xargs, CALLER, PayloadTags(tools=("a", "b"))))

    assert decoded.grammar == grammar
    assert decoded.tools == ["a", "b"]


@pytest.mark.parametrize("text", ["not json", "[1]", json.dumps({"grammar": "x" * 4200}), 7, {"stage": "x"}])
def test_hand_set_json_that_cannot_be_merged_is_left_to_the_server(text: object) -> None:
    xargs = {"agentspec": text}

    assert sent_xargs(xargs, CALLER, PayloadTags()) == xargs


# --- tags of a request body


@pytest.mark.parametrize(
    ("body", "block"),
    [
        (
            {"tools": [tool("find")], "tool_choice": {"type": "function", "function": {"name": "find"}}},
            "tool_call/find",
        ),
        ({"tools": [tool("find")], "tool_choice": {"type": "function", "name": "find"}}, "tool_call/find"),
        ({"tools": [tool("find")], "tool_choice": "required"}, "tool_call"),
        ({"tools": [tool("find")], "tool_choice": "any"}, "tool_call"),
        ({"response_format": json_schema("Plan", n="integer")}, "tool_call/Plan"),
        ({"text": {"format": {"type": "json_schema", "name": "Plan", "schema": {}}}}, "tool_call/Plan"),
        ({"tools": [tool("find")], "tool_choice": "auto"}, None),
        ({"tools": [tool("find")]}, None),
        ({"response_format": {"type": "json_object"}}, None),
        ({"structured_outputs": {"regex": "a+"}}, None),
        ({}, None),
    ],
)
def test_start_block_is_known_where_the_request_forces_one(body: dict[str, Any], block: str | None) -> None:
    assert payload_tags({**system("s"), **body}).block == block


def test_toolset_ignores_order_and_descriptions() -> None:
    one = payload_tags({"tools": [tool("a", "first", x="string"), tool("b")]})
    other = payload_tags({"tools": [tool("b"), tool("a", "rewritten", x="string")]})

    assert one.tools == ("a", "b")
    assert one.toolset == other.toolset


def test_toolset_changes_with_a_parameter() -> None:
    one, other = (payload_tags({"tools": [tool("a", x=kind)]}).toolset for kind in ("string", "integer"))

    assert one != other


def test_tools_that_are_no_plain_dicts_have_the_same_hash() -> None:
    class Special(dict[str, Any]):
        pass

    assert payload_tags({"tools": [Special(tool("a"))]}).toolset == payload_tags({"tools": [tool("a")]}).toolset


def test_at_most_32_tool_names_are_sent() -> None:
    payload = payload_tags({"tools": [tool(f"t{index}") for index in range(40)]})

    assert len(json.loads(sent_xargs({}, CALLER, payload)[TAGS_KEY])["tools"]) == MAX_TOOLS


def test_schema_id_names_the_schema_and_changes_with_it() -> None:
    one, other = (payload_tags({"response_format": json_schema("Plan", n=kind)}) for kind in ("integer", "string"))

    assert one.schema_id is not None
    assert one.schema_id.startswith("Plan:")
    assert one.schema_id != other.schema_id


def test_a_forced_tool_is_the_output_schema() -> None:
    forced = {"tools": [tool("a"), tool("find", q="string")], "tool_choice": {"function": {"name": "find"}}}

    assert str(payload_tags(forced).schema_id).startswith("find:")


def test_prompt_version_outlives_dates_ids_and_urls() -> None:
    one = payload_tags(system("Today is 2026-11-30. Ticket 17 at https://x.test/a"))
    other = payload_tags(system("Today is 2027-01-02. Ticket 99 at https://y.test/b"))

    assert one.prompt_version == other.prompt_version


def test_prompt_version_changes_with_the_instructions() -> None:
    assert payload_tags(system("Plan.")).prompt_version != payload_tags(system("Act.")).prompt_version


@pytest.mark.parametrize(
    "body", [{"messages": [{"role": "user", "content": "Plan this"}]}, {"prompt": "Plan"}, {"prompt": ["Plan"]}]
)
def test_a_prompt_without_system_text_is_known_by_its_head(body: dict[str, Any]) -> None:
    assert str(payload_tags(body).prompt_version).startswith("h")


@pytest.mark.parametrize(
    ("body", "num_chars", "num_messages"),
    [
        (system("12345"), 7, 2),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "123"}, {"type": "image_url"}]}]}, 3, 1),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, 2, 1),
        ({"prompt": "1234"}, 4, None),
        ({"prompt": ["12", "34"]}, 4, None),
        ({"prompt": [1, 2, 3]}, None, None),
        ({"input": "1234"}, 4, None),
        ({"messages": []}, None, None),
    ],
)
def test_context_is_counted_in_characters(
    body: dict[str, Any], num_chars: int | None, num_messages: int | None
) -> None:
    payload = payload_tags(body)

    assert (payload.context_chars, payload.n_messages) == (num_chars, num_messages)


# --- construction


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"workflow_id": 7}, TypeError, "workflow_id: expected a str, got int: 7"),
        ({"workflow_id": ""}, ValueError, "workflow_id: expected a name, got ''"),
        ({"workflow_id": "x" * 257}, ValueError, "x" * 257),
        ({"workflow_id": "\ud800"}, ValueError, "valid UTF-8"),
        ({"agent_id": "设" * 86}, ValueError, "agent_id: expected at most 256 bytes"),
        ({"base_urls": "http://gpu:8000"}, TypeError, "expected a list of URLs, got str: 'http://gpu:8000'"),
        ({"base_urls": []}, ValueError, "no call would carry tags"),
        ({"base_urls": [8000]}, TypeError, "got int: 8000"),
        ({"base_urls": ["gpu:8000"]}, ValueError, "got 'gpu:8000'"),
        ({"base_urls": ["http://gpu:port"]}, ValueError, "got 'http://gpu:port'"),
    ],
)
def test_bad_settings_are_refused_with_their_value(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        AgentSpecMiddleware(**options)

    assert message in str(caught.value)


@pytest.mark.parametrize(("name", "error"), [("", ValueError), ("x" * 257, ValueError), (7, TypeError)])
def test_a_bad_stage_name_is_refused_before_any_call(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="stage"):
        stage(name)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block": ""}, ValueError, "got ''"),
        ({"speculate": 1}, TypeError, "got int: 1"),
        ({"max_draft_tokens": 65}, ValueError, "got 65"),
        ({"max_draft_tokens": "8"}, TypeError, "got str: '8'"),
        ({"history": "write"}, ValueError, "got 'write'"),
    ],
)
def test_a_bad_mark_is_refused_with_its_value(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        stage("a", **options)


@pytest.mark.parametrize("batch_id", ["", 7])
def test_a_bad_batch_id_is_refused(batch_id: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="batch_id"):
        AgentSpecMiddleware().batch(batch_id)
