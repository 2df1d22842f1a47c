"""
Does co-training pay on a language model? The comparison on SmolLM2-135M as data: arms from one SFT of both roles.

The problems are those of runs/smol.sh, two-step word problems of gsm_symbolic. A seed is one of RL: of its problems,
its samples and its held-out problems. Arms stand in the order of their worth. run.py runs them, and scores each by
sampling: on the templates of training, on unseen ones, and on problems in GSM8K's form (--gsm8k-data).
"""
import argparse
import os
import re
from dataclasses import replace
from itertools import product
from statistics import mean

from dev.experiments.arms import Experiment, Start
from dev.experiments.jobs import Job, check_one_word
from nanochat.hf.files import read_json
from nanochat.rl.report.fields import as_written, is_number, number
from nanochat.rl.report.report import Run
from nanochat.storage.files import path_of
from tasks import make_task, task_flags

NAME = "smol"
PROBLEMS = "--task reasoning_gym --reasoning-gym-format lines --reasoning-gym-most-lines 2"
SFT = (f"{PROBLEMS} --from-stage sft --examples-per-step 16 --micro-batch-tokens 4096 --embedding-lr 5e-4 "
       "--max-new-tokens 80 --keep 1")
IMPORTS = {"smollm2": "", "low": "--num-layers 15"}  # of 30
STARTS = {  # the tag, and flags of the SFT
    "gen": ("s0", "--seed 0 --role generator --from-tag {smollm2} --model-tag {tag}"),
    # to judge a step the verifier works it out itself, so it starts from the generator
    "ver": ("s0-ver", "--seed 0 --role verifier --from-tag {gen} --model-tag {gen} --num-sampled 512"),
    # after the generator's, as many demonstrations again of either role
    "both": ("s0-both", "--seed 0 --role both --from-tag {gen} --model-tag {tag} --num-sampled 512 "
                        "--examples-per-step 32"),
    "other": ("s1", "--seed 1 --role generator --from-tag {smollm2} --model-tag {tag}"),
    # half of the layers
    "low_gen": ("low-s0", "--seed 0 --role generator --from-tag {low} --model-tag {tag}"),
    "low_ver": ("low-s0-ver", "--seed 0 --role verifier --from-tag {low_gen} --model-tag {low_gen} --num-sampled 512"),
}
STEPS = 60        # of the generator in RL
EXAMPLES = 8      # problems in each
SFT_STEPS = 120   # of each SFT
LONG = "grpo"     # the arm that goes on, as `longer`, until it has sampled about as many tokens as Tango
LONGER = 1.8      # times its steps
RL = "--num-samples 8 --lr 1.5e-5 --kl-coef 0 --max-new-tokens 80 --eval-examples 100"
VERDICTS = "--verifier-max-new-tokens 56"
JUDGED = f"--verifier-tag {{ver}} {VERDICTS}"
TRAINED = f"{VERDICTS} --warmup-steps 2 --verifier-balance --verifier-replay 0.5"
TANGO = f"--recipe tango --verifier-tag {{ver}} {TRAINED}"
LIGHT = "--recipe grpo --negative-weight 0.1"  # the weight of wrong answers that arms with a verifier have
FEW = {"few": 200, "very_few": 24}  # problems that have an answer; a run samples 480
OTHER = "--model-tag {other}"


def few_arms(name: str, num_labelled: int) -> dict[str, str]:
    """Arms of which so many problems have an answer, the others none."""
    few = f"--num-labelled {num_labelled}"
    return {f"{name}_grpo": f"{LIGHT} {few} --labelled-share 1",
            f"{name}_fixed": f"--recipe fixed_verifier {JUDGED} {few}",
            f"{name}_tango": f"{TANGO} {few}"}


