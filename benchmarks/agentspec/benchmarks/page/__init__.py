"""Results of the benchmarks as one web page that needs nothing else: figures, tables and their conditions."""

from __future__ import annotations

from agentspec.benchmarks.page.render import PageError, render_page

__all__ = ["PageError", "render_page"]
