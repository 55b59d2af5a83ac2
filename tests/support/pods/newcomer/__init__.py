"""A newcomer's protocol, as docs/extend.md says how to add one: a part of an embedding server's."""
