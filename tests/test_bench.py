"""The benchmark scripts run, say what they ran in one line of JSON, and refuse what cannot work; the floors are the
ones written down."""
import json
import sys
from types import SimpleNamespace

import pytest
import torch

from dev.bench import attention as bench_attention, engine as bench_engine, kernels as bench_kernels, step as bench_step
from nanochat import flops
from nanochat.cli import script_main
from nanochat.gpt import GPT, GPTConfig
from tests.conftest import parse

TINY = ["--device-type", "cpu", "--vocab-size", "70", "--depth", "2", "--n-embd", "24", "--n-head", "2", "--n-kv-head",
        "1", "--prompt-len", "5", "--completion-len", "4"]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def known_speed(monkeypatch):
    """A machine of 1 MFLOP/s and 1 MB/s: measuring a real one takes seconds."""
    for script in (bench_step, bench_engine):
        monkeypatch.setattr(script, "machine_speed", lambda device, dtype: (1e6, 1e6))


def run(script, flags, capsys) -> dict:
    script.main(parse(script, flags))
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


@pytest.mark.parametrize("role, sampled",
                         [("plain", 4 * 3 * 4), ("generator", 4 * 3 * (4 + 6)), ("verifier", 4 * 4 + 4 * 3 * 6)])
def test_bench_step_runs_each_role(role, sampled, capsys):
    verification = [] if role == "plain" else ["--verification-len", "6"]
    result = run(bench_step, [*TINY, "--role", role, "--examples-per-step", "4", "--num-samples", "3", "--steps", "2",
                              *verification], capsys)
    assert {"s_per_step", "gen_s", "update_s", "completion_tok_per_s", "peak_mem_mb", "floor_s"} <= result.keys()
    assert result["completion_tok_per_s"] == pytest.approx(sampled / result["s_per_step"], rel=0.05)
    assert (result["verify_s"] == 0) == (role == "plain") and result["gen_s"] > 0 and result["update_s"] > 0
    assert result["role"] == role and result["floor_s"] > 0


def test_bench_step_trains_the_role_it_names(monkeypatch, capsys):
    updated = []
    monkeypatch.setattr(
        bench_step, "update",
        lambda role, batches, *args, **options: updated.append((role.name, batches[0].prompt_ids.shape[1])))
    for role in ("plain", "generator", "verifier"):
        run(bench_step, [*TINY, "--role", role, "--examples-per-step", "2", "--num-samples", "2", "--steps", "1"],
            capsys)
    assert updated == [("generator", 5)] * 4 + [("verifier", 5 + 4)] * 2


def test_bench_engine_reports_ours(monkeypatch, capsys):
    monkeypatch.setattr(bench_engine, "transformers", bench_engine.ours)  # the peer may not be installed
    result = run(bench_engine, [*TINY, "--rows", "6", "--num-samples", "3", "--rounds", "1"], capsys)["results"]
    assert "decode_tok_per_s" in result["ours"] and result["bound"]["decode_tok_per_s"] > 0


def test_bench_attention_compares_with_explicit_products(monkeypatch, capsys):
    monkeypatch.setattr(bench_attention, "machine_speed", lambda device, dtype: (1e6, 1e6))
    flags = ["--device-type", "cpu", "--rounds", "1", "--prefix-len", "9", "--completion-len", "5", "--rows", "3"]
    for window in ("0", "6"):
        results = run(bench_attention, [*flags, "--window", window], capsys)["results"]
        assert results.keys() == {"ours", "sdpa", "decode: plain"}
        assert all(results[name]["gradient_error"] < 1e-5 for name in ("ours", "sdpa"))
    with monkeypatch.context() as patch:
        patch.setitem(bench_attention.TRAINING, "sdpa",
                      lambda *given: lambda *x: 1.1 * bench_attention.ours(*given)(*x))
        bench_attention.main(parse(bench_attention, flags))
    assert "sdpa is left out: its gradients are off by 1.0e-01 of their norm" in capsys.readouterr().out


def test_bench_attention_counts_what_is_seen_by_hand():
    """Prefixes of 9 and 4 tokens, 3 rows of 5 each: a row sees 10 + .. + 14 = 60 and 5 + .. + 9 = 35 keys; in a window
    of 6 before each 5 x 7 = 35 and 5 + 6 + 7 + 7 + 7 = 32. The newest tokens of 2 x 3 rows read 6 x 5 own keys, and 9
    and 4 of the prefixes; in the window 2 of each prefix."""
    args = parse(bench_attention, ["--prefix-len", "9", "--completion-len", "5", "--rows", "3", "--head-dim", "8"])
    for window, pairs, tokens in ((14, 3 * 95, 6 * 5 + 13), (6, 3 * 67, 6 * 5 + 4)):
        args.window = window
        assert bench_attention.seen_pairs(args) == pairs
        assert bench_attention.decoding_actions(args, CPU)[1] == 2 * tokens * 2 * 8 * 4


