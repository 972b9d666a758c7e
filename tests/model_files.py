"""Small models and vocabularies for tests, written as real files by libraries that are not ours.

`tiny_config` is the field cases' model T; `random_tensors` draws its weights; `write_gguf` and `write_safetensors`
write the same model in both formats, with a vocabulary from `byte_vocabulary`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quants
from numpy.typing import NDArray
from safetensors.numpy import save_file

from gpu.model.config import ModelConfig
from gpu.model.tensor_names import required_tensors, safetensors_name

Tensors = dict[str, NDArray[np.float32]]

VOCABULARIES = Path(__file__).parent / "vocabularies"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_alphabet() -> list[str]:
    """GPT-2's stand-ins for the 256 bytes, in vocabulary order: printable ones first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(256 - len(printable))]


def qwen2_merges(count: int = 4600) -> list[str]:
    """The first merges of Qwen2's vocabulary."""
    return (VOCABULARIES / "qwen2_first_merges.txt").read_text("utf-8").splitlines()[:count]


def byte_vocabulary(
    merges: Sequence[str] | None = None,
    pre: str = "qwen2",
    controls: Sequence[str] = CONTROL_TOKENS,
    user_defined: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """`tokenizer.*` metadata: byte pieces, merges, control tokens, user-defined tokens; the last control ends a reply.

    With the default merges it has 512 tokens, as many as `tiny_config` embeds. more: further keys without their
    `tokenizer.ggml.` prefix.
    """
    merges = qwen2_merges(512 - 256 - len(CONTROL_TOKENS)) if merges is None else merges
    pieces = [*byte_alphabet(), *("".join(merge.split(" ")) for merge in merges)]
    tokens = [*pieces, *controls, *user_defined]
    kinds = [TokenType.NORMAL] * len(pieces) + [TokenType.CONTROL] * len(controls)
    kinds += [TokenType.USER_DEFINED] * len(user_defined)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(kind) for kind in kinds],
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.eos_token_id": len(pieces) + len(controls) - 1,
        "tokenizer.chat_template": CHATML,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def tiny_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    """2 layers, 4 heads, 2 KV heads of 64; biases for qwen2, head norms for qwen3."""
    config = ModelConfig(
        architecture=architecture,
        num_layers=2,
        hidden_size=128,
        intermediate_size=192,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        vocab_size=512,
        context_length=2048,
        rms_norm_eps=2.0**-17,  # the same number in f32, as GGUF stores it
        tie_embeddings=True,
        qkv_bias=architecture == "qwen2",
        qk_norm=architecture == "qwen3",
    )
    return replace(config, **changes)


def random_tensors(config: ModelConfig, seed: int = 1) -> Tensors:
    """Weights with usual magnitudes, exactly representable in fp16 and bf16."""
    rng = np.random.default_rng(seed)
    tensors: Tensors = {}
    for name, shape in required_tensors(config).items():
        scale = 0.2 if name.endswith(".bias") else shape[-1] ** -0.5
        values = rng.standard_normal(shape, np.float32) * np.float32(scale)
        if name.endswith("norm.weight"):
            values = 1 + values
        bits = (values.astype(np.float32).view(np.uint32) + 0x8000) & np.uint32(0xFFFF0000)
        tensors[name] = bits.view(np.float32).astype(np.float16).astype(np.float32)
    return tensors


def fp16_tensors(config: ModelConfig, seed: int = 1) -> Tensors:
    """`random_tensors` with all bits of fp16: bf16 cannot hold them, so storing them so gives other cells."""
    rng = np.random.default_rng(seed + 1)
    return {
        name: (values * rng.uniform(0.998, 1.002, values.shape)).astype(np.float16).astype(np.float32)
        for name, values in random_tensors(config, seed).items()
    }


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, NDArray[np.float32]],
    vocabulary: Mapping[str, Any] | None = None,
    matrix_type: GGMLQuantizationType = GGMLQuantizationType.F16,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write with the gguf library; query and key rows of llama get llama.cpp's order, as its converter does."""
    arch = config.architecture
    writer = GGUFWriter(path, arch)
    numbers: dict[str, Any] = {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.context_length,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.key_length": config.head_dim,
        f"{arch}.attention.value_length": config.head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.rope.freq_base": config.rope_theta,
    }
    for key, value in {**numbers, **(vocabulary or byte_vocabulary()), **(metadata or {})}.items():
        _add_value(writer, key, value)
    for name, values in tensors.items():
        stored = _llama_cpp_rows(name, values, config) if arch == "llama" else values
        kind = GGMLQuantizationType.F32 if values.ndim == 1 else matrix_type
        writer.add_tensor(name, quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_safetensors(
    directory: Path, config: ModelConfig, tensors: Mapping[str, NDArray[np.float32]], dtype: str = "float16"
) -> Path:
    """Write model.safetensors with the safetensors library, and config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {safetensors_name(name): values.astype(dtype) for name, values in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config_json(config)))
    return directory


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a configuration."""
    classes = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    return {
        "architectures": [classes[config.architecture]],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
    }


def write_tokenizer_files(directory: Path, vocabulary: Mapping[str, Any], **config: Any) -> Path:
    """Write the vocabulary of `byte_vocabulary` as tokenizer.json and tokenizer_config.json, as HF files lay it out.

    config: entries of tokenizer_config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json(vocabulary)), "utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def tokenizer_json(vocabulary: Mapping[str, Any]) -> dict[str, Any]:
    """Written out independently of workers.prompt: patterns as in the published tokenizer.json files."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    rest = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    pre = vocabulary["tokenizer.ggml.pre"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    steps: dict[str, list[dict[str, Any]]] = {
        "qwen2": [_split(words + r"\p{N}" + rest), byte_level],
        "llama-bpe": [_split(words + r"\p{N}{1,3}" + rest), byte_level],
        "smollm": [{"type": "Digits", "individual_digits": True}, {**byte_level, "use_regex": True}],
    }
    tokens, kinds = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.token_type"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": index, "content": tokens[index], "special": kind == TokenType.CONTROL, **flags}
        for index, kind in enumerate(kinds)
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    model = {
        "type": "BPE",
        # SmolLM2 keeps its control tokens in the vocabulary as well, the others only among the added ones.
        "vocab": {
            token: index for index, token in enumerate(tokens) if kinds[index] == TokenType.NORMAL or pre == "smollm"
        },
        "merges": vocabulary["tokenizer.ggml.merges"],
        "ignore_merges": pre == "llama-bpe",
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps[pre]},
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _llama_cpp_rows(name: str, values: NDArray[np.float32], config: ModelConfig) -> NDArray[np.float32]:
    """llama.cpp's convert_hf_to_gguf: the two halves of each head interleaved."""
    num_heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
    if num_heads is None:
        return values
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))


def _add_value(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
