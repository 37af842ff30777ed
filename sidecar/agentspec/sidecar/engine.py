"""The Python face of the draft engine, and the values that cross the seam between a vLLM hook and a draft client.

A hook opens each request once with its prompt, then hands over one `StepRequest` per verification step of the whole
batch and gets `StepDrafts` back. Both are struct of arrays: no Python object per request or token exists on that path.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agentspec.sidecar import _core
from agentspec.sidecar._core import ArchiveError
from agentspec.sidecar.budget import PLAIN_BUDGET, POLICIES, BucketStats, BudgetOptions, BudgetStats, Policy
from agentspec.sidecar.step import (
    BlockBatch,
    BlockStats,
    FinishReason,
    HistorySize,
    Sampling,
    StepDrafts,
    StepRequest,
    StepTiming,
    TakenBlocks,
    TokenIds,
)

if TYPE_CHECKING:
    from agentspec.sidecar.grammars import BlockRule, Grammar
    from agentspec.sidecar.tags import Tags

__all__ = [
    "ALL_PARTS",
    "ArchiveError",
    "BlockBatch",
    "BlockStats",
    "Engine",
    "FinishReason",
    "HistorySize",
    "Parts",
    "Sampling",
    "StepDrafts",
    "StepRequest",
    "StepTiming",
    "TakenBlocks",
    "TokenIds",
    "allocate_by_redundancy",
]

MAX_SPECULATIVE_TOKENS = 64
MIN_SURVIVAL = 0.1
MAX_HISTORIES = 1 << 16
TTL_S = 86_400.0
GREEDY_TEMPERATURE = 1e-5  # below it vLLM takes the most probable token


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of an engine that a benchmark switches off one by one.

    Attributes:
        own: a request's own prompt and output vote.
        block_starts: texts are marked where a block begins, so that drafts begin there too.
        calibration: the vote's probabilities are corrected by what requests went on to write.
        prior: calibration starts from what was seen on other agents' text.
    """

    own: bool = True
    block_starts: bool = True
    calibration: bool = True
    prior: bool = True


ALL_PARTS = Parts()


def allocate_by_redundancy(
    scores: NDArray[np.float32], lengths: NDArray[np.int32], token_budget: int
) -> NDArray[np.int32]:
    """Split the token budget of one verification step over the batch in proportion to redundancy.

    Args:
        scores: redundancy per row, each in [0, 1]; float32, shape (num_rows,).
        lengths: tokens that the row has drafted, >= 0; int32, shape (num_rows,).
        token_budget: tokens, >= 0, for the whole batch.

    Returns:
        Draft length per row, same order; none above its `lengths`, and the sum never exceeds `token_budget`. What a
        row cannot use goes to the others; a row with score 0 gets nothing.

    Raises:
        ValueError: a score is outside [0, 1] or NaN, a length or the budget is negative, the lengths differ.

    Source: AgentSpec (arXiv 2608.24004), redundancy-aware budget allocation; rounding and redistribution: D-009.
    """
    return _core.allocate_by_redundancy(scores, lengths, token_budget)


_NO_HANDLES = np.empty(0, np.int64)
_NO_TOKENS = np.empty(0, np.int32)


def pooled_bytes() -> int:
    """Bytes that the histories and requests of all engines of this process hold outside of malloc."""
    return _core.pooled_bytes()


def _narrow(namespace: str, tag: str) -> str:
    """Append the tag's namespace, so written that no choice of it equals another part of a namespace."""
    return f"{namespace}/tag-{tag.replace('%', '%25').replace('/', '%2F')}" if tag else namespace


def _rule_fields(rule: BlockRule) -> tuple[str, list[bytes], list[bytes], list[str], int, list[bytes]]:
    anchor = ("anywhere", "line", "output").index(rule.anchor)
    return rule.name, list(rule.starts), list(rule.ends), list(rule.parents), anchor, list(rule.name_marks)


def _timing_fields(timing: StepTiming) -> tuple[float, int, int, int, int, int, int]:
    return (
        timing.duration_ms,
        timing.num_decode_rows,
        timing.num_draft_tokens,
        timing.num_draft_rows,
        timing.num_prefill_tokens,
        timing.num_sampled_rows,
        timing.num_context_tokens,
    )


