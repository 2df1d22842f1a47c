"""report.html in a browser, skipped where there is none (apt-get install chromium chromium-driver)."""
import json
import shutil
import time

import pytest
from test_report import ROLLOUT, make_other_run, make_run

from nanochat.cli import script_main
from nanochat.rl.report.page import write_run_page
from nanochat.rl.report.report import INDICATORS
from scripts import report

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
QUIET = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,1600")
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
RIGHT = {**ROLLOUT, "solution": "3+5:8;8*2:6;=6", "outcome": True, "step_labels": [True, True]}
UNJUDGED = dict(verification=None, step_verdicts=None, verdict=None)
# the steps that they are logged at run from 0
ROLLOUTS = [
    ROLLOUT,                                                       # judged as gold does
    {**ROLLOUT, "step_verdicts": [True, True], "verdict": True,
     "verification": "3+5:8T;8*2:7T;=T"},                          # wrong but believed
    RIGHT,                                                         # right but doubted, step 2 too
    {**RIGHT, "step_verdicts": [True, True], "verdict": True},     # judged as gold does
    {**RIGHT, "step_verdicts": [True, True], "verdict": False},    # doubted, its steps are not
    {**ROLLOUT, "role": "verifier", "advantages": [1.0, 0.0], "verification": HOSTILE, "step_verdicts": [],
     "verdict": None, "unmet": ["missing_tags"]},
    {**ROLLOUT, **UNJUDGED, "problem": HOSTILE, "finish_reason": "length"},
    *[ROLLOUT] * 20]
# three rollouts of one group, with rewards
GROUP = [{**ROLLOUT, "step": 4, "advantages": [0.5] * 3 + [-0.25] * 3 + [-1.0] * 6 + [0.0] * 3, "reward": 0.0},
         {**RIGHT, "step": 4, "reward": 1.0}, {**ROLLOUT, "step": 4, "verdict": True, "reward": 0.0}]
# two held-out problems at two evaluations
EXAMPLES = [{**rollout, "step": step, "problem": problem, "advantages": [], "token_ends": []}
            for step, rollout in ((0, ROLLOUT), (20, RIGHT)) for problem in ("3+5*2", HOSTILE)]
# a refinement with what was said before it, and two problems that a role proposes, of which one is tried twice
TURNS = [{**ROLLOUT, **UNJUDGED, "step": 0, "role": "refiner", "turns": [["first attempt", "1+1:3;=3"],
                                                                        ["critique", HOSTILE]],
          "completion": "ab", "token_ends": [1, 2], "advantages": [1.0, 0.5], "problem": "1+1"},
         *[{**ROLLOUT, **UNJUDGED, "step": 0, "outcome": outcome} for outcome in (True, False, None)],
         *[{**ROLLOUT, **UNJUDGED, "step": 0, "role": "proposer", "problem": "propose", "outcome": None,
            "proposed": problem} for problem in ("3+5*2", "9-9")],
         *[{**ROLLOUT, "step": 1, "role": "judge", "verdict": verdict} for verdict in (True, False)]]
