"""The stages of a GPU day: what each may take, what a failed one leaves, where its row goes."""
import os
import shlex
import sys
import time


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "dev"))
import gpu_day  # noqa: E402

PAGE = f"# Timings\n\nText.\n\n{gpu_day.HEADING}\n\nMore.\n\n" + "\n".join(gpu_day.HEADER) + "\n| old |\n\n## After\n"


def day(tmp_path, monkeypatch, stages: dict, *flags) -> tuple[int, str]:
    """Runs these stages as a rehearsal -> the exit code, the page."""
    page = tmp_path / "BENCH.md"
    page.write_text(PAGE)
    monkeypatch.setattr(gpu_day, "STAGES", stages)
    monkeypatch.setattr(gpu_day, "SLOWER", 1)
    monkeypatch.setattr(sys, "argv", ["gpu_day.py", "--scale", "tiny", "--bench", str(page), "--out",
                                      str(tmp_path / "out"), "--stages", ",".join(stages), "--commit", "abc", *flags])
    return gpu_day.main(), page.read_text()


def test_a_failed_stage_does_not_stop_the_next(tmp_path, monkeypatch, capsys):
    code, page = day(tmp_path, monkeypatch, {
        "one": (60, "false", "echo '{\"a\": {\"b\": 3}, \"c\": 4}'", ["a.b", "c", "a.d"]),
        "two": (60, "", "echo broken; exit 3", ["a"]), "three": (60, "", "echo no json", ["a"]),
        "four": (60, "", "echo fine; echo; echo", None),
        "five": (60, "", "echo step 1; echo 'step   2  x'; echo more", "step "),
        "six": (60, "", "echo more", "step ")})
    rows = [line.strip("| ").split(" | ")[3:] for line in page.splitlines() if "| abc |" in line]
    assert code == 1 and [row for row in rows if row[1] != "seconds"] == [
        ["one", "a.b", "3"], ["one", "c", "4"], ["one", "a.d", "-"], ["two", "failed", "exit code 3"],
        ["two", "last line", "broken"], ["three", "failed", "its last line is not JSON"], ["four", "last line", "fine"],
        ["five", "last line", "step 2 x"], ["six", "failed", "no line starts with 'step '"]]
    assert [row[0] for row in rows if row[1] == "seconds"] == ["one", "two", "three", "four", "five", "six"]
    assert max(map(len, page.splitlines())) <= 120
    assert capsys.readouterr().out.splitlines()[-1].startswith("failed: two, three, six;")
    assert (tmp_path / "out" / "two.log").read_text() == "broken\n"


def test_rows_go_after_the_tables_last_one(tmp_path, monkeypatch):
    _, page = day(tmp_path, monkeypatch, {"one": (60, "", "echo 'a | b'", None)})
    lines = page.splitlines()
    at = lines.index("| old |")
    assert lines[at + 1].startswith("| 20") and "| last line | a / b |" in lines[at + 1] and "seconds" in lines[at + 2]
    assert "\n".join(lines[: at + 1] + lines[at + 3:]) + "\n" == PAGE
    page = tmp_path / "page.md"  # the section is made where there is none
    page.write_text("# Timings\n")
    gpu_day.add_rows([["a", "b|c"]], str(page))
    assert page.read_text().splitlines() == ["# Timings", "", gpu_day.HEADING, "", *gpu_day.HEADER, "| a | b/c |"]


def test_time_is_up_for_a_stage_and_its_children(tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    code, page = day(tmp_path, monkeypatch, {
        "slow": (1, "", f"(sleep 3; touch {shlex.quote(str(mark))}) & sleep 60", None),
        "next": (60, "", "echo y", None)})
    assert code == 1 and "| slow | failed | stopped after 1 s |" in page and "| y |" in page
    time.sleep(3)
    assert not mark.exists()


def test_stages_after_the_end_of_all_time_are_named(tmp_path, monkeypatch):
    code, page = day(tmp_path, monkeypatch, {"one": (60, "", "sleep 3", None), "two": (60, "", "echo y", None)},
                     "--minutes", "0.04")
    assert code == 1 and "| two | failed | no time left |" in page and "| two | last line |" not in page


def test_every_stage_has_a_rehearsal_and_all_fit_in_half_an_hour():
    assert sum(limit for name, (limit, *_) in gpu_day.STAGES.items() if name not in gpu_day.APART) <= 1800
    for _, full, tiny, _ in gpu_day.STAGES.values():
        assert full and tiny
