"""What the commands of `agentspec-bench` share: traces and tokenizers as options, progress, problems."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from agentspec.benchmarks.corpus import Corpus, read_corpus
from agentspec.benchmarks.experiment import OnProgress
from agentspec.benchmarks.models import cache_folder
from agentspec.benchmarks.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from agentspec.sidecar.traces import Problem, find_traces

SAMPLE = Path(__file__).parent / "sample"
MAX_PROBLEMS_SHOWN = 20

EXISTING = click.Path(exists=True, path_type=Path)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
OUTPUT = click.Path(dir_okay=False, writable=True, path_type=Path)


def tokenizer_or_exit(path: Path | None) -> Tokenizer:
    """Load a tokenizer; without one the command ends with the reason."""
    try:
        return load_tokenizer(path)
    except TokenizerError as error:
        raise click.ClickException(str(error)) from None


def read_traces(paths: Sequence[Path], tokenizer: Tokenizer) -> Corpus:
    """Read trace files and folders of them; what can't be used is listed in the corpus' problems."""
    files = list(dict.fromkeys(file for path in paths for file in find_traces(path)))
    empty = [Problem(str(path), 0, "no *.jsonl or *.jsonl.gz in it") for path in paths if not find_traces(path)]
    with _progress() as progress:
        task = progress.add_task("reading", total=1.0)

        def show(name: str, share: float) -> None:
            progress.update(task, description=f"reading {name}", completed=share)

        corpus = read_corpus(files, tokenizer, cache_folder() / "traces", show)
    return Corpus(corpus.calls, corpus.block_names, (*empty, *corpus.problems), corpus.prompt_files)


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def cell_progress() -> Iterator[OnProgress]:
    """A line on the terminal that shows cell, work done and work to do."""
    with _progress() as progress:
        task = progress.add_task("")
        yield lambda cell, done, total: progress.update(task, description=cell, completed=done, total=total)


def finish(problems: Sequence[Problem]) -> None:
    """List what could not be used; any such thing makes the exit code 1."""
    for problem in problems[:MAX_PROBLEMS_SHOWN]:
        click.echo(str(problem), err=True)
    if problems:
        click.echo(f"{len(problems)} problem{'s' * (len(problems) > 1)}; the rest was played", err=True)
        sys.exit(1)
