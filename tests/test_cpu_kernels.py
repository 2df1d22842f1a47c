"""
The CPU kernels of attention and drawing against their PyTorch twins in fp64; whole models with and without kernels; how they are compiled.

    python -m pytest tests/test_cpu_kernels.py -q
"""
import os
import re
import subprocess
import sys

import pytest
import torch

from nanochat import engine
from nanochat.attention import FAR, RECENT_KERNEL, KVCache, Mask, attend, make_mask
from nanochat.engine import generate, pick
from nanochat.gpt import GPT, GPTConfig
from nanochat.kernels import cpu

KERNELS = pytest.mark.skipif(cpu.library() is None, reason="no C compiler")
SHAPES = [  # U, Hkv, R, group, T, tokens of the prefix, D
    (2, 2, 3, 2, 5, 7, 32), (1, 1, 1, 1, 70, 0, 32), (2, 2, 3, 1, 33, 64, 64), (2, 1, 2, 3, 1, 19, 32), (3, 2, 1, 2, 1, 0, 96), (2, 2, 5, 1, 64, 1, 32),
    (1, 2, 9, 4, 2, 35, 32)]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(U, Hkv, R, group, T, Tp, D, window=10 ** 6, context=10 ** 6, own=None):
    """q (heads innermost, as the model has them), k, v, prefix k and v; their mask. Prompts are shorter by one token each."""
    own = T if own is None else own
    q = random(U, R, T, Hkv, group, D).permute(0, 3, 1, 4, 2, 5)
    inputs = [q, *(random(U, Hkv, R, own, D, seed=s) for s in (1, 2)), *(random(U, Hkv, Tp, D, seed=s) for s in (3, 4) if Tp)]
    prefix, lengths = None, torch.tensor([max(1, Tp - u) for u in range(U)])
    if Tp:
        prefix = KVCache(1)
        columns = torch.arange(Tp).expand(U, Tp)
        prefix.positions = torch.where(columns < lengths[:, None], columns, FAR)
    positions = lengths.repeat_interleave(R)[:, None] - 1 + (own > 0) + torch.arange(T)
    return inputs, make_mask(T, window, context, None, prefix, positions, torch.float32)


def wide(mask):
    return Mask(*(None if x is None else x.double() for x in (mask.own, mask.prefix)), mask.causal)


def call(inputs, mask):
    q, k, v, *prefix = inputs
    return attend(q, [(k, v)], mask, *prefix)


def assert_close(a, b, tolerance=3e-6):
    assert a.shape == b.shape and a.isfinite().all()
    assert a.numel() == 0 or (a - b).abs().max() <= tolerance * max(1, b.abs().max())


