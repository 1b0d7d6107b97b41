"""A tiny llama GGUF written with gguf's own writer, as llama.cpp's converter would have laid it out."""

from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType
from gguf.quants import quantize

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, CONTEXT = 2, 64, 4, 2, 16, 96, 128
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
Array = npt.NDArray[np.float32]


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) for byte in kept] + [chr(256 + index) for index in range(len(moved))]


MERGES = ["Ġ t", "h e", "Ġt he", "i s", "1 2"]
TOKENS = [*SPECIALS, *byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]


def hugging_face_weights(*, tied: bool = True, seed: int = 0) -> dict[str, Array]:
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return (generator.standard_normal(shape) * 0.1).astype(np.float32)

    weights = {"model.embed_tokens.weight": normal(len(TOKENS), HIDDEN), "model.norm.weight": 1 + normal(HIDDEN)}
    if not tied:
        weights["lm_head.weight"] = normal(len(TOKENS), HIDDEN)
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        weights |= {
            f"{stem}.input_layernorm.weight": 1 + normal(HIDDEN),
            f"{stem}.post_attention_layernorm.weight": 1 + normal(HIDDEN),
            f"{stem}.self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"{stem}.mlp.gate_proj.weight": normal(MLP, HIDDEN),
            f"{stem}.mlp.up_proj.weight": normal(MLP, HIDDEN),
            f"{stem}.mlp.down_proj.weight": normal(HIDDEN, MLP),
        }
    return weights


def _interleave(weight: Array, heads: int) -> Array:
    """What llama.cpp's converter does to q and k: the two halves of each head, row by row."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{parts[rest.removesuffix('.weight')]}.weight"


def write_gguf(
    path: Path,
    weights: dict[str, Array],
    *,
    quantised: bool = False,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    add_bos: bool = False,
    rope_scaling: str | None = None,
    extra_tensor: str | None = None,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    if rope_scaling:
        writer.add_string(f"{architecture}.rope.scaling.type", rope_scaling)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(TOKENS)
    writer.add_token_merges(MERGES)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(CHAT_TEMPLATE)
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}
    for name, weight in weights.items():
        rotated = next((count for part, count in heads.items() if part in name), 0)
        laid_out = _interleave(weight, rotated) if rotated else weight
        if quantised and weight.ndim == 2:
            packed = quantize(laid_out, GGMLQuantizationType.Q8_0)
            writer.add_tensor(_gguf_name(name), packed, raw_dtype=GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(_gguf_name(name), laid_out)
    if extra_tensor:
        writer.add_tensor(extra_tensor, np.zeros(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
