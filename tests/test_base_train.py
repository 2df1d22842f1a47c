"""Pretraining: the rules from --depth by hand, bits per byte by hand, the compiled trunk, and the script end to end
with resume, signals, ranks and bad input."""
import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import parse, scripts_on_two_ranks

from nanochat.checkpoint import list_steps, load_model
from nanochat.cli import script_main
from nanochat.common import BadInput, CannotWrite, Diverged
from nanochat.dataloader import PackedBatches
from nanochat.gpt import GPT, GPTConfig, config_of, new_model
from nanochat.kernels.attention import register_operator
from nanochat.loss_eval import bits_per_byte, supervised_loss
from nanochat.optim import optimize, pretraining_optimizers, warmup_warmdown
from nanochat.storage.files import path_of
from nanochat.storage.run import Run
from nanochat.supervised import resumable_steps
from nanochat.tokenizer import Tokenizer
from scripts import base_eval, base_train, plan_cost, task_text, tok_train

ROOT = Path(__file__).resolve().parent.parent
TINY = ["--device-type", "cpu", "--depth", "2", "--n-embd", "32", "--n-head", "2", "--sequence-len", "32",
        "--window-pattern", "L", "--total-batch-size", "128",
        "--device-batch-size", "2", "--num-iterations", "8", "--eval-tokens", "256", "--eval-every", "4",
        "--warmup-steps", "2", "--model-tag", "base", "--keep", "0"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A base directory with a tokenizer and four shards of text."""
    base = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        task_text.main(parse(task_text, ["--out", str(base / "text"), "--num-documents", "160"]))
        tok_train.main(parse(tok_train, ["--data", str(base / "text")]))
    return base


def copied(source, tmp_path, monkeypatch):
    shutil.copytree(source, tmp_path / "base")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.fixture
def base(made, tmp_path, monkeypatch):
    """A copy of it, set as NANOCHAT_BASE_DIR."""
    return copied(made, tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def saved_once(made, tmp_path_factory):
    """The same with a finished run that saved every second step."""
    base = shutil.copytree(made, tmp_path_factory.mktemp("saved") / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        train(base, "--save-every", "2")
    return base


@pytest.fixture
def saved(saved_once, tmp_path, monkeypatch):
    return copied(saved_once, tmp_path, monkeypatch)


def flags(base, *more: str) -> list[str]:
    return ["--data", str(base / "text"), *TINY, *more]


def train(base, *more: str) -> None:
    base_train.main(parse(base_train, flags(base, *more)))


def metrics_of(base, tag: str = "base") -> list[dict]:
    return [json.loads(line) for line in (base / "base_checkpoints" / tag / "metrics.jsonl").read_text().splitlines()]


def small_model(**changes) -> GPT:
    config = dict(sequence_len=16, vocab_size=265, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, window_pattern="L")
    model = GPT(GPTConfig(**{**config, **changes}))
    draw = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=draw) * 0.2
    return model


def test_supervised_loss_is_the_cross_entropy_of_trained_tokens():
    model, draw = small_model(), torch.Generator().manual_seed(1)
    ids, mask = torch.randint(265, (3, 9), generator=draw), torch.randint(2, (3, 9), generator=draw)
    for given, trained in ((mask, mask[:, 1:].bool()), (None, torch.ones(3, 8, dtype=torch.bool))):
        expected = F.cross_entropy(model(ids[:, :-1])[trained], ids[:, 1:][trained], reduction="sum") / 7
        expected_grads = torch.autograd.grad(expected, list(model.parameters()), materialize_grads=True)
        loss = supervised_loss(model, ids, given, 7.0)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        grads = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        for p, grad in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(p, grad, rtol=1e-4, atol=1e-5)


def test_bits_per_byte_counts_bytes_of_ordinary_tokens_alone():
    model = small_model()
    token_bytes = torch.tensor([1] * 200 + [3] * 56 + [0] * 9)
    batches = [torch.randint(265, (2, 9), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    nats = num_bytes = 0.0
    for ids in batches:
        logprobs = torch.log_softmax(model(ids[:, :-1]), dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        nats -= logprobs[ids[:, 1:] < 256].sum().item()
        num_bytes += sum(1 if t < 200 else 3 for t in ids[:, 1:].flatten().tolist() if t < 256)
    assert bits_per_byte(model, batches, token_bytes) == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)
    assert bits_per_byte(model, batches, torch.zeros(265)) == math.inf


def trained(model, trunk) -> list[torch.Tensor]:
    """Loss and gradients of two rows."""
    ids = torch.randint(265, (2, 193), generator=torch.Generator().manual_seed(0))
    loss = supervised_loss(model, ids, None, 384.0, trunk)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_a_compiled_trunk_is_one_graph_of_the_same_loss_and_gradients():
    """With sliding windows and gates, in fp32: both passes are traced as for a GPU, and PyTorch's operations run what
    was traced. Names of weights stay."""
    model = small_model(n_layer=2, n_embd=64, n_head=2, n_kv_head=1, window_pattern="SL", sequence_len=192)
    names = list(model.state_dict())
    compiled = trained(model, torch.compile(model.trunk, dynamic=False, fullgraph=True, backend="aot_eager"))
    plain = trained(model, None)
    most = max(float(x.abs().max()) for x in plain)
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6 * most)
    assert list(model.state_dict()) == names


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["L", "SSSL"])
def test_a_compiled_trunk_on_a_gpu_gives_the_loss_to_bf16s_rounding(pattern):
    """At the shape of a small run: the loss to 0.1%, each matrix's gradient to 5% of its norm."""
    model = new_model(GPTConfig(1024, 4096, 4, 4, 2, 512, pattern), 0, torch.device("cuda"), torch.bfloat16)
    for p in model.parameters():
        if not p.any():
            p.data.normal_(0.0, 0.02)
    ids, found = torch.randint(4096, (4, 1025), device="cuda"), []
    register_operator()
    for trunk in (None, torch.compile(model.trunk, dynamic=False)):
        loss = supervised_loss(model, ids, None, 4096.0, trunk)
        found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
    (plain, *gradients), (loss, *compiled) = found
    assert float(loss) == pytest.approx(float(plain), rel=1e-3)
    for ours, theirs in zip(compiled, gradients, strict=True):
        if theirs.numel() > 10 ** 4:
            assert (ours - theirs).norm() <= 0.05 * theirs.norm()


def test_compiling_is_the_default_on_cuda():
    model = small_model()
    for flags, device, compiled in (([], "cuda", True), ([], "cpu", False), (["--compile"], "cpu", True),
                                    (["--no-compile"], "cuda", False)):
        trunk = base_train.training_trunk(parse(base_train, ["--data", "x", *flags]), model, torch.device(device))
        assert (trunk != model.trunk) == compiled


def test_the_learning_rate_goes_up_stays_and_goes_down():
    factors = [warmup_warmdown(step, 10, 2, 0.4, 0.1) for step in range(10)]
    assert factors == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325])
    assert warmup_warmdown(0, 10, 0, 0.0, 0.1) == warmup_warmdown(9, 10, 0, 0.0, 0.1) == 1


