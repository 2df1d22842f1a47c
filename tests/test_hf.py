"""The imported decoder: logits, configurations, greedy text and logprobs of transformers, caches and shared prompts
against plain forwards, recomputation."""
import json
import os
import random

import pytest
import torch
from test_decode_cache import decoded
from test_trainer import batch_rows, full_rows, packed, random_advantages, random_rollouts
from transformers import AutoConfig, AutoModelForCausalLM, set_seed
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from nanochat.attention import PADDING_POSITION, KVCache
from nanochat.engine import generate, row_key
from nanochat.hf.decoder import ROPE, Decoder, DecoderConfig
from nanochat.hf.files import read_config, read_model, written_config
from nanochat.rl.learn.trainer import completion_hidden

logging.disable_progress_bar()
logging.set_verbosity_error()  # it warns of scalings that are not the ratio of contexts
CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen2", "qwen3")
SIZES = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             vocab_size=211, max_position_embeddings=256, pad_token_id=None, bos_token_id=None, eos_token_id=None)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32},
    "yarn": YARN,
    "yarn of the whole context": {"rope_type": "yarn", "factor": 4.0},
    "yarn, attention_factor": YARN | {"attention_factor": 1.3},
    "yarn, betas": YARN | {"beta_fast": 4, "beta_slow": 0.5},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.4},
    "yarn, mscale alone": YARN | {"mscale": 0.7},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, no stretch": YARN | {"factor": 1.0},
}


@torch.no_grad()
def reference_model(family, seed=0, head=1.0, **options):
    """A small model of transformers whose every weight, bias and scale is random; `head` times those of its LM head."""
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SIZES | options))
    for name, p in model.named_parameters():
        p.normal_(1.0 if name.endswith("norm.weight") else 0.0, p.shape[1] ** -0.5 if p.dim() == 2 else 0.5)
    model.lm_head.weight *= head
    return model.eval()


def write(folder, name, content):
    with open(os.path.join(folder, name), "w") as f:
        json.dump(content, f)


def read(folder, name="config.json"):
    with open(os.path.join(folder, name)) as f:
        return json.load(f)


def imported(model, folder):
    model.save_pretrained(folder)
    return read_model(str(folder), CPU, torch.float32)


def random_ids(*shape, vocab_size=211, seed=0):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def draw_options(family, seed):
    """A random configuration: every option that any of the families has."""
    draw = random.Random(f"{family} {seed}")
    heads = draw.choice([2, 4, 6])
    rope = ROPES[draw.choice(list(ROPES))] | {"rope_theta": draw.choice([10000.0, 500000.0])}
    return dict(num_attention_heads=heads, num_key_value_heads=draw.choice([1, 2, heads]),
                rms_norm_eps=draw.choice([1e-6, 1e-5, 1e-2]),
                head_dim=draw.choice([8, 20, 32]), vocab_size=draw.choice([97, 211, 256]),
                tie_word_embeddings=draw.random() < 0.5,
                attention_bias=draw.random() < 0.5, mlp_bias=draw.random() < 0.5, rope_parameters=dict(rope))


@torch.no_grad()
def assert_equal_logits(model, ours, seed=0):
    """Of 90 tokens: almost three times the original context of llama3's scaling, one and a half that of yarn's."""
    ids = random_ids(2, 90, vocab_size=ours.vocab_size, seed=seed)
    expected, logits = model(ids).logits, ours(ids)
    assert logits.dtype == torch.float32 and expected.std() > 0.3
    assert (logits - expected).abs().max() < 3e-5


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(family, seed, tmp_path):
    model = reference_model(family, seed, **draw_options(family, seed))
    assert_equal_logits(model, imported(model, tmp_path), seed)


