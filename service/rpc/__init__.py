"""What every call passes: interceptors, limits on messages, health, reflection, the sockets."""
