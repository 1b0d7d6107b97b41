"""GGUF metadata of the llama architecture → config.json and generation_config.json."""

from dataclasses import dataclass
from typing import Any

from loraplane_cli.model_import.errors import ModelImportError
from loraplane_cli.model_import.gguf_file import GgufFile

DEFAULT_ROPE_THETA = 10000.0


@dataclass(frozen=True)
class LlamaShape:
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    rope_theta: float
    rms_eps: float
    tied_head: bool


def read_shape(file: GgufFile) -> LlamaShape:
    architecture = file.architecture()
    if architecture != "llama":
        raise ModelImportError(
            "unsupported_architecture", f"{file.path} holds the architecture {architecture!r}; only llama is imported"
        )
    _refuse_variants(file)
    hidden = file.require("llama.embedding_length", int)
    heads = file.require("llama.attention.head_count", int)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or heads < 1:
        raise ModelImportError("unsupported_model", f"{file.path} lacks token_embd.weight or attention heads")
    head_dim = file.get("llama.attention.key_length", int, hidden // heads)
    if file.get("llama.rope.dimension_count", int, head_dim) != head_dim:
        raise ModelImportError("unsupported_model", f"{file.path} rotates only a part of each head")
    return LlamaShape(
        layers=file.require("llama.block_count", int),
        hidden=hidden,
        intermediate=file.require("llama.feed_forward_length", int),
        heads=heads,
        kv_heads=file.get("llama.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        vocabulary=int(embedding.shape[1]),
        context=file.require("llama.context_length", int),
        rope_theta=file.decimal("llama.rope.freq_base", DEFAULT_ROPE_THETA),
        rms_eps=file.decimal("llama.attention.layer_norm_rms_epsilon"),
        tied_head="output.weight" not in file.tensors,
    )


def _refuse_variants(file: GgufFile) -> None:
    """Variants that would convert without an error but then compute something else."""
    scaling = file.get("llama.rope.scaling.type", str, "none")
    if scaling != "none" or "rope_freqs.weight" in file.tensors:
        raise ModelImportError("unsupported_model", f"{file.path} uses rope scaling ({scaling}), not supported yet")
    if file.get("llama.expert_count", int, 0):
        raise ModelImportError("unsupported_model", f"{file.path} is a mixture of experts, not supported")


def model_config(shape: LlamaShape, special_ids: dict[str, int | None]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        **special_ids,
        "dtype": "bfloat16",
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": shape.rms_eps,
        # Both spellings: readers before and after transformers 5 look in different places.
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tied_head,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }
