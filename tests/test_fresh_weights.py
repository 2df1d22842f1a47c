"""What is sampled is the model as it is: after every way in which weights change, the logprobs that sampling records
are those of the trainer, and no longer those of the weights before."""
import copy
from types import SimpleNamespace

import pytest
import torch
from conftest import randomized
from test_play import play_of
from test_trainer import packed, random_advantages, random_rollouts, role_of

from nanochat.checkpoint import load_model, restore_model, save_model
from nanochat.engine import generate, row_key
from nanochat.gpt import GPT, GPTConfig
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.kernels.losses import PolicyLoss
from nanochat.optim import adamw, muon_adamw, pretraining_optimizers
from nanochat.rl.learn.heads import share_layers
from nanochat.rl.learn.roles import share_copies
from nanochat.rl.learn.trainer import score, update
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.weights import is_sharded
from scripts import base_train, chat_sft

CPU, VOCAB = torch.device("cpu"), 265
MODELS = {
    "own": (GPT, GPTConfig(64, VOCAB, 2, 2, 1, 48, "SL")),
    "imported": (Decoder, DecoderConfig("qwen2", 64, VOCAB, 2, 4, 2, 48, 12, 64, 1e-6, 1e4, None, True, False, False,
                                        False, False)),
    "tied": (Decoder, DecoderConfig("qwen3", 64, VOCAB, 2, 4, 2, 48, 12, 64, 1e-6, 1e4, None, False, False, False,
                                    True, True)),
    "panels": (Decoder, DecoderConfig("llama", 64, 288, 2, 2, 1, 64, 32, 96, 1e-6, 1e4, None, False, False, False,
                                      False, True)),  # in bf16 by the kernels of tiles.py
}
# Largest difference of a token's logprob: what rounding may make, and what the changes below make at least.
CLOSE, APART = {torch.float32: 1e-3, torch.bfloat16: 0.25}, 1.0
LR = 0.1  # a step moves each weight by about as much as it is
every_dtype = pytest.mark.parametrize("dtype", list(CLOSE), ids=["fp32", "bf16"])


def model_of(name: str, dtype: torch.dtype, seed: int = 0):
    """fp32 weights, all of them random, and activations of a dtype."""
    kind, config = MODELS[name]
    return randomized(kind(config, dtype), seed)


