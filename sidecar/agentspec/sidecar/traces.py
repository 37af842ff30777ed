"""Recorded LLM calls, read from trace files or from a user's own logs of OpenAI-style messages."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz")
MAX_NAME_BYTES = 256
_GZIP_MAGIC = b"\x1f\x8b"
# Lines that hold something to ask a model, but nothing that one wrote.
_PROMPT_FIELDS = ("turns", "prompt", "prompts", "question", "instruction", "messages")

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a prompt."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Call:
    """One LLM call as it was recorded.

    Attributes:
        workload: what kind of work; figures are given for each.
        workflow: the agent program; histories are shared inside it.
        run_id: one task of one agent program; its calls follow each other.
        node: graph node, role or phase, known before the call.
        agent_id: which agent of the run made the call.
        prompt: messages before the answer.
        output: what the model wrote.
        line: where it stands in its file, from 1.
    """

    workload: str
    workflow: str
    run_id: str
    node: str
    agent_id: str
    prompt: tuple[Message, ...]
    output: str
    line: int


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that could not be read.

    Attributes:
        path: the file.
        line: from 1; 0 when it is about the whole file.
        reason: what was expected and what came.
    """

    path: str
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}" if self.line else f"{self.path}: {self.reason}"


@dataclass(slots=True)
class TraceFile:
    """What one file holds: the calls that could be read, in its order, and what could not.

    Attributes:
        path: the file, as the user named it.
        calls: in the order of the file.
        problems: the rest goes on without these lines.
        num_prompts: lines that hold prompts without an output.
    """

    path: str
    calls: list[Call] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    num_prompts: int = 0


def find_traces(path: Path) -> list[Path]:
    """The trace files of a folder in the order of their names, or the file itself."""
    if not path.is_dir():
        return [path]
    return sorted(entry for entry in path.iterdir() if entry.is_file() and entry.name.endswith(SUFFIXES))


def refs_path(path: Path) -> Path:
    """The companion of a trace file: texts that many of its messages share."""
    stem = next((path.name.removesuffix(suffix) for suffix in SUFFIXES[::-1] if path.name.endswith(suffix)), path.name)
    return path.with_name(f"{stem}.refs.json.gz")


def read_trace(path: Path) -> TraceFile:
    """Read one file line by line; nothing in it makes this raise.

    Three kinds of lines are known: the trace format (one call, its prompt given by reference to earlier calls of its
    run), a conversation (`messages`: each assistant message is a call), and a logged request (`messages`, or `request`
    with them, beside `response`, `choices` or `output`).
    """
    found = TraceFile(str(path))
    runs = _Runs(path, found)
    stem = refs_path(path).name.removesuffix(".refs.json.gz")
    for line, record in _records(path, found.problems):
        try:
            if "run_id" in record and "prompt_base" in record:
                calls = runs.read(record, line)
            elif "messages" in _request(record):
                calls = _read_messages(record, stem, line)
            elif any(name in record for name in _PROMPT_FIELDS):
                calls = []
            else:
                raise ValueError(f"unknown schema: expected a trace line or `messages`, got {_keys(record)}")
        except ValueError as error:
            found.problems.append(Problem(found.path, line, str(error)))
            continue
        found.num_prompts += calls == []
        found.calls.extend(calls or [])
    return found


def _keys(record: Record) -> str:
    return "the fields " + ", ".join(sorted(record)[:8]) if record else "an empty object"


def _records(path: Path, problems: list[Problem]) -> Iterator[tuple[int, Record]]:
    line = 0
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == _GZIP_MAGIC
        with gzip.open(path) if is_gzip else path.open("rb") as lines:
            for line, text in enumerate(lines, 1):
                if not text.strip():
                    continue
                try:
                    record = json.loads(text)
                    if not isinstance(record, dict):
                        raise ValueError(f"expected a JSON object, got {type(record).__name__}")
                except (ValueError, RecursionError) as error:
                    problems.append(Problem(str(path), line, f"broken line: {error}"))
                    continue
                yield line, record
    except (OSError, EOFError) as error:
        problems.append(Problem(str(path), line + 1, f"could not be read on: {error}"))
        return
    if line == 0:
        problems.append(Problem(str(path), 0, "expected one JSON object a line, the file is empty"))


def _text(record: Record, name: str, default: str | None = None) -> str:
    value = record.get(name, default)
    if not isinstance(value, str):
        raise ValueError(f"{name}: expected a string, got {type(value).__name__}")
    return value


def _name(record: Record, names: Sequence[str], default: str) -> str:
    """The first field of `names` that is there, as a name that fits into a tag."""
    for name in names:
        if record.get(name) is not None:
            text = _text(record, name)
            if len(text.encode(errors="surrogatepass")) > MAX_NAME_BYTES:
                raise ValueError(f"{name}: longer than {MAX_NAME_BYTES} bytes")
            return text
    return default


