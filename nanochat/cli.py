"""
The command line of every script: flags that check themselves, one line for bad input, exit codes. Importing it does
nothing.
"""
import argparse
import contextlib
import datetime
import errno
import functools
import io
import math
import os
import re
import shlex
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches

import torch.distributed as dist

from nanochat.common import (BadInput, CannotWrite, Diverged, StopRequested, is_out_of_memory, one_line, print0,
                             rank_and_world)

MOST = 10 ** 18  # of an integer flag: twice as many are still 64 bits
WIDEST = 1e30    # of a float flag: what is made of it is still a float32


# What flags of TRL, transformers and verl are called here, or what stands in their place: the first text is shown whose
# first flag the script has.
OTHER_NAMES = {
    "--learning-rate": ["--lr", "--embedding-lr, and of matrices --matrix-lr"],
    "--lr-scheduler-type": ["--lr-schedule"],
    "--warmup-steps": ["--warmup-ratio"],
    "--lr-warmup-steps": ["--warmup-ratio"],
    "--per-device-train-batch-size": ["--examples-per-step, of all ranks together", "--device-batch-size"],
    "--gradient-accumulation-steps": [
        "--examples-per-step is the whole batch, of which --micro-batch-tokens go through the model at once",
        "--total-batch-size is the whole batch, of which --device-batch-size rows go through the model at once"],
    "--gradient-checkpointing": ["--recompute"],
    "--num-train-epochs": ["--num-steps; a pass over N problems takes N / --examples-per-step", "--num-iterations"],
    "--max-steps": ["--num-steps", "--num-iterations"],
    "--num-generations": ["--num-samples"],
    "--max-completion-length": ["--max-new-tokens"],
    "--max-response-length": ["--max-new-tokens"],
    "--max-prompt-length": ["a prompt is not cut: it is refused where --max-new-tokens do not fit after it"],
    "--stop": ["a completion ends with the tokenizer's end of turn, or after --max-new-tokens"],
    "--beta": ["--kl-coef"],
    "--epsilon": ["--clip-low and --clip-high"],
    "--loss-type": ["--loss, --advantage and --aggregation"],
    "--output-dir": ["--run is the name, and NANOCHAT_BASE_DIR the folder of all"],
    "--logging-steps": ["each step is in the log of --run, metrics.jsonl"],
    "--report-to": ["--tensorboard or --trackio; wandb where --run is given"],
    "--save-steps": ["--save-every"],
    "--save-total-limit": ["--keep"],
    "--eval-steps": ["--eval-every"],
    "--model-name-or-path": ["--from-tag, of a model that scripts.hf_import has read",
                             "--model-tag, of a model that scripts.hf_import has read"],
}


def script_main(main, parser, argv: list[str] | None = None, is_shown: bool = False) -> None:
    """Runs main(args), turning BadInput into one line on stderr and exit code 2, Diverged and CannotWrite into code 1.
    A leading `--` is dropped. parser: an ArgumentParser, or a function that makes it from the arguments. is_shown: the
    script is run for what it prints, so that it fails where that could not be shown.

    Where another rank has said why it ends, this one's own failure is its consequence, and is not shown.
    """
    open_streams()
    check_ranks()
    argv = sys.argv[1:] if argv is None else argv
    argv = argv[1:] if argv[:1] == ["--"] else argv
    code = 0
    try:
        check_one_copy(getattr(sys.modules["__main__"], "__file__", None) or "")
        main(read_flags(parser, argv))
        code = int(is_shown and getattr(sys.stdout, "name", "") == os.devnull)  # print0 put it there
    except BadInput as error:
        complain(f"error: {error}")
        code = 2
    except (Diverged, CannotWrite) as error:
        complain(f"stopped: {error}")
        code = 1
    except BrokenPipeError:  # who read the output, as `head` does, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141  # 128 + SIGPIPE
    except StopRequested as stop:
        print0(stop)
        code = 143  # 128 + SIGTERM
    except KeyboardInterrupt:  # before a run has begun, which saves itself
        complain("stopped by Ctrl-C")
        code = 130  # 128 + SIGINT
    except OSError as error:
        if error.filename:
            complain(f"error: {error.filename}: {error.strerror}")
            code = 2
        elif error.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # as above
            complain(f"stopped: the output cannot be written: {error.strerror}")
            code = 1
        else:
            raise
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            complain(f"stopped: there is not enough memory: {error}")
        elif not others_complained():  # of a collective, which another rank has left
            raise
        code = 1
    if dist.is_initialized():
        # Gloo's threads may still hold tensors and abort the interpreter's shutdown (pytorch/pytorch #179291): leave
        # without it.
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    if code:
        sys.exit(code)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A script's docstring as it is, and the default of every flag that has one."""
    def add_argument(self, action) -> None:
        is_switch = action.nargs == 0 and not isinstance(action, argparse.BooleanOptionalAction)
        says = action.help or ""  # argparse.SUPPRESS too
        if not is_switch and action.default not in (None, "") and "default" not in says and says != argparse.SUPPRESS:
            action.help = f"{says} (default: %(default)s)".lstrip()
        super().add_argument(action)


