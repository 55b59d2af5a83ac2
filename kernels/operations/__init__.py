"""What each operation that models call promises, and operations made of others."""
