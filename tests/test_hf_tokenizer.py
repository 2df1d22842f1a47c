"""Imported tokenizers against transformers: ids, chat templates, masks; hostile texts and templates, files that must be
refused."""
import json
import os
import re
import shutil
import unicodedata
from collections import Counter
from datetime import datetime
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import (AddedToken, Regex, Tokenizer as Library, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

from nanochat.common import BadInput
from nanochat.hf import chat_template, template_worker
from nanochat.hf.tokenizer import HFTokenizer, load_own_tokenizer, load_tokenizer, mark_of
from nanochat.tokenizer import Tokenizer

SETTINGS = settings(max_examples=60, deadline=None)
TEXT = ["the cat sat on the mat, and the other cat sat there too; 1234567890 5678!\n",
        "<think><step>12 + 3 = 15</step></think>\n\n",
        "user system assistant You are a helpful assistant. Today Date: 26 Jul\n", "déjà vu — 東京 🙂 don't\t\n",
        "[INST] what is it? [/INST] im_end"] * 8
QWEN_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # noqa: E501
LLAMA_SPLIT = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")

QWEN25 = """{%- if messages[0]['role'] == 'system' %}{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{%- if message.role != "system" or not loop.first %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""  # noqa: E501
QWEN3 = """{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user"
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}{%- set reasoning_content = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
            {%- set reasoning_content = message.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""  # noqa: E501
LLAMA3 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + strftime_now("%d %b") + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}{{- raise_exception("no tools") }}{%- endif %}
{%- for message in messages %}
    {%- generation %}{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}{%- endgeneration %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""  # noqa: E501
LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set said = messages[0]['content'] %}
{% else %}{% set rest = messages %}{% set said = false %}{% endif %}{% for message in rest %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and said != false %}{% set content = '<<SYS>>\\n' + said + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"""  # noqa: E501
DEEPSEEK = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'system' %}{{ m.content }}
{%- else %}{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>' }}{% endif %}"""  # noqa: E501


def trained(split: str, specials: list[str], words: list[str], **trainer) -> Library:
    """A byte-level BPE of 600 merges or fewer, special tokens after it, then words that are tokens but not special."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"),
                                                     pre_tokenizers.ByteLevel(False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(TEXT,
                                trainers.BpeTrainer(vocab_size=600,
                                                    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
                                                    show_progress=False))
    library.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    library.add_tokens([AddedToken(w, special=False, normalized="｜" in w) for w in words])
    return library


def qwen() -> Library:
    library = trained(QWEN_SPLIT, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<think>", "</think>"])
    library.normalizer = normalizers.NFC()
    return library


def llama3() -> Library:
    library = trained(LLAMA_SPLIT, ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                                    "<|eot_id|>"], [])
    library.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[
        ("<|begin_of_text|>", library.token_to_id("<|begin_of_text|>"))])
    return library


def llama2() -> Library:
    """Like sentencepiece: every byte has a token such as <0x0A>, spaces are U+2581."""
    library = Library(models.BPE(unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    names = ["<unk>", "<s>", "</s>"]
    text = [line for line in TEXT if "東" not in line]
    # while training, as sentencepiece: no merge over a space's left side
    library.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    library.train_from_iterator(text, trainers.BpeTrainer(vocab_size=700, special_tokens=names
                                                          + [f"<0x{i:02X}>" for i in range(256)], show_progress=False))
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    settings = json.loads(library.to_str())
    settings["added_tokens"], settings["pre_tokenizer"] = settings["added_tokens"][:3], None
    settings["model"] |= {"byte_fallback": True, "fuse_unk": True}
    return Library.from_str(json.dumps(settings))


CHATML_NAMES = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}
HEADER_NAMES = {"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>", "__type": "AddedToken"}}
KINDS = {  # library tokenizer, tokenizer_config.json, generation_config.json
    "qwen25": (qwen, {**CHATML_NAMES, "chat_template": QWEN25},
               {"eos_token_id": ["<|im_end|>", "<|endoftext|>"], "bos_token_id": "<|endoftext|>"}),
    "qwen3": (qwen, {**CHATML_NAMES, "chat_template": [{"name": "tool_use", "template": "no"},
                                                       {"name": "default", "template": QWEN3}]}, None),
    "llama3": (llama3, {**HEADER_NAMES, "chat_template": LLAMA3}, {"eos_token_id": "<|end_of_text|>"}),
    "llama2": (llama2, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": LLAMA2}, None),
    "deepseek": (lambda: trained(LLAMA_SPLIT, ["<｜begin｜>", "<｜end｜>"],
                                 ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"]),
                 {"bos_token": "<｜begin｜>", "eos_token": "<｜end｜>", "chat_template": DEEPSEEK}, None),
    "base": (llama3, HEADER_NAMES, None),
}


def write(folder, library: Library, config: dict | None, generation: dict | None = None) -> str:
    """A folder in the format of Hugging Face; names of tokens in `generation` are written as ids."""
    os.makedirs(folder, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    if generation is not None:
        to_id = lambda value: [to_id(v) for v in value] if isinstance(value, list) else library.token_to_id(value)
        (folder / "generation_config.json").write_text(
            json.dumps({name: to_id(value) for name, value in generation.items()}))
    return str(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: write(root / kind, make(), config, generation) for kind, (make, config, generation) in KINDS.items()}


@pytest.fixture(scope="module")
def loaded(folders) -> dict[str, HFTokenizer]:
    return {kind: HFTokenizer.load(folder) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def references(folders) -> dict:
    from transformers import AutoTokenizer
    return {kind: AutoTokenizer.from_pretrained(folder) for kind, folder in folders.items()}


every_kind = pytest.mark.parametrize("kind", KINDS)


def with_template(tmp_path, template: str, make=qwen, **config) -> HFTokenizer:
    return HFTokenizer.load(write(tmp_path, make(), {**CHATML_NAMES, "chat_template": template, **config}))


def turns(*texts: str, system: str | None = None) -> list[dict]:
    first = [] if system is None else [{"role": "system", "content": system}]
    return first + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


CONVERSATIONS = [
    turns("what is 12 + 3?"), turns("what is 12 + 3?", "15"), turns("a", "b", "c"), turns("a", "b", "c", "d", "e"),
    turns("hello", system="Be brief."),
    turns("a", "b", system=""), turns(""), turns("", ""), turns("  spaces at both ends  ", " so here\t"),
    turns("\nlines\n\n", "\n\nhere\n", "\n"), turns("東京 🙂 e\u0301 ﬁ \u200d \x00", "déjà\r\nvu\u3000", "don't"),
    turns("code:\n\tif a < b and b > c: x |= 1 [0] <|", "|> <im_end>", "</step> <thin"),
    turns("think", "<think>\nfirst\n</think>\n\nthen", "again"), turns("a", "x</think>y</think>z"),
    turns("<tool_response>no</tool_response>", system="s"), turns("a\ue000\U00100000b", "\U000f0000c", system=" s "),
]


@every_kind
def test_texts_and_conversations_have_the_ids_of_transformers(loaded, references, kind):
    texts = [text for messages in CONVERSATIONS for text in (message["content"] for message in messages)] + TEXT[:5]
    expected = [references[kind].encode(text, add_special_tokens=False) for text in texts]
    assert [loaded[kind].encode(text) for text in texts] == expected
    if kind == "base":
        return
    for messages in CONVERSATIONS:
        expected = [references[kind].apply_chat_template(messages, add_generation_prompt=generate, tokenize=True,
                                                         return_dict=False) for generate in (False, True)]
        tokenizer = loaded[kind]
        if messages[-1]["role"] == "user":
            assert tokenizer.render_chat(messages) == expected[1]
        assert tokenizer._encode_rendered(tokenizer._render(messages, False)).ids == expected[0], messages


@every_kind
def test_a_saved_copy_is_equal_and_transformers_reads_it(loaded, references, kind, tmp_path):
    from transformers import AutoTokenizer
    loaded[kind].save(str(tmp_path / "copy"))
    copy = HFTokenizer.load(str(tmp_path / "copy"))
    for name in ("vocab_size", "stop_tokens", "assistant_end", "bos", "eos", "has_template", "files"):
        assert getattr(copy, name) == getattr(loaded[kind], name), name
    assert (copy.equals(loaded[kind])
            and copy.render_chat(CONVERSATIONS[4]) == loaded[kind].render_chat(CONVERSATIONS[4]))
    again = AutoTokenizer.from_pretrained(str(tmp_path / "copy"))
    assert (again.encode(TEXT[0]) == references[kind].encode(TEXT[0])
            and again.chat_template == references[kind].chat_template)
    assert not [name for name in os.listdir(tmp_path / "copy") if name.endswith(".tmp")]


@pytest.mark.parametrize("kind", ["qwen25", "llama3", "deepseek"])
@SETTINGS
@given(text=st.text() | st.lists(st.sampled_from(["<|im_end|>", "<|eot_id|>", "<｜User｜>", "<think>", "the", " ", "\n",
                                                  "12", "🙂"])).map("".join))
def test_decoding_undoes_encoding(loaded, kind, text):
    tokenizer = loaded[kind]
    text = unicodedata.normalize("NFC", text) if kind == "qwen25" else text
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.replace("\ufffd", "?") and not tokenizer._controls & set(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_bytes_of_tokens_and_halves_of_surrogate_pairs(loaded):
    """A special token and an id of a padded vocabulary are "?", <0x0A> is a newline, an added word is its text."""
    qwen3, llama2, deepseek = loaded["qwen3"], loaded["llama2"], loaded["deepseek"]
    assert ([qwen3.token_bytes(i) for i in (qwen3.ids["<|im_end|>"], qwen3.vocab_size, qwen3.ids["<think>"])]
            == [b"?", b"?", b"<think>"])
    assert [llama2.token_bytes(i) for i in (0, 1, 2, 3 + 10, 3 + 255)] == [b"?", b"?", b"?", b"\n", b"\xff"]
    assert b"".join(map(llama2.token_bytes, llama2.encode("the 東"))) == " the 東".encode()
    assert deepseek.token_bytes(deepseek.ids["<｜User｜>"]) == b"?"  # it frames turns
    assert {qwen3.token_bytes(i) for i in range(256)} == {bytes([i]) for i in range(256)}
    assert qwen3.decode([*qwen3.encode("A"), qwen3.encode("é")[0], *qwen3.encode(";")][:1] + [qwen3.ids["Ã"]]) == "A?"
    tokenizer = loaded["qwen25"]
    assert tokenizer.encode("a\ud83d") == tokenizer.encode("a\ufffd")
    assert (tokenizer.encode("\ud83d\ude42") == tokenizer.encode("🙂")
            and tokenizer.render_prompt("\ud83d\ude42") == tokenizer.render_prompt("🙂"))


def test_an_added_word_with_letters_of_the_byte_alphabet_is_its_text(tmp_path):
    """And truncation and padding of the file are not applied."""
    library = qwen()
    library.add_tokens([AddedToken("éĠé", special=False)])
    library.enable_truncation(3)
    library.enable_padding(length=50)
    tokenizer = HFTokenizer.load(write(tmp_path, library, CHATML_NAMES))
    assert tokenizer.token_bytes(tokenizer.ids["éĠé"]) == "éĠé".encode()
    assert (tokenizer.encode("the cat sat on the mat")
            == HFTokenizer.load(write(tmp_path / "b", qwen(), CHATML_NAMES)).encode("the cat sat on the mat"))


def test_stop_tokens_bos_and_the_end_of_an_answer(loaded):
    """The generation config's ids first, then eos and the end of a turn."""
    found = {kind: [[t.tokens[i] for i in t.stop_tokens], t.tokens[t.assistant_end], t.tokens.get(t.bos),
                    t.has_template] for kind, t in loaded.items()}
    assert found == {
        "qwen25": [["<|im_end|>", "<|endoftext|>"], "<|im_end|>", "<|endoftext|>", True],
        "qwen3": [["<|im_end|>"], "<|im_end|>", None, True],
        "llama3": [["<|end_of_text|>", "<|eot_id|>"], "<|eot_id|>", "<|begin_of_text|>", True],
        "llama2": [["</s>"], "</s>", "<s>", True],
        "deepseek": [["<｜end｜>"], "<｜end｜>", "<｜begin｜>", True],
        "base": [["<|end_of_text|>"], "<|end_of_text|>", "<|begin_of_text|>", False],
    }


def test_config_json_is_asked_only_without_a_generation_config(tmp_path):
    folder = write(tmp_path, qwen(), {"chat_template": QWEN25})
    end, text = (qwen().token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>"))
    with pytest.raises(BadInput, match="no eos_token"):
        HFTokenizer.load(folder)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": text, "bos_token_id": end}))
    tokenizer = HFTokenizer.load(folder)
    assert (tokenizer.stop_tokens, tokenizer.bos, tokenizer.eos) == ([text, end], end, text)
    tokenizer.save(str(tmp_path / "copy"))
    assert HFTokenizer.load(str(tmp_path / "copy")).stop_tokens == [text, end]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    tokenizer = HFTokenizer.load(folder)
    assert (tokenizer.stop_tokens, tokenizer.bos) == ([end], None) and "config.json" not in tokenizer.files
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")  # comes before the config's
    tokenizer = HFTokenizer.load(folder)
    assert tokenizer.decode(tokenizer.render_prompt("the")) == "the!" and tokenizer.assistant_end == tokenizer.eos


def test_special_names_and_sizes(loaded):
    tokenizer = loaded["qwen3"]
    assert tokenizer.special("</think>") == tokenizer.vocab_size - 1
    for name in ("<|python_start|>", "the", ""):
        with pytest.raises(BadInput, match="this tokenizer has no"):
            tokenizer.special(name)
    tokenizer.check_model("model", SimpleNamespace(vocab_size=tokenizer.vocab_size))
    tokenizer.check_model("model", SimpleNamespace(vocab_size=tokenizer.vocab_size + 100))
    with pytest.raises(BadInput, match="the model has a vocabulary of"):
        tokenizer.check_model("model", SimpleNamespace(vocab_size=tokenizer.vocab_size - 1))


def test_what_equal_ids_leave_open_is_told(loaded, folders):
    qwen25, qwen3 = loaded["qwen25"], loaded["qwen3"]
    templates, stops = qwen25.tells_apart(qwen3)
    assert templates == (f"the chat template of {folders['qwen25']}/tokenizer_config.json in place of that of "
                         f"{folders['qwen3']}/tokenizer_config.json")
    assert stops == "the stop tokens <|im_end|> <|endoftext|> in place of <|im_end|>"
    assert len(loaded["llama3"].tells_apart(loaded["base"])) == 2
    assert qwen3.tells_apart(HFTokenizer(qwen3.files, "elsewhere")) == []


def test_equals_compares_ids_not_templates(loaded, tmp_path):
    assert loaded["qwen25"].equals(loaded["qwen3"]) and loaded["llama3"].equals(loaded["base"])
    assert not loaded["qwen3"].equals(loaded["llama3"]) and not loaded["qwen3"].equals(Tokenizer.train(iter([]), 265))
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    for k, change in enumerate((lambda s: s["model"]["merges"].reverse(), lambda s: s.update(pre_tokenizer=split),
                                lambda s: s["added_tokens"][-1].update(rstrip=True),
                                lambda s: s.update(normalizer={"type": "NFKC"}))):
        settings = json.loads(qwen().to_str())
        change(settings)
        other = HFTokenizer.load(write(tmp_path / str(k), Library.from_str(json.dumps(settings)), CHATML_NAMES))
        assert not loaded["qwen25"].equals(other)


def said(tokenizer, messages) -> list[str]:
    """The trained parts of a conversation as text, special tokens by name."""
    ids, mask = tokenizer.render_conversation(messages, None)
    parts = [""]
    for i, trained in zip(ids, mask, strict=True):
        if trained:
            parts[-1] += tokenizer.tokens[i] if i in tokenizer._controls else tokenizer.decode([i])
        elif parts[-1]:
            parts.append("")
    return [part for part in parts if part]


@pytest.mark.parametrize("kind, expected", [
    ("qwen25", ["b<|im_end|>", "d<|im_end|>"]), ("llama3", ["b<|eot_id|>", "d<|eot_id|>"]),
    ("llama2", [" b </s>", " d </s>"]), ("base", ["b<|end_of_text|>", "d<|end_of_text|>"])])
def test_the_mask_is_one_on_what_the_assistant_says_and_its_end(loaded, kind, expected):
    """The template's own words after the prompt are trained too."""
    messages = turns("a", "b", "c", "d", "e", system="s")
    assert said(loaded[kind], messages) == expected and messages == turns("a", "b", "c", "d", "e", system="s")
    assert said(loaded[kind], turns("a", "b", "c", "d")) == expected
    assert said(loaded[kind], turns("a")) == []
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": ""}]
    assert said(loaded[kind], [*turns("a"), {"role": "assistant", "content": parts}]) == expected[:1]
    thought = "<think>\nb\n</think>\n\nc"
    assert said(loaded["qwen3"], turns("a", thought)) == [f"{thought}<|im_end|>"]


def test_wrong_conversations_are_refused_and_templates_that_write_turns_otherwise_later(loaded):
    tokenizer = loaded["qwen25"]
    for messages in ([], turns("a")[::-1] * 2, turns("a", "b")[::-1], [{"role": "system", "content": "s"}],
                     turns("a") + turns("b", system="s"),
                     [{"role": "tool", "content": "a"}], [{"role": "user", "content": None}],
                     [{"role": "user", "content": [{"type": "text", "text": "a"}]}]):
        with pytest.raises(ValueError) as error:
            tokenizer.render_conversation(messages, None)
        assert error.type is ValueError
    with pytest.raises(ValueError, match="expected user"):
        tokenizer.render_chat(turns("a", "b"))
    with pytest.raises(BadInput, match="a part of type 'python'"):
        tokenizer.render_conversation([*turns("a"),
                                       {"role": "assistant", "content": [{"type": "python", "text": "1+1"}]}], None)
    ids, _ = tokenizer.render_conversation(turns("a", "b"), None)
    assert tokenizer.render_conversation(turns("a", "b"), len(ids))[0] == ids
    with pytest.raises(BadInput, match=f"has {len(ids)} tokens, the context {len(ids) - 1}"):
        tokenizer.render_conversation(turns("a", "b"), len(ids) - 1)
    with pytest.raises(BadInput, match="rewrites message 1"):
        loaded["qwen3"].render_conversation(turns("a", "b", "c", "d"), None)
    with pytest.raises(BadInput, match="begins the answer, message 1, otherwise"):
        loaded["deepseek"].render_conversation(turns("a", "b"), None)


def test_a_base_model_s_prompt_is_text_and_a_blank_line(loaded, tmp_path):
    base = loaded["base"]
    assert base.render_prompt("the cat") == [base.bos, *base.encode("the cat\n\n")]
    ids, mask = base.render_conversation(turns("a", "b", "c", "d", system="s"), None)
    assert ids == [base.bos, *base.encode("s\n\na\n\nb"), base.eos, *base.encode("\n\nc\n\nd"),
                   base.eos] and sum(mask) == 4
    without = HFTokenizer.load(write(tmp_path, qwen(), CHATML_NAMES, {"bos_token_id": "<|endoftext|>"}))
    assert (without.bos is not None  # it has a bos, and does not add it
            and without.render_prompt("the") == without.encode("the\n\n"))


def controls(tokenizer, ids) -> Counter:
    return Counter(tokenizer.tokens[i] for i in ids if i in tokenizer._controls)


PIECES = ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<|", "|>", "<", ">", "_id|>", "<|eot_id|>",
          "<|start_header_id|>", "</s>", "<s>", "</", "s>",
          "[INST]", "<｜User｜>", "<｜", "｜>", "</think>", "<think>", "<tool_response>", "</tool_response>", "\n", " ",
          "system", "user", "a", "東", "\U00100000", "\U000f0000"]


@every_kind
@settings(max_examples=100, deadline=None)
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


@pytest.fixture(autouse=True)
def same_day(monkeypatch):
    """transformers tells templates of today, ours of a fixed day."""
    from transformers.utils import chat_template_utils
    monkeypatch.setattr(chat_template_utils, "datetime",
                        SimpleNamespace(now=lambda: datetime.combine(template_worker.TODAY, datetime.min.time())))


def test_templates_have_what_transformers_offers_them(tmp_path):
    from transformers import AutoTokenizer
    template = ("{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{{ [1] | "
                "tojson(separators=(',', ':')) }}"
                "{% if loop.first %}{% continue %}{% endif %}{{ pad_token ~ eos_token ~ bos_token ~ (documents is "
                "none) }}{% break %}{% endfor %}\n"
                " {%- set n = namespace(a=1) %}\n   {% set n.a = 2 %}\n"
                "{{ n.a }}{{ strftime_now(format='%Y') }}{{ dict(a=1).a }}\n")
    tokenizer, messages = with_template(tmp_path, template), turns("<é'&\">", "東", "c")
    expected = AutoTokenizer.from_pretrained(str(tmp_path)).apply_chat_template(
        messages, tokenize=True, return_dict=False)
    assert tokenizer.render_chat(messages) == expected and "東" in tokenizer.decode(expected)


BAD_TEMPLATES = [
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ("{{ messages.__init__.__globals__['os'] }}", "unsafe"),
    ("{{ strftime_now.__globals__.os }}", "unsafe"), ("{{ messages.append(1) }}", "safe"),
    ("{{ '{0.__class__.__mro__}'.format(1) }}", "unsafe"),
    ("{{ namespace(__html__=1) }}", "namespace"), ("{% set n = namespace() %}{% set n.__html__ = 1 %}", "namespace"),
    ("{{ open('/etc/passwd') }}", "undefined"), ("{{ messages[0].content.nothing.more }}", "no attribute"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "Range"),
    ("{% include 'x' %}", "loader"), ("{{ 1 + 'a' }}", "unsupported"), ("{{ 1 / 0 }}", "zero"),
    ("{{ raise_exception('no\nsystem') }}", "refuses: no system"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{% if %}", "broken"), ("{% for m in messages %}", "broken"), ("{{ 'a' | nofilter }}", "broken"),
    ("{% break %}", "b"),
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
DOUBLE = "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}"


def assert_refused(tmp_path, make) -> None:
    """In one line that names the file; and the next template is rendered."""
    with pytest.raises(BadInput, match="the chat template (takes more than|writes)") as error:
        make()
    assert "\n" not in str(error.value) and str(error.value).startswith(f"{tmp_path}/tokenizer_config.json: ")
    assert said(with_template(tmp_path, QWEN25), turns("a", "b")) == ["b<|im_end|>"]


@pytest.mark.parametrize("template", [
    LOOP, DOUBLE, "{{ 'x' * 10 ** 10 }}", "{{ 9 ** (9 ** 9) }}", "{{ 'x' | center(10 ** 10) }}",
    "{{ range(99999) | list * 99999 }}",
    "{% for i in range(2000) %}{{ 'x' * 9999 }}{% endfor %}"])
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
