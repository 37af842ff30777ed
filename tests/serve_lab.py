"""A tiny model with random weights and recorded runs for the tests of `agentspec-bench serve`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from tests.trace_lab import trace_line, write_lines, write_tokenizer

from agentspec.benchmarks.__main__ import main
from agentspec.benchmarks.serving.random_model import QWEN_05B, write_random_model

TINY = {
    **QWEN_05B,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
NUM_RUNS = 24


def write_tiny_model(folder: Path, **shape: Any) -> Path:
    """Its tokens are bytes, so that any trace can be written with them."""
    folder.mkdir()
    tokenizer = write_tokenizer(folder / "bytes.json", special=("<|im_start|>", "<|im_end|>"))
    return write_random_model(folder, tokenizer, {**TINY, **shape})


def write_runs(path: Path) -> Path:
    """Runs of two calls each whose texts differ in a number only."""
    lines = []
    for run in range(NUM_RUNS):
        for step in range(2):
            text = f"Thought: look up item {run * 7 % 10}.\n```python\nprint(item_{step})\n```\nDone.\n"
            lines.append(trace_line(f"run-{run}", step, text))
    return write_lines(path, lines)


def serve(model: Path, traces: Path, *options: str) -> Result:
    """Run the command in this process; its engines are real ones."""
    arguments = ["serve", "--model", str(model), "--eval", str(traces), "--dtype", "float32", "--warm-up-steps", "2"]
    return CliRunner().invoke(main, [*arguments, *options])


def cells_of(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text())["cells"]
    return cells
