"""Imported tokenizers against transformers: ids, chat templates, masks."""
import json
import os
import unicodedata
from datetime import datetime
from types import SimpleNamespace

import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import (AddedToken, Regex, Tokenizer as Library, decoders, models, normalizers, pre_tokenizers,
                        processors, trainers)

from nanochat.common import BadInput
from nanochat.hf import template_worker
from nanochat.hf.tokenizer import HFTokenizer
from nanochat.rl.play.play import Play
from nanochat.rl.records.prompts import Prompt
from nanochat.rl.verify.prefixes import forced_answer
from nanochat.tokenizer import Tokenizer
from tasks.formats import PAPER

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

ALPACA = """{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\n\n' }}
{%- elif m.role == 'user' %}{{ '### Instruction:\n' + m.content + '\n\n' }}
{%- else %}{{ '### Response:\n' + m.content + '\n\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"""
GLM = """[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>
{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


def trained(split: str, specials: list[str], words: list[str], **trainer) -> Library:
    """A byte-level BPE of 600 merges or fewer, special tokens after it, then words that are tokens but not special."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"),
                                                     pre_tokenizers.ByteLevel(False, use_regex=False)])
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(TEXT, trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False))
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
GLM_TOKENS = ["<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
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
    "alpaca": (llama3, {**HEADER_NAMES, "chat_template": ALPACA}, None),  # no token ends an answer
    "glm": (lambda: trained(QWEN_SPLIT, GLM_TOKENS, []), {"eos_token": "<|endoftext|>", "chat_template": GLM},
            {"eos_token_id": ["<|endoftext|>", "<|user|>", "<|observation|>"]}),  # the next turn's token does
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


@pytest.fixture(autouse=True)
def same_day(monkeypatch):
    """transformers tells templates of today, ours of a fixed day."""
    from transformers.utils import chat_template_utils
    monkeypatch.setattr(chat_template_utils, "datetime",
                        SimpleNamespace(now=lambda: datetime.combine(template_worker.TODAY, datetime.min.time())))


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
@settings(max_examples=40, deadline=None)
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
        "alpaca": [["<|end_of_text|>"], "<|end_of_text|>", "<|begin_of_text|>", True],
        "glm": [["<|endoftext|>", "<|user|>", "<|observation|>"], "<|user|>", None, True],
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
    ("llama2", [" b </s>", " d </s>"]), ("base", ["b<|end_of_text|>", "d<|end_of_text|>"]),
    ("glm", ["\nb<|user|>", "\nd<|user|>"])])
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


@pytest.mark.parametrize("answer, end, expected", [  # of a turn of the template's; what is trained
    ("{{ m.content }}\n\n", "", "b<|end_of_text|>"), ("{{ m.content | trim }}\n", "", "b<|end_of_text|>"),
    ("{{ m.content }}\n### End\n", "", "b\n### End\n<|end_of_text|>"),
    ("{{ m.content }}", "<|start_header_id|>", "b<|end_of_text|>"),  # at which generation does not stop
    ("{{ m.content }}", "<|eot_id|>", "b<|eot_id|>"), ("{{ m.content }}", " <|eot_id|>", "b <|eot_id|>"),
    ("{{ m.content }}\n", "<|eot_id|>", "b\n<|eot_id|>"), ("{{ m.content }}", "{{ eos_token }}", "b<|end_of_text|>"),
    ("{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}{{ m.content }} ", "",
     "b<|end_of_text|>")])
def test_a_last_answer_that_the_template_does_not_end_is_ended_where_sampling_stops(tmp_path, answer, end, expected):
    """As an answer is that others follow, after which the template writes `end`, or else by eos."""
    template = (f"{{% for m in messages %}}{{% if m.role == 'user' %}}{{% if not loop.first %}}{end}{{% endif %}}"
                f"Q: {{{{ m.content }}}}\nA: {{% else %}}{answer}{{% endif %}}{{% endfor %}}")
    tokenizer = HFTokenizer.load(write(tmp_path, llama3(), {**HEADER_NAMES, "chat_template": template},
                                       {"eos_token_id": ["<|end_of_text|>", "<|eot_id|>"]}))
    assert said(tokenizer, turns("a", "b")) == [expected]
    ids, mask = tokenizer.render_conversation(turns("a", "b"), None)
    prompt = tokenizer.render_prompt("a")
    assert ids[: len(prompt)] == prompt and mask == [0] * len(prompt) + [1] * (len(ids) - len(prompt))
    assert ids[-1] == tokenizer.assistant_end and ids[-1] in tokenizer.stop_tokens
    if "eo" in end:
        assert said(tokenizer, turns("a", "b", "c", "d")) == [expected, expected.replace("b", "d")]
    else:
        with pytest.raises(BadInput, match="does not end it, when others follow; give one answer at a time|one turn"):
            tokenizer.render_conversation(turns("a", "b", "c", "d"), None)


def test_a_template_that_leaves_out_a_system_message_is_refused(tmp_path):
    deaf = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    deaf = HFTokenizer.load(write(tmp_path, qwen(), {**CHATML_NAMES, "chat_template": deaf}))
    assert deaf.render_prompt("Hi")
    with pytest.raises(BadInput, match="the chat template leaves out the system message 'Be brief.'"):
        deaf.render_prompt("Hi", "Be brief.")


@pytest.mark.parametrize("kind", ["llama3", "glm", "alpaca"])
def test_given_completions_end_as_trained_ones_do(loaded, kind):
    """Not in the first of the tokens that sampling stops at."""
    tokenizer = loaded[kind]
    model = SimpleNamespace(config=SimpleNamespace(sequence_len=99))
    t = SimpleNamespace(tokenizer=tokenizer, roles={"verifier": SimpleNamespace(model=model)}, device="cpu",
                        draws={"d": SimpleNamespace(role="verifier", max_new_tokens=9)})
    rollouts = Play.written(t, "verifier", [Prompt([1])], ["b"])
    assert rollouts.completions() == [[*tokenizer.encode("b"), tokenizer.assistant_end]] and rollouts.texts == ["b"]
    assert forced_answer(tokenizer, PAPER, "5")[1][-1] == tokenizer.assistant_end


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
