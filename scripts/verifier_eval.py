"""
Evaluates a verifier: the first errors it finds in ProcessBench, and the solutions it chooses out of a generator's n.
Either part, or both.

ProcessBench: each solution is put into the format of --format (its answer is what its last step has in \\boxed{}, else
empty; format marks inside steps become "?") and verified k times. The first steps judged wrong vote. Best of n: n
sampled solutions of each test_in problem, each verified k times; the task and its flags are those of the generator's
checkpoint, unless given. --judge-report adds what ails the judge on these solutions: malformed texts, judgments that
follow length or author, right verdicts after a wrong analysis. What does not fit the verifier's context is never cut:
it is counted, and has no verdicts.

    python -m scripts.verifier_eval --verifier-tag d4-ver --processbench Qwen/ProcessBench
    python -m scripts.verifier_eval --verifier-tag first-ver --verifier-source rl --generator-tag first-gen \\
        --generator-source rl --num-samples 8 --num-verifications 4 --temperature 1 --out scores.json
    torchrun --standalone --nproc_per_node=8 scripts/verifier_eval.py -- --verifier-tag d4-ver --processbench folder
"""
import argparse
import os
from dataclasses import replace
from types import SimpleNamespace

from nanochat.checkpoint import load_model, warn_of_role
from nanochat.cli import add_device_arg, at_least, check_name, new_parser, script_main
from nanochat.common import BadInput, gather_lists, init_device, print0, rank_and_world
from nanochat.engine import check_temperature
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.own_code import is_file
from nanochat.rl.measure.scores import aligned, first_error, first_error_scores, majority
from nanochat.rl.measure.voting import SCORES, calibration, choose, final_share, mean_scores, step_share
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import ENDLESS, answers_of, counted_outcomes, labels_of, problems_of
from nanochat.rl.records.prompts import (Solution, Verification, check_prompts_fit, count_copies, read_solution,
                                         verifier_prompt)
from nanochat.rl.report.judge_report import judge_report, rationales_of, report_lines
from nanochat.storage.files import check_writable, found_at, read_json, write_json
from tasks import add_task_args, complete_task_args, make_task, recorded_value, task_flags, warn_of_prompts
from tasks.common import Problem
from tasks.formats import FORMATS, PROMPTS, with_prompts
from tasks.processbench import HUB, LabelledSolution, load_processbench, solution_text

CHOICES = ("pass@1", "maj", "bon", "weighted", "pass@n")
# Recipes that train a verifier which writes nothing: the judge of recipe fixed_verifier that reads it, "" for none.
UNWRITTEN = {"orm": "end", "prm": "steps", "genrm": "verdict", "gram": "preferred", "refit": "steps", "cooper": "",
             "ppo": "", "prime": "", "supervisor": ""}


def add_verifier_args(parser) -> None:
    """Flags of a verifier that is evaluated, and of the evaluation."""
    parser.add_argument("--verifier-tag", required=True,
                        help="the verifier's checkpoint; it must write verifications, as recipe tango's does")
    parser.add_argument("--verifier-source", choices=["sft", "rl"], default="sft", help="stage of its checkpoint")
    parser.add_argument("--step", type=at_least(-1), default=-1, help="of the verifier's checkpoint; -1 = the last")
    parser.add_argument("--num-verifications", type=at_least(1, int, 10 ** 5), default=1, help="per solution")
    parser.add_argument("--temperature", type=float, default=0.0,
                        help="of the verifier; 0 = greedy, for one verification")
    parser.add_argument("--top-k", type=at_least(0), default=0, help="of both; 0 = the full softmax")
    parser.add_argument("--verifier-max-new-tokens", type=at_least(1, also=-1), default=-1,
                        help="-1 = as in the checkpoint's RL, else 256, at most half its context")
    parser.add_argument("--max-rows", type=at_least(1), default=256,
                        help="rows that decode together; changes memory, no result")
    add_device_arg(parser)
    parser.add_argument("--seed", type=int, default=None,
                        help="of problems and noise; default: the checkpoint's, the generator's if there is one")
    parser.add_argument("--out", default="", metavar="FILE.json",
                        help="writes all numbers and every single prediction there; default: nothing is written")


