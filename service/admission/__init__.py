"""Who is let in: places in the queue, memory, and the numbers that front ends share for it."""
