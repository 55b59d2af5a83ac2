"""`reserve` admission: every request gets the sum of its prompt and its most new tokens, as in TGI.

TGI's router books so many tokens (of version 3.3.7, and here: less the last one, which is never
written) and looks at no moment in the future: what one sequence frees when it ends counts when it
has ended. Prefixes in the tree count once.
"""

from __future__ import annotations

from tokenpod.scheduler.policies.admission_policy import Admission, Needs
from tokenpod.scheduler.sequences.table import Ints


class Reserve(Admission):
    """Admits a request if the bounds of all sequences together fit."""

    def held(self, needs: Needs) -> Ints:
        """All of the bound, for as long as it runs."""
        return needs.bound - needs.shared
