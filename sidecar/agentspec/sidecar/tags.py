"""What the application says of one LLM call: tag schema version 1, as it arrives in `vllm_xargs`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

TAGS_KEY = "agentspec"
FLAT_PREFIX = "agentspec_"
MAX_TAGS_BYTES = 4096
MAX_NAME_BYTES = 256
MAX_TOOLS = 32


class TagsError(ValueError):
    """The tags of a request are not version 1 of the schema; the message names the field."""


def _at_most_256_bytes(value: str) -> str:
    if len(value.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"longer than {MAX_NAME_BYTES} bytes")
    return value


Name = Annotated[str, AfterValidator(_at_most_256_bytes)]
Count = Annotated[int, Field(ge=0, le=2**53)]
# vLLM turns the booleans of `vllm_xargs` into 0 and 1.
Switch = Annotated[bool, BeforeValidator(lambda value: bool(value) if value in (0, 1) else value)]


class Tags(BaseModel):
    """Tags of one LLM call (design: tag schema v1). Every field is optional; none of them can change the output.

    `workflow_id`, `stage` (a path such as ``writer/draft``) and `block` (block path at the start of the answer) choose
    the history; `namespace` narrows the server's and never widens it. The ids (`query_id`, `thread_id`, `batch_id`,
    `call_id`, `task_id`) name one instance and are never part of a history key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    v: Literal[1] = 1
    workflow_id: Name = ""
    stage: Name = ""
    agent_id: Name = ""
    query_id: Name = ""
    thread_id: Name = ""
    batch_id: Name = ""
    call_id: Name = ""
    task_id: Name = ""
    iteration: Count = 0
    visit: Count = 0
    call_index: Count = 0
    branch: Count = 0
    toolset: Name = ""
    schema_id: Name = ""
    prompt_version: Name = ""
    tools: Annotated[list[Name], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    context_chars: Count = 0
    n_messages: Count = 0
    grammar: dict[str, Any] | Name = ""
    block: Name = ""
    speculate: Switch = True
    max_draft_tokens: Annotated[int, Field(ge=0, le=64)] = 64
    history: Literal["rw", "read", "off"] = "rw"
    namespace: Name = ""


UNTAGGED = Tags()


def decode_tags(extra_args: Mapping[str, Any] | None) -> Tags:
    """Read the tags out of vLLM's `SamplingParams.extra_args`.

    The JSON string under ``agentspec`` wins over flat ``agentspec_<field>`` keys; other keys are not ours.

    Raises:
        TagsError: not JSON, larger than 4 KiB, a field of wrong type or bound, or an unknown field.
    """
    if not extra_args:
        return UNTAGGED
    fields = {key[len(FLAT_PREFIX) :]: value for key, value in extra_args.items() if key.startswith(FLAT_PREFIX)}
    text = extra_args.get(TAGS_KEY)
    if text is not None:
        fields |= _decode_json(text)
    if not fields:
        return UNTAGGED
    try:
        return Tags.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise TagsError(f"tag {'.'.join(map(str, first['loc'])) or 'agentspec'}: {first['msg']}") from None


def _decode_json(text: object) -> dict[str, Any]:
    if not isinstance(text, str):
        raise TagsError(f"tag agentspec: expected a JSON string, got {type(text).__name__}")
    if len(text.encode(errors="surrogatepass")) > MAX_TAGS_BYTES:
        raise TagsError(f"tag agentspec: longer than {MAX_TAGS_BYTES} bytes")
    try:
        fields = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TagsError(f"tag agentspec: not JSON ({type(error).__name__})") from None
    if not isinstance(fields, dict):
        raise TagsError(f"tag agentspec: expected a JSON object, got {type(fields).__name__}")
    return fields