def test_every_parameter_has_one_optimizer_and_matrices_have_muon():
    model = small_model(n_embd=48, n_head=2)
    muon, adamw = pretraining_optimizers(model, 0.02, 0.3, 0.008, 0.5, 0.1)
    held = [p for optimizer in (muon, adamw) for group in optimizer.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    assert {id(p) for p in muon.param_groups[0]["params"]} == {id(p) for p in model.transformer.h.parameters()}
    # sqrt(768 / 48) = 4
    assert [group["lr"] for group in adamw.param_groups] == pytest.approx([0.032, 1.2, 0.6, 0.005, 0.5, 0.2])


def test_a_gradient_that_is_not_finite_moves_nothing():
    model = small_model()
    optimizers, before = (pretraining_optimizers(model, 0.02, 0.3, 0.008, 0.5, 0.1),
                          [p.clone() for p in model.parameters()])
    model.lm_head.weight.grad = torch.full_like(model.lm_head.weight, math.nan)
    assert not math.isfinite(optimize(optimizers, list(model.parameters()), 1.0, 1.0))
    assert (all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            and model.lm_head.weight.grad is None)


def rules_of(*more: str, world: int = 8) -> dict:
    args = parse(base_train, ["--data", "x", *more])
    with torch.device("meta"):
        return base_train.apply_rules(args, GPT(config_of(args, 32768)), world)


def test_the_rules_by_hand():
    """Depth 12 is the reference; a deeper model gets a larger batch and less decay."""
    shallow, deep = rules_of("--depth", "12"), rules_of("--depth", "24")
    # 12 layers of 12 * 768^2, gates of 6 x 12 on half of them, head 32768 x 768, smear gate 24
    assert shallow["weights"] == 12 * 12 * 768 ** 2 + 6 * 6 * 12 + 32768 * 768 + 24
    assert shallow["batch"] == 2 ** 19 and shallow["lr_factor"] == 1
    assert shallow["weight_decay"] == pytest.approx(0.28)
    assert shallow["num_steps"] == 12 * shallow["weights"] // 2 ** 19
    ratio = deep["weights"] / shallow["weights"]
    assert deep["batch"] == 2 ** round(19 + math.log2(ratio ** 0.383)) == 2 ** 20
    assert (deep["lr_factor"] == pytest.approx(2 ** 0.5)
            and deep["weight_decay"] == pytest.approx(0.28 * 2 ** 0.5 / ratio))
    assert rules_of("--depth", "24", "--num-iterations", "7")["num_steps"] == 7
    seen = 18 * (513 - 512 * 513 / 2 / 2048) + 6 * 2049 / 2  # SSSL over 24 layers
    model_flops = 6 * deep["weights"] + 12 * 1536 * seen
    assert rules_of("--depth", "24", "--target-flops", "1e18")["num_steps"] == round(1e18 / (model_flops * 2 ** 20))


def test_the_plan_of_the_speedrun_is_its_arithmetic(capsys):
    plan = ["--base", "--depth 12 --num-iterations 100 --window-pattern L", "--gpus", "4", "--mfu", "0.5", "--dollars",
            "2", "--generator-sft", "--num-steps 10 --examples-per-step 4"]
    plan_cost.main(parse(plan_cost, plan))
    lines = capsys.readouterr().out.splitlines()
    weights = 12 * 12 * 768 ** 2 + 6 * 6 * 12 + 32768 * 768 + 24
    per_token = 6 * weights + 12 * 768 * 12 * 2049 / 2
    # 4 square matrices, the MLP's two per layer and six gates 6 x 12: a fourth on each GPU, of the gates two
    muon = 3 * 5 * (4 * 6 * 768 ** 3 + 2 * (4 * 768 ** 2 * 3072 + 2 * 768 ** 3))
    muon += 2 * 5 * (4 * 6 ** 2 * 12 + 2 * 6 ** 3)
    flops = 100 * (2 ** 19 * per_token + 4 * muon)
    hours = flops / (4 * 989e12 * 0.5) / 3600
    assert f"{flops:.2e} FLOPs" in lines[1] and f"{hours:6.3f} h  ${hours * 8:7.2f}" in lines[1]
    assert f"{10 * 4 * 500 * per_token:.2e} FLOPs" in lines[2]
    with pytest.raises(BadInput, match="--no-such"):
        plan_cost.main(parse(plan_cost, ["--base", "--no-such 1"]))
    for flags, words in ((["--generator-sft", "--num-steps -100"], "--num-steps -100.*must be at least 1"),
                         (["--rl", "--examples-per-step 0"], "--examples-per-step 0"),
                         (["--rl", "--recipe prime"], "the figures are those of RL Tango")):
        with pytest.raises(BadInput, match=words):
            plan_cost.main(parse(plan_cost, flags))


def test_a_run_logs_and_is_read_by_base_eval(base, capsys):
    """The same text, the same tokens: base_eval finds what training found. A row of the log for each step."""
    train(base, "--eval-every", "4")
    records = metrics_of(base)
    assert [r["step"] for r in records] == list(range(9))
    assert [r["step"] for r in records if "val_bpb" in r] == [0, 4, 8]
    assert (records[7]["tokens"] == 7 * 128 and records[0]["lr_factor"] == 0.5
            and all(r["skipped"] == 0 for r in records[:-1]))
    _, meta = load_model("base", "base", torch.device("cpu"), torch.float32)
    assert meta["val_bpb"] == records[-1]["val_bpb"] and meta["user_config"]["depth"] == 2
    capsys.readouterr()
    base_eval.main(parse(base_eval, ["--device-type", "cpu", "--model-tag", "base", "--val-data",
                                     str(base / "text" / "shard_00003.jsonl"),
                                     "--split-tokens", "256", "--device-batch-size", "2", "--max-new-tokens", "4",
                                     "--prompts", "3+5"]))
    out = capsys.readouterr().out
    assert (f"bits per byte {records[-1]['val_bpb']:.4f} on 256 tokens" in out
            and "CORE left out" in out and "'3+5' -> " in out)


@pytest.mark.parametrize("stop", [3, 4])
def test_a_resumed_run_equals_an_uninterrupted_one(saved, stop, monkeypatch):
    """A stop request at step `stop` saves that step; going on gives the same weights, bit for bit, and the same log."""
    base = saved
    whole, log = load_model("base", "base", torch.device("cpu"), torch.float32)[0], metrics_of(base)
    step = base_train.train_step

    def stopping(t, trunk):
        if t.state["step"] == stop - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(t, trunk)

    monkeypatch.setattr(base_train, "train_step", stopping)
    with pytest.raises(SystemExit) as exit_code:
        script_main(base_train.main, base_train.make_parser(), flags(base, "--model-tag", "two"))
    assert exit_code.value.code == 143 and list_steps("base", "two") == [stop]
    monkeypatch.undo()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base))
    train(base, "--model-tag", "two", "--resume-from-step", "auto")
    resumed = load_model("base", "two", torch.device("cpu"), torch.float32)[0]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    same = ("step", "loss", "grad_norm", "lr_factor", "val_bpb", "epoch", "documents_cut", "tokens")
    assert [[r.get(k) for k in same] for r in metrics_of(base, "two")] == [[r.get(k) for k in same] for r in log]


