"""Why transformers' code for a model can't run here."""


class NotServed(Exception):
    """One reason, as the end of a sentence: "X is not supported: ..."."""


class NotCausal(NotServed):
    """Its tokens look at later ones, so no way to compute it generates text."""
