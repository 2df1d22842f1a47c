"""The model against a loop-level reference written from upstream's mathematics; its parameter names, its caches."""
import math

import pytest
import torch
from conftest import randomized
from test_decode_cache import decoded

from nanochat.attention import PADDING_POSITION, KVCache, Mask
from nanochat.common import BadInput
from nanochat.gpt import GPT, GPTConfig, rotary
from nanochat.hf.decoder import Decoder, DecoderConfig


def tiny_model(n_layer=4, n_head=4, n_kv_head=2, n_embd=48, sequence_len=256, window_pattern="SSL", seed=0):
    """A model in float64 whose every parameter is random: gates, smear, backout and lambdas take part."""
    config = GPTConfig(sequence_len, 265, n_layer, n_head, n_kv_head, n_embd, window_pattern)
    return randomized(GPT(config, torch.float64).double(), seed)


def random_ids(*shape, seed=0):
    return torch.randint(265, shape, generator=torch.Generator().manual_seed(seed))


def reference_norm(x):
    return x / (x.pow(2).mean() + torch.finfo(x.dtype).eps).sqrt()


def reference_rotate(x, position):
    """Half-split rotation of one head vector by minus its angles, whose cos and sin are fp32 numbers (tested on their
    own below)."""
    cos, sin = (table.flatten() for table in rotary(torch.tensor([[position]]), len(x), x.dtype))
    half = len(x) // 2
    out = torch.empty_like(x)
    for j in range(half):
        out[j] = x[j] * cos[j] + x[j + half] * sin[j]
        out[j + half] = x[j + half] * cos[j] - x[j] * sin[j]
    return out


def reference_logits(weights, config, ids, windows):
    """Logits (T, V) of one row of ids before the softcap, from the formulas alone."""
    T, H, Hkv, D = len(ids), config.n_head, config.n_kv_head, config.n_embd // config.n_head
    plain = [reference_norm(weights["transformer.wte.weight"][i]) for i in ids]
    x = [plain[0]]
    for t in range(1, T):
        gate = torch.sigmoid(weights["smear_gate.weight"][0] @ plain[t][:24])
        x.append(plain[t] + weights["smear_lambda"][0] * gate * plain[t - 1])
    x0 = list(x)
    for i in range(config.n_layer):
        w = {name.removeprefix(f"transformer.h.{i}."): p for name, p in weights.items()}
        x = [weights["resid_lambdas"][i] * x[t] + weights["x0_lambdas"][i] * x0[t] for t in range(T)]
        q, k, v = [], [], []
        for t in range(T):
            a = reference_norm(x[t])
            q.append([1.2 * reference_norm(reference_rotate(head, t))
                      for head in (w["attn.c_q.weight"] @ a).view(H, D)])
            k.append([1.2 * reference_norm(reference_rotate(head, t))
                      for head in (w["attn.c_k.weight"] @ a).view(Hkv, D)])
            value = (w["attn.c_v.weight"] @ a).view(Hkv, D)
            if i % 2 == (config.n_layer - 1) % 2:
                gate = 3 * torch.sigmoid(w["attn.ve_gate.weight"] @ a[:12])
                value = value + gate[:, None] * weights[f"value_embeds.{i}.weight"][ids[t]].view(Hkv, D)
            v.append(value)
        for t in range(T):
            first = max(0, t - windows[i])  # a token sees itself and the `window` tokens before it
            heads = []
            for h in range(H):
                g = h // (H // Hkv)
                probs = torch.softmax(torch.stack([k[s][g] for s in range(first, t + 1)]) @ q[t][h] / math.sqrt(D),
                                      dim=0)
                heads.append(probs @ torch.stack([v[s][g] for s in range(first, t + 1)]))
            x[t] = x[t] + w["attn.c_proj.weight"] @ torch.cat(heads)
            x[t] = x[t] + w["mlp.c_proj.weight"] @ torch.relu(w["mlp.c_fc.weight"] @ reference_norm(x[t])) ** 2
        if i == config.n_layer // 2:
            middle = list(x)
    hidden = [reference_norm(x[t] - weights["backout_lambda"][0] * middle[t]) for t in range(T)]
    return torch.stack([weights["lm_head.weight"] @ h for h in hidden])[:, :265]


