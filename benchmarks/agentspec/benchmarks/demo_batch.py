"""The demo's agents on one server, batch by batch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import openai
from rich.progress import Progress

from agentspec.benchmarks.agents import MAX_ROUNDS, build_graph, chat_model, research
from agentspec.benchmarks.calls import TOKEN_IDS_REQUEST, Call, CallRecorder
from agentspec.benchmarks.counters import (
    EngineCounters,
    Samples,
    block_counters,
    engine_counters,
    fallback_counts,
    read_samples,
    settled_counters,
)
from agentspec.benchmarks.demo_report import BatchResult
from agentspec.benchmarks.server import SERVED_NAME, VllmServer
from agentspec.benchmarks.topics import TOPICS

WARM_UP_ROUNDS = 1  # half a minute less for each server; plain decoding learns nothing from a warm-up
MAX_AGENTS = len(TOPICS) // 2
MAX_REPLICA_AGENTS = len(TOPICS) // 4
CALL_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that was served.

    Attributes:
        calls: of all agents.
        counters: vLLM's own counts of it.
        seconds: wall clock from the first agent's start to the last one's end.
    """

    calls: list[Call]
    counters: EngineCounters
    seconds: float


def wait_until_ready(server: VllmServer, progress: Progress) -> None:
    """Show that a server starts, until it has."""
    task = progress.add_task(f"{server.name}: starting vLLM", total=None)
    server.wait_until_ready()
    progress.update(task, total=1, completed=1)


def measure(server: VllmServer, num_agents: int, progress: Progress) -> tuple[BatchResult, list[Call]]:
    """Serve a warm-up batch, then the measured one."""
    warm_up = serve(server, TOPICS[MAX_AGENTS : MAX_AGENTS + num_agents], WARM_UP_ROUNDS, "warm-up", progress)
    blocks_before = _agentspec_samples(server)
    batch = serve(server, TOPICS[:num_agents], MAX_ROUNDS, "measured", progress)
    blocks_after = _agentspec_samples(server)
    prompts = {call.prompt_token_ids for call in batch.calls}
    result = BatchResult(
        decoding=server.decoding,
        counters=batch.counters,
        seconds=batch.seconds,
        warm_up=warm_up.counters,
        num_shared_prompts=len(prompts & {call.prompt_token_ids for call in warm_up.calls}),
        num_repeated_prompts=len(batch.calls) - len(prompts),
        blocks=block_counters(blocks_before, blocks_after),
        fallbacks=fallback_counts(blocks_after),
    )
    return result, batch.calls


def serve_first(server: VllmServer, num_agents: int, progress: Progress) -> Batch:
    """Serve what is the first batch of a replica: as long as a warm-up, with tasks that no other batch has."""
    topics = TOPICS[MAX_REPLICA_AGENTS : MAX_REPLICA_AGENTS + num_agents]
    return serve(server, topics, WARM_UP_ROUNDS, "replica's first", progress)


def serve(server: VllmServer, topics: Sequence[str], max_rounds: int, name: str, progress: Progress) -> Batch:
    """Run one agent per topic, all at once."""
    before = engine_counters(read_samples(server.metrics_url))
    task = progress.add_task(f"{server.name}: {name} batch, calls", total=len(topics) * (1 + 3 * max_rounds))
    recorder = CallRecorder(lambda: progress.advance(task))
    start = time.perf_counter()
    try:
        asyncio.run(_research(server.base_url, topics, max_rounds, recorder))
    except openai.OpenAIError:
        server.check_alive()  # its log says more than a broken connection
        raise
    seconds = time.perf_counter() - start
    progress.update(task, total=len(recorder.calls))
    counters = settled_counters(server.metrics_url, before, len(recorder.calls))
    return Batch(recorder.calls, counters, seconds)


async def _research(base_url: str, topics: Sequence[str], max_rounds: int, recorder: CallRecorder) -> None:
    async with recorder.client(timeout_s=CALL_TIMEOUT_S) as client:
        model = chat_model(
            base_url, SERVED_NAME, http_async_client=client, max_retries=2, extra_body=dict(TOKEN_IDS_REQUEST)
        )
        await research(build_graph(model, max_rounds=max_rounds), topics)


def _agentspec_samples(server: VllmServer) -> Samples:
    """What AgentSpec's processes count together; no two of them count the same."""
    return {key: value for url in server.agentspec_metrics_urls for key, value in read_samples(url).items()}
