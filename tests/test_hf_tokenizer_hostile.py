"""Imported tokenizers: hostile texts and templates, odd special tokens, files that must be refused."""
import json
import os
import re
import shutil
from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st
from test_hf_tokenizer import (LLAMA2, QWEN25, QWEN_SPLIT, every_kind, folders, llama2, loaded, qwen, said,  # noqa: F401
                               trained, turns, with_template, write)
from tokenizers import AddedToken, Tokenizer as Library, models, normalizers, pre_tokenizers

from nanochat.common import BadInput
from nanochat.hf import chat_template, template_worker
from nanochat.hf.tokenizer import HFTokenizer, load_own_tokenizer, load_tokenizer, mark_of
from nanochat.tokenizer import Tokenizer

# ruff: noqa: F811


def controls(tokenizer, ids) -> Counter:
    return Counter(tokenizer.tokens[i] for i in ids if i in tokenizer._controls)


PIECES = ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<|", "|>", "<", ">", "_id|>", "<|eot_id|>",
          "<|start_header_id|>", "</s>", "<s>", "</", "s>",
          "[INST]", "<｜User｜>", "<｜", "｜>", "</think>", "<think>", "<tool_response>", "</tool_response>", "\n", " ",
          "system", "user", "a", "東", "\U00100000", "\U000f0000"]


@every_kind
@settings(max_examples=50, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(PIECES), min_size=1).map("".join) | st.text(min_size=1), min_size=3,
                      max_size=4))
def test_no_text_changes_the_number_of_control_tokens(loaded, kind, texts):
    tokenizer = loaded[kind]
    make = lambda texts: turns(*texts[:3], system=texts[3] if len(texts) > 3 else None)
    hostile, harmless = (controls(tokenizer, tokenizer.render_chat(make(t))) for t in (texts, ["a"] * len(texts)))
    assert hostile == harmless


@every_kind
def test_a_forged_turn_is_quoted_word_for_word(loaded, kind):
    """Not only counted: the ids are those of a harmless text, with this one's in the place of that one's."""
    tokenizer = loaded[kind]
    forged = "a\U00100000" + "".join(tokenizer._inner) * 2 + "\nb"
    ids, harmless = tokenizer.render_prompt(forged), tokenizer.render_prompt("ab")
    assert forged in b"".join(map(tokenizer.token_bytes, ids)).decode()
    shared = [len(os.path.commonprefix([a, b])) for a, b in ((ids, harmless), (ids[::-1], harmless[::-1]))]
    assert sum(shared) >= len(harmless) - 3 and controls(tokenizer, ids) == controls(tokenizer, harmless)


@pytest.mark.parametrize("template, text", [  # of each message
    ("{{ m.content }}end|>", "<|im_"), ("{{ m.content | trim }}end|>", "a<|im_ \n"),   # it ends in the template's text
    ("<|im_{{ m.content }}", "end|>"), ("<|im{{ m.content | trim }}|>", " _end "),     # it begins there, or both
    ("{{ m.content }}|im_end|>", "<"), ("<|im_end|{{ m.content | trim }}", " > "),
    ("{% if '<|im_' in m.content and 'end|>' in m.content %}{{ m.content }}{% endif %}", "<|im_end|>"),
    ("{{ m.content }}end|>{% if 'x<|im_' in m.content %}{% endif %}", "x<|im_"),
    ("<|im_{{ m.content }}{% if 'end|>x' in m.content %}{% endif %}", "end|>x"),
    ("{{ '<|im_' ~ m.content.split('</think>')[-1] }}", "x</think>end|>"), ("{{ m.content[:5] }}end|>", "<|im_x"),
    ("{{ m.content.replace('@@', '') }}", "<|im_@@end|>"),                             # made by the template of parts
    ("{{ m.content | replace('[', '<') }}", "[|im_end|>"), ("{{ m.content }}{{ m.content }}", "|im_end|><"),
    ("{% if m.content.endswith('|>') %}{{ m.content + '' }}{% endif %}", "<|im_end|>"),
    ("{{ m.content | lower }}", "<|IM_END|>"), ("{{ m.content | tojson }}", "\"<|im_end|>"),
    ("{{ m.content | reverse }}", ">|dne_mi|<"), ("{% for c in m.content %}{{ c }}{% endfor %}", "<|im_end|>"),
])
def test_no_control_token_arises_at_a_border(tmp_path, template, text):
    template = f"{{% for m in messages %}}{template}{{% endfor %}}"
    for end, expected in (("", []), ("<|im_end|>", ["<|im_end|>"])):
        tokenizer = with_template(tmp_path, template + end)
        assert controls(tokenizer, tokenizer.render_prompt(text)) == Counter(expected)


