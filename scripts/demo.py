"""
What RL changed, on a few held-out problems: solutions before and after it, each step with the verifier's verdict.

    python -m scripts.demo                                   # of the newest finished run, or of the project's own pair
    python -m scripts.demo chain-s0                          # of a run, by its name or folder
    python -m scripts.demo chain-s0 --split test_out --num-problems 3 --seed 1

Solutions and verdicts are greedy. Those before RL come from the SFT checkpoints that the run started from, those after
it from the run's own. Where a recipe has no role called verifier, steps are shown with their gold labels.
"""
import argparse
import glob
import os
import random
from collections import Counter
from itertools import zip_longest

from nanochat.checkpoint import find_step, fingerprint, load_model
from nanochat.cli import add_device_arg, at_least, new_parser, script_main
from nanochat.common import BadInput, init_device, one_line
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.learn.roles import Start
from nanochat.rl.learn.state import tag_of
from nanochat.rl.measure.evals import SPLITS
from nanochat.rl.play.sampling import Sampler
from nanochat.rl.records.outcomes import answers_of, labels_of, outcomes_of, problems_of
from nanochat.rl.report.report import Run, read_run, run_folder
from nanochat.rl.report.terminal import add_colour_flag, paint, wants_colour
from nanochat.storage.files import found_at, path_of
from tasks import complete_task_args, make_task, recorded_value, task_flags

COLOURS = {True: "32", False: "31", None: "90"}  # right green, wrong red, none grey
WORDS = {True: "right", False: "wrong", None: "-"}


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("run", nargs="?", default="",
                        help="name or folder of a finished run; default: the newest, or the project's own")
    parser.add_argument("--num-problems", type=at_least(1), default=5, help="problems that are shown")
    parser.add_argument("--num-scored", type=at_least(0), default=100,
                        help="problems of the counts in the last lines, those that are shown among them")
    parser.add_argument("--split", choices=list(SPLITS), default="test_in", help="test_out: longer or other problems")
    parser.add_argument("--task", metavar="FILE.py", help="of a run on a task of your own: its file")
    parser.add_argument("--seed", type=int, default=0, help="picks the problems")
    add_colour_flag(parser)
    add_device_arg(parser)
    return parser


def find_run(name: str) -> Run:
    """The finished run of this name or folder, or the newest, or the pair's. Raises BadInput."""
    root = path_of("runs")
    if not name:
        ends = glob.glob(os.path.join(glob.escape(root), "*", "summary.json"))
        name = os.path.basename(os.path.dirname(max(ends, key=os.path.getmtime))) if ends else "pair"
        print(one_line(f"the newest finished run: {name}; the project's own is called pair" if ends else
                       f"no finished run in {root}: this is the pair that comes with the project"))
    folder = run_folder(name)
    run = read_run(folder)
    if os.path.realpath(folder) != os.path.realpath(found_at("runs", run.name)):  # nor are its checkpoints
        raise BadInput(f"{folder} is not in {root}; set NANOCHAT_BASE_DIR to the base directory that it is of")
    return run


def find_checkpoints(run: Run, roles: list[str]) -> dict[str, dict[str, tuple[str, str, int]]]:
    """Before and after RL, (stage, tag, step) of each role. Raises BadInput for one that is gone or was made again."""
    try:
        starts, last = {role: Start(**run.config["starts"][role]) for role in roles}, run.summary["steps"]
    except (KeyError, TypeError):
        raise BadInput(f"run {run.name} does not say where it started from; was it made by another version?") from None
    found = {"before": {role: (start.source, start.tag, find_step(start.source, start.tag, start.step))
                        for role, start in starts.items()}}
    for start in starts.values():
        path = start.path("model.pt")
        if fingerprint(path) != start.fingerprint:
            raise BadInput(f"{path} is not what run {run.name} started from; it was made again")
    ends = {role: tag_of(run.name, role) for role in roles}
    return found | {"after": {role: ("rl", tag, find_step("rl", tag, last)) for role, tag in ends.items()}}


def solve(task, problems: list, checkpoints: dict, sampler: Sampler, device) -> list[tuple]:
    """Of each problem (itself, solution, whether it ended, outcome, verification). The first role solves, a second one
    verifies; without it verifications are None."""
    def load(stage, tag, step):
        model, _ = load_model(stage, tag, device, None, step, trained=False)
        sampler.tokenizer.check_model(tag, model)
        return model

    solver, *verifier = checkpoints.values()
    rollouts, solutions = sampler.solve(load(*solver), problems, 1, ("demo",), greedy=True)
    verifications = [None] * len(problems)
    if verifier:
        _, verifications = sampler.verify(load(*verifier[0]), problems, solutions, 1, ("demo",), greedy=True)
    return list(zip(problems, rollouts.texts, rollouts.stopped.tolist(), outcomes_of(task, problems, rollouts.texts),
                    verifications, strict=True))


