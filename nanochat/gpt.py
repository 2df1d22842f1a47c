"""
The nanochat GPT: upstream's mathematics and parameter names, so that its checkpoints load.

RMSNorm without parameters, rotary positions with q/k norm, grouped key/value heads, relu^2 MLP, untied embedding and
head, value embeddings on alternating layers, smear (a little of the previous token's embedding), per-layer mixing of
the first embedding, backout (the middle layer's output is taken off at the end), softcapped logits.

`trunk` gives hidden states and `head` logits, apart, so that a fused loss can stand in for the head.
"""
import contextlib
import functools
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.nn as nn

from nanochat.attention import PADDING_POSITION, KVCache, Packing, attend, columns_up_to, first_columns, make_mask
from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.decode_cache import DecodeCache
from nanochat.decode_step import DecodeStep
from nanochat.kernels.layer import LEAST_ROWS, after_attention, before_attention, fuses_layers, packed_layer
from nanochat.kernels.ops import add_norm, linear, mix_norm, norm, relu_squared, smear, split_heads, value_gate

SMEAR_CHANNELS = 24   # channels of the embedding that the smear gate reads
VALUE_CHANNELS = 12   # channels of the block input that the value-embedding gate reads
ROTARY_BASE = 100000
MOST_LAYERS = 1000    # beyond them there is no model, and making the layers would fill the memory
QK_SCALE = 1.2        # on q and on k after their norm
NARROW = 512          # width up to which few rows decode in one call: faster at 384, slower at 768 (dev/BENCH.md)


@dataclass
class GPTConfig:
    """The model's shape; exactly upstream's `model_config`."""
    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    def asdict(self) -> dict:
        return asdict(self)


class Linear(nn.Linear):
    """A linear layer whose master weight is cast to the activation's dtype."""

    def forward(self, x):
        y = linear(x, self.weight.to(x.dtype))
        return y if self.bias is None else y + self.bias.to(x.dtype)


class Embedding(nn.Embedding):
    """An embedding that draws no weights where it has no memory: torch would import its compiler to do so, 2 s."""

    def reset_parameters(self):
        if not self.weight.is_meta:
            super().reset_parameters()


