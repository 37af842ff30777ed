"""Records the demo's agents into a trace file, which is how the sample beside this file was made.

python -m agentspec.benchmarks.recording benchmarks/agentspec/benchmarks/sample/research_agents.jsonl.gz
"""

from __future__ import annotations

import asyncio
import gzip
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
from tokenizers import Tokenizer

from agentspec.benchmarks.agents import build_graph, chat_model, research
from agentspec.benchmarks.calls import TOKEN_IDS_REQUEST
from agentspec.benchmarks.models import resolve_model
from agentspec.benchmarks.server import SERVED_NAME, ServerOptions, VllmServer
from agentspec.benchmarks.topics import TOPICS
from agentspec.sidecar.tags import TAGS_KEY

WORKLOAD = "research_agents"
_MAX_NUM_SEQS = 16
_TIMEOUT_S = 600.0


@dataclass(slots=True)
class TraceRecorder:
    """Keeps each finished call as a line of a trace; `keep` goes into an httpx client as a response hook.

    Attributes:
        tokenizer: of the served model; the answer is kept as the model wrote it, before any parser.
        lines: in the order in which the calls ended.
    """

    tokenizer: Tokenizer
    lines: list[dict[str, Any]] = field(default_factory=list)

    async def keep(self, response: httpx.Response) -> None:
        """Read request and answer; calls that failed are not kept."""
        await response.aread()
        if response.status_code == httpx.codes.OK:
            self.lines.append(self._line(json.loads(response.request.content), json.loads(response.content)))

    def _line(self, request: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        tags = json.loads(request["vllm_xargs"][TAGS_KEY])
        return {
            "workload": WORKLOAD,
            "workflow": tags["workflow_id"],
            "run_id": tags["thread_id"],
            "node": tags["stage"],
            "agent_id": tags.get("agent_id", tags["stage"]),
            "messages": [{"role": message["role"], "content": message["content"]} for message in request["messages"]],
            "output": self.tokenizer.decode(answer["choices"][0]["token_ids"], skip_special_tokens=True),
        }


def write_trace(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write the lines run by run, each run's in the order in which they were kept; the same lines, the same bytes."""
    first = {line["run_id"]: index for index, line in reversed(list(enumerate(lines)))}
    ordered = sorted(lines, key=lambda line: first[line["run_id"]])
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in ordered)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


async def _record(base_url: str, recorder: TraceRecorder) -> None:
    async with httpx.AsyncClient(timeout=_TIMEOUT_S, event_hooks={"response": [recorder.keep]}) as client:
        extra_body = dict(TOKEN_IDS_REQUEST)
        model = chat_model(base_url, SERVED_NAME, http_async_client=client, max_retries=0, extra_body=extra_body)
        graph = build_graph(model)
        for begin in range(0, len(TOPICS), _MAX_NUM_SEQS):
            await research(graph, TOPICS[begin : begin + _MAX_NUM_SEQS])


@click.command()
@click.argument("path", type=click.Path(dir_okay=False, path_type=Path))
def main(path: Path) -> None:
    """Run every topic of the demo once on plain vLLM and write PATH (gzip)."""
    model = resolve_model(None)
    recorder = TraceRecorder(Tokenizer.from_file(str(Path(model) / "tokenizer.json")))
    with tempfile.TemporaryDirectory() as logs:
        options = ServerOptions(model, Path(logs), max_num_seqs=_MAX_NUM_SEQS, num_speculative_tokens=1)
        with VllmServer("plain", options) as server:
            server.start()
            server.wait_until_ready()
            asyncio.run(_record(server.base_url, recorder))
    write_trace(path, recorder.lines)
    click.echo(f"{path}: {len(recorder.lines)} calls")


if __name__ == "__main__":
    main()
