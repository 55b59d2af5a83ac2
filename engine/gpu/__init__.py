"""Steps and draws on a GPU: asynchronous, and captured."""