def test_text_that_was_moved_is_gone_on_with_and_changed_text_refused(saved, monkeypatch, capsys):
    """More files, another text, another border between what is trained on and what is not. Another dtype is told."""
    again, whole = ["--save-every", "2", "--resume-from-step", "2"], metrics_of(saved)
    (saved / "text").rename(saved / "elsewhere")
    train(saved, *again, "--data", str(saved / "elsewhere"))
    assert [record["loss"] for record in metrics_of(saved)[:8]] == [record["loss"] for record in whole[:8]]
    (saved / "elsewhere").rename(saved / "text")
    first, *others = sorted((saved / "text").iterdir())
    shutil.copy(first, saved / "text" / "shard_9.jsonl")
    with pytest.raises(BadInput, match=r"jsonl of \d+ bytes: there was no more files when step 2 of base was"):
        train(saved, *again)
    (saved / "text" / "shard_9.jsonl").unlink()
    with pytest.raises(BadInput, match="there was .* when step 2 of base was saved"):
        train(saved, *again, "--data", str(first), "--val-data", *map(str, others))
    with monkeypatch.context() as patch:
        patch.setenv("NANOCHAT_DTYPE", "bfloat16")
        train(saved, *again)
    assert "WARNING: step 2 of base was in float32 and goes on in bfloat16" in capsys.readouterr().out
    text = first.read_text()
    first.write_text(text.replace("=", "#"))
    with pytest.raises(BadInput, match=f"{first.name} of .* bytes with another text: there was {first.name} of"):
        train(saved, *again)
    first.write_text(text)
    folder = saved / "base_checkpoints" / "base"
    shutil.copy(folder / "model_000002.pt", folder / "train_000002_rank0.pt")
    with pytest.raises(BadInput, match="train_000002_rank0.pt is not what training goes on from"):
        train(saved, *again)


