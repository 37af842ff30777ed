"""What the calls of each stage brought: tokens, acceptance, latency and tool time, as the server and the clock say."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

MAX_ROWS = 512
OTHER_STAGES = "(other)"  # all stages past the bound


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """What one LLM call brought.

    Attributes:
        duration_s: from the request to the end of the answer.
        is_failed: the client raised.
        prompt_tokens, output_tokens: as the answer's `usage` says; `None`: it said nothing.
        draft_tokens, accepted_tokens, num_draft_steps: as vLLM's per-request metrics say; `None`: it sent none.
    """

    duration_s: float
    is_failed: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    draft_tokens: int | None = None
    accepted_tokens: int | None = None
    num_draft_steps: int | None = None


@dataclass(frozen=True, slots=True)
class StageStats:
    """Sums over the calls of one stage.

    Attributes:
        num_calls: LLM calls, failed ones included; `num_measured` of them came back with acceptance figures.
        duration_s: of all LLM calls together; they may have run side by side.
        draft_tokens, accepted_tokens: draft tokens that were verified, and those of them that were accepted.
        num_draft_steps: verification steps that had a draft.
        num_tool_calls, tool_s: calls of tools in this stage, and the time they took, LLM calls inside them included.
    """

    workflow_id: str
    stage: str
    num_calls: int = 0
    num_failed: int = 0
    num_measured: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    num_draft_steps: int = 0
    duration_s: float = 0.0
    num_tool_calls: int = 0
    tool_s: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted of the verified draft tokens, in [0, 1]; `None` without a draft."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens of a verification step that had a draft, >= 1; `None` without such a step."""
        return 1 + self.accepted_tokens / self.num_draft_steps if self.num_draft_steps else None

    def with_call(self, outcome: CallOutcome) -> StageStats:
        """The sums with one LLM call more."""
        is_measured = outcome.draft_tokens is not None
        return replace(
            self,
            num_calls=self.num_calls + 1,
            num_failed=self.num_failed + outcome.is_failed,
            num_measured=self.num_measured + is_measured,
            prompt_tokens=self.prompt_tokens + (outcome.prompt_tokens or 0),
            output_tokens=self.output_tokens + (outcome.output_tokens or 0),
            draft_tokens=self.draft_tokens + (outcome.draft_tokens or 0),
            accepted_tokens=self.accepted_tokens + (outcome.accepted_tokens or 0),
            num_draft_steps=self.num_draft_steps + (outcome.num_draft_steps or 0),
            duration_s=self.duration_s + outcome.duration_s,
        )

    def with_tool_call(self, duration_s: float) -> StageStats:
        """The sums with one tool call more."""
        return replace(self, num_tool_calls=self.num_tool_calls + 1, tool_s=self.tool_s + duration_s)

    @property
    def mean_latency_s(self) -> float | None:
        """Of one LLM call, to the end of its answer; `None` without a call."""
        return self.duration_s / self.num_calls if self.num_calls else None


class Feedback:
    """Sums by workflow and stage; thread-safe, at most `MAX_ROWS` rows."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], StageStats] = {}
        self._lock = threading.Lock()

    def add_call(self, workflow_id: str, stage: str, outcome: CallOutcome) -> None:
        """Count one LLM call."""
        with self._lock:
            self._keep(self._row(workflow_id, stage).with_call(outcome))

    def add_tool_call(self, workflow_id: str, stage: str, duration_s: float) -> None:
        """Count one tool call."""
        with self._lock:
            self._keep(self._row(workflow_id, stage).with_tool_call(duration_s))

    def stats(self) -> tuple[StageStats, ...]:
        """The sums so far, by workflow and stage in order of their names."""
        with self._lock:
            return tuple(row for _, row in sorted(self._rows.items()))

    def _row(self, workflow_id: str, stage: str) -> StageStats:
        row = self._rows.get((workflow_id, stage))
        if row is None and len(self._rows) >= MAX_ROWS - 1:
            row = self._rows.get((OTHER_STAGES, OTHER_STAGES), StageStats(OTHER_STAGES, OTHER_STAGES))
        return row or StageStats(workflow_id, stage)

    def _keep(self, row: StageStats) -> None:
        self._rows[row.workflow_id, row.stage] = row


def read_outcome(answer: object, duration_s: float) -> CallOutcome:
    """Read tokens and acceptance out of an answer: a model of the openai client, or the JSON object.

    Args:
        answer: chat completion, completion, response, or the last chunk or event of a stream that says anything.
        duration_s: of the call.
    """
    usage = _get(answer, "usage")
    drafting = _get(_get(answer, "metrics"), "speculative_decoding")
    return CallOutcome(
        duration_s,
        prompt_tokens=_count(usage, "prompt_tokens", "input_tokens"),
        output_tokens=_count(usage, "completion_tokens", "output_tokens"),
        draft_tokens=_count(drafting, "num_draft_tokens"),
        accepted_tokens=_count(drafting, "num_accepted_draft_tokens"),
        num_draft_steps=_count(drafting, "num_spec_steps"),
    )


def says_anything(chunk: object) -> bool:
    """Whether a chunk of a stream holds usage or metrics, as the last one may."""
    return _get(chunk, "usage") is not None or _get(chunk, "metrics") is not None


def _get(holder: object, name: str) -> Any:
    return holder.get(name) if isinstance(holder, Mapping) else getattr(holder, name, None)


def _count(holder: object, *names: str) -> int | None:
    for name in names:
        value = _get(holder, name)
        if isinstance(value, int) and value >= 0:
            return value
    return None


_COLUMNS = ("workflow", "stage", "calls", "tokens", "acceptance", "length", "latency", "tool calls", "tool time")


def table(rows: Sequence[StageStats]) -> str:
    """The sums as text: one line a stage; ``-`` where nothing is known."""
    lines = [_COLUMNS, *map(_cells, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
    aligned = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([aligned[0], "-" * (sum(widths) + 2 * len(widths) - 2), *aligned[1:]])


def _cells(row: StageStats) -> tuple[str, ...]:
    calls = f"{row.num_calls:,}" + (f" ({row.num_failed:,} failed)" if row.num_failed else "")
    return (
        row.workflow_id,
        row.stage,
        calls if row.num_calls else "-",
        f"{row.output_tokens:,}" if row.output_tokens else "-",
        _shown(row.acceptance_rate, "{:.0%}"),
        _shown(row.acceptance_length, "{:.2f}"),
        _shown(row.mean_latency_s, "{:.2f} s"),
        f"{row.num_tool_calls:,}" if row.num_tool_calls else "-",
        f"{row.tool_s:.2f} s" if row.num_tool_calls else "-",
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
