"""Reads result files and writes the page."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from agentspec.benchmarks.page.engine_part import engine_part
from agentspec.benchmarks.page.parts import Part
from agentspec.benchmarks.page.replay_part import replay_part
from agentspec.benchmarks.page.serve_part import serve_part

_PARTS: Mapping[str, Callable[[str, Mapping[str, Any]], Part]] = {
    "serve": serve_part,
    "engine": engine_part,
    "replay": replay_part,
}


class PageError(ValueError):
    """A file is no result of the benchmarks; the message says which one and what was expected."""


def render_page(paths: Sequence[Path], title: str) -> str:
    """Make one page of result files; modelled and measured figures stand apart.

    Args:
        paths: files that `replay`, `engine` or `serve` wrote with --json.
        title: of the page.

    Raises:
        PageError: a file can't be read or is of no known command.
    """
    parts = [_read_part(path) for path in paths]
    groups = {
        "Measured": [part for part in parts if part.kind == "measured"],
        "Modelled": [part for part in parts if part.kind == "modelled"],
    }
    environment = Environment(
        loader=PackageLoader("agentspec.benchmarks.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.jinja").render(title=title, groups=groups)


def _read_part(path: Path) -> Part:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        command = record["meta"]["command"]
    except OSError as error:
        raise PageError(f"{path}: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError):
        raise PageError(f"{path}: no result of agentspec-bench, which writes JSON with `meta` and `cells`") from None
    if command not in _PARTS:
        raise PageError(f"{path}: a result of {command!r}; expected one of {', '.join(_PARTS)}")
    try:
        return _PARTS[command](path.name, record)
    except KeyError as error:
        raise PageError(
            f"{path}: a result of {command!r} without field {error}; was it cut or made long ago?"
        ) from None
