"""Sampling parameters of the OpenAI routes (with vLLM's additions) and what is refused by name."""

import string
from dataclasses import dataclass
from typing import Any

from loraplane_core.errors import InvalidParameter
from loraplane_engine.messages import SamplingParams
from loraplane_engine.server.fields import Fields, wrong

MAX_TOKENS = 1 << 31
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 64
MAX_LOGPROBS = 20
MAX_CHOICES = 128
#: Log probabilities of one request: tokens that get some, times one more than the alternatives to each. They are
#: kept until the answer is whole. What one answer that fills the context may carry is allowed in any case.
MAX_LOGPROB_ENTRIES = 1 << 18
MAX_IGNORED_HEADER = 512

#: Fields that would change the answer and are not implemented, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": ([],),
    "audio": (),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_json": ("", {}),
    "guided_regex": ("",),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "modalities": (["text"], []),
    "prediction": (),
    "prompt_embeds": (),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "structured_outputs": ({},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}


@dataclass(frozen=True)
class Common:
    """What both generation routes share, besides the prompt."""

    model: str
    stream: bool
    include_usage: bool
    n: int
    stops: tuple[str, ...]
    max_tokens: int | None  # None = the route's default
    sampling: dict[str, Any]  # keyword arguments of SamplingParams that do not depend on the prompt


def read_common(fields: Fields, max_tokens_names: tuple[str, ...]) -> Common:
    _refuse_unsupported(fields)
    stream = fields.boolean("stream")
    top_k = fields.integer("top_k", -1, MAX_TOKENS)
    given = {
        "min_tokens": fields.integer("min_tokens", 0, MAX_TOKENS),
        "temperature": fields.number("temperature", 0, 2),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": 0 if top_k == -1 else top_k,
        "seed": fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        "presence_penalty": fields.number("presence_penalty", -2, 2),
        "frequency_penalty": fields.number("frequency_penalty", -2, 2),
        "repetition_penalty": fields.number("repetition_penalty", 0.01, 100),
        "stop_token_ids": _stop_token_ids(fields),
        "ignore_eos": fields.boolean("ignore_eos"),
    }
    if given["top_p"] == 0:
        raise InvalidParameter("`top_p` must be greater than 0", param="top_p")
    return Common(
        model=_model(fields),
        stream=stream,
        include_usage=_stream_options(fields, stream),
        n=fields.integer("n", 1, MAX_CHOICES) or 1,
        stops=_stops(fields),
        max_tokens=_max_tokens(fields, max_tokens_names),
        sampling={name: value for name, value in given.items() if value is not None},
    )


def ignored_header(names: list[str]) -> str:
    """Unknown field names for a response header: printable ASCII without separators, bounded."""
    safe = set(string.ascii_letters + string.digits + "_-.")
    text = ""
    for name in sorted(names):
        clean = "".join(char if char in safe else "?" for char in name[:64]) or "?"
        if len(text) + len(clean) + 1 > MAX_IGNORED_HEADER:
            return text + ",..."
        text += ("," if text else "") + clean
    return text


def sampling_params(common: Common, max_tokens: int, choice: int, extra: dict[str, Any]) -> SamplingParams:
    """For one choice: a given seed moves on by one per choice, so that n choices differ."""
    options = common.sampling | extra
    if "seed" in options:
        options["seed"] = (options["seed"] + choice) & ((1 << 63) - 1)
    return SamplingParams(max_tokens=max_tokens, **options)


def check_logprobs(tokens: int, alternatives: int | None, max_model_len: int) -> None:
    """`tokens` get log probabilities in this request; None = none do. Raises InvalidParameter with the arithmetic."""
    if alternatives is None:
        return
    entries, limit = tokens * (alternatives + 1), max(MAX_LOGPROB_ENTRIES, max_model_len * (MAX_LOGPROBS + 1))
    if entries > limit:
        raise InvalidParameter(
            f"log probabilities of up to {tokens} tokens with {alternatives} alternatives each are {entries} entries; "
            f"one request may ask for {limit}: lower `n`, `max_tokens` or the number of alternatives",
            param="logprobs",
        )


def _model(fields: Fields) -> str:
    model = fields.text("model")
    if not 0 < len(model) <= 512:
        raise InvalidParameter("`model` must have between 1 and 512 characters", param="model")
    return model


def _refuse_unsupported(fields: Fields) -> None:
    for name, neutral in _UNSUPPORTED.items():
        value = fields.raw(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
            if isinstance(value, int | float) and not isinstance(value, bool) and value in neutral:
                continue  # 1.0 for 1
            raise InvalidParameter(
                f"`{name}` is not supported with this value", param=name, code="unsupported_parameter"
            )


def _stream_options(fields: Fields, stream: bool) -> bool:
    options = fields.raw("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        raise wrong("stream_options", "an object", options)
    if not stream:
        raise InvalidParameter("`stream_options` is only allowed when `stream` is true", param="stream_options")
    include = options.get("include_usage")
    if include is not None and not isinstance(include, bool):
        raise wrong("stream_options.include_usage", "a boolean", include)
    return bool(include)


def _max_tokens(fields: Fields, names: tuple[str, ...]) -> int | None:
    values = [fields.integer(name, 1, MAX_TOKENS) for name in names]
    return next((value for value in values if value is not None), None)


def _stops(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
        raise wrong("stop", "a string or a list of strings", value)
    if len(stops) > MAX_STOPS:
        raise InvalidParameter(f"`stop` may hold at most {MAX_STOPS} strings", param="stop")
    if any(not 0 < len(each) <= MAX_STOP_LENGTH for each in stops):
        raise InvalidParameter(f"strings in `stop` have 1 to {MAX_STOP_LENGTH} characters", param="stop")
    return tuple(stops)


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    value = fields.raw("stop_token_ids")
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(each) is int and 0 <= each < MAX_TOKENS for each in value):
        raise wrong("stop_token_ids", "a list of token ids", value)
    if len(value) > MAX_STOP_TOKENS:
        raise InvalidParameter(f"`stop_token_ids` may hold at most {MAX_STOP_TOKENS} ids", param="stop_token_ids")
    return tuple(value)
