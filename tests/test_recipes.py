"""
What holds of every recipe: it resumes bit for bit, two ranks do what one does, it is planned, and a file outside of the
repository is one too.

    python -m pytest tests/test_recipes.py
"""
import gc
import itertools
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
from conftest import on_two_ranks, parse, rl_flags, run_scripts
from test_documents import TODAY
from test_glossary import UNSEEN, keys_of, spelled_out, unexplained, unseen

from nanochat import recipes
from nanochat.checkpoint import saved_steps
from nanochat.common import BadInput, Diverged, StopRequested, script_main
from nanochat.rl.play.play import Play
from nanochat.storage.run import MEASURED
from scripts import report, tango_rl

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# what is seen of a recipe beside its defaults
OPTIONS = {"fixed_verifier": ["--num-labelled", "6"], "cooper": ["--rm-pretrain", "0"],
           "alphaproof": ["--curriculum", "variants", "--targets-of", "test_in"],
           "critic_rm": ["--bt-start", "0.5"], "gram": ["--pretrain-steps", "0", "--num-solutions", "8"],
           **dict.fromkeys(("rm_r1", "think_rm", "spct"), ["--verifier-tag", "tiny-judge", "--num-solutions", "8"]),
           **dict.fromkeys(("think_rm_policy", "debate", "debate_judge"), ["--verifier-tag", "tiny-judge"]),
           "coverrl": ["--verifier-head", "own", "--num-votes", "6", "--verifications", "2", "--refinements", "2"],
           "self_rewarding": ["--model-tag", "tiny-ver", "--points", "verdict"],  # which also judges
           "constitutional_ai": ["--model-tag", "tiny-ver", "--sl-steps", "1"]}
SHORT = ["--num-steps", "3", "--save-every", "1", "--eval-examples", "4", "--max-new-tokens", "16",
         "--kl-coef", "0.01"]  # with a reference


def example() -> str:
    """The recipe that the README shows."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
        return re.search(r"```python\n(\"\"\"Few labels.*?)```", f.read(), re.DOTALL)[1]


@pytest.fixture(scope="module")
def own_file(tmp_path_factory) -> str:
    """The README's recipe, in a folder outside of the repository."""
    path = tmp_path_factory.mktemp("elsewhere") / "few_labels.py"
    path.write_text(example(), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module", params=[*recipes.names(), "own"])
def recipe(request, own_file) -> str:
    """Every recipe by name, and the one in a file of its own."""
    return own_file if request.param == "own" else request.param


@pytest.fixture(scope="module")
def trained(sft_base, tmp_path_factory):
    """A base directory in which every recipe has a run on one rank, straight-<name>, and one on two ranks,
    two-<name>."""
    base = tmp_path_factory.mktemp("trained") / "base"
    shutil.copytree(sft_base, base)
    return base


@pytest.fixture
def at_base(trained, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(trained))
    return trained


def flags_of(recipe: str, *more: str) -> list[str]:
    return rl_flags("--recipe", recipe, *SHORT, *OPTIONS.get(recipe, []), *more)


def train(recipe: str, *more: str) -> None:
    tango_rl.main(parse(tango_rl, flags_of(recipe, *more)))


def records(base, run: str, name: str = "metrics.jsonl") -> list[dict]:
    path = base / "runs" / run / name
    lines = path.read_text().splitlines() if path.exists() else []  # no rollouts where no step had an update
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(MEASURED)} for line in lines]


def tensors(value, name: str = "") -> dict:
    """All tensors in nested dicts and lists, by their place."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {key: x for k, v in items for key, x in tensors(v, f"{name}/{k}").items()}


def last_set(base, run: str) -> dict:
    """Every tensor of a run's last set: models, optimizers and memory."""
    step = max(int(name[6:12]) for name in os.listdir(base / "runs" / run) if name.startswith("state_"))
    found = tensors(torch.load(base / "runs" / run / f"state_{step:06d}.pt", weights_only=True), "state")
    for folder in sorted((base / "chatrl_checkpoints").glob(f"{run}-*")):
        for path in sorted(folder.glob(f"*_{step:06d}*.pt")):
            role = folder.name.removeprefix(f"{run}-")
            found |= tensors(torch.load(path, weights_only=True), f"{role}/{path.name}")
    return found


