"""`make demo`: agents of a LangGraph program on a real vLLM server, plain, with n-grams and with AgentSpec."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
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

from agentspec.benchmarks.calls import Call, RecordingError
from agentspec.benchmarks.comparison import Divergence, compare_calls, judge
from agentspec.benchmarks.demo_batch import (
    CALL_TIMEOUT_S,
    MAX_AGENTS,
    MAX_REPLICA_AGENTS,
    Batch,
    measure,
    serve_first,
    wait_until_ready,
)
from agentspec.benchmarks.demo_report import BatchResult, Replica, make_report, print_tables
from agentspec.benchmarks.models import ModelError, resolve_model
from agentspec.benchmarks.redis_process import RedisMissingError, running_redis
from agentspec.benchmarks.server import DECODINGS, SERVED_NAME, Decoding, Mode, ServerError, ServerOptions, VllmServer

NUM_SPECULATIVE_TOKENS = 8
_TOP_LOGPROBS = 20
_REPLICA = "replica"
_FAILURES = (ServerError, ModelError, RedisMissingError, RecordingError, openai.OpenAIError, httpx.HTTPError)


@click.command(context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--agents", "num_agents", type=click.IntRange(1, MAX_AGENTS), default=16, help="Agents at once.")
@click.option("--model", envvar="DEMO_MODEL", help="Hub id or folder; default: SmolLM2-135M-Instruct, made once.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("build/demo"), help="Report and server logs.")
@click.option(
    "--mode",
    envvar="MODE",
    type=click.Choice(get_args(Mode)),
    default="embedded",
    help="AgentSpec drafts inside vLLM, there with a draft server that shares, or in that server.",
)
@click.option(
    "--redis", "has_redis", is_flag=True, envvar="REDIS", help="Share histories with a second AgentSpec server, too."
)
@click.option("--methods", default=",".join(DECODINGS), help="Ways of decoding, in this order.")
def main(*, num_agents: int, model: str | None, output: Path, mode: Mode, has_redis: bool, methods: str) -> None:
    """Serve a LangGraph program and compare plain decoding, vLLM's n-gram drafter and AgentSpec.

    Each of them serves a warm-up batch of agents, then a measured batch with other tasks. Ends with a table and writes
    report.json. With --redis a replica then starts, whose first batch drafts from what the first server wrote. Exit
    code 1: outputs with AgentSpec are not those of plain decoding, or something failed.
    """
    if has_redis and num_agents > MAX_REPLICA_AGENTS:
        raise click.BadParameter(f"expected at most {MAX_REPLICA_AGENTS} with --redis", param_hint="--agents")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers are stopped then, too
    console = Console()
    decodings = _parse_methods(methods)
    output.mkdir(parents=True, exist_ok=True)
    try:
        with ExitStack() as stack:
            progress = stack.enter_context(_progress(console))
            options = ServerOptions(
                model=_resolve(model, progress),
                log_folder=output,
                max_num_seqs=num_agents,
                num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
                mode=mode,
                redis=stack.enter_context(running_redis()) if has_redis else "",
            )
            results, replica = _run_all(decodings, options, num_agents, progress)
    except _FAILURES as error:
        reason = error.__cause__ if isinstance(error, openai.APIConnectionError) else error
        console.print("[bold red]The demo failed:[/]", escape(str(reason)), highlight=False, soft_wrap=True)
        sys.exit(1)
    report = make_report(results, replica, num_agents=num_agents, conditions=_conditions(options))
    (output / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_tables(report, results, replica, console)
    console.print(f"Report: {output / 'report.json'}; server logs beside it.")
    if False in (report.get("identical"), report.get("replica", {}).get("identical")):
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
) -> tuple[list[BatchResult], Replica | None]:
    """Measure each way of decoding; a server starts while the one before it stops, never while it is measured."""
    results: list[BatchResult] = []
    calls: dict[str, list[Call]] = {}
    first_batches: dict[str, Batch] = {}
    servers = [VllmServer(decoding, options) for decoding in decodings]
    if options.redis and "agentspec" in decodings:
        servers.append(VllmServer("agentspec", options, name=_REPLICA))
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        servers[0].start()
        for server, following in zip_longest(servers, servers[1:]):
            wait_until_ready(server, progress)
            if server.name != _REPLICA:
                result, calls[server.name] = measure(server, num_agents, progress)
                results.append(result)
            if options.redis and server.name in ("plain", _REPLICA):
                first_batches[server.name] = serve_first(server, num_agents, progress)
            if following is not None:
                following.start()
            server.stop()
        return _judge_all(results, calls, first_batches, servers[0], progress)


def _judge_all(
    results: Sequence[BatchResult],
    calls: Mapping[str, Sequence[Call]],
    first_batches: Mapping[str, Batch],
    reference: VllmServer,
    progress: Progress,
) -> tuple[list[BatchResult], Replica | None]:
    """Compare each way of decoding with plain decoding, whose server is asked again only where outputs diverge."""
    replica = Replica(first_batches[_REPLICA].counters) if _REPLICA in first_batches else None
    if reference.decoding != "plain":
        return list(results), replica
    comparisons = {name: compare_calls(calls["plain"], theirs) for name, theirs in calls.items() if name != "plain"}
    if replica is not None:
        comparisons[_REPLICA] = compare_calls(first_batches["plain"].calls, first_batches[_REPLICA].calls)
    if any(comparison.divergences for comparison in comparisons.values()):
        reference.start()
        wait_until_ready(reference, progress)
    verdicts = {name: judge(found, partial(_logit_gap, reference)) for name, found in comparisons.items()}
    if replica is not None:
        replica = replace(replica, verdict=verdicts[_REPLICA])
    return [replace(result, verdict=verdicts.get(result.decoding)) for result in results], replica


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
    response = httpx.post(f"{plain.base_url}/completions", json=body, timeout=CALL_TIMEOUT_S)
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
        "redis": bool(options.redis),
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