@torch.no_grad()
def assert_equals_reference(model, ids, windows):
    expected = reference_logits(model.state_dict(), model.config, ids.tolist(), windows)
    uncapped = model.lm_head(model.trunk(ids[None]))[0, :, :265]
    assert uncapped.dtype == torch.float64
    assert (uncapped - expected).abs().max() < 1e-10
    logits = model(ids[None])[0]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, (15 * torch.tanh(expected / 15)).float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n_layer, n_head, n_kv_head", [(4, 4, 2), (3, 4, 1), (2, 3, 3)])
def test_logits_equal_the_reference(n_layer, n_head, n_kv_head):
    assert_equals_reference(tiny_model(n_layer, n_head, n_kv_head), random_ids(11), [256] * n_layer)


def test_logits_equal_the_reference_beyond_the_short_window():
    # SSL over four layers is S S L S, but the last layer is L; S of 256 is 64 rounded up to 128.
    assert_equals_reference(tiny_model(n_layer=4, n_head=2, n_kv_head=1), random_ids(136), [128, 128, 256, 256])


def test_rotary_angles_are_position_times_base_to_the_minus_channel():
    cos, sin = rotary(torch.tensor([[0, 1, 7, 200]]), 12, torch.float64)
    assert cos.shape == sin.shape == (1, 4, 1, 6)
    for t, position in enumerate((0, 1, 7, 200)):
        for j in range(6):
            angle = position * 100000 ** (-2 * j / 12)
            assert abs(cos[0, t, 0, j] - math.cos(angle)) < 2e-5 and abs(sin[0, t, 0, j] - math.sin(angle)) < 2e-5


def test_windows_are_a_quarter_of_the_context_rounded_up_to_128():
    # 2048 / 4 = 512; 2050 / 4 = 512.5 -> 640; 100 / 4 = 25 -> 128
    for sequence_len, short in [(2048, 512), (2052, 640), (2050, 640), (256, 128), (100, 128)]:
        windows = GPT(GPTConfig(sequence_len, 64, 5, 1, 1, 24, "SSL")).windows
        assert windows == [short, short, sequence_len, short, sequence_len]
    assert GPT(GPTConfig(256, 64, 2, 1, 1, 24, "L")).windows == [256, 256]
    assert GPT(GPTConfig(256, 64, 1, 1, 1, 24, "S")).windows == [256]
    assert GPT(GPTConfig(2048, 64, 2, 1, 1, 24, "sl")).windows == [512, 2048]
    for pattern in ("", "SXL"):
        with pytest.raises(BadInput, match="window pattern"):
            GPT(GPTConfig(256, 64, 2, 1, 1, 24, pattern))


def test_parameter_names_and_shapes_are_upstreams():
    expected = {"transformer.wte.weight": (320, 48), "lm_head.weight": (320, 48), "resid_lambdas": (4,),
                "x0_lambdas": (4,), "smear_gate.weight": (1, 24), "smear_lambda": (1,), "backout_lambda": (1,)}
    for i in range(4):
        block = f"transformer.h.{i}"
        expected |= {f"{block}.attn.c_q.weight": (48, 48), f"{block}.attn.c_k.weight": (24, 48),
                     f"{block}.attn.c_v.weight": (24, 48),
                     f"{block}.attn.c_proj.weight": (48, 48), f"{block}.mlp.c_fc.weight": (192, 48),
                     f"{block}.mlp.c_proj.weight": (48, 192)}
    for i in (1, 3):  # value embeddings end on the last layer and alternate
        expected |= {f"transformer.h.{i}.attn.ve_gate.weight": (2, 12), f"value_embeds.{i}.weight": (320, 24)}
    assert {name: tuple(p.shape) for name, p in tiny_model().state_dict().items()} == expected


