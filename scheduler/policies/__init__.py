"""What operators choose: how memory is promised, and what a step holds."""
