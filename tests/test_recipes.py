"""What holds of every recipe: bit-for-bit resume, two ranks do what one does, a plan; a file of one's own."""
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
from test_tango_rl import copy_run, records

from dev.experiments.arms_smol import SCORED
from nanochat import recipes
from nanochat.checkpoint import saved_steps
from nanochat.cli import script_main
from nanochat.common import BadInput, Diverged, StopRequested
from nanochat.rl.learn.roles import needed, trained_roles
from nanochat.rl.play.play import Play
from nanochat.rl.run import prepare, steps
from scripts import report, tango_rl

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# what is seen of a recipe beside its defaults
OPTIONS = {"fixed_verifier": ["--num-labelled", "6", "--verify-relabelled", "--weigh-by-j"],
           "cooper": ["--rm-pretrain", "0"],
           "alphaproof": ["--curriculum", "variants", "--targets-of", "test_in"],
           "critic_rm": ["--bt-start", "0.5"], "gram": ["--pretrain-steps", "0", "--num-solutions", "8"],
           **dict.fromkeys(("rm_r1", "think_rm", "spct"), ["--verifier-tag", "tiny-judge", "--num-solutions", "8"]),
           **dict.fromkeys(("think_rm_policy", "debate", "debate_judge"), ["--verifier-tag", "tiny-judge"]),
           "coverrl": ["--verifier-head", "own", "--num-votes", "6", "--verifications", "2", "--refinements", "2"],
           "self_rewarding": ["--model-tag", "tiny-ver", "--points", "verdict"],  # which also judges
           "constitutional_ai": ["--model-tag", "tiny-ver", "--sl-steps", "1"]}
SHORT = ["--num-steps", "2", "--save-every", "1", "--eval-examples", "2", "--max-new-tokens", "16",
         "--kl-coef", "0.01"]  # with a reference


def example() -> str:
    with open(os.path.join(ROOT, "dev", "your_own.md"), encoding="utf-8") as f:
        return re.search(r"```python\n(\"\"\"Few labels.*?)```", f.read(), re.DOTALL)[1]


