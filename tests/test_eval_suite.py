"""
eval_suite's table against chat_eval's and verifier_eval's numbers on the same rows; intervals worked out by hand; what
is not there and what is refused.

    python -m pytest tests/test_eval_suite.py
"""
import itertools
import json
import random

import pytest
import tokenizers
import yaml
from conftest import scripts_on_two_ranks
from test_chat import CHECKPOINT, force_picks, refused, run
from test_multiple_choice import cache, write  # noqa: F401
from test_verifier_eval import chain_rows

from dev import check_lm_eval
from nanochat.cli import script_main
from nanochat.rl.measure.intervals import bootstrap_f1, of_mean, wilson
from nanochat.tokenizer import Tokenizer
from scripts import chat_eval, eval_suite, verifier_eval

TESTS = {"math500": 5, "aime24": 4, "aime25": 3, "amc23": 4, "olympiad": 3}
SAMPLED = ["-n", "3", "-t", "1", "-m", "24", "--max-rows", "1"]


@pytest.fixture
def files(base, tmp_path) -> list[str]:
    """Flags of files with problems whose answers are 1, 2, 3, ..., and of a template that fits the tiny context."""
    rows = lambda name, num: [{"problem": f"{name[:2]}{k}?", "answer": str(k)} for k in range(1, num + 1)]
    paths = {name: write(tmp_path / f"{name}.jsonl", rows(name, num)) for name, num in TESTS.items()}
    (tmp_path / "gsm8k").mkdir()
    for name, num in (("train", 40), ("test", 9)):  # some of each hash
        write(tmp_path / "gsm8k" / f"{name}.jsonl",
              [{"question": f"{name[:2]}{k + 10}?", "answer": f"1+{k - 1}={k}\n#### {k}"} for k in range(1, num + 1)])
    (tmp_path / "asked.txt").write_text("{problem}")
    return ["--math500-data", paths["math500"], "--aime-data", paths["aime24"], paths["aime25"], "--amc-data",
            paths["amc23"], "--olympiad-data", paths["olympiad"], "--gsm8k-data", str(tmp_path / "gsm8k"),
            "--generator-prompt", str(tmp_path / "asked.txt")]


def say(monkeypatch, base, *texts: str) -> None:
    """Makes the model write these texts in turn, one a row, where one row decodes at a time. One with "..." is cut."""
    tokenizer = Tokenizer.load(str(base / "tokenizer"))
    turns = [[*tokenizer.encode(text), tokenizer.assistant_end] if "..." not in text else
             tokenizer.encode(text.replace("...", 40 * " ")) for text in texts]
    force_picks(monkeypatch, itertools.cycle(turns))


