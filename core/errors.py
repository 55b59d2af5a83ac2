"""Why an engine cannot start or go on."""


class EngineError(Exception):
    """The engine cannot start, or lost its group; the text is one line for the operator."""


class RankLost(EngineError):
    """Another rank is the cause: new processes may form a group again."""
