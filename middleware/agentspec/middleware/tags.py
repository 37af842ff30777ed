"""The tag schema, version 1: what a request body says of its LLM call, bounds, and the JSON that travels."""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from typing import Any

SCHEMA_VERSION = 1
TAGS_KEY = "agentspec"
FLAT_PREFIX = "agentspec_"
MAX_TAGS_BYTES = 4096
AIM_TAGS_BYTES = 1024
MAX_NAME_BYTES = 256
MAX_TOOLS = 32
MAX_COUNT = 2**53
MAX_DRAFT_TOKENS = 64
GROUP_FIELDS = ("workflow_id", "stage", "prompt_version", "toolset")

TagValue = str | int | list[str] | dict[str, Any]


@dataclass(frozen=True, slots=True)
class CallerTags:
    """Who makes the call, as the run knows it; `None` means not known, and the key is left out.

    The first three choose the history on the server; the ids name one instance; the counts say where in its loop; from
    `prompt_version` on it is what the application set by hand, and wins over what the request's body says.
    """

    workflow_id: str | None = None
    stage: str | None = None
    agent_id: str | None = None
    query_id: str | None = None
    thread_id: str | None = None
    batch_id: str | None = None
    call_id: str | None = None
    task_id: str | None = None
    iteration: int | None = None
    visit: int | None = None
    call_index: int | None = None
    branch: int | None = None
    prompt_version: str | None = None
    grammar: dict[str, Any] | str | None = None
    block: str | None = None
    speculate: bool | None = None
    max_draft_tokens: int | None = None
    history: str | None = None


@dataclass(frozen=True, slots=True)
class PayloadTags:
    """What the request body says of itself, in hashes, names and lengths: never its text."""

    toolset: str | None = None
    schema_id: str | None = None
    prompt_version: str | None = None
    tools: tuple[str, ...] | None = None
    context_chars: int | None = None
    n_messages: int | None = None
    block: str | None = None


_CALLER_FIELDS = tuple(field.name for field in fields(CallerTags))
_PAYLOAD_FIELDS = tuple(field.name for field in fields(PayloadTags))
_CALLER_VALUES, _PAYLOAD_VALUES = attrgetter(*_CALLER_FIELDS), attrgetter(*_PAYLOAD_FIELDS)
TAG_FIELDS = tuple(dict.fromkeys(("v", *_CALLER_FIELDS, *_PAYLOAD_FIELDS)))

# What goes first when the tags are too long: what no history key needs.
_SHED_ORDER = (
    *("tools", "call_id", "task_id", "batch_id", "thread_id", "query_id", "prompt_version", "schema_id", "toolset"),
    *("agent_id", "grammar", "block", "stage", "workflow_id"),
)
_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


@dataclass(frozen=True, slots=True)
class MergedTags:
    """The tags of one request.

    Attributes:
        xargs: the whole `vllm_xargs`, the user's own entries included.
        values: the tags as the engine will read them: what was set by hand, else ours.
    """

    xargs: dict[str, Any]
    values: dict[str, Any]

    def group(self) -> str:
        """Hash of workflow, stage, prompt version and tool set: calls with an equal one write alike."""
        named = "\0".join(str(self.values.get(name, "")) for name in GROUP_FIELDS)
        return _digest(named.encode(errors="replace"), 8)


def merge_xargs(xargs: Mapping[str, Any], caller: CallerTags, payload: PayloadTags) -> MergedTags:
    """Add the tags to a request's `vllm_xargs` as one JSON string of at most 4 KiB; what was set by hand wins.

    Args:
        xargs: the user's own entries; not changed. Their JSON under ``agentspec`` wins over their flat
            ``agentspec_<field>`` keys, and both over `caller` and `payload`.
        caller: who calls; what it says wins over `payload`.
        payload: what the body says.

    Returns:
        A new dict with every entry of `xargs`. Equal to it if the JSON set by hand is not a JSON object that
        leaves room: then it is the server that has to answer it.
    """
    ours = _bounded(caller, payload)
    if not xargs:
        return MergedTags({TAGS_KEY: _encode(ours, {})}, ours)
    flat = {key[len(FLAT_PREFIX) :]: value for key, value in xargs.items() if key.startswith(FLAT_PREFIX)}
    kept = _hand_set(xargs.get(TAGS_KEY))
    values = {**ours, **flat, **(kept or {})}
    if kept is None:
        return MergedTags(dict(xargs), values)
    text = _encode({name: value for name, value in ours.items() if name not in kept and name not in flat}, kept)
    return MergedTags(dict(xargs) if len(text) > MAX_TAGS_BYTES else {**xargs, TAGS_KEY: text}, values)


