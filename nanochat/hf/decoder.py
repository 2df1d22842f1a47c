"""
The decoder of Llama 2/3, Qwen2/2.5 and Qwen3: Hugging Face's parameter names, after the same trunk and head as the
nanochat GPT.

Pre-norm blocks of RMSNorm, grouped-query attention with rotary positions and a gated MLP. What the families differ in
is data: biases, norms of queries and keys, tied embeddings, rotary scaling (DecoderConfig).
"""
import contextlib
import math
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from nanochat import gpt

from nanochat.attention import KVCache, Packing, extend, make_mask
from nanochat.decode_cache import DecodeCache
from nanochat.decode_step import DecoderStep
from nanochat.gpt import GPT, at, at_ends, attend_all, columns_of, last_tokens, run_passes, tokens_asked_for
from nanochat.kernels import tiles
from nanochat.kernels.block import split_heads
from nanochat.kernels.ops import add_norm, linear, norm, rotate, swiglu, takes_block, to_units


@dataclass
class DecoderConfig:
    """The model's shape. rope_scaling: None, or Hugging Face's parameters with their "rope_type"."""
    architecture: str  # llama, qwen2 or qwen3
    sequence_len: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_kv_head: int
    n_embd: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict | None
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool

    def asdict(self) -> dict:
        return asdict(self)


# Rotary frequencies: a config -> (frequencies (D/2,) fp32 on CPU, factor on cos and sin). Formulas as in transformers'
# modeling_rope_utils.

def plain_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    channel = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    return 1.0 / config.rope_theta ** (channel / config.head_dim), 1.0


def linear_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    """Positions divided by a factor (Chen et al. 2023)."""
    return plain_frequencies(config)[0] / config.rope_scaling["factor"], 1.0


