"""What goes wrong with a model folder."""


class ModelError(Exception):
    """The model can't be served; one line that names the file or tensor, and says why."""
