"""Bad input: one line that names what and where, exit code 2, nothing written; and the ways to start the trainer."""
import functools
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from conftest import RL_FLAGS, TASK_FLAGS, parse, rl_flags

from dev.experiments import run as run_experiment
from nanochat import recipes
from nanochat.cli import OTHER_NAMES, flags_in, script_main
from nanochat.rl.run.flags import check_args
from scripts import base_train, chat_eval, chat_sft, tango_rl, tok_eval, tok_train

NEEDED = {chat_sft: ["--role", "generator"], base_train: ["--data", "text"], chat_eval: ["-i", "sft"]}
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def files_under(folder) -> dict[str, float]:
    return {os.path.join(parent, name): os.path.getmtime(os.path.join(parent, name))
            for parent, _, names in os.walk(folder) for name in names}


def refused(capsys, base, script, *flags: str) -> str:
    """Runs a script that must refuse its input; its line."""
    before = files_under(base)
    with pytest.raises(SystemExit) as stop:
        (script_main(script.main, script.make_parser, list(flags)) if script is tango_rl
         else script_main(script.main, script.make_parser(), list(flags)))
    assert stop.value.code == 2
    assert files_under(base) == before
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize("flags, words", [
    (["--num-samples", "1"], ["--num-samples 1", "grpo", "at least 2"]),
    (["--num-samples", "1", "--advantage", "rloo"], ["--num-samples 1", "rloo"]),
    (["--sequence-ratio"], ["--sequence-ratio", "--updates-per-batch above 1"]),
    (["--sequence-ratio", "--updates-per-batch", "2", "--aggregation", "token"], ["--aggregation sequence"]),
    (["--sequence-ratio", "--updates-per-batch", "2", "--loss", "reinforce"], ["a --loss with a ratio"]),
    (["--advantage", "dr_grpo"], ["--advantage dr_grpo", "--aggregation constant", "--aggregation sequence"]),
    (["--recipe", "nobody"], ["--recipe nobody", "tango", "grpo"]),
    (["--recipe", "no/such.py"], ["--recipe no/such.py", "no such file"]),
    (["--recipe", "grpo"], ["a flag of recipe", "tango", "not of grpo"]),
    (["--model-tag", "d99"], ["d99", "chatsft_checkpoints", "tiny", "tiny-ver"]),
    (["--model-step", "7"], ["tiny", "no step 7", "200"]),
    (["--model-tag", ""], ["no checkpoint d<N>", "tiny"]),
    (["--verifier-tag", "nobody"], ["nobody", "tiny-ver"]),
    (["--max-new-tokens", "100"], ["context 128", "--max-new-tokens"]),
    (["--verifier-shared-layers", "1"], ["--verifier-shared-layers 1", "frozen and trunk"]),
    (["--verifier-head", "frozen", "--verifier-shared-layers", "1"], ["--verifier-shared-layers 1", "not the gen"]),
    (["--verifier-head", "frozen", "--verifier-shared-layers", "9"], ["--verifier-shared-layers 9", "2 layers"]),
    (["--verifier-head", "trunk", "--verifier-tag", "tiny-ver"], ["--verifier-shared-layers 2", "--role both"]),
    (["--verifier-head", "prompt", "--verifier-tag", "tiny-ver"], ["--model-tag tiny", "--verifier-tag tiny-ver"]),
    (["--verifier-head", "prompt", "--verifier-shared-layers", "1"], ["--verifier-head prompt", "no number of layers"]),
    (["--verifier-updates", "summed"], ["--verifier-updates summed", "--verifier-head prompt"]),
    (["--model-source", "rl"], ["no checkpoint tiny", "chatrl_checkpoints"]),
    (["--verifier-head", "frozen", "--verifier-optimizer", "own"], ["--verifier-optimizer own", "both roles"]),
    (["--device-type", "cuda"], ["--device-type cuda", "cpu"]),
    (["--resume-from-step", "auto", "--run", "dummy"], ["dummy", "name"]),
    (["--resume-from-step", "5", "--run", "nothing"], ["nothing", "step 5", "none"]),
    (["--resume-from-step", "last", "--run", "r"], ["--resume-from-step last", "auto"]),
    (["--run", "a/b"], ["--run a/b"]), (["--keep", "-1"], ["--keep -1: must be at least 0"]),
    (["--model-tag", "../x"], ["--model-tag ../x"]),
    (["--recipe", "fixed_verifier", "--verifier-shared-layers", "1"], ["a flag of recipe", "fixed_verifier"]),
])
def test_the_trainer_refuses(capsys, sft_base, monkeypatch, flags, words):
    if flags == ["--device-type", "cuda"] and __import__("torch").cuda.is_available():
        pytest.skip("there is a CUDA device")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(sft_base))
    line = refused(capsys, sft_base, tango_rl, *RL_FLAGS, *flags)
    assert line.startswith("error: ") and "\n" not in line
    for word in words:
        assert word in line, line


