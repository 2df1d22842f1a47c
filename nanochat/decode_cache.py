"""
The keys and values of rows that decode together, each at its own length.

A row has a place, which it leaves to another one when it ends. It continues a prompt, which has a slot: its keys and
values exist once for all its rows.
"""
import ctypes
from collections.abc import Callable

import torch

from nanochat.attention import PADDING_POSITION, KVCache
from nanochat.kernels import cpu, steps
from nanochat.kernels.decode_attention import decode_attention, decode_attention_plain
from nanochat.kernels.launch import round_up, takes_triton

TRANSPOSED_FROM = 3  # rows of a prompt from which the CPU kernel reads its keys transposed, all rows together


class DecodeCache:
    """B places and S slots.

    k[i], v[i] (B, Hkv, capacity, D) of layer i: a place's own tokens, of which lengths (B,) int64 count, the one that
    is run among them, and rests (B,) int64 those of its prompt; slots (B,): the prompt of each place, or its start.
    prefix_k[i], prefix_v[i] (S, Hkv, Tp, D) with prefix_lengths (S,); on CPU prefix_k may be (S, Hkv, D, Tp).
    last_embedding (B, 1, C), prompt_embedding (S, 1, C): what the smear of the next token looks back at. places (n,):
    where the rows of the next forward are. All are written in place, so that a CUDA graph can read them.
    """

    def __init__(self, config, places: int, slots: int, rows_per_slot: int, prompt_tokens: int, capacity: int,
                 dtype: torch.dtype, device):
        heads, D, layers = config.n_kv_head, config.head_dim, range(config.n_layer)
        like = torch.empty(1, D, dtype=dtype, device=device)
        self.by_kernel = cpu.takes(like)
        self.transposed = self.by_kernel and rows_per_slot >= TRANSPOSED_FROM
        Tp = round_up(prompt_tokens, 16) if self.transposed else prompt_tokens
        # What is not filled yet is never read by kernels; without them it must be numbers.
        make = like.new_empty if self.by_kernel else like.new_zeros
        self.k, self.v = ([make(places, heads, capacity, D) for _ in layers] for _ in range(2))
        self.prefix_k = [make(slots, heads, *((D, Tp) if self.transposed else (Tp, D))) for _ in layers]
        self.prefix_v = [make(slots, heads, Tp, D) for _ in layers]
        whole = lambda n, value: torch.full((n,), value, dtype=torch.long, device=device)
        self.lengths, self.slots, self.prefix_lengths = whole(places, 1), whole(places, 0), whole(slots, 1)
        self.rests = whole(places, 0)
        self.places = self.last_embedding = self.prompt_embedding = None
        self.cos_sin = None  # of all positions, when they have been asked for
        self.step = None  # the kernel of a model that runs in it (decode_step.DecodeStep)

    def put(self, slots: torch.Tensor, prompts: KVCache) -> None:
        """Stores prompts that have been run, in these slots (p,)."""
        if self.last_embedding is None:
            of_one = prompts.last_embedding.shape[1:]
            self.last_embedding = prompts.last_embedding.new_zeros(len(self.slots), *of_one)
            self.prompt_embedding = prompts.last_embedding.new_zeros(len(self.prefix_lengths), *of_one)
        self.prompt_embedding[slots] = prompts.last_embedding
        width = prompts.positions.shape[1]
        self.prefix_lengths[slots] = (prompts.positions < PADDING_POSITION).sum(dim=1)
        for i, (k, v) in enumerate(zip(prompts.k, prompts.v, strict=True)):
            if self.transposed:
                self.prefix_k[i][slots, :, :, :width] = k[:, :, 0].mT
            else:
                self.prefix_k[i][slots, :, :width] = k[:, :, 0]
            self.prefix_v[i][slots, :, :width] = v[:, :, 0]

    def begin(self, places: torch.Tensor, slots: torch.Tensor, rests: torch.Tensor | int = 0) -> None:
        """Lets these places (n,) continue the prompts in these slots (n,). rests (n,) int64: where slots hold starts of
        prompts alone, how many tokens more each prompt has; these are the place's own."""
        self.slots[places], self.last_embedding[places] = slots, self.prompt_embedding[slots]
        self.rests[places] = rests

    def started(self, slots: torch.Tensor) -> KVCache:
        """What is stored in these slots (n,), as a prefix of n rows."""
        prefix, lengths = KVCache(len(self.k)), self.prefix_lengths[slots, None]
        columns = torch.arange(self.prefix_v[0].shape[2], device=slots.device)
        empty = columns >= lengths  # (n, Tp)
        read = lambda x: x[slots].masked_fill(empty[:, None, :, None], 0.0)[:, :, None]
        prefix.kv = [[read(k.mT if self.transposed else k), read(v)]
                     for k, v in zip(self.prefix_k, self.prefix_v, strict=True)]
        prefix.positions, prefix.length = columns.expand(empty.shape).masked_fill(empty, PADDING_POSITION), len(columns)
        prefix.last_embedding = self.prompt_embedding[slots]
        return prefix

    def put_rests(self, places: torch.Tensor, rests: KVCache) -> None:
        """Stores what has been run after the starts of these places (n,), as their first own tokens."""
        self.last_embedding[places] = rests.last_embedding
        for i, (k, v) in enumerate(zip(rests.k, rests.v, strict=True)):
            self.k[i][places, :, : k.shape[3]], self.v[i][places, :, : k.shape[3]] = k[:, :, 0], v[:, :, 0]

    @property
    def num_columns(self) -> int:
        """Tokens that a row has room for, with its prompt."""
        return self.prefix_v[0].shape[2] + self.k[0].shape[2]

    def advance(self, places: torch.Tensor, num_own: torch.Tensor) -> torch.Tensor:
        """Says in which places (n,) the rows of the next forward are, and how many tokens they have after their prompts
        with the one that is run. -> positions of these (n,)"""
        self.places = places
        if takes_triton(places):
            return steps.advance(places, num_own, self.rests, self.lengths, self.slots, self.prefix_lengths)
        num_own = (num_own + self.rests[places]).clamp(min=1)  # 1 in places that never had a row
        self.lengths[places] = num_own
        return self.prefix_lengths[self.slots[places]] + num_own - 1

    def rotary(self, positions: torch.Tensor, make: Callable) -> torch.Tensor:
        """cos, sin of the rotary angles of positions (n, 1), looked up in those that `make` has given of all (1,
        num_columns) of them. -> (2, n, 1, 1, D/2)"""
        if self.cos_sin is None:
            columns = torch.arange(self.num_columns, device=positions.device)
            self.cos_sin = torch.cat(make(columns[None]))  # (2, num_columns, 1, D/2)
        return self.cos_sin.index_select(1, positions[:, 0])[:, :, None]

    def columns(self, layer: int) -> tuple[torch.Tensor, ...]:
        """What a kernel must know that itself stores the keys and values of new tokens: k, v (B, Hkv, capacity, D), and
        places (n,), whose column is lengths (B,) - 1."""
        return self.k[layer], self.v[layer], self.places, self.lengths

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None,
               window: int) -> torch.Tensor:
        """Stores the keys and values (n, Hkv, 1, 1, D) of new tokens (None: a kernel has done so, see `columns`);
        attention of their queries (n, Hkv, 1, group, 1, D) over all that their rows have. -> as q"""
        q = q[:, :, 0, :, 0]  # (n, Hkv, group, D)
        if self.by_kernel:
            k, v = k[:, :, 0, 0], v[:, :, 0, 0]  # (n, Hkv, D)
            y, spec = q.new_empty(q.shape), self.spec(layer, window, q.shape[2])
            assert k.stride() == v.stride() and q.stride(3) == k.stride(2) == 1
            spec.q, spec.new_k, spec.new_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
            spec.q_row, spec.q_head, spec.q_group, spec.kv_row, spec.kv_head = *q.stride()[:3], *k.stride()[:2]
            cpu.call("decode", spec, y)
            return y[:, :, None, :, None]
        if k is not None:
            columns = self.lengths[self.places] - 1
            for kept, new in ((self.k[layer], k), (self.v[layer], v)):
                kept[self.places, :, columns] = new[:, :, 0, 0]
        function = decode_attention if takes_triton(q) else decode_attention_plain
        y = function(q, self.k[layer], self.v[layer], self.places, self.lengths, self.prefix_k[layer],
                     self.prefix_v[layer], self.prefix_lengths, self.slots, window)
        return y[:, :, None, :, None]

    def spec(self, layer: int, window: int, group: int) -> ctypes.Structure:
        """What kernels read of this layer's cache, without new tokens. group: queries per key."""
        (_, heads, capacity, D), Tp = self.k[layer].shape, self.prefix_v[layer].shape[2]
        addresses = [x.data_ptr() for x in (self.k[layer], self.v[layer], self.prefix_k[layer], self.prefix_v[layer],
                                            self.places, self.lengths, self.slots, self.prefix_lengths)]
        return cpu.struct("Decoding", None, None, None, *addresses, len(self.places), heads, group, D, capacity, Tp,
                          self.transposed, window)
