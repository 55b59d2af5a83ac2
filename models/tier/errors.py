"""Why transformers' code for a model can't run here."""


class NotServed(Exception):
    """One reason, as the end of a sentence: "X is not supported: ..."."""
