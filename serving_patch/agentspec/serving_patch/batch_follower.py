"""Follows the requests of a worker of vLLM: opens them, hands over what each step sampled, closes them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentspec.sidecar.engine import FinishReason, StepRequest, StepTiming
from agentspec.sidecar.tags import Tags

from .drafting import Drafting
from .request import PromptReader, keeps_batch_plain, longest_draft, namespace_of, sampling_of, tags_of

PROMPT_SLICE = 1 << 13  # tokens read before other threads get their turn: 0.2 ms
SAMPLED_TIMEOUT_S = 10.0  # longest wait for a step that the device has not finished
JOIN_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request that starts, or goes on after a preemption.

    Attributes:
        request_id: of vLLM.
        prompt_token_ids: None: embeddings alone.
        prompt_is_token_ids: where `prompt_token_ids` are text; None: everywhere.
        output: tokens that it had sampled before.
        sampling_params: of vLLM.
        cache_salt, lora_request: narrow the tenant.
        max_length: tokens of prompt and output together at which it ends.
        traceparent: W3C trace context of its first step; empty: it is not traced.
    """

    request_id: str
    prompt_token_ids: Sequence[int] | None
    prompt_is_token_ids: Sequence[bool] | None
    output: Sequence[int]
    sampling_params: Any
    cache_salt: str | None
    lora_request: Any
    max_length: int
    traceparent: str = ""

    @property
    def use_structured_output(self) -> bool:
        """Whether a grammar constrains it."""
        return self.sampling_params.structured_outputs is not None


@dataclass(frozen=True, slots=True)
class SampledStep:
    """What one step sampled.

    Attributes:
        request_ids: of the rows.
        tokens: int, shape (num_rows, K + 1).
        num_sampled: of each row, 0 for a chunk of a prompt; int, shape (num_rows,).
        num_draft_tokens: that the step verified, by request; 0 where missing.
        num_prefill_tokens: that the step computed.
        timing: of the step; called once its tokens are there.
    """

    request_ids: Sequence[str]
    tokens: NDArray[Any]
    num_sampled: NDArray[Any]
    num_draft_tokens: Mapping[str, int]
    num_prefill_tokens: int
    timing: Callable[[], float | None]


@dataclass(slots=True)
class AskedStep:
    """A step whose drafts were asked for.

    Attributes:
        is_submitted: set once the client has it.
        request_ids: rows of the question.
        is_drafting: whether an answer is worth a wait.
    """

    is_submitted: threading.Event = field(default_factory=threading.Event)
    request_ids: list[str] = field(default_factory=list)
    is_drafting: bool = False


@dataclass(slots=True)
class _Row:
    request: NewRequest
    handle: int
    tags: Tags
    max_draft_tokens: int
    stop_token_ids: frozenset[int]
    output: list[int]
    position: int = 0  # output tokens handed over
    num_draft_tokens: int = 0  # of the last step
    num_accepted_tokens: int = 0
    num_steps: int = 0
    has_ended: bool = False  # what is sampled after that reaches nobody

    def take_in(self, tokens: Sequence[int]) -> None:
        """Append sampled tokens up to the request's end."""
        prompt_length = len(self.request.prompt_token_ids or ())
        room = min(self.request.max_length - prompt_length, self.request.sampling_params.max_tokens)
        for token in tokens:
            if self.has_ended:
                return
            self.output.append(token)
            self.has_ended = token in self.stop_token_ids or len(self.output) >= room