def table_of(printed: str) -> dict[str, list[str]]:
    """The cells of the printed table, by benchmark."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines() if line[:1] == "|"]
    assert len({len(row) for row in rows}) == 1
    return {row[0]: row[1:] for row in rows[2:]}


def suite(capsys, base, *flags: str) -> tuple[dict, dict[str, list[str]], str]:
    """The numbers that --out keeps, the printed table, and all that is printed."""
    out = base / "suite.json"
    printed = run(capsys, eval_suite, "-i", "sft", "--out", str(out), *flags)
    return json.loads(out.read_text())["benchmarks"], table_of(printed), printed


WRITTEN = ("so \\boxed{1}", "#### 2", "#### 2", "I say 3", "\\boxed{3}...", "#### 1", "no", "#### 2")


def test_its_numbers_are_those_of_chat_eval_on_the_same_rows(capsys, base, files, monkeypatch):
    """Each benchmark begins with the same turn here and there."""
    out = base / "scores.json"
    for name, task, splits in (("math500", "math500", ["test_in"]), ("aime25", "aime", ["test_out"]),
                               ("gsm8k", "gsm8k", ["test_in", "test_out"]),
                               ("last_letter", "last_letter", ["test_in"])):
        say(monkeypatch, base, *WRITTEN)
        more = [*SAMPLED, *files, "-x", "4"]
        row = suite(capsys, base, "--benchmarks", name, *more)[0][name]
        say(monkeypatch, base, *WRITTEN)
        flags = ["-i", "sft", "-a", task, *more, "--out", str(out), *(["--split", *splits] if len(splits) == 1 else [])]
        run(capsys, chat_eval, *flags)
        found = json.loads(out.read_text())["tasks"][task]
        assert set(found) == set(splits)
        total = sum(part["problems"] for part in found.values())
        assert row["problems"] == total and total == {"aime25": 3, "gsm8k": 8}.get(name, 4)
        for score in ("pass@1", "pass@3", "maj@3", "ended") + (("lenient",) if name != "last_letter" else ()):
            mean = sum(part["problems"] * part[score] for part in found.values()) / total
            assert row[score] == pytest.approx(mean), (name, score)
        assert row["cut"] == round(3 * total * (1 - row["ended"])) > 0
        assert 0 < row["pass@1"] < row["pass@3"] or name == "last_letter"


def test_a_row_worked_out_by_hand(capsys, base, files, monkeypatch):
    """Problem k of math500 has the answer k; in which order they come the seed says. Said are three samples each: two
    right of the first problem, one of the second, and none of the third, whose only right one is cut."""
    asked = ["-x", "3", "--seed", "5", *files]
    say(monkeypatch, base, "#### 9")
    printed = run(capsys, chat_eval, "-i", "sft", "-a", "math500", "-m", "24", "--show", "3", *asked)
    golds = [line.split("| ")[1] for line in printed.splitlines() if "gold answer" in line]
    assert len(set(golds)) == 3
    first, second, third = golds
    say(monkeypatch, base, f"#### {first}", "#### 9", f"\\boxed{{{first}}}", "#### 9", f"#### {second}", "no 9",
        f"#### {third}...", "#### 8", "#### 7")
    rows, table, printed = suite(capsys, base, "--benchmarks", "math500", *SAMPLED, *asked)
    row = rows["math500"]
    assert (row["pass@1"], row["maj@3"], row["cut"], row["uncounted"]) == (pytest.approx(3 / 9), 1 / 3, 1, 1)
    assert row["lenient"] == pytest.approx(4 / 9)  # the last number, cut or not
    # shares 2/3, 1/3, 0: the variance is 2/27, of single samples it would be 2/9: three trials for each problem
    low, high = wilson_by_hand(1 / 3, 9)
    assert row["intervals"]["pass@1"] == [pytest.approx(low), pytest.approx(high)]
    assert row["intervals"]["maj@3"] == [pytest.approx(x) for x in wilson_by_hand(1 / 3, 3)]
    assert table["math500"] == ["3", f"33.3 [{100 * low:.1f}, {100 * high:.1f}]", "33.3 [6.1, 79.2]", "44.4 of 9", "1",
                                "81.4", "GRPO + Tango, Qwen2.5-Math-7B, 200 steps; greedy pass@1"]
    assert "1 of 1 benchmarks were run" in printed and "3 samples at temperature 1.0" in printed


def wilson_by_hand(p: float, trials: int) -> tuple[float, float]:
    """The roots of (p - x)^2 = 1.96^2 x (1 - x) / trials."""
    z2 = 3.8414588 / trials
    root = ((2 * p + z2) ** 2 - 4 * (1 + z2) * p * p) ** 0.5
    return (2 * p + z2 - root) / (2 + 2 * z2), (2 * p + z2 + root) / (2 + 2 * z2)


@pytest.mark.parametrize("shares, num_samples, expected", [
    ([1] * 8 + [0] * 2, 1, (0.4902, 0.9433)),         # the textbook's 8 of 10
    ([0] * 4, 1, (0.0, 0.4899)), ([1] * 4, 8, (0.5101, 1.0)),  # 3.8415 / (4 + 3.8415)
    ([1, 0, 0.5, 0.5], 2, (0.2152, 0.7848)),          # variance 1/8, half of 1/4: two trials each, 4 of 8
    ([0.5] * 4, 2, (0.2152, 0.7848)),                 # all alike: at most as many trials as samples
    ([0.5] * 5 + [1], 2, (0.3195, 0.8067)),           # nearly: 7 of 12
    ([1, 1, 0, 0], 8, (0.1500, 0.8500))])             # samples that are all alike add nothing: 2 of 4
def test_wilsons_interval_with_samples_in_clusters(shares, num_samples, expected):
    assert wilson(shares, num_samples) == pytest.approx(expected, abs=6e-5)


def test_the_interval_covers_the_truth_where_samples_of_a_problem_are_alike():
    """400 benchmarks of 60 problems, whose chances are Beta(.5, .5), 8 samples each: about 95% have the mean, .5, in
    the interval, and of those that take all samples for independent much fewer."""
    draw, covered, naive = random.Random(0), 0, 0
    for _ in range(400):
        chances = [draw.betavariate(0.5, 0.5) for _ in range(60)]
        shares = [sum(draw.random() < p for _ in range(8)) / 8 for p in chances]
        low, high = wilson(shares, 8)
        covered += low <= 0.5 <= high
        low, high = wilson_by_hand(sum(shares) / 60, 480)
        naive += low <= 0.5 <= high
    assert 0.92 <= covered / 400 <= 0.98 and naive / 400 < 0.75


def test_a_mean_of_benchmarks_adds_the_distances_to_the_bounds_as_squares():
    found = of_mean([0.5, 0.3], [(0.4, 0.7), (0.2, 0.4)])
    assert found == pytest.approx((0.4 - (0.01 + 0.01) ** 0.5 / 2, 0.4 + (0.04 + 0.01) ** 0.5 / 2))


def test_the_bootstrap_of_f1_by_the_quantiles_of_the_binomial():
    """Of 8 wrong solutions 4 are found, all of 30 right ones are left alone. Of Binomial(8, 1/2) .4% are below 1 and
    3.5% below 2: it is 1 to 7, and F1 2 * .125 / 1.125 to 2 * .875 / 1.875. A subset of certain F1 1 halves that."""
    sure = {"n": 4, "num_error": 2, "error_acc": 1.0, "correct_acc": 1.0}
    half = {"n": 38, "num_error": 8, "error_acc": 0.5, "correct_acc": 1.0}
    assert bootstrap_f1([half], 0) == pytest.approx((2 / 9, 14 / 15))
    assert bootstrap_f1([half, sure], 1) == pytest.approx((11 / 18, 29 / 30))
    assert bootstrap_f1([half | {"error_acc": 0.0}], 0) is None and bootstrap_f1([sure], 0) is None


def test_the_average_stands_there_once_all_five_are_run(capsys, base, files, monkeypatch):
    say(monkeypatch, base, "#### 2")
    five = ["math500", "aime24", "aime25", "amc", "olympiad"]
    rows, table, _ = suite(capsys, base, "--benchmarks", *five, "-m", "24", *files)
    assert list(rows) == list(table) == [*five, "average"]
    shares = [1 / num for num in TESTS.values()]  # one answer is 2
    assert [rows[name]["pass@1"] for name in five] == pytest.approx(shares)
    assert rows["average"]["pass@1"] == pytest.approx(sum(shares) / 5) and rows["average"]["problems"] == 19
    low, high = of_mean(shares, [wilson_by_hand(1 / num, num) for num in TESTS.values()])
    assert table["average"][1] == f"{20 * sum(shares):.1f} [{100 * low:.1f}, {100 * high:.1f}]"
    assert [row[4] for row in table.values()] == ["81.4", "20.0", "20.0", "65.0", "43.9", "46.1"]  # the paper's
    assert "average" not in suite(capsys, base, "--benchmarks", *five[:4], "-m", "24", *files)[1]


def test_processbench_is_verifier_evals_in_the_verifiers_own_format(capsys, base, tmp_path):
    (tmp_path / "bench").mkdir()
    for name, rows in (("gsm8k", chain_rows(range(20))), ("math", chain_rows(range(20, 60)))):
        write(tmp_path / "bench" / f"{name}.jsonl", rows)
    source, out = ["--processbench", str(tmp_path / "bench")], tmp_path / "alone.json"
    asked = ["--benchmarks", "processbench", "--verifier-tag", "tiny-ver"]
    rows, table, _ = suite(capsys, base, *asked, *source, "-x", "30")
    verifier_eval.main(eval_suite.parse_flags(verifier_eval.make_parser(), [
        "--device-type", "cpu", "--verifier-tag", "tiny-ver", *source, "--format", "compact", "--max-examples", "30",
        "--out", str(out)]))
    found, row = json.loads(out.read_text())["processbench"], rows["processbench"]
    assert row["f1"] == found["average"]["f1"] > 0 and row["problems"] == 50
    assert {name: part["f1"] for name, part in row["subsets"].items()} == {
        name: part["f1"] for name, part in found["subsets"].items()}
    low, high = row["intervals"]["f1"]
    assert 0 < low < row["f1"] < high < 1
    assert table["processbench"] == ["50", f"F1 {100 * row['f1']:.1f} [{100 * low:.1f}, {100 * high:.1f}]", "-", "-",
                                     "43.9", "its verifier, Qwen2.5-7B; F1, mean of four subsets"]
    lone = write(tmp_path / "only.jsonl", [row | {"label": -1} for row in chain_rows(range(4))])
    row = suite(capsys, base, *asked, "--processbench", lone)
    assert row[0]["processbench"]["f1"] is None and row[1]["processbench"][1] == "F1 -"


def test_what_is_not_there_is_told_and_counted(capsys, base, files):
    """The hub cannot be reached here. GSM8K's own prompt is longer than the context, one file alone has no AIME25."""
    data = ["--gsm8k-data", files[10], "--aime-data", files[3], "--last-letter-max-words", "4"]
    rows, table, printed = suite(capsys, base, "-x", "2", "-m", "24", *data)
    assert {name: cells[1] for name, cells in table.items() if "[" not in cells[1]} == {
        "math500": "no data", "aime24": "too long", "aime25": "no data", "amc": "no data", "olympiad": "no data",
        "gsm8k": "too long", "processbench": "no verifier"}
    assert list(rows) == list(eval_suite.BENCHMARKS) and rows["amc"]["not_run"] == "no data"
    assert "2 of 9 benchmarks were run." in printed
    said = {line.partition(",")[0]: line for line in printed.splitlines() if line.startswith("- ")}
    assert len(said) == 7 and "math-ai/amc23" in said["- amc"] and "context 128" in said["- gsm8k"]
    assert "--aime-data names no file of it; their order is aime24 aime25" in said["- aime25"]
    line = refused(capsys, eval_suite, "-i", "sft", "--benchmarks", "amc", "processbench")
    assert "none can be run" in line and "math-ai/amc23" in line


