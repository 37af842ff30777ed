"""The demo: its LangGraph program, its server processes, its counters, and all of it with vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from prometheus_client.parser import text_string_to_metric_families
from tests.openai_server import running_server
from tests.redis_lab import require_redis

from agentspec.benchmarks.agents import MAX_ROUNDS, build_graph, chat_model, research
from agentspec.benchmarks.calls import CallRecorder, RecordingError, read_call
from agentspec.benchmarks.comparison import Verdict
from agentspec.benchmarks.counters import BlockCounters, EngineCounters, Samples, block_counters, engine_counters
from agentspec.benchmarks.demo import main
from agentspec.benchmarks.demo_report import BatchResult, make_report
from agentspec.benchmarks.server import DECODINGS, Decoding, ServerError, ServerOptions, VllmServer
from agentspec.benchmarks.topics import TOPICS

STAGES = {"plan": 1, "search": 2, "write": 2, "review": 2}
NO_COUNTS = EngineCounters(0, 0, 0, 0, 0, 0)


def vllm_answer(request: httpx.Request) -> httpx.Response:
    """A chat completion as vLLM gives it, whose prompt token says how many messages it had."""
    body = json.loads(request.content)
    message = {"role": "assistant", "content": "an answer"}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": [7, 2]}
    answer = {"id": "1", "created": 0, "model": "m", "object": "chat.completion", "choices": [choice]}
    return httpx.Response(200, json={**answer, "prompt_token_ids": [len(body["messages"])]})


def test_every_agent_plans_once_and_then_loops() -> None:
    with running_server() as server:
        graph = build_graph(chat_model(server.url, "m"))
        results = asyncio.run(research(graph, TOPICS[:3]))

        stages = Counter(tags.stage for tags in server.tags)
        threads = Counter(tags.thread_id for tags in server.tags)

    assert {stage: 3 * count for stage, count in STAGES.items()} == stages
    assert set(threads.values()) == {1 + 3 * MAX_ROUNDS}
    assert [result["topic"] for result in results] == list(TOPICS[:3])


def test_every_call_of_the_example_is_tagged_with_its_workflow() -> None:
    with running_server() as server:
        asyncio.run(research(build_graph(chat_model(server.url, "m")), TOPICS[:2]))

        workflows = {tags.workflow_id for tags in server.tags}

    assert workflows == {"research"}


def test_search_is_forced_to_call_its_tool_by_schema() -> None:
    with running_server() as server:
        asyncio.run(research(build_graph(chat_model(server.url, "m")), TOPICS[:1]))

        searches = [body for body in server.bodies if body.get("tools")]

    assert len(searches) == STAGES["search"]
    assert all(body["tool_choice"]["function"]["name"] == "search_library" for body in searches)
    assert all(body["tools"][0]["function"]["strict"] for body in searches)


def test_number_of_rounds_can_be_cut() -> None:
    with running_server() as server:
        asyncio.run(research(build_graph(chat_model(server.url, "m"), max_rounds=1), TOPICS[:1]))

        stages = [tags.stage for tags in server.tags]

    assert stages == list(STAGES)


def test_no_prompt_of_the_warm_up_occurs_in_the_measured_batch() -> None:
    assert len(set(TOPICS)) == len(TOPICS)


def test_recorder_knows_agent_stage_and_iteration_of_every_call() -> None:
    recorder = CallRecorder()

    async def run() -> None:
        hooks = recorder.client(timeout_s=1).event_hooks
        async with httpx.AsyncClient(transport=httpx.MockTransport(vllm_answer), event_hooks=hooks) as client:
            await research(build_graph(chat_model("http://vllm/v1", "m", http_async_client=client)), TOPICS[:2])

    asyncio.run(run())

    made = Counter((call.agent, call.stage, call.iteration) for call in recorder.calls)
    expected = {(topic, stage, index): 1 for topic in TOPICS[:2] for stage in STAGES for index in range(STAGES[stage])}
    assert expected == made
    assert {(call.prompt_token_ids, call.output_token_ids) for call in recorder.calls} == {((2,), (7, 2))}


def test_answer_without_token_ids_is_refused() -> None:
    with pytest.raises(RecordingError, match="token ids"):
        read_call({"choices": [{"message": {}}]}, "a", "plan", 0)


def test_speculation_of_a_call_is_kept() -> None:
    speculation = {"num_spec_steps": 3, "num_draft_tokens": 9, "num_accepted_draft_tokens": 4}
    body = {"prompt_token_ids": [1], "choices": [{"token_ids": [2]}], "metrics": {"speculative_decoding": speculation}}

    call = read_call(body, "a", "plan", 0)

    assert (call.num_verified_drafts, call.num_draft_tokens, call.num_accepted_tokens) == (3, 9, 4)


def samples_of(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_request_steps_are_first_tokens_and_inter_token_latencies() -> None:
    samples = samples_of(
        "# TYPE vllm:time_to_first_token_seconds histogram\n"
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf"} 3\n'
        'vllm:time_to_first_token_seconds_count{engine="0"} 3\n'
        "# TYPE vllm:inter_token_latency_seconds histogram\n"
        'vllm:inter_token_latency_seconds_count{engine="0"} 40\n'
    )

    assert engine_counters(samples).num_steps == 43


def block_samples(stage: str, steps: int, drafts: int, drafted: int, accepted: int) -> str:
    counts = {"steps": steps, "drafts": drafts, "draft_tokens": drafted, "accepted_tokens": accepted}
    labels = f'namespace="default",workflow="research",stage="{stage}",block="text"'
    return "".join(
        f"# TYPE agentspec_{name} counter\nagentspec_{name}_total{{{labels}}} {count}\n"
        for name, count in counts.items()
    )


def test_blocks_are_what_was_counted_between_two_readings() -> None:
    before = samples_of(block_samples("plan", 10, 5, 40, 20))
    after = samples_of(block_samples("plan", 16, 9, 60, 30))

    assert block_counters(before, after) == [BlockCounters("plan", "text", 6, 4, 20, 10)]


def test_block_without_steps_in_between_is_left_out() -> None:
    samples = samples_of(block_samples("plan", 10, 5, 40, 20))

    assert block_counters(samples, samples) == []


def test_acceptance_length_counts_only_steps_with_a_draft() -> None:
    block = BlockCounters("plan", "text", num_steps=10, num_drafts=4, num_draft_tokens=20, num_accepted_tokens=10)

    assert (block.acceptance_rate, block.acceptance_length) == (0.5, 3.5)


def test_report_has_every_field_that_is_promised() -> None:
    verdict = Verdict(num_compared_calls=7, num_skipped_calls=0, num_numeric_ties=1, differences=())
    block = BlockCounters("plan", "text", 6, 4, 20, 10)
    results = [
        BatchResult("plain", NO_COUNTS, 1.0),
        BatchResult("ngram", NO_COUNTS, 1.0, verdict=verdict),
        BatchResult("agentspec", NO_COUNTS, 1.0, blocks=[block], verdict=verdict),
    ]

    report = make_report(results, num_agents=16, conditions={})

    promised = {"identical", "num_numeric_ties", "num_agents", "num_tokens", "num_draft_tokens", "num_accepted_tokens"}
    promised |= {f"{field}_{name}" for field in ("request_steps", "tokens_per_s") for name in DECODINGS}
    assert promised - report.keys() == set()
    assert report["by_block"] == [
        {
            "stage": "plan",
            "block": "text",
            "num_steps": 6,
            "num_drafts": 4,
            "num_draft_tokens": 20,
            "num_accepted_tokens": 10,
            "acceptance_rate": 0.5,
            "acceptance_length": 3.5,
        }
    ]


def options_in(folder: Path, **changes: Any) -> ServerOptions:
    return ServerOptions(
        **{"model": "m", "log_folder": folder, "max_num_seqs": 4, "num_speculative_tokens": 8, **changes}
    )


def test_servers_differ_in_their_drafter_alone(tmp_path: Path) -> None:
    def common(decoding: Decoding) -> list[str]:
        command = VllmServer(decoding, options_in(tmp_path)).command()
        words = command[1:]
        words[words.index("--port") + 1] = "PORT"
        own = ("--speculative-config", "--additional-config", "--per-request-spec-decode-metrics")
        return [word for index, word in enumerate(words) if word not in own and words[index - 1] not in own]

    assert common("plain") == common("ngram") == common("agentspec")


def test_environment_of_the_caller_wins(tmp_path: Path) -> None:
    environment = VllmServer("plain", options_in(tmp_path)).environment({"OMP_NUM_THREADS": "7"})

    assert environment["OMP_NUM_THREADS"] == "7"


FAKE_SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE)
process.stdout.readline()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class FakeServer(VllmServer):
    """Runs a module of the test's in vLLM's place."""

    module = "fake_server"

    def command(self) -> list[str]:
        return [self.module, str(httpx.URL(self.base_url).port)]

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        return {**super().environment(environ), "PYTHONPATH": str(self.log_path.parent)}


def group_members(group_id: int) -> list[int]:
    """Processes of a group that are not zombies: nobody may be there to reap an orphan."""
    members = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                state, _parent, group = (folder / "stat").read_text().rpartition(") ")[2].split()[:3]
            except FileNotFoundError:
                continue
            if int(group) == group_id and state != "Z":
                members.append(int(folder.name))
    return members


def wait_until_gone(group_id: int) -> list[int]:
    deadline = time.monotonic() + 10
    while (members := group_members(group_id)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return members


def test_stopped_server_leaves_no_process_of_its_group(tmp_path: Path) -> None:
    (tmp_path / "fake_server.py").write_text(FAKE_SERVER)
    with FakeServer("plain", options_in(tmp_path)) as server:
        server.start()
        server.wait_until_ready()
        assert server.process_id is not None
        group_id = server.process_id
        assert len(group_members(group_id)) == 2

    assert wait_until_gone(group_id) == []


def test_server_that_dies_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "fake_server.py").write_text("raise SystemExit('no such model')")
    with FakeServer("plain", options_in(tmp_path)) as server:
        server.start()

        with pytest.raises(ServerError, match=r"(?s)plain server ended with code 1.*no such model"):
            server.wait_until_ready()


def test_server_that_never_answers_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "fake_server.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)")
    with FakeServer("plain", options_in(tmp_path, start_deadline_s=1.0)) as server:
        server.start()

        with pytest.raises(ServerError, match=r"(?s)did not answer within 1 s.*"):
            server.wait_until_ready()


def test_unknown_method_is_refused() -> None:
    result = CliRunner().invoke(main, ["--methods", "plain,eagle"])

    assert (result.exit_code, "'eagle'" in result.output) == (2, True)


def run_demo(output: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agentspec.benchmarks.demo", "--output", str(output), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=500, check=False, env={**os.environ, **environ}
    )


@pytest.mark.vllm
def test_model_that_vllm_cannot_load_is_reported_with_the_end_of_its_log(model_path: str, tmp_path: Path) -> None:
    del model_path  # skips where there is no vLLM
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no_such_type"}')

    result = run_demo(tmp_path / "out", "--model", str(tmp_path), "--methods", "plain")

    assert result.returncode == 1
    assert "The demo failed: the plain server ended with code 1" in result.stdout
    assert "no_such_type" in result.stdout


def check_against_plain(report: dict[str, Any]) -> None:
    assert report["identical"]
    assert report["num_tokens"] == report["request_steps_plain"]
    assert report["request_steps_agentspec"] < report["request_steps_plain"]
    assert {row["stage"] for row in report["by_block"]} == set(STAGES)


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["embedded", "hybrid"])
def test_demo_with_agentspec_is_identical_to_plain_decoding_and_takes_fewer_steps(
    mode: str, model_path: str, tmp_path: Path
) -> None:
    result = run_demo(tmp_path, "--model", model_path, "--agents", "4", "--methods", "plain,agentspec", MODE=mode)

    assert result.returncode == 0, result.stdout + result.stderr
    check_against_plain(json.loads((tmp_path / "report.json").read_text()))


@pytest.mark.vllm
def test_replica_that_shares_by_redis_accepts_more_in_its_first_batch_than_a_cold_server(
    model_path: str, tmp_path: Path
) -> None:
    """The whole chain: graph, middleware, vLLM's hook, draft server, Redis, a second draft server, a second vLLM."""
    require_redis()
    words = ("--model", model_path, "--agents", "4", "--methods", "plain,agentspec")
    result = run_demo(tmp_path, *words, MODE="sidecar", REDIS="1")

    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    check_against_plain(report)
    assert report["replica"]["identical"]
    cold, replica = report["first_batch"]
    assert ("cold", "replica") == (cold["server"], replica["server"])
    assert replica["num_accepted_tokens"] / replica["num_tokens"] > cold["num_accepted_tokens"] / cold["num_tokens"]
    assert replica["tokens_per_step"] > cold["tokens_per_step"]
