"""What every call passes: interceptors, limits, admission, health, reflection, the sockets."""
