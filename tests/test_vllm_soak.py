"""A thousand requests of every kind through one real vLLM engine with AgentSpec: none lost, nothing leaked."""

from __future__ import annotations

import json
import resource
from random import Random
from typing import Any

import pytest
from tests.vllm_lab import Lab, prompts, sampled

from agentspec.serving_patch.client import EmbeddedClient

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default")]

NUM_WAVES = 25
WAVE = 40  # the engine runs 32 at a time
MAX_GROWTH_KIB = 64 << 10


def random_params(random: Random) -> Any:
    """Sampling parameters and tags as a careless client would mix them.

    No seeds: vLLM itself fails on a CPU when the prompt of a seeded request comes in chunks ("CPU Generator does not
    use offset"), and 40 requests at once do not fit into one step.
    """
    choices: dict[str, list[Any]] = {
        "temperature": [0.0, 0.0, 0.7, 1.3],
        "top_p": [1.0, 0.9, 0.5],
        "top_k": [0, 1, 20],
        "min_p": [0.0, 0.0, 0.2],
        "presence_penalty": [0.0, 1.0],
        "repetition_penalty": [1.0, 1.2],
        "logprobs": [None, None, 2],
        "min_tokens": [0, 1],
        "ignore_eos": [True, False],
        "stop": [None, ["add"]],
        "logit_bias": [None, None, {28: 3.0}],
        "bad_words": [None, [" class"]],
        "stop_token_ids": [None, [198]],
    }
    fields = {name: random.choice(values) for name, values in choices.items()}
    tags: list[Any] = [
        {"workflow_id": f"w{random.randrange(3)}", "stage": "s", "iteration": random.randrange(4)},
        {"speculate": False},
        {"max_draft_tokens": 2, "history": "read", "block": "code"},
        {"history": "off", "namespace": "team", "grammar": random.choice(["react", "llama", "nobody"])},
        {"stage": 7},
    ]
    extra_args = random.choice([None, *({"agentspec": json.dumps(tag)} for tag in tags)])
    return sampled(random.choice([1, 2, 7, 20, 200]), extra_args=extra_args, **fields)


def test_thousand_random_requests_lose_and_leak_nothing(lab: Lab) -> None:
    random = Random(3)  # noqa: S311  # repeatable, not secret
    engine = lab.new_engine()
    lab.use(EmbeddedClient(engine, fallbacks=lab.scheduler._fallbacks))
    peak_kib = 0
    for wave in range(NUM_WAVES):
        params = [random_params(random) for _ in range(WAVE)]
        aborted = {i: random.randrange(1, 12) for i in random.sample(range(WAVE), 6)}
        outputs = lab.run(prompts(WAVE, first=wave * 7), params, abort_after=aborted)
        lost = [i for i, output in enumerate(outputs) if output.finish_reason is None and i not in aborted]
        assert lost == []
        if wave == NUM_WAVES // 2:
            peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lab.settle()

    assert engine.num_open_requests() == 0
    assert lab.scheduler._rows == {}
    assert lab.scheduler._plain_batch_ids == set()
    assert set(lab.fallbacks()) <= {"bad_tags", "bad_grammar"}
    assert sum(row.num_accepted_tokens for row in engine.stats()) > 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < MAX_GROWTH_KIB
    engine.check_integrity()