def copied_run(base, old: str, new: str) -> None:
    """The run under another name, as if it had been started under it."""
    shutil.copytree(base / "runs" / old, base / "runs" / new)
    for folder in (base / "chatrl_checkpoints").glob(f"{old}-*"):
        shutil.copytree(folder, base / "chatrl_checkpoints" / folder.name.replace(f"{old}-", f"{new}-", 1))
    path = base / "runs" / new / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "args": {**config["args"], "run": new}}))


def straight(base, recipe: str) -> str:
    """The recipe's run on one rank, made once."""
    run = f"straight-{recipes.short(recipe)}"
    if not (base / "runs" / run).exists():
        train(recipe, "--run", run)
    return run


def test_a_continued_run_is_a_straight_one_bit_for_bit(at_base, recipe):
    run = straight(at_base, recipe)
    copied_run(at_base, run, f"continued-{run}")
    train(recipe, "--run", f"continued-{run}", "--resume-from-step", "1")
    one, two = last_set(at_base, run), last_set(at_base, f"continued-{run}")
    assert one.keys() == two.keys() and len(one) > 20
    assert not [name for name in one if not torch.equal(one[name], two[name])]
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert records(at_base, run, name) == records(at_base, f"continued-{run}", name)


def test_every_rollout_says_what_was_asked_for(at_base, recipe):
    """The label of a declared call; a given text has none."""
    labels = {call.label for call in recipes.load(recipe).calls(parse(tango_rl, flags_of(recipe)))}
    rollouts = records(at_base, straight(at_base, recipe), "rollouts.jsonl")
    assert {rollout["call"] for rollout in rollouts} <= labels | {""}


def first_steps(calls, path: str) -> None:
    """run_scripts without the health check, and with the evaluation before the steps alone."""
    held_out = tango_rl.held_out
    tango_rl.health_check = lambda *args: []
    tango_rl.held_out = lambda t, recipe: {} if t.step else held_out(t, recipe)
    run_scripts(calls, path)


@pytest.fixture(scope="module")
def two_ranks(trained, own_file):
    """The base directory, with a step of every recipe on two ranks: all of them in one start, as a start takes
    seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(trained))  # where labelled solutions are
        calls = [("scripts.tango_rl", flags_of(name, "--run", f"two-{recipes.short(name)}", "--num-steps", "1"))
                 for name in (*recipes.names(), own_file)]
        on_two_ranks(first_steps, calls, str(trained / "printed"))
    return trained


def test_two_ranks_do_what_one_does(at_base, two_ranks, recipe):
    """Rounding differs, and with it what is sampled after an update: the first step is compared."""
    one, two = records(at_base, straight(at_base, recipe))[0], records(two_ranks, f"two-{recipes.short(recipe)}")[0]
    assert one.keys() == two.keys()
    for name, value in one.items():
        if isinstance(value, float | int) and "diff" not in name:
            assert two[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
        elif "diff" not in name:
            assert two[name] == value, name


# What makes a recipe log more: further runs of it
MORE = {"prime": (["--prm-update", "before", "--accuracy-filter", "0", "1"], ["--accuracy-filter", "0.3", "0.3"]),
        "cooper": (["--rm-pretrain", "1"],), "gram": (["--pretrain-steps", "1"],), "marti": (["--graph", "chain"],),
        "grpo": (["--log-theory", "2", "--theory-samples", "64"],)}  # of 4 solutions no share is .3: no update


@pytest.fixture(scope="module")
def logged(trained) -> dict[str, dict[str, set[str]]]:
    """Log -> recipe -> the names in it. The scores of summary.json are with those of RL."""
    found = {"rl": {}, "summary": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(trained))
        for name in recipes.names():
            runs = [straight(trained, name)]
            for i, flags in enumerate(MORE.get(name, ())):
                runs.append(f"more-{name}-{i}")
                train(name, "--run", runs[-1], "--num-steps", "2", *flags)
            for run in runs:
                summary = json.loads((trained / "runs" / run / "summary.json").read_text())
                found["rl"].setdefault(name, set()).update(keys_of(trained / "runs" / run / "metrics.jsonl"),
                                                           summary["before"], summary["after"])
                found["summary"].setdefault(name, set()).update(summary)
    return found


@pytest.mark.parametrize("log", ["rl", "summary"])
def test_what_is_logged_is_in_the_glossary_and_what_is_there_is_logged(logged, log):
    assert unexplained(log, logged[log]) == unseen(log, logged[log]) == set()


@pytest.mark.parametrize("page", TODAY, ids=lambda page: page.name)
def test_metrics_that_a_page_names_are_logged(logged, page):
    """Names in backticks that begin with a role's prefix, or with timing_s."""
    names = re.findall(r"`((?:gen|ver|prm|opp|timing_s)/[^`\s]+)`", page.read_text(encoding="utf-8"))
    keys = set(UNSEEN).union(*logged["rl"].values())
    for name in itertools.chain(*map(spelled_out, names)):
        pattern = re.sub(r"\\\*|<\w+>", ".+", re.escape(name))
        assert any(re.fullmatch(pattern, key) for key in keys), name


