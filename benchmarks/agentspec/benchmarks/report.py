"""Results for people and for programs: tables on the terminal, JSON in a file."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agentspec.benchmarks.figures import Figures

_MIN_WIDTH = 160  # of a table that goes into a file

# Heading, field and format of the columns; a field that is None shows as a dash.
Columns = tuple[tuple[str, str, str], ...]

CELL_COLUMNS: Columns = (
    ("workload", "workload", "s"),
    ("batch", "batch_size", "d"),
    ("method", "method", "s"),
    ("P", "threshold", "g"),
    ("tokens", "num_tokens", "d"),
    ("tokens/step", "tokens_per_step", ".3f"),
    ("rejection", "rejection_rate", ".3f"),
    ("acc. length", "acceptance_length", ".2f"),
    ("first step", "first_step_accepted", ".2f"),
    ("drafts/step", "draft_tokens_per_step", ".2f"),
    ("D/M(b)", "budget_use", ".2f"),
    ("cal. error", "calibration_error", ".3f"),
    ("speed-up", "modelled_speedup", ".3f"),
    ("worst window", "worst_window_speedup", ".3f"),
)
EQUAL_REJECTION_COLUMNS: Columns = (
    ("workload", "workload", "s"),
    ("batch", "batch_size", "d"),
    ("method", "method", "s"),
    ("peer", "peer", "s"),
    ("peer's P", "peer_threshold", "g"),
    ("rejection", "rejection_rate", ".3f"),
    ("peer's tokens/step", "peer_tokens_per_step", ".3f"),
    ("tokens/step", "tokens_per_step", ".3f"),
    ("gain", "gain", "+.1%"),
)
ENGINE_COLUMNS: Columns = (
    ("metric", "metric", "s"),
    ("batch", "batch_size", "d"),
    ("history", "history_tokens", "d"),
    ("peer", "peer", "s"),
    ("agentspec", "agentspec", ".3f"),
    ("peer's", "peer_value", ".3f"),
    ("ratio", "ratio", ".2f"),
)
MIDDLEWARE_COLUMNS: Columns = (
    ("tools", "num_tools", "d"),
    ("messages", "num_messages", "d"),
    ("injection µs", "inject_us", ".1f"),
    ("all added µs", "added_us", ".1f"),
    ("plain call µs", "plain_us", ".0f"),
    ("reference µs", "reference_us", ".1f"),
    ("injection ratio", "inject_ratio", ".2f"),
    ("added ratio", "added_ratio", ".2f"),
    ("tag bytes", "tag_bytes", "d"),
)
RPC_COLUMNS: Columns = (
    ("batch", "batch_size", "d"),
    ("blocked µs", "blocked_us", ".0f"),
    ("p99", "blocked_p99_us", ".0f"),
    ("framed µs", "framed_us", ".0f"),
    ("p99", "framed_p99_us", ".0f"),
    ("ratio", "ratio", ".2f"),
    ("hook µs", "hook_us", ".0f"),
    ("submit µs", "submit_us", ".0f"),
    ("engine µs", "engine_us", ".0f"),
    ("bytes out", "request_bytes", "d"),
    ("bytes in", "answer_bytes", "d"),
)
REDIS_COLUMNS: Columns = (
    ("measurement", "measurement", "s"),
    ("figure", "figure", "s"),
    ("value", "value", ".4g"),
)
SERVE_COLUMNS: Columns = (
    ("workload", "workload", "s"),
    ("batch", "batch_size", "d"),
    ("method", "method", "s"),
    ("repeat", "repeat", "d"),
    ("steps", "num_steps", "d"),
    ("requests", "num_requests", "d"),
    ("goodput, tok/s", "decode_goodput", ".1f"),
    ("step, ms", "step_ms", ".1f"),
    ("tokens/step", "tokens_per_step", ".2f"),
    ("drafts/step", "draft_tokens_per_step", ".1f"),
    ("acc. rate", "acceptance_rate", ".2f"),
    ("acc. length", "acceptance_length", ".2f"),
    ("speed-up", "speedup_vs_plain", ".3f"),
    ("(wall)", "speedup_vs_plain_wall", ".3f"),
)


def output_console() -> Console:
    """Standard output; wide enough for every column where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, _MIN_WIDTH))


def print_table(console: Console, title: str, columns: Columns, cells: Sequence[Figures]) -> None:
    """Print cells as a table, a row each."""
    table = Table(title=title)
    for heading, _, form in columns:
        table.add_column(heading, justify="left" if form == "s" else "right", no_wrap=True)
    for cell in cells:
        table.add_row(*("–" if cell[field] is None else format(cell[field], form) for _, field, form in columns))
    console.print(table)


def write_json(path: Path, meta: Figures, **parts: Any) -> None:
    """Write a result; `meta` gains version and commit of the project."""
    record = {"meta": {"version": _version(), "commit": _commit(), **meta}, **parts}
    path.write_text(json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


def _version() -> str | None:
    try:
        return importlib.metadata.version("agentspec-serving")
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the working tree that this file is in, with a plus when it was edited; None for an installed wheel."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--abbrev=12",
        "--exclude=*",
        "--dirty=+",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