COMPLETED = {**ROLLOUT, **UNJUDGED, "step": 0, "role": "refiner", "completion": HOSTILE, "critique": HOSTILE,
             "token_ends": [1, len(HOSTILE)], "advantages": [1.0, 0.5], "reward": 0.25}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page's address: two arms of two seeds, the first run with ROLLOUTS."""
    base = tmp_path_factory.mktemp("page")
    rollouts = [{**rollout, "step": i} for i, rollout in enumerate(ROLLOUTS)]
    folders = [make_run(base, "chain-tango-s0", 0, [0.1, 0.3, 0.5], [0.7, 0.8, 0.9], rollouts=rollouts,
                        examples=EXAMPLES),
               make_run(base, "chain-tango-s1", 1, [0.2, 0.4, 0.6], [0.6, 0.8, 0.9], is_old=True,
                        logged={"gen/stepless": 0.6, "gen/skipped": 0}),
               make_run(base, "chain-grpo-s0", 0, [0.1, 0.2, 0.3], rollouts=GROUP),
               make_run(base, "chain-grpo-s1", 1, [0.2, 0.3, 0.5],
                        rollouts=[{**ROLLOUT, "problem": str(i), "reward": i / 7} for i in range(20)]),
               make_other_run(base, "other-own-s0", ("generator", "refiner"), {"gen/pass1_in": 0.1, "ref/kept": 0.4},
                              {"gen/pass1_in": 0.5, "ref/kept": 0.8}, rollouts=[COMPLETED]),
               make_other_run(base, "third-own-s0", ("generator", "refiner", "proposer"), {"gen/pass1_in": 0.1},
                              {"gen/pass1_in": 0.5}, rollouts=TURNS)]
    script_main(report.main, report.make_parser(), ["--out", str(base / "out"), *folders])
    return "file://" + str(base / "out" / "report.html")


def test_the_page_is_one_file_without_addresses(page):
    with open(page.removeprefix("file://"), encoding="utf-8") as f:
        text = f.read()
    assert "{{data}}" not in text and HOSTILE not in text and "default-src 'none'" in text
    assert not [word for word in ("src=\"", "@import", "url(", "fetch(", "XMLHttpRequest") if word in text]
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


@pytest.fixture(scope="module")
def browser():
    if not BROWSER or not DRIVER:
        pytest.skip("needs chromium and chromedriver")
    webdriver = pytest.importorskip("selenium.webdriver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in QUIET:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def shown(browser, page):
    """The page, freshly loaded. Afterwards: nothing but the file was asked for, and the console is empty."""
    browser.get_log("performance")
    browser.get(page)
    yield browser
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {url for url in asked if not url.startswith("data:")} == {page}
    assert browser.get_log("browser") == []


def find(browser, selector: str) -> list:
    return browser.find_elements("css selector", selector)


def choose(browser, **values) -> list[int]:
    """Sets controls by id; the steps of the rollouts that are then shown."""
    for name, value in values.items():
        browser.execute_script("const e = document.getElementById(arguments[0]); e.value = arguments[1]; "
                               "e.dispatchEvent(new Event('input'))", name, str(value))
    return [int(group.find_element("css selector", ".head span").text.removeprefix("step "))
            for group in find(browser, "#list .group") for _ in group.find_elements("css selector", "article")]


def details_text(card) -> list[str]:
    return [node.get_attribute("textContent") for node in card.find_elements("css selector", "details .mono")]


def unfold(browser) -> None:
    browser.execute_script("for (const fold of document.querySelectorAll('details')) fold.open = true")


def emulate(browser, width: int, height: int) -> None:
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600})


def status(browser) -> str:
    return find(browser, "#count")[0].text


def test_the_first_screen_answers_three_questions(shown):
    tile = find(shown, ".tile")[0].text.replace("\u00a0", " ").split("\n")
    # the changes are 40 points twice: an interval of no width
    assert tile == ["generator pass@1, in distribution", "tango", "15.0% \u2192 55.0%", "+40.0 \u00b1 0.0 (2 seeds)",
                    "grpo", "15.0% \u2192 40.0%", "+25.0 \u00b1 63.5 (2 seeds)"]
    warned, fine = (node.text for node in find(shown, "#watched > li"))
    assert warned.startswith("\u2717 Now: answers without steps: chain-tango-s1, 60.0% at step 19, in 20 of "
                             "20 generator steps. Bound: at most 50% have no step. What to do: ")
    assert fine == "\u2713 2 within bounds: updates are finite; sampling explores"
    assert find(shown, "#when")[0].text == "First held-out problems after step 20, greedy, of chain-tango-s0"
    assert [node.text for node in find(shown, "#latest .head b.mono")] == ["3+5*2", HOSTILE]
    steps = find(shown, "#latest article")[0].find_elements("css selector", ".step.mono")
    assert [step.text.split("\n")[1] for step in steps] == ["1: right, gold right", "2: wrong, gold right", "answer"]
    choose(shown, run=2)
    assert find(shown, "#when")[0].text == "Sampled in training at step 4, of chain-grpo-s0"
    assert len(find(shown, "#latest article")) == 3


