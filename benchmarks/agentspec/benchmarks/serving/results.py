"""What a `serve` run has measured, kept in a JSON file from which the next one goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentspec.benchmarks.figures import Figures
from agentspec.benchmarks.report import write_json
from agentspec.benchmarks.serving.figures import block_figures
from agentspec.benchmarks.serving.protocol import CellDone


class ResultsError(ValueError):
    """The file of an earlier run can't be gone on with; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class CellKey:
    """Which cell."""

    workload: str
    batch_size: int
    method: str
    repeat: int

    def __str__(self) -> str:
        return f"{self.workload} b={self.batch_size} {self.method} #{self.repeat}"


@dataclass(frozen=True, slots=True)
class Cell:
    """One method on one workload at one batch size, once; `figures` as in the JSON file."""

    key: CellKey
    figures: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        key: CellKey,
        done: CellDone,
        plain: CellDone | None,
        block_names: Sequence[str],
        quality: Figures | None = None,
    ) -> Cell:
        """A cell that was measured, beside plain decoding in the same lockstep (None: that failed)."""
        figures = {name: value for name, value in done.figures.items() if name != "block_counts"}
        reference: Mapping[str, Any] = {} if plain is None else plain.figures
        return cls(
            key,
            {
                "status": "ok",
                "speedup_vs_plain": _share(figures, reference, "decode_goodput"),
                "speedup_vs_plain_wall": _share(figures, reference, "decode_goodput_wall"),
                "end_to_end_speedup_vs_plain": _share(figures, reference, "goodput"),
                "plain_decode_goodput": reference.get("decode_goodput"),
                **figures,
                "blocks": block_figures(done.figures["block_counts"], block_names),
                "quality": quality,
            },
        )

    @classmethod
    def failed(cls, key: CellKey, reason: str, log_tail: str) -> Cell:
        """A cell that was not measured."""
        return cls(key, {"status": "failed", "reason": reason, "log_tail": log_tail})

    @property
    def is_failed(self) -> bool:
        """Whether it has no figures."""
        return bool(self.figures["status"] == "failed")

    def record(self) -> Figures:
        """Key and figures in one, as the file holds it."""
        key = {"workload": self.key.workload, "batch_size": self.key.batch_size}
        return {**key, "method": self.key.method, "repeat": self.key.repeat, **self.figures}


def _share(figures: Mapping[str, Any], reference: Mapping[str, Any], name: str) -> float | None:
    ours, theirs = figures.get(name), reference.get(name)
    return ours / theirs if ours and theirs else None


class Results:
    """The cells of a run.

    Args:
        path: where they are kept; None: nowhere.
        conditions: under which they are measured; cells of a file with others are not mixed with them.

    Raises:
        ResultsError: the file is there and is of another run, or no file of ours.
    """

    def __init__(self, path: Path | None, conditions: Mapping[str, Any]) -> None:
        self._path = path
        self._conditions = json.loads(json.dumps(conditions))
        self._facts: dict[str, Any] = {}
        self._cells: dict[CellKey, Cell] = {}
        if path is not None and path.exists():
            self._load(path)

    def has(self, key: CellKey) -> bool:
        """Whether a cell was measured; failed ones count as not."""
        return key in self._cells and not self._cells[key].is_failed

    def add(self, cell: Cell) -> None:
        """Keep a cell; a failure never replaces figures."""
        if not (cell.is_failed and self.has(cell.key)):
            self._cells[cell.key] = cell

    def note_facts(self, facts: Mapping[str, Any]) -> None:
        """What an engine said of itself when it started."""
        self._facts |= facts

    def cells(self) -> list[Cell]:
        """All cells, by workload, batch size, method and repeat."""
        return [self._cells[key] for key in sorted(self._cells, key=_order)]

    def save(self) -> None:
        """Write the file, all of it or nothing."""
        if self._path is None:
            return
        unfinished = self._path.with_name(f".{self._path.name}.part")
        meta = {"command": "serve", "conditions": self._conditions, **self._facts}
        write_json(unfinished, meta, cells=[cell.record() for cell in self.cells()])
        unfinished.replace(self._path)

    def _load(self, path: Path) -> None:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            meta, cells = record["meta"], record["cells"]
            conditions = meta["conditions"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ResultsError(f"{path}: no result of `serve` to go on with ({error!r}); name another file") from None
        changed = [
            f"{name} was {conditions.get(name)!r}, is {self._conditions.get(name)!r}"
            for name in sorted({*conditions, *self._conditions})
            if conditions.get(name) != self._conditions.get(name)
        ]
        if changed:
            raise ResultsError(f"{path}: measured under other conditions ({'; '.join(changed)}); name another file")
        self._facts = {name: meta[name] for name in ("vllm", "device", "dtype") if name in meta}
        names = ("workload", "batch_size", "method", "repeat")
        for cell in cells:
            key = CellKey(*(cell.pop(name) for name in names))
            self._cells[key] = Cell(key, cell)


def _order(key: CellKey) -> tuple[str, int, str, int]:
    return key.workload, key.batch_size, key.method, key.repeat
