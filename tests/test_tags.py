"""The tag schema at its bounds: what a client may send, and what is refused with the name of the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentspec.sidecar.tags import MAX_NAME_BYTES, MAX_TAGS_BYTES, MAX_TOOLS, UNTAGGED, Tags, TagsError, decode_tags

NAMES = [name for name, field in Tags.model_fields.items() if field.default == "" and name != "grammar"]
COUNTS = ["iteration", "visit", "call_index", "branch", "context_chars", "n_messages"]


def encoded(**fields: Any) -> dict[str, Any]:
    return {"agentspec": json.dumps(fields)}


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {"agentspec": "{}"}])
def test_call_without_tags_is_untagged(extra_args: dict[str, Any] | None) -> None:
    assert decode_tags(extra_args) == UNTAGGED


def test_every_field_survives_the_wire() -> None:
    tags = Tags(
        workflow_id="w",
        stage="writer/draft",
        agent_id="a",
        query_id="q",
        iteration=3,
        tools=["search", "edit"],
        block="tool_call/search",
        speculate=False,
        max_draft_tokens=0,
        history="off",
        namespace="team",
        grammar={"rules": []},
    )

    assert decode_tags({"agentspec": tags.model_dump_json()}) == tags


def test_flat_keys_are_read() -> None:
    assert decode_tags({"agentspec_stage": "plan", "agentspec_iteration": 2, "stage": "x"}) == Tags(
        stage="plan", iteration=2
    )


def test_json_wins_over_flat_keys() -> None:
    tags = decode_tags({**encoded(stage="json"), "agentspec_stage": "flat", "agentspec_visit": 1})

    assert tags == Tags(stage="json", visit=1)


def test_booleans_arrive_from_vllm_as_numbers() -> None:
    assert decode_tags({"agentspec_speculate": 0}) == Tags(speculate=False)
    assert decode_tags({"agentspec_speculate": 1}) == Tags(speculate=True)


@pytest.mark.parametrize("name", NAMES)
def test_name_of_256_bytes_is_taken_and_of_257_refused(name: str) -> None:
    assert getattr(decode_tags(encoded(**{name: "é" * (MAX_NAME_BYTES // 2)})), name) == "é" * (MAX_NAME_BYTES // 2)
    with pytest.raises(TagsError, match=f"tag {name}: .*256 bytes"):
        decode_tags(encoded(**{name: "é" * (MAX_NAME_BYTES // 2) + "x"}))


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [-1, 2**53 + 1, 1.5, "3", True, None])
def test_count_out_of_bounds_is_refused(name: str, value: object) -> None:
    with pytest.raises(TagsError, match=f"tag {name}: "):
        decode_tags(encoded(**{name: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("v", 2),
        ("max_draft_tokens", 65),
        ("max_draft_tokens", -1),
        ("history", "write"),
        ("speculate", 2),
        ("tools", "search"),
        ("tools", ["x"] * (MAX_TOOLS + 1)),
        ("stage", 7),
        ("grammar", 7),
        ("color", "red"),
    ],
)
def test_wrong_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(TagsError, match=f"tag {field}"):
        decode_tags(encoded(**{field: value}))


def test_tags_of_4096_bytes_are_taken_and_of_4097_refused() -> None:
    text = json.dumps({"tools": ["x" * 200] * 20})
    fitting = text + " " * (MAX_TAGS_BYTES - len(text))

    assert len(decode_tags({"agentspec": fitting}).tools) == 20
    with pytest.raises(TagsError, match="longer than 4096 bytes"):
        decode_tags({"agentspec": fitting + " "})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"x"', "[" * 4000, "\ud800"])
def test_text_that_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(TagsError, match="tag agentspec: "):
        decode_tags({"agentspec": text})


@pytest.mark.parametrize("value", [1, 1.5, ["{}"], {"stage": "x"}, b"{}"])
def test_value_that_is_no_string_is_refused(value: object) -> None:
    with pytest.raises(TagsError, match="expected a JSON string"):
        decode_tags({"agentspec": value})


def test_message_holds_no_text_of_the_caller() -> None:
    with pytest.raises(TagsError) as caught:
        decode_tags(encoded(stage=["my secret prompt"]))

    assert "secret" not in str(caught.value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=8), values, max_size=4),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*Tags.model_fields, "color"]), JSON_VALUES, max_size=6))
def test_any_json_gives_tags_or_a_tags_error(fields: dict[str, Any]) -> None:
    try:
        tags = decode_tags(encoded(**fields))
    except TagsError as error:
        assert str(error).startswith("tag ")  # noqa: PT017  # either outcome is right
    else:
        assert isinstance(tags, Tags)


@given(st.text(max_size=200))
def test_any_text_gives_tags_or_a_tags_error(text: str) -> None:
    try:
        decode_tags({"agentspec": text})
    except TagsError as error:
        assert str(error).startswith("tag ")  # noqa: PT017  # either outcome is right