@pytest.mark.parametrize("flags, words", [
    (["--gsm8k-data", "nowhere/there"], "nowhere/there"), (["--aime-data", "nowhere.jsonl"], "nowhere.jsonl: no such"),
    (["--amc-data", "nobody/nothing"], "nobody/nothing"),
    (["--processbench", "nowhere.jsonl", "--verifier-tag", "tiny-ver"], "nowhere.jsonl: no such file"),
    (["--processbench", "nowhere.jsonl"], "--processbench: needs --verifier-tag"),
    (["--verifier-tag", "nobody"], "no checkpoint nobody"), (["-g", "nobody"], "no checkpoint nobody"),
    (["-s", "7"], "no step 7"), (["--benchmarks", "sudoku"], "sudoku"),
    (["--data", "x"], "--rows-data: is of no benchmark"), (["--math-data", "x"], "--math-data: is of no benchmark"),
    (["--task", "chain"], "--benchmarks names"), (["-n", "2"], "greedy samples are all the same"),
    (["-x", "0"], "-x"), (["-t", "-1"], "--temperature -1"), (["--out", __file__], "no earlier result"),
    (["--last-letter-min-words", "20"], "min <= max")])
def test_bad_input_is_one_line_before_any_work(capsys, base, monkeypatch, flags, words):
    monkeypatch.setattr(chat_eval, "solve", None)
    monkeypatch.setattr(verifier_eval, "evaluate_processbench", None)
    assert words in refused(capsys, eval_suite, "-i", "sft", *flags)


