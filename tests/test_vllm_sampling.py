"""Every sampling parameter of vLLM with drafts: a real model in float32, the output of plain decoding beside ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.chi_square import p_value
from tests.vllm_lab import Lab, OracleClient, Output, PlainEngine, SpyClient, drive, greedy, prompts, sampled

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

MAX_TOKENS = 20
PARAMETERS: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.0},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "bad_words": {"bad_words": [" class", " add", "Ticket"]},
    "min_tokens": {"min_tokens": 15, "ignore_eos": False, "stop_token_ids": [198, 28]},
    "allowed_token_ids": {"allowed_token_ids": list(range(100, 2000))},
    "stop": {"stop": ["add", "("]},
    "stop_token_ids": {"stop_token_ids": [1462]},
    "logit_bias": {"logit_bias": {28: 5.0, 198: -100.0}},
    "top_k of 1": {"temperature": 0.9, "top_k": 1},
    "top_p of almost nothing": {"temperature": 0.9, "top_p": 1e-6},
    "min_p of 1": {"temperature": 0.9, "min_p": 1.0},
    "seed": {"temperature": 0.9, "top_k": 1, "seed": 11},
    "structured_outputs": {"structured": r"[a-z]{80}[0-9]{3}"},
    "skip_special_tokens": {"skip_special_tokens": False},
}
UNVERIFIABLE = ("logit_bias", "min_p of 1")
NEVER = 1 << 30


def params_of(name: str) -> Any:
    fields = dict(PARAMETERS[name])
    if pattern := fields.pop("structured", None):
        from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415  # imports vLLM

        fields |= {"structured_outputs": StructuredOutputsParams(regex=pattern), "ignore_eos": False}
    return sampled(MAX_TOKENS, **{"temperature": 0.0, **fields})


def plain_tokens(plain_engine: PlainEngine, params: Any) -> list[tuple[int, ...]]:
    return [output.token_ids for output in drive(plain_engine.llm, prompts(2), params)]


def tokens(outputs: Sequence[Output]) -> list[tuple[int, ...]]:
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("drafts", ["right", "wrong"])
def test_output_under_a_parameter_is_that_of_plain_decoding(
    name: str, drafts: str, lab: Lab, plain_engine: PlainEngine
) -> None:
    params = params_of(name)
    plain = plain_tokens(plain_engine, params)
    spoiled = 2 if drafts == "wrong" else NEVER
    spy = SpyClient(OracleClient(plain, spoil=lambda draft: [*draft[:spoiled], *(t ^ 1 for t in draft[spoiled:])]))
    lab.use(spy)
    ours = lab.run(prompts(2), params)
    lab.settle()

    assert tokens(ours) == plain
    num_draft_tokens = sum(int(step.num_draft_tokens.sum()) for step in spy.steps)
    assert (num_draft_tokens > 0) == (name not in UNVERIFIABLE)
    assert lab.fallbacks() == {}


@pytest.mark.parametrize("name", UNVERIFIABLE)
def test_request_that_cannot_be_verified_stays_right_beside_one_with_drafts(
    name: str, lab: Lab, plain_engine: PlainEngine
) -> None:
    params = [params_of(name), greedy(MAX_TOKENS)]
    plain = tokens(drive(plain_engine.llm, prompts(2), params))
    spy = SpyClient(OracleClient(plain))
    lab.use(spy)
    ours = lab.run(prompts(2), params)
    lab.settle()

    assert tokens(ours) == plain
    drafted = np.sum([step.num_draft_tokens for step in spy.steps if len(step.handles) == 2], axis=0)
    assert drafted[0] == 0
    assert drafted[1] > 0


def test_log_probabilities_are_those_of_plain_decoding(lab: Lab, plain_engine: PlainEngine) -> None:
    params = greedy(MAX_TOKENS, logprobs=3, prompt_logprobs=2)
    plain = drive(plain_engine.llm, prompts(2), params)
    lab.use(OracleClient(tokens(plain)))
    ours = lab.run(prompts(2), params)

    assert tokens(ours) == tokens(plain)
    for one, other in zip(ours, plain, strict=True):
        assert len(one.logprobs) == MAX_TOKENS
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def test_log_probabilities_of_given_tokens_are_those_of_plain_decoding(lab: Lab, plain_engine: PlainEngine) -> None:
    params = [greedy(MAX_TOKENS, logprob_token_ids=[5, 28, 198]), greedy(MAX_TOKENS)]
    plain = drive_completions(plain_engine.llm, params)
    lab.use(OracleClient([completion.token_ids for completion in plain]))
    ours = drive_completions(lab.llm, params)

    assert [completion.token_ids for completion in ours] == [completion.token_ids for completion in plain]
    for one, other in zip(ours[0].logprobs, plain[0].logprobs, strict=True):
        assert one.keys() == other.keys()
        assert [entry.logprob for entry in one.values()] == pytest.approx(
            [entry.logprob for entry in other.values()], abs=1e-3
        )


def drive_completions(llm: Any, params: Sequence[Any]) -> list[Any]:
    """vLLM's own completions of the first prompts; the second one starts first, and has drafts when the first comes."""
    engine = llm.llm_engine
    engine.add_request("late-1", prompts(2)[1], params[1])
    completions: dict[str, Any] = {}
    for step in range(100):
        if step == 3:
            engine.add_request("late-0", prompts(2)[0], params[0])
        completions |= {output.request_id: output.outputs[0] for output in engine.step()}
        if step > 3 and not engine.has_unfinished_requests():
            return [completions["late-0"], completions["late-1"]]
    raise AssertionError("the engine does not come to an end")


