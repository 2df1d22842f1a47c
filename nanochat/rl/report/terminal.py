"""
Colours where they are wanted.
"""
import os
import sys


def add_colour_flag(parser) -> None:
    parser.add_argument("--colour", choices=["auto", "always", "never"], default="auto",
                        help="auto: in a terminal, unless NO_COLOR is set")


def wants_colour(choice: str) -> bool:
    """What --colour means here."""
    return choice == "always" or choice == "auto" and sys.stdout.isatty() and "NO_COLOR" not in os.environ


def paint(text: str, colour: str, wanted: bool) -> str:
    return f"\033[{colour}m{text}\033[0m" if wanted else text