def llama3_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    """Low frequencies divided by a factor, high ones kept, those between blended (Llama 3.1)."""
    given, frequencies = config.rope_scaling, plain_frequencies(config)[0]
    turns = given["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # over the original context
    blend = (turns - given["low_freq_factor"]) / (given["high_freq_factor"] - given["low_freq_factor"])
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / given["factor"] + blend * frequencies, 1.0


def yarn_frequencies(config: DecoderConfig) -> tuple[torch.Tensor, float]:
    """As llama3's, with a ramp over channels, and a temperature through cos and sin (Peng et al. 2023)."""
    given, dim = config.rope_scaling, config.head_dim
    original = given.get("original_max_position_embeddings") or config.sequence_len
    channel_of = lambda turns: dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))
    low, high = channel_of(given.get("beta_fast") or 32), channel_of(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    frequencies = plain_frequencies(config)[0]
    scale_of = lambda m: 0.1 * m * math.log(given["factor"]) + 1 if given["factor"] > 1 else 1.0
    factor = given.get("attention_factor")
    if factor is None:
        m, m_all = given.get("mscale"), given.get("mscale_all_dim")
        factor = scale_of(m) / scale_of(m_all) if m and m_all else scale_of(1)
    return frequencies / given["factor"] * ramp + frequencies * (1 - ramp), factor


ROPE = {"default": plain_frequencies, "linear": linear_frequencies, "llama3": llama3_frequencies,
        "yarn": yarn_frequencies}


class Linear(gpt.Linear):
    """Where it is narrow, on CPU the product's operands are rounded to bf16 and all else is fp32 (kernels.tiles)."""
    is_narrow, panels = False, None  # panels: of a model that samples (Decoder.joined_projections)

    def forward(self, x):
        if not (self.is_narrow and x.device.type == "cpu" and x.dtype == torch.float32):
            return super().forward(x)
        y = tiles.linear(x, self.weight) if self.panels is None else tiles.product(x, self.panels)
        return y if self.bias is None else y + tiles.rounded(self.bias)


class Norm(nn.Module):
    """RMSNorm with a learned scale."""
    is_narrow = False  # as Linear's

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return norm(x, self.scale(x), self.eps)

    def scale(self, x):
        """The weight, in x's dtype."""
        return tiles.rounded(self.weight) if self.is_narrow and x.dtype == torch.float32 else self.weight.to(x.dtype)

    def after_adding(self, x, delta):
        """x + delta (None: x), and its norm."""
        return (x, self(x)) if delta is None else add_norm(x, delta, self.scale(x), self.eps)


def join(layers: list[Linear]) -> torch.Tensor:
    """Lays the weights of layers that read the same input side by side, so that one product serves all. -> the joined
    weight, of which the layers' own become views"""
    weight = torch.cat([layer.weight for layer in layers])
    for layer, part in zip(layers, weight.split([len(layer.weight) for layer in layers]), strict=True):
        layer.weight = nn.Parameter(part, requires_grad=False)
    return weight


class Attention(nn.Module):
    qkv = None  # of a model to sample from: the weights of its projections in one (Decoder.join_weights)

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.n_kv_head, config.head_dim
        self.q_proj = Linear(config.n_embd, config.n_head * config.head_dim, bias=config.qkv_bias)
        self.k_proj = Linear(config.n_embd, config.n_kv_head * config.head_dim, bias=config.qkv_bias)
        self.v_proj = Linear(config.n_embd, config.n_kv_head * config.head_dim, bias=config.qkv_bias)
        self.o_proj = Linear(config.n_head * config.head_dim, config.n_embd, bias=config.out_bias)
        if config.qk_norm:
            self.q_norm, self.k_norm = Norm(config.head_dim, config.norm_eps), Norm(config.head_dim, config.norm_eps)

    def heads(self, x, cos_sin, units: int, into: tuple | None = None, packing: Packing | None = None):
        """x (B, T, C), or packed (1, M, C) -> q (U, Hkv, R, group, T, D), k and v (U, Hkv, R, T, D), as attention wants
        them."""
        if takes_block(x) and packing is None:
            return self.heads_in_one(x, cos_sin, units, into)
        apart = lambda y: y.unflatten(-1, (-1, self.head_dim))  # (B, T, heads, D)
        q, k, v = apart(self.q_proj(x)), apart(self.k_proj(x)), apart(self.v_proj(x))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, *cos_sin), rotate(k, *cos_sin)
        if packing is not None:
            q, k, v = map(packing.unpack, (q, k, v))
        q, k, v = (to_units(part, units, self.n_kv_head) for part in (q, k, v))
        return q.contiguous(), k[:, :, :, 0].contiguous(), v[:, :, :, 0].contiguous()

    def heads_in_one(self, x, cos_sin, units: int, into: tuple | None = None):
        """The same on CUDA without gradients: biases, norms, rotation and layout in one launch after the products."""
        cast = lambda *weights: [weight.to(x.dtype) for weight in weights]
        layers = self.q_proj, self.k_proj, self.v_proj
        parts = ([linear(x, *cast(layer.weight)) for layer in layers] if self.qkv is None
                 else linear(x, self.qkv).split([len(layer.weight) for layer in layers], dim=-1))
        options = {} if layers[0].bias is None else dict(biases=cast(*(layer.bias for layer in layers)))
        if hasattr(self, "q_norm"):
            options |= dict(norm="before", weights=cast(self.q_norm.weight, self.k_norm.weight),
                            epsilon=self.q_norm.eps)
        return split_heads(*parts, *cos_sin, units, self.n_kv_head, into=into, **options)

    def forward(self, x, cos_sin, mask, cache, prefix, ends, packing):
        B = len(x) if packing is None else packing.B
        units = B if prefix.cache is None else len(prefix.cache.positions)
        q, k, v = self.heads(x, cos_sin, units, columns_of(cache.layer, cache.cache), packing)
        y = attend_all(cache.layer, cache.once(), q, k, v, mask, prefix.shared(), ends)  # (U, Hkv, R, group, T, D)
        y = y.permute(0, 2, 4, 1, 3, 5).reshape(B, -1, self.n_head * self.head_dim)
        return self.o_proj(y if packing is None or ends is not None else packing.pack(y))


