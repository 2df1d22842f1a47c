"""
One evaluation for all judges, on solutions that stay the same in the whole run; and what recipes that train a judge
share.
"""
from nanochat.cli import at_least
from nanochat.rl.measure.evals import cut, kept
from nanochat.rl.measure.scores import first_error_f1, macro_f1, share_of
from nanochat.rl.measure.step_labels import until_error
from nanochat.rl.measure.voting import auroc, calibration, choose
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.outcomes import labels_of
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.judges import JUDGES, Judgment, add_judge_args, judge_draws


def fixed_solutions(t: Play, generator: str, num: int, draw: str = "judged", split: str = "test_in",
                    num_problems: int | None = None) -> Rollouts:
    """`num` solutions of each of this rank's first problems of a split (default: --eval-examples), sampled once: the
    same in the whole run."""
    problems, name = t.problems(num_problems or t.args.eval_examples, split), f"{draw}_solutions"
    if name not in t.memory:
        rows = t.solve(draw, problems, num, role=generator).completions()
        of_problems = t.gather([rows[i: i + num] for i in range(0, len(rows), num)])
        t.memory[name] = kept([row for rows in of_problems for row in rows])
    rows = cut(t.memory[name])
    mine = [row for i in range(t.run.rank, len(rows) // num, t.run.world) for row in rows[i * num: (i + 1) * num]]
    prompts = [prompt for prompt in t.solve_prompts(problems) for _ in range(num)]
    return t.written(generator, prompts, mine).with_prompts(prompts)


def judge_scores(t: Play, judgments: list[Judgment], solutions: Rollouts, num: int) -> dict:
    """`judged_scores` of judgments of solutions, `num` of each problem one after the other, over all ranks. Solutions
    with a column of outcomes are not checked again."""
    problems, outcomes = solutions.problems(), solutions.columns.get("outcome") or t.check(solutions)
    labels = [labels_of(t.task, problem, text) for problem, text in zip(problems, solutions.texts, strict=True)]
    rows = [[*row, j.steps, j.final, j.tokens] for *row, j in zip(
        t.answers(solutions, num), outcomes, labels, judgments, strict=True)]
    return judged_scores(t.gather([rows[i: i + num] for i in range(0, len(rows), num)]))


def judged_scores(problems: list[list[list]]) -> dict:
    """A judge's scores. problems: of each its solutions: [answer, outcome, gold step labels, the steps' chances, the
    final chance, tokens].

    A step or solution is called right where its chance is above .5. F1s are macro, of which a chance that is missing
    counts as wrong; the AUCs, ECE and Brier score leave it out, and abstained is its share: of finals, of steps where
    there are no finals. first_error_auc is of the steps up to each solution's first wrong one: there a judge of single
    steps and one of all that came before mean the same. Solutions without an outcome count for steps alone, those
    without gold labels for outcomes alone. bon, weighted: a missing final chance is 0 there.
    """
    rows = [row for solutions in problems for row in solutions]
    called = lambda chance: None if chance is None else chance > 0.5
    gold = [labels for _, _, labels, _, _, _ in rows if labels]
    said = [steps or [None] * len(labels) for _, _, labels, steps, _, _ in rows if labels]
    flat = lambda *both: [pair for row in zip(*both, strict=True) for pair in zip(*row, strict=True)]
    pairs, first = flat(gold, said), flat(until_error(gold, gold), until_error(said, gold))
    known = [(outcome, final) for _, outcome, _, _, final, _ in rows if outcome is not None]
    finals = calibration([f for _, f in known if f is not None], [o for o, f in known if f is not None]) or {}
    mean_step = lambda row: sum(row[3]) / len(row[3]) if row[3] else 0.0
    choices = [choose([row[0] for row in solutions], [row[1] for row in solutions],
                      [row[4] or 0.0 for row in solutions], [mean_step(row) for row in solutions])
               for solutions in problems]
    scored = [choice for choice in choices if choice]
    says_steps, says_finals = any(s is not None for _, s in pairs), any(f is not None for _, f in known)
    return {
        **{name: auroc([s for _, s in found if s is not None], [l for l, s in found if s is not None])
           for name, found in (("step_auc", pairs), ("first_error_auc", first))},
        "step_f1": macro_f1([l for l, _ in pairs], [called(s) for _, s in pairs]) if says_steps else None,
        "first_error_f1": first_error_f1(gold, [[called(s) for s in steps] for steps in said]) if says_steps else None,
        "outcome_auc": finals.get("auroc"), "ece": finals.get("ece"), "brier": finals.get("brier"),
        "outcome_f1": macro_f1([o for o, _ in known], [called(f) for _, f in known]) if says_finals else None,
        "abstained": share_of([f is None for _, f in known] if says_finals else [s is None for _, s in pairs]),
        **{name: sum(choice[name] for choice in scored) / len(scored) if scored else None
           for name in ("pass@1", "maj", "bon", "weighted")},
        "tokens": sum(row[5] for row in rows) / len(rows) if rows else None}


# Recipes that train a verifier on labels and evaluate it as a judge of the generator's solutions

def add_judged_args(group) -> None:
    add_judge_args(group)
    add_judged_samples(group)


def add_judged_samples(group) -> None:
    group.add_argument("--judged-samples", type=at_least(1), default=4,
                       help="n: the starting generator's solutions of each test problem on which the judge is "
                       "evaluated, best of n among them")


def judged_draws(args, judge: str) -> dict[str, Draw]:
    """What the evaluation samples and gives to the judge; nothing of it in a step."""
    P, n = args.examples_per_step, args.judged_samples
    return {"judged": Draw("generator", P, n, args.max_new_tokens, 0)} | judge_draws(args, judge, P, n, 0)


def scores_as_judge(t: Play, judge: str) -> dict:
    """`judge_scores` of the verifier on fixed solutions of the generator."""
    solutions = fixed_solutions(t, "generator", t.args.judged_samples)
    scores = judge_scores(t, JUDGES[judge](t, "verifier", solutions), solutions, t.args.judged_samples)
    return {f"ver/{name}_fixed": value for name, value in scores.items()}
