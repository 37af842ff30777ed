"""The hook for vLLM's V1 runner: a scheduler that drafts for the whole batch between two steps, and a null proposer.

A step's tokens are submitted as soon as the scheduler knows them; the drafts are collected after vLLM has handed the
tokens to its clients, so that drafting overlaps with that and never delays it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from agentspec.sidecar.engine import StepDrafts, StepRequest, StepTiming
from agentspec.sidecar.tags import Tags

from .compat import fix_sampling, probe, skip_rejection_without_drafts
from .cost_model import StepTimer
from .drafting import Drafting
from .request import (
    PromptReader,
    finish_reason,
    keeps_batch_plain,
    longest_draft,
    namespace_of,
    sampling_of,
    tags_of,
    traceparent_of,
)

# vLLM configures only its own logger tree; a line under any other name would not be seen in `vllm serve`.
logger = logging.getLogger("vllm.agentspec")

MAX_PROMPT_TOKENS = 1 << 13  # read in one step: 0.2 ms


class NullProposer:
    """What vLLM's worker asks for drafts: never any, because the scheduler brings them."""

    def __init__(self, vllm_config: Any) -> None:
        del vllm_config  # part of vLLM's contract
        fix_sampling()  # VLLM_PLUGINS may have kept vLLM from it
        skip_rejection_without_drafts()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load nothing; vLLM's CPU runner calls this without asking whether it exists."""

    def propose(self, sampled_token_ids: Sequence[Sequence[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        """Return one empty draft per row."""
        return [[] for _ in sampled_token_ids]


@dataclass(slots=True)
class _Row:
    """What the draft client knows of one request."""

    request: Any
    handle: int
    tags: Tags
    max_draft_tokens: int
    position: int = 0  # output tokens handed over
    num_draft_tokens: int = 0  # verified since the last step
    num_accepted_tokens: int = 0


class AgentSpecScheduler(Scheduler):
    """vLLM's scheduler with drafts from a `DraftClient`; losing that client costs speed, never output.

    Raises:
        CompatibilityError: this vLLM or its configuration is not supported.
        OptionsError: ``additional_config["agentspec"]`` or an ``AGENTSPEC_*`` variable is wrong.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        probe(self.vllm_config, Scheduler)
        self._drafting = Drafting(self.vllm_config, int(self.num_spec_tokens))
        self._options = self._drafting.options
        self._max_draft_tokens = self._drafting.max_draft_tokens
        self._deadline_ms = self._drafting.deadline_ms
        self._fallbacks = self._drafting.fallbacks
        self._client = self._drafting.client
        self._rows: dict[str, _Row] = {}
        self._prompts: dict[int, tuple[_Row, PromptReader]] = {}  # by handle: rows whose prompt is being read
        self._traceparents: dict[int, str] = {}  # by handle: traced requests that no step has had yet
        self._next_handle = 0
        self._step_id = 0
        self._step: StepRequest | None = None  # handed over and not collected
        self._step_rows: list[_Row] = []
        self._num_steps_to_skip = 0
        self._plain_batch_ids: set[str] = set()  # requests beside which no other may have a draft
        self._timer = StepTimer()
        self._timing: StepTiming | None = None  # of the last step that ran
        self._switch_padding_off()
        self._drafting.log_start("v1")

    def add_request(self, request: Any) -> None:
        """Take note of a request beside which nobody may have a draft."""
        with self._fail_open():
            if request.sampling_params is not None and keeps_batch_plain(request.sampling_params):
                self._plain_batch_ids.add(request.request_id)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Open the requests that start now, so that their prompts are indexed while the model runs."""
        self._timer.start()
        if self._plain_batch_ids:
            self._drop_drafts()
        output = super().schedule(throttle_prefills)
        with self._fail_open():
            for new in output.scheduled_new_reqs:
                self._find_row(self.requests[new.req_id])
            self._read_prompts()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Hand over what the step brought."""
        with self._fail_open():
            self._timing = self._timer.finish(
                scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens, self.requests
            )
            self._count_verdicts(scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._step = None
        if scheduler_output.total_num_scheduled_tokens > 0:
            with self._fail_open():
                self._submit_step()
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Set the drafts of the next step; the proposer's are empty, or zeros near `max_model_len`."""
        self._drop_drafts()
        if self._step is None:
            return
        with self._fail_open():
            drafts = self._collect(self._step)
            if drafts is not None:
                self._set_drafts(drafts)
                self._resync(drafts)

    def _free_request(self, request: Any, delay_free_blocks: bool = False) -> Any:
        self._plain_batch_ids.discard(request.request_id)
        with self._fail_open():
            self._close(request)
        return super()._free_request(request, delay_free_blocks)

    def shutdown(self) -> None:
        """Stop the draft thread and the metrics server before vLLM's own parts."""
        with self._fail_open():
            self._drafting.shutdown()
        super().shutdown()

    def _drop_drafts(self) -> None:
        for request in self.running:
            request.spec_token_ids = []

    @contextmanager
    def _fail_open(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001  # the one boundary: vLLM goes on without drafts
            self._fallbacks.note("hook_error", repr(error))

    def _switch_padding_off(self) -> None:
        """Do without the drafts of -1 that vLLM gives a prompt whose prefix cache lacks its last token only.

        All of them would be rejected. A table that says `num_spec_tokens` for every batch size has no other effect.
        """
        if getattr(self, "dynamic_sd_lookup", None) is None:
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.max_num_running_reqs + 1)

    def _find_row(self, request: Any) -> _Row | None:
        row = self._rows.get(request.request_id)
        if row is not None:
            return row
        # Pooling has no output; a streaming session turns its output into prompt, which no position survives.
        if request.sampling_params is None or request.resumable:
            return None
        tags = tags_of(request.sampling_params, self._fallbacks)
        most = longest_draft(request.sampling_params, tags, self._max_draft_tokens)
        row = _Row(request, self._next_handle, tags, most)
        self._next_handle += 1
        self._rows[request.request_id] = row
        if traceparent := traceparent_of(request):
            self._traceparents[row.handle] = traceparent
        self._open(row)
        return row

    def _open(self, row: _Row) -> None:
        row.position = 0
        self._prompts[row.handle] = row, PromptReader(row.request, self._drafting.vocab_size)

    def _read_prompts(self) -> None:
        """Read on in the prompts of new requests, and open those that are read."""
        num_left = MAX_PROMPT_TOKENS
        while self._prompts and num_left > 0:
            handle = next(iter(self._prompts))
            row, prompt = self._prompts.pop(handle)
            num_unread = prompt.num_left
            prompt.read(num_left)
            num_left -= num_unread - prompt.num_left
            if prompt.num_left > 0:
                self._prompts[handle] = row, prompt
                continue
            self._client.open(
                handle,
                prompt.tokens(),
                row.tags,
                sampling_of(row.request),
                namespace=namespace_of(self._options.namespace, row.request),
            )

    def _close(self, request: Any) -> None:
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self._prompts.pop(row.handle, None)
            self._traceparents.pop(row.handle, None)
            output = request.output_token_ids
            self._client.close(
                row.handle, finish_reason(request), len(output), np.array(output[row.position :], np.int32)
            )

    def _count_verdicts(self, scheduler_output: Any, model_runner_output: Any) -> None:
        sampled = model_runner_output.sampled_token_ids
        if not sampled:
            return
        for request_id, draft in scheduler_output.scheduled_spec_decode_tokens.items():
            row = self._rows.get(request_id)
            index = model_runner_output.req_id_to_index.get(request_id)
            # vLLM cuts these lists at a stop in the call that follows.
            if row is not None and index is not None and sampled[index]:
                row.num_draft_tokens += len(draft)
                row.num_accepted_tokens += len(sampled[index]) - 1

    def _submit_step(self) -> None:
        rows = [
            row
            for request in self.running
            if not request.is_prefill_chunk
            and request.num_output_tokens
            and self._is_open(row := self._find_row(request))
        ]
        if not rows:
            return
        self._step_id += 1
        step = self._make_step(rows)
        self._client.submit(step)
        for row in rows:
            row.position = row.request.num_output_tokens
            row.num_draft_tokens = row.num_accepted_tokens = 0
        self._step, self._step_rows = step, rows

    def _is_open(self, row: _Row | None) -> TypeGuard[_Row]:
        return row is not None and row.handle not in self._prompts

    def _make_step(self, rows: Sequence[_Row]) -> StepRequest:
        token_ids: list[int] = []
        token_offsets = [0]
        for row in rows:
            token_ids += row.request.output_token_ids[row.position :]
            token_offsets.append(len(token_ids))
        num_prefill_tokens = self._expect_prefill(len(rows))
        # Whatever the policy, every row and prompt keeps its place in the step.
        left = max(0, int(self.max_num_scheduled_tokens) - len(rows) - num_prefill_tokens)
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
            num_prefill_tokens=num_prefill_tokens,
            token_budget=budget,
            num_context_tokens=sum(row.request.num_tokens for row in rows),
            timing=self._timing,
            traceparent=self._sample_trace(rows),
        )

    def _sample_trace(self, rows: Sequence[_Row]) -> str:
        """The trace of a request whose first step this is: the agent's own sampling decides which steps are traced."""
        if not self._traceparents:
            return ""
        found = [self._traceparents.pop(row.handle) for row in rows if row.handle in self._traceparents]
        return found[0] if found else ""

    def _room(self, row: _Row) -> int:
        if not row.max_draft_tokens:
            return 0
        request = row.request
        to_model_len = int(self.max_model_len - request.num_tokens - 1)
        to_max_tokens = int(request.max_tokens - request.num_output_tokens - 1)
        return max(0, min(row.max_draft_tokens, to_model_len, to_max_tokens))

    def _expect_prefill(self, num_rows: int) -> int:
        """Prompt tokens of the next step, as far as requests that have arrived tell; the prefix cache may hold some."""
        limit = int(self.max_num_scheduled_tokens) - num_rows
        total: int = 0
        for request in self.running:
            if request.is_prefill_chunk:
                total += request.num_tokens - request.num_computed_tokens
        num_places = self.max_num_running_reqs - len(self.running)
        for request in self.waiting if num_places > 0 else ():
            if total >= limit or num_places == 0:
                break
            total += request.num_tokens - request.num_computed_tokens
            num_places -= 1
        return max(0, min(total, limit))

    def _collect(self, step: StepRequest) -> StepDrafts | None:
        if self._num_steps_to_skip > 0:
            self._num_steps_to_skip -= 1
            return None
        is_drafting = step.token_budget > 0 and step.max_draft_tokens.any()
        return self._client.collect(deadline_ms=self._deadline_ms if is_drafting else 0.0)

    def _set_drafts(self, drafts: StepDrafts) -> None:
        tokens = drafts.draft_token_ids.tolist()
        end = 0
        for row, length in zip(self._step_rows, drafts.draft_lengths.tolist(), strict=True):
            begin, end = end, end + length
            if length and row.request.status == RequestStatus.RUNNING:
                row.request.spec_token_ids = self.structured_output_manager.validate_tokens(
                    row.request, tokens[begin:end]
                )
        self._num_steps_to_skip = drafts.skip_steps

    def _resync(self, drafts: StepDrafts) -> None:
        lost = set(drafts.resync_handles.tolist())
        if lost:
            for row in self._rows.values():
                if row.handle in lost:
                    self._open(row)
            self._read_prompts()