def add_generator_args(group, is_needed: bool) -> None:
    """Flags of a generator whose solutions are verified."""
    group.add_argument("--generator-tag", default="", required=is_needed,
                       help="the checkpoint that samples solutions" + "; default: no best of n" * (not is_needed))
    group.add_argument("--generator-source", choices=["sft", "rl"], default="sft", help="stage of its checkpoint")
    group.add_argument("--generator-step", type=at_least(-1), default=-1,
                       help="of the generator's checkpoint; -1 = the last")
    group.add_argument("--num-samples", type=at_least(1, int, 10 ** 5), default=8, help="solutions per problem")
    group.add_argument("--generator-temperature", type=float, default=1.0, help="0 = greedy, for one solution")
    group.add_argument("--max-new-tokens", type=at_least(1, also=-1), default=-1,
                       help="of a solution; -1 = as in the checkpoint's training, else 256")
    group.add_argument("--max-problems", type=at_least(1, int, 10 ** 6, also=-1), default=-1,
                       help=f"-1 = all there are, {ENDLESS} of tasks that make their own")
    group.add_argument("--score", choices=list(SCORES), default="final",
                       help="of a solution: share of verifications that call it CORRECT, share of its steps judged "
                            "right, or the share for its weakest step")
    group.add_argument("--calculator", action=argparse.BooleanOptionalAction, default=True,
                       help="solutions may call the calculator")


def make_parser():
    parser = new_parser(__doc__)
    add_verifier_args(parser)
    group = parser.add_argument_group("ProcessBench")
    group.add_argument("--processbench", default="", metavar="SOURCE",
                       help=f"a .jsonl, .json or .parquet file, a folder of them, or a hub name ({HUB})")
    group.add_argument("--subset", default="", help="one subset; default: all")
    group.add_argument("--max-examples", type=at_least(1, also=-1), default=-1, help="per subset; -1 = all")
    group.add_argument("--format", choices=list(FORMATS), default="paper", help="that the verifier was trained with")
    group = parser.add_argument_group("best of n")
    add_generator_args(group, is_needed=False)
    group.add_argument("--judge-report", action="store_true",
                       help="report its F1 and what ails it, on the same solutions (nanochat.rl.report.judge_report)")
    group.add_argument("--own-tag", default="",
                       help="judge report: a model that solves as the judge would; its solutions are judged beside "
                            "the generator's, for self-preference")
    group.add_argument("--own-source", choices=["sft", "rl"], default="sft", help="stage of its checkpoint")
    group.add_argument("--own-step", type=at_least(-1), default=-1, help="of its checkpoint; -1 = the last")
    add_task_args(parser)
    parser.set_defaults(**dict.fromkeys(task_flags()))
    return parser


def is_result(path: str, parts: set[str]) -> bool:
    """Whether a file is what an earlier evaluation wrote: its args and some of these parts."""
    try:
        found = read_json(path)
        return found.keys() <= {"args", *parts} and "verifier_tag" in found["args"]
    except (BadInput, KeyError):
        return False


def check_args(args) -> None:
    if not args.processbench and not args.generator_tag:
        raise BadInput("nothing to evaluate on: give --processbench, --generator-tag or both")
    if args.subset and not args.processbench:
        raise BadInput(f"--subset {args.subset}: is for --processbench")
    if args.judge_report and not args.generator_tag or args.own_tag and not args.judge_report:
        raise BadInput("--judge-report: is of a generator's solutions, so it needs --generator-tag" if args.judge_report
                       else f"--own-tag {args.own_tag}: is for --judge-report")
    if not args.own_tag and (args.own_step, args.own_source) != (-1, "sft"):
        raise BadInput(f"--own-step {args.own_step} --own-source {args.own_source}: are for --own-tag")
    given = [name for name in task_flags().keys() - PROMPTS if getattr(args, name) is not None]
    if given and not args.generator_tag:
        raise BadInput(f"--{given[0].replace('_', '-')} {getattr(args, given[0])}: is for --generator-tag")
    check_players(args, {"processbench", "best_of_n", "judge_report"})
    check_name("--own-tag", args.own_tag or args.verifier_tag)


