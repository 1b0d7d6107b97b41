"""GGUF vocabulary and merges → tokenizer.json and tokenizer_config.json (byte-level BPE)."""

from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from loraplane_cli.model_import.errors import ModelImportError
from loraplane_cli.model_import.gguf_file import GgufFile

CONTROL, USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


@dataclass(frozen=True)
class SpecialTokens:
    bos: int | None
    eos: int | None
    pad: int | None
    unk: int | None

    def config_ids(self) -> dict[str, int | None]:
        return {"bos_token_id": self.bos, "eos_token_id": self.eos, "pad_token_id": self.pad}


def read_special_tokens(file: GgufFile) -> SpecialTokens:
    eos = file.optional_int("tokenizer.ggml.eos_token_id")
    if eos is None:
        raise ModelImportError("unsupported_model", f"{file.path} names no end-of-sequence token")
    pad = file.optional_int("tokenizer.ggml.padding_token_id")
    return SpecialTokens(
        bos=file.optional_int("tokenizer.ggml.bos_token_id"),
        eos=eos,
        pad=eos if pad is None else pad,
        unk=file.optional_int("tokenizer.ggml.unknown_token_id"),
    )


def build_tokenizer(file: GgufFile, special: SpecialTokens) -> Tokenizer:
    kind = file.require("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise ModelImportError("unsupported_model", f"{file.path}: tokenizer {kind!r}; only byte-level BPE (gpt2)")
    tokens = file.strings("tokenizer.ggml.tokens")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ModelImportError("unsupported_model", f"{file.path}: the vocabulary names a token twice")
    merges = [_split_merge(file, merge) for merge in file.strings("tokenizer.ggml.merges")]
    try:
        model = BPE(vocab=vocabulary, merges=merges, fuse_unk=False)
    except Exception as error:  # the Rust binding raises bare Exception for a merge outside the vocabulary
        raise ModelImportError("unsupported_model", f"{file.path}: vocabulary and merges disagree ({error})") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(file)
    tokenizer.decoder = decoders.ByteLevel()
    bos = special.bos
    if file.get("tokenizer.ggml.add_bos_token", bool, False) and bos is not None:
        name = tokens[bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{name} $A", pair=f"{name} $A $B:1", special_tokens=[(name, bos)]
        )
    kinds = file.ints("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens([_added(t) for t, k in zip(tokens, kinds, strict=True) if k == CONTROL])
    tokenizer.add_tokens([_added(t) for t, k in zip(tokens, kinds, strict=True) if k == USER_DEFINED])
    return tokenizer


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _split_merge(file: GgufFile, merge: str) -> tuple[str, str]:
    left, separator, right = merge.partition(" ")
    if not separator:
        raise ModelImportError("unsupported_model", f"{file.path}: {merge!r} is not a BPE merge")
    return left, right


def _pre_tokenizer(file: GgufFile) -> pre_tokenizers.PreTokenizer:
    name = file.get("tokenizer.ggml.pre", str, "default")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    if name == "gpt-2":
        return byte_level
    # Guessing would tokenise almost everything right and the rest silently wrong.
    raise ModelImportError("unsupported_model", f"{file.path}: pre-tokenizer {name!r} is not supported")


def tokenizer_config(file: GgufFile, special: SpecialTokens, context: int) -> dict[str, Any]:
    tokens = file.strings("tokenizer.ggml.tokens")
    kinds = file.ints("tokenizer.ggml.token_type")
    named = {"bos_token": special.bos, "eos_token": special.eos, "pad_token": special.pad, "unk_token": special.unk}
    config: dict[str, Any] = {
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", bool, False),
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(index): _added_entry(token, special=kind == CONTROL)
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind in (CONTROL, USER_DEFINED)
        },
        **{key: tokens[index] for key, index in named.items() if index is not None},
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
        # Loads tokenizer.json as it is; the GPT-2 class would rebuild it without the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    template = file.get("tokenizer.chat_template", str, "")
    if template:
        config["chat_template"] = template
    return config


def _added_entry(token: str, *, special: bool) -> dict[str, Any]:
    return {
        "content": token,
        "lstrip": False,
        "normalized": False,
        "rstrip": False,
        "single_word": False,
        "special": special,
    }