class Parser(argparse.ArgumentParser):
    """A parser with flags that follow from others: add_more(argv) adds them before they are read."""
    add_more = staticmethod(lambda argv: None)

    def parse_known_args(self, args=None, namespace=None):
        self.add_more(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)


def new_parser(description: str) -> Parser:
    """A parser of a script's flags, whose help begins with the script's docstring."""
    return Parser(description=description, formatter_class=HelpFormatter, allow_abbrev=False)


def add_device_arg(parser) -> None:
    """The flag of all scripts that run models."""
    parser.add_argument("--device-type", default="", choices=["", "cuda", "mps", "cpu"],
                        help="default: the best there is")


def check_one_copy(script: str) -> None:
    """Raises BadInput where the script that was started lies in one copy of the project and this package comes from
    another, as for `torchrun scripts/tango_rl.py` in the environment of the folder that was copied."""
    root, package = os.path.dirname(os.path.dirname(os.path.realpath(script))), os.path.dirname(__file__)
    beside = os.path.join(root, "nanochat")
    if os.path.exists(os.path.join(beside, "common.py")) and not os.path.samefile(beside, package):
        raise BadInput(f"{script}: Python takes the package nanochat from {package}, not from {root}: "
                       f"install it with `pip install -e {root}`, or set PYTHONPATH={root}")


def check_ranks() -> None:
    """Ends the process with a line and exit code 2 where the environment's numbers are none or do not go together."""
    if fault := fault_of_environment():
        setter = "" if "NANOCHAT" in fault else "torchrun sets it, or "
        print(one_line(f"error: the environment has {fault}; {setter}unset it"), file=sys.stderr)
        sys.exit(2)


def fault_of_environment() -> str | None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "NANOCHAT_GRADING_WORKERS"):
        is_ours, value = name.startswith("NANOCHAT"), os.environ.get(name)
        if value is None or is_ours and not value:
            continue
        if not re.fullmatch("[0-9]{1,9}", value):
            return f"{name}={value[:100]}: must be a number"
        if is_ours and int(value) == 0:
            return f"{name}={value}: must be at least 1"
        if name == "MASTER_PORT" and int(value) > 65535:
            return f"{name}={value}: must be at most 65535"
    rank, world = rank_and_world()
    if rank >= world:
        return f"RANK={rank}: must be below WORLD_SIZE={world}"
    if world > 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return f"WORLD_SIZE={world}: several ranks are started with torchrun"
    return None


def open_streams() -> None:
    """Stands the null device in for those of stdin, stdout and stderr that the process was started without. A character
    that stdout's encoding lacks is shown as its number: printing stops no training."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def refuse(explain, message: str) -> None:
    """Raises BadInput with argparse's message, as `explain` puts it; what a type refuses as --flag value: ..."""
    raise BadInput(explain(re.sub(r"^argument (\S+): (.*?): must be", r"\1 \2: must be", message)))


