"""The native decoder and the families it serves."""