def test_curves_and_table_are_there(shown):
    assert [fold.is_displayed() for fold in find(shown, ".fold .panels")][:2] == [True, False]
    unfold(shown)
    titles = [h.text for h in find(shown, ".panel figcaption")]
    assert titles[0] == "generator pass@1, in distribution" and INDICATORS["gen/reasoning_steps"] in titles
    panels = dict(zip(titles, find(shown, ".panel"), strict=True))
    accuracy, verifier = find(shown, ".panel")[0], panels["verifier balanced accuracy, fixed solutions"]
    assert (len(accuracy.find_elements("css selector", "polyline")) == 2
            and len(verifier.find_elements("css selector", "polyline")) == 1)
    assert ("tango, generator step 20: 55% ± 7.07 (2 seeds)"
            in [t.get_attribute("textContent") for t in accuracy.find_elements("css selector", "title")])
    # runs that are alone in their task are not compared
    assert [row.text.split()[0] for row in find(shown, "#table tbody tr")] == ["tango", "grpo"]
    assert "NaN" not in shown.page_source.split('id="data"')[0]


@pytest.mark.parametrize("kind, steps", [("disagreements", [5, 4, 2, 1]), ("believed", [1]), ("doubted", [4, 2]),
                                         ("all", list(range(26, 18, -1)))])
def test_each_kind_shows_its_rollouts(shown, kind, steps):
    assert choose(shown, kind=kind) == steps
    assert status(shown).startswith(f"{27 if kind == 'all' else len(steps)} of the 27 rollouts kept here (27 logged)")


def test_pages_turn_and_role_and_step_filters_join(shown):
    assert len(find(shown, "#list .group")) == 8 and "page 1 of 4" in status(shown)
    for _ in range(3):
        shown.execute_script("document.getElementById('next').click()")
    assert len(find(shown, "#list article")) == 3 and "page 4 of 4" in status(shown)
    assert not find(shown, "#next")[0].is_enabled()
    assert len(choose(shown, kind="believed")) == 1 and "page 1 of 1" in status(shown)
    assert len(choose(shown, kind="all", role="verifier")) == 1
    assert len(choose(shown, role="", **{"from": 3, "to": 5})) == 3
    assert len(choose(shown, role="generator", kind="disagreements")) == 1
    assert choose(shown, kind="believed") == [] and status(shown).startswith("0 of the 27")


def test_steps_carry_verdict_label_and_advantage(shown):
    choose(shown, kind="believed")
    first, second, answer = find(shown, "#list article .step")
    assert (first.text == "3+5:8;\n1: right, gold right, A +0.50"
            and set(first.get_attribute("class").split()) == {"step", "mono", "right"})
    assert (second.text == "8*2:7;\n2: right, gold wrong, A -1.00"
            and set(second.get_attribute("class").split()) == {"step", "mono", "right", "off"})
    assert answer.text == "=7\u25a0\nanswer, A -2.00"
    assert details_text(find(shown, "#list article")[0]) == ["3+5:8T;8*2:7T;=T"]


def test_text_of_models_is_never_markup(shown):
    choose(shown, **{"from": 5, "to": 6})
    unjudged, verified = find(shown, "#list article")
    assert details_text(verified) == [HOSTILE] and "unmet: missing_tags" in verified.text
    assert "cut at the length limit" in unjudged.text and "verdict" not in unjudged.text
    assert HOSTILE in [head.text for head in find(shown, "#list .group > .head b")]
    assert find(shown, "img") == []


