"""The Llama family: RMSNorm, rotary positions, grouped-query attention over the paged cache, gated MLP.

Plain objects that hold tensors; q, k, v and gate, up are merged linears. Every linear names its sites, so an
adapter's place is decided here and not by looking up module names after loading.
"""

import torch
import torch.nn.functional as F

from loraplane_engine.adapters.sites import GROUPS, group_sites
from loraplane_engine.kernels.contract import GroupedLora, SiteGroup
from loraplane_engine.memory.arena import Arena
from loraplane_engine.models.attention import PagedAttention
from loraplane_engine.models.batch import ForwardBatch
from loraplane_engine.models.config import BaseConfig
from loraplane_engine.models.linear import Linear, matmul_by
from loraplane_engine.models.loader import Weights
from loraplane_engine.models.rope import Rope, inverse_frequencies, rotate

_QKV, _O, _GATE_UP, _DOWN = range(len(GROUPS))
_IGNORED = "rotary_emb.inv_freq"  # old checkpoints store the table that Rope computes


class Attention:
    def __init__(
        self, config: BaseConfig, weights: Weights, layer: int, lora: GroupedLora, attention: PagedAttention
    ) -> None:
        name = f"model.layers.{layer}.self_attn"
        self._layer, self._attention = layer, attention
        self._heads, self._kv_heads, self._width = config.num_attention_heads, config.kv_heads, config.head_width
        hidden, q, kv = config.hidden_size, self._heads * self._width, self._kv_heads * self._width
        self.qkv = Linear(
            [
                weights.take(f"{name}.{part}_proj.weight", size, hidden)
                for part, size in (("q", q), ("k", kv), ("v", kv))
            ],
            group_sites(layer, _QKV),
            lora,
        )
        # What o and down write stays in the residual stream: their rounding decides that of the logits.
        self.o = Linear([weights.take(f"{name}.o_proj.weight", hidden, q)], group_sites(layer, _O), lora, exact=True)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        rows, rotated = x.shape[0], self._heads + self._kv_heads
        qkv = self.qkv(x, batch.routing).view(rows, rotated + self._kv_heads, self._width)
        qk = rotate(qkv[:, :rotated], cos, sin)
        q, k = qk[:, : self._heads], qk[:, self._heads :]
        return self.o(self._attention(q, k, qkv[:, rotated:], self._layer, batch), batch.routing)


class Mlp:
    def __init__(self, config: BaseConfig, weights: Weights, layer: int, lora: GroupedLora) -> None:
        name, hidden, inner = f"model.layers.{layer}.mlp", config.hidden_size, config.intermediate_size
        self.gate_up = Linear(
            [weights.take(f"{name}.{part}_proj.weight", inner, hidden) for part in ("gate", "up")],
            group_sites(layer, _GATE_UP),
            lora,
        )
        down = weights.take(f"{name}.down_proj.weight", hidden, inner)
        self.down = Linear([down], group_sites(layer, _DOWN), lora, exact=True)

    def __call__(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        gate, up = self.gate_up(x, batch.routing).chunk(2, dim=1)
        return self.down(F.silu(gate).mul_(up), batch.routing)


class Norm:
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight, self._eps = weight, eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._weight.shape, self._weight, self._eps)


class Layer:
    def __init__(
        self, config: BaseConfig, weights: Weights, layer: int, lora: GroupedLora, attention: PagedAttention
    ) -> None:
        name, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self._norm_in = Norm(weights.take(f"{name}.input_layernorm.weight", hidden), eps)
        self._norm_mlp = Norm(weights.take(f"{name}.post_attention_layernorm.weight", hidden), eps)
        self.attention = Attention(config, weights, layer, lora, attention)
        self.mlp = Mlp(config, weights, layer, lora)

    def __call__(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        x = x + self.attention(self._norm_in(x), cos, sin, batch)
        return x.add_(self.mlp(self._norm_mlp(x), batch))


class Llama:
    """`max_len` bounds the positions. Raises ValueError unless every tensor of the checkpoint is used."""

    def __init__(self, config: BaseConfig, weights: Weights, arena: Arena, lora: GroupedLora, max_len: int) -> None:
        dtype = arena.elements.dtype
        attention = PagedAttention(arena, kv_heads=config.kv_heads, head_dim=config.head_width)
        theta, scaling = config.rope
        frequencies = inverse_frequencies(config.head_width, theta, scaling)
        self._rope = Rope(frequencies, max_len, dtype)
        self._embedding = weights.take("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, weights, layer, lora, attention) for layer in range(config.num_hidden_layers)]
        self._norm = Norm(weights.take("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        if tied and "lm_head.weight" in weights:  # some checkpoints carry the tied copy as well
            weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
        head = self._embedding if tied else weights.take("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = matmul_by(head)
        unused = [name for name in weights.unused() if not name.endswith(_IGNORED)]
        if unused:
            raise ValueError(f"tensors of the base model are not understood: {', '.join(unused[:5])}")

    @property
    def site_groups(self) -> list[SiteGroup]:
        """All groups in order; a site's widths are found here."""
        return [
            linear.group
            for layer in self.layers
            for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
        ]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """fp32 logits of the wanted rows, [rows, vocabulary]."""
        x = F.embedding(batch.tokens, self._embedding)
        cos, sin = self._rope.at(batch.positions)
        for layer in self.layers:
            x = layer(x, cos, sin, batch)
        if batch.logit_rows is not None:
            if not batch.logit_rows.numel():
                return x.new_empty(0, self._embedding.shape[0], dtype=torch.float32)
            x = x.index_select(0, batch.logit_rows)
        return self._head(self._norm(x)).float()