def test_every_recipe_is_planned(at_base, recipe, capsys):
    train(recipe, "--run", "planned", "--dry-run")
    out = capsys.readouterr().out
    for role in recipes.load(recipe).ROLES:
        assert re.search(rf"GB per rank.*\b{role}\b", out)
    for call in recipes.load(recipe).calls(parse(tango_rl, flags_of(recipe))):
        assert f"of {call.label} ({call.role})" in out
    assert not (at_base / "runs" / "planned").exists()


def test_every_recipe_has_its_paper_its_tags_and_says_where_it_departs():
    for name in recipes.names():
        module = recipes.load(name)
        assert all(hasattr(module, part) for part in recipes.NEEDED), name
        first_line = module.__doc__.splitlines()[0]  # which --list-recipes prints
        assert re.search(r"arXiv \d{4}\.\d{5}(, section [\d.]+)?\.$", first_line), name
        assert {"family", "verifier", "reward"} <= module.TAGS.keys(), name


def test_the_recipes_are_listed(capsys):
    tango_rl.main(parse(tango_rl, ["--list-recipes"]))
    out = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", out, re.MULTILINE) for name in recipes.names())


# Recipes outside of the repository

@pytest.fixture
def own(own_file, tmp_path):
    """A copy of it to change."""
    return Path(shutil.copy(own_file, tmp_path / "few_labels.py"))


def test_a_file_of_ones_own_is_stored_with_the_run_and_shows_in_the_report(base, own, capsys):
    train(str(own), "--run", "mine")
    assert (base / "runs" / "mine" / "recipe.py").read_text() == own.read_text()
    assert json.loads((base / "runs" / "mine" / "summary.json").read_text())["recipe"] == "few_labels"
    capsys.readouterr()
    script_main(report.main, report.make_parser(), ["mine"])
    assert "report.html" in capsys.readouterr().out and (base / "runs" / "mine" / "report.html").stat().st_size > 10000


def test_a_continued_run_refuses_a_changed_text(base, own):
    train(str(own), "--run", "mine")
    own.write_text(own.read_text() + "\n# another idea\n")
    with pytest.raises(BadInput, match="another text of this recipe"):
        train(str(own), "--run", "mine", "--resume-from-step", "auto")


@pytest.mark.parametrize("text, words", [
    ("def play(t:\n", "SyntaxError"), ("import no_such_module\n", "no_such_module' (line 1)"),
    ("TAGS = {}\nROLES = {'generator': 1 / 0}\n", "ZeroDivisionError: division by zero (line 2)"),
    ("raise SystemExit\n", "SystemExit"), ("raise ValueError('two\\nlines')\n", "two lines"),
    ("TAGS = ROLES = {}\n", "has no calls, play, evaluate")])
