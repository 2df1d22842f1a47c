"""label_steps: formulas by hand, the search against a scan, estimates against exact enumeration, files and refusals."""
import json
import math
import os
import random
from fractions import Fraction
from itertools import product

import pytest
import torch
from conftest import TASK_FLAGS, on_two_ranks, parse
from test_bad_input import files_under
from test_dpo import logprobs_after, random_model

from nanochat.checkpoint import load_model
from nanochat.cli import script_main
from nanochat.rl.measure.step_labels import (METHODS, agreement, any_right, gains, relative_progress, run_plans,
                                             until_error)
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.verify import prefixes
from nanochat.rl.verify.prefixes import (Cut, Found, Meter, are_held, best_of_chance, complete, completion_logprobs,
                                         forced_answer, right_share, share_right)
from nanochat.tokenizer import Tokenizer
from scripts import chat_sft, label_steps
from tasks import make_task
from tasks.chain import Chain
from tasks.common import Problem
from tasks.formats import COMPACT, PAPER

FLAGS = ["--device-type", "cpu", "--generator-tag", "tiny", "--num-completions", "4"]
SAMPLED = ["--num-problems", "8", "--num-samples", "3"]


def flags_of(*flags: str) -> list[str]:
    """These and the usual ones; solutions of a file are not sampled."""
    return [*FLAGS, *([] if "--solutions" in flags else SAMPLED), *flags]


def labels_of(method: str, values: list) -> tuple[list[float], list[int]]:
    """A method's labels of a solution where prefix k has values[k], and the prefixes that it asked for."""
    asked = []

    def values_of(round):
        asked.extend(k for _, k in round)
        return [values[k] for _, k in round]
    (labels,) = run_plans([METHODS[method].plan(len(values) - 1)], values_of)
    return labels, asked


def chain() -> Chain:
    return make_task(parse(chat_sft, [*TASK_FLAGS, "--role", "generator"]))


def test_labels_of_hand_vectors():
    values = [0.9, 0.25, 0.0, 1.0]  # the empty prefix is not asked for
    assert labels_of("math_shepherd", values) == ([1.0, 0.0, 1.0], [1, 2, 3])
    assert labels_of("math_shepherd_soft", values) == ([0.25, 0.0, 1.0], [1, 2, 3])
    assert any_right([0.0, 1e-9]) == [0.0, 1.0]
    # .8 / 1 = .8 counts; .5 / .8 = .625 does not; .9 / .5 = 1.8 does; 0 / .9 does not, nor anything after it,
    # though the last one comes back.
    values = [1.0, 0.8, 0.5, 0.9, 0.0, 0.0, 0.5]
    assert labels_of("rpe", values) == ([1.0, 0.0, 1.0, 0.0, 0.0, 0.0], [0, 1, 2, 3, 4, 5, 6])
    assert relative_progress([0.0, 0.5, 0.5]) == [0.0, 0.0]  # MC_0 = 0
    # 8 of 25 after 10 of 25 is .8, which floats take for less; 7 of 25 is less
    assert relative_progress([10 / 25, 8 / 25, 8 / 25]) == [1.0, 1.0] and relative_progress([0.4, 0.28]) == [0.0]
    values = [Fraction(n, 7) for n in (3, 1, 6, 0, 5)]
    assert gains(values) == [Fraction(-2, 7), Fraction(5, 7), Fraction(-6, 7), Fraction(5, 7)]
    for method in ("pav", "information_gain"):
        assert labels_of(method, values) == (gains(values), [0, 1, 2, 3, 4])


def test_the_search_finds_the_scans_first_error_with_a_logarithm_of_its_prefixes():
    for num_steps, error in ((n, error) for n in range(7) for error in range(1, n + 2)):  # num_steps + 1: no error
        values = [1.0] + [0.25 if k < error else 0.0 for k in range(1, num_steps + 1)]
        labels, asked = labels_of("omega_prm", values)
        assert labels == labels_of("math_shepherd", values)[0] == [float(k < error) for k in range(1, num_steps + 1)]
        assert len(asked) <= math.ceil(math.log2(num_steps + 1)) and 0 not in asked
    for pattern in product([0.0, 0.5], repeat=5):
        labels, _ = labels_of("omega_prm", [1.0, *pattern])
        error = labels.index(0.0) if 0.0 in labels else 5
        assert labels == [1.0] * error + [0.0] * (5 - error)
        assert (error == 5 or pattern[error] == 0) and (error == 0 or pattern[error - 1] > 0)


