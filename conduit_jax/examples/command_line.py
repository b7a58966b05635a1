"""What the examples' own command lines share: help as it was written, counts that are counts, refusals without a traceback."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from conduit_jax.errors import ConduitError


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows ``description`` line by line."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def count(text: str) -> int:
    """Return the positive integer that ``text`` says; argparse names the option where it says none."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return number


def run(main: Callable[[], None]) -> None:
    """Run ``main``; what the package refuses is printed as it is, and ends the process with 2, like a wrong option."""
    try:
        main()
    except ConduitError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
