"""Which tensors an architecture needs, with their shapes, under the names of GGUF and of safetensors files."""

from __future__ import annotations

from typing import Final

from gpu.model.config import ModelConfig

EMBEDDING: Final = "token_embd.weight"
FINAL_NORM: Final = "output_norm.weight"
HEAD: Final = "output.weight"

_SAFETENSORS_GLOBAL: Final = {
    EMBEDDING: "model.embed_tokens.weight",
    FINAL_NORM: "model.norm.weight",
    HEAD: "lm_head.weight",
}
_SAFETENSORS_LAYER: Final = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def layer_name(layer: int, part: str) -> str:
    """GGUF name of a layer's tensor."""
    return f"blk.{layer}.{part}"


def safetensors_name(name: str) -> str:
    """The name that a safetensors file uses for the tensor of this GGUF name."""
    if (known := _SAFETENSORS_GLOBAL.get(name)) is not None:
        return known
    _, layer, part = name.split(".", 2)
    return f"model.layers.{layer}.{_SAFETENSORS_LAYER[part]}"


def required_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name (as in GGUF) -> shape of every tensor that the model reads."""
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        shapes |= {layer_name(layer, part): shape for part, shape in _layer_shapes(config).items()}
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (config.q_width, hidden),
        "attn_k.weight": (config.kv_width, hidden),
        "attn_v.weight": (config.kv_width, hidden),
        "attn_output.weight": (hidden, config.q_width),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (inner, hidden),
        "ffn_up.weight": (inner, hidden),
        "ffn_down.weight": (hidden, inner),
    }
    if config.qkv_bias:
        shapes |= {"attn_q.bias": (config.q_width,), "attn_k.bias": (config.kv_width,)}
        shapes |= {"attn_v.bias": (config.kv_width,)}
    if config.qk_norm:
        shapes |= {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    return shapes