@pytest.fixture(scope="module")
def own_file(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("elsewhere") / "few_labels.py"
    path.write_text(example(), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module", params=[*recipes.names(), "own"])
def recipe(request, own_file) -> str:
    return own_file if request.param == "own" else request.param


@pytest.fixture(scope="module")
def trained(sft_base, tmp_path_factory):
    """A base directory in which every recipe has a run on one rank, straight-<name>, and one on two, two-<name>."""
    return Path(shutil.copytree(sft_base, tmp_path_factory.mktemp("trained") / "base"))


@pytest.fixture
def at_base(trained, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(trained))
    return trained


def flags_of(recipe: str, *more: str) -> list[str]:
    return rl_flags("--recipe", recipe, *SHORT, *OPTIONS.get(recipe, []), *more)


def train(recipe: str, *more: str) -> None:
    tango_rl.main(parse(tango_rl, flags_of(recipe, *more)))


def tensors(value, name: str = "") -> dict:
    """All tensors in nested dicts and lists, by their place."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {key: x for k, v in items for key, x in tensors(v, f"{name}/{k}").items()}


def last_set(base, run: str) -> dict:
    """Every tensor of a run's last set: models, optimizers and memory."""
    state = max((base / "runs" / run).glob("state_*.pt"))
    models = (base / "chatrl_checkpoints").glob(f"{run}-*/*_{state.stem[6:]}*.pt")
    return {key: x for path in (state, *models) for key, x in tensors(
        torch.load(path, weights_only=True), f"{path.parent.name.removeprefix(run)}/{path.name}").items()}


def straight(base, recipe: str) -> str:
    run = f"straight-{recipes.short(recipe)}"
    if not (base / "runs" / run).exists():
        train(recipe, "--run", run)
    return run


def test_a_continued_run_is_a_straight_one_bit_for_bit(at_base, recipe):
    run = straight(at_base, recipe)
    copy_run(at_base, run, f"continued-{run}")
    train(recipe, "--run", f"continued-{run}", "--resume-from-step", "1")
    one, two = last_set(at_base, run), last_set(at_base, f"continued-{run}")
    assert one.keys() == two.keys() and len(one) > 20
    assert not [name for name in one if not torch.equal(one[name], two[name])]
    for name in ("metrics.jsonl", "rollouts.jsonl", "examples.jsonl"):
        assert records(at_base, run, name) == records(at_base, f"continued-{run}", name)


def test_every_rollout_says_what_was_asked_for_and_trained_roles_alone_learn(at_base, recipe):
    """The name of a declared draw; a given text has none."""
    draws = recipes.load(recipe).draws(parse(tango_rl, flags_of(recipe)))
    run, trained = straight(at_base, recipe), trained_roles(recipes.load(recipe).ROLES)
    assert {rollout["call"] for rollout in records(at_base, run, "rollouts.jsonl")} <= draws.keys() | {""}
    learned = {role for record in records(at_base, run) for role in record["role"].split("+")}
    assert trained[0] in learned and learned <= set(trained)


def first_steps(calls, path: str) -> None:
    """run_scripts without the health check, and with the evaluation before the steps alone."""
    steps.health_check = lambda *args: []
    tango_rl.held_out = lambda *args: {}
    run_scripts(calls, path)


@pytest.fixture(scope="module")
def two_ranks(trained, own_file):
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
    for name in (name for name in one if "diff" not in name):
        is_number = isinstance(one[name], float | int)
        assert two[name] == (pytest.approx(one[name], rel=1e-3, abs=1e-5) if is_number else one[name]), name


# further runs of a recipe that log more
MORE = {"prime": (["--prm-update", "before", "--accuracy-filter", "0", "1"], ["--accuracy-filter", "0.3", "0.3"]),
        "cooper": (["--rm-pretrain", "1"],), "gram": (["--pretrain-steps", "1"],), "marti": (["--graph", "chain"],),
        "mars": (["--system1", "frozen"],),
        "grpo": (["--log-theory", "2", "--theory-samples", "64"],)}  # of 4 solutions no share is .3: no update


@pytest.fixture(scope="module")
def logged(trained) -> dict[str, dict[str, set[str]]]:
    """Log -> recipe -> the names in it. The scores of summary.json are with those of RL."""
    found: dict = {"rl": {}, "summary": {}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(trained))
        for name in recipes.names():
            of_rl, of_summary = (found[log].setdefault(name, set()) for log in found)
            runs = [straight(trained, name), *(f"more-{name}-{i}" for i in range(len(MORE.get(name, ()))))]
            for run, flags in zip(runs, [None, *MORE.get(name, ())], strict=True):
                if flags:
                    train(name, "--run", run, *flags)
                summary = json.loads((trained / "runs" / run / "summary.json").read_text())
                of_rl.update(keys_of(trained / "runs" / run / "metrics.jsonl"), summary["before"], summary["after"])
                of_summary.update(summary)
    return found


@pytest.mark.parametrize("log", ["rl", "summary"])
def test_what_is_logged_is_in_the_glossary_and_what_is_there_is_logged(logged, log):
    assert unexplained(log, logged[log]) == unseen(log, logged[log]) == set()


@pytest.mark.parametrize("page", TODAY, ids=lambda page: page.name)
def test_metrics_that_a_page_names_are_logged(logged, page):
    names = re.findall(r"`((?:gen|ver|prm|opp|timing_s)/[^`\s]+)`", page.read_text(encoding="utf-8"))
    keys = {*UNSEEN, *SCORED}.union(*logged["rl"].values())  # SCORED: an experiment's, in its csv
    for name in itertools.chain(*map(spelled_out, names)):
        pattern = re.sub(r"\\\*|<\w+>", ".+", re.escape(name))
        assert any(re.fullmatch(pattern, key) for key in keys), name


def test_every_recipe_is_planned(at_base, recipe, capsys):
    train(recipe, "--run", "planned", "--dry-run")
    out = capsys.readouterr().out
    draws = recipes.load(recipe).draws(parse(tango_rl, flags_of(recipe)))
    for role in needed(recipes.load(recipe).ROLES, draws):
        assert re.search(rf"GB per rank.*\b{role}\b", out)
    for name, draw in draws.items():
        assert f"of {name} ({draw.role})" in out
    assert not (at_base / "runs" / "planned").exists()


def test_every_recipe_has_its_paper_and_its_status_and_is_listed(capsys):
    for name in recipes.names():
        module = recipes.load(name)
        first_line = module.__doc__.splitlines()[0]
        assert re.search(r"arXiv \d{4}\.\d{5}(, section [\d.]+)?\.$", first_line), name
        assert re.fullmatch(r"(works|runs): [^|]+", module.STATUS), name
    tango_rl.main(parse(tango_rl, ["--list-recipes"]))
    with open(os.path.join(ROOT, "dev", "recipes.md"), encoding="utf-8") as f:
        assert capsys.readouterr().out == f.read()


@pytest.fixture
def own(own_file, tmp_path):
    return Path(shutil.copy(own_file, tmp_path / "few_labels.py"))


def change(own: Path, *pairs: tuple[str, str]) -> str:
    text = own.read_text()
    for old, new in pairs:
        assert old in text, old
        text = text.replace(old, new)
    own.write_text(text)
    return str(own)


def refusal(capsys, flags: list[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        script_main(tango_rl.main, tango_rl.make_parser, flags)
    line = capsys.readouterr().err
    assert stop.value.code == 2 and line.count("\n") == 1
    return line


def test_a_file_is_stored_with_its_run_which_is_known_by_it(base, own, tmp_path, capsys):
    train(str(own), "--run", "mine", "--num-steps", "1")
    stored = base / "runs" / "mine" / "recipe.py"
    assert stored.read_text() == own.read_text() == example()
    assert json.loads((base / "runs" / "mine" / "summary.json").read_text())["recipe"] == "few_labels"
    capsys.readouterr()
    script_main(report.main, report.make_parser(), ["mine"])
    assert "report.html" in capsys.readouterr().out and (base / "runs" / "mine" / "report.html").stat().st_size > 10000
    moved = shutil.move(own, tmp_path / "renamed.py")
    more = ["--run", "mine", "--num-steps", "2", "--resume-from-step"]
    train(str(moved), *more, "1")
    with pytest.raises(BadInput, match="--recipe grpo: run mine is of recipe"):
        train("grpo", *more, "1")
    moved.write_text(example() + "\n# another idea\n")
    with pytest.raises(BadInput, match="started with another text of this recipe"):
        train(str(moved), *more, "auto")
    moved.write_text(example())
    stored.write_bytes(b"\xff\xfe")
    with pytest.raises(BadInput, match="recipe.py cannot be read"):
        train(str(moved), *more, "auto")
    stored.unlink()
    with pytest.raises(BadInput, match="recipe.py is missing"):
        train(str(moved), *more, "auto")


def test_a_path_may_start_with_a_tilde_and_a_file_with_a_byte_order_mark(monkeypatch, own):
    monkeypatch.setenv("HOME", str(own.parent))
    own.write_text(own.read_text(), encoding="utf-8-sig")
    assert recipes.load("~/few_labels.py").text == recipes.load(str(own)).text == example()


@pytest.mark.parametrize("text, words", [
    ("def play(t:\n", "SyntaxError"), ("import no_such_module\n", "no_such_module' (line 1)"),
    ("x = 1\nROLES = {'generator': 1 / 0}\n", "ZeroDivisionError: division by zero (line 2)"),
    ("raise SystemExit\n", "SystemExit"), ("raise ValueError('two\\nlines')\n", "two lines"),
    ("ROLES = {}\n", "has no draws, play, evaluate")])
def test_a_file_that_is_no_recipe_is_refused_in_one_line(capsys, base, tmp_path, text, words):
    path = tmp_path / "broken.py"
    path.write_text(text)
    line = refusal(capsys, ["--recipe", str(path)])
    assert line.startswith(f"error: --recipe {path}: ") and words in line


def with_play(own: Path, body: str) -> str:
    return change(own, ("def play(t):", f"def play(t):\n{body}\n\n\ndef unused(t):"))


def test_a_step_without_an_update_is_counted_and_a_score_that_is_no_number_is_told_once(base, own, capsys):
    with_play(own, '    t.solve("solutions", t.problems())\n    yield from ()')
    change(own, ('return pass_at_1(t, "generator")', 'return {"x": float("nan")}'))
    train(str(own), "--run", "mine", "--num-steps", "2", "--eval-every", "1")
    log = records(base, "mine")
    assert [(record["without_update"], record["gen_step"]) for record in log] == [(1, 0), (1, 1)]
    assert capsys.readouterr().out.count("WARNING: evaluate gives x as nan") == 1
    assert json.loads((base / "runs" / "mine" / "summary.json").read_text())["after"] == {"x": None}


def test_a_run_that_never_updates_its_first_role_or_leaves_by_itself_is_stopped(base, own):
    text = own.read_text()
    with_play(own, "    raise SystemExit(0)\n    yield")
    with pytest.raises(BadInput, match=r"left the run after step 0 by exit\(0\)"):
        train(str(own), "--run", "left")
    own.write_text(text)
    with_play(own, """\
    solutions = t.solve("solutions", t.problems())
    verdicts = t.written("verifier", t.verify_prompts(solutions), ["=T"] * len(solutions))
    yield Update("verifier", [(verdicts, verdicts.mask.float())])""")
    change(own, (", trained=False", ""), ("quoted=limit", "quoted=limit, trained=True"))
    with pytest.raises(Diverged, match="the generator has made 0 of its 1 updates"):
        train(str(own), "--run", "mine", "--num-steps", "1")


def test_a_run_that_made_no_step_gives_its_name_back(base, own):
    """A mistake in play ends the first step: the file is mended and run again under the same name."""
    change(own, ("t.rewards(solutions)", "t.rewads(solutions)"))
    with pytest.raises(AttributeError):
        train(str(own), "--run", "mine")
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a run has its lock until all that holds it is gone
        signal.signal(name, signal.SIG_DFL)
    gc.collect()
    own.write_text(example())
    train(str(own), "--run", "mine", "--num-steps", "1", "--save-every", "0")
    assert (base / "runs" / "mine" / "recipe.py").read_text() == example()
    with pytest.raises(BadInput, match="mine exists, its last checkpoint is of step 1; take another name"):
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
    change(own, ("    yield Update(", REMEMBERING), ("ROLES =", "SHOWN = {'generator': ['mode', 'num']}\nROLES ="))
    train(str(own), "--run", "straight")
    assert "| mode a text | num 2.000 |" in capsys.readouterr().out

    def stop(self, role, values, log=Play.log):
        log(self, role, values)
        if self.step == 1 and "draw" in values:
            self.run.on_signal()
    with monkeypatch.context() as patch:
        patch.setattr(Play, "log", stop)
        with pytest.raises(StopRequested, match="stopped after step 1"):
            train(str(own), "--run", "continued")
    train(str(own), "--run", "continued", "--resume-from-step", "auto")
    assert records(base, "straight") == records(base, "continued")


def test_an_error_of_a_recipe_loses_no_step_before_it(base, own):
    change(own, ("    yield Update(", "    assert t.step < 1\n    yield Update("))
    with pytest.raises(AssertionError):
        train(str(own), "--run", "mine", "--save-every", "0")
    assert saved_steps("mine") == [1]


GIVES = ("    return {\"solutions\"", "    {\"solutions\"")  # draws() gives nothing


@pytest.mark.parametrize("old, new, words", [
    ("def play(t):", "def play(t, more):", r"play must be a function of \(t\)"),
    ("def draws(args):", "def draws():", r"draws must be a function of \(args\)"),
    ('Draw("generator", P', 'Draw("judge", P', "name a role judge; there are generator, verifier"),
    ("1, args.verifier_max_new_tokens", "1, 0", "declare nothing to sample as verdicts"),
    (*GIVES, "must give a dict of names and Draws"),
    ("limit = args.examples", "limit = args.exams", r"draws\(\): AttributeError: .*'exams.*' \(line \d+\)"),
    ("P * G, 1", "P * G / 2, 1", "'verdicts' with num_prompts as nothing that can be"),
    ("quoted=limit", "quoted=-5", "'verdicts' with quoted as nothing that can be: -5"),
    ("wrap=empty_verifier_prompt", "split='train'", "'verdicts' with wrap or split"),
    (", trained=True)", ")", "generator is trained, and none of its draws"),
    ('"--gold-every", type', '"--gold-every", kind', r"add_args\(\): TypeError.*\(line \d+\)"),
    ("one problem in so many", "5% of the problems", "a percent sign is written %%"),
    ("default=4", "default={4}", "its flag --gold-every is a set: flags are numbers, texts"),
    ("def evaluate(t):", "evaluate = 1\n\n\ndef unused(t):", r"evaluate must be a function of \(t\)"),
    ("ROLES =", "SHOWN = {'generator': 'reward'}\nROLES =", "SHOWN must be a dict of lists"),
    ("ROLES =", "SHOWN = {'generator': [3]}\nROLES =", "SHOWN must be a dict of lists"),
    ("ROLES =", "TABLE = {'x': 3}\nROLES =", "TABLE must be a dict of texts"),
    ("ROLES =", "def updates(args):\n    return {'generator': '3'}\n\n\nROLES =", "must give a number for each of"),
    ("ROLES =", "def updates(args):\n    return {'judge': 3}\n\n\nROLES =", "must give a number for each of generator"),
    ("def add_args(group):", "def check(args, task):\n    args.nothing\n\n\ndef add_args(group):",
     r"check\(\): AttributeError"),
    ('{"generator": RoleSpec("--model-tag")', '{"a/b": RoleSpec("--model-tag")', "needs a name of lower-case letters"),
    ('RoleSpec("--model-tag")', 'RoleSpec("--seed")', "--seed of role generator: this flag means something else"),
    ('RoleSpec("--model-tag")', 'RoleSpec("model-tag")', "must be like --model-tag"),
    ('"verifier": RoleSpec(', '"general": RoleSpec(', "the same first three letters"),
    ('RoleSpec("--model-tag")', 'RoleSpec("--model-tag", trained=False)', "none of its roles is trained"),
    ('RoleSpec("--verifier-tag", "-ver"', 'RoleSpec("--model-tag", "-ver"', "needs a tag flag of its own"),
    ('RoleSpec("--model-tag")', 'RoleSpec("--model-tag", shares="verifier")', "shares layers with verifier"),
    ('RoleSpec("--model-tag")', '"--model-tag"', "ROLES must be a dict of names and RoleSpecs"),
    ("\"--gold-every\"", "\"--num-steps\"", "conflicting option")])
def test_declarations_that_cannot_be_are_refused_before_anything_is_written(base, own, old, new, words):
    with pytest.raises(BadInput, match=words):
        train(change(own, (old, new)), "--run", "mine")
    assert not (base / "runs").exists()


@pytest.mark.parametrize("recipe, flags, words", [
    ("tango", ["--alpha", "5"], "a flag of recipe marti, progress_rewards, score, not of tango; did you mean "
                                "--alpha-start or --alpha-end?"),
    ("tango", ["--nmu-steps", "5"], "unrecognized arguments: --nmu-steps 5; did you mean --num-steps?"),
    ("grpo", ["--beta", "1", "--num_generations=8"],
     "not of grpo; --num_generations: unknown; --beta: here --kl-coef; --num_generations: here --num-samples\n"),
    ("grpo", ["--warmup-steps", "3"], "self_verify, tango, not of grpo; --warmup-steps: here --warmup-ratio\n"),
    ("tango", ["--zzz", "5"], "unrecognized arguments: --zzz 5\n"),
    ("grpo", ["--nosuch", "1", "--prm-beta", "1"],
     "error: --prm-beta: a flag of recipe prime, not of grpo; --nosuch: unknown\n")])
def test_a_flag_of_another_recipe_or_like_a_known_one_is_explained(capsys, recipe, flags, words):
    assert words in refusal(capsys, ["--recipe", recipe, *flags])


@pytest.mark.parametrize("recipe, flags, words", [
    ("tango", ["--dry-run", "--recompute"], "--recompute"),
    ("tango", ["--dry-run", "--verifier-shared-layers", "9", "--verifier-head", "frozen"], "--verifier-shared-layers"),
    ("fixed_generator", ["--verifier-head", "trunk"], "--verifier-head trunk: this recipe keeps the generator fixed"),
    ("fixed_generator", ["--verifier-head", "prompt"], "--verifier-head prompt: this recipe keeps the generator")])
def test_a_plan_refuses_what_the_run_would_and_a_fixed_generator_lends_no_trunk(base, recipe, flags, words):
    with pytest.raises(BadInput, match=words):
        train(recipe, *flags)


def test_a_run_goes_on_from_what_it_was_started_from_alone(base, own, monkeypatch, capsys):
    """A later step of the tag is for new runs; other weights, another recipe and older states are refused."""
    one, more = ["--run", "r", "--num-steps", "1"], ["--run", "r", "--num-steps", "2", "--resume-from-step", "auto"]
    train("grpo", *one)
    starts = lambda run: json.loads((base / "runs" / run / "config.json").read_text())["starts"]["generator"]
    assert (starts("r")["tag"], starts("r")["step"]) == ("tiny", 200)
    for recipe in (str(own), "dpo"):
        with pytest.raises(BadInput, match="run r is of recipe grpo; a continued run cannot change it"):
            train(recipe, *more)
    folder = base / "chatsft_checkpoints" / "tiny"
    state = torch.load(folder / "model_000200.pt", weights_only=True)
    other = {name: x + 1e-3 for name, x in state.items()}
    torch.save(other, folder / "model_000300.pt")
    shutil.copy(folder / "meta_000200.json", folder / "meta_000300.json")
    train("grpo", "--run", "s", "--num-steps", "0")
    assert starts("s")["step"] == 300
    with monkeypatch.context() as patch:
        patch.setattr(prepare.inspect, "getsource", lambda module: "another text")
        train("grpo", *more)
    assert "WARNING: the text of recipe grpo is no longer what run r was started with" in capsys.readouterr().out
    torch.save(other, folder / "model_000200.pt")
    with pytest.raises(BadInput, match="step 200 is not what the run started from"):
        train("grpo", *more)
    torch.save(state, folder / "model_000200.pt")
    path = base / "runs" / "r" / "state_000002.pt"
    saved = torch.load(path, weights_only=True)
    del saved["memory"]
    torch.save(saved, path)
    with pytest.raises(BadInput, match="before recipes were files"):
        train("grpo", *more)
