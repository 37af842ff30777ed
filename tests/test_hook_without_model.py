"""The scheduler hook driven without a model: what its own methods cost, and long prompts that are read in slices."""

from __future__ import annotations

import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.vllm_lab import longest_drafts

from agentspec.sidecar.engine import FinishReason, Sampling, StepDrafts, StepRequest, TokenIds
from agentspec.sidecar.grammars import CHAT
from agentspec.sidecar.tags import Tags

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

VOCAB_SIZE = 1000
SLICE = 8192  # prompt tokens read in one step


class CountingClient:
    """Keeps the length of every prompt that is opened, in order."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.steps: list[StepRequest] = []

    def open(self, handle: int, tokens: TokenIds, tags: Tags, sampling: Sampling, *, namespace: str) -> None:
        self.opened.append(tokens.size)

    def submit(self, step: StepRequest) -> None:
        self.steps.append(step)

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        return None

    def close(self, handle: int, reason: FinishReason, true_length: int, tail: TokenIds) -> None:
        pass

    def shutdown(self) -> None:
        pass


@pytest.fixture
def scheduler(require_vllm: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The hook over an empty scheduler of vLLM, with a `CountingClient` and no thread between."""
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415  # slow

    from agentspec.serving_patch import drafting, hook_v1  # noqa: PLC0415  # imports vLLM

    config = SimpleNamespace(
        additional_config={"agentspec": {"metrics_port": 0, "arithmetic_intensity": 206}},
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB_SIZE, model="none", dtype="none"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        device_config=SimpleNamespace(device_type="cuda"),
        compilation_config=SimpleNamespace(cudagraph_mode=None, cudagraph_capture_sizes=[]),
    )
    state = {
        "vllm_config": config,
        "num_spec_tokens": 8,
        "max_num_running_reqs": 256,
        "dynamic_sd_lookup": [8],
        "running": [],
        "waiting": [],
        "requests": {},
        "max_num_scheduled_tokens": 8192,
        "max_model_len": 1 << 20,
    }
    monkeypatch.setattr(Scheduler, "__init__", lambda self: self.__dict__.update(state))
    monkeypatch.setattr(hook_v1, "probe", lambda *_: None)
    monkeypatch.setattr(drafting, "read_grammar", lambda _: CHAT)
    monkeypatch.setattr(drafting.Drafting, "_embed", lambda self: CountingClient())  # no thread: calls are seen at once
    return hook_v1.AgentSpecScheduler()


def request(number: int, num_prompt_tokens: int) -> Any:
    from vllm import SamplingParams  # noqa: PLC0415  # slow
    from vllm.v1.request import Request, RequestStatus  # noqa: PLC0415  # slow

    made = Request(
        request_id=f"r{number}",
        prompt_token_ids=np.random.default_rng(number).integers(0, VOCAB_SIZE, num_prompt_tokens).tolist(),
        sampling_params=SamplingParams(max_tokens=64),
        pooling_params=None,
    )
    made.status = RequestStatus.RUNNING
    return made


def start(scheduler: Any, *requests: Any) -> None:
    for each in requests:
        scheduler.running.append(each)
        scheduler._find_row(each)


def test_long_prompt_is_opened_after_as_many_steps_as_it_has_slices(scheduler: Any) -> None:
    start(scheduler, request(0, 8 * SLICE - 1))
    opened = []
    for _ in range(9):
        scheduler._read_prompts()
        opened.append(len(scheduler._client.opened))

    assert opened == [0] * 7 + [1] * 2
    assert scheduler._client.opened == [8 * SLICE - 1]


def test_short_prompts_are_opened_in_the_step_in_which_they_start(scheduler: Any) -> None:
    start(scheduler, *(request(i, 30) for i in range(256)))
    scheduler._read_prompts()

    assert scheduler._client.opened == [30] * 256


def test_first_step_of_a_traced_request_belongs_to_its_trace_and_no_other_does(scheduler: Any) -> None:
    traced, plain = request(0, 10), request(1, 10)
    traced.trace_headers = {"traceparent": "00-trace-span-01", "tracestate": "x=y"}
    start(scheduler, plain, traced)
    scheduler._read_prompts()
    seen = []
    for tokens in ([plain], [plain, traced], [plain, traced]):
        for each in tokens:
            each.append_output_token_ids([5])
        scheduler._submit_step()
        seen.append(scheduler._client.steps[-1].traceparent)

    assert seen == ["", "00-trace-span-01", ""]


def test_row_takes_part_in_steps_once_its_prompt_is_read(scheduler: Any) -> None:
    long, short = request(0, 2 * SLICE), request(1, 10)
    start(scheduler, short, long)
    for each in (short, long):
        each.append_output_token_ids([5])
    rows = []
    for _ in range(3):
        scheduler._read_prompts()
        scheduler._submit_step()
        rows.append(len(scheduler._client.steps[-1].handles))
        short.append_output_token_ids([5])

    assert rows == [1, 1, 2]
    assert scheduler._client.steps[-1].positions.tolist() == [2, 0]


def test_request_that_ends_while_its_prompt_is_read_is_forgotten(scheduler: Any) -> None:
    each = request(0, 2 * SLICE)
    start(scheduler, each)
    scheduler._read_prompts()
    scheduler._close(each)
    scheduler._read_prompts()

    assert scheduler._client.opened == []
    assert scheduler._prompts == {}


class StubClient(CountingClient):
    """Drafts two tokens for every row, in next to no time."""

    def collect(self, *, deadline_ms: float) -> StepDrafts | None:
        return longest_drafts(self.steps[-1], token_id=5)


def test_hook_costs_a_row_of_a_large_batch_less_than_5_microseconds(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415  # slow

    num_rows, num_steps = 256, 25
    output = SimpleNamespace(scheduled_new_reqs=[], total_num_scheduled_tokens=1)
    monkeypatch.setattr(Scheduler, "schedule", lambda self, throttle_prefills=False: output)
    monkeypatch.setattr(Scheduler, "update_from_output", lambda self, scheduler_output, model_runner_output: {})
    scheduler._client, scheduler._max_draft_tokens = StubClient(), 2
    scheduler._options = scheduler._options.model_copy(update={"arithmetic_intensity": 1024})
    scheduler.structured_output_manager = SimpleNamespace(validate_tokens=lambda request, tokens: tokens)
    start(scheduler, *(request(i, 30) for i in range(num_rows)))
    scheduler.requests = {each.request_id: each for each in scheduler.running}
    sampled = [[5, 6][: 1 + row % 2] for row in range(num_rows)]
    result = SimpleNamespace(
        sampled_token_ids=sampled, req_id_to_index={each.request_id: row for row, each in enumerate(scheduler.running)}
    )
    costs = []
    for _ in range(num_steps):
        drafts = {each.request_id: each.spec_token_ids for each in scheduler.running if each.spec_token_ids}
        output.scheduled_spec_decode_tokens = drafts
        output.num_scheduled_tokens = {each.request_id: 1 + len(each.spec_token_ids) for each in scheduler.running}
        started = time.thread_time()
        scheduler.schedule()
        costs.append(time.thread_time() - started)
        for each, tokens in zip(scheduler.running, sampled, strict=True):
            each.append_output_token_ids(tokens)
        started = time.thread_time()
        scheduler.update_from_output(output, result)
        scheduler.update_draft_token_ids(None)
        costs[-1] += time.thread_time() - started

    assert len(drafts) == num_rows
    assert scheduler._fallbacks.counts() == {}
    assert statistics.median(costs) / num_rows < 5e-6
