"""The bodies of /v1/completions and /v1/chat/completions, checked and tokenised into one form."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from loraplane_core.errors import ContextLengthExceeded, InvalidParameter
from loraplane_engine.messages import SamplingParams
from loraplane_engine.server.chat import ChatTemplate, Message
from loraplane_engine.server.fields import Fields, wrong
from loraplane_engine.server.params import (
    MAX_CHOICES,
    MAX_LOGPROBS,
    Common,
    check_logprobs,
    read_common,
    sampling_params,
)
from loraplane_engine.server.text import Tokenizer

COMPLETION_DEFAULT_TOKENS = 16
ROLES = ("system", "developer", "user", "assistant", "tool")
#: Longer texts are tokenised in a thread, so that one big prompt does not hold up everyone's stream.
INLINE_CHARACTERS = 8192


@dataclass(frozen=True)
class Choice:
    """One answer to make: which prompt, and how to sample."""

    index: int
    prompt: list[int]
    sampling: SamplingParams
    echo: str = ""  # text to begin with


@dataclass(frozen=True)
class GenerateRequest:
    chat: bool
    model: str  # as the client wrote it; the answer echoes it
    stream: bool
    include_usage: bool
    echo: bool
    stops: tuple[str, ...]
    choices: list[Choice]
    prompt_tokens: int
    ignored: list[str] = field(default_factory=list)


class RequestReader:
    """Needs what the core told about the model; one per process."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, max_model_len: int, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size

    async def completion(self, body: dict[str, Any]) -> GenerateRequest:
        fields = Fields(body)
        common = read_common(fields, ("max_tokens",))
        echo = fields.boolean("echo")
        logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
        prompts = await self._prompts(fields.raw("prompt"), common.n)
        extra = {"logprobs": logprobs, "prompt_logprobs": echo and logprobs is not None}
        choices: list[Choice] = []
        for prompt in prompts:
            limit = self._limit(prompt, common.max_tokens, COMPLETION_DEFAULT_TOKENS)
            text = self._tokenizer.decode(prompt) if echo else ""
            choices += self._choices(len(choices), prompt, limit, common, extra=extra, echo=text)
        self._check_logprobs(choices, logprobs, prompts_too=echo)
        return self._request(fields, common, prompts, choices, chat=False, echo=echo)

    async def chat(self, body: dict[str, Any]) -> GenerateRequest:
        fields = Fields(body)
        common = read_common(fields, ("max_completion_tokens", "max_tokens"))
        messages = fields.raw("messages")
        if isinstance(messages, list) and len(messages) > self._max_model_len:  # before they are rendered
            raise self._too_long(f"at least {len(messages)}", "messages")
        prompt_text = self._template.render(_messages(messages))
        prompt = await self._encode(prompt_text, special=False, param="messages")
        limit = self._limit(prompt, common.max_tokens, self._max_model_len)
        wanted = fields.boolean("logprobs")
        top = fields.integer("top_logprobs", 0, MAX_LOGPROBS)
        if top is not None and not wanted:
            raise InvalidParameter("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
        if fields.raw("add_generation_prompt") not in (None, True):
            raise InvalidParameter("`add_generation_prompt` must be true", param="add_generation_prompt")
        logprobs = (top or 0) if wanted else None
        choices = self._choices(0, prompt, limit, common, extra={"logprobs": logprobs})
        self._check_logprobs(choices, logprobs)
        return self._request(fields, common, [prompt], choices, chat=True, echo=False)

    def _request(
        self,
        fields: Fields,
        common: Common,
        prompts: list[list[int]],
        choices: list[Choice],
        *,
        chat: bool,
        echo: bool,
    ) -> GenerateRequest:
        return GenerateRequest(
            chat=chat,
            model=common.model,
            stream=common.stream,
            include_usage=common.include_usage,
            echo=echo,
            stops=common.stops,
            choices=choices,
            prompt_tokens=sum(len(prompt) for prompt in prompts),
            ignored=fields.rest(),
        )

    def _choices(
        self, first: int, prompt: list[int], limit: int, common: Common, *, extra: dict[str, Any], echo: str = ""
    ) -> list[Choice]:
        if common.sampling.get("min_tokens", 0) > limit:
            raise InvalidParameter(f"`min_tokens` is larger than the {limit} tokens allowed", param="min_tokens")
        if any(token >= self._vocab_size for token in common.sampling["stop_token_ids"]):
            raise InvalidParameter(f"token ids lie between 0 and {self._vocab_size - 1}", param="stop_token_ids")
        return [Choice(first + n, prompt, sampling_params(common, limit, n, extra), echo) for n in range(common.n)]

    def _check_logprobs(self, choices: list[Choice], alternatives: int | None, *, prompts_too: bool = False) -> None:
        tokens = sum(each.sampling.max_tokens + (len(each.prompt) if prompts_too else 0) for each in choices)
        check_logprobs(tokens, alternatives, self._max_model_len)

    async def _prompts(self, value: Any, n: int) -> list[list[int]]:
        """string | [string] | [token] | [[token]] -> token lists."""
        if value is None:
            raise InvalidParameter("`prompt` is required", param="prompt")
        if isinstance(value, str):
            return [await self._encode(value, special=True, param="prompt")]
        if not isinstance(value, list) or not value:
            raise wrong("prompt", "a string, a list of strings, a list of tokens or a list of lists of tokens", value)
        if type(value[0]) is int:
            return [self._tokens(value)]
        if len(value) * n > MAX_CHOICES:
            raise InvalidParameter(f"prompts times `n` may be at most {MAX_CHOICES}", param="prompt")
        if all(isinstance(each, str) for each in value):
            return [await self._encode(each, special=True, param="prompt") for each in value]
        if all(isinstance(each, list) for each in value):
            return [self._tokens(each) for each in value]
        raise InvalidParameter("`prompt` mixes strings, tokens and lists", param="prompt")

    def _tokens(self, value: list[Any]) -> list[int]:
        if not value:
            raise InvalidParameter("`prompt` is empty", param="prompt")
        if not all(type(each) is int for each in value):
            raise InvalidParameter("a token prompt holds integers only", param="prompt")
        if not all(0 <= each < self._vocab_size for each in value):
            raise InvalidParameter(f"token ids lie between 0 and {self._vocab_size - 1}", param="prompt")
        return value

    async def _encode(self, text: str, *, special: bool, param: str) -> list[int]:
        if len(text) <= INLINE_CHARACTERS:
            ids = self._tokenizer.encode(text, special=special)
        else:
            fewest = self._tokenizer.fewest_tokens(text)
            if fewest >= self._max_model_len:
                raise self._too_long(f"at least {fewest}", param)
            ids = await asyncio.to_thread(self._tokenizer.encode, text, special=special)
        if not ids:
            raise InvalidParameter(f"`{param}` holds no tokens", param=param)
        return ids

    def _limit(self, prompt: list[int], wanted: int | None, default: int) -> int:
        """Tokens to generate. Raises ContextLengthExceeded with the arithmetic."""
        room = self._max_model_len - len(prompt)
        if room < 1:
            raise self._too_long(str(len(prompt)), "messages" if default == self._max_model_len else "prompt")
        if wanted is not None and wanted > room:
            raise ContextLengthExceeded(
                f"{len(prompt)} prompt tokens and {wanted} requested tokens are {len(prompt) + wanted}; "
                f"this model's context is {self._max_model_len} tokens",
                param="max_tokens",
            )
        return min(default, room) if wanted is None else wanted

    def _too_long(self, tokens: str, param: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"the prompt has {tokens} tokens; this model's context is {self._max_model_len} tokens, "
            "of which at least 1 is for the answer",
            param=param,
        )


def _messages(value: Any) -> list[Message]:
    if value is None:
        raise InvalidParameter("`messages` is required", param="messages")
    if value == []:
        raise InvalidParameter("`messages` is empty; at least one message is needed", param="messages")
    if not isinstance(value, list):
        raise wrong("messages", "a list of messages", value)
    return [_message(f"messages[{index}]", each) for index, each in enumerate(value)]


def _message(where: str, value: Any) -> Message:
    if not isinstance(value, dict):
        raise wrong(where, "an object", value)
    role = value.get("role")
    if role not in ROLES:
        raise InvalidParameter(f"`{where}.role` must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if value.get("tool_calls") or value.get("function_call"):
        raise InvalidParameter(
            "tool calls are not supported", param=f"{where}.tool_calls", code="unsupported_parameter"
        )
    content = _content(f"{where}.content", value.get("content"))
    return {"role": "system" if role == "developer" else role, "content": content}


def _content(where: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(where, "a string or a list of text parts", value)
    parts: list[str] = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidParameter("only parts of type text are supported", param=f"{where}[{index}]")
        parts.append(part["text"])
    return "".join(parts)
