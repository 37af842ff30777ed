"""The scheduler hook driven without a model: long prompts are read in slices, whoever waits for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

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

    from agentspec.serving_patch import hook_v1  # noqa: PLC0415  # imports vLLM

    config = SimpleNamespace(
        additional_config={"agentspec": {"metrics_port": 0}},
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCAB_SIZE),
        device_config=SimpleNamespace(device_type="cuda"),
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
    monkeypatch.setattr(hook_v1, "read_grammar", lambda _: CHAT)
    monkeypatch.setattr(hook_v1.AgentSpecScheduler, "_make_client", lambda self: CountingClient())
    scheduler = hook_v1.AgentSpecScheduler()
    scheduler._client.shutdown()
    scheduler._client = CountingClient()  # no thread: calls are seen as they are made
    return scheduler


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
