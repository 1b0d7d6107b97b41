"""OpenAI's answer shapes. A non-streamed answer is the fold of the pieces a stream would have carried."""

import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from loraplane_engine.messages import TokenLogprob
from loraplane_engine.server.generation import Piece
from loraplane_engine.server.protocol import GenerateRequest
from loraplane_engine.server.text import Tokenizer

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def event(value: object) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


@dataclass
class _Fold:
    """What has been rendered of one choice so far."""

    text: str = ""
    offset: int = 0  # characters of token texts, for text_offset
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    opened: bool = False  # chat: the role was sent


class Renderer:
    """Renders one request. The constant parts of a chunk are encoded once, not per token."""

    def __init__(self, request: GenerateRequest, tokenizer: Tokenizer, answer_id: str) -> None:
        self._chat = request.chat
        self._request = request
        self._tokenizer = tokenizer
        self._folds = [_Fold() for _ in request.choices]
        prefix, kind = ("chatcmpl-", "chat.completion") if request.chat else ("cmpl-", "text_completion")
        self._head: dict[str, Any] = {
            "id": prefix + answer_id,
            "object": kind,
            "created": int(time.time()),
            "model": request.model,
        }
        chunk = self._head | ({"object": "chat.completion.chunk"} if request.chat else {})
        self._before = b"data: " + _encode(chunk)[:-1] + b',"choices":['
        self._after = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"

    def chunks(self, pieces: list[Piece]) -> bytes:
        """Server-sent events of these pieces."""
        return b"".join(
            self._before + _encode(choice) + self._after for piece in pieces for choice in self._chunk_choices(piece)
        )

    def last_chunk(self, completion_tokens: int) -> bytes:
        """The usage chunk, if it was asked for, and the end mark."""
        if not self._request.include_usage:
            return DONE
        totals = usage(self._request.prompt_tokens, completion_tokens)
        return self._before + b'],"usage":' + _encode(totals) + b"}\n\n" + DONE

    def fold(self, pieces: list[Piece]) -> None:
        for piece in pieces:
            fold = self._folds[piece.index]
            fold.text += piece.text
            fold.finish = piece.finish or fold.finish
            logprobs = self._logprobs(fold, piece)
            if logprobs is not None:
                fold.logprobs.append(logprobs)

    def answer(self, completion_tokens: int) -> bytes:
        choices = [self._whole_choice(index, fold) for index, fold in enumerate(self._folds)]
        totals = usage(self._request.prompt_tokens, completion_tokens)
        return _encode(self._head | {"choices": choices, "usage": totals})

    def _chunk_choices(self, piece: Piece) -> list[dict[str, Any]]:
        fold = self._folds[piece.index]
        logprobs = self._logprobs(fold, piece)
        if not self._chat:
            return [self._choice(piece.index, piece.finish, logprobs, text=piece.text)]
        found = []
        if not fold.opened:
            fold.opened = True
            found.append(self._choice(piece.index, None, None, delta={"role": "assistant", "content": ""}))
        delta = {"content": piece.text} if piece.text or logprobs else {}
        found.append(self._choice(piece.index, piece.finish, logprobs, delta=delta))
        return found

    def _choice(self, index: int, finish: str | None, logprobs: Any, **content: Any) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish}

    def _whole_choice(self, index: int, fold: _Fold) -> dict[str, Any]:
        logprobs = None
        if fold.logprobs:
            logprobs = {key: [each for part in fold.logprobs for each in part[key]] for key in fold.logprobs[0]}
        if self._chat:
            message = {"role": "assistant", "content": fold.text, "refusal": None}
            return self._choice(index, fold.finish, logprobs, message=message)
        return self._choice(index, fold.finish, logprobs, text=fold.text)

    def _logprobs(self, fold: _Fold, piece: Piece) -> dict[str, Any] | None:
        if piece.logprobs is None and piece.prompt_logprobs is None:
            return None
        if self._chat:
            return {"content": [self._chat_token(each) for each in piece.logprobs or []]}
        tokens: list[TokenLogprob | None] = list(piece.logprobs or [])
        if piece.prompt_logprobs is not None:
            tokens = piece.prompt_logprobs + tokens
        return self._completion_tokens(fold, self._request.choices[piece.index].prompt, tokens)

    def _completion_tokens(self, fold: _Fold, prompt: list[int], tokens: list[TokenLogprob | None]) -> dict[str, Any]:
        """The legacy shape: four parallel lists. The first prompt token has no probability."""
        found: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for position, each in enumerate(tokens):
            text = self._tokenizer.token_text(prompt[position] if each is None else each.token)
            found["tokens"].append(text)
            found["token_logprobs"].append(None if each is None else each.logprob)
            top = None if each is None else {self._tokenizer.token_text(token): value for token, value in each.top}
            found["top_logprobs"].append(top)
            found["text_offset"].append(fold.offset)
            fold.offset += len(text)
        return found

    def _chat_token(self, each: TokenLogprob) -> dict[str, Any]:
        return self._chat_entry(each.token, each.logprob) | {
            "top_logprobs": [self._chat_entry(token, value) for token, value in each.top]
        }

    def _chat_entry(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokenizer.token_text(token),
            "logprob": logprob,
            "bytes": list(self._tokenizer.token_bytes(token)),
        }