def _hand_set(text: object) -> dict[str, Any] | None:
    """The tags that the user set as JSON; `None` if it is no JSON object."""
    if text is None:
        return {}
    try:
        kept = json.loads(text)  # type: ignore[arg-type]  # whatever the user put there
    except (TypeError, ValueError, RecursionError):
        return None
    return kept if isinstance(kept, dict) else None


def _encode(ours: Mapping[str, TagValue], kept: Mapping[str, Any]) -> str:
    text = _ENCODER.encode({**ours, **kept} if kept else ours)
    return text if len(text) <= AIM_TAGS_BYTES else _encode_shorter(dict(ours), kept, text)


def _encode_shorter(ours: dict[str, TagValue], kept: Mapping[str, Any], text: str) -> str:
    """`text` without what has to go; an inline grammar comes on top of the size that is aimed at."""
    fixed = {**kept, "grammar": ours["grammar"]} if "grammar" in ours else kept
    aim = AIM_TAGS_BYTES + (len(_ENCODER.encode(fixed)) if fixed else 0)
    while len(text) > aim and (tools := ours.get("tools")) and isinstance(tools, list):
        ours["tools"] = tools[: len(tools) // 2]
        text = _ENCODER.encode({**ours, **kept})
    for name in _SHED_ORDER:
        if len(text) <= MAX_TAGS_BYTES:
            break
        ours.pop(name, None)
        text = _ENCODER.encode({**ours, **kept})
    return text


def _bounded(caller: CallerTags, payload: PayloadTags) -> dict[str, TagValue]:
    """Each tag within its bounds, by name; the caller's win."""
    values: dict[str, TagValue] = {"v": SCHEMA_VERSION}
    given = chain(
        zip(_PAYLOAD_FIELDS, _PAYLOAD_VALUES(payload), strict=True),
        zip(_CALLER_FIELDS, _CALLER_VALUES(caller), strict=True),
    )
    for name, value in given:
        if value is None:
            continue
        if isinstance(value, str):
            if value:
                is_short = len(value) <= MAX_NAME_BYTES and value.isascii()
                values[name] = value if is_short else _cut_name(value)
        elif isinstance(value, tuple):
            values[name] = _fit_names(value)
        elif isinstance(value, dict) or 0 <= value <= MAX_COUNT:
            values[name] = value
    return values


def fit_name(name: str) -> str:
    """Cut a name to at most 256 bytes of UTF-8; the cut end becomes a hash, so that long names stay distinct."""
    return name if len(name) <= MAX_NAME_BYTES and name.isascii() else _cut_name(name)


def _cut_name(name: str) -> str:
    encoded = name.encode(errors="replace")
    if len(encoded) > MAX_NAME_BYTES:
        mark = "~" + _digest(encoded, 6)
        return encoded[: MAX_NAME_BYTES - len(mark)].decode(errors="ignore") + mark
    return encoded.decode()


@lru_cache(maxsize=256)
def _fit_names(names: tuple[str, ...]) -> list[str]:
    """At most 32 names that fit; shared, not to be changed."""
    return [fit_name(name) for name in names[:MAX_TOOLS]]


def check_name(field: str, name: object) -> str:
    """Return `name` if it can be sent as tag `field` without being cut.

    Raises:
        TypeError: not a string.
        ValueError: empty, longer than 256 bytes or not encodable as UTF-8; the message holds the value.
    """
    if not isinstance(name, str):
        raise TypeError(f"{field}: expected a str, got {type(name).__name__}: {name!r}")
    if not name:
        raise ValueError(f"{field}: expected a name, got {name!r}")
    if fit_name(name) != name:
        raise ValueError(f"{field}: expected at most {MAX_NAME_BYTES} bytes of valid UTF-8, got {name!r}")
    return name


def payload_tags(body: Mapping[str, Any]) -> PayloadTags:
    """Read the tags that a request body of chat completions, completions or responses holds.

    Args:
        body: the JSON body; not changed.
    """
    messages = body.get("messages") or body.get("input") or body.get("prompt") or None
    tools = body.get("tools")
    toolset, names = _toolset(_snapshot(tools)) if tools else (None, None)
    schema = _output_schema(body)
    return PayloadTags(
        toolset=toolset,
        schema_id=_schema_id(*schema) if schema else None,
        prompt_version=_prompt_version(body.get("instructions"), messages),
        tools=names,
        context_chars=_num_chars(messages),
        n_messages=len(messages) if isinstance(messages, list) and isinstance(messages[0], dict) else None,
        block=_start_block(body, schema[0] if schema else None),
    )


def _digest(text: bytes, num_bytes: int) -> str:
    return blake2b(text, digest_size=num_bytes).hexdigest()


def _snapshot(value: Any) -> bytes:
    """Bytes that say the value: the key under which a canonical hash, 20 times dearer, is kept."""
    try:
        return marshal.dumps(value)
    except ValueError:  # a subclass of dict, a model
        return marshal.dumps(json.loads(json.dumps(value, default=str)))


def _canonical(schema: object) -> bytes:
    return json.dumps(schema, sort_keys=True, separators=(",", ":")).encode()


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    return function if isinstance(function, Mapping) else tool


@lru_cache(maxsize=256)
def _toolset(snapshot: bytes) -> tuple[str, tuple[str, ...]]:
    """Hash of names and parameter schemas in any order (descriptions may change), and the sorted names."""
    functions = [_function(tool) for tool in marshal.loads(snapshot)]  # noqa: S302 - bytes made by _snapshot
    signatures = sorted((_tool_name(function), _canonical(function.get("parameters"))) for function in functions)
    text = b"\0".join(name.encode(errors="replace") + b"\1" + parameters for name, parameters in signatures)
    return _digest(text, 6), tuple(name for name, _ in signatures)


def _tool_name(function: Mapping[str, Any]) -> str:
    return str(function.get("name") or function.get("type") or "?")


def _output_schema(body: Mapping[str, Any]) -> tuple[str, bytes] | None:
    """Name and snapshot of the JSON schema that the answer must follow."""
    text = body.get("text")
    chosen = body.get("response_format") or (text.get("format") if isinstance(text, Mapping) else None)
    if isinstance(chosen, Mapping) and chosen.get("type") == "json_schema":
        spec = chosen.get("json_schema") or chosen
        return str(spec.get("name") or "json_schema"), _snapshot(spec.get("schema"))
    if constraint := body.get("structured_outputs"):
        return "structured_outputs", _snapshot(constraint)
    if forced := _forced_tool(body.get("tool_choice")):
        for function in map(_function, body.get("tools") or ()):
            if function.get("name") == forced:
                return forced, _snapshot(function.get("parameters"))
    return None


@lru_cache(maxsize=256)
def _schema_id(name: str, snapshot: bytes) -> str:
    return f"{name}:{_digest(_canonical(marshal.loads(snapshot)), 4)}"  # noqa: S302 - bytes made by _snapshot


def _forced_tool(choice: object) -> str | None:
    name = _function(choice).get("name") if isinstance(choice, Mapping) else None
    return name if isinstance(name, str) else None


def _start_block(body: Mapping[str, Any], schema_name: str | None) -> str | None:
    """The block that the answer starts in, when the request forces one: then no marker will announce it."""
    choice = body.get("tool_choice")
    if forced := _forced_tool(choice):
        return f"tool_call/{forced}"
    if choice in ("required", "any"):
        return "tool_call"
    return f"tool_call/{schema_name}" if schema_name and schema_name != "structured_outputs" else None


_VOLATILE = re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F-]{27}|https?://\S+|\b\d[\d:.,/TZ+-]*\b|\"[^\"]{24,}\"")


