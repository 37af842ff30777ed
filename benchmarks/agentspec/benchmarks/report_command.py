"""`agentspec-bench report`: result files as one web page."""

from __future__ import annotations

from pathlib import Path

import click

from agentspec.benchmarks.page import PageError, render_page


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, writable=True, path_type=Path), help="report.html"
)
@click.option("--title", default="AgentSpec benchmarks", show_default=True)
def report(files: tuple[Path, ...], output: Path, title: str) -> None:
    """Make one self-contained page of FILES that `replay`, `engine` or `serve` wrote with --json."""
    try:
        page = render_page(files, title)
    except PageError as error:
        raise click.ClickException(str(error)) from None
    output.write_text(page, encoding="utf-8")
    click.echo(f"{output}: {len(files)} result{'s' * (len(files) > 1)}, {len(page) // 1024} KiB")