def test_a_file_that_is_no_recipe_is_refused_in_one_line(capsys, base, tmp_path, text, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        script_main(tango_rl.main, tango_rl.make_parser, ["--recipe", str(path)])
    line = capsys.readouterr().err
    assert (stop.value.code == 2 and line.startswith(f"error: --recipe {path}: ")
            and words in line and line.count("\n") == 1)


UNDECLARED = '''
def play(t):
    solutions = t.solve("generator", t.problems(), t.args.num_samples, "more")
    yield from ()
'''


def test_what_is_not_declared_is_not_sampled(base, own):
    own.write_text(example().replace("def play(t):", UNDECLARED.strip() + "\n\n\ndef unused(t):"))
    with pytest.raises(ValueError, match="'more'.*no such label"):
        train(str(own), "--run", "mine")


NOTHING = '''
def play(t):
    t.solve("generator", t.problems(), t.args.num_samples, "generator")
    yield from ()
'''


def test_a_step_without_an_update_is_counted_and_the_run_goes_on(base, own):
    own.write_text(example().replace("def play(t):", NOTHING.strip() + "\n\n\ndef unused(t):"))
    train(str(own), "--run", "mine")
    log = records(base, "mine")
    assert ([record["without_update"] for record in log] == [1, 1, 1]
            and [record["gen_step"] for record in log] == [0, 1, 2])


# What a run starts from

def test_sft_done_again_under_the_same_tag_is_noticed(base):
    train("grpo", "--run", "r")
    starts = json.loads((base / "runs" / "r" / "config.json").read_text())["starts"]
    assert starts["generator"]["tag"] == "tiny" and starts["generator"]["step"] == 200
    path = base / "chatsft_checkpoints" / "tiny" / "model_000200.pt"
    state = torch.load(path, weights_only=True)
    torch.save({name: x + 1e-3 for name, x in state.items()}, path)
    with pytest.raises(BadInput, match="step 200 is not what the run started from"):
        train("grpo", "--run", "r", "--resume-from-step", "auto")


def test_a_later_step_of_the_tag_changes_nothing_for_a_run_that_goes_on(base):
    train("grpo", "--run", "r")
    folder = base / "chatsft_checkpoints" / "tiny"
    state = torch.load(folder / "model_000200.pt", weights_only=True)
    torch.save({name: x + 1e-3 for name, x in state.items()}, folder / "model_000300.pt")
    shutil.copy(folder / "meta_000200.json", folder / "meta_000300.json")
    train("grpo", "--run", "s", "--num-steps", "1")
    assert json.loads((base / "runs" / "s" / "config.json").read_text())["starts"]["generator"]["step"] == 300
    train("grpo", "--run", "r", "--resume-from-step", "1")


def test_a_run_of_before_recipes_were_files_is_refused_in_one_line(base):
    train("grpo", "--run", "r")
    for path in (base / "runs" / "r").glob("state_*.pt"):
        state = torch.load(path, weights_only=True)
        del state["memory"]
        torch.save(state, path)
    with pytest.raises(BadInput, match="before recipes were files"):
        train("grpo", "--run", "r", "--resume-from-step", "auto")


@pytest.mark.parametrize("old, new, words", [
    ('"verifier": RoleSpec(', '"general": RoleSpec(', "the same first three letters"),
    ('RoleSpec("--model-tag")', 'RoleSpec("--model-tag", trained=False)', "none of its roles is trained"),
    ('RoleSpec("--verifier-tag", "-ver"', 'RoleSpec("--model-tag", "-ver"', "needs a tag flag of its own"),
    ('RoleSpec("--model-tag")', 'RoleSpec("--model-tag", shares="verifier")', "shares layers with verifier"),
    ('RoleSpec("--model-tag")', '"--model-tag"', "ROLES must be a dict of names and RoleSpecs"),
    ('Call("verifier", "verdicts"', 'Call("verifier", "generator"', "declare a label twice")])
def test_roles_and_calls_that_clash_are_refused(capsys, base, own, old, new, words):
    own.write_text(own.read_text().replace(old, new))
    flags = flags_of(str(own), "--run", "mine") if "label" in words else ["--recipe", str(own)]
    with pytest.raises(SystemExit) as stop:
        script_main(tango_rl.main, tango_rl.make_parser, flags)
    line = capsys.readouterr().err
    assert (stop.value.code == 2 and line.startswith(f"error: --recipe {own}: ")
            and words in line and line.count("\n") == 1)


def test_a_run_without_the_text_it_was_started_with_is_refused(base, own):
    train(str(own), "--run", "mine")
    (base / "runs" / "mine" / "recipe.py").unlink()
    with pytest.raises(BadInput, match="recipe.py is missing"):
        train(str(own), "--run", "mine", "--resume-from-step", "auto")


def test_a_stored_text_that_cannot_be_read_is_said(base, own):
    train(str(own), "--run", "mine")
    (base / "runs" / "mine" / "recipe.py").write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="recipe.py cannot be read"):
        train(str(own), "--run", "mine", "--resume-from-step", "auto")