def test_a_role_of_another_recipe_is_shown_with_its_text_and_facts(shown):
    assert [o.text for o in find(shown, "#role option")] == ["all", "generator", "verifier", "refiner", "proposer",
                                                             "judge"]
    assert len(choose(shown, run=4, role="refiner")) == 1
    card = find(shown, "#list article")[0]
    assert card.find_element("css selector", "summary").text == "the refiner's text (trained on, mean advantage +0.75)"
    assert card.find_element("css selector", "details .mono").text == HOSTILE
    facts, steps = (card.find_elements("css selector", selector) for selector in (".facts span", ".step small"))
    assert [fact.text for fact in facts] == [f"critique: {HOSTILE}"] and "reward 0.25" in card.text
    assert [step.text for step in steps] == ["1: gold right", "2: gold wrong", "answer"]
    unfold(shown)
    assert "ref/kept" in [h.text for h in find(shown, ".panel figcaption")] and find(shown, "img") == []
    assert any(row.text.startswith("ref/margin") for row in find(shown, "#health tbody tr"))


def test_examples_stand_problem_by_problem_over_the_run(shown):
    groups = find(shown, "#solved .group")
    assert [find(group, ".head b")[0].text for group in groups] == ["3+5*2", HOSTILE]
    for group in groups:
        assert [title.text for title in find(group, "h3")] == ["after step 0", "after step 20"]
        assert [len(find(card, ".step.off")) for card in find(group, ".rollout")] == [0, 1]
    choose(shown, run=1)
    assert not shown.find_element("id", "examples").is_displayed()


def test_another_run_brings_its_settings_and_rollouts(shown):
    assert len(choose(shown, run=1)) == 1
    assert ("seed 1" in [row.text for row in find(shown, "#settings tbody tr")]
            and len(find(shown, "#settings table")) == 1)
    unfold(shown)
    assert any(row.text.startswith("gen/reasoning_steps") for row in find(shown, "#health tbody tr"))


def test_rollouts_about_one_problem_stand_beside_each_other_underlined_by_advantages_their_rewards_counted(shown):
    bars = lambda: find(shown, "#rewards svg")[0].get_attribute("aria-label")
    choose(shown, run=2)
    (group,) = find(shown, "#list .group")
    assert group.find_element("css selector", ".head").text.split("\n") == ["step 4", "3+5*2", "gold answer 6",
                                                                            "1 of 3 right"]
    cards = group.find_elements("css selector", "article")
    assert len({card.rect["y"] for card in cards}) == 1 and [card.rect["x"] for card in cards] == sorted(
        {card.rect["x"] for card in cards})
    tokens = find(shown, "#list article:first-child .token")
    assert [(t.text, t.get_attribute("title")) for t in tokens] == [
        ("3+5", "A +0.50"), (":8;", "A -0.25"), ("8*2:7;", "A -1.00"), ("=7", "A 0.00"), ("\u25a0", "A 0.00")]
    ink = shown.execute_script("return [...document.querySelectorAll('#list article:first-child .token')]"
                               ".map(t => getComputedStyle(t)).map(s => [s.textDecorationStyle, "
                               "...s.textDecorationColor.slice(5, -1).split(', ')])")
    above, below = ["solid", "0", "114", "178"], ["wavy", "213", "94", "0"]
    assert [parts[:4] for parts in ink] == [above, below, below, above, above]
    # of the largest in the group, 2: .25 + .75 of the share; none at 0
    assert [float(parts[4]) for parts in ink] == pytest.approx([0.4375, 0.34375, 0.625, 0, 0], abs=0.005)
    assert bars() == "rewards: 0: 2, 1: 1"
    assert len(choose(shown, kind="believed")) == 1
    assert "1 of 3 right, 2 others hidden" in find(shown, "#list .group")[0].text
    assert bars() == "rewards: 0: 1"
    assert choose(shown, run=0) and find(shown, "#rewards svg") == []  # its rollouts have none
    choose(shown, run=3, kind="all")
    assert bars().count(": ") == 13 and sum(int(part.split(": ")[1]) for part in bars()[9:].split(", ")) == 20


