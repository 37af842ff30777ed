"""Greedy output with AgentSpec equals that of vLLM without a speculative configuration: a real model in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.vllm_lab import (
    MAX_MODEL_LEN,
    Lab,
    OracleClient,
    Output,
    PlainEngine,
    SpyClient,
    count_ties,
    drive,
    first_difference,
    greedy,
    prompts,
    sampled,
)

from agentspec.serving_patch.client import EmbeddedClient

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

MAX_TOKENS = 32


@pytest.fixture(scope="session")
def plain_outputs(plain_engine: PlainEngine) -> Callable[[int], list[Output]]:
    """Plain outputs of the first prompts, batch sizes as asked for; each is computed once."""

    known: dict[int, list[Output]] = {}

    def outputs(count: int) -> list[Output]:
        if count not in known:
            known[count] = plain_engine.run(prompts(count), greedy(MAX_TOKENS))
        return known[count]

    return outputs


def verdicts(lab: Lab, engine: Any) -> tuple[int, int]:
    """Draft and accepted tokens by the engine's count."""
    lab.settle()
    stats = engine.stats()
    return sum(row.num_draft_tokens for row in stats), sum(row.num_accepted_tokens for row in stats)


@pytest.mark.parametrize("batch_size", [1, 8, 32])
def test_output_is_that_of_plain_decoding_cold_and_warm(
    batch_size: int, lab: Lab, plain_outputs: Callable[[int], list[Output]]
) -> None:
    engine = lab.new_engine()
    lab.use(EmbeddedClient(engine))
    cold = lab.run(prompts(batch_size), greedy(MAX_TOKENS))
    _, num_cold = verdicts(lab, engine)
    warm = lab.run(prompts(batch_size), greedy(MAX_TOKENS))
    num_drafts, num_accepted = verdicts(lab, engine)

    plain = plain_outputs(batch_size)
    num_ties = count_ties(plain, cold) + count_ties(plain, warm)
    assert num_ties <= batch_size // 8
    assert num_accepted - num_cold > batch_size * MAX_TOKENS // 2  # of the warm run: the test is about drafts
    assert num_drafts >= num_accepted
    assert engine.num_open_requests() == 0
    engine.check_integrity()


def test_requests_beside_aborted_ones_end_as_in_plain_decoding(
    lab: Lab, plain_outputs: Callable[[int], list[Output]]
) -> None:
    engine = lab.new_engine()
    lab.use(EmbeddedClient(engine))
    plain = plain_outputs(8)
    aborted = {1: 1, 3: 2, 4: 3, 6: 4}
    for _ in ("cold", "warm"):
        ours = lab.run(prompts(8), greedy(MAX_TOKENS), abort_after=aborted)
        survivors = [i for i in range(8) if i not in aborted]

        assert count_ties([plain[i] for i in survivors], [ours[i] for i in survivors]) == 0
        for i in aborted:
            assert len(ours[i].token_ids) < MAX_TOKENS
            assert first_difference(plain[i].token_ids, ours[i].token_ids) is None
    lab.settle()
    assert engine.num_open_requests() == 0
    engine.check_integrity()


def test_requests_that_reach_max_model_len_end_as_in_plain_decoding(lab: Lab, plain_engine: PlainEngine) -> None:
    texts = prompts(6)
    params = greedy(10 * MAX_MODEL_LEN)
    engine = lab.new_engine()
    lab.use(EmbeddedClient(engine))
    plain = plain_engine.run(texts, params)
    cold = lab.run(texts, params)
    warm = lab.run(texts, params)

    assert {output.finish_reason for output in plain} == {"length"}
    assert count_ties(plain, cold) + count_ties(plain, warm) <= 1
    assert verdicts(lab, engine)[1] > 0
    assert engine.num_open_requests() == 0


def test_perfect_drafts_end_at_max_model_len_without_a_token_too_many(lab: Lab, plain_engine: PlainEngine) -> None:
    texts = prompts(3, first=3)
    params = greedy(10 * MAX_MODEL_LEN)
    plain = plain_engine.run(texts, params)
    lab.use(OracleClient([[*output.token_ids, *[1] * 8] for output in plain]))

    assert count_ties(plain, lab.run(texts, params)) == 0


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 9, 10])
def test_perfect_drafts_end_at_max_tokens_without_a_token_too_many(
    max_tokens: int, lab: Lab, plain_outputs: Callable[[int], list[Output]]
) -> None:
    plain = plain_outputs(8)[:3]
    lab.use(OracleClient([output.token_ids for output in plain]))
    ours = lab.run(prompts(3), greedy(max_tokens))

    assert [output.token_ids for output in ours] == [output.token_ids[:max_tokens] for output in plain]
    assert {output.finish_reason for output in ours} == {"length"}


def test_drafts_past_a_stop_are_cut_as_in_plain_decoding(
    lab: Lab, plain_outputs: Callable[[int], list[Output]]
) -> None:
    plain = plain_outputs(1)[0].token_ids
    stop = plain[12]
    lab.use(OracleClient([plain]))
    ours = lab.run(prompts(1), greedy(MAX_TOKENS, stop_token_ids=[stop]))[0]

    assert ours.token_ids == plain[: plain.index(stop) + 1]
    assert ours.finish_reason == "stop"