def test_a_byte_order_mark_is_no_text(own):
    own.write_text(own.read_text(), encoding="utf-8-sig")
    assert recipes.load(str(own)).text == example()


def test_a_borrowed_pair_update_keeps_its_guard(base, own):
    own.write_text(own.read_text().replace("--gold-every", "--beta").replace("gold_every", "beta").replace(
        'yield Update("generator", [(solutions, advantages)])',
        'yield from learn_from_pairs(t, "generator", solutions, [0], [1], advantages)').replace(
        "from nanochat.rl.play", "from nanochat.rl.play.pairs import learn_from_pairs\nfrom nanochat.rl.play", 1))
    with pytest.raises(BadInput, match="the coefficients hold for one optimizer step"):
        train(str(own), "--run", "mine", "--updates-per-batch", "2")


@pytest.mark.parametrize("flags", [["--recompute"], ["--verifier-shared-layers", "9", "--verifier-head", "frozen"]])
def test_a_plan_refuses_what_the_run_would(base, flags):
    with pytest.raises(BadInput, match=flags[0]):
        train("tango", "--dry-run", *flags)


@pytest.mark.parametrize("head", ["trunk", "prompt"])
def test_a_fixed_generator_lends_no_trunk_that_is_trained(base, head):
    with pytest.raises(BadInput, match=f"--verifier-head {head}: this recipe keeps the generator fixed"):
        train("fixed_generator", "--verifier-head", head)


def test_a_recipe_that_never_updates_its_first_role_is_stopped(base, own):
    limit = "1, args.verifier_max_new_tokens, args.num_steps"
    own.write_text(own.read_text().replace(", trained=False", "").replace(limit, f"{limit}, trained=True").replace(
        "    yield Update", "    if False:\n        yield Update").replace("    log_rewards(t,", """\
    verdicts = t.written("verifier", t.verify_prompts(solutions), ["=T"] * len(solutions))
    yield Update("verifier", [(verdicts, verdicts.mask.float())])
    log_rewards(t,"""))
    with pytest.raises(Diverged, match="the generator has made 0 of its 1 updates"):
        train(str(own), "--run", "mine", "--num-steps", "1")


def test_flags_of_several_recipes_are_explained_together(capsys, base):
    with pytest.raises(SystemExit):
        script_main(tango_rl.main, tango_rl.make_parser, ["--recipe", "grpo", "--nosuch", "1", "--prm-beta", "1"])
    assert capsys.readouterr().err == ("error: --prm-beta: a flag of recipe prime, not of grpo; --nosuch: unknown\n")


def test_a_path_may_start_with_a_tilde(monkeypatch, own):
    monkeypatch.setenv("HOME", str(own.parent))
    assert recipes.load("~/few_labels.py").text == own.read_text()


@pytest.mark.parametrize("flag, words", [
    ("--alpha", "a flag of recipe marti, progress_rewards, score, not of tango; did you mean --alpha-start or "
                "--alpha-end?"),
    ("--nmu-steps", "unrecognized arguments: --nmu-steps 5; did you mean --num-steps?"),
    ("--zzz", "unrecognized arguments: --zzz 5\n")])
def test_a_flag_that_is_like_a_known_one_is_explained(capsys, flag, words):
    with pytest.raises(SystemExit):
        script_main(tango_rl.main, tango_rl.make_parser, ["--recipe", "tango", flag, "5"])
    assert words in capsys.readouterr().err


def test_a_reward_that_is_no_number_is_said_to_be_one(base, own):
    text = own.read_text()
    own.write_text(text.replace("    log_rewards(t,", "    rewards[0] = float('nan')\n    log_rewards(t,"))
    with pytest.raises(BadInput, match="a reward of the generator is nan"):
        train(str(own), "--run", "mine")


