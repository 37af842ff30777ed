"""What the demo found: `report.json`, and the tables that it ends with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from agentspec.benchmarks.comparison import Verdict
from agentspec.benchmarks.counters import BlockCounters, EngineCounters
from agentspec.benchmarks.server import Decoding


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The measured batch under one way of decoding.

    Attributes:
        decoding: which.
        counters: vLLM's own counts of the batch.
        seconds: wall clock from the first agent's start to the last one's end.
        warm_up: likewise, of the batch before it, the server's first.
        num_shared_prompts: prompts that occur in both batches.
        num_repeated_prompts: calls of the measured batch whose prompt an earlier one had, too.
        blocks: AgentSpec's counts of the batch; empty under the other ways.
        fallbacks: steps without drafts since the server started, by reason; likewise.
        verdict: against plain decoding; None for plain decoding itself, or where it was not run.
    """

    decoding: Decoding
    counters: EngineCounters
    seconds: float
    warm_up: EngineCounters | None = None
    num_shared_prompts: int = 0
    num_repeated_prompts: int = 0
    blocks: Sequence[BlockCounters] = ()
    fallbacks: Mapping[str, int] | None = None
    verdict: Verdict | None = None

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all agents per second of wall clock."""
        return self.counters.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Replica:
    """The first batch of a second AgentSpec server, which shares the histories of the first one.

    Attributes:
        counters: vLLM's own counts of it.
        verdict: against plain decoding; None where it was not run.
    """

    counters: EngineCounters
    verdict: Verdict | None = None


def make_report(
    results: Sequence[BatchResult], replica: Replica | None = None, *, num_agents: int, conditions: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of `report.json`; what a way of decoding that was not run would say is absent."""
    report: dict[str, Any] = {"num_agents": num_agents}
    for result in results:
        name, counters = result.decoding, result.counters
        report[f"request_steps_{name}"] = counters.num_steps
        report[f"tokens_per_s_{name}"] = round(result.tokens_per_s, 2)
        report[f"seconds_{name}"] = round(result.seconds, 2)
        if name == "plain":
            report["num_tokens"] = counters.num_tokens
            report["num_warm_up_tokens"] = result.warm_up.num_tokens if result.warm_up is not None else 0
            report["num_shared_prompts"] = result.num_shared_prompts
            report["num_repeated_prompts"] = result.num_repeated_prompts
        if name == "ngram":
            report["num_draft_tokens_ngram"] = counters.num_draft_tokens
            report["num_accepted_tokens_ngram"] = counters.num_accepted_tokens
        if name == "agentspec":
            report["num_draft_tokens"] = counters.num_draft_tokens
            report["num_accepted_tokens"] = counters.num_accepted_tokens
            report["fallbacks"] = dict(result.fallbacks or {})
            report["by_block"] = [_block_row(block) for block in result.blocks]
        if result.verdict is not None:
            suffix = "" if name == "agentspec" else f"_{name}"
            report |= {f"{key}{suffix}": value for key, value in _verdict_fields(result.verdict).items()}
    if replica is not None:
        report["first_batch"] = [
            {"server": server} | _first_batch_fields(counters) for server, counters in _first_batches(results, replica)
        ]
        report["replica"] = _verdict_fields(replica.verdict) if replica.verdict is not None else {}
    return report | {"conditions": dict(conditions)}


def _first_batches(results: Sequence[BatchResult], replica: Replica) -> list[tuple[str, EngineCounters]]:
    cold = next((result.warm_up for result in results if result.decoding == "agentspec"), None)
    return [*([("cold", cold)] if cold is not None else []), ("replica", replica.counters)]


def _first_batch_fields(counters: EngineCounters) -> dict[str, Any]:
    return asdict(counters) | {"tokens_per_step": round(counters.num_tokens / counters.num_steps, 4)}


