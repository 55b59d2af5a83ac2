"""Processes that do for a front end what can't be bounded within it: in time, and in memory."""
