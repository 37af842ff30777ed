"""`make demo`: agents of a LangGraph program on a real vLLM server, plain, with n-grams and with AgentSpec."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import click
import httpx
import openai
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

from agentspec.benchmarks.agents import MAX_ROUNDS, build_graph, chat_model, research
from agentspec.benchmarks.calls import TOKEN_IDS_REQUEST, Call, CallRecorder, RecordingError
from agentspec.benchmarks.comparison import Comparison, Divergence, compare_calls, judge
from agentspec.benchmarks.counters import (
    Samples,
    block_counters,
    engine_counters,
    fallback_counts,
    read_samples,
    settled_counters,
)
from agentspec.benchmarks.demo_report import BatchResult, make_report, print_tables
from agentspec.benchmarks.models import ModelError, resolve_model
from agentspec.benchmarks.server import DECODINGS, SERVED_NAME, Decoding, Mode, ServerError, ServerOptions, VllmServer
from agentspec.benchmarks.topics import TOPICS

NUM_SPECULATIVE_TOKENS = 8
WARM_UP_ROUNDS = 1  # half a minute less for each server; plain decoding learns nothing from a warm-up
_CALL_TIMEOUT_S = 300.0
_TOP_LOGPROBS = 20
_FAILURES = (ServerError, ModelError, RecordingError, openai.OpenAIError, httpx.HTTPError)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--agents", "num_agents", type=click.IntRange(1, len(TOPICS) // 2), default=16, help="Agents at once.")
@click.option("--model", envvar="DEMO_MODEL", help="Hub id or folder; default: SmolLM2-135M-Instruct, made once.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/demo"), help="Report and server logs.")
@click.option(
    "--mode",
    envvar="MODE",
    type=click.Choice(get_args(Mode)),
    default="embedded",
    help="AgentSpec drafts inside vLLM, or in a draft server beside it.",
)
@click.option("--methods", default=",".join(DECODINGS), help="Ways of decoding, in this order.")
def main(num_agents: int, model: str | None, output: Path, mode: Mode, methods: str) -> None:
    """Serve a LangGraph program and compare plain decoding, vLLM's n-gram drafter and AgentSpec.

    Each of them serves a warm-up batch of agents, then a measured batch with other tasks. Ends with a table and writes
    report.json. Exit code 1: outputs with AgentSpec are not those of plain decoding, or something failed.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are stopped then, too
    console = Console()
    decodings = _parse_methods(methods)
    output.mkdir(parents=True, exist_ok=True)
    try:
        with _progress(console) as progress:
            options = ServerOptions(
                model=_resolve(model, progress),
                log_folder=output,
                max_num_seqs=num_agents,
                num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
                mode=mode,
            )
            results = _run_all(decodings, options, num_agents, progress)
    except _FAILURES as error:
        reason = error.__cause__ if isinstance(error, openai.APIConnectionError) else error
        console.print("[bold red]The demo failed:[/]", escape(str(reason)), highlight=False, soft_wrap=True)
        sys.exit(1)
    report = make_report(results, num_agents=num_agents, conditions=_conditions(options))
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_tables(report, results, console)
    console.print(f"Report: {output / 'report.json'}; server logs beside it.")
    if report.get("identical") is False:
        console.print("[bold red]Outputs with AgentSpec are not those of plain decoding: see `differences`.[/]")
        sys.exit(1)


def _parse_methods(methods: str) -> list[Decoding]:
    names = [name.strip() for name in methods.split(",")]
    if unknown := [name for name in names if name not in DECODINGS]:
        raise click.BadParameter(f"expected some of {', '.join(DECODINGS)}; got {unknown[0]!r}", param_hint="--methods")
    return [decoding for name in dict.fromkeys(names) for decoding in DECODINGS if decoding == name]


def _resolve(model: str | None, progress: Progress) -> str:
    task = progress.add_task("model", total=1.0)

    def show(what: str, share: float | None) -> None:
        progress.update(task, description=what, completed=share or 0.0)

    resolved = resolve_model(model, show)
    progress.update(task, description=f"model: {Path(resolved).name}", completed=1.0)
    return resolved


def _run_all(
    decodings: Sequence[Decoding], options: ServerOptions, num_agents: int, progress: Progress
) -> list[BatchResult]:
    """Measure each way of decoding; a server starts while the one before it stops, never while it is measured."""
    results: list[BatchResult] = []
    calls: dict[Decoding, list[Call]] = {}
    servers = [VllmServer(decoding, options) for decoding in decodings]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        servers[0].start()
        for server, following in zip_longest(servers, servers[1:]):
            _wait_until_ready(server, progress)
            result, calls[server.decoding] = _measure(server, num_agents, progress)
            results.append(result)
            if following is not None:
                following.start()
            server.stop()
        return _judge_all(results, calls, servers, progress)


def _wait_until_ready(server: VllmServer, progress: Progress) -> None:
    task = progress.add_task(f"{server.decoding}: starting vLLM", total=None)
    server.wait_until_ready()
    progress.update(task, total=1, completed=1)


