"""Faults of whole runs: ranks and torchrun that die, drift and numbers that are none on one rank, no network, two
processes in one folder, malicious json. Faults of one module stand in its own tests."""
import contextlib
import json
import math
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
from conftest import ONE, RL_FLAGS, TASK_FLAGS, on_two_ranks, parse, rl_flags
from test_tango_rl import ROOT, records, weights

from nanochat import core_eval
from nanochat.checkpoint import load_meta
from nanochat.common import BadInput, Diverged
from nanochat.dataloader import open_rows
from nanochat.hf.files import find_folder
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.learn import trainer
from nanochat.rl.run import steps
from nanochat.rl.run.progress import health_warnings
from nanochat.rl.run.resume import read_config
from nanochat.storage import files
from nanochat.storage.run import claim_run_name, lock_run
from scripts import chat_sft, tango_rl
from tasks.conversations import load_conversations
from tasks.tables import read_hub


@pytest.fixture
def two_ranks(base):
    """A run on two ranks that would go on for long, after its third step; and the processes of its ranks. All of them
    are gone after the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
               "scripts/tango_rl.py", "--", *RL_FLAGS, "--run", "r", "--save-every", "2", "--num-steps", "1000"]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    for line in process.stdout:
        if line.startswith("step    2"):
            break
    ranks = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    yield process, ranks
    for pid in (process.pid, *ranks):
        if is_there(pid):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


def is_there(pid: int) -> bool:
    """Whether a process is at work: not gone, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def last_saved(base) -> int:
    return max(int(name[6:12]) for name in os.listdir(base / "runs" / "r") if name.startswith("state_"))


def assert_run_is_free(base) -> None:
    """Nobody holds its lock, and its last set is whole."""
    lock_run(str(base / "runs" / "r")).close()
    saved = last_saved(base)
    assert torch.load(base / "runs" / "r" / f"state_{saved:06d}.pt", weights_only=True)["step"] == saved
    assert weights(base, "r", saved)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the request comes from Linux")
def test_ranks_whose_torchrun_was_killed_save_and_end(base, two_ranks):
    process, ranks = two_ranks
    assert len(ranks) == 2
    process.kill()
    end = time.monotonic() + 60
    while any(map(is_there, ranks)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_there, ranks))
    assert_run_is_free(base)
    assert last_saved(base) == len(records(base, "r")) >= 3


def test_when_a_rank_dies_all_end_and_the_last_set_stays(base, two_ranks):
    process, ranks = two_ranks
    os.kill(ranks[1], signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0 and not any(map(is_there, ranks))
    assert_run_is_free(base)


def drift(monkeypatch) -> None:
    """Rank 1's generator moves by a last bit after its first update."""
    apply_update = steps.apply_update

    def drifting(t, update):
        metrics = apply_update(t, update)
        if update.role == "generator" and t.run.rank == 1:
            weight = t.roles["generator"].model.lm_head.weight.data
            weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))
        return metrics
    monkeypatch.setattr(steps, "apply_update", drifting)


def poison(monkeypatch) -> None:
    """Rank 1's losses are no numbers."""
    loss = trainer.linear_policy_loss

    def poisoned(*args, **kwargs):
        total, logprobs, entropy = loss(*args, **kwargs)
        return (total * float("nan") if os.environ["RANK"] == "1" else total), logprobs, entropy
    monkeypatch.setattr(trainer, "linear_policy_loss", poisoned)


def run_with_faults(folder: str) -> None:
    """What each fault's run ends with on this rank, into <folder>/<rank>.json."""
    ends = {}
    for fault in (drift, poison):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            try:
                tango_rl.main(parse(tango_rl, rl_flags("--run", fault.__name__, "--save-every", "2")))
            except Diverged as error:
                ends[fault.__name__] = str(error)
    with open(f"{folder}/{os.environ['RANK']}.json", "w") as f:
        json.dump(ends, f)