def test_what_was_trained_before_a_row_without_text_is_saved(base, monkeypatch):
    batch, seen = PackedBatches.next_batch, []

    def fourth_fails(self):
        seen.append(self.rows)
        if seen.count(self.rows) == 4 and self.rows > 1:
            raise BadInput("row 9 has no text")
        return batch(self)

    flags = ["--eval-every", "-1"]
    with monkeypatch.context() as patch:
        patch.setattr(PackedBatches, "next_batch", fourth_fails)
        with pytest.raises(BadInput, match="row 9 has no text; the model after step 3 is saved, and cannot be"):
            train(base, *flags)
    assert list_steps("base", "base") == [3] and resumable_steps("base", "base") == []
    with pytest.raises(BadInput, match="holds a model, of step 3: take another tag$"):
        train(base, *flags)
    with pytest.raises(BadInput, match="train_000003_rank0.pt is missing"):
        train(base, *flags, "--resume-from-step", "auto")


def test_text_to_validate_on_is_another_than_what_is_trained_on(base):
    last = sorted((base / "text").iterdir())[-1]
    for more in (["--val-data", str(last)], ["--data", str(base / "text"), str(last)]):
        with pytest.raises(BadInput, match=f"{last}: is in the text to validate on, and would be trained on too"):
            train(base, *more)
    for data, words in ((str(base / "text" / "shard_00000.jsonl"), "is one file"), ("owner/corpus", "--val-data")):
        with pytest.raises(BadInput, match=words):
            base_train.main(parse(base_train, ["--data", data, *TINY]))


def test_a_model_whose_folder_was_moved_is_saved(base, monkeypatch):
    log, folder = Run.log, base / "base_checkpoints" / "base"

    def moving(self, record):
        if record["step"] == 2:
            folder.rename(base / "elsewhere")
        log(self, record)
    monkeypatch.setattr(Run, "log", moving)
    with pytest.raises(CannotWrite, match="metrics.jsonl cannot be written: .*; the checkpoint of step 3 is whole"):
        train(base)
    assert resumable_steps("base", "base") == [3]


