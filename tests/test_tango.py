"""What Tango rewards and keeps: variants, few gold answers, verdicts that are shared or say nothing."""
from dataclasses import asdict
from random import Random
from types import SimpleNamespace

import pytest
import torch
from conftest import train
from test_dpo import random_play, weights_of
from test_tango_rl import AT_THE_END, records

from nanochat.common import BadInput
from nanochat.recipes.tango import _judged, tango
from nanochat.recipes.tango._pool import class_weights
from nanochat.rl.credit.rewards import ClassWeights, VerdictTrust
from nanochat.rl.play.play import Play
from nanochat.rl.play.updates import apply_update
from nanochat.rl.records.prompts import Verification
from tasks import make_task
from tasks.common import Problem, demo_of
from tasks.few_labels import FewLabels


@pytest.mark.parametrize("flags", [
    ["--combine", "advantages", "--advantage", "rloo", "--updates-per-batch", "2", "--kl-coef", "0.1", "--kl", "k2",
     "--entropy-coef", "0.01", "--dual-clip", "3", "--verifier-replay", "0", "--no-verifier-balance"],
    ["--loss", "reinforce", "--aggregation", "token", "--advantage", "dr_grpo", "--lr-schedule", "linear"]])
def test_variants_run_and_keep_past_solutions_only_where_they_are_used(base, flags):
    train(*AT_THE_END, "--num-steps", "2", *flags)
    assert all(r.get("gen/skipped", r.get("ver/skipped")) == 0 for r in records(base, "r"))
    state, = (base / "runs" / "r").glob("state_*.pt")
    assert ("pool" in torch.load(state, weights_only=True)["memory"]) == ("--no-verifier-balance" not in flags)


def test_outcome_verifier_rewards_the_final_verdict_and_no_step(base):
    train(*AT_THE_END, "--recipe", "outcome_verifier", "--alpha-start", "1", "--alpha-end", "1", "--log-rollouts", "8",
          "--warmup-steps", "0", "--num-steps", "2")
    rollouts = [r for r in records(base, "r", "rollouts.jsonl") if r["role"] == "generator"]
    assert {r["verdict"] for r in rollouts} >= {True, False} and any(r["advantages"][0] for r in rollouts)
    for r in rollouts:
        assert len(set(r["advantages"])) == 1
        assert (r["advantages"][0] >= 0 if r["verdict"]
                else r["advantages"][0] <= 0 if r["verdict"] is False else r["advantages"][0] == 0)


def test_class_weights_remember_the_batches_before_and_are_saved_with_the_run(base):
    t, expected = random_play("tango", "--num-samples", "2"), ClassWeights()
    for right in (4, 0):  # of 4 verifications of 2 solutions
        outcomes = [True] * right + [False] * (4 - right)
        expected.observe(right / 2, 2 - right / 2)
        assert class_weights(t, outcomes).tolist() == pytest.approx([expected.weight(o) for o in outcomes])
    assert t.memory["class_weights"] == asdict(expected)


def solved_problems(monkeypatch) -> list[tuple[str, list[int]]]:
    """(draw, indices of the problems) of everything that is solved in steps from here on."""
    solved, solve = [], Play.solve
    def noted(self, draw, problems, *args, **flags):
        if not self.evaluating:
            solved.append((draw, [p.index for p in problems]))
        return solve(self, draw, problems, *args, **flags)
    monkeypatch.setattr(Play, "solve", noted)
    return solved


def test_labelled_problems_come_again_and_their_outcomes_alone_are_told():
    """Of 7 problems 3 are labelled: one in two that are drawn, or one in four, or all. The others come in turn."""
    task = SimpleNamespace(num_problems=lambda split: 7, check=lambda problem, text: text == problem.answer, name="x")
    order = lambda share, **which: [FewLabels(task, 3, share, 3).index_of(i, **which) for i in range(10)]
    assert order(0.5) == [0, 3, 1, 4, 2, 5, 0, 6, 1, 3] and order(0.25) == [0, 3, 4, 5, 1, 6, 3, 4, 2, 5]
    assert order(1.0) == order(0.5, labelled=True) == [0, 1, 2] * 3 + [0]
    few = FewLabels(task, 3, 0.5, 3)
    of = lambda index, split="rl": [(few.check(p, text), few.hidden(p, text)) for text in "12"
                                    for p in [Problem(split, index, "0+1", "1")]]
    assert of(2) == of(9, "test_in") == [(True, None), (False, None)] and of(3) == [(None, True), (None, False)]
    assert few.name == "x" and few.num_problems("rl") == 7
    for num in (3, 5):
        with pytest.raises(BadInput, match=f"--num-labelled {num}: with and without a gold answer"):
            FewLabels(task, num, 0.5, 4 if num == 3 else 3)
    del task.num_problems  # endless: the others never come again
    assert [FewLabels(task, 3, 0.5, 3).index_of(i) for i in (21, 401)] == [13, 203]


