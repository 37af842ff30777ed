"""The commands of `agentspec-sidecar` that talk to a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import click
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import ValidationError

from agentspec.draft.v1 import draft_pb2, history_pb2
from agentspec.sidecar.connection import Connection, connecting
from agentspec.sidecar.flags import ConfigurationError, option_flags
from agentspec.sidecar.log_blocks import Encode, TokenizerFileError, batches_of, load_encoder
from agentspec.sidecar.options import options_error
from agentspec.sidecar.sealed import MAGIC as SEALED_MAGIC
from agentspec.sidecar.store.connection import FAILURES
from agentspec.sidecar.store.deletion import delete_shared
from agentspec.sidecar.store.options import RedisOptions
from agentspec.sidecar.traces import find_traces, read_trace

PART_BYTES = 1 << 20
ARCHIVE_MAGICS = (b"ASPH", SEALED_MAGIC)
MAX_PROBLEMS_SHOWN = 20
DRAFT_SERVICE = draft_pb2.DESCRIPTOR.services_by_name["DraftService"].full_name

_model = click.option("--model", "fingerprint", metavar="FINGERPRINT", help="Which one, if the server has several.")
_json = click.option("--json", "is_json", is_flag=True, help="Print JSON, for programs.")
_EXISTING = click.Path(exists=True, path_type=Path)
_STDIN = Path("-")


@click.command()
@connecting
@_json
def stats(connection: Connection, is_json: bool) -> None:
    """Print what speculation brought, by namespace, workflow, stage and block."""
    answer = connection.histories.GetStats(history_pb2.GetStatsRequest(), timeout=connection.timeout_s)
    if is_json:
        _print_json(answer)
        return
    for model in answer.models:
        click.echo(
            f"model {model.model_fingerprint}: {model.num_open_requests} open requests, "
            f"{model.history_bytes / (1 << 20):.1f} MiB of histories"
        )
        rows = [
            (
                *(row.namespace, row.workflow_id, row.stage, row.block_path),
                *(row.num_steps, row.num_drafts, row.num_draft_tokens, row.num_accepted_tokens, row.num_tokens),
                _share(row.num_accepted_tokens, row.num_draft_tokens),
            )
            for row in model.blocks
        ]
        header = ("namespace", "workflow", "stage", "block", "steps", "drafts", "draft", "accepted", "tokens", "rate")
        _print_table(header, rows)


@click.command()
@connecting
@click.option("--namespace", default="", help="[all that this client may use]")
@_model
@_json
def keys(connection: Connection, namespace: str, fingerprint: str | None, is_json: bool) -> None:
    """List the histories of a model with their sizes."""
    request = history_pb2.ListKeysRequest(model_fingerprint=connection.model(fingerprint), namespace=namespace)
    answer = connection.histories.ListKeys(request, timeout=connection.timeout_s)
    if is_json:
        _print_json(answer)
        return
    rows = [(key.namespace, key.stage, key.num_tokens, key.num_bytes) for key in answer.keys]
    _print_table(("namespace", "stage", "tokens", "bytes"), rows)


@click.command()
@connecting
@click.argument("namespace")
@click.option("-o", "--output", type=click.File("wb", lazy=True), required=True, help="File to write; - is stdout.")
@_model
def export(connection: Connection, namespace: str, output: IO[bytes], fingerprint: str | None) -> None:
    """Save the histories of NAMESPACE, and of those within it, to a file.

    Token ids are text: guard the file as you guard the answers themselves.
    """
    request = history_pb2.ExportHistoryRequest(model_fingerprint=connection.model(fingerprint), namespace=namespace)
    size = 0
    for part in connection.histories.ExportHistory(request, timeout=connection.timeout_s):
        size += output.write(part.archive_part)
    click.echo(f"{size} bytes", err=True)


@click.command("import")
@connecting
@click.argument(
    "paths", metavar="LOGS...", nargs=-1, required=True, type=click.Path(exists=True, allow_dash=True, path_type=Path)
)
@click.option("--namespace", default="", help="Where it goes. [the first that this client may use]")
@click.option("--tokenizer", type=_EXISTING, help="tokenizer.json of the model; chat logs need it.")
@click.option("--end-token", default="", help="Special token that ends an answer, as in <|im_end|>. [none]")
@_model
def import_(  # noqa: PLR0917  # click passes the options by name
    connection: Connection,
    paths: tuple[Path, ...],
    namespace: str,
    tokenizer: Path | None,
    end_token: str,
    fingerprint: str | None,
) -> None:
    """Warm the histories of a running server from LOGS.

    LOGS are archives of `export`, or chat logs: JSON lines (.jsonl, .jsonl.gz, or a folder of them) with `messages` as
    OpenAI's API takes them, beside `response` or `choices` if the answer is apart. Fields `workflow` and `stage` (or
    `node`) of a line choose the history; an engine drafts best from logs that carry the names it will see in tags.
    `-` reads an archive from standard input.
    """
    model = connection.model(fingerprint)
    files = [file for path in paths for file in ([path] if path == _STDIN else find_traces(path))]
    is_archive = {file: file == _STDIN or _is_archive(file) for file in files}
    encode = None if all(is_archive.values()) else _encoder(tokenizer, end_token)
    num_tokens = 0
    for file in files:
        if encode is None or is_archive[file]:
            num_tokens += _import_archive(connection, file, model, namespace)
        else:
            num_tokens += _import_log(connection, file, model, namespace, encode)
    click.echo(f"{num_tokens} tokens stored")


@click.command("delete-namespace")
@connecting
@click.argument("namespace")
@click.option("--model", "fingerprint", metavar="FINGERPRINT", default="", help="[all models]")
@click.confirmation_option("--yes", prompt="Forget all text of this namespace, for good?")
def delete_namespace(connection: Connection, namespace: str, fingerprint: str) -> None:
    """Forget all text of NAMESPACE and of those within it, for good."""
    request = history_pb2.DeleteNamespaceRequest(model_fingerprint=fingerprint, namespace=namespace)
    answer = connection.histories.DeleteNamespace(request, timeout=connection.timeout_s)
    click.echo(f"{answer.num_tokens} tokens forgotten")


@click.command("delete-shared")
@click.argument("namespace")
@option_flags(RedisOptions)
@click.confirmation_option("--yes", prompt="Forget all text of this namespace, for good, wherever it is shared?")
def delete_shared_namespace(namespace: str, **given: Any) -> None:
    """Forget all text of NAMESPACE and of those within it, for good, without a server: for engines that embed theirs.

    Every engine that shares histories through this Redis forgets it within a second, one that is cut off as soon as it
    is back.
    """
    try:
        options = RedisOptions.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise ConfigurationError(str(options_error(error))) from None
    if options.redis is None:
        raise ConfigurationError("agentspec option 'redis': expected a URL")
    try:
        delete_shared(options, namespace)
    except FAILURES as error:
        raise click.ClickException(f"Redis can't be asked, nothing is certain: {error}") from None
    click.echo(f"{namespace} is deleted")


@click.command()
@connecting
@click.option("--service", default=DRAFT_SERVICE, show_default=True, help='Whose; "" is the whole process.')
def health(connection: Connection, service: str) -> None:
    """Exit with 0 if the server answers that a service is SERVING, else with 1."""
    stub: Any = health_pb2_grpc.HealthStub(connection.channel)
    answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=connection.timeout_s)
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    click.echo(status)
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise SystemExit(1)


COMMANDS = (stats, keys, import_, export, delete_namespace, delete_shared_namespace, health)


def _is_archive(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(SEALED_MAGIC)) in ARCHIVE_MAGICS


def _import_archive(connection: Connection, path: Path, model: str, namespace: str) -> int:
    def parts() -> Iterator[history_pb2.ImportHistoryRequest]:
        head = {"model_fingerprint": model, "namespace": namespace}
        with click.open_file(str(path), "rb") as file:
            while part := file.read(PART_BYTES):
                yield history_pb2.ImportHistoryRequest(archive_part=part, **head)
                head = {}

    return int(connection.histories.ImportHistory(parts(), timeout=connection.timeout_s).num_tokens)


def _encoder(tokenizer: Path | None, end_token: str) -> Encode:
    if tokenizer is None:
        raise click.UsageError("chat logs need the tokenizer.json of the model: give it with --tokenizer")
    try:
        return load_encoder(tokenizer, end_token)
    except TokenizerFileError as error:
        raise click.UsageError(str(error)) from None


def _import_log(connection: Connection, path: Path, model: str, namespace: str, encode: Encode) -> int:
    trace = read_trace(path)
    for problem in trace.problems[:MAX_PROBLEMS_SHOWN]:
        click.echo(f"left out: {problem}", err=True)
    if len(trace.problems) > MAX_PROBLEMS_SHOWN:
        click.echo(f"left out: {len(trace.problems) - MAX_PROBLEMS_SHOWN} more", err=True)
    num_tokens = 0
    for blocks in batches_of(trace, namespace, encode):
        request = history_pb2.AppendBlocksRequest(model_fingerprint=model, blocks=blocks)
        num_tokens += connection.histories.AppendBlocks(request, timeout=connection.timeout_s).num_tokens
    return num_tokens


def _print_json(message: Message) -> None:
    fields = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    click.echo(json.dumps(fields, indent=2))


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = [[*map(str, row)] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    is_number = [isinstance(cell, int) for cell in (rows[0] if rows else header)]
    for row in table:
        cells = zip(row, widths, is_number, strict=True)
        click.echo("  ".join(c.rjust(width) if number else c.ljust(width) for c, width, number in cells).rstrip())