def test_dr_grpo_is_taken_with_an_aggregation_that_is_said():
    for flags in (["--advantage", "dr_grpo", "--aggregation", "constant"], ["--recipe", "magrpo"],
                  ["--advantage", "dr_grpo", "--aggregation", "sequence"]):
        check_args(parse(tango_rl, flags), 1)


def test_what_another_script_refuses_too(capsys, base, monkeypatch):
    """Flags are never abbreviated or guessed; an empty name; a long demonstration; float16; no tokenizer."""
    for flags in (["--num-sample", "4"], ["--learning-rate", "1"], ["--num-steps", "many"]):
        line = refused(capsys, base, tango_rl, *RL_FLAGS, *flags)
        assert flags[0] in line and "\n" not in line
    for script, flags in ((base_train, ["--data", ""]), (base_train, ["--data", "x", "--val-data", ""]),
                          (tok_train, ["--data", ""]), (tok_eval, ["--data", ""])):
        assert f"{flags[-2]}: must not be empty" in refused(capsys, base, script, *flags)
    sft = [*TASK_FLAGS, "--role", "generator", "--model-tag", "short", "--depth", "1", "--sequence-len", "24"]
    assert "--sequence-len 24" in refused(capsys, base, chat_sft, *sft)
    monkeypatch.setenv("NANOCHAT_DTYPE", "float16")
    for script, flags in ((tango_rl, RL_FLAGS), (chat_sft, sft)):
        assert "NANOCHAT_DTYPE=float16" in refused(capsys, base, script, *flags)
    monkeypatch.delenv("NANOCHAT_DTYPE")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base / "new"))
    assert "tokenizer.pkl" in refused(capsys, base, chat_sft, *sft)


def test_world_size_must_divide_the_problems(capsys, base, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("nanochat.cli.complaints", lambda key: 0)  # nobody listens there: it would wait in vain
    assert "--examples-per-step 4" in refused(capsys, base, tango_rl, *RL_FLAGS)
    assert "--examples-per-step 32" in refused(capsys, base, chat_sft, *TASK_FLAGS, "--role", "generator",
                                               "--examples-per-step", "32")


def test_a_recipe_without_verifier_needs_none_and_others_say_so(capsys, base):
    for name in os.listdir(base / "chatsft_checkpoints" / "tiny-ver"):
        os.remove(base / "chatsft_checkpoints" / "tiny-ver" / name)
    assert "tiny-ver" in refused(capsys, base, tango_rl, *RL_FLAGS)
    script_main(tango_rl.main, tango_rl.make_parser, rl_flags("--recipe", "grpo", "--num-steps", "1"))


def test_a_folder_that_cannot_be_written_is_named(capsys, base, monkeypatch, tmp_path):
    (base / "runs").write_text("a file where a folder belongs")
    assert str(base / "runs") in refused(capsys, base, tango_rl, *RL_FLAGS)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "file" / "base"))
    assert str(tmp_path / "file") in refused(capsys, tmp_path, tok_train, *TASK_FLAGS)