def check_players(args, parts: set[str]) -> None:
    """Raises BadInput for what a verifier and a generator cannot be asked. parts: of what --out holds, beside args."""
    check_temperature("--temperature", args.temperature)
    check_temperature("--generator-temperature", args.generator_temperature)
    for count, greedy, flag in (("num_verifications", args.temperature == 0, "--temperature"),
                                ("num_samples", args.generator_tag and args.generator_temperature == 0,
                                 "--generator-temperature")):
        if getattr(args, count) > 1 and greedy:
            raise BadInput(f"--{count.replace('_', '-')} {getattr(args, count)}: greedy ones are all the same; give "
                           f"{flag} above 0")
    check_name("--verifier-tag", args.verifier_tag)
    check_name("--generator-tag", args.generator_tag or args.verifier_tag)
    if args.out:
        args.out = os.path.realpath(args.out)  # a link stays, and what it leads to is written
        check_writable(os.path.dirname(args.out))
        if not os.path.isdir(os.path.dirname(args.out)):
            raise BadInput(f"--out {args.out}: its folder is not there")
        if os.path.exists(args.out) and not (os.path.isfile(args.out) and is_result(args.out, parts)):
            raise BadInput(f"--out {args.out}: is there, and no earlier result of this script; take another name")


def share_malformed(rows: list[dict], k: int) -> float | None:
    """The share of malformed verifications, of rows of `verified_solutions`; None where nothing was verified."""
    verified = k * sum(row["too_long"].count(False) for row in rows)
    return sum(sum(row["malformed"]) for row in rows) / verified if verified else None


def warn_of_malformed(parse_fail: float | None) -> None:
    """Says so where most verifications miss a criterion of their format. parse_fail: the share of these."""
    if parse_fail is not None and parse_fail > 0.5:
        print0(f"WARNING: {shown(parse_fail)}% of the verifications are malformed. Was the verifier taught to write "
               f"them, in this format?")


def gathered(rows: list[dict], key: str, device) -> list[dict]:
    """The rows of all ranks, by ascending key: the same list on any number of ranks."""
    return sorted(gather_lists(rows, device), key=lambda row: row[key])


def verify_fitting(args, problems: list[Problem], solutions: list[Solution], verifier, sampler: Sampler,
                   stream: tuple) -> list[tuple[list[Verification], list[int]]]:
    """The k verifications of each solution and their tokens; none of one that does not fit the verifier's context."""
    k, room = args.num_verifications, verifier.config.sequence_len - args.verifier_max_new_tokens
    prompts = [verifier_prompt(sampler.tokenizer, sampler.task.fmt, p.prompt, s.text)
               for p, s in zip(problems, solutions, strict=True)]
    fits, copies = [len(prompt) <= room for prompt in prompts], count_copies(problems)
    kept = [[x for x, fit in zip(row, fits, strict=True) if fit] for row in (problems, solutions, copies)]
    rollouts, said = sampler.verify(verifier, *kept[:2], k, stream, greedy=args.temperature == 0, copies=kept[2])
    lengths = rollouts.lengths.tolist()
    groups = iter([(said[i: i + k], lengths[i: i + k]) for i in range(0, len(said), k)])
    return [next(groups) if fit else ([], []) for fit in fits]


# ProcessBench

