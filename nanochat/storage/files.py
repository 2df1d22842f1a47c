"""
Files: the layout on disk, files that are written whole or not at all, records, data files, and the hub they come from.
"""
import contextlib
import fcntl
import functools
import glob
import json
import os
import shutil
import socket
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator

from nanochat.common import BadInput, CannotWrite, one_line, print0

BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some programs begin a text in UTF-8 with it
PARTIAL = ".partial"  # ends the name of a folder that is being written
HUB_SECONDS = 5.0  # until a hub that does not answer is taken for not there
PAIR = os.path.join(os.path.dirname(os.path.dirname(__file__)), "pair")
STAGE_FOLDERS = {"base": "base_checkpoints", "sft": "chatsft_checkpoints", "rl": "chatrl_checkpoints"}


@functools.cache
def base_dir() -> str:
    """Where tokenizer, checkpoints and runs live: $NANOCHAT_BASE_DIR or ~/.cache/nanochat. Read once: a run whose
    recipe changes the environment, or its folder, still has all in one place."""
    return os.path.abspath(os.path.expanduser(os.environ.get("NANOCHAT_BASE_DIR") or "~/.cache/nanochat"))


def path_of(kind: str, *names: str) -> str:
    """The one place that knows the layout on disk, upstream's. kind: tokenizer, runs, or a stage (base, sft, rl), whose
    first name is a tag."""
    return os.path.join(base_dir(), STAGE_FOLDERS.get(kind, kind), *names)


def found_at(kind: str, *names: str) -> str:
    """The same for what is read: where the base directory has no such tokenizer, tag or run, that of the pair that
    comes with the project, whose folder is laid out in the same way."""
    top, rest = (kind, *names[:1]), names[1:]
    own, shipped = path_of(*top), os.path.join(PAIR, STAGE_FOLDERS.get(kind, kind), *names[:1])
    return os.path.join(own if os.path.exists(own) or not os.path.exists(shipped) else shipped, *rest)


