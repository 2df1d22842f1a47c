"""Weights, gradients and optimizers sharded over ranks: the same steps as one rank's, saved and continued, on one
machine and on two."""
import json
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from conftest import RL_FLAGS, on_ranks, parse, randomized, scripts_on_two_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat import checkpoint
from nanochat.attention import PADDING_POSITION, KVCache, columns_up_to
from nanochat.common import BadInput, all_reduce
from nanochat.engine import generate
from nanochat.gpt import GPT, GPTConfig, run_passes
from nanochat.hf.decoder import Decoder, DecoderConfig
from nanochat.kernels.losses import PolicyLoss
from nanochat.optim import adamw
from nanochat.rl.learn.packing import pack, pad_batches, token_weights
from nanochat.rl.learn.roles import Role, set_recompute
from nanochat.rl.learn.state import load_set
from nanochat.rl.learn.trainer import completion_hidden, score, update
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.records.rollouts import Rollouts
from nanochat.storage.run import MEASURED
from nanochat.weights import (allocate, copy_of, fill, inference_model, is_sharded, local_optimizer_state, refresh,
                              whole_state)
from scripts import tango_rl

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
MODELS = {
    "gpt": (GPT, GPTConfig(64, 265, 3, 2, 1, 48, "SSL")),
    "tied": (Decoder,
             DecoderConfig("qwen2", 64, 97, 3, 4, 2, 32, 8, 48, 1e-6, 1e4, None, True, False, False, False, True)),
    "panels": (Decoder,  # which kernels take in bf16
               DecoderConfig("llama", 64, 128, 2, 2, 1, 64, 32, 96, 1e-6, 1e4, None, False, False, False, False, True)),
}
DTYPES = {"gpt": torch.bfloat16, "tied": torch.float32, "panels": torch.bfloat16}  # of activations that sample
LOSS = PolicyLoss("ppo_clip", kl="k3", kl_coef=0.1)


def random_state(name: str) -> dict:
    """Every parameter random, whole tensors."""
    kind, config = MODELS[name]
    return randomized(allocate(kind, config, torch.float64, "cpu", torch.float64), 3).state_dict()


def make_model(name: str, sharded: bool, device: str = "cpu", activations: torch.dtype = torch.float64,
               weights: torch.dtype = torch.float64):
    kind, config = MODELS[name]
    model = allocate(kind, config, activations, device, weights, sharded)
    fill(model, random_state(name))
    return model


def make_role(name: str, sharded: bool, device: str = "cpu", activations: torch.dtype = torch.float64,
              weights: torch.dtype = torch.float64) -> Role:
    model = make_model(name, sharded, device, activations, weights)
    refresh(model)
    if isinstance(model, Decoder):
        set_recompute(model, True, "model")
    parameters = list(model.parameters())
    return Role("generator", model, parameters, adamw(parameters, 1e-2), copy_of(model, sharded=sharded))


def rollouts_of(rank: int, world: int) -> tuple[Rollouts, torch.Tensor]:
    """This rank's share of 8 groups of 2, and their advantages. The last group teaches nothing and has single tokens,
    so that ranks differ in work."""
    draw = torch.Generator().manual_seed(5)
    widths, lengths = [3, 9, 5, 7, 4, 6, 8, 2], [4, 9, 2, 7, 5, 1, 8, 3, 6, 6, 2, 9, 1, 4, 1, 1]
    prompts = [torch.randint(97, (n,), generator=draw).tolist() for n in widths]
    tokens, advantages = torch.randint(97, (16, 9), generator=draw), torch.randn(16, 9, generator=draw)
    advantages[14:] = 0
    groups = range(rank, 8, world)
    rows = [n for g in groups for n in (2 * g, 2 * g + 1)]
    rollouts = Rollouts([Prompt(prompts[g]) for g in groups], torch.arange(len(groups)).repeat_interleave(2),
                        tokens[rows], torch.zeros(len(rows), 9),
                        torch.tensor(lengths)[rows], torch.ones(len(rows), dtype=torch.bool))
    return rollouts, advantages[rows]


