"""What guesses tokens beside the served model: a draft model, a head, or heads."""