def test_plans_run_side_by_side_and_one_that_cannot_be_told_has_no_labels():
    rounds, values = [], {0: [1, 1, 1, 1, 1], 1: [1, 1, None], 2: [1], 3: [1, 0]}

    def values_of(asked):
        rounds.append(asked)
        return [values[n][k] for n, k in asked]
    labels = run_plans([METHODS["omega_prm"].plan(len(values[n]) - 1) for n in values], values_of)
    assert labels == [[1.0] * 4, None, [], [0.0]]
    assert rounds == [[(0, 2), (1, 1), (3, 1)], [(0, 3), (1, 2)], [(0, 4)]]


def test_agreement_by_hand():
    """Right steps 1, 0, .5, 1, of which one of four fails; wrong steps 0, .25, .75, of which one of three is
    rescued."""
    gold = [[True, True, False], [True], [False, False, True]]
    labels = [[1.0, 0.0, 0.0], [0.5], [0.25, 0.75, 1.0]]
    scores = agreement(gold, labels, 0.5)
    assert (scores["steps"], scores["accuracy"], scores["rescued"], scores["failed"]) == (7, 5 / 7, 1 / 3, 1 / 4)
    # class True: 3 hits of 4 and 4; class False: 2 hits of 3 and 3
    assert scores["macro_f1"] == pytest.approx((6 / 8 + 4 / 6) / 2)
    # first errors 2, none, 0, and 1, none, 0 were said: one of two erroneous found, the correct one left alone
    assert scores["first_error_f1"] == pytest.approx(2 * 0.5 * 1 / 1.5)
    # wrong ones below 1, 0, .5 and 1, a tie half: 3 + .5 + 2 + 3 of 12
    assert scores["auc"] == 8.5 / 12
    assert until_error(gold, gold) == [[True, True, False], [True], [False]]
    assert until_error(labels, gold) == [[1.0, 0.0, 0.0], [0.5], [0.25]]
    assert agreement([], [], 0.5)["accuracy"] is None


@torch.no_grad()
def test_the_forced_answer_is_scored_as_a_plain_forward_scores_it():
    model, prompts, answers = random_model(), [[5, 1, 4], [5, 1, 4, 1, 5, 3, 2], [5]], [[0, 6], [1, 0, 6], [6]]
    for prompt, answer, value in zip(prompts, answers, completion_logprobs(model, prompts, answers), strict=True):
        assert value == pytest.approx(logprobs_after(model, prompt, answer).sum().item(), abs=1e-4)


def test_an_answer_is_forced_in_the_tasks_format_and_its_opening_is_not_scored(base):
    tokenizer = Tokenizer.load(str(base / "tokenizer"))
    for fmt, opening, rest in ((COMPACT, "=", "12"), (PAPER, "</think><answer>\\boxed{", "12}</answer>")):
        given, scored = forced_answer(tokenizer, fmt, "12")
        assert (tokenizer.decode(given), tokenizer.decode(scored[:-1])) == (opening, rest)
        assert scored[-1] == tokenizer.stop_tokens[0]


def crafted(base) -> tuple:
    """The crafted generator, its sampler, and three solutions of each of some problems."""
    model, _ = load_model("sft", "tiny", torch.device("cpu"), torch.float32)
    sampler = Sampler(chain(), Tokenizer.load(str(base / "tokenizer")), 0, 28)
    args = parse(label_steps, flags_of("--out", "a.jsonl"))
    problems = [sampler.task.problem("rl", i) for i in range(8)]
    cuts = [cut for _, cut in label_steps.sampled(args, problems, model, sampler)]
    for cut in cuts:
        cut.values = [None] * (len(cut.step_ends) + 1)
    return model, sampler, cuts