def test_verifications_of_one_solution_are_tallied_by_their_verdicts(shown):
    assert choose(shown, run=5, role="judge") == [1, 1]
    assert "1 of 2 verdicts agree with the outcome" in find(shown, "#list .group .head")[0].text


def test_a_point_of_a_curve_leads_to_the_rollouts_of_its_step(shown):
    """Of grpo's runs the first has rollouts at step 4 alone: the nearest to any point."""
    points = shown.execute_script("return [...document.querySelector('.panel').querySelectorAll('.point')]")
    assert [point.get_attribute("tabindex") for point in points] == ["0"] + ["-1"] * 5 and len(points) == 6
    shown.execute_script("arguments[0].dispatchEvent(new Event('click'))", points[5])
    chosen = [shown.execute_script(f"return document.getElementById('{name}').value") for name in ("run", "from", "to")]
    assert chosen == ["2", "4", "4"] and len(find(shown, "#list article")) == 3
    shown.execute_script("arguments[0].dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter'}))", points[1])
    assert choose(shown) == [10]  # of tango's first run


def test_what_is_chosen_outlives_a_reload(shown):
    choose(shown, run=0, kind="believed")
    shown.refresh()
    assert choose(shown) == [1] and status(shown).startswith("1 of the 27")


def test_all_turns_of_a_rollout_are_shown(shown):
    choose(shown, run=5, role="refiner")
    card = find(shown, "#list article")[0]
    assert [node.text for node in card.find_elements("css selector", "summary")] == [
        "first attempt", "critique", "the refiner's text (trained on, mean advantage +0.75)"]
    assert details_text(card) == ["1+1:3;=3", HOSTILE, "ab"] and "3+5:8;" in card.text


def test_a_proposed_problem_shows_what_became_of_it(shown):
    choose(shown, run=5, role="proposer")
    proposed, lost = find(shown, "#list article")
    assert "proposed 3+5*2 solved in 1 of 2 rollouts" in " ".join(proposed.text.split("\n"))
    assert "has no rollout here" in lost.text and lost.find_elements("css selector", "button") == []
    proposed.find_element("css selector", "button").click()
    assert 0 in choose(shown) and "3+5*2" in [head.text for head in find(shown, "#list .group > .head b")]


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_is_wider_than_the_page(shown, width):
    emulate(shown, width, 800)
    unfold(shown)
    assert shown.execute_script("return document.documentElement.scrollWidth") <= width
    table = find(shown, "#table table")[0]
    assert width < 600 or table.rect["x"] + table.rect["width"] <= width
    shown.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def alone(tmp_path, live: dict | None) -> str:
    folder = make_run(tmp_path, "chain-own-s0", 0, [0.1, 0.3, 0.5])
    summary = json.loads((tmp_path / "runs" / "chain-own-s0" / "summary.json").read_text())
    return "file://" + write_run_page(folder, {"minutes": 1.0, "before": summary["before"]} if live else None, live)


def test_a_single_run_is_titled_and_compared_with_nothing(browser, tmp_path):
    browser.get(alone(tmp_path, None))
    assert browser.title == "chain-own-s0 - nanochat-tango" and find(browser, "h1")[0].text == "chain-own-s0"
    for width, height in ((1280, 800), (390, 800)):  # one of its solutions begins on the first screen
        emulate(browser, width, height)
        assert find(browser, "#latest article")[0].rect["y"] < 0.8 * height
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    unfold(browser)
    assert find(browser, "#made")[0].text.startswith("1 run") and "commit None" in find(browser, "#made")[0].text
    assert find(browser, "#table") == [] and "not measurable" not in find(browser, "body")[0].text
    assert "generator pass@1, in distribution 10.0% 50.0% +40.0" in [r.text for r in find(browser, "#scores tbody tr")]
    assert not find(browser, "#live")[0].is_displayed() and not find(browser, "#runs")[0].is_displayed()
    assert "10.0% \u2192 50.0%\n+40.0 (1 seed)" in find(browser, ".tile")[0].text.replace("\u00a0", " ")
    assert find(browser, "#seeds")[0].text == ""  # and no interval