def verify_samples(args, samples: list[LabelledSolution], verifier, sampler, device) -> list[dict]:
    """Per sample of one subset, over all ranks: what k verifications said. predictions: the first step each judges
    wrong, -1 for none, None where its text leaves that open; prediction: their majority; verdicts: the final ones;
    malformed: how many miss a criterion of the format."""
    rank, world = rank_and_world()
    k, fmt, tokenizer = args.num_verifications, sampler.task.fmt, sampler.tokenizer
    mine = samples[rank::world]
    problems = [Problem(s.subset, s.row, s.problem, "") for s in mine]  # names the noise
    solutions = [read_solution(tokenizer, fmt, tokenizer.encode(solution_text(fmt, s))) for s in mine]
    assert [len(solution.step_ends) for solution in solutions] == [len(s.steps) for s in mine]
    rows = []
    judged = verify_fitting(args, problems, solutions, verifier, sampler, ("processbench",))
    for sample, (said, _) in zip(mine, judged, strict=True):
        predictions = [first_error(aligned(v.step_verdicts, len(sample.steps))) for v in said] or [None] * k
        rows.append({"subset": sample.subset, "row": sample.row, "label": sample.label,
                     "final_answer_correct": sample.final_answer_correct, "too_long": not said,
                     "prediction": majority(predictions), "predictions": predictions,
                     "verdicts": [v.verdict for v in said] or [None] * k,
                     "malformed": sum(bool(v.unmet) for v in said)})
    return gathered(rows, "row", device)


def processbench_scores(rows: list[dict], k: int) -> dict:
    """Scores of these rows of `verify_samples`: the vote's, and ("single") the mean of each of the k verifications'
    own; parse_fail: share of malformed verifications; votes: readable votes per sample; calibration of the share of
    CORRECT final verdicts, where k > 1, without samples that are too long."""
    labels = [row["label"] for row in rows]
    asked = [row for row in rows if not row["too_long"]]
    shares = [final_share(row["verdicts"], []) for row in asked]
    single = mean_scores([first_error_scores(labels, [row["predictions"][g] for row in rows]) for g in range(k)])
    return {"n": len(rows), **first_error_scores(labels, [row["prediction"] for row in rows]), "single": single,
            "parse_fail": sum(row["malformed"] for row in asked) / (k * len(asked)) if asked else None,
            "votes": sum(p is not None for row in rows for p in row["predictions"]) / len(rows),
            "too_long": len(rows) - len(asked),
            "calibration": calibration(shares, [row["final_answer_correct"] for row in asked]) if k > 1 else None}


def shown(value: float | None, digits: int = 1, factor: float = 100) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}"


def print_subset(name: str, scores: dict, k: int) -> None:
    single = [shown(scores["single"][s]) for s in ("error_acc", "correct_acc", "f1")] if k > 1 else []
    cells = [shown(scores[s]) for s in ("error_acc", "correct_acc", "f1")] + single
    if "n" in scores:
        cells += [shown(scores["parse_fail"]), shown(scores["votes"], 2, 1), str(scores["too_long"])]
    print0(f"{name:16s} {scores.get('n', ''):>6} " + " ".join(f"{cell:>10}" for cell in cells))


def print_calibration(scores: dict[str, dict]) -> None:
    """Per subset ECE, Brier score and AUROC of the final verdicts, and the reliability table of all together."""
    print0("\nfinal verdict, share of CORRECT against final_answer_correct\n"
           + f"{'':16s} {'n':>6} {'ECE':>10} {'Brier':>10} {'AUROC':>10}")
    for name, row in scores.items():
        if row["calibration"] is not None:
            print0(f"{name:16s} {row['calibration']['count']:>6} "
                   + " ".join(f"{shown(row['calibration'][s], 3, 1):>10}" for s in ("ece", "brier", "auroc")))
    print0(f"{'share of CORRECT':16s} {'n':>6} {'mean':>10} {'right':>10}")
    for b in (scores["all"]["calibration"] or {"bins": []})["bins"]:
        print0(f"{shown(b['low'], 0) + ' to ' + shown(b['high'], 0):16s} {b['count']:>6} "
               f"{shown(b['mean_share']):>10} {shown(b['right']):>10}")