CONTEXTS = {  # context, theta, scaling: as in files of Llama 3.1 and Qwen 2.5; then yarn's ramp at its ends
    "llama3.1": (131072, 500000.0,
                 {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                  "original_max_position_embeddings": 8192}),
    "qwen2.5": (32768, 1000000.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    "all channels turn often": (8192, 20.0, YARN | {"original_max_position_embeddings": 8192}),
    "no channel turns": (256, 10000.0, YARN | {"original_max_position_embeddings": 4}),
    "a step for a ramp": (256, 10000.0, YARN | {"beta_fast": 2, "beta_slow": 2, "truncate": False}),
}


@pytest.mark.parametrize("name", [*ROPES, *CONTEXTS])
def test_rotary_frequencies_equal_transformers(name, tmp_path):
    length, theta, parameters = CONTEXTS.get(name) or (256, 10000.0, ROPES[name])
    config = AutoConfig.for_model("llama", **SIZES | dict(max_position_embeddings=length, head_dim=128,
                                                          rope_parameters={**parameters, "rope_theta": theta}))
    config.save_pretrained(tmp_path)
    ours, kind = read_config(str(tmp_path)), parameters["rope_type"]
    frequencies, factor = ROPE[kind](ours)
    if kind == "default":
        expected, expected_factor = theta ** (-torch.arange(0, 128, 2).float() / 128), 1.0
    else:
        expected, expected_factor = ROPE_INIT_FUNCTIONS[kind](config)
    assert frequencies.dtype == torch.float32
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert factor == pytest.approx(expected_factor, rel=1e-12)


def test_angles_are_fp32_numbers_whatever_the_activations():
    positions = torch.tensor([[0, 257, 1003]])  # 257 is no bf16 number
    exact = Decoder(small_config("llama")).rotary(positions)
    for dtype, given in ((torch.bfloat16, torch.float32), (torch.float16, torch.float16)):  # bf16 is of products alone
        ours = Decoder(small_config("llama"), dtype).rotary(positions)
        assert all(x.dtype == given and torch.equal(x, y.to(given)) for x, y in zip(ours, exact, strict=True))


def in_the_style_of_transformers_4(config, key="type"):
    """config.json as transformers 4 wrote it, from a configuration of transformers 5."""
    old = {name: value for name, value in config.to_dict().items()
           if name not in ("rope_parameters", "layer_types", "dtype")}
    rope = dict(config.rope_parameters)
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    return old | {"rope_theta": theta, "rope_scaling": None if kind == "default" else {key: kind, **rope},
                  "torch_dtype": "float32"}


@pytest.mark.parametrize("family", FAMILIES)
def test_old_new_and_written_configurations_are_the_same(family, tmp_path):
    for i, rope in enumerate(ROPES.values()):
        config = AutoConfig.for_model(family, **SIZES | draw_options(family, i)
                                      | {"rope_parameters": {**rope, "rope_theta": 12345.0}})
        config.save_pretrained(tmp_path)
        new = read_config(str(tmp_path))
        assert "rope_parameters" in read(tmp_path) and new.rope_theta == 12345.0
        assert new.rope_scaling is None if rope["rope_type"] == "default" else new.rope_scaling.items() >= rope.items()
        for key in ("type", "rope_type"):
            write(tmp_path, "config.json", in_the_style_of_transformers_4(config, key))
            assert read_config(str(tmp_path)) == new
        write(tmp_path, "config.json", written_config(new, torch.bfloat16, {"eos_token_id": [5, 7],
                                                                            "bos_token_id": None}))
        assert read_config(str(tmp_path)) == new
        theirs = AutoConfig.from_pretrained(tmp_path)
        assert theirs.eos_token_id == [5, 7] and theirs.dtype == torch.bfloat16
        theirs.save_pretrained(tmp_path)
        assert read_config(str(tmp_path)) == new


def test_the_original_context_is_where_transformers_finds_it(tmp_path):
    # Not there: the whole context. Some files have it outside of rope_scaling, where it counts more than inside.
    frequencies = []
    for scaling, outside in (({}, {}), ({}, {"original_max_position_embeddings": 32}),
                             ({"original_max_position_embeddings": 64}, {"original_max_position_embeddings": 32})):
        config = SIZES | {"model_type": "qwen2", "rope_scaling": {"type": "yarn", "factor": 4.0, **scaling},
                          "head_dim": 64, **outside}
        write(tmp_path, "config.json", config)
        expected, _ = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(tmp_path))
        frequencies.append(ROPE["yarn"](read_config(str(tmp_path)))[0])
        torch.testing.assert_close(frequencies[-1], expected, rtol=1e-6, atol=0)
    assert not torch.allclose(frequencies[0], frequencies[1])


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_of_two_descriptions_of_rotary_positions_the_one_of_transformers_counts(tmp_path, key):
    yarn, linear, plain = {key: "yarn", "factor": 4.0}, {key: "linear", "factor": 3.0}, {"rope_type": "default"}
    for new, old in ((plain, yarn), (yarn, plain), (linear, yarn), (yarn, linear), (yarn, None), (yarn, {}),
                     ({**plain, "rope_theta": 5e5}, yarn), ({**yarn, "rope_theta": 5e5}, {**linear, "rope_theta": 6e5}),
                     (yarn, {**linear, "type": "default", "rope_type": "linear"})):
        for theta in ({}, {"rope_theta": 7e5}):
            write(tmp_path, "config.json",
                  SIZES | {"model_type": "qwen2", "rope_parameters": new, "rope_scaling": old, **theta})
            theirs, ours = AutoConfig.from_pretrained(tmp_path).rope_parameters, read_config(str(tmp_path))
            found = ours.rope_scaling or plain
            assert (ours.rope_theta, found["rope_type"], found.get("factor")) == (
                theirs["rope_theta"], theirs["rope_type"], theirs.get("factor")), (new, old, theta)