def test_prefixes_end_with_their_step_and_completions_go_on_from_there(base):
    model, sampler, cuts = crafted(base)
    asked = [(cut, k) for cut in cuts for k in range(len(cut.values))]
    assert len(asked) > len(cuts)
    for cut, k in asked:
        end = sampler.task.fmt.step_spans(cut.text)[k - 1][1] if k else 0
        assert sampler.tokenizer.decode(cut.begin(k)) == cut.text[:end]
    rollouts = complete(asked, model, sampler, 4)
    for n, (text, ids) in enumerate(zip(rollouts.texts, rollouts.completions(), strict=True)):
        cut, k = asked[n // 4]
        assert rollouts.prompt_of()[n].ids == cut.prompt + cut.begin(k)
        new = sampler.tokenizer.decode(ids[:-1] if ids[-1] in sampler.tokenizer.stop_tokens else ids)
        assert text == sampler.tokenizer.decode(cut.begin(k)) + new
    more = complete(asked, model, sampler, 5)  # more completions are the same and others after them
    assert rollouts.texts == [text for n, text in enumerate(more.texts) if n % 5 < 4]
    right = [sum(sampler.task.check(asked[n // 4][0].problem, text) for text in rollouts.texts[n: n + 4])
             for n in range(0, len(rollouts), 4)]
    assert [found.value for found in right_share(asked, model, sampler, 4, 1)] == [c / 4 for c in right]
    best = [found.value for found in best_of_chance(asked, model, sampler, 4, 2)]  # of two of 4: 1 - C(4 - c, 2) / 6
    assert best == pytest.approx([[0, 3, 5, 6, 6][c] / 6 for c in right]) and len(set(best)) > 2


@pytest.mark.parametrize("method", ["rpe", "omega_prm"])
def test_equal_prefixes_of_a_problem_are_paid_for_once_and_labels_are_those_of_each_alone(base, method):
    model, sampler, cuts = crafted(base)

    def label(chosen):
        meter = Meter(lambda asked: right_share(asked, model, sampler, 4, 1))
        plans = [METHODS[method].plan(len(cut.step_ends)) for cut in chosen]
        return run_plans(plans, lambda asked: meter([(chosen[n], k) for n, k in asked])), meter
    labels, meter = label(cuts)
    values = [cut.values for cut in cuts]
    asked = [(cut.problem, tuple(cut.begin(k))) for cut in cuts for k, value in enumerate(cut.values)
             if value is not None]
    assert sum(cut.rollouts for cut in cuts) == 4 * len(set(asked)) and meter.costs()[0] == 4 * len(asked)
    assert len(set(asked)) < len(asked) or method == "omega_prm"  # all three begin with nothing
    prompt = {cut.problem: cut.prompt for cut in cuts}
    assert meter.costs()[1] == sum(len(prompt[problem]) + len(ids) for problem, ids in set(asked))
    alone = [label([cut])[0][0] for cut in cuts]
    assert labels == alone and values == [cut.values for cut in cuts]
    assert len({value for row in values for value in row}) > 2  # None, and more than one share


def test_a_later_round_measures_only_what_no_round_did():
    """Two solutions of a problem with the same first step, and one of another problem that is the same text."""
    a, b, c = (Cut(Problem("rl", index, "1+1", "2"), [9], ids, "", [1, 3], values=[None] * 3)
               for index, ids in ((0, [1, 2, 3, 4]), (0, [1, 2, 5, 6]), (1, [1, 2, 3, 4])))
    measured = []

    def measure(asked):
        measured.append([("abc"[[a, b, c].index(cut)], k) for cut, k in asked])
        return [Found(float(len(measured)), 4, 10, 5, 5) for _ in asked]
    meter = Meter(measure)
    assert meter([(a, 1), (b, 1), (c, 1)]) == [1.0] * 3 and meter([(b, 1)]) == [1.0]
    assert meter([(b, 2), (a, 1), (a, 2), (b, 0)]) == [2.0, 1.0, 2.0, 2.0]
    assert measured == [[("a", 1), ("c", 1)], [("b", 2), ("a", 2), ("b", 0)]]
    assert [(cut.rollouts, cut.tokens, cut.values) for cut in (a, b, c)] == [
        (8, 20, [None, 1.0, 2.0]), (8, 20, [2.0, 1.0, 2.0]), (4, 10, [None, 1.0, None])]
    assert meter.costs() == [4 * 8, 25, 25]


def test_prompts_that_a_longer_one_begins_with_are_told():
    a, b = [1, 2], [1, 2, 3]
    assert are_held([b, a, [1, 2, 3, 4], [2], a, [1, 3]]) == [True, True, False, False, True, False]
    assert are_held([]) == [] and share_right(8, 3) == 3 / 8


def run(out, *flags: str) -> tuple[list[dict], dict]:
    """The lines and the summary that a call writes."""
    label_steps.main(parse(label_steps, flags_of("--out", str(out), *flags)))
    summary = out.with_name(out.name.replace(".jsonl", ".summary.json"))
    return [json.loads(line) for line in out.read_text().splitlines()], json.loads(summary.read_text())


def corrupted(path) -> str:
    """A file of three solutions to each of some problems, with right and wrong steps."""
    task = chain()
    rows = [{"split": "rl", "index": i, "prompt": task.problem("rl", i).prompt, "generator": "hand@0",
             "solution": task.corrupted_solution(task.problem("rl", i), random.Random(f"{i}-{g}"))}
            for i in range(8) for g in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_writes_a_label_per_step_with_what_it_cost(base, tmp_path, capsys, method):
    task = chain()
    rows, summary = run(tmp_path / "a.jsonl", "--method", method, "--solutions", corrupted(tmp_path / "given.jsonl"))
    assert [(row["split"], row["index"]) for row in rows] == [("rl", i) for i in range(8) for _ in range(3)]
    for row in rows:
        problem, K = task.problem("rl", row["index"]), len(task.fmt.step_spans(row["solution"]))
        assert row["prompt"] == problem.prompt and len(row["labels"]) == K and len(row["values"]) == K + 1
        assert row["gold"] == task.step_labels(problem, row["solution"])
        assert row["outcome"] == task.check(problem, row["solution"])
        assert (row["generator"], row["method"]) == ("hand@0", method)
        if method in ("pav", "information_gain"):
            assert sum(row["labels"]) == pytest.approx(row["values"][-1] - row["values"][0])
    cost = summary["cost"]
    assert [cost[name] for name in ("rollouts", "tokens")] == [sum(row[name] for row in rows)
                                                               for name in ("rollouts", "tokens")]
    assert (cost["rollouts"] == 0) == (method == "gold") and summary["unlabelled"] == 0
    gold, labels = [row["gold"] for row in rows], [row["labels"] for row in rows]
    assert {True, False} == {label for row in gold for label in row}
    assert summary["agreement"] == agreement(gold, labels, METHODS[method].least)
    assert summary["agreement"]["accuracy"] == 1 or method != "gold"
    assert f"{100 * summary['agreement']['rescued']:.1f}" in capsys.readouterr().out


def test_solutions_of_a_file_are_labelled_as_when_they_were_sampled(base, tmp_path):
    gold, _ = run(tmp_path / "gold.jsonl", "--method", "gold")
    assert {row["generator"] for row in gold} == {"tiny@200"}
    assert [row["index"] for row in gold] == [i for i in range(8) for _ in range(3)]
    direct, _ = run(tmp_path / "direct.jsonl", "--method", "rpe")
    again, _ = run(tmp_path / "again.jsonl", "--method", "rpe", "--solutions", str(tmp_path / "gold.jsonl"))
    assert again == direct
    bare = [{name: row[name] for name in ("split", "index", "prompt", "solution")} for row in gold][::-1]
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    texts, _ = run(tmp_path / "texts.jsonl", "--method", "rpe", "--solutions", str(tmp_path / "bare.jsonl"))
    assert [(row["solution"], row["labels"]) for row in texts] == [(r["solution"], r["labels"]) for r in direct[::-1]]


def test_what_cannot_be_scored_is_left_out_and_counted(base, tmp_path, monkeypatch):
    check = Chain.check
    monkeypatch.setattr(Chain, "check", lambda self, problem, text: None if problem.index in (2, 3, 5)
                        else check(self, problem, text))
    rows, summary = run(tmp_path / "a.jsonl")
    whole, _ = run(tmp_path / "b.jsonl", "--method", "gold")
    # a solution without steps has no label to lack
    lost = [row for row in whole if row["index"] in (2, 3, 5) and row["labels"]]
    assert summary["unlabelled"] == len(lost) > 0 and len(rows) == len(whole) - len(lost)
    assert all(row["outcome"] is None for row in lost)


def test_another_checkpoint_may_be_the_prover_or_the_supervisor(base, tmp_path):
    for method, flag in (("pav", "--prover-tag"), ("information_gain", "--supervisor-tag")):
        own, other = (run(tmp_path / "new" / method / f"{i}.jsonl", "--method", method, *words)[0]
                      for i, words in enumerate([[], [flag, "tiny-ver"]]))
        assert [row["solution"] for row in own] == [row["solution"] for row in other]
        assert [row["labels"] for row in own] != [row["labels"] for row in other]


def share_of_two(folder: str) -> None:
    label_steps.main(parse(label_steps, flags_of("--method", "omega_prm", "--out", f"{folder}/two.jsonl")))
    torch.distributed.barrier()  # the first rank has written it
    label_steps.main(parse(label_steps, [*FLAGS, "--method", "rpe", "--solutions", f"{folder}/two.jsonl", "--out",
                                         f"{folder}/again.jsonl"]))


def test_two_ranks_write_what_one_writes(base, tmp_path):
    on_two_ranks(share_of_two, str(tmp_path))
    for name, flags in (("two", ["omega_prm"]), ("again", ["rpe", "--solutions", str(tmp_path / "two.jsonl")])):
        _, one = run(tmp_path / f"one-{name}.jsonl", "--method", *flags)
        assert (tmp_path / f"{name}.jsonl").read_text() == (tmp_path / f"one-{name}.jsonl").read_text()
        both = json.loads((tmp_path / f"{name}.summary.json").read_text())
        for summary in (one, both):
            summary["cost"].pop("seconds")
            summary.pop("args")
        assert both == one


GOOD = {"split": "rl", "index": 0, "prompt": "P", "solution": "1+1:2;=2"}


@pytest.mark.parametrize("flags, lines, words", [
    (["--method", "pav", "--best-of", "5"], None, ["--best-of 5", "--num-completions is 4"]),
    (["--prover-tag", "tiny-ver"], None, ["--prover-tag tiny-ver", "math_shepherd", "no prover"]),
    (["--prover-step", "3"], None, ["--prover-step", "are for --prover-tag"]),
    (["--method", "pav", "--prover-tag", "nobody"], None, ["nobody", "tiny-ver"]),
    (["--step", "7"], None, ["no step 7", "200"]),
    (["--solutions", "there.jsonl", "--num-problems", "3"], [GOOD], ["--num-problems: is of solutions that are"]),
    (["--out", "a.json"], None, ["--out a.json", ".jsonl"]),
    (["--out", "base/tokenizer/tokenizer.pkl/a.jsonl"], None, ["cannot write to base/tokenizer/tokenizer.pkl/a.js"]),
    (["--out", "there.jsonl"], [GOOD], ["--out there.jsonl", "is there"]),
    (["--max-new-tokens", "64"], None, ["generator", "context 128", "--max-new-tokens"]),
    (["--solutions", "nowhere.jsonl"], None, ["nowhere.jsonl", "No such file"]),
    (["--solutions", "there.jsonl"], [], ["there.jsonl", "no solutions"]),
    (["--solutions", "there.jsonl"], [GOOD, "{"], ["there.jsonl: line 2: is no json"]),
    (["--solutions", "there.jsonl"], ["[1]"], ["there.jsonl: line 1", "is no json object with split"]),
    (["--solutions", "there.jsonl"], [GOOD | {"index": True}], ["there.jsonl: line 1", "is no json object"]),
    (["--solutions", "there.jsonl"], [GOOD | {"split": "dev"}], ["there.jsonl: line 1", "problem 0 of dev"]),
    (["--solutions", "there.jsonl"], [GOOD, GOOD | {"prompt": "1+1+1"}], ["line 2", "problem 0 of rl", "'1+1+1'"]),
    (["--solutions", "there.jsonl"], [GOOD | {"ids": [49, 50]}], ["line 1", "ids are not the tokens"]),
    (["--solutions", "there.jsonl"], [GOOD | {"ids": [10 ** 9]}], ["line 1", "ids are not the tokens"]),
    (["--solutions", "there.jsonl"], [GOOD, GOOD | {"solution": "1" * 100}], ["context 128"]),
])
def test_bad_input_is_refused_in_one_line_before_any_work(base, tmp_path, monkeypatch, capsys, flags, lines, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(prefixes, "complete", lambda *_: pytest.fail("work began"))
    prompt = chain().problem("rl", 0).prompt
    if lines is not None:
        texts = [line if isinstance(line, str) else json.dumps(line).replace('"P"', json.dumps(prompt))
                 for line in lines]
        (tmp_path / "there.jsonl").write_text("".join(text + "\n" for text in texts))
    before = files_under(tmp_path)
    with pytest.raises(SystemExit) as stop:
        script_main(label_steps.main, label_steps.make_parser(), flags_of("--out", "new.jsonl", *flags))
    err = capsys.readouterr().err
    assert stop.value.code == 2 and err.count("\n") == 1 and all(word in err for word in words), err
    assert files_under(tmp_path) == before and not os.path.exists("new.jsonl")
