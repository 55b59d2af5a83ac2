"""From hidden states to what is asked of a text: its vector, or numbers of labels."""