def test_what_a_configuration_leaves_out_is_as_transformers_has_it(tmp_path):
    config = AutoConfig.for_model("llama", **SIZES)
    optional = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
                "attention_bias", "mlp_bias", "hidden_act")
    for family in FAMILIES:
        write(tmp_path, "config.json",
              {key: value for key, value in config.to_dict().items() if key not in optional} | {"model_type": family})
        ours = read_config(str(tmp_path))
        assert ((ours.n_kv_head, ours.head_dim, ours.norm_eps, ours.rope_theta, ours.rope_scaling, ours.tied)
                == (4, 12, 1e-6, 10000.0, None, False))
        assert ((ours.qkv_bias, ours.out_bias, ours.mlp_bias, ours.qk_norm)
                == (family == "qwen2", False, False, family == "qwen3"))


LENGTHS = (1, 40, 2, 17, 33, 7)
SAMPLED = {"llama": dict(seed=1, head=2.0, head_dim=32, num_key_value_heads=1),
           "qwen2": dict(seed=3, head=2.0, num_key_value_heads=4),
           "qwen3": dict(seed=1, head=1.5, head_dim=20, tie_word_embeddings=True)}


def sampled_case(family, folder):
    """A model of transformers, the same one here, and prompts of 1 to 40 tokens."""
    model = reference_model(family, rope_parameters={**ROPES["llama3"], "rope_theta": 10000.0}, **SAMPLED[family])
    return model, imported(model, folder), [random_ids(length, seed=length).tolist() for length in LENGTHS]