def assert_agrees(inputs, mask, grad=None):
    """Outputs and gradients of the kernels, against the twin in fp64."""
    inputs = [x.requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = call(inputs, mask), call(exact, wide(mask))
    assert out.grad_fn.name() != expected.grad_fn.name() and "Kernel" in out.grad_fn.name()
    grad = random(*out.shape, seed=9) if grad is None else grad(out)
    for a, b in zip((out, *torch.autograd.grad(out, inputs, grad)), (expected, *torch.autograd.grad(expected, exact, grad.double())), strict=True):
        assert_close(a, b)
    with torch.no_grad():
        assert_close(call(inputs, mask), expected)


@KERNELS
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window, context", [(10 ** 6, 10 ** 6), (3, 10 ** 6), (0, 10 ** 6)])
def test_attention_equals_the_twin(shape, window, context):
    assert_agrees(*case(*shape, window=window, context=context))


@KERNELS
@pytest.mark.parametrize("U, Hkv, R, group, Tp, D", [(3, 2, 1, 2, 20, 32), (2, 1, 3, 1, 64, 64)])
def test_one_query_with_no_own_keys(U, Hkv, R, group, Tp, D):
    # How the last layer of a prompt is run: all keys are behind the query.
    assert_agrees(*case(U, Hkv, R, group, 1, Tp, D, own=0))


@KERNELS
def test_memory_may_lie_in_any_order():
    inputs, mask = case(2, 2, 3, 2, 5, 7, 32)
    for order in ((0, 2), (0, -1), (3, -1)):
        assert_agrees([x.detach().transpose(*(d if -d <= x.dim() and d < x.dim() else 0 for d in order)).contiguous()
                       .transpose(*(d if -d <= x.dim() and d < x.dim() else 0 for d in order)) for x in inputs], mask)
    assert_agrees([torch.stack([x, x], dim=-2)[..., 0, :] for x in inputs], mask)  # gaps between heads
    assert_agrees(inputs, mask, lambda out: torch.ones(()).expand(out.shape))
    assert_agrees(inputs, mask, lambda out: random(*out.shape[::-1]).permute(5, 4, 3, 2, 1, 0))


@KERNELS
def test_padding_of_a_prefix_takes_no_gradient():
    inputs, mask = case(2, 2, 3, 2, 5, 7, 32)
    prefix = [x.requires_grad_() for x in inputs[3:]]
    for grad in torch.autograd.grad(call(inputs, mask).square().sum(), prefix):
        assert grad[1, :, 6:].eq(0).all() and grad[1, :, :6].ne(0).all() and grad[0].ne(0).all()


@KERNELS
def test_large_scores_and_what_is_not_a_number():
    inputs, mask = case(2, 2, 2, 1, 40, 20, 32)
    inputs[0] *= 3e3
    inputs = [x.requires_grad_() for x in inputs]
    assert_close(call(inputs, mask), call([x.double() for x in inputs], wide(mask)), 1e-3)  # scores of 1e4 are known to 1e-3
    assert all(x.isfinite().all() for x in torch.autograd.grad(call(inputs, mask).sum(), inputs))
    spoilt = [x.detach().clone() for x in inputs]
    spoilt[1][1, 0, 1, 7, 3] = float("nan")  # a key: seen by queries 7 and later of that row and head
    out = call(spoilt, mask).isnan()
    assert out[1, 0, 1, 0, 7:].all() and out.sum() == 33 * 32


@KERNELS
def test_a_second_backward_pass_gives_the_same_and_no_input_changes():
    inputs, mask = case(2, 2, 3, 2, 35, 7, 32)
    inputs = [x.requires_grad_() for x in inputs]
    before, out = [x.detach().clone() for x in inputs], call(inputs, mask)
    first, second = (torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second)) and all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))
    grads = torch.autograd.grad(call(inputs, mask).square().sum(), inputs, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grads[0].sum().backward()


@KERNELS
@pytest.mark.parametrize("T", [1, 40])
def test_the_number_of_threads_changes_nothing(T):
    inputs, mask = case(3, 2, 3, 2, T, 20, 32)
    inputs, before, results = [x.requires_grad_() for x in inputs], torch.get_num_threads(), []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        out = call(inputs, mask)
        with torch.no_grad():
            results.append((out, call(inputs, mask), *torch.autograd.grad(out, inputs, torch.ones_like(out))))
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@KERNELS
@pytest.mark.parametrize("Hkv, group, R", [(2, 1, 3), (1, 3, 40), (2, 2, 1)])
@pytest.mark.parametrize("before, recent", [(1, 0), (1, 5), (RECENT_KERNEL + 3, 17), (3, RECENT_KERNEL)])
@pytest.mark.parametrize("Tp", [0, 9, 33])
@pytest.mark.parametrize("window", [10 ** 6, 4])
@torch.no_grad()
def test_decoding_equals_the_twin(Hkv, group, R, before, recent, Tp, window):
    # A cache of `before` columns that were moved and `recent` ones that were not.
    (q, _, _, *shared), _ = case(2, Hkv, R, group, 1, Tp, 32)
    k, v = (random(2, Hkv, R, before + recent, 32, seed=s) for s in (5, 6))
    prefix = KVCache(1)
    prefix.positions = torch.tensor([[*range(Tp)], [*range(Tp - 1), FAR]]) if Tp else None
    cache = KVCache(1)
    for start, end in [(0, before), *((t, t + 1) for t in range(before, before + recent))]:
        parts = cache.append(0, k[..., start:end, :], v[..., start:end, :])
    assert [part[0].shape[3] for part in parts] == [before] + [recent] * (recent > 0)
    cache.length = before + recent - 1
    positions = torch.tensor([Tp, Tp - 1]).clamp(min=0).repeat_interleave(R)[:, None] + cache.length
    mask = make_mask(1, window, 10 ** 6, cache, prefix if Tp else None, positions, torch.float32)
    kept = [x.clone() for x in (q, *shared, *(x for part in parts for x in part))]
    out = attend(q, parts, mask, *shared)
    expected = attend(q.double(), [(k.double(), v.double())], wide(mask), *(x.double() for x in shared))
    assert_close(out, expected)
    assert out.dtype == torch.float32 and all(map(torch.equal, kept, (q, *shared, *(x for part in parts for x in part))))


# Drawing

def twin(monkeypatch, *arguments):
    with monkeypatch.context() as patch:
        patch.setattr(cpu, "library", lambda: None)
        return pick(*arguments)


@KERNELS
@pytest.mark.parametrize("V", [1, 5, 16, 100, 265, 1000])
@pytest.mark.parametrize("temperature, top_k", [(1.0, 0), (0.7, 0), (1.0, 3)])
def test_the_same_tokens_are_drawn(monkeypatch, V, temperature, top_k):
    logits = (3 * random(400, V + 20))[:, 3: 3 + V]
    logits[:, V // 2] = float("-inf") if V > 1 else 0.0
    keys = torch.arange(400) * 7919
    tokens, logprobs = pick(logits, keys, 5, temperature, top_k)
    expected, expected_logprobs = twin(monkeypatch, logits, keys, 5, temperature, top_k)
    assert torch.equal(tokens, expected) and (logprobs - expected_logprobs).abs().max() < 3e-6
    assert tokens.dtype == torch.long and (V == 1 or (tokens != V // 2).all()) and tokens.unique().numel() >= min(V, 3) - (V == 5)


@KERNELS
@pytest.mark.parametrize("noise, expected", [(0.0, 2), (1 - 2 ** -53, 37)])
def test_the_ends_of_the_noise_draw_the_first_and_the_last_possible_token(monkeypatch, noise, expected):
    monkeypatch.setattr(engine, "uniform_noise", lambda keys, position: torch.full((len(keys),), noise, dtype=torch.float64))
    logits = random(8, 70)
    logits[:, :2] = logits[:, 38:] = float("-inf")
    assert pick(logits, torch.arange(8), 0, 1.0, 0)[0].tolist() == [expected] * 8


@KERNELS
def test_frequencies_are_the_probabilities():
    logits = random(1, 40, seed=3) * 1.5
    tokens, logprobs = pick(logits.expand(20000, 40).contiguous(), torch.arange(20000), 0, 1.0, 0)
    probs = torch.softmax(logits[0].double(), dim=0)
    expected = 20000 * probs
    assert ((torch.bincount(tokens, minlength=40) - expected) ** 2 / expected).sum() < 75  # 39 degrees of freedom: p < 0.0005
    assert (logprobs.double() - probs[tokens].log()).abs().max() < 2e-6


@KERNELS
def test_logits_that_are_not_numbers_give_such_logprobs():
    logits = random(2, 20)
    logits[0, 3] = float("nan")
    tokens, logprobs = pick(logits, torch.arange(2), 0, 1.0, 0)
    assert logprobs.isnan().tolist() == [True, False] and tokens.min() >= 0 and tokens.max() < 20


# Whole models

def model_of(n_layer=2, n_kv_head=4, pattern="L", dtype=torch.float32):
    model = GPT(GPTConfig(512 if "S" not in pattern else 64, 265, n_layer, 4, n_kv_head, 128, pattern), dtype).to(dtype)
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw).to(dtype) * (p.shape[1] ** -0.5 if p.dim() == 2 else 0.5)
    if "S" in pattern:
        model.windows = [7 if kind == "S" else 64 for kind in "SL"[: n_layer - 1].ljust(n_layer - 1, "S") + "L"]
    return model


@KERNELS
@pytest.mark.parametrize("n_layer, n_kv_head, pattern", [(2, 4, "L"), (3, 2, "SL")])
def test_a_model_is_the_same_with_kernels(monkeypatch, n_layer, n_kv_head, pattern):
    model, ids = model_of(n_layer, n_kv_head, pattern), torch.randint(265, (3, 40), generator=torch.Generator().manual_seed(1))
    prompts, keys = [ids[0, :5].tolist(), ids[1, :12].tolist()], list(range(6))

    def run():
        model.zero_grad()
        logits = model(ids)
        logits.square().mean().backward()
        samples = [generate(model, prompts, 3, max_new_tokens=20, stop_tokens=[7], keys=keys, temperature=t) for t in (1.0, 0.0)]
        return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, *samples

    ours = run()
    monkeypatch.setattr(cpu, "library", lambda: None)
    theirs = run()
    assert_close(ours[0], theirs[0], 1e-5)
    for name, grad in ours[1].items():
        assert (grad - theirs[1][name]).abs().max() <= 2e-5 * max(1e-3, theirs[1][name].abs().max()), name
    for a, b in zip(ours[2:], theirs[2:], strict=True):
        assert torch.equal(a.tokens, b.tokens) and (a.logprobs - b.logprobs).abs().max() < 3e-5


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("n_layer, n_kv_head, pattern", [(1, 4, "L"), (2, 2, "L"), (3, 4, "SL"), (3, 2, "S")])
def test_last_only_gives_the_last_tokens_of_the_whole(dtype, tolerance, n_layer, n_kv_head, pattern):
    model, lengths = model_of(n_layer, n_kv_head, pattern, dtype), torch.tensor([20, 1, 13])
    ids = torch.randint(265, (3, 20), generator=torch.Generator().manual_seed(1))
    positions = torch.where(torch.arange(20) < lengths[:, None], torch.arange(20), FAR)
    results = []
    for last_only in (False, True):
        cache = KVCache(n_layer)
        hidden = model.trunk(ids, positions=positions, cache=cache, last_only=last_only)
        hidden = hidden[:, 0] if last_only else hidden[torch.arange(3), lengths - 1]
        assert hidden.shape == (3, 128)
        # The keys are used too: as a group's prompt they take gradients.
        keys = sum((x.flatten(0, 2) * (positions < FAR).repeat_interleave(n_kv_head, dim=0)[..., None]).square().sum() for x in (*cache.k, *cache.v))
        grads = torch.autograd.grad(hidden.sin().sum() + 1e-2 * keys, list(model.parameters()), allow_unused=True)
        results.append([hidden.detach(), cache.last_embedding.detach(), *(g for g in grads if g is not None)])
    assert len(results[0]) == len(results[1])
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= tolerance * max(1, a.abs().max())


def test_joined_projections_go_when_sampling_ends():
    model = model_of()
    with pytest.raises(KeyError), model.joined_projections():
        assert torch.equal(model.transformer.h[0].attn.c_qkv[128:256], model.transformer.h[0].attn.c_k.weight)
        raise KeyError
    assert all(block.attn.c_qkv is None and "c_qkv" not in vars(block.attn) for block in model.transformer.h)


# Compiling

SCRIPT = "import torch\nfrom nanochat.kernels import cpu\nfrom nanochat.ops import norm\nx = torch.ones(2, 32)\n" \
         "print(cpu.library() is not None, float(norm(x).sum()))\n"


def start(tmp_path, **env):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.path.dirname(os.path.dirname(os.path.abspath(__file__))), **env}
    return subprocess.Popen([sys.executable, "-c", SCRIPT], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """cpu.library as a new process finds it, with a cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cpu.library.__wrapped__


@KERNELS
def test_two_processes_compile_once_and_leave_one_file(tmp_path):
    processes = [start(tmp_path) for _ in range(2)]
    assert [p.communicate() for p in processes] == [("True 64.0\n", "")] * 2
    folder = tmp_path / "nanochat" / "kernels"
    files = os.listdir(folder)
    assert len(files) == 1 and re.fullmatch(r"cpu-[0-9a-f]{24}\.so", files[0]) and folder.stat().st_mode & 0o777 == 0o700
    written = os.stat(folder / files[0]).st_mtime_ns
    assert start(tmp_path).communicate() == ("True 64.0\n", "") and os.stat(folder / files[0]).st_mtime_ns == written


@pytest.mark.parametrize("env, problem", [({"CC": "false", "PATH": "/usr/bin:/bin"}, "false"), ({"CC": "", "PATH": "/nonexistent"}, "no C compiler"),
                                          ({"NANOCHAT_CPU_KERNELS": "0"}, "")])
def test_without_a_compiler_pytorch_does_the_work(fresh, monkeypatch, capsys, tmp_path, env, problem):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert fresh() is None
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == bool(problem) and not list(tmp_path.rglob("*.so")) and not list(tmp_path.rglob("tmp*"))


@KERNELS
def test_a_cache_folder_that_cannot_be_used_is_left_alone(fresh, monkeypatch, tmp_path):
    (tmp_path / "nanochat").write_text("a file")
    assert fresh() is not None
    os.remove(tmp_path / "nanochat")
    monkeypatch.setattr(os, "getuid", lambda: 12345)  # somebody else's folder: what lies there is not loaded
    assert fresh() is not None and not list(tmp_path.rglob("*.so"))


@KERNELS
def test_other_sources_or_flags_have_another_name(fresh, monkeypatch, tmp_path):
    compiler = cpu.shutil.which("cc") or cpu.shutil.which("gcc") or cpu.shutil.which("clang")
    names = {cpu.compiled(compiler, cpu.FLAGS), cpu.compiled(compiler, cpu.FLAGS)}
    assert len(names) == 1
    names.add(cpu.compiled(compiler, [*cpu.FLAGS, "-DOTHER"]))
    monkeypatch.setattr(cpu, "processor", lambda: b"another one")
    names.add(cpu.compiled(compiler, cpu.FLAGS))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("cpu.h", "cpu_block.c", "cpu_attention.c"):
        (tmp_path / name).write_text(open(os.path.join(cpu.FOLDER, name)).read() + ("/* more */\n" if name == "cpu.h" else ""))
    monkeypatch.setattr(cpu, "FOLDER", str(tmp_path))
    names.add(cpu.compiled(compiler, cpu.FLAGS))
    assert len(names) == 4 and all(os.path.exists(name) for name in names)


def test_every_kernel_is_called_as_it_is_written():
    kinds = {"long": "c_long", "float": "c_float"}
    source = "".join(open(path).read() for path in cpu.SOURCES)
    written = {}
    for name, parameters in re.findall(r"^void (\w+)\(([^)]*)\)", source, re.MULTILINE):
        written[name] = ["c_void_p" if "*" in p else kinds[p.split()[0]] for p in parameters.split(",")]
        assert parameters.split(",")[-1].strip() == "long threads"
    assert written == {name: [t.__name__ for t in types] + ["c_long"] for name, types in cpu.ARGUMENTS.items()}
