"""
What a terminal may show: text of a model without control characters, and colours where they are wanted.
"""
import os
import sys
import unicodedata

PASSED = "\n\t\u200c\u200d"  # what Python calls not printable and Persian, Hindi and emoji are written with


def add_colour_flag(parser) -> None:
    parser.add_argument("--colour", choices=["auto", "always", "never"], default="auto",
                        help="auto: in a terminal, unless NO_COLOR is set")


def wants_colour(choice: str) -> bool:
    """What --colour means here."""
    return choice == "always" or choice == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ


def paint(text: str, colour: str, wanted: bool) -> str:
    return f"\033[{colour}m{text}\033[0m" if wanted else text


def printable(text: str) -> str:
    """Text without control characters, which would steer the terminal. All kinds of spaces and joiners pass."""
    return "".join(c if c.isprintable() or c in PASSED or unicodedata.category(c) == "Zs" else "?" for c in text)


def printable_line(text: str) -> str:
    """`printable` text on one line: it cannot forge lines either."""
    return " ".join(printable(text).split())