def gap(sampled, trained) -> float:
    """The largest difference between the logprobs that sampling of one model records and the trainer's of another."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(VOCAB, (n,), generator=draw).tolist() for n in (3, 9)]
    out = generate(sampled, prompts, 4, max_new_tokens=12, stop_tokens=[], keys=[row_key(n) for n in range(8)])
    rollouts = Rollouts([Prompt(ids) for ids in prompts], torch.arange(8) // 4, out.tokens, out.logprobs, out.lengths,
                        out.stopped)
    batch, = packed(rollouts, torch.ones(out.tokens.shape))
    return float((score(trained, batch, 1.0) - batch.at_trained(batch.sampler_logprobs)).abs().max())


def check_follows(model, change) -> None:
    """Sampling of a model follows a change of its weights."""
    before = copy.deepcopy(model)
    assert gap(model, model) < CLOSE[model.compute_dtype] and gap(model, before) < CLOSE[model.compute_dtype]
    for _ in range(2):
        change()
        assert gap(model, model) < CLOSE[model.compute_dtype]
        assert gap(model, before) > APART


def learn(role) -> None:
    """A step of RL on tokens and advantages that nobody drew."""
    rollouts = random_rollouts([3, 7], [5, 9, 4, 8])
    metrics = update(role, packed(rollouts, random_advantages(rollouts)), PolicyLoss(), lr=LR, max_grad_norm=1.0,
                     temperature=1.0, device=CPU)
    assert metrics["skipped"] == 0


RUN = SimpleNamespace(device=CPU, tell=lambda line: None)


def trained_by_rl(model):
    role = role_of(model, adamw(model.parameters(), LR))
    return lambda: learn(role)


def trained_by_sft(model, optimizers=None):
    args = SimpleNamespace(pack=False, micro_batch_tokens=100, shard=False, num_steps=10, verifier_shared_layers=0,
                           lr_schedule="cosine", warmup_ratio=0.1)
    draw = torch.Generator().manual_seed(2)
    examples = [(torch.randint(VOCAB, (n,), generator=draw).tolist(), [0] + [1] * (n - 1)) for n in (5, 9, 12)]
    optimizers = optimizers or muon_adamw(model, LR, LR)
    t = chat_sft.Training(args, "x", None, None, model, optimizers, None, {}, [], state={"step": 1}, run=RUN)
    return lambda: chat_sft.train_step(t, examples)


def trained_by_sft_with_adamw(model):
    return trained_by_sft(model, [adamw(model.parameters(), LR)])


def trained_by_pretraining(model, optimizers=None):
    args = SimpleNamespace(device_batch_size=2, warmup_steps=0, warmdown_ratio=0.0, final_lr_frac=0.0,
                           max_grad_norm=1.0)
    ids = torch.randint(VOCAB, (4, 17), generator=torch.Generator().manual_seed(2))
    rules = {"batch": 64, "num_steps": 10, "weight_decay": 0.0}
    optimizers = optimizers or pretraining_optimizers(model, LR, LR, LR, LR, 0.0)
    t = base_train.Pretraining(args, "x", None, [], [], model, optimizers, SimpleNamespace(next_batch=lambda: ids),
                               rules, {"step": 0}, RUN)
    return lambda: base_train.train_step(t, model.trunk)


@every_dtype
@pytest.mark.parametrize("name, training", [
    *((name, way) for name in MODELS for way in (trained_by_rl, trained_by_sft)),
    ("own", trained_by_sft_with_adamw), ("own", trained_by_pretraining)], ids=lambda x: getattr(x, "__name__", x))
def test_sampling_follows_a_step_of_training(name, training, dtype):
    model = model_of(name, dtype)
    check_follows(model, training(model))


@every_dtype
@pytest.mark.parametrize("name", ["own", "imported"])
@pytest.mark.parametrize("head", ["frozen", "trunk"])
def test_sampling_follows_a_shared_trunk_that_the_other_role_trains(name, head, dtype):
    """The verifier is sampled after each update of the generator, and the generator after the verifier's where the
    verifier trains what they share."""
    generator, verifier = (role_of(model_of(name, dtype, seed)) for seed in range(2))
    private = share_layers(generator.model, verifier.model, 1)
    verifier.parameters = list(verifier.model.parameters()) if head == "trunk" else private
    verifier.num_shared = 1
    share_copies(generator, verifier)
    for role in (generator, verifier):
        role.optimizer = adamw(role.parameters, LR)
    check_follows(verifier.model, lambda: learn(generator))
    if head == "trunk":
        check_follows(generator.model, lambda: learn(verifier))
    else:
        learn(verifier)
        assert gap(generator.model, generator.model) < CLOSE[dtype]
    assert gap(verifier.model, verifier.model) < CLOSE[dtype]


@every_dtype
@pytest.mark.parametrize("name", MODELS)
def test_sampling_follows_weights_that_are_copied_restored_written_and_loaded(name, dtype, tmp_path, monkeypatch):
    """Restored into one that was sampled from already. Written by hand, past autograd's count of changes: as optimizers
    that make one pass over memory do."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    t = play_of(source=model_of(name, dtype, 1), snapshot=model_of(name, dtype, 0))
    check_follows(t.roles["snapshot"].model, lambda: t.copy_weights("source", "snapshot"))
    model, state = model_of(name, dtype, 0), model_of(name, dtype, 1).state_dict()
    check_follows(model, lambda: restore_model(model, state, "a file"))
    before, version = copy.deepcopy(model), model.lm_head.weight._version
    assert gap(model, before) < CLOSE[dtype]
    model.lm_head.weight.data.mul_(-1.0)
    assert model.lm_head.weight._version == version
    assert gap(model, model) < CLOSE[dtype] and gap(model, before) > APART
    save_model("sft", "x", 1, model, {})
    loaded, _ = load_model("sft", "x", CPU, dtype)
    assert not is_sharded(loaded) and gap(loaded, model) < CLOSE[dtype] and gap(model, loaded) < CLOSE[dtype]