class _Runs:
    """Reads lines of the trace format; keeps the prompts and outputs of the current run, which later lines refer to."""

    def __init__(self, path: Path, found: TraceFile) -> None:
        self._path = refs_path(path)
        self._found = found
        self._refs: Record | None = None
        self._run_id: str | None = None
        self._prompts: dict[int, tuple[Message, ...]] = {}
        self._outputs: dict[int, str] = {}
        self._is_broken = False

    def read(self, record: Record, line: int) -> list[Call] | None:
        """The call of a line; None after a line of the same run that this one stands on could not be read."""
        run_id = _text(record, "run_id")
        if run_id != self._run_id:
            self._run_id, self._prompts, self._outputs, self._is_broken = run_id, {}, {}, False
        if self._is_broken:
            return None
        try:
            return [self._call(record, run_id, line)]
        except ValueError:
            self._is_broken = True
            raise

    def _call(self, record: Record, run_id: str, line: int) -> Call:
        step, base, keep = record.get("step"), record["prompt_base"], record.get("prompt_keep")
        if not isinstance(step, int) or not isinstance(keep, int) or not isinstance(base, int | None):
            raise ValueError(f"step, prompt_base, prompt_keep: expected integers, got {step!r}, {base!r}, {keep!r}")
        if base is not None and base not in self._prompts:
            raise ValueError(f"prompt_base: no step {base} in run {run_id} before this line")
        messages = _messages(record, "prompt")
        kept = () if base is None else self._prompts[base][:keep]
        prompt = kept + tuple(Message(_text(message, "role"), self._content(message)) for message in messages)
        output = _text(record, "output")
        workflow = _name(record, ("workflow",), "")
        node = _name(record, ("node", "stage"), "")
        call = Call(
            _name(record, ("workload",), workflow), workflow, run_id, node, _name(record, ("agent_id",), node),
            prompt, output, line,
        )  # fmt: skip
        self._prompts[step], self._outputs[step] = prompt, output
        return call

    def _content(self, message: Record) -> str:
        if "ref" in message:
            name = _text(message, "ref")
            if name not in self._read_refs():
                raise ValueError(f"ref: {name!r} is not in {self._path.name}")
            return _text(self._read_refs(), name)
        if "output_of" in message:
            step = message["output_of"]
            if not isinstance(step, int) or step not in self._outputs:
                raise ValueError(f"output_of: no step {step!r} in run {self._run_id} before this line")
            return self._outputs[step]
        return _text(message, "content")

    def _read_refs(self) -> Record:
        if self._refs is None:
            self._refs = {}
            try:
                with gzip.open(self._path, "rt", encoding="utf-8") as file:
                    refs = json.load(file)
                if not isinstance(refs, dict):
                    raise ValueError(f"expected a JSON object, got {type(refs).__name__}")
                self._refs = refs
            except (OSError, EOFError, ValueError) as error:
                self._found.problems.append(Problem(str(self._path), 0, f"could not be read: {error}"))
        return self._refs


def _request(record: Record) -> Record:
    request = record.get("request")
    return request if isinstance(request, dict) else record


def _messages(record: Record, name: str) -> list[Record]:
    messages = record.get(name)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"{name}: expected a list of messages")
    return messages


def _read_messages(record: Record, stem: str, line: int) -> list[Call]:
    messages = _messages(_request(record), "messages")
    workload = _name(record, ("workload",), stem)
    workflow = _name(record, ("workflow", "workflow_id"), workload)
    node = _name(record, ("node", "stage"), "")
    agent_id = _name(record, ("agent_id",), node)
    run_id = _name(record, ("run_id", "thread_id"), f"{stem}:{line}")
    history = [Message(_text(message, "role"), _written(message)) for message in messages]
    if (answer := _answer(record)) is not None:
        return [Call(workload, workflow, run_id, node, agent_id, tuple(history), answer, line)]
    return [
        Call(workload, workflow, run_id, node, agent_id, tuple(history[:index]), message.content, line)
        for index, message in enumerate(history)
        if message.role == "assistant" and message.content
    ]


def _answer(record: Record) -> str | None:
    """What the model wrote in a logged request, or None where only the conversation itself is there."""
    if "output" in record:
        return _text(record, "output")
    response = record.get("response", record)
    if isinstance(response, dict):
        response = response.get("body", response)
    if not isinstance(response, dict):
        raise ValueError(f"response: expected an object, got {type(response).__name__}")
    if "choices" not in response:
        return _written(response) if "content" in response and response is not record else None
    try:
        message = response["choices"][0]["message"]
    except (LookupError, TypeError):
        message = None
    if not isinstance(message, dict):
        raise ValueError("choices: expected a list of objects with `message`")
    return _written(message)


def _written(message: Record) -> str:
    """A message as text; tool calls in the form that a Qwen or Hermes model writes them."""
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(text for text in texts if isinstance(text, str))
    if not isinstance(content, str | None):
        raise ValueError(f"content: expected a string, got {type(content).__name__}")
    reasoning = message.get("reasoning_content")
    parts = [f"<think>\n{reasoning}\n</think>\n"] if isinstance(reasoning, str) and reasoning else []
    parts += [content] if content else []
    for call in _messages(message, "tool_calls") if message.get("tool_calls") else []:
        function = call.get("function")
        if not isinstance(function, dict):
            raise ValueError("tool_calls: expected objects with `function`")
        arguments = function.get("arguments")
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        name = json.dumps(function.get("name"), ensure_ascii=False)
        parts.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)
