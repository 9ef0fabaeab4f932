"""How long the patterns of sparse matrices last, by which a new one is converted at once or used as it is listed.

Conversion takes as long as tens of products. A graph that a model is trained on lasts; one that is sampled for a step
is used a few times, and then there is another one. So patterns are taken to last until several in turn have not.
"""

from __future__ import annotations

__all__ = ["PAYS_AFTER", "Lifetimes"]

# Calls over a pattern after which its conversion has paid, as with the maps of convolutions: it says how patterns are
# used, not how fast a GPU is. A model of three layers uses a sampled graph three times.
PAYS_AFTER = 32
SEVERAL = 3  # patterns in turn that were used less, after which new ones are not converted at once


class Lifetimes:
    """What is known of the patterns in this process."""

    short = 0  # those in turn that were used less than pays

    @staticmethod
    def ended(uses: int) -> None:
        """Take note that a pattern is gone with which so many products were; one that made a layer had none."""
        if uses > 0:
            Lifetimes.short = 0 if uses >= PAYS_AFTER else Lifetimes.short + 1

    @staticmethod
    def are_short() -> bool:
        """Return whether a new pattern is to be expected not to last."""
        return Lifetimes.short >= SEVERAL
