"""The V2 hook in vLLM's Model Runner V2 on a CPU: outputs are those of plain decoding, whatever happens to drafts.

Every run is a process of its own, because Triton's interpreter is chosen by the environment; see `v2_cpu.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.chi_square import p_value
from tests.sidecar_lab import running_sidecar
from tests.trace_lab import write_tokenizer
from tests.v2_scenario import Outcome, Request, Scenario, mixed_requests, write_scenario, write_tiny_llama

from agentspec.serving_patch import compat_v2
from agentspec.serving_patch.compat import CompatibilityError

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]

PROJECT = Path(__file__).resolve().parent.parent
VOCAB_SIZE = 258
NUM_TOKENS = 300  # that the mixed requests write in a round
Play = Callable[..., Outcome]


@pytest.fixture(scope="module")
def tiny(require_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    return str(write_tiny_llama(folder, write_tokenizer(folder / "bytes.json"), VOCAB_SIZE))


@pytest.fixture(scope="module")
def play(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Play:
    folder = tmp_path_factory.mktemp("scenarios")

    def run(requests: list[Request] | None = None, **fields: Any) -> Outcome:
        scenario = Scenario(tiny, mixed_requests() if requests is None else requests, **fields)
        path = write_scenario(folder / "scenario.json", scenario)
        done = subprocess.run(
            [sys.executable, "-m", "tests.v2_run", str(path)],
            cwd=PROJECT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECT), os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return Outcome(**json.loads(done.stdout.splitlines()[-1]))

    return run


@pytest.fixture(scope="module")
def plain(play: Play) -> list[list[int]]:
    """What the mixed requests get of plain decoding."""
    return play(has_hook=False).tokens[0]


def check(outcome: Outcome, plain: list[list[int]]) -> None:
    """Outputs, counters and histories are exact."""
    assert all(tokens == plain for tokens in outcome.tokens)
    assert outcome.num_draft_tokens == outcome.engine_draft_tokens
    assert (outcome.num_open_requests, outcome.num_syncs) == (0, 0)


@pytest.mark.parametrize("is_async", [True, False])
def test_output_is_that_of_plain_decoding_and_most_drafts_are_accepted(
    is_async: bool, play: Play, plain: list[list[int]]
) -> None:
    outcome = play(is_async=is_async, num_rounds=2, disturbance="syncs")

    check(outcome, plain)
    assert outcome.num_accepted_tokens > 0.8 * outcome.num_draft_tokens > 100
    assert outcome.stages == ["plan"]
    assert outcome.fallbacks == {}


@pytest.mark.parametrize("is_async", [True, False])
def test_history_holds_no_token_past_the_end_of_a_request(is_async: bool, play: Play, plain: list[list[int]]) -> None:
    requests = [
        Request(request.prompt, {**request.sampling, "stop_token_ids": [tokens[len(tokens) // 2]]}, request.extra_args)
        for request, tokens in zip(mixed_requests(), plain, strict=True)
    ]
    outcome = play(requests, is_async=is_async, num_rounds=3)

    lengths = [len(tokens) for tokens in outcome.tokens[0]]
    assert outcome.tokens[0] == [tokens[:length] for tokens, length in zip(plain, lengths, strict=True)]
    assert outcome.num_accepted_tokens > 50
    assert outcome.history_tokens == outcome.engine_tokens == 3 * sum(lengths)


@pytest.mark.parametrize(
    ("disturbance", "options", "reason"),
    [("raises", {}, "client_error"), ("late", {"deadline_ms": 5}, "deadline"), ("", {"policy": "off"}, "")],
)
def test_client_that_fails_or_is_late_costs_drafts_alone(
    disturbance: str, options: dict[str, Any], reason: str, play: Play, plain: list[list[int]]
) -> None:
    outcome = play(disturbance=disturbance, options=options)

    assert outcome.tokens[0] == plain
    assert not reason or outcome.fallbacks[reason] > 0
    assert reason or (outcome.num_draft_tokens, outcome.fallbacks) == (0, {})


@pytest.mark.parametrize("is_async", [True, False])
def test_preempted_requests_go_on_where_they_were(is_async: bool, play: Play, plain: list[list[int]]) -> None:
    outcome = play(is_async=is_async, num_rounds=2, engine={"num_gpu_blocks_override": 12})

    check(outcome, plain)
    assert outcome.num_preemptions > 0
    assert outcome.num_accepted_tokens > 50


def test_prompts_in_chunks_leave_the_output_as_it_is(play: Play, plain: list[list[int]]) -> None:
    outcome = play(num_rounds=2, engine={"max_num_batched_tokens": 32})

    check(outcome, plain)
    assert outcome.num_accepted_tokens > 50


@pytest.mark.parametrize("is_async", [True, False])
def test_grammar_holds_with_drafts(is_async: bool, play: Play) -> None:
    def structured(has_hook: bool) -> Outcome:
        requests = mixed_requests()
        for request in requests[::2]:
            request.sampling["structured_outputs"] = {"regex": "(abcd|dcba)*"}
        options = {"policy": "fixed"}  # else the steps of a slow machine decide how many drafts are verified
        return play(requests, has_hook=has_hook, is_async=is_async, num_rounds=2, options=options)

    plain, hooked = structured(has_hook=False), structured(has_hook=True)

    assert plain.tokens == hooked.tokens
    assert hooked.num_accepted_tokens > 50


@pytest.mark.parametrize("is_async", [True, False])
def test_ranks_trim_alike(is_async: bool, play: Play, plain: list[list[int]]) -> None:
    outcome = play(is_async=is_async, num_rounds=2, engine={"tensor_parallel_size": 2})

    assert all(tokens == plain for tokens in outcome.tokens)
    assert outcome.num_accepted_tokens > 0.8 * outcome.num_draft_tokens > 100


def test_penalties_and_log_probabilities_are_served_with_drafts(play: Play) -> None:
    requests = mixed_requests(logprobs=2, presence_penalty=0.3, repetition_penalty=1.1)
    outcome = play(requests, num_rounds=2)

    assert outcome.tokens[0] == outcome.tokens[1] == play(requests, has_hook=False).tokens[0]
    assert outcome.num_accepted_tokens > 50


def test_draft_server_drafts_as_the_embedded_engine_does(play: Play, plain: list[list[int]], tmp_path: Path) -> None:
    with running_sidecar(tmp_path / "draft.sock", "--num-speculative-tokens", "4") as server:
        options = {"mode": "sidecar", "socket": str(server.socket)}
        outcome = play(num_rounds=2, options=options)

    assert all(tokens == plain for tokens in outcome.tokens)
    assert outcome.num_accepted_tokens > 50


def test_both_hooks_have_the_same_acceptance(play: Play, plain: list[list[int]]) -> None:
    v1, synchronous, asynchronous = (
        play(num_rounds=2, options={"policy": "fixed"}, is_v1=is_v1, is_async=is_async)
        for is_v1, is_async in ((True, False), (False, False), (False, True))
    )

    for outcome in (v1, synchronous, asynchronous):
        assert all(tokens == plain for tokens in outcome.tokens)
    rates = [each.num_accepted_tokens / each.num_draft_tokens for each in (v1, synchronous, asynchronous)]
    assert max(rates) - min(rates) < 0.05
    counts = [each.num_accepted_tokens for each in (v1, synchronous, asynchronous)]
    assert max(counts) < 1.1 * min(counts)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_distribution_with_drafts_is_that_of_plain_decoding(play: Play) -> None:
    prompt = mixed_requests()[2].prompt
    sampling = {"max_tokens": 4, "temperature": 1.0, "top_k": 3, "ignore_eos": True}
    requests = [Request(prompt, sampling)] * 128

    def sample(**fields: Any) -> tuple[Counter[tuple[int, ...]], Outcome]:
        outcome = play(requests, num_rounds=4, engine={"max_num_seqs": 32}, **fields)
        return Counter(tuple(tokens) for answers in outcome.tokens for tokens in answers), outcome

    (theirs, _), (ours, outcome) = sample(has_hook=False), sample(options={"policy": "fixed"})

    assert len(theirs) >= 6
    assert outcome.num_draft_tokens > 500
    assert 0 < outcome.num_accepted_tokens < outcome.num_draft_tokens
    assert p_value(theirs, ours) > 1e-4


# --- what the hook assumes of vLLM ---


def test_installed_vllm_is_the_one_that_the_hook_was_written_for(require_vllm: None) -> None:
    code = "from tests import v2_cpu\nfrom agentspec.serving_patch.compat_v2 import check_v2\ncheck_v2()"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr[-2000:]


def test_what_moved_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat_v2, "V2_SIGNATURES", {"json.decoder.JSONDecoder": {"decode": ("self", "text")}})

    with pytest.raises(CompatibilityError, match=r"JSONDecoder.decode takes \('self', 's'\), AgentSpec expects"):
        compat_v2.check_v2()


def config(**changes: Any) -> Any:
    spec = SimpleNamespace(method="ngram_gpu", **{"rejection_sample_method": "standard", **changes.pop("spec", {})})
    parallel = SimpleNamespace(pipeline_parallel_size=1, worker_cls=compat_v2.V2_WORKER_CLS)
    for name in ("pipeline_parallel_size", "worker_cls"):
        if name in changes:
            setattr(parallel, name, changes.pop(name))
    values = {"speculative_config": spec, "parallel_config": parallel, "use_v2_model_runner": True, **changes}
    return SimpleNamespace(**values)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_v2_model_runner": False}, "needs Model Runner V2, this engine runs V1"),
        ({"speculative_config": None}, "needs the speculative method 'ngram_gpu'.* has None"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"spec": {"rejection_sample_method": "synthetic"}}, "changes the output"),
        ({"spec": {"enable_adaptive_verification": True}}, "enable_adaptive_verification chooses draft lengths"),
        ({"worker_cls": "json.JSONDecoder"}, "worker_cls is 'json.JSONDecoder': the V2 hook brings its own"),
    ],
)
def test_configuration_that_the_hook_cannot_serve_is_refused(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat_v2, "check_v2", lambda: None)
    monkeypatch.setattr(compat_v2, "check_version", lambda: None)
    compat_v2.probe_v2(config())

    with pytest.raises(CompatibilityError, match=reason):
        compat_v2.probe_v2(config(**changes))