def evaluate_processbench(args, samples: list[LabelledSolution], verifier, sampler, device) -> dict:
    """Verifies and prints ProcessBench subset by subset; all numbers and rows."""
    k, rows, scores = args.num_verifications, [], {}
    print0(f"\nProcessBench, {args.processbench}, format {args.format}: {k} verification{'s' * (k > 1)} each; "
           f"percent; votes: readable ones per sample"
           + (f"; single: mean of the {k} verifications alone" if k > 1 else ""))
    names = (["erroneous", "correct", "F1"] + ["single err", "single cor", "single F1"] * (k > 1)
             + ["parse fail", "votes", "too long"])
    print0(f"{'subset':16s} {'n':>6} " + " ".join(f"{name:>10}" for name in names))
    for subset in dict.fromkeys(s.subset for s in samples):
        part = verify_samples(args, [s for s in samples if s.subset == subset], verifier, sampler, device)
        scores[subset] = processbench_scores(part, k)
        print_subset(subset, scores[subset], k)
        rows += part
    average = mean_scores(list(scores.values())) | {"single": mean_scores([s["single"] for s in scores.values()])}
    print_subset("average", average, k)
    if num_long := sum(row["too_long"] for row in rows):
        print0(f"{num_long} of {len(rows)} do not fit the verifier's context {verifier.config.sequence_len} with "
               f"{args.verifier_max_new_tokens} new tokens: not cut, not verified, counted as wrong")
    whole = processbench_scores(rows, k)
    warn_of_malformed(whole["parse_fail"])
    if k > 1:
        print_calibration({**scores, "all": whole})
    else:
        print0("calibration of the final verdict needs --num-verifications above 1")
    return {"subsets": scores, "average": average, "calibration": whole["calibration"], "samples": rows}


# Best of n

def verified_solutions(args, task, generator, verifier, sampler, device) -> list[dict]:
    """Per test_in problem, over all ranks, lists over its n solutions: answers, outcomes, lengths (in tokens), labels
    (gold, of steps), verdicts, verification_lengths (n, k), step_verdicts, rationales (n, k, K), scores, tie_breaks
    (the share of steps judged right), too_long (for the verifier), malformed (verifications that miss a criterion of
    the format)."""
    rank, world = rank_and_world()
    n, k = args.num_samples, args.num_verifications
    task.problem("test_in", 0)  # there must be some
    problems = problems_of(task, "test_in", args.max_problems)
    # On all ranks before any work: a rank that failed alone would leave the others waiting.
    check_prompts_fit(sampler.tokenizer, task.fmt, [p.prompt for p in problems],
                      {"generator": generator.config.sequence_len}, args.max_new_tokens, 0)
    problems = [p for p in problems[rank::world] for _ in range(n)]
    solver = replace(sampler, temperature=args.generator_temperature or 1.0,
                     calculator=args.calculator and sampler.tokenizer.has_calculator)
    is_greedy = args.generator_temperature == 0
    solved, solutions = solver.solve(generator, problems[::n], n, ("best_of_n",), greedy=is_greedy)
    rows: dict[int, dict] = {}
    verifications = verify_fitting(args, problems, solutions, verifier, sampler, ("best_of_n", "verify"))
    texts = [solution.text for solution in solutions]
    outcomes, _ = counted_outcomes(task, problems, texts, solved.stopped.tolist())
    answers = answers_of(task, texts, n)
    for problem, solution, length, outcome, answer, (said, said_lengths) in zip(
            problems, solutions, solved.lengths.tolist(), outcomes, answers, verifications, strict=True):
        num_steps = len(solution.step_ends)
        verdicts = [v.verdict for v in said] or [None] * k
        step_verdicts = [aligned(v.step_verdicts, num_steps) for v in said] or [[None] * num_steps] * k
        row = rows.setdefault(problem.index, {"index": problem.index})
        rationales = [rationales_of(task, problem, solution.text, v) for v in said] if args.judge_report else []
        for name, value in (("answers", answer), ("outcomes", outcome), ("lengths", length),
                            ("labels", labels_of(task, problem, solution.text)), ("rationales", rationales),
                            ("verdicts", verdicts), ("verification_lengths", said_lengths or [0] * k),
                            ("step_verdicts", step_verdicts), ("scores", SCORES[args.score](verdicts, step_verdicts)),
                            ("tie_breaks", step_share(verdicts, step_verdicts)), ("too_long", not said),
                            ("malformed", sum(bool(v.unmet) for v in said))):
            row.setdefault(name, []).append(value)
    return gathered(list(rows.values()), "index", device)


