"""The grammars that requests name: by id, from presets and files, or inline in their tags; each is built once."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from agentspec.sidecar.grammars import PRESETS, ROOT_BLOCK, Anchor, BlockRule, Grammar, GrammarError, Markers
from agentspec.sidecar.options import OptionsError

OWN_GRAMMAR = 0
NO_ROOM = -1
MAX_INLINE_BYTES = 1024
MAX_INLINE_GRAMMARS = 64
MAX_REGISTERED_GRAMMARS = 64  # of a namespace
MAX_REGISTERED_NAMESPACES = 1024
MAX_FILE_BYTES = 1 << 16


class GrammarTarget(Protocol):
    """Where grammars are built: the engine. Grammar `OWN_GRAMMAR` is its own."""

    def add_grammar(self, grammar: Grammar) -> int:
        """Build a grammar; returns its number, or `NO_ROOM` when all of them together would be too large."""

    def remove_grammar(self, grammar_id: int) -> None:
        """Forget a grammar; open requests keep it."""


def _has_bytes(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("has a lone surrogate, which no output contains") from None
    return text


_Marker = Annotated[str, AfterValidator(_has_bytes)]


class _BlockSource(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    start: _Marker | list[_Marker]
    end: _Marker | list[_Marker] | None
    parents: list[str] = [ROOT_BLOCK]
    anchor: Anchor = "anywhere"
    tool_name_after: _Marker | list[_Marker] | None = None

    def rule(self) -> BlockRule:
        return BlockRule(
            self.name,
            _markers(self.start),
            _markers(self.end),
            tuple(self.parents),
            self.anchor,
            _markers(self.tool_name_after),
        )


class _GrammarSource(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    blocks: list[_BlockSource]
    answer_starts: list[_Marker] | None = None


def _markers(source: str | list[str] | None) -> Markers:
    if source is None:
        return ()
    return source.encode() if isinstance(source, str) else tuple(marker.encode() for marker in source)


def parse_grammar(source: Mapping[str, Any]) -> Grammar:
    """Read a grammar from its JSON form.

    Args:
        source: ``{"blocks": [{"name": …, "start": …, "end": …}]}``. A marker is a string or a list of them; an end of
            null is an open-ended block. Optional in a block: ``parents``, ``anchor``, ``tool_name_after``; beside the
            blocks: ``answer_starts``. Meaning and defaults: `BlockRule` and `Grammar`.

    Raises:
        GrammarError: a field is missing, unknown, of the wrong type or out of bounds; names field and value.
    """
    try:
        parsed = _GrammarSource.model_validate(source)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "grammar"
        raise GrammarError(f"grammar {field}: {first['msg']}, got {first['input']!r:.80}") from None
    rules = tuple(block.rule() for block in parsed.blocks)
    if parsed.answer_starts is None:
        return Grammar(rules)
    return Grammar(rules, tuple(start.encode() for start in parsed.answer_starts))


def read_grammars(folder: Path) -> dict[str, Grammar]:
    """Read every ``*.json`` of a folder; the file's name without the suffix is the grammar's id.

    Raises:
        GrammarError: a file is no grammar or larger than 64 KiB; names it.
        OSError: the folder or a file can't be read.
    """
    return {path.stem: _read_grammar(path) for path in sorted(folder.iterdir()) if path.suffix == ".json"}


class GrammarsFolder(Protocol):
    """Options that name a folder of grammars."""

    @property
    def grammars_dir(self) -> Path | None:
        """Folder of ``<id>.json`` files; None: no grammars but the presets."""


def server_grammars(options: GrammarsFolder) -> dict[str, Grammar]:
    """Read the grammars that the option `grammars_dir` names; none without it.

    Raises:
        OptionsError: the folder can't be read, or a file of it is no grammar.
    """
    if options.grammars_dir is None:
        return {}
    try:
        return read_grammars(options.grammars_dir)
    except (GrammarError, OSError) as error:
        raise OptionsError(f"agentspec option 'grammars_dir': {error}") from None


def _read_grammar(path: Path) -> Grammar:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise GrammarError(f"grammar file {path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        return parse_grammar(json.loads(content))
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"grammar file {path}: {error}") from None


class GrammarStore:
    """Turns the `grammar` tag of a request into the number of a built grammar; thread-safe.

    A grammar is built when the first request that names it opens, not on the step path; that takes 0.1 ms. A namespace
    holds at most `MAX_INLINE_GRAMMARS` inline ones; the least recently used is forgotten, there and where memory runs
    out.

    Args:
        target: builds and holds the grammars.
        by_id: grammars of the server by id; a preset's name may be redefined.
    """

    def __init__(self, target: GrammarTarget, by_id: Mapping[str, Grammar] | None = None) -> None:
        self._target = target
        self._by_id = {**PRESETS, **(by_id or {})}
        self._lock = threading.Lock()
        # By namespace (None: the server's own), then by id; the least recently used first.
        self._numbers: OrderedDict[str | None, OrderedDict[str, int]] = OrderedDict()
        # By namespace, then by id, with the text's own id; the least recently registered first.
        self._registered: OrderedDict[str, OrderedDict[str, tuple[str, Grammar]]] = OrderedDict()

    def register(self, namespace: str, grammar_id: str, source: str) -> None:
        """Make a grammar known to one namespace by an id; another one of that id is replaced.

        It hides the server's own of the same id. A namespace holds `MAX_REGISTERED_GRAMMARS`; the oldest is forgotten.

        Args:
            namespace: whose requests may name it.
            grammar_id: as the tag `grammar` names it.
            source: the JSON form.

        Raises:
            GrammarError: no grammar; names field and value.
        """
        try:
            grammar = parse_grammar(json.loads(source))
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"grammar: {error}") from None
        text_id = hashlib.sha256(source.encode()).hexdigest()[:16]
        with self._lock:
            registered = self._registered.setdefault(namespace, OrderedDict())
            registered[grammar_id] = (text_id, grammar)
            registered.move_to_end(grammar_id)
            self._registered.move_to_end(namespace)
            if len(registered) > MAX_REGISTERED_GRAMMARS:
                registered.popitem(last=False)
            if len(self._registered) > MAX_REGISTERED_NAMESPACES:
                self._registered.popitem(last=False)

    def find(self, namespace: str, grammar: Mapping[str, Any] | str) -> int:
        """Number of a grammar for `open`; `OWN_GRAMMAR` if the tag is empty.

        Args:
            namespace: whose inline grammars are counted together.
            grammar: an id, or the JSON form inline, at most 1 KiB.

        Raises:
            GrammarError: unknown id, no grammar, too large, or no memory for it: the request takes `OWN_GRAMMAR`.
        """
        if not grammar:
            return OWN_GRAMMAR
        if isinstance(grammar, str):
            with self._lock:
                registered = self._registered.get(namespace)
                if registered is not None and grammar in registered:
                    text_id, own = registered[grammar]
                    return self._find(namespace, text_id) or self._add(namespace, text_id, own)
            if grammar not in self._by_id:
                raise GrammarError(f"grammar: unknown id {grammar[:80]!r}")
            with self._lock:
                return self._find(None, grammar) or self._add(None, grammar, self._by_id[grammar])
        grammar_id = content_id(grammar)
        with self._lock:
            if number := self._find(namespace, grammar_id):
                return number
        parsed = parse_grammar(grammar)
        with self._lock:
            return self._find(namespace, grammar_id) or self._add(namespace, grammar_id, parsed)

    def _find(self, namespace: str | None, grammar_id: str) -> int | None:
        numbers = self._numbers.get(namespace)
        if numbers is None or grammar_id not in numbers:
            return None
        self._numbers.move_to_end(namespace)
        numbers.move_to_end(grammar_id)
        return numbers[grammar_id]

    def _add(self, namespace: str | None, grammar_id: str, grammar: Grammar) -> int:
        numbers = self._numbers.get(namespace)
        if namespace is not None and numbers is not None and len(numbers) >= MAX_INLINE_GRAMMARS:
            self._forget(namespace)
        while (number := self._target.add_grammar(grammar)) == NO_ROOM:
            if not self._numbers:
                raise GrammarError(f"grammar {grammar_id[:80]}: no memory for it")
            self._forget(next(iter(self._numbers)))
        self._numbers.setdefault(namespace, OrderedDict())[grammar_id] = number
        self._numbers.move_to_end(namespace)
        return number

    def _forget(self, namespace: str | None) -> None:
        """Forget the least recently used grammar of a namespace."""
        numbers = self._numbers[namespace]
        self._target.remove_grammar(numbers.popitem(last=False)[1])
        if not numbers:
            del self._numbers[namespace]


def content_id(source: Mapping[str, Any]) -> str:
    """Id of an inline grammar: equal content has an equal id, whatever the order of its keys.

    Raises:
        GrammarError: larger than 1 KiB, or nested too deeply.
    """
    try:
        content = json.dumps(source, sort_keys=True, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"grammar: not JSON ({type(error).__name__})") from None
    if len(content) > MAX_INLINE_BYTES:
        raise GrammarError(f"grammar: expected at most {MAX_INLINE_BYTES} bytes inline, got {len(content)}")
    return hashlib.sha256(content).hexdigest()[:16]
