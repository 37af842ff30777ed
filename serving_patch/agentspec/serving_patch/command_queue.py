"""Commands that wait for the one thread that carries them out, bounded by the tokens that they hold."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

MAX_QUEUED_TOKENS = 1 << 22  # 16 MiB of prompts and steps that wait for a stuck client
COMMAND_TOKENS = 64  # what a queued command counts beside its tokens

T = TypeVar("T")


class CommandQueue(Generic[T]):
    """Commands in order. It has no lock of its own: its owner's guards it."""

    def __init__(self) -> None:
        self._commands: deque[tuple[int, T]] = deque()
        self.num_tokens = 0
        """Of all commands, those taken and not finished included."""

    def __len__(self) -> int:
        return len(self._commands)

    def add(self, command: T, num_tokens: int, *, is_needed: bool = False) -> bool:
        """Queue a command.

        Args:
            command: for the thread.
            num_tokens: what it holds.
            is_needed: queue it whatever its size.

        Returns:
            False: the queue is full, and the command was dropped.
        """
        size = num_tokens + COMMAND_TOKENS
        if not is_needed and self.num_tokens + size > MAX_QUEUED_TOKENS:
            return False
        self.num_tokens += size
        self._commands.append((size, command))
        return True

    def first(self) -> tuple[int, T]:
        """What `take` would return.

        Raises:
            IndexError: there is none.
        """
        return self._commands[0]

    def take(self) -> tuple[int, T]:
        """Remove the first command; its size, for `finish`, and itself.

        Raises:
            IndexError: there is none.
        """
        return self._commands.popleft()

    def finish(self, size: int) -> None:
        """Note that a command of a size, as `take` gave it, holds no tokens any more."""
        self.num_tokens -= size

    def clear(self) -> None:
        """Drop every command."""
        self._commands.clear()
        self.num_tokens = 0
