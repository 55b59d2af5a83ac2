"""Images in the engine: their rows, computed beside the steps and kept for a while."""