def take_steps(name: str, rank: int, world: int, num_steps: int = 2, role: Role | None = None,
               device: str = "cpu", lr: float = 1e-2) -> tuple[Role, list[dict]]:
    role = role or make_role(name, sharded=world > 1)
    metrics = []
    for _ in range(num_steps):
        rollouts, advantages = rollouts_of(rank, world)
        for field in ("group_id", "tokens", "sampler_logprobs", "lengths", "stopped"):
            setattr(rollouts, field, getattr(rollouts, field).to(device))
        advantages = advantages.to(device)
        weights = token_weights(rollouts.lengths, "token", 9, all_reduce)
        batches = pack(rollouts, advantages, weights, 55, keep_idle=False)
        if world > 1:
            most = int(all_reduce(torch.tensor(len(batches)), "max"))
            assert rank or len(batches) <= most
            batches = pad_batches(batches, most, "cpu")
        metrics.append(update(role, batches, LOSS, lr=lr, max_grad_norm=1.0, temperature=1.0,
                              device=torch.device(device)))
    return role, metrics


def check_one_sharded_rank_on_a_gpu(folder: str) -> None:
    """NCCL and FSDP2 with one rank: the steps of a model that is not sharded."""
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
    for name in MODELS:
        found = [take_steps(name, 0, 1, role=make_role(name, sharded, "cuda"), device="cuda")
                 for sharded in (True, False)]
        assert [is_sharded(role.model) for role, _ in found] == [True, False]
        for ours, theirs in zip(*(metrics for _, metrics in found), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7), name
        states = [whole_state(role.model) for role, _ in found]
        for key, x in states[0].items():
            torch.testing.assert_close(x, states[1][key], rtol=1e-6, atol=1e-8)
    dist.destroy_process_group()
    print("the same")


@pytest.mark.gpu
def test_one_sharded_rank_on_a_gpu_takes_the_same_steps(tmp_path):
    code = f"import test_sharding; test_sharding.check_one_sharded_rank_on_a_gpu({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], cwd=os.path.dirname(__file__), capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, *sys.path]), "LOCAL_RANK": "0"})
    assert done.returncode == 0 and done.stdout.endswith("the same\n"), done.stderr[-2000:]


def save_steps(folder: str) -> None:
    """What each model's steps give on this rank, into a file in the folder."""
    os.environ["NANOCHAT_BASE_DIR"] = folder
    rank, world, found = dist.get_rank(), dist.get_world_size(), {}
    for name in MODELS:
        role, metrics = take_steps(name, rank, world)
        assert (is_sharded(role.model)
                and sum(p.to_local().numel() for p in role.parameters) < 0.7 * sum(p.numel() for p in role.parameters))
        state = whole_state(role.model, keep=rank == 0)
        sampled = generate(inference_model(role.model), [[1, 2, 3], [4]], 1, max_new_tokens=6, stop_tokens=[0],
                           keys=[1, 2], temperature=0.0)
        # Saved here and restored into a fresh role: the next step is the same.
        checkpoint.save_optimizer("rl", name, 3, local_optimizer_state(role.optimizer), rank)
        fresh = make_role(name, sharded=True)
        whole = [state]
        dist.broadcast_object_list(whole)
        checkpoint.restore_model(fresh.model, whole[0], "broadcast")
        checkpoint.load_optimizer("rl", name, 3, fresh.optimizer, rank)
        straight, continued = (take_steps(name, rank, world, 1, r)[1] for r in (role, fresh))
        assert straight == continued, name
        try:  # another rank's part
            saved = checkpoint.load_file(f"{folder}/chatrl_checkpoints/{name}/optim_000003_rank{rank}.pt")
            checkpoint.restore_optimizer(fresh.optimizer, shorter(saved), "a part")
            refused = ""
        except BadInput as error:
            refused = str(error)
        found[name] = {"metrics": metrics + straight, "state": state, "tokens": sampled.tokens, "refused": refused}
        found[name]["gaps"] = gaps_of_an_update(name, DTYPES[name], rank, world)
    torch.save(found, f"{folder}/found{rank}.pt")