def rotary(positions: torch.Tensor, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin of the rotary angles. positions (B, T) -> two of (B, T, 1, D/2)."""
    channel = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, :, None, None].float() * ROTARY_BASE ** (-channel / head_dim)  # (B, T, 1, D/2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def check_layers(name: str, num_layers: int) -> None:
    """Raises ValueError for more than MOST_LAYERS. name: what a file calls their number."""
    if num_layers > MOST_LAYERS:
        raise ValueError(f"{name} is {num_layers}, and {MOST_LAYERS} are the most")


def has_value_embedding(layer: int, n_layer: int) -> bool:
    return layer % 2 == (n_layer - 1) % 2


def run_passes(blocks, passes: list) -> list[torch.Tensor]:
    """Runs forward passes together, block by block, so that a block's weights are gathered once for all of them."""
    for i, block in enumerate(blocks):
        for one, output in zip(passes, block(*(one.block_input(i) for one in passes)), strict=True):
            one.take(i, output)
    return [one.result() for one in passes]


def at_ends(x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The column `ends` (B,) of each row of x (B, T, ...) -> (B, 1, ...)."""
    return x[torch.arange(len(x), device=x.device), ends].unsqueeze(1)


def last_tokens(positions: torch.Tensor) -> torch.Tensor:
    """The place of the last real token of each row; padding (PADDING_POSITION) stands after it. (B, T) -> (B,)"""
    return (positions < PADDING_POSITION).sum(dim=1) - 1


def at(x: torch.Tensor, ends: torch.Tensor | None, kept: torch.Tensor | None) -> torch.Tensor:
    """The tokens of x (B, T, C) that are asked for: one of each row (B, 1, C), some of all (M, C), or all."""
    return at_ends(x, ends) if ends is not None else x if kept is None else x.flatten(0, 1).index_select(0, kept)


def attend_all(layer: int, cache: DecodeCache | KVCache | None, q, k, v, mask, prefix: tuple, ends):
    """attention.attend over what came before and over the queries' own keys, which are put into the cache, if there is
    one. mask: of a DecodeCache the window; prefix: its keys and values, or nothing; ends (B,): one query per row, which
    stands there, after all keys."""
    if isinstance(cache, DecodeCache):
        return cache.attend(layer, q, k, v, mask)
    if cache is not None:
        k, v = cache.append(layer, k, v)
    if ends is not None:
        q = at_ends(q.permute(0, 4, 1, 2, 3, 5), ends).permute(0, 2, 3, 4, 1, 5)
        k, v, prefix = k[..., :0, :], v[..., :0, :], (k[:, :, 0], v[:, :, 0])
    return attend(q, k, v, mask, *prefix)


def columns_of(layer: int, cache: DecodeCache | KVCache | None) -> tuple | None:
    """Where a kernel may store the keys and values of new tokens (DecodeCache.columns), which attend_all then is not
    given."""
    return cache.columns(layer) if isinstance(cache, DecodeCache) else None


def tokens_asked_for(shape, positions, cache, kept, lengths) -> torch.Tensor | None:
    """The places (M,) of the B * T tokens (shape) that need to be run, of a forward pass with trunk's arguments and
    trunk_after's lengths; None for all of them."""
    if isinstance(cache, DecodeCache) or torch.compiler.is_compiling() or positions is kept is lengths is None:
        return None
    if kept is not None and cache is None:
        lengths = columns_up_to(kept, *shape)
    return first_columns((positions < PADDING_POSITION).sum(dim=1) if lengths is None else lengths, shape[1])


class BlockInput(NamedTuple):
    """What a block reads in a forward pass of B rows of T tokens."""
    x: torch.Tensor                       # (B, T, C), or packed (1, M, C)
    delta: torch.Tensor | None            # what is yet to be added to x
    x0: torch.Tensor                      # the first embedding, likewise ...
    lambdas: tuple                        # ... and the weights of x and of it
    value_embedding: torch.Tensor | None  # (B, T, Hkv * D)
    cos_sin: tuple
    mask: object                          # attention.make_mask; of a DecodeCache the window
    cache: KVCache | DecodeCache | None   # where keys and values are kept
    prefix: KVCache | None                # of the prompts that the rows continue
    ends: torch.Tensor | None             # (B,): after attention the rows' last tokens alone go on, or ...
    kept: torch.Tensor | None             # ... (M,) of the B * T places
    packing: Packing | None               # how the tokens that are asked for are packed


class Attention(nn.Module):
    c_qkv = None  # while sampling, the weights of c_q, c_k and c_v in one (GPT.joined_projections)

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer, self.n_head, self.n_kv_head = layer, config.n_head, config.n_kv_head
        self.c_q = Linear(config.n_embd, config.n_head * config.head_dim, bias=False)
        self.c_k, self.c_v = (Linear(config.n_embd, config.n_kv_head * config.head_dim, bias=False) for _ in range(2))
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=False)
        if has_value_embedding(layer, config.n_layer):
            self.ve_gate = Linear(VALUE_CHANNELS, self.n_kv_head, bias=False)

    def joined_weight(self) -> torch.Tensor:
        return torch.cat([self.c_q.weight, self.c_k.weight, self.c_v.weight])

    def heads(self, x, value_embedding, cos_sin, units: int, into: tuple | None, packing: Packing | None):
        """Queries, keys and values of normed x, as `split_heads` has them."""
        if self.c_qkv is not None:
            qkv = linear(x, self.c_qkv)
        elif x.device.type == "cpu":  # one product of three: fewer operations are worth the copy of small weights
            qkv = linear(x, self.joined_weight().to(x.dtype))
        else:
            qkv = torch.cat([layer(x) for layer in (self.c_q, self.c_k, self.c_v)], dim=-1)
        gate = None if value_embedding is None else value_gate(x, self.ve_gate.weight.to(x.dtype))  # (B, T, Hkv)
        if packing is not None:
            qkv, gate = packing.unpack(qkv), None if gate is None else packing.unpack(gate)
        return split_heads(qkv, cos_sin, gate, value_embedding, QK_SCALE, units, self.n_head, self.n_kv_head, into)

    def read(self, q, k, v, mask, cache, prefix, ends):
        """What attention reads for each token, or each row's last one (ends): before the projection (B, T or 1, C)."""
        shared = () if prefix is None else (prefix.k[self.layer].squeeze(2), prefix.v[self.layer].squeeze(2))
        y = attend_all(self.layer, cache, q, k, v, mask, shared, ends)          # (U, Hkv, R, group, T, D)
        U, Hkv, R, group, T, D = y.shape
        return y.permute(0, 2, 4, 1, 3, 5).reshape(U * R, T, Hkv * group * D)


class MLP(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(relu_squared(self.c_fc(x)))


class Block(nn.Module):
    ready = None  # while sampling, () and then what `packed` gives (GPT.joined_projections)

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn = Attention(config, layer)
        self.mlp = MLP(config)

    def forward(self, *passes):
        """The block's outputs, those of `run` for the BlockInput of each pass."""
        return [self.run(one) for one in passes]

    def weights(self, dtype: torch.dtype) -> tuple[list, list]:
        """Those that act before attention, and those after it."""
        attn, mlp = self.attn, self.mlp
        return tuple([layer.weight.to(dtype) for layer in layers]
                     for layers in ((attn.c_q, attn.c_k, attn.c_v), (attn.c_proj, mlp.c_fc, mlp.c_proj)))

    def packed(self, dtype: torch.dtype) -> tuple | None:
        """While sampling, the weights as kernels of a layer read them, packed when first asked for; else, and for
        weights that these do not take, None."""
        if self.ready == ():
            self.ready = packed_layer(*self.weights(dtype))
        return self.ready

    def run(self, given: BlockInput) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x, and what is yet to be added to it or None: the addition is one operation with what follows."""
        x, delta, x0, lambdas, value_embedding, cos_sin, mask, cache, prefix, ends, kept, packing = given
        attn, mlp = self.attn, self.mlp
        units = len(prefix.positions) if prefix is not None else len(x) if packing is None else packing.B
        if fuses_layers(x):
            gate_weight = None if value_embedding is None else attn.ve_gate.weight.to(x.dtype)
            ready_before, ready_after = self.packed(x.dtype) or (None, None)
            before, after = self.weights(x.dtype)
            x, *heads = before_attention(x, x0, *lambdas, *before, gate_weight, value_embedding, cos_sin, QK_SCALE,
                                         units, ready_before)
            y = attn.read(*heads, mask, cache, prefix, ends)
            return after_attention(at(x, ends, kept), at(y, None, kept), *after, ready_after), None
        x, normed = mix_norm(x, delta, x0, *lambdas)
        heads = attn.heads(normed, value_embedding, cos_sin, units, columns_of(attn.layer, cache), packing)
        y = attn.read(*heads, mask, cache, prefix, ends)
        if packing is not None and ends is None and kept is None:
            y = packing.pack(y)
        elif packing is not None:
            x = packing.unpack(x)
        x, normed = add_norm(at(x, ends, kept), attn.c_proj(at(y, None, kept)))
        return x, mlp(normed)


class ForwardPass:
    """A pass of tokens through a GPT, block by block, with trunk's arguments and trunk_after's lengths. Caches get
    positions and length first."""

    def __init__(self, model: "GPT", ids, positions, cache: KVCache | DecodeCache | None, prefix: KVCache | None,
                 last_only: bool, kept: torch.Tensor | None = None, lengths: torch.Tensor | None = None):
        assert not last_only or cache is not None and cache.length == 0
        (B, T), packs = ids.shape, torch.is_grad_enabled() or lengths is not None  # kernels of sampling do not
        places = tokens_asked_for(ids.shape, positions, cache, kept, lengths) if packs else None
        if positions is None:
            positions = torch.arange(T, device=ids.device).expand(B, T)
        self.model, self.ids, self.cache, self.prefix, self.kept = model, ids, cache, prefix, kept
        self.x, self.ends = self.embed(positions), None
        config, dtype, decoding = model.config, self.x.dtype, isinstance(cache, DecodeCache)
        angles = functools.partial(rotary, head_dim=config.head_dim, dtype=dtype)
        self.cos_sin = cache.rotary(positions, angles) if decoding else angles(positions)
        self.masks = {w: w if decoding else make_mask(T, w, config.sequence_len, cache, prefix, positions, dtype)
                      for w in set(model.windows)}
        if cache is not None and not decoding:
            cache.length += T
        if last_only and T > 1:
            self.ends = last_tokens(positions)
            self.last_mask = make_mask(1, model.windows[-1], config.sequence_len, None, cache,
                                       at_ends(positions, self.ends), dtype)
        self.packing = None if places is None or fuses_layers(self.x) else Packing(places, B, T)
        if self.packing is not None:
            self.x = self.packing.pack(self.x)
        self.x0, self.delta = self.x, None
        self.lambdas = list(zip(*(y.to(dtype).unbind() for y in (model.resid_lambdas, model.x0_lambdas)), strict=True))

    def embed(self, positions) -> torch.Tensor:
        """The embeddings, of which the first of each row is smeared by the token before it, wherever that is. Caches
        keep the last one."""
        cache, prefix, last = self.cache, self.prefix, None
        decoding = isinstance(cache, DecodeCache)
        if decoding:
            last = cache.last_embedding[cache.places]
        elif cache is not None and cache.last_embedding is not None:
            last = cache.last_embedding
        elif prefix is not None:
            assert prefix.length == prefix.positions.shape[1], "a prefix is run in one forward"
            last = prefix.last_embedding.repeat_interleave(len(self.ids) // len(prefix.positions), dim=0)
        x, unsmeared = self.model.embed(self.ids, last)
        if decoding:
            cache.last_embedding[cache.places] = unsmeared
        elif cache is not None:
            cache.last_embedding = at_ends(unsmeared, last_tokens(positions)) if x.shape[1] > 1 else unsmeared
            if cache.length == 0:
                cache.positions = positions
        return x

    def block_input(self, i: int) -> BlockInput:
        """What block i reads. The last one's tokens are those alone that are asked for."""
        model, is_last = self.model, i == self.model.config.n_layer - 1
        resid, first = (y.detach() for y in self.lambdas[i]) if i < model.frozen_layers else self.lambdas[i]
        embeds = model.value_embeds[str(i)](self.ids).to(self.x.dtype) if str(i) in model.value_embeds else None
        mask, ends = (self.last_mask, self.ends) if is_last and self.ends is not None else (
            self.masks[model.windows[i]], None)
        return BlockInput(self.x, self.delta, self.x0, (resid, first), embeds, self.cos_sin, mask, self.cache,
                          self.prefix, ends, self.kept if is_last and ends is None else None, self.packing)

    def take(self, i: int, output: tuple) -> None:
        """The outputs of block i."""
        self.x, self.delta = output
        if i == self.model.config.n_layer // 2:
            self.x, self.delta = self.x if self.delta is None else self.x + self.delta, None
            self.backout = self.x

    def result(self) -> torch.Tensor:
        """Hidden states, less those of the middle, after the final norm."""
        x, backout, packing = self.x, self.backout, self.packing
        if backout.shape != x.shape:
            backout = backout if packing is None else packing.unpack(backout)
            backout = at(backout, None if self.kept is not None else self.ends, self.kept)
        x = mix_norm(x, self.delta, backout, x.new_ones(()), -self.model.backout_lambda.to(x.dtype)[0])[1]
        return packing.unpack(x) if packing is not None and self.kept is self.ends is None else x


class GPT(nn.Module):
    """The model. `compute_dtype` is the dtype of activations; parameters stay as they are."""

    softcap = 15.0  # logits are softcap * tanh(z / softcap)
    frozen_layers = 0  # the lowest layers' scalars take no gradient (roles.share_layers)

    def __init__(self, config: GPTConfig, compute_dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config, self.compute_dtype = config, compute_dtype
        self.vocab_size = config.vocab_size
        rows = -(-config.vocab_size // 64) * 64  # padded to a multiple of 64
        kv_dim = config.n_kv_head * config.head_dim
        self.transformer = nn.ModuleDict({
            "wte": Embedding(rows, config.n_embd),
            "h": nn.ModuleList([Block(config, i) for i in range(config.n_layer)]),
        })
        self.lm_head = Linear(config.n_embd, rows, bias=False)
        self.resid_lambdas = nn.Parameter(torch.ones(config.n_layer))
        self.x0_lambdas = nn.Parameter(torch.zeros(config.n_layer))
        self.smear_gate = Linear(SMEAR_CHANNELS, 1, bias=False)
        self.smear_lambda = nn.Parameter(torch.zeros(1))
        self.backout_lambda = nn.Parameter(torch.zeros(1))
        layers = [i for i in range(config.n_layer) if has_value_embedding(i, config.n_layer)]
        self.value_embeds = nn.ModuleDict({str(i): Embedding(rows, kv_dim) for i in layers})
        if not config.window_pattern or set(config.window_pattern.upper()) - set("SL"):
            raise BadInput(f"window pattern {config.window_pattern!r}: must be made of S (short) and L (long)")
        self.windows = [self._window(i) for i in range(config.n_layer)]

    @property
    def activation_dtype(self) -> torch.dtype:
        return self.compute_dtype

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.h

    def _window(self, layer: int) -> int:
        """How many tokens back a layer sees: L all, S a quarter of the context (rounded up to 128); the last is L."""
        pattern, length = self.config.window_pattern.upper(), self.config.sequence_len
        short = pattern[layer % len(pattern)] == "S" and layer < self.config.n_layer - 1
        return -(-length // 512) * 128 if short else length

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Random weights. Output projections start at 0, so every block starts as the identity."""
        bound = 3 ** 0.5 * self.config.n_embd ** -0.5  # uniform with std 1/sqrt(C)
        for name, p in self.named_parameters():
            if name.endswith(("c_proj.weight", "ve_gate.weight", "smear_gate.weight")):
                p.zero_()
            elif name == "transformer.wte.weight":
                p.normal_(0.0, 0.8, generator=generator)
            elif name == "lm_head.weight":
                p.normal_(0.0, 0.001, generator=generator)
            elif (name.endswith((".c_q.weight", ".c_k.weight", ".c_v.weight", ".c_fc.weight"))
                  or name.startswith("value_embeds")):
                p.uniform_(-bound, bound, generator=generator)
        self.resid_lambdas.fill_(1.0)
        self.x0_lambdas.fill_(0.1)
        self.smear_lambda.zero_()
        self.backout_lambda.fill_(0.2)

    @contextlib.contextmanager
    def joined_projections(self):
        """While it lasts, queries, keys and values are one product by a copy of their weights, and the kernels of
        layers keep theirs: for many forwards with the same weights."""
        assert all(block.attn.c_qkv is None for block in self.blocks), "one call at a time"
        try:
            for block in self.blocks:
                block.attn.c_qkv, block.ready = block.attn.joined_weight().to(self.compute_dtype), ()
            yield
        finally:
            for block in self.blocks:
                vars(block.attn).pop("c_qkv", None)
                vars(block).pop("ready", None)

    def embed(self, ids, last_embedding):
        """Normed token embeddings after the smear, and the last unsmeared one. ids (B, T) -> (B, T, C), (B, 1, C)."""
        x = norm(self.transformer.wte(ids).to(self.compute_dtype))  # (B, T, C)
        return smear(x, last_embedding, self.smear_gate.weight.to(x.dtype), self.smear_lambda.to(x.dtype)), x

    def trunk(self, ids, *, positions=None, cache: KVCache | DecodeCache | None = None, prefix: KVCache | None = None,
              last_only: bool = False, kept: torch.Tensor | None = None):
        """Hidden states of tokens, after the final norm.

        ids (B, T) int64, right-padded rows allowed. positions (B, T) int64: consecutive, from 0 at the start of a row;
        PADDING_POSITION marks padding, which no later token sees. prefix: the cache of U prompts that B/U consecutive
        rows each continue. cache: where keys and values are kept; a second forward into it goes on after its columns.
        A DecodeCache takes one token of each row in its places. last_only: of prompts run into an empty cache the last
        tokens alone are asked for, for which alone the last layer does more than keys and values. That layer does not
        look at a prefix then: with one, use the cache and not what is returned. kept (M,) int64: the same of these
        places of the B * T, with or without a cache. -> (B, T, C), (B, 1, C) or (M, C), in compute_dtype.
        """
        if isinstance(cache, DecodeCache) and kept is None and self.decodes_in_one(cache, len(ids)):
            if cache.step is None or cache.step.ready is not self.blocks[0].ready:
                columns = torch.arange(cache.num_columns)[None]
                cache.step = DecodeStep(self, cache, rotary(columns, self.config.head_dim, torch.float32), QK_SCALE)
            return cache.step(cache, ids, positions)
        return run_passes(self.blocks, [self.forward_pass(ids, positions, cache, prefix, last_only, kept)])[0]

    def decodes_in_one(self, cache: DecodeCache, rows: int) -> bool:
        """Whether one kernel runs a token of each of these rows, and is faster than single operations."""
        return (cache.by_kernel and (self.config.n_embd <= NARROW or rows >= LEAST_ROWS * torch.get_num_threads())
                and self.blocks[0].packed(self.compute_dtype) is not None)

    def trunk_after(self, prompt_ids, prompt_positions, ids, positions,
                    lengths: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Hidden states of the last tokens of U prompts, and of the rows that continue them: two passes of `trunk` in
        one.

        prompt_ids, prompt_positions (U, Tp), ids and positions (B, T), all int64; lengths (B,) int64: tokens of each
        row that are asked for, its first ones; what is given of others means nothing. -> (U, 1, C), (B, T, C)
        """
        prefix = KVCache(self.config.n_layer)
        return run_passes(self.blocks, [self.forward_pass(prompt_ids, prompt_positions, prefix, None, True),
                                        self.forward_pass(ids, positions, None, prefix, False, lengths=lengths)])

    def forward_pass(self, ids, positions, cache, prefix, last_only: bool, kept=None, lengths=None) -> ForwardPass:
        """A pass with trunk's arguments, and trunk_after's lengths."""
        return ForwardPass(self, ids, positions, cache, prefix, last_only, kept, lengths)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits over the real vocabulary, softcapped, fp32. hidden (..., C) -> (..., V)."""
        logits = self.lm_head(hidden)[..., : self.vocab_size].float()
        # S tanh(z / S), by a sigmoid, which CPUs compute ten times as fast
        return torch.sigmoid(logits * (2 / self.softcap)) * (2 * self.softcap) - self.softcap

    def head_options(self, temperature: float = 1.0) -> dict:
        """What a fused LM-head op must know of this head."""
        return dict(vocab_size=self.vocab_size, softcap=self.softcap, temperature=temperature)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of a plain causal pass. ids (B, T) -> (B, T, V) fp32."""
        return self.head(self.trunk(ids))


def add_model_args(parser, depth: int = 4, sequence_len: int = 256, window_pattern: str = "L") -> None:
    """The flags of a new model's shape; --depth is the one dial."""
    group = parser.add_argument_group("model")
    group.add_argument("--depth", type=at_least(1, int, MOST_LAYERS), default=depth, help="layers: the one dial")
    group.add_argument("--n-embd", type=at_least(0, int, 2 ** 17), default=0,
                       help="width; default: 64 per layer, rounded up to a multiple of 128")
    group.add_argument("--n-head", type=at_least(0), default=0, help="default: n_embd / 128, at least 1")
    group.add_argument("--n-kv-head", type=at_least(0), default=0, help="default: --n-head")
    group.add_argument("--sequence-len", type=at_least(8, int, 2 ** 24), default=sequence_len)
    group.add_argument("--window-pattern", default=window_pattern,
                       help="per layer, repeated: L sees all tokens before it, S a quarter of the context")


def config_of(args, vocab_size: int) -> GPTConfig:
    """The shape that the flags of add_model_args ask for. Raises BadInput."""
    depth = args.depth
    n_embd = args.n_embd or (64 if depth == 1 else -(-64 * depth // 128) * 128)
    n_head = args.n_head or max(1, n_embd // 128)
    n_kv_head = args.n_kv_head or n_head
    if n_embd < SMEAR_CHANNELS or n_embd % (2 * n_head) or n_head % n_kv_head:
        raise BadInput(f"--n-embd {n_embd} --n-head {n_head} --n-kv-head {n_kv_head}: need a width >= {SMEAR_CHANNELS} "
                       f"and a multiple of twice the heads, heads a multiple of the key/value heads")
    return GPTConfig(args.sequence_len, vocab_size, depth, n_head, n_kv_head, n_embd, args.window_pattern)


def new_model(config: GPTConfig, seed: int, device, dtype: torch.dtype) -> GPT:
    """A model of random weights, for training from scratch."""
    with torch.device(device):
        model = GPT(config, dtype)
    model.init_weights(torch.Generator(device).manual_seed(seed))
    return model