class BatchFollower:
    """Everything of a worker that touches the draft client, on one thread of its own but for `collect`.

    A step goes: `ask` when its tokens were sampled, `collect` when the next one begins, and in between `open` and
    `close` of whatever starts or ends. None of them blocks but `collect`, and none raises.

    Args:
        drafting: client and options.
        max_num_scheduled_tokens: of a step.
    """

    def __init__(self, drafting: Drafting, max_num_scheduled_tokens: int) -> None:
        self._drafting = drafting
        self._max_num_scheduled_tokens = max_num_scheduled_tokens
        self._rows: dict[str, _Row] = {}
        self._plain_batch_ids: set[str] = set()  # requests beside which no other may have a draft
        self._next_handle = 0
        self._step_id = 0
        self._num_steps_to_skip = 0
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="agentspec-worker", daemon=True)
        self._thread.start()

    # --- the worker's thread ---

    def open(self, request: NewRequest) -> None:
        """Follow a request; one that is followed already begins anew with the output that it has."""
        self._commands.put(lambda: self._open(request))

    def close(self, request_id: str, reason: FinishReason, num_output_tokens: int | None) -> None:
        """End a request; unknown ones are ignored.

        Args:
            request_id: of vLLM.
            reason: how it ended.
            num_output_tokens: that its client got; None: all that were sampled.
        """
        self._commands.put(lambda: self._close(request_id, reason, num_output_tokens))

    def ask(self, step: SampledStep, wait: Callable[[], None]) -> AskedStep:
        """Hand over what a step sampled, and ask for drafts.

        Args:
            step: its arrays may be filled until `wait` returns.
            wait: waits until they are there.
        """
        asked = AskedStep()
        self._commands.put(lambda: self._submit(step, wait, asked))
        return asked

    def collect(self, asked: AskedStep) -> dict[str, list[int]]:
        """The drafts of a step by request, where there are any; waits for a deadline once its tokens are there."""
        with self._fail_open():
            if self._num_steps_to_skip > 0:
                self._num_steps_to_skip -= 1
                return {}
            if not asked.is_submitted.wait(SAMPLED_TIMEOUT_S):
                self._drafting.fallbacks.note("behind", f"no tokens within {SAMPLED_TIMEOUT_S:g} s")
                return {}
            if not asked.request_ids:
                return {}
            deadline_ms = self._drafting.deadline_ms if asked.is_drafting else 0.0
            drafts = self._drafting.client.collect(deadline_ms=deadline_ms)
            if drafts is None:
                return {}
            self._num_steps_to_skip = drafts.skip_steps
            if drafts.resync_handles.size:
                lost = frozenset(drafts.resync_handles.tolist())
                self._commands.put(lambda: self._reopen(lost))
            tokens = np.split(drafts.draft_token_ids, np.cumsum(drafts.draft_lengths)[:-1])
            return {
                request_id: draft.tolist()
                for request_id, draft in zip(asked.request_ids, tokens, strict=True)
                if draft.size
            }
        return {}

    def shutdown(self) -> None:
        """Finish what is queued and end the thread; a stuck one is left behind after 2 s."""
        self._commands.put(None)
        self._thread.join(JOIN_TIMEOUT_S)

    # --- the thread of its own ---

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            with self._fail_open():
                command()

    @contextmanager
    def _fail_open(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the one boundary: vLLM goes on without drafts
            self._drafting.fallbacks.note("hook_error", repr(error))

    def _open(self, request: NewRequest) -> None:
        params = request.sampling_params
        known = self._rows.get(request.request_id)
        if known is not None and known.output == [*request.output]:
            known.has_ended = False
            return
        if known is not None:  # in flight when it was preempted: it samples those tokens again
            self._close(request.request_id, FinishReason.ERROR, None)
        if keeps_batch_plain(params):
            self._plain_batch_ids.add(request.request_id)
        tags = tags_of(params, self._drafting.fallbacks)
        stops = {*(params.stop_token_ids or ()), *(() if params.eos_token_id is None else (params.eos_token_id,))}
        limit = longest_draft(params, tags, self._drafting.max_draft_tokens)
        row = _Row(request, self._next_handle, tags, limit, frozenset(stops), [*request.output])
        self._next_handle += 1
        self._rows[request.request_id] = row
        self._open_at_client(row)

    def _open_at_client(self, row: _Row) -> None:
        prompt = PromptReader(row.request, self._drafting.vocab_size)
        while prompt.num_left:
            prompt.read(PROMPT_SLICE)
            time.sleep(0)  # gives the interpreter to the worker's thread
        row.position = 0
        self._drafting.client.open(
            row.handle,
            prompt.tokens(),
            row.tags,
            sampling_of(row.request),
            namespace=namespace_of(self._drafting.options.namespace, row.request),
        )

    def _reopen(self, handles: frozenset[int]) -> None:
        for row in self._rows.values():
            if row.handle in handles:
                self._open_at_client(row)

    def _close(self, request_id: str, reason: FinishReason, num_output_tokens: int | None) -> None:
        self._plain_batch_ids.discard(request_id)
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        length = len(row.output) if num_output_tokens is None else min(num_output_tokens, len(row.output))
        tail = np.array(row.output[row.position : length], np.int32)
        self._drafting.client.close(row.handle, reason, length, tail)

    def _submit(self, step: SampledStep, wait: Callable[[], None], asked: AskedStep) -> None:
        try:
            wait()
            rows = self._take_in(step)
            if rows:
                self._step_id += 1
                question = self._question(rows, step)
                asked.is_drafting = question.token_budget > 0 and bool(question.max_draft_tokens.any())
                asked.request_ids = [row.request.request_id for row in rows]
                self._drafting.client.submit(question)
                for row in rows:
                    row.position = len(row.output)
                    row.num_steps += 1
        finally:
            asked.is_submitted.set()

    def _take_in(self, step: SampledStep) -> list[_Row]:
        rows = []
        for request_id, tokens, count in zip(
            step.request_ids, step.tokens.tolist(), step.num_sampled.tolist(), strict=True
        ):
            row = self._rows.get(request_id)
            if row is None or row.has_ended or not count:
                continue
            row.num_draft_tokens = step.num_draft_tokens.get(request_id, 0)
            row.num_accepted_tokens = count - 1
            row.take_in(tokens[:count])
            if not row.has_ended:
                rows.append(row)
        return rows

    def _question(self, rows: Sequence[_Row], step: SampledStep) -> StepRequest:
        token_ids: list[int] = []
        token_offsets = [0]
        for row in rows:
            token_ids += row.output[row.position :]
            token_offsets.append(len(token_ids))
        left = max(0, self._max_num_scheduled_tokens - len(rows) - step.num_prefill_tokens)
        budget = 0 if self._plain_batch_ids else left
        return StepRequest(
            step_id=self._step_id,
            handles=np.array([row.handle for row in rows], np.int64),
            positions=np.array([row.position for row in rows], np.int32),
            token_offsets=np.array(token_offsets, np.int32),
            token_ids=np.array(token_ids, np.int32),
            num_draft_tokens=np.array([row.num_draft_tokens for row in rows], np.int32),
            num_accepted_tokens=np.array([row.num_accepted_tokens for row in rows], np.int32),
            max_draft_tokens=np.array([self._room(row) if budget else 0 for row in rows], np.int32),
            num_decode_rows=len(rows),
            num_prefill_tokens=step.num_prefill_tokens,
            token_budget=budget,
            num_context_tokens=sum(len(row.request.prompt_token_ids or ()) + len(row.output) for row in rows),
            timing=self._timing(step),
            traceparent=next(filter(None, (row.request.traceparent for row in rows if not row.num_steps)), ""),
        )

    def _room(self, row: _Row) -> int:
        prompt_length = len(row.request.prompt_token_ids or ())
        most: int = min(row.request.max_length - prompt_length, row.request.sampling_params.max_tokens)
        return max(0, min(row.max_draft_tokens, most - len(row.output) - 1))

    def _timing(self, step: SampledStep) -> StepTiming | None:
        duration_ms = step.timing()
        if duration_ms is None:
            return None
        is_decode = step.num_sampled > 0
        drafted = [step.num_draft_tokens.get(request_id, 0) for request_id in step.request_ids]
        rows = [self._rows.get(request_id) for request_id in step.request_ids]
        return StepTiming(
            duration_ms=duration_ms,
            num_decode_rows=int(np.count_nonzero(is_decode)),
            num_draft_tokens=sum(drafted),
            num_draft_rows=sum(map(bool, drafted)),
            num_prefill_tokens=step.num_prefill_tokens,
            num_sampled_rows=sum(row is not None and row.request.sampling_params.temperature > 0 for row in rows),
            num_context_tokens=sum(
                len(row.request.prompt_token_ids or ()) + len(row.output) for row in rows if row is not None
            ),
        )
