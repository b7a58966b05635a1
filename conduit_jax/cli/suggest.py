"""Choices that answer a typing error with the nearest word, as click does for commands and options."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import click


class SuggestingChoice(click.Choice):
    """A choice that names the nearest word when none fits."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            near = get_close_matches(str(value), [str(choice) for choice in self.choices], n=1)
            if not near:
                raise
            raise click.BadParameter(f"{error.message} Did you mean {near[0]!r}?", ctx=ctx, param=param) from None
