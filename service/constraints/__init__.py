"""What clients ask a text to conform to: read, checked, and made into the engine's words."""
