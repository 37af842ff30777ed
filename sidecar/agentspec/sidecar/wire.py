"""Messages of the draft contract as values of the engine's seam, and back. Arrays are read in place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from agentspec.draft.v1 import draft_pb2
from agentspec.sidecar.engine import FinishReason, Sampling, StepDrafts, StepRequest, StepTiming, TokenIds
from agentspec.sidecar.refusal import RefusalError, exhausted, invalid
from agentspec.sidecar.tags import MAX_NAME_BYTES, MAX_TAGS_BYTES, TAGS_KEY, Tags, TagsError, decode_tags

HANDLE_BITS = 40
MAX_HANDLE = (1 << HANDLE_BITS) - 1
MAX_ROWS = 4096
MAX_BATCH = 1024
MAX_COUNT = (1 << 31) - 1  # of the engine's 32-bit counts

# Where the engine's own words for an argument differ from the contract's.
_FIELDS = {"tokens": "prompt_token_ids", "tail": "tail_token_ids", "true_length": "num_output_tokens"}

_Scalar = TypeVar("_Scalar", bound=np.generic)


def read_array(raw: bytes, dtype: type[_Scalar], field: str, length: int | None = None) -> NDArray[_Scalar]:
    """Read a packed array.

    Args:
        raw: little-endian.
        dtype: of its entries.
        field: its name, for the message.
        length: entries that are expected; None: any number.

    Raises:
        RefusalError: another length, or a part of an entry.
    """
    size = np.dtype(dtype).itemsize
    if length is not None and len(raw) != length * size:
        raise invalid(field, f"expected {length} entries of {size} bytes, got {len(raw)} bytes")
    if len(raw) % size:
        raise invalid(field, f"expected entries of {size} bytes, got {len(raw)} bytes")
    return np.frombuffer(raw, dtype)


def read_step(step: draft_pb2.Step, first_handle: int, client_id: int) -> StepRequest:
    """Turn a step of one client into a step of the engine.

    Args:
        step: as it came.
        first_handle: what the client's handle 0 is called in the engine.
        client_id: of the client, 1 or more.

    Raises:
        RefusalError: an array has a wrong length, or a value that the engine would not find is out of its bound.
    """
    handles = read_array(step.handles, np.int64, "handles")
    num_rows = len(handles)
    if num_rows > MAX_ROWS:
        raise exhausted("handles", f"expected at most {MAX_ROWS} rows, got {num_rows}")
    if (handles >> HANDLE_BITS).any():
        raise invalid("handles", f"expected 0 to {MAX_HANDLE}, got {handles.min()} to {handles.max()}")
    token_offsets = read_array(step.token_offsets, np.int32, "token_offsets", num_rows + 1)
    num_draft_tokens = read_array(step.num_draft_tokens, np.int32, "num_draft_tokens", num_rows)
    num_accepted_tokens = read_array(step.num_accepted_tokens, np.int32, "num_accepted_tokens", num_rows)
    if (num_accepted_tokens > num_draft_tokens).any():
        row = int(np.argmax(num_accepted_tokens > num_draft_tokens))
        raise invalid(
            f"num_accepted_tokens[{row}]",
            f"expected at most {num_draft_tokens[row]}, its draft tokens, got {num_accepted_tokens[row]}",
        )
    return StepRequest(
        step_id=step.step_id,
        handles=handles + first_handle,
        positions=read_array(step.positions, np.int32, "positions", num_rows),
        token_offsets=token_offsets,
        token_ids=read_array(step.token_ids, np.int32, "token_ids", max(0, int(token_offsets[-1]))),
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=num_accepted_tokens,
        max_draft_tokens=read_array(step.max_draft_tokens, np.int32, "max_draft_tokens", num_rows),
        num_decode_rows=step.num_decode_rows,
        num_prefill_tokens=step.num_prefill_tokens,
        token_budget=min(step.token_budget, MAX_COUNT),
        num_context_tokens=step.num_context_tokens,
        timing=_read_timing(step.timing) if step.HasField("timing") else None,
        client_id=client_id,
    )


def _read_timing(timing: draft_pb2.StepTiming) -> StepTiming:
    if not (timing.duration_ms > 0 and math.isfinite(timing.duration_ms)):
        raise invalid("timing.duration_ms", f"expected > 0, got {timing.duration_ms}")
    return StepTiming(
        duration_ms=timing.duration_ms,
        num_decode_rows=timing.num_decode_rows,
        num_draft_tokens=timing.num_draft_tokens,
        num_draft_rows=timing.num_draft_rows,
        num_prefill_tokens=timing.num_prefill_tokens,
        num_sampled_rows=timing.num_sampled_rows,
        num_context_tokens=timing.num_context_tokens,
    )


def write_drafts(drafts: StepDrafts, first_handle: int, message: draft_pb2.StepDrafts) -> None:
    """Fill a message with the engine's answer; `first_handle` as in `read_step`."""
    message.step_id = drafts.step_id
    message.draft_lengths = drafts.draft_lengths.tobytes()
    message.draft_token_ids = drafts.draft_token_ids.tobytes()
    message.survival = drafts.survival.tobytes()
    message.redundancy = drafts.redundancy.tobytes()
    message.token_budget = drafts.token_budget
    message.skip_steps = drafts.skip_steps
    if drafts.resync_handles.size:
        message.resync_handles = (drafts.resync_handles - first_handle).tobytes()