def _measure(server: VllmServer, num_agents: int, progress: Progress) -> tuple[BatchResult, list[Call]]:
    middle = len(TOPICS) // 2
    warm_up, _ = _run_batch(server, TOPICS[middle : middle + num_agents], WARM_UP_ROUNDS, "warm-up", progress)
    before = engine_counters(read_samples(server.metrics_url))
    blocks_before = _agentspec_samples(server)
    calls, seconds = _run_batch(server, TOPICS[:num_agents], MAX_ROUNDS, "measured", progress)
    counters = settled_counters(server.metrics_url, before, len(calls))
    blocks_after = _agentspec_samples(server)
    prompts = {call.prompt_token_ids for call in calls}
    result = BatchResult(
        decoding=server.decoding,
        counters=counters,
        seconds=seconds,
        num_warm_up_tokens=sum(len(call.output_token_ids) for call in warm_up),
        num_shared_prompts=len(prompts & {call.prompt_token_ids for call in warm_up}),
        num_repeated_prompts=len(calls) - len(prompts),
        blocks=block_counters(blocks_before, blocks_after),
        fallbacks=fallback_counts(blocks_after),
    )
    return result, calls


def _agentspec_samples(server: VllmServer) -> Samples:
    """What AgentSpec's processes count together; no two of them count the same."""
    return {key: value for url in server.agentspec_metrics_urls for key, value in read_samples(url).items()}


def _run_batch(
    server: VllmServer, topics: Sequence[str], max_rounds: int, name: str, progress: Progress
) -> tuple[list[Call], float]:
    """Run one agent per topic, all at once; return their calls and the seconds from first start to last end."""
    task = progress.add_task(f"{server.decoding}: {name} batch, calls", total=len(topics) * (1 + 3 * max_rounds))
    recorder = CallRecorder(lambda: progress.advance(task))
    start = time.perf_counter()
    try:
        asyncio.run(_research(server.base_url, topics, max_rounds, recorder))
    except openai.OpenAIError:
        server.check_alive()  # its log says more than a broken connection
        raise
    seconds = time.perf_counter() - start
    progress.update(task, total=len(recorder.calls))
    return recorder.calls, seconds


async def _research(base_url: str, topics: Sequence[str], max_rounds: int, recorder: CallRecorder) -> None:
    async with recorder.client(timeout_s=_CALL_TIMEOUT_S) as client:
        model = chat_model(
            base_url, SERVED_NAME, http_async_client=client, max_retries=2, extra_body=dict(TOKEN_IDS_REQUEST)
        )
        await research(build_graph(model, max_rounds=max_rounds), topics)


def _judge_all(
    results: Sequence[BatchResult],
    calls: Mapping[Decoding, Sequence[Call]],
    servers: Sequence[VllmServer],
    progress: Progress,
) -> list[BatchResult]:
    """Compare each way of decoding with plain decoding, whose server is asked again only where outputs diverge."""
    plain = next((server for server in servers if server.decoding == "plain"), None)
    if plain is None:
        return list(results)
    comparisons: dict[Decoding, Comparison] = {
        decoding: compare_calls(calls["plain"], theirs) for decoding, theirs in calls.items() if decoding != "plain"
    }
    if any(comparison.divergences for comparison in comparisons.values()):
        plain.start()
        _wait_until_ready(plain, progress)
    verdicts = {decoding: judge(found, partial(_logit_gap, plain)) for decoding, found in comparisons.items()}
    return [replace(result, verdict=verdicts.get(result.decoding)) for result in results]


def _logit_gap(plain: VllmServer, divergence: Divergence) -> float | None:
    """How far plain decoding's logits of the two tokens lie apart; None where it ranks one of them low.

    The gap of two log probabilities is that of the logits, and a mask of structured output does not change it.
    """
    body = {
        "model": SERVED_NAME,
        "prompt": list(divergence.prefix_token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": _TOP_LOGPROBS,
        "return_tokens_as_token_ids": True,
    }
    response = httpx.post(f"{plain.base_url}/completions", json=body, timeout=_CALL_TIMEOUT_S)
    response.raise_for_status()
    top: dict[str, float] = response.json()["choices"][0]["logprobs"]["top_logprobs"][0]
    expected, actual = (top.get(f"token_id:{token}") for token in (divergence.expected_id, divergence.actual_id))
    return None if expected is None or actual is None else abs(expected - actual)


def _conditions(options: ServerOptions) -> dict[str, Any]:
    packages = ("agentspec-serving", "vllm", "torch", "transformers", "langgraph", "langchain-openai", "openai")
    return {
        "title": "measured on CPU, one run",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": options.model,
        "dtype": "float32",
        "temperature": 0,
        "num_speculative_tokens": options.num_speculative_tokens,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs,
        "mode": options.mode,
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in packages},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(finished_text="✓"),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=console,
    )


if __name__ == "__main__":
    main()
