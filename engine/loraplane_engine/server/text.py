"""Tokens to text and back: the tokenizer, incremental detokenisation and stop strings."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer

REPLACEMENT = "\ufffd"
#: A UTF-8 character is at most 4 bytes, so more undecodable tokens in a row than this are not a
#: character in the making but invalid bytes, and are shown as such.
MAX_PENDING_TOKENS = 6


class Tokenizer:
    """A model folder's tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        self._inner = HfTokenizer.from_file(str(folder / "tokenizer.json"))
        self._inner.no_truncation()
        self._inner.no_padding()
        self.vocab_size = self._inner.get_vocab_size(with_added_tokens=True)
        decoder = json.loads(self._inner.to_str()).get("decoder")
        self._byte_level = "ByteLevel" in json.dumps(decoder)
        longest = max(len(piece.encode()) for piece in self._inner.get_vocab(with_added_tokens=True))
        self._longest = longest if self._inner.normalizer is None else None  # a normalizer may drop text

    def encode(self, text: str, *, special: bool) -> list[int]:
        """`special` adds what the tokenizer's post-processor adds (a beginning-of-sequence token)."""
        # As a batch of one, which releases the GIL; encode() keeps it and would stop every stream meanwhile.
        ids: list[int] = self._inner.encode_batch([text], add_special_tokens=special)[0].ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """No encoding of `text` is shorter than this; known at once, where encoding megabytes takes seconds."""
        return 0 if self._longest is None else -(-len(text.encode()) // self._longest)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        text: str = self._inner.decode(list(ids), skip_special_tokens=skip_special)
        return text

    @functools.lru_cache(maxsize=8192)  # noqa: B019 - lives as long as the process does
    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for, also when they are only part of a character."""
        piece = self._inner.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level and all(char in _BYTE_OF for char in piece):
            return bytes(_BYTE_OF[char] for char in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("\u2581", " ").encode()

    def token_text(self, token: int) -> str:
        """For logprobs: the token's text, or `bytes:\\x..` when its bytes are no text by themselves."""
        raw = self.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes_to_unicode() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes, inverted."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _bytes_to_unicode()


class Detokenizer:
    """Text of a growing token list, given out only as far as later tokens cannot change it.

    Only a window is decoded each time: from the last place where text was given out (as context,
    because some decoders treat the first token differently) to the end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that became certain with `token`; "" while a character is incomplete."""
        self._pending.append(token)
        whole = self._tokenizer.decode(self._context + self._pending)
        text = whole[len(self._context_text) :]
        if text.endswith(REPLACEMENT):
            if len(self._pending) <= MAX_PENDING_TOKENS:
                return ""
            self._context, self._context_text = [], ""
        else:
            self._context, self._context_text = self._pending, self._tokenizer.decode(self._pending)
        self._pending = []
        return text

    def flush(self) -> str:
        """What is left at the end: an incomplete character shows as U+FFFD."""
        if not self._pending:
            return ""
        text = self._tokenizer.decode(self._context + self._pending)[len(self._context_text) :]
        self._pending = []
        return text


class StopStrings:
    """Finds stop strings in text that arrives in pieces and holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was met); the stop string is never shown."""
        if not self._stops:
            return text, False
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def read_json(path: Path) -> dict[str, Any]:
    """A model folder's optional JSON file; {} when there is none."""
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    return value if isinstance(value, dict) else {}
