"""The values between a vLLM hook, a draft client and an engine: struct of arrays, no object for each row."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]


class FinishReason(enum.IntEnum):
    """Why a request ended. Only text that the target model really ended (`STOP`) is stored as complete blocks."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target model samples one request, as far as drafting depends on it.

    Attributes:
        temperature: >= 0; 0 is greedy.
        is_structured: the output follows a JSON schema, a regular expression or another grammar of the server.
        forced_tool: the tool that the output must call; empty: none, or not known.
    """

    temperature: float = 0.0
    is_structured: bool = False
    forced_tool: str = ""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What one verification step of the target model was made of, and how long it took.

    Attributes:
        duration_ms: from the start of scheduling to the end of sampling; drafting is not part of it.
        num_decode_rows: rows that got one token and their drafts.
        num_draft_tokens: draft tokens verified, of all rows.
        num_draft_rows: rows that verified at least one.
        num_prefill_tokens: prompt tokens computed.
        num_sampled_rows: decode rows at a temperature above 0.
        num_context_tokens: tokens that the decode rows attended to, summed over the rows.
    """

    duration_ms: float
    num_decode_rows: int
    num_draft_tokens: int = 0
    num_draft_rows: int = 0
    num_prefill_tokens: int = 0
    num_sampled_rows: int = 0
    num_context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepRequest:
    """What became known since the last verification step, for every running row of the batch.

    The tokens of a row are provisional until the next step or `close` of the same handle: an engine may have run up
    to `num_speculative_tokens` past a stop.

    Attributes:
        step_id: increases by at least one with every step of a client; names the step in replies.
        handles: one per row, as given to `open`; int64, shape (num_rows,).
        positions: output tokens of the row that were handed over before this step; int32, shape (num_rows,).
        token_offsets: row i brings `token_ids[token_offsets[i]:token_offsets[i + 1]]`; int32, shape (num_rows + 1,).
        token_ids: the new output tokens of all rows, flat; int32.
        num_draft_tokens: draft tokens of the row that were verified since the last step; int32, shape (num_rows,).
        num_accepted_tokens: how many of them the target model accepted; int32, shape (num_rows,).
        max_draft_tokens: room of the row in the next step (K, model length, output limit); 0 asks for no draft;
            int32, shape (num_rows,).
        num_decode_rows: b, rows that decode in the next step, with or without a draft.
        num_prefill_tokens: p, prompt tokens that the next step is expected to compute beside them.
        token_budget: draft tokens that the whole batch may verify in the next step, >= 0; a limit, not a goal.
        num_context_tokens: tokens that the decode rows attend to in the next step, summed over the rows; 0: unknown.
        timing: the last step that the target model has finished; None: not measured.
        client_id: which of several engines of the target model steps, as a draft server numbers them; each
            has a machine and a load of its own.
        traceparent: W3C trace context that a span of this step belongs to; empty: none is wanted. At most 128 bytes.
    """

    step_id: int
    handles: NDArray[np.int64]
    positions: NDArray[np.int32]
    token_offsets: NDArray[np.int32]
    token_ids: TokenIds
    num_draft_tokens: NDArray[np.int32]
    num_accepted_tokens: NDArray[np.int32]
    max_draft_tokens: NDArray[np.int32]
    num_decode_rows: int
    num_prefill_tokens: int
    token_budget: int
    num_context_tokens: int = 0
    timing: StepTiming | None = None
    client_id: int = 0
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of one verification step; rows in the order of the `StepRequest` with the same `step_id`.

    Attributes:
        step_id: the request that is answered.
        draft_lengths: the budget of each row; int32, shape (num_rows,); the sum never exceeds `token_budget`.
        draft_token_ids: drafts of all rows, flat; int32, shape (sum of draft_lengths,).
        survival: probability that the token and all before it in its draft are accepted; float32, same shape.
        redundancy: score of each row in [0, 1], consensus x support saturation; float32, shape (num_rows,).
        token_budget: the budget that was split.
        skip_steps: no draft will pay for so many steps: do not wait for an answer to them (keep submitting).
        resync_handles: handles that the engine does not know at the given position: `open` them again and hand over
            their output from the start; int64.
    """

    step_id: int
    draft_lengths: NDArray[np.int32]
    draft_token_ids: TokenIds
    survival: NDArray[np.float32]
    redundancy: NDArray[np.float32]
    token_budget: int
    skip_steps: int = 0
    resync_handles: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class BlockStats:
    """What speculation brought in one block of one stage since the engine started.

    Attributes:
        num_steps: verification steps of one request that began in this block (request-steps).
        num_drafts: those of them that verified a draft.
        num_tokens: output tokens that these steps brought, accepted draft tokens included.
    """

    namespace: str
    workflow_id: str
    stage: str
    block: str
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class HistorySize:
    """What is held of one stage of one namespace.

    Attributes:
        num_tokens: output tokens that can be drafted from.
        num_bytes: memory.
    """

    namespace: str
    stage: str
    num_tokens: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class BlockBatch:
    """Blocks of one namespace on their way to other engines.

    Attributes:
        num_blocks: closed blocks, and stretches of open ones.
        num_tokens: of all of them, block starts included.
        blocks: for `Engine.merge_blocks`.
    """

    namespace: str
    num_blocks: int
    num_tokens: int
    blocks: bytes


@dataclass(frozen=True, slots=True)
class TakenBlocks:
    """What an engine's requests have stored, and which namespaces they have used, since it was asked last."""

    batches: list[BlockBatch]
    namespaces: list[str]
