"""What calls become: streams of text, and the batches that routers own."""
