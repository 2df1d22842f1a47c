"""
The programs. One that is started by `python -m scripts.<name>` needs seconds to import: a Ctrl-C in them is one line.
"""
import sys


def say_what_ended(kind, error, trace) -> None:
    """Ctrl-C in words, before script_main is there to say so; anything else as Python shows it."""
    if issubclass(kind, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


if sys.argv[:1] == ["-m"]:  # what Python has there until it has found the program: no other imports this
    sys.excepthook = say_what_ended
