"""R1-Searcher (Song et al. 2025): first the use of a search is rewarded, then the answer. arXiv 2503.05592.

Stage 1 pays 0.5 for a solution that searches and whose marks pair up, and 0.5 for its form, whatever it answers. Stage
2 pays the answer, 1 or 0, and takes 2 off for a bad form; it no longer asks for a search. The form: every query has the
information that the search gave it, and there is one answer, at the end, that is no query. The information is masked
from the loss. The advantage is REINFORCE++'s (Hu 2025), normalised over the batch. The KL is 1e-4, as in their scripts
for Llama; the one for Qwen has none.

Departures:
1. Rewards are the paper's. In the released code stage 1 also pays 1 for a right answer and takes 1 off for a wrong one,
   stage 2 takes 1 off for a bad form with Llama, and with Qwen there is stage 2 alone (--stage1-steps 0).
2. The answer is right or wrong. Theirs earns the F1 of its words, which is the same of a single one.
3. Their form has a closed block of thinking, at most 10 words in the answer and no Chinese. The formats here have none
   of these.
4. Stage 1 ends after a number of steps on the same problems. Theirs has 350 problems of its own.
5. Queries and the search are those of recipe search_r1, with its departures 1 and 3.
6. The KL is a term of the loss (--kl). Theirs is taken off each token's reward.
7. The released code takes the mean of a problem's rewards off before it normalises over the batch. Its stage 1 with
   Llama has GRPO's advantages in place of both.
"""
from nanochat.cli import at_least
from nanochat.recipes.search.search_r1 import (ROLES, TABLE, add_search_args, answers_once, check,  # noqa: F401
                                               draws, evaluate, learn, log_queries, read_queries, search_of)
from nanochat.rl.play.play import Play

STATUS = "runs: 24.8 ± 7.1 above GRPO from memory; that its first stage helps is not shown, search_r1 has none"
SHOWN = {"generator": ["stage", "queries"]}
BAD_FORM = 2.0  # what stage 2 takes off for it


def add_args(group) -> None:
    add_search_args(group)
    group.add_argument("--stage1-steps", type=at_least(0), default=20, help="steps of stage 1")
    group.set_defaults(advantage="reinforce++", kl_coef=1e-4)


def is_formed(fmt, text: str, stopped: bool, num_queries: int) -> bool:
    """Whether a solution has the form: all information in it is what the search gave to its `num_queries` queries."""
    queries = read_queries(fmt, text)
    return queries is not None and len(queries) == num_queries and answers_once(fmt, text, stopped)


def play(t: Play):
    search, fmt = search_of(t), t.task.fmt
    solutions = t.solve("solutions", t.problems(), tool=search)
    outcomes = solutions.columns["outcome"] = t.check(solutions)
    num_queries = [search.num_queries[n] for n in range(len(solutions))]
    formed = [is_formed(fmt, *row)
              for row in zip(solutions.texts, solutions.stopped.tolist(), num_queries, strict=True)]
    stage = 1 if t.steps["generator"] < t.args.stage1_steps else 2
    if stage == 1:
        searches = [num > 0 and read_queries(fmt, text) is not None
                    for num, text in zip(num_queries, solutions.texts, strict=True)]
        rewards = [0.5 * searched + 0.5 * form for searched, form in zip(searches, formed, strict=True)]
    else:
        rewards = [None if outcome is None else outcome - BAD_FORM * (not form)
                   for outcome, form in zip(outcomes, formed, strict=True)]
    log_queries(t, solutions, num_queries)
    t.log("generator", {"stage": stage} | t.mean({"rewards/format/mean": formed}))
    yield learn(t, solutions, rewards)
