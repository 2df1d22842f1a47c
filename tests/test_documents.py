"""The pages, *.md and dev/*.md: commands have flags that exist, links lead somewhere, and lines are short."""
import contextlib
import functools
import importlib
import importlib.machinery
import inspect
import io
import itertools
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.run import get_args_parser

from nanochat.cli import script_main
from nanochat import recipes
from nanochat.common import BadInput
from nanochat.own_code import is_file
from scripts import tango_rl

ROOT = Path(__file__).resolve().parent.parent
PAGES = [path for folder in (ROOT, ROOT / "dev", ROOT / "dev" / "results") for path in sorted(folder.glob("*.md"))]
HISTORY = {"LOG.md", "CHANGELOG.md"}  # their flags and names are those of the day
TODAY = [path for path in PAGES if path.name not in HISTORY]
COLUMNS, README_LINES, README_WORDS, ENTRY_LINES = 120, 150, 1500, 15


def named(paths: list[Path]):
    return pytest.mark.parametrize("page", paths, ids=lambda path: str(path.relative_to(ROOT)))


every_page = named(PAGES)
every_page_of_today = named(TODAY)


def without_code(text: str) -> str:
    """The text but for fenced and indented blocks and what stands in backticks."""
    text = re.sub(r"^( *)(```+|~~~+).*?^ *\2[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?<=\n\n)(?: {4}.*\n?)+", "", text)
    return re.sub(r"(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)


class Command(NamedTuple):
    """A command as a shell would run it. base: its NANOCHAT_BASE_DIR; is_nested: it is in a script that a page's
    command runs."""
    words: tuple[str, ...]
    base: str = ""
    is_nested: bool = False

    def __str__(self) -> str:
        return " ".join(self.words)


# A shell that writes down what it is told to run and runs nothing but shell scripts, which do the same.
RECORDER = r"""
record() {
    local call
    printf -v call '%s\037' "${NESTED-}" "$NANOCHAT_BASE_DIR" "$@"
    printf '%s\036' "$call" >> "$CALLS"  # in one piece: commands of a pipe write at the same time
}
command_not_found_handle() { record "$@"; }
bash() { record bash "$@"; NESTED=1 "$BASH" "$@"; }
exec() { "$@"; exit; }
source() { :; }
cd() { :; }
"""
BEGINS = r"(?:\w+=\S* +)*(?:python3?|bash|torchrun .*\.py)\b(?!.*\bNAME\b)"  # NAME: any of several


def blocks_of(text: str) -> list[str]:
    """The commands of a page: its bash blocks, and the indented blocks and the backticks that begin with one. X stands
    for a <placeholder>."""
    fences = re.findall(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    blocks = [body for _, kind, body in fences if kind in ("bash", "sh")]
    text = re.sub(r"^ *```.*?^ *```[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    blocks += [block for block in re.findall(r"(?<=\n\n)(?: {4}.*\n?)+", text) if re.match(f" +{BEGINS} ", block)]
    spans = [" ".join(span.split()) for span in re.findall(r"(?<!`)`((?:(?!\n\n)[^`])+)`(?!`)", text)]
    blocks += [span.removesuffix("...") for span in spans if re.match(f"{BEGINS} ", span)]
    return [re.sub(r"<[A-Za-z][^<>|\n]*>", "X", block) for block in blocks]


def commands_of(block: str, folder: Path) -> list[Command]:
    """What the shell runs. folder: the home, for what it writes; paths in /tmp are there too. Raises AssertionError for
    what is no shell."""
    (folder / "recorder").write_text(RECORDER)
    if not (folder / "runs").exists():
        (folder / "runs").symlink_to(ROOT / "runs")
        (folder / "dev").symlink_to(ROOT / "dev")
        for name in ("base/said/x", "models/model.gguf", "problems/train.jsonl", "problems/test.jsonl"):  # of smol.sh
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch()
    calls, block = folder / "calls", re.sub(r"(?<=\s)/tmp/", "~/tmp/", block)
    calls.write_text("")
    env = {"PATH": "/nowhere", "HOME": str(folder), "NANOCHAT_BASE_DIR": str(folder / "base"), "CALLS": str(calls),
           "BASH_ENV": str(folder / "recorder")}
    done = subprocess.run([shutil.which("bash"), "-euc", block], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{block}\n{done.stderr}"
    records = [record.split("\x1f")[:-1] for record in calls.read_text().split("\x1e")[:-1]]
    return [Command(tuple(words), path, is_nested=nested == "1") for nested, path, *words in records]


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """The commands of a page, and of all pages."""
    @functools.cache
    def of(*pages: Path) -> list[Command]:
        if len(pages) > 1:
            return [command for page in pages for command in of(page)]
        home = tmp_path_factory.mktemp("home")
        return [c for block in blocks_of(pages[0].read_text(encoding="utf-8")) for c in commands_of(block, home)]
    return of


def script_and_flags(words: tuple[str, ...]) -> tuple[str, list[str]] | None:
    """Of a command that runs a script: its module and the flags after it; None for others. Raises BadInput where
    torchrun would not start or there is no such file or module."""
    if words[0] == "torchrun":
        parser = get_args_parser()
        parser.error = refuse
        args = parser.parse_args(words[1:])
        path, flags = args.training_script, args.training_script_args
    elif words[0] in ("python", "python3") and words[1] == "-m":
        path, flags = words[2].replace(".", "/") + ".py", list(words[3:])
        if not path.startswith("scripts/"):
            # not find_spec: looking for pip with it has setuptools give way to the library's distutils for good
            if importlib.machinery.PathFinder.find_spec(words[2].partition(".")[0]) is None:
                raise BadInput(f"no module {words[2]}")
            return None
    else:
        path, flags = None, []
        if words[0] in ("python", "python3", "bash") and not words[1].startswith("-"):
            path, flags = words[1], list(words[2:])
    if path and not (ROOT / path).is_file():
        raise BadInput(f"no file {path}")
    if not path or not path.startswith("scripts/"):
        return None
    return path.removesuffix(".py").replace("/", "."), flags[1:] if flags[:1] == ["--"] else flags


def refuse(message: str):
    raise BadInput(message)


def parser_of(module, flags: list[str]):
    """A script's parser; a trainer's depends on the recipe among the flags."""
    return module.make_parser(*([flags] if inspect.signature(module.make_parser).parameters else []))


def check_flags(name: str, flags: list[str]) -> None:
    """Raises BadInput for flags that the script does not take. A recipe or task in a file that is not there counts as
    the default one."""
    for word, value in itertools.pairwise(list(flags)):
        if word in ("--recipe", "--task") and is_file(value) and not (ROOT / value).exists():
            at = flags.index(word)
            flags = flags[:at] + flags[at + 2:]
    parser = parser_of(importlib.import_module(name), flags)
    parser.error = refuse
    with contextlib.suppress(SystemExit):  # --help
        parser.parse_args(flags)


def complaint(command: Command) -> str | None:
    """What is wrong with a command; None if nothing is."""
    try:
        call = script_and_flags(command.words)
        if call:
            check_flags(*call)
    except BadInput as error:
        return f"{command}: {error}"
    return None


# Programs that a page may call and that need not be on this machine
PROGRAMS = {"git", "hf", "lm_eval", "mkdocs", "pip", "ruff", "wandb"}


def test_commands_have_programs_and_flags_that_exist(commands, capsys):
    found = commands(*TODAY)
    assert len(found) > 20 and not [said for said in map(complaint, found) if said]
    called = {c.words[0] for c in found if not c.is_nested}
    assert not {program for program in called - PROGRAMS if not shutil.which(program)}
    assert "--warmup-steps" in complaint(Command(("python", "-m", "scripts.tango_rl", "--recipe", "grpo",
                                                  "--warmup-steps", "3")))


@pytest.mark.parametrize("path", sorted((ROOT / "runs").glob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_are_shell(path):
    done = subprocess.run(["bash", "-n", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def said_for_help(mode: tuple[str, ...]) -> tuple[int | str, str]:
    """The exit code of a tool that is asked for help, and what it prints; an import that fails is its code."""
    out = io.TextIOWrapper(io.BytesIO(), write_through=True)
    said = lambda: out.buffer.getvalue().decode()
    with contextlib.redirect_stdout(out), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [*mode, "--help"])
        patch.setattr(sys, "path", [str(ROOT / "dev"), *sys.path])
        patch.setenv("COLUMNS", "200")
        try:
            runpy.run_path(str(ROOT / mode[0]), run_name="__main__")
        except SystemExit as stop:
            return stop.code, said()
        except ModuleNotFoundError as error:
            return str(error), said()
    return "it has no --help", said()


def test_tools_of_developers_tell_their_flags(commands):
    """Each dev/*.py that a page runs exits with 0 for --help, whose usage has the flags that the page gives."""
    given = {}  # a tool with what chooses its mode -> flags
    for command in commands(*TODAY):
        if command.words[0] == "python" and command.words[1].startswith("dev/"):
            mode = tuple(itertools.takewhile(lambda word: not word.startswith("-"), command.words[1:]))
            own = itertools.takewhile(lambda word: word != "--", command.words)  # after it is another command
            given.setdefault(mode, set()).update(word for word in own if word.startswith("--"))
    assert given
    said = {mode: said_for_help(mode) for mode in given}
    optional = {mode: code for mode, (code, _) in said.items() if "No module named" in str(code)}
    assert not {mode: code for mode, (code, _) in said.items() if code and mode not in optional}
    usage = {mode: text.partition("\n\n")[0] for mode, (_, text) in said.items() if mode not in optional}
    lacking = {mode: given[mode] - set(re.findall(r"--[\w-]+", text)) for mode, text in usage.items()}
    assert not {mode: flags for mode, flags in lacking.items() if flags}
    if optional:
        pytest.skip(f"needs an optional package: {optional}")


# What takes seconds is run as it is printed, in the order of the pages
RUN = ("tango_rl --list-recipes", "plan_cost", "plan_memory", "hf_random .*--n-layer 2 ",
       "hf_import --source .*random-pair", "tango_rl .*--model-tag toy .*--dry-run", "hf_export .*--model-tag toy ")


def test_quick_commands_run_as_printed(commands, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    done = set()
    for command in dict.fromkeys(c for c in commands(*TODAY) if not c.is_nested):
        patterns = {p for p in RUN if re.search(rf"-m scripts\.{p}", f"{command} ")}
        if patterns:
            name, flags = script_and_flags(command.words)
            module = importlib.import_module(name)
            monkeypatch.setenv("NANOCHAT_BASE_DIR", command.base)
            script_main(module.main, parser_of(module, flags), flags)
            assert capsys.readouterr().out, str(command)
            done |= patterns
    assert done == set(RUN)


def anchors_of(text: str) -> set[str]:
    """The anchors of a page's headings by GitHub's rule: lower case, spaces to hyphens, no punctuation but - and _;
    one that is there already gets a number."""
    text, counts, found = re.sub(r"^ *```.*?^ *```[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL), {}, set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = counts.get(anchor, 0)
        counts[anchor] = number + 1
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def links_of(text: str) -> list[str]:
    """The targets of a page's links and images, web addresses apart."""
    text = without_code(text)
    found = re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(r"""(?:src|href)=["']([^"']+)""", text)
    found += re.findall(r"^\[[^]]+\]:\s*(\S+)", text, re.MULTILINE)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists():
        return True
    return bool(anchor) and (target.suffix != ".md" or anchor not in anchors_of(target.read_text(encoding="utf-8")))


@every_page
def test_links_lead_somewhere(page):
    assert not [link for link in links_of(page.read_text(encoding="utf-8")) if broken(page, link)]


# Statuses of recipes

def test_intervals_of_a_status_stand_in_results_and_what_works_leaves_out_zero():
    """The first interval of a recipe that works is of its claim; those of others may be of anything."""
    pages = " ".join(path.read_text(encoding="utf-8") for path in PAGES if path.parent.name == "results")
    results, interval = " ".join(pages.split()), re.compile(r"(\d+\.\d) ± (\d+\.\d)")
    for name in recipes.names():
        status = recipes.load(name).STATUS
        found = interval.findall(status)
        assert not [pair for pair in found if f"{pair[0]} ± {pair[1]}" not in results], name
        assert status.startswith("runs: ") or all(float(mean) > float(half) for mean, half in found[:1]), name


# Widths and lengths

ROWS = ("recipes.md", "questions.md", "LEAGUE.md", "SPEEDRUN.md")


@every_page
def test_lines_are_short(page):
    """But for web addresses that are longer by themselves, and the tables of ROWS, whose lines are rows."""
    lines = [line for line in page.read_text(encoding="utf-8").splitlines()
             if page.name not in ROWS or not line.startswith("|")]
    assert not [f"line {n}: {len(line)}" for n, line in enumerate(lines, 1) if len(line) > COLUMNS
                and not any("://" in word and len(word) > COLUMNS for word in line.split())]


def test_the_readme_and_entries_of_the_log_are_short():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= README_LINES and len(readme.split()) <= README_WORDS
    text = (ROOT / "dev" / "LOG.md").read_text(encoding="utf-8")
    entries = [entry.partition("\n") for entry in re.split(r"^## ", text, flags=re.MULTILINE)[1:]]
    sizes = {title: len(body.strip().splitlines()) for title, _, body in entries}
    assert sizes and not {title: size for title, size in sizes.items() if size > ENTRY_LINES}


@functools.cache
def flags_there_are() -> set[str]:
    """The flags of all scripts with all recipes, of torchrun, and of the tools of developers."""
    modules = [importlib.import_module(f"scripts.{path.stem}") for path in (ROOT / "scripts").glob("[!_]*.py")]
    parsers = [module.make_parser() for module in modules]
    parsers += [get_args_parser(), *(tango_rl.make_parser(["--recipe", name]) for name in recipes.names())]
    tools = "".join(path.read_text() for path in (ROOT / "dev").rglob("*.py"))
    return ({flag for parser in parsers for flag in parser._option_string_actions}
            | set(re.findall(r"(?<![\w-])--[a-z][\w-]*", tools)))


@every_page_of_today
def test_flags_exist(page):
    text = page.read_text(encoding="utf-8")
    own = set(re.findall(r'add_argument\("(--[a-z-]+)"', text))  # of a recipe that the page shows
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= flags_there_are() | own