@contextlib.contextmanager
def whole_file(path: str, mode: str = "w"):
    """Opens a file (text: UTF-8) that has another name until it is written and on the disk. Raises CannotWrite."""
    with writing(path), open_alone(path + ".tmp", mode) as f:
        try:
            yield f
            f.flush()
            os.fsync(f.fileno())
            os.replace(path + ".tmp", path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(path + ".tmp")
            raise


def open_alone(path: str, mode: str):
    """An empty file that no other process writes to, whatever a killed one left there. Raises CannotWrite."""
    f = open(path, mode, encoding=None if "b" in mode else "utf-8",
             opener=lambda name, flags: os.open(name, flags & ~os.O_TRUNC, 0o666))
    if not is_alone(f.fileno(), path):
        f.close()
        raise CannotWrite(f"{path.removesuffix('.tmp')} cannot be written: another process is writing it")
    f.truncate(0)
    return f


def is_alone(descriptor: int, path: str) -> bool:
    """Whether this process has now locked an open file or folder of this name; True where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError:
        return True


@contextlib.contextmanager
def writing(path: str):
    """Around all that writes a file. Raises CannotWrite, which names it and the reason, where the system refuses: a
    library's own error (torch.save's) is put down to what it was raised in the wake of."""
    try:
        yield
    except (CannotWrite, BadInput):  # said already, of a file within
        raise
    except Exception as error:
        cause = error
        while not isinstance(cause, OSError) and cause.__context__ is not None:
            cause = cause.__context__
        if not isinstance(cause, OSError):
            raise
        raise CannotWrite(f"{path} cannot be written: {cause.strerror or cause}") from error


@contextlib.contextmanager
def whole_folder(path: str):
    """A folder to fill, which has another name until the block ends: it is there whole or not at all. Raises
    CannotWrite."""
    parent, name = os.path.split(os.path.abspath(path))
    begin = f".{name[:50]}-"  # a name may be nearly as long as the system takes
    make_folder(parent)
    for other in glob.glob(f"{glob.escape(begin)}*{PARTIAL}", root_dir=parent):
        print0(f"WARNING: {os.path.join(parent, other)} is of another process that writes {path}: remove it, unless "
               f"that is still at work")
    with writing(path):
        partial = tempfile.mkdtemp(dir=parent, prefix=begin, suffix=PARTIAL)
        try:
            os.chmod(partial, 0o755)  # mkdtemp makes it for its owner alone
            yield partial
            os.rename(partial, path)
        except CannotWrite as error:  # the other folder is gone when this is read
            raise CannotWrite(str(error).replace(partial, path)) from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def make_folder(path: str) -> None:
    """Makes a folder and those that it is in, unless they are there. Raises CannotWrite."""
    with writing(path):
        os.makedirs(path, exist_ok=True)


def write_json(path: str, record: dict) -> None:
    """Writes a json file whole or not at all. Raises CannotWrite."""
    with whole_file(path) as f:
        json.dump(record, f, indent=2)
        f.write("\n")


@contextlib.contextmanager
def reading(where: str):
    """Around all that reads a file, or a row of one. Raises BadInput, which begins with `where`, where it cannot be
    read or does not hold what it should."""
    try:
        yield
    except BadInput:  # said already
        raise
    except OSError as error:
        raise BadInput(f"{where}: {error.strerror or error}") from None
    except KeyError as error:
        raise BadInput(f"{where}: {error} is missing") from None
    except UnicodeDecodeError:
        raise BadInput(f"{where}: is no text in UTF-8") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " * (error.lineno > 1)  # of one line, `where` says which
        raise BadInput(f"{where}: is no json: {error.msg}: {line}column {error.colno}") from None
    except (AttributeError, TypeError):
        raise BadInput(f"{where}: something in it is empty or not of the type it should have") from None
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        raise BadInput(f"{where}: {one_line(error)}") from None


def read_text(path: str) -> str:
    """The text of a file in UTF-8, line ends as they are. Raises BadInput."""
    with reading(path), open(path, encoding="utf-8", newline="") as f:
        return f.read()


def read_json(path: str) -> dict:
    """The object of a json file. Raises BadInput."""
    with reading(path), open(path, encoding="utf-8") as f:
        content = json.load(f)
        if not isinstance(content, dict):
            raise ValueError("holds no json object")
    return content


def json_lines(path: str, parse_float: Callable = float) -> Iterator[tuple[str, object]]:
    """The values of a file of json lines, each after its place, "FILE: line 3". A byte-order mark and blank lines hold
    none. Raises BadInput, which begins with the place."""
    with reading(path), open(path, "rb") as f:
        for number, line in enumerate(f, 1):
            line = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).strip()
            place = f"{path}: line {number}"
            if line:
                with reading(place):
                    value = json.loads(line.decode(), parse_float=parse_float)
                yield place, value


def read_records(path: str) -> list[tuple[str, dict]]:
    """The lines of a file of records, each with its record; a last one that was cut is none. Raises BadInput."""
    found = []
    with open(path, "rb") as f:
        for number, line in enumerate((line for line in f if line.endswith(b"\n")), 1):
            try:
                found.append((line.decode(), json.loads(line)))
                if not isinstance(found[-1][1]["step"], int):
                    raise ValueError
            except (ValueError, TypeError, KeyError, RecursionError):
                raise BadInput(f"{path}, line {number}: not a json record of a step; mend the line or take it "
                               f"out") from None
    return found


def check_writable(path: str) -> None:
    """Raises BadInput unless `path`, or its nearest parent that exists, can be written to. Leaves nothing after."""
    if not path:
        raise BadInput("cannot write to a folder without a name")
    parent = os.path.abspath(path)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.stat(parent)  # which refuses a name that is too long
        while not os.path.exists(parent):
            parent = os.path.dirname(parent)
        tempfile.TemporaryFile(dir=parent).close()
    except OSError as error:
        raise BadInput(f"cannot write to {path} ({parent}: {error.strerror})") from None


def quiet_datasets():
    """The `datasets` library without progress bars and calls home, for which opening local files would wait."""
    import datasets
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    # what fails is raised too, and told in one line
    datasets.utils.logging.set_verbosity(datasets.utils.logging.CRITICAL)
    datasets.disable_progress_bars()
    return datasets


def check_data_file(path: str) -> None:
    """Raises BadInput for a file that cannot be read, is empty, or holds no json though its name says so: pyarrow ends
    the process at a file that begins with null."""
    try:
        with open(path, "rb") as f:
            begin = f.read(2 ** 12)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    if not begin.strip():
        raise BadInput(f"{path}: is empty")
    text = begin.removeprefix(BYTE_ORDER_MARK).lstrip()
    if path.endswith((".json", ".jsonl")) and text[:1] not in (b"{", b"["):
        raise BadInput(f"{path}: is no json of rows: it begins with {text[:20]!r}")


@functools.cache
def look_for_hub() -> None:
    """To be called before the hub is asked. Where no connection to it can be made, its libraries work offline from here
    on, with what they downloaded before: they would try again for half a minute at every call."""
    import datasets
    import huggingface_hub
    hub = urllib.parse.urlsplit(huggingface_hub.constants.ENDPOINT)
    if huggingface_hub.constants.HF_HUB_OFFLINE or urllib.request.getproxies():  # a proxy finds it
        return
    try:
        socket.create_connection((hub.hostname, hub.port or hub.scheme), timeout=HUB_SECONDS).close()
    except OSError as error:
        print0(f"WARNING: {hub.hostname} cannot be reached ({error.strerror or error}): what was downloaded before is "
               f"used")
        datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