def gaps_of_an_update(name: str, dtype: torch.dtype, rank: int, world: int) -> tuple[float, float, float]:
    """How far the logprobs that sampling records are from the trainer's: before an update and after it; and from the
    trainer's of the weights before. fp32 weights, activations of a dtype."""
    role, before = (make(name, True, "cpu", dtype, torch.float32) for make in (make_role, make_model))
    start = gap(role.model, role.model)
    take_steps(name, rank, world, 1, role, lr=0.1)
    return start, gap(role.model, role.model), gap(role.model, before)


def gap(sampled, trained) -> float:
    """The largest difference, over what every rank samples. A collective."""
    prompts = [[1, 2, 3], [4]]
    out = generate(sampled, prompts, 4, max_new_tokens=5, stop_tokens=[], keys=list(range(8)))
    rollouts = Rollouts([Prompt(ids) for ids in prompts], torch.arange(8) // 4, out.tokens, out.logprobs, out.lengths,
                        out.stopped)
    batch, = pack(rollouts, torch.ones(out.tokens.shape), torch.ones(8), 10 ** 6, True)
    return float((score(trained, batch, 1.0) - batch.at_trained(batch.sampler_logprobs)).abs().max())


def shorter(saved: dict) -> dict:
    """An optimizer's part as it would be on more ranks."""
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"][:-1]
    return saved


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_three_sharded_ranks_take_the_steps_of_one(tmp_path):
    """Losses, gradient norms and weights, in fp64; what they sample; a step after a save and a restore is the same to
    the bit. After an update they sample from the weights that it left, in fp32 and bf16."""
    on_ranks(3, save_steps, str(tmp_path))
    ranks = [torch.load(tmp_path / f"found{rank}.pt", weights_only=True) for rank in range(3)]
    for name in MODELS:
        role, expected = take_steps(name, 0, 1)
        state = {key: x.clone() for key, x in role.model.state_dict().items()}
        tokens = generate(role.model, [[1, 2, 3], [4]], 1, max_new_tokens=6, stop_tokens=[0], keys=[1, 2],
                          temperature=0.0).tokens
        expected += take_steps(name, 0, 1, 1, role)[1]
        for rank in ranks:
            for ours, theirs in zip(rank[name]["metrics"], expected, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7), name
            assert torch.equal(rank[name]["tokens"], tokens)
            assert "another number of ranks" in rank[name]["refused"]
            start, after, from_before = rank[name]["gaps"]
            assert max(start, after) < (1e-3 if DTYPES[name] == torch.float32 else 0.2) and from_before > 1, name
        assert len({m["loss"] for m in expected}) == 3 and expected[1]["kl"] > 0
        for key, x in ranks[0][name]["state"].items():
            torch.testing.assert_close(x, state[key], rtol=1e-6, atol=1e-8)
        assert not ranks[1][name]["state"]