def test_model_config_has_upstreams_keys():
    assert set(GPTConfig().asdict()) == {"sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd",
                                         "window_pattern"}


@torch.no_grad()
def test_padded_vocabulary_takes_no_part():
    model, ids = tiny_model(), random_ids(2, 5)
    before = model(ids)
    assert before.shape == (2, 5, 265)
    model.lm_head.weight[265:] = 1e4
    model.transformer.wte.weight[265:] = 1e4
    assert torch.equal(model(ids), before)


@torch.no_grad()
def test_right_padded_rows_equal_rows_alone():
    model, rows = tiny_model(), [random_ids(n, seed=n) for n in (3, 9, 1, 6)]
    ids, positions = torch.zeros(4, 9, dtype=torch.long), torch.full((4, 9), PADDING_POSITION)
    for row, own in enumerate(rows):
        ids[row, : len(own)], positions[row, : len(own)] = own, torch.arange(len(own))
    padded = model.trunk(ids, positions=positions)
    assert padded.isfinite().all()
    for row, own in enumerate(rows):
        assert (padded[row, : len(own)] - model.trunk(own[None])[0]).abs().max() < 1e-12


@torch.no_grad()
def test_cached_pieces_equal_one_forward():
    # Pieces of 130, 1, 1 and 4 tokens: the short window ends inside the cache, and the smear looks back across pieces.
    model, ids = tiny_model(), random_ids(2, 136)
    cache = KVCache(4)
    pieces, start = [], 0
    for size in (130, 1, 1, 4):
        positions = torch.arange(start, start + size).expand(2, size)
        pieces.append(model.trunk(ids[:, start: start + size], positions=positions, cache=cache))
        start += size
    assert (torch.cat(pieces, dim=1) - model.trunk(ids)).abs().max() < 1e-12


@torch.no_grad()
def test_one_token_continues_ragged_rows():
    model, rows = tiny_model(), [random_ids(n, seed=n) for n in (3, 9)]
    ids, positions = torch.zeros(2, 8, dtype=torch.long), torch.full((2, 8), PADDING_POSITION)
    for row, own in enumerate(rows):
        ids[row, : len(own) - 1], positions[row, : len(own) - 1] = own[:-1], torch.arange(len(own) - 1)
    prefix, cache = KVCache(4), KVCache(4)
    model.trunk(ids, positions=positions, cache=prefix)
    last = model.trunk(torch.stack([own[-1:] for own in rows]), positions=torch.tensor([[2], [8]]), prefix=prefix,
                       cache=cache)
    for row, own in enumerate(rows):
        assert (last[row, 0] - model.trunk(own[None])[0, -1]).abs().max() < 1e-12


@pytest.mark.parametrize("piece", [1, 3])
@torch.no_grad()
def test_rows_continue_their_shared_prompts(piece):
    # Two rows after each of two ragged prompts; on its way the short window of 128 slides off the first tokens of one
    # prompt.
    model, lengths, new = tiny_model(), (121, 40), 37
    rows = [[torch.cat([random_ids(length, seed=length), random_ids(new, seed=r)]) for r in range(2)]
            for length in lengths]
    ids, positions = torch.zeros(2, 121, dtype=torch.long), torch.full((2, 121), PADDING_POSITION)
    for u, length in enumerate(lengths):
        ids[u, :length], positions[u, :length] = rows[u][0][:length], torch.arange(length)
    prefix, cache, pieces = KVCache(4), KVCache(4), []
    model.trunk(ids, positions=positions, cache=prefix)
    for start in range(0, new, piece):
        own = torch.stack([row[length + start: length + start + piece]
                           for length, unit in zip(lengths, rows, strict=True) for row in unit])
        places = torch.tensor(lengths).repeat_interleave(2)[:, None] + start + torch.arange(own.shape[1])
        pieces.append(model.trunk(own, positions=places, prefix=prefix, cache=cache))
    assert cache.length == new
    for u, length in enumerate(lengths):
        for r in range(2):
            assert (torch.cat(pieces, dim=1)[2 * u + r] - model.trunk(rows[u][r][None])[0, length:]).abs().max() < 1e-12


