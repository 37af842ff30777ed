"""Counters that servers export for Prometheus, read before and after a batch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]
"""Value by name and labels of a sample."""

_SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What vLLM itself counts, whatever the way of decoding.

    Attributes:
        num_requests: finished requests.
        num_tokens: output tokens.
        num_steps: request-steps. vLLM observes one latency for every step that brought a request tokens: the time to
            first token for the step that ended its prefill, the inter-token latency for each later one.
        num_drafts: request-steps that verified a draft.
        num_draft_tokens: draft tokens that were verified, those past a stop included.
        num_accepted_tokens: how many of them were accepted, those past a stop included.
    """

    num_requests: int
    num_tokens: int
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def since(self, earlier: EngineCounters) -> EngineCounters:
        """What was counted between two readings."""
        return EngineCounters(
            self.num_requests - earlier.num_requests,
            self.num_tokens - earlier.num_tokens,
            self.num_steps - earlier.num_steps,
            self.num_drafts - earlier.num_drafts,
            self.num_draft_tokens - earlier.num_draft_tokens,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
        )


@dataclass(frozen=True, slots=True)
class BlockCounters:
    """What AgentSpec counts in one block of one stage; see `agentspec.sidecar.engine.BlockStats`."""

    stage: str
    block: str
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over draft tokens, in [0, 1]; None without a draft."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens of a step that verified a draft, its own token included; None without a draft."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None


def read_samples(url: str) -> Samples:
    """Fetch the metrics of one server.

    Raises:
        httpx.HTTPError: the server does not answer.
    """
    response = httpx.get(url, timeout=10)
    response.raise_for_status()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def engine_counters(samples: Samples) -> EngineCounters:
    """Sum vLLM's counters over its engines."""
    return EngineCounters(
        num_requests=_total(samples, "vllm:request_success_total"),
        num_tokens=_total(samples, "vllm:generation_tokens_total"),
        num_steps=_total(samples, "vllm:time_to_first_token_seconds_count")
        + _total(samples, "vllm:inter_token_latency_seconds_count"),
        num_drafts=_total(samples, "vllm:spec_decode_num_drafts_total"),
        num_draft_tokens=_total(samples, "vllm:spec_decode_num_draft_tokens_total"),
        num_accepted_tokens=_total(samples, "vllm:spec_decode_num_accepted_tokens_total"),
    )


def settled_counters(url: str, before: EngineCounters, num_requests: int) -> EngineCounters:
    """Read vLLM's counters once they hold all of a batch: it counts a step shortly after its answers are out.

    Raises:
        RuntimeError: they do not settle within ten seconds.
    """
    deadline = time.monotonic() + _SETTLE_S
    while time.monotonic() < deadline:
        batch = engine_counters(read_samples(url)).since(before)
        if batch.num_requests == num_requests:
            return batch
        time.sleep(0.05)
    raise RuntimeError(f"{url}: expected {num_requests} finished requests, got {batch.num_requests}")


def block_counters(before: Samples, after: Samples) -> list[BlockCounters]:
    """What AgentSpec counted between two readings, by stage and block, most steps first; workflows are added up."""
    fields = ("steps", "drafts", "draft_tokens", "accepted_tokens")
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for (name, label_items), value in after.items():
        field = name.removeprefix("agentspec_").removesuffix("_total")
        if not name.startswith("agentspec_") or field not in fields:
            continue
        labels = dict(label_items)
        row = counts.setdefault((labels["stage"], labels["block"]), dict.fromkeys(fields, 0))
        row[field] += round(value - before.get((name, label_items), 0.0))
    blocks = [BlockCounters(stage, block, *row.values()) for (stage, block), row in counts.items()]
    return sorted((block for block in blocks if block.num_steps), key=lambda block: (-block.num_steps, block.stage))


def fallback_counts(samples: Samples) -> dict[str, int]:
    """How often AgentSpec fell back to no drafts, by reason."""
    return {
        dict(labels)["reason"]: round(value)
        for (name, labels), value in samples.items()
        if name == "agentspec_fallbacks_total" and value
    }


def _total(samples: Samples, name: str) -> int:
    return round(sum(_values(samples, name)))


def _values(samples: Samples, name: str) -> Iterable[float]:
    return (value for (sample_name, _labels), value in samples.items() if sample_name == name)
