"""Imported models in bf16 on CPU, with the kernels of products and without."""
import contextlib
import weakref
from dataclasses import replace

import pytest
import torch
from test_tiles import OF_ROUNDING, assert_close, native as one_thread, random, threads
from test_trainer import packed as packed_batches

from nanochat import checkpoint
from nanochat.attention import PADDING_POSITION, first_columns
from nanochat.checkpoint import dtype_for
from nanochat.common import BadInput
from nanochat.engine import generate, row_key
from nanochat.gpt import GPTConfig
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.kernels import cpu, tiles
from nanochat.rl.learn.trainer import score
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts

native = one_thread  # the fixture
LOGPROB_GAP = 0.05  # of a token's logprob where sums have other orders: 0.025 was measured, 0.0003 in the mean


@contextlib.contextmanager
def without_kernels():
    """PyTorch's operations on rounded operands, and the plain attention and decoding."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "library", lambda: None)
        patch.setattr(tiles, "has_kernels", lambda: False)
        yield


CONFIGS = {"llama": DecoderConfig("llama", 128, 256, 2, 4, 2, 64, 32, 96, 1e-5, 1e4, None, False, False, False, False,
                                  True)}
CONFIGS["qwen2"] = replace(CONFIGS["llama"], architecture="qwen2", qkv_bias=True, tied=False)
CONFIGS["qwen3"] = replace(CONFIGS["llama"], architecture="qwen3", qk_norm=True)    # by PyTorch, but the LM head
CONFIGS["narrow"] = replace(CONFIGS["llama"], head_dim=16, n_embd=48, vocab_size=250)  # all of it
PROMPTS = [[1, 2, 3, 4], [5, 6], [7] * 9, [8, 9, 10]]


def model_of(name: str, std: float = 0.1) -> Decoder:
    model = Decoder(CONFIGS[name], torch.bfloat16)
    model.init_weights(torch.Generator().manual_seed(1), std)
    for i, (path, p) in enumerate(model.named_parameters()):
        if "norm" in path or "bias" in path:
            p.data += 0.1 * random(*p.shape, seed=i)
    return model


def sample(model, **options):
    """7 completions of each of 4 prompts, some of which end early; 5 places, so that they are refilled."""
    return generate(model, PROMPTS, 7, **(dict(max_new_tokens=24, stop_tokens=[3, 40, 99], max_rows=5,
                                               keys=[row_key(n) for n in range(28)]) | options))


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_model_computes_what_pytorchs_operations_do(native, name):
    model, ids, grad = model_of(name), torch.arange(5 * 37).view(5, 37) * 89 % 250, random(5, 37, 48)

    def results():
        model.zero_grad()
        hidden = model.trunk(ids)
        (model.head(hidden)[..., :48] * grad).sum().backward()
        return [hidden.detach(), *(p.grad for p in model.parameters())]
    ours = results()
    assert (model.blocks[0].layer(ours[0]) is not None) == (name in ("llama", "qwen2"))
    with threads(2 if name == "qwen2" else 1):
        for a, b in zip(results(), ours, strict=True):
            assert_close(a, b, 1e-4)
    with without_kernels():
        expected = results()
    for a, b in zip(ours, expected, strict=True):
        assert_close(a, b, 2 * OF_ROUNDING)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_padding_is_not_run(native, monkeypatch, name):
    """Of rows whose first tokens are asked for, and of prompts; what is asked for and all gradients are the same."""
    model, T, lengths = model_of(name), 37, torch.tensor([37, 1, 20, 0, 8, 36])
    ids, prompts = torch.arange(6 * T).view(6, T) * 89 % 250, torch.arange(3 * 9).view(3, 9) * 83 % 250
    positions = torch.arange(9).expand(3, 9).masked_fill(torch.arange(9) >= torch.tensor([[9], [2], [5]]),
                                                         PADDING_POSITION)
    places, num_run = first_columns(lengths, T), []
    call = cpu.call
    monkeypatch.setattr(cpu, "call", lambda kernel, *args: (
        num_run.append(args[-1]) if kernel == "decoder_before" else None, call(kernel, *args)))

    def results(hidden):
        model.zero_grad()
        (hidden * random(*hidden.shape)).sum().backward()
        return [hidden.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]  # the head is not run

    def after(lengths):
        columns = 9 + torch.arange(T).expand(6, T)  # of rows two by two after a prompt
        first, rest = model.trunk_after(prompts, positions, ids, columns, lengths)
        return torch.cat([first[:, 0], rest.flatten(0, 1)[places]])
    for kept, full, num_prompts in ((lambda: model.trunk(ids, kept=places),
                                     lambda: model.trunk(ids).flatten(0, 1)[places], []),
                                    (lambda: after(lengths), lambda: after(None), [16])):
        num_run.clear()
        ours = results(kept())
        if name in ("llama", "qwen2"):
            assert num_run == [*num_prompts, len(places)] * 2  # in each layer
        for a, b in zip(ours, results(full()), strict=True):
            assert_close(a, b, 1e-4)


def test_panels_go_with_their_pass_and_not_with_the_graph(native, monkeypatch):
    made, num_alive = [], lambda: sum(panels() is not None for panels in made)
    for name in ("packed", "packed_back"):
        def pack(*weights, function=getattr(tiles, name), **options):
            panels = function(*weights, **options)
            made.append(weakref.ref(panels))
            return panels
        monkeypatch.setattr(tiles, name, pack)
    total = model_of("llama").trunk(torch.arange(12).view(2, 6)).sum()
    assert (len(made), num_alive()) == (2 * 4, 0)  # in each layer of one product, and of three
    total.backward()
    assert (len(made), num_alive()) == (2 * 8, 0)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_model_samples_what_pytorchs_operations_do(native, name):
    model = model_of(name)
    options = dict(temperature=0.0, stop_tokens=[])
    ours = sample(model, **options)
    with threads(2 if name == "qwen2" else 1):  # few tokens: on busy cores threads wait for each other
        few = sample(model, **options, max_new_tokens=4, max_rows=28)
    assert torch.equal(few.tokens, ours.tokens[:, :4])
    with without_kernels():
        expected = sample(model, **options)
    assert torch.equal(ours.tokens, expected.tokens)
    assert (ours.logprobs - expected.logprobs).abs().max() < LOGPROB_GAP


@pytest.mark.parametrize("name, options", [*((name, {}) for name in CONFIGS), ("llama", {"max_rows": 1000}),
                                           ("qwen2", {"temperature": 0.6}), ("narrow", {"temperature": 0.6})])
def test_sampling_records_the_trainers_logprobs(native, name, options):
    model = model_of(name, 0.2)
    out = sample(model, **options)
    lengths = out.lengths.tolist()
    assert min(lengths) < max(lengths)
    batch = Rollouts([Prompt(ids) for ids in PROMPTS], torch.arange(28) // 7, out.tokens, out.logprobs, out.lengths,
                     out.stopped)
    batch, = packed_batches(batch, torch.ones(out.tokens.shape))
    trained = score(model, batch, options.get("temperature", 1.0))
    gap = (trained - batch.at_trained(batch.sampler_logprobs)).abs()
    assert gap.max() < LOGPROB_GAP and gap.mean() < LOGPROB_GAP / 50 and trained.min() < -3


def test_wide_imported_models_compute_in_bf16_where_the_cpu_gains_by_it(monkeypatch):
    device, narrow = torch.device("cpu"), replace(CONFIGS["llama"], n_embd=checkpoint.NARROW_FROM - 32)
    wide_model, gpt = replace(narrow, n_embd=checkpoint.NARROW_FROM), GPTConfig(64, 96, 2, 2, 1, 1024, "L")
    monkeypatch.delenv("NANOCHAT_DTYPE", raising=False)
    for has_bf16 in (False, True):
        monkeypatch.setattr(checkpoint, "has_bf16", lambda has=has_bf16: has)
        assert dtype_for(device, wide_model) == (torch.bfloat16 if has_bf16 else torch.float32)
        odd, normed = replace(wide_model, vocab_size=97), replace(wide_model, qk_norm=True)  # not the kernels'
        for others in ((), (narrow,), (gpt,), (wide_model, narrow), (wide_model, gpt), (odd,), (normed,)):
            assert dtype_for(device, *others) == torch.float32
        for name in ("float32", "bfloat16"):
            monkeypatch.setenv("NANOCHAT_DTYPE", name)
            assert {dtype_for(device, x) for x in (wide_model, narrow, gpt)} == {getattr(torch, name)}
        monkeypatch.setenv("NANOCHAT_DTYPE", "float16")
        with pytest.raises(BadInput, match="overflows"):
            dtype_for(device, wide_model)
        monkeypatch.delenv("NANOCHAT_DTYPE")
