"""The processes of a pod: start-up, membership in a group, drain and shutdown."""
