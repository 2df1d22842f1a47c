"""The report of a run that is under way: written at every evaluation and when it is due, and no matter to the run."""
import json

import pytest
from conftest import train

from nanochat.common import StopRequested
from nanochat.rl.run import steps
from scripts import tango_rl

FLAGS = ["--run", "r", "--recipe", "grpo", "--num-steps", "5", "--eval-every", "2"]


def data_of(base) -> dict:
    text = (base / "runs" / "r" / "report.html").read_text()
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


@pytest.fixture
def written(base, monkeypatch) -> list:
    """What each version of the report says: (what the run is doing, whether time is left, points, rollouts)."""
    versions, write = [], steps.write_run_page

    def write_and_look(*args):
        write(*args)
        data = data_of(base)
        live = data["live"] or {"state": None, "minutes_left": None}
        points = data["tasks"][0]["groups"]["Held-out scores"][0]["curves"]["r"]
        versions.append((live["state"], live["minutes_left"] is not None, [point[0] for point in points],
                         len(data["runs"][0]["rollouts"])))
    monkeypatch.setattr(steps, "write_run_page", write_and_look)
    return versions


def test_the_report_is_written_at_every_evaluation(written):
    train(*FLAGS)
    assert written == [("under way, after step 0", False, [0], 0), ("under way, after step 1", True, [0], 8),
                       ("under way, after step 3", True, [0, 2], 24),
                       ("under way, after step 5", True, [0, 2, 4], 40), (None, False, [0, 2, 4, 5], 40)]


def test_a_stopped_run_says_so(written, monkeypatch):
    def stop_in_step_1(t, *args):
        if t.step == 1:
            raise StopRequested
        return make_step(t, *args)
    make_step = tango_rl.make_step
    monkeypatch.setattr(tango_rl, "make_step", stop_in_step_1)
    with pytest.raises(StopRequested):
        train(*FLAGS)
    assert written[-1][0] == "stopped after step 1"


def test_without_evaluations_there_is_a_report_at_both_ends(written):
    train(*FLAGS, "--eval-every", "0", "--num-steps", "1")
    assert [(state, points) for state, _, points, _ in written] == [("under way, after step 0", [0]), (None, [0, 1])]


def test_a_report_that_is_due_is_written_without_an_evaluation(written, monkeypatch):
    def make_it_due(t, *args):
        t.page_due = 0.0 if t.step == 1 else t.page_due
        return make_step(t, *args)
    make_step = tango_rl.make_step
    monkeypatch.setattr(tango_rl, "make_step", make_it_due)
    train(*FLAGS, "--eval-every", "0", "--num-steps", "3")
    assert [(state, points) for state, _, points, _ in written] == [
        ("under way, after step 0", [0]), ("under way, after step 2", [0]), (None, [0, 3])]


def test_a_report_that_fails_is_told_and_stops_no_run(base, monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("nothing to draw with")
    monkeypatch.setattr(steps, "write_run_page", fail)
    train(*FLAGS, "--num-steps", "1")
    assert capsys.readouterr().out.count("report.html was not written: RuntimeError: nothing to draw with") == 3
    assert (base / "runs" / "r" / "summary.json").exists() and not (base / "runs" / "r" / "report.html").exists()