def flags_in(message: str) -> list[str]:
    """The flags that a text names, such as argparse's complaint."""
    return [re.split("[=,;]", word)[0] for word in message.split() if word.startswith("--")]


def explain_unknown_flag(message: str, known: list[str]) -> str:
    """argparse's complaint, with hints where flags are unknown."""
    hints = hints_of(flags_in(message), known) if message.startswith("unrecognized") else []
    return "; ".join([message, *hints])


def hints_of(flags: list[str], known: list[str]) -> list[str]:
    """What flags that a script has not got may mean: those of other projects, and known ones that are like them."""
    hints = []
    for flag in flags:
        there = [words for words in OTHER_NAMES.get(flag.replace("_", "-"), []) if flags_in(words)[0] in known]
        near = [] if there else similar(flag, known)
        hints += [f"{flag}: here {words}" for words in there[:1]] + [f"did you mean {' or '.join(near)}?"] * bool(near)
    return hints


def similar(flag: str, known: list[str]) -> list[str]:
    """Known flags that begin with this one, else the one that is most like it."""
    begin = [other for other in known if flag != "--" and other.startswith(flag)]
    return begin or get_close_matches(flag, known, 1, cutoff=0.85)


class Flags(argparse.Namespace):
    """Parsed flags. explicit: the names of those that the user wrote, which vars() does not have."""
    __slots__ = ("explicit",)


def read_flags(parser, argv: list[str]) -> Flags:
    """A script's flags. parser: as for script_main. Raises BadInput, also for what argparse refuses."""
    check_text(argv)
    parser = parser(argv) if callable(parser) else parser
    explain = functools.partial(explain_unknown_flag, known=list(parser._option_string_actions))
    parser.error = functools.partial(refuse, getattr(parser, "explain", explain))  # one line instead of the usage
    return parse_flags(parser, argv)


def parse_flags(parser, argv: list[str]) -> Flags:
    """The flags that stand in the arguments. Raises BadInput for a number that is not finite."""
    args, unset = parser.parse_args(argv, Flags()), object()
    written = parser.parse_args(argv, argparse.Namespace(**{action.dest: unset for action in parser._actions}))
    args.explicit = {name for name, value in vars(written).items() if value is not unset}
    check_finite(args)
    return args


def check_text(argv: list[str]) -> None:
    """Raises BadInput for the first argument that is no text in UTF-8: what says so would fail on it."""
    for number, word in enumerate(argv, 1):
        if "\0" in word or word != word.encode(errors="replace").decode():
            raise BadInput(f"argument {number}, {word!r}: is no text in UTF-8")


def check_finite(args) -> None:
    """Raises BadInput for the first flag that is not a number, an integer beyond MOST, or a float beyond WIDEST."""
    for name, given in vars(args).items():
        for value in given if isinstance(given, list) else [given]:
            most = WIDEST if isinstance(value, float) else MOST
            if isinstance(value, int | float) and not abs(value) <= most:
                raise BadInput(f"--{name.replace('_', '-')} {value}: must be from -{most} to {most}")


def complaints(key: str) -> int:
    """Counts up a number that all ranks of this start share, from 0; "" gives that of all. 0 without other ranks."""
    if rank_and_world()[1] == 1 or "MASTER_PORT" not in os.environ:
        return 0
    with contextlib.suppress(RuntimeError, ValueError, KeyError):
        store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                              timeout=datetime.timedelta(seconds=10))
        prefix = f"complaint/{os.environ.get('TORCHELASTIC_RESTART_COUNT')}/"
        if key:
            store.add(prefix, 1)
            return store.add(prefix + key, 1) - 1
        return store.add(prefix, 0)
    return 0


def complain(line: str) -> None:
    """Says what is wrong, in one line and once: of several ranks with the same complaint the first."""
    line = one_line(line)
    if complaints(str(zlib.crc32(line.encode(errors="replace")))) == 0:
        print(line, file=sys.stderr, flush=True)


