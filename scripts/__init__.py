"""
The programs. One that is started by `python -m scripts.<name>` needs seconds to import: a Ctrl-C in them is one line,
and so is an environment that is not active.
"""
import sys


def say_what_ended(kind, error, trace) -> None:
    """What ended a program before script_main is there to say so; anything else as Python shows it."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
    elif issubclass(kind, ModuleNotFoundError) and error.name == "torch":
        print(f"error: {error}: run `source .venv/bin/activate` first, or `bash runs/setup.sh`", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # what Python has there until it has found the program: no other imports this
    sys.excepthook = say_what_ended