class MLP(nn.Module):
    gate_and_up = None  # of a model to sample from: the weights of both in one (Decoder.join_weights)

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate_proj = Linear(config.n_embd, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = Linear(config.n_embd, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.n_embd, bias=config.mlp_bias)

    def forward(self, x):
        gate, up = (self.gate_proj(x), self.up_proj(x)) if self.gate_and_up is None else linear(
            x, self.gate_and_up).chunk(2, dim=-1)
        return self.down_proj(swiglu(gate, up))


class BlockInput(NamedTuple):
    """What a block reads in a forward pass of B rows of T tokens."""
    x: torch.Tensor              # (B, T, C), or packed (1, M, C)
    delta: torch.Tensor | None   # what is yet to be added to x
    cos_sin: tuple
    mask: object                 # attention.make_mask; of a DecodeCache the context
    cache: "LayerCache"
    prefix: "LayerCache"
    ends: torch.Tensor | None    # (B,): after attention the rows' last tokens alone go on
    places: torch.Tensor | None  # the tokens that are asked for (tiles.before_attention)
    packing: Packing | None      # how these alone are packed, where kernels of layers do not see to it


class Block(nn.Module):
    recompute = False  # in the backward pass, instead of keeping activations
    ready = None       # of a model that samples: what `layer` gives (Decoder.joined_projections)

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(config.n_embd, config.norm_eps), Attention(config)
        self.post_attention_layernorm, self.mlp = Norm(config.n_embd, config.norm_eps), MLP(config)

    def forward(self, *passes):
        """The block's outputs for the BlockInput of each pass: x, and what is yet to be added to it or None."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.run_all, *passes, use_reentrant=False, preserve_rng_state=False)
        return self.run_all(*passes)

    def run_all(self, *passes):
        layer = self.ready or self.layer(passes[0].x)
        if layer is None:
            return [self.run(one) for one in passes]
        outputs = [self.run_narrow(layer, one) for one in passes]
        if self.ready is None:
            layer.drop_forward()
        return outputs

    def layer(self, x) -> tiles.Layer | None:
        """The weights as kernels want them, where products are in bf16 and all else is in fp32; None where it is not
        so, or they do not take the shape."""
        attn, mlp = self.self_attn, self.mlp
        projections = attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        takes = (attn.q_proj.is_narrow and x.device.type == "cpu" and x.dtype == torch.float32
                 and not hasattr(attn, "q_norm") and attn.o_proj.bias is None and mlp.up_proj.bias is None
                 and tiles.takes(attn.head_dim, *(n for projection in projections for n in projection.weight.shape)))
        if not takes:
            return None
        weights, biases = ([getattr(projection, name) for projection in projections] for name in ("weight", "bias"))
        first, second = self.input_layernorm, self.post_attention_layernorm
        return tiles.Layer(weights[:3], weights[3:], (first.weight, second.weight),
                           None if biases[0] is None else torch.cat(biases[:3]), first.eps)

    def run_narrow(self, layer, given: BlockInput) -> tuple[torch.Tensor, None]:
        """As run, by kernels of a layer, of the tokens alone that are asked for."""
        x, _, cos_sin, mask, cache, prefix, ends, places, _ = given
        attn, units = self.self_attn, len(x) if prefix.cache is None else len(prefix.cache.positions)
        q, k, v = tiles.before_attention(layer, x, cos_sin, units, attn.n_head, attn.n_kv_head, places)
        y = attend_all(cache.layer, cache.once(), to_units(q, units, attn.n_kv_head), k, v, mask, prefix.shared(), ends)
        x, places = (x, places) if ends is None else (at_ends(x, ends), None)
        return tiles.after_attention(layer, x, y.permute(0, 2, 4, 1, 3, 5).reshape(*x.shape[:2], -1), places), None

    def run(self, given: BlockInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """On CUDA without gradients the last addition is one launch with the norm that follows."""
        x, delta, cos_sin, mask, cache, prefix, ends, _, packing = given
        x, normed = self.input_layernorm.after_adding(x, delta)
        y = self.self_attn(normed, cos_sin, mask, cache, prefix, ends, packing)
        if ends is not None:
            x = at_ends(x if packing is None else packing.unpack(x), ends)
        x, normed = self.post_attention_layernorm.after_adding(x, y)
        y = self.mlp(normed)
        return (x, y) if takes_block(x) else (x + y, None)


class Decoder(nn.Module):
    """The model. compute_dtype: of products; activation_dtype: of what lies between. Parameters stay as they are."""

    def __init__(self, config: DecoderConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        # Kept from the first forward on: a CUDA graph can capture no copy from the host.
        self.frequencies, self.rope_factor = None, 1.0
        self.vocab_size, self.windows = config.vocab_size, [config.sequence_len] * config.n_layer
        self.model = nn.ModuleDict({
            "embed_tokens": gpt.Embedding(config.vocab_size, config.n_embd),
            "layers": nn.ModuleList([Block(config) for _ in range(config.n_layer)]),
            "norm": Norm(config.n_embd, config.norm_eps),
        })
        self.lm_head = Linear(config.n_embd, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, Linear | Norm):
                module.is_narrow = compute_dtype == torch.bfloat16
        if config.tied:
            self.tie()

    @property
    def activation_dtype(self) -> torch.dtype:
        """What hidden states, keys and values have: on CPU fp32 where products are in bf16."""
        is_wide = self.compute_dtype == torch.bfloat16 and self.lm_head.weight.device.type == "cpu"
        return torch.float32 if is_wide else self.compute_dtype

    def tie(self) -> None:
        """Makes the head's weight be the embedding's."""
        self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Random weights, for tests and rehearsals: normal with this standard deviation, scales 1, biases 0."""
        for name, p in self.named_parameters():
            if name.endswith("norm.weight"):
                p.fill_(1.0)
            elif name.endswith("bias"):
                p.zero_()
            else:
                p.normal_(0.0, std, generator=generator)

    @contextlib.contextmanager
    def joined_projections(self):
        """While it lasts, kernels on CPU keep the weights in panels: for many forwards with the same weights. On CUDA
        copies to sample from have joined weights (join_weights)."""
        layers = [block.layer(self.lm_head.weight.new_empty(0, dtype=self.activation_dtype)) for block in self.blocks]
        assert all(block.ready is None for block in self.blocks), "one call at a time"
        try:
            if layers and layers[0] is not None and tiles.takes(self.vocab_size):
                self.lm_head.panels = tiles.packed(self.lm_head.weight)
                for block, layer in zip(self.blocks, layers, strict=True):
                    block.ready = layer
            yield
        finally:
            self.lm_head.panels = None
            for block in self.blocks:
                block.ready = None

    @torch.no_grad()
    def join_weights(self) -> None:
        """For a copy to sample from on CUDA: queries, keys and values become one product, and so do the two of the MLP.
        Parameters stay, as views."""
        for block in self.blocks:
            attention, mlp = block.self_attn, block.mlp
            attention.qkv = join([attention.q_proj, attention.k_proj, attention.v_proj])
            if mlp.gate_proj.bias is None:
                mlp.gate_and_up = join([mlp.gate_proj, mlp.up_proj])

    def rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions (B, T) -> cos, sin (B, T, 1, D/2) for `rotate`, which turns by minus the angle, these by plus."""
        if self.frequencies is None or self.frequencies.device != positions.device:
            kind = (self.config.rope_scaling or {}).get("rope_type", "default")
            frequencies, self.rope_factor = ROPE[kind](self.config)
            self.frequencies = frequencies.to(positions.device)
        angles = positions[:, :, None, None].float() * self.frequencies
        cos, sin = angles.cos() * self.rope_factor, -angles.sin() * self.rope_factor
        return cos.to(self.activation_dtype), sin.to(self.activation_dtype)

    def trunk(self, ids, *, positions=None, cache: KVCache | DecodeCache | None = None, prefix: KVCache | None = None,
              last_only: bool = False, kept: torch.Tensor | None = None):
        """Hidden states of tokens, after the final norm: arguments and result as GPT.trunk's."""
        if isinstance(cache, DecodeCache) and kept is None and cache.by_kernel and self.blocks[0].ready is not None:
            if cache.step is None:
                cos_sin = self.rotary(torch.arange(cache.num_columns, device=ids.device)[None])
                cache.step = DecoderStep(self, cache, cos_sin)
            return cache.step(cache, ids, positions)
        return run_passes(self.blocks, [self.forward_pass(ids, positions, cache, prefix, last_only, kept)])[0]

    trunk_after = GPT.trunk_after

    def forward_pass(self, ids, positions, cache, prefix, last_only: bool, kept=None, lengths=None) -> "ForwardPass":
        """A pass with trunk's arguments, and trunk_after's lengths."""
        return ForwardPass(self, ids, positions, cache, prefix, last_only, kept, lengths)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, fp32. hidden (..., C) -> (..., V)."""
        return self.lm_head(hidden).float()

    def head_options(self, temperature: float = 1.0) -> dict:
        """What a fused LM-head op must know of this head."""
        narrow = {} if self.activation_dtype == self.compute_dtype else {"narrow": True}
        return dict(vocab_size=self.vocab_size, softcap=None, temperature=temperature) | narrow

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of a plain causal pass. ids (B, T) -> (B, T, V) fp32."""
        return self.head(self.trunk(ids))


class ForwardPass:
    """A pass of tokens through a Decoder, as gpt.ForwardPass. lengths (B,): the first tokens of each row are asked for
    alone. Others go through attention at most, but where prompts are run to sample."""

    def __init__(self, model: Decoder, ids, positions, cache: KVCache | DecodeCache | None, prefix: KVCache | None,
                 last_only: bool, kept: torch.Tensor | None = None, lengths: torch.Tensor | None = None):
        assert not last_only or cache is not None and cache.length == 0
        (B, T), by_layers = ids.shape, model.lm_head.is_narrow and ids.device.type == "cpu"
        packs = by_layers or torch.is_grad_enabled() or lengths is not None  # kernels of sampling on CUDA do not
        self.places = tokens_asked_for(ids.shape, positions, cache, kept, lengths) if packs else None
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand(B, T)
        self.model, self.cache, self.prefix, self.kept = model, cache, prefix, kept
        self.x = model.model.embed_tokens(ids).to(model.compute_dtype).to(model.activation_dtype)  # (B, T, C)
        self.delta = None
        context, decoding = model.config.sequence_len, isinstance(cache, DecodeCache)
        if cache is not None and not decoding:
            cache.last_embedding = self.x.new_zeros(B, 1, 0)  # only a GPT's smear looks back
            if cache.length == 0:
                cache.positions = positions
        self.cos_sin = cache.rotary(positions, model.rotary) if decoding else model.rotary(positions)
        self.mask = context if decoding else make_mask(T, context, context, cache, prefix, positions, self.x.dtype)
        self.ends, self.packing = None, None
        if self.places is not None and not by_layers:
            self.packing = Packing(self.places, B, T)
            self.x, *self.cos_sin = map(self.packing.pack, (self.x, *self.cos_sin))
        if cache is not None and not decoding:
            cache.length += T
        if last_only and T > 1:
            self.ends = last_tokens(positions)
            self.last_mask = make_mask(1, context, context, None, cache, at_ends(positions, self.ends), self.x.dtype)

    def block_input(self, i: int) -> BlockInput:
        """What block i reads. The last one's tokens are those alone that are asked for."""
        is_short = self.ends is not None and i == self.model.config.n_layer - 1
        mask, ends = (self.last_mask, self.ends) if is_short else (self.mask, None)
        return BlockInput(self.x, self.delta, self.cos_sin, mask, LayerCache(self.cache, i), LayerCache(self.prefix, i),
                          ends, self.places, self.packing)

    def take(self, i: int, output: tuple) -> None:
        self.x, self.delta = output

    def result(self) -> torch.Tensor:
        """Hidden states after the final norm."""
        x, delta = self.x, self.delta
        if self.packing is None or self.ends is not None:
            x, delta = (None if y is None else at(y, None, self.kept) for y in (x, delta))
            return self.model.model.norm.after_adding(x, delta)[1]
        return at(self.packing.unpack(self.model.model.norm.after_adding(x, delta)[1]), None, self.kept)


class LayerCache:
    """A layer's part of a cache, or of none. It knows the layer's number for a DecodeCache alone: where it did in
    training, torch.compile would compile each layer anew, and stop at the eighth."""

    def __init__(self, cache: KVCache | DecodeCache | None, layer: int):
        self.cache, self.layer, self.kv, self.called = cache, None, None, False
        if isinstance(cache, DecodeCache):
            self.layer = layer
        elif cache is not None:
            self.kv = cache.kv[layer]

    def once(self):
        """Where the block puts its keys and values: a DecodeCache, None, or this."""
        return self.cache if self.cache is None or isinstance(self.cache, DecodeCache) else self

    def append(self, _, k, v):
        """Stores new keys and values (U, Hkv, R, T, D); gives those of all columns. As KVCache.append, without its
        layer."""
        if self.called:  # the block is run once more for its backward pass
            return k, v
        self.called = True
        return extend(self.kv, k, v)

    def shared(self) -> tuple:
        """Keys and values (U, Hkv, T, D) of a prefix; empty without one."""
        return () if self.cache is None else tuple(x[:, :, 0] for x in self.kv)