def test_drafting_goes_on_after_a_request_that_keeps_its_batch_plain(lab: Lab, plain_engine: PlainEngine) -> None:
    plain = tokens(plain_engine.run(prompts(1), greedy(MAX_TOKENS)))
    drive_completions(lab.llm, [greedy(2, logprob_token_ids=[5, 28]), greedy(4)])
    spy = SpyClient(OracleClient(plain))
    lab.use(spy)

    assert tokens(lab.run(prompts(1), greedy(MAX_TOKENS))) == plain
    lab.settle()
    assert any(step.num_draft_tokens.any() for step in spy.steps)


NUM_SAMPLES = 2048
BATCH = 32
ALLOWED = [28, 198, 504]  # a comma, a line break, " the"
DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "three tokens": {"temperature": 1.4, "allowed_token_ids": ALLOWED},
    "top_k": {"temperature": 1.5, "top_k": 3},
    "top_p": {"temperature": 0.8, "top_p": 0.5, "allowed_token_ids": [*ALLOWED, 357, 216]},
    "penalties": {"temperature": 1.2, "presence_penalty": 0.8, "allowed_token_ids": ALLOWED},
}
PROMPT = [504, 357, 28, 216, 198, 504, 28, 198, 357, 504]


def sample(llm: Any, fields: dict[str, Any], before: Any = lambda: None) -> Counter[tuple[int, ...]]:
    """How often each text of three tokens was drawn."""
    counts: Counter[tuple[int, ...]] = Counter()
    for _ in range(NUM_SAMPLES // BATCH):
        before()
        counts.update(tokens(drive(llm, [PROMPT] * BATCH, sampled(3, **fields))))
    return counts


@pytest.mark.parametrize(
    "name", [name if name == "top_k" else pytest.param(name, marks=pytest.mark.slow) for name in DISTRIBUTIONS]
)
def test_distribution_with_drafts_is_that_of_plain_decoding(name: str, lab: Lab, plain_engine: PlainEngine) -> None:
    fields = DISTRIBUTIONS[name]
    plain = sample(plain_engine.llm, fields)
    texts = [text for text, _ in plain.most_common(4)]
    lengths: list[int] = []

    def count(draft: list[int]) -> list[int]:
        lengths.append(len(draft))
        return draft

    def draft_another_text() -> None:
        lab.use(OracleClient([texts[len(lengths) % len(texts)]] * BATCH, spoil=count))

    ours = sample(lab.llm, fields, draft_another_text)

    assert len(plain) >= 6
    assert p_value(plain, ours) > 1e-4
    assert sum(lengths) >= NUM_SAMPLES / 2


@pytest.mark.slow
def test_chi_square_sees_a_wrong_temperature(plain_engine: PlainEngine) -> None:
    fields = DISTRIBUTIONS["top_k"]

    assert p_value(sample(plain_engine.llm, fields), sample(plain_engine.llm, {**fields, "temperature": 1.2})) < 1e-4
