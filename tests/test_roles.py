"""The verifier's shared trunk: what is shared, what stays private, what an update moves and what it costs."""
import pytest
import torch
from conftest import parse, random_model, rl_flags
from test_trainer import packed, random_advantages, random_rollouts, step, weights_of

from nanochat.checkpoint import load_model
from nanochat.common import BadInput
from nanochat.kernels.linear_logprob import linear_logprob
from nanochat.optim import adamw
from nanochat.recipes.tango import fixed_generator
from nanochat.rl.learn.heads import check_shared, copy_shared_lambdas, share_layers
from nanochat.rl.learn.roles import Role, find_starts, load_roles, trainable_only
from nanochat.rl.learn.state import weights_to_save
from nanochat.rl.run.flags import complete_args
from nanochat.weights import copy_of
from scripts import tango_rl

N_LAYER = 4
LAMBDAS = ("resid_lambdas", "x0_lambdas")


def tiny_model(seed=0, n_layer=N_LAYER, n_embd=48):
    return random_model(n_layer, seed, torch.float32, n_embd)


def two_models(num_layers):
    """Generator, verifier with that many shared layers, and the verifier's private parameters."""
    generator, verifier = tiny_model(0), tiny_model(1)
    private = share_layers(generator, verifier, num_layers)
    return generator, verifier, private


def names_of(model, parameters):
    chosen = {id(p) for p in parameters}
    return {name for name, p in model.named_parameters() if id(p) in chosen}


def one_update(model, parameters):
    rollouts = random_rollouts([3, 2], [6, 3, 5, 6], 7)
    metrics = step(Role("verifier", model, parameters, adamw(parameters, 1e-3)),
                   packed(rollouts, random_advantages(rollouts)), lr=1e-3, max_grad_norm=1.0)
    assert metrics["skipped"] == 0 and metrics["grad_norm"] > 0


def expected_shared(num_layers):
    """The design's list: embedding, smear, and blocks and value embeddings (of layers 1 and 3) with index < n."""
    names = {"transformer.wte.weight", "smear_gate.weight", "smear_lambda"} if num_layers else set()
    for i in range(num_layers):
        block = f"transformer.h.{i}"
        names |= {f"{block}.attn.{part}.weight" for part in ("c_q", "c_k", "c_v", "c_proj")}
        names |= {f"{block}.mlp.c_fc.weight", f"{block}.mlp.c_proj.weight"}
        names |= {f"{block}.attn.ve_gate.weight", f"value_embeds.{i}.weight"} if i % 2 == 1 else set()
    return names


@pytest.mark.parametrize("num_layers", range(N_LAYER + 1))
def test_shared_parameters_are_the_generators_own(num_layers):
    generator, verifier, private = two_models(num_layers)
    shared = {name for name, p in verifier.named_parameters() if p is generator.get_parameter(name)}
    assert shared == expected_shared(num_layers)
    assert names_of(verifier, private) == {name for name, _ in verifier.named_parameters()} - shared
    assert len({id(p) for p in private}) == len(private)
    if num_layers == N_LAYER:  # no entry of the lambdas moves, see below
        assert names_of(verifier, private) - set(LAMBDAS) == {"lm_head.weight", "backout_lambda"}


@pytest.mark.parametrize("num_layers", [0, 2, N_LAYER])
def test_a_verifier_update_moves_the_private_weights_alone(num_layers):
    generator, verifier, private = two_models(num_layers)
    before_generator, before = weights_of(generator), weights_of(verifier)
    one_update(verifier, private)
    assert all(torch.equal(p, before_generator[name]) for name, p in generator.named_parameters())
    shared = expected_shared(num_layers)
    for name, p in verifier.named_parameters():
        if name in LAMBDAS:
            moved = p != before[name]
            assert not moved[:num_layers].any() and moved[num_layers:].all(), name
        else:
            assert torch.equal(p, before[name]) == (name in shared), name


@pytest.mark.parametrize("num_layers", [2, N_LAYER])
def test_a_generator_update_moves_the_shared_trunk_for_both(num_layers):
    generator, verifier, private = two_models(num_layers)
    one_update(verifier, private)  # leaves the shared weights without gradients
    before, before_verifier = weights_of(generator), weights_of(verifier)
    one_update(generator, list(generator.parameters()))
    copy_shared_lambdas(generator, verifier, num_layers)
    assert not any(torch.equal(p, before[name]) for name, p in generator.named_parameters())
    for name, p in verifier.named_parameters():
        if name in LAMBDAS:
            assert torch.equal(p[:num_layers], generator.get_parameter(name)[:num_layers])
            assert not torch.equal(p[:num_layers], before_verifier[name][:num_layers])
            assert torch.equal(p[num_layers:], before_verifier[name][num_layers:])
        else:
            assert torch.equal(p, generator.get_parameter(name) if name in expected_shared(num_layers)
                               else before_verifier[name])


@pytest.mark.parametrize("num_layers", [1, 2, N_LAYER])
def test_shared_blocks_cost_no_backward_pass(num_layers):
    _, verifier, private = two_models(num_layers)
    trainable_only(verifier, private)
    assert names_of(verifier, [p for p in verifier.parameters() if p.requires_grad]) == names_of(verifier, private)
    reached = {}
    for i, block in enumerate(verifier.transformer.h):
        block.register_forward_hook(lambda block, inputs, outs, i=i: reached.update({i: outs[0][0].requires_grad}))
    verifier(torch.tensor([[1, 2, 3]]))
    assert reached == {i: i >= num_layers for i in range(N_LAYER)}


