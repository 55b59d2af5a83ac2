"""How a GPU draws tokens, in the order of `engine.sampling`, its specification."""
