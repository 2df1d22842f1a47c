"""
report.html in a real browser: Debian's chromium, headless. Skipped where chromium, its driver or selenium are not
installed.

    apt-get install chromium chromium-driver
    python -m pytest tests/test_page.py
"""
import json
import shutil

import pytest
from test_report import ROLLOUT, make_other_run, make_run

from nanochat.common import script_main
from nanochat.rl.report import INDICATORS
from scripts import report

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
QUIET = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,1600")
HOSTILE = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
RIGHT = {**ROLLOUT, "solution": "3+5:8;8*2:6;=6", "outcome": True, "step_labels": [True, True]}
# what is shown -> rollouts of that kind; the steps they are logged at run from 0
ROLLOUTS = [
    ROLLOUT,                                                       # judged as gold does
    {**ROLLOUT, "step_verdicts": [True, True], "verdict": True,
     "verification": "3+5:8T;8*2:7T;=T"},                          # wrong but believed
    RIGHT,                                                         # right but doubted, step 2 too
    {**RIGHT, "step_verdicts": [True, True], "verdict": True},     # judged as gold does
    {**RIGHT, "step_verdicts": [True, True], "verdict": False},    # doubted, its steps are not
    {**ROLLOUT, "role": "verifier", "advantages": [1.0, 0.0], "verification": HOSTILE, "step_verdicts": [],
     "verdict": None, "unmet": ["missing_tags"]},
    {**ROLLOUT, "problem": HOSTILE, "verification": None, "step_verdicts": None, "verdict": None,
     "finish_reason": "length"},                                   # no judge
    *[ROLLOUT] * 20,
]
COMPLETED = {**ROLLOUT, "step": 0, "role": "refiner", "verification": None, "step_verdicts": None, "verdict": None,
             "completion": HOSTILE, "advantages": [1.0, 0.5], "reward": 0.25, "critique": HOSTILE}


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page's address: two arms of two seeds, the first run with ROLLOUTS."""
    base = tmp_path_factory.mktemp("page")
    rollouts = [{**rollout, "step": i} for i, rollout in enumerate(ROLLOUTS)]
    folders = [make_run(base, "chain-tango-s0", 0, [0.1, 0.3, 0.5], [0.7, 0.8, 0.9], rollouts=rollouts),
               make_run(base, "chain-tango-s1", 1, [0.2, 0.4, 0.6], [0.6, 0.8, 0.9], is_old=True),
               make_run(base, "chain-grpo-s0", 0, [0.1, 0.2, 0.3]), make_run(base, "chain-grpo-s1", 1, [0.2, 0.3, 0.5]),
               make_other_run(base, "other-own-s0", ("generator", "refiner"), {"gen/pass1_in": 0.1, "ref/kept": 0.4},
                              {"gen/pass1_in": 0.5, "ref/kept": 0.8}, rollouts=[COMPLETED])]
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


def choose(browser, **values) -> list[str]:
    """Sets controls by id; the heads of the rollouts that are then shown."""
    for name, value in values.items():
        browser.execute_script("const e = document.getElementById(arguments[0]); e.value = arguments[1]; "
                               "e.dispatchEvent(new Event('input'))", name, str(value))
    return [head.text for head in find(browser, "article .head")]


def status(browser) -> str:
    return find(browser, "#count")[0].text


IN_BROWSER = pytest.mark.browser


@IN_BROWSER
def test_curves_and_table_are_there(shown):
    titles = [h.text for h in find(shown, ".panel h3")]
    assert (titles[0] == "generator pass@1, in distribution"
            and INDICATORS["gen/reasoning_steps"] in titles and "verifier balanced accuracy" in titles)
    accuracy, verifier = find(shown, ".panel")[0], find(shown, ".panel")[titles.index("verifier balanced accuracy")]
    assert (len(accuracy.find_elements("css selector", "polyline")) == 2
            and len(verifier.find_elements("css selector", "polyline")) == 1)
    assert ("tango, generator step 20: 0.55 ± 0.0707 (2 seeds)"
            in [t.get_attribute("textContent") for t in accuracy.find_elements("css selector", "title")])
    assert [row.text.split()[0] for row in find(shown, "#table tbody tr")] == ["tango", "grpo", "own"]
    assert "NaN" not in shown.page_source.split('id="data"')[0]


