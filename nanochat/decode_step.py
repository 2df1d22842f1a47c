"""
A trunk for one token of each row, by one kernel on CPU: there, calls of small operations take longer than their
arithmetic. Operation by operation it is gpt.GPT.trunk and hf.decoder.Decoder.trunk.
"""
import torch

from nanochat.decode_cache import DecodeCache
from nanochat.kernels import cpu
from nanochat.kernels.tiles import rounded


class Step:
    """Of a model that samples (Block.packed, tiles.Layer) into a cache, for as long as it does: its weights do not
    change. cos_sin: of positions from 0 on, as many as the cache has room for, two of (1, positions, 1, D/2). What the
    kernel reads has addresses alone: `kept` holds it.

    The cache holds the step, so the step must not hold the cache: its memory would wait for the garbage collector.
    """
    window = 0  # where each layer has its own

    def __call__(self, cache: DecodeCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """ids (below the vocabulary), positions (n, 1) int64 -> (n, 1, C): hidden states of these tokens, after the
        final norm. cache: the one that this was made for."""
        n = len(ids)
        assert ids.shape == positions.shape == (n, 1) and n == len(cache.places)
        assert ids.dtype == positions.dtype == torch.long and cache.k[0].data_ptr() == self.layers[0].k
        out, spec = torch.empty(n, 1, self.trunk.C), cache.spec(0, self.window, self.heads.Hq // self.heads.Hkv)
        self.heads.U = n
        cpu.call(self.kernel, self.heads, self.trunk, self.layers, spec, ids.contiguous(), positions.contiguous(),
                 self.work, out)
        return out


class DecodeStep(Step):
    """Of a GPT. qk_scale: on queries and keys after their norm."""
    kernel = "decode_trunk"

    def __init__(self, model, cache: DecodeCache, cos_sin: tuple[torch.Tensor, torch.Tensor], qk_scale: float):
        config, self.ready = model.config, model.blocks[0].packed(torch.float32)
        self.kept = []

        def read(*tensors: torch.Tensor) -> list[int]:
            self.kept += [x.detach().float().contiguous() for x in tensors]
            return [x.data_ptr() for x in self.kept[-len(tensors):]]

        layers = []
        scalars = zip(model.resid_lambdas.unbind(), model.x0_lambdas.unbind(), strict=True)
        for i, (block, (a, b), window) in enumerate(zip(model.blocks, scalars, model.windows, strict=True)):
            weights, (o, up, down) = block.packed(torch.float32)
            keys = [x.data_ptr() for x in (cache.k[i], cache.v[i], cache.prefix_k[i], cache.prefix_v[i])]
            of_values = [None, None]
            if str(i) in model.value_embeds:
                of_values = read(block.attn.ve_gate.weight, model.value_embeds[str(i)].weight)
            layers.append(cpu.struct("Layer", *read(a, b, weights, o, up, down), *keys, *of_values, window))
        C, F = config.n_embd, len(model.blocks[0].mlp.c_fc.weight)
        smear, gate = model.smear_gate.weight, model.blocks[-1].attn.ve_gate.weight  # the last layer always has one
        shared = read(model.transformer.wte.weight, smear, model.smear_lambda, model.backout_lambda, *cos_sin)
        self.layers = (type(layers[0]) * len(layers))(*layers)
        self.trunk = cpu.struct("Trunk", *shared, cache.last_embedding.data_ptr(), len(layers), len(layers) // 2, C, F,
                                gate.shape[1], smear.shape[1])
        self.heads = cpu.struct("Heads", 0, 1, 1, config.n_head, config.n_kv_head, config.head_dim, qk_scale,
                                torch.finfo(torch.float32).eps)
        self.work = torch.empty(len(cache.slots), numbers_per_row(config, F))


class DecoderStep(Step):
    """Of an imported model whose products are in bf16 (hf.decoder.Decoder)."""
    kernel = "decode_decoder"

    def __init__(self, model, cache: DecodeCache, cos_sin: tuple[torch.Tensor, torch.Tensor]):
        config, table = model.config, model.model.embed_tokens.weight.detach()
        self.kept, self.window = [table], cache.num_columns  # all of it

        def read(*tensors: torch.Tensor | None) -> list[int | None]:
            self.kept += tensors
            return [None if x is None else x.data_ptr() for x in tensors]

        layers = []
        for i, block in enumerate(model.blocks):
            layer = block.ready
            bias = None if layer.bias is None else rounded(layer.bias.detach())
            weights, after = layer.forward
            keys = [x.data_ptr() for x in (cache.k[i], cache.v[i], cache.prefix_k[i], cache.prefix_v[i])]
            norms = (rounded(x.detach()) for x in layer.norms)
            layers.append(cpu.struct("DecoderLayer", *read(*norms, bias, weights, *after), *keys))
        self.layers, heads, C = (type(layers[0]) * len(layers))(*layers), config.n_head, config.n_embd
        shared = read(rounded(model.model.norm.weight.detach()), *(x.contiguous() for x in cos_sin))
        self.trunk = cpu.struct("DecoderTrunk", table.data_ptr(), *shared, table.dtype == torch.float32, len(layers), C,
                                config.intermediate_size)
        self.heads = cpu.struct("Heads", 0, 1, 1, heads, config.n_kv_head, config.head_dim, 1.0, config.norm_eps)
        self.work = torch.empty(len(cache.slots), decoder_numbers_per_row(config))


def numbers_per_row(config, F: int) -> int:
    """What decode_trunk writes down of a row on its way. F: the width inside of an MLP."""
    C, heads, kv_heads, D = config.n_embd, config.n_head, config.n_kv_head, config.head_dim
    return D + 5 * C + F + 2 * heads * D + 3 * kv_heads * D + 1 + heads + 2 * kv_heads


def decoder_numbers_per_row(config) -> int:
    """The same of decode_decoder."""
    return config.head_dim * (1 + 2 * config.n_head + 2 * config.n_kv_head) + config.n_embd + 1