def others_complained() -> bool:
    """Whether a rank has said why it ends. It may be about to: the others notice in the same moment that it is gone."""
    time.sleep(1.0 if rank_and_world()[1] > 1 else 0.0)
    return complaints("") > 0


def at_least(low: float, kind: type = int, most: float = math.inf, also: float | None = None,
             is_open: bool = False) -> Callable:
    """A type for argparse: an int, or a float, from `low` to `most`, or `also`. is_open: not `low` itself."""
    def number(text: str):
        value = kind(text)
        if value != also and not (low < value <= most or value == low and not is_open):
            bound = f"at most {most}" if value > most else f"{'above' if is_open else 'at least'} {low}"
            raise argparse.ArgumentTypeError(f"{text}: must be {bound}" + (f", or {also}" if also is not None else ""))
        return value
    number.__name__, number.kind = kind.__name__, kind  # argparse says "invalid int value"
    return number


SHARE = at_least(0, float, 1)


def above(low: float, most: float = math.inf) -> Callable:
    """A type for argparse: a float above `low`, to `most`."""
    return at_least(low, float, most, is_open=True)


def not_empty(text: str) -> str:
    """A type for argparse: any text but the empty one."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def check_choices(args, tables: dict[str, Iterable[str]]) -> None:
    """Raises BadInput for the first flag whose value is not in its table."""
    for name, table in tables.items():
        if getattr(args, name) not in table:
            raise BadInput(f"--{name.replace('_', '-')} {getattr(args, name)}: there are {', '.join(table)}")


def in_words(may_change: set[str]) -> str:
    """The flags that a continued run may change, for the help of --resume-from-step."""
    names = sorted(may_change - {"resume_from_step", "dry_run"})
    return f"flags that may change then: {', '.join('--' + name.replace('_', '-') for name in names)}"


def flag_defaults(parser) -> dict:
    """The flags of a parser and their defaults, and what it sets without a flag."""
    return parser._defaults | {action.dest: action.default for action in parser._actions}


def check_unchanged(what: str, before: dict, args, may_change: set[str], defaults: dict) -> list[str]:
    """Raises BadInput for the first flag that differs from what a run or checkpoint was made with; the allowed changes,
    in words. A flag that did not exist then counts as its default; --tensorboard and --trackio may always change.
    --keep stays what it was unless it is given: what was kept is not removed without asking."""
    if "keep" not in getattr(args, "explicit", {"keep"}):
        args.keep = before.get("keep", 0)
    before = defaults | before
    changed = {name: value for name, value in vars(args).items() if before.get(name) != value}
    for name, value in changed.items():
        if name not in may_change | {"tensorboard", "trackio"}:
            raise BadInput(f"--{name.replace('_', '-')} {value}: {what} was started with {before.get(name)}; "
                           f"a continued run cannot change it")
    return [f"--{name.replace('_', '-')} {before.get(name)} -> {value}" for name, value in changed.items()]


def continuing(what: str, step: int, changed: list[str], args, defaults: dict) -> str:
    """That a run or a checkpoint is gone on with, with what is changed, and the flags that are not the defaults."""
    said = f"continuing {what} after step {step}" + (f" with {', '.join(changed)}" if changed else "")
    words = [shown_flag(name, value) for name, value in vars(args).items()
             if name != "resume_from_step" and value != defaults.get(name)]
    return f"{said}\nits flags: {' '.join(words) or 'all by default'}"


def shown_flag(name: str, value) -> str:
    """A flag and its value as they stand on a command line."""
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag[2:]}"
    return " ".join([flag, *(shlex.quote(str(one)) for one in (value if isinstance(value, list) else [value]))])


def check_name(flag: str, name: str) -> None:
    """Raises BadInput unless the name of a run or a tag is a plain folder name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}", name):
        raise BadInput(f"{flag} {name}: use letters, digits, '.', '_' and '-', at most 200 of them")