class Engine:
    """Block tracker, histories, drafter and budget of one model; thread-safe, and never holds the GIL while it works.

    Args:
        vocabulary: the bytes of each token id, in order; special tokens as their text. Markers are found in them.
        grammar: which markers open and close semantic blocks.
        num_speculative_tokens: longest draft of a row, 1 to 64.
        history_bytes: memory of all histories together, > 0; what was used least lately is forgotten first, but of a
            namespace or a workflow that has more than half of it, its own.
        namespace_bytes: memory of the histories of one namespace, > 0 and at most `history_bytes`; None: all of it.
        max_histories: histories (pairs of namespace and stage) at one time, > 0; with more, requests go without one.
        ttl_s: seconds, > 0; a history that no request has used for so long is dropped by a later call.
        stored_tokens_per_s: output tokens, > 0, that one workflow may store per second on average, a second's worth
            at once; what it writes beyond that is not stored.
        is_strict: draft only from text of the same block path and never across a block's end (the paper's isolation);
            otherwise the block path is a label that weighs in the vote.
        min_survival: draft tokens that would survive with less are not verified, in [0, 1]; the policies `goodput`
            and `shadow` verify what pays, whatever it is.
        parts: switches of single parts, for measuring what each is worth.
        budget: which draft tokens are verified. Default: the token budget of each `StepRequest`, by redundancy.

    Raises:
        ValueError: an argument is out of its range; the message names it.
    """

    def __init__(
        self,
        vocabulary: Sequence[bytes],
        grammar: Grammar,
        *,
        num_speculative_tokens: int = 16,
        history_bytes: int = 1 << 30,
        namespace_bytes: int | None = None,
        max_histories: int = MAX_HISTORIES,
        ttl_s: float = TTL_S,
        stored_tokens_per_s: float = math.inf,
        is_strict: bool = False,
        min_survival: float = MIN_SURVIVAL,
        parts: Parts = ALL_PARTS,
        budget: BudgetOptions = PLAIN_BUDGET,
    ) -> None:
        if not 0 <= min_survival <= 1:
            raise ValueError(f"min_survival: expected 0 to 1, got {min_survival}")
        if not 1 <= num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(f"num_speculative_tokens: expected 1 to 64, got {num_speculative_tokens}")
        if history_bytes <= 0:
            raise ValueError(f"history_bytes: expected > 0, got {history_bytes}")
        if namespace_bytes is not None and not 0 < namespace_bytes <= history_bytes:
            raise ValueError(f"namespace_bytes: expected 1 to history_bytes, {history_bytes}, got {namespace_bytes}")
        if max_histories <= 0:
            raise ValueError(f"max_histories: expected > 0, got {max_histories}")
        if not ttl_s > 0:
            raise ValueError(f"ttl_s: expected > 0, got {ttl_s}")
        if not stored_tokens_per_s > 0:
            raise ValueError(f"stored_tokens_per_s: expected > 0, got {stored_tokens_per_s}")
        offsets = np.zeros(len(vocabulary) + 1, np.int64)
        np.cumsum([len(token) for token in vocabulary], out=offsets[1:])
        self._appended = itertools.count(-1, -1)  # handles that no client has
        self._core = _core.Engine(
            b"".join(vocabulary),
            offsets,
            [_rule_fields(rule) for rule in grammar.rules],
            list(grammar.answer_starts),
            num_speculative_tokens,
            history_bytes,
            history_bytes if namespace_bytes is None else namespace_bytes,
            max_histories,
            ttl_s,
            stored_tokens_per_s,
            is_strict,
            min_survival,
            parts.own,
            parts.block_starts,
            parts.calibration,
            parts.prior,
            budget.fields(),
        )

    def add_grammar(self, grammar: Grammar) -> int:
        """Build a grammar for `open`; returns its number, or -1 if all of them together would exceed 8 MiB."""
        return self._core.add_grammar([_rule_fields(rule) for rule in grammar.rules], list(grammar.answer_starts))

    def remove_grammar(self, grammar_id: int) -> None:
        """Forget a grammar: open requests keep it, later ones that name it take the engine's own."""
        self._core.remove_grammar(grammar_id)

    def open(
        self,
        handle: int,
        tokens: TokenIds,
        tags: Tags,
        sampling: Sampling,
        *,
        namespace: str = "",
        grammar_id: int = 0,
    ) -> None:
        """Make a request known, or bring a known one back to its prompt (idempotent resync).

        Args:
            handle: chosen by the client, unique among its open requests.
            tokens: the prompt; int32, C-contiguous. Output is handed over by `step` alone.
            tags: what the application says of the call.
            sampling: how the target model samples it.
            namespace: the tenant; nothing of a history ever crosses it. The tag's namespace narrows it further.
            grammar_id: which grammar the output follows, see `add_grammar`; 0: the engine's own.

        Raises:
            ValueError: a token id is outside the vocabulary; the message names token, position and handle.
        """
        self._core.open(
            handle,
            tokens,
            _narrow(namespace, tags.namespace),
            tags.workflow_id,
            tags.stage,
            grammar_id,
            tags.block,
            sampling.is_structured,
            sampling.forced_tool,
            tags.max_draft_tokens if tags.speculate else 0,
            tags.history == "rw",
            tags.history != "off",
            sampling.temperature < GREEDY_TEMPERATURE,
            True,
        )

    def append(self, tokens: TokenIds, tags: Tags, *, namespace: str = "", grammar_id: int = 0) -> None:
        """Add the whole text of an answer that was written elsewhere; it is in no statistics, and no ration holds.

        Args:
            tokens: int32, C-contiguous.
            tags: workflow and stage that it belongs to, and the block that it begins in; empty: the markers tell.
            namespace: as in `open`.
            grammar_id: as in `open`.

        Raises:
            ValueError: a token id is outside the vocabulary; the message names token and position.
        """
        handle = next(self._appended)
        self._core.open(
            handle, _NO_TOKENS, _narrow(namespace, tags.namespace), tags.workflow_id, tags.stage, grammar_id,
            tags.block, False, "", 0, True, True, True, False,
        )  # fmt: skip
        try:
            self._core.close(handle, FinishReason.STOP, len(tokens), tokens)
        finally:
            self._core.close(handle, FinishReason.ERROR, 0, _NO_TOKENS)

    def step(self, request: StepRequest, *, deadline_us: int = 0) -> StepDrafts:
        """Take in the new tokens of the batch and draft for its next verification step.

        Args:
            request: the step; unknown handles and positions that do not follow come back in `resync_handles`.
            deadline_us: rows that are not drafted so many microseconds after the call get no draft; 0 = no deadline.

        Raises:
            ValueError: an array has a wrong length, a count is negative, a token id is outside the vocabulary; the
                message names field, row and value, and nothing has changed.
            TypeError: an array has another dtype than int32 (handles: int64) or is not C-contiguous.
        """
        packed, num_tokens, resync, skip_steps = self._core.step(
            request.handles,
            request.positions,
            request.token_offsets,
            request.token_ids,
            request.num_draft_tokens,
            request.num_accepted_tokens,
            request.max_draft_tokens,
            request.token_budget,
            deadline_us,
            request.num_decode_rows,
            request.num_prefill_tokens,
            request.num_context_tokens,
            None if request.timing is None else _timing_fields(request.timing),
            request.client_id,
        )
        num_rows = len(request.handles)
        return StepDrafts(
            step_id=request.step_id,
            draft_lengths=np.frombuffer(packed, np.int32, num_rows),
            draft_token_ids=np.frombuffer(packed, np.int32, num_tokens, 8 * num_rows),
            survival=np.frombuffer(packed, np.float32, num_tokens, 8 * num_rows + 4 * num_tokens),
            redundancy=np.frombuffer(packed, np.float32, num_rows, 4 * num_rows),
            token_budget=request.token_budget,
            skip_steps=skip_steps,
            resync_handles=np.array(resync, np.int64) if resync else _NO_HANDLES,
        )

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        """End a request and store what it really wrote.

        Args:
            handle: an open request; an unknown one is ignored, so that `close` may be repeated.
            reason: text of a request that did not end by itself is stored, but its last block stays open.
            true_length: output tokens that the client of the target model got; what was handed over past it is dropped.
            tail: the last output tokens that no step has handed over; int32.

        Raises:
            ValueError: a token id of the tail is outside the vocabulary, or `true_length` is negative.
        """
        self._core.close(handle, int(reason), true_length, tail)

    @property
    def policy(self) -> Policy:
        """Which draft tokens are verified."""
        return POLICIES[self._core.policy()]

    def set_policy(self, policy: Policy) -> None:
        """Verify other draft tokens from the next step on; what was learned stays.

        Raises:
            ValueError: no such policy.
        """
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
        self._core.set_policy(POLICIES.index(policy))

    def budget_stats(self) -> list[BudgetStats]:
        """What the budget of each client did since the engine started; a client that never stepped has none."""
        return [
            BudgetStats(*row[:-1], buckets=tuple(BucketStats(*bucket) for bucket in row[-1]))
            for row in self._core.budget_stats()
        ]

    def predict_step_ms(self, step: StepTiming, client_id: int = 0) -> float | None:
        """Time that the cost model expects of such a step; its `duration_ms` is ignored. None: nothing measured yet."""
        predicted = self._core.predict_step_ms(client_id, _timing_fields(step))
        return predicted if predicted >= 0 else None

    def export_cost_model(self, client_id: int = 0) -> bytes:
        """Return what was learned of a client's step times; empty: nothing yet."""
        return self._core.export_cost_model(client_id)

    def import_cost_model(self, saved: bytes, client_id: int = 0) -> bool:
        """Take in a saved cost model; the next steps set its level.

        Returns:
            False: the bytes are cut, changed, or of another machine's cost model, and nothing has changed.
        """
        return self._core.import_cost_model(client_id, saved)

    def export_histories(self, namespace: str) -> bytes:
        """Return all histories of a namespace and of those within it, as one checked archive; steps go on meanwhile."""
        return self._core.export_histories(namespace)

    def export_parts(self, namespace: str, num_parts: int) -> list[bytes]:
        """Return the histories of one namespace alone as archives: each has its part of them, the oldest first."""
        return self._core.export_parts(namespace, num_parts)

    def import_histories(self, archive: bytes, *, within: str = "") -> int:
        """Add the histories of an archive and return the number of their tokens.

        Args:
            archive: as `export_histories` gives it.
            within: the namespace in which all of them must lie; empty: any.

        Raises:
            ArchiveError: another version, vocabulary or namespace, or the bytes were cut or changed; nothing has
                changed.
        """
        return self._core.import_histories(archive, within)

    def history_sizes(self, namespace: str) -> list[HistorySize]:
        """What is held of a namespace and of those within it, ordered by namespace and stage."""
        return [HistorySize(*row) for row in self._core.history_sizes(namespace)]

    def share_blocks(self, max_waiting_tokens: int) -> None:
        """From now on keep what requests store for `take_blocks`.

        Args:
            max_waiting_tokens: of more than that the oldest are dropped and counted; 0: keep nothing any more.
        """
        self._core.share_blocks(max_waiting_tokens)

    def wait_for_blocks(self, timeout_s: float) -> bool:
        """Whether `take_blocks` has something to give; waits up to `timeout_s` for it, without the GIL."""
        return self._core.wait_for_blocks(int(timeout_s * 1e6))

    def take_blocks(self) -> TakenBlocks:
        """Return what was stored since the last call."""
        batches, namespaces = self._core.take_blocks()
        return TakenBlocks([BlockBatch(*batch) for batch in batches], namespaces)

    def merge_blocks(self, namespace: str, blocks: bytes, *, origin: int) -> int:
        """Add what `take_blocks` gave on another engine of the same model; return the number of new tokens.

        Args:
            namespace: where it goes, as in the batch.
            blocks: of the batch, unchanged: they carry no checksum.
            origin: of that engine, 0 to 2**64 - 1; its texts go on where they ended, and what has been merged is passed
                over as long as the text is open.

        Raises:
            ArchiveError: no such bytes, or a token id outside the vocabulary; nothing has changed.
        """
        return self._core.merge_blocks(namespace, blocks, origin)

    def num_unshared_tokens(self) -> int:
        """Tokens that were dropped because too many waited for `take_blocks`."""
        return self._core.num_unshared_tokens()

    def delete_namespace(self, namespace: str) -> int:
        """Forget all text of a namespace and of those within it, for good; return the number of tokens.

        What its open requests go on to write is not stored either.
        """
        return self._core.delete_namespace(namespace)

    def forget_unused(self, max_age_s: float) -> int:
        """Forget histories that no request has used for so many seconds; return the number of tokens."""
        return self._core.forget_unused(max_age_s)

    def block_path(self, handle: int) -> str:
        """Block path of the next output token of an open request, outermost first, such as ``tool_call/code``.

        Raises:
            ValueError: the handle is not open.
        """
        return self._core.block_path(handle)

    def stats(self) -> list[BlockStats]:
        """Counts by namespace, workflow, stage and block path; at most 1,024 rows, the rest under block ``other``."""
        return [BlockStats(*row) for row in self._core.stats()]

    def calibration_counts(self, namespace: str = "", *, is_greedy: bool = True) -> NDArray[np.float32]:
        """What drafts of a namespace were compared with: accepted and all, by cell; float32, shape (num_cells, 2)."""
        return self._core.calibration_counts(namespace, is_greedy).reshape(-1, 2)

    def num_recoveries(self) -> int:
        """Markers that did not fit the open blocks: the end of none, not of the innermost one, a start too deep."""
        return self._core.num_recoveries()

    def num_open_requests(self) -> int:
        """Requests that were opened and not closed."""
        return self._core.num_open_requests()

    def memory_bytes(self) -> int:
        """Bytes that all shared histories hold; never above `history_bytes` after a call has returned."""
        return self._core.memory_bytes()

    def num_dropped_tokens(self) -> int:
        """Output tokens that were not stored: `stored_tokens_per_s` was used up, or there was no room."""
        return self._core.num_dropped_tokens()

    def num_history_tokens(self) -> int:
        """Output tokens that can be drafted from."""
        return self._core.num_history_tokens()

    def check_integrity(self) -> None:
        """Verify the invariants of every history.

        Raises:
            RuntimeError: an invariant is broken; the message names it.
        """
        self._core.check_integrity()