ARMS = {
    LONG: "--recipe grpo",
    "tango": TANGO,
    "fixed_verifier": f"--recipe fixed_verifier {JUDGED}",
    "gold_steps": "--recipe gold_steps",
    **{arm: flags for name, num in FEW.items() for arm, flags in few_arms(name, num).items()},
    "ttrl": "--recipe ttrl --num-votes 8 --negative-weight 0.1",  # no problem has one
    "outcome_verifier": f"--recipe outcome_verifier --verifier-tag {{ver}} {TRAINED}",
    "grpo_tenth": LIGHT,
    "grpo_both": f"{LIGHT} --model-tag {{both}}",
    "one_trunk": f"--recipe tango --verifier-head prompt --model-tag {{both}} --verifier-tag {{both}} {TRAINED}",
    # a verifier with half of the generator's layers, and a generator with half of the verifier's
    "small_fixed": f"--recipe fixed_verifier --verifier-tag {{low_ver}} {VERDICTS}",
    "small_tango": f"--recipe tango --verifier-tag {{low_ver}} {TRAINED}",
    "low_grpo": f"{LIGHT} --model-tag {{low_gen}}",
    "low_fixed": f"--recipe fixed_verifier --model-tag {{low_gen}} {JUDGED}",
    "low_tango": f"{TANGO} --model-tag {{low_gen}}",
    # remedies: the verifier learns first, alpha follows its skill, or it changes little
    "tango_warm": f"{TANGO} --warmup-steps 20",  # the last one counts
    "tango_by_j": f"{TANGO} --weigh-by-j",
    "tango_gentle": f"{TANGO} --verifier-lr 5e-6",
    # another generator, rewarded by the verifier as SFT left it and as Tango did, on problems of another seed
    "other_grpo": f"{LIGHT} {OTHER}",
    "other_fixed": f"--recipe fixed_verifier {OTHER} {JUDGED}",
    "other_tango": f"--recipe fixed_verifier {OTHER} --verifier-tag {{next_tango}}-ver --verifier-source rl {VERDICTS}",
}
PARTNERS = {
    **dict.fromkeys(["tango", "small_fixed"], "fixed_verifier"),
    **dict.fromkeys(["fixed_verifier", "gold_steps"], "grpo_tenth"),
    **dict.fromkeys(["outcome_verifier", "tango_warm", "tango_by_j", "tango_gentle"], "tango"),
    **{f"{name}_fixed": f"{name}_grpo" for name in FEW}, **{f"{name}_tango": f"{name}_fixed" for name in FEW},
    "ttrl": "few_grpo", "one_trunk": "grpo_both",
    "small_tango": "small_fixed", "low_fixed": "low_grpo", "low_tango": "low_fixed",
    "other_fixed": "other_grpo", "other_tango": "other_fixed"}
# Evaluations by sampling. 200 x 8 samples of seen templates give a difference of two arms an error of a point.
SCORINGS = {"seen": "-a reasoning_gym --split test_in --num-samples 8 --max-problems 800",
            "unseen": "-a reasoning_gym --split test_out --num-samples 8 --max-problems 200",
            "words": "-a gsm8k --gsm8k-format lines --num-samples 4 --max-problems 200"}
# a metric of a run's last point, its words, and of which evaluation it is
SCORED = {"gen/sampled_in": ("sampled, templates of training", "seen"),
          "gen/sampled_out": ("sampled, unseen templates", "unseen"),
          "gen/sampled_words": ("sampled, problems in GSM8K's form", "words")}
WATCHED = {"gen/pass1_in": "greedy", "gen/pass1_out": "greedy, unseen templates",
           "ver/balanced_acc_fixed": "greedy verdicts on the start's solutions: balanced accuracy",
           "ver/step_f1_fixed": "greedy verdicts on the start's solutions: step F1",
           "ver/step_f1_current": "greedy verdicts on current solutions: step F1",
           "ver/outcome_f1_current": "greedy verdicts on current solutions: outcome F1",
           "ver/wrong_steps_passed_current": "greedy verdicts on current solutions: wrong steps passed",
           # those that reward, over the first and over the last third of the generator's steps
           "thirds/wrong_steps_passed": "sampled verdicts in training, by thirds: wrong steps passed",
           "thirds/right_steps_blamed": "sampled verdicts in training, by thirds: right steps blamed"}


def num_steps(args, arm: str) -> int:
    return round(args.steps * LONGER) if arm == LONG else args.steps


def experiment(args, arms: list[str]) -> Experiment:
    """args: steps, sft_steps, examples (per step) and device_type."""
    device = f"--device-type {args.device_type}"
    starts = {name: Start("import", name if name == "smollm2" else f"smollm2-{name}", f"{{tag}} {flags}")
              for name, flags in IMPORTS.items()}
    starts |= {name: Start("sft", f"{NAME}-{tag}", f"{SFT} --num-steps {args.sft_steps} {device} {flags}")
               for name, (tag, flags) in STARTS.items()}
    common = (f"--seed {{seed}} {device} --model-tag {{gen}} {PROBLEMS} {RL} --examples-per-step {args.examples} "
              f"--eval-every {args.steps}")
    # the arm LONG is scored at the others' last step, too
    saved = lambda arm: f"--save-every {args.steps} --keep 0" if arm == LONG else "--save-every 30 --keep 1"
    flags = {arm: f"{common} {saved(arm)} --num-steps {num_steps(args, arm)} {own}" for arm, own in ARMS.items()}
    starts["next_tango"] = Start("run", f"{NAME}-tango-s{{next}}", flags["tango"].replace("{seed}", "{next}"))
    return Experiment(NAME, starts, {arm: flags[arm] for arm in arms})