@IN_BROWSER
@pytest.mark.parametrize("kind, steps", [("disagreements", [1, 2, 4, 5]), ("believed", [1]), ("doubted", [2, 4]),
                                         ("all", list(range(20)))])
def test_each_kind_shows_its_rollouts(shown, kind, steps):
    heads = choose(shown, kind=kind)
    assert [int(head.split()[1].rstrip(",")) for head in heads] == steps
    assert status(shown).startswith(f"{27 if kind == 'all' else len(steps)} of the 27 rollouts kept here (27 logged)")


@IN_BROWSER
def test_role_and_step_filters_join(shown):
    assert len(choose(shown, role="verifier")) == 1
    assert len(choose(shown, role="", **{"from": 3, "to": 5})) == 3
    assert len(choose(shown, role="generator", kind="disagreements")) == 1
    assert choose(shown, kind="believed") == [] and status(shown).startswith("0 of the 27")


@IN_BROWSER
def test_pages_turn(shown):
    assert len(find(shown, "article")) == 20 and "page 1 of 2" in status(shown)
    find(shown, "#next")[0].click()
    assert (len(find(shown, "article")) == 7 and "page 2 of 2" in status(shown)
            and not find(shown, "#next")[0].is_enabled())
    assert len(choose(shown, kind="believed")) == 1 and "page 1 of 1" in status(shown)


@IN_BROWSER
def test_steps_carry_verdict_label_and_advantage(shown):
    choose(shown, kind="believed")
    first, second, answer = find(shown, "article .step")
    assert (first.text == "3+5:8;\n1: right, gold right, A +0.50"
            and set(first.get_attribute("class").split()) == {"step", "mono", "right"})
    assert (second.text == "8*2:7;\n2: right, gold wrong, A -1.00"
            and set(second.get_attribute("class").split()) == {"step", "mono", "right", "off"})
    assert answer.text == "=7\nanswer, A -2.00"
    assert find(shown, "article details .mono")[0].text == "3+5:8T;8*2:7T;=T"


@IN_BROWSER
def test_text_of_models_is_never_markup(shown):
    choose(shown, **{"from": 5, "to": 6})
    verified, unjudged = find(shown, "article")
    assert (verified.find_element("css selector", "details .mono").text == HOSTILE
            and "unmet: missing_tags" in verified.text)
    assert HOSTILE in unjudged.text and "cut at the length limit" in unjudged.text and "verdict" not in unjudged.text
    assert find(shown, "img") == []


@IN_BROWSER
def test_a_role_of_another_recipe_is_shown_with_its_text_and_facts(shown):
    assert [o.text for o in find(shown, "#role option")] == ["all", "generator", "verifier", "refiner"]
    assert len(choose(shown, run=4, role="refiner")) == 1
    card = find(shown, "article")[0]
    assert card.find_element("css selector", "summary").text == "the refiner's text (trained on, mean advantage +0.75)"
    assert card.find_element("css selector", "details .mono").text == HOSTILE
    facts, steps = (card.find_elements("css selector", selector) for selector in (".facts span", ".step small"))
    assert [fact.text for fact in facts] == ["reward: 0.25", f"critique: {HOSTILE}"]
    assert [step.text for step in steps] == ["1: gold right", "2: gold wrong", "answer"]
    assert "ref/kept" in [h.text for h in find(shown, ".panel h3")] and find(shown, "img") == []
    assert any(row.text.startswith("ref/margin") for row in find(shown, "#health tbody tr"))


@IN_BROWSER
def test_another_run_brings_its_settings_and_rollouts(shown):
    assert len(choose(shown, run=1)) == 1
    assert ("seed 1" in [row.text for row in find(shown, "#settings tbody tr")]
            and len(find(shown, "#settings table")) == 1)
    assert any(row.text.startswith("gen/reasoning_steps") for row in find(shown, "#health tbody tr"))


@IN_BROWSER
def test_light_and_dark(shown):
    colours = []
    for scheme in ("light", "dark"):
        shown.execute_cdp_cmd("Emulation.setEmulatedMedia",
                              {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        colours.append(shown.execute_script("const s = getComputedStyle(document.body); "
                                            "return [s.backgroundColor, s.color]"))
    light, dark = ([sum(int(x) for x in c[4:-1].split(",")) / 765 for c in pair] for pair in colours)
    assert light[0] > 0.9 > 0.3 > light[1] and dark[0] < 0.15 < 0.8 < dark[1]
