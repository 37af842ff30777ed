"""What the user says to one `AgentSpecMiddleware`: checked when it is made, never when a call is made."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from agentspec.middleware.feedback import Feedback
from agentspec.middleware.grammar import BlockGrammar
from agentspec.middleware.tags import check_name

MAX_PROMPT_VERSIONS = 16  # of one stage; a prompt with more of them changes with every call
CHANGING_PROMPT = "dyn"
MAX_STAGES = 512
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64

GrammarChoice = BlockGrammar | str
T = TypeVar("T")


class PromptVersions:
    """The prompt versions that each stage has shown; past the bound a stage's prompt counts as ever changing."""

    def __init__(self) -> None:
        self._seen: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def bound(self, stage: str, version: str) -> str:
        """`version`, or `CHANGING_PROMPT` if the stage has shown `MAX_PROMPT_VERSIONS` others."""
        seen = self._seen.get(stage)
        if seen is not None and version in seen:
            return version
        with self._lock:
            if seen is None and len(self._seen) >= MAX_STAGES:
                return CHANGING_PROMPT
            seen = self._seen.setdefault(stage, set())
            if len(seen) >= MAX_PROMPT_VERSIONS:
                return CHANGING_PROMPT
            seen.add(version)
        return version


@dataclass(frozen=True, slots=True)
class Settings:
    """What was said to one `AgentSpecMiddleware`, and what its calls brought.

    Attributes:
        endpoints: ``host:port`` of the servers that get tags; `None` is every one but known hosted providers.
        grammars: the tag of each stage, by stage path, its last part, or ``*``.
        prompt_versions: by stage path, its last part, or ``*``.
        hash_key: with it, ids that the application chose travel as hashes; `None`: as they are.
        sends_group: whether requests carry the header `x-agentspec-group`.
        propagates_trace: whether requests carry `traceparent` when a span is active.
    """

    workflow_id: str | None = None
    agent_id: str | None = None
    endpoints: frozenset[str] | None = None
    grammars: Mapping[str, dict[str, Any] | str] = field(default_factory=dict)
    prompt_versions: Mapping[str, str] = field(default_factory=dict)
    hash_key: bytes | None = None
    sends_group: bool = False
    propagates_trace: bool = True
    feedback: Feedback = field(default_factory=Feedback)
    shown_prompts: PromptVersions = field(default_factory=PromptVersions)

    def shown_id(self, name: str | None) -> str | None:
        """An id that the application chose, as it may leave the process."""
        if self.hash_key is None or name is None:
            return name
        return blake2b(name.encode(errors="replace"), digest_size=8, key=self.hash_key).hexdigest()


def for_stage(choices: Mapping[str, T], stage: str) -> T | None:
    """What was chosen for a stage: by its path, else by its last part, else for all of them."""
    if not choices:
        return None
    for name in (stage, stage.rpartition("/")[2], "*"):
        if name in choices:
            return choices[name]
    return None


def check_grammars(grammars: object) -> dict[str, dict[str, Any] | str]:
    """The `grammar` tag of each stage.

    Args:
        grammars: one choice for all stages, or a mapping from stage to choice; a choice is a `BlockGrammar` or the id
            of a grammar that the server knows.

    Raises:
        TypeError: something else; the message holds it.
        ValueError: a stage or id that is empty or too long.
    """
    if grammars is None:
        return {}
    if not isinstance(grammars, Mapping):
        grammars = {"*": grammars}
    return {check_name("grammars", stage): _grammar_tag(choice) for stage, choice in grammars.items()}


def _grammar_tag(choice: object) -> dict[str, Any] | str:
    if isinstance(choice, BlockGrammar):
        return choice.to_json()
    if isinstance(choice, str):
        return check_name("grammars", choice)
    raise TypeError(f"grammars: expected a BlockGrammar or the id of one, got {type(choice).__name__}: {choice!r}")


def check_prompt_versions(versions: object) -> dict[str, str]:
    """Prompt versions by stage.

    Raises:
        TypeError: not a mapping from str to str; the message holds it.
        ValueError: an empty or too long name.
    """
    if versions is None:
        return {}
    if not isinstance(versions, Mapping):
        raise TypeError(f"prompt_versions: expected a mapping, got {type(versions).__name__}: {versions!r}")
    return {
        check_name("prompt_versions", stage): check_name("prompt_versions", version)
        for stage, version in versions.items()
    }


def check_switch(name: str, value: object) -> bool:
    """Return a switch.

    Raises:
        TypeError: not a bool.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}: expected a bool, got {type(value).__name__}: {value!r}")
    return value


def check_hash_key(hash_ids: object) -> bytes | None:
    """The key that ids are hashed with; `None` for False.

    Raises:
        TypeError: neither a bool nor bytes.
        ValueError: a key that is too short or too long; the message has its length only.
    """
    if isinstance(hash_ids, bool):
        return secrets.token_bytes(MIN_KEY_BYTES) if hash_ids else None
    if not isinstance(hash_ids, bytes):
        raise TypeError(f"hash_ids: expected a bool or the bytes of a key, got {type(hash_ids).__name__}")
    if not MIN_KEY_BYTES <= len(hash_ids) <= MAX_KEY_BYTES:
        raise ValueError(f"hash_ids: expected a key of {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, got {len(hash_ids)}")
    return hash_ids