def test_two_ranks_print_the_table_of_one(capsys, base):
    flags = ["-i", "sft", "--benchmarks", "last_letter", "amc", "-x", "5", "-n", "3", "-t", "1"]
    printed = scripts_on_two_ranks(("scripts.eval_suite", [*CHECKPOINT, *flags]))
    assert printed == run(capsys, eval_suite, *flags) and "| amc | - | no data |" in printed


def test_check_lm_eval_tells_where_the_two_differ(capsys, base, files, monkeypatch, tmp_path):
    """lm-eval's log is written here as it would write it: the third text is another one, and the second, right but
    cut, counts there."""
    folder, exported = tmp_path / "compared", tmp_path / "exported"
    say(monkeypatch, base, "#### 9")
    flags = ["-i", "sft", "-g", "tiny", "--device-type", "cpu", "-x", "2", "-m", "24", "--max-rows", "1", *files[-4:]]
    script_main(check_lm_eval.main, check_lm_eval.make_parser, ["ours", str(folder), *flags])
    first, second, third, _ = (row["answer"] for row in read_jsonl(folder / "problems.jsonl"))
    say(monkeypatch, base, f"#### {first}", f"#### {second}...", "no", "#### 77")
    script_main(check_lm_eval.main, check_lm_eval.make_parser, ["ours", str(folder), *flags])
    rows, task = read_jsonl(folder / "problems.jsonl"), yaml.safe_load((folder / "gsm8k_same.yaml").read_text())
    assert [row["strict"] for row in rows] == [True, False, False, False] and rows[1]["uncounted"] == "cut"
    assert task["generation_kwargs"] == {"until": ["<|bos|>", "<|assistant_end|>"], "do_sample": False,
                                         "max_gen_toks": 24}
    assert task["filter_list"][0]["filter"][0]["regex_pattern"] == r"#### (\-?[0-9\.\,]+)"
    exported.mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": rows[0]["ids"][0], "b": 7}, unk_token="b"))
    words.save(str(exported / "tokenizer.json"))
    (folder / "problems.jsonl").write_text("".join(json.dumps(row | {"ids": row["ids"][:1]}) + "\n" for row in rows))
    (folder / "lm_eval").mkdir()
    texts = [row["text"] for row in rows[:2]] + [f"#### {third}", rows[3]["text"]]
    logged = [{"doc_id": i, "filter": name, "arguments": {"gen_args_0": {"arg_0": "b" if i == 3 else "a"}},
               "resps": [[text]], "filtered_resps": [text[5:]], "exact_match": float(i < 3)}
              for i, text in enumerate(texts) for name in ("strict-match", "flexible-extract")]
    write(folder / "lm_eval" / "samples_gsm8k_same_0.jsonl", logged)
    capsys.readouterr()
    script_main(check_lm_eval.main, check_lm_eval.make_parser, ["compare", str(folder), "--exported", str(exported)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 problems: the ids of the prompt are equal in 3, the texts in 3; 3 ended within the limit"
    assert [line.split()[:2] for line in lines[1:5]] == [["strict", "1"], ["strict-match", "3"], ["lenient", "2"],
                                                         ["flexible-extract", "3"]]
    assert lines[5] == "3 differences" and [line.partition(": ")[2].partition(";")[0] for line in lines[6:]] == [
        "right but cut, which counts as wrong here", "the texts differ", "the texts differ"]


def read_jsonl(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]