def test_a_model_of_another_vocabulary_is_refused(capsys, base):
    shutil.rmtree(base / "tokenizer")  # else tok_train itself refuses
    script_main(tok_train.main, tok_train.make_parser(), [*TASK_FLAGS, "--vocab-size", "270"])
    capsys.readouterr()
    sft = [*TASK_FLAGS, "--role", "verifier", "--model-tag", "tiny", "--depth", "1", "--verifier-tag", "new"]
    for words in ("its model was made with another tokenizer than the one in", "vocabulary of 265"):
        assert words in refused(capsys, base, tango_rl, *RL_FLAGS)
        assert words in refused(capsys, base, chat_sft, *sft)
        for path in base.glob("chatsft_checkpoints/*/meta_*.json"):  # older ones do not tell
            path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer": None}))


@pytest.mark.parametrize("changes, words", [({"chain_modulus": "x"}, "chain_modulus is 'x', expected a whole number"),
                                            ({"task": ["chain"]}, "was trained on task ['chain']")])
def test_a_checkpoint_that_records_what_no_flag_can_be_is_refused(capsys, base, changes, words):
    path = next(base.glob("chatsft_checkpoints/tiny/meta_*.json"))
    meta = json.loads(path.read_text())
    path.write_text(json.dumps(meta | {"user_config": meta["user_config"] | changes}))
    given = RL_FLAGS.index("--chain-modulus")
    flags = [*RL_FLAGS[:given], *RL_FLAGS[given + 2:]]
    assert words in refused(capsys, base, tango_rl, *[flag for flag in flags if flag not in ("--task", "chain")])
    path.write_text(json.dumps(meta | {"user_config": meta["user_config"] | {"num_steps": 300}}))
    tango_rl.main(parse(tango_rl, [*RL_FLAGS, "--dry-run"]))
    assert "starts from step 200 of tiny, whose SFT was to make 300" in capsys.readouterr().out


def test_an_old_run_is_neither_overwritten_nor_continued_as_another(capsys, base):
    run = ["--run", "r", "--save-every", "1"]
    script_main(tango_rl.main, tango_rl.make_parser, rl_flags(*run, "--num-steps", "1", "--recipe", "grpo"))
    capsys.readouterr()
    assert "--resume-from-step auto" in refused(capsys, base, tango_rl, *rl_flags(*run, "--recipe", "grpo"))
    for flag, value in (("--model-tag", "d4"), ("--task", "last_letter"), ("--chain-modulus", "4"), ("--seed", "3"),
                        ("--recipe", "tango")):
        line = refused(capsys, base, tango_rl,
                       *rl_flags(*run, "--recipe", "grpo", "--resume-from-step", "auto", flag, value))
        assert f"{flag} {value}" in line and "cannot change" in line


@pytest.mark.parametrize("launcher", [["-m", "scripts.tango_rl"], ["scripts/tango_rl.py", "--"]])
def test_every_way_to_start_the_trainer(base, launcher):
    """By torchrun: tests/test_sharding.py."""
    task = "sudoku" if launcher[0] == "-m" else "chain"  # the exit code of bad input is 2
    flags = rl_flags("--recipe", "grpo", "--num-steps", "1", "--task", task)
    done = subprocess.run([sys.executable, *launcher, *flags], env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT,
                          capture_output=True, text=True, timeout=120)
    if task == "sudoku":
        assert done.returncode == 2 and re.fullmatch("error: .*--task.*sudoku.*\n", done.stderr), done.stderr
        return
    assert done.returncode == 0, done.stderr[-2000:]
    folder = done.stdout.strip().splitlines()[-1]
    with open(os.path.join(folder, "metrics.jsonl")) as f:
        assert [json.loads(line)["role"] for line in f] == ["generator"]
    with open(os.path.join(folder, "config.json")) as f:
        assert json.load(f)["world"] == 1


def fig4(capsys, *flags: str) -> tuple[int, str, str]:
    """What dev/experiments/run.sh hands its flags to; exit code, stdout, stderr."""
    code = 0
    try:
        script_main(run_experiment.main, run_experiment.make_parser(), list(flags))
    except SystemExit as stop:
        code = stop.code
    return code, *capsys.readouterr()