@lru_cache(maxsize=1024)
def _prompt_hash(text: str) -> str:
    """Hash of a prompt's text without the parts that change from call to call (ids, URLs, numbers, long quotes)."""
    return _digest(_VOLATILE.sub("\0", text).encode(errors="replace"), 6)


def _prompt_version(instructions: object, messages: object) -> str | None:
    if isinstance(instructions, str) and instructions:
        return _prompt_hash(instructions[:4096])
    if isinstance(messages, str):
        return "h" + _prompt_hash(messages[:120])
    first = messages[0] if isinstance(messages, list) else None
    if isinstance(first, str):
        return "h" + _prompt_hash(first[:120])
    text = "".join(_texts(first.get("content"))) if isinstance(first, Mapping) else ""
    if not text:
        return None
    if isinstance(first, Mapping) and first.get("role") in ("system", "developer"):
        return _prompt_hash(text[:4096])
    return "h" + _prompt_hash(text[:120])


def _texts(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Sequence):
        for part in content:
            text = part.get("text") if isinstance(part, Mapping) else None
            if isinstance(text, str):
                yield text


def _num_chars(messages: object) -> int | None:
    """Characters of text and tool-call arguments; `None` when the prompt is token ids."""
    if isinstance(messages, str):
        return len(messages)
    if not isinstance(messages, list) or isinstance(messages[0], int | list):
        return None
    num_chars = 0
    for message in messages:
        if isinstance(message, dict):
            content = message.get("content")
            num_chars += len(content) if isinstance(content, str) else sum(map(len, _texts(content)))
            if "tool_calls" in message:
                calls = map(_function, message["tool_calls"] or ())
                num_chars += sum(len(function.get("arguments") or "") for function in calls)
        elif isinstance(message, str):
            num_chars += len(message)
    return num_chars
