"""Chat messages to a prompt by the model's own template, in jinja2's sandbox."""

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from loraplane_core.errors import InvalidRequest
from loraplane_engine.server.text import read_json

Message = dict[str, str]


class ChatTemplate:
    """A model without a template refuses chat: guessing a format would quietly degrade answers."""

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "tokenizer_config.json")
        source = _source(folder, config)
        self._template = _environment().from_string(source) if source is not None else None
        self._special = {
            name: _content(config[name])
            for name in ("bos_token", "eos_token", "unk_token", "pad_token")
            if config.get(name) is not None
        }

    def render(self, messages: list[Message]) -> str:
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", code="no_chat_template")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._special)
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the chat template refuses these messages: {error.message}", param="messages"
            ) from error


def _source(folder: Path, config: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = next((each.get("template") for each in template if each.get("name") == "default"), None)
    return template if isinstance(template, str) else None


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _environment() -> jinja2.Environment:
    """The environment that published templates are written for (block trimming, loop controls, two helpers)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], autoescape=False
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(
        form
    )  # the template's local day
    return environment


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