def test_sharing_all_layers_gives_the_generators_hidden_states_and_loading_writes_through():
    generator, verifier, _ = two_models(N_LAYER)
    verifier.backout_lambda.data = generator.backout_lambda.data.clone()
    ids = torch.tensor([[1, 2, 3, 4]])
    assert torch.equal(verifier.trunk(ids), generator.trunk(ids)) and not torch.equal(verifier(ids), generator(ids))
    generator, verifier, _ = two_models(2)
    alone, other, ids = tiny_model(9), tiny_model(8), torch.tensor([[1, 2, 3, 4]])
    assert list(verifier.state_dict()) == list(alone.state_dict())
    alone.load_state_dict(verifier.state_dict())
    assert torch.equal(alone(ids), verifier(ids))
    verifier.load_state_dict(other.state_dict())
    assert torch.equal(generator.transformer.wte.weight, other.transformer.wte.weight)
    assert verifier.transformer.wte.weight is generator.transformer.wte.weight


def test_layers_out_of_range_models_of_different_shape_and_another_trunk_are_refused():
    for num_layers in (-1, N_LAYER + 1):
        with pytest.raises(BadInput, match=f"--verifier-shared-layers {num_layers}.* {N_LAYER} layers"):
            share_layers(tiny_model(0), tiny_model(1), num_layers)
    with pytest.raises(BadInput, match="differ in shape"):
        share_layers(tiny_model(0, n_embd=64), tiny_model(1), 1)
    assert len(share_layers(tiny_model(0, n_embd=64), tiny_model(1), 0)) == len(list(tiny_model().parameters()))
    generator, verifier = tiny_model(0), tiny_model(0)
    for name in ("transformer.h.2.mlp.c_fc.weight", "value_embeds.3.weight", "lm_head.weight", "backout_lambda"):
        verifier.get_parameter(name).data += 1
    for name in ("transformer.wte.weight", "smear_lambda", "transformer.h.0.mlp.c_fc.weight", "value_embeds.1.weight"):
        check_shared(generator, verifier, 2, "d4-ver")
        before = verifier.get_parameter(name).data.clone()
        verifier.get_parameter(name).data.flatten()[-1] += 1e-3
        with pytest.raises(BadInput, match=f"-layers 2: {name} of verifier d4-ver is not the generator's"):
            check_shared(generator, verifier, 2, "d4-ver")
        check_shared(generator, verifier, 0, "d4-ver")
        verifier.get_parameter(name).data.copy_(before)
    with pytest.raises(BadInput):
        check_shared(generator, verifier, 3, "d4-ver")


@pytest.mark.parametrize("n_layer, n_embd", [(2, 48), (3, 48), (N_LAYER, 64)])
def test_a_verifier_of_another_shape_is_refused_as_bad_input(n_layer, n_embd):
    """Also where all that both have is equal."""
    generator, verifier = tiny_model(0, n_layer, n_embd), tiny_model(0)
    theirs = dict(generator.named_parameters())
    for name, p in verifier.named_parameters():
        if name in theirs and theirs[name].shape == p.shape:
            theirs[name].data = p.data.clone()
    with pytest.raises(BadInput):
        check_shared(generator, verifier, 3, "d4-ver")


def test_a_reference_is_frozen_and_stays_after():
    model = tiny_model()
    reference, before = copy_of(model), weights_of(model)
    assert [{p.requires_grad for p in m.parameters()} for m in (reference, model)] == [{False}, {True}]
    one_update(model, list(model.parameters()))
    assert all(torch.equal(p, before[name]) for name, p in reference.named_parameters())


def test_a_frozen_role_in_bf16_does_what_fp32_weights_do_and_is_saved_as_it_was_loaded(sft_base, monkeypatch):
    """Hidden states and logprobs to the bit, at half the memory."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(sft_base))
    args = parse(tango_rl, rl_flags("--recipe", "fixed_generator"))
    complete_args(args, fixed_generator.ROLES)
    starts = find_starts(args, fixed_generator.ROLES)
    roles = load_roles(args, fixed_generator.ROLES, starts, torch.device("cpu"), torch.bfloat16)
    role, trained, wide = roles["generator"], roles["verifier"], load_model("sft", "tiny", "cpu", torch.bfloat16)[0]
    assert {p.dtype for p in role.model.parameters()} == {torch.bfloat16}
    assert {p.dtype for p in (*wide.parameters(), *trained.model.parameters())} == {torch.float32}
    ids = torch.randint(wide.vocab_size, (3, 20), generator=torch.Generator().manual_seed(0))
    ours, theirs = role.model.trunk(ids), wide.trunk(ids)
    assert torch.equal(ours, theirs) and ours.std() > 0.1
    logprobs = [linear_logprob(ours.flatten(0, 1), model.lm_head.weight, ids.flatten(), **model.head_options())[0]
                for model in (role.model, wide)]
    assert torch.equal(*logprobs)
    assert {p.dtype for p in trained.reference.parameters()} == {torch.bfloat16}
    saved, start = weights_to_save(role, True), wide.state_dict()
    assert saved.keys() == start.keys() and all(torch.equal(saved[name], p) for name, p in start.items())
    assert any(not torch.equal(p, role.model.state_dict()[name].float()) for name, p in start.items())
    assert weights_to_save(trained, True)["lm_head.weight"].data_ptr() == trained.model.lm_head.weight.data_ptr()
    role.model.lm_head.weight.data[0, 0] += 1
    assert {p.dtype for p in weights_to_save(role, True).values()} == {torch.bfloat16}
