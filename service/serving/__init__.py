"""The services behind the rpcs, which know no messages: streams of text, and routers' batches."""