# Scores by sampling, after the runs

def scored_steps(args, arm: str) -> list[int]:
    return sorted({args.steps, num_steps(args, arm)})


def start_of(arm: str) -> str:
    """The tag of the generator's start."""
    name, = re.findall(r"--model-tag \{(\w+)\}", ARMS[arm]) or ["gen"]
    return f"{NAME}-{STARTS[name][0]}"


def folder_of(arm: str, seed: int | str, step: int, scoring: str) -> str:
    """That of a generator's scores after these steps of a run; those of its start serve all arms of a seed."""
    if step == 0:
        return path_of("scores", f"{start_of(arm)}-problems_{seed}", scoring)
    return path_of("runs", f"{NAME}-{arm}-s{seed}", f"scores_{step}", scoring)


def scorings(args, run: str) -> list[Job]:
    """The processes that score the generator of a run, given by its name, and its start."""
    arm, seed = re.fullmatch(rf"{NAME}-(\w+)-s(\d+)", run).groups()
    asked = dict(SCORINGS)
    if args.gsm8k_data:
        asked["words"] += f" --gsm8k-data {args.gsm8k_data}"
    else:
        del asked["words"]
    jobs = []
    for step, (scoring, flags) in product([0, *scored_steps(args, arm)], asked.items()):
        folder = folder_of(arm, seed, step, scoring)
        saved = f"-s {step}" if step < num_steps(args, arm) else ""  # the last one's number is that of all turns
        which = f"-i rl -g {run}-gen {saved}" if step else f"-i sft -g {start_of(arm)}"
        jobs.append(Job("score-" + "-".join(folder.split(os.sep)[-3:]), "scripts.chat_eval", folder, "scores.json",
                        " ".join(f"{which} --seed {seed} --device-type {args.device_type} "
                                 f"--temperature 1 {flags} --out {folder}/scores.json".split())))
    return jobs


def check_data(folder: str) -> None:
    """Raises BadInput for problems that no run could be scored on."""
    check_one_word("--gsm8k-data", folder)
    flags = task_flags() | {"task": "gsm8k", "seed": 0, "gsm8k_format": "lines", "gsm8k_data": folder}
    task = make_task(argparse.Namespace(**flags))
    for split in ("test_in", "test_out"):
        task.num_problems(split)  # refuses to have none


def scores_of(args, arm: str, seed: int, step: int) -> dict[str, float]:
    """Metrics of a point from chat_eval's scores, strict ones and lenient ones."""
    found = {}
    for metric, (_, scoring) in SCORED.items():
        path = os.path.join(folder_of(arm, seed, step, scoring), "scores.json")
        if not os.path.exists(path) or (scoring == "words" and not args.gsm8k_data):  # which may be of other problems
            continue
        with as_written(path):
            of_splits, = (list(of_task.values()) for of_task in read_json(path)["tasks"].values())
            num = sum(number(scores, "problems") for scores in of_splits)
            for name, ending in (("pass@1", ""), ("lenient", "_lenient")):
                found[metric + ending] = sum(number(scores, name) * scores["problems"] for scores in of_splits) / num
    return found


def thirds_of(records: list[dict]) -> list[dict[str, float]]:
    """Of what is watched by thirds: means over the first and over the last third of the steps that have it."""
    ends = [{}, {}]
    for metric in (metric for metric in WATCHED if metric.startswith("thirds/")):
        logged = metric.replace("thirds/", "gen/verdicts/")
        values = [record[logged] for record in records if is_number(record.get(logged))]
        if third := len(values) // 3:
            ends[0][metric], ends[1][metric] = mean(values[:third]), mean(values[-third:])
    return ends


def with_scores(args, run: Run) -> list[Run]:
    """The run, with scores and thirds in its first and last point. Of the arm LONG two: as if it had ended with the
    others, and all of it."""
    rows = []
    for step in scored_steps(args, run.arm):
        points = [dict(point) for point in run.points if point["gen_step"] <= step]
        first, last = thirds_of([record for record in run.records if record.get("gen_step", 0) <= step])
        points[0] |= scores_of(args, run.arm, run.seed, 0) | first
        points[-1] |= scores_of(args, run.arm, run.seed, step) | last
        flags = run.config | {"args": run.config["args"] | {"num_steps": step}}
        rows.append(replace(run, points=points, config=flags, arm=run.arm if step == args.steps else "longer"))
    return rows
