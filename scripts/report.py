"""
Turns finished runs into curves, a comparison of arms, and one page to look at. A run writes its own page while it goes.

    python -m scripts.report chain-s0                                 # a run's name or folder; writes into its folder
    python -m scripts.report --out dev/curves chain-tango-s0 chain-grpo-s0 chain-tango-s1 chain-grpo-s1

Writes <task>.csv and <task>.png (curves.csv and curves.png for a single run) and report.html, and prints the
comparison.
"""
import os
import re

from nanochat.cli import at_least, new_parser, script_main
from nanochat.common import BadInput, print0
from nanochat.rl.report.page import MOST_ROLLOUTS, draw_curves, write_page
from nanochat.rl.report.report import compare, markdown_table, provenance, read_run, run_folder, tidy, write_csv
from nanochat.storage.files import check_writable, make_folder


def make_parser():
    parser = new_parser(__doc__)
    parser.add_argument("runs", nargs="+",
                        help="names or folders of finished runs; <task>-<arm>-s<seed> are compared arm by arm")
    parser.add_argument("--out", default="",
                        help="folder for the files; default: the run's own, where there is one run")
    parser.add_argument("--max-rollouts", type=at_least(1), default=MOST_ROLLOUTS,
                        help="about so many rollouts on the page, over all runs; the page says of how many")
    return parser


def main(args) -> None:
    folders = [run_folder(run) for run in args.runs]
    if not args.out and len(folders) > 1:
        raise BadInput("--out: name a folder for the report of several runs")
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if re.search(r"-s\d+$", run.name) and not run.name.endswith(f"-s{run.seed}"):
            print0(f"{run.name} has seed {run.seed}, not the one that its name says: it is an arm of its own")
    rows = compare(runs)
    out = args.out or folders[0]
    check_writable(out)
    page = os.path.join(out, "report.html")
    make_folder(out)
    write_page(runs, rows, page, max(len(runs), args.max_rollouts))
    for task in dict.fromkeys(run.task for run in runs):
        of_task = [run for run in runs if run.task == task]
        path = os.path.join(out, task if len(runs) > 1 else "curves")
        write_csv(tidy(of_task), path + ".csv")
        draw_curves(of_task, path + ".png")
    if len(runs) > 1:
        print0(f"{markdown_table(rows)}\n{provenance(runs)}\n")
    print0(f"{page} ({os.path.getsize(page) / 1e6:.1f} MB)")


if __name__ == "__main__":
    script_main(main, make_parser())