def test_with_few_labelled_problems_half_of_a_batch_has_no_outcome(base, monkeypatch):
    """Every second problem of a generator step has index 6 or more; a verifier step judges labelled ones alone."""
    solved = solved_problems(monkeypatch)
    train(*AT_THE_END, "--num-labelled", "6")
    drawn = {draw: [i for name, places in solved if name == draw for i in places] for draw in ("solutions", "judged")}
    assert len(drawn["judged"]) == 3 * 4 and set(drawn["judged"]) == set(range(6))
    labelled, others = ([i for i in drawn["solutions"] if (i < 6) is kind] for kind in (True, False))
    assert len(labelled) == len(others) == 4 * 2 and len(set(others)) == 8
    log = [r for r in records(base, "r") if r["role"] == "generator"]
    assert [r["gen/unscorable"] for r in log] == [0.5] * 4
    assert all(0 <= r[f"gen/unlabelled/{name}"] <= 1 for r in log for name in ("outcome/mean", "verdict_accuracy"))
    outcomes = [r["outcome"] for r in records(base, "r", "rollouts.jsonl") if r["role"] == "generator"]
    assert outcomes.count(None) == 16 and len(outcomes) == 32


def test_a_start_that_was_not_taught_what_it_is_asked_for_is_warned_of(base, capsys):
    train("--run", "r", "--recipe", "multi_agent_evolve", "--dry-run")
    out = capsys.readouterr().out
    assert "WARNING: the SFT of tiny had no verifications (chat_sft --role both)" in out
    assert "WARNING: the SFT of tiny had no demonstrations of kind propose (chat_sft --demo-shares)" in out
    train("--run", "r", "--recipe", "self_rewarding", "--dry-run")  # two roles from one checkpoint
    assert capsys.readouterr().out.count("had no verifications") == 1
    train("--run", "r", "--recipe", "marti", "--dry-run")
    assert "kind refine or revise" in capsys.readouterr().out
    train("--run", "r", "--dry-run")
    assert "the SFT of" not in capsys.readouterr().out


@pytest.mark.parametrize("combine", ["advantages", "rewards"])
@pytest.mark.parametrize("earn", ["steps", "verdict"])
def test_no_gold_answer_of_an_unlabelled_problem_enters_an_update(base, earn, combine):
    """A check that finds all of them right, or wrong, gives the same weights; one of labelled ones gives others."""
    def moved(labelled: bool, others: bool, kind: str = "posterior") -> dict[str, torch.Tensor]:
        t = random_play("tango", "--verifier-max-new-tokens", "36", "--step-rewards", kind, "--combine", combine)
        t.task.check = lambda problem, text: len(text) % 2 == 0 if problem.index < 4 and labelled else others
        t.sampler.task = FewLabels(t.task, 4, 0.5, 4)
        num_steps = lambda rollouts: [len(prompt.solution.step_ends) for prompt in rollouts.prompt_of()]
        said = lambda n, text: Verification([len(text) % 3 > 0] * n, len(text) % 2 == 0, ())
        t.read_verifications = lambda rollouts: list(map(said, num_steps(rollouts), rollouts.texts))
        update, = tango.generator_step(t, tango.written, earn)
        solutions = update.parts[0][0]
        assert {p.index < 4 for p in solutions.problems()} == {True, False}
        hidden = [verdict for problem, verdict in zip(solutions.problems(), solutions.columns["verdict"], strict=True)
                  if problem.index >= 4]
        assert t.metrics["gen/unlabelled/outcome/mean"] == others
        assert t.metrics["gen/unlabelled/verdict_accuracy"] == pytest.approx(hidden.count(others) / len(hidden))
        apply_update(t, update)
        return weights_of(t.roles["generator"].model)
    plain, same, *other = moved(True, True), moved(True, False), moved(False, True), moved(True, True, "verdicts")
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    differ = [any(not torch.equal(plain[name], weights[name]) for name in plain) for weights in other]
    assert differ[0]
    if combine == "rewards":  # normalised by themselves two values are +-1, whatever they are
        assert differ[1] == (earn == "steps")


GSM = ("--task", "reasoning_gym", "--reasoning-gym-format", "lines", "--reasoning-gym-most-lines", "2")


@pytest.mark.parametrize("task", [(), ("--task", "last_letter"), ("--task", "mixture"), GSM],
                         ids=["chain", "last_letter", "mixture", "gsm_symbolic"])