@pytest.mark.parametrize("n_kv_head, window_pattern", [(2, "SSL"), (1, "L"), (4, "S")])
@torch.no_grad()
def test_decoding_gives_the_states_of_full_forwards(n_kv_head, window_pattern):
    # Rows of unlike lengths after ragged prompts, which begin when others are half way; the short window of 128 slides
    # off prompts, and off own tokens.
    model, lengths = tiny_model(n_kv_head=n_kv_head, window_pattern=window_pattern), (121, 1, 40)
    prompts = [random_ids(length, seed=length).tolist() for length in lengths]
    rows = [(p, random_ids(new, seed=50 + i).tolist())
            for i, (p, new) in enumerate([(0, 30), (1, 150), (0, 5), (1, 3), (2, 100), (2, 1), (0, 12)])]
    hidden = decoded(model, prompts, rows, starts=[0, 3, 7, 20, 0, 2, 31])
    for (p, tokens), states in zip(rows, hidden, strict=True):
        whole = model.trunk(torch.tensor([prompts[p] + tokens]))[0, lengths[p]:]
        assert (states - whole).abs().max() < 1e-11


@torch.no_grad()
def test_decoding_by_the_kernel_gives_the_states_of_full_forwards():
    model = tiny_model(n_embd=128, window_pattern="SL").float()
    model.compute_dtype = torch.float32
    prompts = [random_ids(length, seed=length).tolist() for length in (120, 3)]
    rows = [(p, random_ids(new, seed=i).tolist()) for i, (p, new) in enumerate([(0, 20), (0, 9), (1, 140), (0, 2)])]
    for rows_per_slot in (1, 3):
        hidden = decoded(model, prompts, rows, [0, 4, 1, 15], rows_per_slot)
        for (p, tokens), states in zip(rows, hidden, strict=True):
            whole = model.trunk(torch.tensor([prompts[p] + tokens]))[0, len(prompts[p]):]
            assert (states - whole).abs().max() < 3e-5


def test_activations_have_the_compute_dtype_and_parameters_keep_theirs():
    model = GPT(GPTConfig(64, 265, 2, 2, 1, 48, "L"), torch.bfloat16)
    assert model.trunk(random_ids(1, 4)).dtype == torch.bfloat16 and model(random_ids(1, 4)).dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@torch.no_grad()
def test_fresh_blocks_are_the_identity():
    model = GPT(GPTConfig(64, 265, 2, 2, 1, 48, "L"))
    model.init_weights(torch.Generator().manual_seed(1))
    x = torch.randn(1, 5, 48)
    cos_sin = rotary(torch.arange(5)[None], 24, x.dtype)
    lambdas = torch.tensor(1.0), torch.tensor(0.0)
    (y, delta), = model.transformer.h[0]((x, None, x, lambdas, None, cos_sin, Mask(torch.zeros(5, 5)), *[None] * 5))
    assert torch.equal(y if delta is None else y + delta, x)


def test_fresh_weights_follow_the_seed():
    states = []
    for seed in (1, 1, 2):
        model = GPT(GPTConfig(64, 265, 2, 2, 1, 48, "L"))
        model.init_weights(torch.Generator().manual_seed(seed))
        states.append(model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["transformer.wte.weight"], states[2]["transformer.wte.weight"])


def test_a_model_without_memory_draws_no_weights(monkeypatch):
    """Drawing them there imports torch's compiler, which takes longer than to load a small model."""
    monkeypatch.setattr(torch.nn.init, "normal_", lambda *args, **options: pytest.fail("weights were drawn"))
    decoder = DecoderConfig("llama", 64, 265, 1, 2, 2, 32, 16, 64, 1e-5, 1e4, None, False, False, False, False, False)
    with torch.device("meta"):
        assert GPT(GPTConfig(64, 265, 1, 2, 2, 32, "L")).transformer.wte.weight.is_meta
        assert Decoder(decoder).model.embed_tokens.weight.is_meta