def evaluate_best_of_n(args, task, generator, verifier, sampler, device) -> dict:
    """Samples, verifies and prints; all numbers and rows."""
    n, k = args.num_samples, args.num_verifications
    rows = verified_solutions(args, task, generator, verifier, sampler, device)
    for row in rows:
        row["choice"] = choose(row["answers"], row["outcomes"], row["scores"], row["tie_breaks"])
    scored, total = [row["choice"] for row in rows if row["choice"] is not None], n * len(rows)
    count = lambda name: sum(sum(row[name]) for row in rows)
    scores = {"problems": len(rows), "problems_left_out": len(rows) - len(scored),
              "unscorable": sum(o is None for row in rows for o in row["outcomes"]), "too_long": count("too_long"),
              "unread_answers": sum(answer is None for row in rows for answer in row["answers"]) / total,
              "parse_fail": share_malformed(rows, k),
              **{name: sum(choice[name] for choice in scored) / len(scored) if scored else None for name in CHOICES}}
    warn_of_malformed(scores["parse_fail"])
    print0(f"\nbest of {n}, task {args.task}: {k} verification{'s' * (k > 1)} of each solution, score {args.score}; "
           f"percent\n{len(rows)} problems | "
           + " | ".join(f"{name.removesuffix('@n')}{f'@{n}' * (name != 'pass@1')} {shown(scores[name])}"
                        for name in CHOICES)
           + f" | answers unread {shown(scores['unread_answers'])} | parse failures {shown(scores['parse_fail'])}")
    if scores["unscorable"]:
        print0(f"{scores['unscorable']} solutions cannot be scored and are left out, with them "
               f"{scores['problems_left_out']} whole problems")
    if scores["too_long"]:
        print0(f"{scores['too_long']} of {total} solutions do not fit the verifier's context: "
               f"not cut, not verified, score 0")
    return {**scores, "samples": rows}


def judged_of(rows: list[dict], k: int) -> list[dict]:
    """The rows of `verified_solutions` as the judge report takes them: a solution each."""
    names = ("outcomes", "lengths", "malformed", "labels", "verdicts", "step_verdicts", "rationales", "too_long")
    judged = []
    for row in rows:
        for outcome, length, malformed, labels, verdicts, step_verdicts, rationales, too_long in zip(
                *(row[name] for name in names), strict=True):
            is_read = bool(labels) and not too_long
            judged.append({"outcome": outcome, "length": length, "malformed": malformed, "labels": labels,
                           "share": None if too_long else final_share(verdicts, []),
                           "verifications": 0 if too_long else k, "verdicts": [] if too_long else verdicts,
                           "step_verdicts": step_verdicts if is_read else [],
                           "rationales": rationales if is_read else []})
    return judged


def check_writes(tag: str, meta: dict) -> None:
    """Raises BadInput for a verifier whose recipe has trained it to write no verifications."""
    recipe = meta["user_config"].get("recipe")
    if recipe in list(UNWRITTEN) and meta.get("role") != "generator":
        judge = f", or with --recipe fixed_verifier --judge {UNWRITTEN[recipe]}" if UNWRITTEN[recipe] else ""
        raise BadInput(f"--verifier-tag {tag}: recipe {recipe} has trained it to write no verifications, which are "
                       f"sampled here; see its scores in the evaluation of tango_rl --recipe {recipe}{judge}")


def load(stage: str, tag: str, step: int, tokenizer, device, role: str):
    """A role's model, the flags that it was trained with, the file that says so, and its step."""
    model, meta = load_model(stage, tag, device, None, None if step < 0 else step, trained=False)
    tokenizer.check_model(tag, model)
    if role == "verifier":
        check_writes(tag, meta)
    warn_of_role(tag, meta, role)
    return model, meta.get("user_config", {}), found_at(stage, tag, f"meta_{meta['step']:06d}.json"), meta["step"]


