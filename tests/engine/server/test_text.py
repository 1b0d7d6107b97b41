"""Detokenisation and stop strings, token by token."""

import threading
from pathlib import Path

import pytest

from loraplane_engine.server.text import Detokenizer, StopStrings, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


def pieces(tokenizer: Tokenizer, raw: bytes) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(byte) for byte in raw), detokenizer.flush()]


@pytest.mark.parametrize("text", ["plain", "grüße", "世界", "🎉🎉", "a🎉b世c", "\ufffd kept", ""])
def test_pieces_join_to_the_text_and_no_piece_is_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    found = pieces(tokenizer, text.encode())
    assert "".join(found) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in found)


def test_an_incomplete_end_shows_as_a_replacement_character(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, b"ab\xf0\x9f")) == "ab\ufffd"


def test_endless_invalid_bytes_do_not_hold_text_back_for_ever(tokenizer: Tokenizer) -> None:
    found = pieces(tokenizer, b"\xff" * 100 + b"ok")
    assert "".join(found).endswith("ok")
    assert "".join(found).count("\ufffd") == 100
    assert sum(bool(piece) for piece in found) > 10


def test_a_token_s_bytes_and_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bytes(0xE2) == b"\xe2"
    assert tokenizer.token_text(0xE2) == "bytes:\\xe2"
    assert tokenizer.token_text(ord(" ")) == " "
    assert tokenizer.token_text(257) == "<|end|>"
    assert tokenizer.token_text(259) == ""


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["END"], "abENDcd", "ab"),
        (["END"], "abENcd", "abENcd"),
        (["aab"], "aaab", "a"),
        (["###", "\n\n"], "x\n\n###", "x"),
        (["世界"], "hi 世界!", "hi "),
        (["abc", "b"], "abc", "a"),
        ([], "free", "free"),
    ],
)
def test_a_stop_string_is_found_across_pieces_and_never_shown(stops: list[str], text: str, shown: str) -> None:
    matcher = StopStrings(stops)
    found = ""
    for char in text:
        new, stopped = matcher.push(char)
        found += new
        if stopped:
            break
    else:
        found += matcher.flush()
    assert found == shown


def test_other_threads_go_on_while_a_long_text_is_tokenised(tokenizer: Tokenizer) -> None:
    text, done = "ab " * 200_000, threading.Event()

    def encode() -> None:
        tokenizer.encode(text, special=False)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20


def test_the_fewest_tokens_are_never_more_than_there_are(tokenizer: Tokenizer) -> None:
    for text in ("", "a", "<|start|>" * 50, "世界" * 100, "plain text"):
        assert tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text, special=False))
    assert tokenizer.fewest_tokens("a" * 90_000) >= 10_000  # the longest token is <|start|>, nine bytes
