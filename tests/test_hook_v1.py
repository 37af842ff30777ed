"""The scheduler hook in a real vLLM engine: what it tells the draft client, and what a bad client cannot do to it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.vllm_lab import (
    MAX_MODEL_LEN,
    GarbageClient,
    HangingClient,
    Lab,
    OracleClient,
    Output,
    PlainEngine,
    RaisingClient,
    SpyClient,
    count_ties,
    drafts_for,
    greedy,
    longest_drafts,
    prompts,
    sampled,
    shifted,
)

from agentspec.serving_patch import command_queue
from agentspec.serving_patch.client import EmbeddedClient
from agentspec.sidecar.engine import FinishReason, StepDrafts, StepRequest
from agentspec.sidecar.options import OptionsError
from agentspec.sidecar.tags import UNTAGGED, Tags

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

MAX_TOKENS = 16


@pytest.fixture
def spy(lab: Lab) -> SpyClient:
    spy = SpyClient(lab.new_client())
    lab.use(spy)
    return spy


@pytest.fixture(scope="session")
def plain(plain_engine: PlainEngine) -> list[Output]:
    """Plain outputs of the first four prompts."""

    return plain_engine.run(prompts(4), greedy(MAX_TOKENS))


def tagged(**tags: Any) -> Any:
    return greedy(MAX_TOKENS, extra_args={"agentspec": json.dumps(tags)})


@pytest.fixture(autouse=True)
def _empty_prefix_cache(lab: Lab) -> None:
    lab.llm.llm_engine.reset_prefix_cache()


def random_prompts(count: int, length: int) -> list[list[int]]:
    texts: list[list[int]] = np.random.default_rng(length).integers(20, 49000, (count, length)).tolist()
    return texts


def run_four(lab: Lab, **kwargs: Any) -> list[Output]:
    outputs = lab.run(prompts(4), greedy(MAX_TOKENS), **kwargs)
    lab.settle()
    return outputs


def run_one(lab: Lab, params: Any) -> list[Output]:
    outputs = lab.run(prompts(1), params)
    lab.settle()
    return outputs


def test_steps_and_tail_make_up_the_output_of_every_request(lab: Lab, spy: SpyClient) -> None:
    outputs = run_four(lab)

    assert [closed.output for closed in spy.closed.values()] == [list(output.token_ids) for output in outputs]
    assert all(closed.true_length == MAX_TOKENS for closed in spy.closed.values())
    assert all(closed.tail for closed in spy.closed.values())
    assert spy.outputs == {}


def test_request_that_reached_its_limit_is_closed_with_length(lab: Lab, spy: SpyClient) -> None:
    run_four(lab)

    assert {closed.reason for closed in spy.closed.values()} == {FinishReason.LENGTH}


def test_request_that_stopped_is_closed_with_stop_and_nothing_past_it(lab: Lab, plain: list[Output]) -> None:
    text = list(plain[0].token_ids)
    spy = SpyClient(OracleClient([text]))
    lab.use(spy)
    lab.run(prompts(1), greedy(MAX_TOKENS, stop_token_ids=[text[6]]))
    lab.settle()
    closed = spy.closed.popitem()[1]

    assert closed.reason == FinishReason.STOP
    assert closed.output == text[: text.index(text[6]) + 1]
    assert closed.true_length == len(closed.output)


def test_aborted_request_is_closed_with_its_true_length(lab: Lab, spy: SpyClient) -> None:
    outputs = run_four(lab, abort_after={0: 1, 2: 5})
    closed = list(spy.closed.values())

    assert [entry.reason for entry in closed].count(FinishReason.ABORT) == 2
    assert sorted(entry.true_length for entry in closed) == sorted(len(output.token_ids) for output in outputs)
    assert all(entry.true_length == len(entry.output) for entry in closed)


def test_request_that_is_aborted_inside_its_prompt_is_closed_empty(lab: Lab, spy: SpyClient) -> None:
    lab.run(random_prompts(5, 120), greedy(2), abort_after={4: 1})  # 600 prompt tokens; a step takes 512
    lab.settle()
    aborted = [closed for closed in spy.closed.values() if closed.reason == FinishReason.ABORT]

    assert [(closed.true_length, closed.output) for closed in aborted] == [(0, [])]
    assert len(spy.closed) == 5


def test_request_that_never_ran_is_neither_opened_nor_closed(lab: Lab, spy: SpyClient) -> None:
    lab.run(prompts(33), greedy(3), abort_after={32: 1})  # max_num_seqs is 32
    lab.settle()

    assert spy.num_opens == 32
    assert len(spy.closed) == 32


def test_client_gets_the_prompt(lab: Lab, spy: SpyClient) -> None:
    lab.run([[5, 6, 7, 8]], greedy(2))
    lab.settle()

    assert list(spy.prompts.values()) == [[5, 6, 7, 8]]


def test_tags_of_the_request_reach_the_client(lab: Lab, spy: SpyClient) -> None:
    run_one(lab, tagged(workflow_id="w", stage="writer/draft", namespace="team"))

    assert list(spy.tags.values()) == [Tags(workflow_id="w", stage="writer/draft", namespace="team")]
    assert list(spy.namespaces.values()) == ["default"]  # the engine adds the tag's part


@pytest.mark.parametrize("extra_args", [{"agentspec": "{"}, {"agentspec": '{"stage": 1}'}, {"agentspec_color": "red"}])
def test_request_with_bad_tags_is_served_untagged_and_counted(
    extra_args: dict[str, Any], lab: Lab, spy: SpyClient, plain: list[Output]
) -> None:
    outputs = run_one(lab, greedy(MAX_TOKENS, extra_args=extra_args))

    assert outputs[0].token_ids == plain[0].token_ids
    assert list(spy.tags.values()) == [UNTAGGED]
    assert lab.fallbacks() == {"bad_tags": 1}


def test_grammar_of_the_request_decides_what_its_blocks_are(lab: Lab, plain: list[Output]) -> None:
    engine = lab.new_engine()
    lab.use(EmbeddedClient(engine))
    words = lab.llm.get_tokenizer().decode(plain[0].token_ids)
    start = words[2:6]  # of the output itself
    grammar = {"blocks": [{"name": "plan", "start": start, "end": None, "anchor": "anywhere"}]}
    outputs = run_one(lab, tagged(workflow_id="w", grammar=grammar))

    assert outputs[0].token_ids == plain[0].token_ids
    assert "plan" in {row.block for row in engine.stats()}
    assert lab.fallbacks() == {}


def test_request_whose_grammar_is_unknown_is_served_and_counted(lab: Lab, plain: list[Output]) -> None:
    lab.use(lab.new_client())
    outputs = run_one(lab, tagged(grammar="nobody"))

    assert outputs[0].token_ids == plain[0].token_ids
    assert lab.fallbacks() == {"bad_grammar": 1}


def test_sampling_of_the_request_reaches_the_client(lab: Lab, spy: SpyClient) -> None:
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415  # imports vLLM

    run_one(lab, sampled(2, temperature=0.5))
    run_one(lab, greedy(2, structured_outputs=StructuredOutputsParams(regex="a+")))

    assert [(sampling.temperature, sampling.is_structured) for sampling in spy.samplings.values()] == [
        (0.5, False),
        (0.0, True),
    ]


@pytest.mark.parametrize(("tags", "most"), [({}, 8), ({"max_draft_tokens": 2}, 2), ({"speculate": False}, 0)])
def test_room_of_a_row_is_capped_by_its_tags(tags: dict[str, Any], most: int, lab: Lab, spy: SpyClient) -> None:
    run_one(lab, tagged(**tags))

    assert max(step.max_draft_tokens.max() for step in spy.steps) == most


def test_room_of_a_row_ends_with_its_limits(lab: Lab, spy: SpyClient) -> None:
    lab.run([[9] * (MAX_MODEL_LEN - 12), [9] * 20], [greedy(100), greedy(11)])
    lab.settle()

    lengths = {handle: len(prompt) for handle, prompt in spy.prompts.items()}
    for step in spy.steps:
        for handle, position, count, room in zip(
            step.handles, step.positions, np.diff(step.token_offsets), step.max_draft_tokens, strict=True
        ):
            num_output = int(position + count)
            to_model_len = MAX_MODEL_LEN - lengths[int(handle)] - num_output - 1
            to_max_tokens = (100 if lengths[int(handle)] > 20 else 11) - num_output - 1
            assert room == max(0, min(8, to_model_len, to_max_tokens))


def test_token_budget_is_what_rows_and_prompts_leave_of_a_step(lab: Lab, spy: SpyClient) -> None:
    lab.run(random_prompts(5, 120), greedy(4))
    lab.settle()
    first = spy.steps[0]
    most = lab.scheduler.max_num_scheduled_tokens

    assert (first.num_decode_rows, first.num_prefill_tokens) == (4, 5 * 120 - 512)
    for step in spy.steps:
        assert step.num_decode_rows == len(step.handles)
        assert step.token_budget == max(0, most - step.num_decode_rows - step.num_prefill_tokens)


def test_prompts_that_wait_count_as_prefill(lab: Lab, spy: SpyClient, monkeypatch: pytest.MonkeyPatch) -> None:
    original = lab.scheduler.update_from_output
    late_ids: list[str] = []

    def update_from_output(*args: Any) -> Any:
        if not late_ids:  # it arrives while the model runs its first step
            late_ids.append(lab.llm.llm_engine.add_request("late", {"prompt_token_ids": [7] * 50}, greedy(2)))
        return original(*args)

    monkeypatch.setattr(lab.scheduler, "update_from_output", update_from_output)
    lab.run(prompts(1), greedy(MAX_TOKENS))
    lab.settle()

    assert [step.num_prefill_tokens for step in spy.steps[:3]] == [50, 0, 0]


def test_policy_off_never_drafts_and_still_feeds_the_histories(lab: Lab, plain: list[Output]) -> None:
    engine = lab.new_engine()
    engine.set_policy("off")
    spy = SpyClient(EmbeddedClient(engine))
    lab.use(spy)
    outputs = [*run_four(lab), *run_four(lab)]

    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain] * 2
    assert sum(int(step.num_draft_tokens.sum()) for step in spy.steps) == 0
    assert engine.num_history_tokens() >= 4 * MAX_TOKENS


def test_every_step_says_how_long_the_last_one_took_and_what_was_in_it(lab: Lab, spy: SpyClient) -> None:
    run_four(lab)
    first, *later = spy.steps

    assert first.timing is not None
    assert first.timing.num_prefill_tokens > 0
    for before, step in zip(spy.steps, later, strict=False):
        assert step.timing is not None
        assert step.timing.duration_ms > 0
        assert step.timing.num_decode_rows == before.num_decode_rows
        assert step.timing.num_draft_tokens == step.num_draft_tokens.sum()
        assert step.timing.num_context_tokens >= before.num_context_tokens


def test_verdicts_are_those_that_vllm_counts(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted, accepted = [], []
    original = lab.scheduler.update_from_output

    def update_from_output(*args: Any) -> Any:
        outputs = original(*args)
        for output in outputs.values():
            if output.scheduler_stats is not None and output.scheduler_stats.spec_decoding_stats is not None:
                drafted.append(output.scheduler_stats.spec_decoding_stats.num_draft_tokens)
                accepted.append(output.scheduler_stats.spec_decoding_stats.num_accepted_tokens)
        return outputs

    monkeypatch.setattr(lab.scheduler, "update_from_output", update_from_output)
    engine = lab.new_engine()
    lab.use(EmbeddedClient(engine))
    run_four(lab)
    run_four(lab)
    stats = engine.stats()

    assert sum(drafted) > 0
    assert sum(row.num_draft_tokens for row in stats) == sum(drafted)
    assert sum(row.num_accepted_tokens for row in stats) == sum(accepted)
    assert sum(row.num_tokens for row in stats) == 8 * MAX_TOKENS


def test_prompt_in_the_prefix_cache_costs_no_draft_tokens(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    text = random_prompts(1, 33)[0]  # a block of the prefix cache and one token
    drafts: list[list[int]] = []
    original = lab.scheduler.schedule

    def schedule(*args: Any) -> Any:
        output = original(*args)
        drafts.extend(output.scheduled_spec_decode_tokens.values())
        return output

    monkeypatch.setattr(lab.scheduler, "schedule", schedule)
    lab.run([text], greedy(1))
    lab.run([prompts(1)[0], text], greedy(2))
    num_ours = sum(draft.count(-1) for draft in drafts)
    monkeypatch.setattr(lab.scheduler, "dynamic_sd_lookup", None)
    lab.run([prompts(1)[0], text], greedy(2))
    num_stock = sum(draft.count(-1) for draft in drafts)

    assert num_ours == 0
    assert num_stock > 0  # else vLLM no longer pads, and our switch may go


def failing_clients() -> dict[str, Callable[[Any], Any]]:
    def garbage(change: Callable[[StepRequest, StepDrafts], Any]) -> Callable[[Any], Any]:
        return lambda target: GarbageClient(target, change)

    return {
        "raises in open": lambda target: RaisingClient(target, "open"),
        "raises in submit": lambda target: RaisingClient(target, "submit"),
        "raises in collect": lambda target: RaisingClient(target, "collect"),
        "raises in close": lambda target: RaisingClient(target, "close"),
        "lost its peer": lambda target: RaisingClient(
            target, "open", "submit", "collect", "close", error=ConnectionResetError("peer is gone")
        ),
        "tokens past the vocabulary": garbage(lambda step, _: shifted(longest_drafts(step, 49150), 2)),
        "negative tokens": garbage(lambda step, _: longest_drafts(step, -1)),
        "drafts that are too long": garbage(lambda step, _: longest_drafts(step, 5, extra=9)),
        "one row too few": garbage(lambda step, _: drafts_for(step, [[5]] * (len(step.handles) - 1))),
        "one row too many": garbage(lambda step, _: drafts_for(step, [[5]] * (len(step.handles) + 1))),
        "lengths without tokens": garbage(lambda step, drafts: replace(drafts, draft_lengths=step.max_draft_tokens)),
        "another step": garbage(lambda _, drafts: replace(drafts, step_id=drafts.step_id - 1)),
        "no answer": garbage(lambda _step, _drafts: None),
        "a string": garbage(lambda _step, _drafts: "drafts"),
        "lies about lost requests": garbage(
            lambda step, drafts: replace(drafts, resync_handles=np.array([*step.handles, -5, 1 << 60], np.int64))
        ),
        "negative skip": garbage(lambda _, drafts: replace(drafts, skip_steps=-3)),
        "wrong drafts": garbage(lambda step, _: longest_drafts(step, 5)),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "raises in open",
        "raises in submit",
        "raises in collect",
        "raises in close",
        "lost its peer",
        "tokens past the vocabulary",
        "negative tokens",
        "drafts that are too long",
        "one row too few",
        "one row too many",
        "lengths without tokens",
        "another step",
        "no answer",
        "a string",
        "lies about lost requests",
        "negative skip",
        "wrong drafts",
    ],
)
def test_bad_client_leaves_the_output_as_it_is(kind: str, lab: Lab, plain: list[Output]) -> None:
    lab.use(failing_clients()[kind](lab.new_client()))
    outputs = run_four(lab)

    assert count_ties(plain, outputs) == 0
    harmless = ("lies about lost requests", "negative skip", "wrong drafts")
    assert bool(lab.fallbacks()) == (kind not in harmless)


def test_client_that_hangs_for_ever_costs_one_deadline(
    lab: Lab, plain: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = HangingClient(lab.new_client())
    lab.use(client, deadline_ms=200)
    waits: list[float] = []
    original = lab.scheduler._client.collect

    def collect(*, deadline_ms: float) -> Any:
        begin = time.monotonic()
        drafts = original(deadline_ms=deadline_ms)
        waits.append(time.monotonic() - begin)
        return drafts

    monkeypatch.setattr(lab.scheduler._client, "collect", collect)
    try:
        outputs = lab.run(prompts(4), greedy(MAX_TOKENS))
    finally:
        client.let_go.set()

    assert count_ties(plain, outputs) == 0
    assert lab.fallbacks()["deadline"] == 1
    assert sum(wait >= 0.2 for wait in waits) == 1
    assert len(waits) > MAX_TOKENS // 2


def test_client_that_comes_back_gets_the_whole_text_again(
    lab: Lab, plain: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = lab.new_engine()
    spy = LenientSpy(EmbeddedClient(engine))
    client = HangingClient(spy)
    lab.use(client, deadline_ms=20)
    monkeypatch.setattr(command_queue, "MAX_QUEUED_TOKENS", 700)  # so that steps are dropped

    def let_go(step: int) -> None:
        if step == 10:
            client.let_go.set()
            lab.settle()
            monkeypatch.undo()
            lab.scheduler._deadline_ms = 2000.0

    try:
        outputs = run_four(lab, on_step=let_go)
    finally:
        client.let_go.set()

    assert count_ties(plain, outputs) == 0
    assert lab.fallbacks()["queue_full"] > 0
    assert sorted(closed.output for closed in spy.closed.values()) == sorted(
        list(output.token_ids) for output in outputs
    )
    assert engine.num_open_requests() == 0
    engine.check_integrity()


class LenientSpy(SpyClient):
    """A spy that may miss calls: it drops what does not follow, as the real engine does."""

    def submit(self, step: StepRequest) -> None:
        for row, handle in enumerate(step.handles.tolist()):
            output = self.outputs.get(handle)
            if output is not None and step.positions[row] == len(output):
                output += step.token_ids[step.token_offsets[row] : step.token_offsets[row + 1]].tolist()
        self.target.submit(step)


def test_requests_that_the_client_lost_are_opened_again_from_the_start(lab: Lab, plain: list[Output]) -> None:
    spy = SpyClient(lab.new_client())

    def lose_all(step: StepRequest, drafts: StepDrafts) -> StepDrafts:
        return replace(drafts, resync_handles=step.handles) if len(spy.steps) == 4 else drafts

    lab.use(GarbageClient(spy, lose_all))
    outputs = run_four(lab)

    assert count_ties(plain, outputs) == 0
    assert spy.num_opens == 8
    assert (spy.steps[4].positions == 0).all()
    assert sorted(closed.output for closed in spy.closed.values()) == sorted(
        list(output.token_ids) for output in outputs
    )


def test_steps_that_the_client_wants_skipped_are_submitted_and_not_waited_for(lab: Lab, plain: list[Output]) -> None:
    spy = SpyClient(OracleClient([output.token_ids for output in plain], spoil=lambda draft: draft[:1]))
    lab.use(GarbageClient(spy, lambda _, drafts: replace(drafts, skip_steps=3)))
    outputs = run_four(lab)
    has_drafts = [bool(step.num_draft_tokens.any()) for step in spy.steps]

    assert count_ties(plain, outputs) == 0
    assert has_drafts[:10] == [False, True, False, False, False, True, False, False, False, True]
    assert sorted(closed.output for closed in spy.closed.values()) == sorted(
        list(output.token_ids) for output in outputs
    )


def test_bug_in_the_hook_leaves_the_output_as_it_is(
    lab: Lab, plain: list[Output], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("a bug")

    for name in ("_make_step", "_close", "_find_row", "_count_verdicts"):
        monkeypatch.setattr(lab.scheduler, name, fail)
    outputs = run_four(lab)
    monkeypatch.undo()
    lab.scheduler._rows.clear()

    assert [output.token_ids for output in outputs] == [output.token_ids for output in plain]
    assert lab.fallbacks()["hook_error"] > 0


def test_pooling_requests_and_streaming_sessions_are_left_alone(lab: Lab) -> None:
    pooling = SimpleNamespace(request_id="p", sampling_params=None, resumable=False)
    session = SimpleNamespace(request_id="s", sampling_params=object(), resumable=True)

    assert lab.scheduler._find_row(pooling) is None
    assert lab.scheduler._find_row(session) is None
    assert lab.scheduler._rows == {}


def test_wrong_option_stops_the_engine_before_it_starts() -> None:
    from agentspec.serving_patch.drafting import _read_options  # noqa: PLC0415  # imports vLLM

    with pytest.raises(OptionsError, match="polcy"):
        _read_options(SimpleNamespace(additional_config={"agentspec": {"polcy": "off"}}))


def test_start_is_one_line_with_what_matters(lab: Lab, agentspec_log: pytest.LogCaptureFixture) -> None:
    lab.scheduler._drafting.log_start("v1")

    assert len(agentspec_log.records) == 1
    for part in (
        *("hook=v1", "mode=embedded", "policy=goodput", "K=8", "namespace=default"),
        *("grammar=chat", "metrics_port=off", "otlp_endpoint=off"),
    ):
        assert part in agentspec_log.text


def test_no_prompt_or_output_text_is_logged(
    lab: Lab, agentspec_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.scheduler._fallbacks._logged_at.clear()
    run_one(lab, greedy(2, extra_args={"agentspec": '{"stage": ["top secret"]}'}))

    assert "bad_tags" in agentspec_log.text
    assert "secret" not in agentspec_log.text


def test_draft_thread_is_the_only_one_that_we_start(lab: Lab) -> None:
    names = [thread.name for thread in threading.enumerate() if "agentspec" in thread.name]

    assert names == ["agentspec-draft"]
