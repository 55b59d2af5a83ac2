"""What is known of a command before it is called."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Entry:
    """A command of the command line."""

    #: One sentence: the first of its help.
    summary: str
    #: Where it is: `module:name`.
    where: str

    def within(self, package: str) -> Entry:
        """Itself, its module being one of `package`."""
        return Entry(self.summary, f"{package}.{self.where}")
