"""Looks for secrets in texts, in the forms in which one gets out. Tells where and which, never the secret itself."""

import base64
import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from loraplane_core.credentials import ROLES, operator_credential, role_key

#: Of a secret this many characters in a row are a leak; fewer could be anything.
LENGTH = 16
_RUN = re.compile(rf"[0-9A-Za-z+/=_-]{{{LENGTH},}}")
_API_KEY = re.compile(r"lp_[0-9A-Za-z]{12}_([0-9A-Za-z]{38})")
_SECRET_DOCUMENT = re.compile(r"^kind: Secret\s*$", re.MULTILINE)
#: What of base64 after so many foreign bytes still depends on them.
_SPOILT = (0, 2, 3)
_BASE64_BYTES = 13  # as many characters as LENGTH, wherever they begin
_MASTER = "master.key"


@dataclass(frozen=True, slots=True, order=True)
class Find:
    place: str
    secret: str
    form: str


class Hunt:
    """`add` what is secret, then ask about texts."""

    def __init__(self) -> None:
        self._needles: dict[str, tuple[str, str]] = {}

    def add(self, name: str, value: bytes) -> None:
        """Of a URL its password, of a JSON object its strings, of an API key what follows its id.

        Raises ValueError, without the value, for a secret that is too short to be told from other text.
        """
        try:
            tokens = _tokens(value.decode())
        except UnicodeDecodeError:
            self._add_bytes(name, "its bytes", value)
            return
        for token in tokens:
            if len(token) < LENGTH:
                raise ValueError(f"{name} has fewer than {LENGTH} characters: it cannot be looked for; make it longer")
            for begin in (*range(0, len(token) - LENGTH + 1, LENGTH), len(token) - LENGTH):
                self._needles[token[begin : begin + LENGTH]] = (name, "as it is")
            self._add_base64(name, "base64", token.encode())
            with contextlib.suppress(ValueError):
                self._add_bytes(name, "its bytes", bytes.fromhex(token))

    def add_secret(self, raw: Mapping[str, Any]) -> None:
        """Every entry of a Secret; of the master key also what is derived from it."""
        where = f"Secret {raw['metadata'].get('namespace', '')}/{raw['metadata']['name']}"
        data = {entry: base64.b64decode(value) for entry, value in (raw.get("data") or {}).items()}
        data |= {entry: value.encode() for entry, value in (raw.get("stringData") or {}).items()}
        for entry, value in data.items():
            self.add(f"{where}: {entry}", value)
            if entry == _MASTER:
                master = bytes.fromhex(value.decode().strip())
                self.add(f"{where}: the operator's credential", operator_credential(master).encode())
                for role in ROLES:
                    self.add(f"{where}: the key of role {role}", role_key(master, role).hex().encode())

    def finds(self, place: str, text: str) -> list[Find]:
        """Sorted; each secret once per form."""
        runs = "\n".join(set(_RUN.findall(text)))
        found = {
            Find(place, name, form)
            for needle, (name, form) in self._needles.items()
            if needle in (runs if _RUN.fullmatch(needle) else text)
        }
        return sorted(found)

    def _add_bytes(self, name: str, form: str, value: bytes) -> None:
        if len(value) < LENGTH:
            raise ValueError(f"{name} has fewer than {LENGTH} bytes: it cannot be looked for; make it longer")
        self._needles.setdefault(value.hex()[:LENGTH], (name, f"{form} in hexadecimal digits"))
        self._add_base64(name, f"{form} in base64", value)

    def _add_base64(self, name: str, form: str, value: bytes) -> None:
        """As it looks on its own, and in the middle of something longer that was encoded."""
        for before, spoilt in enumerate(_SPOILT):
            encoded = base64.b64encode(b"\0" * before + value[:_BASE64_BYTES] + b"\0\0").decode()
            needle = encoded[spoilt : spoilt + LENGTH]
            for each in {needle, needle.replace("+", "-").replace("/", "_")}:
                self._needles[each] = (name, form)


def without_secrets(manifests: str) -> str:
    """Rendered documents, comments too, that are no Secret."""
    documents = re.split(r"^---.*$", manifests, flags=re.MULTILINE)
    return "---\n".join(each for each in documents if not _SECRET_DOCUMENT.search(each))


def _tokens(text: str) -> list[str]:
    text = text.strip()
    with contextlib.suppress(ValueError):
        parsed = json.loads(text)
        if isinstance(parsed, dict):
            return [token for leaf in _strings(parsed) for token in _tokens(leaf)]
    password = urlsplit(text).password if "://" in text else None
    if password:
        return [password]
    key = _API_KEY.fullmatch(text)
    return [key[1]] if key else [text]


def _strings(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for each in value.values():
                yield from _strings(each)
        case list():
            for each in value:
                yield from _strings(each)
        case _:
            pass
