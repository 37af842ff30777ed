"""Values of the seam as messages of the draft contract, and back. Arrays are packed whole and read in place."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentspec.draft.v1 import draft_pb2
from agentspec.sidecar.engine import FinishReason, Sampling, StepDrafts, StepRequest, TokenIds
from agentspec.sidecar.tags import MAX_TAGS_BYTES, UNTAGGED, Tags

MAX_TEMPLATE_BYTES = 256 << 10
MAX_PART_BYTES = 1 << 20
MAX_PART_TOKENS = 1 << 16

REASONS = {
    FinishReason.STOP: draft_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: draft_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: draft_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: draft_pb2.FINISH_REASON_ERROR,
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a draft server must know of the target model; kept to register it again with a server that restarted.

    Attributes:
        fingerprint: 64 hex digits; equal for equal models with equal tokens alone.
        chat_template: tells the model's family; empty: not known, or too long for the contract.
        token_lengths: bytes of each token, uint32.
        token_bytes: the tokens, joined.
    """

    fingerprint: str
    chat_template: str
    token_lengths: NDArray[np.uint32]
    token_bytes: bytes

    @classmethod
    def of(cls, model: str, tokens: Sequence[bytes], chat_template: str = "") -> Vocabulary:
        """The vocabulary of a model.

        Args:
            model: what tells it from other models with the same tokens, such as its hub id.
            tokens: the bytes of each token id, in order; at least one.
            chat_template: of its tokenizer.
        """
        lengths = np.fromiter(map(len, tokens), np.uint32, len(tokens))
        joined = b"".join(tokens)
        digest = hashlib.sha256(f"{model}\0{len(tokens)}\0".encode(errors="replace"))
        digest.update(lengths.tobytes())
        digest.update(joined)
        is_short = len(chat_template.encode(errors="replace")) <= MAX_TEMPLATE_BYTES
        return cls(digest.hexdigest(), chat_template if is_short else "", lengths, joined)

    def parts(self) -> Iterator[draft_pb2.RegisterTokenizerRequest]:
        """The messages that register it."""
        ends = np.cumsum(self.token_lengths, dtype=np.int64)
        begin = first_byte = 0
        while begin < len(ends):
            end = int(np.searchsorted(ends, first_byte + MAX_PART_BYTES, side="right"))
            end = max(begin + 1, min(end, begin + MAX_PART_TOKENS))
            last_byte = int(ends[end - 1])
            part = draft_pb2.RegisterTokenizerRequest(
                token_lengths=self.token_lengths[begin:end].tobytes(),
                token_bytes=self.token_bytes[first_byte:last_byte],
            )
            if begin == 0:
                part.model_fingerprint, part.chat_template = self.fingerprint, self.chat_template
            yield part
            begin, first_byte = end, last_byte


def write_step(step: StepRequest, message: draft_pb2.Step) -> None:
    """Fill a message with a step."""
    message.step_id = step.step_id
    message.handles = step.handles.tobytes()
    message.positions = step.positions.tobytes()
    message.token_offsets = step.token_offsets.tobytes()
    message.token_ids = step.token_ids.tobytes()
    message.num_draft_tokens = step.num_draft_tokens.tobytes()
    message.num_accepted_tokens = step.num_accepted_tokens.tobytes()
    message.max_draft_tokens = step.max_draft_tokens.tobytes()
    message.num_decode_rows = step.num_decode_rows
    message.num_prefill_tokens = step.num_prefill_tokens
    message.token_budget = step.token_budget
    message.num_context_tokens = step.num_context_tokens
    message.traceparent = step.traceparent
    if step.timing is not None and step.timing.duration_ms > 0:
        timing = message.timing
        timing.duration_ms = step.timing.duration_ms
        timing.num_decode_rows = step.timing.num_decode_rows
        timing.num_draft_tokens = step.timing.num_draft_tokens
        timing.num_draft_rows = step.timing.num_draft_rows
        timing.num_prefill_tokens = step.timing.num_prefill_tokens
        timing.num_sampled_rows = step.timing.num_sampled_rows
        timing.num_context_tokens = step.timing.num_context_tokens


def open_message(
    handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str, max_prompt_tokens: int
) -> draft_pb2.OpenRequest:
    """A request that starts.

    Args:
        handle: of the client.
        tokens: its prompt; what is before the last `max_prompt_tokens` is left out, as history far away is.
        tags: those too large for the contract are left out.
        sampling: how the target model samples it.
        namespace: the tenant.
        max_prompt_tokens: what fits into one message.
    """
    tags_json = "" if tags is UNTAGGED else tags.model_dump_json(exclude_defaults=True)
    return draft_pb2.OpenRequest(
        handle=handle,
        namespace=namespace,
        prompt_token_ids=tokens[-max_prompt_tokens:].tobytes(),
        tags_json=tags_json if len(tags_json.encode()) <= MAX_TAGS_BYTES else "",
        sampling=draft_pb2.Sampling(
            temperature=sampling.temperature,
            is_structured=sampling.is_structured,
            forced_tool=sampling.forced_tool,
        ),
    )


def close_message(handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> draft_pb2.CloseRequest:
    """A request that ended."""
    return draft_pb2.CloseRequest(
        handle=handle, reason=REASONS[reason], num_output_tokens=true_length, tail_token_ids=tail.tobytes()
    )


def read_drafts(message: draft_pb2.StepDrafts) -> StepDrafts:
    """Read an answer.

    Raises:
        ValueError: an array has a part of an entry.
    """
    return StepDrafts(
        step_id=message.step_id,
        draft_lengths=np.frombuffer(message.draft_lengths, np.int32),
        draft_token_ids=np.frombuffer(message.draft_token_ids, np.int32),
        survival=np.frombuffer(message.survival, np.float32),
        redundancy=np.frombuffer(message.redundancy, np.float32),
        token_budget=message.token_budget,
        skip_steps=message.skip_steps,
        resync_handles=np.frombuffer(message.resync_handles, np.int64),
    )