def print_tables(
    report: Mapping[str, Any], results: Sequence[BatchResult], replica: Replica | None, console: Console
) -> None:
    """Print one row per way of decoding, then one per stage and block, then one per first batch."""
    table = Table(title=f"Measured batch: {report['num_agents']} agents at once, each on a task of its own")
    for column in ("decoding", "tokens", "request-steps", "of plain", "draft tokens", "acceptance rate"):
        table.add_column(column, justify="left" if column == "decoding" else "right")
    for column in ("acceptance length", "tokens/s", "identical to plain"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(*_result_cells(result, report.get("request_steps_plain")))
    console.print(table)
    blocks = next((result.blocks for result in results if result.decoding == "agentspec"), ())
    if blocks:
        console.print(_block_table(blocks))
    if replica is not None:
        console.print(_first_batch_table(_first_batches(results, replica), replica.verdict))


def _result_cells(result: BatchResult, plain_steps: int | None) -> list[str]:
    counters = result.counters
    rate = counters.num_accepted_tokens / counters.num_draft_tokens if counters.num_draft_tokens else None
    length = 1 + counters.num_accepted_tokens / counters.num_drafts if counters.num_drafts else None
    return [
        result.decoding,
        f"{counters.num_tokens:,}",
        f"{counters.num_steps:,}",
        _percent(counters.num_steps / plain_steps if plain_steps else None),
        f"{counters.num_draft_tokens:,}",
        _percent(rate),
        _number(length),
        f"{result.tokens_per_s:.1f}",
        _identity(result.verdict),
    ]


def _block_table(blocks: Sequence[BlockCounters]) -> Table:
    table = Table(title="AgentSpec, by stage and block in which the step began")
    for column in ("stage", "block", "request-steps", "draft tokens", "accepted", "acceptance rate"):
        table.add_column(column, justify="left" if column in {"stage", "block"} else "right")
    table.add_column("acceptance length", justify="right")
    for block in blocks:
        table.add_row(
            block.stage,
            block.block,
            f"{block.num_steps:,}",
            f"{block.num_draft_tokens:,}",
            f"{block.num_accepted_tokens:,}",
            _percent(block.acceptance_rate),
            _number(block.acceptance_length),
        )
    return table


def _first_batch_table(batches: Sequence[tuple[str, EngineCounters]], verdict: Verdict | None) -> Table:
    table = Table(title="First batch of an AgentSpec server: with no history, and with that of the first one, by Redis")
    for column in ("server", "tokens", "request-steps", "tokens per step", "acceptance rate", "identical to plain"):
        table.add_column(column, justify="left" if column == "server" else "right")
    for server, counters in batches:
        table.add_row(
            server,
            f"{counters.num_tokens:,}",
            f"{counters.num_steps:,}",
            _number(counters.num_tokens / counters.num_steps),
            _percent(counters.num_accepted_tokens / counters.num_draft_tokens if counters.num_draft_tokens else None),
            _identity(verdict) if server == "replica" else "–",
        )
    return table


def _block_row(block: BlockCounters) -> dict[str, Any]:
    rates = {"acceptance_rate": block.acceptance_rate, "acceptance_length": block.acceptance_length}
    return asdict(block) | {key: None if value is None else round(value, 4) for key, value in rates.items()}


def _verdict_fields(verdict: Verdict) -> dict[str, Any]:
    return {
        "identical": verdict.is_identical,
        "num_numeric_ties": verdict.num_numeric_ties,
        "num_compared_calls": verdict.num_compared_calls,
        "num_skipped_calls": verdict.num_skipped_calls,
        "differences": [
            {key: value for key, value in asdict(difference).items() if key != "prefix_token_ids"}
            for difference in verdict.differences
        ],
    }


def _identity(verdict: Verdict | None) -> str:
    if verdict is None:
        return "–"
    if not verdict.is_identical:
        return f"no: {len(verdict.differences)} agents differ"
    return f"yes, {verdict.num_numeric_ties} ties" if verdict.num_numeric_ties else "yes"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
