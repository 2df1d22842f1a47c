"""Model cards: what stands in them, and that nothing from outside gets out of its place."""
import json
import re

import huggingface_hub
import pytest

from nanochat.hf.card import code, head
from nanochat.hf.files import origin_of_folder
from scripts import hf_export, tango_rl

HOSTILE = ["x\n---\nlicense: mit\n# Forged", "a: [b", "`` ` \r# Forged\u2028## Forged", "| a | b |\n| --- | --- |",
           "'\"{}", "</code><h1>Forged</h1>", "- \n    # Forged", "\x1b[31m", "---", "", "!!python/object:os.system x"]
OURS = {"# m, step 3", "## Training", "## Scores", "## Prompts"}


def parts(card: str, folder) -> tuple[dict, list[str]]:
    """The head that the hub reads, and the lines of the text that are not in an indented block."""
    (folder / "README.md").write_text(card, newline="")
    lines = re.split("[\n\r\x0b\x0c\x85\u2028\u2029]", card.split("\n---\n", 1)[1])
    return huggingface_hub.metadata_load(folder / "README.md"), [x for x in lines if not x.startswith("    ")]


def meta_with(text: str) -> dict:
    """The meta of an RL checkpoint in which every text from outside is this one."""
    origin = {"name": text, "license": text, "license_name": text, "license_link": text, "base_models": []}
    given = {"task": "gsm8k", "seed": 3, "recipe": "tango", "run": text, "model_tag": text, "gsm8k_data": [text, text],
             "system_prompt": text, "generator_prompt": text.replace("{}", "{{}}") + "{problem}"}
    return {"step": 3, "role": "generator", "run": "../none", "commit": text, "user_config": given, "history": [
        {"stage": "sft", "tag": text, "step": 0, "imported_from": text, "origin": origin},
        {"stage": "sft", "tag": text, "step": 1,
         "user_config": {"task": "gsm8k", "role": text, "conversations": [text]}}]}


@pytest.mark.parametrize("text", HOSTILE)
def test_text_from_outside_neither_breaks_the_head_nor_forges_a_heading(text, tmp_path):
    card, _ = hf_export.model_card("rl", "m", meta_with(text), "meta")
    data, lines = parts(card, tmp_path)
    assert data == {"library_name": "transformers", "pipeline_tag": "text-generation",
                    "tags": ["nanochat-tango", "generator", "tango"]}
    assert {line for line in lines if line.lstrip().startswith("#")} == OURS
    assert not any(re.fullmatch(r"\s*(-{3,}|={3,})\s*", line) for line in lines)
    assert not any("<" in re.sub(r"(`+).+?\1", "", line) for line in lines)


def test_a_licence_with_the_hubs_name_stands_in_the_head(tmp_path):
    origin = {"name": "o/n", "base_models": ["o/n"], "license": "other", "license_name": "a: 'b", "license_link": "# x"}
    data, _ = parts(head(origin, ["t"]) + "\n", tmp_path)
    assert data == {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["t"],
                    "base_model": ["o/n"], "license": "other", "license_name": "a: 'b", "license_link": "# x"}


def test_a_code_span_holds_any_text():
    for text, shown in (("a", "`a`"), ("a`b", "`` a`b ``"), ("``", "``` `` ```"), ("a\n# b", "`a # b`"),
                        ("", "(empty)"), ("a|b", "`a\u2502b`")):
        assert code(text) == shown


@pytest.mark.parametrize("readme, said", [
    (None, {}), ("# no head\n", {}), ("---\n---\n", {}),
    ("---\nlicense: apache-2.0\nbase_model: Qwen/Qwen2.5-0.5B\n---\n",
     {"license": "apache-2.0", "base_models": ["Qwen/Qwen2.5-0.5B"]}),
    ("---\nlicense: other\nlicense_name: llama3\nlicense_link: LICENSE\nbase_model: [a/b, '../x y', 3, c/d]\n---\n",
     {"license": "other", "license_name": "llama3", "license_link": "LICENSE", "base_models": ["a/b", "c/d"]}),
    ("---\nlicense: [mit]\nlicense_name: {a: b}\n---\n", {}), ("---\nlicense: [mit\n---\n", None),
    ("---\n- a\n---\n", None), (b"\xff\xfe", None)])
def test_what_a_folder_says_of_itself_is_kept(readme, said, tmp_path, capsys):
    """None: it cannot be read, which is told."""
    if readme is not None:
        (tmp_path / "README.md").write_bytes(readme if isinstance(readme, bytes) else readme.encode())
    assert origin_of_folder(str(tmp_path), None) == {"name": None, "base_models": [], **(said or {})}
    assert ("WARNING" in capsys.readouterr().out) == (said is None)
    assert origin_of_folder(str(tmp_path), "o/n")["base_models"] == ["o/n"]


def test_a_card_tells_what_is_not_known():
    card, origin = hf_export.model_card("sft", "m", {"step": 3, "user_config": {}}, "meta")
    assert origin == {} and "began as: not known" in card and "licence of that: not known" in card
    assert "None: it is as it was imported." in card and "trained on no task" in card


def test_the_flags_that_differ_are_told_without_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    defaults = {action.dest: action.default for action in tango_rl.make_parser(["--recipe", "dapo"])._actions}
    given = defaults | {"recipe": "dapo", "lr": 0.5, "gsm8k_data": ["/home/someone/a b", "c"], "keep": defaults["keep"]}
    flags = hf_export.flags_of({"stage": "rl", "user_config": given})
    assert flags == ["--lr 0.5", "--gsm8k-data '~/a b' c"]
    own = hf_export.flags_of({"stage": "rl", "user_config": given | {"recipe": "my/own.py", "own_flag": True}})
    assert "--own-flag" in own and json.dumps(own).count("gsm8k") == 1


def test_scores_are_those_of_the_runs_end(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    folder = tmp_path / "runs" / "r"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"words": {"out of distribution": "longer"}}))
    (folder / "summary.json").write_text(json.dumps({
        "steps": 3, "before": {"gen/pass1_in": 0.25, "gen/pass1_out": None},
        "after": {"gen/pass1_in": 0.5, "gen/pass1_out": 0.125, "x | y": 2.0}}))
    meta = {"step": 3, "run": "r", "user_config": {"recipe": "my/own.py", "eval_examples": 64}}
    lines = hf_export.score_lines("rl", "r-gen", meta)
    assert "at most 64 held-out problems" in lines[0]
    assert lines[2:] == ["| score | before | after |", "| --- | --- | --- |",
                         "| `generator greedy pass@1, in distribution` | 25.0 | 50.0 |",
                         "| `generator greedy pass@1, longer` | - | 12.5 |", "| `x \u2502 y` | - | 2.000 |"]
    assert "None were measured" in hf_export.score_lines("rl", "r-gen", meta | {"step": 2})[0]
