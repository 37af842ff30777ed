"""Command line flags made from a table of options."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click
from pydantic import BaseModel

from agentspec.sidecar.options import ENV_PREFIX

_Command = TypeVar("_Command", bound=Callable[..., Any])

_METAVARS = {
    "socket": "PATH",
    "dir": "FOLDER",
    "bytes": "BYTES",
    "s": "SECONDS",
    "ms": "MS",
    "port": "PORT",
    "tcp": "HOST:PORT",
    "redis": "URL",
    **dict.fromkeys(("cert", "key", "ca", "identities", "file"), "FILE"),
    **dict.fromkeys(("tokens", "models", "requests", "calls"), "N"),
    "isolation": "soft|strict",
    "level": "debug|info|warning|error",
    **dict.fromkeys(("namespace", "username"), "NAME"),
}
"""What a flag takes, by the last word of its name."""


class ConfigurationError(click.ClickException):
    """An option is wrong; the message names it."""

    exit_code = 2


def option_flags(options: type[BaseModel]) -> Callable[[_Command], _Command]:
    """Give a command one flag for each option, which also a variable of the same name sets."""

    def decorate(command: _Command) -> _Command:
        for name, field in reversed(options.model_fields.items()):
            default = "" if field.default is None else f"  [default: {field.default}]"
            command = click.option(
                f"--{name.replace('_', '-')}",
                name,
                metavar=_METAVARS.get(name.rpartition("_")[2], "VALUE"),
                envvar=ENV_PREFIX + name.upper(),
                show_envvar=True,
                help=f"{field.description}{default}",
            )(command)
        return command

    return decorate