def test_a_run_that_made_no_step_gives_its_name_back(base, own):
    """A mistake in play ends the first step: the file is mended and run again under the same name."""
    text = own.read_text()
    own.write_text(text.replace("solutions.lengths", "solutions.lenghts"))
    with pytest.raises(AttributeError):
        train(str(own), "--run", "mine")
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a run has its lock until all that holds it is gone
        signal.signal(name, signal.SIG_DFL)
    gc.collect()
    own.write_text(text)
    train(str(own), "--run", "mine", "--num-steps", "1", "--save-every", "0")
    assert (base / "runs" / "mine" / "recipe.py").read_text() == text
    with pytest.raises(BadInput, match="mine exists, its last checkpoint is of step 1; take another name"):
        train(str(own), "--run", "mine")


def test_another_recipe_does_not_continue_a_run(base, own):
    train("grpo", "--run", "other", "--num-steps", "1")
    for recipe in (str(own), "dpo"):
        with pytest.raises(BadInput, match="run other is of recipe grpo; a continued run cannot change it"):
            train(recipe, "--run", "other", "--resume-from-step", "auto")


def test_a_label_is_drawn_once_in_a_step(base, own):
    own.write_text(re.sub(r"(def play\(t\):.*\n)", r'\1    t.solve("generator", t.problems(), 2, "generator")\n',
                          own.read_text()))
    with pytest.raises(BadInput, match="'generator' twice in a step"):
        train(str(own), "--run", "mine")


def test_a_recipe_is_known_by_its_text_wherever_the_file_is(base, own, tmp_path):
    train(str(own), "--run", "mine")
    moved = shutil.move(own, tmp_path / "renamed.py")
    train(str(moved), "--run", "mine", "--resume-from-step", "1")
    with pytest.raises(BadInput, match="--recipe grpo: run mine is of recipe"):
        train("grpo", "--run", "mine", "--resume-from-step", "1")


@pytest.mark.parametrize("old, new, words", [
    ("    yield Update(\"generator\", [(solutions, advantages)])", "    yield \"generator\"",
     "play yields a str, not an Update"),
    ("    yield Update(", "    Update(", "few_labels.py: play gives a NoneType: it must yield an Update"),
    ("yield Update(\"generator\"", "yield Update(\"verifier\"",
     "an Update of 'verifier'; the roles that are trained are generator"),
    ("[(solutions, advantages)])", "((s, advantages) for s in [solutions]))", "must be a list of"),
    ("[(solutions, advantages)])", "[solutions])", "must be pairs of Rollouts and a tensor"),
    ("[(solutions, advantages)])", "[(solutions, advantages.long())])", "are torch.int64 on cpu: they must be floats"),
    ("[(solutions, advantages)])", "[(solutions, advantages)], lr=float('nan'))", "rate of an Update .* is nan"),
    ("[(solutions, advantages)])", "[(solutions, advantages)], per='line')", "averages per 'line'; there are"),
    ("[(solutions, advantages)])", "[(solutions, advantages)], loss='ppo_clip')", "is a str, not a PolicyLoss"),
    ("[(solutions, advantages)])", "[(solutions, advantages)], loss=type(t.loss)('abc'))", "names 'abc'; there are"),
    ("[(solutions, advantages)])", "[(solutions, advantages)], loss=type(t.loss)(clip_low='a'))", "what is no number"),
    ("    yield Update(", "    solutions.columns = {'x': [1]}\n    yield Update(", "column 'x' of .* is a list of 1"),
    ("    yield Update(", "    solutions.columns = {'x': list(advantages)}\n    yield Update(", "Tensor is not JSON"),
    ("    yield Update(", "    solutions.columns = {(1, 2): list(solutions.texts)}\n    yield Update(",
     "its name is a tuple"),
    ("    yield Update(", "    raise SystemExit(0)\n    yield Update(", r"left the run after step 0 by exit\(0\)"),
    ("    yield Update(", "    t.log('generator', {'x': 10 ** 400})\n    yield Update(", "x of the .* of 1329 bits"),
    ("return pass_at_1(t, \"generator\")", "return {\"x\": 10 ** 400}", "evaluate gives x as a number of 1329 bits"),
    ("    log_rewards(t,", "    t.log(None, {'step': 99})\n    log_rewards(t,", "'step' of the step, which the loop"),
    ("    log_rewards(t,", "    t.log('judge', {'x': 9})\n    log_rewards(t,", "metrics of a role 'judge'"),
    ("return pass_at_1(t, \"generator\")", "pass_at_1(t, \"generator\")", "evaluate gives a NoneType"),
    ("return pass_at_1(t, \"generator\")", "return {\"x\": \"good\"}", "evaluate gives x as a str"),
    ("return pass_at_1(t, \"generator\")", "return {\"gen_step\": 1}", "logs 'gen_step' of the step, which the loop"),
    ("return pass_at_1(t, \"generator\")", "return {1: 2}", "evaluate names a score 1: names are texts"),
    ("return pass_at_1(t, \"generator\")", "return pass_at_1(t, \"judge\")", "samples of a role 'judge': there are"),
    ("    log_rewards(t,", "    t.solve('judge', [], 1, 'x')\n    log_rewards(t,", "samples of a role 'judge'"),
    ("    yield Update(", "    while True:\n        yield Update(", "and does not end; the recipe planned 3 in all"),
    ("TAGS =", "def eval_step(t):\n    return 'x'\n\n\nTAGS =", "eval_step gives a str, not an int")])