def reference_logits(model, prompt, completion):
    """Logits that predict a completion. -> (T, V)"""
    return model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1: -1]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_text_and_logprobs_equal_transformers(family, tmp_path):
    model, ours, prompts = sampled_case(family, tmp_path)

    def continuation(prompt, **options):
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
                             pad_token_id=0, **options)
        return out[0, len(prompt):].tolist()

    unstopped = [continuation(prompt) for prompt in prompts]
    assert sum(len(set(tokens)) for tokens in unstopped) > 20
    for prompt, tokens in zip(prompts, unstopped, strict=True):
        best = reference_logits(model, prompt, tokens).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 2e-3  # no near ties: logits differ by less than 3e-5
    stop_tokens = [unstopped[0][9], unstopped[1][4]]
    stopped = [continuation(prompt, eos_token_id=stop_tokens) for prompt in prompts]
    assert len({len(tokens) for tokens in stopped}) > 2
    for stops, expected in (([], unstopped), (stop_tokens, stopped)):
        out = generate(ours, prompts, 3, max_new_tokens=24, stop_tokens=stops, keys=list(range(18)), temperature=0.0)
        for row in range(18):
            tokens = expected[row // 3]
            assert out.tokens[row, : out.lengths[row]].tolist() == tokens
            assert bool(out.stopped[row]) == (tokens[-1] in stops)
    for temperature in (1.0, 0.7):
        out = generate(ours, prompts, 3, max_new_tokens=24, stop_tokens=list(range(12)),
                       keys=[row_key(i) for i in range(18)], temperature=temperature)
        assert len(set(out.lengths.tolist())) > 3 and len({tuple(row) for row in out.tokens.tolist()}) > 14
        for row, (tokens, length) in enumerate(zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)):
            logprobs = torch.log_softmax(reference_logits(model, prompts[row // 3], tokens[:length]) / temperature, -1)
            expected = logprobs.gather(1, torch.tensor(tokens[:length])[:, None])[:, 0]
            assert (out.logprobs[row, :length] - expected).abs().max() < 1e-4


def small_config(family, **changes):
    config = dict(architecture=family, sequence_len=256, vocab_size=265, n_layer=3, n_head=4, n_kv_head=2, n_embd=48,
                  head_dim=20, intermediate_size=80,
                  norm_eps=1e-3, rope_theta=1e4, rope_scaling=ROPES["llama3"], qkv_bias=family == "qwen2",
                  out_bias=False, mlp_bias=False, qk_norm=family == "qwen3", tied=family == "qwen3")
    return DecoderConfig(**config | changes)


@torch.no_grad()
def double_model(family="qwen2", seed=0, **changes):
    model = Decoder(small_config(family, **changes), torch.float64).double()
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.normal_(0.0, p.shape[1] ** -0.5 if p.dim() == 2 else 0.5, generator=draw)
    return model


def padded(rows):
    """Ragged rows as ids and positions, padding after them."""
    ids, positions = (torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long),
                      torch.full((len(rows), max(map(len, rows))), PADDING_POSITION))
    for row, own in enumerate(rows):
        ids[row, : len(own)], positions[row, : len(own)] = own, torch.arange(len(own))
    return ids, positions


@pytest.mark.parametrize("lengths", [(3, 9, 1, 6), (1, 1)])
@torch.no_grad()
def test_right_padded_rows_equal_rows_alone_and_last_only_gives_their_last_tokens(lengths):
    model, rows = double_model(), [random_ids(n, seed=n) for n in lengths]
    ids, positions = padded(rows)
    whole, last = (model.trunk(ids, positions=positions),
                   model.trunk(ids, positions=positions, cache=KVCache(3), last_only=True))
    assert whole.isfinite().all() and last.shape == (len(rows), 1, 48)
    for row, own in enumerate(rows):
        alone = model.trunk(own[None])[0]
        assert (whole[row, : len(own)] - alone).abs().max() < 1e-12
        assert (last[row, 0] - alone[-1]).abs().max() < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_decoding_gives_the_states_of_full_forwards(family):
    # Rows of unlike lengths after ragged prompts; some begin when others are half way, or have ended.
    model, lengths = double_model(family), (21, 1, 4)
    prompts = [random_ids(length, seed=length).tolist() for length in lengths]
    rows = [(p, random_ids(new, seed=50 + i).tolist())
            for i, (p, new) in enumerate([(0, 30), (1, 40), (0, 5), (1, 3), (2, 25), (2, 1), (0, 12)])]
    hidden = decoded(model, prompts, rows, starts=[0, 3, 7, 20, 0, 2, 31])
    for (p, tokens), states in zip(rows, hidden, strict=True):
        whole = model.trunk(torch.tensor([prompts[p] + tokens]))[0, lengths[p]:]
        assert (states - whole).abs().max() < 1e-12


def shared_and_plain(model, rollouts):
    """A sum over all completion tokens of random functions of their logits, twice: prompts run once, and row by row."""
    batch, = packed(rollouts, random_advantages(rollouts))
    direction = torch.randn(265, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    hidden, advantages = completion_hidden(model, batch), random_advantages(rollouts)
    plain = [full_rows(model, rollouts, n) for n in range(len(rollouts.tokens))]
    gap = max((hidden[row, : rollouts.lengths[n]] - plain[n]).abs().max()
              for row, n in enumerate(batch_rows(batch, rollouts)))
    return ((model.lm_head(hidden[batch.mask]) @ direction * batch.advantages[batch.mask]).sum(),
            sum((model.lm_head(row) @ direction * advantages[n, : len(row)]).sum() for n, row in enumerate(plain)), gap)


RAGGED = ([26, 3, 15], [12, 5, 1, 9, 12, 2])


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_and_gradients_after_a_shared_prompt_equal_those_of_plain_rows(family):
    model = double_model(family, out_bias=family == "llama", qkv_bias=family != "qwen3", mlp_bias=family == "llama")
    shared, plain, gap = shared_and_plain(model, random_rollouts(*RAGGED))
    assert gap < 1e-10
    parameters = dict(model.named_parameters())
    results = zip(*(torch.autograd.grad(x, list(parameters.values())) for x in (shared, plain)), strict=True)
    for name, (a, b) in zip(parameters, results, strict=True):
        assert b.abs().max() > 1e-6, name
        assert (a - b).abs().max() < 1e-10 * max(1.0, float(b.abs().max())), name


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_blocks_give_the_same_gradients_and_keep_less(family):
    model, rollouts = double_model(family), random_rollouts(*RAGGED)
    batch, = packed(rollouts, random_advantages(rollouts))
    calls, gradients, kept = [], [], []
    for i, block in enumerate(model.blocks):
        block.mlp.register_forward_pre_hook(lambda *_, i=i: calls.append(i))
    for recompute in (False, True):
        for block in model.blocks:
            block.recompute = recompute
        calls.clear()
        sizes = {}  # by storage: a tensor that several operations keep counts once
        with torch.autograd.graph.saved_tensors_hooks(lambda x, sizes=sizes: sizes.update({x.data_ptr(): x.numel()})
                                                      or x, lambda x: x):
            loss = model.lm_head(completion_hidden(model, batch)).tanh().square().sum()
        kept.append(sum(sizes.values()))
        assert sorted(calls) == [0, 0, 1, 1, 2, 2]  # prompts and completions
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
        assert sorted(calls[6:]) == ([0, 0, 1, 1, 2, 2] if recompute else [])
    for a, b in zip(*gradients, strict=True):
        assert b.abs().max() > 0 and torch.equal(a, b)
    assert kept[1] < 0.7 * kept[0]
    calls.clear()
    with torch.no_grad():
        assert torch.isfinite(completion_hidden(model, batch)).all()
    assert len(calls) == 6


@pytest.mark.parametrize("dtype, given", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_activations_have_the_compute_dtype_but_for_bf16_on_cpu_and_parameters_keep_theirs(dtype, given):
    model = Decoder(small_config("qwen2"), dtype)
    model.init_weights(torch.Generator().manual_seed(0))
    assert model.activation_dtype == model.trunk(random_ids(1, 4)).dtype == given
    assert model(random_ids(1, 4)).dtype == torch.float32
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fresh_weights_follow_the_seed_and_the_deviation():
    states = []
    for seed, std in ((1, 0.02), (1, 0.02), (2, 0.02), (1, 0.5)):
        model = Decoder(small_config("qwen2", out_bias=True, mlp_bias=True))
        model.init_weights(torch.Generator().manual_seed(seed), std)
        states.append(model.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0][name], states[2][name]) and torch.allclose(states[3][name], 25 * states[0][name])
    assert float(states[0][name].std()) == pytest.approx(0.02, rel=0.05)
    for name, x in states[0].items():
        if x.dim() == 1:
            assert (x == (1 if name.endswith("norm.weight") else 0)).all(), name


def test_what_sampling_computed_can_be_trained_with():
    # Rotary frequencies are kept from the first forward, which runs in inference mode here.
    model = double_model()
    generate(model, [[3, 1, 4]], 2, max_new_tokens=4, stop_tokens=[], keys=[1, 2])
    model.trunk(random_ids(1, 9)).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for name, p in model.named_parameters() if not name.startswith("lm_head"))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_joined_weights_are_the_parameters_and_give_the_same(family, monkeypatch):
    """A copy to sample from has one product for queries, keys and values, and one for the MLP's first two."""
    model, ids = double_model(family), random_ids(2, 9)
    before, state = model(ids), {name: x.clone() for name, x in model.state_dict().items()}
    model.join_weights()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in state.items())
    assert (model(ids) - before).abs().max() < 1e-12
    for block in model.blocks:  # what is written into a parameter is in the product
        for part in (block.self_attn.q_proj, block.self_attn.v_proj, block.mlp.up_proj):
            part.weight.zero_()
        H = len(block.self_attn.q_proj.weight)
        assert block.self_attn.qkv[:H].eq(0).all() and block.self_attn.qkv[H:].ne(0).any()
        assert block.mlp.gate_and_up[len(block.mlp.gate_proj.weight):].eq(0).all()
