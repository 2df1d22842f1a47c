"""Supervisor (Ton et al. 2024): an LM that predicts the gold answer from a solution's beginnings. arXiv 2411.11984.

What a reasoning step is worth is its information gain: how much it adds to the log-probability of the gold answer Y,
log p(Y | X_j) - log p(Y | X_{j-1}), where X_j is the problem with the first j steps, and p is the supervisor's. It is
fitted by SFT on Y after beginnings of labelled solutions (--labels), right and wrong ones. Their outcomes and labels
are not used. The trained checkpoint labels steps: label_steps --method information_gain --supervisor-tag RUN-sup
--supervisor-source rl.

Departures:
1. The marks that open an answer are given after the beginning, and the answer and its end are learned and scored. So
   the gain tells which answer comes, not whether one is due.
2. The paper's gain is a mean over problems. Here it is one solution's, and a step with a gain from 0 on counts as
   right.
"""
import random

from nanochat.cli import at_least
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.step_labels import METHODS, agreement, gains, until_error
from nanochat.rl.play.play import Draw, Play
from nanochat.rl.records.outcomes import labels_of
from nanochat.rl.records.rollouts import Rollouts
from nanochat.rl.verify.judge_evals import add_judged_samples, fixed_solutions
from nanochat.rl.verify.labelled import (Labelled, add_label_args, as_rollouts, check_labels, labelled_of_step,
                                         quoting_labelled)
from nanochat.rl.verify.log_odds import learn_verdicts, likelihood_parts
from nanochat.rl.verify.prefixes import Asked, Cut, forced_after, prompt_after

STATUS = "runs: not measured beside other sources of labels; an early look found few first errors"
ROLES = {"generator": RoleSpec("--model-tag", trained=False), "supervisor": RoleSpec("--supervisor-tag")}
SHOWN = {"supervisor": ["nll"]}
check = check_labels
ANSWER_TOKENS = 64  # of an answer and the marks that open and close it, at most


def add_args(group) -> None:
    add_label_args(group)
    add_judged_samples(group)
    group.add_argument("--prefixes", type=at_least(1), default=4,
                       help="beginnings of each labelled solution in a step, drawn; all where it has no more")


def draws(args) -> dict[str, Draw]:
    P = args.examples_per_step
    answers = Draw("supervisor", P * args.prefixes, 1, ANSWER_TOKENS, trained=True, teacher_forced=True, scored=1)
    return {"judged": Draw("generator", P, args.judged_samples, args.max_new_tokens, 0),
            "held_out": answers._replace(times=0, trained=False, quoted=args.max_new_tokens),
            "answers": quoting_labelled(args, answers)}


def play(t: Play):
    """-log p(Y | X_j), the mean over beginnings, of which the answer's tokens alone are learned."""
    rows = labelled_of_step(t)
    cuts = cuts_of(t, as_rollouts(t, "supervisor", rows))
    answers = gold_answers(t, [(cut, j) for row, cut in zip(rows, cuts, strict=True) for j in drawn(t, row, cut)])
    t.log("supervisor", t.mean({"nll": [-logprob for logprob in answer_logprobs(t, answers)]}))
    yield from learn_verdicts(t, "supervisor", (likelihood_parts(answers, answers.mask), len(answers)))


def cuts_of(t: Play, solutions: Rollouts) -> list[Cut]:
    """The solutions with where their steps end."""
    return [Cut(prompt.problem, prompt.ids, ids, solution.text, solution.step_ends) for prompt, ids, solution in zip(
        solutions.prompt_of(), solutions.completions(), t.read_solutions(solutions), strict=True)]


def drawn(t: Play, row: Labelled, cut: Cut) -> list[int]:
    """How many steps the beginnings of a labelled solution have that are learned from in this step."""
    rng = random.Random(f"{t.args.seed}-{t.step}-{row.problem.split}-{row.problem.index}-{row.copy}")
    num = len(cut.step_ends) + 1
    return sorted(rng.sample(range(num), min(num, t.args.prefixes)))


def gold_answers(t: Play, asked: Asked) -> Rollouts:
    """The gold answer as the supervisor's completion after each beginning of a solution."""
    forced = [forced_after(t.tokenizer, t.task.fmt, cut, j) for cut, j in asked]
    begun, answers = [begun for begun, _ in forced], [answer for _, answer in forced]
    prompts = [prompt_after(cut.prompt, cut.problem, ids) for (cut, _), ids in zip(asked, begun, strict=True)]
    return t.written("supervisor", prompts, answers).with_prompts(prompts)


def answer_logprobs(t: Play, answers: Rollouts) -> list[float]:
    """log p(Y | X_j) of each."""
    return t.logprobs("supervisor", answers).sum(dim=1).tolist()                               # (N, T) -> N


def evaluate(t: Play) -> dict:
    """How well the gains tell right steps of the generator's solutions, which stay the same in the whole run."""
    cuts = cuts_of(t, fixed_solutions(t, "generator", t.args.judged_samples))
    found = iter(answer_logprobs(t, gold_answers(t, [(cut, j) for cut in cuts for j in range(len(cut.step_ends) + 1)])))
    values = [[next(found) for _ in range(len(cut.step_ends) + 1)] for cut in cuts]
    scores = t.mean({"nll_none": [-row[0] for row in values], "nll_whole": [-row[-1] for row in values]})
    gold = [labels_of(t.task, cut.problem, cut.text) for cut in cuts]
    scores |= gain_scores(t.gather([list(pair) for pair in zip(values, gold, strict=True)]))
    return {f"sup/{name}_fixed": value for name, value in scores.items()}


def gain_scores(rows: list[list]) -> dict:
    """Scores of the gains as labels of steps. rows: log p(Y | X_0) to log p(Y | X_K) of a solution and the gold labels
    of its K steps, [] where they are not known. first_error_auc is over the steps up to the first that is wrong."""
    known = [(gains(values), labels) for values, labels in rows if labels]
    found, gold, least = [g for g, _ in known], [labels for _, labels in known], METHODS["information_gain"].least
    steps, first = agreement(gold, found, least), agreement(until_error(gold, gold), until_error(found, gold), least)
    return {"step_auc": steps["auc"], "step_accuracy": steps["accuracy"], "first_error_auc": first["auc"]}