def test_what_a_recipe_gets_wrong_is_said_in_its_terms(base, own, old, new, words):
    text = own.read_text()
    assert old in text
    own.write_text(text.replace(old, new))
    with pytest.raises(BadInput, match=words):
        train(str(own), "--run", "mine")


REMEMBERING = """
    w = next(t.roles["generator"].model.parameters()).detach()
    t.memory.setdefault("first", w)                            # the weight itself, not a copy
    t.memory.setdefault("same", t.memory.setdefault("steps", [])).append(t.step)
    draw = w.new_zeros(()).uniform_().item()                   # from the global generator
    t.log("generator", {"num": len(t.memory["steps"]), "drift": (t.memory["first"] - w).abs().sum().item(),
                        "draw": draw, "mode": "a text"})
    yield Update("""


def test_what_a_recipe_remembers_and_draws_is_the_same_in_a_continued_run(base, own, capsys, monkeypatch):
    """Also after a step that a signal stopped, and so was thrown away."""
    own.write_text(own.read_text().replace("    yield Update(", REMEMBERING)
                   + "\nSHOWN = {'generator': ['mode', 'num']}\n")
    train(str(own), "--run", "straight", "--num-steps", "4", "--save-every", "1")
    assert "| mode a text | num 4.000 |" in capsys.readouterr().out

    def stop(self, role, values, log=Play.log):
        log(self, role, values)
        if self.step == 2 and "draw" in values:
            self.run.on_signal()
    with monkeypatch.context() as patch:
        patch.setattr(Play, "log", stop)
        with pytest.raises(StopRequested, match="stopped after step 2"):
            train(str(own), "--run", "continued", "--num-steps", "4", "--save-every", "1")
    train(str(own), "--run", "continued", "--num-steps", "4", "--save-every", "1", "--resume-from-step", "auto")
    assert records(base, "straight") == records(base, "continued")


def test_an_error_of_a_recipe_loses_no_step_before_it(base, own):
    own.write_text(own.read_text().replace("    yield Update(", "    assert t.step < 2\n    yield Update("))
    with pytest.raises(AssertionError):
        train(str(own), "--run", "mine", "--num-steps", "4", "--save-every", "0")
    assert saved_steps("mine") == [2]
    own.write_text(own.read_text().replace("t.step < 2", "t.step < 9"))
    with pytest.raises(BadInput, match="started with another text of this recipe"):
        train(str(own), "--run", "mine", "--num-steps", "4", "--save-every", "0", "--resume-from-step", "auto")


def test_a_recipe_of_the_repository_that_has_changed_is_told(base, capsys, monkeypatch):
    train("grpo", "--run", "mine", "--num-steps", "1")
    with monkeypatch.context() as patch:
        patch.setattr(tango_rl.inspect, "getsource", lambda module: "another text")
        train("grpo", "--run", "mine", "--num-steps", "2", "--resume-from-step", "auto")
    assert "WARNING: the text of recipe grpo is no longer what run mine was started with" in capsys.readouterr().out