def test_neither_a_wrong_answer_nor_what_cannot_be_judged_is_paid_for_itself(base, task):
    """Groups of right and wrong solutions, and groups of wrong ones alone, of which some have no form, with verdicts of
    all kinds, or such as cannot be read. With the defaults; those before them paid for both."""
    def paid(*flags: str) -> list[bool]:
        """Whether a wrong solution earns where nothing was said of it, or outside its steps."""
        t, rng, earned = random_play("tango", *task, "--examples-per-step", "12", *flags), Random(0), []
        t.sampler.task = make_task(t.args)
        t.roles["generator"].model.config.sequence_len = 2048

        def written(problem: Problem) -> str:
            own = t.task.part(problem) if hasattr(t.task, "part") else t.task
            text = demo_of(own, "corrupted_solution", problem, rng)
            while problem.index % 2 and t.task.check(problem, text):  # a group of wrong ones alone
                text = demo_of(own, "corrupted_solution", problem, rng)
            return text if rng.random() < 0.8 else text[:rng.randrange(len(text))]
        prompts = [prompt for prompt in t.solve_prompts(t.problems()) for _ in range(8)]
        texts = [written(prompt.problem) for prompt in prompts]
        solutions = t.written("generator", prompts, texts).with_prompts(prompts)
        ends, trusted = [solution.step_ends for solution in t.read_solutions(solutions)], {True: 0.9, False: 0.1}
        said = [Verification([rng.random() < trusted[bool(outcome)] for _ in found], rng.random() < 0.5,
                             ("missing_tags",) * (rng.random() < 0.3))
                for found, outcome in zip(ends, t.check(solutions), strict=True)]
        t.solve, t.verify, t.read_verifications = lambda *_: solutions, lambda draw, rollouts: rollouts, lambda _: said
        update, = tango.generator_step(t, tango.written)
        (_, advantages), = update.parts
        outcomes = solutions.columns["outcome"]
        assert {True, False} <= {*outcomes} and any(v.unmet for v in said)
        for n, outcome in enumerate(outcomes):
            if not outcome:
                first = ends[n][-1] + 1 if said[n].usable_steps and ends[n] else 0
                earned.append(bool((advantages[n, first:] > 0).any()))
        return earned
    before = paid("--no-verify-distinct", "--combine", "rewards", "--credit", "to_go", "--negative-weight", "1")
    assert any(before) and not any(paid("--no-verify-distinct"))


@pytest.mark.parametrize("has_answer", [True, False])
def test_a_solution_without_an_answer_earns_as_a_wrong_one_and_says_nothing_of_verdicts(has_answer):
    """One that is cut off may lack steps and have no wrong ones, so verdicts are not believed less by it."""
    told: dict = {}
    t = SimpleNamespace(answers=lambda solutions: ["1" if has_answer else None] * len(solutions.texts),
                        memory={}, device=torch.device("cpu"), reduce=lambda x: x,
                        log=lambda role, values: told.update(values))
    solutions = SimpleNamespace(texts=["a", "b", "c", "d"], columns={"outcome": [has_answer, False, False, None]})
    batches = [[True, False], [True, True], None, [True, False]], [[True, True], [False, True], [True], None]
    trust = VerdictTrust()
    for verdicts in batches:  # a batch after the other moves one estimate, which is saved with the run
        chances = _judged.posterior(t, solutions, verdicts)
        if has_answer:
            trust.observe(verdicts, solutions.columns["outcome"])
            assert t.memory["trust"] == asdict(trust)
        assert chances == [row and trust.chances(row, o)
                           for row, o in zip(verdicts, solutions.columns["outcome"], strict=True)]
        assert solutions.columns["step_chances"] == chances and trust.luck == told["trust/luck"]


def test_solutions_that_are_alike_are_verified_once(base, monkeypatch):
    flags, seen, verify = ["--num-steps", "1", "--warmup-steps", "0", "--temperature", "0.4"], [], tango.written
    def watched(t, solutions):
        judged = verify(t, solutions)
        seen.append((list(zip(solutions.group_id.tolist(), solutions.texts, strict=True)), judged.verifications))
        return judged
    monkeypatch.setattr(tango, "written", watched)
    train("--run", "all", *flags, "--num-samples", "8", "--no-verify-distinct")
    train("--run", "one", *flags, "--num-samples", "8")
    (record_all,), (record_one,) = records(base, "all"), records(base, "one")
    said = [[{v.text for k, v in zip(keys, verifications, strict=True) if k == key} for key in dict.fromkeys(keys)]
            for keys, verifications in seen]
    assert seen[0][0] == seen[1][0] and len(said[1]) < len(seen[1][0])
    assert max(map(len, said[0])) > 1 == max(map(len, said[1]))
    assert record_all["gen/verified"] == 1
    assert record_one["gen/verified"] == pytest.approx(len(said[1]) / len(seen[1][0]))
    assert record_one["gen/sampled_tokens"] < record_all["gen/sampled_tokens"]