def test_the_page_of_a_run_that_is_under_way_reloads_itself(browser, tmp_path, monkeypatch):
    monkeypatch.setattr("nanochat.rl.report.page.RELOAD_SECONDS", 2)
    address = alone(tmp_path, {"state": "under way, after step 12", "minutes_left": 7.3, "is_alive": True})
    browser.get(address)
    emulate(browser, 1280, 800)
    browser.execute_script("[...document.querySelectorAll('.fold')].forEach((fold, i) => fold.open = i === 1); "
                           "scrollTo(0, 300); document.getElementById('kind').focus({preventScroll: true})")
    assert find(browser, "#state")[0].text.startswith("under way, after step 12, about 7 minutes left (written at ")
    with open(address.removeprefix("file://")) as f:
        text = f.read()
    with open(address.removeprefix("file://"), "w") as f:
        f.write(text.replace("after step 12", "after step 13"))
    state = lambda: browser.execute_script("return document.getElementById('state')?.textContent") or "loading"
    deadline = time.time() + 30
    while "after step 13" not in state() and time.time() < deadline:
        time.sleep(0.1)
    assert "after step 13" in state()
    assert browser.execute_script("return [...document.querySelectorAll('.fold')].map(fold => fold.open)")[:2] == [
        False, True]
    assert browser.execute_script("return [scrollY, document.activeElement.id]") == [300, "kind"]
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    browser.execute_script("const e = document.getElementById('reload'); e.checked = false; "
                           "e.dispatchEvent(new Event('input')); window.same = true")
    time.sleep(3)
    assert browser.execute_script("return window.same")


# The least contrast of a text with what is behind it, and the text (WCAG 2: relative luminance).
CONTRAST = """
const luminance = c => c.reduce((sum, x, i) => sum + [.2126, .7152, .0722][i] *
  ((x /= 255) <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4), 0);
const parts = text => text.match(/[\\d.]+/g).map(Number);
const over = ([r, g, b, a = 1], below) => [r, g, b].map((x, i) => a * x + (1 - a) * below[i]);
const behind = node => node ? over(parts(getComputedStyle(node).backgroundColor), behind(node.parentElement))
  : [255, 255, 255];
let least = [99, ""];
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const node = texts.currentNode.parentElement, style = getComputedStyle(node);
  if (!texts.currentNode.data.trim() || !node.checkVisibility()) continue;
  const ink = parts(node.closest("svg") ? style.fill : style.color), back = behind(node);
  let opacity = 1;
  for (let up = node; up; up = up.parentElement) opacity *= getComputedStyle(up).opacity;
  const pair = [luminance(over([...ink.slice(0, 3), opacity], back)), luminance(back)].sort((a, b) => b - a);
  const ratio = (pair[0] + .05) / (pair[1] + .05);
  if (ratio < least[0] && !node.closest(":disabled")) least = [ratio, node.textContent];
}
return least;
"""


def test_light_and_dark(shown):
    colours = []
    unfold(shown)
    for scheme in ("light", "dark"):
        shown.execute_cdp_cmd("Emulation.setEmulatedMedia",
                              {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        colours.append(shown.execute_script("const s = getComputedStyle(document.body); "
                                            "return [s.backgroundColor, s.color]"))
        least, text = shown.execute_script(CONTRAST)
        assert least >= 4.5, text
    light, dark = ([sum(int(x) for x in c[4:-1].split(",")) / 765 for c in pair] for pair in colours)
    assert light[0] > 0.9 > 0.3 > light[1] and dark[0] < 0.15 < 0.8 < dark[1]