def test_a_provider_with_wrong_gradients_is_left_out(monkeypatch, capsys):
    monkeypatch.setitem(bench_kernels.PROVIDERS, "liger",
                        lambda *args, **inputs: 1.1 * bench_kernels.naive(*args, **inputs))
    bench_kernels.main(parse(bench_kernels, ["--device-type", "cpu", "--rows", "40", "--n-embd", "16", "--vocab-size",
                                             "70", "--rounds", "1", "--providers", "ours,naive,liger"]))
    out = capsys.readouterr().out
    assert "liger is left out: its gradients are off" in out
    results = json.loads(out.splitlines()[-1])["results"]
    assert list(results) == ["ours", "naive", "three products", "linear_logprob", "one product"]
    assert results["ours"]["gradient_error"] < 1e-4 and results["one product"]["percent_of_products"] == 100


def test_other_packages_cross_entropies_give_the_same_gradients(monkeypatch, capsys):
    """Made of their interfaces: what the packages compute, with PyTorch's cross entropy in their kernels' place."""
    ce = torch.nn.functional.cross_entropy
    cut = SimpleNamespace(linear_cross_entropy=lambda e, c, targets, softcap, reduction: ce(
        softcap * torch.tanh(e @ c.t() / softcap) if softcap else e @ c.t(), targets, reduction=reduction))
    quack = SimpleNamespace(
        linear_cross_entropy_func=lambda x, w, bias, targets, reduction, inplace_backward: ce(
            x @ w.t(), targets, reduction=reduction),
        chunked_linear_cross_entropy=lambda x, w, targets: ce(x @ w.t(), targets))
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", cut)
    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(linear_cross_entropy=quack))
    monkeypatch.setitem(sys.modules, "quack.linear_cross_entropy", quack)
    flags = ["--device-type", "cpu", "--rows", "40", "--n-embd", "16", "--vocab-size", "70", "--rounds", "1",
             "--providers", "cce,quack,quack_ce"]
    results = run(bench_kernels, flags, capsys)["results"]
    assert all(results[name]["gradient_error"] < 1e-5 for name in ("cce", "quack", "quack_ce"))
    bench_kernels.main(parse(bench_kernels, [*flags, "--softcap", "15"]))
    out = capsys.readouterr().out
    assert json.loads(out.splitlines()[-1])["results"]["cce"]["gradient_error"] < 1e-5
    assert "quack is left out: NotImplementedError: it has no softcap and no temperature" in out


@pytest.mark.parametrize("script, flags, words", [
    (bench_step, ["--n-head", "5"], "--n-head 5"),
    (bench_step, ["--verification-len", "6"], "--verification-len 6: --role plain has no verifier"),
    (bench_step, ["--compile"], "--compile: for --shape on CUDA alone"),
    (bench_engine, ["--rows", "7", "--num-samples", "2"], "--rows 7"),
    (bench_attention, ["--providers", "ours,theirs"], "theirs"), (bench_attention, ["--n-head", "3"], "--n-head 3"),
    (bench_kernels, ["--providers", "ours,theirs"], "there is no theirs")])
def test_what_cannot_work_is_refused_in_one_line(script, flags, words, capsys):
    with pytest.raises(SystemExit) as stop:
        script_main(script.main, script.make_parser(), [*flags, "--device-type", "cpu"])
    captured = capsys.readouterr()
    assert stop.value.code == 2 and words in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_floors_are_the_formulas():
    # 2 layers of width 24: per layer q and c_proj 24x24, k and v 24x12, MLP 2 x 24x96.
    model = GPT(GPTConfig(64, 70, 2, 2, 1, 24, "L"))
    blocks, head = 2 * (2 * 24 * 24 + 2 * 24 * 12 + 2 * 24 * 96), 128 * 24
    assert flops.matrix_weights(model) == blocks
    # Of the last layer a prompt needs keys and values alone.
    assert flops.prefill_floor(model, 3, 5, (1e6, 1e6)) == pytest.approx(2 * (blocks // 2 + 2 * 24 * 12) * 15 / 1e6)
    # Memory alone: weights, and of every cached token 2 layers x (k, v) x 12 numbers; 3 prompts of 5 tokens, 6 rows.
    reads = [4 * (blocks + head) + 4 * 48 * (15 + 6 * t) for t in range(4)]
    assert flops.decode_floor(model, 3, 6, 5, 4, (1e18, 1e6)) == pytest.approx(sum(reads) / 1e6)
    work = [6 * (2 * (blocks + head) + 4 * 2 * 24 * (5 + t)) for t in range(4)]
    assert flops.decode_floor(model, 3, 6, 5, 4, (1e6, 1e18)) == pytest.approx(sum(work) / 1e6)