def in_two_passes(model, batch) -> torch.Tensor:
    """completion_hidden by two passes, one after the other."""
    prefix, R = KVCache(model.config.n_layer), len(batch.tokens) // len(batch.prompt_ids)
    prompts = model.trunk(batch.prompt_ids, positions=batch.prompt_positions, cache=prefix, last_only=True)
    lengths = (batch.prompt_positions < PADDING_POSITION).sum(dim=1).repeat_interleave(R)
    positions = lengths[:, None] + torch.arange(batch.tokens.shape[1] - 1)
    asked = (columns_up_to(batch.index, *batch.tokens.shape) - 1).clamp(min=0)
    rows, = run_passes(model.blocks, [model.forward_pass(batch.tokens[:, :-1], positions, None, prefix, False,
                                                         lengths=asked)])
    return torch.cat([prompts.repeat_interleave(R, dim=0), rows], dim=1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name, recompute", [("gpt", False), ("tied", True)])
def test_a_pass_over_prompts_and_completions_is_two_passes_to_the_bit(name, recompute, dtype):
    """Hidden states, and gradients after two micro-batches."""
    kind, config = MODELS[name]
    model = allocate(kind, config, dtype, "cpu", torch.promote_types(dtype, torch.float32))
    fill(model, random_state(name))
    for block in model.blocks:
        block.recompute = recompute
    rollouts, advantages = rollouts_of(0, 1)
    batches = pack(rollouts, advantages, token_weights(rollouts.lengths, "token", 9, all_reduce), 70, True)[-2:]
    found = []
    for run in (completion_hidden, in_two_passes):
        model.zero_grad(set_to_none=True)
        states = [run(model, batch) for batch in batches]
        for hidden, batch in zip(states, batches, strict=True):
            model.head(hidden).log_softmax(-1).gather(2, batch.tokens[..., None])[..., 0].sum().backward()
        found.append(states + [p.grad for p in model.parameters()])
    assert len(batches) == 2 and all(x.abs().max() > 0 for x in found[0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


class CountGathers(TorchDispatchMode):
    """How often FSDP2 gathers a block or the root."""
    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += func._schema.name == "c10d::_allgather_base_"
        return func(*args, **(kwargs or {}))


def gathers_of_an_update(kl_coef: float, recompute: bool) -> int:
    name = "tied"
    role, (rollouts, advantages) = make_role(name, sharded=True), rollouts_of(dist.get_rank(), 2)
    set_recompute(role.model, recompute, name)
    batch, = pack(rollouts, advantages, token_weights(rollouts.lengths, "token", 9, all_reduce), 10 ** 6, True)
    with CountGathers() as count:
        update(role, [batch], PolicyLoss("ppo_clip", kl="k3", kl_coef=kl_coef), lr=1e-2, max_grad_norm=1.0,
               temperature=1.0, device=torch.device("cpu"))
    return count.num


def check_gathers() -> None:
    """Three blocks and what is outside of them, once; the blocks once more in the backward pass; a reference forward.
    Prompts and completions apart would take 13 and 20."""
    for recompute in (False, True):
        assert gathers_of_an_update(0.0, recompute) == 3 + 1 + 3
        assert gathers_of_an_update(0.1, recompute) == (3 + 1 + 3) + (3 + 1)


def test_blocks_are_gathered_once_per_direction_for_prompts_and_completions():
    on_ranks(2, check_gathers)


def gathers_of(folder: str) -> None:
    """How often each model's weights are gathered while it is saved and loaded, into a file of this rank."""
    os.environ["NANOCHAT_BASE_DIR"] = folder
    from torch.distributed.tensor import DTensor
    rank, gather, found = dist.get_rank(), DTensor.full_tensor, {}
    for name, (_, config) in MODELS.items():
        seen = []
        DTensor.full_tensor = lambda self, seen=seen: (seen.append(tuple(self.shape)), gather(self))[1]
        role, sizes = make_role(name, sharded=True), [tuple(p.shape) for p in role_parameters(name)]
        assert seen == sizes  # the copy to sample from
        seen.clear()
        state = whole_state(role.model, keep=rank == 0)
        assert seen == sizes and list(state) == (list(role.model.state_dict()) if rank == 0 else [])
        if rank == 0:
            checkpoint.save_model("rl", name, 1, role.model, {}, state)
        dist.barrier()
        seen.clear()
        loaded, _ = checkpoint.load_model("rl", name, "cpu", torch.float64, sharded=True)
        assert not seen and config == loaded.config
        assert all(torch.equal(a.to_local(), b.to_local().float())
                   for a, b in zip(loaded.parameters(), role.model.parameters(), strict=True))
        found[name] = len(sizes)
    with open(f"{folder}/gathers{rank}.json", "w") as f:
        json.dump(found, f)


def role_parameters(name: str) -> list:
    """Of a model that is not sharded, each tensor once."""
    kind, config = MODELS[name]
    return list(allocate(kind, config, torch.float64, "meta", torch.float64).parameters())


def test_a_tied_weight_is_gathered_and_stored_once(tmp_path):
    """By saving it and by refreshing the copy; loading gathers nothing. The file holds it once, under both names."""
    on_ranks(2, gathers_of, str(tmp_path))
    for rank in (0, 1):
        found = json.loads((tmp_path / f"gathers{rank}.json").read_text())
        assert found == {name: len(role_parameters(name)) for name in MODELS}
    path = tmp_path / "chatrl_checkpoints" / "tied" / "model_000001.pt"
    saved = checkpoint.load_file(str(path))
    assert saved["lm_head.weight"].data_ptr() == saved["model.embed_tokens.weight"].data_ptr()
    stored = {x.data_ptr(): x.nbytes for x in saved.values()}
    assert sum(stored.values()) < path.stat().st_size < sum(stored.values()) + saved["lm_head.weight"].nbytes


def node(base, port: int, rank: int, *flags: str):
    """One machine's torchrun, of two with a rank each."""
    env = {**os.environ, "NANOCHAT_BASE_DIR": str(base), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", f"--node-rank={rank}",
               "--master-addr=127.0.0.1", f"--master-port={port}", "scripts/tango_rl.py", "--", *RL_FLAGS, *flags]
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_of(base, run: str) -> list[dict]:
    """metrics.jsonl without timings."""
    lines = (base / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)}
            for line in lines]


def test_a_sharded_run_goes_on_from_a_save_and_two_machines_are_as_one(base):
    """One rank, which has nothing to shard over; two sharded ones; these after an earlier step once more; two machines
    of one rank each."""
    with pytest.raises(BadInput, match="nothing to shard over"):
        tango_rl.main(parse(tango_rl, [*RL_FLAGS, "--shard"]))
    tango_rl.main(parse(tango_rl, [*RL_FLAGS, "--run", "whole"]))
    parts = ("scripts.tango_rl", [*RL_FLAGS, "--run", "parts", "--shard", "--save-every", "1"])
    scripts_on_two_ranks(parts)
    straight, whole = steps_of(base, "parts"), steps_of(base, "whole")
    assert any(record.get("gen/grad_norm", 0) > 0.01 for record in whole)
    for a, b in zip(whole, straight, strict=True):
        for name in ("loss", "grad_norm", "reward", "entropy"):
            key = f"{'gen' if a['role'] == 'generator' else 'ver'}/{name}"
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5), (a["step"], key)

    assert {f"optim_000003_rank{r}.pt" for r in (0, 1)} < set(os.listdir(base / "chatrl_checkpoints" / "parts-ver"))
    with pytest.raises(BadInput, match="sharded over 2 ranks and can be continued by as many, not by 1"):
        load_set("parts", 3, {"generator": None, "verifier": None}, torch.device("cpu"), sharded=True)
    out = scripts_on_two_ranks((parts[0], [*parts[1], "--resume-from-step", "3"]))
    assert "continued after step 3" in out
    assert steps_of(base, "parts") == straight and len(straight) == 7  # to the bit

    port = free_port()
    nodes = [node(base, port, rank, "--run", "nodes", "--shard") for rank in (0, 1)]
    outs = [process.communicate()[0] for process in nodes]
    assert [process.returncode for process in nodes] == [0, 0], outs[0][-2000:] + outs[1][-2000:]
    assert steps_of(base, "nodes") == straight
    assert outs[0].strip().splitlines()[-1] == str(base / "runs" / "nodes")
    assert json.loads((base / "runs" / "nodes" / "config.json").read_text())["world"] == 2