@pytest.mark.parametrize("flags, words", [
    (["--task", "sudoku"], ["--task sudoku", "chain", "last_letter", "mixture"]),
    *((["--arms", x], [f"--arms {x}"]) for x in ("alpha_x", "alpha_0.xyz", "tango_2e-4", "dpo_20", "score", "*")),
    (["--arms", "tango nobody"], ["--arms nobody", "grpo", "ng_1"]), (["--arms", "tango tango"], ["twice"]),
    (["--arms", ""], ["--arms", "empty"]), (["--seeds", "1 two"], ["--seeds two"]),
    (["--seeds", "01 1"], ["--seeds 01"]),
    (["--start", "middle"], ["--start middle", "sft", "refine"]), (["--steps", "08"], ["--steps 08"]),
    (["--steps", ""], ["--steps"]), (["--steps"], ["--steps", "expected one argument"]),
    (["--sedes", "1"], ["--sedes", "--seeds"])])
def test_the_experiment_refuses_before_any_work(capsys, monkeypatch, tmp_path, flags, words):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    code, out, err = fig4(capsys, "--out", str(tmp_path / "out"), *flags)
    assert code == 2 and out == "" and not os.listdir(tmp_path)
    assert err.count("\n") == 1 and all(word in err for word in words)


def test_the_experiment_refuses_a_folder_that_cannot_be(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "base"))
    (tmp_path / "out").touch()
    code, out, err = fig4(capsys, "--out", str(tmp_path / "out" / "curves"))
    assert code == 2 and out == "" and str(tmp_path / "out") in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["out"]
    monkeypatch.setenv("JOBS", "abc")
    assert fig4(capsys) == (2, "", "error: JOBS abc: must be a number from 1\n")


@pytest.mark.parametrize("folder, log, flags", [
    ("runs/chain_refine-grpo-s1", "chain_refine-grpo-s1", "--lr 1\n"),
    ("chatsft_checkpoints/chain-s1", "sft-chain-s1", "--lr 1\n"),
    ("chatsft_checkpoints/chain-s1-ver-small", "sft-chain-s1-ver-small", "--lr 1\n"),
    ("chatsft_checkpoints/chain-s1-refine", "sft-chain-s1-refine", "--lr 1\n"),
    ("chatsft_checkpoints/chain-s1-ver", "sft-chain-s1-ver", None),  # nothing tells how it was made
])
def test_the_experiment_does_not_take_what_other_flags_made_for_its_own(capsys, monkeypatch, tmp_path, folder, log,
                                                                        flags):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    if flags:
        (tmp_path / "logs" / f"{log}.flags").write_text(flags)
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    code, _, err = fig4(capsys, "--arms", "tango grpo small_verifier score_2e-4", "--start", "refine", "--seeds", "1",
                        "--out", str(tmp_path / "out"))
    words = (f"{tmp_path}/{folder} was made with other flags" if flags
             else f"{tmp_path}/logs/{log}.flags is gone, and {tmp_path}/{folder}/config.json does not tell")
    assert code == 2 and err.startswith(f"error: {words}")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_experiment_knows_every_ablation_it_lists(capsys):
    ablations = fig4(capsys, "--list", "ablations")[1].strip()
    assert len(ablations.split()) > 15
    # refused for its seed, after the arms
    assert "--seeds x: must be numbers" in fig4(capsys, "--arms", ablations, "--seeds", "x")[2]


def test_the_flags_of_every_arm_are_those_of_its_recipe(capsys):
    parser = functools.cache(lambda recipe: tango_rl.make_parser(["--recipe", recipe]))
    for task, start in (("chain", "sft"), ("chain", "refine"), ("last_letter", "sft"), ("mixture", "sft"),
                        ("small_chain", "sft")):
        lines = fig4(capsys, "--task", task, "--start", start, "--list", "flags")[1].splitlines()
        assert len(lines) > 25
        for line in lines:
            arm, *flags = line.split()
            other = arm.partition("_")[0]  # grpo_2e-4, prime_outcome
            other = {"fixed": "fixed_verifier", "gold": "gold_steps", "progress": "progress_rewards",
                     "ties": "simulated_judge", "flips": "simulated_judge"}.get(other, other)
            recipe = next((name for name in (arm, other) if name in recipes.names()), "tango")
            assert parser(recipe).parse_args(flags).recipe == recipe


