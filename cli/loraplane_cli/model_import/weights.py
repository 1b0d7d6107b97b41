"""GGUF tensors → model.safetensors in bf16, streamed block by block so that memory does not grow with the model."""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
from gguf import ReaderTensor
from gguf.quants import dequantize

from loraplane_cli.model_import.config import LlamaShape
from loraplane_cli.model_import.errors import ModelImportError
from loraplane_cli.model_import.gguf_file import GgufFile

BLOCK_ELEMENTS = 2 * 1024 * 1024
BF16_BYTES = 2


@dataclass(frozen=True)
class Target:
    """One tensor of the Hugging Face form. `rope_heads`: how many heads' rows llama.cpp interleaved, 0 for none."""

    gguf_name: str
    name: str
    shape: tuple[int, ...]
    rope_heads: int = 0

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape)) * BF16_BYTES


def plan_targets(shape: LlamaShape) -> list[Target]:
    hidden, kv_rows, q_rows = shape.hidden, shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    targets = [
        Target("token_embd.weight", "model.embed_tokens.weight", (shape.vocabulary, hidden)),
        Target("output_norm.weight", "model.norm.weight", (hidden,)),
    ]
    if not shape.tied_head:
        targets.append(Target("output.weight", "lm_head.weight", (shape.vocabulary, hidden)))
    for layer in range(shape.layers):
        source, target = f"blk.{layer}", f"model.layers.{layer}"
        mlp, attention = f"{target}.mlp", f"{target}.self_attn"
        targets += [
            Target(f"{source}.attn_norm.weight", f"{target}.input_layernorm.weight", (hidden,)),
            Target(f"{source}.ffn_norm.weight", f"{target}.post_attention_layernorm.weight", (hidden,)),
            Target(f"{source}.ffn_gate.weight", f"{mlp}.gate_proj.weight", (shape.intermediate, hidden)),
            Target(f"{source}.ffn_up.weight", f"{mlp}.up_proj.weight", (shape.intermediate, hidden)),
            Target(f"{source}.ffn_down.weight", f"{mlp}.down_proj.weight", (hidden, shape.intermediate)),
            Target(f"{source}.attn_q.weight", f"{attention}.q_proj.weight", (q_rows, hidden), shape.heads),
            Target(f"{source}.attn_k.weight", f"{attention}.k_proj.weight", (kv_rows, hidden), shape.kv_heads),
            Target(f"{source}.attn_v.weight", f"{attention}.v_proj.weight", (kv_rows, hidden)),
            Target(f"{source}.attn_output.weight", f"{attention}.o_proj.weight", (hidden, q_rows)),
        ]
    return sorted(targets, key=lambda target: target.name)


def check_tensors(file: GgufFile, targets: list[Target]) -> None:
    """Every expected tensor is there in its shape, and none is left over: a silently dropped one changes answers."""
    expected = {target.gguf_name: target.shape for target in targets}
    missing = sorted(expected.keys() - file.tensors.keys())
    unknown = sorted(file.tensors.keys() - expected.keys())
    if missing or unknown:
        raise ModelImportError(
            "unsupported_model", f"{file.path}: missing tensors {missing[:5]}, tensors without a place {unknown[:5]}"
        )
    for name, shape in expected.items():
        found = tuple(int(n) for n in reversed(file.tensors[name].shape.tolist()))
        if found != shape:
            raise ModelImportError("unsupported_model", f"{file.path}: {name} has shape {found}, expected {shape}")


def write_safetensors(file: GgufFile, targets: list[Target], path: Path, progress: Callable[[int, int], None]) -> int:
    """Returns the file's size in bytes. Format: u64 header length, JSON header padded to 8, then the raw data."""
    total = sum(target.bytes for target in targets)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for target in targets:
        header[target.name] = {
            "dtype": "BF16",
            "shape": list(target.shape),
            "data_offsets": [offset, offset + target.bytes],
        }
        offset += target.bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    done = 0
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)))
        out.write(encoded)
        for target in targets:
            _write_tensor(file.tensors[target.gguf_name], target, out)
            done += target.bytes
            progress(done, total)
    return 8 + len(encoded) + total


def _write_tensor(tensor: ReaderTensor, target: Target, out: BinaryIO) -> None:
    rows = tensor.data if tensor.data.ndim > 1 else tensor.data.reshape(1, -1)
    order = _row_order(rows.shape[0], target.rope_heads)
    step = max(1, BLOCK_ELEMENTS // target.shape[-1])
    for start in range(0, rows.shape[0], step):
        block = rows[order[start : start + step]]
        try:
            values = dequantize(block, tensor.tensor_type)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise ModelImportError(
                "unsupported_model", f"{tensor.name}: quantisation {kind} is not supported"
            ) from error
        out.write(to_bf16(values).tobytes())


def _row_order(rows: int, rope_heads: int) -> npt.NDArray[np.intp]:
    """Source row of each target row.

    llama.cpp rotates neighbouring pairs, Hugging Face the two halves of a head, so its converter interleaves the
    halves of q and k per head: row 2i+j of a head holds Hugging Face's row j*half+i. This undoes it.
    """
    order = np.arange(rows, dtype=np.intp)
    if not rope_heads:
        return order
    half = rows // rope_heads // 2
    return order.reshape(rope_heads, half, 2).swapaxes(1, 2).reshape(rows)


def to_bf16(values: npt.NDArray[np.generic]) -> npt.NDArray[np.uint16]:
    """Round to nearest, ties to even, as torch's cast does (NaN stays NaN); little-endian bit patterns."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4")
    rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
    quiet_nan = (bits >> 16) | 0x40
    return np.where(np.isnan(bits.view("<f4")), quiet_nan, rounded).astype("<u2")
