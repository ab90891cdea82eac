"""What was found of claimed numbers, in words."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_diag.claims import Fit

TOLD = 4
"""Readings that a sentence lists at most."""


def headline(found: Sequence[Fit]) -> str:
    """The sentence that matters most: a contradiction, a misfit, a doubt, or the readings."""
    for one in found:
        if one.contradicts:
            others = " and ".join(one.contradicts[:3])
            return (
                f"{one.claim} contradicts {others}: no blocks can have printed these numbers, "
                "however they are read."
            )
    for one in found:
        if not one.fits:
            reasons = "; ".join(dict.fromkeys(why for _, why in one.excluded))
            return f"{one.claim} fits no definition ({reasons or 'none has such a value'})."
    several = [one for one in found if len(one.fits) > 1]
    if several:
        first, more = several[0], len(several) - 1
        rest = f"; so {'has' if more == 1 else 'have'} {more} more" if more else ""
        return f"{first.claim} can be {either(first.fits)}: its line does not tell which{rest}."
    told = [f"{one.claim.name} is {one.fits[0]}" for one in found]
    rest = f", and so on for {len(told) - TOLD} more" if len(told) > TOLD else ""
    return f"Every claim has one reading: {', '.join(told[:TOLD])}{rest}."


def finding(found: Sequence[Fit]) -> str:
    """The same for the title of a picture."""
    if any(not one.fits for one in found):
        return "Some claims cannot be true"
    clear = sum(len(one.fits) == 1 for one in found)
    return f"{clear} of {len(found)} claimed numbers have one reading"


def either(names: Sequence[str]) -> str:
    """Names joined by commas and an or, many of them cut short."""
    listed = [*names[:8], f"one of {len(names) - 8} more"] if len(names) > 9 else list(names)
    return f"{', '.join(listed[:-1])} or {listed[-1]}"
