"""What a page is made of: parts, each of one result file, with figures and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentspec.benchmarks.report import Columns

Kind = Literal["modelled", "measured"]


@dataclass(frozen=True, slots=True)
class Chart:
    """One figure.

    Attributes:
        title: what it shows.
        svg: the drawing; its colours are those of the page.
        caption: the conditions under which its numbers hold.
    """

    title: str
    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of one kind of figures.

    Attributes:
        title: what it holds.
        headings: of the columns.
        is_number: whether a column is aligned to the right; shape of `headings`.
        rows: formatted, each of the shape of `headings`.
    """

    title: str
    headings: tuple[str, ...]
    is_number: tuple[bool, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """A cell that was not measured.

    Attributes:
        name: of the cell.
        reason: what went wrong.
        log_tail: last lines of the engine's log, may be empty.
    """

    name: str
    reason: str
    log_tail: str


@dataclass(frozen=True, slots=True)
class Part:
    """All that one result file says.

    Attributes:
        title: what was run.
        kind: modelled figures come from recorded outputs and a cost model, measured ones from a clock.
        source: the file's name.
        conditions: name and value of each.
        charts, tables, failures: may be empty.
    """

    title: str
    kind: Kind
    source: str
    conditions: tuple[tuple[str, str], ...]
    charts: tuple[Chart, ...]
    tables: tuple[Table, ...]
    failures: tuple[Failure, ...] = ()


def make_table(title: str, columns: Columns, cells: Sequence[Mapping[str, Any]]) -> Table:
    """Format cells as the terminal does; a figure that a cell has not is a dash."""
    rows = tuple(
        tuple("–" if cell.get(field) is None else format(cell[field], form) for _, field, form in columns)
        for cell in cells
    )
    headings = tuple(heading for heading, _, _ in columns)
    return Table(title, headings, tuple(form != "s" for _, _, form in columns), rows)


def make_conditions(meta: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Every entry of a file's `meta` that says something, as text."""
    return tuple(
        (name.replace("_", " "), text) for name, value in meta.items() if (text := _text(value)) and name != "command"
    )


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_text(entry)}" for name, entry in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def unique(values: Sequence[Any]) -> list[Any]:
    """Each value once, in the order in which they first occur."""
    return list(dict.fromkeys(values))