def test_a_finished_run_says_so_and_is_never_trained_over(saved, capsys):
    """Nor is a model without what it goes on from: upstream's, or where that was removed to save room."""
    folder = saved / "base_checkpoints" / "base"
    for missing, words in (([], "take another tag, or continue it"),
                           ([folder / "metrics.jsonl", *folder.glob("train_*.pt")], "take another tag$")):
        for path in missing:
            path.unlink()
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(BadInput, match=f"base holds a model, of step 8: {words}"):
            train(saved, "--num-iterations", "2")
        with pytest.raises(BadInput, match="--seed 5: .* was started with"):
            train(saved, "--resume-from-step", "auto", "--seed", "5")
        capsys.readouterr()
        train(saved, "--resume-from-step", "auto")
        assert "is finished at step 8" in capsys.readouterr().out
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_two_ranks_go_on_together_and_no_other_number_can(base):
    launch = lambda *more: scripts_on_two_ranks(("scripts.base_train", flags(base, *more)))
    launch("--save-every", "5")
    whole = load_model("base", "base", torch.device("cpu"), torch.float32)[0]
    records = metrics_of(base)
    folder = base / "base_checkpoints" / "base"
    assert {"train_000005_rank0.pt", "train_000005_rank1.pt", "model_000005.pt"} <= set(os.listdir(folder))
    with pytest.raises(BadInput, match="saved by 2 ranks"):
        train(base, "--save-every", "5", "--resume-from-step", "5")
    launch("--save-every", "5", "--resume-from-step", "5")
    resumed = load_model("base", "base", torch.device("cpu"), torch.float32)[0]
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert [r["loss"] for r in metrics_of(base)[:8]] == [r["loss"] for r in records[:8]]


def test_a_loss_or_a_model_that_is_not_finite_stops_the_run_and_is_not_saved(base, monkeypatch):
    with pytest.raises(Diverged, match="after step 1: validation bits per byte are nan"):
        train(base, "--num-iterations", "1", "--matrix-lr", "1e30")
    assert list_steps("base", "base") == []
    monkeypatch.setattr(base_train, "supervised_loss", lambda *a: supervised_loss(*a) * math.nan)
    with pytest.raises(Diverged, match="step 2: loss or gradient was not finite three times"):
        train(base, "--model-tag", "two")


def test_another_tokenizer_does_not_take_the_place_of_one_that_models_were_made_for(saved, capsys, monkeypatch):
    again = ["--data", str(saved / "text"), "--vocab-size"]
    tok_train.main(parse(tok_train, [*again, "265"]))  # the same one
    with pytest.raises(BadInput, match="holds the tokenizer of base base, and this would be another"):
        tok_train.main(parse(tok_train, [*again, "270"]))
    tok_train.main(parse(tok_train, [*again, "270", "--if-missing"]))
    assert Tokenizer.load(path_of("tokenizer")).vocab_size == 265
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(saved / "new"))
    tok_train.main(parse(tok_train, again[:2]))
    assert "--vocab-size 265 has no merges: nothing is learnt from the text" in capsys.readouterr().out
    with pytest.raises(BadInput, match="/no/such: no such file"):
        tok_train.main(parse(tok_train, ["--data", "/no/such"]))


def test_the_micro_batch_changes_nothing(saved):
    train(saved, "--model-tag", "two", "--device-batch-size", "4")
    one, two = ([r["loss"] for r in metrics_of(saved, tag)[:8]] for tag in ("base", "two"))
    assert one == pytest.approx(two, rel=1e-4)


@pytest.mark.parametrize("more, complaint", [
    (["--total-batch-size", "100"], "--total-batch-size 100: must be a multiple of --sequence-len 32"),
    (["--n-head", "3"], "--n-head 3"),
    (["--resume-from-step", "3"], "no step 3 to continue from; there are: none"),
    (["--resume-from-step", "soon"], "--resume-from-step soon"),
    (["--model-tag", "../x"], "--model-tag ../x"),
    (["--data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (["--num-iterations", "-1", "--target-param-data-ratio", "0"], "must be above 0"),
    (["--num-iterations", "-1", "--target-param-data-ratio", "0.0001"], "not one step"),
    (["--window-pattern", "X"], "window pattern 'X'"),
])
def test_bad_input_is_one_line_before_anything_is_written(base, capsys, more, complaint):
    with pytest.raises(SystemExit) as exit_code:
        script_main(base_train.main, base_train.make_parser(), flags(base, *more))
    err = capsys.readouterr().err.strip().splitlines()
    assert exit_code.value.code == 2 and complaint in err[-1] and err[-1].startswith("error: ")
    assert not (base / "base_checkpoints").exists()