def test_drafts_that_are_all_wrong_change_nothing(lab: Lab, plain_outputs: Callable[[int], list[Output]]) -> None:
    plain = plain_outputs(8)
    lab.use(OracleClient([output.token_ids for output in plain], spoil=lambda draft: [token ^ 1 for token in draft]))

    assert count_ties(plain, lab.run(prompts(8), greedy(MAX_TOKENS))) == 0


def test_preempted_requests_end_as_in_plain_decoding(lab: Lab, plain_outputs: Callable[[int], list[Output]]) -> None:
    def preempt_all(step: int) -> None:
        if step in (3, 6):
            assert lab.llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    engine = lab.new_engine()
    spy = SpyClient(EmbeddedClient(engine))
    lab.use(spy)
    lab.run(prompts(8), greedy(MAX_TOKENS))
    ours = lab.run(prompts(8), greedy(MAX_TOKENS), on_step=preempt_all)
    lab.settle()

    assert count_ties(plain_outputs(8), ours) == 0
    assert spy.num_opens == 16  # a preempted request stays known
    assert engine.num_open_requests() == 0


def test_chunked_prompts_end_as_in_plain_decoding(lab: Lab, plain_engine: PlainEngine) -> None:
    # 10 prompts of 100 tokens need two steps of 512; the first ones decode, with drafts, beside the rest.
    texts = [[int(token) for token in np.random.default_rng(i).integers(20, 49000, 100)] for i in range(10)]
    params = greedy(16)
    plain = plain_engine.run(texts, params)
    lab.use(OracleClient([output.token_ids for output in plain]))

    assert count_ties(plain, lab.run(texts, params)) <= 1


def test_samples_of_one_prompt_end_as_in_plain_decoding(lab: Lab, plain_outputs: Callable[[int], list[Output]]) -> None:
    # top_k = 1 is greedy, by the path of random sampling.
    params = sampled(MAX_TOKENS, n=3, temperature=0.8, top_k=1)
    lab.llm.generate(prompts(1), params, use_tqdm=False)
    results = lab.llm.generate(prompts(1), params, use_tqdm=False)

    assert [sample.token_ids for sample in results[0].outputs] == [list(plain_outputs(1)[0].token_ids)] * 3


def test_structured_output_with_drafts_is_that_of_plain_decoding(lab: Lab, plain_engine: PlainEngine) -> None:
    from vllm.sampling_params import StructuredOutputsParams  # noqa: PLC0415  # imports vLLM

    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["parser", "lexer", "router"]}, "methods": {"enum": ["add", "remove"]}},
        "required": ["name", "methods"],
        "additionalProperties": False,
    }
    params = greedy(40, structured_outputs=StructuredOutputsParams(json=schema), ignore_eos=False)
    plain = plain_engine.run(prompts(4), params)
    texts = [list(output.token_ids) for output in plain]
    # Every second draft leaves the grammar after its first token.
    lab.use(OracleClient(texts, spoil=lambda draft: draft if len(draft) % 2 else [*draft[:1], *[5] * (len(draft) - 1)]))
    ours = lab.run(prompts(4), params)

    assert count_ties(plain, ours) == 0
    for output in ours:
        assert json.loads(lab.llm.get_tokenizer().decode(output.token_ids, skip_special_tokens=True))


def test_random_sampling_with_drafts_ends_every_request(lab: Lab, plain_outputs: Callable[[int], list[Output]]) -> None:
    engine = lab.new_engine()
    lab.use(EmbeddedClient(engine))
    params = [
        sampled(MAX_TOKENS, temperature=0.8, top_p=top_p, top_k=top_k)
        for top_p, top_k in ((1.0, 0), (0.9, 0), (1.0, 20), (0.9, 20))
    ]
    for _ in range(2):
        ours = lab.run(prompts(8), [params[i % 4] for i in range(8)])
        assert [len(output.token_ids) for output in ours] == [MAX_TOKENS] * 8
    assert verdicts(lab, engine)[0] > 0
    assert engine.num_open_requests() == 0


def test_low_temperature_follows_the_target_model_with_drafts(
    lab: Lab, plain_outputs: Callable[[int], list[Output]]
) -> None:
    # Temperature and top_k are tensors that vLLM's CPU kernel leaves uninitialised; at 0.01 the output is greedy but
    # for near ties, with a garbage temperature it is not.
    plain = plain_outputs(8)
    sure = [i for i in range(8) if min(plain[i].logit_gaps) > 0.2]
    assert len(sure) >= 2
    lab.use(OracleClient([output.token_ids for output in plain]))
    params = sampled(MAX_TOKENS, temperature=0.01, top_p=0.99, top_k=50)
    ours = lab.run(prompts(8), params)

    assert [ours[i].token_ids for i in sure] == [plain[i].token_ids for i in sure]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_without_drafts_tokens_and_logprobs_are_those_of_plain_decoding(
    temperature: float, lab: Lab, plain_engine: PlainEngine
) -> None:
    params = sampled(16, temperature=temperature, seed=7, logprobs=3, presence_penalty=0.5, min_tokens=4)
    lab.use(OracleClient([[]] * 4))
    plain = drive(plain_engine.llm, prompts(4), params)
    ours = lab.run(prompts(4), params)

    assert [output.token_ids for output in ours] == [output.token_ids for output in plain]
    for one, other in zip(ours, plain, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
