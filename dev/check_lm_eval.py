"""
GSM8K here against lm-evaluation-harness: the same problems and prompts, greedy, the same limit of tokens.

    python dev/check_lm_eval.py ours compared -i sft -g smollm2-gsm8k -x 75 -m 160
    python -m scripts.hf_export --stage sft --model-tag smollm2-gsm8k --to exported --dtype float32
    lm_eval --model hf --model_args pretrained=exported,dtype=float32 --tasks gsm8k_same --include_path compared \\
        --apply_chat_template --log_samples --output_path compared/lm_eval --device cpu --batch_size 25
    python dev/check_lm_eval.py compare compared --exported exported

`ours` takes chat_eval's flags, and -x problems of each half of the test file. It writes what it sampled
(problems.jsonl) and the task of lm-eval (gsm8k_same.yaml), whose filters are those of lm-eval's own gsm8k. lm-eval
(0.4.13) may be installed elsewhere. `compare` prints both accuracies, and every problem on which the two differ.
"""
import argparse
import glob
import json
import os

from tokenizers import Tokenizer

from nanochat.cli import at_least, new_parser, script_main
from nanochat.common import BadInput, init_device
from nanochat.hf.tokenizer import load_tokenizer
from nanochat.rl.measure.intervals import wilson
from nanochat.rl.records.outcomes import counted_outcomes, lenient_outcomes, problems_of
from nanochat.storage.files import found_at, json_lines, make_folder
from scripts import chat_eval
from tasks import make_task

TASK = """task: gsm8k_same
dataset_path: json
dataset_kwargs: {{data_files: {{test: {path}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{message}}}}"
doc_to_target: "{{{{answer}}}}"
num_fewshot: 0
generation_kwargs: {{until: {until}, do_sample: false, max_gen_toks: {limit}}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true, ignore_punctuation: false,
     regexes_to_ignore: [",", "\\\\$", "(?s).*#### ", "\\\\.$"]}}
filter_list:
  - name: strict-match
    filter: [{{function: regex, regex_pattern: "#### (\\\\-?[0-9\\\\.\\\\,]+)"}}, {{function: take_first}}]
  - name: flexible-extract
    filter: [{{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{{2,}})|(-?[0-9]+)"}},
             {{function: take_first}}]
"""
PAIRS = {"strict": "strict-match", "lenient": "flexible-extract"}  # a score here, and lm-eval's


def make_parser(argv: list[str]):
    mode = argv[0] if argv else ""
    parser = new_parser(__doc__)
    if mode == "ours":
        chat_eval.add_generation_args(parser)
    parser.add_argument("mode", choices=["ours", "compare"])
    parser.add_argument("folder", help="for all that is written")
    if mode == "compare":
        parser.add_argument("--exported", required=True, help="the folder of the model that lm-eval was run on")
        parser.add_argument("--show", type=at_least(0), default=10 ** 6, help="problems that differ, at most")
    return parser


def write_ours(args) -> None:
    """Samples one greedy solution of each problem and writes what lm-eval is to be asked."""
    args.task, tokenizer, device = "gsm8k", load_tokenizer(found_at("tokenizer")), init_device(args.device_type)
    model, _ = chat_eval.load_generator(args, args.step, tokenizer, device)
    task = make_task(args)
    problems = [problem for split in ("test_in", "test_out") for problem in problems_of(task, split, args.max_problems)]
    sampler = chat_eval.sampler_of(args, task, tokenizer)
    rollouts, solutions = sampler.solve(model, problems, 1, ("lm_eval",), greedy=True)
    texts, stopped = [solution.text for solution in solutions], rollouts.stopped.tolist()
    outcomes, reasons = counted_outcomes(task, problems, texts, stopped)
    make_folder(args.folder)
    path = os.path.abspath(os.path.join(args.folder, "problems.jsonl"))
    with open(path, "w", encoding="utf-8") as f:
        for problem, prompt, text, end, outcome, reason, lenient in zip(
                problems, rollouts.prompts, texts, stopped, outcomes, reasons,
                lenient_outcomes(task, problems, texts), strict=True):
            f.write(json.dumps({"message": task.fmt.generator_prompt.format(problem=problem.prompt),
                                "answer": problem.answer, "ids": prompt.ids, "text": text, "ended": end,
                                "strict": outcome is True, "lenient": lenient, "uncounted": reason}) + "\n")
    with open(os.path.join(args.folder, "gsm8k_same.yaml"), "w", encoding="utf-8") as f:
        f.write(TASK.format(path=json.dumps(path), limit=args.max_new_tokens,
                            until=json.dumps([tokenizer.spell([token]) for token in sorted(tokenizer.stop_tokens)])))
    print(f"{len(problems)} problems: strict {sum(o is True for o in outcomes)}, ended {sum(stopped)}")


def lm_eval_rows(folder: str) -> dict[tuple[int, str], dict]:
    """What lm-eval has logged of each problem and filter."""
    found = glob.glob(os.path.join(folder, "lm_eval", "**", "samples_gsm8k_same_*.jsonl"), recursive=True)
    if not found:
        raise BadInput(f"{folder}: has no samples of lm-eval; run it with --log_samples --output_path {folder}/lm_eval")
    return {(row["doc_id"], row["filter"]): row for _, row in json_lines(max(found))}


def compare(args) -> None:
    ours = [row for _, row in json_lines(os.path.join(args.folder, "problems.jsonl"))]
    theirs, tokenizer = lm_eval_rows(args.folder), Tokenizer.from_file(os.path.join(args.exported, "tokenizer.json"))
    ours = ours[:1 + max(doc for doc, _ in theirs)]  # lm-eval's --limit takes the first
    num, same_ids, same_text, differing = len(ours), 0, 0, []
    for i, row in enumerate(ours):
        logged = theirs[i, "strict-match"]
        prompt = logged["arguments"]["gen_args_0"]["arg_0"]
        same_ids += tokenizer.encode(prompt).ids == row["ids"]
        row["their text"] = logged["resps"][0][0]
        same_text += row["their text"] == row["text"]
        for here, there in PAIRS.items():
            row[there] = theirs[i, there]["exact_match"] == 1
            if row[here] != row[there]:
                why = ("the texts differ" if row["their text"] != row["text"] else
                       "right but cut, which counts as wrong here" if row["uncounted"] else "read otherwise")
                differing.append(f"problem {i + 1}, {here} {row[here]}, {there} {row[there]}: {why}; gold "
                                 f"{row['answer']}, read there {theirs[i, there]['filtered_resps'][0]!r}, text "
                                 f"{row['text'][-80:]!r}")
    print(f"{num} problems: the ids of the prompt are equal in {same_ids}, the texts in {same_text}; "
          f"{sum(row['ended'] for row in ours)} ended within the limit")
    for names in PAIRS.items():
        for name in names:
            low, high = wilson([float(row[name]) for row in ours])
            right = sum(row[name] for row in ours)
            print(f"{name:17s} {right:4d} right, {100 * right / num:5.1f}% [{100 * low:.1f}, {100 * high:.1f}]")
    print(f"{len(differing)} differences", *differing[:args.show], sep="\n")


def main(args: argparse.Namespace) -> None:
    (write_ours if args.mode == "ours" else compare)(args)


if __name__ == "__main__":
    script_main(main, make_parser, is_shown=True)