def describe(task, colour: bool, problem, text: str, ended: bool, outcome: bool | None,
             verification) -> tuple[list[str], Counter]:
    """Lines: a solution's steps, then its answer, and where the verifier is mistaken; and what the last line counts."""
    def painted(value, words):
        return paint(words, COLOURS[value], colour)

    spans, answer, lines = task.fmt.step_spans(text), answers_of(task, [text])[0], []
    counts = Counter(right=int(outcome is True), unscorable=int(outcome is None))
    bodies = map(one_line, task.fmt.step_bodies(text))
    labels = labels_of(task, problem, text)  # some tasks have none
    verdicts = labels if verification is None else verification.step_verdicts[: len(spans)]
    for body, verdict, label in zip_longest(bodies, verdicts, labels):
        is_mistaken = None not in (verdict, label) and verdict != label
        note = f"  <- mistaken: the step is {WORDS[label]}" if is_mistaken else ""
        lines.append(painted(verdict, f"{WORDS[verdict]:5s}  {body}") + note)
        counts.update(steps=int(label is not None), steps_hit=int(label is not None and verdict is label))
    rest = one_line(text[spans[-1][1] if spans else 0:])
    if rest and (answer is None or not spans):  # what no other line shows
        lines.append(painted(None, f"{WORDS[None]:5s}  {rest}"))
    line = "no answer: " if answer is None else f"answer {one_line(answer)}: "
    line += painted(outcome, "cannot be scored" if outcome is None else WORDS[outcome]) + ("" if ended else " (cut)")
    if verification is not None:
        verdict = verification.verdict
        line += f"; verdict: {painted(verdict, 'none' if verdict is None else WORDS[verdict])}"
        line += "  <- mistaken" if None not in (verdict, outcome) and verdict != outcome else ""
        counts.update(hit=int(outcome is not None and verdict is outcome))
    return [*lines, line], counts


def solved_again(run: Run, args) -> tuple:
    """A finished run's task, its checkpoints (find_checkpoints), and before and after RL the rows of `solve` of its
    held-out problems, those that are shown first. args: of make_parser. Raises BadInput."""
    roles = list(dict.fromkeys([run.solver, *({"verifier"} & set(run.roles))]))
    checkpoints = find_checkpoints(run, roles)
    recorded, where = run.config["args"], found_at("runs", run.name, "config.json")
    flags = argparse.Namespace(**recorded | dict.fromkeys([*task_flags(), "seed"]))
    flags.task = args.task
    complete_task_args(flags, recorded, where)
    max_new_tokens = recorded_value(recorded, "max_new_tokens", 0, where)
    limits = max_new_tokens, recorded_value(recorded, "verifier_max_new_tokens", max_new_tokens, where)
    calculator = recorded_value(recorded, "calculator", False, where)
    task = make_task(flags)
    held_out = problems_of(task, args.split, recorded_value(recorded, "eval_examples", 0, where))
    if args.num_problems > len(held_out):
        few = f"the run has {len(held_out)} problems of {args.split}"
        if "num_problems" in args.explicit or not held_out:
            raise BadInput(f"--num-problems {args.num_problems}: {few}")
        print(f"{few}, which are all shown")
        args.num_problems = len(held_out)
    num_scored = max(args.num_problems, min(args.num_scored, len(held_out)))
    problems = random.Random(args.seed).sample(held_out, num_scored)
    tokenizer, device = load_tokenizer(found_at("tokenizer")), init_device(args.device_type)
    sampler = Sampler(task, tokenizer, flags.seed, *limits, calculator=calculator)
    return task, checkpoints, {when: solve(task, problems, found, sampler, device)
                               for when, found in checkpoints.items()}


def main(args) -> None:
    run = find_run(args.run)
    task, checkpoints, solved = solved_again(run, args)
    has_verifier = len(checkpoints["after"]) > 1
    for when, found in checkpoints.items():
        names = [f"{role} {tag} at step {step}" for role, (_, tag, step) in found.items()]
        print(f"{when + ' RL:':10s} {', '.join(names)}")
    if hasattr(task, "about"):
        print(one_line(f"task {task.name}: {task.about}"))
    print("Before each step stands the verdict of the verifier of that time: right, wrong, or - for none."
          if has_verifier else "Before each step stands its gold label: right, wrong, or - where it has none.")
    counts = {when: Counter() for when in solved}
    for number, rows in enumerate(zip(*solved.values(), strict=True), 1):
        problem, is_shown = rows[0][0], number <= args.num_problems
        if is_shown:
            print(f"\nproblem {number}: {one_line(problem.prompt)}\n"
                  f"gold answer: {one_line(problem.answer)}")
        for when, row in zip(solved, rows, strict=True):
            lines, found = describe(task, wants_colour(args.colour), *row)
            if is_shown:
                print("\n    ".join([f"  {when} RL", *lines]))
            counts[when] += found
    before, after = counts.values()
    scores = [f"problems right {before['right']} -> {after['right']}"]
    if before["unscorable"] + after["unscorable"]:
        scores.append(f"those that cannot be scored {before['unscorable']} -> {after['unscorable']}")
    if has_verifier:
        scores.append(f"verdicts right {before['hit']} -> {after['hit']}")
    if has_verifier and before["steps"] + after["steps"]:
        scores.append(f"verdicts on steps right {before['steps_hit']} of {before['steps']} -> "
                      f"{after['steps_hit']} of {after['steps']}")
    paths = [found_at("runs", run.name, name) for name in ("summary.json", "report.html")]
    print(f"\nOf {len(solved['after'])} {', '.join(scores)}.")
    if has_verifier:
        print("Verdicts before and after are on different solutions, each on those of its time.")
    print(f"More of the run: {', '.join(path for path in paths if os.path.exists(path))}")


if __name__ == "__main__":
    script_main(main, make_parser())
