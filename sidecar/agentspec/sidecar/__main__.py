"""`agentspec-sidecar`: serve drafts to engines, and look after their histories."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from agentspec.sidecar.callers import read_identities
from agentspec.sidecar.commands import COMMANDS
from agentspec.sidecar.flags import ConfigurationError, option_flags
from agentspec.sidecar.grammar_store import server_grammars
from agentspec.sidecar.logs import configure_logging
from agentspec.sidecar.options import ENV_PREFIX, OptionsError
from agentspec.sidecar.server import run_server
from agentspec.sidecar.server_options import ServerOptions, package_version, read_server_options
from agentspec.sidecar.socket_file import SocketInUseError, claimed
from agentspec.sidecar.tls import Certificates


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_version())
def main() -> None:
    """Serve drafts to engines over gRPC, and look after the histories that they are made of."""


@main.command()
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar=f"{ENV_PREFIX}CONFIG",
    show_envvar=True,
    help='TOML or JSON file with options by name, as in `history_bytes = "4GiB"`; flags and variables win.',
)
@click.option("--check-config", is_flag=True, help="Check the options and the files they name, print them, and exit.")
@option_flags(ServerOptions)
def serve(config_file: Path | None, check_config: bool, **given: Any) -> None:
    """Serve until SIGTERM.

    A wrong option ends the program with exit code 2 and its name, a socket that another server has with 1.
    """
    try:
        options = read_server_options({name: value for name, value in given.items() if value is not None}, config_file)
        grammars = server_grammars(options)
        certificates = Certificates.of(options)
        if options.tls_identities is not None:
            read_identities(options.tls_identities)
        if check_config:
            click.echo(options.model_dump_json(indent=2))
            return
        configure_logging(options.log_level)
        with claimed(options.socket) as socket:
            asyncio.run(run_server(options, socket, grammars, certificates))
    except OptionsError as error:
        raise ConfigurationError(str(error)) from None
    except SocketInUseError as error:
        raise click.ClickException(str(error)) from None


for _command in COMMANDS:
    main.add_command(_command)

if __name__ == "__main__":
    main()
