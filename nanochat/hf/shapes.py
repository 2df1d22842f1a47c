"""
The shapes of well-known models, for planning memory and for rehearsals with random weights. Figures from the models'
public config.json.
"""
from nanochat.hf.decoder import DecoderConfig

LLAMA31 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192}
# name: architecture, context, vocabulary, layers, heads, key/value heads, width, head size, MLP width, tied,
# rope_theta, rotary scaling
SHAPES = {
    "qwen2.5-0.5b": ("qwen2", 32768, 151936, 24, 14, 2, 896, 64, 4864, True, 1e6, None),
    "qwen2.5-1.5b": ("qwen2", 131072, 151936, 28, 12, 2, 1536, 128, 8960, True, 1e6, None),
    "qwen2.5-math-1.5b": ("qwen2", 4096, 151936, 28, 12, 2, 1536, 128, 8960, True, 1e4, None),
    "qwen2.5-3b": ("qwen2", 32768, 151936, 36, 16, 2, 2048, 128, 11008, True, 1e6, None),
    "qwen2.5-7b": ("qwen2", 131072, 152064, 28, 28, 4, 3584, 128, 18944, False, 1e6, None),
    "qwen2.5-math-7b": ("qwen2", 4096, 152064, 28, 28, 4, 3584, 128, 18944, False, 1e4, None),
    "qwen3-0.6b": ("qwen3", 40960, 151936, 28, 16, 8, 1024, 128, 3072, True, 1e6, None),
    "qwen3-1.7b": ("qwen3", 40960, 151936, 28, 16, 8, 2048, 128, 6144, True, 1e6, None),
    "qwen3-4b": ("qwen3", 40960, 151936, 36, 32, 8, 2560, 128, 9728, True, 1e6, None),
    "qwen3-8b": ("qwen3", 40960, 151936, 36, 32, 8, 4096, 128, 12288, False, 1e6, None),
    "smollm2-135m": ("llama", 8192, 49152, 30, 9, 3, 576, 64, 1536, True, 1e5, None),
    "smollm2-360m": ("llama", 8192, 49152, 32, 15, 5, 960, 64, 2560, True, 1e5, None),
    "llama-2-7b": ("llama", 4096, 32000, 32, 32, 32, 4096, 128, 11008, False, 1e4, None),
    "llama-3.2-1b": ("llama", 131072, 128256, 16, 32, 8, 2048, 64, 8192, True, 5e5, {**LLAMA31, "factor": 32.0}),
    "llama-3.2-3b": ("llama", 131072, 128256, 28, 24, 8, 3072, 128, 8192, True, 5e5, {**LLAMA31, "factor": 32.0}),
    "llama-3.1-8b": ("llama", 131072, 128256, 32, 32, 8, 4096, 128, 14336, False, 5e5, {**LLAMA31, "factor": 8.0}),
}


def shape_of(name: str) -> DecoderConfig:
    """The configuration of a model of SHAPES."""
    kind, context, vocab_size, layers, heads, kv_heads, width, head_dim, mlp, tied, theta, scaling = SHAPES[name]
    eps = 1e-5 if kind == "llama" else 1e-6
    return DecoderConfig(kind, context, vocab_size, layers, heads, kv_heads, width, head_dim, mlp, eps, theta, scaling,
                         qkv_bias=kind == "qwen2", out_bias=False, mlp_bias=False, qk_norm=kind == "qwen3", tied=tied)