ONE_RANK_ALONE = """
import os
from nanochat.cli import script_main
from nanochat.common import BadInput
from nanochat.rl.run import prepare
from scripts import tango_rl

load_roles = prepare.load_roles

def failing(*args):
    if os.environ["RANK"] == "1":
        raise BadInput("a file of this rank alone")
    return load_roles(*args)

prepare.load_roles = failing
script_main(tango_rl.main, tango_rl.make_parser)
"""


def test_bad_input_of_one_rank_alone_is_its_line_and_no_traceback_of_the_others(base, tmp_path):
    """The other rank waits in a collective, and is left alone there."""
    (tmp_path / "start.py").write_text(ONE_RANK_ALONE)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                           str(tmp_path / "start.py"), *rl_flags("--recipe", "grpo")], cwd=ROOT, capture_output=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}, text=True, timeout=120)
    assert done.returncode != 0
    lines = done.stderr.splitlines()
    assert lines.count("error: a file of this rank alone") == 1
    # torchrun's own account of its ranks comes after their words, and has a traceback of itself
    ours = lines[: next(i for i, line in enumerate(lines) if "torch/distributed/elastic" in line or "torch.distributed"
                        in line)]
    assert not [line for line in ours if "Traceback" in line or "Error:" in line], done.stderr


@pytest.mark.parametrize("script, flag, words", [
    (chat_sft, "--learning-rate=1", "--learning-rate: here --embedding-lr, and of matrices --matrix-lr"),
    (base_train, "--gradient-accumulation-steps", "here --total-batch-size is the whole batch, of which --device"),
    (tango_rl, "--gradient-accumulation-steps", "here --examples-per-step is the whole batch, of which --micro-batch"),
    (chat_eval, "--stop", "--stop: here a completion ends with the tokenizer's end of turn, or after --max-new-tokens"),
    (chat_eval, "--beta", "unrecognized arguments: --beta"), (tok_train, "--vocab-sise", "did you mean --vocab-size?")])
def test_a_flag_of_another_project_is_told_ours(capsys, base, script, flag, words):
    """And what it is told, the script has."""
    line = refused(capsys, base, script, flag, *NEEDED.get(script, []))
    assert line.startswith("error: unrecognized arguments: ") and words in line
    parser = script.make_parser()
    assert {*flags_in(line.partition("; ")[2].partition(": ")[2])} <= {*parser._option_string_actions}
    assert ("here" in line) == (flag.partition("=")[0] in OTHER_NAMES and not line.endswith(flag))


def test_what_stands_in_the_place_of_anothers_flag_is_a_flag_of_ours():
    ours = {flag for script in (tango_rl, chat_sft, base_train) for flag in script.make_parser()._option_string_actions}
    assert all(flags_in(words) and {*flags_in(words)} <= ours for texts in OTHER_NAMES.values() for words in texts)


def test_help_says_what_a_continued_run_may_change(capsys):
    for parser in (tango_rl.make_parser(), chat_sft.make_parser()):
        with pytest.raises(SystemExit):
            parser.parse_args(["--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "flags that may change then: --" in text and "--save-every" in text.partition("may change then")[2][:400]


def test_help_shows_the_flags_of_the_chosen_task_and_their_defaults(capsys):
    shown = {}
    for task in ("", "gsm8k", "brittle", "mixture"):
        with pytest.raises(SystemExit):
            tango_rl.make_parser().parse_args([*(["--task", task] if task else []), "--help"])
        shown[task] = " ".join(capsys.readouterr().out.split())
    assert "modulo this, so they are single digits (default: 10)" in shown[""] and "--gsm8k" not in shown[""]
    assert "--gsm8k-data" in shown["gsm8k"] and "--chain-modulus" not in shown["gsm8k"]
    assert {"--chain-modulus" in shown[task] for task in ("brittle", "mixture")} == {True}  # which rest on it
    assert "--gsm8k-data" in shown["mixture"] and "--clip-low CLIP_LOW (default: 0.2)" in shown["mixture"]