def test_a_flag_of_a_recipe_that_config_json_cannot_hold_is_refused(base, own):
    own.write_text(own.read_text().replace("default=4", "default={4}"))
    with pytest.raises(BadInput, match="its flag --gold-every is a set: flags are numbers, texts"):
        train(str(own), "--run", "mine")


def test_a_score_that_is_no_number_is_warned_of_once(base, own, capsys):
    own.write_text(own.read_text().replace("return pass_at_1(t, \"generator\")", "return {\"x\": float(\"nan\")}"))
    train(str(own), "--run", "mine", "--num-steps", "2", "--eval-every", "1")
    assert capsys.readouterr().out.count("WARNING: evaluate gives x as nan") == 1
    assert json.loads((base / "runs" / "mine" / "summary.json").read_text())["after"] == {"x": None}


@pytest.mark.parametrize("old, new, words", [
    ("def play(t):", "def play(t, more):", r"play must be a function of \(t\)"),
    ("def calls(args):", "def calls():", r"calls must be a function of \(args\)"),
    ("[Call(\"generator\", \"generator\"", "[Call(\"judge\", \"solutions\"",
     "name a role judge; there are generator, verifier"),
    ("args.verifier_max_new_tokens, args.num_steps", "0, args.num_steps", "declare nothing to sample as verdicts"),
    ("    return [Call(", "    [Call(", "must give a list of Call"),
    ("    P, G = args.examples_per_step, args.num_samples", "    P, G = args.examples, args.num_samples",
     r"calls\(\): AttributeError: .*'examples' \(line \d+\)"),
    ("P * G, 1, args.verifier", "P * G / 2, 1, args.verifier", "'verdicts' with num_prompts as nothing that can be"),
    ("quoted=args.max_new_tokens", "quoted=-5", "'verdicts' with quoted as nothing that can be: -5"),
    ("wrap=empty_verifier_prompt", "split='train'", "'verdicts' with wrap or split"),
    ("args.num_steps, trained=True)", "args.num_steps)", "generator is trained, and none of its calls"),
    ("group.add_argument(\"--gold-every\", type", "group.add_argument(\"--gold-every\", kind",
     r"add_args\(\): TypeError.*\(line \d+\)"),
    ("one problem in so many", "5% of the problems", "a percent sign is written %%"),
    ("def evaluate(t):", "evaluate = 1\n\n\ndef unused(t):", "evaluate is no function"),
    ("TAGS =", "SHOWN = {'generator': 'reward'}\nTAGS =", "SHOWN must be a dict of lists"),
    ("TAGS =", "SHOWN = {'generator': [3]}\nTAGS =", "SHOWN must be a dict of lists"),
    ("TAGS =", "TABLE = {'x': 3}\nTAGS =", "TABLE must be a dict of texts"),
    ("TAGS =", "def updates(args):\n    return {'generator': '3'}\n\n\nTAGS =", "must give a number for each of"),
    ("TAGS =", "def updates(args):\n    return {'judge': 3}\n\n\nTAGS =", "must give a number for each of generator"),
    ("def add_args(group):", "def check(args, task):\n    args.nothing\n\n\ndef add_args(group):",
     r"check\(\): AttributeError"),
    ('{"generator": RoleSpec("--model-tag")', '{"a/b": RoleSpec("--model-tag")', "needs a name of lower-case letters"),
    ('RoleSpec("--model-tag")', 'RoleSpec("--seed")', "--seed of role generator: this flag means something else"),
    ('RoleSpec("--model-tag")', 'RoleSpec("model-tag")', "must be like --model-tag"),
    ("\"--gold-every\"", "\"--num-steps\"", "conflicting option")])
def test_declarations_that_cannot_be_are_refused_before_anything_is_written(base, own, old, new, words):
    text = own.read_text()
    assert old in text
    own.write_text(text.replace(old, new))
    with pytest.raises(BadInput, match=words):
        train(str(own), "--run", "mine")
    assert not (base / "runs").exists()