def read_handle(handle: int) -> int:
    """Check the handle of a request.

    Raises:
        RefusalError: out of its bound.
    """
    if not 0 <= handle <= MAX_HANDLE:
        raise invalid("handle", f"expected 0 to {MAX_HANDLE}, got {handle}")
    return handle


def read_tokens(raw: bytes, field: str) -> TokenIds:
    """Read token ids; the engine checks them against its vocabulary."""
    return read_array(raw, np.int32, field)


def read_tags(text: str) -> Tags:
    """Read the tags of a call.

    Raises:
        RefusalError: they are not version 1 of the schema, or larger than 4 KiB.
    """
    if len(text) > MAX_TAGS_BYTES:
        raise invalid("tags_json", f"expected at most {MAX_TAGS_BYTES} bytes, got {len(text)}")
    try:
        return decode_tags({TAGS_KEY: text} if text else None)
    except TagsError as error:
        raise invalid("tags_json", str(error)) from None


def read_sampling(sampling: draft_pb2.Sampling) -> Sampling:
    """Read how a request is sampled.

    Raises:
        RefusalError: a temperature below 0 or none, or a name that is too long.
    """
    if not sampling.temperature >= 0:
        raise invalid("sampling.temperature", f"expected >= 0, got {sampling.temperature}")
    check_name(sampling.forced_tool, "sampling.forced_tool")
    return Sampling(sampling.temperature, sampling.is_structured, sampling.forced_tool)


def check_name(name: str, field: str, *, can_be_empty: bool = True) -> None:
    """Check the bytes of a name.

    Raises:
        RefusalError: longer than 256 bytes, or empty where it must not be.
    """
    size = len(name.encode())
    if size > MAX_NAME_BYTES or not (size or can_be_empty):
        raise invalid(field, f"expected {0 if can_be_empty else 1} to {MAX_NAME_BYTES} bytes, got {size}")


def read_reason(reason: draft_pb2.FinishReason) -> FinishReason:
    """Read why a request ended.

    Raises:
        RefusalError: not said, or not known.
    """
    try:
        return FinishReason[draft_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")]
    except (KeyError, ValueError):
        raise invalid("reason", f"expected STOP, LENGTH, ABORT or ERROR, got {reason}") from None


def refusal_of(error: ValueError, first_handle: int, fields: Mapping[str, str] = _FIELDS) -> RefusalError:
    """Turn what the engine refused into the contract's words.

    Args:
        error: as the engine raised it.
        first_handle: what the client's handle 0 is called in the engine.
        fields: names of the contract by those of the engine, where they differ.
    """
    text = str(error)
    last_handle = first_handle + MAX_HANDLE
    for word in text.replace(":", " ").replace(")", " ").split():
        if word.isdecimal() and first_handle <= int(word) <= last_handle:
            text = text.replace(word, str(int(word) - first_handle))
    field, _, reason = text.partition(": ")
    name, bracket, index = field.partition("[")
    if not reason or not name.isidentifier():
        return invalid("", text)
    return invalid(f"{fields.get(name, name)}{bracket}{index}", reason)


def check_batch(count: int, name: str, most: int = MAX_BATCH) -> None:
    """Check how many of a kind one message brings.

    Raises:
        RefusalError: too many.
    """
    if count > most:
        raise exhausted(name, f"expected at most {most}, got {count}")
