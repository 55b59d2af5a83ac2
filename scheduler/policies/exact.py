"""`exact` admission: every request gets its bound, so none ever runs out of memory.

The argument is that of peak.py: sequences decode in lockstep, so it is known when each has ended
at the latest, and what all of them hold until then.
"""

from __future__ import annotations

import numpy as np

from tokenpod.scheduler.policies.admission_policy import SLACK, Admission, Needs
from tokenpod.scheduler.policies.peak import FOREVER
from tokenpod.scheduler.sequences.table import Ints


class Exact(Admission):
    """Admits a request if all sequences together can never need more slots than there are."""

    def held(self, needs: Needs) -> Ints:
        """What it has and must compute; of those that may miss steps all of the bound, always.

        These don't run in lockstep.
        """
        return needs.computed - needs.shared + needs.left * needs.uneven

    def growth(self, needs: Needs) -> Ints:
        """Up to its bound."""
        return needs.left * ~needs.uneven

    def end(self, needs: Needs, growth: Ints) -> Ints:
        """Once it has reached its bound."""
        # Of drafts in flight all may be wrong; and meanwhile a step may go without their row.
        late = needs.drafted + (needs.drafted > 0) + (needs.pace > 1)
        ends = needs.delay + needs.pace * growth + late + SLACK
        return np.where(needs.uneven, FOREVER, ends)
