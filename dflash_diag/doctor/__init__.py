"""The doctor: everything that was measured about one drafter, as ranked causes and one sentence.

Order of work. What can fake all the rest comes first: is decoding lossless, and are the captured
states those of their tokens? Where the states are broken and the target is at hand, everything else
is looked at on states that it computes anew, and the broken ones are judged by what they cost. Then
the files, other readings of the weights, other ways of computing the states, the training step if
one was given, and last what claimed numbers mean.

Rules. A cause is found by an interval or a test, never by a point; it is excluded if its gain is
certainly below 0.05 tokens a round; else it is not identifiable, with what would settle it, or not
tested, with the reason. What is measured outweighs what the files suggest.
"""

from __future__ import annotations

from dflash_diag.doctor.examining import SCHEMA, Examination, examine

__all__ = ["SCHEMA", "Examination", "examine"]