@pytest.fixture(scope="module")
def faults_of_rank_1(sft_base, tmp_path_factory):
    """The base directory and what each fault's run ended with, rank by rank."""
    base = tmp_path_factory.mktemp("faults") / "base"
    shutil.copytree(sft_base, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        on_two_ranks(run_with_faults, str(base))
    return base, [json.loads((base / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_weights_that_drift_between_ranks_are_noticed_before_they_are_saved(faults_of_rank_1):
    """The generator's first update is that of step 2, after the warm-up; step 4 would be saved."""
    base, ends = faults_of_rank_1
    for end in ends:
        assert end["drift"].startswith("step 4: the weights of the generator are no longer the same on all ranks "
                                       "(lm_head.weight)")
    assert [name for name in os.listdir(base / "runs" / "drift") if name.startswith("state")] == ["state_000002.pt"]


def test_a_loss_that_is_no_number_on_one_rank_moves_no_rank_and_stops_all(faults_of_rank_1):
    base, ends = faults_of_rank_1
    assert all("not finite three times in a row" in end["poison"] for end in ends)
    log = records(base, "poison")
    assert [r.get("gen/skipped", r.get("ver/skipped")) for r in log] == [1] * len(log)
    for role, tag in (("gen", "tiny"), ("ver", "tiny-ver")):
        saved, start = (torch.load(base / path, weights_only=True) for path in (
            f"chatrl_checkpoints/poison-{role}/model_000002.pt", f"chatsft_checkpoints/{tag}/model_000200.pt"))
        assert all(torch.equal(saved[name], start[name]) for name in start)


def watched(folder: str, environment: dict, tag: str) -> None:
    """SFT and a dummy run, in a process of their own that has no network: what they print and ask for, into a file."""
    local = (None, "", "localhost", "127.0.0.1", "::1")

    def watch(event, args):
        if event == "socket.getaddrinfo" and args[0] not in local or (
                event == "socket.connect" and isinstance(args[1], tuple) and args[1][0] not in local):
            print("NETWORK", event, args[-1], args[0], flush=True)
            raise OSError("no network")
    os.environ |= environment
    for name in ("WANDB_MODE", "HF_HUB_OFFLINE"):  # which conftest sets
        os.environ.pop(name, None)
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = False
    torch.set_num_threads(1)
    with open(f"{folder}/{tag}", "w") as f, contextlib.redirect_stdout(f), contextlib.redirect_stderr(f):
        sys.addaudithook(watch)
        chat_sft.main(parse(chat_sft, ["--role", "generator", *TASK_FLAGS, "--device-type", "cpu", "--model-tag", tag,
                                       "--depth", "1", "--n-embd", "64", "--n-head", "2", "--sequence-len", "128",
                                       "--max-new-tokens", "28", "--num-steps", "2", "--num-sampled", "4"]))
        tango_rl.main(parse(tango_rl, rl_flags("--num-steps", "1", "--warmup-steps", "0")))


@pytest.fixture(scope="module")
def two_processes(sft_base, tmp_path_factory):
    """What SFT and a dummy run say in each of two processes that work in one base directory at the same time."""
    base = tmp_path_factory.mktemp("shared") / "base"
    shutil.copytree(sft_base, base)
    environment = {**os.environ, "NANOCHAT_BASE_DIR": str(base)}
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=watched, args=(str(base), environment, tag)) for tag in ("one", "two")]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    return base, [((base / tag).read_text(), process.exitcode)
                  for tag, process in zip(("one", "two"), processes, strict=True)]


def test_nothing_is_looked_for_on_the_network(two_processes):
    """SFT, evaluation and RL, with wandb and the hub as they are by default; the name of a dummy run sends none to
    wandb."""
    for said, code in two_processes[1]:
        assert code == 0 and "NETWORK" not in said, said[-2000:]


ASKED = {"a table": lambda: list(read_hub("owner/name", "owner/name", split="train")),
         "text": lambda: open_rows(["owner/name"]), "conversations": lambda: load_conversations(["owner/name"]),
         "a model": lambda: find_folder("owner/name")}


@pytest.mark.parametrize("asked", ASKED)
def test_a_hub_that_cannot_be_reached_is_tried_once(monkeypatch, capsys, asked):
    """And whoever asks it is told so, with no library's own attempts."""
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(urllib.request, "getproxies", dict)
    tried = []

    def fail(host, *args, **kwargs):
        tried.append(host)
        raise OSError(101, "Network is unreachable")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    files.look_for_hub.cache_clear()
    for _ in range(2):
        with pytest.raises(BadInput, match="owner/name"):
            ASKED[asked]()
    files.look_for_hub.cache_clear()
    assert tried == ["huggingface.co"]
    assert capsys.readouterr().out.count("WARNING: huggingface.co cannot be reached (Network is unreachable)") == 1


def test_two_processes_in_one_base_directory_have_a_run_each_and_do_the_same(two_processes):
    base, said = two_processes
    assert sorted(os.listdir(base / "runs")) == ["dummy-1", "dummy-2"]
    one, two = (records(base, run) for run in ("dummy-1", "dummy-2"))
    assert one == two and len(one) == 1
    assert {"dummy-1", "dummy-2"} == {name for out, _ in said for name in ("dummy-1", "dummy-2")
                                      if f"run {name} in " in out}


def test_a_dummy_name_that_two_processes_chose_is_the_first_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    chosen = iter(["dummy-1", "dummy-1", "dummy-2"])
    monkeypatch.setattr("nanochat.storage.run.choose_run_name", lambda name: next(chosen))
    assert [claim_run_name("dummy"), claim_run_name("dummy")] == ["dummy-1", "dummy-2"]
    assert sorted(os.listdir(tmp_path / "runs")) == ["dummy-1", "dummy-2"]


def config_of_run(path) -> dict:
    path.rename(path.parent / "config.json")
    return read_config(path.parent.name)


JSON_READERS = {
    "a model's meta": lambda path: load_meta(str(path)), "a run's configuration": config_of_run,
    "a run's records": lambda path: files.read_records(str(path)),
    "a report's file or a model's configuration": lambda path: files.read_json(str(path)),
    "conversations": lambda path: load_conversations([str(path)]),
    "examples of CORE": lambda path: core_eval.read_items(str(path), "multiple_choice"),
}
BAD_JSON = (b"[" * 10 ** 5, b'{"step":' * 10 ** 5, b"1" * 10 ** 5, b'{"step": ' + b"1" * 10 ** 5 + b"}", b'{"step": 1',
            b'{"step": "\xff\xfe"}', b"\0" * 100)


@pytest.mark.parametrize("reader", JSON_READERS)
def test_malicious_json_is_refused_in_one_line_that_names_the_file(tmp_path, monkeypatch, reader):
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    for content in BAD_JSON:
        (folder / "bad.json").write_bytes(content + b"\n")
        with pytest.raises(BadInput, match="bad.json|config.json") as error:
            JSON_READERS[reader](folder / "bad.json")
        assert "\n" not in str(error.value) and len(str(error.value)) < len(str(tmp_path)) + 300, content[:20]


def say_nothing(base, recipe: str) -> list[str]:
    """Both models end every text at once."""
    end = load_tokenizer(str(base / "tokenizer")).stop_tokens[0]
    for path in (base / "chatsft_checkpoints").glob("*/model_*.pt"):
        state = torch.load(path, weights_only=True)
        state["lm_head.weight"][end, ONE] = 100.0
        torch.save(state, path)
    return []


def cut_all(base, recipe: str) -> list[str]:
    return ["--max-new-tokens", "1", *(["--verifier-max-new-tokens", "1"] if recipe == "tango" else [])]


@pytest.mark.parametrize("recipe, fault, is_cut", [("tango", say_nothing, 0), ("dpo", cut_all, 1),
                                                   ("prime", say_nothing, 0), ("tango", cut_all, 1)])
def test_texts_that_are_all_empty_or_all_cut_earn_nothing_and_the_run_goes_on(base, recipe, fault, is_cut):
    """All rewards of a group are equal then; what is logged is finite or missing."""
    flags = rl_flags("--recipe", recipe, "--run", "r", "--num-steps", "2", *fault(base, recipe))
    tango_rl.main(parse(tango_rl, flags))
    log = records(base, "r")
    for record in log:
        assert all(math.isfinite(x) for x in record.values() if isinstance(x, int | float))
    assert len(log) >= 2
    drawn = [record for record in log if "gen/completions/clipped_ratio" in record]
    assert {record["gen/completions/clipped_ratio"] for record in drawn} <= {is_cut}
    assert all(record["gen/reward"] == record["gen/reward_std"] == 0 for record in log if "gen/reward" in record)


@pytest.mark.parametrize("judged, is_warned", [
    ({"pred_pos_rate": 1.0, "balanced_acc": 0.5}, True), ({"pred_pos_rate": 0.0, "balanced_acc": 0.5}, True),
    ({"pred_pos_rate": 0.4, "balanced_acc": 0.5}, True), ({"pred_pos_rate": 1.0, "balanced_acc": None}, True),
    ({"pred_pos_rate": 0.4, "balanced_acc": 0.6}, False), ({}, False)])
def test_a_constant_verifier_is_warned_of_before_the_run(judged, is_warned):
    sampled = {"pass@1": 0.5, "end_token_rate": 1.0}
    warnings = health_warnings(sampled, {"parse_fail": 0.0, **judged}, 0.0, torch.float32)
    assert [warning.startswith("the verifier is constant") for warning in warnings] == [True] * is_warned
