"""Search-R1 (Jin et al. 2025): GRPO on solutions that search as they are written. arXiv 2503.09516.

Where the policy closes a query, the search's information is put after it, and the policy goes on. A right answer earns
1, any other 0; nothing rewards a search or its form. Information is no token of the policy: it is masked from the loss
(--no-mask-information is the paper's ablation). Other recipes with a search share its flags, marks and evaluation: with
the search (pass1) and without it (memory_pass1), where the policy has to write the information itself.

Departures:
1. After --most-queries queries nothing is put there, and the solution goes on. Theirs, after 4, generates once more
   without a search, and its own answer to what is neither a query nor an answer is "my previous action is invalid".
2. GRPO alone. The paper has PPO as well.
3. A tiny model learns the marks of a query by SFT first. Theirs reads of them in the prompt.
"""
import argparse
import re
from dataclasses import replace

from nanochat.cli import at_least
from nanochat.common import BadInput
from nanochat.rl.learn.roles import RoleSpec
from nanochat.rl.measure.evals import pass_at_1
from nanochat.rl.measure.observe import log_rewards
from nanochat.rl.play.play import Play, Update, solution_draws
from nanochat.rl.records.outcomes import answers_of, check_task, labels_of
from nanochat.rl.records.rollouts import Rollouts

STATUS = "works: 24.8 ± 7.1 above GRPO from memory; that its mask helps is not shown"
ROLES = {"generator": RoleSpec("--model-tag")}
SHOWN = {"generator": ["queries"]}
draws = solution_draws
TABLE = {"gen/pass1_in": "greedy pass@1 with the search, in distribution",
         "gen/pass1_out": "greedy pass@1 with the search, out of distribution",
         "gen/memory_pass1_in": "greedy pass@1 from memory, in distribution",
         "gen/memory_pass1_out": "greedy pass@1 from memory, out of distribution"}


def add_search_args(group) -> None:
    group.add_argument("--most-queries", type=at_least(1), default=8, help="queries of a solution that are answered")


def check(args, task, needed: str = "tool") -> None:
    check_task(task, needed)
    if args.calculator:
        raise BadInput("--calculator: solutions of this recipe have a search, and one tool at a time")


def search_of(t: Play):
    """The task's search, for one draw."""
    return t.task.tool(t.tokenizer, t.args.most_queries)


def read_queries(fmt, text: str) -> list[tuple[str, str]] | None:
    """The queries of a text with the information after each; None where the marks of both do not pair up. COMPACT:
    "<c>(7);4+7:1;=1" -> [("c", "7")], "<c>;=1" -> None."""
    marks = fmt.query_open, fmt.query_close, fmt.info_open, fmt.info_close
    found = re.findall("{}(.*?){}{}(.*?){}".format(*map(re.escape, marks)), text, re.DOTALL)
    return found if all(text.count(mark) == len(found) for mark in marks) else None


def answers_once(fmt, text: str, stopped: bool) -> bool:
    """Whether a solution ends itself with one answer, and without a query in it."""
    answer = fmt.answer(text) if stopped and text.count(fmt.answer_open) == 1 else None
    return bool(answer) and fmt.query_open not in answer


def log_queries(t: Play, solutions: Rollouts, num_queries: list[int]) -> None:
    """Logs what solutions ask, and how far they can be read."""
    pairs = zip(solutions.problems(), solutions.texts, strict=True)
    labels = [labels_of(t.task, problem, text) for problem, text in pairs]
    masked = 1 - solutions.num_trained() / solutions.lengths.clamp(min=1)
    t.log("generator", t.mean({
        "queries": num_queries, "searched": [num > 0 for num in num_queries],
        "bad_marks": [read_queries(t.task.fmt, text) is None for text in solutions.texts],
        "unreadable": [answer is None for answer in answers_of(t.task, solutions.texts)],
        "rewards/outcome/mean": solutions.columns["outcome"],
        "unscorable": [outcome is None for outcome in solutions.columns["outcome"]],
        "step_label_mean": [x for row in labels for x in row],
        "masked": masked.tolist()}))


def learn(t: Play, solutions: Rollouts, rewards: list[float | None]) -> Update:
    """An update on solutions and what each of them earns at its end."""
    log_rewards(t, "generator", solutions, rewards)
    return Update("generator", [(solutions, t.advantages(solutions, rewards))])


def named(scores: dict, name: str) -> dict:
    """Scores of pass@1 as <name>_pass1."""
    return {key.replace("pass1", f"{name}_pass1"): value for key, value in scores.items()}


def add_args(group) -> None:
    add_search_args(group)
    group.add_argument("--mask-information", action=argparse.BooleanOptionalAction, default=True,
                       help="the information that a search gives is not trained")


def play(t: Play):
    search = search_of(t)
    solutions = t.solve("solutions", t.problems(), tool=search)    # y ~ pi(. | x; R)
    outcomes = solutions.columns["outcome"] = t.check(solutions)    # EM(a_pred, a_gold)
    if not t.args.mask_information:
        solutions = unmasked(solutions)
    log_queries(t, solutions, [search.num_queries[n] for n in range(len(solutions))])
    yield learn(t, solutions, outcomes)


def unmasked(solutions: Rollouts) -> Rollouts:
    """The same solutions, of which the information is trained too. Nobody drew it."""
    logprobs = solutions.sampler_logprobs.masked_fill(solutions.forced, float("nan"))
    return replace(solutions, forced=None, sampler_logprobs=logprobs)


def evaluate(t: Play) -> dict:
    """pass@1 with the search, and from memory."""
    return pass_at_1(t, tool=lambda: search_of(t)) | named(pass_at_1(t), "memory")