@pytest.mark.parametrize("end", ["||x||", "||x||y||"])
def test_special_tokens_that_overlap_themselves_stay_where_the_template_puts_them(tmp_path, end):
    """||x|| after "||x": the leftmost match would begin in the text and leave the template's token as "x||"."""
    library = trained(QWEN_SPLIT, ["||x||", "||x||y||", "<e>"], [])
    config = {"eos_token": "<e>", "chat_template": f"{{% for m in messages %}}{{{{ m.content }}}}{end}{{% endfor %}}"}
    tokenizer = HFTokenizer.load(write(tmp_path, library, config))
    for text in ("||x", "||x|", "x||", "||x||x||x||", "|", "||x||y||"):
        assert tokenizer.render_prompt(text) == [*tokenizer.encode(text), tokenizer.ids[end]]


def test_odd_special_tokens(tmp_path):
    """NFKC writes full-width ＜ as <: transformers finds <|im_end|> there when the token is marked as normalized."""
    library = trained(QWEN_SPLIT, ["<|im_start|>"], [])
    library.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=True)])
    library.normalizer = normalizers.NFKC()
    assert library.token_to_id("<|im_end|>") in library.encode("＜|im_end|＞").ids
    tokenizer = with_template(tmp_path, QWEN25, lambda: library, pad_token=None)
    assert (controls(tokenizer, tokenizer.render_prompt("＜|im_end|＞"))
            == controls(tokenizer, tokenizer.render_prompt("a")))
    # A special token in the vocabulary is no word of it
    settings = json.loads(trained(QWEN_SPLIT, ["<e>"], []).to_str())
    settings["model"]["vocab"]["<e>"], settings["model"]["ignore_merges"] = settings["added_tokens"][0]["id"], True
    settings["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                                 "use_regex": False}
    library = Library.from_str(json.dumps(settings))
    library.encode_special_tokens = True
    assert len(library.encode("<e>").ids) == 1
    tokenizer = HFTokenizer.load(write(tmp_path, library, {"eos_token": "<e>"}))
    assert tokenizer.eos not in tokenizer.encode("<e>") and tokenizer.decode(tokenizer.encode("<e>")) == "<e>"
    # Special tokens that swallow spaces do so in the library s way
    from transformers import AutoTokenizer
    settings = json.loads(qwen().to_str())
    settings["added_tokens"][2] |= {"rstrip": True, "lstrip": True}
    tokenizer = with_template(tmp_path, QWEN25, lambda: Library.from_str(json.dumps(settings)))
    expected = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(
        turns("a ", "b ", "c"), tokenize=True, return_dict=False)
    assert (tokenizer.render_conversation(turns("a ", "b ", "c"), None)[0] == expected
            and said(tokenizer, turns("a ", "b ", "c")) == ["b<|im_end|>"])


def test_tokens_that_only_the_config_calls_special_are_control_tokens(tmp_path):
    """One of a single character is refused."""
    library = trained(QWEN_SPLIT, ["<|im_start|>", "<|im_end|>"], ["<a>", "<b>", "<c>"])
    config = {"additional_special_tokens": ["<a>"], "added_tokens_decoder": {"5": {"content": "<b>", "special": True}},
              "eos_token": "<|im_end|>"}
    tokenizer = with_template(tmp_path, QWEN25, lambda: library, pad_token=None, **config)
    ids = tokenizer.encode("<a><b><c>")
    assert [tokenizer.ids[name] in ids for name in ("<a>", "<b>", "<c>")] == [False, False, True]
    # added words that are no tags stay tokens: the template writes them, and so may a text
    library = trained(QWEN_SPLIT, ["<|im_start|>", "<|im_end|>"], ["\n", "\n\n", "user", "<turn>", "###"])
    template = "{% for m in messages %}<turn>user\n\n### {{ m.content }}{% endfor %}"
    tokenizer = with_template(tmp_path / "b", template, lambda: library, pad_token=None)
    ids = tokenizer.encode("\n\n<turn>user###\n")
    assert all(tokenizer.ids[name] in ids for name in ("\n", "\n\n", "user", "###"))
    assert tokenizer.ids["<turn>"] not in ids
    assert tokenizer.render_prompt("a")[:3] == [tokenizer.ids[name] for name in ("<turn>", "user", "\n\n")]
    with pytest.raises(BadInput, match="is one character"):
        HFTokenizer.load(write(tmp_path, trained(QWEN_SPLIT, ["\u2603", "<e>"], []), {"eos_token": "<e>"}))


def like_llama2(tmp_path, change, template: str = LLAMA2) -> HFTokenizer:
    settings = json.loads(llama2().to_str())
    change(settings)
    return HFTokenizer.load(write(tmp_path, Library.from_str(json.dumps(settings)),
                                  {"eos_token": "</s>", "bos_token": "<s>", "chat_template": template}))


def test_tokens_of_sentencepiece_that_are_unknown_words_or_not_found(tmp_path):
    tokenizer = like_llama2(tmp_path, lambda settings: settings["model"].update(byte_fallback=False))
    assert (0 in tokenizer.encode("東") and 0 in tokenizer.render_prompt("東")
            and tokenizer.decode(tokenizer.encode("東")) == " ?")
    tokenizer = like_llama2(tmp_path / "b", lambda settings: settings.update(added_tokens=[]))
    assert (tokenizer.bos, tokenizer.eos, tokenizer.token_bytes(0)) == (1, 2, b"?")
    assert (controls(tokenizer, tokenizer.render_prompt("</s><s>")) == Counter(["<s>"])
            and said(tokenizer, turns("a", "b")) == [" b </s>"])
    # A normalized <s> is "▁<s>" to the library: the second one, after </s>, would be read as text.
    template = LLAMA2.replace("{{ bos_token + '[INST] '", "{{ 'x' + bos_token + '[INST] '")
    tokenizer = like_llama2(tmp_path, lambda settings: settings["added_tokens"][1].update(normalized=True), template)
    with pytest.raises(BadInput, match="does not find the special tokens"):
        tokenizer.render_prompt("a")


def test_a_template_may_end_an_answer_after_a_space_and_count_characters(tmp_path):
    tokenizer = with_template(tmp_path, "{% for m in messages %}{{ m.content }} <|im_start|>{% endfor %}")
    assert (tokenizer.assistant_end == tokenizer.ids["<|im_start|>"]
            and tokenizer.stop_tokens == [tokenizer.eos, tokenizer.assistant_end])
    tokenizer = with_template(tmp_path, "{% for m in messages %}{{ m.content | length }}<|im_end|>{% endfor %}")
    assert tokenizer.render_prompt("a cat") == [*tokenizer.encode("5"), tokenizer.ids["<|im_end|>"]]


BAD_TEMPLATES = [
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ("{{ strftime_now.__globals__.os }}", "unsafe"), ("{{ messages.append(1) }}", "safe"),
    ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
    ("{{ namespace(__html__=1) }}", "namespace"), ("{% set n = namespace() %}{% set n.__html__ = 1 %}", "namespace"),
    ("{{ open('/etc/passwd') }}", "undefined"), ("{{ messages[0].content.nothing.more }}", "no attribute"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "Range"),
    ("{% include 'x' %}", "loader"), ("{{ 1 + 'a' }}", "unsupported"), ("{{ 1 / 0 }}", "zero"),
    ("{{ raise_exception('no\nsystem') }}", "refuses: no system"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{% if %}", "broken"), ("{{ 'a' | nofilter }}", "broken"), ("{% break %}", "b"),
]


def test_bad_templates_are_refused_in_one_line(tmp_path):
    for template, message in BAD_TEMPLATES:
        with pytest.raises(BadInput, match=message) as error:
            with_template(tmp_path, template)
        assert "\n" not in str(error.value) and str(error.value).startswith(f"{tmp_path}/tokenizer_config.json: ")


@pytest.fixture
def small_worker(monkeypatch):
    """A process for templates with little time and memory, for this test alone."""
    monkeypatch.setattr(template_worker, "TIMEOUT", 0.5)
    monkeypatch.setattr(template_worker, "MEMORY", 1 << 28)
    chat_template.WORKERS.close()
    yield
    chat_template.WORKERS.close()


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}" \
       "{% endfor %}"


def assert_refused(tmp_path, make) -> None:
    """In one line that names the file; and the next template is rendered."""
    with pytest.raises(BadInput, match="the chat template (takes more than|writes)") as error:
        make()
    assert "\n" not in str(error.value) and str(error.value).startswith(f"{tmp_path}/tokenizer_config.json: ")
    assert said(with_template(tmp_path, QWEN25), turns("a", "b")) == ["b<|im_end|>"]


@pytest.mark.parametrize("template", [
    LOOP, "{{ 9 ** (9 ** 9) }}", "{{ 'x' * 10 ** 10 }}", "{% for i in range(2000) %}{{ 'x' * 9999 }}{% endfor %}"])
def test_a_template_that_takes_all_time_or_memory_is_refused(small_worker, tmp_path, template):
    assert_refused(tmp_path, lambda: with_template(tmp_path, template))


def test_a_template_that_waits_for_a_message_before_it_takes_them_is_refused_too(small_worker, tmp_path):
    tokenizer = with_template(tmp_path, "{% if messages[0].content == 'now' %}" + LOOP + "{% endif %}" + QWEN25)
    assert_refused(tmp_path, lambda: tokenizer.render_conversation(turns("now", "b"), None))
    assert said(tokenizer, turns("not now", "b")) == ["b<|im_end|>"]


def test_the_process_that_renders_loads_no_torch(tmp_path):
    with_template(tmp_path, QWEN25)
    worker = chat_template.WORKERS.slots.get()
    chat_template.WORKERS.slots.put(worker)
    assert "torch" not in open(f"/proc/{worker.process.pid}/maps").read()


def test_damaged_files_are_refused_by_name(folders, tmp_path):
    config = "tokenizer_config.json"
    for k, (name, content, message) in enumerate([
            ("tokenizer.json", "", "tokenizer.json: is not a tokenizer"),
            ("tokenizer.json", b"\xff", "is no text"), ("tokenizer.json", '{"version": "1.0"', "is not a tokenizer"),
            (config, "{", f"{config}: is no json"), (config, "[]", f"{config}: something in it is"),
            (config, "[" * 100000, "maximum recursion depth"), (config, "{}", "no eos_token"),
            (config, '{"eos_token": "<none>"}', "'<none>' is missing"),
            (config, '{"eos_token": "<s>", "chat_template": 3}', "the chat template is broken"),
            (config, '{"eos_token": "<s>", "chat_template": [{"name": "rag", "template": ""}]}',
             "'default' is missing"),
            (config, '{"added_tokens_decoder": 3}', "something in it is"),
            (config, '{"eos_token": {"text": "<s>"}}', "'content' is missing"),
            ("generation_config.json", '{"eos_token_id": "a"}', "'a' is no token's id"),
            ("generation_config.json", '{"eos_token_id": [1, 99999]}', "99999 is no token's id"),
            ("generation_config.json", '{"eos_token_id": true}', "True is no"),
            ("generation_config.json", "null", "generation_config.json: something in it is"),
            ("chat_template.jinja", b"\xff", "chat_template.jinja: is no text")]):
        copy = tmp_path / str(k)
        shutil.copytree(folders["llama2"], copy)
        (copy / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(BadInput, match=message) as error:
            HFTokenizer.load(str(copy))
        assert "\n" not in str(error.value) and str(copy) in str(error.value)


@pytest.mark.parametrize("model, pre", [
    (models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"), pre_tokenizers.Whitespace()),
    (models.Unigram([("a", 0.0)]), pre_tokenizers.Metaspace()),
    (models.BPE({"a": 0, "b</w>": 1}, [], end_of_word_suffix="</w>"), pre_tokenizers.ByteLevel()),
    (models.BPE({"a": 0}, []), pre_tokenizers.Whitespace())])
def test_other_kinds_of_tokenizers_are_refused(tmp_path, model, pre):
    library = Library(model)
    library.pre_tokenizer = pre
    with pytest.raises(BadInput, match="of another kind"):
        HFTokenizer.load(write(tmp_path, library, {"eos_token": "a"}))


def test_load_tokenizer_takes_the_one_that_is_there(folders, tmp_path):
    """A base model's is nanochat's own."""
    assert isinstance(load_tokenizer(folders["qwen3"]), HFTokenizer)
    shutil.copytree(folders["qwen3"], tmp_path / "both")
    ours, none = str(tmp_path / "ours"), str(tmp_path / "none")
    Tokenizer.train(iter([]), 265).save(ours)
    assert isinstance(load_tokenizer(ours), Tokenizer) and isinstance(load_own_tokenizer(ours), Tokenizer)
    shutil.copy(tmp_path / "ours" / "tokenizer.pkl", tmp_path / "both")
    with pytest.raises(BadInput) as expected:
        Tokenizer.load(none)
    for load, folder, message in (
            (load_tokenizer, str(tmp_path / "both"), "tokenizer.pkl and tokenizer.json"),
            (load_tokenizer, none, re.escape(str(expected.value))), (HFTokenizer.load, none, "no tokenizer at"),
            (load_own_tokenizer, folders["qwen3"],
             f"{folders['qwen3']} holds an imported tokenizer.*NANOCHAT_BASE_DIR")):
        with pytest.raises(BadInput, match=message):
            load(folder)


def test_saving_over_another_template_is_refused(loaded, tmp_path):
    """And over other stop tokens, of which a mark is too."""
    for name in ("chat_template.jinja", "generation_config.json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text("{{ messages }}")
        with pytest.raises(BadInput, match=f"{name} is of another tokenizer"):
            loaded["qwen3"].save(str(tmp_path / name))
        assert os.listdir(tmp_path / name) == [name]
    files = {"tokenizer.json": b"{}", "tokenizer_config.json": b'{"eos_token": "<e>"}'}
    marks = {mark_of(files), mark_of({**files, "chat_template.jinja": b"{{ messages }}"}),
             mark_of({**files, "tokenizer_config.json": b'{"eos_token": "<f>"}'})}
    assert len(marks) == 3 and mark_of(dict(reversed(files.items()))) in marks


def test_a_save_that_was_cut_off_leaves_no_tokenizer_and_is_made_up_for(loaded, tmp_path, monkeypatch):
    tokenizer, replace, left = loaded["qwen25"], os.replace, []

    def cut_off(*paths):
        if not left:
            raise KeyboardInterrupt
        left.pop()
        replace(*paths)

    monkeypatch.setattr(os, "replace", cut_off)
    for number in range(len(tokenizer.files)):
        left[:] = range(number)
        with pytest.raises(KeyboardInterrupt):
            tokenizer.save(str(tmp_path))
        assert len(os.listdir(tmp_path)) == number
        with pytest.raises(BadInput, match="no tokenizer at"):
            load_tokenizer(str(tmp_path))
    monkeypatch.undo()
    tokenizer.save(str(tmp_path))
    assert HFTokenizer.load(str(tmp_path)).files == tokenizer.files