def load_generator(args, step: int, tokenizer, device) -> tuple:
    """The generator's model and its step. Flags that were left out are as its checkpoint says."""
    generator, recorded, where, step = load(args.generator_source, args.generator_tag, step, tokenizer, device,
                                            "generator")
    if not (args.task or recorded.get("task")):
        raise BadInput(f"{args.generator_tag}: the checkpoint names no task, so give one")
    if args.max_new_tokens < 0:
        args.max_new_tokens = recorded_value(recorded, "max_new_tokens", min(256, generator.config.sequence_len // 2),
                                             where)
    complete_task_args(args, recorded, where)
    warn_of_prompts(args.generator_tag, recorded, args, "generator")
    print0(f"{found_at(args.generator_source, args.generator_tag)} at step {step}, seed {args.seed} of problems, "
           f"{args.max_new_tokens} tokens at most")
    return generator, step


def load_players(args, tokenizer, device) -> tuple:
    """The verifier's model, the generator's and its task (None without --generator-tag), and the sampler. Flags that
    were left out are as the checkpoints say."""
    verifier, recorded, where, args.step = load(args.verifier_source, args.verifier_tag, args.step, tokenizer, device,
                                                "verifier")
    print0(f"{found_at(args.verifier_source, args.verifier_tag)} at step {args.step}")
    context = verifier.config.sequence_len
    if args.verifier_max_new_tokens < 0:
        args.verifier_max_new_tokens = recorded_value(recorded, "verifier_max_new_tokens", min(256, context // 2),
                                                      where)
    if args.verifier_max_new_tokens >= context:
        raise BadInput(f"--verifier-max-new-tokens {args.verifier_max_new_tokens}: the verifier's context is {context}")
    generator = task = None
    if args.verifier_prompt is None:  # the generator's checkpoint may know another, or none
        args.verifier_prompt = recorded_value(recorded, "verifier_prompt", "", where)
    if args.generator_tag:
        generator, args.generator_step = load_generator(args, args.generator_step, tokenizer, device)
        task = make_task(args)
    else:
        its_task = recorded_value(recorded, "task", "", where)
        complete_task_args(args, recorded | {"task": "" if is_file(its_task) else its_task}, where)  # none is asked
    warn_of_prompts(args.verifier_tag, recorded, args, "verifier")
    sampler = Sampler(task, tokenizer, args.seed, args.max_new_tokens, args.verifier_max_new_tokens,
                      args.temperature or 1.0, args.top_k, max_rows=args.max_rows)
    print0(f"seed {args.seed}, at most {args.verifier_max_new_tokens} tokens per verification, "
           + (f"temperature {args.temperature}" if args.temperature else "greedy"))
    return verifier, generator, task, sampler


def main(args) -> None:
    check_args(args)
    samples = load_processbench(args.processbench, args.subset, args.max_examples) if args.processbench else []
    tokenizer = load_tokenizer(found_at("tokenizer"))
    device = init_device(args.device_type)
    verifier, generator, task, sampler = load_players(args, tokenizer, device)
    own_model = (load(args.own_source, args.own_tag, args.own_step, tokenizer, device, "generator")[0] if args.own_tag
                 else None)
    numbers = {"args": vars(args)}
    if args.processbench:
        fmt = with_prompts(FORMATS[args.format], vars(args))
        reader = replace(sampler, task=SimpleNamespace(fmt=fmt))  # to verify takes no more of a task
        numbers["processbench"] = evaluate_processbench(args, samples, verifier, reader, device)
    if args.generator_tag:
        numbers["best_of_n"] = evaluate_best_of_n(args, task, generator, verifier, sampler, device)
    if args.judge_report:
        own = own_model and verified_solutions(args, task, own_model, verifier, sampler, device)
        judged, own = (rows and judged_of(rows, args.num_verifications)
                       for rows in (numbers["best_of_n"]["samples"], own))
        numbers["judge_report"] = found = judge_report(judged, own)
        print0("\n".join([f"\njudge report, {len(judged)} solutions", *report_lines(found)]))
    if args.out and rank_and_world()[0] == 0:
        write_json(args.out, numbers)


if __name__ == "__main__":
    script_main(main, make_parser(), is_shown=True)
