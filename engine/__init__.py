"""The step loop: plans in, tokens out."""
