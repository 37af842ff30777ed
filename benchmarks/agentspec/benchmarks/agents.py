"""The agents that the demo measures: the very program under `examples/` that a newcomer reads."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

try:
    from research_agents import MAX_ROUNDS, build_graph, chat_model, research
except ModuleNotFoundError as missing:
    raise SystemExit(f"the demo runs from a clone of the project: {missing}, expected below {EXAMPLES}") from None

__all__ = ["MAX_ROUNDS", "build_graph", "chat_model", "research"]
